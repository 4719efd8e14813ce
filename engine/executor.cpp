// The executors that come with the library. The only file of the engine that includes oneTBB, if it is built with it.
#if HEADLONG_TBB
#include <tbb/global_control.h>
#include <tbb/task_scheduler_observer.h>
#endif

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <headlong/context.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#if HEADLONG_TBB
#include <headlong/tbb.hpp>
#else
#include <headlong/error.hpp>
#endif

#include "engine/processors.hpp"

namespace headlong {
namespace {

class SerialExecutor final : public Executor {
  public:
    std::size_t concurrency() const noexcept override { return 1; }
    void run(std::size_t tasks, Body body, void* state) override {
        for (std::size_t task = 0; task < tasks; ++task) body(state, task, 0);
    }
};

#if HEADLONG_TBB
/// oneTBB prints a warning when an arena asks for more threads than it will ever get.
int allowed(std::size_t threads) {
    const std::size_t most = tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism);
    return static_cast<int>(std::clamp<std::size_t>(threads, 1, std::min<std::size_t>(most, 1U << 20U)));
}

/// Keeps threads to processors while they are in an arena. oneTBB does so itself (task_arena::constraints) only where
/// its binding library and hwloc are installed.
class Keeper final : public tbb::task_scheduler_observer {
  public:
    Keeper(tbb::task_arena& arena, std::size_t slots, const ProcessorSet& processors)
        : task_scheduler_observer(arena), processors_(processors), before_(slots) {
        observe(true);
    }
    Keeper(const Keeper&) = delete;
    Keeper& operator=(const Keeper&) = delete;

    /// oneTBB's threads serve all arenas of the process: those that still look for work in this one leave it before
    /// they would go elsewhere without their own processors. They do so within milliseconds.
    ~Keeper() override {
        std::unique_lock lock(mutex_);
        all_left_.wait_for(lock, std::chrono::seconds(1), [&] { return inside_ == 0; });
        lock.unlock();
        observe(false);
    }

    void on_scheduler_entry(bool) override {
        before() = processors_of_this_thread();
        keep_this_thread_to(processors_);
        const std::lock_guard lock(mutex_);
        ++inside_;
    }
    void on_scheduler_exit(bool) override {
        if (const auto processors = before()) keep_this_thread_to(*processors);
        const std::lock_guard lock(mutex_);
        if (--inside_ == 0) all_left_.notify_all();
    }

  private:
    /// Where the calling thread could run before it entered; its own while it is inside.
    std::optional<ProcessorSet>& before() {
        return before_[static_cast<std::size_t>(tbb::this_task_arena::current_thread_index())];
    }

    const ProcessorSet processors_;
    std::vector<std::optional<ProcessorSet>> before_;
    std::mutex mutex_;
    std::condition_variable all_left_;
    std::size_t inside_ = 0;
};

/// Owns the arena that it lends to a TbbArenaExecutor.
class OwnArenaExecutor final : public Executor {
  public:
    explicit OwnArenaExecutor(std::size_t threads) : arena_(allowed(threads)), lent_(arena_) {}
    OwnArenaExecutor(std::size_t threads, const ProcessorSet& processors) : OwnArenaExecutor(threads) {
        keeper_.emplace(arena_, lent_.worker_slots(), processors);
    }
    std::size_t concurrency() const noexcept override { return lent_.concurrency(); }
    std::size_t worker_slots() const noexcept override { return lent_.worker_slots(); }
    void run(std::size_t tasks, Body body, void* state) override { lent_.run(tasks, body, state); }

  private:
    tbb::task_arena arena_;
    TbbArenaExecutor lent_;
    std::optional<Keeper> keeper_;
};
#endif

}  // namespace

std::shared_ptr<Executor> make_serial_executor() { return std::make_shared<SerialExecutor>(); }

#if HEADLONG_TBB
std::shared_ptr<Executor> make_tbb_executor(std::size_t threads) {
    return std::make_shared<OwnArenaExecutor>(threads == 0 ? default_concurrency() : threads);
}
std::shared_ptr<Executor> make_tbb_executor_on(const ProcessorSet& processors, std::size_t threads) {
    return std::make_shared<OwnArenaExecutor>(threads, processors);
}
#else
std::shared_ptr<Executor> make_tbb_executor_on(const ProcessorSet&, std::size_t) {
    throw Unsupported("ContextOptions: processors: this library was built without oneTBB (HEADLONG_TBB=OFF)");
}
std::shared_ptr<Executor> make_tbb_executor(std::size_t) {
    throw Unsupported("make_tbb_executor: this library was built without oneTBB (HEADLONG_TBB=OFF)");
}
#endif

}  // namespace headlong
