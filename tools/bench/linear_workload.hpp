// A linear layer as rows of a benchmark: y = x W.
#pragma once

#include <cstdint>
#include <string>

#include "tools/bench/workload.hpp"

namespace headlong::tools {

struct LinearShape {
    std::int64_t rows = 0;     ///< M: tokens
    std::int64_t inputs = 0;   ///< K
    std::int64_t outputs = 0;  ///< N
    std::int64_t layers = 0;   ///< copies of W that runs cycle through; 0 = as many as are twice the last-level cache
};

/// Weights are f32. Throws OutOfMemory (naming what `what` says was asked for) if the memory that is available does not
/// hold it.
PlannedWorkload plan_linear(const LinearShape& shape, const std::string& what);

}  // namespace headlong::tools
