// What cases may need beyond plain attention, and whether this version has it. A case that needs what is not built is
// skipped, with the names as the reason.
#pragma once

#include <cstdint>
#include <set>
#include <string>

namespace headlong::tools {

enum class Feature : std::uint8_t {
    mask,
    window,
    softcap,
    sink_logits,
    kv_lengths,
    qk_matmul_output,
    f16,
    bf16,
    f64,
};

/// "needs mask, softcap", or nothing if all of them are built.
std::string missing(const std::set<Feature>& needed);

}  // namespace headlong::tools
