// Whether the limits that everything else is measured against are right: the engine's measurements (engine/limits.hpp)
// beside loops of this suite's own (own_loops.hpp), a few milliseconds of each in turn, the best of each.
//   own         FLOP/s, integer operations/s or bytes/s of the own loop
//   engine      the same of the engine's measure_*()
//   engine/own  within 0.9 to 1.1, or one of the two does not find the limit
#include <benchmark/benchmark.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <memory_resource>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "bench/data.hpp"
#include "bench/own_loops.hpp"
#include "engine/limits.hpp"

namespace headlong::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// Seconds that body(thread) takes on threads that start together, from the first start to the last end.
template <class Body>
double seconds_of(std::size_t threads, const Body& body) {
    std::vector<Clock::time_point> starts(threads), ends(threads);
    std::barrier start(static_cast<std::ptrdiff_t>(threads));
    const auto timed = [&](std::size_t thread) {
        start.arrive_and_wait();
        starts[thread] = Clock::now();
        body(thread);
        ends[thread] = Clock::now();
    };
    {
        std::vector<std::jthread> others;
        for (std::size_t thread = 1; thread < threads; ++thread) others.emplace_back(timed, thread);
        timed(0);
    }
    return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) -
                                         *std::min_element(starts.begin(), starts.end()))
        .count();
}

constexpr double kWrong = std::numeric_limits<double>::quiet_NaN();  // an own loop's sum was

/// Takes both rates in turn, once an iteration.
template <class Own, class Engine>
void compare(benchmark::State& state, const Own& own, const Engine& engine) {
    double best_own = 0.0;
    double best_engine = 0.0;
    for (auto _ : state) {
        const double rate = own();
        if (!(rate > 0.0)) {
            state.SkipWithError("the sum of an own loop is wrong");
            break;
        }
        best_own = std::max(best_own, rate);
        best_engine = std::max(best_engine, engine());
    }
    state.counters["own"] = best_own;
    state.counters["engine"] = best_engine;
    state.counters["engine/own"] = best_engine / best_own;
}

/// As many operations as take a millisecond or two.
constexpr std::size_t kFlops = 50'000'000;
constexpr std::size_t kProducts = 50'000'000;

void limit_of_flops(benchmark::State& state, Isa isa) {
    Context context = context_of(isa, state.range(0));
    const std::size_t threads = context.concurrency();
    const OwnLoops& loops = *own_loops_of(isa);
    const std::size_t rounds = kFlops / loops.flops;
    std::vector<float> results(threads);
    compare(
        state,
        [&] {
            const double seconds =
                seconds_of(threads, [&](std::size_t thread) { results[thread] = loops.fma(rounds); });
            const auto right = [&](float result) { return result == loops.fma_result(rounds); };
            if (!std::all_of(results.begin(), results.end(), right)) return kWrong;
            return static_cast<double>(loops.flops * rounds * threads) / seconds;
        },
        [&] { return measure_flops(context); });
}

void limit_of_int8_ops(benchmark::State& state, Isa isa) {
    Context context = context_of(isa, 1);
    const OwnLoops& loops = *own_loops_of(isa);
    const std::size_t rounds = kProducts / loops.products;
    const std::size_t products = rounds * loops.products;
    std::uint32_t sum = 0;
    compare(
        state,
        [&] {
            const double seconds = seconds_of(1, [&](std::size_t) { sum = loops.dot(rounds); });
            return sum == static_cast<std::uint32_t>(15 * products) ? 2.0 * static_cast<double>(products) / seconds
                                                                    : kWrong;
        },
        [&] { return measure_int8_ops(context); });
}

/// Memory whose integers are their own indices, read in passes over each thread's part, or piece by piece if it is
/// large.
class OwnMemory {
  public:
    explicit OwnMemory(std::size_t bytes)
        : count_(bytes / sizeof(std::uint64_t)),
          data_(static_cast<std::uint64_t*>(::operator new (bytes, std::align_val_t{kHugePageBytes}))) {
#if defined(__linux__)
        // as caches and the engine's read buffer ask for them, and before they are touched: with small pages the loop
        // would measure how addresses are translated
        if (bytes >= kHugePageBytes) {
            static_cast<void>(madvise(data_.get(), bytes / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE));
        }
#endif
        for (std::size_t i = 0; i < count_; ++i) data_.get()[i] = i;
    }

    /// Bytes/s of reading `bytes` a thread, from where the last measurement ended.
    double measure(const OwnLoops& loops, std::size_t threads, std::size_t bytes, std::size_t ahead) {
        constexpr std::size_t kUnit = 64;  // integers that a loop takes at a time
        const std::size_t part = count_ / threads / kUnit * kUnit;
        const std::size_t piece = std::min(bytes / sizeof(std::uint64_t) / kUnit * kUnit, part);
        const std::size_t passes = bytes / sizeof(std::uint64_t) / piece;
        if (at_ + piece > part) at_ = 0;
        std::vector<std::uint64_t> sums(threads);
        const double seconds = seconds_of(threads, [&](std::size_t thread) {
            sums[thread] = loops.read(data_.get() + thread * part + at_, piece, passes, ahead);
        });
        for (std::size_t thread = 0; thread < threads; ++thread) {
            const std::uint64_t first = thread * part + at_;
            if (sums[thread] != passes * (piece * first + piece * (piece - 1) / 2)) return kWrong;
        }
        at_ += piece;
        return static_cast<double>(passes * piece * sizeof(std::uint64_t) * threads) / seconds;
    }

  private:
    static constexpr std::size_t kHugePageBytes = std::size_t{2} << 20U;
    struct Free {
        void operator()(std::uint64_t* p) const { ::operator delete (p, std::align_val_t{kHugePageBytes}); }
    };
    std::size_t count_;
    std::unique_ptr<std::uint64_t, Free> data_;
    std::size_t at_ = 0;
};

/// Over `bytes` of memory, of which each thread has a part.
void limit_of_reading(benchmark::State& state, Isa isa, std::size_t bytes) {
    constexpr std::size_t kBytes = 1U << 25U;  // a thread and measurement
    constexpr std::size_t kAhead = 2048;
    Context context = context_of(isa, state.range(0));
    const std::size_t threads = context.concurrency();
    const OwnLoops& loops = *own_loops_of(isa);
    OwnMemory memory(bytes);
    ReadBuffer buffer(bytes, *std::pmr::new_delete_resource());
    compare(
        state,
        [&] {
            // the engine's memory has pushed ours out of the caches: once for nothing, as the engine does
            if (std::isnan(memory.measure(loops, threads, kBytes, 0))) return kWrong;
            const double plain = memory.measure(loops, threads, kBytes, 0);
            const double prefetching = memory.measure(loops, threads, kBytes, kAhead);
            return plain > 0.0 && prefetching > 0.0 ? std::max(plain, prefetching) : kWrong;
        },
        [&] { return buffer.measure(context, bytes, kBytes * threads); });
}

/// One cache of a level; what a laptop has where the system tells of none.
benchmark::CPUInfo::CacheInfo cache_of(int level) {
    for (const benchmark::CPUInfo::CacheInfo& cache : benchmark::CPUInfo::Get().caches) {
        if (cache.level == level && cache.type != "Instruction") return cache;
    }
    return {"", level, level == 1 ? 1 << 15 : level == 2 ? 1 << 19 : 1 << 23, 0};
}

/// Four times what all last-level caches hold.
std::size_t memory_bytes() {
    const benchmark::CPUInfo::CacheInfo last = cache_of(3);
    const auto sharing = static_cast<std::size_t>(std::max(last.num_sharing, 1));
    const std::size_t caches = last.num_sharing == 0 ? 1 : (default_concurrency() + sharing - 1) / sharing;
    return 4 * caches * static_cast<std::size_t>(last.size);
}

/// In place of the rows of a set that own_loops.hpp has nothing for: what is not checked should be seen.
void no_own_loops(benchmark::State& state, Isa) { state.SkipWithError("own_loops.hpp has no loops for this set"); }

const bool registered = [] {
    constexpr std::int64_t kAlternations = 16;
    const std::vector<std::int64_t> threads = thread_counts();
    for (const Isa isa : available_isas()) {
        if (own_loops_of(isa) == nullptr) {
            add("limits", isa, "none", no_own_loops)->Iterations(1);
            continue;
        }
        const auto args = [&](benchmark::internal::Benchmark* b, const std::vector<std::int64_t>& counts) {
            b->ArgName("threads")->ArgsProduct({counts})->Iterations(kAlternations)->Unit(benchmark::kMillisecond);
        };
        args(add("limits", isa, "flops", limit_of_flops), threads);
        add("limits", isa, "int8_ops", limit_of_int8_ops)->Iterations(kAlternations)->Unit(benchmark::kMillisecond);
        for (const int level : {1, 2, 3}) {
            // both memories fit together, beside what others have in a cache that is shared
            const std::size_t part = static_cast<std::size_t>(cache_of(level).size) / (level == 3 ? 8 : 2);
            args(add("limits", isa, "read_L" + std::to_string(level), limit_of_reading, part), {1});
        }
        args(add("limits", isa, "read_memory", limit_of_reading, memory_bytes()), threads);
    }
    return true;
}();

}  // namespace
}  // namespace headlong::bench
