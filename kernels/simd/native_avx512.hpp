// AVX-512 F, BW, DQ, VL (Skylake-X 2017), and VNNI (Cascade Lake 2019, Zen 4 2022): 32 registers of 16 floats. Fused
// multiply-add: latency 4, two a cycle where both 512-bit ports exist; loads two a cycle; scalef and roundscale:
// latency 4 and 8, one to two a cycle.
#pragma once

#include <immintrin.h>

#include <xsimd/xsimd.hpp>

namespace headlong::HEADLONG_ISA {

using F32 = xsimd::batch<float, xsimd::avx512bw>;
inline constexpr std::size_t kLanes = F32::size;
static_assert(kLanes == 16);

// 24 accumulators (6 rows x the 4 panels of a block), 4 registers of panel rows, 1 broadcast: 29 of 32
inline constexpr std::size_t kTileRows = 6;
inline constexpr std::size_t kTileVectors = 24;

HEADLONG_INLINE F32 load(const float* p) noexcept { return _mm512_loadu_ps(p); }
HEADLONG_INLINE void store(float* p, F32 x) noexcept { _mm512_storeu_ps(p, x); }
HEADLONG_INLINE F32 broadcast(float x) noexcept { return _mm512_set1_ps(x); }
HEADLONG_INLINE float first_lane(F32 x) noexcept { return _mm512_cvtss_f32(x); }
HEADLONG_INLINE F32 fma(F32 a, F32 b, F32 c) noexcept { return _mm512_fmadd_ps(a, b, c); }
HEADLONG_INLINE F32 max(F32 a, F32 b) noexcept { return _mm512_max_ps(a, b); }

HEADLONG_INLINE F32 divide(F32 a, F32 b) noexcept { return _mm512_div_ps(a, b); }

/// begin < 16, end <= 16
HEADLONG_INLINE __mmask16 lane_mask(std::uint32_t begin, std::uint32_t end) noexcept {
    return static_cast<__mmask16>(((1U << end) - 1U) & ~((1U << begin) - 1U));
}
HEADLONG_INLINE F32 load_n(const float* p, std::size_t n) noexcept {
    return _mm512_maskz_loadu_ps(lane_mask(0, static_cast<std::uint32_t>(n)), p);
}
HEADLONG_INLINE void store_n(float* p, F32 x, std::size_t n) noexcept {
    _mm512_mask_storeu_ps(p, lane_mask(0, static_cast<std::uint32_t>(n)), x);
}

HEADLONG_INLINE F32 round_nearest(F32 x) noexcept {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
struct Power {
    F32 exponent;
};
HEADLONG_INLINE Power nearest_power(F32 x) noexcept { return {round_nearest(x)}; }
HEADLONG_INLINE F32 scale(F32 p, Power n) noexcept { return _mm512_scalef_ps(p, n.exponent); }
HEADLONG_INLINE F32 zero_below(F32 x, float limit, F32 y) noexcept {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), y);
}
HEADLONG_INLINE F32 select_lanes(std::uint32_t begin, std::uint32_t end, F32 inside, F32 outside) noexcept {
    return _mm512_mask_mov_ps(outside, lane_mask(begin, end), inside);
}
HEADLONG_INLINE F32 select_below(F32 x, float limit, F32 yes, F32 no) noexcept {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ), yes);
}
HEADLONG_INLINE F32 select_bytes(const std::uint8_t* p, F32 yes, F32 no) noexcept {
    const __m512i lanes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_mask_mov_ps(no, _mm512_test_epi32_mask(lanes, lanes), yes);
}
HEADLONG_INLINE F32 absolute(F32 x) noexcept { return _mm512_abs_ps(x); }
HEADLONG_INLINE F32 copy_sign(F32 magnitude, F32 sign) noexcept {
    return _mm512_or_ps(absolute(magnitude), _mm512_and_ps(_mm512_set1_ps(-0.0F), sign));
}
HEADLONG_INLINE F32 widen_f16(const std::uint16_t* p) noexcept {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HEADLONG_INLINE F32 widen_bf16(const std::uint16_t* p) noexcept {
    const __m512i lanes = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(lanes, 16));
}
HEADLONG_INLINE void narrow_f16(std::uint16_t* p, F32 x) noexcept {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HEADLONG_INLINE bool any_nan(F32 x) noexcept { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
HEADLONG_INLINE F32 canonical_nan(F32 x) noexcept {
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                              _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
}

// indices from 16 on are lanes of b
HEADLONG_INLINE F32 even_lanes(F32 a, F32 b) noexcept {
    const __m512i lanes = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(a, lanes, b);
}
HEADLONG_INLINE F32 odd_lanes(F32 a, F32 b) noexcept {
    const __m512i lanes = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_permutex2var_ps(a, lanes, b);
}
HEADLONG_INLINE F32 zip_low(F32 a, F32 b) noexcept {
    const __m512i lanes = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(a, lanes, b);
}
HEADLONG_INLINE F32 zip_high(F32 a, F32 b) noexcept {
    const __m512i lanes = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(a, lanes, b);
}

using I32 = __m512i;
using DotOperand = __m512i;
HEADLONG_INLINE I32 zero_i32() noexcept { return _mm512_setzero_si512(); }
#if defined(HEADLONG_ISA_AVX512VNNI)
// Unsigned by signed bytes, four products a lane: latency 4 to 5, one a cycle or two.
inline constexpr std::size_t kDotProducts = 64;
inline constexpr bool kDotFused = true;
HEADLONG_INLINE DotOperand dot_ones() noexcept { return _mm512_set1_epi8(1); }
HEADLONG_INLINE I32 dot_add(I32 sums, DotOperand a, DotOperand b) noexcept { return _mm512_dpbusd_epi32(sums, a, b); }
#else
// 16-bit pairs: without VNNI there is no dot product of bytes. One a cycle or two.
inline constexpr std::size_t kDotProducts = 32;
inline constexpr bool kDotFused = false;
HEADLONG_INLINE DotOperand dot_ones() noexcept { return _mm512_set1_epi16(1); }
HEADLONG_INLINE I32 dot_add(I32 sums, DotOperand a, DotOperand b) noexcept {
    return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
}
#endif
HEADLONG_INLINE void hide(__m512i& x) noexcept { HEADLONG_HIDE(HEADLONG_AVX512_REGISTER, x); }
HEADLONG_INLINE void hide(F32& x) noexcept {
    __m512 bits = x;
    HEADLONG_HIDE(HEADLONG_AVX512_REGISTER, bits);
    x = bits;
}

#include "kernels/simd/transpose_avx2-inl.hpp"

HEADLONG_INLINE I32 broadcast_i32(std::int32_t x) noexcept { return _mm512_set1_epi32(x); }
HEADLONG_INLINE I32 add_i32(I32 a, I32 b) noexcept { return _mm512_add_epi32(a, b); }
HEADLONG_INLINE F32 to_f32(I32 x) noexcept { return _mm512_cvtepi32_ps(x); }

HEADLONG_INLINE I32 load_i32(const float* p) noexcept { return _mm512_loadu_si512(p); }
HEADLONG_INLINE void store_i32(float* p, I32 x) noexcept { _mm512_storeu_si512(p, x); }

inline constexpr std::size_t kLineParts = 1;
template <std::size_t Quads>
inline constexpr std::int32_t kCodeOffset = Quads == 1 ? 128 : 8;
inline constexpr std::size_t kCodeTileRows = 6;  // 24 accumulators, registers of codes of both panels, one of a row
inline constexpr std::size_t kCodeTilePanels = 2;
inline constexpr std::size_t kQuadSums = 2;
#if !defined(HEADLONG_ISA_AVX512VNNI)
/// gcc would keep old and new sums side by side, and spill.
HEADLONG_INLINE void add_in_place(I32& sum, I32 x) noexcept { HEADLONG_ADD_IN_PLACE(HEADLONG_AVX512_REGISTER, sum, x); }
#endif
#if defined(HEADLONG_ISA_AVX512VNNI)
// One register of 16 columns, a sum of the first and of the second terms.
inline constexpr std::size_t kQuadLatency = 8;
inline constexpr bool kCodeTerms = true;
template <std::size_t Quads, std::size_t Rows, std::size_t Panels>
HEADLONG_INLINE void add_line(I32 (&sums)[Rows][Panels][kQuadSums], const std::uint8_t* line, std::size_t panel_stride,
                              const std::uint8_t* rows, std::size_t row_stride, std::size_t) noexcept {
    HEADLONG_UNROLL for (std::size_t quad = 0; quad < Quads; ++quad) {
        __m512i w[Panels];
        HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
            w[p] = _mm512_loadu_si512(line + p * panel_stride);
            if constexpr (Quads == 2) {
                w[p] = _mm512_and_si512(quad == 0 ? w[p] : _mm512_srli_epi16(w[p], 4), _mm512_set1_epi8(0x0F));
            }
        }
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            HEADLONG_UNROLL for (std::size_t term = 0; term < 2; ++term) {
                std::int32_t codes = 0;
                std::memcpy(&codes, rows + r * row_stride + quad * 8 + term * 4, sizeof codes);
                const __m512i x = _mm512_set1_epi32(codes);
                HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                    sums[r][p][term] = _mm512_dpbusd_epi32(sums[r][p][term], w[p], x);
                    hide(sums[r][p][term]);  // or gcc keeps old and new sums side by side, and spills
                }
            }
        }
    }
}
HEADLONG_INLINE void quad_totals(const I32 (&sums)[kQuadSums], I32 (&totals)[1]) noexcept {
    const __m512i first = _mm512_sub_epi32(_mm512_slli_epi32(sums[0], 8), _mm512_add_epi32(sums[0], sums[0]));
    totals[0] = _mm512_add_epi32(first, sums[1]);  // 254 = 256 - 2
}
HEADLONG_INLINE void store_row_quads(std::uint8_t* p, F32 first, F32 second) noexcept {
    const __m128i a = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(first));
    const __m128i b = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(second));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi32(a, b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm_unpackhi_epi32(a, b));
}
#else
// Two registers of 8 columns, two partial sums for each column: vpmaddwd adds neighbours. The codes are widened to
// 16 bits as they are loaded; a row's four codes are broadcast.
inline constexpr std::size_t kQuadLatency = 2;  // only the addition waits for the one before
inline constexpr bool kCodeTerms = false;
template <std::size_t Quads, std::size_t Rows, std::size_t Panels>
HEADLONG_INLINE void add_line(I32 (&sums)[Rows][Panels][kQuadSums], const std::uint8_t* line, std::size_t panel_stride,
                              const std::uint8_t* rows, std::size_t row_stride, std::size_t) noexcept {
    HEADLONG_UNROLL for (std::size_t quad = 0; quad < Quads; ++quad) {
        __m512i w[Panels][kQuadSums];
        HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
            HEADLONG_UNROLL for (std::size_t i = 0; i < kQuadSums; ++i) {
                const auto* half = reinterpret_cast<const __m256i*>(line + p * panel_stride + i * 32);
                const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(half));
                w[p][i] = Quads == 1  ? x
                          : quad == 0 ? _mm512_and_si512(x, _mm512_set1_epi16(0x0F))
                                      : _mm512_srli_epi16(x, 4);
            }
        }
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            long long codes = 0;
            std::memcpy(&codes, rows + r * row_stride + quad * 8, sizeof codes);
            const __m512i x = _mm512_set1_epi64(codes);
            HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                HEADLONG_UNROLL for (std::size_t i = 0; i < kQuadSums; ++i) {
                    add_in_place(sums[r][p][i], _mm512_madd_epi16(w[p][i], x));
                }
            }
        }
    }
}
HEADLONG_INLINE void quad_totals(const I32 (&sums)[kQuadSums], I32 (&totals)[1]) noexcept {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    totals[0] = _mm512_add_epi32(_mm512_permutex2var_epi32(sums[0], even, sums[1]),
                                 _mm512_permutex2var_epi32(sums[0], odd, sums[1]));
}
HEADLONG_INLINE void store_row_quads(std::uint8_t* p, F32 first, F32 second) noexcept {
    const __m512i x = _mm512_cvtps_epi32(first * broadcast(254.0F) + second);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
#endif

// Weights x values of codes: 24 accumulators (6 rows x 4 panels), 4 registers of codes, one of a row's weights, one of
// products.
inline constexpr std::size_t kPairTileRows = 6;
inline constexpr std::size_t kPairTileVectors = 24;
template <std::size_t Pairs>
inline constexpr std::int32_t kPairCodeOffset = Pairs == 1 ? 0 : 8;
HEADLONG_INLINE __m512i broadcast_pair(const std::int16_t* p) noexcept {
    std::int32_t pair = 0;
    std::memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}
template <std::size_t Pairs>
HEADLONG_INLINE __m512i load_pair_codes(const std::uint8_t* line, std::size_t pair, std::size_t) noexcept {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
    if constexpr (Pairs == 1) return _mm512_cvtepi8_epi16(bytes);
    const __m512i both = _mm512_cvtepu8_epi16(bytes);
    return pair == 0 ? _mm512_and_si512(both, _mm512_set1_epi16(0x0F)) : _mm512_srli_epi16(both, 4);
}
HEADLONG_INLINE void add_pairs(I32& sum, __m512i weights, __m512i codes) noexcept {
#if defined(HEADLONG_ISA_AVX512VNNI)
    sum = _mm512_dpwssd_epi32(sum, codes, weights);
    hide(sum);
#else
    add_in_place(sum, _mm512_madd_epi16(codes, weights));
#endif
}
HEADLONG_INLINE void store_weight_codes(std::int16_t* p, const F32 (&weights)[1], I32& sums) noexcept {
    const __m512i codes = _mm512_cvttps_epi32(weights[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(codes));
    sums = _mm512_add_epi32(sums, codes);
}

}  // namespace headlong::HEADLONG_ISA
