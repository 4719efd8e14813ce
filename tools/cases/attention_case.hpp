// The ONNX operator Attention (opset 23 to 25), with additions that say what else a call may ask for:
//
//   sinks, alibi_slopes   inputs [heads]
//   lse                   an output [batch, heads, q_len], F32
//   attr.alignment        bottom_right, top_left or offset, instead of ONNX's rule
//   attr.causal_offset    of alignment offset; the length of the past if absent
//   attr.mask_keys        last_q: attn_mask lies over the last q_len keys
//   attr.through_cache    1: through a cache as well, as a case with a past
#pragma once

#include "tools/cases/case_file.hpp"
#include "tools/cases/outcome.hpp"

namespace headlong::tools {

/// Throws BadFile if the file does not describe a case of this operator.
Case attention_case(std::string name, const CaseFile& file);

}  // namespace headlong::tools
