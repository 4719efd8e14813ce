#include "tests/support/operator_new.hpp"

#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

namespace {

std::atomic<std::size_t> calls{0};
std::atomic<std::size_t> all_bytes{0};
std::atomic<std::size_t> given_back{0};

/// Of this thread: allocations until one is refused, and whether all after it are.
thread_local std::size_t until_refusal = headlong::test::kNever;
thread_local bool all_after = false;
thread_local std::size_t refused = 0;

bool is_refused() noexcept {
    if (until_refusal == headlong::test::kNever) return false;
    if (until_refusal > 0) {
        --until_refusal;
        return false;
    }
    ++refused;
    if (!all_after) until_refusal = headlong::test::kNever;
    return true;
}

void give_back(void* p) noexcept {
    if (p != nullptr) given_back.fetch_add(1, std::memory_order_relaxed);
    std::free(p);
}

void* counted(std::size_t bytes, std::size_t alignment) {
    if (is_refused()) throw std::bad_alloc();
    calls.fetch_add(1, std::memory_order_relaxed);
    all_bytes.fetch_add(bytes, std::memory_order_relaxed);
    const std::size_t size = bytes == 0 ? 1 : bytes;
    if (size > std::numeric_limits<std::size_t>::max() - alignment) throw std::bad_alloc();
    void* p = alignment == 0 ? std::malloc(size)
                             : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (p == nullptr) throw std::bad_alloc();
    return p;
}

}  // namespace

std::size_t headlong::test::operator_new_calls() noexcept { return calls.load(std::memory_order_relaxed); }
std::size_t headlong::test::operator_new_bytes() noexcept { return all_bytes.load(std::memory_order_relaxed); }
std::size_t headlong::test::operator_new_live() noexcept { return calls.load() - given_back.load(); }

void headlong::test::refuse_operator_new(std::size_t after, bool and_all_after) noexcept {
    until_refusal = after;
    all_after = and_all_after;
    refused = 0;
}
std::size_t headlong::test::refuse_no_more() noexcept {
    until_refusal = kNever;
    return refused;
}

// The array forms call these. (Of the nothrow forms a sanitizer has its own, whose memory it would not see freed here.)
void* operator new(std::size_t bytes) { return counted(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return counted(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
    try {
        return counted(bytes, 0);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
    try {
        return counted(bytes, static_cast<std::size_t>(alignment));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void operator delete(void* p) noexcept { give_back(p); }
void operator delete(void* p, std::size_t) noexcept { give_back(p); }
void operator delete(void* p, std::align_val_t) noexcept { give_back(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { give_back(p); }
