// A linear layer as rows of a benchmark: y = x W.
#pragma once

#include <cstdint>
#include <string>

#include <headlong/model.hpp>

#include "tools/bench/workload.hpp"

namespace headlong::tools {

struct LinearShape {
    std::int64_t rows = 0;     ///< M: tokens
    std::int64_t inputs = 0;   ///< K
    std::int64_t outputs = 0;  ///< N
    WeightType weights = WeightType::f32;
    std::int64_t layers = 0;  ///< copies of W that runs cycle through; 0 = as many as are twice the last-level cache
};

/// Throws OutOfMemory (naming what `what` says was asked for) if the memory that is available does not
/// hold it.
PlannedWorkload plan_linear(const LinearShape& shape, const std::string& what);

}  // namespace headlong::tools
