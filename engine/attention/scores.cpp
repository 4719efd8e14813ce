// The score output: the one place where a score matrix exists, in the caller's memory, because the caller asked.
#include <headlong/attention.hpp>

#include "engine/attention/call.hpp"
#include "engine/carver.hpp"
#include "engine/kv_cache_impl.hpp"

namespace headlong {
namespace {

void check_stage(ScoreStage stage) {
    switch (stage) {
        case ScoreStage::scaled:
        case ScoreStage::softcapped:
        case ScoreStage::masked:
        case ScoreStage::weights:
            return;
    }
    throw InvalidArgument(fmt::format("attention_scores: stage is {}; allowed: scaled, softcapped, masked, weights",
                                      static_cast<int>(stage)));
}

/// Before masks all pairs count, of whatever is in the sequence's memory.
void allow_all_pairs(AttentionProblem& problem, std::span<Sequence> sequences, std::int64_t kv_len) noexcept {
    problem.causal = false;
    problem.window_left = -1;
    problem.window_right = -1;
    problem.alibi_slopes = nullptr;
    for (Sequence& sequence : sequences) {
        sequence.kv_len = kv_len;
        sequence.kv_end = kv_len;
        sequence.mask = {};
    }
}

/// Keys that lengths cut off exist, and their scores are written: as not allowed.
void cover_all_keys(std::span<Sequence> sequences, std::int64_t kv_len) noexcept {
    for (Sequence& sequence : sequences) sequence.kv_len = kv_len;
}

struct Tables {
    float* rotary;
    float* states;  ///< maximum and sum of every row, for the weights
};

/// Runs a call whose sequences and score places are set. `kv_len` is the keys' extent.
void run_stage(Context& context, Workspace& workspace, const AttentionOptions& options, CallShape shape, bool causal,
               ScoreStage stage, const CallLists& lists, std::int64_t kv_len, const std::optional<Rotary>& rotary) {
    Context::Impl& impl = context.impl();
    shape.value_dim = 0;  // nobody asks for the values
    std::int64_t rows = 0;
    for (const Sequence& sequence : lists.sequences) rows += sequence.q_len;
    const bool weights = stage == ScoreStage::weights;
    const auto carve = [&](Carver& carver) {
        Tables tables{};
        tables.rotary = carver.take<float>(rotary_floats(rotary, lists.sequences));
        tables.states = carver.take<float>(
            weights ? saturating_product(static_cast<std::size_t>(2 * rows), static_cast<std::size_t>(shape.heads))
                    : 0);
        return tables;
    };
    Carver counter(nullptr);
    static_cast<void>(carve(counter));
    Carver carver(workspace.rows.ensure(counter.used()));
    const Tables tables = carve(carver);

    AttentionProblem problem = weights ? problem_of(options, shape, causal) : scores_problem_of(options, shape, causal);
    problem.sequences = lists.sequences;
    tabulate_queries(impl, rotary, lists.sequences, tables.rotary, problem);
    if (stage == ScoreStage::scaled) problem.softcap = 0.0F;
    if (stage == ScoreStage::scaled || stage == ScoreStage::softcapped) {
        allow_all_pairs(problem, lists.sequences, kv_len);
    }
    if (weights) {
        float* states = tables.states;
        for (Sequence& sequence : lists.sequences) {
            const std::int64_t count = sequence.q_len * shape.heads;
            sequence.maxima = states;
            sequence.sums = states + count;
            states += 2 * count;
        }
        run_or_cancel(context, workspace, problem, "attention_scores");
    }
    cover_all_keys(lists.sequences, kv_len);
    problem.interrupt.check("attention_scores");
    if (!run_scores(impl, workspace, problem, lists.scores, weights)) problem.interrupt.check("attention_scores");
}

}  // namespace

void attention_scores(Context& context, const InputTensor<4>& query, const InputTensor<4>& key,
                      const AttentionOptions& options, ScoreStage stage, const OutputTensor<4>& scores) {
    check_stage(stage);
    check_output("scores", scores);
    const PlainCall call = check_plain(query, key, 0, options);
    const CallShape& shape = call.shape;
    const Lengths& lengths = call.lengths;
    check_same_extents<4>("scores", scores.extents, {call.batch, shape.heads, lengths.q_len, lengths.kv_len},
                          "as in query and key");
    if (is_empty<4>(scores.extents)) return;

    with_memory_errors("attention_scores", [&] {
        auto workspace = context.impl().workspaces.lend();
        const auto count = static_cast<std::size_t>(call.batch);
        const CallLists lists = lists_in(*workspace, count, count);
        for (std::size_t i = 0; i < count; ++i) {
            const auto b = static_cast<std::int64_t>(i);
            Sequence& sequence = lists.sequences[i];
            const InputTensor<3> keys = sequence_of(key, b);
            lists.pages[i] = page_of(keys, keys, 0);  // of values no column is read
            sequence.pages = lists.pages.subspan(i, 1);
            sequence.query = input_rows(sequence_of(query, b));
            lists.scores[i] = output_rows(sequence_of(scores, b));
            apply_options(options, i, lengths, {}, sequence);
        }
        run_stage(context, *workspace, options, shape, false, stage, lists, lengths.kv_len, {});
    });
}

void attention_scores(Context& context, const InputTensor<3>& query, const KvCache& cache, std::size_t layer,
                      const AttentionOptions& options, ScoreStage stage, const OutputTensor<3>& scores) {
    check_stage(stage);
    check_input("query", query);
    check_output("scores", scores);
    const KvShape& kv = cache.shape();
    const CallShape shape{query.extents[0], kv.kv_heads, kv.head_dim, kv.value_dim};
    const Lengths lengths{query.extents[1], cache.length(layer)};
    check_extent("query", 2, query.extents[2], shape.head_dim, "the cache's head_dim");
    check_shape(shape);
    check_lengths(lengths);
    check_same_extents<3>("scores", scores.extents, {shape.heads, lengths.q_len, lengths.kv_len},
                          "as in query and the layer's length");
    check_options(options, shape, 1, lengths);
    check_kv_length(options, 0, lengths.kv_len);
    check_plain_layer("cache", cache, layer);
    if (is_empty<3>(scores.extents)) return;

    with_memory_errors("attention_scores", [&] {
        auto workspace = context.impl().workspaces.lend();
        const CallLists lists = lists_in(*workspace, 1, 0);
        set_cached({.query = query, .cache = &cache, .layer = layer}, options, 0, lists.sequences[0]);
        lists.scores[0] = output_rows(scores);
        run_stage(context, *workspace, options, shape, true, stage, lists, lengths.kv_len, cache.rotary(layer));
    });
}

}  // namespace headlong
