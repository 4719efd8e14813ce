#include "engine/reference/quantise.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "engine/reference/tensor.hpp"

namespace headlong::reference {

namespace {

// Products and quotients of floats in double are exact, or so near that rounding them to float rounds once.
double rounded(double x) { return static_cast<double>(static_cast<float>(x)); }

void quantise(std::span<double> group, double largest_code) {
    double largest = 0.0;
    bool finite = true;
    for (const double x : group) {
        finite = finite && std::isfinite(x);
        largest = std::max(largest, std::abs(x));
    }
    if (!finite || largest < 0x1p-100) {
        std::ranges::fill(group, finite ? 0.0 : std::numeric_limits<double>::quiet_NaN());
        return;
    }
    const double scale = rounded(largest / largest_code);
    const double inverse = rounded(largest_code / largest);
    for (double& x : group) {
        const double code = std::nearbyint(rounded(x * inverse));
        x = code == 0.0 ? 0.0 : rounded(scale * code);  // codes have no negative zero
    }
}

std::vector<double> stored(KvType type, std::vector<double> rows, std::int64_t dim, std::size_t group) {
    if (type == KvType::f16) {
        for (double& x : rows) x = widen_f16(narrow_f16(x));
    } else if (type == KvType::bf16) {
        for (double& x : rows) x = widen_bf16(narrow_bf16(x));
    } else if (has_codes(type)) {
        const auto width = static_cast<std::size_t>(dim);
        for (std::size_t row = 0; row < rows.size(); row += width) {
            for (std::size_t first = 0; first < width; first += group) {
                quantise(std::span(rows).subspan(row + first, std::min(group, width - first)),
                         type == KvType::int8 ? 127.0 : 7.0);
            }
        }
    }
    return rows;
}

}  // namespace

bool has_codes(KvType type) noexcept { return type == KvType::int8 || type == KvType::int4; }

std::vector<double> stored_keys(KvType type, std::vector<double> rows, std::int64_t dim) {
    return stored(type, std::move(rows), dim, kKeyGroup);
}

std::vector<double> stored_values(KvType type, std::vector<double> rows, std::int64_t dim) {
    return stored(type, std::move(rows), dim, kValueGroup);
}

}  // namespace headlong::reference
