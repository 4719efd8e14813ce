// Rows x panels: scores of a query tile, or outputs of a linear layer. Compiled per instruction set.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/source-inl.hpp"
#include "kernels/tiles-inl.hpp"

namespace headlong::HEADLONG_ISA {

template <class Elements>
struct DotTile {
    using Tiles = FloatTiles;
    const kernels::DotPanels& a;

    std::size_t panel_bytes() const noexcept { return a.panel_stride * sizeof(typename Elements::Element); }

    /// Lane by lane a sum over the depth in ascending order, from +0 or from what `out` holds: the order is the
    /// same for every tile shape, so a score does not depend on its place in a tile.
    template <std::size_t Rows, std::size_t Panels>
    HEADLONG_INLINE void operator()(std::size_t row, std::size_t panel) const noexcept {
        constexpr std::size_t kVectors = Panels * kPanelVectors;
        const float* rows = a.rows + row * a.row_stride;
        const auto* panels = static_cast<const typename Elements::Element*>(a.panels) + panel * a.panel_stride;
        float* out = a.out + row * a.out_stride + panel * 16;
        const std::size_t columns = a.columns - panel * 16;  // valid ones from here on; the tile may have fewer
        const bool whole = columns >= Panels * 16;

        F32 sums[Rows][kVectors];
        if (a.accumulate) {
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                    const float* p = out + r * a.out_stride + v * kLanes;
                    sums[r][v] = whole ? load(p) : load_n(p, lanes_left(columns, v));
                }
            }
        } else {
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) sums[r][v] = broadcast(0.0F);
            }
        }

        if (panel == 0 && row + 2 * Rows <= a.row_count) prefetch_rows<Rows>(rows + Rows * a.row_stride);
        const auto step = [&](std::size_t k) noexcept {
            multiply_add(
                sums, [&](std::size_t r) noexcept { return broadcast(rows[r * a.row_stride + k]); },
                [&](std::size_t v) noexcept {
                    return Elements::load(panels + v / kPanelVectors * a.panel_stride + k * 16 +
                                          v % kPanelVectors * kLanes);
                });
        };
        constexpr std::size_t kElement = sizeof(typename Elements::Element);
        const Ahead ahead(a.panels, (a.columns + 15) / 16 * a.panel_stride * kElement, a.next, a.row_count);
        for_steps<Tiles, Rows, Panels>(a.depth, step, [&](std::size_t k) noexcept {
            if (row != 0) return;  // the others find them near
            HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                ahead.ask<kStepsAtOnce * 16 * kElement>(panels + p * a.panel_stride + k * 16);
            }
        });

        if (a.canonical) {
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) sums[r][v] = canonical_nan(sums[r][v]);
            }
        }
        if (whole) {
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                    store(out + r * a.out_stride + v * kLanes, sums[r][v]);
                }
            }
        } else {
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                    store_n(out + r * a.out_stride + v * kLanes, sums[r][v], lanes_left(columns, v));
                }
            }
        }
    }

    /// Asks for the rows of the next tile: the first panel finds them outside of L1, and where the rows of a matrix lie
    /// apart the processor does not guess.
    template <std::size_t Rows>
    HEADLONG_INLINE void prefetch_rows(const float* next) const noexcept {
        for (std::size_t k = 0; k < a.depth; k += 16) {
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) compiler::prefetch(next + r * a.row_stride + k);
        }
    }

    /// Valid lanes of vector v when `columns` are left from the tile's start.
    HEADLONG_INLINE static std::size_t lanes_left(std::size_t columns, std::size_t v) noexcept {
        const std::size_t start = v * kLanes;
        if (columns <= start) return 0;
        return columns - start < kLanes ? columns - start : kLanes;
    }
};

inline void dot_panels(const kernels::DotPanels& a) noexcept {
    with_elements(
        a.type, [&a](auto elements) { for_tiles(a.row_count, (a.columns + 15) / 16, DotTile<decltype(elements)>{a}); });
}

}  // namespace headlong::HEADLONG_ISA
