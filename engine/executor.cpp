// The executors that come with the library. The only file of the engine that includes oneTBB.
#include <headlong/context.hpp>
#include <headlong/tbb.hpp>
#include <memory>

namespace headlong {
namespace {

class SerialExecutor final : public Executor {
  public:
    std::size_t concurrency() const noexcept override { return 1; }
    void run(std::size_t tasks, Body body, void* state) override {
        for (std::size_t task = 0; task < tasks; ++task) body(state, task, 0);
    }
};

/// Owns the arena that it lends to a TbbArenaExecutor.
class OwnArenaExecutor final : public Executor {
  public:
    explicit OwnArenaExecutor(std::size_t threads) : arena_(static_cast<int>(threads)), lent_(arena_) {}
    std::size_t concurrency() const noexcept override { return lent_.concurrency(); }
    void run(std::size_t tasks, Body body, void* state) override { lent_.run(tasks, body, state); }

  private:
    tbb::task_arena arena_;
    TbbArenaExecutor lent_;
};

}  // namespace

std::shared_ptr<Executor> make_serial_executor() { return std::make_shared<SerialExecutor>(); }

std::shared_ptr<Executor> make_tbb_executor(std::size_t threads) {
    return std::make_shared<OwnArenaExecutor>(threads == 0 ? default_concurrency() : threads);
}

}  // namespace headlong
