// Parts of views: some of the elements of one dimension, of a tensor or of a mask.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include <headlong/attention.hpp>
#include <headlong/tensor.hpp>

#include "tests/support/any_tensor.hpp"

namespace headlong::test {

template <class Pointer>
Pointer moved(Pointer data, DType type, std::int64_t elements) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte, std::byte>;
    if (data == nullptr) return data;
    return static_cast<Byte*>(data) + elements * static_cast<std::int64_t>(headlong::size_of(type));
}

/// Elements [first, first + count) of one dimension of a view.
template <class View>
View cut(View view, std::size_t dimension, std::int64_t first, std::int64_t count) {
    view.data = moved(view.data, view.dtype, first * view.strides[dimension]);
    view.extents[dimension] = count;
    return view;
}

inline Element element_of(AttentionMask::Type type) noexcept { return static_cast<Element>(type); }

/// One dimension of a mask, unless it is broadcast.
inline void cut_mask(AttentionMask& mask, std::size_t dimension, std::int64_t first, std::int64_t count) {
    if (mask.extents[dimension] == 1) return;
    mask.data = static_cast<const std::byte*>(mask.data) +
                first * mask.strides[dimension] * static_cast<std::int64_t>(size_of(element_of(mask.type)));
    mask.extents[dimension] = count;
}

/// The bits of one element of a view, which lies at the dot product of an index and the strides.
template <std::size_t Rank>
std::uint32_t bits_at(const void* data, Element element, const Extents<Rank>& strides, const Extents<Rank>& index) {
    std::int64_t place = 0;
    for (std::size_t d = 0; d < Rank; ++d) place += index[d] * strides[d];
    std::uint32_t bits = 0;
    std::memcpy(&bits, static_cast<const std::byte*>(data) + place * static_cast<std::int64_t>(size_of(element)),
                size_of(element));
    return bits;
}

/// A copy in memory of its own, of any element type (a boolean is true where a number is not -infinity), in a layout
/// like the view's or dense.
template <std::size_t Rank>
AnyTensor<Rank> copy_of(const void* data, Element from, const Extents<Rank>& extents, const Extents<Rank>& strides,
                        Element to, bool dense = true) {
    Layout<Rank> layout = dense_layout<Rank>(extents);
    if (!dense && layout.elements != 0) {
        layout = {strides, 0, 1};
        for (std::size_t d = 0; d < Rank; ++d) {
            const std::int64_t reach = (extents[d] - 1) * strides[d];
            if (reach < 0) layout.first -= reach;
            layout.elements += static_cast<std::size_t>(std::abs(reach));
        }
    }
    AnyTensor<Rank> copy(to, extents, layout);
    for_each_index<Rank>(extents, [&](const Extents<Rank>& i) {
        const std::uint32_t bits = bits_at(data, from, strides, i);
        if (from == to) {
            copy.set_bits(i, bits);
        } else if (to == Element::boolean) {
            copy.set(i, value_of(from, bits) == -std::numeric_limits<double>::infinity() ? 0.0 : 1.0);
        } else {
            copy.set(i, value_of(from, bits));
        }
    });
    return copy;
}

}  // namespace headlong::test
