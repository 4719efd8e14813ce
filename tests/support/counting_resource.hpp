// A memory resource that counts, and can fail on demand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory_resource>
#include <mutex>
#include <new>
#include <utility>

namespace headlong::test {

/// Thread-safe. Allocates from operator new.
class CountingResource final : public std::pmr::memory_resource {
  public:
    struct Counts {
        std::size_t live_bytes = 0;
        std::size_t peak_bytes = 0;
        std::size_t total_bytes = 0;
        std::size_t live_allocations = 0;
        std::size_t allocations = 0;
    };

    Counts counts() const {
        const std::lock_guard lock(mutex_);
        return counts_;
    }

    /// From now on the n-th allocation (0 = the next one) throws bad_alloc, and so do all after it.
    void fail_after(std::size_t allocations) {
        const std::lock_guard lock(mutex_);
        fail_at_ = counts_.allocations + allocations;
    }
    void never_fail() {
        const std::lock_guard lock(mutex_);
        fail_at_ = std::numeric_limits<std::size_t>::max();
    }

  private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        const std::lock_guard lock(mutex_);
        if (counts_.allocations >= fail_at_) throw std::bad_alloc();
        void* memory = ::operator new (bytes, std::align_val_t{alignment});
        taken_[memory] = {bytes, alignment};
        ++counts_.allocations;
        ++counts_.live_allocations;
        counts_.live_bytes += bytes;
        counts_.total_bytes += bytes;
        if (counts_.live_bytes > counts_.peak_bytes) counts_.peak_bytes = counts_.live_bytes;
        return memory;
    }

    void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
        const std::lock_guard lock(mutex_);
        // what is given back must be what was taken: not every resource forgives
        const auto taken = taken_.find(memory);
        if (taken == taken_.end() || taken->second != std::pair(bytes, alignment)) std::abort();
        taken_.erase(taken);
        --counts_.live_allocations;
        counts_.live_bytes -= bytes;
        ::operator delete (memory, std::align_val_t{alignment});
    }

    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

    mutable std::mutex mutex_;
    Counts counts_;
    std::map<void*, std::pair<std::size_t, std::size_t>> taken_;  ///< bytes and alignment
    std::size_t fail_at_ = std::numeric_limits<std::size_t>::max();
};

}  // namespace headlong::test
