// What a context holds.
#pragma once

#include <headlong/context.hpp>
#include <headlong/error.hpp>
#include <memory>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>

#include "engine/workspace.hpp"
#include "kernels/kernel_table.hpp"

namespace headlong {

class Context::Impl {
  public:
    Impl(Isa isa, std::shared_ptr<Executor> executor, std::pmr::memory_resource& memory);
    /// With another table than the instruction set's, which must outlive the context: tests count calls.
    Impl(const kernels::KernelTable& table, Isa isa, std::shared_ptr<Executor> executor,
         std::pmr::memory_resource& memory);

    const Isa isa;
    const kernels::KernelTable& kernels;
    const std::shared_ptr<Executor> executor;
    std::pmr::memory_resource& memory;
    WorkspacePool workspaces;
};

/// Runs an operation, and turns a refusal of memory into the library's own error.
template <class Operation>
decltype(auto) with_memory_errors(const char* what, const Operation& operation) {
    try {
        return operation();
    } catch (const std::bad_alloc&) {
        throw OutOfMemory(std::string(what) + ": the memory resource refused an allocation");
    } catch (const std::length_error&) {
        throw OutOfMemory(std::string(what) + ": more memory is needed than can be addressed");
    }
}

}  // namespace headlong
