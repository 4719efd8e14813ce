// Attention over all keys from the results over parts of them: merge(), and shared prefixes on top of it.
#include <algorithm>
#include <cmath>
#include <headlong/attention.hpp>
#include <limits>

#include "engine/attention/call.hpp"
#include "engine/carver.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/parallel.hpp"

namespace headlong {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Rows of one part: [heads, rows, value_dim], and lse as rows of one column.
struct PartRows {
    InputRows output;
    InputRows lse;
};

float lse_of(const PartRows& part, std::int64_t head, std::int64_t row) noexcept {
    return *reinterpret_cast<const float*>(part.lse.at(head, row));
}

/// A worker's memory for one row.
struct MergeScratch {
    double* sum;
    float* row;
    MergeScratch(Carver& carver, std::size_t columns) noexcept
        : sum(carver.take<double>(columns)), row(carver.take<float>(columns)) {}
    static std::size_t bytes(std::size_t columns) noexcept {
        Carver counter(nullptr);
        const MergeScratch counted(counter, columns);
        static_cast<void>(counted);
        return counter.used();
    }
};

/// Merges one row of `count` parts, part_at(i) being the i-th.
template <class PartAt>
void merge_row(const kernels::KernelTable& kernels, std::size_t count, const PartAt& part_at, std::int64_t head,
               std::int64_t row, std::size_t columns, const MergeScratch& scratch, const OutputRows& output,
               const OutputRows& lse) noexcept {
    double max = -kInfinity;
    bool nan = false;
    for (std::size_t i = 0; i < count; ++i) {
        const auto l = static_cast<double>(lse_of(part_at(i), head, row));
        nan = nan || std::isnan(l);
        max = std::max(max, l);
    }
    double total = 0.0;
    if (max > -kInfinity) {
        for (std::size_t i = 0; i < count; ++i) {
            total += std::exp(static_cast<double>(lse_of(part_at(i), head, row)) - max);
        }
    }
    nan = nan || std::isnan(total);  // an infinite lse
    std::fill_n(scratch.sum, columns, nan ? std::numeric_limits<double>::quiet_NaN() : 0.0);
    for (std::size_t i = 0; i < count && !nan; ++i) {
        const PartRows part = part_at(i);
        const auto l = static_cast<double>(lse_of(part, head, row));
        if (l == -kInfinity) continue;  // an empty part has no output
        const double weight = std::exp(l - max) / total;
        kernels.scale_rows({part.output.rows(head, row, 1, columns), 1.0F, scratch.row, columns});
        for (std::size_t c = 0; c < columns; ++c) scratch.sum[c] += weight * static_cast<double>(scratch.row[c]);
    }
    for (std::size_t c = 0; c < columns; ++c) {
        const auto x = static_cast<float>(scratch.sum[c]);
        scratch.row[c] = std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x + 0.0F;
    }
    double merged = max;
    if (nan) merged = std::numeric_limits<double>::quiet_NaN();
    if (!nan && max > -kInfinity) merged = max + std::log(total);
    if (columns > 0) store_rows(kernels, scratch.row, columns, 1, columns, output, head, row);
    if (lse.base != nullptr) {
        *reinterpret_cast<float*>(lse.at(head, row)) = static_cast<float>(merged);
    }
}

/// [heads, rows] of a view of lse.
template <class Rows, class View>
Rows lse_rows(const View& view) noexcept {
    using Byte = std::remove_pointer_t<decltype(Rows::base)>;
    return {static_cast<Byte*>(view.data), kernels::ElementType::f32, view.strides[0], view.strides[1], 0};
}

// Rows of one task: enough that a task is worth handing out.
constexpr std::int64_t kTaskRows = 64;

}  // namespace

void merge(Context& context, std::span<const AttentionPart> parts, const OutputTensor<4>& output,
           const OutputTensor<3>& lse) {
    check_output("output", output);
    // no structured binding: clang warns of lambdas that capture one
    const std::int64_t batch = output.extents[0];
    const std::int64_t heads = output.extents[1];
    const std::int64_t rows = output.extents[2];
    const std::int64_t value_dim = output.extents[3];
    for (const AttentionPart& part : parts) {
        check_input("part: output", part.output);
        check_f32_input("part: lse", part.lse);
        check_same_extents<4>("part: output", part.output.extents, output.extents, "as in output");
        check_same_extents<3>("part: lse", part.lse.extents, {batch, heads, rows}, "as in output");
    }
    if (lse.data != nullptr) {
        check_f32_output("lse", lse);
        check_same_extents<3>("lse", lse.extents, {batch, heads, rows}, "as in output");
    }
    if (is_empty<4>(output.extents) && (lse.data == nullptr || is_empty<3>(lse.extents))) return;  // nothing to write

    with_memory_errors("merge", [&] {
        Context::Impl& impl = context.impl();
        auto workspace = impl.workspaces.lend();
        const auto columns = static_cast<std::size_t>(value_dim);
        const std::size_t bytes = MergeScratch::bytes(columns);
        std::byte* memory = workspace->workers.ensure(saturating_product(bytes, impl.executor->worker_slots()));
        const std::int64_t chunks = (rows + kTaskRows - 1) / kTaskRows;
        parallel_for(*impl.executor, static_cast<std::size_t>(batch * heads * chunks),
                     [&](std::size_t task, std::size_t worker) noexcept {
                         Carver carver(memory + worker * bytes);
                         const MergeScratch scratch(carver, columns);
                         const std::int64_t chunk = static_cast<std::int64_t>(task) % chunks;
                         const std::int64_t head = static_cast<std::int64_t>(task) / chunks % heads;
                         const std::int64_t b = static_cast<std::int64_t>(task) / chunks / heads;
                         const auto part_at = [&](std::size_t i) noexcept {
                             return PartRows{input_rows(sequence_of(parts[i].output, b)),
                                             lse_rows<InputRows>(sequence_of(parts[i].lse, b))};
                         };
                         const OutputRows out = output_rows(sequence_of(output, b));
                         OutputRows out_lse;
                         if (lse.data != nullptr) out_lse = lse_rows<OutputRows>(sequence_of(lse, b));
                         for (std::int64_t row = chunk * kTaskRows; row < std::min(rows, (chunk + 1) * kTaskRows);
                              ++row) {
                             merge_row(impl.kernels, parts.size(), part_at, head, row, columns, scratch, out, out_lse);
                         }
                     });
    });
}

namespace {

/// What a shared-prefix call keeps between its two runs: the rows of all queries, stacked, in [heads, rows, ...].
struct Stacked {
    float* query;
    float* prefix_output;
    float* prefix_lse;
    float* suffix_output;
    float* suffix_lse;
    std::int64_t* positions;

    Stacked(Carver& carver, const CallShape& shape, std::int64_t rows) noexcept {
        const std::size_t count =
            saturating_product(static_cast<std::size_t>(shape.heads), static_cast<std::size_t>(rows));
        query = carver.take<float>(saturating_product(count, static_cast<std::size_t>(shape.head_dim)));
        prefix_output = carver.take<float>(saturating_product(count, static_cast<std::size_t>(shape.value_dim)));
        suffix_output = carver.take<float>(saturating_product(count, static_cast<std::size_t>(shape.value_dim)));
        prefix_lse = carver.take<float>(count);
        suffix_lse = carver.take<float>(count);
        positions = carver.take<std::int64_t>(static_cast<std::size_t>(rows));
    }
};

/// Dense [heads, rows, columns] from row `first` on.
template <class Rows, class T>
Rows stacked_rows(T* data, std::int64_t rows, std::int64_t columns, std::int64_t first) noexcept {
    using Byte = std::remove_pointer_t<decltype(Rows::base)>;
    return {reinterpret_cast<Byte*>(data + first * columns), kernels::ElementType::f32, rows * columns, columns, 1};
}

void check_shared_prefix(const KvCache& prefix, std::span<const CachedQuery> queries, const AttentionOptions& options) {
    const CachedQuery& first = queries.front();
    if (!(prefix.shape() == first.cache->shape())) {
        throw InvalidArgument("prefix: its KvShape must be that of the queries' caches");
    }
    if (prefix.rotary(first.layer) || first.cache->rotary(first.layer)) {
        throw InvalidArgument(
            "prefix: caches with a rotary description count positions from 0 each; rotate the rows before appending");
    }
    if (options.alignment != Alignment::bottom_right) {
        throw InvalidArgument(
            fmt::format("AttentionOptions: alignment is {}; over a shared prefix it must be "
                        "bottom_right, {}",
                        static_cast<int>(options.alignment), static_cast<int>(Alignment::bottom_right)));
    }
    check_plain_layer("prefix", prefix, first.layer);
    for (const CachedQuery& q : queries) check_plain_layer("CachedQuery: cache", *q.cache, q.layer);
    const auto check_keys = [](const std::optional<AttentionMask>& mask) {
        if (mask && mask->keys != AttentionMask::Keys::last_q) {
            throw InvalidArgument("mask: keys is all; over a shared prefix it must be last_q");
        }
    };
    check_keys(options.mask);
    for (std::size_t i = 0; i < queries.size(); ++i) {
        const CachedQuery& q = queries[i];
        check_keys(q.mask);
        const std::int64_t live = options.kv_lengths.empty() ? q.cache->length(q.layer) : options.kv_lengths[i];
        if ((q.mask || options.mask) && q.query.extents[1] > live) {
            throw InvalidArgument(
                fmt::format("mask: it covers the last {} keys (q_len), and the suffix has {}; a mask "
                            "must not reach into the prefix",
                            q.query.extents[1], live));
        }
        if (q.layer == first.layer) continue;
        throw InvalidArgument(
            fmt::format("CachedQuery: layer is {}; over a shared prefix all queries must have the "
                        "same, {}",
                        q.layer, first.layer));
    }
}

}  // namespace

void attend_shared_prefix(Context& context, const KvCache& prefix, std::span<const CachedQuery> queries,
                          const AttentionOptions& options) {
    if (queries.empty()) {
        check_kv_lengths(options, 0);
        return;
    }
    const CallShape shape = check_cached_queries(queries, options);
    check_shared_prefix(prefix, queries, options);
    std::int64_t rows = 0;
    for (const CachedQuery& q : queries) rows += q.query.extents[1];
    if (writes_nothing(queries)) return;

    with_memory_errors("attend_shared_prefix", [&] {
        Context::Impl& impl = context.impl();
        auto workspace = impl.workspaces.lend();
        Carver counter(nullptr);
        const Stacked counted(counter, shape, rows);
        static_cast<void>(counted);
        Carver carver(workspace->rows.ensure(counter.used()));
        const Stacked stacked(carver, shape, rows);
        const CallLists lists = lists_in(*workspace, queries.size(), 0);

        // the suffixes: each query over its own cache; sinks join this part
        std::int64_t first = 0;
        for (std::size_t i = 0; i < queries.size(); ++i) {
            Sequence& sequence = lists.sequences[i];
            set_cached(queries[i], options, i, sequence);
            sequence.output = stacked_rows<OutputRows>(stacked.suffix_output, rows, shape.value_dim, first);
            sequence.lse = stacked_rows<OutputRows>(stacked.suffix_lse, rows, 1, first);
            first += sequence.q_len;
        }
        AttentionProblem problem = problem_of(options, shape, true);
        problem.sequences = lists.sequences;
        run_or_cancel(context, *workspace, problem, "attend_shared_prefix");

        // the prefix: the rows of all queries as one sequence, each at its own position
        const KvCache::Impl::Layer& layer = prefix.impl().layer(queries.front().layer);
        first = 0;
        for (const Sequence& sequence : lists.sequences) {
            const FloatEnvironment environment;
            for (std::int64_t h = 0; h < shape.heads; ++h) {
                impl.kernels.scale_rows(
                    {sequence.query.rows(h, 0, sequence.q_len, static_cast<std::size_t>(shape.head_dim)), 1.0F,
                     stacked.query + (h * rows + first) * shape.head_dim, static_cast<std::size_t>(shape.head_dim)});
            }
            for (std::int64_t i = 0; i < sequence.q_len; ++i) {
                stacked.positions[first + i] = layer.length + sequence.offset + i;
            }
            first += sequence.q_len;
        }
        Sequence whole;
        whole.query = stacked_rows<InputRows>(static_cast<const float*>(stacked.query), rows, shape.head_dim, 0);
        whole.q_len = rows;
        whole.positions = stacked.positions;
        whole.kv_len = layer.length;
        whole.kv_end = layer.length;
        set_blocks(prefix, queries.front().layer, whole);
        whole.output = stacked_rows<OutputRows>(stacked.prefix_output, rows, shape.value_dim, 0);
        whole.lse = stacked_rows<OutputRows>(stacked.prefix_lse, rows, 1, 0);
        problem.sequences = {&whole, 1};
        problem.sink_logits = nullptr;
        run_or_cancel(context, *workspace, problem, "attend_shared_prefix");

        const auto columns = static_cast<std::size_t>(shape.value_dim);
        const std::size_t bytes = MergeScratch::bytes(columns);
        std::byte* memory = workspace->workers.ensure(saturating_product(bytes, impl.executor->worker_slots()));
        first = 0;
        for (std::size_t i = 0; i < queries.size(); ++i) {
            const std::int64_t start = first;
            const std::int64_t q_len = lists.sequences[i].q_len;
            const auto part_at = [&](std::size_t part) noexcept {
                const float* output = part == 0 ? stacked.prefix_output : stacked.suffix_output;
                const float* lse = part == 0 ? stacked.prefix_lse : stacked.suffix_lse;
                return PartRows{stacked_rows<InputRows>(output, rows, shape.value_dim, start),
                                stacked_rows<InputRows>(lse, rows, 1, start)};
            };
            const OutputRows out = output_rows(queries[i].output);
            const OutputRows lse = lse_rows<OutputRows>(queries[i].lse);
            const std::int64_t chunks = (q_len + kTaskRows - 1) / kTaskRows;
            parallel_for(*impl.executor, static_cast<std::size_t>(shape.heads * chunks),
                         [&](std::size_t task, std::size_t worker) noexcept {
                             Carver worker_carver(memory + worker * bytes);
                             const MergeScratch scratch(worker_carver, columns);
                             const std::int64_t head = static_cast<std::int64_t>(task) / chunks;
                             const std::int64_t begin = static_cast<std::int64_t>(task) % chunks * kTaskRows;
                             for (std::int64_t row = begin; row < std::min(q_len, begin + kTaskRows); ++row) {
                                 merge_row(impl.kernels, 2, part_at, head, row, columns, scratch, out, lse);
                             }
                         });
            first += q_len;
        }
    });
}

}  // namespace headlong
