// Order statistics of timings.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace headlong::tools {

/// Timings of one thing, sorted.
class Samples {
  public:
    void add(std::vector<double> values);
    std::size_t count() const noexcept { return sorted_.size(); }

    /// The middle one, or the mean of the two in the middle. 0 without samples, as below.
    double median() const noexcept;
    double min() const noexcept { return quantile(0.0); }
    double max() const noexcept { return quantile(1.0); }
    /// The smallest sample that a share q in [0, 1] of all is at most (nearest rank).
    double quantile(double q) const noexcept;

    /// Half the width of the 95 % confidence interval of the median, relative to the median: from the samples at the
    /// ranks (n -+ 1.96 sqrt(n)) / 2, which needs independent samples, but no normal distribution (Le Boudec 2010,
    /// "Performance Evaluation of Computer and Communication Systems", 2.2.2). Infinite below 6 samples.
    double median_uncertainty() const noexcept;

  private:
    std::vector<double> sorted_;
};

}  // namespace headlong::tools
