// Attention as rows of a benchmark: a prefill over plain tensors, or into caches of other types; a decode step or a
// chunk of queries over caches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <headlong/kv_cache.hpp>

#include "tools/bench/workload.hpp"

namespace headlong::tools {

enum class Phase : std::uint8_t { prefill, decode, chunk };

const char* to_string(Phase phase) noexcept;

struct AttentionShape {
    Phase phase = Phase::prefill;
    std::vector<std::int64_t> q_lens;   ///< per sequence
    std::vector<std::int64_t> kv_lens;  ///< per sequence; of a prefill, the same as q_lens
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t value_dim = 0;
    KvTypes kv = {};
    bool causal = true;
    std::int64_t window = 0;       ///< a query sees its own position and window - 1 before it; 0 = all
    bool ring = false;             ///< the caches are rings of `window` tokens, ...
    std::int64_t sink_tokens = 0;  ///< ... of which so many are the first ones
    std::int64_t layers = 0;  ///< caches that decode steps cycle through; 0 = as many as are twice the last-level cache
};

/// Pairs of a query and a key that it sees, over all sequences.
double visible_pairs(const AttentionShape& shape);

/// Bytes of keys, values and their scales that some query sees, each once.
double live_kv_bytes(const AttentionShape& shape);

/// Throws Unsupported for a type that caches do not have, OutOfMemory (naming what `what` says was asked for) if the
/// memory that is available does not hold it.
PlannedWorkload plan_attention(const AttentionShape& shape, const std::string& what);

}  // namespace headlong::tools
