// The one way in which the engine runs a loop on an executor.
#pragma once

#include <cstddef>
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

}  // namespace headlong
