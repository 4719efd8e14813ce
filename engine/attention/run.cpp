// The road of a query below the API (engine/README.md has the picture):
//
//   row block   up to 2048 rows = positions x heads of one KV group, so that a key is read once for the whole group
//   row tile    48 rows whose scores against one span stay in L2
//   span        dot_panels -> softmax_span -> weighted_rows gives the tile's state, computed alone from zero
//   fold        span states into the group's state in ascending order, groups into the total in ascending order
//
// Two ways to share this work give the same bits, since neither changes the arithmetic of a span or the fold:
//   walk        a task takes one row block through all its spans (prefill, or enough heads for all threads)
//   split       a task takes some spans of a row block and stores their states; whoever finishes a row block's last
//               task folds them (decoding with more threads than KV heads)
#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <utility>

#include "engine/attention/row_block.hpp"
#include "engine/parallel.hpp"

namespace headlong {
namespace {

/// One row block through all its spans.
void walk(const Plan& plan, Scratch& scratch, std::int64_t item, std::int64_t index) noexcept {
    const RowBlock block(plan, scratch, item, index);
    block.load_query();
    const Range spans = block.spans();
    if (spans.empty()) make_empty(scratch.total, block.rows());
    for (std::int64_t span = spans.begin; span < spans.end;) {
        const bool first_group = span == spans.begin;
        const std::int64_t group_end = std::min((span / kGroup + 1) * kGroup, spans.end);
        block.begin_group();
        for (; span < group_end; ++span) {
            if (plan.problem.stop.stop_requested()) return;
            block.fold_span(span);
        }
        block.end_group();
        if (first_group) {
            std::swap(scratch.total, scratch.group);
        } else {
            plan.kernels.merge({scratch.total, scratch.group, block.rows(), plan.layout.columns()});
        }
    }
    block.finish(scratch.total);
}

bool run_walk(Context::Impl& context, Workspace& workspace, const Plan& plan) {
    const std::size_t bytes = Scratch::bytes(plan);
    std::byte* memory = workspace.workers.ensure(bytes * context.executor->worker_slots());
    const std::int64_t items = plan.items();
    parallel_for(*context.executor, size(items * plan.row_blocks()),
                 [&](std::size_t task, std::size_t worker) noexcept {
                     if (plan.problem.stop.stop_requested()) return;
                     Carver carver(memory + worker * bytes);
                     Scratch scratch(plan, carver);
                     // Row block by row block from the last: causal rows further down see more keys, and heavy tasks go
                     // first.
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
        spans = take_states(carver, kernels::kGroupSpans * rows, plan.layout.columns());
        group = take_states(carver, rows, plan.layout.columns());
        total = take_states(carver, rows, plan.layout.columns());
        left = carver.take<std::atomic<std::int64_t>>(1);
    }

    static std::size_t bytes(const Plan& plan) noexcept {
        Carver counter(nullptr);
        const SplitItem counted(plan, counter);
        static_cast<void>(counted);
        return counter.used();
    }
};

bool run_split(Context::Impl& context, Workspace& workspace, const Plan& plan) {
    const std::size_t worker_bytes = Scratch::bytes(plan);
    const std::size_t item_bytes = SplitItem::bytes(plan);
    const auto concurrency = static_cast<std::int64_t>(context.executor->concurrency());
    const std::int64_t items = plan.items() * plan.row_blocks();
    std::byte* workers = workspace.workers.ensure(worker_bytes * context.executor->worker_slots());
    std::byte* states = workspace.states.ensure(item_bytes * size(items));
    const auto item_at = [&](std::int64_t i) noexcept {
        Carver carver(states + size(i) * item_bytes);
        return SplitItem(plan, carver);
    };
    const auto block_at = [&](Scratch& scratch, std::int64_t i) noexcept {
        return RowBlock(plan, scratch, i / plan.row_blocks(), i % plan.row_blocks());
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
                block.store_span(span, rows_from(item.spans, size(span % kGroup) * rows));
            }
            if (item.left->fetch_sub(1, std::memory_order_acq_rel) != 1) return;

            make_empty(item.group, rows);
            for (std::int64_t span = std::max(wave.begin, spans.begin); span < std::min(wave.end, spans.end); ++span) {
                plan.kernels.merge(
                    {item.group, rows_from(item.spans, size(span % kGroup) * rows), rows, plan.layout.columns()});
            }
            plan.kernels.merge({item.total, item.group, rows, plan.layout.columns()});
            if (group == last_group) block.finish(item.total);
        });
        if (plan.problem.stop.stop_requested()) return false;
    }
    return true;
}

bool splits(const Context::Impl& context, const Plan& plan) noexcept {
    const auto concurrency = static_cast<std::int64_t>(context.executor->concurrency());
    return concurrency > 1 && plan.items() * plan.row_blocks() < 2 * concurrency;
}

bool computes(const Plan& plan) noexcept { return plan.longest > 0 && plan.problem.heads > 0; }

}  // namespace

AttentionScratch attention_scratch(const Context::Impl& context, const AttentionProblem& problem) noexcept {
    const Plan plan(context, problem);
    if (!computes(plan)) return {};
    return {
        saturating_product(Scratch::bytes(plan), context.executor->worker_slots()),
        splits(context, plan) ? saturating_product(SplitItem::bytes(plan), size(plan.items() * plan.row_blocks())) : 0};
}

bool run_attention(Context::Impl& context, Workspace& workspace, const AttentionProblem& problem) {
    const Plan plan(context, problem);
    if (!computes(plan)) return true;
    return splits(context, plan) ? run_split(context, workspace, plan) : run_walk(context, workspace, plan);
}

bool run_scores(Context::Impl& context, Workspace& workspace, const AttentionProblem& problem,
                std::span<const OutputRows> scores, bool weights) {
    const Plan plan(context, problem);
    if (!computes(plan)) return true;
    const std::size_t bytes = Scratch::bytes(plan);
    std::byte* memory = workspace.workers.ensure(bytes * context.executor->worker_slots());
    const std::int64_t row_blocks = plan.row_blocks();
    parallel_for(*context.executor, size(plan.items() * row_blocks),
                 [&](std::size_t task, std::size_t worker) noexcept {
                     Carver carver(memory + worker * bytes);
                     Scratch scratch(plan, carver);
                     const std::int64_t item = static_cast<std::int64_t>(task) / row_blocks;
                     const RowBlock block(plan, scratch, item, static_cast<std::int64_t>(task) % row_blocks);
                     if (!block.exists()) return;
                     block.load_query();
                     const std::int64_t sequence = item / problem.kv_heads;
                     const std::int64_t kv_len = problem.sequences[size(sequence)].kv_len;
                     for (std::int64_t span = 0; span * kSpan < kv_len; ++span) {
                         if (problem.stop.stop_requested()) return;
                         block.write_scores(span, scores[size(sequence)], weights);
                     }
                 });
    return !problem.stop.stop_requested();
}

}  // namespace headlong
