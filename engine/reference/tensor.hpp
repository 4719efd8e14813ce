// Dense tensors of double for the reference: everything is widened once, and computed without views or strides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <headlong/attention.hpp>
#include <headlong/tensor.hpp>

namespace headlong::reference {

/// A dense row-major tensor of any rank. Rank 0 with no values stands for "absent".
struct Tensor {
    std::vector<std::int64_t> extents;
    std::vector<double> values;

    Tensor() = default;
    /// All elements are `fill`.
    explicit Tensor(std::vector<std::int64_t> shape, double fill = 0.0);
    /// Throws InvalidArgument if the number of elements is not the product of the extents.
    Tensor(std::vector<std::int64_t> shape, std::vector<double> elements);

    std::size_t rank() const noexcept { return extents.size(); }
    bool absent() const noexcept { return extents.empty(); }

    /// The place of an element in `values`; one index per dimension.
    template <typename... Index>
    std::size_t place(Index... index) const {
        std::int64_t flat = 0;
        std::size_t dimension = 0;
        ((flat = flat * extents[dimension++] + static_cast<std::int64_t>(index)), ...);
        return static_cast<std::size_t>(flat);
    }
    template <typename... Index>
    double& at(Index... index) {
        return values.at(place(index...));
    }
    template <typename... Index>
    double at(Index... index) const {
        return values.at(place(index...));
    }
};

/// Of the finite ones; 0 if there is none.
double root_mean_square(std::span<const double> values);

/// The number of elements of a shape.
std::size_t element_count(const std::vector<std::int64_t>& extents);

/// Bits of IEEE binary16 and of the upper half of a binary32, widened exactly.
double widen_f16(std::uint16_t bits) noexcept;
double widen_bf16(std::uint16_t bits) noexcept;

/// The nearest binary16 and bfloat16, ties to even; what is too large becomes infinity, NaN the plain quiet NaN.
std::uint16_t narrow_f16(double value) noexcept;
std::uint16_t narrow_bf16(double value) noexcept;

/// A copy of a strided view of any float type.
Tensor widen(const void* data, DType type, std::vector<std::int64_t> extents, const std::vector<std::int64_t>& strides);

template <std::size_t Rank>
Tensor widen(const InputTensor<Rank>& view) {
    return widen(view.data, view.dtype, {view.extents.begin(), view.extents.end()},
                 {view.strides.begin(), view.strides.end()});
}

/// A mask over scores. Boolean masks hold 1 (attend) and 0 (do not); float masks are added to the scores.
struct Mask {
    Tensor values;  ///< rank 1 to 4, broadcast by right alignment against [batch, heads, q_len, kv_len]
    bool boolean = false;
    bool last_q = false;  ///< the last dimension lies over the last q_len live keys; the keys before are allowed
};

/// A copy of a strided mask of any type.
Mask widen(const AttentionMask& mask);

}  // namespace headlong::reference
