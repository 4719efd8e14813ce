// Runs on every processor: the compiler's own four-lane vectors, which become SSE2, NEON or plain scalar code.
// Multiply-add is a multiplication and an addition here: std::fma would be a library call without FMA hardware.
#pragma once

namespace headlong::HEADLONG_ISA {

inline constexpr std::size_t kLanes = 4;
using F32 = HEADLONG_VECTOR_OF(float);
using U32 = HEADLONG_VECTOR_OF(std::uint32_t);

// 16 registers: 3 x 4 accumulators, 4 of the panel row; the broadcast is folded into them one by one
inline constexpr std::size_t kTileRows = 3;
inline constexpr std::size_t kTileVectors = 12;

HEADLONG_INLINE U32 bits(F32 x) noexcept { return reinterpret_cast<U32>(x); }
HEADLONG_INLINE F32 from_bits(U32 x) noexcept { return reinterpret_cast<F32>(x); }
HEADLONG_INLINE F32 select(U32 mask, F32 yes, F32 no) noexcept {
    return from_bits((mask & bits(yes)) | (~mask & bits(no)));
}

HEADLONG_INLINE F32 load(const float* p) noexcept {
    F32 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
HEADLONG_INLINE void store(float* p, F32 x) noexcept { std::memcpy(p, &x, sizeof x); }
HEADLONG_INLINE F32 broadcast(float x) noexcept { return F32{x, x, x, x}; }
HEADLONG_INLINE float first_lane(F32 x) noexcept { return x[0]; }
HEADLONG_INLINE F32 fma(F32 a, F32 b, F32 c) noexcept { return a * b + c; }
HEADLONG_INLINE F32 max(F32 a, F32 b) noexcept { return select(reinterpret_cast<U32>(a > b), a, b); }

HEADLONG_INLINE F32 divide(F32 a, F32 b) noexcept { return a / b; }

HEADLONG_INLINE F32 load_n(const float* p, std::size_t n) noexcept {
    F32 x{};
    std::memcpy(&x, p, n * sizeof(float));
    return x;
}
HEADLONG_INLINE void store_n(float* p, F32 x, std::size_t n) noexcept { std::memcpy(p, &x, n * sizeof(float)); }

// 1.5 * 2^23: adding it rounds to a whole number, for |x| < 2^22
inline constexpr float kRoundingMagic = 12582912.0F;
HEADLONG_INLINE F32 round_nearest(F32 x) noexcept {
    return (x + broadcast(kRoundingMagic)) - broadcast(kRoundingMagic);
}
struct Power {
    F32 exponent;
    F32 factor;
};
HEADLONG_INLINE Power nearest_power(F32 x) noexcept {
    const F32 sum = x + broadcast(kExponentMagic);
    return {sum - broadcast(kExponentMagic), from_bits(bits(sum) << 23U)};
}
HEADLONG_INLINE F32 scale(F32 p, Power n) noexcept { return p * n.factor; }
HEADLONG_INLINE F32 zero_below(F32 x, float limit, F32 y) noexcept {
    return select(reinterpret_cast<U32>(x < broadcast(limit)), F32{}, y);
}
HEADLONG_INLINE F32 select_lanes(std::uint32_t begin, std::uint32_t end, F32 inside, F32 outside) noexcept {
    const U32 lane{0, 1, 2, 3};
    const U32 mask = reinterpret_cast<U32>(lane >= begin) & reinterpret_cast<U32>(lane < end);
    return select(mask, inside, outside);
}
HEADLONG_INLINE F32 select_below(F32 x, float limit, F32 yes, F32 no) noexcept {
    return select(reinterpret_cast<U32>(x < broadcast(limit)), yes, no);
}
HEADLONG_INLINE F32 select_bytes(const std::uint8_t* p, F32 yes, F32 no) noexcept {
    const U32 lanes{p[0], p[1], p[2], p[3]};
    return select(reinterpret_cast<U32>(lanes != U32{}), yes, no);
}
HEADLONG_INLINE F32 absolute(F32 x) noexcept { return from_bits(bits(x) & 0x7FFFFFFFU); }
HEADLONG_INLINE F32 copy_sign(F32 magnitude, F32 sign) noexcept {
    return from_bits((bits(magnitude) & 0x7FFFFFFFU) | (bits(sign) & 0x80000000U));
}
HEADLONG_INLINE F32 widen_f16(const std::uint16_t* p) noexcept {
    return F32{kernels::widen_f16(p[0]), kernels::widen_f16(p[1]), kernels::widen_f16(p[2]), kernels::widen_f16(p[3])};
}
HEADLONG_INLINE F32 widen_bf16(const std::uint16_t* p) noexcept {
    return from_bits(U32{p[0], p[1], p[2], p[3]} << 16U);
}
HEADLONG_INLINE void narrow_f16(std::uint16_t* p, F32 x) noexcept {
    for (std::size_t i = 0; i < kLanes; ++i) p[i] = kernels::narrow_f16(x[i]);
}
HEADLONG_INLINE bool any_nan(F32 x) noexcept {
    const U32 nan = reinterpret_cast<U32>(x != x);
    return (nan[0] | nan[1] | nan[2] | nan[3]) != 0;
}
HEADLONG_INLINE F32 canonical_nan(F32 x) noexcept {
    const U32 nan{0x7FC00000U, 0x7FC00000U, 0x7FC00000U, 0x7FC00000U};
    return select(reinterpret_cast<U32>(x != x), from_bits(nan), x);
}

HEADLONG_INLINE F32 even_lanes(F32 a, F32 b) noexcept { return F32{a[0], a[2], b[0], b[2]}; }
HEADLONG_INLINE F32 odd_lanes(F32 a, F32 b) noexcept { return F32{a[1], a[3], b[1], b[3]}; }
HEADLONG_INLINE F32 zip_low(F32 a, F32 b) noexcept { return F32{a[0], b[0], a[1], b[1]}; }
HEADLONG_INLINE F32 zip_high(F32 a, F32 b) noexcept { return F32{a[2], b[2], a[3], b[3]}; }

// Plain 32-bit products: what the compiler makes of them is all that is sure to be there.
using I32 = U32;
using DotOperand = U32;
inline constexpr std::size_t kDotProducts = 4;
inline constexpr bool kDotFused = false;
HEADLONG_INLINE I32 zero_i32() noexcept { return I32{}; }
HEADLONG_INLINE DotOperand dot_ones() noexcept { return U32{1, 1, 1, 1}; }
HEADLONG_INLINE I32 dot_add(I32 sums, DotOperand a, DotOperand b) noexcept { return sums + a * b; }
#if defined(__x86_64__) || defined(__aarch64__)
template <class Vector>
HEADLONG_INLINE void hide(Vector& x) noexcept {
    HEADLONG_HIDE(HEADLONG_VECTOR_REGISTER, x);
}
#else
template <class Vector>
HEADLONG_INLINE void hide(Vector& x) noexcept {
    HEADLONG_HIDE(HEADLONG_MEMORY, x);
}
#endif

inline constexpr std::size_t kTransposeColumns = 4;
HEADLONG_INLINE void transpose_16(const float* rows, std::ptrdiff_t stride, float* panel) noexcept {
    for (std::ptrdiff_t row = 0; row < 16; ++row) {
        const F32 x = load(rows + row * stride);
        for (std::ptrdiff_t column = 0; column < 4; ++column) panel[column * 16 + row] = x[column];
    }
}

HEADLONG_INLINE I32 broadcast_i32(std::int32_t x) noexcept { return U32{} + static_cast<std::uint32_t>(x); }
HEADLONG_INLINE I32 add_i32(I32 a, I32 b) noexcept { return a + b; }
HEADLONG_INLINE F32 to_f32(I32 x) noexcept {
    using S32 = HEADLONG_VECTOR_OF(std::int32_t);
    return HEADLONG_CONVERT_VECTOR(reinterpret_cast<S32>(x), F32);
}

HEADLONG_INLINE I32 load_i32(const float* p) noexcept { return bits(load(p)); }
HEADLONG_INLINE void store_i32(float* p, I32 x) noexcept { store(p, from_bits(x)); }

// Four vectors of 4 columns: a column's four codes are one number, of which each byte is taken in turn. Products are
// mod 2^32, which is what signed ones are as well.
inline constexpr std::size_t kLineParts = 1;
template <std::size_t Quads>
inline constexpr std::int32_t kCodeOffset = Quads == 1 ? 128 : 8;
inline constexpr std::size_t kCodeTileRows = 2;  // 8 accumulators: a 32-bit product takes registers in SSE2
inline constexpr std::size_t kCodeTilePanels = 1;
inline constexpr std::size_t kQuadSums = 4;
inline constexpr std::size_t kQuadLatency = 4;
inline constexpr bool kCodeTerms = false;
template <std::size_t Quads, std::size_t Rows, std::size_t Panels>
HEADLONG_INLINE void add_line(I32 (&sums)[Rows][Panels][kQuadSums], const std::uint8_t* line, std::size_t panel_stride,
                              const std::uint8_t* rows, std::size_t row_stride, std::size_t) noexcept {
    constexpr std::uint32_t kMask = Quads == 1 ? 0xFFU : 0x0FU;
    HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
        HEADLONG_UNROLL for (std::size_t i = 0; i < kQuadSums; ++i) {
            U32 w;
            std::memcpy(&w, line + p * panel_stride + i * sizeof w, sizeof w);
            HEADLONG_UNROLL for (std::uint32_t quad = 0; quad < Quads; ++quad) {
                HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                    std::int16_t x[4];
                    std::memcpy(x, rows + r * row_stride + quad * sizeof x, sizeof x);
                    HEADLONG_UNROLL for (std::uint32_t input = 0; input < 4; ++input) {
                        const U32 codes = w >> (8U * input + 4U * quad) & kMask;
                        sums[r][p][i] = sums[r][p][i] + codes * broadcast_i32(x[input]);
                    }
                }
            }
        }
    }
}
HEADLONG_INLINE void quad_totals(const I32 (&sums)[kQuadSums], I32 (&totals)[4]) noexcept {
    HEADLONG_UNROLL for (std::size_t i = 0; i < 4; ++i) totals[i] = sums[i];
}
HEADLONG_INLINE void store_row_quads(std::uint8_t* p, F32 first, F32 second) noexcept {
    const F32 x = first * broadcast(254.0F) + second;
    for (std::size_t i = 0; i < kLanes; ++i) {
        const auto code = static_cast<std::int16_t>(x[i]);
        std::memcpy(p + i * sizeof code, &code, sizeof code);
    }
}

inline constexpr std::size_t kPairTileRows = 2;  // as above
inline constexpr std::size_t kPairTileVectors = 8;
template <std::size_t Pairs>
inline constexpr std::int32_t kPairCodeOffset = Pairs == 1 ? 0 : 8;
/// Of two tokens: a row's weights in every lane, or the codes of 4 columns.
struct PairOperand {
    U32 first;
    U32 second;
};
HEADLONG_INLINE PairOperand broadcast_pair(const std::int16_t* p) noexcept {
    return {broadcast_i32(p[0]), broadcast_i32(p[1])};
}
template <std::size_t Pairs>
HEADLONG_INLINE PairOperand load_pair_codes(const std::uint8_t* line, std::size_t pair, std::size_t v) noexcept {
    const auto code = [line, pair, v](std::size_t i) noexcept {
        const std::uint8_t byte = line[v * 8 + i];
        return Pairs == 1 ? static_cast<std::uint32_t>(static_cast<std::int8_t>(byte))
                          : static_cast<std::uint32_t>(byte) >> 4U * pair & 0x0FU;
    };
    return {U32{code(0), code(2), code(4), code(6)}, U32{code(1), code(3), code(5), code(7)}};
}
HEADLONG_INLINE void add_pairs(I32& sum, const PairOperand& weights, const PairOperand& codes) noexcept {
    sum = sum + weights.first * codes.first + weights.second * codes.second;
}
HEADLONG_INLINE void store_weight_codes(std::int16_t* p, const F32 (&weights)[4], I32& sums) noexcept {
    for (std::size_t v = 0; v < 4; ++v) {
        for (std::size_t i = 0; i < kLanes; ++i) {
            const auto code = static_cast<std::int16_t>(weights[v][i]);
            p[v * kLanes + i] = code;
            sums[i] += static_cast<std::uint32_t>(code);
        }
    }
}

}  // namespace headlong::HEADLONG_ISA
