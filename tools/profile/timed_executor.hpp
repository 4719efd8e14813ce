// An executor that knows where the time of its loops goes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <headlong/context.hpp>

namespace headlong::tools {

using Clock = std::chrono::steady_clock;

/// Runs loops on another executor and reads the clock before and after every task (some 50 ns a task, which are part of
/// what is measured). Its loops must be run from one thread.
class TimedExecutor final : public Executor {
  public:
    struct Task {
        Clock::time_point begin;
        Clock::time_point end;
    };

    explicit TimedExecutor(std::shared_ptr<Executor> inner);

    std::size_t concurrency() const noexcept override { return inner_->concurrency(); }
    std::size_t worker_slots() const noexcept override { return inner_->worker_slots(); }
    void run(std::size_t tasks, Body body, void* state) override;

    /// How long threads have waited in loops since the last call: the loops' wall time less the busy time of all
    /// workers / concurrency(). Waking, scheduling, and uneven ends of loops.
    Clock::duration take_waiting() noexcept;

    /// Tasks of all loops so far.
    std::uint64_t tasks() const noexcept { return tasks_; }

    /// Keeps each worker's tasks from now on, up to `capacity` of each; further ones are counted only. 0 stops keeping,
    /// and keeps what there is.
    void keep_tasks(std::size_t capacity);
    const std::vector<Task>& kept_tasks(std::size_t worker) const { return workers_[worker].kept; }
    std::uint64_t dropped_tasks() const noexcept;

  private:
    struct alignas(64) Worker {  // a cache line of its own: written after every task
        Clock::duration busy{};
        std::vector<Task> kept;
        std::uint64_t dropped = 0;
    };
    struct Loop;

    std::shared_ptr<Executor> inner_;
    std::vector<Worker> workers_;
    std::uint64_t tasks_ = 0;
    bool keeping_ = false;
    Clock::duration waiting_{};
};

}  // namespace headlong::tools
