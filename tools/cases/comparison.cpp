#include "tools/cases/comparison.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "engine/reference/quantise.hpp"
#include "engine/reference/tensor.hpp"

namespace headlong::tools {

Tolerance output_tolerance(const reference::AttentionResult& expected, const KvTypes& types) {
    if (!reference::has_codes(types.keys) && !reference::has_codes(types.values)) {
        return {.absolute = reference::output_tolerance(expected.magnitudes)};
    }
    const reference::CodesTolerance codes = reference::codes_output_tolerance(expected);
    return {.absolute = codes.element, .rms = codes.root_mean_square};
}

Tolerance lse_tolerance(const reference::Magnitudes& magnitudes, const KvTypes& types) {
    return {.absolute = reference::has_codes(types.keys) ? reference::codes_lse_tolerance(magnitudes)
                                                         : reference::lse_tolerance(magnitudes)};
}

std::string element_name(const std::string& tensor, std::span<const std::int64_t> shape, std::size_t flat) {
    std::vector<std::size_t> index(shape.size());
    for (std::size_t i = shape.size(); i-- > 0;) {
        const auto extent = static_cast<std::size_t>(shape[i]);
        index[i] = flat % extent;
        flat /= extent;
    }
    return fmt::format("{}[{}]", tensor, fmt::join(index, ", "));
}

void Comparison::compare(const std::string& tensor, const std::string& path, std::span<const std::int64_t> shape,
                         std::span<const double> got, std::span<const double> expected, Tolerance tolerance) {
    if (got.size() != expected.size()) {
        fail(fmt::format("{}: {} elements of {}, expected {}", path, got.size(), tensor, expected.size()));
        return;
    }
    std::vector<double> errors;
    std::size_t wrong = 0;
    std::size_t worst = 0;
    double worst_excess = -1.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        if (std::isnan(got[i]) && std::isnan(expected[i])) continue;
        const double error = got[i] == expected[i] ? 0.0 : std::abs(got[i] - expected[i]);  // infinities too
        if (tolerance.rms && std::isfinite(expected[i])) errors.push_back(error);
        if (error == 0.0) continue;
        if (std::isfinite(error)) max_abs_err_ = std::max(max_abs_err_, error);
        const double allowed = tolerance.absolute + tolerance.relative * std::abs(expected[i]);
        if (error <= allowed && std::isfinite(expected[i])) continue;
        ++wrong;
        const double excess = std::isfinite(error) ? error - allowed : std::numeric_limits<double>::infinity();
        if (excess > worst_excess) {
            worst_excess = excess;
            worst = i;
        }
    }
    if (wrong == 0) {
        if (!tolerance.rms) return;
        const double rms = reference::root_mean_square(errors);
        const double allowed = *tolerance.rms + tolerance.relative * reference::root_mean_square(expected);
        if (rms <= allowed) return;
        fail(fmt::format("{}: the root mean square of the errors of {} is {:.3g}, allowed is {:.3g}", path, tensor, rms,
                         allowed));
        return;
    }
    fail(fmt::format("{}: {} is {:.9g}, expected {:.9g} within {:.2g}; {} of {} elements are wrong", path,
                     element_name(tensor, shape, worst), got[worst], expected[worst],
                     tolerance.absolute + tolerance.relative * std::abs(expected[worst]), wrong, got.size()));
}

void Comparison::fail(const std::string& why) {
    if (why_.empty()) why_ = why;
}

Outcome Comparison::outcome() const {
    return {.status = why_.empty() ? Status::passed : Status::failed, .max_abs_err = max_abs_err_, .why = why_};
}

}  // namespace headlong::tools
