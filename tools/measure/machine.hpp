// What this machine and this build are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace headlong::tools {

const char* architecture() noexcept;
std::string compiler();
std::string processor();
const char* build_type() noexcept;

struct CacheLevel {
    std::string name;  ///< "L1d", "L2" ...
    std::uint64_t kib = 0;
};

/// Caches of the first processor as Linux tells them; empty where it does not.
std::vector<CacheLevel> cache_levels();

/// Bytes of the largest cache; 32 MiB where the system does not tell.
std::size_t last_level_cache_bytes();

/// The largest buffer to measure read bandwidth over: eight times the last-level cache, beyond which bandwidth does not
/// depend on the size any more, and at least 64 MiB.
std::size_t read_buffer_cap();

/// Version, processor, caches, memory, compiler: for the head of a report.
nlohmann::ordered_json machine_json();

}  // namespace headlong::tools
