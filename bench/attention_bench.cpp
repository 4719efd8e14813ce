// Attention as callers see it, on every instruction set: each way to call it. FLOP/s counts 4 * heads * head_dim per
// visible (query, key) pair; bytes/s the live keys and values, once per KV head and sequence.
#include <benchmark/benchmark.h>

#include <numeric>
#include <vector>

#include <headlong/headlong.hpp>

#include "bench/data.hpp"
#include "bench/limits.hpp"

namespace headlong::bench {
namespace {

double flops_of(const Shape& s, std::int64_t pairs) {
    return 4.0 * static_cast<double>(s.heads * s.dim) * static_cast<double>(pairs);
}

/// Pairs of `rows` queries that are the last of `depth` tokens.
std::int64_t causal_pairs(std::int64_t rows, std::int64_t depth) { return rows * depth - rows * (rows - 1) / 2; }

/// Queries and outputs of some sequences, [heads, rows, dim] each.
class Queries {
  public:
    Queries(const Shape& s, std::int64_t sequences, std::int64_t rows)
        : extents_{s.heads, rows, s.dim},
          query_(random_floats(sequences * s.heads * rows * s.dim)),
          output_(query_.size()) {}

    InputTensor<3> query(std::int64_t sequence) const {
        return InputTensor<3>::dense(query_.data() + sequence * size(), extents_);
    }
    OutputTensor<3> output(std::int64_t sequence) {
        return OutputTensor<3>::dense(output_.data() + sequence * size(), extents_);
    }

  private:
    std::int64_t size() const { return extents_[0] * extents_[1] * extents_[2]; }
    Extents<3> extents_;
    std::vector<float> query_, output_;
};

/// The last rows of one or more sequences, each over a cache of its own.
class CachedQueries {
  public:
    CachedQueries(Context& context, const Shape& s, std::int64_t sequences, std::int64_t rows, std::int64_t depth,
                  KvType type = KvType::f32)
        : rows_(s, sequences, rows) {
        caches_.reserve(static_cast<std::size_t>(sequences));
        for (std::int64_t i = 0; i < sequences; ++i) {
            caches_.push_back(filled_cache(context, s, depth, type));
            queries_.push_back(
                {.query = rows_.query(i), .cache = &caches_.back(), .layer = 0, .output = rows_.output(i), .lse = {}});
        }
    }
    std::span<const CachedQuery> queries() const { return queries_; }
    double kv_bytes() const {
        double bytes = 0.0;
        for (const KvCache& cache : caches_) bytes += static_cast<double>(cache.used_bytes());
        return bytes;
    }

  private:
    Queries rows_;
    std::vector<KvCache> caches_;
    std::vector<CachedQuery> queries_;
};

void prefill(benchmark::State& state, Isa isa, Shape s) {
    const std::int64_t length = state.range(0);
    Context context = context_of(isa, state.range(1));
    const auto q = random_floats(s.heads * length * s.dim);
    const auto k = random_floats(s.kv_heads * length * s.dim);
    std::vector<float> out(q.size());
    const auto keys = InputTensor<4>::dense(k.data(), {1, s.kv_heads, length, s.dim});
    AttentionOptions options;
    options.causal = true;
    run(state, context, {.flops = flops_of(s, causal_pairs(length, length))}, [&] {
        attend(context, InputTensor<4>::dense(q.data(), {1, s.heads, length, s.dim}), keys, keys, options,
               OutputTensor<4>::dense(out.data(), {1, s.heads, length, s.dim}));
    });
}

/// Sequences of 2048 rows in all, one behind the other.
void packed(benchmark::State& state, Isa isa, Shape s) {
    const std::vector<std::int64_t> offsets{0, 512, 640, 1024, 1088, 1344, 1376, 1824, 2048};
    const std::int64_t rows = offsets.back();
    Context context = context_of(isa, state.range(0));
    const auto q = random_floats(s.heads * rows * s.dim);
    const auto k = random_floats(s.kv_heads * rows * s.dim);
    std::vector<float> out(q.size());
    const auto keys = InputTensor<3>::dense(k.data(), {s.kv_heads, rows, s.dim});
    AttentionOptions options;
    options.causal = true;
    std::int64_t pairs = 0;
    for (std::size_t i = 1; i < offsets.size(); ++i) {
        const std::int64_t length = offsets[i] - offsets[i - 1];
        pairs += causal_pairs(length, length);
    }
    run(state, context, {.flops = flops_of(s, pairs)}, [&] {
        attend_packed(context, InputTensor<3>::dense(q.data(), {s.heads, rows, s.dim}), keys, keys, offsets, offsets,
                      options, OutputTensor<3>::dense(out.data(), {s.heads, rows, s.dim}));
    });
}

/// The last rows of one or more sequences over caches: a chunk of a prompt, a decode step, a batch of them.
void cached(benchmark::State& state, Isa isa, Shape s, std::int64_t sequences, std::int64_t rows, KvType type) {
    const std::int64_t depth = state.range(0);
    Context context = context_of(isa, state.range(1));
    const CachedQueries batch(context, s, sequences, rows, depth, type);
    const Work work{.flops = flops_of(s, sequences * causal_pairs(rows, depth)), .bytes = batch.kv_bytes()};
    run(state, context, work, [&] { attend(context, batch.queries()); });
}

/// A decode step over 1024 tokens: what a cache may hold beside them must not matter.
void decode_by_capacity(benchmark::State& state, Isa isa, Shape s) {
    constexpr std::int64_t kDepth = 1024;
    Context context = context_of(isa, state.range(1));
    const KvCache cache = filled_cache(context, s, kDepth, KvType::f32, state.range(0));
    Queries rows(s, 1, 1);
    const CachedQuery query{
        .query = rows.query(0), .cache = &cache, .layer = 0, .output = rows.output(0), .lse = {}, .mask = {}};
    run(state, context, {.flops = flops_of(s, kDepth), .bytes = kv_bytes(s, kDepth)},
        [&] { attend(context, std::span(&query, 1)); });
}

/// A decode step over the caller's own pages of 16 tokens.
void paged(benchmark::State& state, Isa isa, Shape s) {
    constexpr std::int64_t kPage = 16;
    const std::int64_t depth = state.range(0);
    Context context = context_of(isa, state.range(1));
    const auto memory = random_floats(2 * s.kv_heads * depth * s.dim);
    std::vector<KvPage> pages;
    const std::int64_t half = s.kv_heads * kPage * s.dim;
    for (std::int64_t i = 0; i < depth / kPage; ++i) {
        const float* page = memory.data() + 2 * i * half;
        const Extents<3> extents{s.kv_heads, kPage, s.dim};
        pages.push_back({InputTensor<3>::dense(page, extents), InputTensor<3>::dense(page + half, extents)});
    }
    Queries rows(s, 1, 1);
    const PagedQuery query{.query = rows.query(0), .pages = pages, .output = rows.output(0), .lse = {}, .mask = {}};
    run(state, context, {.flops = flops_of(s, depth), .bytes = kv_bytes(s, depth)},
        [&] { attend(context, std::span(&query, 1)); });
}

/// A decode step of 8 sequences that share a prefix, each with 128 tokens of its own.
void shared_prefix(benchmark::State& state, Isa isa, Shape s) {
    constexpr std::int64_t kSequences = 8;
    constexpr std::int64_t kSuffix = 128;
    const std::int64_t prefix_length = state.range(0);
    Context context = context_of(isa, state.range(1));
    const KvCache prefix = filled_cache(context, s, prefix_length);
    const CachedQueries batch(context, s, kSequences, 1, kSuffix);
    const Work work{.flops = flops_of(s, kSequences * (prefix_length + kSuffix)),
                    .bytes = kv_bytes(s, prefix_length + kSequences * kSuffix)};
    run(state, context, work, [&] { attend_shared_prefix(context, prefix, batch.queries()); });
}

/// A decode step of 8 sequences with a long prefix and 64 tokens of their own: forks of one cache, or caches that each
/// hold the prefix.
void forks(benchmark::State& state, Isa isa, Shape s, KvType type, bool separate) {
    constexpr std::int64_t kSequences = 8;
    constexpr std::int64_t kOwn = 64;
    const std::int64_t prefix = state.range(0);
    Context context = context_of(isa, state.range(1));
    std::vector<KvCache> caches;
    caches.push_back(filled_cache(context, s, prefix, type));
    while (caches.size() < kSequences) {
        caches.push_back(separate ? filled_cache(context, s, prefix, type) : caches.front().fork());
    }
    Queries rows(s, kSequences, 1);
    std::vector<CachedQuery> queries;
    std::size_t held = 0;
    const std::vector<float> floats = random_floats(s.kv_heads * kOwn * s.dim);
    const auto own = InputTensor<3>::dense(floats.data(), {s.kv_heads, kOwn, s.dim});
    for (KvCache& cache : caches) {
        cache.append(context, 0, own, own);
        const auto i = static_cast<std::int64_t>(queries.size());
        queries.push_back(
            {.query = rows.query(i), .cache = &cache, .layer = 0, .output = rows.output(i), .lse = {}, .mask = {}});
        if (separate || i == 0) held += cache.pool()->used_bytes();
    }
    if (!separate) held = caches.front().pool()->used_bytes();
    const double token = static_cast<double>(caches.front().used_bytes()) / static_cast<double>(prefix + kOwn);
    const std::int64_t read = separate ? kSequences * (prefix + kOwn) : prefix + kSequences * kOwn;
    run(state, context,
        {.flops = flops_of(s, kSequences * (prefix + kOwn)), .bytes = token * static_cast<double>(read)},
        [&] { attend(context, queries); });
    state.counters["held_MB"] = static_cast<double>(held) / 1e6;
}

const bool registered = [] {
    const std::vector<std::int64_t> threads = thread_counts();
    for (const Isa isa : available_isas()) {
        for (const Shape& s : kShapes) {
            const std::string shape = to_string(s);
            const auto args = [&](benchmark::internal::Benchmark* b, const char* name,
                                  const std::vector<std::int64_t>& values) {
                b->ArgNames({name, "threads"})->ArgsProduct({values, threads})->Unit(benchmark::kMillisecond);
            };
            const auto over_caches = [&](const char* name, std::int64_t sequences, std::int64_t rows,
                                         const std::vector<std::int64_t>& depths, KvType type = KvType::f32) {
                args(add(name, isa, shape, cached, s, sequences, rows, type), "depth", depths);
            };
            args(add("prefill", isa, shape, prefill, s), "tokens", {512, 2048});
            add("packed", isa, shape, packed, s)
                ->ArgName("threads")
                ->ArgsProduct({threads})
                ->Unit(benchmark::kMillisecond);
            over_caches("chunk", 1, 16, {8192});
            over_caches("decode", 1, 1, {4096, 32768});
            over_caches("decode_int8", 1, 1, {4096, 32768}, KvType::int8);
            over_caches("decode_int4", 1, 1, {4096, 32768}, KvType::int4);
            over_caches("batched_decode", 8, 1, {2048});
            args(add("decode_by_capacity", isa, shape, decode_by_capacity, s), "capacity",
                 {2048, std::int64_t{1} << 20U});
            args(add("paged", isa, shape, paged, s), "depth", {4096});
            args(add("shared_prefix", isa, shape, shared_prefix, s), "prefix", {4096});
        }
        constexpr Shape kNoGroups{32, 32, 128};
        for (const bool separate : {true, false}) {
            add(separate ? "separate" : "forks", isa, to_string(kNoGroups), forks, kNoGroups, KvType::f16, separate)
                ->ArgNames({"prefix", "threads"})
                ->ArgsProduct({{16384}, threads})
                ->Unit(benchmark::kMillisecond);
        }
    }
    return true;
}();

}  // namespace
}  // namespace headlong::bench
