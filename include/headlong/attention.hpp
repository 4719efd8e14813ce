/// \file
/// Exact attention: softmax(scale * Q K^T) V, computed span by span with an online softmax (Milakov and Gimelshein
/// 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention"), so that a score matrix
/// is never built. Arithmetic is float32, with fused multiply-add on every instruction set but `generic`; 16-bit
/// inputs are widened exactly, 16-bit outputs rounded once, to nearest even.
///
///   s_j   = scale * dot(query_i, key_j)
///   s_j   = softcap * tanh(s_j / softcap)             if softcap is on
///   s_j  -= alibi_slopes[h] * |p_i - j|               if ALiBi is on; p_i is the query's position
///   s_j  += mask[i, j]                                a float mask; of a boolean one, true = attend
///   o_i   = sum of softmax(s)_j * value_j over the keys that causality, window, length and mask all allow; a sink
///           logit joins the softmax's denominator once
///   lse_i = log(sum of exp(s_j)), with the sink; a natural logarithm
///
/// For one instruction set and one cache type a row's bits depend only on its query, the keys and values it sees
/// at their positions, and the options: not on threads, batch, chunking, or whether a cache was used, which counts its
/// sink_tokens apart if it has some. (merge() and attend_shared_prefix() split a row's keys at places of the caller's
/// choice, and agree within rounding.)
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stop_token>
#include <vector>

#include <headlong/context.hpp>
#include <headlong/export.hpp>
#include <headlong/tensor.hpp>

namespace headlong HEADLONG_API {

class KvCache;

/// Where query row i stands among the keys: its position is i + offset. Causality, windows and ALiBi use it.
enum class Alignment : std::uint8_t {
    bottom_right,  ///< offset = kv_len - q_len: the last query stands on the last live key (FlashAttention, decoding)
    top_left,      ///< offset = 0: the first query stands on the first key (ONNX without a past, PyTorch is_causal)
    offset,        ///< offset = AttentionOptions::causal_offset, which may be negative or beyond the keys
};

/// A mask over scores, broadcast by right alignment against [batch, heads, q_len, kv_len]: rank 3 is [heads, q_len,
/// kv_len]. An extent of 1 broadcasts, and so does a stride of 0. Fewer keys than there are (but not 1) leave the
/// others not allowed. Elements of a float mask that are -infinity mean "not allowed"; other non-finite ones reach
/// the rows that see them, and finite ones saturate at +-2.35e38 (FLT_MAX / log2(e)).
struct AttentionMask {
    /// Of an element.
    enum class Type : std::uint8_t {
        boolean,  ///< one byte, nonzero = attend
        f32,      ///< added to the score, as the other two are
        f16,      ///< IEEE 754 binary16
        bf16,     ///< the upper half of an f32
    };
    /// Which keys the last dimension is laid over.
    enum class Keys : std::uint8_t {
        all,     ///< key 0 and those that follow
        last_q,  ///< a sequence's last q_len live keys, all earlier ones being allowed: the tree mask of speculative
                 ///< decoding (Miao et al. 2023, "SpecInfer"); the last extent is q_len, or 1
    };
    const void* data = nullptr;  ///< element [0, ...]; the caller's
    Type type = Type::boolean;   ///< of every element
    std::size_t rank = 0;        ///< 1 to 4
    Extents<4> extents{};        ///< the first `rank` of them
    Extents<4> strides{};        ///< in elements, of any sign
    Keys keys = Keys::all;       ///< which keys it is laid over

    /// A dense row-major mask of `extents.size()` dimensions, 1 to 4 (others are refused by the call that takes it).
    static AttentionMask dense(const void* data, Type type, std::span<const std::int64_t> extents) noexcept;
};

/// What attention computes besides the plain operator. All features work together, in every call. Spans and masks
/// must outlive the call.
struct AttentionOptions {
    /// Factor of every score; 1 / sqrt(head_dim) if absent. Finite.
    std::optional<float> scale = {};
    /// Whether row i sees only keys j <= i + offset. Absent: not causal for plain tensors, causal with a cache.
    std::optional<bool> causal = {};
    Alignment alignment = Alignment::bottom_right;  ///< of the causal limit
    std::int64_t causal_offset = 0;                 ///< with Alignment::offset, else 0

    /// A query at position p sees the keys p - window_left <= j <= p + window_right; -1 = unbounded on that side.
    /// See window_left_of() for windows that count the query itself. Windows and offsets saturate at 2^60.
    std::int64_t window_left = -1;
    std::int64_t window_right = -1;  ///< likewise
    /// Scores become softcap * tanh(score / softcap), before ALiBi and masks; 0 = off. Finite, 1e-30 to 1e30.
    float softcap = 0.0F;
    std::span<const float> alibi_slopes = {};  ///< one per query head, finite; see alibi_slopes_for()
    std::optional<AttentionMask> mask = {};    ///< none if absent
    std::span<const float> sink_logits = {};   ///< one per query head; finite, or -infinity for none
    /// Live keys per sequence of the call, at most as many as there are: keys from there on are never read (but by
    /// attention_scores() before masks, which shows all pairs).
    std::span<const std::int64_t> kv_lengths = {};

    /// Checked before each row block's span of 512 keys, and between the tiles of a layer's products: a stop that is
    /// requested ends the call with Cancelled, its outputs unspecified.
    std::stop_token stop = {};
    /// The same once this time has come.
    std::optional<std::chrono::steady_clock::time_point> deadline = {};
};

/// The window_left of a sliding window that counts the query's own position, as in Hugging Face and ONNX Runtime
/// (`sliding_window` = 4096 sees the query's own key and 4095 before it). Throws InvalidArgument unless it is >= 1.
HEADLONG_API std::int64_t window_left_of(std::int64_t sliding_window);

/// ALiBi's slopes (Press et al. 2022, "Train Short, Test Long"): with n the largest power of two <= heads,
/// 2^(-8(h+1)/n) for h < n and 2^(-4(2(h-n)+1)/n) beyond. Throws InvalidArgument unless 1 <= heads <= 2^20,
/// OutOfMemory.
HEADLONG_API std::vector<float> alibi_slopes_for(std::int64_t heads);

/// Attention over plain tensors of one batch. Element [b, h, i, d] lies at data + the dot product of the indices
/// and the strides, so that [batch, length, heads, dim] layouts are the same call with other strides.
///
///   query   [batch, heads,    q_len,  head_dim]     head_dim >= 1
///   key     [batch, kv_heads, kv_len, head_dim]     heads is a multiple of kv_heads; query head h reads
///   value   [batch, kv_heads, kv_len, value_dim]    KV head h / (heads / kv_heads)
///   output  [batch, heads,    q_len,  value_dim]    written whole; must not overlap the inputs
///   lse     [batch, heads,    q_len]                optional, f32
///
/// Query, key, value and output may be f32, f16 or bf16, each its own. Every extent but head_dim may be 0. A row
/// that sees no key gives 0 and an lse of -infinity (with a sink logit: 0 and that logit). A NaN or infinity
/// reaches exactly the rows that see it; every NaN is written as 0x7fc00000 (f16: 0x7e00, bf16: 0x7fc0). (Where all
/// scores of a row in a span of 512 positions are -infinity, the span counts as empty, and its values are not looked
/// at.) Sums are float32: values and scores must leave room for the sum of 512 of them.
///
/// Throws InvalidArgument, OutOfMemory, Cancelled. Thread-safe.
HEADLONG_API void attend(Context& context, const InputTensor<4>& query, const InputTensor<4>& key,
                         const InputTensor<4>& value, const AttentionOptions& options, const OutputTensor<4>& output,
                         const OutputTensor<3>& lse = {});

/// Attention over sequences of any lengths that lie packed one behind the other (a "ragged" or "varlen" batch):
/// sequence s has the rows [query_offsets[s], query_offsets[s + 1]) of query, output and lse, and the rows
/// [key_offsets[s], key_offsets[s + 1]) of key and value. Offsets begin at 0 and do not decrease, so that a sequence
/// may be empty; rows behind the last offset belong to none and are left alone. Positions and masks count from each
/// sequence's own start; a mask is broadcast against [sequences, heads, q_len, kv_len], each sequence using the part
/// that its own lengths reach. Otherwise as attend() over plain tensors.
///
///   query [heads, rows, head_dim]    key [kv_heads, kv_rows, head_dim]    value [kv_heads, kv_rows, value_dim]
///   output [heads, rows, value_dim]  lse [heads, rows], optional
HEADLONG_API void attend_packed(Context& context, const InputTensor<3>& query, const InputTensor<3>& key,
                                const InputTensor<3>& value, std::span<const std::int64_t> query_offsets,
                                std::span<const std::int64_t> key_offsets, const AttentionOptions& options,
                                const OutputTensor<3>& output, const OutputTensor<2>& lse = {});

/// One sequence of a call over caches.
struct CachedQuery {
    InputTensor<3> query = {};       ///< [heads, q_len, head_dim]
    const KvCache* cache = nullptr;  ///< its keys and values; read, not changed; must not change during the call
    std::size_t layer = 0;           ///< of the cache
    OutputTensor<3> output = {};     ///< [heads, q_len, value_dim]
    OutputTensor<2> lse = {};        ///< [heads, q_len], optional, f32
    /// A mask of its own, rank 1 to 3, against [heads, q_len, kv_len]; not together with AttentionOptions::mask.
    std::optional<AttentionMask> mask = {};
};

/// Attention of any number of sequences, each over a layer of a cache: rows of a prompt, of a chunk, or of one
/// decode step, which have just been appended (causal and bottom-right unless the options say otherwise). The
/// sequences may differ in q_len and cache length, and may share a cache; heads and dims are the same for all. Of a
/// cache with a rotary description the query rows are rotated here, each at its position.
///
/// Positions count all tokens ever appended to the layer. Of a ring, or a layer with a window, a query sees what
/// KvCacheOptions says, and of that what the options allow: window_left cuts sinks off too, by their distance. A query
/// that stands where the layer no longer holds what it would see is refused with WouldForget (the rows of the last
/// append never are). Masks over a layer that has forgotten keys must be of the last q_len keys, or Unsupported is
/// thrown.
HEADLONG_API void attend(Context& context, std::span<const CachedQuery> queries, const AttentionOptions& options = {});

/// A run of consecutive keys and values in the caller's memory.
struct KvPage {
    InputTensor<3> key = {};    ///< [kv_heads, n, head_dim], n >= 0
    InputTensor<3> value = {};  ///< [kv_heads, n, value_dim]
};

/// One sequence of a call over the caller's own pages.
struct PagedQuery {
    InputTensor<3> query = {};           ///< [heads, q_len, head_dim]
    std::span<const KvPage> pages = {};  ///< at least one (it may hold 0 keys); keys count through all pages in order
    OutputTensor<3> output = {};         ///< [heads, q_len, value_dim]
    OutputTensor<2> lse = {};            ///< [heads, q_len], optional, f32
    std::optional<AttentionMask> mask = {};  ///< as CachedQuery::mask
};

/// Attention over keys and values that the caller keeps in pages of any sizes, which are packed as they are read.
/// Causal and bottom-right unless the options say otherwise, as with a KvCache, whose bits it gives. (A KvCache is
/// faster when the same keys are read again and again: it packs them once.)
HEADLONG_API void attend(Context& context, std::span<const PagedQuery> queries, const AttentionOptions& options = {});

/// Attention of sequences whose contexts begin with the same tokens ("cascade" or "shared-prefix" attention: Juravsky
/// et al. 2024, "Hydragen"): row i of a query sees the prefix, then its own cache; a suffix cache may be empty. The
/// rows of all queries go through the prefix together, so that it is read once, and merge() joins the two parts.
/// Positions count through prefix and suffix; kv_lengths, if given, are of the suffixes; the prefix must lie before
/// the queries: only bottom-right alignment. Masks are of the last q_len keys (AttentionMask::Keys::last_q), of which
/// each suffix has as many. All queries use the same layer, in their caches and in the prefix. Caches with a rotary
/// description are refused: their positions count from 0 in each cache; so are those with sink tokens, rings and
/// windows (Unsupported).
HEADLONG_API void attend_shared_prefix(Context& context, const KvCache& prefix, std::span<const CachedQuery> queries,
                                       const AttentionOptions& options = {});

/// The result of attention over some of a row's keys. The empty part is (0, -infinity).
struct AttentionPart {
    InputTensor<4> output = {};  ///< [batch, heads, q_len, value_dim]
    InputTensor<3> lse = {};     ///< [batch, heads, q_len], f32
};

/// Attention over all keys from the results over disjoint parts of them: l = log(sum of e^l_k),
/// o = sum of o_k e^(l_k - l), in double precision and in the order given. A sink logit must have joined exactly one
/// part. No parts, and parts that are all empty, give the empty part. Outputs may be one of the parts, in place.
HEADLONG_API void merge(Context& context, std::span<const AttentionPart> parts, const OutputTensor<4>& output,
                        const OutputTensor<3>& lse = {});

/// How far a score has come (ONNX Attention's qk_matmul_output_mode, in its order).
enum class ScoreStage : std::uint8_t {
    scaled,      ///< scale * dot(query, key), of all pairs
    softcapped,  ///< after softcap, of all pairs
    masked,      ///< after ALiBi and masks; -infinity where not allowed
    weights,     ///< after the softmax; 0 where not allowed
};

/// The matrix of scores of a call of attend() with the same arguments: [batch, heads, q_len, kv_len], f32, f16 or
/// bf16, written whole. The one place where such a matrix exists, for those who want to look at it; it costs
/// q_len * kv_len memory, which the caller provides.
HEADLONG_API void attention_scores(Context& context, const InputTensor<4>& query, const InputTensor<4>& key,
                                   const AttentionOptions& options, ScoreStage stage, const OutputTensor<4>& scores);

/// The same for one sequence over a layer of a cache: query [heads, q_len, head_dim], scores [heads, q_len, kv_len],
/// kv_len being the layer's length. Throws Unsupported for a layer with sink tokens, of a ring or with a window.
HEADLONG_API void attention_scores(Context& context, const InputTensor<3>& query, const KvCache& cache,
                                   std::size_t layer, const AttentionOptions& options, ScoreStage stage,
                                   const OutputTensor<3>& scores);

}  // namespace headlong
