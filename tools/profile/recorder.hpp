// Adds up where the time of a phase (a prefill, or decode steps) goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/forward_log.hpp"
#include "tools/profile/timed_executor.hpp"

namespace headlong::tools {

/// What time is spent on: the operations of forward(), and what happens around it.
using Kind = std::size_t;                        ///< below kOperations an Operation
inline constexpr Kind kSampling = kOperations;   ///< choosing the next token
inline constexpr Kind kOther = kOperations + 1;  ///< between the others; timed like them
inline constexpr std::size_t kKinds = kOperations + 2;
const char* kind_name(Kind kind) noexcept;

/// A stretch of the calling thread's time.
struct Segment {
    Kind kind = kOther;
    std::int64_t layer = -1;
    Work work = {};
    Clock::time_point begin = {};
    Clock::time_point end = {};
};

/// Segments of the same kind and layer.
struct Totals {
    std::uint64_t calls = 0;
    Clock::duration time{};     ///< without waiting
    Clock::duration waiting{};  ///< of threads in their loops, TimedExecutor::take_waiting()
    Work work = {};

    Totals& operator+=(const Totals& other) noexcept;
};

/// Cuts the time from start() to stop() into segments without gaps. The executor is the context's that forward() gets.
class Recorder final : public ForwardLog {
  public:
    Recorder(TimedExecutor& executor, std::int64_t layers);

    /// Keeps the segments, up to `capacity` of them.
    void keep_segments(std::size_t capacity) { kept_.reserve(capacity); }

    void start() noexcept;
    void begin(Operation operation, std::int64_t layer, const Work& work) noexcept override;
    void begin_sampling() noexcept { turn_to(kSampling, -1, {}); }
    void end() noexcept override { turn_to(kOther, -1, {}); }
    void stop() noexcept { turn_to(kOther, -1, {}); }

    std::int64_t layers() const noexcept { return layers_; }
    const Totals& totals(Kind kind, std::int64_t layer) const noexcept { return totals_[index(kind, layer)]; }
    Totals totals(Kind kind) const noexcept;  ///< of all layers, and of none
    std::size_t segments() const noexcept { return segments_; }
    const std::vector<Segment>& kept_segments() const noexcept { return kept_; }

  private:
    std::size_t index(Kind kind, std::int64_t layer) const noexcept {
        return static_cast<std::size_t>(layer + 1) * kKinds + kind;
    }
    void turn_to(Kind kind, std::int64_t layer, const Work& work) noexcept;

    TimedExecutor& executor_;
    std::int64_t layers_;
    std::vector<Totals> totals_;  ///< [layer, none first][kind]
    std::vector<Segment> kept_;
    std::size_t segments_ = 0;
    Segment open_;
};

}  // namespace headlong::tools
