// What features cost: a window against full causal attention over a long context, and a prefill with each feature
// beside the plain one. FLOP/s counts 4 * heads * head_dim * visible (query, key) pairs.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>

#include "bench/data.hpp"
#include "bench/limits.hpp"

namespace headlong::bench {
namespace {

struct Tensors {
    std::int64_t heads, kv_heads, length, dim;
    std::vector<float> query = random_floats(heads * length * dim);
    std::vector<float> key = random_floats(kv_heads * length * dim);
    std::vector<float> output = std::vector<float>(query.size());

    void run(Context& context, const AttentionOptions& options) {
        const auto rows = InputTensor<4>::dense(key.data(), {1, kv_heads, length, dim});
        attend(context, InputTensor<4>::dense(query.data(), {1, heads, length, dim}), rows, rows, options,
               OutputTensor<4>::dense(output.data(), {1, heads, length, dim}));
    }
};

Work work_of(const Tensors& t, std::int64_t window) {
    const std::int64_t full = std::min(window, t.length);
    const auto pairs = static_cast<double>(full * (full + 1) / 2 + (t.length - full) * full);
    return {.flops = 4.0 * static_cast<double>(t.heads * t.dim) * pairs};
}

/// 64 k tokens, 2 heads over 1 KV head of dim 64; a window of 64 k is full causal attention.
void window_over_64k(benchmark::State& state, Isa isa) {
    Context context = context_of(isa, 1);
    Tensors t{2, 1, 65536, 64};
    AttentionOptions options;
    options.causal = true;
    if (state.range(0) < t.length) options.window_left = window_left_of(state.range(0));
    run(state, context, work_of(t, state.range(0)), [&] { t.run(context, options); });
}

enum class Feature : std::uint8_t { none, window, softcap, alibi, sinks, boolean_mask, float_mask, half_mask };

void prefill_with(benchmark::State& state, Isa isa, Feature feature) {
    Context context = context_of(isa, 1);
    Tensors t{32, 8, 1024, 128};
    AttentionOptions options;
    options.causal = true;
    const std::vector<float> slopes = alibi_slopes_for(t.heads);
    const std::vector<float> sinks(static_cast<std::size_t>(t.heads), 0.5F);
    const std::vector<std::uint8_t> booleans(static_cast<std::size_t>(t.length * t.length), 1);
    const std::vector<float> floats(booleans.size(), 0.25F);
    const std::vector<std::uint16_t> halves(booleans.size(), 0x3400);
    const std::int64_t square[2] = {t.length, t.length};
    switch (feature) {
        case Feature::none:
            break;
        case Feature::window:
            options.window_left = t.length;  // wide enough to see everything: the cost of looking
            break;
        case Feature::softcap:
            options.softcap = 30.0F;
            break;
        case Feature::alibi:
            options.alibi_slopes = slopes;
            break;
        case Feature::sinks:
            options.sink_logits = sinks;
            break;
        case Feature::boolean_mask:
            options.mask = AttentionMask::dense(booleans.data(), AttentionMask::Type::boolean, square);
            break;
        case Feature::float_mask:
            options.mask = AttentionMask::dense(floats.data(), AttentionMask::Type::f32, square);
            break;
        case Feature::half_mask:
            options.mask = AttentionMask::dense(halves.data(), AttentionMask::Type::f16, square);
            break;
    }
    run(state, context, work_of(t, t.length), [&] { t.run(context, options); });
}

const bool registered = [] {
    const std::pair<const char*, Feature> features[] = {{"plain", Feature::none},
                                                        {"window", Feature::window},
                                                        {"softcap", Feature::softcap},
                                                        {"alibi", Feature::alibi},
                                                        {"sinks", Feature::sinks},
                                                        {"boolean_mask", Feature::boolean_mask},
                                                        {"float_mask", Feature::float_mask},
                                                        {"half_mask", Feature::half_mask}};
    for (const Isa isa : available_isas()) {
        if (isa == available_isas().back()) {
            add("window_over_64k", isa, window_over_64k)
                ->ArgName("window")
                ->Arg(1024)
                ->Arg(65536)
                ->Unit(benchmark::kMillisecond);
        }
        for (const auto& [name, feature] : features) {
            add("prefill_with", isa, name, prefill_with, feature)->Unit(benchmark::kMillisecond);
        }
    }
    return true;
}();

}  // namespace
}  // namespace headlong::bench
