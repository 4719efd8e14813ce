// The multi-head attention layer: x, Wq, Wk, Wv, Wo -> y, with `heads` and `causal` in the metadata.
#pragma once

#include <string>

#include "tools/cases/case_file.hpp"
#include "tools/cases/outcome.hpp"

namespace headlong::tools {

/// Throws BadFile if the file does not describe a case of this operator.
Case multi_head_case(std::string name, const CaseFile& file);

}  // namespace headlong::tools
