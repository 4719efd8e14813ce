// Cuts one allocation into pieces.
#pragma once

#include <cstddef>

#include "kernels/layout.hpp"

namespace headlong {

/// Hands out pieces of a memory block, each aligned for kernels; with a null base it only counts. The same code that
/// takes the pieces thus says how much they need.
class Carver {
  public:
    explicit Carver(std::byte* base) noexcept : base_(base) {}

    template <class T>
    T* take(std::size_t count) noexcept {
        std::byte* p = base_ == nullptr ? nullptr : base_ + used_;
        used_ += kernels::round_up(count * sizeof(T), kernels::kAlignment);
        return reinterpret_cast<T*>(p);
    }
    std::size_t used() const noexcept { return used_; }

  private:
    std::byte* base_;
    std::size_t used_ = 0;
};

}  // namespace headlong
