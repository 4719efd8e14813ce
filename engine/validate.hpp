// Checks of arguments, made once at the API. After them kernels trust what they get.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <headlong/error.hpp>
#include <headlong/tensor.hpp>
#include <limits>

#include "kernels/compiler.hpp"

namespace headlong {

template <std::size_t Rank>
bool is_empty(const Extents<Rank>& extents) noexcept {
    for (const std::int64_t extent : extents) {
        if (extent == 0) return true;
    }
    return false;
}

/// Extents are not negative, and neither their product nor any element's offset in bytes leaves std::ptrdiff_t (63
/// bits, or 31). Returns nothing; throws.
template <std::size_t Rank>
void check_extents(const char* name, const Extents<Rank>& extents, const Extents<Rank>& strides,
                   std::size_t element_bytes) {
    constexpr std::int64_t kMax = std::numeric_limits<std::ptrdiff_t>::max();
    for (std::size_t i = 0; i < Rank; ++i) {
        if (extents[i] < 0) {
            throw InvalidArgument(fmt::format("{}: extent {} is {}; it must not be negative", name, i, extents[i]));
        }
    }
    if (is_empty<Rank>(extents)) return;
    std::int64_t elements = 1;
    std::int64_t reach = 0;
    for (std::size_t i = 0; i < Rank; ++i) {
        std::int64_t step = 0;
        if (strides[i] == std::numeric_limits<std::int64_t>::min() ||
            compiler::mul_overflows(elements, extents[i], elements) || elements > kMax ||
            compiler::mul_overflows(extents[i] - 1, strides[i] < 0 ? -strides[i] : strides[i], step) ||
            compiler::add_overflows(reach, step, reach) ||
            reach > kMax / static_cast<std::int64_t>(element_bytes) - 1) {
            throw InvalidArgument(fmt::format("{}: extent {} with stride {} in dimension {} exceeds {}-bit sizes", name,
                                              extents[i], strides[i], i, 8 * sizeof(std::ptrdiff_t)));
        }
    }
}

/// A type that there is.
inline void check_dtype(const char* name, DType dtype) {
    if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16) {
        throw InvalidArgument(fmt::format("{}: dtype is {}; allowed: f32, f16, bf16", name, static_cast<int>(dtype)));
    }
}

inline void check_f32(const char* name, DType dtype) {
    check_dtype(name, dtype);
    if (dtype != DType::f32) {
        throw InvalidArgument(fmt::format("{}: elements are {}; they must be f32", name, to_string(dtype)));
    }
}

template <std::size_t Rank>
void check_input(const char* name, const InputTensor<Rank>& view) {
    check_dtype(name, view.dtype);
    check_extents<Rank>(name, view.extents, view.strides, size_of(view.dtype));
    if (view.data == nullptr && !is_empty<Rank>(view.extents)) {
        throw InvalidArgument(fmt::format("{}: data is null, but the tensor has elements", name));
    }
}

template <std::size_t Rank>
void check_f32_input(const char* name, const InputTensor<Rank>& view) {
    check_f32(name, view.dtype);
    check_input(name, view);
}

template <std::size_t Rank>
void check_output(const char* name, const OutputTensor<Rank>& view) {
    check_dtype(name, view.dtype);
    check_extents<Rank>(name, view.extents, view.strides, size_of(view.dtype));
    if (is_empty<Rank>(view.extents)) return;
    if (view.data == nullptr) throw InvalidArgument(fmt::format("{}: data is null, but the tensor has elements", name));
    for (std::size_t i = 0; i < Rank; ++i) {
        if (view.strides[i] == 0 && view.extents[i] > 1) {
            throw InvalidArgument(
                fmt::format("{}: stride {} is 0 with extent {}; an output's elements must not share memory", name, i,
                            view.extents[i]));
        }
    }
}

template <std::size_t Rank>
void check_f32_output(const char* name, const OutputTensor<Rank>& view) {
    check_f32(name, view.dtype);
    check_output(name, view);
}

/// All extents are those of another view.
template <std::size_t Rank>
void check_same_extents(const char* name, const Extents<Rank>& extents, const Extents<Rank>& expected,
                        const char* meaning) {
    for (std::size_t i = 0; i < Rank; ++i) {
        if (extents[i] != expected[i]) {
            throw InvalidArgument(
                fmt::format("{}: extent {} is {}; it must be {} ({})", name, i, extents[i], expected[i], meaning));
        }
    }
}

/// The extent in one dimension is what another argument says.
inline void check_extent(const char* name, std::size_t dimension, std::int64_t extent, std::int64_t expected,
                         const char* meaning) {
    if (extent != expected) {
        throw InvalidArgument(
            fmt::format("{}: extent {} is {}; it must be {} ({})", name, dimension, extent, expected, meaning));
    }
}

/// A pointer to an element of float.
inline const float* floats(const void* data) noexcept { return static_cast<const float*>(data); }
inline float* floats(void* data) noexcept { return static_cast<float*>(data); }

}  // namespace headlong
