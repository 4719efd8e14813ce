// The kernels alone, from L1 or L2: one thread, every instruction set. Rates are multiply-adds x 2 (FLOP/s), or
// elements a second where there are none.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include <headlong/context.hpp>

#include "engine/isa.hpp"
#include "kernels/layout.hpp"

namespace headlong {
namespace {

using kernels::KernelTable;

struct alignas(kernels::kAlignment) Line {
    float floats[16];
};

/// Floats in cache-line-aligned memory, small and finite.
class Floats {
  public:
    explicit Floats(std::size_t count) : lines_(count / 16 + 1) {
        for (std::size_t i = 0; i < count; ++i) data()[i] = static_cast<float>(i % 97) * 0.01F - 0.5F;
    }
    float* data() noexcept { return lines_.front().floats; }

  private:
    std::vector<Line> lines_;
};

void set_flops(benchmark::State& state, double flops) {
    state.counters["FLOP/s"] = benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
}

void dot_panels(benchmark::State& state, const KernelTable& table) {
    const auto rows = static_cast<std::size_t>(state.range(0));
    const auto depth = static_cast<std::size_t>(state.range(1));
    Floats query(rows * depth), panels(64 * depth), out(rows * 64);
    for (auto _ : state) {
        table.dot_panels(
            {query.data(), depth, rows, panels.data(), depth * 16, depth, out.data(), 64, 64, false, false});
        benchmark::ClobberMemory();
    }
    set_flops(state, 2.0 * static_cast<double>(rows * depth * 64));
}

void weighted_rows(benchmark::State& state, const KernelTable& table) {
    const auto rows = static_cast<std::size_t>(state.range(0));
    const auto columns = static_cast<std::size_t>(state.range(1));
    Floats weights(rows * 64), values(64 * columns), out(rows * columns);
    const float* blocks[8] = {values.data()};
    for (auto _ : state) {
        table.weighted_rows({weights.data(), 64, rows, blocks, columns, 0, 0, 64, columns, out.data(), columns});
        benchmark::ClobberMemory();
    }
    set_flops(state, 2.0 * static_cast<double>(rows * columns * 64));
}

void softmax_span(benchmark::State& state, const KernelTable& table) {
    Floats scores(512), original(512);
    const kernels::TokenRange range{0, 509};
    float max = 0.0F;
    float sum = 0.0F;
    for (auto _ : state) {
        std::copy_n(original.data(), 512, scores.data());
        table.softmax_span({scores.data(), 512, 1, &range, 0, 512, &max, &sum});
        benchmark::ClobberMemory();
    }
    state.SetItemsProcessed(state.iterations() * 512);
}

void pack_panels(benchmark::State& state, const KernelTable& table) {
    Floats rows(64 * 128), panels(64 * 128);
    for (auto _ : state) {
        table.pack_panels({{rows.data(), kernels::ElementType::f32, 128, 1, 64, 128}, panels.data(), 0});
        benchmark::ClobberMemory();
    }
    state.SetItemsProcessed(state.iterations() * 64 * 128);
}

const bool registered = [] {
    for (const Isa isa : available_isas()) {
        const KernelTable& table = table_of(isa);
        const std::string suffix = std::string("/") + to_string(isa);
        const auto args = [](auto* b) { b->ArgNames({"rows", "dim"})->ArgsProduct({{1, 4, 6, 48}, {64, 128}}); };
        args(benchmark::RegisterBenchmark(("dot_panels" + suffix).c_str(), dot_panels, table));
        args(benchmark::RegisterBenchmark(("weighted_rows" + suffix).c_str(), weighted_rows, table));
        benchmark::RegisterBenchmark(("softmax_span" + suffix).c_str(), softmax_span, table);
        benchmark::RegisterBenchmark(("pack_panels" + suffix).c_str(), pack_panels, table);
    }
    return true;
}();

}  // namespace
}  // namespace headlong
