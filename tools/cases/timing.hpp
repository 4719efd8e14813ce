// Times a computation within a bounded budget.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace headlong::tools {

/// The median of up to 9 runs, in seconds; no run is started once 5 ms have been spent.
template <typename Run>
double median_seconds(Run&& run) {
    using Clock = std::chrono::steady_clock;
    constexpr double budget = 5e-3;
    constexpr std::size_t most = 9;
    std::vector<double> samples;
    double spent = 0.0;
    while (samples.size() < most && spent < budget) {
        const Clock::time_point start = Clock::now();
        run();
        samples.push_back(std::chrono::duration<double>(Clock::now() - start).count());
        spent += samples.back();
    }
    const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
    std::nth_element(samples.begin(), middle, samples.end());
    return *middle;
}

}  // namespace headlong::tools
