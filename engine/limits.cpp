#include "engine/limits.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/context_impl.hpp"
#include "engine/huge_pages.hpp"
#include "engine/parallel.hpp"
#include "kernels/compiler.hpp"

namespace headlong {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void check(bool right, const char* loop) {
    if (!right) throw std::logic_error(std::string("limits: the sum of ") + loop + " is wrong");
}

// About 1.5 ms at 3 GHz and two instructions a cycle: long beside a call, short beside the changes of a clock.
constexpr std::size_t kInstructions = 9'000'000;

/// Runs work(thread) on every thread at the same time; returns the seconds from the first one's start to the last one's
/// end. A thread that is woken late is waited for, but not for ever: an executor may have fewer threads to give.
template <class Work>
double run_together(Context::Impl& context, const Work& work) {
    constexpr auto kPatience = std::chrono::milliseconds(2);
    const std::size_t threads = context.executor->concurrency();
    std::vector<Clock::time_point> begins(threads), ends(threads);
    std::atomic<std::size_t> there{0};
    parallel_for(*context.executor, threads, [&](std::size_t thread, std::size_t) noexcept {
        there.fetch_add(1);
        for (const Clock::time_point from = Clock::now(); there.load() < threads && Clock::now() - from < kPatience;) {
            std::this_thread::yield();
        }
        begins[thread] = Clock::now();
        work(thread);
        ends[thread] = Clock::now();
    });
    const Clock::duration time =
        *std::max_element(ends.begin(), ends.end()) - *std::min_element(begins.begin(), begins.end());
    return std::chrono::duration<double>(time).count();
}

/// Runs a loop of `operations` a round once on every thread, for about kInstructions of `per_round` each; returns
/// operations/s of all of them.
template <class Loop>
double rate(Context::Impl& context, std::size_t operations, std::size_t per_round, const Loop& loop) {
    const std::size_t rounds = kInstructions / per_round;
    const double seconds = run_together(context, [&](std::size_t) noexcept { loop(rounds); });
    return static_cast<double>(operations) * static_cast<double>(rounds * context.executor->concurrency()) / seconds;
}

/// Seconds of one dependent multiply.
double multiply_seconds() noexcept {
    constexpr int kSteps = 2500;
    constexpr int kUnrolled = 8;
    const Clock::time_point start = Clock::now();
#if defined(__aarch64__)
    float x = 1.0F;
    float factor = 1.0F;
#define HEADLONG_FACTOR_REGISTER HEADLONG_VECTOR_REGISTER
#else
    std::uint32_t x = 3;  // 32 bits: 64 take 5 cycles on small cores
    std::uint32_t factor = 5;
#define HEADLONG_FACTOR_REGISTER HEADLONG_GENERAL_REGISTER
#endif
    HEADLONG_HIDE(HEADLONG_FACTOR_REGISTER, x);
    HEADLONG_HIDE(HEADLONG_FACTOR_REGISTER, factor);
    for (int step = 0; step < kSteps; ++step) {
        HEADLONG_UNROLL for (int i = 0; i < kUnrolled; ++i) {
            x *= factor;
            HEADLONG_HIDE(HEADLONG_FACTOR_REGISTER, x);  // or products of constants could be taken together
        }
    }
#undef HEADLONG_FACTOR_REGISTER
    return seconds_since(start) / (kSteps * kUnrolled);
}

}  // namespace

double measure_flops(Context& context) {
    Context::Impl& impl = context.impl();
    const kernels::KernelTable& table = impl.kernels;
    std::atomic<bool> right{true};
    const double result = rate(impl, table.fma_flops, table.fma_sums, [&](std::size_t rounds) noexcept {
        const double expected = static_cast<double>(rounds * table.fma_flops / 2) * 0x1p-20;
        if (table.fma_loop(rounds) != expected) right.store(false, std::memory_order_relaxed);
    });
    check(right, "the multiply-add loop");
    return result;
}

double measure_int8_ops(Context& context) {
    Context::Impl& impl = context.impl();
    const kernels::KernelTable& table = impl.kernels;
    std::atomic<bool> right{true};
    const double result = rate(impl, table.dot_ops, table.dot_sums, [&](std::size_t rounds) noexcept {
        const auto expected = static_cast<std::uint32_t>(rounds * table.dot_ops / 2);
        if (table.dot_loop(rounds) != expected) right.store(false, std::memory_order_relaxed);
    });
    check(right, "the integer loop");
    return result;
}

double measure_clock(Context& context) {
    constexpr double kCycles = 3.0;
    const std::size_t threads = context.concurrency();
    std::vector<double> slowest(threads);
    run_together(context.impl(), [&](std::size_t task) noexcept {
        double best = multiply_seconds();
        for (int i = 0; i < 7; ++i) best = std::min(best, multiply_seconds());  // some may be interrupted
        slowest[task] = best;
    });
    return kCycles / *std::max_element(slowest.begin(), slowest.end());
}

ReadBuffer::ReadBuffer(std::size_t bytes, std::pmr::memory_resource& memory)
    : memory_(memory),
      bytes_(kernels::round_up(std::max(bytes, 2 * kHugePageBytes), kHugePageBytes)),
      data_(static_cast<std::byte*>(memory.allocate(bytes_, kHugePageBytes))) {
    ask_for_huge_pages(data_, bytes_);
    std::uninitialized_fill_n(reinterpret_cast<float*>(data_), bytes_ / sizeof(float), 1.0F);
}

ReadBuffer::~ReadBuffer() { memory_.deallocate(data_, bytes_, kHugePageBytes); }

double ReadBuffer::measure(Context& context, std::size_t size, std::size_t least) {
    constexpr std::size_t kPrefetchBytes = 4096;  // a page ahead, where the decode kernels' prefetch lies too
    constexpr std::size_t kMostFloats = std::size_t{1} << 24U;  // a call's sum of ones stays exact
    constexpr std::size_t kUnit = kernels::kReadFloats;
    Context::Impl& impl = context.impl();
    constexpr std::size_t kLeastBytes = std::size_t{16} << 10U;
    const auto* floats = reinterpret_cast<const float*>(data_);
    const std::size_t threads = impl.executor->concurrency();
    const std::size_t units = std::min(std::max(size, kLeastBytes * threads), bytes_) / sizeof(float) / kUnit;
    const std::size_t wanted = std::max(least / sizeof(float) / kUnit / threads, std::size_t{1});  // units a thread
    std::atomic<bool> right{true};
    // each thread has a part of its own, as it has of a cache's heads
    const auto read = [&](std::size_t prefetch) {
        const std::size_t from = at_;
        const double seconds = run_together(impl, [&](std::size_t task) noexcept {
            const std::size_t begin = task * units / threads;
            const std::size_t part = (task + 1) * units / threads - begin;
            for (std::size_t done = 0; done < wanted;) {
                const std::size_t at = (from + done) % part;
                const std::size_t run = std::min({wanted - done, part - at, kMostFloats / kUnit});
                // a small part is read again and again in one call, whose end would show otherwise
                const std::size_t passes =
                    run == part ? std::min((wanted - done) / part, kMostFloats / kUnit / part) : std::size_t{1};
                const float sum =
                    impl.kernels.read_loop({floats + (begin + at) * kUnit, run * kUnit, passes, prefetch});
                if (sum != static_cast<float>(run * passes * kUnit)) right.store(false, std::memory_order_relaxed);
                done += run * passes;
            }
        });
        at_ = from + wanted;
        return static_cast<double>(wanted * threads * kUnit * sizeof(float)) / seconds;
    };
    // what a loop comes round to again it finds in the caches, unless others have been at work since the last call
    if (wanted * threads >= units) read(0);
    const double best = std::max(read(0), read(kPrefetchBytes));
    check(right, "the read loop");
    return best;
}

}  // namespace headlong
