// Runs the rows of a benchmark: interleaved at random, each until its median is steady, with the machine's limits
// measured in between.
//
// A turn of a row: the clock, the limits (multiply-adds; reading as much memory as the row walks through), one untimed
// run if runs are short (others' turns have emptied the caches), timed runs for 10 ms but at least one, the clock
// again. Turns of all rows that are not steady follow each other in an order that is drawn anew each round, so that a
// machine that slows down or warms up favours no row.
//
// A row is steady with at least 5 turns and 10 runs, once the 95 % confidence interval of its median is within +-2 %.
// It ends without being steady after 3 s of timed runs (but 5 turns), or 20,000 runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <headlong/context.hpp>

#include "tools/bench/workload.hpp"
#include "tools/measure/statistics.hpp"

namespace headlong::tools {

/// One row: a workload on a number of threads with an instruction set.
struct PlannedRow {
    std::size_t workload = 0;  ///< index into the plan's workloads
    Isa isa = Isa::generic;
    std::size_t threads = 1;
};

struct BenchPlan {
    std::vector<PlannedWorkload> workloads;
    std::vector<PlannedRow> rows;
    std::optional<std::size_t> repetitions;  ///< exactly so many, instead of until steady
    bool check = false;                      ///< compare outputs with the reference
};

struct RowResult {
    Samples ns;  ///< nanoseconds of each timed run
    double flops = 0.0;
    double bytes = 0.0;
    double limit_flops = 0.0;  ///< per second: the best measured between the row's own turns
    double limit_bytes = 0.0;
    double clock_hz = 0.0;  ///< the median of the turns' (of each, the slower of before and after)
    std::size_t kv_bytes = 0;
    std::size_t scratch_bytes = 0;
    std::int64_t tokens = 0;
    bool steady = false;
    std::optional<Deviation> deviation = {};

    double gflops() const { return flops / ns.median(); }
    double gbps() const { return bytes / ns.median(); }
    /// The time that the limits allow over the time it took.
    double of_limit() const;
};

struct BenchResult {
    std::vector<RowResult> rows;  ///< of the plan's rows
    double best_clock_hz = 0.0;   ///< seen in the process

    /// The core was slowed down: its ratios mislead, since memory is not.
    bool throttled(const RowResult& row) const { return row.clock_hz < 0.9 * best_clock_hz; }
};

/// Called between turns with the work that is done and the estimated rest.
using OnProgress = std::function<void(std::size_t rows_done, std::size_t rows, double seconds_left)>;

/// Workloads that fit into memory together are interleaved; others follow in groups.
BenchResult run_bench(const BenchPlan& plan, const OnProgress& on_progress = {});

}  // namespace headlong::tools
