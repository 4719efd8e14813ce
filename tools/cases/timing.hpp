// Times a computation within a bounded budget.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace headlong::tools {

/// The median of 3 to 9 runs, in seconds. No run is started once 5 ms have been spent, unless there are fewer than 3;
/// and none at all once 50 ms have.
template <typename Run>
double median_seconds(Run&& run) {
    using Clock = std::chrono::steady_clock;
    std::vector<double> samples;
    double spent = 0.0;
    while (samples.empty() || (samples.size() < 3 ? spent < 50e-3 : samples.size() < 9 && spent < 5e-3)) {
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
