// What tests of the C interface share: handles that destroy themselves, and callbacks that can be watched.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <headlong/headlong.h>

namespace headlong::test {

struct DestroyHandle {
    void operator()(hl_context* handle) const { hl_context_destroy(handle); }
    void operator()(hl_cache* handle) const { hl_cache_destroy(handle); }
    void operator()(hl_pool* handle) const { hl_pool_destroy(handle); }
    void operator()(hl_layer* handle) const { hl_layer_destroy(handle); }
    void operator()(hl_model* handle) const { hl_model_destroy(handle); }
    void operator()(hl_generation* handle) const { hl_generation_destroy(handle); }
    void operator()(hl_cancel* handle) const { hl_cancel_destroy(handle); }
};
template <class T>
using Handle = std::unique_ptr<T, DestroyHandle>;

inline Handle<hl_context> make_c_context(const hl_context_options* options = nullptr) {
    hl_context* context = nullptr;
    char message[512];
    EXPECT_EQ(hl_context_create(options, &context, message, sizeof(message)), HL_OK) << message;
    return Handle<hl_context>(context);
}

/// Options of a small cache: 2 KV heads of 16 elements.
inline hl_cache_options small_cache() {
    hl_cache_options options;
    EXPECT_EQ(hl_cache_options_init(&options, sizeof(options)), HL_OK);
    options.shape.kv_heads = 2;
    options.shape.head_dim = 16;
    options.shape.value_dim = 16;
    return options;
}

inline Handle<hl_cache> make_c_cache(hl_context* context, const hl_cache_options& options = small_cache()) {
    hl_cache* cache = nullptr;
    EXPECT_EQ(hl_cache_create(context, &options, &cache), HL_OK) << hl_context_message(context);
    return Handle<hl_cache>(cache);
}

template <std::size_t Rank>
hl_tensor dense_f32(const std::vector<float>& data, const std::array<std::int64_t, Rank>& extents) {
    return hl_dense(data.data(), HL_F32, static_cast<std::int32_t>(Rank), extents.data());
}

/// hl_memory that counts, checks what is given back, and can refuse.
class WatchedMemory {
  public:
    hl_memory callbacks() {
        return {sizeof(hl_memory), this,
                [](void* user, std::size_t bytes, std::size_t alignment) {
                    return static_cast<WatchedMemory*>(user)->allocate(bytes, alignment);
                },
                [](void* user, void* address, std::size_t bytes, std::size_t alignment) {
                    static_cast<WatchedMemory*>(user)->deallocate(address, bytes, alignment);
                }};
    }

    std::size_t live() const { return taken_.size(); }
    std::size_t calls() const { return calls_; }
    std::size_t faults() const { return faults_; }
    /// The n-th allocation from now on (0 = the next one) and all after it are refused.
    void refuse_after(std::size_t n) { refuse_at_ = calls_ + n; }
    void refuse_nothing() { refuse_at_ = std::numeric_limits<std::size_t>::max(); }

  private:
    void* allocate(std::size_t bytes, std::size_t alignment) {
        const std::lock_guard lock(mutex_);
        if (calls_ >= refuse_at_) return nullptr;
        ++calls_;
        void* const address = ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
        taken_[address] = {bytes, alignment};
        return address;
    }
    void deallocate(void* address, std::size_t bytes, std::size_t alignment) {
        const std::lock_guard lock(mutex_);
        const auto taken = taken_.find(address);
        if (taken == taken_.end() || taken->second != std::pair(bytes, alignment)) {
            ++faults_;
            return;
        }
        taken_.erase(taken);
        ::operator delete (address, std::align_val_t{alignment});
    }

    std::mutex mutex_;
    std::map<void*, std::pair<std::size_t, std::size_t>> taken_;
    std::size_t calls_ = 0;
    std::size_t faults_ = 0;
    std::size_t refuse_at_ = std::numeric_limits<std::size_t>::max();
};

}  // namespace headlong::test
