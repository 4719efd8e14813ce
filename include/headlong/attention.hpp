// Exact attention: softmax(scale * Q K^T) V, computed span by span with an online softmax (Milakov and Gimelshein
// 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention"), so that a score matrix
// is never built. Arithmetic is float32, with fused multiply-add on every instruction set but `generic`.
//
// For one instruction set and one cache type a row's bits depend only on its query, the keys and values it sees
// at their positions, and the options: not on threads, batch, chunking, or whether a cache was used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stop_token>

#include <headlong/context.hpp>
#include <headlong/tensor.hpp>

namespace headlong {

class KvCache;

/// Where query row i stands among the keys: its position is i + offset.
enum class Alignment : std::uint8_t {
    bottom_right,  ///< offset = kv_len - q_len: the last query stands on the last key (FlashAttention, decoding)
    top_left,      ///< offset = 0: the first query stands on the first key (ONNX without a past, PyTorch is_causal)
    offset,        ///< offset = AttentionOptions::causal_offset, which may be negative and is not clamped
};

/// A mask over scores, broadcast by right alignment against [batch, heads, q_len, kv_len].
struct AttentionMask {
    enum class Type : std::uint8_t { boolean, f32, f16, bf16 };  ///< boolean: one byte, nonzero = attend
    const void* data = nullptr;
    Type type = Type::boolean;
    std::size_t rank = 0;  ///< 1 to 4; rank 3 is [heads, q_len, kv_len]
    Extents<4> extents{};
    Extents<4> strides{};
};

/// What attention computes besides the plain operator. An option that this version does not have yet is refused
/// with Unsupported, by its name. Spans and masks must outlive the call.
struct AttentionOptions {
    /// Factor of every score; 1 / sqrt(head_dim) if absent. Finite.
    std::optional<float> scale = {};
    /// Whether row i sees only keys j <= i + offset. Absent: not causal for plain tensors, causal with a cache.
    std::optional<bool> causal = {};
    Alignment alignment = Alignment::bottom_right;
    std::int64_t causal_offset = 0;  ///< used with Alignment::offset only

    std::int64_t window_left = -1;   ///< keys before a query's position that it sees; -1 = all. Not built yet.
    std::int64_t window_right = -1;  ///< keys after it; -1 = all. Not built yet.
    float softcap = 0.0F;            ///< scores become cap * tanh(score / cap); 0 = off. Not built yet.
    std::span<const float> alibi_slopes = {};       ///< one per query head. Not built yet.
    std::optional<AttentionMask> mask = {};         ///< Not built yet.
    std::span<const float> sink_logits = {};        ///< one per query head. Not built yet.
    std::span<const std::int64_t> kv_lengths = {};  ///< live keys per sequence. Not built yet.

    /// Checked between tasks; a stop requested during the call ends it with Cancelled, its outputs unspecified.
    std::stop_token stop = {};
};

/// Attention over plain tensors of one batch. Element [b, h, i, d] lies at data + the dot product of the indices
/// and the strides, so that [batch, length, heads, dim] layouts are the same call with other strides.
///
///   query   [batch, heads,    q_len,  head_dim]     head_dim >= 1
///   key     [batch, kv_heads, kv_len, head_dim]     heads is a multiple of kv_heads; query head h reads
///   value   [batch, kv_heads, kv_len, value_dim]    KV head h / (heads / kv_heads)
///   output  [batch, heads,    q_len,  value_dim]    written whole; must not overlap the inputs
///   lse     [batch, heads,    q_len]                optional: natural logarithm of the sum of exp(score)
///
/// Every extent but head_dim may be 0. A row that sees no key gives 0 and an lse of -infinity. A NaN or infinity
/// reaches exactly the rows that see it; every NaN is written as 0x7fc00000. (Where all scores of a row in a span of
/// 512 positions are -infinity, the span counts as empty, and its values are not looked at.) Sums are float32: values
/// and scores must leave room for the sum of 512 of them. Throws InvalidArgument, Unsupported (types other than f32,
/// options not built yet), OutOfMemory, Cancelled.
void attend(Context& context, const InputTensor<4>& query, const InputTensor<4>& key, const InputTensor<4>& value,
            const AttentionOptions& options, const OutputTensor<4>& output, const OutputTensor<3>& lse = {});

/// One sequence of a call over caches.
struct CachedQuery {
    InputTensor<3> query = {};       ///< [heads, q_len, head_dim]
    const KvCache* cache = nullptr;  ///< its keys and values; read, not changed; must not change during the call
    std::size_t layer = 0;
    OutputTensor<3> output = {};  ///< [heads, q_len, value_dim]
    OutputTensor<2> lse = {};     ///< [heads, q_len], optional
};

/// Attention of any number of sequences, each over a layer of a cache: rows of a prompt, of a chunk, or of one
/// decode step, which have just been appended (causal and bottom-right unless the options say otherwise). The
/// sequences may differ in q_len and cache length, and may share a cache; heads and dims are the same for all.
void attend(Context& context, std::span<const CachedQuery> queries, const AttentionOptions& options = {});

}  // namespace headlong
