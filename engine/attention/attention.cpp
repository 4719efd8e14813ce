// The API of attention: checks everything once, lists the sequences, and runs them.
#include <headlong/attention.hpp>

#include <algorithm>
#include <cmath>

#include "engine/attention/call.hpp"
#include "engine/float_environment.hpp"
#include "engine/kv_cache_impl.hpp"

namespace headlong {
namespace {

void check_lse(const OutputTensor<3>& lse, const Extents<4>& query) {
    if (lse.data == nullptr) return;
    check_f32_output("lse", lse);
    check_same_extents<3>("lse", lse.extents, {query[0], query[1], query[2]}, "as in query");
}

/// Rows [first, first + count) of a packed tensor.
template <class Tensor>
Tensor rows_of(Tensor packed, std::size_t dimension, std::int64_t first, std::int64_t count) noexcept {
    using Byte =
        std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(packed.data)>>, const std::byte, std::byte>;
    if (packed.data != nullptr && count > 0 && !is_empty(packed.extents)) {
        packed.data = static_cast<Byte*>(packed.data) +
                      first * packed.strides[dimension] * static_cast<std::int64_t>(size_of(packed.dtype));
    }
    packed.extents[dimension] = count;
    return packed;
}

void check_offsets(const char* name, std::span<const std::int64_t> offsets, std::int64_t rows, const char* tensor) {
    if (offsets.empty() || offsets.front() != 0) {
        throw InvalidArgument(fmt::format("{}: must begin with 0; it {}", name,
                                          offsets.empty() ? "is empty" : fmt::format("begins with {}", offsets[0])));
    }
    for (std::size_t i = 1; i < offsets.size(); ++i) {
        if (offsets[i] >= offsets[i - 1] && offsets[i] <= rows) continue;
        throw InvalidArgument(fmt::format("{}[{}] is {}; allowed: {} (the one before) to {} (the rows of {})", name, i,
                                          offsets[i], offsets[i - 1], rows, tensor));
    }
}

}  // namespace

AttentionMask AttentionMask::dense(const void* data, Type type, std::span<const std::int64_t> extents) noexcept {
    AttentionMask mask;
    mask.data = data;
    mask.type = type;
    mask.rank = extents.size();
    std::uint64_t stride = 1;  // a hostile extent wraps here and is refused when the mask is checked
    for (std::size_t i = std::min<std::size_t>(extents.size(), 4); i-- > 0;) {
        mask.extents[i] = extents[i];
        mask.strides[i] = static_cast<std::int64_t>(stride);
        stride *= static_cast<std::uint64_t>(extents[i]);
    }
    return mask;
}

std::int64_t window_left_of(std::int64_t sliding_window) {
    if (sliding_window >= 1) return sliding_window - 1;
    throw InvalidArgument(
        fmt::format("sliding_window is {}; it counts the query's own position and must be at least 1", sliding_window));
}

std::vector<float> alibi_slopes_for(std::int64_t heads) {
    constexpr std::int64_t kMost = std::int64_t{1} << 20;
    if (heads < 1 || heads > kMost) {
        throw InvalidArgument(fmt::format("alibi_slopes_for: heads is {}; allowed: 1 to {}", heads, kMost));
    }
    std::int64_t n = 1;
    while (2 * n <= heads) n *= 2;
    const FloatEnvironment environment;  // the caller's rounding must not reach them
    std::vector<float> slopes;
    with_memory_errors("alibi_slopes_for", [&] { slopes.reserve(static_cast<std::size_t>(heads)); });
    for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t numerator = h < n ? 8 * (h + 1) : 4 * (2 * (h - n) + 1);
        slopes.push_back(static_cast<float>(std::exp2(-static_cast<double>(numerator) / static_cast<double>(n))));
    }
    return slopes;
}

void attend(Context& context, const InputTensor<4>& query, const InputTensor<4>& key, const InputTensor<4>& value,
            const AttentionOptions& options, const OutputTensor<4>& output, const OutputTensor<3>& lse) {
    check_input("value", value);
    check_output("output", output);
    const PlainCall call = check_plain(query, key, value.extents[3], options);
    const std::int64_t batch = call.batch;
    const CallShape& shape = call.shape;
    const Lengths& lengths = call.lengths;
    check_extent("value", 0, value.extents[0], batch, "query's batch");
    check_extent("value", 1, value.extents[1], shape.kv_heads, "key's heads");
    check_extent("value", 2, value.extents[2], lengths.kv_len, "key's length");
    check_same_extents<4>("output", output.extents, {batch, shape.heads, lengths.q_len, shape.value_dim},
                          "as in query and value");
    check_lse(lse, query.extents);
    const bool wants_lse = lse.data != nullptr && !is_empty<3>(lse.extents);
    if (is_empty<4>(output.extents) && !wants_lse) return;  // nothing to write

    with_memory_errors("attend", [&] {
        auto workspace = context.impl().workspaces.lend();
        const auto count = static_cast<std::size_t>(batch);
        const CallLists lists = lists_in(*workspace, count, count);
        for (std::size_t i = 0; i < count; ++i) {
            const auto b = static_cast<std::int64_t>(i);
            Sequence& sequence = lists.sequences[i];
            lists.pages[i] = page_of(sequence_of(key, b), sequence_of(value, b), 0);
            sequence.pages = lists.pages.subspan(i, 1);
            set_rows(sequence_of(query, b), sequence_of(output, b), sequence_of(lse, b), sequence);
            apply_options(options, i, lengths, {}, sequence);
        }
        AttentionProblem problem = problem_of(options, shape, false);
        problem.sequences = lists.sequences;
        run_or_cancel(context, *workspace, problem, "attend");
    });
}

void attend_packed(Context& context, const InputTensor<3>& query, const InputTensor<3>& key,
                   const InputTensor<3>& value, std::span<const std::int64_t> query_offsets,
                   std::span<const std::int64_t> key_offsets, const AttentionOptions& options,
                   const OutputTensor<3>& output, const OutputTensor<2>& lse) {
    check_input("key", key);
    check_input("value", value);
    const CallShape shape{query.extents[0], key.extents[0], query.extents[2], value.extents[2]};
    check_extent("key", 2, key.extents[2], shape.head_dim, "query's head_dim");
    check_extent("value", 0, value.extents[0], shape.kv_heads, "key's heads");
    check_extent("value", 1, value.extents[1], key.extents[1], "key's rows");
    check_rows(query, output, lse, shape);
    check_shape(shape);
    check_lengths({query.extents[1], key.extents[1]});
    check_offsets("query_offsets", query_offsets, query.extents[1], "query");
    check_offsets("key_offsets", key_offsets, key.extents[1], "key");
    if (query_offsets.size() != key_offsets.size()) {
        throw InvalidArgument(fmt::format("key_offsets has {} elements; it must have {}, as query_offsets",
                                          key_offsets.size(), query_offsets.size()));
    }
    const std::size_t count = query_offsets.size() - 1;
    const auto lengths_of = [&](std::size_t i) {
        return Lengths{query_offsets[i + 1] - query_offsets[i], key_offsets[i + 1] - key_offsets[i]};
    };
    LongestLengths lengths_of_call;
    for (std::size_t i = 0; i < count; ++i) lengths_of_call.add(lengths_of(i));
    check_options(options, shape, count, lengths_of_call.longest());
    for (std::size_t i = 0; i < count; ++i) check_kv_length(options, i, lengths_of(i).kv_len);
    const bool wants_lse = lse.data != nullptr && !is_empty<2>(lse.extents);
    if (lengths_of_call.rows() == 0 || (is_empty<3>(output.extents) && !wants_lse)) return;

    with_memory_errors("attend_packed", [&] {
        auto workspace = context.impl().workspaces.lend();
        const CallLists lists = lists_in(*workspace, count, count);
        for (std::size_t i = 0; i < count; ++i) {
            const Lengths lengths = lengths_of(i);
            Sequence& sequence = lists.sequences[i];
            lists.pages[i] = page_of(rows_of(key, 1, key_offsets[i], lengths.kv_len),
                                     rows_of(value, 1, key_offsets[i], lengths.kv_len), 0);
            sequence.pages = lists.pages.subspan(i, 1);
            set_rows(rows_of(query, 1, query_offsets[i], lengths.q_len),
                     rows_of(output, 1, query_offsets[i], lengths.q_len),
                     rows_of(lse, 1, query_offsets[i], lengths.q_len), sequence);
            apply_options(options, i, lengths, {}, sequence);
        }
        AttentionProblem problem = problem_of(options, shape, false);
        problem.sequences = lists.sequences;
        run_or_cancel(context, *workspace, problem, "attend_packed");
    });
}

void attend(Context& context, std::span<const CachedQuery> queries, const AttentionOptions& options) {
    if (queries.empty()) {
        check_kv_lengths(options, 0);
        return;
    }
    const CallShape shape = check_cached_queries(queries, options);
    if (writes_nothing(queries)) return;
    with_memory_errors("attend", [&] {
        auto workspace = context.impl().workspaces.lend();
        const CallLists lists = lists_in(*workspace, queries.size(), 0);
        for (std::size_t i = 0; i < queries.size(); ++i) {
            const CachedQuery& q = queries[i];
            set_cached(q, options, i, lists.sequences[i]);
            set_rows(q.query, q.output, q.lse, lists.sequences[i]);
        }
        AttentionProblem problem = problem_of(options, shape, true);
        problem.sequences = lists.sequences;
        for (std::size_t i = 0; i < queries.size(); ++i) {
            check_held(problem, lists.sequences[i], queries[i].cache->impl().layer(queries[i].layer).held_from);
        }
        const std::optional<Rotary>& rotary = queries.front().cache->rotary(queries.front().layer);
        tabulate_queries(context.impl(), rotary, lists.sequences,
                         workspace->rows.ensure_floats(rotary_floats(rotary, lists.sequences)), problem);
        gather_families(context.impl(), problem, lists.sequences);
        run_or_cancel(context, *workspace, problem, "attend");
    });
}

void attend(Context& context, std::span<const PagedQuery> queries, const AttentionOptions& options) {
    if (queries.empty()) {
        check_kv_lengths(options, 0);
        return;
    }
    const auto first_page = [](const PagedQuery& q) -> const KvPage& {
        if (q.pages.empty()) throw InvalidArgument("PagedQuery: pages is empty; give at least one, it may hold 0 keys");
        return q.pages.front();
    };
    const KvPage& model = first_page(queries.front());
    const CallShape shape{queries.front().query.extents[0], model.key.extents[0], model.key.extents[2],
                          model.value.extents[2]};
    const auto lengths_of = [](const PagedQuery& q) noexcept {
        Lengths lengths{q.query.extents[1], 0};
        for (const KvPage& page : q.pages) lengths.kv_len += page.key.extents[1];
        return lengths;
    };
    std::size_t pages = 0;
    LongestLengths lengths_of_call;
    for (std::size_t i = 0; i < queries.size(); ++i) {
        const PagedQuery& q = queries[i];
        first_page(q);
        std::int64_t kv_len = 0;
        for (const KvPage& page : q.pages) {
            check_input("key", page.key);
            check_input("value", page.value);
            check_same_extents<3>("key", page.key.extents, {shape.kv_heads, page.key.extents[1], shape.head_dim},
                                  "as in the call's first page");
            check_same_extents<3>("value", page.value.extents, {shape.kv_heads, page.key.extents[1], shape.value_dim},
                                  "key's length, else as in the call's first page");
            check_lengths({0, page.key.extents[1]});
            kv_len += page.key.extents[1];
            check_lengths({0, kv_len});
        }
        pages += q.pages.size();
        check_rows(q.query, q.output, q.lse, shape);
        lengths_of_call.add(lengths_of(q));
        check_own_mask(options, q.mask, shape, lengths_of(q));
    }
    check_shape(shape);
    check_options(options, shape, queries.size(), lengths_of_call.longest());
    for (std::size_t i = 0; i < queries.size(); ++i) check_kv_length(options, i, lengths_of(queries[i]).kv_len);
    if (writes_nothing(queries)) return;

    with_memory_errors("attend", [&] {
        auto workspace = context.impl().workspaces.lend();
        const CallLists lists = lists_in(*workspace, queries.size(), pages);
        std::size_t next = 0;
        for (std::size_t i = 0; i < queries.size(); ++i) {
            const PagedQuery& q = queries[i];
            Sequence& sequence = lists.sequences[i];
            const std::size_t first = next;
            std::int64_t position = 0;
            for (const KvPage& page : q.pages) {
                lists.pages[next++] = page_of(page.key, page.value, position);
                position += page.key.extents[1];
            }
            sequence.pages = lists.pages.subspan(first, next - first);
            set_rows(q.query, q.output, q.lse, sequence);
            apply_options(options, i, lengths_of(q), q.mask, sequence);
        }
        AttentionProblem problem = problem_of(options, shape, true);
        problem.sequences = lists.sequences;
        run_or_cancel(context, *workspace, problem, "attend");
    });
}

}  // namespace headlong
