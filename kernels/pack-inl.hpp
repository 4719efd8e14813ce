// Rows of a strided tensor into key panels, value panels, or dense rows, and back. Compiled per instruction set.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/source-inl.hpp"

namespace headlong::HEADLONG_ISA {

template <class Elements>
HEADLONG_INLINE const typename Elements::Element* row_of(const kernels::Rows& rows, std::size_t i) noexcept {
    return static_cast<const typename Elements::Element*>(rows.data) + static_cast<std::ptrdiff_t>(i) * rows.row_stride;
}

/// Asks for a row that will be read soon. Rows of a tensor are often a page or more apart, where the processor does not
/// guess.
template <class Elements>
HEADLONG_INLINE void prefetch_row(const kernels::Rows& rows, std::size_t i) noexcept {
    if (i >= rows.row_count || rows.column_stride != 1) return;
    const auto* row = row_of<Elements>(rows, i);
    for (std::size_t c = 0; c < rows.column_count; c += 64 / sizeof(typename Elements::Element)) {
        compiler::prefetch(row + c);
    }
}
inline constexpr std::size_t kRowsAhead = 8;

/// kTransposeColumns columns of 16 rows as floats, in a tile that transposes like a tensor of float.
template <class Elements>
HEADLONG_INLINE void transpose_rows(const typename Elements::Element* rows, std::ptrdiff_t stride,
                                    float* panel) noexcept {
    if constexpr (sizeof(typename Elements::Element) == sizeof(float)) {
        transpose_16(rows, stride, panel);
    } else {
        static_assert(kTransposeColumns % kLanes == 0 || kLanes % kTransposeColumns == 0);
        constexpr std::size_t kStep = kTransposeColumns < kLanes ? kLanes : kTransposeColumns;
        float tile[16 * kStep];
        for (std::size_t i = 0; i < 16; ++i) {
            const typename Elements::Element* row = rows + static_cast<std::ptrdiff_t>(i) * stride;
            for (std::size_t c = 0; c < kStep; c += kLanes) store(tile + i * kStep + c, Elements::load(row + c));
        }
        for (std::size_t c = 0; c < kStep; c += kTransposeColumns) {
            transpose_16(tile + c, static_cast<std::ptrdiff_t>(kStep), panel + c * 16);
        }
    }
}

/// Columns that transpose_rows() takes at a time.
template <class Elements>
constexpr std::size_t transpose_step() noexcept {
    return sizeof(typename Elements::Element) == sizeof(float) || kTransposeColumns > kLanes ? kTransposeColumns
                                                                                             : kLanes;
}

/// One panel whose lanes [lane, lane + count) are the rows from `row` on.
template <class Elements, class Stored>
HEADLONG_INLINE void pack_panel(const kernels::Rows& source, std::size_t row, std::size_t count,
                                typename Stored::Element* panel, std::size_t lane) noexcept {
    constexpr std::size_t kStep = transpose_step<Elements>();
    const std::size_t depth = source.column_count;
    const auto* rows = row_of<Elements>(source, row);
    std::size_t column = 0;
    if (count == 16 && source.column_stride == 1) {
        for (std::size_t i = 0; i < 16; ++i) prefetch_row<Elements>(source, row + 16 + i);
        for (; column + kStep <= depth; column += kStep) {
            if constexpr (sizeof(typename Stored::Element) == sizeof(float)) {
                transpose_rows<Elements>(rows + column, source.row_stride, panel + column * 16);
            } else {
                float tile[16 * kStep];
                transpose_rows<Elements>(rows + column, source.row_stride, tile);
                for (std::size_t i = 0; i < 16 * kStep; i += kLanes) {
                    Stored::store(panel + column * 16 + i, load(tile + i));
                }
            }
        }
    } else if (count == 16 && source.row_stride == 1) {  // a transposed tensor: panel rows are contiguous
        for (; column < depth; ++column) {
            const auto* p = rows + static_cast<std::ptrdiff_t>(column) * source.column_stride;
            HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
                Stored::store(panel + column * 16 + v * kLanes, Elements::load(p + v * kLanes));
            }
        }
    }
    for (; column < depth; ++column) {
        const auto* p = rows + static_cast<std::ptrdiff_t>(column) * source.column_stride;
        auto* out = panel + column * 16 + lane;
        for (std::size_t i = 0; i < count; ++i) {
            out[i] = Stored::element(Elements::value(p[static_cast<std::ptrdiff_t>(i) * source.row_stride]));
        }
    }
}

inline void pack_panels(const kernels::PackPanels& a) noexcept {
    with_elements(a.source.type, [&a](auto elements) {
        with_elements(a.type, [&a](auto stored) {
            using Stored = decltype(stored);
            auto* panels = static_cast<typename Stored::Element*>(a.panels);
            for (std::size_t row = 0; row < a.source.row_count;) {
                const std::size_t token = a.first_lane + row;
                const std::size_t lane = token % 16;
                const std::size_t left = a.source.row_count - row;
                const std::size_t count = left < 16 - lane ? left : 16 - lane;
                pack_panel<decltype(elements), Stored>(a.source, row, count,
                                                       panels + token / 16 * a.source.column_count * 16, lane);
                row += count;
            }
        });
    });
}

/// One row as floats, each passed through `change`; padding is left alone.
template <class Elements, class Change>
HEADLONG_INLINE void gather_row(const kernels::Rows& source, std::size_t row, float* out,
                                const Change& change) noexcept {
    const std::size_t columns = source.column_count;
    const auto* p = row_of<Elements>(source, row);
    std::size_t c = 0;
    if (source.column_stride == 1) {
        for (; c + kLanes <= columns; c += kLanes) store(out + c, change(Elements::load(p + c)));
    }
    for (; c < columns; ++c) {
        out[c] =
            first_lane(change(broadcast(Elements::value(p[static_cast<std::ptrdiff_t>(c) * source.column_stride]))));
    }
}

/// One row as a token of value panels. The very bits of floats: nothing is computed with them. What is written is added
/// to the probe, times 0: NaN for NaN and infinity, else a zero.
template <class Elements, class Stored>
HEADLONG_INLINE void pack_value(const kernels::Rows& source, std::size_t row, typename Stored::Element* out,
                                F32& probe) noexcept {
    const std::size_t columns = source.column_count;
    const auto* p = row_of<Elements>(source, row);
    std::size_t c = 0;
    if (source.column_stride == 1) {
        for (; c + 16 <= columns; c += 16, out += kernels::kValuePanel) {
            HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
                Stored::store(out + v * kLanes, Elements::load(p + c + v * kLanes));
                probe = fma(Stored::load(out + v * kLanes), broadcast(0.0F), probe);
            }
        }
    }
    for (; c < columns; c += 16, out += kernels::kValuePanel) {
        for (std::size_t i = 0; i < 16; ++i) {
            const auto column = static_cast<std::ptrdiff_t>(c + i);
            out[i] = c + i < columns ? Stored::element(Elements::value(p[column * source.column_stride])) : 0;
        }
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
            probe = fma(Stored::load(out + v * kLanes), broadcast(0.0F), probe);
        }
    }
}

inline bool pack_values(const kernels::PackValues& a) noexcept {
    F32 probe = broadcast(0.0F);
    with_elements(a.source.type, [&a, &probe](auto elements) {
        with_elements(a.type, [&a, &probe](auto stored) {
            using Elements = decltype(elements);
            using Stored = decltype(stored);
            for (std::size_t row = 0; row < a.source.row_count; ++row) {
                auto* out = static_cast<typename Stored::Element*>(a.values) + (a.first_token + row) * 16;
                prefetch_row<Elements>(a.source, row + kRowsAhead);
                pack_value<Elements, Stored>(a.source, row, out, probe);
            }
        });
    });
    return any_nan(probe);
}

inline void widen(const kernels::Widen& a) noexcept {
    with_elements(a.type, [&a](auto elements) {
        const auto* from = static_cast<const typename decltype(elements)::Element*>(a.from);
        for (std::size_t i = 0; i < a.count; i += kLanes) store(a.to + i, decltype(elements)::load(from + i));
    });
}

inline void scale_rows(const kernels::ScaleRows& a) noexcept {
    const F32 factor = broadcast(a.factor);
    with_elements(a.source.type, [&a, factor](auto elements) {
        for (std::size_t row = 0; row < a.source.row_count; ++row) {
            prefetch_row<decltype(elements)>(a.source, row + kRowsAhead);
            gather_row<decltype(elements)>(a.source, row, a.out + row * a.out_stride,
                                           [factor](F32 x) noexcept { return x * factor; });
        }
    });
}

inline void store_rows(const kernels::StoreRows& a) noexcept {
    with_elements(a.type, [&a](auto elements) {
        using Elements = decltype(elements);
        for (std::size_t row = 0; row < a.row_count; ++row) {
            const float* p = a.rows + row * a.row_pitch;
            auto* out =
                static_cast<typename Elements::Element*>(a.out) + static_cast<std::ptrdiff_t>(row) * a.row_stride;
            std::size_t c = 0;
            if (a.column_stride == 1) {
                for (; c + kLanes <= a.column_count; c += kLanes) Elements::store(out + c, load(p + c));
            }
            for (; c < a.column_count; ++c) {
                out[static_cast<std::ptrdiff_t>(c) * a.column_stride] = Elements::element(p[c]);
            }
        }
    });
}

/// mask * unit. Finite elements stay finite: -FLT_MAX, which some use for "not allowed", is a bias like any other.
HEADLONG_INLINE F32 bias_of(F32 mask, F32 unit) noexcept {
    constexpr float kLowest = -__FLT_MAX__;
    const F32 zero = broadcast(0.0F);
    F32 bias = max(broadcast(kLowest), mask * unit);  // in this order a NaN stays
    bias = zero - max(broadcast(kLowest), zero - bias);
    bias = select_below(zero - mask, kLowest, mask, bias);
    return select_below(mask, kLowest, mask, bias);
}

/// One row of a mask as biases.
template <class Elements>
HEADLONG_INLINE void bias_row(const kernels::MaskRow& a) noexcept {
    const F32 unit = broadcast(a.unit);
    const auto* p = static_cast<const typename Elements::Element*>(a.data);
    std::size_t token = a.range.begin;
    if (a.stride == 1) {
        for (; token + kLanes <= a.range.end; token += kLanes, p += kLanes) {
            store(a.bias + token, bias_of(Elements::load(p), unit));
        }
    }
    for (; token < a.range.end; ++token, p += a.stride)
        a.bias[token] = first_lane(bias_of(broadcast(Elements::value(*p)), unit));
}

HEADLONG_INLINE void bias_row_of_bytes(const kernels::MaskRow& a) noexcept {
    const auto* p = static_cast<const std::uint8_t*>(a.data);
    std::size_t token = a.range.begin;
    if (a.stride == 1) {
        for (; token + kLanes <= a.range.end; token += kLanes, p += kLanes) {
            store(a.bias + token, select_bytes(p, broadcast(0.0F), broadcast(-compiler::kInfinity)));
        }
    }
    for (; token < a.range.end; ++token, p += a.stride) a.bias[token] = *p != 0 ? 0.0F : -compiler::kInfinity;
}

inline kernels::TokenRange mask_row(const kernels::MaskRow& a) noexcept {
    if (a.boolean) {
        bias_row_of_bytes(a);
    } else {
        with_elements(a.type, [&a](auto elements) { bias_row<decltype(elements)>(a); });
    }
    kernels::TokenRange allowed = a.range;
    while (allowed.begin < allowed.end && a.bias[allowed.begin] == -compiler::kInfinity) ++allowed.begin;
    while (allowed.begin < allowed.end && a.bias[allowed.end - 1] == -compiler::kInfinity) --allowed.end;
    return allowed;
}

}  // namespace headlong::HEADLONG_ISA
