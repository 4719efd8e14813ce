// Takes an input apart: the decisions of a fuzzer that draws what it does from bytes.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <type_traits>

#include "tests/fuzz/fuzzer.hpp"

namespace headlong::fuzz {

template <class T>
concept Number = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;

/// Where the input ends, everything is 0.
class Reader {
  public:
    explicit Reader(Input input) noexcept : rest_(input) {}

    bool empty() const noexcept { return rest_.empty(); }
    Input rest() const noexcept { return rest_; }

    /// The bytes of an integer or a float, little-endian.
    template <Number T>
    T take() noexcept {
        std::array<std::byte, sizeof(T)> taken{};
        std::ranges::copy(bytes(taken.size()), taken.begin());
        if constexpr (std::endian::native == std::endian::big) std::ranges::reverse(taken);
        return std::bit_cast<T>(taken);
    }
    template <std::integral T>
    T integer() noexcept {
        return take<T>();
    }
    std::uint8_t byte() noexcept { return take<std::uint8_t>(); }
    bool flag() noexcept { return byte() % 2 != 0; }

    /// In [0, n), n > 0.
    std::size_t below(std::size_t n) noexcept { return n <= 256 ? byte() % n : take<std::uint32_t>() % n; }
    template <class T>
    T one_of(std::span<const T> values) noexcept {
        return values[below(values.size())];
    }
    template <class T>
    T one_of(std::initializer_list<T> values) noexcept {
        return one_of(std::span<const T>(values.begin(), values.size()));
    }
    /// The next bytes; fewer where the input ends.
    Input bytes(std::size_t most) noexcept {
        const Input taken = rest_.first(std::min(most, rest_.size()));
        rest_ = rest_.subspan(taken.size());
        return taken;
    }

  private:
    Input rest_;
};

}  // namespace headlong::fuzz
