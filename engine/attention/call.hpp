// What all calls of attention share between the public function and the run: checks of shapes and options, room for
// the call's sequences, and what the options say of each of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include <headlong/attention.hpp>
#include <headlong/rotary.hpp>

#include "engine/attention/problem.hpp"
#include "engine/validate.hpp"

namespace headlong {

struct CallShape {
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t value_dim = 0;
};

/// The lengths of one sequence, or the longest of a call.
struct Lengths {
    std::int64_t q_len = 0;
    std::int64_t kv_len = 0;
};

/// Dims and heads fit together, and no size of a plan can leave 64 bits.
void check_shape(const CallShape& shape);
void check_lengths(const Lengths& lengths);
void check_batch(std::int64_t sequences);

/// Gathers the longest lengths of a call's sequences, and checks them: each, and all query rows together.
class LongestLengths {
  public:
    void add(const Lengths& lengths);
    const Lengths& longest() const noexcept { return longest_; }
    std::int64_t rows() const noexcept { return rows_; }

  private:
    Lengths longest_;
    std::int64_t rows_ = 0;
};

/// Checks a mask against [sequences, heads, q_len, kv_len] of the longest sequence; `rank` is the highest allowed.
void check_mask(const char* name, const AttentionMask& mask, std::size_t rank, std::int64_t sequences,
                std::int64_t heads, const Lengths& longest);

/// Checks everything in the options but kv_lengths against a call.
void check_options(const AttentionOptions& options, const CallShape& shape, std::size_t sequences,
                   const Lengths& longest);

/// kv_lengths has one length for each sequence; checks the one of sequence `index`, whose tensor or cache holds kv_len.
void check_kv_lengths(const AttentionOptions& options, std::size_t sequences);
void check_kv_length(const AttentionOptions& options, std::size_t index, std::int64_t kv_len);

/// The problem that the options describe; sequences are still to be set.
AttentionProblem problem_of(const AttentionOptions& options, const CallShape& shape, bool causal_by_default);
/// The same with scores as they are, not in units of log2.
AttentionProblem scores_problem_of(const AttentionOptions& options, const CallShape& shape, bool causal_by_default);

/// Sets what the options say of a sequence, whose lengths (kv_len: of its memory) are given: live keys, offset, mask.
/// `own_mask` is the sequence's, if it has one.
void apply_options(const AttentionOptions& options, std::size_t index, const Lengths& lengths,
                   const std::optional<AttentionMask>& own_mask, Sequence& sequence);

/// A call over plain tensors, as queries, keys and options say.
struct PlainCall {
    std::int64_t batch = 0;
    CallShape shape;
    Lengths lengths;
};
PlainCall check_plain(const InputTensor<4>& query, const InputTensor<4>& key, std::int64_t value_dim,
                      const AttentionOptions& options);

/// Query, output and lse of one sequence: [heads, q_len, ...].
void check_rows(const InputTensor<3>& query, const OutputTensor<3>& output, const OutputTensor<2>& lse,
                const CallShape& shape);
void set_rows(const InputTensor<3>& query, const OutputTensor<3>& output, const OutputTensor<2>& lse,
              Sequence& sequence) noexcept;
/// The mask of a single query, which excludes one for the whole call.
void check_own_mask(const AttentionOptions& options, const std::optional<AttentionMask>& mask, const CallShape& shape,
                    const Lengths& lengths);

/// Checks all of a call over caches (at least one query), and returns its shape.
CallShape check_cached_queries(std::span<const CachedQuery> queries, const AttentionOptions& options);
/// Whether there is nothing to compute: no rows, or none that anybody wants.
template <class Query>
bool writes_nothing(std::span<const Query> queries) noexcept {
    for (const Query& q : queries) {
        if (!is_empty<3>(q.output.extents) || (q.lse.data != nullptr && !is_empty<2>(q.lse.extents))) return false;
    }
    return true;
}
/// Throws Unsupported if a layer has sinks or forgets.
void check_plain_layer(const char* name, const KvCache& cache, std::size_t layer);
/// Sets where a sequence's keys and values lie in a cache, and which of them there are.
void set_blocks(const KvCache& cache, std::size_t layer, Sequence& sequence);
/// Sets everything of a sequence but where it writes to. A layer without tokens has no blocks to point to.
void set_cached(const CachedQuery& query, const AttentionOptions& options, std::size_t index, Sequence& sequence);

/// Throws WouldForget if a query of the sequence sees a key that its layer no longer holds.
void check_held(const AttentionProblem& problem, const Sequence& sequence, std::int64_t held_from);

/// Throws Unsupported for a mask over all keys of a layer that no longer holds them all.
void check_ring_mask(const std::optional<AttentionMask>& mask, const KvCache& cache, std::size_t layer);

/// Room for a call's lists in the workspace, so that a call that was made before allocates nothing.
struct CallLists {
    std::span<Sequence> sequences;
    std::span<Page> pages;
    std::span<OutputRows> scores;
};
std::size_t list_bytes(std::size_t sequences, std::size_t pages) noexcept;
CallLists lists_in(Workspace& workspace, std::size_t sequences, std::size_t pages);

/// One page of [kv_heads, n, dim] key and value rows that holds the positions [begin, begin + n).
inline Page page_of(const InputTensor<3>& key, const InputTensor<3>& value, std::int64_t begin) noexcept {
    return {input_rows(key), input_rows(value), begin, begin + key.extents[1]};
}

/// Floats that rotary tables for the rows of all queries take.
std::size_t rotary_floats(const std::optional<Rotary>& rotary, std::span<const Sequence> sequences) noexcept;
/// Fills the tables of all sequences (queries stand at position i + offset) in `memory`, and points to them.
void tabulate_queries(Context::Impl& context, const std::optional<Rotary>& rotary, std::span<Sequence> sequences,
                      float* memory, AttentionProblem& problem);

/// Runs the problem, or throws Cancelled.
void run_or_cancel(Context& context, Workspace& workspace, const AttentionProblem& problem, const char* what);

}  // namespace headlong
