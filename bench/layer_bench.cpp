// The linear layer, and the multi-head attention layer built of it: a prompt, and a decode step. FLOP/s counts 2 per
// weight and row, and attention's own; bytes/s the weights, and in a decode step the keys and values. Rows are left
// out, as `headlong bench linear` leaves them out: few beside the weights, or bound by arithmetic.
#include <benchmark/benchmark.h>

#include <memory_resource>
#include <vector>

#include <headlong/headlong.hpp>

#include "bench/data.hpp"
#include "bench/limits.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/linear.hpp"

namespace headlong::bench {
namespace {

void linear(benchmark::State& state, Isa isa) {
    const std::int64_t rows = state.range(0);
    const std::int64_t width = state.range(1);
    Context context = context_of(isa, state.range(2));
    const auto weights = random_floats(width * width);
    const Linear layer(context.impl(), *std::pmr::new_delete_resource(),
                       InputTensor<2>::dense(weights.data(), {width, width}), {});
    const auto x = random_floats(rows * width);
    std::vector<float> y(x.size());
    const Work work{.flops = 2.0 * static_cast<double>(rows * width * width),
                    .bytes = sizeof(float) * static_cast<double>(width * width)};
    auto workspace = context.impl().workspaces.lend();
    run(state, context, work, [&] { layer.apply(context.impl(), *workspace, x.data(), width, rows, y.data(), width); });
}

MultiHeadAttention layer_of(Context& context, const Shape& s) {
    const std::int64_t width = s.heads * s.dim;
    const std::int64_t kv_width = s.kv_heads * s.dim;
    const auto floats = random_floats(width * width);
    const auto weight = [&](std::int64_t outputs) { return InputTensor<2>::dense(floats.data(), {width, outputs}); };
    return {context,
            {.heads = s.heads, .kv_heads = s.kv_heads, .memory = nullptr},
            {.query = weight(width), .key = weight(kv_width), .value = weight(kv_width), .output = weight(width)}};
}

double weight_count(const Shape& s) {
    return 2.0 * static_cast<double>((s.heads + s.kv_heads) * s.dim) * static_cast<double>(s.heads * s.dim);
}

void prefill_layer(benchmark::State& state, Isa isa, Shape s) {
    const std::int64_t length = state.range(0);
    const std::int64_t width = s.heads * s.dim;
    Context context = context_of(isa, state.range(1));
    const MultiHeadAttention layer = layer_of(context, s);
    const auto x = random_floats(length * width);
    std::vector<float> y(x.size());
    AttentionOptions options;
    options.causal = true;
    const double pairs = static_cast<double>(length * (length + 1) / 2);
    run(state, context,
        {.flops = 2.0 * weight_count(s) * static_cast<double>(length) + 4.0 * static_cast<double>(width) * pairs}, [&] {
            layer.forward(context, InputTensor<3>::dense(x.data(), {1, length, width}),
                          OutputTensor<3>::dense(y.data(), {1, length, width}), options);
        });
}

void decode_layer(benchmark::State& state, Isa isa, Shape s) {
    const std::int64_t depth = state.range(0);
    const std::int64_t width = s.heads * s.dim;
    Context context = context_of(isa, state.range(1));
    const MultiHeadAttention layer = layer_of(context, s);
    KvCache cache = filled_cache(context, s, depth - 1);
    const auto x = random_floats(width);
    std::vector<float> y(x.size());
    const Work work{.flops = 2.0 * weight_count(s) + 4.0 * static_cast<double>(width * depth),
                    .bytes = sizeof(float) * weight_count(s) + kv_bytes(s, depth)};
    run(state, context, work, [&] {
        layer.forward(context, InputTensor<2>::dense(x.data(), {1, width}), cache, 0,
                      OutputTensor<2>::dense(y.data(), {1, width}));
        cache.impl().take_back(depth - 1);  // every step is the same one
    });
}

const bool registered = [] {
    const std::vector<std::int64_t> threads = thread_counts();
    for (const Isa isa : available_isas()) {
        add("linear", isa, linear)
            ->ArgNames({"rows", "width", "threads"})
            ->ArgsProduct({{1, 512}, {1024, 4096}, threads})
            ->Unit(benchmark::kMillisecond);
        for (const Shape& s : kShapes) {
            add("prefill_layer", isa, to_string(s), prefill_layer, s)
                ->ArgNames({"tokens", "threads"})
                ->ArgsProduct({{512}, threads})
                ->Unit(benchmark::kMillisecond);
            add("decode_layer", isa, to_string(s), decode_layer, s)
                ->ArgNames({"depth", "threads"})
                ->ArgsProduct({{2048}, threads})
                ->Unit(benchmark::kMillisecond);
        }
    }
    return true;
}();

}  // namespace
}  // namespace headlong::bench
