/// \file
/// The multi-head attention layer (Vaswani et al. 2017, "Attention Is All You Need"):
///
///   Q, K, V = x Wq + bq, x Wk + bk, x Wv + bv      split into heads
///   y       = concatenate(softmax(Q K^T / sqrt(head_dim)) V) Wo + bo
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <headlong/attention.hpp>
#include <headlong/context.hpp>
#include <headlong/export.hpp>
#include <headlong/kv_cache.hpp>
#include <headlong/tensor.hpp>

namespace headlong HEADLONG_API {

/// Weights are applied as x @ W: [inputs, outputs]. They are copied into panels when the layer is made, and need
/// not live longer. A transposed weight is the same view with its strides exchanged. Biases are optional.
struct MultiHeadAttentionWeights {
    InputTensor<2> query = {};        ///< [d_model, heads * head_dim]
    InputTensor<2> key = {};          ///< [d_model, kv_heads * head_dim]
    InputTensor<2> value = {};        ///< [d_model, kv_heads * head_dim]
    InputTensor<2> output = {};       ///< [heads * head_dim, d_model]
    InputTensor<1> query_bias = {};   ///< [heads * head_dim]
    InputTensor<1> key_bias = {};     ///< [kv_heads * head_dim]
    InputTensor<1> value_bias = {};   ///< [kv_heads * head_dim]
    InputTensor<1> output_bias = {};  ///< [d_model]
};

/// The heads of a layer.
struct MultiHeadAttentionOptions {
    std::int64_t heads = 0;                       ///< >= 1; head_dim is query's outputs / heads
    std::int64_t kv_heads = 0;                    ///< 0 = heads; otherwise a divisor of heads
    std::pmr::memory_resource* memory = nullptr;  ///< for the packed weights; nullptr = aligned operator new
};

/// Immutable once made: any number of threads may call forward() at once.
class MultiHeadAttention {
  public:
    /// Packs the weights, which are not needed afterwards. Throws InvalidArgument, naming the weight or option, and
    /// OutOfMemory.
    MultiHeadAttention(Context& context, const MultiHeadAttentionOptions& options,
                       const MultiHeadAttentionWeights& weights);
    ~MultiHeadAttention();
    MultiHeadAttention(
        MultiHeadAttention&&) noexcept;  ///< one that was moved from may only be assigned to or destroyed
    MultiHeadAttention& operator=(MultiHeadAttention&&) noexcept;  ///< likewise

    std::int64_t d_model() const noexcept;   ///< elements of a row of x and y
    std::int64_t heads() const noexcept;     ///< query heads
    std::int64_t kv_heads() const noexcept;  ///< key and value heads
    std::int64_t head_dim() const noexcept;  ///< elements of a query, key and value

    /// x [batch, length, d_model] -> y [batch, length, d_model]; each sequence attends to itself. Options as for
    /// attend() over plain tensors: not causal unless options.causal says so.
    void forward(Context& context, const InputTensor<3>& x, const OutputTensor<3>& y,
                 const AttentionOptions& options = {}) const;

    /// x [length, d_model] -> y [length, d_model]: appends the rows' keys and values to a layer of the cache and
    /// attends over all it holds, causally. A step costs O(tokens held), not its square. If an error is thrown
    /// the layer holds what it held before.
    void forward(Context& context, const InputTensor<2>& x, KvCache& cache, std::size_t layer, const OutputTensor<2>& y,
                 const AttentionOptions& options = {}) const;

  private:
    class HEADLONG_LOCAL Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace headlong
