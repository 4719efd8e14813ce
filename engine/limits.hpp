// What the machine can do at best, on a context's threads and with its instruction set: what benchmarks and profiles
// are measured against. Each call is one measurement of a few milliseconds; take the best of several that lie between
// the runs they are compared with, since clocks drift and machines are shared.
#pragma once

#include <cstddef>
#include <headlong/context.hpp>
#include <memory_resource>

namespace headlong {

/// f32 multiply-adds in registers, 2 FLOPs each. FLOP/s of all threads together.
double measure_flops(Context& context);

/// Integer multiply-adds of 8-bit elements in registers, widened to 16 bits where the set has no dot product of bytes;
/// 2 operations each. Operations/s of all threads together.
double measure_int8_ops(Context& context);

/// Clock in Hz, from a chain of dependent multiplies of known latency (3 cycles; x86: imul on every core since 2008;
/// arm64: fmul on Neoverse, 4 on some others, so that only its changes mean anything there). The slowest thread's.
double measure_clock(Context& context);

/// Whether a core was slowed down while something was measured, from the clock then and the best one that was seen on
/// as many threads. The core slows and memory does not: ratios of what is bound by one to what is bound by the other
/// mislead.
constexpr bool is_throttled(double clock, double best_clock) noexcept { return clock < 0.9 * best_clock; }

/// Memory to measure read bandwidth over: as large as the data that a computation walks through, on large pages as
/// caches are.
class ReadBuffer {
  public:
    /// At least 4 MiB. Throws what the resource throws.
    ReadBuffer(std::size_t bytes, std::pmr::memory_resource& memory);
    ~ReadBuffer();
    ReadBuffer(const ReadBuffer&) = delete;
    ReadBuffer& operator=(const ReadBuffer&) = delete;

    std::size_t bytes() const noexcept { return bytes_; }

    /// Bytes/s of all threads together, the better of a plain and a prefetching loop, each of which goes on where the
    /// last one ended, over at least `least` bytes of the first `size`, round and round. Both are at most bytes(). Less
    /// than 16 KiB a thread is measured as 16 KiB: a loop's beginning and end would show.
    double measure(Context& context, std::size_t size, std::size_t least);

  private:
    std::pmr::memory_resource& memory_;
    std::size_t bytes_;
    std::byte* data_;
    std::size_t at_ = 0;  ///< where the next loop begins, in steps of the loop
};

}  // namespace headlong
