// What becomes of a case that fails: a small one, in a file that replays it.
#pragma once

#include <functional>
#include <string>

#include <headlong/context.hpp>

#include "tests/support/attention_case.hpp"

namespace headlong::test {

/// Shrinks a case that fails on an instruction set and writes it as name.safetensors (write_case()) into
/// $HEADLONG_FAILED_CASES, or a folder among the temporary files. A failure that `headlong verify` sees is shrunk for
/// its eyes, any other one for `still_fails`' (as in shrink()). Returns lines that say what is left, where it is, and
/// how to replay it.
std::string shrink_and_write(const AttentionCase& c, const std::string& name, Isa isa,
                             const std::function<bool(const AttentionCase&)>& still_fails);

}  // namespace headlong::test
