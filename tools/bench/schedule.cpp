#include "tools/bench/schedule.hpp"

#include <algorithm>
#include <chrono>
#include <random>

#include "engine/limits.hpp"
#include "tools/measure/contexts.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/memory.hpp"

namespace headlong::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr std::size_t kLeastTurns = 5;
constexpr std::size_t kLeastRuns = 10;
constexpr std::size_t kMostRuns = 20'000;
constexpr double kSteady = 0.02;
constexpr double kTurnSeconds = 10e-3;
constexpr double kRowSeconds = 3.0;
// A run that takes longer than this hardly notices that its first touch of each cache line was a miss.
constexpr double kWarmUpBelow = 20e-3;

/// A row under way.
struct Runner {
    RowResult& result;
    Workload& workload;
    std::unique_ptr<Context> context;
    std::optional<std::size_t> repetitions;
    Samples clocks;
    std::size_t turns = 0;
    double spent = 0.0;  ///< seconds of timed runs
    bool done = false;

    void turn(ReadBuffer& buffer, double& best_clock) {
        const double before = measure_clock(*context);
        result.limit_flops = std::max(result.limit_flops, measure_flops(*context));
        const std::size_t walk = workload.walk_bytes();
        const auto least =
            std::clamp(static_cast<std::size_t>(result.bytes), std::size_t{4} << 20U, std::size_t{64} << 20U);
        result.limit_bytes = std::max(result.limit_bytes, buffer.measure(*context, walk, least));
        if (turns == 0 || result.ns.median() < kWarmUpBelow * 1e9) workload.run(*context);
        const std::size_t most = repetitions ? *repetitions : kMostRuns;
        const std::size_t of_turn = repetitions ? (*repetitions + kLeastTurns - 1) / kLeastTurns : kMostRuns;
        double turn_spent = 0.0;
        std::size_t runs = 0;
        do {
            const Clock::time_point start = Clock::now();
            workload.run(*context);
            const double seconds = seconds_since(start);
            result.ns.add(seconds * 1e9);
            turn_spent += seconds;
            ++runs;
        } while (result.ns.count() < most && runs < of_turn && (repetitions || turn_spent < kTurnSeconds));
        const double after = measure_clock(*context);
        clocks.add(std::min(before, after));
        best_clock = std::max({best_clock, before, after});
        spent += turn_spent;
        ++turns;
        if (repetitions) {
            done = result.ns.count() >= *repetitions;
        } else {
            result.steady =
                turns >= kLeastTurns && result.ns.count() >= kLeastRuns && result.ns.median_uncertainty() <= kSteady;
            done = result.steady || (turns >= kLeastTurns && spent >= kRowSeconds) || result.ns.count() >= kMostRuns;
        }
        result.clock_hz = clocks.median();
        result.scratch_bytes = context->scratch_bytes();
    }

    /// Of timed runs, at most.
    double seconds_left() const {
        if (done) return 0.0;
        if (result.ns.count() == 0) return kRowSeconds / 2.0;
        const double one = result.ns.median() * 1e-9;
        if (repetitions) return one * static_cast<double>(*repetitions - result.ns.count());
        return std::max(kRowSeconds - spent, one * static_cast<double>(kLeastTurns - std::min(turns, kLeastTurns)));
    }
};

}  // namespace

double RowResult::of_limit() const {
    const double compute = limit_flops > 0.0 ? flops / limit_flops : 0.0;
    const double memory = limit_bytes > 0.0 ? bytes / limit_bytes : 0.0;
    return std::max(compute, memory) * 1e9 / ns.median();
}

BenchResult run_bench(const BenchPlan& plan, const OnProgress& on_progress) {
    BenchResult result;
    result.rows.resize(plan.rows.size());
    std::mt19937 order(1);
    std::size_t rows_done = 0;
    const std::size_t most_read = std::max(8 * last_level_cache_bytes(), std::size_t{64} << 20U);

    std::vector<std::size_t> used;
    for (std::size_t w = 0; w < plan.workloads.size(); ++w) {
        if (std::ranges::any_of(plan.rows, [&](const PlannedRow& row) { return row.workload == w; })) used.push_back(w);
    }
    for (std::size_t first = 0; first < used.size();) {
        // half of what is free: the rest is for scratch, the read buffer and others
        const std::size_t budget = available_memory() / 2;
        std::size_t end = first;
        std::size_t bytes = 0;
        do {
            bytes += plan.workloads[used[end]].memory_bytes;
            ++end;
        } while (end < used.size() && bytes + plan.workloads[used[end]].memory_bytes <= budget);

        std::vector<std::unique_ptr<Workload>> workloads;
        std::vector<Runner> runners;
        std::size_t walk = 0;
        for (std::size_t i = first; i < end; ++i) {
            const std::size_t w = used[i];
            const std::unique_ptr<Context> maker = make_context({}, default_concurrency());
            workloads.push_back(plan.workloads[w].make(*maker));
            walk = std::max(walk, workloads.back()->walk_bytes());
            for (std::size_t r = 0; r < plan.rows.size(); ++r) {
                const PlannedRow& row = plan.rows[r];
                if (row.workload != w) continue;
                Workload& workload = *workloads.back();
                RowResult& out = result.rows[r];
                out.flops = workload.flops();
                out.bytes = workload.bytes();
                out.kv_bytes = workload.kv_bytes();
                out.tokens = workload.tokens();
                runners.push_back({.result = out,
                                   .workload = workload,
                                   .context = make_context(row.isa, row.threads),
                                   .repetitions = plan.repetitions,
                                   .clocks = {}});
            }
        }
        // Far beyond the last-level cache, bandwidth does not depend on the size any more.
        ReadBuffer buffer(std::min(walk, most_read), *std::pmr::new_delete_resource());

        std::vector<Runner*> left;
        for (Runner& runner : runners) left.push_back(&runner);
        while (!left.empty()) {
            std::ranges::shuffle(left, order);
            for (Runner* runner : left) {
                if (on_progress) {
                    double seconds =
                        kRowSeconds / 2.0 * static_cast<double>(plan.rows.size() - rows_done - left.size());
                    for (const Runner& each : runners) seconds += each.seconds_left();
                    on_progress(rows_done, plan.rows.size(), seconds);
                }
                runner->turn(buffer, result.best_clock_hz);
            }
            rows_done += static_cast<std::size_t>(std::erase_if(left, [](const Runner* r) { return r->done; }));
        }
        if (plan.check) {
            for (Runner& runner : runners) runner.result.deviation = runner.workload.check(*runner.context);
        }
        first = end;
    }
    return result;
}

}  // namespace headlong::tools
