// Cases of the operators on single rows: ONNX RotaryEmbedding, RMSNormalization and SwiGLU.
#pragma once

#include <string>

#include "tools/cases/case_file.hpp"
#include "tools/cases/outcome.hpp"

namespace headlong::tools {

/// X as [batch, heads, length, head_dim] or [batch, length, heads * head_dim], tables by position_ids or one per row.
/// Throws BadFile if the case is malformed.
Case rotary_case(std::string name, const CaseFile& file);

/// X over its dimensions from `axis` on. Throws BadFile if the case is malformed.
Case rms_norm_case(std::string name, const CaseFile& file);

/// A * sigmoid(A) * B. Throws BadFile if the case is malformed.
Case swiglu_case(std::string name, const CaseFile& file);

}  // namespace headlong::tools
