// The callbacks of a C program as the objects that the engine takes.
#pragma once

#include <headlong/headlong.h>
#include <headlong/context.hpp>

#include <cstddef>
#include <memory_resource>

namespace headlong::c_api {

/// Throws InvalidArgument, naming the field.
void check(const hl_memory& memory);
void check(const hl_executor& executor);

class CallbackMemory final : public std::pmr::memory_resource {
  public:
    explicit CallbackMemory(const hl_memory& memory) : memory_(memory) {}

  private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override;
    void do_deallocate(void* address, std::size_t bytes, std::size_t alignment) override;
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

    hl_memory memory_;
};

/// Passes tasks on through a function that counts them: a pool that makes fewer or more calls than there are tasks, or
/// numbers its workers too high, is reported.
class CallbackExecutor final : public Executor {
  public:
    explicit CallbackExecutor(const hl_executor& executor) : executor_(executor) {}

    std::size_t concurrency() const noexcept override { return executor_.concurrency; }
    std::size_t worker_slots() const noexcept override {
        return executor_.worker_slots == 0 ? executor_.concurrency : executor_.worker_slots;
    }
    void run(std::size_t tasks, Body body, void* state) override;

  private:
    hl_executor executor_;
};

}  // namespace headlong::c_api
