// 16-bit floats, one at a time: IEEE 754 binary16, and bfloat16 (the upper half of a binary32). Forced inline, so that
// no unit of an instruction set shares a symbol with the baseline.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/compiler.hpp"

namespace headlong::kernels {

HEADLONG_INLINE float float_of_bits(std::uint32_t bits) noexcept {
    float x = 0.0F;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
HEADLONG_INLINE std::uint32_t bits_of_float(float x) noexcept {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

/// Exact; signalling NaNs become quiet.
HEADLONG_INLINE float widen_f16(std::uint16_t half) noexcept {
    const std::uint32_t sign = (half & 0x8000U) << 16U;
    const std::uint32_t rest = half & 0x7FFFU;
    if (rest >= 0x7C00U) {  // infinity or NaN
        return float_of_bits(sign | 0x7F800000U | (rest & 0x3FFU) << 13U | (rest > 0x7C00U ? 0x400000U : 0U));
    }
    if (rest < 0x400U) {  // zero or subnormal: a multiple of 2^-24
        return float_of_bits(sign | bits_of_float(static_cast<float>(rest) * 0x1p-24F));
    }
    return float_of_bits(sign | ((rest << 13U) + (112U << 23U)));  // the exponents' biases differ by 112
}

/// Exact.
HEADLONG_INLINE float widen_bf16(std::uint16_t half) noexcept {
    return float_of_bits(static_cast<std::uint32_t>(half) << 16U);
}

/// Rounded to nearest even (the caller's mode must be that one). Every NaN becomes 0x7e00.
HEADLONG_INLINE std::uint16_t narrow_f16(float x) noexcept {
    const std::uint32_t bits = bits_of_float(x);
    const std::uint32_t sign = bits >> 16U & 0x8000U;
    std::uint32_t rest = bits & 0x7FFFFFFFU;
    if (rest > 0x7F800000U) return 0x7E00U;
    if (rest >= 0x477FF000U) {  // 65520 and more round to infinity
        rest = 0x7C00U;
    } else if (rest < 0x38800000U) {  // under 2^-14: at 0.5 a float's last place is 2^-24, that of a subnormal half
        rest = bits_of_float(float_of_bits(rest) + 0.5F) - bits_of_float(0.5F);
    } else {
        rest = (rest + 0xFFFU + (rest >> 13U & 1U) - (112U << 23U)) >> 13U;
    }
    return static_cast<std::uint16_t>(sign | rest);
}

/// Rounded to nearest even; every NaN becomes 0x7fc0.
HEADLONG_INLINE std::uint16_t narrow_bf16(float x) noexcept {
    const std::uint32_t bits = bits_of_float(x);
    const bool nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    const std::uint32_t rounded = (bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U;
    return static_cast<std::uint16_t>(nan ? 0x7FC0U : rounded);
}

}  // namespace headlong::kernels
