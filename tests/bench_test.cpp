// The benchmark's arithmetic against numbers computed by hand, its schedule, and its reports. No timing is asserted.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <headlong/error.hpp>

#include "tests/support/command_line.hpp"
#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tools/bench/attention_workload.hpp"
#include "tools/bench/linear_workload.hpp"
#include "tools/bench/plot.hpp"
#include "tools/bench/report.hpp"
#include "tools/bench/schedule.hpp"
#include "tools/measure/lists.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/statistics.hpp"

namespace headlong::test {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using tools::AttentionShape;
using tools::Phase;
using tools::Samples;

// ---------------------------------------------------------------------------------------------------- statistics

TEST(SamplesTest, OrderStatistics) {
    Samples samples;
    EXPECT_EQ(samples.median(), 0.0);
    EXPECT_EQ(samples.quantile(0.95), 0.0);
    samples.add({5.0, 1.0});
    samples.add({4.0, 2.0, 3.0});
    EXPECT_EQ(samples.median(), 3.0);
    EXPECT_EQ(samples.min(), 1.0);
    EXPECT_EQ(samples.max(), 5.0);
    samples.add({10.0});
    EXPECT_EQ(samples.median(), 3.5) << "the mean of the middle two";
    EXPECT_EQ(samples.quantile(0.5), 3.0) << "nearest rank";
    EXPECT_EQ(samples.quantile(0.95), 10.0);

    Samples hundred;
    for (int i = 100; i >= 1; --i) hundred.add({static_cast<double>(i)});
    EXPECT_EQ(hundred.quantile(0.95), 95.0);
    EXPECT_EQ(hundred.quantile(0.99), 99.0);
}

TEST(SamplesTest, UncertaintyOfTheMedian) {
    Samples samples;
    for (int i = 1; i <= 5; ++i) {
        samples.add({7.0});
        EXPECT_TRUE(std::isinf(samples.median_uncertainty())) << i << " samples say nothing";
    }
    samples.add({7.0});
    EXPECT_EQ(samples.median_uncertainty(), 0.0);
    // 100 samples: ranks floor((100 - 19.6) / 2) = 40 and ceil(1 + (100 + 19.6) / 2) = 61
    Samples hundred;
    for (int i = 1; i <= 100; ++i) hundred.add({static_cast<double>(i)});
    EXPECT_DOUBLE_EQ(hundred.median_uncertainty(), (61.0 - 40.0) / 2.0 / 50.5);
}

// -------------------------------------------------------------------------------------------- FLOPs and bytes by hand

AttentionShape shape(Phase phase, std::vector<std::int64_t> q_lens, std::vector<std::int64_t> kv_lens) {
    AttentionShape s;
    s.phase = phase;
    s.q_lens = std::move(q_lens);
    s.kv_lens = std::move(kv_lens);
    s.heads = 4;
    s.kv_heads = 2;
    s.head_dim = 8;
    s.value_dim = 8;
    s.layers = 1;
    return s;
}

TEST(WorkloadTest, VisiblePairs) {
    EXPECT_EQ(visible_pairs(shape(Phase::prefill, {4}, {4})), 1 + 2 + 3 + 4);
    EXPECT_EQ(visible_pairs(shape(Phase::prefill, {4, 2}, {4, 2})), 10 + 3);
    EXPECT_EQ(visible_pairs(shape(Phase::decode, {1}, {100})), 100) << "the query sees exactly as many keys";
    EXPECT_EQ(visible_pairs(shape(Phase::chunk, {3}, {10})), 8 + 9 + 10) << "the last query sees all";
    EXPECT_EQ(visible_pairs(shape(Phase::decode, {1, 1}, {7, 9})), 16);

    AttentionShape full = shape(Phase::prefill, {4}, {4});
    full.causal = false;
    EXPECT_EQ(visible_pairs(full), 16);
    AttentionShape window = shape(Phase::prefill, {5}, {5});
    window.window = 2;
    EXPECT_EQ(visible_pairs(window), 1 + 2 + 2 + 2 + 2);
    window = shape(Phase::decode, {1}, {100});
    window.window = 16;
    EXPECT_EQ(visible_pairs(window), 16);
}

TEST(WorkloadTest, LiveBytes) {
    // f32 keys and values of 2 KV heads with 8 elements: 128 bytes a token
    EXPECT_EQ(live_kv_bytes(shape(Phase::prefill, {4}, {4})), 4 * 128);
    EXPECT_EQ(live_kv_bytes(shape(Phase::decode, {1, 1}, {7, 9})), 16 * 128);
    AttentionShape window = shape(Phase::chunk, {3}, {100});
    window.window = 10;
    EXPECT_EQ(live_kv_bytes(window), 12 * 128) << "the first query's window begins 11 before the last key";
    AttentionShape wide = shape(Phase::decode, {1}, {10});
    wide.value_dim = 24;
    EXPECT_EQ(live_kv_bytes(wide), 10 * 2 * (8 + 24) * 4);
}

TEST(WorkloadTest, BytesAreThoseOfTheTypes) {
    const std::unique_ptr<Context> context = make_context(available_isas().back());
    for (const Phase phase : {Phase::prefill, Phase::decode}) {
        AttentionShape s = shape(phase, {phase == Phase::prefill ? 100 : 1}, {100});
        s.value_dim = 24;
        // bytes of a key, of a value, and of a value padded to 32 elements; codes have one scale here
        for (const auto& [types, key_bytes, value_bytes, padded] :
             {std::tuple{KvTypes{KvType::f16, KvType::f16}, 8 * 2, 24 * 2, 32 * 2},
              {KvTypes{KvType::bf16, KvType::f32}, 8 * 2, 24 * 4, 32 * 4},
              {KvTypes{KvType::f32, KvType::f16}, 8 * 4, 24 * 2, 32 * 2},
              {KvTypes{KvType::int8, KvType::int8}, 4 + 8, 4 + 24, 4 + 32},
              {KvTypes{KvType::int4, KvType::int4}, 4 + 4, 4 + 12, 4 + 16},
              {KvTypes{KvType::int8, KvType::f16}, 4 + 8, 24 * 2, 32 * 2},
              {KvTypes{KvType::f32, KvType::int4}, 8 * 4, 4 + 12, 4 + 16}}) {
            s.kv = types;
            EXPECT_EQ(live_kv_bytes(s), 100.0 * 2 * (key_bytes + value_bytes));
            const tools::PlannedWorkload plan = plan_attention(s, "test");
            EXPECT_EQ(plan.shape["kv_type"], tools::kv_types_name(types));
            const auto workload = plan.make(*context);
            EXPECT_EQ(workload->bytes(), live_kv_bytes(s));
            EXPECT_EQ(workload->kv_bytes(), static_cast<std::size_t>(100 * 2 * (key_bytes + padded)));
        }
    }
}

// A prompt goes into a cache that the repetition before filled, and blocks come from its pool.
TEST(WorkloadTest, CachedPrefillsAllocateNothingAnew) {
    CountingResource memory;
    {
        const auto context = make_context(available_isas().back(), 1, &memory);
        AttentionShape s = shape(Phase::prefill, {300, 70}, {300, 70});
        s.kv = {KvType::f16, KvType::f16};
        const auto workload = plan_attention(s, "test").make(*context);
        workload->run(*context);
        const std::size_t kv_bytes = workload->kv_bytes();
        const auto before = memory.counts();
        for (int i = 0; i < 3; ++i) workload->run(*context);
        EXPECT_EQ(memory.counts().allocations, before.allocations);
        EXPECT_EQ(workload->kv_bytes(), kv_bytes) << "the cache is filled from its beginning";
    }
}

TEST(WorkloadTest, FlopsAndStoredBytes) {
    const std::unique_ptr<Context> context = make_context(available_isas().back());
    const auto make = [&](const AttentionShape& s) { return plan_attention(s, "test").make(*context); };
    const auto prefill = make(shape(Phase::prefill, {4}, {4}));
    EXPECT_EQ(prefill->flops(), 4.0 * 4 * 8 * 10);
    EXPECT_EQ(prefill->bytes(), 512.0);
    EXPECT_EQ(prefill->kv_bytes(), 512U);
    AttentionShape two_layers = shape(Phase::decode, {1}, {100});
    two_layers.layers = 2;
    const auto decode = make(two_layers);
    EXPECT_EQ(decode->flops(), 4.0 * 4 * 8 * 100);
    EXPECT_EQ(decode->bytes(), 100 * 128.0);
    EXPECT_EQ(decode->walk_bytes(), 2 * 100 * 128U);
    // values are padded to 16 floats a row
    EXPECT_EQ(decode->kv_bytes(), 100 * 2 * (8 + 16) * 4U);
    AttentionShape wide = shape(Phase::prefill, {4}, {4});
    wide.value_dim = 24;
    EXPECT_EQ(make(wide)->flops(), 2.0 * 4 * (8 + 24) * 10);

    const auto linear = tools::plan_linear({.rows = 3, .inputs = 5, .outputs = 7, .layers = 2}, "test").make(*context);
    EXPECT_EQ(linear->flops(), 2.0 * 3 * 5 * 7);
    EXPECT_EQ(linear->bytes(), 5 * 7 * 4.0);
    EXPECT_EQ(linear->walk_bytes(), 2 * 5 * 7 * 4U);
}

TEST(WorkloadTest, LayersAreTwiceTheLastCache) {
    AttentionShape s = shape(Phase::decode, {1}, {4096});
    s.heads = s.kv_heads = 8;
    s.head_dim = s.value_dim = 128;
    s.layers = 0;
    const auto layers = [](const AttentionShape& each) {
        return plan_attention(each, "test").shape["layers"].get<std::size_t>();
    };
    const auto cache = static_cast<double>(tools::last_level_cache_bytes());
    EXPECT_GE(static_cast<double>(layers(s)) * live_kv_bytes(s), 2.0 * cache);
    EXPECT_LT(static_cast<double>(layers(s) - 1) * live_kv_bytes(s), 2.0 * cache);
    AttentionShape tiny = shape(Phase::decode, {1}, {1});
    tiny.layers = 0;
    EXPECT_EQ(layers(tiny), 1024U) << "blocks and tables are larger than the rows then";
}

TEST(WorkloadTest, AWrongOutputDoesNotPass) {
    const tools::Deviation fine{1e-6, 1e-5};
    const tools::Deviation wrong{0.1, 1e-5};
    const tools::Deviation nan{std::numeric_limits<double>::quiet_NaN(), 1e-5};
    EXPECT_TRUE(fine.passes());
    EXPECT_FALSE(wrong.passes());
    EXPECT_FALSE(nan.passes());
    EXPECT_FALSE(tools::worse(fine, wrong).passes());
    EXPECT_FALSE(tools::worse(wrong, fine).passes());
    EXPECT_FALSE(tools::worse(tools::worse(fine, nan), wrong).passes());
    EXPECT_FALSE(tools::worse(tools::worse(nan, fine), fine).passes()) << "a NaN is not forgotten";
    EXPECT_FALSE(tools::worse({2e-5, 1e-3}, {2e-5, 1e-5}).passes()) << "by its own tolerance";
}

TEST(WorkloadTest, OutputsAgreeWithTheReference) {
    HEADLONG_FOR_EACH_ISA(isa) {
        const std::unique_ptr<Context> context = make_context(isa, 2);
        std::vector<AttentionShape> shapes{shape(Phase::prefill, {33}, {33}), shape(Phase::prefill, {5, 40}, {5, 40}),
                                           shape(Phase::decode, {1, 1}, {70, 3}), shape(Phase::chunk, {9}, {80})};
        shapes.push_back(shapes.back());
        shapes.back().window = 20;
        shapes.push_back(shapes.front());
        shapes.back().causal = false;
        const std::vector<KvTypes> types{{KvType::f16, KvType::f16},   {KvType::bf16, KvType::f16},
                                         {KvType::int8, KvType::int8}, {KvType::int4, KvType::int4},
                                         {KvType::int8, KvType::f16},  {KvType::f32, KvType::int4}};
        for (std::size_t i = 0, plain = shapes.size(); i < plain; ++i) {  // the same over caches of other types
            for (std::size_t next = i % 2; next < types.size(); next += 2) {
                shapes.push_back(shapes[i]);
                shapes.back().kv = types[next];
            }
        }
        for (const AttentionShape& s : shapes) {
            const auto deviation = plan_attention(s, "test").make(*context)->check(*context);
            ASSERT_TRUE(deviation);
            EXPECT_LE(deviation->max_abs_err, deviation->tolerance);
            EXPECT_GT(deviation->max_abs_err, 0.0) << "float32 differs from double somewhere";
            const bool codes = s.kv.keys > KvType::bf16 || s.kv.values > KvType::bf16;
            EXPECT_LE(deviation->tolerance, codes ? 1e-2 : 1e-4);
        }
        const auto linear = tools::plan_linear({.rows = 3, .inputs = 50, .outputs = 70, .layers = 2}, "test");
        const auto deviation = linear.make(*context)->check(*context);
        ASSERT_TRUE(deviation);
        EXPECT_LE(deviation->max_abs_err, deviation->tolerance);
        EXPECT_GT(deviation->max_abs_err, 0.0);
    }
}

TEST(WorkloadTest, WhatDoesNotFitIsRefused) {
    const AttentionShape s = shape(Phase::decode, {1}, {std::int64_t{1} << 39U});
    try {
        plan_attention(s, "-d 549755813888");
        FAIL();
    } catch (const OutOfMemory& error) {
        EXPECT_NE(std::string(error.what()).find("-d 549755813888"), std::string::npos) << error.what();
    }
    AttentionShape type = shape(Phase::decode, {1}, {10});
    type.kv.keys = static_cast<KvType>(5);
    EXPECT_THROW(plan_attention(type, "test"), InvalidArgument);
}

// ------------------------------------------------------------------------------------------------------- schedule

/// Counts its runs.
class CountingWorkload final : public tools::Workload {
  public:
    explicit CountingWorkload(std::vector<int>& order, int name, bool wrong = false)
        : order_(order), name_(name), wrong_(wrong) {}
    void run(Context& /*context*/) override { order_.push_back(name_); }
    double flops() const override { return 100.0; }
    double bytes() const override { return 10.0; }
    std::size_t kv_bytes() const override { return 11; }
    std::size_t walk_bytes() const override { return 1U << 16U; }
    std::optional<tools::Deviation> check(Context& /*context*/) override {
        return tools::Deviation{wrong_ ? 1.0 : 0.25, 0.5};
    }

  private:
    std::vector<int>& order_;
    int name_;
    bool wrong_;
};

tools::BenchPlan counting_plan(std::vector<int>& order, int workloads) {
    tools::BenchPlan plan;
    for (int w = 0; w < workloads; ++w) {
        plan.workloads.push_back({.shape = {{"phase", "decode"}, {"kv_len", w}, {"kv_type", "f32"}},
                                  .memory_bytes = 1,
                                  .make = [&order, w](Context&) -> std::unique_ptr<tools::Workload> {
                                      return std::make_unique<CountingWorkload>(order, w);
                                  }});
        plan.rows.push_back({.workload = static_cast<std::size_t>(w), .isa = available_isas().back(), .threads = 1});
    }
    return plan;
}

TEST(ScheduleTest, RowsAreInterleaved) {
    std::vector<int> order;
    tools::BenchPlan plan = counting_plan(order, 3);
    plan.repetitions = 12;
    std::size_t calls = 0;
    const std::vector<tools::RowResult> rows = run_bench(plan, [&](std::size_t, std::size_t all, double seconds) {
        ++calls;
        EXPECT_EQ(all, 3U);
        EXPECT_GE(seconds, 0.0);
    });
    ASSERT_EQ(rows.size(), 3U);
    for (const tools::RowResult& row : rows) {
        EXPECT_EQ(row.ns.count(), 12U);
        EXPECT_GT(row.limit_flops, 0.0);
        EXPECT_GT(row.limit_bytes, 0.0);
        EXPECT_GT(row.clock_hz, 0.0);
        EXPECT_LE(row.clock_hz, row.best_clock_hz);
        EXPECT_EQ(row.kv_bytes, 11U);
    }
    EXPECT_EQ(calls, 18U) << "6 turns of each row";
    // a turn is one untimed and two timed runs of one row; each round has one turn of every row
    ASSERT_EQ(order.size(), 54U);
    std::set<std::vector<int>> rounds;
    for (std::size_t round = 0; round < 6; ++round) {
        std::vector<int> names;
        for (std::size_t turn = 0; turn < 3; ++turn) {
            const std::size_t at = (round * 3 + turn) * 3;
            EXPECT_EQ(order[at], order[at + 1]);
            EXPECT_EQ(order[at], order[at + 2]);
            names.push_back(order[at]);
        }
        rounds.insert(names);
        EXPECT_EQ(std::set<int>(names.begin(), names.end()).size(), 3U);
    }
    EXPECT_GT(rounds.size(), 1U) << "the order is drawn anew each round";
}

/// Takes exactly as long as it is told, on the clock that the schedule reads.
class WaitingWorkload final : public tools::Workload {
  public:
    explicit WaitingWorkload(std::chrono::microseconds time) : time_(time) {}
    void run(Context& /*context*/) override {
        const auto until = std::chrono::steady_clock::now() + time_;
        while (std::chrono::steady_clock::now() < until) {
        }
        ++runs;
    }
    double flops() const override { return 1.0; }
    double bytes() const override { return 1.0; }
    std::size_t kv_bytes() const override { return 0; }
    std::size_t walk_bytes() const override { return 1; }
    std::optional<tools::Deviation> check(Context& /*context*/) override { return {}; }
    int runs = 0;

  private:
    std::chrono::microseconds time_;
};

TEST(ScheduleTest, EndsOnceSteady) {
    tools::BenchPlan plan;
    plan.workloads.push_back({.shape = {}, .memory_bytes = 1, .make = [](Context&) -> std::unique_ptr<tools::Workload> {
                                  return std::make_unique<WaitingWorkload>(std::chrono::microseconds(500));
                              }});
    plan.rows.push_back({.workload = 0, .isa = available_isas().back(), .threads = 1});
    const std::vector<tools::RowResult> rows = run_bench(plan);
    EXPECT_GE(rows[0].ns.count(), 10U);
    EXPECT_GE(rows[0].ns.min(), 500e3);
    // steady, or ended by the clock on a machine that others use
    const double spent = rows[0].ns.median() * static_cast<double>(rows[0].ns.count());
    EXPECT_TRUE(rows[0].steady || spent >= 1e9) << rows[0].ns.count();
}

TEST(ScheduleTest, OfLimit) {
    tools::RowResult row;
    row.ns.add({1000.0});
    row.flops = 400.0;
    row.bytes = 100.0;
    row.limit_flops = 1e9;    // 400 ns
    row.limit_bytes = 0.5e9;  // 200 ns
    EXPECT_DOUBLE_EQ(row.of_limit(), 0.4);
    row.limit_bytes = 0.125e9;  // 800 ns
    EXPECT_DOUBLE_EQ(row.of_limit(), 0.8);
    EXPECT_DOUBLE_EQ(row.gflops(), 0.4);
    EXPECT_DOUBLE_EQ(row.gbps(), 0.1);
    row.best_clock_hz = 3e9;
    row.clock_hz = 2.71e9;
    EXPECT_FALSE(row.throttled());
    row.clock_hz = 2.69e9;
    EXPECT_TRUE(row.throttled());
}

// -------------------------------------------------------------------------------------------------------- reports

ordered_json row(const char* phase, int kv_len, double ns, const char* isa = "avx2") {
    return {{"phase", phase}, {"q_len", 1}, {"kv_len", kv_len}, {"head_dim", 8},     {"kv_type", "f32"},
            {"threads", 1},   {"isa", isa}, {"ns_median", ns},  {"throttled", false}};
}

class BenchTest : public CommandLine {
  protected:
    std::string write(const std::string& name, const std::string& text) const {
        const std::string path = (folder_ / name).string();
        std::ofstream(path, std::ios::binary) << text;
        return path;
    }
    /// A stand-in for gnuplot, and how a shell finds it.
    std::string with_gnuplot(const std::string& script) const {
        std::filesystem::create_directory(folder_ / "bin");
        std::filesystem::permissions(write("bin/gnuplot", script), std::filesystem::perms::owner_all);
        return "PATH='" + (folder_ / "bin").string() + "':\"$PATH\"";
    }
    std::string write_report(const std::vector<ordered_json>& rows) const {
        return write("base.json", format_report(tools::Format::json, {}, rows));
    }
    json bench(const std::string& arguments, int code = 0) const {
        const Result result = run("bench " + arguments + " -o json");
        EXPECT_EQ(result.code, code) << arguments << "\n" << result.err;
        json report = json::parse(result.out, nullptr, false);
        EXPECT_FALSE(report.is_discarded()) << result.out;
        return report;
    }
};

TEST_F(BenchTest, CompareMatchesShapesNotInstructionSets) {
    const tools::Baseline base(write_report({row("decode", 10, 200.0, "generic"), row("decode", 20, 300.0, "avx2"),
                                             row("decode", 20, 500.0, "generic"), row("prefill", 10, 1.0)}));
    std::vector<ordered_json> rows{row("decode", 10, 100.0), row("decode", 20, 100.0),
                                   row("decode", 20, 100.0, "generic"), row("decode", 30, 100.0)};
    EXPECT_TRUE(base.has_any(rows));
    base.compare(rows);
    EXPECT_EQ(rows[0]["speedup"], 2.0);
    EXPECT_EQ(rows[1]["speedup"], 3.0) << "the same instruction set where there is one";
    EXPECT_EQ(rows[2]["speedup"], 5.0);
    EXPECT_TRUE(rows[3]["speedup"].is_null());
    const auto matches = [&](const char* field, const ordered_json& value) {
        std::vector<ordered_json> other{row("decode", 10, 100.0)};
        other[0][field] = value;
        return base.has_any(other);
    };
    EXPECT_TRUE(matches("isa", "another"));
    EXPECT_TRUE(matches("layers", 7)) << "follows from the machine";
    EXPECT_FALSE(matches("kv_type", "int8"));
    EXPECT_FALSE(matches("threads", 2));
    EXPECT_FALSE(matches("model", "some"));
    EXPECT_FALSE(matches("lens", {3, 10}));
    EXPECT_FALSE(matches("window", 16));
    EXPECT_FALSE(matches("causal", false));
    EXPECT_FALSE(matches("value_dim", 16));
    // what an older report does not say
    EXPECT_TRUE(matches("window", 0));
    EXPECT_TRUE(matches("causal", true));
    EXPECT_TRUE(matches("value_dim", 8));
    EXPECT_FALSE(tools::Baseline(write("few.json", R"({"rows":[{"phase":"decode","ns_median":1}]})"))
                     .has_any({row("decode", 10, 100.0)}));
}

TEST_F(BenchTest, BrokenBaselines) {
    for (const char* text :
         {"", "[]", "{}", R"({"rows":3})", R"({"rows":[3]})", R"({"rows":[{"phase":"decode"}]})",
          R"({"rows":[{"phase":"decode","ns_median":0}]})", R"({"rows":[{"phase":"decode","ns_median":"x"}]})"}) {
        const std::string path = write("broken.json", text);
        EXPECT_THROW(tools::Baseline{path}, BadFile) << text;
        expect_bad_call("bench attention -d 16 --compare '" + path + "'", {"broken.json"});
    }
}

TEST_F(BenchTest, RowsHaveEveryField) {
    const json report =
        bench("attention --heads 4 --kv-heads 2 --head-dim 8 -p 4 -d 100 --kv f32 -t 1,2 -r 3 --layers 2 --check");
    ASSERT_TRUE(report.contains("machine"));
    for (const char* field :
         {"version", "processor", "architecture", "threads", "caches_kib", "memory_bytes", "compiler"}) {
        EXPECT_TRUE(report["machine"].contains(field)) << field;
    }
    ASSERT_EQ(report["rows"].size(), 4U);
    std::set<std::string> seen;
    for (const json& each : report["rows"]) {
        for (const char* field :
             {"q_len",        "kv_len",     "batch",    "heads",    "kv_heads",      "head_dim",  "threads",
              "samples",      "ns_median",  "ns_min",   "ns_p95",   "ns_p99",        "gflops",    "gbps",
              "limit_gflops", "limit_gbps", "of_limit", "kv_bytes", "scratch_bytes", "clock_ghz", "max_abs_err"}) {
            ASSERT_TRUE(each.contains(field)) << field;
            EXPECT_TRUE(each[field].is_number()) << field;
        }
        EXPECT_TRUE(each["throttled"].is_boolean());
        EXPECT_EQ(each["kv_type"], "f32");
        EXPECT_EQ(each["isa"], to_string(available_isas().back()));
        EXPECT_EQ(each["samples"], 3);
        EXPECT_GT(each["scratch_bytes"], 0);
        const bool prefill = each["phase"] == "prefill";
        EXPECT_EQ(each["phase"], prefill ? "prefill" : "decode");
        EXPECT_EQ(each["q_len"], prefill ? 4 : 1);
        EXPECT_EQ(each["kv_len"], prefill ? 4 : 100);
        // 4 heads of 8: prefill 10 pairs, decode 100; 128 bytes a token
        const double flops = prefill ? 4.0 * 4 * 8 * 10 : 4.0 * 4 * 8 * 100;
        const double bytes = prefill ? 512.0 : 12'800.0;
        const double ns = each["ns_median"];
        EXPECT_EQ(each["flops"], flops);
        EXPECT_EQ(each["bytes"], bytes);
        EXPECT_NEAR(each["gflops"].get<double>(), flops / ns, 1e-9 * flops / ns);
        EXPECT_NEAR(each["gbps"].get<double>(), bytes / ns, 1e-9 * bytes / ns);
        const double limit =
            std::max(flops / each["limit_gflops"].get<double>(), bytes / each["limit_gbps"].get<double>());
        EXPECT_NEAR(each["of_limit"].get<double>(), limit / ns, 1e-9 * limit / ns);
        EXPECT_LE(each["ns_min"], each["ns_median"]);
        EXPECT_LE(each["ns_median"], each["ns_p95"]);
        EXPECT_LE(each["ns_p95"], each["ns_p99"]);
        seen.insert(each["phase"].get<std::string>() + each["threads"].dump());
    }
    EXPECT_EQ(seen, std::set<std::string>({"decode1", "decode2", "prefill1", "prefill2"}));
}

TEST_F(BenchTest, OnlyRowsAskedFor) {
    const std::string small = "attention --heads 2 --kv-heads 1 --head-dim 8 -t 1 -r 1 --layers 1 ";
    const auto phases = [&](const std::string& arguments) {
        std::vector<std::string> result;
        const json report = bench(small + arguments);
        for (const json& each : report["rows"]) {
            result.push_back(each["phase"].get<std::string>() + " " + each["q_len"].dump() + " " +
                             each["kv_len"].dump() + " " + each["batch"].dump());
        }
        return result;
    };
    using Phases = std::vector<std::string>;
    EXPECT_EQ(phases("-p 3-6+3"), Phases({"prefill 3 3 1", "prefill 6 6 1"}));
    EXPECT_EQ(phases("-d 4-16*2"), Phases({"decode 1 4 1", "decode 1 8 1", "decode 1 16 1"}));
    EXPECT_EQ(phases("-p 5 -d 9 -q 4 -b 3"), Phases({"prefill 5 5 3", "chunk 4 9 3"}));
    EXPECT_EQ(phases("--lens 3,9,3"), Phases({"prefill 9 9 3", "decode 1 9 3"}));
    EXPECT_EQ(phases("--lens 3,9 -q 1"), Phases({"decode 1 9 2"}));
    EXPECT_EQ(phases("--lens 3,9 -q 2"), Phases({"chunk 2 9 2"}));
}

TEST_F(BenchTest, ShapesFromPresetsAndConfigs) {
    const json preset = bench("attention --preset smollm2-135m -d 20 -r 1 -t 1 --layers 1")["rows"][0];
    EXPECT_EQ(preset["heads"], 9);
    EXPECT_EQ(preset["kv_heads"], 3);
    EXPECT_EQ(preset["head_dim"], 64);
    const std::string path = write("config.json", R"({"n_head": 4, "n_embd": 32, "n_layer": 1})");
    const json config = bench("attention --config '" + path + "' -d 20 -r 1 -t 1 --layers 1")["rows"][0];
    EXPECT_EQ(config["heads"], 4);
    EXPECT_EQ(config["head_dim"], 8);
}

TEST_F(BenchTest, Formats) {
    const std::string arguments = "bench attention --heads 2 --kv-heads 1 --head-dim 8 -d 8,16 -t 1 -r 1 --layers 1";
    const Result md = run(arguments);
    EXPECT_EQ(md.code, 0);
    EXPECT_EQ(md.err, "") << "progress goes to a terminal alone";
    EXPECT_NE(md.out.find("| phase  |"), std::string::npos) << md.out;
    EXPECT_EQ(std::ranges::count(md.out, '\n'), 6) << md.out;
    const Result csv = run(arguments + " -o csv");
    EXPECT_EQ(std::ranges::count(csv.out, '\n'), 3) << csv.out;
    std::istringstream csv_lines(csv.out);
    std::set<std::ptrdiff_t> commas;
    for (std::string line; std::getline(csv_lines, line);) commas.insert(std::ranges::count(line, ','));
    EXPECT_EQ(commas.size(), 1U) << csv.out;
    const Result jsonl = run(arguments + " -o jsonl");
    std::istringstream lines(jsonl.out);
    int count = 0;
    for (std::string line; std::getline(lines, line); ++count) EXPECT_EQ(json::parse(line)["phase"], "decode");
    EXPECT_EQ(count, 2);
    const std::string out = (folder_ / "report.json").string();
    const Result file = run(arguments + " -o json --out '" + out + "'");
    EXPECT_EQ(file.out, "");
    EXPECT_EQ(json::parse(contents(out))["rows"].size(), 2U);
}

TEST_F(BenchTest, CsvQuotes) {
    const std::string text =
        format_report(tools::Format::csv, {}, {{{"a", "x,\"y\""}, {"lens", {1, 2}}}, {{"b", nullptr}}});
    EXPECT_EQ(text, "a,lens,b\n\"x,\"\"y\"\"\",1 2,\n,,\n");
}

TEST_F(BenchTest, CompareAndFail) {
    const std::string arguments = "attention --heads 2 --kv-heads 1 --head-dim 8 -d 64 -t 1 -r 3 --layers 1";
    json report = bench(arguments);
    const auto with_base = [&](double ns, const std::string& more) {
        report["rows"][0]["ns_median"] = ns;
        report["rows"][0]["ns_min"] = ns;
        report["rows"][0]["throttled"] = false;
        report["rows"][0]["isa"] = "another";
        return run("bench " + arguments + " -o json --compare '" + write("base.json", report.dump()) + "' " + more);
    };
    const Result faster = with_base(1e12, "--fail-below 0.95");
    const json row = json::parse(faster.out)["rows"][0];
    EXPECT_GT(row["speedup"], 1.0);
    if (row["throttled"] == false) {
        EXPECT_EQ(faster.code, 0) << faster.err;
    }
    EXPECT_EQ(row["base_ns_median"], 1e12);
    const Result slower = with_base(1e-3, "--fail-below 0.95");
    EXPECT_EQ(slower.code, 1);
    const json slow = json::parse(slower.out)["rows"][0];
    const bool judged = slow["throttled"] == false;
    EXPECT_NE(slower.err.find(judged ? "times as fast as in" : "could be judged"), std::string::npos) << slower.err;
    EXPECT_LT(slow["speedup_retried"], 0.95) << "it had its chances";
    EXPECT_EQ(with_base(1e-3, "").code, 0) << "compared, not judged";
    EXPECT_FALSE(json::parse(slower.out)["rows"].empty()) << "the report is written all the same";
    expect_bad_call("bench attention --heads 2 --kv-heads 1 --head-dim 8 -d 65 -t 1 -r 1 --layers 1 --compare '" +
                        (folder_ / "base.json").string() + "'",
                    {"none of these rows"});
}

TEST_F(BenchTest, LinearLayers) {
    const json row = bench("linear --shape 3x16x40 -t 1 -r 2 --layers 1 --check")["rows"][0];
    EXPECT_EQ(row["phase"], "linear");
    EXPECT_EQ(row["flops"], 2.0 * 3 * 16 * 40);
    EXPECT_EQ(row["bytes"], 4.0 * 16 * 40);
    EXPECT_LE(row["max_abs_err"], row["tolerance"]);

    // live bytes of every type, int8 with a scale per output and group of 64 inputs; the check knows the types
    const json report = bench("linear --shape 20x130x40 --weights f32,f16,bf16,int8 -t 1 -r 2 --layers 1 --check");
    const std::vector<std::pair<std::string, double>> bytes{
        {"f32", 4.0 * 130 * 40}, {"f16", 2.0 * 130 * 40}, {"bf16", 2.0 * 130 * 40}, {"int8", 130 * 40 + 4.0 * 3 * 40}};
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        const json& each = report["rows"][i];
        EXPECT_EQ(each["weights"], bytes[i].first);
        EXPECT_EQ(each["bytes"], bytes[i].second);
        EXPECT_LE(each["max_abs_err"], each["tolerance"]) << each["weights"];
        if (bytes[i].first == "int8") {
            EXPECT_GT(each["max_abs_err"], 1e-6) << "not the arithmetic of floats";
        }
    }
}

TEST_F(BenchTest, Models) {
    const json report = bench("model -p 8 -d 16 -n 2 -t 1 -r 2");
    ASSERT_EQ(report["rows"].size(), 2U);
    // hidden size 192, 6 heads of 32 over 2, 512 in the MLP, 1024 tokens, 6 layers
    constexpr double kLayer = 192 * 192 + 2 * 192 * 64 + 192 * 192 + 3 * 192 * 512;
    constexpr double kHead = 192 * 1024;
    const auto expect_flops = [](const json& row, double linear_and_attention) {
        // norms, rotary and activations are small beside them
        EXPECT_GT(row["flops"], linear_and_attention);
        EXPECT_LT(row["flops"], 1.05 * linear_and_attention);
    };
    const json& prefill = report["rows"][0];
    EXPECT_EQ(prefill["phase"], "prefill");
    EXPECT_EQ(prefill["model"], "embedded");
    EXPECT_EQ(prefill["q_len"], 8);
    expect_flops(prefill, 8 * 2 * 6 * kLayer + 2 * kHead + 6 * 4 * 6 * 32 * 36);
    EXPECT_NEAR(prefill["tokens_per_s"].get<double>() * prefill["ns_median"].get<double>(), 8e9, 1.0);
    const json& decode = report["rows"][1];
    EXPECT_EQ(decode["phase"], "decode");
    EXPECT_EQ(decode["kv_len"], 16);
    EXPECT_EQ(decode["steps"], 2);
    expect_flops(decode, 2 * 2 * (6 * kLayer + kHead) + 6 * 4 * 6 * 32 * (16 + 17));
    EXPECT_NEAR(decode["tokens_per_s"].get<double>() * decode["ns_median"].get<double>(), 2e9, 1.0);
    expect_bad_call("bench model /nowhere", {"/nowhere/config.json"});
    expect_bad_call("bench model -p 2000", {"-p 2000", "1024"});
    expect_bad_call("bench model -d 1024 -n 2", {"-d 1024 -n 2", "1024"});
    expect_bad_call("bench model -n 0", {"-n is 0"});
}

TEST_F(BenchTest, TypesOfTheCacheAreRows) {
    const json rows = bench(
        "attention --heads 4 --kv-heads 2 --head-dim 16 -p 70 -d 100 --kv f32,f16,bf16:f32,int8,int4,int8:f16 -t 1 "
        "-r 1 --layers 1 --check")["rows"];
    // bytes of a key and a value; codes have a scale each
    const std::vector<std::pair<std::string, std::size_t>> want{
        {"f32", 16 * 8}, {"f16", 16 * 4}, {"bf16:f32", 16 * 6}, {"int8", 2 * 20}, {"int4", 2 * 12}, {"int8:f16", 52}};
    ASSERT_EQ(rows.size(), 2 * want.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::size_t tokens = i % 2 == 0 ? 70 : 100;
        EXPECT_EQ(rows[i]["kv_type"], want[i / 2].first);
        EXPECT_EQ(rows[i]["phase"], i % 2 == 0 ? "prefill" : "decode");
        EXPECT_EQ(rows[i]["kv_bytes"], tokens * 2 * want[i / 2].second);
        EXPECT_EQ(rows[i]["bytes"].get<double>(), static_cast<double>(tokens * 2 * want[i / 2].second));
        EXPECT_LE(rows[i]["max_abs_err"], rows[i]["tolerance"]);
    }
    const json chunk = bench(
        "attention --heads 4 --kv-heads 2 --head-dim 16 -d 100 -q 30 --kv f16 -t 1 -r 1 --layers 1 "
        "--check")["rows"][0];
    EXPECT_EQ(chunk["phase"], "chunk");
    EXPECT_EQ(chunk["kv_type"], "f16");
    EXPECT_EQ(chunk["kv_bytes"], 100 * 2 * 16 * 4);

    const json models = bench("model -p 8 -d 16 --kv f32,f16,int8 -t 1 -r 1")["rows"];
    ASSERT_EQ(models.size(), 6U);
    for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(models[i + 4]["kv_type"], "int8");
        // 32 floats or codes and a scale
        EXPECT_EQ(models[i + 4]["kv_bytes"].get<std::size_t>() * 128, models[i]["kv_bytes"].get<std::size_t>() * 36);
        EXPECT_EQ(models[i]["kv_type"], "f32");
        EXPECT_EQ(models[i + 2]["kv_type"], "f16");
        EXPECT_EQ(models[i + 2]["kv_bytes"].get<std::size_t>() * 2, models[i]["kv_bytes"].get<std::size_t>());
        // appended and read: 6 layers, 2 KV heads, 64 elements a token, 2 bytes less each
        const std::size_t tokens = i == 0 ? 8 + 8 : 1 + 16;
        EXPECT_EQ(models[i]["bytes"].get<double>() - models[i + 2]["bytes"].get<double>(),
                  static_cast<double>(tokens * 6 * 2 * 64 * 2));
    }
}

TEST_F(BenchTest, BadCalls) {
    const std::string a = "bench attention ";
    expect_bad_call("bench", {"subcommand"});
    expect_bad_call(a + "--nope", {"--nope"});
    expect_bad_call(a + "-p 0", {"-p"});
    expect_bad_call(a + "-d 1-x", {"-d", "1-x"});
    expect_bad_call(a + "-d 99999999999", {"-d 99999999999", "GiB"});
    expect_bad_call(a + "-p 99999999999", {"-p 99999999999", "GiB"});
    expect_bad_call(a + "-q 5", {"-q", "-d"});
    expect_bad_call(a + "-q 50 -d 49", {"-q is 50", "49"});
    expect_bad_call(a + "-b 2 --lens 3,4", {"-b", "--lens"});
    expect_bad_call(a + "-d 5 --lens 3,4", {"--lens", "-d"});
    expect_bad_call(a + "--heads 0", {"--heads is 0"});
    expect_bad_call(a + "--heads 3 --kv-heads 2", {"--kv-heads is 2", "3 heads"});
    expect_bad_call(a + "--head-dim -4", {"--head-dim"});
    expect_bad_call(a + "--preset nope", {"nope", "Qwen3-8B"});
    expect_bad_call(a + "--preset GPT-2 --heads 3", {"--preset", "--heads"});
    expect_bad_call(a + "--config /nowhere/config.json", {"/nowhere/config.json"});
    expect_bad_call(a + "--config '" +
                        write("zero.json", R"({"num_attention_heads": 0, "hidden_size": 64, "num_hidden_layers": 2})") +
                        "'",
                    {"zero.json", "num_attention_heads", "0"});
    expect_bad_call(a + "--kv f33", {"--kv is 'f33'", "no type", "f32, f16, bf16, int8 and int4"});
    expect_bad_call(a + "--kv f16,f32:int2", {"'int2'", "no type", "f32, f16, bf16, int8 and int4"});
    expect_bad_call("bench model --kv int9", {"--kv is 'int9'", "no type", "f32, f16, bf16, int8 and int4"});
    expect_bad_call(a + "-t 0", {"-t"});
    expect_bad_call(a + "--isa mmx", {"mmx"});
    expect_bad_call(a + "-o xml", {"xml", "jsonl"});
    expect_bad_call(a + "-r 0", {"-r is 0"});
    expect_bad_call(a + "--window 0", {"--window is 0"});
    expect_bad_call(a + "--fail-below 0.9", {"--fail-below", "--compare"});
    expect_bad_call(a + "--compare /nowhere/base.json", {"/nowhere/base.json"});
    expect_bad_call(a + "--plot a.gif", {"a.gif", ".svg"});
    expect_bad_call(a + "--plot a.svg", {"gnuplot"}, "PATH=/nowhere");
    expect_bad_call(a + "--out /nowhere/report.json", {"/nowhere/report.json"});
    expect_bad_call("bench linear --shape 3x4", {"3x4", "MxKxN"});
    expect_bad_call("bench linear --shape 3x0x4", {"3x0x4"});
    expect_bad_call("bench linear --shape 9999999x9999999x9999999", {"GiB"});
    expect_bad_call("bench linear --shape 1x2x3,", {"--shape holds ''"});
    expect_bad_call("bench linear --weights int2", {"--weights", "int2", "f32, f16, bf16, int8 and int4"});
    expect_bad_call("bench linear --weights f32,", {"--weights"});
    expect_bad_call("bench linear --plot /nowhere/a.svg", {"--plot /nowhere/a.svg"}, with_gnuplot("#!/bin/sh\n"));
    expect_bad_call("bench model -p 8 -n 4", {"-n", "-d"});
    expect_bad_call(a + "-b 65536 -d 1-1000", {"sequences"});
    expect_bad_call(a + "-d 1-1000 -t 1-1000 --heads 1 --kv-heads 1 --head-dim 1 --layers 1", {"1000000 rows"});
    for (const char* option : {"--heads", "-p", "-d", "-t", "--isa", "--out", "--preset", "--lens"}) {
        expect_bad_call(a + option + " ''", {"is empty"});
    }
    expect_bad_call("bench model ''", {"is empty"});
    // what cannot be told is no reason to end otherwise
    EXPECT_EQ(run("bench attention -d 0", "exec 2>&-;").code, 2);
}

TEST_F(BenchTest, PlotProgram) {
    const ordered_json decode = {{"phase", "decode"}, {"q_len", 1},    {"kv_len", 64},  {"batch", 1},
                                 {"heads", 2},        {"kv_heads", 1}, {"head_dim", 8}, {"kv_type", "f32"},
                                 {"threads", 1},      {"isa", "avx2"}, {"gbps", 3.5},   {"gflops", 7.0},
                                 {"of_limit", 0.5}};
    const std::string program = tools::plot_program("svg", {decode});
    EXPECT_NE(program.find("set terminal svg"), std::string::npos);
    EXPECT_NE(program.find("64 3.5 0.5\n"), std::string::npos) << program;
    EXPECT_EQ(program.find("GFLOP/s"), std::string::npos) << "no row is measured in it";
}

TEST_F(BenchTest, Plot) {
    const auto draw = [&](const std::string& name, const std::string& before) {
        const Result result =
            run("bench attention --heads 2 --kv-heads 1 --head-dim 8 -p 8 -d 8,16 -t 1 -r 1 --layers 1 --plot '" +
                    (folder_ / name).string() + "'",
                before);
        EXPECT_EQ(result.code, 0) << result.err;
        EXPECT_EQ(result.err, "");
        return contents((folder_ / name).string());
    };
    const std::string path = with_gnuplot("#!/bin/sh\ncat \"$1\"\n");  // shows the program it was given
    EXPECT_NE(draw("plot.svg", path).find("set terminal svg"), std::string::npos);
    EXPECT_NE(draw("plot.png", path).find("set terminal pngcairo"), std::string::npos);
    // neither gnuplot nor a shell takes the name for more than a name
    EXPECT_NE(draw("|touch pwned;cat>x.svg", path).find("set terminal svg"), std::string::npos);
    EXPECT_EQ(contents((folder_ / "plot.svg").string()).find("touch"), std::string::npos);
    if (std::system("command -v gnuplot >/dev/null") == 0) {
        EXPECT_NE(draw("real.svg", "").find("<svg"), std::string::npos);
        EXPECT_NE(draw("real.png", "").find("PNG"), std::string::npos);
    }
    write("bin/gnuplot", "#!/bin/sh\nexit 1\n");
    const Result fails =
        run("bench attention --heads 2 -d 8 -t 1 -r 1 --layers 1 --plot '" + (folder_ / "no.svg").string() + "'", path);
    EXPECT_EQ(fails.code, 2);
    EXPECT_NE(fails.err.find("gnuplot could not draw it"), std::string::npos) << fails.err;
}

}  // namespace
}  // namespace headlong::test
