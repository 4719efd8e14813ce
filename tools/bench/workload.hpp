// What a row of a benchmark computes.
#pragma once

#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <headlong/context.hpp>
#include <nlohmann/json.hpp>

namespace headlong::tools {

/// The largest difference between an output and the double-precision reference, and how large it may be.
struct Deviation {
    double max_abs_err = 0.0;
    double tolerance = 1e-5;

    /// False for a NaN, too.
    bool passes() const { return max_abs_err <= tolerance; }
};

/// The one that is further off, measured by its own tolerance. A NaN stays.
inline Deviation worse(const Deviation& a, const Deviation& b) {
    if (std::isnan(a.max_abs_err)) return a;
    return std::isnan(b.max_abs_err) || b.max_abs_err / b.tolerance > a.max_abs_err / a.tolerance ? b : a;
}

/// Data and a computation over it. Contexts of any instruction set and number of threads may run it, one at a time.
class Workload {
  public:
    Workload() = default;
    Workload(const Workload&) = delete;
    Workload& operator=(const Workload&) = delete;
    virtual ~Workload() = default;

    /// One repetition: what is timed.
    virtual void run(Context& context) = 0;

    virtual double flops() const = 0;
    virtual double bytes() const = 0;            ///< read by one repetition, each once
    virtual std::size_t kv_bytes() const = 0;    ///< of the keys and values of one repetition, as they are stored
    virtual std::size_t walk_bytes() const = 0;  ///< what repetitions walk through before they come back to the same
    virtual std::int64_t tokens() const { return 0; }  ///< that one repetition computes; 0 = not a model

    /// Runs once, and compares sampled rows of the output with the reference.
    virtual std::optional<Deviation> check(Context& context) = 0;
};

/// A workload that does not exist yet.
struct PlannedWorkload {
    nlohmann::ordered_json
        shape;  ///< the fields that say what is computed: rows of two reports are the same if these are
    std::size_t memory_bytes = 0;  ///< that it will hold
    std::function<std::unique_ptr<Workload>(Context&)> make;
};

}  // namespace headlong::tools
