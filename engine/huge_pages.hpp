// Large pages for memory that is read from end to end: with 4 KiB pages a 2 MiB span costs 512 TLB misses.
#pragma once

#include <cstddef>
#include <memory_resource>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace headlong {

/// Memory that is aligned to this can be of large pages.
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20U;

/// Only a hint, and only for whole pages of ours. To be given before the memory is touched.
inline void ask_for_huge_pages(std::byte* memory, std::size_t bytes) noexcept {
#if defined(__linux__)
    if (bytes >= kHugePageBytes)
        static_cast<void>(madvise(memory, bytes / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE));
#else
    static_cast<void>(memory);
    static_cast<void>(bytes);
#endif
}

/// Nobody else manages these pages, and huge ones may be asked for; of a caller's resource that is not known.
inline bool is_ours(const std::pmr::memory_resource& memory) noexcept {
    return &memory == std::pmr::new_delete_resource();
}

}  // namespace headlong
