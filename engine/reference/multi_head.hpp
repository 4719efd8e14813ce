// The multi-head attention layer in double precision:
//
//     Q, K, V = x Wq + bq, x Wk + bk, x Wv + bv      split into heads
//     y       = concatenate(attention(Q, K, V)) Wo + bo
#pragma once

#include <cstdint>

#include "engine/reference/attention.hpp"
#include "engine/reference/tensor.hpp"

namespace headlong::reference {

/// Weights are [inputs, outputs], applied as x @ W. Absent biases are 0.
struct MultiHeadWeights {
    Tensor query;   ///< [d_model, heads * head_dim]
    Tensor key;     ///< [d_model, kv_heads * head_dim]
    Tensor value;   ///< [d_model, kv_heads * value_dim]
    Tensor output;  ///< [heads * value_dim, d_out]
    Tensor query_bias, key_bias, value_bias, output_bias;
};

/// x [length, inputs] @ weight [inputs, outputs] + bias [outputs] (if present) -> [length, outputs].
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});

struct MultiHeadResult {
    Tensor y;       ///< [length, d_out]
    Tensor keys;    ///< [1, kv_heads, length, head_dim], as a cache would hold them
    Tensor values;  ///< [1, kv_heads, length, value_dim]
    AttentionResult attention;
};

/// One sequence x [length, d_model] that attends to itself. With options.causal row t is also what a cache gives
/// after t + 1 single steps. kv_heads = 0 means as many as heads.
MultiHeadResult multi_head(const Tensor& x, const MultiHeadWeights& weights, std::int64_t heads, std::int64_t kv_heads,
                           const AttentionOptions& options);

}  // namespace headlong::reference
