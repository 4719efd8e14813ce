// exp2 for weights. Compiled per instruction set.
#pragma once

#include "kernels/simd/native.hpp"

namespace headlong::HEADLONG_ISA {

// Minimax polynomial of 2^f on [-0.5, 0.5], degree 5, for the relative error with the constant term fixed at 1 (so
// that exp2(0) is exactly 1): found by Lawson's iteration (reweighted least squares), 9.1e-8 in exact arithmetic. With
// coefficients and operations rounded to float, at most 1.45 * 2^-23, and 1.6 * 2^-23 where multiply-add rounds twice
// (tests/kernels_test.cpp).
inline constexpr float kExp2C1 = 0x1.62e42ap-1F;
inline constexpr float kExp2C2 = 0x1.ebf9bcp-3F;
inline constexpr float kExp2C3 = 0x1.c6b752p-5F;
inline constexpr float kExp2C4 = 0x1.3cea88p-7F;
inline constexpr float kExp2C5 = 0x1.5bba14p-10F;

/// 2^x for x <= 127. Results under 2^-126 become +0 (so does x = -infinity), a NaN stays NaN, 2^0 is exactly 1.
HEADLONG_INLINE F32 exp2(F32 x) noexcept {
    const F32 whole = round_nearest(x);
    const F32 f = x - whole;
    F32 p = fma(broadcast(kExp2C5), f, broadcast(kExp2C4));
    p = fma(p, f, broadcast(kExp2C3));
    p = fma(p, f, broadcast(kExp2C2));
    p = fma(p, f, broadcast(kExp2C1));
    p = fma(p, f, broadcast(1.0F));
    return zero_below(x, -126.0F, scale_by_power_of_two(p, whole));
}

}  // namespace headlong::HEADLONG_ISA
