// attend() on every instruction set of the machine: causal prefill over plain tensors, and one decode step over a
// cache. FLOP/s counts 4 * heads * head_dim per visible (query, key) pair; B/s counts live keys and values once per
// KV head.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <headlong/headlong.hpp>

namespace {

// 8B-class decoders: 32 query heads over 8 KV heads of 128.
constexpr std::int64_t kHeads = 32;
constexpr std::int64_t kKvHeads = 8;
constexpr std::int64_t kHeadDim = 128;

std::vector<float> random_floats(std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    std::minstd_rand random(1);
    std::uniform_real_distribution<float> uniform(-1.7F, 1.7F);  // of about unit variance
    for (float& value : values) value = uniform(random);
    return values;
}

benchmark::Counter per_second(double amount) { return {amount, benchmark::Counter::kIsIterationInvariantRate}; }

headlong::ContextOptions context_options(headlong::Isa isa, std::int64_t threads) {
    headlong::ContextOptions options;
    options.isa = isa;
    options.threads = static_cast<std::size_t>(threads);
    return options;
}

void prefill(benchmark::State& state, headlong::Isa isa) {
    const std::int64_t tokens = state.range(0);
    headlong::Context context(context_options(isa, state.range(1)));
    const std::vector<float> query = random_floats(kHeads * tokens * kHeadDim);
    const std::vector<float> key = random_floats(kKvHeads * tokens * kHeadDim);
    const std::vector<float> value = random_floats(kKvHeads * tokens * kHeadDim);
    std::vector<float> output(query.size());
    headlong::AttentionOptions options;
    options.causal = true;
    const headlong::Extents<4> query_extents{1, kHeads, tokens, kHeadDim};
    const headlong::Extents<4> key_extents{1, kKvHeads, tokens, kHeadDim};
    for (auto _ : state) {
        headlong::attend(context, headlong::InputTensor<4>::dense(query.data(), query_extents),
                         headlong::InputTensor<4>::dense(key.data(), key_extents),
                         headlong::InputTensor<4>::dense(value.data(), key_extents), options,
                         headlong::OutputTensor<4>::dense(output.data(), query_extents));
    }
    const double pairs = static_cast<double>(tokens) * static_cast<double>(tokens + 1) / 2;
    state.counters["FLOP/s"] = per_second(4.0 * kHeads * kHeadDim * pairs);
}

void decode(benchmark::State& state, headlong::Isa isa) {
    const std::int64_t tokens = state.range(0);
    constexpr std::int64_t kLayers = 4;  // visited in turn, as a model does: the last-level cache keeps little
    headlong::Context context(context_options(isa, state.range(1)));
    headlong::KvCacheOptions cache_options;
    cache_options.shape = {.kv_heads = kKvHeads, .head_dim = kHeadDim, .value_dim = kHeadDim};
    cache_options.layers = kLayers;
    headlong::KvCache cache(cache_options);
    const std::vector<float> rows = random_floats(kKvHeads * tokens * kHeadDim);
    const auto view = headlong::InputTensor<3>::dense(rows.data(), {kKvHeads, tokens, kHeadDim});
    for (std::size_t layer = 0; layer < kLayers; ++layer) cache.append(context, layer, view, view);

    const std::vector<float> query = random_floats(kHeads * kHeadDim);
    std::vector<float> output(query.size());
    headlong::CachedQuery step{.query = headlong::InputTensor<3>::dense(query.data(), {kHeads, 1, kHeadDim}),
                               .cache = &cache,
                               .layer = 0,
                               .output = headlong::OutputTensor<3>::dense(output.data(), {kHeads, 1, kHeadDim}),
                               .lse = {}};
    for (auto _ : state) {
        headlong::attend(context, {&step, 1});
        step.layer = (step.layer + 1) % kLayers;
    }
    state.counters["FLOP/s"] = per_second(4.0 * kHeads * kHeadDim * static_cast<double>(tokens));
    state.counters["B/s"] = per_second(2.0 * sizeof(float) * kKvHeads * kHeadDim * static_cast<double>(tokens));
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::int64_t> threads{1};
    if (headlong::default_concurrency() > 1) {
        threads.push_back(static_cast<std::int64_t>(headlong::default_concurrency()));
    }
    for (const headlong::Isa isa : headlong::available_isas()) {
        const std::string name = headlong::to_string(isa);
        benchmark::RegisterBenchmark(("prefill/" + name).c_str(), prefill, isa)
            ->ArgNames({"tokens", "threads"})
            ->ArgsProduct({{512, 2048}, threads})
            ->Unit(benchmark::kMillisecond)
            ->UseRealTime();
        benchmark::RegisterBenchmark(("decode/" + name).c_str(), decode, isa)
            ->ArgNames({"tokens", "threads"})
            ->ArgsProduct({{1024, 8192}, threads})
            ->Unit(benchmark::kMillisecond)
            ->UseRealTime();
    }
    benchmark::AddCustomContext("headlong", headlong::version());
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
