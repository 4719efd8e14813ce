#include "tools/profile/recorder.hpp"

#include <algorithm>

namespace headlong::tools {

const char* kind_name(Kind kind) noexcept {
    if (kind == kSampling) return "sampling";
    if (kind == kOther) return "other";
    return to_string(static_cast<Operation>(kind));
}

Totals& Totals::operator+=(const Totals& other) noexcept {
    calls += other.calls;
    time += other.time;
    waiting += other.waiting;
    work.flops += other.work.flops;
    work.bytes += other.work.bytes;
    return *this;
}

Recorder::Recorder(TimedExecutor& executor, std::int64_t layers)
    : executor_(executor), layers_(layers), totals_(static_cast<std::size_t>(layers + 1) * kKinds) {}

void Recorder::start() noexcept {
    executor_.take_waiting();  // what loops before left
    open_ = {.begin = Clock::now()};
}

void Recorder::begin(Operation operation, std::int64_t layer, const Work& work) noexcept {
    turn_to(static_cast<Kind>(operation), layer, work);
}

Totals Recorder::totals(Kind kind) const noexcept {
    Totals sum;
    for (std::int64_t layer = -1; layer < layers_; ++layer) sum += totals(kind, layer);
    return sum;
}

void Recorder::turn_to(Kind kind, std::int64_t layer, const Work& work) noexcept {
    const Clock::time_point now = Clock::now();
    open_.end = now;
    const Clock::duration time = now - open_.begin;
    const Clock::duration waiting = std::min(executor_.take_waiting(), time);
    totals_[index(open_.kind, open_.layer)] += {1, time - waiting, waiting, open_.work};
    if (kept_.size() < kept_.capacity()) kept_.push_back(open_);
    ++segments_;
    open_ = {kind, layer, work, now, now};
}

}  // namespace headlong::tools
