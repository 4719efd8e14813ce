// Rows of codes x key panels of codes, in integers: scores of a query tile, or outputs of a linear layer. Compiled per
// instruction set. The layouts are in layout.hpp.
//
// Over a group of 64 inputs sum(C * q) is an integer below 2^31, the same one on every set; the groups' integers are
// added up in floats, in ascending order.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/simd/native.hpp"
#include "kernels/tiles-inl.hpp"

namespace headlong::HEADLONG_ISA {

/// One row or two have registers for a line's sums as a whole: a stream from memory is then read once, front to back.
template <std::size_t Rows>
inline constexpr std::size_t kPartsOf = Rows <= 2 ? 1 : kLineParts;
template <std::size_t Rows>
inline constexpr std::size_t kSumsOf = kQuadSums* kLineParts / kPartsOf<Rows>;

/// `Type` is int8 or int4.
template <kernels::StoredType Type>
struct CodeTile {
    static constexpr std::size_t kQuads = kernels::codes_in_byte(Type);  ///< of a line
    const kernels::DotCodes& a;

    /// Lane by lane a sum over the groups in ascending order, from +0 or from what `out` holds. The order inside a
    /// group is free: its sum is an integer. Tiles of few sums therefore sum several lines side by side.
    template <std::size_t Rows, std::size_t Panels>
    HEADLONG_INLINE void operator()(std::size_t row, std::size_t panel) const noexcept {
        constexpr std::size_t kVectors = Panels * kPanelVectors;
        const std::uint8_t* rows = a.rows + row * a.row_stride;
        const std::uint8_t* panels = a.panels + panel * a.panel_stride;
        float* out = a.out + row * a.out_stride + panel * 16;
        const std::size_t columns = a.columns - panel * 16;  // valid ones from here on; the tile may have fewer
        const bool whole = columns >= Panels * 16;

        F32 sums[Rows][kVectors];
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                const float* p = out + r * a.out_stride + v * kLanes;
                sums[r][v] = !a.accumulate ? broadcast(0.0F) : whole ? load(p) : load_n(p, valid_lanes(columns, v));
            }
        }

        for (std::size_t group = a.group_begin; group < a.group_end; ++group) {
            HEADLONG_UNROLL for (std::size_t part = 0; part < kPartsOf<Rows>; ++part) {
                add_group<Rows, Panels>(rows, panels, group, part, row == 0 && part == 0, sums);
            }
        }

        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                float* p = out + r * a.out_stride + v * kLanes;
                const F32 lanes = a.canonical ? canonical_nan(sums[r][v]) : sums[r][v];
                if (whole) {
                    store(p, lanes);
                } else {
                    store_n(p, lanes, valid_lanes(columns, v));
                }
            }
        }
    }

    /// Adds one group's sums of a part of the lines. The first rows bring panels in (`asks`); to the others they are
    /// near.
    template <std::size_t Rows, std::size_t Panels>
    HEADLONG_INLINE void add_group(const std::uint8_t* rows, const std::uint8_t* panels, std::size_t group,
                                   std::size_t part, bool asks,
                                   F32 (&sums)[Rows][Panels * kPanelVectors]) const noexcept {
        constexpr std::size_t kSums = Rows * Panels * kSumsOf<Rows>;
        constexpr std::size_t kSplits = kSums >= kQuadLatency      ? 1
                                        : kQuadLatency / kSums > 4 ? kStepsAtOnce
                                                                   : kQuadLatency / kSums;
        static_assert(kStepsAtOnce % kSplits == 0);
        const std::uint8_t* const scales = panels + group * kernels::code_group_bytes(Type);
        const std::uint8_t* const codes = scales + kernels::kCodeScaleBytes;
        const std::uint8_t* const x = rows + group * kernels::kRowGroupBytes;
        const std::size_t lines = kernels::code_lines(Type, kernels::code_group_inputs(a.depth, group));
        const std::size_t panel_stride = a.panel_stride;
        const std::size_t row_stride = a.row_stride;

        const Ahead ahead(a.panels, (a.columns + 15) / 16 * panel_stride, a.next, a.row_count);

        I32 dots[kSplits][Rows][Panels][kSumsOf<Rows>];
        HEADLONG_UNROLL for (std::size_t s = 0; s < kSplits; ++s) {
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                    HEADLONG_UNROLL for (std::size_t i = 0; i < kSumsOf<Rows>; ++i) dots[s][r][p][i] = zero_i32();
                }
            }
        }
        std::size_t line = 0;
        for (; line + kStepsAtOnce <= lines; line += kStepsAtOnce) {
            if (asks) {
                HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                    ahead.ask<kStepsAtOnce * kernels::kCodeLineBytes>(codes + p * panel_stride +
                                                                      line * kernels::kCodeLineBytes);
                }
            }
            HEADLONG_UNROLL for (std::size_t i = 0; i < kStepsAtOnce; ++i) {
                add_line<kQuads>(dots[i % kSplits], codes + (line + i) * kernels::kCodeLineBytes, panel_stride,
                                 x + (line + i) * kQuads * kernels::kRowQuadBytes, row_stride, part);
            }
        }
        for (; line < lines; ++line) {
            add_line<kQuads>(dots[0], codes + line * kernels::kCodeLineBytes, panel_stride,
                             x + line * kQuads * kernels::kRowQuadBytes, row_stride, part);
        }

        constexpr std::size_t kPartVectors = kPanelVectors / kPartsOf<Rows>;
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            const std::uint8_t* record = rows + r * row_stride;
            float factor = 0.0F;
            std::int32_t sum = 0;
            std::memcpy(&factor, record + kernels::code_row_factors(a.depth) + group * sizeof factor, sizeof factor);
            std::memcpy(&sum, record + kernels::code_row_sums(a.depth) + group * sizeof sum, sizeof sum);
            const F32 row_factor = broadcast(factor);
            const I32 offset = broadcast_i32(-kCodeOffset<kQuads> * sum);
            HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                HEADLONG_UNROLL for (std::size_t s = 1; s < kSplits; ++s) {
                    HEADLONG_UNROLL for (std::size_t i = 0; i < kSumsOf<Rows>; ++i) {
                        dots[0][r][p][i] = add_i32(dots[0][r][p][i], dots[s][r][p][i]);
                    }
                }
                I32 totals[kPartVectors];
                quad_totals(dots[0][r][p], totals);
                const float* scale = reinterpret_cast<const float*>(scales + p * panel_stride);
                HEADLONG_UNROLL for (std::size_t i = 0; i < kPartVectors; ++i) {
                    const std::size_t v = part * kPartVectors + i;
                    F32& lanes = sums[r][p * kPanelVectors + v];
                    lanes = fma(to_f32(add_i32(totals[i], offset)) * load(scale + v * kLanes), row_factor, lanes);
                }
            }
        }
    }

    /// Valid lanes of vector v when `columns` are left from the tile's start.
    HEADLONG_INLINE static std::size_t valid_lanes(std::size_t columns, std::size_t v) noexcept {
        const std::size_t start = v * kLanes;
        if (columns <= start) return 0;
        return columns - start < kLanes ? columns - start : kLanes;
    }
};

template <std::size_t Rows, std::size_t Panels, class Tile>
HEADLONG_INLINE void code_rest_rows(const Tile& tile, std::size_t row, std::size_t rows, std::size_t panel) noexcept {
    if (rows == Rows) {
        tile.template operator()<Rows, Panels>(row, panel);
    } else if constexpr (Rows > 1) {
        code_rest_rows<Rows - 1, Panels>(tile, row, rows, panel);
    }
}

/// All rows of `Panels` panels, so that these come from memory once.
template <std::size_t Panels, class Tile>
inline void code_panels(const Tile& tile, std::size_t panel) noexcept {
    const std::size_t row_count = tile.a.row_count;
    std::size_t row = 0;
    for (; row + kCodeTileRows <= row_count; row += kCodeTileRows) {
        tile.template operator()<kCodeTileRows, Panels>(row, panel);
    }
    if constexpr (kCodeTileRows > 1) {
        if (row < row_count) code_rest_rows<kCodeTileRows - 1, Panels>(tile, row, row_count - row, panel);
    }
}

template <class Tile>
inline void dot_codes_of(const Tile& tile) noexcept {
    const std::size_t panel_count = (tile.a.columns + 15) / 16;
    std::size_t panel = 0;
    // Of int8, one row is bound by memory, and two long panels side by side come a tenth faster; of int4, by
    // arithmetic.
    if constexpr (Tile::kQuads == 1) {
        if (tile.a.row_count == 1 && tile.a.panel_stride >= kLongPanelBytes) {
            for (; panel + 2 <= panel_count; panel += 2) tile.template operator()<1, 2>(0, panel);
        }
    }
    if constexpr (kCodeTilePanels > 1) {
        if (tile.a.row_count >= kCodeTileRows) {  // fewer rows are a stream, and take panels one by one
            for (; panel + kCodeTilePanels <= panel_count; panel += kCodeTilePanels) {
                code_panels<kCodeTilePanels>(tile, panel);
            }
        }
    }
    for (; panel < panel_count; ++panel) code_panels<1>(tile, panel);
}

inline void dot_codes(const kernels::DotCodes& a) noexcept {
    if (a.type == kernels::StoredType::int4) {
        dot_codes_of(CodeTile<kernels::StoredType::int4>{a});
    } else {
        dot_codes_of(CodeTile<kernels::StoredType::int8>{a});
    }
}

}  // namespace headlong::HEADLONG_ISA
