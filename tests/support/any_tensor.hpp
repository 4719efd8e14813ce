// Tensors of any element type in guarded memory: float, binary16, bfloat16, and the bytes of boolean masks.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <headlong/attention.hpp>
#include <headlong/tensor.hpp>

#include "engine/reference/tensor.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {

/// What a tensor or a mask may hold, in the order of AttentionMask::Type.
enum class Element : std::uint8_t { boolean, f32, f16, bf16 };

inline Element element_of(DType type) noexcept {
    return type == DType::f32 ? Element::f32 : type == DType::f16 ? Element::f16 : Element::bf16;
}
inline DType dtype_of(Element element) noexcept {
    return element == Element::f16 ? DType::f16 : element == Element::bf16 ? DType::bf16 : DType::f32;
}
inline std::size_t size_of(Element element) noexcept {
    return element == Element::boolean ? 1 : headlong::size_of(dtype_of(element));
}

/// Quiet NaNs that the library never writes (it writes 0x7fc00000, 0x7e00 and 0x7fc0), and a byte that means "attend".
inline std::uint32_t canary_of(Element element) noexcept {
    switch (element) {
        case Element::boolean:
            return 0xA5U;
        case Element::f32:
            return kCanaryBits;
        case Element::f16:
            return 0x7FC3U;
        case Element::bf16:
            return 0x7FE5U;
    }
    return 0;
}

/// The bits of the element nearest to a number. A boolean is true unless 0; which byte says so is up to the number.
inline std::uint32_t bits_of(Element element, double value) {
    switch (element) {
        case Element::boolean:
            return static_cast<std::uint8_t>(value);
        case Element::f32:
            return std::bit_cast<std::uint32_t>(static_cast<float>(value));
        case Element::f16:
            return reference::narrow_f16(value);
        case Element::bf16:
            return reference::narrow_bf16(value);
    }
    return 0;
}

inline double value_of(Element element, std::uint32_t bits) {
    switch (element) {
        case Element::boolean:
            return static_cast<double>(bits);
        case Element::f32:
            return static_cast<double>(std::bit_cast<float>(bits));
        case Element::f16:
            return reference::widen_f16(static_cast<std::uint16_t>(bits));
        case Element::bf16:
            return reference::widen_bf16(static_cast<std::uint16_t>(bits));
    }
    return 0.0;
}

/// Calls visit(index) for every index of a shape, in row-major order.
template <std::size_t Rank, typename Visit>
void for_each_index(const Extents<Rank>& extents, const Visit& visit) {
    for (const std::int64_t extent : extents) {
        if (extent == 0) return;
    }
    Extents<Rank> index{};
    for (;;) {
        visit(std::as_const(index));
        std::size_t i = Rank;
        while (i > 0 && ++index[i - 1] == extents[i - 1]) index[--i] = 0;
        if (i == 0) return;
    }
}

/// Elements between guard pages, all canaries at first.
template <std::size_t Rank>
class AnyTensor {
  public:
    AnyTensor(Element element, const Extents<Rank>& extents, const Layout<Rank>& layout, Touch touch = Touch::end)
        : element_(element), extents_(extents), layout_(layout), memory_(layout.elements * size_of(element), touch) {
        for (std::size_t i = 0; i < layout_.elements; ++i) store(i, canary_of(element_));
    }

    /// Dense.
    AnyTensor(Element element, const Extents<Rank>& extents)
        : AnyTensor(element, extents, dense_layout<Rank>(extents)) {}

    /// Any layout, the guard page behind or in front.
    static AnyTensor random(Element element, const Extents<Rank>& extents, Random& random,
                            std::size_t broadcastable = 0) {
        const Layout<Rank> layout = random_layout<Rank>(extents, random, broadcastable);
        return AnyTensor(element, extents, layout, random.chance(0.75) ? Touch::end : Touch::begin);
    }

    Element element() const noexcept { return element_; }
    const Extents<Rank>& extents() const noexcept { return extents_; }
    const Extents<Rank>& strides() const noexcept { return layout_.strides; }

    void* data() const noexcept {
        return memory_.data() + layout_.first * static_cast<std::int64_t>(size_of(element_));
    }
    InputTensor<Rank> input() const noexcept { return {data(), dtype_of(element_), extents_, layout_.strides}; }
    OutputTensor<Rank> output() const noexcept { return {data(), dtype_of(element_), extents_, layout_.strides}; }

    std::uint32_t bits(const Extents<Rank>& index) const noexcept { return load(place(index)); }
    double get(const Extents<Rank>& index) const noexcept { return value_of(element_, bits(index)); }
    void set(const Extents<Rank>& index, double value) const { store(place(index), bits_of(element_, value)); }
    void set_bits(const Extents<Rank>& index, std::uint32_t bits) const noexcept { store(place(index), bits); }

    void fill_normal(Random& random, double factor = 1.0) const {
        for_each_index<Rank>(extents_, [&](const Extents<Rank>& i) { set(i, random.normal() * factor); });
    }
    /// From a dense row-major sequence.
    template <typename Source>
    void assign(const Source& source) const {
        auto next = source.begin();
        for_each_index<Rank>(extents_, [&](const Extents<Rank>& i) { set(i, static_cast<double>(*next++)); });
    }
    std::vector<std::uint32_t> all_bits() const {
        std::vector<std::uint32_t> all;
        for_each_index<Rank>(extents_, [&](const Extents<Rank>& i) { all.push_back(bits(i)); });
        return all;
    }

    /// Whether those elements of an output that `wanted(index)` names have been written, and nothing else.
    template <typename Wanted>
    testing::AssertionResult written_exactly(const Wanted& wanted) const {
        const std::uint32_t canary = canary_of(element_);
        std::vector<char> element(layout_.elements, 0);
        std::size_t unwritten = 0;
        for_each_index<Rank>(extents_, [&](const Extents<Rank>& i) {
            if (!wanted(i)) return;
            element[place(i)] = 1;
            unwritten += load(place(i)) == canary ? 1U : 0U;
        });
        if (unwritten != 0) return testing::AssertionFailure() << unwritten << " elements were not written";
        for (std::size_t i = 0; i < layout_.elements; ++i) {
            if (element[i] == 0 && load(i) != canary) {
                return testing::AssertionFailure()
                       << "wrote " << value_of(element_, load(i)) << " to a place that is no element, " << i << " of "
                       << layout_.elements << ", first element at " << layout_.first;
            }
        }
        return testing::AssertionSuccess();
    }
    testing::AssertionResult written_exactly() const {
        return written_exactly([](const Extents<Rank>&) { return true; });
    }
    testing::AssertionResult untouched() const {
        return written_exactly([](const Extents<Rank>&) { return false; });
    }

    /// For messages.
    std::string describe() const {
        static constexpr const char* kNames[] = {"bool", "f32", "f16", "bf16"};
        std::string text = kNames[static_cast<std::size_t>(element_)];
        for (const std::int64_t extent : extents_) text += " " + std::to_string(extent);
        text += " strides";
        for (const std::int64_t stride : layout_.strides) text += " " + std::to_string(stride);
        return text;
    }

  private:
    std::size_t place(const Extents<Rank>& index) const noexcept {
        std::int64_t flat = layout_.first;
        for (std::size_t i = 0; i < Rank; ++i) flat += index[i] * layout_.strides[i];
        return static_cast<std::size_t>(flat);
    }
    // little-endian, as every architecture that the library is built for
    std::uint32_t load(std::size_t i) const noexcept {
        std::uint32_t bits = 0;
        std::memcpy(&bits, memory_.data() + i * size_of(element_), size_of(element_));
        return bits;
    }
    void store(std::size_t i, std::uint32_t bits) const noexcept {
        std::memcpy(memory_.data() + i * size_of(element_), &bits, size_of(element_));
    }

    Element element_;
    Extents<Rank> extents_;
    Layout<Rank> layout_;
    GuardedBytes memory_;
};

}  // namespace headlong::test
