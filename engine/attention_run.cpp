// The road of a query below the API (engine/README.md has the picture):
//
//   row block   up to 512 rows = positions x heads of one KV group, so that a key is read once for the whole group
//   row tile    48 rows whose scores against one span stay in L2
//   span        dot_panels -> softmax_span -> weighted_rows gives the tile's state, computed alone from zero
//   fold        span states into the group's state in ascending order, groups into the total in ascending order
//
// Two ways to share this work give the same bits, since neither changes the arithmetic of a span or the fold:
//   walk        a task takes one row block through all its spans (prefill, or enough heads for all threads)
//   split       a task takes some spans of a row block and stores their states; whoever finishes a row block's last
//               task folds them (decoding with more threads than KV heads)
#include "engine/attention_run.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <numbers>

#include "engine/parallel.hpp"

namespace headlong {
namespace {

using kernels::kBlockTokens;
using kernels::kGroupSpans;
using kernels::kPanelTokens;
using kernels::kSpanBlocks;
using kernels::kSpanTokens;

constexpr auto kSpan = static_cast<std::int64_t>(kSpanTokens);
constexpr auto kBlock = static_cast<std::int64_t>(kBlockTokens);
constexpr auto kPanel = static_cast<std::int64_t>(kPanelTokens);
constexpr auto kGroup = static_cast<std::int64_t>(kGroupSpans);

// A span of plain keys and values is packed once per row block: 512 rows make that about 1 % of the arithmetic.
constexpr std::int64_t kRowBlock = 512;
// 48 rows are whole register tiles of 6 and of 3; their scores (48 x 528 x 4 = 99 KiB) leave most of L2 to the span.
constexpr std::int64_t kRowTile = 48;
// Not 512: rows a multiple of 2 KiB apart would meet in two sets of an L1 of 64 sets x 64 bytes.
constexpr std::size_t kScoreStride = kSpanTokens + kPanelTokens;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

/// Hands out pieces of a memory block, each aligned for kernels; with a null base it only counts.
class Carver {
  public:
    explicit Carver(std::byte* base) noexcept : base_(base) {}
    template <class T>
    T* take(std::size_t count) noexcept {
        std::byte* p = base_ == nullptr ? nullptr : base_ + used_;
        used_ += kernels::round_up(count * sizeof(T), kernels::kAlignment);
        return reinterpret_cast<T*>(p);
    }
    kernels::States states(std::size_t rows, std::size_t pitch) noexcept {
        kernels::States s{};
        s.output = take<float>(rows * pitch);
        s.stride = pitch;
        s.max = take<float>(rows);
        s.sum = take<float>(rows);
        return s;
    }
    std::size_t used() const noexcept { return used_; }

  private:
    std::byte* base_;
    std::size_t used_ = 0;
};

kernels::States rows_from(const kernels::States& states, std::size_t row) noexcept {
    return {states.output + row * states.stride, states.stride, states.max + row, states.sum + row};
}

void make_empty(const kernels::States& states, std::size_t rows) noexcept {
    std::fill_n(states.output, rows * states.stride, 0.0F);
    std::fill_n(states.max, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(states.sum, rows, 0.0F);
}

/// Where the blocks of one span lie for one KV head.
struct SpanBlocks {
    const float* keys[kSpanBlocks] = {};
    const float* values[kSpanBlocks] = {};
    std::uint32_t nonfinite = 0;
};

/// Keys [begin, end); empty if begin >= end.
struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool empty() const noexcept { return begin >= end; }
};

/// The sizes and shares of a call.
struct Plan {
    const AttentionProblem& problem;
    const kernels::KernelTable& kernels;
    kernels::BlockLayout layout;
    std::int64_t heads_per_kv_head;
    std::int64_t block_positions;  ///< positions of a row block
    std::int64_t row_blocks;       ///< of the longest sequence
    bool packs;                    ///< some sequence is of plain tensors

    std::int64_t block_rows() const noexcept { return block_positions * heads_per_kv_head; }
    std::int64_t items() const noexcept {
        return static_cast<std::int64_t>(problem.sequences.size()) * problem.kv_heads;
    }
};

/// A worker's own memory. Its size depends on dims and row block, never on a length.
struct Scratch {
    float* query;           ///< [block rows][head_dim], times factor
    kernels::States total;  ///< fold of the finished groups
    kernels::States group;  ///< fold of the running group of spans
    kernels::States tile;   ///< one span's state of one row tile
    float* scores;          ///< [row tile][score stride]
    kernels::TokenRange* ranges;
    float* packed;  ///< 8 blocks of plain keys and values

    Scratch(const Plan& plan, Carver& carver) noexcept {
        const std::size_t rows = size(plan.block_rows());
        const std::size_t pitch = plan.layout.pitch();
        query = carver.take<float>(rows * plan.layout.head_dim);
        total = carver.states(rows, pitch);
        group = carver.states(rows, pitch);
        tile = carver.states(size(kRowTile), pitch);
        scores = carver.take<float>(size(kRowTile) * kScoreStride);
        ranges = carver.take<kernels::TokenRange>(size(kRowTile));
        packed =
            carver.take<float>(plan.packs ? kSpanBlocks * kernels::round_up(plan.layout.floats(), kPanelTokens) : 0);
    }
};

/// One row block of one KV head of one sequence, in a worker's scratch.
class RowBlock {
  public:
    RowBlock(const Plan& plan, Scratch& scratch, std::int64_t item, std::int64_t index) noexcept
        : plan_(plan),
          scratch_(scratch),
          sequence_(plan.problem.sequences[size(item / plan.problem.kv_heads)]),
          kv_head_(item % plan.problem.kv_heads),
          first_position_(index * plan.block_positions),
          positions_(std::min(plan.block_positions, sequence_.q_len - first_position_)) {}

    /// False past the end of a sequence that is shorter than the call's longest.
    bool exists() const noexcept { return positions_ > 0; }
    std::size_t rows() const noexcept { return size(positions_ * plan_.heads_per_kv_head); }

    /// Row r is head r mod group at position r / group, so that neighbours see nearly the same keys.
    void load_query() const noexcept {
        for (std::int64_t g = 0; g < plan_.heads_per_kv_head; ++g) {
            plan_.kernels.scale_rows(
                {{sequence_.query.at(kv_head_ * plan_.heads_per_kv_head + g, first_position_), kernels::ElementType::f32,
                  sequence_.query.row_stride, sequence_.query.column_stride, size(positions_), plan_.layout.head_dim},
                 plan_.problem.factor,
                 scratch_.query + size(g) * plan_.layout.head_dim,
                 size(plan_.heads_per_kv_head) * plan_.layout.head_dim});
        }
    }

    /// The spans that some row sees.
    Range spans() const noexcept {
        const Range keys = keys_of_positions(0, positions_);
        if (keys.empty()) return {};
        return {keys.begin / kSpan, ceil_div(keys.end, kSpan)};
    }

    /// The span's blocks: in place in a cache, or packed into scratch.
    SpanBlocks blocks_of(std::int64_t span) const noexcept {
        const Range all = keys_of_positions(0, positions_);
        const std::int64_t span_begin = span * kSpan;
        const Range keys{std::max(all.begin - span_begin, std::int64_t{0}), std::min(all.end - span_begin, kSpan)};
        return sequence_.blocks != nullptr ? cached_blocks(span, keys) : packed_blocks(span_begin, keys);
    }

    /// States of all rows over one span, folded into `into`.
    void fold_span(std::int64_t span, const SpanBlocks& blocks, const kernels::States& into) const noexcept {
        for (std::int64_t row = 0; row < positions_ * plan_.heads_per_kv_head; row += kRowTile) {
            const std::int64_t count = std::min(kRowTile, positions_ * plan_.heads_per_kv_head - row);
            if (!span_state(span, blocks, row, count, scratch_.tile)) continue;
            plan_.kernels.merge({rows_from(into, size(row)), scratch_.tile, size(count), plan_.layout.pitch()});
        }
    }

    /// States of all rows over one span, stored. Rows that see nothing get the empty state.
    void store_span(std::int64_t span, const SpanBlocks& blocks, const kernels::States& out) const noexcept {
        for (std::int64_t row = 0; row < positions_ * plan_.heads_per_kv_head; row += kRowTile) {
            const std::int64_t count = std::min(kRowTile, positions_ * plan_.heads_per_kv_head - row);
            const kernels::States rows = rows_from(out, size(row));
            if (!span_state(span, blocks, row, count, rows)) make_empty(rows, size(count));
        }
    }

    /// Divides, and writes output and lse.
    void finish(const kernels::States& states) const noexcept {
        const std::size_t columns = plan_.layout.value_dim;
        const std::int64_t stride = sequence_.output.column_stride;
        for (std::int64_t row = 0; row < positions_ * plan_.heads_per_kv_head; ++row) {
            const std::int64_t head = kv_head_ * plan_.heads_per_kv_head + row % plan_.heads_per_kv_head;
            const std::int64_t position = first_position_ + row / plan_.heads_per_kv_head;
            const kernels::States state = rows_from(states, size(row));
            float* out = sequence_.output.at(head, position);
            if (stride == 1) {
                plan_.kernels.finish({state, 1, columns, out, 0});
            } else {
                plan_.kernels.finish({state, 1, columns, state.output, 0});
                for (std::size_t c = 0; c < columns; ++c) out[static_cast<std::int64_t>(c) * stride] = state.output[c];
            }
            if (sequence_.lse.base != nullptr) *sequence_.lse.at(head, position) = log_sum_exp(*state.max, *state.sum);
        }
    }

  private:
    /// max is in units of log2, the result a natural logarithm.
    static float log_sum_exp(float max, float sum) noexcept {
        if (sum == 0.0F) return -std::numeric_limits<float>::infinity();
        const double lse = static_cast<double>(max) * std::numbers::ln2 + std::log(static_cast<double>(sum));
        return std::isnan(lse) ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(lse);
    }

    /// Keys that the query at a position of this row block sees.
    Range keys_of_position(std::int64_t position) const noexcept {
        Range keys{0, sequence_.kv_len};
        if (sequence_.causal) {
            std::int64_t end = 0;  // first_position_ + position + offset + 1, saturating
            if (__builtin_add_overflow(first_position_ + position + 1, sequence_.offset, &end)) {
                end = sequence_.offset < 0 ? 0 : sequence_.kv_len;
            }
            keys.end = std::clamp<std::int64_t>(end, 0, sequence_.kv_len);
        }
        return keys;
    }

    /// Keys that any query of the positions [first, last) sees: both ends grow with the position.
    Range keys_of_positions(std::int64_t first, std::int64_t last) const noexcept {
        return {keys_of_position(first).begin, keys_of_position(last - 1).end};
    }

    SpanBlocks cached_blocks(std::int64_t span, Range keys) const noexcept {
        SpanBlocks blocks;
        for (std::int64_t b = keys.begin / kBlock; b * kBlock < keys.end; ++b) {
            const Block& block = sequence_.blocks[span * static_cast<std::int64_t>(kSpanBlocks) + b];
            blocks.keys[b] = block.keys(size(kv_head_));
            blocks.values[b] = block.values(size(kv_head_));
            if (block.nonfinite(size(kv_head_)) != 0) blocks.nonfinite |= 1U << static_cast<unsigned>(b);
        }
        return blocks;
    }

    SpanBlocks packed_blocks(std::int64_t span_begin, Range keys) const noexcept {
        SpanBlocks blocks;
        const std::size_t pitch = plan_.layout.pitch();
        const std::size_t panel_floats = plan_.layout.panel_floats();
        for (std::int64_t b = keys.begin / kBlock; b * kBlock < keys.end; ++b) {
            float* block = scratch_.packed + size(b) * kernels::round_up(plan_.layout.floats(), kPanelTokens);
            float* values = block + plan_.layout.values_offset();
            // whole panels from the first visible one on; of the last one the tail is cleared like a cache's dead lanes
            const std::int64_t from = std::max(keys.begin - b * kBlock, std::int64_t{0}) / kPanel * kPanel;
            const std::int64_t to = std::min(keys.end - b * kBlock, kBlock);
            const std::size_t count = size(to - from);
            if (to % kPanel != 0) {
                float* tail = block + size(to / kPanel) * panel_floats;
                std::fill_n(tail, panel_floats, 0.0F);
                std::fill(values + size(to) * pitch, values + size(ceil_div(to, kPanel) * kPanel) * pitch, 0.0F);
            }
            const std::int64_t token = span_begin + b * kBlock + from;
            plan_.kernels.pack_panels(
                {{sequence_.key.at(kv_head_, token), kernels::ElementType::f32, sequence_.key.row_stride,
                  sequence_.key.column_stride, count, plan_.layout.head_dim},
                 block,
                 size(from)});
            const bool nonfinite = plan_.kernels.pack_rows(
                {{sequence_.value.at(kv_head_, token), kernels::ElementType::f32, sequence_.value.row_stride,
                  sequence_.value.column_stride, count, plan_.layout.value_dim},
                 values + size(from) * pitch,
                 pitch});
            if (nonfinite) blocks.nonfinite |= 1U << static_cast<unsigned>(b);
            blocks.keys[b] = block;
            blocks.values[b] = values;
        }
        return blocks;
    }

    /// The state of `count` rows from `row` on over one span; false if no row sees any of it.
    bool span_state(std::int64_t span, const SpanBlocks& blocks, std::int64_t row, std::int64_t count,
                    const kernels::States& out) const noexcept {
        // The tile's rows belong to a run of positions; each row's own range ends its softmax.
        std::int64_t first = kSpan;
        std::int64_t last = 0;
        for (std::int64_t r = 0; r < count; ++r) {
            const Range keys = keys_of_position((row + r) / plan_.heads_per_kv_head);
            const std::int64_t begin = std::max(keys.begin - span * kSpan, std::int64_t{0});
            const std::int64_t end = std::min(keys.end - span * kSpan, kSpan);
            if (begin < end) {
                scratch_.ranges[r] = {static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end)};
                first = std::min(first, begin);
                last = std::max(last, end);
            } else {
                scratch_.ranges[r] = {0, 0};
            }
        }
        if (first >= last) return false;
        first = first / kPanel * kPanel;
        last = ceil_div(last, kPanel) * kPanel;

        const std::size_t depth = plan_.layout.head_dim;
        for (std::int64_t b = first / kBlock; b * kBlock < last; ++b) {
            const std::int64_t from = std::max(first - b * kBlock, std::int64_t{0});
            const std::int64_t to = std::min(last - b * kBlock, kBlock);
            plan_.kernels.dot_panels({.rows = scratch_.query + size(row) * depth,
                                      .row_stride = depth,
                                      .row_count = size(count),
                                      .panels = blocks.keys[b] + size(from / kPanel) * plan_.layout.panel_floats(),
                                      .panel_stride = plan_.layout.panel_floats(),
                                      .depth = depth,
                                      .out = scratch_.scores + b * kBlock + from,
                                      .out_stride = kScoreStride,
                                      .columns = size(to - from),
                                      .accumulate = false,
                                      .canonical = false});
        }
        plan_.kernels.softmax_span(
            {scratch_.scores, kScoreStride, size(count), scratch_.ranges, size(first), size(last), out.max, out.sum});
        plan_.kernels.weighted_rows({.weights = scratch_.scores,
                                     .weight_stride = kScoreStride,
                                     .row_count = size(count),
                                     .value_blocks = blocks.values,
                                     .value_pitch = plan_.layout.pitch(),
                                     .nonfinite_blocks = blocks.nonfinite,
                                     .first = size(first),
                                     .last = size(last),
                                     .columns = plan_.layout.pitch(),
                                     .out = out.output,
                                     .out_stride = out.stride});
        return true;
    }

    const Plan& plan_;
    Scratch& scratch_;
    const Sequence& sequence_;
    std::int64_t kv_head_;
    std::int64_t first_position_;
    std::int64_t positions_;
};

/// One row block through all its spans.
void walk(const Plan& plan, Scratch& scratch, std::int64_t item, std::int64_t index) noexcept {
    const RowBlock block(plan, scratch, item, index);
    block.load_query();
    make_empty(scratch.total, block.rows());
    const Range spans = block.spans();
    for (std::int64_t span = spans.begin; span < spans.end;) {
        const std::int64_t group_end = std::min((span / kGroup + 1) * kGroup, spans.end);
        make_empty(scratch.group, block.rows());
        for (; span < group_end; ++span) {
            if (plan.problem.stop.stop_requested()) return;
            block.fold_span(span, block.blocks_of(span), scratch.group);
        }
        plan.kernels.merge({scratch.total, scratch.group, block.rows(), plan.layout.pitch()});
    }
    block.finish(scratch.total);
}

bool run_walk(Context::Impl& context, Workspace& workspace, const Plan& plan) {
    Carver counter(nullptr);
    const Scratch counted(plan, counter);
    static_cast<void>(counted);
    const std::size_t bytes = counter.used();
    std::byte* memory = workspace.workers.ensure(bytes * context.executor->worker_slots());
    const std::int64_t items = plan.items();
    parallel_for(*context.executor, size(items * plan.row_blocks), [&](std::size_t task, std::size_t worker) noexcept {
        if (plan.problem.stop.stop_requested()) return;
        Carver carver(memory + worker * bytes);
        Scratch scratch(plan, carver);
        // Row block by row block from the last: causal rows further down see more keys, and heavy tasks go first.
        const std::int64_t item = static_cast<std::int64_t>(task) % items;
        const std::int64_t level = static_cast<std::int64_t>(task) / items;
        const Sequence& sequence = plan.problem.sequences[size(item / plan.problem.kv_heads)];
        const std::int64_t index = ceil_div(sequence.q_len, plan.block_positions) - 1 - level;
        if (index >= 0) walk(plan, scratch, item, index);  // shorter sequences have fewer row blocks
    });
    return !plan.problem.stop.stop_requested();
}

/// What the split way keeps of one row block between tasks. The spans of one group are its wave: memory is bounded
/// by a group, whatever the length.
struct SplitItem {
    kernels::States spans;  ///< [64 spans of a group x block rows]
    kernels::States group;
    kernels::States total;
    std::atomic<std::int64_t>* left;  ///< tasks of this wave that are not done

    SplitItem(const Plan& plan, Carver& carver) noexcept {
        const std::size_t rows = size(plan.block_rows());
        spans = carver.states(kGroupSpans * rows, plan.layout.pitch());
        group = carver.states(rows, plan.layout.pitch());
        total = carver.states(rows, plan.layout.pitch());
        left = carver.take<std::atomic<std::int64_t>>(1);
    }
};

bool run_split(Context::Impl& context, Workspace& workspace, const Plan& plan) {
    Carver counter(nullptr);
    const Scratch counted(plan, counter);
    static_cast<void>(counted);
    const std::size_t worker_bytes = counter.used();
    Carver item_counter(nullptr);
    const SplitItem counted_item(plan, item_counter);
    static_cast<void>(counted_item);
    const std::size_t item_bytes = item_counter.used();

    const auto concurrency = static_cast<std::int64_t>(context.executor->concurrency());
    const std::int64_t items = plan.items() * plan.row_blocks;
    std::byte* workers = workspace.workers.ensure(worker_bytes * context.executor->worker_slots());
    std::byte* states = workspace.states.ensure(item_bytes * size(items));
    const auto item_at = [&](std::int64_t i) noexcept {
        Carver carver(states + size(i) * item_bytes);
        return SplitItem(plan, carver);
    };
    const auto block_at = [&](Scratch& scratch, std::int64_t i) noexcept {
        return RowBlock(plan, scratch, i / plan.row_blocks, i % plan.row_blocks);
    };

    Carver spans_carver(workers);
    Scratch any_scratch(plan, spans_carver);
    Range all_spans{std::numeric_limits<std::int64_t>::max(), 0};
    for (std::int64_t i = 0; i < items; ++i) {
        const SplitItem item = item_at(i);
        make_empty(item.total, size(plan.block_rows()));
        new (item.left) std::atomic<std::int64_t>(0);
        const RowBlock block = block_at(any_scratch, i);
        const Range spans = block.exists() ? block.spans() : Range{};
        if (spans.empty()) continue;
        all_spans.begin = std::min(all_spans.begin, spans.begin);
        all_spans.end = std::max(all_spans.end, spans.end);
    }

    // Four tasks a thread even out what the spans' ends and other programs make uneven.
    const std::int64_t runs_wanted = ceil_div(4 * concurrency, items);
    const std::int64_t last_group = all_spans.empty() ? 0 : (all_spans.end - 1) / kGroup;
    for (std::int64_t group = all_spans.empty() ? 0 : all_spans.begin / kGroup; group <= last_group; ++group) {
        const Range wave{std::max(group * kGroup, all_spans.begin), std::min((group + 1) * kGroup, all_spans.end)};
        const std::int64_t wave_spans = std::max(wave.end - wave.begin, std::int64_t{0});
        const std::int64_t runs = std::clamp(wave_spans, std::int64_t{1}, runs_wanted);
        const std::int64_t run_spans = ceil_div(wave_spans, runs);
        for (std::int64_t i = 0; i < items; ++i) item_at(i).left->store(runs, std::memory_order_relaxed);
        parallel_for(*context.executor, size(items * runs), [&](std::size_t task, std::size_t worker) noexcept {
            const std::int64_t i = static_cast<std::int64_t>(task) % items;
            const std::int64_t run = static_cast<std::int64_t>(task) / items;
            Carver carver(workers + worker * worker_bytes);
            Scratch scratch(plan, carver);
            const RowBlock block = block_at(scratch, i);
            if (!block.exists() || plan.problem.stop.stop_requested()) return;
            const SplitItem item = item_at(i);
            const std::size_t rows = block.rows();
            const Range spans = block.spans();
            const Range mine{std::max(wave.begin + run * run_spans, spans.begin),
                             std::min({wave.begin + (run + 1) * run_spans, wave.end, spans.end})};
            if (!mine.empty()) block.load_query();
            for (std::int64_t span = mine.begin; span < mine.end; ++span) {
                block.store_span(span, block.blocks_of(span), rows_from(item.spans, size(span % kGroup) * rows));
            }
            if (item.left->fetch_sub(1, std::memory_order_acq_rel) != 1) return;

            make_empty(item.group, rows);
            for (std::int64_t span = std::max(wave.begin, spans.begin); span < std::min(wave.end, spans.end); ++span) {
                plan.kernels.merge(
                    {item.group, rows_from(item.spans, size(span % kGroup) * rows), rows, plan.layout.pitch()});
            }
            plan.kernels.merge({item.total, item.group, rows, plan.layout.pitch()});
            if (group == last_group) block.finish(item.total);
        });
        if (plan.problem.stop.stop_requested()) return false;
    }
    return true;
}

}  // namespace

bool run_attention(Context::Impl& context, Workspace& workspace, const AttentionProblem& problem) {
    std::int64_t longest = 0;
    bool packs = false;
    for (const Sequence& sequence : problem.sequences) {
        longest = std::max(longest, sequence.q_len);
        packs = packs || sequence.blocks == nullptr;
    }
    if (longest == 0 || problem.heads == 0) return true;

    const std::int64_t heads_per_kv_head = problem.heads / problem.kv_heads;
    Plan plan{.problem = problem,
              .kernels = context.kernels,
              .layout = {size(problem.head_dim), size(problem.value_dim)},
              .heads_per_kv_head = heads_per_kv_head,
              .block_positions = std::clamp<std::int64_t>(kRowBlock / heads_per_kv_head, 1, longest),
              .row_blocks = 0,
              .packs = packs};
    // Smaller row blocks where there would not be two for every thread; then the spans are split.
    const auto concurrency = static_cast<std::int64_t>(context.executor->concurrency());
    const auto tasks = [&] { return plan.items() * ceil_div(longest, plan.block_positions); };
    while (concurrency > 1 && tasks() < 2 * concurrency && plan.block_rows() > kRowTile && plan.block_positions > 1) {
        plan.block_positions = ceil_div(plan.block_positions, 2);
    }
    plan.row_blocks = ceil_div(longest, plan.block_positions);
    const bool split = concurrency > 1 && tasks() < 2 * concurrency;
    return split ? run_split(context, workspace, plan) : run_walk(context, workspace, plan);
}

}  // namespace headlong
