#include <mimalloc.h>

#include <algorithm>
#include <cstddef>
#include <headlong/mimalloc.hpp>
#include <new>

#include "engine/huge_pages.hpp"

namespace headlong {
namespace {

class MimallocResource final : public std::pmr::memory_resource {
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        const bool large = bytes >= kHugePageBytes;  // as of operator new: weights, caches and scratch of this size
        void* p = mi_malloc_aligned(bytes, large ? std::max(alignment, kHugePageBytes) : alignment);
        if (p == nullptr) throw std::bad_alloc();
        if (large) ask_for_huge_pages(static_cast<std::byte*>(p), bytes);
        return p;
    }
    void do_deallocate(void* p, std::size_t, std::size_t) override { mi_free(p); }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

}  // namespace

std::pmr::memory_resource& mimalloc_resource() noexcept {
    static MimallocResource resource;
    return resource;
}

}  // namespace headlong
