// AVX2 with FMA (Haswell 2013, Zen 2017), and AVX-VNNI (Alder Lake 2021, Zen 5 2024): 16 registers of 8 floats. Fused
// multiply-add: latency 4 to 5, two a cycle; loads two a cycle (a broadcast from memory is a load); shuffles across
// 128-bit lanes: latency 3, one a cycle.
#pragma once

#include <immintrin.h>

#include <xsimd/xsimd.hpp>

namespace headlong::HEADLONG_ISA {

using F32 = xsimd::batch<float, xsimd::fma3<xsimd::avx2>>;
inline constexpr std::size_t kLanes = F32::size;
static_assert(kLanes == 8);

// 12 accumulators (3 rows x the 4 registers of 2 panel rows) cover latency 4-5 x 2 a cycle; 3 broadcasts, 1 register of
// a panel row. 7 loads for 12 multiply-adds; 6 rows x 2 registers would be 8, and what is dispatched is the bound where
// another thread shares the core.
inline constexpr std::size_t kTileRows = 3;
inline constexpr std::size_t kTileVectors = 12;

HEADLONG_INLINE F32 load(const float* p) noexcept { return _mm256_loadu_ps(p); }
HEADLONG_INLINE void store(float* p, F32 x) noexcept { _mm256_storeu_ps(p, x); }
HEADLONG_INLINE F32 broadcast(float x) noexcept { return _mm256_set1_ps(x); }
HEADLONG_INLINE float first_lane(F32 x) noexcept { return _mm256_cvtss_f32(x); }
HEADLONG_INLINE F32 fma(F32 a, F32 b, F32 c) noexcept { return _mm256_fmadd_ps(a, b, c); }
HEADLONG_INLINE F32 max(F32 a, F32 b) noexcept { return _mm256_max_ps(a, b); }

HEADLONG_INLINE F32 divide(F32 a, F32 b) noexcept { return _mm256_div_ps(a, b); }

HEADLONG_INLINE __m256i lane_mask(std::uint32_t begin, std::uint32_t end) noexcept {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(begin)), lane),
                               _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(end)), lane));
}
// Whole registers go around the masks: Zen 3 takes some 20 cycles for a masked store.
HEADLONG_INLINE F32 load_n(const float* p, std::size_t n) noexcept {
    if (n == kLanes) return load(p);
    return _mm256_maskload_ps(p, lane_mask(0, static_cast<std::uint32_t>(n)));
}
HEADLONG_INLINE void store_n(float* p, F32 x, std::size_t n) noexcept {
    if (n == kLanes) return store(p, x);
    _mm256_maskstore_ps(p, lane_mask(0, static_cast<std::uint32_t>(n)), x);
}

HEADLONG_INLINE F32 round_nearest(F32 x) noexcept {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
struct Power {
    F32 exponent;
    F32 factor;
};
HEADLONG_INLINE Power nearest_power(F32 x) noexcept {
    const F32 sum = _mm256_add_ps(x, _mm256_set1_ps(kExponentMagic));
    return {_mm256_sub_ps(sum, _mm256_set1_ps(kExponentMagic)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(sum), 23))};
}
HEADLONG_INLINE F32 scale(F32 p, Power n) noexcept { return _mm256_mul_ps(p, n.factor); }
HEADLONG_INLINE F32 zero_below(F32 x, float limit, F32 y) noexcept {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_LT_OQ), y);
}
HEADLONG_INLINE F32 select_lanes(std::uint32_t begin, std::uint32_t end, F32 inside, F32 outside) noexcept {
    return _mm256_blendv_ps(outside, inside, _mm256_castsi256_ps(lane_mask(begin, end)));
}
HEADLONG_INLINE F32 select_below(F32 x, float limit, F32 yes, F32 no) noexcept {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_LT_OQ));
}
HEADLONG_INLINE F32 select_bytes(const std::uint8_t* p, F32 yes, F32 no) noexcept {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, p, sizeof bytes);
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
    return _mm256_blendv_ps(yes, no, _mm256_castsi256_ps(_mm256_cmpeq_epi32(lanes, _mm256_setzero_si256())));
}
HEADLONG_INLINE F32 absolute(F32 x) noexcept { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x); }
HEADLONG_INLINE F32 copy_sign(F32 magnitude, F32 sign) noexcept {
    return _mm256_or_ps(absolute(magnitude), _mm256_and_ps(_mm256_set1_ps(-0.0F), sign));
}
HEADLONG_INLINE F32 widen_f16(const std::uint16_t* p) noexcept {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HEADLONG_INLINE F32 widen_bf16(const std::uint16_t* p) noexcept {
    const __m256i lanes = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 16));
}
HEADLONG_INLINE void narrow_f16(std::uint16_t* p, F32 x) noexcept {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HEADLONG_INLINE bool any_nan(F32 x) noexcept { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
HEADLONG_INLINE F32 canonical_nan(F32 x) noexcept {
    return _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

// shuffles and unpacks work inside 128-bit halves; the permutations put their quarters in order
HEADLONG_INLINE F32 even_lanes(F32 a, F32 b) noexcept {
    const __m256d quarters = _mm256_castps_pd(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(quarters, _MM_SHUFFLE(3, 1, 2, 0)));
}
HEADLONG_INLINE F32 odd_lanes(F32 a, F32 b) noexcept {
    const __m256d quarters = _mm256_castps_pd(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(quarters, _MM_SHUFFLE(3, 1, 2, 0)));
}
HEADLONG_INLINE F32 zip_low(F32 a, F32 b) noexcept {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
HEADLONG_INLINE F32 zip_high(F32 a, F32 b) noexcept {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}

using I32 = __m256i;
using DotOperand = __m256i;
HEADLONG_INLINE I32 zero_i32() noexcept { return _mm256_setzero_si256(); }
#if defined(HEADLONG_ISA_AVX2VNNI)
// Unsigned by signed bytes, four products a lane: latency 4 to 5, two a cycle.
inline constexpr std::size_t kDotProducts = 32;
inline constexpr bool kDotFused = true;
HEADLONG_INLINE DotOperand dot_ones() noexcept { return _mm256_set1_epi8(1); }
HEADLONG_INLINE I32 dot_add(I32 sums, DotOperand a, DotOperand b) noexcept {
    return _mm256_dpbusd_avx_epi32(sums, a, b);
}
#else
// 16-bit pairs: the unsigned-by-signed 8-bit multiply of AVX2 saturates. One a cycle or two.
inline constexpr std::size_t kDotProducts = 16;
inline constexpr bool kDotFused = false;
HEADLONG_INLINE DotOperand dot_ones() noexcept { return _mm256_set1_epi16(1); }
HEADLONG_INLINE I32 dot_add(I32 sums, DotOperand a, DotOperand b) noexcept {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
#endif
HEADLONG_INLINE void hide(__m256i& x) noexcept { HEADLONG_HIDE(HEADLONG_VECTOR_REGISTER, x); }
HEADLONG_INLINE void hide(F32& x) noexcept {
    __m256 bits = x;
    HEADLONG_HIDE(HEADLONG_VECTOR_REGISTER, bits);
    x = bits;
}

#include "kernels/simd/transpose_avx2-inl.hpp"

HEADLONG_INLINE I32 broadcast_i32(std::int32_t x) noexcept { return _mm256_set1_epi32(x); }
HEADLONG_INLINE I32 add_i32(I32 a, I32 b) noexcept { return _mm256_add_epi32(a, b); }
HEADLONG_INLINE F32 to_f32(I32 x) noexcept { return _mm256_cvtepi32_ps(x); }

HEADLONG_INLINE I32 load_i32(const float* p) noexcept {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
HEADLONG_INLINE void store_i32(float* p, I32 x) noexcept { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }

template <std::size_t Quads>
inline constexpr std::int32_t kCodeOffset = Quads == 1 ? 128 : 8;
inline constexpr std::size_t kCodeTilePanels = 1;
#if !defined(HEADLONG_ISA_AVX2VNNI)
/// gcc would keep old and new sums side by side, and spill.
HEADLONG_INLINE void add_in_place(I32& sum, I32 x) noexcept { HEADLONG_ADD_IN_PLACE(HEADLONG_VECTOR_REGISTER, sum, x); }
#endif
#if defined(HEADLONG_ISA_AVX2VNNI)
// Two registers of 8 columns, a sum of the first and of the second terms for each.
inline constexpr std::size_t kCodeTileRows = 3;  // 12 accumulators, 2 registers of codes, one of a row
inline constexpr std::size_t kLineParts = 1;
inline constexpr std::size_t kQuadSums = 4;
inline constexpr std::size_t kQuadLatency = 8;
inline constexpr bool kCodeTerms = true;
template <std::size_t Quads, std::size_t Rows, std::size_t Panels>
HEADLONG_INLINE void add_line(I32 (&sums)[Rows][Panels][kQuadSums], const std::uint8_t* line, std::size_t panel_stride,
                              const std::uint8_t* rows, std::size_t row_stride, std::size_t) noexcept {
    HEADLONG_UNROLL for (std::size_t quad = 0; quad < Quads; ++quad) {
        __m256i w[Panels][2];
        HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
            HEADLONG_UNROLL for (std::size_t i = 0; i < 2; ++i) {
                __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + p * panel_stride + i * 32));
                if constexpr (Quads == 2) {
                    x = _mm256_and_si256(quad == 0 ? x : _mm256_srli_epi16(x, 4), _mm256_set1_epi8(0x0F));
                }
                w[p][i] = x;
            }
        }
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            HEADLONG_UNROLL for (std::size_t term = 0; term < 2; ++term) {
                std::int32_t codes = 0;
                std::memcpy(&codes, rows + r * row_stride + quad * 8 + term * 4, sizeof codes);
                const __m256i x = _mm256_set1_epi32(codes);
                HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                    HEADLONG_UNROLL for (std::size_t i = 0; i < 2; ++i) {
                        I32& sum = sums[r][p][2 * i + term];
                        sum = _mm256_dpbusd_avx_epi32(sum, w[p][i], x);
                        hide(sum);  // or gcc keeps old and new sums side by side, and spills
                    }
                }
            }
        }
    }
}
HEADLONG_INLINE void quad_totals(const I32 (&sums)[kQuadSums], I32 (&totals)[2]) noexcept {
    HEADLONG_UNROLL for (std::size_t i = 0; i < 2; ++i) {  // 254 = 256 - 2
        const __m256i first =
            _mm256_sub_epi32(_mm256_slli_epi32(sums[2 * i], 8), _mm256_add_epi32(sums[2 * i], sums[2 * i]));
        totals[i] = _mm256_add_epi32(first, sums[2 * i + 1]);
    }
}
HEADLONG_INLINE void store_row_quads(std::uint8_t* p, F32 first, F32 second) noexcept {
    __m256i x = _mm256_packs_epi32(_mm256_cvtps_epi32(first), _mm256_cvtps_epi32(second));
    x = _mm256_packs_epi16(x, x);  // in each half a quad of both terms, twice
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(x, _MM_SHUFFLE(3, 1, 2, 0))));
}
#else
// Registers of 4 columns, two partial sums for each column: vpmaddwd adds neighbours. The codes are widened to 16 bits
// as they are loaded; a row's four codes are broadcast. A line's four registers are taken in two parts: 6 rows x 2 are
// 12 accumulators, with 2 registers of codes, one of a row and one of products. (3 rows x 4 would be 17 in all.)
inline constexpr std::size_t kCodeTileRows = 6;
inline constexpr std::size_t kLineParts = 2;
inline constexpr std::size_t kQuadSums = 2;
inline constexpr std::size_t kQuadLatency = 4;  // only the addition waits for the one before
inline constexpr bool kCodeTerms = false;
template <std::size_t Quads, std::size_t Rows, std::size_t Panels, std::size_t Sums>
HEADLONG_INLINE void add_line(I32 (&sums)[Rows][Panels][Sums], const std::uint8_t* line, std::size_t panel_stride,
                              const std::uint8_t* rows, std::size_t row_stride, std::size_t part) noexcept {
    HEADLONG_UNROLL for (std::size_t quad = 0; quad < Quads; ++quad) {
        HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
            __m256i w[Sums];
            HEADLONG_UNROLL for (std::size_t i = 0; i < Sums; ++i) {
                const auto* quarter =
                    reinterpret_cast<const __m128i*>(line + p * panel_stride + (part * Sums + i) * 16);
                const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(quarter));
                w[i] = Quads == 1  ? x
                       : quad == 0 ? _mm256_and_si256(x, _mm256_set1_epi16(0x0F))
                                   : _mm256_srli_epi16(x, 4);
            }
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                long long codes = 0;
                std::memcpy(&codes, rows + r * row_stride + quad * 8, sizeof codes);
                const __m256i x = _mm256_set1_epi64x(codes);
                HEADLONG_UNROLL for (std::size_t i = 0; i < Sums; ++i) {
                    add_in_place(sums[r][p][i], _mm256_madd_epi16(w[i], x));
                }
            }
        }
    }
}
HEADLONG_INLINE void quad_totals(const I32 (&sums)[kQuadSums], I32 (&totals)[1]) noexcept {
    // inside 128-bit halves: columns 0 1 4 5, 2 3 6 7
    totals[0] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[0], sums[1]), _MM_SHUFFLE(3, 1, 2, 0));
}
HEADLONG_INLINE void quad_totals(const I32 (&sums)[2 * kQuadSums], I32 (&totals)[2]) noexcept {
    HEADLONG_UNROLL for (std::size_t i = 0; i < 2; ++i) {
        totals[i] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[2 * i], sums[2 * i + 1]), _MM_SHUFFLE(3, 1, 2, 0));
    }
}
HEADLONG_INLINE void store_row_quads(std::uint8_t* p, F32 first, F32 second) noexcept {
    const __m256i x = _mm256_cvtps_epi32(first * broadcast(254.0F) + second);
    const __m256i twice = _mm256_packs_epi32(x, x);  // in each half a quad, twice
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, _MM_SHUFFLE(3, 1, 2, 0))));
}
#endif

// Weights x values of codes: 12 accumulators (6 rows x the 2 registers of a panel), 2 registers of codes, one of a
// row's weights, one of products.
inline constexpr std::size_t kPairTileRows = 6;
inline constexpr std::size_t kPairTileVectors = 12;
template <std::size_t Pairs>
inline constexpr std::int32_t kPairCodeOffset = Pairs == 1 ? 0 : 8;
HEADLONG_INLINE __m256i broadcast_pair(const std::int16_t* p) noexcept {
    std::int32_t pair = 0;
    std::memcpy(&pair, p, sizeof pair);
    return _mm256_set1_epi32(pair);
}
template <std::size_t Pairs>
HEADLONG_INLINE __m256i load_pair_codes(const std::uint8_t* line, std::size_t pair, std::size_t v) noexcept {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + v * 16));
    if constexpr (Pairs == 1) return _mm256_cvtepi8_epi16(bytes);
    const __m256i both = _mm256_cvtepu8_epi16(bytes);
    return pair == 0 ? _mm256_and_si256(both, _mm256_set1_epi16(0x0F)) : _mm256_srli_epi16(both, 4);
}
HEADLONG_INLINE void add_pairs(I32& sum, __m256i weights, __m256i codes) noexcept {
#if defined(HEADLONG_ISA_AVX2VNNI)
    sum = _mm256_dpwssd_avx_epi32(sum, codes, weights);
    hide(sum);
#else
    add_in_place(sum, _mm256_madd_epi16(codes, weights));
#endif
}
HEADLONG_INLINE void store_weight_codes(std::int16_t* p, const F32 (&weights)[2], I32& sums) noexcept {
    const __m256i x = _mm256_packs_epi32(_mm256_cvttps_epi32(weights[0]), _mm256_cvttps_epi32(weights[1]));
    const __m256i codes = _mm256_permute4x64_epi64(x, _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(codes, _mm256_set1_epi16(1)));
}

}  // namespace headlong::HEADLONG_ISA
