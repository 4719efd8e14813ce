// Rows of a strided tensor into panels, value rows, or dense query rows. Compiled per instruction set.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/simd/native.hpp"

namespace headlong::HEADLONG_ISA {

HEADLONG_INLINE const float* row_of(const kernels::Rows& rows, std::size_t i) noexcept {
    return static_cast<const float*>(rows.data) + static_cast<std::ptrdiff_t>(i) * rows.row_stride;
}

/// One panel whose lanes [lane, lane + count) are the rows from `row` on.
inline void pack_panel(const kernels::Rows& source, std::size_t row, std::size_t count, float* panel,
                       std::size_t lane) noexcept {
    const std::size_t depth = source.column_count;
    const float* rows = row_of(source, row);
    std::size_t column = 0;
    if (count == 16 && source.column_stride == 1) {
        for (; column + kTransposeColumns <= depth; column += kTransposeColumns) {
            transpose_16(rows + column, source.row_stride, panel + column * 16);
        }
    } else if (count == 16 && source.row_stride == 1) {  // a transposed tensor: panel rows are contiguous
        for (; column < depth; ++column) {
            const float* p = rows + static_cast<std::ptrdiff_t>(column) * source.column_stride;
            HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
                store(panel + column * 16 + v * kLanes, load(p + v * kLanes));
            }
        }
    }
    for (; column < depth; ++column) {
        const float* p = rows + static_cast<std::ptrdiff_t>(column) * source.column_stride;
        float* out = panel + column * 16 + lane;
        for (std::size_t i = 0; i < count; ++i) out[i] = p[static_cast<std::ptrdiff_t>(i) * source.row_stride];
    }
}

inline void pack_panels(const kernels::PackPanels& a) noexcept {
    for (std::size_t row = 0; row < a.source.row_count;) {
        const std::size_t token = a.first_lane + row;
        const std::size_t lane = token % 16;
        const std::size_t left = a.source.row_count - row;
        const std::size_t count = left < 16 - lane ? left : 16 - lane;
        pack_panel(a.source, row, count, a.panels + token / 16 * a.source.column_count * 16, lane);
        row += count;
    }
}

inline bool pack_rows(const kernels::PackRows& a) noexcept {
    const std::size_t columns = a.source.column_count;
    F32 probe = broadcast(0.0F);  // x * 0 is NaN for NaN and infinity, else a zero
    for (std::size_t row = 0; row < a.source.row_count; ++row) {
        const float* p = row_of(a.source, row);
        float* out = a.rows + row * a.pitch;
        std::size_t c = 0;
        if (a.source.column_stride == 1) {
            for (; c + kLanes <= columns; c += kLanes) store(out + c, load(p + c));
            if (c < columns) {
                store_n(out + c, load_n(p + c, columns - c), columns - c);
                c = columns;
            }
        } else {
            for (; c < columns; ++c) out[c] = p[static_cast<std::ptrdiff_t>(c) * a.source.column_stride];
        }
        for (; c < a.pitch; ++c) out[c] = 0.0F;
        for (c = 0; c < a.pitch; c += kLanes) probe = fma(load(out + c), broadcast(0.0F), probe);
    }
    return any_nan(probe);
}

inline void scale_rows(const kernels::ScaleRows& a) noexcept {
    const std::size_t columns = a.source.column_count;
    const F32 factor = broadcast(a.factor);
    for (std::size_t row = 0; row < a.source.row_count; ++row) {
        const float* p = row_of(a.source, row);
        float* out = a.out + row * a.out_stride;
        std::size_t c = 0;
        if (a.source.column_stride == 1) {
            for (; c + kLanes <= columns; c += kLanes) store(out + c, load(p + c) * factor);
        }
        for (; c < columns; ++c) out[c] = p[static_cast<std::ptrdiff_t>(c) * a.source.column_stride] * a.factor;
    }
}

}  // namespace headlong::HEADLONG_ISA
