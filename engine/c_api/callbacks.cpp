#include "engine/c_api/callbacks.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstdint>
#include <headlong/error.hpp>
#include <new>

namespace headlong::c_api {
namespace {

constexpr std::size_t kMostWorkers = std::size_t{1} << 20;  // each has scratch

/// One loop.
struct Loop {
    Executor::Body body;
    void* state;
    std::size_t tasks;
    std::size_t workers;
    std::atomic<std::size_t> done = 0;
    std::atomic<bool> out_of_range = false;
};

void run_task(void* state, std::size_t task, std::size_t worker) noexcept {
    Loop& loop = *static_cast<Loop*>(state);
    if (task >= loop.tasks || worker >= loop.workers) {
        loop.out_of_range.store(true, std::memory_order_relaxed);
        return;
    }
    loop.body(loop.state, task, worker);
    loop.done.fetch_add(1, std::memory_order_release);  // the task's results are there for who sees the count
}

}  // namespace

void check(const hl_memory& memory) {
    if (memory.allocate == nullptr) throw InvalidArgument("hl_memory: allocate is NULL");
    if (memory.deallocate == nullptr) throw InvalidArgument("hl_memory: deallocate is NULL");
}

void check(const hl_executor& executor) {
    if (executor.run == nullptr) throw InvalidArgument("hl_executor: run is NULL");
    if (executor.concurrency < 1 || executor.concurrency > kMostWorkers) {
        throw InvalidArgument(
            fmt::format("hl_executor: concurrency is {}; allowed: 1 to {}", executor.concurrency, kMostWorkers));
    }
    if (executor.worker_slots != 0 &&
        (executor.worker_slots < executor.concurrency || executor.worker_slots > kMostWorkers)) {
        throw InvalidArgument(fmt::format("hl_executor: worker_slots is {}; allowed: 0, or concurrency ({}) to {}",
                                          executor.worker_slots, executor.concurrency, kMostWorkers));
    }
}

void* CallbackMemory::do_allocate(std::size_t bytes, std::size_t alignment) {
    if (bytes == 0) bytes = 1;
    void* const address = memory_.allocate(memory_.user, bytes, alignment);
    if (address == nullptr) throw std::bad_alloc();
    if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
        memory_.deallocate(memory_.user, address, bytes, alignment);  // aligned loads would fault on it
        throw std::bad_alloc();
    }
    return address;
}

void CallbackMemory::do_deallocate(void* address, std::size_t bytes, std::size_t alignment) {
    memory_.deallocate(memory_.user, address, bytes == 0 ? 1 : bytes, alignment);
}

void CallbackExecutor::run(std::size_t tasks, Body body, void* state) {
    Loop loop{.body = body, .state = state, .tasks = tasks, .workers = worker_slots()};
    executor_.run(executor_.user, tasks, &run_task, &loop);
    if (loop.out_of_range.load(std::memory_order_relaxed)) {
        throw InvalidArgument(
            fmt::format("hl_executor: run passed a task or worker out of range; there are {} tasks "
                        "and {} worker_slots",
                        tasks, worker_slots()));
    }
    const std::size_t done = loop.done.load(std::memory_order_acquire);
    if (done != tasks) {
        throw InvalidArgument(fmt::format("hl_executor: run returned after {} calls of its {} tasks", done, tasks));
    }
}

}  // namespace headlong::c_api
