// How far a benchmark is from what the machine can do: its FLOPs and bytes against the limits (engine/limits.hpp) of
// the context it runs on, measured right before and right after its loop, so that a drift of the clock favours none.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <memory_resource>
#include <utility>

#include "engine/limits.hpp"
#include "kernels/kernel_table.hpp"

namespace headlong::bench {

/// What one iteration does. Zero: of no interest, and not measured.
struct Work {
    double flops = 0.0;
    double bytes = 0.0;  ///< read and written, each byte once; every iteration walks through the same ones
};

/// Memory to read as often as a benchmark asks, one for all of them: filling it takes longer than most of them do.
inline ReadBuffer& read_buffer(std::size_t bytes) {
    static std::unique_ptr<ReadBuffer> buffer;
    if (buffer == nullptr || buffer->bytes() < bytes) {
        buffer.reset();
        buffer = std::make_unique<ReadBuffer>(bytes, *std::pmr::new_delete_resource());
    }
    return *buffer;
}

/// The limits of a context for some work: the best of all measurements.
class Limits {
  public:
    Limits(Context& context, const Work& work) : context_(context), work_(work) {
        // Of less than 16 KiB, which any L1 holds, the read loop would measure how it starts and ends.
        const std::size_t bytes = std::max(static_cast<std::size_t>(work.bytes), std::size_t{16384});
        constexpr std::size_t kUnit = kernels::kReadFloats * sizeof(float);
        size_ = kernels::round_up(std::max(bytes, context.concurrency() * kUnit), kUnit);
    }

    /// About 10 ms.
    void measure() {
        constexpr double kSeconds = 0.001;  // of reading: long beside the time that threads take to wake
        constexpr std::size_t kLeast = std::size_t{4} << 20U;
        constexpr std::size_t kCached = std::size_t{32} << 20U;
        for (int i = 0; i < 2; ++i) {
            if (work_.flops > 0.0) flops_ = std::max(flops_, measure_flops(context_));
            if (work_.bytes > 0.0) {
                // First a whole pass, if a cache may hold it: the benchmark's own memory has taken the place.
                const std::size_t least = i == 0 ? std::clamp(size_, kLeast, kCached)
                                                 : std::max(kLeast, static_cast<std::size_t>(bandwidth_ * kSeconds));
                bandwidth_ = std::max(bandwidth_, read_buffer(size_).measure(context_, size_, least));
            }
        }
        const double clock = measure_clock(context_);
        slowest_ = slowest_ == 0.0 ? clock : std::min(slowest_, clock);
        double& fastest = fastest_clock();
        fastest = std::max(fastest, clock);
    }

    /// The least that an iteration can take, in seconds.
    double seconds() const {
        return std::max(work_.flops > 0.0 ? work_.flops / flops_ : 0.0,
                        work_.bytes > 0.0 ? work_.bytes / bandwidth_ : 0.0);
    }

    /// Whether a measurement found the clock well below the fastest of this run.
    bool throttled() const { return slowest_ < 0.9 * fastest_clock(); }

  private:
    /// Sets of wide registers and many busy cores have clocks of their own.
    double& fastest_clock() const {
        static std::map<std::pair<Isa, std::size_t>, double> clocks;
        return clocks[{context_.isa(), context_.concurrency()}];
    }

    Context& context_;
    Work work_;
    std::size_t size_;
    double flops_ = 0.0;
    double bandwidth_ = 0.0;
    double slowest_ = 0.0;
};

inline void set_rate(benchmark::State& state, const char* name, double count) {
    if (count > 0.0) state.counters[name] = benchmark::Counter(count, benchmark::Counter::kIsIterationInvariantRate);
}

/// The timed loop, with the counters that README.md defines.
template <class Body>
void run(benchmark::State& state, Context& context, const Work& work, const Body& body) {
    using Clock = std::chrono::steady_clock;
    Limits limits(context, work);
    limits.measure();
    const Clock::time_point start = Clock::now();
    for (auto _ : state) {
        body();
        benchmark::ClobberMemory();
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    limits.measure();
    set_rate(state, "FLOP/s", work.flops);
    set_rate(state, "bytes/s", work.bytes);
    state.counters["of_limit"] = limits.seconds() * static_cast<double>(state.iterations()) / seconds;
    if (limits.throttled()) state.SetLabel("throttled");
}

}  // namespace headlong::bench
