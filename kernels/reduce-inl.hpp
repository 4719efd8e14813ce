// Sums of partial sums. Compiled per instruction set.
#pragma once

#include "kernels/simd/native.hpp"

namespace headlong::HEADLONG_ISA {

/// Sums 16 partial sums in a fixed tree: halves onto halves.
HEADLONG_INLINE float reduce_tree(float* partial) noexcept {
    for (std::size_t half = 8; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) partial[i] += partial[i + half];
    }
    return partial[0];
}

}  // namespace headlong::HEADLONG_ISA
