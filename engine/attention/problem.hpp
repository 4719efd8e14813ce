// Attention after validation: what the API's calls boil down to, and the functions that run it.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "engine/block_table.hpp"
#include "engine/context_impl.hpp"
#include "engine/interrupt.hpp"
#include "engine/key_transform.hpp"
#include "engine/rows.hpp"

namespace headlong {

/// A run of plain keys and values: the positions [begin, end) of a sequence.
struct Page {
    InputRows key;
    InputRows value;
    std::int64_t begin = 0;
    std::int64_t end = 0;
};

/// A sequence's mask, element (head, row, key) at base + the indices times the strides; column 0 is key first_key, and
/// all keys before it are allowed. Keys behind the last column are cut off by Sequence::kv_end.
struct MaskRows {
    const std::byte* base = nullptr;  ///< null: no mask
    bool boolean = false;             ///< one byte an element, nonzero = allowed
    kernels::ElementType type = kernels::ElementType::f32;
    std::int64_t head_stride = 0;
    std::int64_t row_stride = 0;
    std::int64_t key_stride = 0;
    std::int64_t first_key = 0;
};

/// Where a layer's keys and values lie in a cache, and how.
struct CachedRows {
    const BlockTable* blocks = nullptr;  ///< null: they do not lie in a cache
    kernels::StoredType key_type = kernels::StoredType::f32;
    kernels::StoredType value_type = kernels::StoredType::f32;
    const KeyTransform* transform = nullptr;  ///< of the keys; null: none

    bool centred() const noexcept { return transform != nullptr && !transform->centre.empty(); }
};

/// Further than any position.
inline constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();

/// One sequence: its queries, where its keys and values lie, and which of them each query may see.
struct Sequence {
    InputRows query;
    std::int64_t q_len = 0;
    std::int64_t offset = 0;                  ///< query row i stands at position i + offset, ...
    const std::int64_t* positions = nullptr;  ///< ... or at positions[i]
    const float* cosine = nullptr;  ///< [q_len][rotary_dim / 2]: queries are rotated first; null: they are not
    const float* sine = nullptr;
    const float* sink_cosine = nullptr;  ///< the same for what meets the sinks
    const float* sink_sine = nullptr;

    std::int64_t kv_len = 0;             ///< live keys
    std::int64_t kv_end = 0;             ///< of them, those from here on are allowed to no query
    std::int64_t sinks = 0;              ///< the keys [0, sinks) are folded on their own, first, ...
    std::int64_t last_place = kForever;  ///< ... and are met by a query at this position at most
    std::int64_t window = kForever;      ///< of the other keys, a query sees the last so many, its own included
    CachedRows cached;                   ///< of a cache's layer, or ...
    CachedRows cached_sinks;             ///< the same for its sinks, which may be stored on their own
    std::int64_t family = 1;  ///< sequences, from this one on, that have the keys [0, shared) in the same blocks; 0:
                              ///< an earlier one counts this one
    std::int64_t shared = 0;  ///< whole spans, and all sinks
    std::span<const Page> pages;  ///< ... plain memory
    MaskRows mask;

    OutputRows output;        ///< base is null if not wanted
    OutputRows lse;           ///< the same; f32, column_stride does not matter
    float* maxima = nullptr;  ///< [heads][q_len], or null: the softmax's state, maximum in log2 units and ...
    float* sums = nullptr;    ///< ... sum
};

struct AttentionProblem {
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t value_dim = 0;
    std::span<const Sequence> sequences;

    /// What scores are multiplied by beside the scale: log2(e), which softmax_span wants, or 1 to look at them.
    float unit = 1.0F;
    float factor = 1.0F;  ///< what a query is multiplied by: scale * unit
    bool causal = false;
    std::int64_t window_left = -1;
    std::int64_t window_right = -1;
    float softcap = 0.0F;                 ///< times unit
    const float* alibi_slopes = nullptr;  ///< one per head, null = off; not times unit
    const float* sink_logits = nullptr;   ///< the same
    std::int64_t rotary_half = 0;         ///< pairs that are turned where a sequence has cosines
    bool rotary_interleaved = false;
    Interrupt interrupt;
};

/// Positions, offsets and windows are clamped to this: so far out a query sees all keys of a side, or none, and sums
/// of three stay in 64 bits.
inline constexpr std::int64_t kFarPosition = std::int64_t{1} << 60;

/// Keys [begin, end); empty if begin >= end.
struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool empty() const noexcept { return begin >= end; }
};

/// Keys, sinks aside, that a query at a position may see, by causality, windows and length; and sinks.
Range visible_keys(const AttentionProblem& problem, const Sequence& sequence, std::int64_t position) noexcept;
Range visible_sinks(const AttentionProblem& problem, const Sequence& sequence, std::int64_t position) noexcept;

/// Finds sequences that share blocks (forks), and puts them next to each other as families: keys that several have are
/// read once for the queries of all.
void gather_families(const Context::Impl& context, const AttentionProblem& problem,
                     std::span<Sequence> sequences) noexcept;

/// Computes outputs, lse and states. Returns false if it was interrupted. Throws what the memory resource
/// throws.
bool run_attention(Context::Impl& context, Workspace& workspace, const AttentionProblem& problem);

/// Bytes of a workspace's buffers that a call fills.
struct AttentionScratch {
    std::size_t workers = 0;
    std::size_t units = 0;
    std::size_t states = 0;
};

/// What run_attention() will take of a workspace. Of sequences, only q_len matters, and which members are null.
AttentionScratch attention_scratch(const Context::Impl& context, const AttentionProblem& problem) noexcept;

/// Writes scores, not outputs: sequence s to scores[s], [heads, q_len, kv_len]. Not allowed ones are -infinity. With
/// `weights` they go through the softmax whose states the sequences hold (run_attention's), and are 0 where not
/// allowed.
bool run_scores(Context::Impl& context, Workspace& workspace, const AttentionProblem& problem,
                std::span<const OutputRows> scores, bool weights);

}  // namespace headlong
