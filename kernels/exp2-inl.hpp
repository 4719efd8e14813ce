// exp2 for weights, tanh for the softcap. Compiled per instruction set.
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

/// x[i] = 2^x[i] for x <= 127. Results under 2^-126 become +0 (so does x = -infinity), a NaN stays NaN, 2^0 is
/// exactly 1. Several are computed side by side, step by step, which hide() keeps the compiler to: one after the other,
/// chains of dependent operations would fill the scheduler with what has to wait.
template <std::size_t Count>
HEADLONG_INLINE void exp2(F32 (&x)[Count]) noexcept {
    constexpr float kCoefficients[] = {kExp2C4, kExp2C3, kExp2C2, kExp2C1, 1.0F};
    Power power[Count];
    F32 f[Count];
    F32 p[Count];
    HEADLONG_UNROLL for (std::size_t i = 0; i < Count; ++i) {
        power[i] = nearest_power(x[i]);
        f[i] = x[i] - power[i].exponent;
        p[i] = broadcast(kExp2C5);
        if constexpr (Count > 1) hide(f[i]);
    }
    HEADLONG_UNROLL for (const float coefficient : kCoefficients) {
        HEADLONG_UNROLL for (std::size_t i = 0; i < Count; ++i) {
            p[i] = fma(p[i], f[i], broadcast(coefficient));
            if constexpr (Count > 1) hide(p[i]);
        }
    }
    HEADLONG_UNROLL for (std::size_t i = 0; i < Count; ++i) x[i] = zero_below(x[i], -126.0F, scale(p[i], power[i]));
}
HEADLONG_INLINE F32 exp2(F32 x) noexcept {
    F32 one[1] = {x};
    exp2(one);
    return one[0];
}

// tanh(x) = x + x z Q(z), z = x^2, for |x| < 0.625: minimax for the relative error, degree 4, found like exp2's, 4.4e-9
// in exact arithmetic. Beyond, (1 - e) / (1 + e) with e = exp(-2 |x|) cancels nothing.
inline constexpr float kTanhC0 = -0x1.555532p-2F;
inline constexpr float kTanhC1 = 0x1.110726p-3F;
inline constexpr float kTanhC2 = -0x1.b83c5ap-5F;
inline constexpr float kTanhC3 = 0x1.522698p-6F;
inline constexpr float kTanhC4 = -0x1.75e1c2p-8F;

/// tanh(x) for every x; a NaN stays NaN.
HEADLONG_INLINE F32 tanh(F32 x) noexcept {
    constexpr float kMinusTwoLog2E = -0x1.715476p+1F;
    const F32 z = x * x;
    F32 q = fma(broadcast(kTanhC4), z, broadcast(kTanhC3));
    q = fma(q, z, broadcast(kTanhC2));
    q = fma(q, z, broadcast(kTanhC1));
    q = fma(q, z, broadcast(kTanhC0));
    const F32 small = fma(x * z, q, x);
    const F32 magnitude = absolute(x);
    const F32 e = exp2(magnitude * broadcast(kMinusTwoLog2E));
    const F32 large = copy_sign(divide(broadcast(1.0F) - e, broadcast(1.0F) + e), x);
    return select_below(magnitude, 0.625F, small, large);
}

}  // namespace headlong::HEADLONG_ISA
