#include "tools/profile/timed_executor.hpp"

#include <algorithm>
#include <utility>

namespace headlong::tools {

/// What a task needs to find its body and its worker's account.
struct TimedExecutor::Loop {
    Body body;
    void* state;
    Worker* workers;
    bool keeping;
};

TimedExecutor::TimedExecutor(std::shared_ptr<Executor> inner)
    : inner_(std::move(inner)), workers_(inner_->worker_slots()) {}

void TimedExecutor::run(std::size_t tasks, Body body, void* state) {
    Loop loop{body, state, workers_.data(), keeping_};
    const auto timed = [](void* timed_state, std::size_t task, std::size_t worker) noexcept {
        const auto& l = *static_cast<const Loop*>(timed_state);
        Worker& account = l.workers[worker];
        const Clock::time_point begin = Clock::now();
        l.body(l.state, task, worker);
        const Clock::time_point end = Clock::now();
        account.busy += end - begin;
        if (!l.keeping) return;
        if (account.kept.size() < account.kept.capacity()) {
            account.kept.push_back({begin, end});
        } else {
            ++account.dropped;
        }
    };
    const Clock::time_point begin = Clock::now();
    inner_->run(tasks, timed, &loop);
    const Clock::duration wall = Clock::now() - begin;
    Clock::duration busy{};
    for (Worker& worker : workers_) busy += std::exchange(worker.busy, {});
    // more workers than concurrency() may have been busy for a moment
    waiting_ += std::max(wall - busy / static_cast<Clock::rep>(concurrency()), Clock::duration{});
    tasks_ += tasks;
}

Clock::duration TimedExecutor::take_waiting() noexcept { return std::exchange(waiting_, {}); }

void TimedExecutor::keep_tasks(std::size_t capacity) {
    keeping_ = capacity > 0;
    if (!keeping_) return;
    for (Worker& worker : workers_) worker.kept.reserve(capacity);
}

std::uint64_t TimedExecutor::dropped_tasks() const noexcept {
    std::uint64_t dropped = 0;
    for (const Worker& worker : workers_) dropped += worker.dropped;
    return dropped;
}

}  // namespace headlong::tools
