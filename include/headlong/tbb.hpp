/// \file
/// Lends the caller's own oneTBB arena to a context. Header-only; needs oneTBB's headers and library.
#pragma once

#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cstddef>
#include <memory>

#include <headlong/context.hpp>

namespace headlong {

/// Runs loops in a task_arena. The arena must outlive every context that uses the executor.
class TbbArenaExecutor final : public Executor {
  public:
    /// Starts the arena, if that has not been done.
    explicit TbbArenaExecutor(tbb::task_arena& arena) : arena_(&arena) {
        arena.initialize();
        concurrency_ = static_cast<std::size_t>(std::max(1, arena.max_concurrency()));
    }

    std::size_t concurrency() const noexcept override { return concurrency_; }
    /// An arena of one still has two slots: a task that was enqueued into it runs at index 1.
    std::size_t worker_slots() const noexcept override { return std::max<std::size_t>(2, concurrency_); }

    void run(std::size_t tasks, Body body, void* state) override {
        arena_->execute([&] {
            // isolate: a thread that waits for this loop must not pick up an outer task of the caller's, whose
            // worker index (and scratch) would then be in use twice
            tbb::this_task_arena::isolate([&] {
                // grain 1: tasks are large, uneven, and ordered heaviest first
                tbb::parallel_for(
                    tbb::blocked_range<std::size_t>(0, tasks, 1),
                    [&](const tbb::blocked_range<std::size_t>& range) {
                        const auto worker = static_cast<std::size_t>(tbb::this_task_arena::current_thread_index());
                        for (std::size_t task = range.begin(); task != range.end(); ++task) body(state, task, worker);
                    },
                    tbb::simple_partitioner{});
            });
        });
    }

  private:
    tbb::task_arena* arena_;
    std::size_t concurrency_ = 1;
};

/// The executor to pass in ContextOptions::executor.
inline std::shared_ptr<Executor> borrow_arena(tbb::task_arena& arena) {
    return std::make_shared<TbbArenaExecutor>(arena);
}

}  // namespace headlong
