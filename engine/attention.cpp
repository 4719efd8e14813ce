// The API of attention: checks everything once, lists the sequences, and runs them.
#include <headlong/attention.hpp>

#include <cmath>
#include <memory>
#include <numbers>
#include <type_traits>

#include "engine/attention_run.hpp"
#include "engine/float_environment.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/validate.hpp"

namespace headlong {
namespace {

// Bounds under which no size of a plan can leave 64 bits: lengths are added, dims and heads are multiplied.
constexpr std::int64_t kMaxLength = std::int64_t{1} << 48;
constexpr std::int64_t kMaxBatch = std::int64_t{1} << 32;
constexpr std::int64_t kMaxHeads = std::int64_t{1} << 20;
constexpr std::int64_t kMaxDim = std::int64_t{1} << 20;

void refuse_unbuilt(const AttentionOptions& options) {
    const auto refuse = [](bool asked, const char* name) {
        if (asked) throw Unsupported(fmt::format("AttentionOptions: {} is not built yet", name));
    };
    refuse(options.window_left != -1, "window_left");
    refuse(options.window_right != -1, "window_right");
    refuse(options.softcap != 0.0F, "softcap");
    refuse(!options.alibi_slopes.empty(), "alibi_slopes");
    refuse(options.mask.has_value(), "mask");
    refuse(!options.sink_logits.empty(), "sink_logits");
    refuse(!options.kv_lengths.empty(), "kv_lengths");
}

/// scale * log2(e): what a query is multiplied by, so that scores are in units of log2. Computed in the tasks'
/// floating-point mode: the caller's rounding must not reach it.
float factor_of(const AttentionOptions& options, std::int64_t head_dim) {
    const FloatEnvironment environment;
    const float scale =
        options.scale ? *options.scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
    const float factor = scale * std::numbers::log2e_v<float>;
    if (!std::isfinite(factor)) {
        throw InvalidArgument(
            fmt::format("AttentionOptions: scale is {}; it must be finite, and so must scale * log2(e)", scale));
    }
    return factor;
}

std::int64_t offset_of(const AttentionOptions& options, std::int64_t q_len, std::int64_t kv_len) {
    switch (options.alignment) {
        case Alignment::bottom_right:
            return kv_len - q_len;
        case Alignment::top_left:
            return 0;
        case Alignment::offset:
            return options.causal_offset;
    }
    throw InvalidArgument(fmt::format("AttentionOptions: alignment is {}; allowed: bottom_right, top_left, offset",
                                      static_cast<int>(options.alignment)));
}

void check_at_most(const char* name, std::int64_t value, std::int64_t most) {
    if (value > most) throw InvalidArgument(fmt::format("{} is {}; at most {} are allowed", name, value, most));
}

void check_heads(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, std::int64_t value_dim) {
    if (head_dim < 1) throw InvalidArgument("query: extent of head_dim is 0; it must be at least 1");
    check_at_most("query: head_dim", head_dim, kMaxDim);
    check_at_most("value: value_dim", value_dim, kMaxDim);
    check_at_most("query: heads", heads, kMaxHeads);
    check_at_most("key: heads", kv_heads, kMaxHeads);
    if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
        throw InvalidArgument(
            fmt::format("query: {} heads; they must be a multiple of the {} KV heads", heads, kv_heads));
    }
}

void run(Context& context, Workspace& workspace, AttentionProblem& problem, const AttentionOptions& options) {
    problem.factor = factor_of(options, problem.head_dim);
    problem.stop = options.stop;
    if (options.stop.stop_requested() || !run_attention(context.impl(), workspace, problem)) {
        throw Cancelled("attend: the stop token asked to end the call");
    }
}

/// Room for the call's sequences in the workspace, so that a call that was made before allocates nothing.
std::span<Sequence> sequences_in(Workspace& workspace, std::size_t count) {
    auto* memory = reinterpret_cast<Sequence*>(workspace.lists.ensure(count * sizeof(Sequence)));
    std::uninitialized_value_construct_n(memory, count);
    return {memory, count};
}
static_assert(std::is_trivially_destructible_v<Sequence>);

}  // namespace

void attend(Context& context, const InputTensor<4>& query, const InputTensor<4>& key, const InputTensor<4>& value,
            const AttentionOptions& options, const OutputTensor<4>& output, const OutputTensor<3>& lse) {
    refuse_unbuilt(options);
    check_input("query", query);
    check_input("key", key);
    check_input("value", value);
    check_output("output", output);
    const std::int64_t batch = query.extents[0];
    const std::int64_t heads = query.extents[1];
    const std::int64_t q_len = query.extents[2];
    const std::int64_t head_dim = query.extents[3];
    const std::int64_t kv_heads = key.extents[1];
    const std::int64_t kv_len = key.extents[2];
    const std::int64_t value_dim = value.extents[3];
    check_extent("key", 0, key.extents[0], batch, "query's batch");
    check_extent("key", 3, key.extents[3], head_dim, "query's head_dim");
    check_extent("value", 0, value.extents[0], batch, "query's batch");
    check_extent("value", 1, value.extents[1], kv_heads, "key's heads");
    check_extent("value", 2, value.extents[2], kv_len, "key's length");
    check_heads(heads, kv_heads, head_dim, value_dim);
    check_extent("output", 0, output.extents[0], batch, "query's batch");
    check_extent("output", 1, output.extents[1], heads, "query's heads");
    check_extent("output", 2, output.extents[2], q_len, "query's length");
    check_extent("output", 3, output.extents[3], value_dim, "value's value_dim");
    check_at_most("query: batch", batch, kMaxBatch);
    check_at_most("query: length", q_len, kMaxLength);
    check_at_most("key: length", kv_len, kMaxLength);
    if (lse.data != nullptr) {
        check_output("lse", lse);
        for (std::size_t i = 0; i < 3; ++i) check_extent("lse", i, lse.extents[i], query.extents[i], "as in query");
    }
    const std::int64_t offset = offset_of(options, q_len, kv_len);
    static_cast<void>(factor_of(options, head_dim));
    if (batch == 0 || heads == 0 || q_len == 0) return;  // nothing to write

    with_memory_errors("attend", [&] {
        auto workspace = context.impl().workspaces.lend();
        const std::span<Sequence> sequences = sequences_in(*workspace, static_cast<std::size_t>(batch));
        for (std::int64_t b = 0; b < batch; ++b) {
            Sequence& s = sequences[static_cast<std::size_t>(b)];
            const auto rows = [b](const auto& view, auto* data) {
                return HeadRows<decltype(data)>{data + b * view.strides[0], view.strides[1], view.strides[2],
                                                view.strides[3]};
            };
            s.query = rows(query, floats(query.data));
            s.output = rows(output, floats(output.data));
            s.key = rows(key, floats(key.data));
            s.value = rows(value, floats(value.data));
            if (lse.data != nullptr) s.lse = {floats(lse.data) + b * lse.strides[0], lse.strides[1], lse.strides[2], 1};
            s.q_len = q_len;
            s.kv_len = kv_len;
            s.causal = options.causal.value_or(false);
            s.offset = offset;
        }
        AttentionProblem problem{.heads = heads,
                                 .kv_heads = kv_heads,
                                 .head_dim = head_dim,
                                 .value_dim = value_dim,
                                 .factor = 1.0F,
                                 .sequences = sequences,
                                 .stop = {}};
        run(context, *workspace, problem, options);
    });
}

void attend(Context& context, std::span<const CachedQuery> queries, const AttentionOptions& options) {
    refuse_unbuilt(options);
    if (queries.empty()) return;
    const auto check_cache = [](const CachedQuery& q) {
        if (q.cache == nullptr) throw InvalidArgument("CachedQuery: cache is null");
    };
    check_cache(queries.front());
    const KvShape& shape = queries.front().cache->shape();
    const std::int64_t heads = queries.front().query.extents[0];
    for (const CachedQuery& q : queries) {
        check_cache(q);
        check_input("query", q.query);
        check_output("output", q.output);
        check_extent("query", 0, q.query.extents[0], heads, "the heads of the call's first query");
        check_extent("query", 2, q.query.extents[2], q.cache->shape().head_dim, "the cache's head_dim");
        if (!(q.cache->shape() == shape)) {
            throw InvalidArgument("CachedQuery: the caches of one call must have the same KvShape");
        }
        check_heads(heads, shape.kv_heads, shape.head_dim, shape.value_dim);
        check_extent("output", 0, q.output.extents[0], heads, "query's heads");
        check_extent("output", 1, q.output.extents[1], q.query.extents[1], "query's length");
        check_extent("output", 2, q.output.extents[2], shape.value_dim, "the cache's value_dim");
        check_at_most("query: length", q.query.extents[1], kMaxLength);
        if (q.lse.data != nullptr) {
            check_output("lse", q.lse);
            for (std::size_t i = 0; i < 2; ++i)
                check_extent("lse", i, q.lse.extents[i], q.query.extents[i], "as in query");
        }
        static_cast<void>(q.cache->length(q.layer));
    }

    with_memory_errors("attend", [&] {
        auto workspace = context.impl().workspaces.lend();
        const std::span<Sequence> sequences = sequences_in(*workspace, queries.size());
        for (std::size_t i = 0; i < queries.size(); ++i) {
            const CachedQuery& q = queries[i];
            const KvCache::Impl::Layer& layer = q.cache->impl().layer(q.layer);
            Sequence& s = sequences[i];
            s.query = {floats(q.query.data), q.query.strides[0], q.query.strides[1], q.query.strides[2]};
            s.output = {floats(q.output.data), q.output.strides[0], q.output.strides[1], q.output.strides[2]};
            if (q.lse.data != nullptr) s.lse = {floats(q.lse.data), q.lse.strides[0], q.lse.strides[1], 1};
            s.q_len = q.query.extents[1];
            s.kv_len = layer.length;
            s.causal = options.causal.value_or(true);
            s.offset = offset_of(options, s.q_len, s.kv_len);
            s.blocks = layer.blocks.data();
        }
        AttentionProblem problem{.heads = heads,
                                 .kv_heads = shape.kv_heads,
                                 .head_dim = shape.head_dim,
                                 .value_dim = shape.value_dim,
                                 .factor = 1.0F,
                                 .sequences = sequences,
                                 .stop = {}};
        run(context, *workspace, problem, options);
    });
}

}  // namespace headlong
