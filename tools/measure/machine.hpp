// What the machine is, as Linux tells it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headlong::tools {

struct CacheLevel {
    std::string name;  ///< "L1d", "L2" ...
    std::uint64_t kib = 0;
};

/// Caches of the first processor, the nearest first; empty where Linux does not tell.
std::vector<CacheLevel> cache_levels();

}  // namespace headlong::tools
