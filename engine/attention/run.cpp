// The road of a query below the API (engine/README.md has the picture):
//
//   row block   up to 2048 rows = positions x heads of one KV group, so that a key is read once for the whole group
//   row tile    48 rows whose scores against one span stay in L2
//   span        dot_panels -> softmax_span -> weighted_rows gives the tile's state, computed alone from zero
//   fold        span states into the group's state in ascending order, groups into the total in ascending order
//
// Three ways to share this work give the same bits, since none changes the arithmetic of a span or the fold:
//   walk        a task takes one row block through all its spans
//   family      a task takes the rows of several sequences through the spans that all have, then each through its own
//   split       a task takes some spans of a row block and stores their states; whoever finishes a row block's last
//               task folds them
// A row block is split if it is more than a task's share of the call: the long sequences of a batch, or all row blocks
// where there are few of them. Everything runs in one parallel region, the largest tasks first; a row block
// that is split and longer than a wave takes a region per wave, so that memory is bounded whatever the length.
#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <utility>

#include "engine/attention/row_block.hpp"
#include "engine/parallel.hpp"

namespace headlong {
namespace {

/// The fold of a row block's spans into its scratch: finished groups in `total`, the running one in `group`.
class Fold {
  public:
    Fold(const Plan& plan, Scratch& scratch) noexcept : plan_(plan), scratch_(scratch) {}
    /// Goes on with one member's rows of a family, in a scratch of that member's states.
    Fold(const Fold& family, Scratch& scratch) noexcept
        : plan_(family.plan_), scratch_(scratch), group_(family.group_), any_(family.any_) {}

    /// Returns false if the call is to stop.
    bool add(const RowBlock& block) noexcept {
        const SpanList spans = block.spans();
        for (std::int64_t n = 0; n < spans.count(); ++n) {
            if (plan_.problem.interrupt.requested()) return false;
            if (group_ != kNone && group_of(spans[n]) != group_) close(block);
            if (group_ == kNone) block.begin_group();
            group_ = group_of(spans[n]);
            block.load_query_for(spans, n);
            block.fold_span(spans[n]);
        }
        return true;
    }
    void finish(const RowBlock& block) noexcept {
        if (group_ != kNone) close(block);
        if (!any_) make_empty(scratch_.total, block.rows());
        block.finish(scratch_.total);
    }

  private:
    void close(const RowBlock& block) noexcept {
        block.end_group();
        if (any_) {
            plan_.kernels.merge({scratch_.total, scratch_.group, block.rows(), plan_.layout.columns()});
        } else {
            std::swap(scratch_.total, scratch_.group);
        }
        any_ = true;
        group_ = kNone;
    }

    static constexpr std::int64_t kNone = -2;  // no group's number
    const Plan& plan_;
    Scratch& scratch_;
    std::int64_t group_ = kNone;  ///< the running one
    bool any_ = false;            ///< `total` holds something
};

/// One row block through all its spans.
void walk(const Plan& plan, Scratch& scratch, std::int64_t item, std::int64_t index) noexcept {
    Fold fold(plan, scratch);
    const RowBlock block(plan, scratch, {item, index});
    if (fold.add(block)) fold.finish(block);
}

/// A family's shared spans for the rows of all, and then each member's own.
void walk_family(const Plan& plan, Scratch& scratch, std::int64_t item) noexcept {
    const Sequence& first = plan.problem.sequences[size(item / plan.problem.kv_heads)];
    scratch.begun[0] = false;  // the shared spans may be seen by nobody
    Fold shared(plan, scratch);
    const RowBlock all(plan, scratch, {item, 0, first.family, {0, first.shared}});
    if (!shared.add(all)) return;
    for (std::int64_t m = 0; m < first.family; ++m) {
        Scratch own = scratch;
        own.total = rows_from(scratch.total, size(m * all.member_rows()));
        own.group = rows_from(scratch.group, size(m * all.member_rows()));
        bool begun = scratch.begun[0];  // a family is one row tile
        own.begun = &begun;
        Fold fold(shared, own);
        const RowBlock rest(plan, own, {item + m * plan.problem.kv_heads, 0, 1, {first.shared, kForever}});
        if (!fold.add(rest)) return;
        fold.finish(rest);
    }
}

// Four tasks a thread even out what the spans' ends and other programs make uneven.
constexpr std::int64_t kTasksPerThread = 4;
// A wave is up to 131072 keys, fewer if there are many rows and threads: states of 8192 rows of 128 columns are 4 MiB.
// Waking threads for the next wave costs a hundredth of one.
constexpr std::int64_t kMostWaveGroups = 4;
constexpr std::int64_t kWaveRows = 8192;

std::int64_t wave_spans(const Plan& plan) noexcept {
    return kGroup *
           std::clamp<std::int64_t>(kWaveRows / (kGroup * plan.split_rows() * plan.threads), 1, kMostWaveGroups);
}

/// What a row block that is split keeps between its tasks, for one KV head.
struct SplitState {
    kernels::States spans;  ///< [spans of a wave x block rows]
    kernels::States group;
    kernels::States total;
    std::atomic<std::int64_t>* left;  ///< tasks of this wave that are not done

    SplitState(const Plan& plan, Carver& carver) noexcept {
        const std::size_t rows = size(plan.split_rows());
        spans = take_states(carver, size(wave_spans(plan)) * rows, plan.layout.columns());
        group = take_states(carver, rows, plan.layout.columns());
        total = take_states(carver, rows, plan.layout.columns());
        left = carver.take<std::atomic<std::int64_t>>(1);
    }

    static std::size_t bytes(const Plan& plan) noexcept {
        Carver counter(nullptr);
        const SplitState counted(plan, counter);
        static_cast<void>(counted);
        return counter.used();
    }
};

/// A row block of a sequence, for all KV heads.
struct Unit {
    std::int64_t sequence;
    std::int64_t index;        ///< of the sequence's row blocks
    std::int64_t spans;        ///< that some row may see
    std::int64_t work;         ///< of one KV head: rows x spans
    std::int64_t first_state;  ///< of the KV heads' split states; -1: it is walked
    std::int64_t runs;         ///< tasks of one KV head in this wave
    std::int64_t first_task;   ///< in this wave
};

/// The tasks of a call.
class Schedule {
  public:
    /// Lists the units in memory of unit_bytes(). `scratch` is not written to.
    Schedule(const Plan& plan, std::byte* units, Scratch& scratch) noexcept
        : plan_(plan), units_(reinterpret_cast<Unit*>(units)) {
        std::int64_t total = 0;
        for (std::size_t s = 0; s < plan_.problem.sequences.size(); ++s) {
            const auto sequence = static_cast<std::int64_t>(s);
            if (plan_.problem.sequences[s].family == 0) continue;
            const std::int64_t blocks = ceil_div(plan_.problem.sequences[s].q_len, plan_.block_positions);
            for (std::int64_t index = 0; index < blocks; ++index) {
                const RowBlock block(plan_, scratch, {sequence * plan_.problem.kv_heads, index});
                const std::int64_t spans = block.spans().count();
                // (of a family, what its first member would have to do alone)
                const std::int64_t work = static_cast<std::int64_t>(block.rows()) * spans;
                units_[count_++] = {sequence, index, spans, work, -1, 1, 0};
                total += work * plan_.problem.kv_heads;
            }
        }
        const std::int64_t tasks = kTasksPerThread * plan_.threads;
        share_ = std::max<std::int64_t>(ceil_div(total, tasks), 1);
        for (Unit& unit : std::span(units_, count_)) {
            if (plan_.problem.sequences[size(unit.sequence)].family > 1) continue;
            if (plan_.threads == 1 || unit.work * tasks <= total || unit.work > plan_.split_rows() * unit.spans)
                continue;
            unit.first_state = split_;
            split_ += plan_.problem.kv_heads;
        }
    }

    /// Bytes of the list: 64 bytes a row block, 1024 of them at a time.
    static std::size_t unit_bytes(const Plan& plan) noexcept {
        return kernels::round_up(size(std::max<std::int64_t>(plan.units, 1)), 1024) * sizeof(Unit);
    }
    /// Bytes of what row blocks keep that are split.
    std::size_t state_bytes() const noexcept {
        // one sequence takes what was foretold, whatever its keys
        const std::int64_t states = plan_.problem.sequences.size() == 1 ? most_split(plan_) : split_;
        return size(states) * SplitState::bytes(plan_);
    }
    /// The same for keys of any length.
    static std::size_t most_state_bytes(const Plan& plan) noexcept {
        return saturating_product(SplitState::bytes(plan), size(most_split(plan)));
    }

    void use_states(std::byte* memory) noexcept {
        memory_ = memory;
        for (const Unit& unit : std::span(units_, count_)) {
            for (std::int64_t head = 0; unit.first_state >= 0 && head < plan_.problem.kv_heads; ++head) {
                const SplitState state = state_of(unit, head);
                make_empty(state.total, size(plan_.split_rows()));
                make_empty(state.group, size(plan_.split_rows()));
                new (state.left) std::atomic<std::int64_t>(0);
            }
        }
    }

    /// Sets up the tasks of wave `wave` and returns how many there are; 0: all is done.
    std::int64_t begin_wave(std::int64_t wave) noexcept {
        for (Unit& unit : std::span(units_, count_)) {
            unit.runs = wave == 0 ? 1 : 0;
            if (unit.first_state < 0) continue;
            const std::int64_t spans = std::max(wave_of(unit, wave).end - wave_of(unit, wave).begin, std::int64_t{0});
            const std::int64_t rows = unit.work / unit.spans;
            unit.runs = std::min(ceil_div(spans * rows, share_), spans);
            for (std::int64_t head = 0; head < plan_.problem.kv_heads; ++head) {
                state_of(unit, head).left->store(unit.runs, std::memory_order_relaxed);
            }
        }
        std::sort(units_, units_ + count_, [](const Unit& a, const Unit& b) noexcept {
            const std::int64_t of_a = a.work / std::max<std::int64_t>(a.runs, 1);
            const std::int64_t of_b = b.work / std::max<std::int64_t>(b.runs, 1);
            if (of_a != of_b) return of_a > of_b;
            return a.sequence != b.sequence ? a.sequence < b.sequence : a.index > b.index;
        });
        std::int64_t tasks = 0;
        for (Unit& unit : std::span(units_, count_)) {
            unit.first_task = tasks;
            tasks += unit.runs * plan_.problem.kv_heads;
        }
        return tasks;
    }

    void run(std::int64_t task, std::int64_t wave, Scratch& scratch) const noexcept {
        const Unit& unit = *(std::upper_bound(units_, units_ + count_, task,
                                              [](std::int64_t t, const Unit& u) noexcept { return t < u.first_task; }) -
                             1);
        const std::int64_t head = (task - unit.first_task) % plan_.problem.kv_heads;
        const std::int64_t item = unit.sequence * plan_.problem.kv_heads + head;
        if (plan_.problem.sequences[size(unit.sequence)].family > 1) {
            walk_family(plan_, scratch, item);
        } else if (unit.first_state < 0) {
            walk(plan_, scratch, item, unit.index);
        } else {
            run_part(unit, head, (task - unit.first_task) / plan_.problem.kv_heads, wave, scratch);
        }
    }

  private:
    /// Heads of row blocks that are split, at most: those that are more than a task's share.
    static std::int64_t most_split(const Plan& plan) noexcept {
        if (plan.threads == 1) return 0;
        const std::int64_t kv_heads = std::max<std::int64_t>(plan.problem.kv_heads, 1);
        const bool too_large =
            plan.block_rows() > plan.split_rows() && plan.problem.sequences.size() == 1 && plan.units == 1;
        if (too_large) return 0;
        return std::min(plan.units * kv_heads, (kTasksPerThread * plan.threads - 1) / kv_heads * kv_heads);
    }

    SplitState state_of(const Unit& unit, std::int64_t head) const noexcept {
        Carver carver(memory_ + size(unit.first_state + head) * SplitState::bytes(plan_));
        return SplitState(plan_, carver);
    }

    /// Those of a unit's spans that a wave computes.
    Range wave_of(const Unit& unit, std::int64_t wave) const noexcept {
        const std::int64_t first = wave * wave_spans(plan_);
        return {first, std::min(first + wave_spans(plan_), unit.spans)};
    }

    /// Some spans of a row block; the last task of a wave folds.
    void run_part(const Unit& unit, std::int64_t head, std::int64_t run, std::int64_t wave,
                  Scratch& scratch) const noexcept {
        const RowBlock block(plan_, scratch, {unit.sequence * plan_.problem.kv_heads + head, unit.index});
        const SplitState state = state_of(unit, head);
        const SpanList spans = block.spans();
        const std::size_t rows = block.rows();
        const std::size_t columns = plan_.layout.columns();
        const Range part = wave_of(unit, wave);
        const auto at = [&](std::int64_t n) noexcept { return rows_from(state.spans, size(n - part.begin) * rows); };
        const std::int64_t count = part.end - part.begin;
        const std::int64_t first = part.begin + count * run / unit.runs;
        for (std::int64_t n = first; n < part.begin + count * (run + 1) / unit.runs; ++n) {
            if (plan_.problem.interrupt.requested()) return;
            if (n == first) block.load_query(is_sink_span(spans[n]));
            if (n != first) block.load_query_for(spans, n);
            block.store_span(spans[n], at(n));
        }
        if (state.left->fetch_sub(1, std::memory_order_acq_rel) != 1) return;

        // the running group goes on from wave to wave
        for (std::int64_t n = part.begin; n < part.end; ++n) {
            plan_.kernels.merge({state.group, at(n), rows, columns});
            if (n + 1 < unit.spans && group_of(spans[n + 1]) == group_of(spans[n])) continue;
            plan_.kernels.merge({state.total, state.group, rows, columns});
            make_empty(state.group, rows);
        }
        if (part.end == unit.spans) block.finish(state.total);
    }

    const Plan& plan_;
    Unit* const units_;
    std::byte* memory_ = nullptr;
    std::size_t count_ = 0;
    std::int64_t share_ = 1;  ///< of a task
    std::int64_t split_ = 0;  ///< heads of row blocks that are split
};

bool computes(const Plan& plan) noexcept { return plan.longest > 0 && plan.problem.heads > 0; }

}  // namespace

AttentionScratch attention_scratch(const Context::Impl& context, const AttentionProblem& problem) noexcept {
    const Plan plan(context, problem);
    if (!computes(plan)) return {};
    return {saturating_product(Scratch::bytes(plan), context.executor->worker_slots()), Schedule::unit_bytes(plan),
            Schedule::most_state_bytes(plan)};
}

bool run_attention(Context::Impl& context, Workspace& workspace, const AttentionProblem& problem) {
    const Plan plan(context, problem);
    if (!computes(plan)) return true;
    const std::size_t worker_bytes = Scratch::bytes(plan);
    std::byte* workers = workspace.workers.ensure(saturating_product(worker_bytes, context.executor->worker_slots()));
    const auto scratch_of = [&](std::size_t worker) noexcept {
        Carver carver(workers + worker * worker_bytes);
        return Scratch(plan, carver);
    };
    Scratch first = scratch_of(0);
    Schedule schedule(plan, workspace.units.ensure(Schedule::unit_bytes(plan)), first);
    schedule.use_states(workspace.states.ensure(schedule.state_bytes()));
    for (std::int64_t wave = 0;; ++wave) {
        const std::int64_t tasks = schedule.begin_wave(wave);
        if (tasks == 0) return true;
        parallel_for(*context.executor, size(tasks), [&](std::size_t task, std::size_t worker) noexcept {
            if (problem.interrupt.requested()) return;
            Scratch scratch = scratch_of(worker);
            schedule.run(static_cast<std::int64_t>(task), wave, scratch);
        });
        if (problem.interrupt.requested()) return false;
    }
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
                     const RowBlock block(plan, scratch, {item, static_cast<std::int64_t>(task) % row_blocks});
                     if (!block.exists()) return;
                     block.load_query();
                     const std::int64_t sequence = item / problem.kv_heads;
                     const std::int64_t kv_len = problem.sequences[size(sequence)].kv_len;
                     for (std::int64_t span = 0; span * kSpan < kv_len; ++span) {
                         if (problem.interrupt.requested()) return;
                         block.write_scores(span, scores[size(sequence)], weights);
                     }
                 });
    return !problem.interrupt.requested();
}

}  // namespace headlong
