#include "tests/support/operator_new.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::size_t> calls{0};
std::atomic<std::size_t> all_bytes{0};

void* counted(std::size_t bytes, std::size_t alignment) {
    calls.fetch_add(1, std::memory_order_relaxed);
    all_bytes.fetch_add(bytes, std::memory_order_relaxed);
    const std::size_t size = bytes == 0 ? 1 : bytes;
    void* p = alignment == 0 ? std::malloc(size)
                             : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (p == nullptr) throw std::bad_alloc();
    return p;
}

}  // namespace

std::size_t headlong::test::operator_new_calls() noexcept { return calls.load(std::memory_order_relaxed); }
std::size_t headlong::test::operator_new_bytes() noexcept { return all_bytes.load(std::memory_order_relaxed); }

// The array and nothrow forms call these two.
void* operator new(std::size_t bytes) { return counted(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
