// Runs the rows of a benchmark: interleaved at random, each until its median is steady, with the machine's limits
// measured in between.
//
// A turn of a row: the clock, the limits (the best of three of multiply-adds, and of reading as much memory as the row
// walks through), one untimed run in the first turn and wherever runs are short (others' turns have emptied the
// caches), timed runs for 10 ms but at least one, the clock again. Turns of all rows that are not steady follow each
// other in an order that is drawn anew each round, so that a machine that slows down or warms up favours no row.
//
// Runs of one turn have much in common; turns do not. So a row is steady, with at least 6 turns and 10 runs, once the
// 95 % confidence interval of the median of its turns' medians is within +-2 %. It ends without being steady once 6
// turns and 6 s of timed runs are over, or 20,000 runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <headlong/context.hpp>

#include "engine/limits.hpp"
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
    double limit_flops = 0.0;    ///< per second; of the measurements in the row's turns, the best but for a tenth: a
    double limit_bytes = 0.0;    ///< maximum would grow with the number of turns
    double clock_hz = 0.0;       ///< the lower quartile of the turns' (of each, the slower of before and after)
    double best_clock_hz = 0.0;  ///< seen in the process on as many threads
    std::size_t walk_bytes = 0;
    std::size_t kv_bytes = 0;
    std::size_t scratch_bytes = 0;
    std::int64_t tokens = 0;
    bool steady = false;
    std::optional<Deviation> deviation = {};

    double gflops() const { return flops / ns.median(); }
    double gbps() const { return bytes / ns.median(); }
    /// The time that the limits allow over the time it took.
    double of_limit() const;
    bool throttled() const { return is_throttled(clock_hz, best_clock_hz); }
};

/// Called between turns with the work that is done and the estimated rest.
using OnProgress = std::function<void(std::size_t rows_done, std::size_t rows, double seconds_left)>;

/// Measures the plan's rows. Workloads that fit into memory together are interleaved; others follow in groups.
std::vector<RowResult> run_bench(const BenchPlan& plan, const OnProgress& on_progress = {});

}  // namespace headlong::tools
