// Attention after validation: what the API's calls boil down to, and the function that runs it.
#pragma once

#include <cstdint>
#include <span>
#include <stop_token>

#include "engine/block_pool.hpp"
#include "engine/context_impl.hpp"

namespace headlong {

/// Elements of float at base + head * head_stride + row * row_stride + column * column_stride.
template <class Pointer>
struct HeadRows {
    Pointer base = nullptr;
    std::int64_t head_stride = 0;
    std::int64_t row_stride = 0;
    std::int64_t column_stride = 1;
    Pointer at(std::int64_t head, std::int64_t row) const noexcept {
        return base + head * head_stride + row * row_stride;
    }
};

/// One sequence: its queries, where its keys and values lie, and which of them each query sees.
struct Sequence {
    HeadRows<const float*> query;
    HeadRows<float*> output;
    HeadRows<float*> lse;  ///< base is null if not wanted
    std::int64_t q_len = 0;
    std::int64_t kv_len = 0;
    bool causal = false;
    std::int64_t offset = 0;  ///< query row i stands at position i + offset

    const Block* blocks = nullptr;  ///< of a cache's layer; null for plain tensors
    HeadRows<const float*> key;     ///< plain tensors
    HeadRows<const float*> value;
};

struct AttentionProblem {
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t value_dim = 0;
    float factor = 1.0F;  ///< what a query is multiplied by: scale * log2(e)
    std::span<const Sequence> sequences;
    std::stop_token stop;
};

/// Returns false if the stop token asked for an end. Throws what the memory resource throws.
bool run_attention(Context::Impl& context, Workspace& workspace, const AttentionProblem& problem);

}  // namespace headlong
