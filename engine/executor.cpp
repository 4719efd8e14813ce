// The executors that come with the library. The only file of the engine that includes oneTBB, if it is built with it.
#if HEADLONG_TBB
#include <tbb/global_control.h>
#endif

#include <algorithm>
#include <headlong/context.hpp>
#include <memory>

#if HEADLONG_TBB
#include <headlong/tbb.hpp>
#else
#include <headlong/error.hpp>
#endif

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
/// Owns the arena that it lends to a TbbArenaExecutor.
class OwnArenaExecutor final : public Executor {
  public:
    explicit OwnArenaExecutor(std::size_t threads) : arena_(allowed(threads)), lent_(arena_) {}
    std::size_t concurrency() const noexcept override { return lent_.concurrency(); }
    std::size_t worker_slots() const noexcept override { return lent_.worker_slots(); }
    void run(std::size_t tasks, Body body, void* state) override { lent_.run(tasks, body, state); }

  private:
    /// oneTBB prints a warning when an arena asks for more threads than it will ever get.
    static int allowed(std::size_t threads) {
        const std::size_t most = tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism);
        return static_cast<int>(std::clamp<std::size_t>(threads, 1, std::min<std::size_t>(most, 1U << 20U)));
    }

    tbb::task_arena arena_;
    TbbArenaExecutor lent_;
};
#endif

}  // namespace

std::shared_ptr<Executor> make_serial_executor() { return std::make_shared<SerialExecutor>(); }

#if HEADLONG_TBB
std::shared_ptr<Executor> make_tbb_executor(std::size_t threads) {
    return std::make_shared<OwnArenaExecutor>(threads == 0 ? default_concurrency() : threads);
}
#else
std::shared_ptr<Executor> make_tbb_executor(std::size_t) {
    throw Unsupported("make_tbb_executor: this library was built without oneTBB (HEADLONG_TBB=OFF)");
}
#endif

}  // namespace headlong
