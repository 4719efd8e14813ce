// Rows in the caller's memory: a view after validation, as kernels want it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <headlong/tensor.hpp>

#include "engine/validate.hpp"
#include "kernels/kernel_table.hpp"

namespace headlong {

constexpr kernels::ElementType element_type(DType type) noexcept {
    switch (type) {
        case DType::f16:
            return kernels::ElementType::f16;
        case DType::bf16:
            return kernels::ElementType::bf16;
        case DType::f32:
            break;
    }
    return kernels::ElementType::f32;
}

constexpr std::int64_t stride_bytes(kernels::ElementType type) noexcept {
    return static_cast<std::int64_t>(kernels::element_bytes(type));
}

/// [heads, rows, columns] of one sequence; strides in elements.
template <class Byte>
struct HeadRows {
    Byte* base = nullptr;
    kernels::ElementType type = kernels::ElementType::f32;
    std::int64_t head_stride = 0;
    std::int64_t row_stride = 0;
    std::int64_t column_stride = 1;

    Byte* at(std::int64_t head, std::int64_t row) const noexcept {
        return base + (head * head_stride + row * row_stride) * stride_bytes(type);
    }
    kernels::Rows rows(std::int64_t head, std::int64_t row, std::int64_t count, std::size_t columns) const noexcept {
        return {at(head, row),
                type,
                static_cast<std::ptrdiff_t>(row_stride),
                static_cast<std::ptrdiff_t>(column_stride),
                static_cast<std::size_t>(count),
                columns};
    }
};
using InputRows = HeadRows<const std::byte>;
using OutputRows = HeadRows<std::byte>;

/// Of a view without elements neither pointer nor strides are looked at.
inline InputRows input_rows(const InputTensor<3>& view) noexcept {
    if (is_empty<3>(view.extents)) return {nullptr, element_type(view.dtype), 0, 0, 0};
    return {static_cast<const std::byte*>(view.data), element_type(view.dtype), view.strides[0], view.strides[1],
            view.strides[2]};
}
inline OutputRows output_rows(const OutputTensor<3>& view) noexcept {
    if (is_empty<3>(view.extents)) return {nullptr, element_type(view.dtype), 0, 0, 0};
    return {static_cast<std::byte*>(view.data), element_type(view.dtype), view.strides[0], view.strides[1],
            view.strides[2]};
}

/// Writes dense rows of floats to row `row` and the following ones of a head.
inline void store_rows(const kernels::KernelTable& kernels, const float* rows, std::size_t pitch, std::size_t count,
                       std::size_t columns, const OutputRows& out, std::int64_t head, std::int64_t row) noexcept {
    kernels.store_rows({rows, pitch, count, columns, out.at(head, row), out.type,
                        static_cast<std::ptrdiff_t>(out.row_stride), static_cast<std::ptrdiff_t>(out.column_stride)});
}

/// One sequence of a batch.
template <std::size_t Rank>
InputTensor<Rank - 1> sequence_of(const InputTensor<Rank>& batch, std::int64_t index) noexcept {
    InputTensor<Rank - 1> one;
    if (batch.data != nullptr && !is_empty<Rank>(batch.extents)) {
        one.data = static_cast<const std::byte*>(batch.data) +
                   index * batch.strides[0] * static_cast<std::int64_t>(size_of(batch.dtype));
    }
    one.dtype = batch.dtype;
    std::copy_n(batch.extents.begin() + 1, Rank - 1, one.extents.begin());
    std::copy_n(batch.strides.begin() + 1, Rank - 1, one.strides.begin());
    return one;
}
template <std::size_t Rank>
OutputTensor<Rank - 1> sequence_of(const OutputTensor<Rank>& batch, std::int64_t index) noexcept {
    OutputTensor<Rank - 1> one;
    if (batch.data != nullptr && !is_empty<Rank>(batch.extents)) {
        one.data = static_cast<std::byte*>(batch.data) +
                   index * batch.strides[0] * static_cast<std::int64_t>(size_of(batch.dtype));
    }
    one.dtype = batch.dtype;
    std::copy_n(batch.extents.begin() + 1, Rank - 1, one.extents.begin());
    std::copy_n(batch.strides.begin() + 1, Rank - 1, one.strides.begin());
    return one;
}

}  // namespace headlong
