// Weights x value panels: the output of one span. Compiled per instruction set.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/source-inl.hpp"
#include "kernels/tiles-inl.hpp"

namespace headlong::HEADLONG_ISA {

/// The tokens [first, last), added to what `out` holds: sums may go through memory, which changes no bit.
template <class Elements>
struct WeightedTile {
    using Tiles = FloatTiles;
    const kernels::WeightedRows& a;
    std::size_t first;
    std::size_t last;

    /// The first value panel of the block that holds a token, from that token on.
    HEADLONG_INLINE const typename Elements::Element* values(std::size_t token) const noexcept {
        return static_cast<const typename Elements::Element*>(a.value_blocks[token / kernels::kBlockTokens]) +
               token % kernels::kBlockTokens * 16;
    }
    /// Where the block of a token ends, or the tokens do.
    HEADLONG_INLINE std::size_t block_end(std::size_t token) const noexcept {
        const std::size_t end = (token / kernels::kBlockTokens + 1) * kernels::kBlockTokens;
        return end < last ? end : last;
    }
    /// What is read after the block of a token.
    HEADLONG_INLINE const void* after(std::size_t token) const noexcept {
        const std::size_t end = (token / kernels::kBlockTokens + 1) * kernels::kBlockTokens;
        return end < a.last ? a.value_blocks[end / kernels::kBlockTokens] : a.next;
    }
    /// Nothing has been added yet: start from +0.
    HEADLONG_INLINE bool fresh() const noexcept { return first == a.first; }

    template <std::size_t Rows, std::size_t Panels>
    HEADLONG_INLINE void operator()(std::size_t row, std::size_t panel) const noexcept {
        constexpr std::size_t kVectors = Panels * kPanelVectors;
        const float* weights = a.weights + row * a.weight_stride;
        float* out = a.out + row * a.out_stride + panel * 16;

        F32 sums[Rows][kVectors];
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                sums[r][v] = fresh() ? broadcast(0.0F) : load(out + r * a.out_stride + v * kLanes);
            }
        }
        for (std::size_t token = first; token < last; token = block_end(token)) {
            const auto* value = values(token) + panel * kernels::kValuePanel;
            const float* weight = weights + token;
            const std::size_t count = block_end(token) - token;
            const auto step = [&](std::size_t t) noexcept {
                multiply_add(
                    sums, [&](std::size_t r) noexcept { return broadcast(weight[r * a.weight_stride + t]); },
                    [&](std::size_t v) noexcept {
                        return Elements::load(value + v / kPanelVectors * kernels::kValuePanel + t * 16 +
                                              v % kPanelVectors * kLanes);
                    });
            };
            constexpr std::size_t kElement = sizeof(typename Elements::Element);
            const Ahead ahead(a.value_blocks[token / kernels::kBlockTokens],
                              kernels::kBlockTokens * a.columns * kElement, after(token), a.row_count);
            for_steps<Tiles, Rows, Panels>(count, step, [&](std::size_t t) noexcept {
                if (row != 0) return;  // the others find them near
                HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                    ahead.ask<kStepsAtOnce * 16 * kElement>(value + p * kernels::kValuePanel + t * 16);
                }
            });
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
template <class Elements>
void weighted_block_guarded(const WeightedTile<Elements>& tile) noexcept {
    const kernels::WeightedRows& a = tile.a;
    const auto* values = tile.values(tile.first);
    for (std::size_t r = 0; r < a.row_count; ++r) {
        const float* weights = a.weights + r * a.weight_stride + tile.first;
        float* out = a.out + r * a.out_stride;
        if (tile.fresh()) {
            for (std::size_t c = 0; c < a.columns; c += kLanes) store(out + c, broadcast(0.0F));
        }
        for (std::size_t t = 0; t < tile.last - tile.first; ++t) {
            if (is_masked(weights[t])) continue;
            const F32 weight = broadcast(weights[t]);
            for (std::size_t c = 0; c < a.columns; c += kLanes) {
                store(out + c, fma(weight, Elements::load(values + kernels::value_index(t, c)), load(out + c)));
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
    with_elements(a.type, [&a](auto elements) {
        const auto guarded = [&a](std::size_t token) noexcept {
            return (a.nonfinite_blocks >> token / kernels::kBlockTokens & 1U) != 0;
        };
        WeightedTile<decltype(elements)> run{a, a.first, a.last};
        for (; run.first < a.last; run.first = run.last) {
            run.last = a.last;  // for block_end()
            run.last = run.block_end(run.first);
            if (guarded(run.first)) {
                weighted_block_guarded(run);
                continue;
            }
            // Many rows keep their sums in registers through all blocks: loading and storing them costs as much as a
            // dozen tokens.
            while (a.row_count >= kManyRows && run.last < a.last && !guarded(run.last)) {
                const std::size_t next = run.last + kernels::kBlockTokens;
                run.last = next < a.last ? next : a.last;
            }
            for_tiles(a.row_count, a.columns / 16, run);
        }
    });
}

}  // namespace headlong::HEADLONG_ISA
