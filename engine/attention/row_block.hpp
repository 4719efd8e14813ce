// One row block of one KV head of one sequence, in a worker's scratch. A row is one head at one position; a block has
// up to 2048 rows, positions x heads of a KV group, so that a key is read once for the whole group.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/attention/problem.hpp"
#include "engine/carver.hpp"

namespace headlong {

inline constexpr auto kSpan = static_cast<std::int64_t>(kernels::kSpanTokens);
inline constexpr auto kBlock = static_cast<std::int64_t>(kernels::kBlockTokens);
inline constexpr auto kPanel = static_cast<std::int64_t>(kernels::kPanelTokens);
inline constexpr auto kGroup = static_cast<std::int64_t>(kernels::kGroupSpans);

// A span of plain keys and values is packed once per row block: strided rows come from memory a line at a time, and
// took a tenth of the time of 512 rows of 128 floats. 2048 rows of them are 3 MiB of states and queries.
inline constexpr std::int64_t kRowBlock = 2048;
// From so many rows on, 16-bit keys and values are widened once per span; fewer rows widen them in registers, again for
// every register tile. At 48 rows both cost about a quarter of the arithmetic, by the instructions counted.
inline constexpr std::int64_t kWideningRows = 48;
// 48 rows are whole register tiles of 6 and of 3; their scores (48 x 528 x 4 = 99 KiB) leave most of L2 to the span.
inline constexpr std::int64_t kRowTile = 48;
// Not 512: rows a multiple of 2 KiB apart would meet in two sets of an L1 of 64 sets x 64 bytes.
inline constexpr std::size_t kScoreStride = kernels::kSpanTokens + kernels::kPanelTokens;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }
constexpr std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

/// The number of the k-th span of sinks is k - kSinkSpans: below those of all other spans, in groups of their own.
inline constexpr std::int64_t kSinkSpans = kGroup << 40;
constexpr bool is_sink_span(std::int64_t span) noexcept { return span < 0; }
/// The first position of a span.
constexpr std::int64_t begin_of(std::int64_t span) noexcept {
    return (is_sink_span(span) ? span + kSinkSpans : span) * kSpan;
}
/// Spans of a group are folded on their own.
constexpr std::int64_t group_of(std::int64_t span) noexcept { return is_sink_span(span) ? -1 : span / kGroup; }

/// Spans in the order in which they are folded: those of the sinks, then the others.
struct SpanList {
    Range sinks;
    Range others;

    std::int64_t count() const noexcept { return sinks.end - sinks.begin + others.end - others.begin; }
    std::int64_t operator[](std::int64_t n) const noexcept {
        const std::int64_t first = sinks.end - sinks.begin;
        return n < first ? sinks.begin + n : others.begin + n - first;
    }
};

kernels::States take_states(Carver& carver, std::size_t rows, std::size_t pitch) noexcept;
kernels::States rows_from(const kernels::States& states, std::size_t row) noexcept;
void make_empty(const kernels::States& states, std::size_t rows) noexcept;

/// The sizes and shares of a call.
struct Plan {
    const AttentionProblem& problem;
    const kernels::KernelTable& kernels;
    kernels::BlockLayout layout;
    std::int64_t heads_per_kv_head;
    std::int64_t threads;
    std::int64_t longest;           ///< q_len
    std::int64_t block_positions;   ///< positions of a row block
    std::int64_t family_rows;       ///< of the largest family
    std::int64_t family_positions;  ///< of its members, which are one row block each; 1 without families
    std::int64_t units;             ///< row blocks of all sequences
    bool packs;                     ///< some sequence is of plain memory, or widened
    bool key_codes;                 ///< some sequence has keys of codes, ...
    bool value_codes;               ///< ... or values
    bool centred;                   ///< some sequence has keys that are centred
    bool masked;                    ///< some sequence has a mask

    Plan(const Context::Impl& context, const AttentionProblem& problem) noexcept;

    /// Rows of a row block whose spans may be shared by several tasks: no more than a row tile, or one position.
    std::int64_t split_rows() const noexcept { return std::min(block_rows(), std::max(kRowTile, heads_per_kv_head)); }
    std::int64_t block_rows() const noexcept { return block_positions * heads_per_kv_head; }
    /// Rows of the largest row block or family.
    std::int64_t most_rows() const noexcept { return std::max(block_rows(), family_rows); }
    std::int64_t items() const noexcept {
        return static_cast<std::int64_t>(problem.sequences.size()) * problem.kv_heads;
    }
    std::int64_t row_blocks() const noexcept {
        return ceil_div(longest, block_positions);
    }  ///< of the longest sequence

  private:
    void count_units() noexcept;
};

/// A worker's own memory. Its size depends on dims and row block, never on a length.
struct Scratch {
    float* query;                 ///< [block rows][head_dim], rotated, times factor
    kernels::States total;        ///< fold of the finished groups
    kernels::States group;        ///< fold of the running group of spans
    kernels::States tile;         ///< one span's state of one row tile
    kernels::States sink;         ///< one row: the state that a sink logit is
    float* scores;                ///< [row tile][score stride]
    kernels::TokenRange* ranges;  ///< [row tile]
    bool* begun;                  ///< [row tiles]: the group's state of a row tile holds something
    float* slopes;                ///< [row tile]
    float* positions;             ///< [row tile]
    float* bias;                  ///< [row tile][score stride], with a mask
    const float** bias_rows;      ///< [row tile]
    float* packed;                ///< 8 blocks of floats: plain keys and values, or widened ones
    std::uint8_t* query_codes;    ///< [block rows][code_row_bytes], with keys of codes
    float* shifts;                ///< [block rows], with centred keys: what their centre adds to a row's scores
    std::int16_t* weight_codes;   ///< [row tile][score stride], with values of codes

    Scratch(const Plan& plan, Carver& carver) noexcept;

    /// Bytes of a worker's scratch.
    static std::size_t bytes(const Plan& plan) noexcept {
        Carver counter(nullptr);
        const Scratch counted(plan, counter);
        static_cast<void>(counted);
        return counter.used();
    }
};

/// Whose rows a row block has, and before which keys.
struct Part {
    std::int64_t item;         ///< KV head item mod kv_heads of sequence item / kv_heads
    std::int64_t index;        ///< counts the sequence's row blocks
    std::int64_t members = 1;  ///< sequences of a family, from this one on, whose rows follow one another
    Range keys{0, kForever};   ///< sinks or not
};

class RowBlock {
  public:
    RowBlock(const Plan& plan, Scratch& scratch, const Part& part) noexcept
        : plan_(plan),
          scratch_(scratch),
          sequence_(plan.problem.sequences[size(part.item / plan.problem.kv_heads)]),
          kv_head_(part.item % plan.problem.kv_heads),
          first_row_(part.index * plan.block_positions),
          positions_(std::min(plan.block_positions, sequence_.q_len - first_row_)),
          members_(part.members),
          bounds_(part.keys),
          keys_(keys_of_block(false)),
          sinks_(keys_of_block(true)) {}

    /// False past the end of a sequence that is shorter than the call's longest.
    bool exists() const noexcept { return positions_ > 0; }
    std::size_t rows() const noexcept { return size(members_ * member_rows()); }
    std::int64_t member_rows() const noexcept { return positions_ * plan_.heads_per_kv_head; }
    /// The spans that some row may see, by causality, windows and length.
    SpanList spans() const noexcept;

    /// Loads the rows for the n-th of these spans, after the one before: to sinks a query may stand nearer, and they
    /// may be stored otherwise.
    void load_query_for(const SpanList& spans, std::int64_t n) const noexcept;
    /// Row r of a member is head r mod group at position r / group, so that neighbours see nearly the same keys. Rows
    /// that meet keys of codes become codes too.
    void load_query(bool sinks = false) const noexcept;

    /// What walks a group of spans, in this order: from nothing, span by span into the scratch's group, and what no
    /// span wrote to becomes the empty state. A first span's state is stored, not folded: folding into the empty state
    /// changes no bit but a -0, which nobody sees after finish().
    void begin_group() const noexcept;
    void fold_span(std::int64_t span) const noexcept;
    void end_group() const noexcept;
    /// States of all rows over one span, stored. Rows that see nothing get the empty state.
    void store_span(std::int64_t span, const kernels::States& out) const noexcept;
    /// Scores of all rows over one span, written to [heads, q_len, kv_len].
    void write_scores(std::int64_t span, const OutputRows& out, bool weights) const noexcept;
    /// Folds the sinks in, divides, and writes what the sequence wants.
    void finish(const kernels::States& states) const noexcept;

  private:
    /// Where the blocks of one span lie for this KV head, and what they are of.
    struct SpanBlocks {
        const std::byte* keys[kernels::kSpanBlocks] = {};
        const void* values[kernels::kSpanBlocks] = {};
        kernels::StoredType key_type = kernels::StoredType::f32;
        kernels::StoredType value_type = kernels::StoredType::f32;
        std::uint32_t nonfinite = 0;
        bool streams = false;             ///< they lie in a cache, and are read in place
        const std::byte* next = nullptr;  ///< keys of the span that is walked next, in a cache
        bool ready = false;
    };
    /// A row tile, and the panels of a span that it sees.
    struct Tile {
        std::int64_t row;
        std::int64_t count;
        std::int64_t first;
        std::int64_t last;
        bool sinks = false;   ///< it is one of sinks
        bool masked = false;  ///< a mask has something to say about the span
        bool empty() const noexcept { return first >= last; }
    };

    void rotate_query(float* rows, const float* cosine, const float* sine) const noexcept;
    void transform_query(const KeyTransform& transform) const noexcept;
    const CachedRows& cached(bool sinks) const noexcept { return sinks ? sequence_.cached_sinks : sequence_.cached; }
    /// The head and the query row of row r.
    std::int64_t head_of(std::int64_t row) const noexcept {
        return kv_head_ * plan_.heads_per_kv_head + row % plan_.heads_per_kv_head;
    }
    std::int64_t query_row_of(std::int64_t row) const noexcept {
        return first_row_ + row % member_rows() / plan_.heads_per_kv_head;
    }
    /// The sequence of row r: the members of a family lie one behind the other.
    const Sequence& sequence_of(std::int64_t row) const noexcept { return (&sequence_)[row / member_rows()]; }

    static std::int64_t position_of(const Sequence& sequence, std::int64_t query_row) noexcept {
        return sequence.positions != nullptr ? sequence.positions[query_row] : query_row + sequence.offset;
    }
    /// Keys that a query row may see, by causality, windows, length and this block's part: sinks, or the others.
    Range keys_of(const Sequence& sequence, std::int64_t query_row, bool sinks) const noexcept;
    /// Keys that some row of the block may see.
    Range keys_of_block(bool sinks) const noexcept;

    /// The span's blocks: in place in a cache, or packed into scratch.
    SpanBlocks blocks_of(std::int64_t span) const noexcept;
    SpanBlocks cached_blocks(std::int64_t span, Range keys) const noexcept;
    void widen(SpanBlocks& blocks, Range keys) const noexcept;
    /// Block b of the scratch.
    float* packed_block(std::int64_t b) const noexcept {
        return scratch_.packed + size(b) * (plan_.layout.bytes() / sizeof(float));
    }
    float* packed_values(float* block) const noexcept { return block + plan_.layout.values_offset() / sizeof(float); }
    SpanBlocks packed_blocks(std::int64_t span_begin, Range keys) const noexcept;
    /// Packs the tokens [position, position + count) of the pages as the tokens from `token` on of a block. Returns
    /// whether a value is NaN or infinite.
    bool pack(std::int64_t position, std::int64_t count, float* block, std::size_t token) const noexcept;

    /// What a tile's rows see of a span, left in scratch: ranges, and with a mask biases.
    Tile tile_at(std::int64_t span, std::int64_t row) const noexcept;
    /// Writes the biases of a row's range from a row of the mask (`data` is that of the range's first token that
    /// has an element), and returns the part of the range that holds all allowed tokens.
    kernels::TokenRange masked_range(std::int64_t span_begin, const std::byte* data, kernels::TokenRange range,
                                     float* bias) const noexcept;
    /// The rules for the tile that tile_at() has left in scratch.
    kernels::ScoreRules rules(const Tile& tile) const noexcept;
    void dot(const SpanBlocks& blocks, const Tile& tile) const noexcept;
    /// Asks for what the weights of a block meet first: the scales of its values.
    void ask_for_scales(const SpanBlocks& blocks, std::int64_t b) const noexcept;
    void weigh(const SpanBlocks& blocks, const Tile& tile, const kernels::States& out) const noexcept;
    /// The states of a tile's rows over one span.
    void span_state(const SpanBlocks& blocks, const Tile& tile, const kernels::States& out) const noexcept;
    /// Scores after the rules to weights, by the state that run_attention() left for this row.
    void to_weights(float* scores, std::size_t count, std::int64_t state) const noexcept;

    const Plan& plan_;
    Scratch& scratch_;
    const Sequence& sequence_;
    std::int64_t kv_head_;
    std::int64_t first_row_;  ///< of the sequence's query rows
    std::int64_t positions_;
    std::int64_t members_;
    Range bounds_;
    Range keys_;   ///< that some row of the block may see, sinks aside
    Range sinks_;  ///< the sinks
};

}  // namespace headlong
