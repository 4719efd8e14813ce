// What becomes of numbers that share a scale, said again from the words of kernels/layout.hpp, for tests; and numbers
// that a quantiser may get wrong.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/support/random.hpp"

namespace headlong::test {

/// Numbers of a group: what its sizes are, and where the special groups are.
enum class Kind : std::uint8_t { normal, zero, negative_zero, tiny, least, nan, infinite, large, one_outlier };
inline constexpr std::array kKinds{Kind::normal, Kind::zero,     Kind::negative_zero, Kind::tiny,       Kind::least,
                                   Kind::nan,    Kind::infinite, Kind::large,         Kind::one_outlier};

/// Number i of a group.
inline float number(Kind kind, std::size_t i, Random& random) {
    const float x = random.normal_f32();
    switch (kind) {
        case Kind::normal:
            return x;
        case Kind::zero:
            return 0.0F;
        case Kind::negative_zero:
            return -0.0F;
        case Kind::tiny:
            return std::copysign(std::nextafter(0x1p-100F, 0.0F), x);
        case Kind::least:
            return std::copysign(0x1p-100F, x);
        case Kind::nan:
            return i == 0 ? std::bit_cast<float>(0xFFC12345U) : x;
        case Kind::infinite:
            return i == 0 ? -std::numeric_limits<float>::infinity() : x;
        case Kind::large:
            return std::copysign(std::numeric_limits<float>::max(), x) * (i == 0 ? 1.0F : 0.25F);
        case Kind::one_outlier:
            return i == 0 ? 1000.0F : x;
    }
    return x;
}

/// Largest magnitude of a group, and what the rules make of it.
struct GroupScale {
    float magnitude = 0.0F;
    bool finite = true;

    void add(float x) {
        if (!std::isfinite(x))
            finite = false;
        else
            magnitude = std::max(magnitude, std::abs(x));
    }
    bool empty() const { return !finite || magnitude < 0x1p-100F; }
    /// With codes up to `most`.
    float scale(int most) const {
        if (!finite) return std::numeric_limits<float>::quiet_NaN();
        return empty() ? 0.0F : magnitude / static_cast<float>(most);
    }
    int code(float x, int most) const {
        return empty() ? 0 : static_cast<int>(std::nearbyint(x * (static_cast<float>(most) / magnitude)));
    }
};

/// Of a row whose elements share a scale in groups: group g has scales[g].
struct Codes {
    std::vector<float> scales;
    std::vector<int> codes;

    Codes(const std::vector<float>& row, std::size_t group, int most) {
        for (std::size_t first = 0; first < row.size(); first += group) {
            const std::size_t end = std::min(row.size(), first + group);
            GroupScale scale;
            for (std::size_t i = first; i < end; ++i) scale.add(row[i]);
            scales.push_back(scale.scale(most));
            for (std::size_t i = first; i < end; ++i) codes.push_back(scale.code(row[i], most));
        }
    }
};

}  // namespace headlong::test
