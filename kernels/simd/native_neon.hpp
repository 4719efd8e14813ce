// NEON of AArch64, and its dot products (Cortex-A55 and A75 2017, Apple A11): 32 registers of 4 floats. Fused
// multiply-add: latency 4, two (Neoverse N1) to four (Apple, V1) a cycle; loads two to three a cycle.
#pragma once

#include <arm_neon.h>

#include <xsimd/xsimd.hpp>

namespace headlong::HEADLONG_ISA {

using F32 = xsimd::batch<float, xsimd::neon64>;
inline constexpr std::size_t kLanes = F32::size;
static_assert(kLanes == 4);

// 24 accumulators (6 rows x the 4 registers of a panel row), 4 registers of the panel row, 1 broadcast: 29 of 32
inline constexpr std::size_t kTileRows = 6;
inline constexpr std::size_t kTileVectors = 24;

HEADLONG_INLINE F32 load(const float* p) noexcept { return vld1q_f32(p); }
HEADLONG_INLINE void store(float* p, F32 x) noexcept { vst1q_f32(p, x); }
HEADLONG_INLINE F32 broadcast(float x) noexcept { return vdupq_n_f32(x); }
HEADLONG_INLINE float first_lane(F32 x) noexcept { return vgetq_lane_f32(x, 0); }
HEADLONG_INLINE F32 fma(F32 a, F32 b, F32 c) noexcept { return vfmaq_f32(c, a, b); }
HEADLONG_INLINE F32 max(F32 a, F32 b) noexcept { return vmaxq_f32(a, b); }

HEADLONG_INLINE F32 divide(F32 a, F32 b) noexcept { return vdivq_f32(a, b); }

HEADLONG_INLINE F32 load_n(const float* p, std::size_t n) noexcept {
    float lanes[4] = {};
    std::memcpy(lanes, p, n * sizeof(float));
    return vld1q_f32(lanes);
}
HEADLONG_INLINE void store_n(float* p, F32 x, std::size_t n) noexcept {
    float lanes[4];
    vst1q_f32(lanes, x);
    std::memcpy(p, lanes, n * sizeof(float));
}

HEADLONG_INLINE F32 round_nearest(F32 x) noexcept { return vrndnq_f32(x); }
struct Power {
    F32 exponent;
    F32 factor;
};
HEADLONG_INLINE Power nearest_power(F32 x) noexcept {
    const float32x4_t sum = vaddq_f32(x, vdupq_n_f32(kExponentMagic));
    return {vsubq_f32(sum, vdupq_n_f32(kExponentMagic)),
            vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(sum), 23))};
}
HEADLONG_INLINE F32 scale(F32 p, Power n) noexcept { return vmulq_f32(p, n.factor); }
HEADLONG_INLINE F32 zero_below(F32 x, float limit, F32 y) noexcept {
    const uint32x4_t below = vcltq_f32(x, vdupq_n_f32(limit));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), below));
}
HEADLONG_INLINE F32 select_lanes(std::uint32_t begin, std::uint32_t end, F32 inside, F32 outside) noexcept {
    const std::uint32_t lanes[4] = {0, 1, 2, 3};
    const uint32x4_t lane = vld1q_u32(lanes);
    const uint32x4_t mask = vandq_u32(vcgeq_u32(lane, vdupq_n_u32(begin)), vcltq_u32(lane, vdupq_n_u32(end)));
    return vbslq_f32(mask, inside, outside);
}
HEADLONG_INLINE F32 select_below(F32 x, float limit, F32 yes, F32 no) noexcept {
    return vbslq_f32(vcltq_f32(x, vdupq_n_f32(limit)), yes, no);
}
HEADLONG_INLINE F32 select_bytes(const std::uint8_t* p, F32 yes, F32 no) noexcept {
    const std::uint32_t lanes[4] = {p[0], p[1], p[2], p[3]};
    return vbslq_f32(vceqq_u32(vld1q_u32(lanes), vdupq_n_u32(0)), no, yes);
}
HEADLONG_INLINE F32 absolute(F32 x) noexcept { return vabsq_f32(x); }
HEADLONG_INLINE F32 copy_sign(F32 magnitude, F32 sign) noexcept {
    return vbslq_f32(vdupq_n_u32(0x80000000U), sign, magnitude);
}
HEADLONG_INLINE F32 widen_f16(const std::uint16_t* p) noexcept {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
HEADLONG_INLINE F32 widen_bf16(const std::uint16_t* p) noexcept {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
HEADLONG_INLINE void narrow_f16(std::uint16_t* p, F32 x) noexcept {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
HEADLONG_INLINE bool any_nan(F32 x) noexcept { return vminvq_u32(vceqq_f32(x, x)) == 0; }
HEADLONG_INLINE F32 canonical_nan(F32 x) noexcept {
    return vbslq_f32(vceqq_f32(x, x), x, vreinterpretq_f32_u32(vdupq_n_u32(0x7FC00000U)));
}

HEADLONG_INLINE F32 even_lanes(F32 a, F32 b) noexcept { return vuzp1q_f32(a, b); }
HEADLONG_INLINE F32 odd_lanes(F32 a, F32 b) noexcept { return vuzp2q_f32(a, b); }
HEADLONG_INLINE F32 zip_low(F32 a, F32 b) noexcept { return vzip1q_f32(a, b); }
HEADLONG_INLINE F32 zip_high(F32 a, F32 b) noexcept { return vzip2q_f32(a, b); }

using I32 = int32x4_t;
using DotOperand = int8x16_t;
inline constexpr std::size_t kDotProducts = 16;
HEADLONG_INLINE I32 zero_i32() noexcept { return vdupq_n_s32(0); }
HEADLONG_INLINE DotOperand dot_ones() noexcept { return vdupq_n_s8(1); }
#if defined(HEADLONG_ISA_NEONDOT)
// Four products a lane: latency 3 to 4, two (Neoverse N1) to four (Apple, V1) a cycle.
inline constexpr bool kDotFused = true;
HEADLONG_INLINE I32 dot_add(I32 sums, DotOperand a, DotOperand b) noexcept { return vdotq_s32(sums, a, b); }
#else
// 16 bytes a step: a widening multiply of each half, and the neighbours' products added up.
inline constexpr bool kDotFused = false;
HEADLONG_INLINE I32 dot_add(I32 sums, DotOperand a, DotOperand b) noexcept {
    const I32 low = vpadalq_s16(sums, vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    return vpadalq_s16(low, vmull_high_s8(a, b));
}
#endif
HEADLONG_INLINE void hide(int8x16_t& x) noexcept { HEADLONG_HIDE(HEADLONG_VECTOR_REGISTER, x); }
HEADLONG_INLINE void hide(int32x4_t& x) noexcept { HEADLONG_HIDE(HEADLONG_VECTOR_REGISTER, x); }
HEADLONG_INLINE void hide(F32& x) noexcept {
    float32x4_t bits = x;
    HEADLONG_HIDE(HEADLONG_VECTOR_REGISTER, bits);
    x = bits;
}

inline constexpr std::size_t kTransposeColumns = 4;
HEADLONG_INLINE void transpose_16(const float* rows, std::ptrdiff_t stride, float* panel) noexcept {
    HEADLONG_UNROLL for (std::ptrdiff_t quad = 0; quad < 4; ++quad) {
        const float* p = rows + 4 * quad * stride;
        const float32x4x2_t ab = vtrnq_f32(vld1q_f32(p), vld1q_f32(p + stride));
        const float32x4x2_t cd = vtrnq_f32(vld1q_f32(p + 2 * stride), vld1q_f32(p + 3 * stride));
        float* out = panel + 4 * quad;
        vst1q_f32(out, vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0])));
        vst1q_f32(out + 16, vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1])));
        vst1q_f32(out + 32, vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0])));
        vst1q_f32(out + 48, vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1])));
    }
}

HEADLONG_INLINE I32 broadcast_i32(std::int32_t x) noexcept { return vdupq_n_s32(x); }
HEADLONG_INLINE I32 add_i32(I32 a, I32 b) noexcept { return vaddq_s32(a, b); }
HEADLONG_INLINE F32 to_f32(I32 x) noexcept { return vcvtq_f32_s32(x); }

HEADLONG_INLINE I32 load_i32(const float* p) noexcept { return vreinterpretq_s32_f32(vld1q_f32(p)); }
HEADLONG_INLINE void store_i32(float* p, I32 x) noexcept { vst1q_f32(p, vreinterpretq_f32_s32(x)); }

inline constexpr std::size_t kCodeTilePanels = 1;
inline constexpr std::size_t kLineParts = 1;
inline constexpr std::size_t kQuadLatency = 8;
#if defined(HEADLONG_ISA_NEONDOT)
// Four registers of 4 columns, a sum of the first and of the second terms for each. Exclusive or with 0x80 takes the
// offset from a code, which is then q.
template <std::size_t Quads>
inline constexpr std::int32_t kCodeOffset = Quads == 1 ? 0 : 8;
inline constexpr std::size_t kCodeTileRows = 3;  // 24 accumulators, a register of codes, 3 of the rows
inline constexpr std::size_t kQuadSums = 8;
inline constexpr bool kCodeTerms = true;
template <std::size_t Quads, std::size_t Rows, std::size_t Panels>
HEADLONG_INLINE void add_line(I32 (&sums)[Rows][Panels][kQuadSums], const std::uint8_t* line, std::size_t panel_stride,
                              const std::uint8_t* rows, std::size_t row_stride, std::size_t) noexcept {
    HEADLONG_UNROLL for (std::size_t quad = 0; quad < Quads; ++quad) {
        int8x8_t x[Rows];
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            x[r] = vld1_s8(reinterpret_cast<const std::int8_t*>(rows + r * row_stride + quad * 8));
        }
        HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
            HEADLONG_UNROLL for (std::size_t i = 0; i < 4; ++i) {
                const uint8x16_t codes = vld1q_u8(line + p * panel_stride + i * 16);
                const int8x16_t w = vreinterpretq_s8_u8(Quads == 1  ? veorq_u8(codes, vdupq_n_u8(0x80))
                                                        : quad == 0 ? vandq_u8(codes, vdupq_n_u8(0x0F))
                                                                    : vshrq_n_u8(codes, 4));
                HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                    sums[r][p][2 * i] = vdotq_lane_s32(sums[r][p][2 * i], w, x[r], 0);
                    sums[r][p][2 * i + 1] = vdotq_lane_s32(sums[r][p][2 * i + 1], w, x[r], 1);
                }
            }
        }
    }
}
HEADLONG_INLINE void quad_totals(const I32 (&sums)[kQuadSums], I32 (&totals)[4]) noexcept {
    HEADLONG_UNROLL for (std::size_t i = 0; i < 4; ++i) totals[i] = vmlaq_n_s32(sums[2 * i + 1], sums[2 * i], 254);
}
HEADLONG_INLINE void store_row_quads(std::uint8_t* p, F32 first, F32 second) noexcept {
    const int16x8_t x = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(first)), vmovn_s32(vcvtnq_s32_f32(second)));
    vst1_s8(reinterpret_cast<std::int8_t*>(p), vmovn_s16(x));
}
#else
// Four registers of 4 columns. Loading four apart puts one input's codes of all columns into a register; they are
// widened to 16 bits and multiplied by one of a row's four codes.
template <std::size_t Quads>
inline constexpr std::int32_t kCodeOffset = Quads == 1 ? 128 : 8;
inline constexpr std::size_t kCodeTileRows = 4;  // 16 accumulators, 6 registers of codes, 4 of the rows
inline constexpr std::size_t kQuadSums = 4;
inline constexpr bool kCodeTerms = false;
template <int Input, std::size_t Rows, std::size_t Panels>
HEADLONG_INLINE void add_input(I32 (&sums)[Rows][Panels][kQuadSums], std::size_t panel, uint8x16_t codes,
                               const int16x4_t (&x)[Rows]) noexcept {
    const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes)));
    const int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(codes));
    HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
        I32(&row)[kQuadSums] = sums[r][panel];
        row[0] = vmlal_lane_s16(row[0], vget_low_s16(low), x[r], Input);
        row[1] = vmlal_high_lane_s16(row[1], low, x[r], Input);
        row[2] = vmlal_lane_s16(row[2], vget_low_s16(high), x[r], Input);
        row[3] = vmlal_high_lane_s16(row[3], high, x[r], Input);
        if constexpr (Rows == kCodeTileRows) {  // gcc copies sums about in the whole tile, in smaller ones with this
            HEADLONG_UNROLL for (std::size_t i = 0; i < kQuadSums; ++i) hide(row[i]);
        }
    }
}
template <std::size_t Quads, std::size_t Rows, std::size_t Panels>
HEADLONG_INLINE void add_line(I32 (&sums)[Rows][Panels][kQuadSums], const std::uint8_t* line, std::size_t panel_stride,
                              const std::uint8_t* rows, std::size_t row_stride, std::size_t) noexcept {
    HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
        const uint8x16x4_t inputs = vld4q_u8(line + p * panel_stride);
        HEADLONG_UNROLL for (std::size_t quad = 0; quad < Quads; ++quad) {
            int16x4_t x[Rows];
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                x[r] = vld1_s16(reinterpret_cast<const std::int16_t*>(rows + r * row_stride + quad * 8));
            }
            const auto codes = [quad](uint8x16_t bytes) noexcept {
                return Quads == 1 ? bytes : quad == 0 ? vandq_u8(bytes, vdupq_n_u8(0x0F)) : vshrq_n_u8(bytes, 4);
            };
            add_input<0>(sums, p, codes(inputs.val[0]), x);
            add_input<1>(sums, p, codes(inputs.val[1]), x);
            add_input<2>(sums, p, codes(inputs.val[2]), x);
            add_input<3>(sums, p, codes(inputs.val[3]), x);
        }
    }
}
HEADLONG_INLINE void quad_totals(const I32 (&sums)[kQuadSums], I32 (&totals)[4]) noexcept {
    HEADLONG_UNROLL for (std::size_t i = 0; i < 4; ++i) totals[i] = sums[i];
}
HEADLONG_INLINE void store_row_quads(std::uint8_t* p, F32 first, F32 second) noexcept {
    const int32x4_t x = vcvtnq_s32_f32(first * broadcast(254.0F) + second);
    vst1_s16(reinterpret_cast<std::int16_t*>(p), vmovn_s32(x));
}
#endif

// Weights x values of codes: 24 accumulators (6 rows x the 4 registers of a panel), 4 registers of codes, one of a
// row's weights. Loading two apart parts the tokens of a pair.
inline constexpr std::size_t kPairTileRows = 6;
inline constexpr std::size_t kPairTileVectors = 24;
template <std::size_t Pairs>
inline constexpr std::int32_t kPairCodeOffset = Pairs == 1 ? 0 : 8;
struct PairCodes {
    int16x4_t first;
    int16x4_t second;
};
HEADLONG_INLINE int16x4_t broadcast_pair(const std::int16_t* p) noexcept {
    std::int32_t pair = 0;
    std::memcpy(&pair, p, sizeof pair);
    return vreinterpret_s16_s32(vdup_n_s32(pair));
}
template <std::size_t Pairs>
HEADLONG_INLINE PairCodes load_pair_codes(const std::uint8_t* line, std::size_t pair, std::size_t v) noexcept {
    const uint8x16x2_t tokens = vld2q_u8(line);
    const auto part = [pair, v](uint8x16_t bytes) noexcept {
        if constexpr (Pairs == 2) {
            bytes = pair == 0 ? vandq_u8(bytes, vdupq_n_u8(0x0F)) : vshrq_n_u8(bytes, 4);
        }
        const int8x16_t codes = vreinterpretq_s8_u8(bytes);
        const int16x8_t half = v < 2 ? vmovl_s8(vget_low_s8(codes)) : vmovl_high_s8(codes);
        return v % 2 == 0 ? vget_low_s16(half) : vget_high_s16(half);
    };
    return {part(tokens.val[0]), part(tokens.val[1])};
}
HEADLONG_INLINE void add_pairs(I32& sum, int16x4_t weights, const PairCodes& codes) noexcept {
    sum = vmlal_lane_s16(sum, codes.first, weights, 0);
    sum = vmlal_lane_s16(sum, codes.second, weights, 1);
}
HEADLONG_INLINE void store_weight_codes(std::int16_t* p, const F32 (&weights)[4], I32& sums) noexcept {
    HEADLONG_UNROLL for (std::size_t v = 0; v < 4; ++v) {
        const int32x4_t codes = vcvtq_s32_f32(weights[v]);
        vst1_s16(p + 4 * v, vmovn_s32(codes));
        sums = vaddq_s32(sums, codes);
    }
}

}  // namespace headlong::HEADLONG_ISA
