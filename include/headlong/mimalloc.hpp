/// \file
/// mimalloc as a memory resource: CMake target headlong::mimalloc. Linking that target replaces the whole process's
/// malloc (Debian builds mimalloc that way), so it is for programs, not for libraries.
#pragma once

#include <memory_resource>

namespace headlong {

/// A thread-safe resource that allocates with mi_malloc_aligned. Lives as long as the process.
std::pmr::memory_resource& mimalloc_resource() noexcept;

}  // namespace headlong
