// Every kernel alone, on one thread, from L1 or L2: the sizes are those of a row tile, a block or a span. Where the
// limit is neither multiply-adds nor memory but exponentials or divisions, there is no of_limit.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <headlong/context.hpp>

#include "bench/data.hpp"
#include "bench/limits.hpp"
#include "engine/context_impl.hpp"

namespace headlong::bench {
namespace {

using kernels::ElementType;
using kernels::kBlockTokens;
using kernels::KernelTable;
using kernels::kSpanTokens;
using kernels::StoredType;

constexpr std::size_t kTile = 48;  // rows that share a span's scores (engine/attention)

/// A context of one thread, whose kernels a suite calls.
struct OneThread {
    explicit OneThread(Isa isa) : context(context_of(isa, 1)), table(context.impl().kernels) {}
    Context context;
    const KernelTable& table;
};

std::size_t argument(const benchmark::State& state, std::size_t index) {
    return static_cast<std::size_t>(state.range(index));
}

double bytes_of(std::size_t floats) { return static_cast<double>(floats * sizeof(float)); }

/// The loop of a kernel that no limit here describes: rates alone.
template <class Body>
void run_unlimited(benchmark::State& state, double bytes, const Body& body) {
    for (auto _ : state) {
        body();
        benchmark::ClobberMemory();
    }
    set_rate(state, "bytes/s", bytes);
}

// ---- products: rows x a block of 64 tokens

void dot_panels(benchmark::State& state, Isa isa) {
    OneThread one(isa);
    const std::size_t rows = argument(state, 0);
    const std::size_t depth = argument(state, 1);
    AlignedFloats query(rows * depth), panels(kBlockTokens * depth), out(rows * kBlockTokens);
    const Work work{.flops = 2.0 * static_cast<double>(rows * depth * kBlockTokens),
                    .bytes = bytes_of(rows * depth + kBlockTokens * depth + rows * kBlockTokens)};
    run(state, one.context, work, [&] {
        one.table.dot_panels({query.data(), depth, rows, panels.data(), depth * kernels::kPanelTokens, depth,
                              out.data(), kBlockTokens, kBlockTokens, false, false});
    });
}

void weighted_rows(benchmark::State& state, Isa isa) {
    OneThread one(isa);
    const std::size_t rows = argument(state, 0);
    const std::size_t columns = argument(state, 1);
    AlignedFloats weights(rows * kBlockTokens), values(kBlockTokens * columns), out(rows * columns);
    const void* blocks[kernels::kSpanBlocks] = {values.data()};
    const Work work{.flops = 2.0 * static_cast<double>(rows * columns * kBlockTokens),
                    .bytes = bytes_of(rows * kBlockTokens + kBlockTokens * columns + rows * columns)};
    run(state, one.context, work, [&] {
        one.table.weighted_rows(
            {weights.data(), kBlockTokens, rows, blocks, 0, 0, kBlockTokens, columns, out.data(), columns});
    });
}

void dot_codes(benchmark::State& state, Isa isa, StoredType type) {
    OneThread one(isa);
    const std::size_t rows = argument(state, 0);
    const std::size_t depth = argument(state, 1);
    const std::size_t row_bytes = kernels::code_row_bytes(depth);
    const std::size_t panel_bytes = kernels::code_panel_bytes(type, depth);
    AlignedFloats query(rows * depth), query_codes(rows * row_bytes / sizeof(float)), out(rows * kBlockTokens);
    AlignedFloats panels(kernels::kBlockPanels * panel_bytes / sizeof(float));
    auto* row_codes = reinterpret_cast<std::uint8_t*>(query_codes.data());
    one.table.quantise_rows({query.data(), depth, rows, depth, row_codes, row_bytes});
    const Work work{.flops = 2.0 * static_cast<double>(rows * depth * kBlockTokens),
                    .bytes = static_cast<double>(rows * row_bytes + kernels::kBlockPanels * panel_bytes)};
    run(state, one.context, work, [&] {
        one.table.dot_codes({.rows = row_codes,
                             .row_stride = row_bytes,
                             .row_count = rows,
                             .panels = reinterpret_cast<const std::uint8_t*>(panels.data()),
                             .panel_stride = panel_bytes,
                             .depth = depth,
                             .group_begin = 0,
                             .group_end = kernels::code_groups(depth),
                             .out = out.data(),
                             .out_stride = kBlockTokens,
                             .columns = kBlockTokens,
                             .accumulate = false,
                             .canonical = false,
                             .type = type,
                             .next = panels.data()});
    });
}

void weighted_codes(benchmark::State& state, Isa isa, StoredType type) {
    OneThread one(isa);
    const std::size_t rows = argument(state, 0);
    const std::size_t columns = argument(state, 1);
    const std::size_t bytes = kernels::value_block_bytes(type, columns);
    AlignedFloats weights(rows * kBlockTokens), values(bytes / sizeof(float)), out(rows * columns);
    std::fill_n(weights.data(), rows * kBlockTokens, 0.5F);
    std::fill_n(values.data(), bytes / sizeof(float), 0.01F);  // scales; codes are what that makes of them
    const std::vector<float> sums(rows, 1.0F);
    std::vector<std::int16_t> codes(rows * kSpanTokens);
    const void* blocks[kernels::kSpanBlocks] = {values.data()};
    const Work work{.flops = 2.0 * static_cast<double>(rows * columns * kBlockTokens),
                    .bytes = bytes_of(rows * kBlockTokens + rows * columns) + static_cast<double>(bytes)};
    run(state, one.context, work, [&] {
        one.table.weighted_codes({.weights = weights.data(),
                                  .weight_stride = kBlockTokens,
                                  .row_count = rows,
                                  .sums = sums.data(),
                                  .value_blocks = blocks,
                                  .nonfinite_blocks = 0,
                                  .first = 0,
                                  .last = kBlockTokens,
                                  .columns = columns,
                                  .out = out.data(),
                                  .out_stride = columns,
                                  .type = type,
                                  .codes = codes.data(),
                                  .code_stride = kSpanTokens,
                                  .next = nullptr});
    });
}

// ---- scores: a row tile of one span

/// Rules, and what they point to.
struct Rules {
    explicit Rules(const std::string& name) {
        const bool all = name == "all";
        if (all || name == "softcap") rules.softcap = 30.0F;
        if (all || name == "alibi") {
            rules.slopes = slopes.data();
            rules.positions = positions.data();
        }
        if (all || name == "bias") rules.bias = rows.data();
    }
    Rules(const Rules&) = delete;
    Rules& operator=(const Rules&) = delete;

    std::vector<float> slopes = std::vector<float>(kTile, 0.5F);
    std::vector<float> positions = std::vector<float>(kTile, 511.0F);
    std::vector<float> bias = std::vector<float>(kSpanTokens, 0.25F);
    std::vector<const float*> rows = std::vector<const float*>(kTile, bias.data());
    kernels::ScoreRules rules;
};

// Both work in place, on what the last iteration left: finite numbers, which take as long as any others.

void softmax_span(benchmark::State& state, Isa isa, std::string name) {
    OneThread one(isa);
    const Rules rules(name);
    AlignedFloats scores(kTile * kSpanTokens);
    const std::vector<kernels::TokenRange> ranges(kTile, {0, 509});
    std::vector<float> max(kTile), sum(kTile);
    run_unlimited(state, bytes_of(2 * kTile * kSpanTokens), [&] {
        one.table.softmax_span(
            {scores.data(), kSpanTokens, kTile, ranges.data(), 0, kSpanTokens, max.data(), sum.data(), rules.rules});
    });
}

void adjust_scores(benchmark::State& state, Isa isa, std::string name) {
    OneThread one(isa);
    const Rules rules(name);
    AlignedFloats scores(kTile * kSpanTokens);
    const std::vector<kernels::TokenRange> ranges(kTile, {0, 509});
    run_unlimited(state, bytes_of(2 * kTile * kSpanTokens), [&] {
        one.table.adjust_scores({scores.data(), kSpanTokens, kTile, ranges.data(), rules.rules});
    });
}

void mask_row(benchmark::State& state, Isa isa, bool boolean, ElementType type) {
    OneThread one(isa);
    const std::size_t size = boolean ? 1 : type == ElementType::f32 ? 4 : 2;
    const std::vector<std::uint32_t> data(kSpanTokens, 0x30013001);  // allowed, or a small bias of any type
    AlignedFloats bias(kSpanTokens);
    run(state, one.context, {.bytes = static_cast<double>(kSpanTokens * (size + sizeof(float)))}, [&] {
        benchmark::DoNotOptimize(
            one.table.mask_row({data.data(), boolean, type, 1, {0, kSpanTokens}, 1.442695F, bias.data()}));
    });
}

// ---- the caller's memory: blocks of keys and values, tiles of query and output

/// Dense rows of any element type.
class Source {
  public:
    Source(ElementType type, std::size_t rows, std::size_t columns)
        : floats_(rows * columns), halves_(rows * columns), rows_(rows), columns_(columns), type_(type) {
        for (std::size_t i = 0; i < halves_.size(); ++i) halves_[i] = static_cast<std::uint16_t>(0x3000 + i % 1024);
    }
    kernels::Rows view() { return {data(), type_, static_cast<std::ptrdiff_t>(columns_), 1, rows_, columns_}; }
    void* data() { return type_ == ElementType::f32 ? static_cast<void*>(floats_.data()) : halves_.data(); }
    /// Of these rows and as many floats.
    Work copied() const {
        const std::size_t element = type_ == ElementType::f32 ? 4 : 2;
        return {.bytes = static_cast<double>(rows_ * columns_ * (element + sizeof(float)))};
    }

  private:
    AlignedFloats floats_;
    std::vector<std::uint16_t> halves_;
    std::size_t rows_, columns_;
    ElementType type_;
};

void pack_panels(benchmark::State& state, Isa isa, ElementType type) {
    OneThread one(isa);
    const std::size_t dim = argument(state, 0);
    Source source(type, kBlockTokens, dim);
    AlignedFloats panels(kBlockTokens * dim);
    run(state, one.context, source.copied(), [&] { one.table.pack_panels({source.view(), panels.data(), 0}); });
}

void pack_values(benchmark::State& state, Isa isa, ElementType type) {
    OneThread one(isa);
    const std::size_t dim = argument(state, 0);
    Source source(type, kBlockTokens, dim);
    AlignedFloats values(kBlockTokens * dim);
    run(state, one.context, source.copied(), [&] {
        benchmark::DoNotOptimize(one.table.pack_values({source.view(), values.data(), 0}));
    });
}

void scale_rows(benchmark::State& state, Isa isa, ElementType type) {
    OneThread one(isa);
    const std::size_t dim = argument(state, 0);
    Source source(type, kTile, dim);
    AlignedFloats out(kTile * dim);
    run(state, one.context, source.copied(), [&] { one.table.scale_rows({source.view(), 0.125F, out.data(), dim}); });
}

void store_rows(benchmark::State& state, Isa isa, ElementType type) {
    OneThread one(isa);
    const std::size_t dim = argument(state, 0);
    Source out(type, kTile, dim);
    AlignedFloats rows(kTile * dim);
    run(state, one.context, out.copied(), [&] {
        one.table.store_rows({rows.data(), dim, kTile, dim, out.data(), type, static_cast<std::ptrdiff_t>(dim), 1});
    });
}

// ---- states of a row tile

void merge(benchmark::State& state, Isa isa) {
    OneThread one(isa);
    const std::size_t dim = argument(state, 0);
    AlignedFloats into(kTile * dim), from(kTile * dim);
    std::vector<float> into_max(kTile, 1.0F), from_max(kTile, 0.0F), into_sum(kTile, 1.0F), from_sum(kTile, 1.0F);
    const double elements = static_cast<double>(kTile * dim);
    run(state, one.context, {.flops = 3.0 * elements, .bytes = 3.0 * sizeof(float) * elements}, [&] {
        one.table.merge({{into.data(), dim, into_max.data(), into_sum.data()},
                         {from.data(), dim, from_max.data(), from_sum.data()},
                         kTile,
                         dim});
    });
}

void finish(benchmark::State& state, Isa isa) {
    OneThread one(isa);
    const std::size_t dim = argument(state, 0);
    AlignedFloats output(kTile * dim), out(kTile * dim);
    std::vector<float> max(kTile, 0.0F), sum(kTile, 3.0F);
    run_unlimited(state, bytes_of(2 * kTile * dim), [&] {
        one.table.finish({{output.data(), dim, max.data(), sum.data()}, kTile, dim, out.data(), dim});
    });
}

// ---- rows of a layer

void rms_norm(benchmark::State& state, Isa isa) {
    OneThread one(isa);
    const std::size_t columns = argument(state, 0);
    const std::size_t rows = 4096 / columns;  // one row of a model, or one of each head
    AlignedFloats x(rows * columns), weight(columns), out(rows * columns);
    const Work work{.flops = 4.0 * static_cast<double>(rows * columns),
                    .bytes = bytes_of(2 * rows * columns + columns)};
    run(state, one.context, work, [&] {
        one.table.rms_norm({x.data(), columns, rows, columns, weight.data(), 1e-5F, out.data(), columns});
    });
}

void rotate(benchmark::State& state, Isa isa, bool interleaved) {
    OneThread one(isa);
    constexpr std::size_t kHeads = 32;
    const std::size_t dim = argument(state, 0);
    AlignedFloats row(kHeads * dim);
    const std::vector<float> cosine(dim / 2, 0.6F), sine(dim / 2, 0.8F);
    const Work work{.flops = 3.0 * static_cast<double>(kHeads * dim), .bytes = bytes_of(2 * kHeads * dim + dim)};
    run(state, one.context, work, [&] {
        one.table.rotate({row.data(), kHeads, dim, dim / 2, cosine.data(), sine.data(), interleaved});
    });
}

void swiglu(benchmark::State& state, Isa isa) {
    OneThread one(isa);
    const std::size_t count = argument(state, 0);
    AlignedFloats gate(count), up(count), out(count);
    run_unlimited(state, bytes_of(3 * count), [&] { one.table.activate({gate.data(), up.data(), out.data(), count}); });
}

const bool registered = [] {
    const std::vector<std::int64_t> dims{64, 128};
    const std::pair<std::string, ElementType> types[] = {
        {"f32", ElementType::f32}, {"f16", ElementType::f16}, {"bf16", ElementType::bf16}};
    for (const Isa isa : available_isas()) {
        const auto of_dims = [&](benchmark::internal::Benchmark* b) { b->ArgName("dim")->ArgsProduct({dims}); };
        for (auto* b : {add("dot_panels", isa, dot_panels), add("weighted_rows", isa, weighted_rows)}) {
            b->ArgNames({"rows", "dim"})->ArgsProduct({{1, 4, 6, 48}, dims});
        }
        for (const auto& [name, type] : {std::pair<std::string, StoredType>{"int8", StoredType::int8},
                                         std::pair<std::string, StoredType>{"int4", StoredType::int4}}) {
            for (auto* b : {add("dot_codes", isa, name, dot_codes, type),
                            add("weighted_codes", isa, name, weighted_codes, type)}) {
                b->ArgNames({"rows", "dim"})->ArgsProduct({{1, 4, 48}, dims});
            }
        }
        for (const std::string rules : {"plain", "softcap", "alibi", "bias", "all"}) {
            add("softmax_span", isa, rules, softmax_span, rules);
            if (rules != "plain") add("adjust_scores", isa, rules, adjust_scores, rules);
        }
        add("mask_row", isa, "boolean", mask_row, true, ElementType::f32);
        for (const auto& [name, type] : types) {
            add("mask_row", isa, name, mask_row, false, type);
            of_dims(add("pack_panels", isa, name, pack_panels, type));
            of_dims(add("pack_values", isa, name, pack_values, type));
            of_dims(add("scale_rows", isa, name, scale_rows, type));
            of_dims(add("store_rows", isa, name, store_rows, type));
        }
        of_dims(add("merge", isa, merge));
        of_dims(add("finish", isa, finish));
        of_dims(add("rotate", isa, "halves", rotate, false));
        of_dims(add("rotate", isa, "interleaved", rotate, true));
        add("rms_norm", isa, rms_norm)->ArgName("columns")->ArgsProduct({{64, 128, 4096}});
        add("swiglu", isa, swiglu)->ArgName("count")->Arg(4096);
    }
    return true;
}();

}  // namespace
}  // namespace headlong::bench
