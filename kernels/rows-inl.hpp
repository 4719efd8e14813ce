// Operations on single rows: normalisation, rotary embedding, activation. Compiled per instruction set.
#pragma once

#include "kernels/exp2-inl.hpp"
#include "kernels/kernel_table.hpp"
#include "kernels/reduce-inl.hpp"

namespace headlong::HEADLONG_ISA {

inline void rms_norm(const kernels::RmsNorm& a) noexcept {
    for (std::size_t r = 0; r < a.row_count; ++r) {
        const float* x = a.rows + r * a.row_stride;
        float* out = a.out + r * a.out_stride;
        F32 sums[kPanelVectors];
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) sums[v] = broadcast(0.0F);
        std::size_t c = 0;
        for (; c + 16 <= a.columns; c += 16) {
            HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
                const F32 y = load(x + c + v * kLanes);
                sums[v] = fma(y, y, sums[v]);
            }
        }
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
            const std::size_t start = c + v * kLanes;
            if (start < a.columns) {
                const std::size_t left = a.columns - start;
                const F32 y = load_n(x + start, left < kLanes ? left : kLanes);
                sums[v] = fma(y, y, sums[v]);
            }
        }
        float partial[16];
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) store(partial + v * kLanes, sums[v]);
        const float mean = reduce_tree(partial) / static_cast<float>(a.columns);
        const F32 factor = broadcast(1.0F / __builtin_sqrtf(mean + a.epsilon));
        for (c = 0; c < a.columns; c += kLanes) {
            const std::size_t n = a.columns - c < kLanes ? a.columns - c : kLanes;
            store_n(out + c, load_n(x + c, n) * factor * load_n(a.weight + c, n), n);
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

inline void swiglu(const kernels::SwiGlu& a) noexcept {
    constexpr float kLog2E = 0x1.715476p+0F;
    for (std::size_t c = 0; c < a.count; c += kLanes) {
        const std::size_t n = a.count - c < kLanes ? a.count - c : kLanes;
        const F32 gate = load_n(a.gate + c, n);
        // -max(gate * log2(e), -126): where the bound bites, the sigmoid is under 2^-125
        const F32 exponential = exp2(broadcast(0.0F) - max(gate * broadcast(kLog2E), broadcast(-126.0F)));
        const F32 sigmoid = divide(broadcast(1.0F), broadcast(1.0F) + exponential);
        store_n(a.out + c, gate * sigmoid * load_n(a.up + c, n), n);
    }
}

inline void hadamard(const kernels::Hadamard& a) noexcept {
    const std::size_t block = a.columns & (~a.columns + 1);  // its lowest bit
    const float unit = 1.0F / __builtin_sqrtf(static_cast<float>(block));
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
