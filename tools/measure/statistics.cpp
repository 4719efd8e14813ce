#include "tools/measure/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headlong::tools {

void Samples::add(std::vector<double> values) {
    std::ranges::sort(values);
    const auto middle = static_cast<std::ptrdiff_t>(sorted_.size());
    sorted_.insert(sorted_.end(), values.begin(), values.end());
    std::inplace_merge(sorted_.begin(), sorted_.begin() + middle, sorted_.end());
}

double Samples::median() const noexcept {
    if (sorted_.empty()) return 0.0;
    const std::size_t half = sorted_.size() / 2;
    return sorted_.size() % 2 == 1 ? sorted_[half] : (sorted_[half - 1] + sorted_[half]) / 2.0;
}

double Samples::quantile(double q) const noexcept {
    if (sorted_.empty()) return 0.0;
    const auto rank = static_cast<std::size_t>(std::ceil(q * static_cast<double>(sorted_.size())));
    return sorted_[std::clamp<std::size_t>(rank, 1, sorted_.size()) - 1];
}

double Samples::median_uncertainty() const noexcept {
    const auto n = static_cast<double>(sorted_.size());
    if (sorted_.size() < 6 || median() <= 0.0) return std::numeric_limits<double>::infinity();
    const double spread = 1.96 * std::sqrt(n);
    const auto low = static_cast<std::size_t>(std::max(1.0, std::floor((n - spread) / 2.0)));
    const auto high = static_cast<std::size_t>(std::min(n, std::ceil(1.0 + (n + spread) / 2.0)));
    return (sorted_[high - 1] - sorted_[low - 1]) / 2.0 / median();
}

}  // namespace headlong::tools
