// An executor of many workers on one thread: what depends on their number, without threads.
#pragma once

#include <cstddef>

#include <headlong/context.hpp>

namespace headlong::test {

/// Runs tasks in turn, each as the next worker.
class WideExecutor final : public Executor {
  public:
    explicit WideExecutor(std::size_t workers) : WideExecutor(workers, workers) {}
    WideExecutor(std::size_t workers, std::size_t slots) : workers_(workers), slots_(slots) {}

    std::size_t concurrency() const noexcept override { return workers_; }
    std::size_t worker_slots() const noexcept override { return slots_; }
    void run(std::size_t tasks, Body body, void* state) override {
        for (std::size_t task = 0; task < tasks; ++task) body(state, task, task % workers_);
    }

  private:
    std::size_t workers_;
    std::size_t slots_;
};

}  // namespace headlong::test
