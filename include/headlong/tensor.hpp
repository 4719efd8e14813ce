/// \file
/// Views of the caller's memory. A view is a pointer, an element type, extents and strides; it owns nothing, and
/// the memory must stay valid and unchanged (inputs) or unread (outputs) until the call that took it returns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <headlong/export.hpp>

namespace headlong HEADLONG_API {

/// Element types of query, key, value and output tensors.
enum class DType : std::uint8_t {
    f32,   ///< IEEE 754 binary32
    f16,   ///< IEEE 754 binary16
    bf16,  ///< the upper half of a binary32
};

/// Bytes of one element.
constexpr std::size_t size_of(DType type) noexcept { return type == DType::f32 ? 4 : 2; }

/// "f32", "f16" or "bf16".
HEADLONG_API const char* to_string(DType type) noexcept;

/// One number per dimension, the outermost first.
template <std::size_t Rank>
using Extents = std::array<std::int64_t, Rank>;

/// Strides of a dense row-major tensor: the last dimension has stride 1.
template <std::size_t Rank>
constexpr Extents<Rank> dense_strides(const Extents<Rank>& extents) noexcept {
    Extents<Rank> strides{};
    // unsigned arithmetic: a hostile extent wraps here and is refused when the view is validated
    std::uint64_t stride = 1;
    for (std::size_t i = Rank; i-- > 0;) {
        strides[i] = static_cast<std::int64_t>(stride);
        stride *= static_cast<std::uint64_t>(extents[i]);
    }
    return strides;
}

/// A read-only view. Strides count elements, may be negative (data points at element [0, 0, ...]) and may be 0
/// to broadcast. A view with an extent of 0 is never read and may have a null pointer.
template <std::size_t Rank>
struct InputTensor {
    const void* data = nullptr;  ///< element [0, 0, ...]; the caller's
    DType dtype = DType::f32;    ///< of every element
    Extents<Rank> extents{};     ///< elements per dimension, not negative
    Extents<Rank> strides{};     ///< elements from one index to the next, per dimension

    /// A dense row-major tensor of float.
    static constexpr InputTensor dense(const float* data, const Extents<Rank>& extents) noexcept {
        return {data, DType::f32, extents, dense_strides<Rank>(extents)};
    }
    /// A dense row-major tensor of any element type.
    static constexpr InputTensor dense(const void* data, DType dtype, const Extents<Rank>& extents) noexcept {
        return {data, dtype, extents, dense_strides<Rank>(extents)};
    }
};

/// A view to write to. Strides count elements, may be negative, and must not be 0 where the extent exceeds 1:
/// two places of an output must not share memory. Default-constructed means "not wanted".
template <std::size_t Rank>
struct OutputTensor {
    void* data = nullptr;      ///< element [0, 0, ...]; the caller's
    DType dtype = DType::f32;  ///< of every element
    Extents<Rank> extents{};   ///< elements per dimension, not negative
    Extents<Rank> strides{};   ///< elements from one index to the next, per dimension

    /// A dense row-major tensor of float.
    static constexpr OutputTensor dense(float* data, const Extents<Rank>& extents) noexcept {
        return {data, DType::f32, extents, dense_strides<Rank>(extents)};
    }
    /// A dense row-major tensor of any element type.
    static constexpr OutputTensor dense(void* data, DType dtype, const Extents<Rank>& extents) noexcept {
        return {data, dtype, extents, dense_strides<Rank>(extents)};
    }
};

}  // namespace headlong
