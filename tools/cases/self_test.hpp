// Cases that need no file: seeded random attention, measured against the double-precision reference.
#pragma once

#include <vector>

#include "tools/cases/outcome.hpp"

namespace headlong::tools {

/// Plain calls, and the same through a cache that was filled in random portions. A second or two in all.
std::vector<Case> self_test_cases();

}  // namespace headlong::tools
