// What a forward pass of a decoder does, told while it runs: for instruments that time it, or that sum up its work.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headlong {

/// Every moment of Decoder::forward() belongs to one of these.
enum class Operation : std::uint8_t {
    reserve,      ///< checks, blocks of the cache, memory for activations
    embedding,    ///< rows of the embedding
    norm,         ///< RMS norms
    projection,   ///< linear layers: q, k, v, o, gate, up, down
    append,       ///< keys, rotated, and values into the cache
    attention,    ///< queries, rotated, over the cache
    activation,   ///< SwiGLU
    output_head,  ///< hidden states to logits
};
inline constexpr std::size_t kOperations = 8;

constexpr const char* to_string(Operation operation) noexcept {
    constexpr const char* kNames[kOperations] = {"reserve", "embedding", "norm",       "projection",
                                                 "append",  "attention", "activation", "output_head"};
    return kNames[static_cast<std::size_t>(operation)];
}

/// The work of an operation, as the roofline counts it.
struct Work {
    /// Multiply-adds count 2, other arithmetic (an exponential, too) 1: 2 * inputs * outputs * rows of a linear layer,
    /// 4 * heads * head_dim * visible (query, key) pairs of attention.
    std::uint64_t flops = 0;
    /// Read from or written to what is too large to stay in caches from call to call: weights as they are stored, once
    /// a call; live keys and values, once per KV head; rows appended. Activations are not counted.
    std::uint64_t bytes = 0;
};

/// Told in order, on the thread that called forward(): an operation lasts from its begin() to the next begin() or
/// end(). Every call of forward() ends with end(), one that throws too.
class ForwardLog {
  public:
    ForwardLog() = default;
    ForwardLog(const ForwardLog&) = delete;
    ForwardLog& operator=(const ForwardLog&) = delete;
    virtual ~ForwardLog() = default;

    /// `layer` is -1 for what belongs to none.
    virtual void begin(Operation operation, std::int64_t layer, const Work& work) noexcept = 0;
    virtual void end() noexcept = 0;
};

}  // namespace headlong
