// How much memory there is, for commands that refuse what will not fit before they begin.
#pragma once

#include <cstdint>

namespace headlong::tools {

/// Bytes that the process may have in all: the machine's, or the least limit of its cgroups. The largest number where
/// Linux does not tell.
std::uint64_t total_memory();

/// Bytes that it can still get: what Linux calls available, or what its cgroups leave.
std::uint64_t available_memory();

}  // namespace headlong::tools
