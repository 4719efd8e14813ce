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
HEADLONG_INLINE F32 scale_by_power_of_two(F32 p, F32 n) noexcept { return _mm512_scalef_ps(p, n); }
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
HEADLONG_INLINE void hide(__m512i& x) noexcept { asm volatile("" : "+v"(x)); }
HEADLONG_INLINE void hide(F32& x) noexcept {
    __m512 bits = x;
    asm volatile("" : "+v"(bits));
    x = bits;
}

#include "kernels/simd/transpose_avx2-inl.hpp"

}  // namespace headlong::HEADLONG_ISA
