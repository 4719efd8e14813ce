// Operations on single rows: normalisation, rotary embedding, activation. Compiled per instruction set.
#pragma once

#include "kernels/exp2-inl.hpp"
#include "kernels/kernel_table.hpp"
#include "kernels/reduce-inl.hpp"

namespace headlong::HEADLONG_ISA {

/// Sum of y(x)^2 over a row, or of y(x): one partial sum per column mod 16, then the tree.
template <bool kSquares, class Value>
HEADLONG_INLINE float sum_row(const float* x, std::size_t columns, const Value& value) noexcept {
    const auto add = [](F32 y, F32 sum) noexcept { return kSquares ? fma(y, y, sum) : y + sum; };
    F32 sums[kPanelVectors];
    HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) sums[v] = broadcast(0.0F);
    std::size_t c = 0;
    for (; c + 16 <= columns; c += 16) {
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
            sums[v] = add(value(load(x + c + v * kLanes)), sums[v]);
        }
    }
    HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
        const std::size_t start = c + v * kLanes;
        if (start < columns) {
            const std::size_t left = columns - start;
            const std::size_t n = left < kLanes ? left : kLanes;
            const F32 y = value(load_n(x + start, n));
            const F32 zero = broadcast(0.0F);
            sums[v] = add(n < kLanes ? select_lanes(0, static_cast<std::uint32_t>(n), y, zero) : y, sums[v]);
        }
    }
    float partial[16];
    HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) store(partial + v * kLanes, sums[v]);
    return reduce_tree(partial);
}

inline void rms_norm(const kernels::RmsNorm& a) noexcept {
    for (std::size_t r = 0; r < a.row_count; ++r) {
        const float* x = a.rows + r * a.row_stride;
        float* out = a.out + r * a.out_stride;
        const auto same = [](F32 y) noexcept { return y; };
        const float mean = sum_row<true>(x, a.columns, same) / static_cast<float>(a.columns);
        const F32 factor = broadcast(1.0F / compiler::square_root(mean + a.epsilon));
        for (std::size_t c = 0; c < a.columns; c += kLanes) {
            const std::size_t n = a.columns - c < kLanes ? a.columns - c : kLanes;
            store_n(out + c, load_n(x + c, n) * factor * load_n(a.weight + c, n), n);
        }
    }
}

inline void layer_norm(const kernels::LayerNorm& a) noexcept {
    const auto count = static_cast<float>(a.columns);
    for (std::size_t r = 0; r < a.row_count; ++r) {
        const float* x = a.rows + r * a.row_stride;
        float* out = a.out + r * a.out_stride;
        const F32 mean = broadcast(sum_row<false>(x, a.columns, [](F32 y) noexcept { return y; }) / count);
        const auto centred = [&](F32 y) noexcept { return y - mean; };
        const float variance = sum_row<true>(x, a.columns, centred) / count;
        const F32 factor = broadcast(1.0F / compiler::square_root(variance + a.epsilon));
        for (std::size_t c = 0; c < a.columns; c += kLanes) {
            const std::size_t n = a.columns - c < kLanes ? a.columns - c : kLanes;
            const F32 normal = centred(load_n(x + c, n)) * factor;
            store_n(out + c, fma(normal, load_n(a.weight + c, n), load_n(a.bias + c, n)), n);
        }
    }
}

/// Both pairings compute a pair by these, and so give it the same bits. Rounded thrice, on every set: a saved cache of
/// rotated keys has the same bytes whichever wrote it.
HEADLONG_INLINE F32 rotated_x(F32 x, F32 y, F32 cosine, F32 sine) noexcept { return x * cosine - y * sine; }
HEADLONG_INLINE F32 rotated_y(F32 x, F32 y, F32 cosine, F32 sine) noexcept { return y * cosine + x * sine; }

inline void rotate_halves(float* first, const kernels::Rotate& a) noexcept {
    float* second = first + a.half;
    for (std::size_t i = 0; i < a.half; i += kLanes) {
        const std::size_t n = a.half - i < kLanes ? a.half - i : kLanes;
        const F32 x = load_n(first + i, n);
        const F32 y = load_n(second + i, n);
        const F32 cosine = load_n(a.cosine + i, n);
        const F32 sine = load_n(a.sine + i, n);
        store_n(first + i, rotated_x(x, y, cosine, sine), n);
        store_n(second + i, rotated_y(x, y, cosine, sine), n);
    }
}

inline void rotate_interleaved(float* head, const kernels::Rotate& a) noexcept {
    for (std::size_t i = 0; i < a.half; i += kLanes) {
        const std::size_t n = a.half - i < kLanes ? a.half - i : kLanes;
        const std::size_t low = 2 * n < kLanes ? 2 * n : kLanes;
        float* p = head + 2 * i;
        const F32 first = load_n(p, low);
        const F32 second = load_n(p + low, 2 * n - low);
        const F32 x = even_lanes(first, second);
        const F32 y = odd_lanes(first, second);
        const F32 cosine = load_n(a.cosine + i, n);
        const F32 sine = load_n(a.sine + i, n);
        const F32 new_x = rotated_x(x, y, cosine, sine);
        const F32 new_y = rotated_y(x, y, cosine, sine);
        store_n(p, zip_low(new_x, new_y), low);
        store_n(p + low, zip_high(new_x, new_y), 2 * n - low);
    }
}

inline void rotate(const kernels::Rotate& a) noexcept {
    for (std::size_t h = 0; h < a.heads; ++h) {
        float* head = a.row + h * a.head_stride;
        a.interleaved ? rotate_interleaved(head, a) : rotate_halves(head, a);
    }
}

HEADLONG_INLINE F32 sigmoid(F32 x) noexcept {
    constexpr float kLog2E = 0x1.715476p+0F;
    // -max(x * log2(e), -126): where the bound bites, the sigmoid is under 2^-125
    const F32 exponential = exp2(broadcast(0.0F) - max(x * broadcast(kLog2E), broadcast(-126.0F)));
    return divide(broadcast(1.0F), broadcast(1.0F) + exponential);
}

// erfc(z) = t exp2(R(t) - z^2 log2(e)) for z >= 0 with t = 1 / (1 + z / 2), the form of Numerical Recipes' erfc. R is
// minimax of degree 9, found like exp2's for z up to 10.5, where erfc is below 2^-149: relative error 4.8e-8 in exact
// arithmetic, 2.7e-7 in floats. From the constant term on.
inline constexpr float kErfc[] = {-0x1.d35ea2p+0F, 0x1.70dc06p+0F,  0x1.1d0dcep-1F, 0x1.bee186p-5F,  -0x1.5d8e4ep-7F,
                                  -0x1.818a1cp-4F, -0x1.076036p+0F, 0x1.af95fap+0F, -0x1.fa63b8p-1F, 0x1.aea41ap-3F};

/// The normal distribution function.
HEADLONG_INLINE F32 normal_distribution(F32 x) noexcept {
    constexpr float kSqrtHalf = 0x1.6a09e6p-1F;
    constexpr float kMinusLog2E = -0x1.715476p+0F;
    const F32 z = absolute(x) * broadcast(kSqrtHalf);
    const F32 t = divide(broadcast(1.0F), fma(z, broadcast(0.5F), broadcast(1.0F)));
    F32 r = broadcast(kErfc[9]);
    HEADLONG_UNROLL for (std::size_t i = 9; i-- > 0;) r = fma(r, t, broadcast(kErfc[i]));
    const F32 half = t * exp2(fma(z * z, broadcast(kMinusLog2E), r)) * broadcast(0.5F);  // of erfc(z)
    return select_below(x, 0.0F, half, broadcast(1.0F) - half);
}

HEADLONG_INLINE F32 activated(kernels::Activation activation, F32 x) noexcept {
    switch (activation) {
        case kernels::Activation::gelu:
            return x * normal_distribution(x);
        case kernels::Activation::gelu_tanh: {
            constexpr float kTwiceSqrt2OverPi = 0x1.988454p+0F;
            constexpr float kCubic = 0x1.2444f2p-4F;  // 0.044715 times that
            return x * sigmoid(x * fma(x * x, broadcast(kCubic), broadcast(kTwiceSqrt2OverPi)));
        }
        default:
            return x * sigmoid(x);
    }
}

inline void activate(const kernels::Activate& a) noexcept {
    // the second operand of max() is what a NaN of either leaves
    const auto at_most = [](F32 x, F32 most) noexcept {
        const F32 zero = broadcast(0.0F);
        return zero - max(zero - most, zero - x);
    };
    for (std::size_t c = 0; c < a.count; c += kLanes) {
        const std::size_t n = a.count - c < kLanes ? a.count - c : kLanes;
        const F32 gate = load_n(a.gate + c, n);
        if (a.activation == kernels::Activation::clamped_silu) {
            const F32 limit = broadcast(a.limit);
            const F32 low = at_most(gate, limit);
            const F32 up = max(broadcast(0.0F) - limit, at_most(load_n(a.up + c, n), limit));
            store_n(a.out + c, low * sigmoid(low * broadcast(1.702F)) * (up + broadcast(1.0F)), n);
        } else {
            const F32 y = activated(a.activation, gate);
            store_n(a.out + c, a.up != nullptr ? y * load_n(a.up + c, n) : y, n);
        }
    }
}

inline void add_scaled(const kernels::AddScaled& a) noexcept {
    for (std::size_t c = 0; c < a.count; c += kLanes) {
        const std::size_t n = a.count - c < kLanes ? a.count - c : kLanes;
        store_n(a.out + c, fma(load_n(a.rows + c, n), broadcast(a.factor), load_n(a.out + c, n)), n);
    }
}

inline void hadamard(const kernels::Hadamard& a) noexcept {
    const std::size_t block = a.columns & (~a.columns + 1);  // its lowest bit
    const float unit = 1.0F / compiler::square_root(static_cast<float>(block));
    for (std::size_t r = 0; r < a.row_count; ++r) {
        float* row = a.rows + r * a.row_stride;
        for (std::size_t c = 0; c < a.columns; ++c) row[c] *= unit;  // first: sums stay in range
        for (std::size_t half = 1; half < block; half *= 2) {
            for (std::size_t c = 0; c < a.columns; c += 2 * half) {
                std::size_t i = c;
                for (; i + kLanes <= c + half; i += kLanes) {
                    const F32 x = load(row + i);
                    const F32 y = load(row + i + half);
                    store(row + i, x + y);
                    store(row + i + half, x - y);
                }
                for (; i < c + half; ++i) {
                    const float x = row[i];
                    const float y = row[i + half];
                    row[i] = x + y;
                    row[i + half] = x - y;
                }
            }
        }
    }
}

}  // namespace headlong::HEADLONG_ISA
