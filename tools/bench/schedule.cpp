#include "tools/bench/schedule.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <random>

#include "engine/limits.hpp"
#include "tools/measure/contexts.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/memory.hpp"

namespace headlong::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr std::size_t kLeastTurns = 6;
constexpr std::size_t kLeastRuns = 10;
constexpr std::size_t kMostRuns = 20'000;
constexpr double kSteady = 0.02;
constexpr double kTurnSeconds = 10e-3;
constexpr double kRowSeconds = 6.0;
// A run that takes longer than this hardly notices that its first touch of each cache line was a miss.
constexpr double kWarmUpBelow = 20e-3;

/// A row under way.
struct Runner {
    RowResult& result;
    Workload& workload;
    std::unique_ptr<Context> context;
    std::optional<std::size_t> repetitions;
    double& best_clock;                                   ///< of rows on as many threads
    Samples clocks, flops_limits, bytes_limits, medians;  ///< of the turns
    double spent = 0.0;                                   ///< seconds of timed runs
    bool done = false;

    std::size_t turns() const { return clocks.count(); }

    void turn(ReadBuffer& buffer) {
        constexpr std::size_t kLeastRead = std::size_t{4} << 20U;  // 0.1 ms and more, however fast the cache
        constexpr std::size_t kMostRead = std::size_t{64} << 20U;  // 5 ms of memory
        const double before = measure_clock(*context);
        const auto read = std::clamp(static_cast<std::size_t>(result.bytes), kLeastRead, kMostRead);
        double flops = 0.0;
        double bytes = 0.0;
        for (int i = 0; i < 3; ++i) {  // a core that has just been woken takes a millisecond to come to its clock
            flops = std::max(flops, measure_flops(*context));
            bytes = std::max(bytes, buffer.measure(*context, result.walk_bytes, read));
        }
        flops_limits.add({flops});
        bytes_limits.add({bytes});
        if (turns() == 0 || result.ns.min() < kWarmUpBelow * 1e9) workload.run(*context);
        std::vector<double> ns = timed_runs();
        const double after = measure_clock(*context);
        clocks.add({std::min(before, after)});
        best_clock = std::max({best_clock, before, after});
        Samples of_turn;
        of_turn.add(ns);
        medians.add({of_turn.median()});
        result.ns.add(std::move(ns));
        if (repetitions) {
            done = result.ns.count() >= *repetitions;
        } else {
            const bool enough = turns() >= kLeastTurns;
            result.steady = enough && result.ns.count() >= kLeastRuns && medians.median_uncertainty() <= kSteady;
            done = result.steady || (enough && spent >= kRowSeconds) || result.ns.count() >= kMostRuns;
        }
        result.limit_flops = flops_limits.quantile(0.9);
        result.limit_bytes = bytes_limits.quantile(0.9);
        result.clock_hz = clocks.quantile(0.25);
        result.scratch_bytes = context->scratch_bytes();
    }

    /// Of timed runs, at most.
    double seconds_left() const {
        if (done) return 0.0;
        if (result.ns.count() == 0) return kRowSeconds / 2.0;
        const double one = result.ns.median() * 1e-9;
        if (repetitions) return one * static_cast<double>(*repetitions - result.ns.count());
        return std::max(kRowSeconds - spent, one * static_cast<double>(kLeastTurns - std::min(turns(), kLeastTurns)));
    }

  private:
    /// The nanoseconds of one turn's runs.
    std::vector<double> timed_runs() {
        const std::size_t all = repetitions.value_or(kMostRuns);
        const std::size_t most =
            std::min((all + kLeastTurns - 1) / kLeastTurns, all - std::min(all, result.ns.count()));
        std::vector<double> ns;
        ns.reserve(most);  // nothing is moved between runs
        double seconds = 0.0;
        do {
            const Clock::time_point start = Clock::now();
            workload.run(*context);
            const double one = seconds_since(start);
            ns.push_back(one * 1e9);
            seconds += one;
        } while (ns.size() < most && (repetitions || seconds < kTurnSeconds));
        spent += seconds;
        return ns;
    }
};

}  // namespace

double RowResult::of_limit() const {
    const double compute = limit_flops > 0.0 ? flops / limit_flops : 0.0;
    const double memory = limit_bytes > 0.0 ? bytes / limit_bytes : 0.0;
    return std::max(compute, memory) * 1e9 / ns.median();
}

std::vector<RowResult> run_bench(const BenchPlan& plan, const OnProgress& on_progress) {
    std::vector<RowResult> results(plan.rows.size());
    std::map<std::size_t, double> best_clocks;  // by threads: more cores at work clock lower
    std::mt19937 order(1);
    std::size_t rows_done = 0;

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
                RowResult& out = results[r];
                out.flops = workload.flops();
                out.bytes = workload.bytes();
                out.kv_bytes = workload.kv_bytes();
                out.tokens = workload.tokens();
                out.walk_bytes = workload.walk_bytes();
                runners.push_back({.result = out,
                                   .workload = workload,
                                   .context = make_context(row.isa, row.threads),
                                   .repetitions = plan.repetitions,
                                   .best_clock = best_clocks[row.threads],
                                   .clocks = {},
                                   .flops_limits = {},
                                   .bytes_limits = {},
                                   .medians = {}});
            }
        }
        ReadBuffer buffer(std::min(walk, read_buffer_cap()), runners.front().context->memory());

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
                runner->turn(buffer);
            }
            rows_done += static_cast<std::size_t>(std::erase_if(left, [](const Runner* r) { return r->done; }));
        }
        if (plan.check) {
            for (Runner& runner : runners) runner.result.deviation = runner.workload.check(*runner.context);
        }
        first = end;
    }
    for (std::size_t r = 0; r < results.size(); ++r) results[r].best_clock_hz = best_clocks[plan.rows[r].threads];
    return results;
}

}  // namespace headlong::tools
