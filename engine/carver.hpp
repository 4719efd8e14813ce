// Cuts one allocation into pieces.
#pragma once

#include <cstddef>
#include <limits>

#include "kernels/compiler.hpp"
#include "kernels/layout.hpp"

namespace headlong {

/// A product of sizes, or the largest size if it does not fit: a resource refuses that.
constexpr std::size_t saturating_product(std::size_t a, std::size_t b) noexcept {
    std::size_t product = 0;
    return compiler::mul_overflows(a, b, product) ? std::numeric_limits<std::size_t>::max() : product;
}

constexpr std::size_t saturating_sum(std::size_t a, std::size_t b) noexcept {
    std::size_t sum = 0;
    return compiler::add_overflows(a, b, sum) ? std::numeric_limits<std::size_t>::max() : sum;
}

/// Hands out pieces of a memory block, each aligned for kernels; with a null base it only counts. The same code that
/// takes the pieces thus says how much they need. Sizes saturate: what 64 bits cannot count, nobody allocates.
class Carver {
  public:
    explicit Carver(std::byte* base) noexcept : base_(base) {}

    template <class T>
    T* take(std::size_t count) noexcept {
        std::byte* p = base_ == nullptr ? nullptr : base_ + used_;
        const std::size_t bytes = saturating_product(count, sizeof(T));
        // half of the address space is more than there is, and leaves room to round up and to add
        constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 4;
        used_ = bytes > kMost || used_ > kMost ? 2 * kMost : used_ + kernels::round_up(bytes, kernels::kAlignment);
        return reinterpret_cast<T*>(p);
    }
    std::size_t used() const noexcept { return used_; }

  private:
    std::byte* base_;
    std::size_t used_ = 0;
};

}  // namespace headlong
