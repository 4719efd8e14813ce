// How kernels walk a matrix in register tiles. Compiled per instruction set.
#pragma once

#include "kernels/simd/native.hpp"

namespace headlong::HEADLONG_ISA {

/// Columns of a tile of `rows` rows, in panels of 16: as many as the accumulators allow, at most the 4 of a block.
/// Few rows take more panels, so that enough independent sums are under way to hide the latency of the FMA.
constexpr std::size_t tile_panels(std::size_t rows) noexcept {
    const std::size_t panels = kTileVectors / (rows * kPanelVectors);
    return panels < 1 ? 1 : panels > 4 ? 4 : panels;
}

/// Calls body.operator()<rows, panels>(row, panel) for tiles that cover [0, row_count) x [0, panel_count): column
/// by column of tiles, so that a column's panels stay in L1 while the rows pass.
template <std::size_t Rows, std::size_t Panels, class Body>
HEADLONG_INLINE void for_panels(std::size_t row, std::size_t panel, std::size_t panel_count,
                                const Body& body) noexcept {
    for (; panel + Panels <= panel_count; panel += Panels) body.template operator()<Rows, Panels>(row, panel);
    if constexpr (Panels > 1) {
        if (panel < panel_count) for_panels<Rows, Panels - 1>(row, panel, panel_count, body);
    }
}

template <std::size_t Rows, class Body>
HEADLONG_INLINE void for_rest_rows(std::size_t row, std::size_t rows, std::size_t panel_count,
                                   const Body& body) noexcept {
    if (rows == Rows) {
        for_panels<Rows, tile_panels(Rows)>(row, 0, panel_count, body);
    } else if constexpr (Rows > 1) {
        for_rest_rows<Rows - 1>(row, rows, panel_count, body);
    }
}

template <class Body>
HEADLONG_INLINE void for_tiles(std::size_t row_count, std::size_t panel_count, const Body& body) noexcept {
    constexpr std::size_t kPanels = tile_panels(kTileRows);
    const std::size_t full_rows = row_count / kTileRows * kTileRows;
    for (std::size_t panel = 0; panel < panel_count && full_rows > 0; panel += kPanels) {
        const std::size_t end = panel + kPanels < panel_count ? panel + kPanels : panel_count;
        for (std::size_t row = 0; row < full_rows; row += kTileRows) {
            for_panels<kTileRows, kPanels>(row, panel, end, body);
        }
    }
    if (full_rows < row_count) for_rest_rows<kTileRows - 1>(full_rows, row_count - full_rows, panel_count, body);
}

}  // namespace headlong::HEADLONG_ISA
