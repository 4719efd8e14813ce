// Attention as callers see it: prefill of plain tensors, and decode steps over a cache, on every instruction set.
// FLOP/s counts 4 * heads * head_dim * visible (query, key) pairs; bytes/s the live keys and values, read once.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include <headlong/headlong.hpp>

#include "bench/data.hpp"

namespace headlong::bench {
namespace {

struct Shape {
    std::int64_t heads, kv_heads, dim;
};

void prefill(benchmark::State& state, Isa isa, Shape s) {
    const std::int64_t length = state.range(0);
    Context context = context_of(isa, static_cast<std::size_t>(state.range(1)));
    const auto q = random_floats(s.heads * length * s.dim);
    const auto k = random_floats(s.kv_heads * length * s.dim);
    std::vector<float> out(q.size());
    AttentionOptions options;
    options.causal = true;
    for (auto _ : state) {
        attend(context, InputTensor<4>::dense(q.data(), {1, s.heads, length, s.dim}),
               InputTensor<4>::dense(k.data(), {1, s.kv_heads, length, s.dim}),
               InputTensor<4>::dense(k.data(), {1, s.kv_heads, length, s.dim}), options,
               OutputTensor<4>::dense(out.data(), {1, s.heads, length, s.dim}));
    }
    const auto pairs = static_cast<double>(length * (length + 1) / 2);
    state.counters["FLOP/s"] = benchmark::Counter(4.0 * static_cast<double>(s.heads * s.dim) * pairs,
                                                  benchmark::Counter::kIsIterationInvariantRate);
}

void decode(benchmark::State& state, Isa isa, Shape s) {
    const std::int64_t depth = state.range(0);
    Context context = context_of(isa, static_cast<std::size_t>(state.range(1)));
    KvCacheOptions cache_options;
    cache_options.shape = {.kv_heads = s.kv_heads, .head_dim = s.dim, .value_dim = s.dim};
    KvCache cache(cache_options);
    const auto k = random_floats(s.kv_heads * depth * s.dim);
    const auto rows = InputTensor<3>::dense(k.data(), {s.kv_heads, depth, s.dim});
    cache.append(context, 0, rows, rows);
    const auto q = random_floats(s.heads * s.dim);
    std::vector<float> out(q.size());
    const CachedQuery query{.query = InputTensor<3>::dense(q.data(), {s.heads, 1, s.dim}),
                            .cache = &cache,
                            .layer = 0,
                            .output = OutputTensor<3>::dense(out.data(), {s.heads, 1, s.dim}),
                            .lse = {}};
    for (auto _ : state) attend(context, std::span(&query, 1));
    state.counters["bytes/s"] = benchmark::Counter(8.0 * static_cast<double>(s.kv_heads * depth * s.dim),
                                                   benchmark::Counter::kIsIterationInvariantRate);
}

const bool registered = [] {
    const auto name = [](const char* what, Isa isa, Shape s) {
        return std::string(what) + "/" + to_string(isa) + "/" + std::to_string(s.heads) + "x" +
               std::to_string(s.kv_heads) + "x" + std::to_string(s.dim);
    };
    const auto threads = static_cast<std::int64_t>(default_concurrency());
    std::vector<std::int64_t> counts{1};
    if (threads > 1) counts.push_back(threads);
    for (const Isa isa : available_isas()) {
        for (const Shape s : {Shape{32, 8, 128}, Shape{12, 12, 64}}) {
            benchmark::RegisterBenchmark(name("prefill", isa, s).c_str(), prefill, isa, s)
                ->ArgNames({"tokens", "threads"})
                ->ArgsProduct({{512, 2048}, counts})
                ->UseRealTime()
                ->Unit(benchmark::kMillisecond);
            benchmark::RegisterBenchmark(name("decode", isa, s).c_str(), decode, isa, s)
                ->ArgNames({"depth", "threads"})
                ->ArgsProduct({{4096, 32768}, counts})
                ->UseRealTime()
                ->Unit(benchmark::kMillisecond);
        }
    }
    return true;
}();

}  // namespace
}  // namespace headlong::bench
