// How much memory there is, for commands that refuse what will not fit before they begin.
#pragma once

#include <cstdint>
#include <string>

namespace headlong::tools {

/// Bytes that the process may have in all: the machine's, or the least limit of its cgroups (containers). `root` goes
/// before the paths that are read: "" but in tests. The largest number where Linux does not tell.
std::uint64_t total_memory(const std::string& root = "");

/// Bytes that it can still get without swapping: what Linux calls available, or what its cgroups leave. File pages that
/// a cgroup would give up are counted as free.
std::uint64_t available_memory(const std::string& root = "");

/// Throws OutOfMemory, beginning with `what`, if the process cannot get so many bytes and keep a twentieth of what is
/// there for what nobody counted. In double, since what is asked for may be more than 64 bits count.
void check_memory(const std::string& what, double bytes);

}  // namespace headlong::tools
