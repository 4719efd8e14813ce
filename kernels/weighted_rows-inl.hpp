// Weights x value rows: the output of one span. Compiled per instruction set.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/tiles-inl.hpp"

namespace headlong::HEADLONG_ISA {

/// The tokens [first, last) of one block, added to what `out` holds. The accumulators pass through memory once per
/// block of 64 tokens, which changes no bit and keeps the block's rows in L1 for all columns.
struct WeightedTile {
    const kernels::WeightedRows& a;
    const float* values;  ///< row of token `first`
    std::size_t first;    ///< token in the span
    std::size_t count;
    bool fresh;  ///< nothing has been added yet: start from +0

    template <std::size_t Rows, std::size_t Panels>
    HEADLONG_INLINE void operator()(std::size_t row, std::size_t panel) const noexcept {
        constexpr std::size_t kVectors = Panels * kPanelVectors;
        const float* weights = a.weights + row * a.weight_stride + first;
        const float* value = values + panel * 16;
        float* out = a.out + row * a.out_stride + panel * 16;

        F32 sums[Rows][kVectors];
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                sums[r][v] = fresh ? broadcast(0.0F) : load(out + r * a.out_stride + v * kLanes);
            }
        }
        for (std::size_t t = 0; t < count; ++t) {
            F32 columns[kVectors];
            HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) columns[v] = load(value + v * kLanes);
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                const F32 weight = broadcast(weights[r * a.weight_stride + t]);
                HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                    sums[r][v] = fma(weight, columns[v], sums[r][v]);
                }
            }
            value += a.value_pitch;
        }
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                store(out + r * a.out_stride + v * kLanes, sums[r][v]);
            }
        }
    }
};

HEADLONG_INLINE bool is_masked(float weight) noexcept {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &weight, sizeof bits);
    return bits == 0x80000000U;
}

/// The same sums in the same order, but a masked token is skipped instead of multiplied: 0 * NaN would be NaN.
inline void weighted_block_guarded(const WeightedTile& tile) noexcept {
    const kernels::WeightedRows& a = tile.a;
    for (std::size_t r = 0; r < a.row_count; ++r) {
        const float* weights = a.weights + r * a.weight_stride + tile.first;
        float* out = a.out + r * a.out_stride;
        if (tile.fresh) {
            for (std::size_t c = 0; c < a.columns; c += kLanes) store(out + c, broadcast(0.0F));
        }
        for (std::size_t t = 0; t < tile.count; ++t) {
            if (is_masked(weights[t])) continue;
            const float* value = tile.values + t * a.value_pitch;
            const F32 weight = broadcast(weights[t]);
            for (std::size_t c = 0; c < a.columns; c += kLanes) {
                store(out + c, fma(weight, load(value + c), load(out + c)));
            }
        }
    }
}

inline void weighted_rows(const kernels::WeightedRows& a) noexcept {
    if (a.first >= a.last) {
        for (std::size_t r = 0; r < a.row_count; ++r) {
            for (std::size_t c = 0; c < a.columns; c += kLanes) store(a.out + r * a.out_stride + c, broadcast(0.0F));
        }
        return;
    }
    for (std::size_t token = a.first; token < a.last;) {
        const std::size_t block = token / kernels::kBlockTokens;
        const std::size_t block_end = (block + 1) * kernels::kBlockTokens;
        const std::size_t end = block_end < a.last ? block_end : a.last;
        const float* values = a.value_blocks[block] + token % kernels::kBlockTokens * a.value_pitch;
        const WeightedTile tile{a, values, token, end - token, token == a.first};
        if ((a.nonfinite_blocks >> block & 1U) != 0) {
            weighted_block_guarded(tile);
        } else {
            for_tiles(a.row_count, a.columns / 16, tile);
        }
        token = end;
    }
}

}  // namespace headlong::HEADLONG_ISA
