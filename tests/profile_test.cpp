// headlong profile, and what it is made of: the decoder's log, the timed executor, the memory there is.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <headlong/error.hpp>
#include <headlong/model.hpp>

#include "engine/decoder.hpp"
#include "engine/model_impl.hpp"
#include "tests/support/command_line.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/operator_new.hpp"
#include "tests/support/shared_data.hpp"
#include "tools/measure/memory.hpp"
#include "tools/profile/recorder.hpp"
#include "tools/profile/report.hpp"
#include "tools/profile/timed_executor.hpp"

namespace headlong::test {
namespace {

using nlohmann::json;
using tools::Recorder;
using tools::TimedExecutor;

std::string austen() { return (source_dir() / "tools" / "models" / "austen").string(); }
constexpr std::int64_t kLayers = 6;
constexpr std::int64_t kVocab = 1024;

struct Event {
    Operation operation;
    std::int64_t layer;
    Work work;
};

class CollectingLog final : public ForwardLog {
  public:
    void begin(Operation operation, std::int64_t layer, const Work& work) noexcept override {
        EXPECT_EQ(ends, 0) << "nothing begins after the end";
        events.push_back({operation, layer, work});
    }
    void end() noexcept override { ++ends; }

    Work sum(Operation operation) const {
        Work sum;
        for (const Event& event : events) {
            if (event.operation != operation) continue;
            sum.flops += event.work.flops;
            sum.bytes += event.work.bytes;
        }
        return sum;
    }

    std::vector<Event> events;
    int ends = 0;
};

/// Logits of the last `rows` of the tokens, appended to the cache.
std::vector<float> forward(Context& context, const Model& model, KvCache& cache,
                           const std::vector<std::int32_t>& tokens, std::int64_t rows, ForwardLog* log) {
    std::vector<float> logits(static_cast<std::size_t>(rows * kVocab));
    model.impl().decoder.forward(context, tokens, cache, logits.data(), rows, kVocab, {.log = log});
    return logits;
}

void expect_work(const CollectingLog& log, Operation operation, std::uint64_t flops, std::uint64_t bytes) {
    const Work work = log.sum(operation);
    EXPECT_EQ(work.flops, flops) << to_string(operation);
    EXPECT_EQ(work.bytes, bytes) << to_string(operation);
}

// Hidden size 192, 6 heads of 32, 2 KV heads, 512 in the MLP, 1,024 tokens, 6 layers, bf16 in the file and in memory.
TEST(ProfileLogTest, WorkOfTheEmbeddedModelIsCounted) {
    constexpr std::uint64_t kWeights = 192 * 192 + 2 * 192 * 64 + 192 * 192 + 3 * 192 * 512;  // of a layer
    const auto context = make_context(available_isas().back(), 2);
    const Model model(*context, austen());
    EXPECT_EQ(Decoder::weight_bytes(model.impl().decoder.config()), 2 * (6 * kWeights + 192 * 1024));
    KvCache cache(model.cache_options());

    CollectingLog prefill;
    forward(*context, model, cache, {1, 2, 3, 4, 5}, 2, &prefill);
    EXPECT_EQ(prefill.ends, 1);
    expect_work(prefill, Operation::reserve, 0, 0);
    expect_work(prefill, Operation::embedding, 0, 5 * 192 * 2);
    expect_work(prefill, Operation::norm, 4 * 192 * (5 * 12 + 2), 13 * 192 * 4);
    expect_work(prefill, Operation::projection, 6 * 2 * kWeights * 5, 6 * kWeights * 2);
    expect_work(prefill, Operation::append, 0, 6 * 5 * 2 * 64 * 4);
    expect_work(prefill, Operation::attention, 6 * 4 * 6 * 32 * (1 + 2 + 3 + 4 + 5), 6 * 5 * 2 * 64 * 4);
    expect_work(prefill, Operation::activation, 6 * 5 * 512 * 5, 0);
    expect_work(prefill, Operation::output_head, 2 * 192 * 1024 * 2, 192 * 1024 * 2);

    CollectingLog step;
    forward(*context, model, cache, {6}, 1, &step);
    expect_work(step, Operation::projection, 6 * 2 * kWeights, 6 * kWeights * 2);
    expect_work(step, Operation::append, 0, 6 * 1 * 2 * 64 * 4);
    expect_work(step, Operation::attention, 6 * 4 * 6 * 32 * 6, 6 * 6 * 2 * 64 * 4);
}

TEST(ProfileLogTest, BytesOfKeysAndValuesAreThoseOfTheCache) {
    const auto context = make_context(available_isas().back());
    const Model model(*context, austen());
    // of a key and a value of 32 elements: one scale each with codes
    for (const auto& [types, pair_bytes] : {std::pair{KvTypes{}, 32 * 8},
                                            {KvTypes{KvType::f16, KvType::bf16}, 32 * 4},
                                            {KvTypes{KvType::f16, KvType::f32}, 32 * 6},
                                            {KvTypes{KvType::int8, KvType::int8}, 2 * 36},
                                            {KvTypes{KvType::int4, KvType::f16}, 20 + 64}}) {
        KvCache cache(model.cache_options(types));
        CollectingLog prefill;
        forward(*context, model, cache, {1, 2, 3, 4, 5}, 1, &prefill);
        const auto token = static_cast<std::uint64_t>(6 * 2 * pair_bytes);
        expect_work(prefill, Operation::append, 0, 5 * token);
        expect_work(prefill, Operation::attention, 6 * 4 * 6 * 32 * (1 + 2 + 3 + 4 + 5), 5 * token);
        CollectingLog step;
        forward(*context, model, cache, {6}, 1, &step);
        expect_work(step, Operation::append, 0, token);
        expect_work(step, Operation::attention, 6 * 4 * 6 * 32 * 6, 6 * token);
    }
}

TEST(ProfileLogTest, OperationsComeInOrder) {
    using enum Operation;
    const auto context = make_context(available_isas().back());
    const Model model(*context, austen());
    KvCache cache(model.cache_options());
    CollectingLog log;
    forward(*context, model, cache, {1, 2}, 1, &log);
    std::vector<std::pair<Operation, std::int64_t>> want{{reserve, -1}, {embedding, -1}};
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
        for (const Operation operation : {norm, projection, projection, projection, append, attention, projection, norm,
                                          projection, projection, activation, projection}) {
            want.emplace_back(operation, layer);
        }
    }
    want.emplace_back(norm, -1);
    want.emplace_back(output_head, -1);
    std::vector<std::pair<Operation, std::int64_t>> got;
    for (const Event& event : log.events) got.emplace_back(event.operation, event.layer);
    EXPECT_EQ(got, want);
}

TEST(ProfileLogTest, EveryCallEnds) {
    const auto context = make_context(available_isas().back());
    const Model model(*context, austen());
    KvCacheOptions options = model.cache_options();
    options.capacity = 3;
    KvCache cache(options);
    CollectingLog full;
    EXPECT_THROW(forward(*context, model, cache, {1, 2, 3, 4}, 1, &full), OutOfMemory);
    EXPECT_EQ(full.ends, 1);
    EXPECT_EQ(full.events.size(), 1U);
    CollectingLog nothing;
    forward(*context, model, cache, {}, 0, &nothing);
    EXPECT_EQ(nothing.ends, 1);
    CollectingLog no_logits;
    forward(*context, model, cache, {1, 2}, 0, &no_logits);
    EXPECT_EQ(no_logits.ends, 1);
    EXPECT_EQ(no_logits.sum(Operation::output_head).flops, 0U);
}

std::unique_ptr<Context> timed_context(Isa isa, const std::shared_ptr<TimedExecutor>& executor) {
    ContextOptions options;
    options.isa = isa;
    options.executor = executor;
    return std::make_unique<Context>(options);
}

TEST(ProfileLogTest, LogitsHaveTheSameBits) {
    std::vector<std::int32_t> prompt;
    for (std::int32_t i = 0; i < (emulated() ? 20 : 150); ++i) prompt.push_back(i * 37 % 1024);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto plain = make_context(isa);
        const Model model(*plain, austen());
        KvCache cache(model.cache_options());
        const std::vector<float> want = forward(*plain, model, cache, prompt, 3, nullptr);
        const std::vector<float> want_next = forward(*plain, model, cache, {7}, 1, nullptr);
        for (const std::size_t threads : {1U, 2U}) {
            allow_threads(threads);
            const auto executor =
                std::make_shared<TimedExecutor>(threads == 1 ? make_serial_executor() : make_tbb_executor(threads));
            const auto context = timed_context(isa, executor);
            Recorder recorder(*executor, kLayers);
            KvCache logged(model.cache_options());
            recorder.start();
            EXPECT_TRUE(same_bits(want, forward(*context, model, logged, prompt, 3, &recorder)));
            EXPECT_TRUE(same_bits(want_next, forward(*context, model, logged, {7}, 1, &recorder)));
            recorder.stop();
        }
    }
}

TEST(ProfileExecutorTest, EveryTaskIsRunOnceAndKeptUpToTheCapacity) {
    allow_threads(2);
    TimedExecutor executor(make_tbb_executor(2));
    EXPECT_EQ(executor.concurrency(), 2U);
    EXPECT_GE(executor.worker_slots(), 2U);
    std::array<int, 100> runs{};
    const auto body = [](void* state, std::size_t task, std::size_t) noexcept { ++static_cast<int*>(state)[task]; };
    const auto kept = [&] {
        std::size_t count = 0;
        for (std::size_t worker = 0; worker < executor.worker_slots(); ++worker) {
            const auto& tasks = executor.kept_tasks(worker);
            count += tasks.size();
            for (std::size_t i = 0; i < tasks.size(); ++i) {
                EXPECT_LE(tasks[i].begin, tasks[i].end);
                if (i == 0) continue;
                EXPECT_LE(tasks[i - 1].end, tasks[i].begin) << "a worker does one task at a time";
            }
        }
        return count;
    };
    executor.run(100, body, runs.data());
    EXPECT_EQ(kept(), 0U);
    executor.keep_tasks(70);
    executor.run(100, body, runs.data());
    executor.keep_tasks(0);
    executor.run(100, body, runs.data());
    for (const int count : runs) EXPECT_EQ(count, 3);
    EXPECT_EQ(executor.tasks(), 300U);
    EXPECT_EQ(kept() + executor.dropped_tasks(), 100U);
    EXPECT_GE(executor.take_waiting().count(), 0);
    EXPECT_EQ(executor.take_waiting().count(), 0);
}

TEST(ProfileExecutorTest, SegmentsFollowEachOtherWithoutGapsOrAllocations) {
    const auto executor = std::make_shared<TimedExecutor>(make_serial_executor());
    const auto context = timed_context(available_isas().back(), executor);
    const Model model(*context, austen());
    KvCache cache(model.cache_options());
    const std::vector<std::int32_t> prompt(20, 3);
    std::vector<float> logits(static_cast<std::size_t>(kVocab));
    const auto allocations_of = [&](ForwardLog* log) {
        cache.reset();
        const std::size_t before = operator_new_calls();
        model.impl().decoder.forward(*context, prompt, cache, logits.data(), 1, kVocab, {.log = log});
        return operator_new_calls() - before;
    };
    allocations_of(nullptr);  // makes the scratch
    const std::size_t usual = allocations_of(nullptr);
    executor->keep_tasks(executor->tasks());
    Recorder recorder(*executor, kLayers);
    recorder.keep_segments(1000);
    recorder.start();
    EXPECT_EQ(allocations_of(&recorder), usual);
    recorder.stop();
    EXPECT_EQ(executor->dropped_tasks(), 0U);
    const std::vector<tools::Segment>& segments = recorder.kept_segments();
    EXPECT_EQ(segments.size(), recorder.segments());
    ASSERT_EQ(segments.size(), 2U + 12U * kLayers + 2U + 2U) << "one before forward(), one after";
    tools::Clock::duration sum{};
    for (tools::Kind kind = 0; kind < tools::kKinds; ++kind) {
        sum += recorder.totals(kind).time + recorder.totals(kind).waiting;
    }
    EXPECT_EQ(sum, segments.back().end - segments.front().begin);
    for (std::size_t i = 1; i < segments.size(); ++i) EXPECT_EQ(segments[i - 1].end, segments[i].begin);
    for (const TimedExecutor::Task& task : executor->kept_tasks(0)) {
        EXPECT_GE(task.begin, segments.front().begin);
        EXPECT_LE(task.end, segments.back().end);
    }
}

TEST(ProfileReportTest, RatesAreOverTheWallTimeOfAKind) {
    tools::ProfileReport report;
    report.limit_flops = 4e9;
    report.limit_bytes = 1e9;
    report.decode_steps = 0;
    report.prefill.name = "prefill";
    report.prefill.tokens = 5;
    report.prefill.wall_seconds = 1.0;
    // three of four threads had nothing to do: the rate is that of one
    report.prefill.parts = {{"projection", 1, 0.25, 2'000'000'000, 100'000'000, 0.75},
                            {.kind = "waiting", .seconds = 0.75}};
    const json parts = json::parse(to_json(report, false).dump())["prefill"]["parts"];
    EXPECT_EQ(parts[0]["seconds"], 0.25);
    EXPECT_EQ(parts[0]["waiting_seconds"], 0.75);
    EXPECT_EQ(parts[0]["share"], 0.25) << "shares are without waiting, and add up with its own";
    EXPECT_NEAR(parts[0]["gflops"].get<double>(), 2.0, 1e-9);
    EXPECT_NEAR(parts[0]["gbps"].get<double>(), 0.1, 1e-9);
    EXPECT_NEAR(parts[0]["of_limit"].get<double>(), 0.5, 1e-9);
    EXPECT_EQ(parts[1]["waiting_seconds"], 0.0);
    EXPECT_TRUE(parts[1]["of_limit"].is_null());
    EXPECT_TRUE(holds(to_text(report, false), "750.000      2.00     0.10     50.0%")) << to_text(report, false);
}

TEST(ProfileMemoryTest, TheMachineAndItsCgroupsAreRead) {
    namespace fs = std::filesystem;
    const fs::path root = fs::temp_directory_path() / ("headlong-memory-" + std::to_string(::getpid()));
    const auto write = [&](const fs::path& file, const std::string& text) {
        fs::create_directories((root / file).parent_path());
        std::ofstream(root / file) << text;
    };
    const auto total = [&] { return tools::total_memory(root.string()); };
    const auto available = [&] { return tools::available_memory(root.string()); };
    EXPECT_EQ(total(), UINT64_MAX) << "nothing is known";
    EXPECT_EQ(available(), UINT64_MAX);
    write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:         1 kB\nMemAvailable:    600 kB\n");
    EXPECT_EQ(total(), 1000U * 1024);
    EXPECT_EQ(available(), 600U * 1024);
    write("proc/self/cgroup", "4:memory:/x\n0::/a/b\n");
    write("sys/fs/cgroup/a/b/memory.max", "max\n");
    write("sys/fs/cgroup/a/b/memory.current", "5000\n");
    EXPECT_EQ(total(), 1000U * 1024) << "no limit";
    write("sys/fs/cgroup/a/memory.max", "400000\n");
    write("sys/fs/cgroup/a/memory.current", "300000\n");
    EXPECT_EQ(total(), 400000U) << "an ancestor's";
    EXPECT_EQ(available(), 100000U);
    write("sys/fs/cgroup/a/memory.stat", "anon 100000\ninactive_file 150000\nactive_file 50000\n");
    EXPECT_EQ(available(), 250000U) << "pages of files are given up first";
    write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "200000\n");
    write("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "210000\n");
    EXPECT_EQ(total(), 200000U) << "version 1";
    EXPECT_EQ(available(), 0U) << "over the limit";
    write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n");
    EXPECT_EQ(total(), 400000U);
    EXPECT_GT(tools::available_memory(), 0U);
    EXPECT_LE(tools::available_memory(), tools::total_memory());
    fs::remove_all(root);
}

/// Runs the binary, and makes model folders for it.
class ProfileCommandTest : public CommandLine {
  protected:
    /// The embedded model, with other settings in config.json.
    std::string model(const json& changes) const {
        const std::filesystem::path folder = folder_ / "model";
        std::filesystem::create_directories(folder);
        for (const char* name : {"model.safetensors", "tokenizer.json"}) {
            std::error_code exists;
            std::filesystem::create_symlink(std::filesystem::path(austen()) / name, folder / name, exists);
        }
        json config = json::parse(contents(austen() + "/config.json"));
        config.update(changes);
        std::ofstream(folder / "config.json") << config;
        return "'" + folder.string() + "'";
    }

    json profile(const std::string& arguments) const {
        const Result result = run("profile --json " + arguments);
        EXPECT_EQ(result.code, 0) << result.err;
        EXPECT_EQ(result.err, "");
        json report = json::parse(result.out, nullptr, false);
        EXPECT_FALSE(report.is_discarded()) << result.out;
        return report;
    }
};

json part(const json& parts, const std::string& kind) {
    for (const json& each : parts) {
        if (each["kind"] == kind) return each;
    }
    return nullptr;
}

void expect_phase(const json& phase, std::int64_t tokens, std::int64_t calls) {
    EXPECT_EQ(phase["tokens"], tokens);
    const double wall = phase["wall_seconds"];
    EXPECT_GT(wall, 0.0);
    double sum = 0.0;
    double waiting = 0.0;
    for (const json& each : phase["parts"]) {
        const double of_kind = each["seconds"].get<double>() + each["waiting_seconds"].get<double>();
        const auto flops = each["flops"].get<double>();
        const auto bytes = each["bytes"].get<double>();
        EXPECT_NEAR(each["gflops"].get<double>() * 1e9 * of_kind, flops, 1e-6 * flops) << each;
        EXPECT_NEAR(each["gbps"].get<double>() * 1e9 * of_kind, bytes, 1e-6 * bytes) << each;
        EXPECT_GE(each["waiting_seconds"].get<double>(), 0.0) << each;
        waiting += each["waiting_seconds"].get<double>();
        EXPECT_GE(each["seconds"].get<double>(), 0.0) << each;
        EXPECT_NEAR(each["share"].get<double>() * wall, each["seconds"].get<double>(), 1e-9) << each;
        sum += each["seconds"].get<double>();
    }
    EXPECT_NEAR(sum, phase["sum_seconds"].get<double>(), 1e-9);
    EXPECT_NEAR(sum, wall, 0.05 * wall) << "the parts are the whole";
    EXPECT_EQ(phase["parts"].back()["kind"], "waiting");
    EXPECT_NEAR(phase["parts"].back()["seconds"].get<double>(), waiting, 1e-9) << "what all kinds waited";
    EXPECT_EQ(part(phase["parts"], "projection")["calls"], 42 * calls);
    EXPECT_EQ(part(phase["parts"], "attention")["calls"], 6 * calls);
    EXPECT_EQ(part(phase["parts"], "projection")["flops"], 2 * 6 * 393216 * tokens);
    EXPECT_TRUE(part(phase["parts"], "waiting")["of_limit"].is_null());
    EXPECT_GT(part(phase["parts"], "projection")["of_limit"].get<double>(), 0.0);
    EXPECT_GT(phase["clock_before_ghz"].get<double>(), 0.0);
    EXPECT_GT(phase["clock_after_ghz"].get<double>(), 0.0);
    EXPECT_TRUE(phase["throttled"].is_boolean());

    ASSERT_EQ(phase["layers"].size(), 7U);
    EXPECT_TRUE(phase["layers"][0]["layer"].is_null());
    std::map<std::string, json> sums;
    for (const json& layer : phase["layers"]) {
        for (const json& each : layer["parts"]) {
            json& total = sums.try_emplace(each["kind"], json::object()).first->second;
            for (const char* key : {"calls", "flops", "bytes"}) {
                total[key] = total.value(key, std::uint64_t{0}) + each[key].get<std::uint64_t>();
            }
            for (const char* key : {"seconds", "waiting_seconds"}) {
                total[key] = total.value(key, 0.0) + each[key].get<double>();
            }
        }
    }
    EXPECT_EQ(sums.size(), phase["parts"].size());
    for (const json& each : phase["parts"]) {
        const json& total = sums[each["kind"]];
        for (const char* key : {"calls", "flops", "bytes"}) EXPECT_EQ(total[key], each[key]) << each;
        for (const char* key : {"seconds", "waiting_seconds"}) {
            EXPECT_NEAR(total[key].get<double>(), each[key].get<double>(), 1e-9) << each;
        }
    }
}

/// Tracks of nested events: none ends inside another one that it did not begin in.
void expect_trace(const json& trace) {
    ASSERT_TRUE(trace["traceEvents"].is_array());
    EXPECT_EQ(trace["displayTimeUnit"], "ms");
    EXPECT_EQ(trace["otherData"]["dropped_tasks"], 0);
    std::map<std::int64_t, std::string> names;
    std::map<std::int64_t, std::vector<std::pair<std::int64_t, std::int64_t>>> tracks;  // (begin, -end) in ns
    std::map<std::string, int> categories;
    std::int64_t run_end = 0;
    for (const json& event : trace["traceEvents"]) {
        ASSERT_TRUE(event["name"].is_string() && event["pid"].is_number_integer() && event["tid"].is_number_integer() &&
                    event["args"].is_object())
            << event;
        if (event["ph"] == "M") {
            ASSERT_TRUE(event["args"]["name"].is_string()) << event;
            if (event["name"] == "thread_name") names[event["tid"]] = event["args"]["name"];
            continue;
        }
        ASSERT_EQ(event["ph"], "X") << event;
        ASSERT_TRUE(event["cat"].is_string() && event["ts"].is_number() && event["dur"].is_number()) << event;
        const std::int64_t begin = std::llround(event["ts"].get<double>() * 1e3);
        const std::int64_t end = begin + std::llround(event["dur"].get<double>() * 1e3);
        EXPECT_GE(begin, 0);
        EXPECT_GE(end, begin);
        tracks[event["tid"]].emplace_back(begin, -end);
        ++categories[event["cat"]];
        if (event["cat"] == "phase") run_end = std::max(run_end, end);
        if (event["cat"] == "operation") {
            for (const char* key : {"layer", "flops", "bytes"}) {
                EXPECT_TRUE(event["args"][key].is_number_integer()) << event;
            }
        }
        if (event["cat"] == "task") {
            EXPECT_NE(event["name"], "task") << "its operation is known";
            EXPECT_TRUE(event["args"]["layer"].is_number_integer()) << event;
        }
    }
    EXPECT_EQ(categories["phase"], 2);
    EXPECT_GT(categories["operation"], 2 * 80);
    EXPECT_GT(categories["task"], 2 * 42);
    EXPECT_EQ(names[0], "operations");
    for (auto& [thread, events] : tracks) {
        EXPECT_TRUE(names.contains(thread)) << thread;
        std::ranges::sort(events);
        std::vector<std::int64_t> open;
        for (const auto& [begin, minus_end] : events) {
            while (!open.empty() && open.back() <= begin) open.pop_back();
            if (!open.empty()) {
                EXPECT_LE(-minus_end, open.back()) << "track " << thread;
            }
            open.push_back(-minus_end);
            EXPECT_LE(-minus_end, run_end);
        }
    }
}

TEST_F(ProfileCommandTest, PartsAreTheWholeAndTheTraceIsWellFormed) {
    const std::int64_t prompt = emulated() ? 20 : 200;
    const std::int64_t steps = emulated() ? 2 : 7;
    const std::string file = (folder_ / "trace.json").string();
    const json report = profile("-p " + std::to_string(prompt) + " -n " + std::to_string(steps) +
                                " --threads 2 --layers --trace '" + file + "'");
    EXPECT_EQ(report["isa"], to_string(available_isas().back()));
    EXPECT_EQ(report["prompt_tokens"], prompt);
    EXPECT_EQ(report["decode_steps"], steps);
    expect_phase(report["prefill"], prompt, 1);
    expect_phase(report["decode"], steps, steps);
    EXPECT_EQ(part(report["prefill"]["parts"], "attention")["flops"], 6 * 4 * 192 * (prompt * (prompt + 1) / 2));
    EXPECT_EQ(report["time_to_first_token_seconds"], report["prefill"]["wall_seconds"]);
    double before = 0.0;
    for (const char* key : {"min", "median", "p95", "p99", "max"}) {
        EXPECT_GE(report["decode_latency_seconds"][key].get<double>(), before) << key;
        before = report["decode_latency_seconds"][key];
    }
    EXPECT_GT(report["limits"]["gflops"].get<double>(), 0.0);
    EXPECT_GT(report["limits"]["gbps"].get<double>(), 0.0);
    EXPECT_EQ(report["memory"]["kv_used_bytes"], (prompt + steps) * 6 * 2 * 64 * 4);
    EXPECT_GE(report["memory"]["kv_reserved_bytes"], report["memory"]["kv_used_bytes"]);
    EXPECT_EQ(report["memory"]["kv_type"], "f32");
    const json halves = profile("-p 20 -n 2 --threads 1 --kv f16:bf16");
    EXPECT_EQ(halves["memory"]["kv_type"], "f16:bf16");
    EXPECT_EQ(halves["memory"]["kv_used_bytes"], 22 * 6 * 2 * 64 * 2);
    const json codes = profile("-p 20 -n 2 --threads 1 --kv int8");
    EXPECT_EQ(codes["memory"]["kv_type"], "int8");
    EXPECT_EQ(codes["memory"]["kv_used_bytes"], 22 * 6 * 2 * 2 * 36);
    EXPECT_EQ(report["memory"]["weight_bytes"], 2 * (6 * 393216 + 192 * 1024));
    EXPECT_GT(report["memory"]["peak_bytes"], report["memory"]["weight_bytes"]);
    EXPECT_GT(report["memory"]["scratch_bytes"].get<std::int64_t>(), 0);
    const json trace = json::parse(contents(file), nullptr, false);
    ASSERT_FALSE(trace.is_discarded());
    expect_trace(trace);
}

TEST_F(ProfileCommandTest, LengthsAreThoseThatTheModelAllows) {
    const json small = profile(model({{"max_position_embeddings", 12}}) + " --threads 1 --isa generic");
    EXPECT_EQ(small["prompt_tokens"], 6);
    EXPECT_EQ(small["decode_steps"], 6);
    EXPECT_EQ(small["threads"], 1);
    EXPECT_EQ(small["isa"], "generic");
    EXPECT_FALSE(small["prefill"].contains("layers"));
    const Result text = run("profile " + model({{"max_position_embeddings", 12}}) + " -n 0 --threads 1 --layers");
    EXPECT_EQ(text.code, 0);
    EXPECT_EQ(text.err, "");
    for (const char* word : {"prefill: 12 tokens", "waiting", "sum", "wall", "of limit", "ms by layer"}) {
        EXPECT_TRUE(holds(text.out, word)) << text.out;
    }
    EXPECT_FALSE(holds(text.out, "decode:")) << text.out;
    const json no_steps = profile("-p 3 -n 0 --threads 1");
    EXPECT_TRUE(no_steps["decode"].is_null());
    EXPECT_TRUE(no_steps["decode_latency_seconds"].is_null());
    EXPECT_EQ(no_steps["decode_steps"], 0);
    if (emulated()) return;
    const json usual = profile("--threads 2");
    EXPECT_EQ(usual["prompt_tokens"], 512);
    EXPECT_EQ(usual["decode_steps"], 64);
    const json chunks = profile("-p 1020 -n 4 --threads 2");
    EXPECT_EQ(part(chunks["prefill"]["parts"], "attention")["calls"], 2 * 6) << "512 at a time, as generate does it";
    EXPECT_EQ(part(chunks["prefill"]["parts"], "output_head")["calls"], 1);
}

TEST_F(ProfileCommandTest, BadCallsAreRefusedBeforeAnyWork) {
    expect_bad_call("profile -p 1025", {"-p 1025: at most 1024"});
    expect_bad_call("profile -p 1000 -n 25", {"-p 1000 -n 25", "at most 1024"});
    expect_bad_call("profile -n 1024", {"a prompt of 1 token and -n 1024", "at most 1024"});
    expect_bad_call("profile -p 9223372036854775807 -n 9223372036854775807", {"at most 1024"});
    expect_bad_call("profile -p 0", {"-p is 0"});
    expect_bad_call("profile -p -1", {"-p is -1"});
    expect_bad_call("profile -n -1", {"-n is -1"});
    expect_bad_call("profile -p many", {"-p", "many"});
    expect_bad_call("profile --threads 0", {"--threads"});
    expect_bad_call("profile --isa sse9", {"sse9"});
    expect_bad_call("profile --no-such-flag", {"--no-such-flag", "headlong profile --help"});
    expect_bad_call("profile /nowhere", {"/nowhere/config.json"});
    expect_bad_call("profile --trace /nowhere/trace.json", {"--trace /nowhere/trace.json", "cannot be written"});
    expect_bad_call("profile " + model({{"num_attention_heads", 0}}), {"num_attention_heads: is 0"});
    // 16 million tokens of 64 KV heads of 1024 in 100 layers are almost a petabyte
    const json vast{{"num_attention_heads", 64},
                    {"num_key_value_heads", 64},
                    {"head_dim", 1024},
                    {"num_hidden_layers", 100},
                    {"max_position_embeddings", 1 << 24}};
    expect_bad_call("profile " + model(vast) + " -p 16000000", {"-p 16000000 -n 64", "the cache needs", "available"});
    // weights of a small cache: 100,000 layers of 3 * 2^18 * 2^18 floats and more are 80 petabytes
    const json heavy{{"hidden_size", 1 << 18},   {"intermediate_size", 1 << 18}, {"num_hidden_layers", 100000},
                     {"num_attention_heads", 1}, {"num_key_value_heads", 1},     {"head_dim", 2}};
    expect_bad_call("profile " + model(heavy) + " -p 1 -n 0", {"-p 1 -n 0", "weights", "scratch", "available"});
}

TEST_F(ProfileCommandTest, ATraceReplacesWhatWasThereOnlyWhenItIsComplete) {
    const std::filesystem::path file = folder_ / "trace.json";
    const std::filesystem::path empty = folder_ / "empty";
    std::filesystem::create_directories(empty);
    std::filesystem::copy_file(austen() + "/config.json", empty / "config.json");
    const std::string broken = "profile '" + empty.string() + "' --trace '" + file.string() + "'";
    expect_bad_call(broken, {"model.safetensors"});
    EXPECT_FALSE(std::filesystem::exists(file)) << "nothing came of it";
    std::ofstream(file) << std::string(1 << 20, '#');
    expect_bad_call(broken, {"model.safetensors"});
    EXPECT_EQ(std::filesystem::file_size(file), 1U << 20) << "the last trace is still there";
    const Result result = run("profile -p 4 -n 1 --threads 1 --trace '" + file.string() + "'");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_TRUE(json::accept(contents(file))) << "and is replaced as a whole";
}

TEST_F(ProfileCommandTest, AFullStdoutIsTold) {
    for (const char* format : {"", "--json --layers "}) {
        const std::string command = std::string(HEADLONG_COMMAND) + " profile " + format +
                                    "-p 4 -n 1 --threads 1 >/dev/full 2>'" + (folder_ / "told").string() + "'";
        EXPECT_NE(std::system(command.c_str()), 0);
        EXPECT_EQ(contents((folder_ / "told").string()), "headlong: writing the results failed\n");
    }
}

TEST_F(ProfileCommandTest, ATraceThatCannotBeWrittenIsAnError) {
    expect_bad_call("profile -p 4 -n 1 --threads 1 --trace /dev/full", {"--trace /dev/full", "cannot be written"});
}

}  // namespace
}  // namespace headlong::test
