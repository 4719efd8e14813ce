// The ONNX operator Attention (opset 23 to 25), with two additions: an input `sinks` and an output `lse`.
#pragma once

#include "tools/cases/case_file.hpp"
#include "tools/cases/outcome.hpp"

namespace headlong::tools {

/// Throws BadFile if the file does not describe a case of this operator.
Case attention_case(std::string name, const CaseFile& file);

}  // namespace headlong::tools
