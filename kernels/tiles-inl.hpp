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

/// What is left over by tiles of 3 rows joins the last of them where the registers hold both: a tile of 4 rows reads
/// its columns once, one of 3 and one of 1 twice. Of larger tiles less is left over, and every size more is compile
/// time.
inline constexpr std::size_t kMostTileRows =
    kTileRows > 3 || kTileVectors / kPanelVectors < 2 * kTileRows - 1 ? kTileRows : 2 * kTileRows - 1;

/// Whether a tile's loop is unrolled: full tiles, and those of the few rows of a decode step.
template <std::size_t Rows, std::size_t Panels>
inline constexpr bool kUnrolled = (Rows == kTileRows && Panels == tile_panels(kTileRows)) ||
                                  (Rows <= 4 && Panels == tile_panels(Rows));

/// One step of a tile's sums: sums[r][v] += row(r) * column(v). The longer of the two sides is loaded one register at
/// a time, so that a tile needs Rows * Vectors + min(Rows, Vectors) + 1 registers.
template <std::size_t Rows, std::size_t Vectors, class Row, class Column>
HEADLONG_INLINE void multiply_add(F32 (&sums)[Rows][Vectors], const Row& row, const Column& column) noexcept {
    if constexpr (Rows < Vectors) {
        F32 x[Rows];
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) x[r] = row(r);
        HEADLONG_UNROLL for (std::size_t v = 0; v < Vectors; ++v) {
            const F32 y = column(v);
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) sums[r][v] = fma(x[r], y, sums[r][v]);
        }
    } else {
        F32 y[Vectors];
        HEADLONG_UNROLL for (std::size_t v = 0; v < Vectors; ++v) y[v] = column(v);
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            const F32 x = row(r);
            HEADLONG_UNROLL for (std::size_t v = 0; v < Vectors; ++v) sums[r][v] = fma(x, y[v], sums[r][v]);
        }
    }
}

/// Rows of a tile of `panels` panels where fewer than a full tile's are left: a multiple of kTileRows, up to two.
constexpr std::size_t tall_tile_rows(std::size_t panels) noexcept {
    return kTileVectors / (panels * kPanelVectors) < 2 * kTileRows ? kTileRows : 2 * kTileRows;
}

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

/// The last panels, fewer than a full tile has; row_count is a multiple of kTileRows.
template <std::size_t Panels, class Body>
HEADLONG_INLINE void for_rest_panels(std::size_t row_count, std::size_t panel, std::size_t panels,
                                     const Body& body) noexcept {
    if (panels == Panels) {
        constexpr std::size_t kRows = tall_tile_rows(Panels);
        std::size_t row = 0;
        for (; row + kRows <= row_count; row += kRows) body.template operator()<kRows, Panels>(row, panel);
        if (row < row_count) body.template operator()<kTileRows, Panels>(row, panel);
    } else if constexpr (Panels > 1) {
        for_rest_panels<Panels - 1>(row_count, panel, panels, body);
    }
}

/// Calls body.operator()<rows, panels>(row, panel) for tiles that cover [0, row_count) x [0, panel_count): column
/// by column of tiles, so that a column's panels stay in L1 while the rows pass.
template <class Body>
HEADLONG_INLINE void for_tiles(std::size_t row_count, std::size_t panel_count, const Body& body) noexcept {
    constexpr std::size_t kPanels = tile_panels(kTileRows);
    std::size_t rest = row_count % kTileRows;
    if (rest != 0 && rest < row_count && rest + kTileRows <= kMostTileRows) rest += kTileRows;
    const std::size_t full_rows = row_count - rest;
    if (full_rows > 0) {
        std::size_t panel = 0;
        for (; panel + kPanels <= panel_count; panel += kPanels) {
            for (std::size_t row = 0; row < full_rows; row += kTileRows) {
                body.template operator()<kTileRows, kPanels>(row, panel);
            }
        }
        if constexpr (kPanels > 1) {
            if (panel < panel_count) for_rest_panels<kPanels - 1>(full_rows, panel, panel_count - panel, body);
        }
    }
    if (rest > 0) for_rest_rows<kMostTileRows>(full_rows, rest, panel_count, body);
}

}  // namespace headlong::HEADLONG_ISA
