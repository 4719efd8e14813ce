// Comparisons with messages that say where, what, and how far off.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "engine/reference/tensor.hpp"

namespace headlong::test {

/// "[1, 0, 12]": the index of a flat place in a row-major shape.
inline std::string index_text(const std::vector<std::int64_t>& extents, std::size_t flat) {
    std::vector<std::size_t> index(extents.size());
    for (std::size_t i = extents.size(); i-- > 0;) {
        index[i] = flat % static_cast<std::size_t>(extents[i]);
        flat /= static_cast<std::size_t>(extents[i]);
    }
    std::string text = "[";
    for (std::size_t i = 0; i < index.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(index[i]);
    return text + "]";
}

/// Whether two numbers agree: equal infinities match, NaN matches only NaN, the rest within the bound.
inline bool agree(double got, double want, double bound) noexcept {
    if (std::isnan(got) || std::isnan(want)) return std::isnan(got) && std::isnan(want);
    return got == want || std::abs(got - want) <= bound;
}

/// Compares row-major elements with the reference. `bound` is absolute.
template <typename Got>
testing::AssertionResult within(const Got& got, const reference::Tensor& want, double bound) {
    if (got.size() != want.values.size()) {
        return testing::AssertionFailure() << got.size() << " elements, want " << want.values.size();
    }
    std::size_t wrong = 0;
    std::size_t worst = 0;
    double worst_error = -1.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const auto value = static_cast<double>(got[i]);
        if (agree(value, want.values[i], bound)) continue;
        ++wrong;
        double error = std::abs(value - want.values[i]);
        if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
        if (error > worst_error) {
            worst_error = error;
            worst = i;
        }
    }
    if (wrong == 0) return testing::AssertionSuccess();
    std::ostringstream text;
    text << std::setprecision(10) << wrong << " of " << got.size() << " elements are wrong, the worst at "
         << index_text(want.extents, worst) << ": got " << got[worst] << ", want " << want.values[worst] << ", error "
         << worst_error << ", allowed " << bound;
    return testing::AssertionFailure() << text.str();
}

inline bool same_bits(float a, float b) noexcept {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

inline std::string bits_text(float x) {
    std::ostringstream text;
    text << std::setprecision(9) << x << " (0x" << std::hex << std::setw(8) << std::setfill('0')
         << std::bit_cast<std::uint32_t>(x) << ")";
    return text.str();
}

/// memcmp with a message.
inline testing::AssertionResult same_bits(const float* a, const float* b, std::size_t count) {
    if (count == 0 || std::memcmp(a, b, count * sizeof(float)) == 0) return testing::AssertionSuccess();
    std::size_t different = 0;
    std::size_t first = count;
    for (std::size_t i = 0; i < count; ++i) {
        if (same_bits(a[i], b[i])) continue;
        ++different;
        if (first == count) first = i;
    }
    return testing::AssertionFailure() << different << " of " << count << " floats differ in their bits, the first at "
                                       << first << ": " << bits_text(a[first]) << " and " << bits_text(b[first]);
}

inline testing::AssertionResult same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " floats and " << b.size();
    return same_bits(a.data(), b.data(), a.size());
}

}  // namespace headlong::test
