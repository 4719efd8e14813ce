// Cases as files that `headlong verify` reads.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/attention_case.hpp"

namespace headlong::test {

/// Writes folder/name.safetensors, dense, with the output and lse of `want` (expected(c), unless a test wants something
/// else) and their bounds. Sequences of different lengths are no tensor: each gets a file of its own, name-0, name-1
/// and so on. A file does not say strides, threads, how caches are filled, and their types (`verify --kv` does).
std::vector<std::filesystem::path> write_case(const std::filesystem::path& folder, const std::string& name,
                                              const AttentionCase& c, const Expected& want);

}  // namespace headlong::test
