// The one way in which the engine runs a loop on an executor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <headlong/context.hpp>

#include "engine/float_environment.hpp"

namespace headlong {

/// Calls body(task, worker) for every task, in the tasks' floating-point mode. The body must not throw or allocate.
/// A single task runs on the calling thread: it is not worth waking another.
template <class Body>
void parallel_for(Executor& executor, std::size_t tasks, const Body& body) {
    const auto run = [](void* state, std::size_t task, std::size_t worker) noexcept {
        const FloatEnvironment environment;
        (*static_cast<const Body*>(state))(task, worker);
    };
    void* state = const_cast<void*>(static_cast<const void*>(&body));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    if (tasks == 1) {
        run(state, 0, 0);
    } else if (tasks > 1) {
        executor.run(tasks, run, state);
    }
}

// Moving a few KiB is not worth waking a thread. From 64 KiB of floats on it is.
inline constexpr std::int64_t kParallelElements = 16384;

/// The same, but on the calling thread unless the tasks move many elements in all.
template <class Body>
void parallel_for(Executor& executor, std::size_t tasks, std::int64_t elements, const Body& body) {
    if (elements >= kParallelElements) {
        parallel_for(executor, tasks, body);
    } else {
        const FloatEnvironment environment;
        for (std::size_t task = 0; task < tasks; ++task) body(task, 0);
    }
}

}  // namespace headlong
