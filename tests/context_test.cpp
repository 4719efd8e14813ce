// Contexts: instruction sets, threads, memory, cancellation, and what the attention call refuses.
#include <gtest/gtest.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <limits>
#include <new>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include <headlong/headlong.hpp>
#include <headlong/tbb.hpp>

#include "engine/concurrency.hpp"
#include "engine/processors.hpp"
#include "engine/workspace.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/operator_new.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"

namespace headlong::test {
namespace {

/// Sets HEADLONG_ISA for a scope.
class IsaVariable {
  public:
    explicit IsaVariable(const char* value) {
        const char* old = std::getenv("HEADLONG_ISA");
        had_ = old != nullptr;
        if (had_) old_ = old;
        if (value != nullptr) {
            setenv("HEADLONG_ISA", value, 1);
        } else {
            unsetenv("HEADLONG_ISA");
        }
    }
    ~IsaVariable() {
        if (had_) {
            setenv("HEADLONG_ISA", old_.c_str(), 1);
        } else {
            unsetenv("HEADLONG_ISA");
        }
    }
    IsaVariable(const IsaVariable&) = delete;
    IsaVariable& operator=(const IsaVariable&) = delete;

  private:
    bool had_ = false;
    std::string old_;
};

/// Inputs for calls whose numbers do not matter.
struct Tensors {
    std::vector<float> data;
    std::vector<float> out;
    InputTensor<4> query, key, value;
    OutputTensor<4> output;

    Tensors(std::int64_t heads, std::int64_t kv_heads, std::int64_t q_len, std::int64_t kv_len, std::int64_t dim)
        : data(static_cast<std::size_t>(std::max(heads * q_len, kv_heads * kv_len) * dim + 1)),
          out(static_cast<std::size_t>(heads * q_len * dim + 1)),
          query(InputTensor<4>::dense(data.data(), {1, heads, q_len, dim})),
          key(InputTensor<4>::dense(data.data(), {1, kv_heads, kv_len, dim})),
          value(key),
          output(OutputTensor<4>::dense(out.data(), {1, heads, q_len, dim})) {
        Random random(41);
        for (float& x : data) x = random.normal_f32();
    }
    void run(Context& context, const AttentionOptions& options = {}) {
        attend(context, query, key, value, options, output);
    }
};

TEST(ContextTest, TheEnvironmentCapsTheInstructionSet) {
    const IsaVariable unset(nullptr);
    const std::vector<Isa> all = available_isas();
    ASSERT_FALSE(all.empty());
    EXPECT_EQ(all.front(), Isa::generic);
    EXPECT_EQ(Context().isa(), all.back()) << "the best one is the default";
    for (const Isa isa : all) {
        const IsaVariable capped(to_string(isa));
        EXPECT_EQ(Context().isa(), isa);
        EXPECT_EQ(available_isas().back(), isa);
        ContextOptions options;
        options.isa = all.back();
        if (isa != all.back()) {
            EXPECT_TRUE(
                says(refusal([&] { Context context(options); }, ErrorCode::unsupported), to_string(all.back())));
        }
    }
    for (const char* wrong : {"avx", "AVX2", "nonsense", "generic "}) {
        const IsaVariable variable(wrong);
        EXPECT_TRUE(says(refusal([] { available_isas(); }, ErrorCode::invalid_argument),
                         std::string("HEADLONG_ISA is '") + wrong + "'"));
    }
    const IsaVariable empty("");
    EXPECT_EQ(available_isas(), all);
}

TEST(ContextTest, OptionsChooseTheInstructionSet) {
    for (const Isa isa : available_isas()) {
        ContextOptions options;
        options.isa = isa;
        EXPECT_EQ(Context(options).isa(), isa);
        options = {};
        options.isa_cap = isa;
        EXPECT_EQ(Context(options).isa(), isa);
        options.isa = isa;
        refusal([&] { Context context(options); }, ErrorCode::invalid_argument);
        EXPECT_EQ(parse_isa(to_string(isa)), isa);
    }
    ContextOptions options;
    EXPECT_FALSE(parse_isa("sse9").has_value());
#if defined(__aarch64__)
    constexpr Isa kForeign = Isa::avx2;
#else
    constexpr Isa kForeign = Isa::neon;
#endif
    options.isa = kForeign;  // no kernels for it in this build
    EXPECT_TRUE(says(refusal([&] { Context context(options); }, ErrorCode::unsupported), to_string(kForeign)));
    options = {};
    options.isa_cap = kForeign;
    EXPECT_TRUE(says(refusal([&] { Context context(options); }, ErrorCode::invalid_argument), "another architecture"));
}

TEST(ContextTest, ExecutorsRunEveryTaskOnceOnDistinctWorkers) {
    allow_threads(5);
    tbb::task_arena arena(3);
    for (const auto& executor :
         {make_serial_executor(), make_tbb_executor(2), make_tbb_executor(5), borrow_arena(arena)}) {
        struct State {
            std::vector<std::atomic<int>> runs = std::vector<std::atomic<int>>(1000);
            std::vector<std::atomic<int>> busy;
            std::atomic<int> clashes{0};
            explicit State(std::size_t workers) : busy(workers) {}
        } state(executor->worker_slots());
        executor->run(
            1000,
            [](void* p, std::size_t task, std::size_t worker) noexcept {
                State& s = *static_cast<State*>(p);
                if (worker >= s.busy.size() || s.busy[worker].fetch_add(1) != 0) s.clashes.fetch_add(1);
                s.runs[task].fetch_add(1);
                if (worker < s.busy.size()) s.busy[worker].fetch_sub(1);
            },
            &state);
        EXPECT_EQ(state.clashes.load(), 0);
        for (const auto& runs : state.runs) ASSERT_EQ(runs.load(), 1);
    }
    // a task that was enqueued into an arena of one runs in its second slot
    tbb::task_arena one(1);
    ContextOptions options;
    options.executor = borrow_arena(one);
    Context one_slot(options);
    Tensors alone(4, 2, 64, 600, 16);
    alone.run(one_slot);
    Tensors enqueued(4, 2, 64, 600, 16);
    std::promise<void> done;
    one.enqueue([&] {
        enqueued.run(one_slot);
        done.set_value();
    });
    done.get_future().wait();
    EXPECT_TRUE(same_bits(alone.out.data(), enqueued.out.data(), 4 * 64 * 16));
    EXPECT_GE(default_concurrency(), 1U);
    ContextOptions both;
    both.threads = 2;
    both.executor = make_serial_executor();
    refusal([&] { Context refused(both); }, ErrorCode::invalid_argument);
    both.executor = nullptr;
    both.threads = std::numeric_limits<std::size_t>::max();
    refusal([&] { Context refused(both); }, ErrorCode::invalid_argument);
}

TEST(ContextTest, ProcessorsAreChosenByName) {
    namespace fs = std::filesystem;
    const auto set_of = [](std::string_view list) { return parse_processor_list(list).value(); };
    EXPECT_EQ(set_of("0-2,5").to_string().substr(1024 - 6), "100111");
    EXPECT_EQ(set_of("1023").count(), 1U);
    for (const char* wrong : {"", "a", "-1", "3-", "3-1", "1,", ",1", "1 ", "0-1024", "99999999999999999999", "0--1"}) {
        EXPECT_FALSE(parse_processor_list(wrong).has_value()) << wrong;
    }
    const auto allowed = processors_of_this_thread();
    if (!allowed) GTEST_SKIP() << "this system cannot keep threads to processors";

    // The folder of devices of a machine where processor `fast` is of another kind than the others that there may be.
    const fs::path devices = fs::temp_directory_path() / ("headlong-devices-" + std::to_string(::getpid()));
    const auto write = [&](const fs::path& file, const std::string& text) {
        fs::create_directories((devices / file).parent_path());
        std::ofstream(devices / file) << text;
    };
    std::size_t fast = 0;
    while (!(*allowed)[fast]) ++fast;
    const ProcessorSet only_fast = set_of(std::to_string(fast));
    const auto choose = [&](const std::string& text) { return choose_processors(text, devices.string()); };
    EXPECT_EQ(choose("performance"), *allowed) << "nothing is told";
    const auto write_capacities = [&](const std::string& others) {
        for (std::size_t number = 0; number < allowed->size(); ++number) {
            const bool least = number != fast;
            if ((*allowed)[number]) {
                write("system/cpu/cpu" + std::to_string(number) + "/cpu_capacity", least ? others : "1024");
            }
        }
    };
    write_capacities("1024");
    EXPECT_EQ(choose("performance"), *allowed) << "all alike";
    write_capacities("446");
    EXPECT_EQ(choose("performance"), only_fast) << "Arm";
    write_capacities("1024");
    write("cpu_core/cpus", std::to_string(fast) + "\n");
    EXPECT_EQ(choose("performance"), only_fast) << "Intel";
    write("system/node/node7/cpulist", std::to_string(fast) + "\n");
    write("system/node/node8/cpulist", "\n");  // a node of memory alone
    EXPECT_EQ(choose("node7"), only_fast);
    EXPECT_EQ(choose(std::to_string(fast)), only_fast);
    EXPECT_EQ(choose("0-1023"), *allowed);
    for (const char* none : {"node8", "node9"}) {
        EXPECT_TRUE(says(refusal([&] { choose(none); }, ErrorCode::invalid_argument),
                         std::string("processors is \"") + none + "\", none of which this thread may use"));
    }
    for (const char* wrong : {"fast", "node", "node-1", "node7 ", "0-", "1024"}) {
        EXPECT_TRUE(says(refusal([&] { choose(wrong); }, ErrorCode::invalid_argument),
                         std::string("processors is \"") + wrong + "\"; allowed"));
    }
    fs::remove_all(devices);
}

TEST(ContextTest, ThreadsKeepToTheirProcessorsOnlyInsideOfCalls) {
    const auto allowed = processors_of_this_thread();
    if (!allowed) GTEST_SKIP() << "this system cannot keep threads to processors";
    allow_threads(3);
    std::size_t last = allowed->size() - 1;
    while (!(*allowed)[last]) --last;
    ProcessorSet chosen;
    chosen.set(last);
    struct Seen {
        std::mutex mutex;
        std::set<std::string> sets;
        void add() {
            const std::lock_guard lock(mutex);
            sets.insert(processors_of_this_thread().value().to_string());
        }
    };
    const auto sets_of = [](Executor& executor) {
        Seen seen;
        executor.run(
            300,
            [](void* state, std::size_t, std::size_t) noexcept {
                static_cast<Seen*>(state)->add();
                std::this_thread::sleep_for(std::chrono::microseconds(50));  // so that all threads come
            },
            &seen);
        return seen.sets;
    };
    const std::set<std::string> all{allowed->to_string()};
    for (int life = 0; life < 3; ++life) {
        {
            const auto executor = make_tbb_executor_on(chosen, 3);
            EXPECT_EQ(sets_of(*executor), std::set<std::string>{chosen.to_string()});
            EXPECT_EQ(processors_of_this_thread(), allowed) << "the caller's thread after the call";
            EXPECT_EQ(sets_of(*make_tbb_executor(3)), all) << "another arena beside it";
        }
        EXPECT_EQ(sets_of(*make_tbb_executor(3)), all) << "oneTBB's threads afterwards";
    }

    ContextOptions options;
    options.processors = std::to_string(last);
    Context context(options);
    EXPECT_EQ(context.concurrency(), 1U) << "as many threads as processors";
    Tensors kept(4, 2, 64, 600, 16);
    kept.run(context);
    EXPECT_EQ(processors_of_this_thread(), allowed);
    Context plain;
    Tensors free(4, 2, 64, 600, 16);
    free.run(plain);
    EXPECT_TRUE(same_bits(kept.out.data(), free.out.data(), 4 * 64 * 16));
    options.executor = make_serial_executor();
    refusal([&] { Context refused(options); }, ErrorCode::invalid_argument);
}

TEST(ContextTest, CgroupQuotasAreRead) {
    namespace fs = std::filesystem;
    const fs::path root = fs::temp_directory_path() / ("headlong-cgroup-" + std::to_string(::getpid()));
    const auto write = [&](const fs::path& file, const std::string& text) {
        fs::create_directories((root / file).parent_path());
        std::ofstream(root / file) << text;
    };
    const auto cpus = [&] { return cgroup_cpus(root.string(), (root / "membership").string()); };
    EXPECT_EQ(cpus(), std::numeric_limits<double>::infinity()) << "no cgroups at all";
    write("membership", "0::/a/b\n");
    write("cpu.max", "max 100000\n");
    write("a/b/cpu.max", "max 100000\n");
    EXPECT_EQ(cpus(), std::numeric_limits<double>::infinity());
    write("a/b/cpu.max", "250000 100000\n");
    EXPECT_EQ(cpus(), 2.5);
    write("a/cpu.max", "50000 100000\n");
    EXPECT_EQ(cpus(), 0.5) << "an ancestor's";
    write("a/cpu.max", "nonsense\n");
    EXPECT_EQ(cpus(), 2.5);
    fs::remove_all(root);
    write("membership", "3:memory:/c\n2:cpu,cpuacct:/c\n");
    write("cpu/c/cpu.cfs_quota_us", "-1\n");
    write("cpu/c/cpu.cfs_period_us", "100000\n");
    EXPECT_EQ(cpus(), std::numeric_limits<double>::infinity());
    write("cpu/c/cpu.cfs_quota_us", "300000\n");
    EXPECT_EQ(cpus(), 3.0);
    fs::remove_all(root);
}

TEST(ContextTest, ASizeBeyondAllMemoryIsRefused) {
    Buffer buffer(*std::pmr::new_delete_resource());
    EXPECT_THROW(buffer.ensure(std::numeric_limits<std::size_t>::max()), std::bad_alloc);
    EXPECT_EQ(buffer.bytes(), 0U);
}

// Scratch does not grow with the length, with a cache or without; nothing is allocated by a second call of a shape.
TEST(ContextTest, ScratchIsTheSameForAnyLength) {
    const std::int64_t longest = emulated() ? 4096 : 65536;
    for (const std::size_t threads : {1U, 2U}) {
        for (const std::int64_t q_len : {std::int64_t{1}, std::int64_t{16}, std::int64_t{1000}}) {
            std::vector<std::size_t> plain_bytes;
            std::vector<std::size_t> cache_bytes;
            for (const std::int64_t length : {std::int64_t{1024}, longest}) {
                CountingResource memory;
                const auto context = make_context(available_isas().back(), threads, &memory);
                Tensors t(2, 1, q_len, length, 8);
                t.run(*context);
                const std::size_t allocations = memory.counts().allocations;
                plain_bytes.push_back(memory.counts().peak_bytes);
                EXPECT_EQ(context->scratch_bytes(), memory.counts().live_bytes);
                const std::size_t news = operator_new_calls();
                t.run(*context);
                const std::size_t news_after = operator_new_calls();
                EXPECT_EQ(news_after, news) << "a second call allocates nothing";
                EXPECT_EQ(memory.counts().allocations, allocations);

                CountingResource cache_memory;  // of the context that attends, not of the cache
                const auto cache_context = make_context(available_isas().back(), threads, &cache_memory);
                KvCacheOptions options;
                options.shape = {.kv_heads = 1, .head_dim = 8, .value_dim = 8};
                KvCache cache(options);
                const auto rows = InputTensor<3>::dense(t.data.data(), {1, length, 8});
                cache.append(*cache_context, 0, rows, rows);
                const CachedQuery query{.query = InputTensor<3>::dense(t.data.data(), {2, q_len, 8}),
                                        .cache = &cache,
                                        .layer = 0,
                                        .output = OutputTensor<3>::dense(t.out.data(), {2, q_len, 8}),
                                        .lse = {}};
                attend(*cache_context, std::span(&query, 1));
                const std::size_t first = cache_memory.counts().allocations;
                cache_bytes.push_back(cache_memory.counts().peak_bytes);
                const std::size_t first_news = operator_new_calls();
                attend(*cache_context, std::span(&query, 1));
                EXPECT_EQ(operator_new_calls(), first_news);
                EXPECT_EQ(cache_memory.counts().allocations, first);
            }
            EXPECT_EQ(plain_bytes[0], plain_bytes[1]) << threads << " threads, " << q_len << " queries";
            EXPECT_EQ(cache_bytes[0], cache_bytes[1]) << threads << " threads, " << q_len << " queries";
        }
        // as many queries as keys, from where each thread has four row blocks of 2048 rows
        if (emulated() && threads > 1) continue;
        std::vector<std::size_t> bytes;
        const std::int64_t full = threads == 1 ? 2048 : 4096 * static_cast<std::int64_t>(threads);
        for (const std::int64_t length : {full, 2 * full}) {
            CountingResource memory;
            const auto context = make_context(available_isas().back(), threads, &memory);
            Tensors t(2, 2, length, length, 4);
            t.run(*context);
            bytes.push_back(memory.counts().peak_bytes);
        }
        EXPECT_EQ(bytes[0], bytes[1]);
    }
}

TEST(ContextTest, EveryRefusedAllocationIsOneError) {
    for (std::size_t failing = 0;; ++failing) {
        ASSERT_LT(failing, 20U);
        CountingResource memory;
        bool refused = false;
        {
            const auto context = make_context(available_isas().back(), 2, &memory);
            Tensors t(4, 2, 3, 700, 16);
            memory.fail_after(failing);
            try {
                t.run(*context);
            } catch (const OutOfMemory& error) {
                refused = true;
                EXPECT_TRUE(says(error.what(), "attend"));
            }
            memory.never_fail();
            t.run(*context);  // still usable
        }
        EXPECT_EQ(memory.counts().live_bytes, 0U);
        if (!refused) break;
    }
}

TEST(ContextTest, ManyThreadsUseOneContext) {
    Context context;
    Tensors alone(4, 2, 64, 600, 16);
    alone.run(context);
    std::vector<std::thread> threads;
    std::vector<std::vector<float>> results(6);
    for (auto& result : results) {
        threads.emplace_back([&] {
            Tensors t(4, 2, 64, 600, 16);
            for (int i = 0; i < 10; ++i) t.run(context);
            result = t.out;
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& result : results) EXPECT_TRUE(same_bits(alone.out.data(), result.data(), 4 * 64 * 16));
}

// The caller's own parallel loop around calls that share its arena must neither deadlock nor share scratch.
TEST(ContextTest, CallsNestInTheCallersLoop) {
    allow_threads(4);
    tbb::task_arena arena(4);
    ContextOptions options;
    options.executor = borrow_arena(arena);
    Context context(options);
    Tensors alone(4, 2, 64, 600, 16);
    alone.run(context);
    std::atomic<int> wrong{0};
    arena.execute([&] {
        tbb::parallel_for(0, 40, [&](int) {
            Tensors t(4, 2, 64, 600, 16);
            t.run(context);
            if (!same_bits(alone.out.data(), t.out.data(), 4 * 64 * 16)) wrong.fetch_add(1);
        });
    });
    EXPECT_EQ(wrong.load(), 0);
}

TEST(ContextTest, AStopTokenEndsACall) {
    for (const std::size_t threads : {1U, 2U}) {
        const auto context = make_context(available_isas().back(), threads);
        for (const std::int64_t q_len : {1, 800}) {
            Tensors t(2, 1, q_len, 2000, 8);
            std::stop_source source;
            AttentionOptions options;
            options.stop = source.get_token();
            t.run(*context, options);
            source.request_stop();
            EXPECT_TRUE(says(refusal([&] { t.run(*context, options); }, ErrorCode::cancelled), "attend"));
            t.run(*context);
        }
    }
}

TEST(ContextTest, ZeroExtentsSucceed) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t threads : {1U, 2U}) {
            const auto context = make_context(isa, threads);
            float out[64];
            float lse[8];
            const float data[64] = {};
            for (int zero = 0; zero < 5; ++zero) {
                std::int64_t n[5] = {2, 2, 2, 3, 4};  // batch, heads, q_len, kv_len, value_dim
                n[zero] = 0;
                std::fill_n(out, 64, -7.0F);
                std::fill_n(lse, 8, -7.0F);
                attend(*context, InputTensor<4>::dense(data, {n[0], n[1], n[2], 2}),
                       InputTensor<4>::dense(data, {n[0], n[1], n[3], 2}),
                       InputTensor<4>::dense(data, {n[0], n[1], n[3], n[4]}), {},
                       OutputTensor<4>::dense(out, {n[0], n[1], n[2], n[4]}),
                       OutputTensor<3>::dense(lse, {n[0], n[1], n[2]}));
                const std::int64_t outputs = n[0] * n[1] * n[2] * n[4];
                for (std::int64_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i < outputs ? 0.0F : -7.0F) << zero;
                for (std::int64_t i = 0; i < n[0] * n[1] * n[2]; ++i) {
                    EXPECT_EQ(lse[i],
                              zero == 3 ? -std::numeric_limits<float>::infinity() : static_cast<float>(std::log(3.0)))
                        << zero;
                }
            }
            attend(*context, std::span<const CachedQuery>{});
        }
    }
}

TEST(ContextTest, WhatHasNoOutputCostsNothing) {
    // rows and batches beyond all memory, of which nobody wants a result
    Context context;
    const float one = 0.5F;
    constexpr std::int64_t kHuge = std::int64_t{1} << 42;
    KvCacheOptions options;
    options.shape = {.kv_heads = 1, .head_dim = 16, .value_dim = 0};
    options.rotary.emplace(RotaryOptions{.head_dim = 16});
    const KvCache rotating(options);
    options.rotary.reset();
    const KvCache cache(options);
    CachedQuery query;
    query.query = {&one, DType::f32, {1, kHuge, 16}, {0, 0, 0}};
    query.output = {nullptr, DType::f32, {1, kHuge, 0}, {0, 0, 0}};
    for (const KvCache* each : {&rotating, &cache}) {
        query.cache = each;
        attend(context, std::span(&query, 1));
    }
    attend_shared_prefix(context, cache, std::span(&query, 1));
    merge(context, {}, {nullptr, DType::f32, {kHuge, kHuge, 1, 0}, {}});
    merge(context, {}, {nullptr, DType::f32, {kHuge, 1, 1, 0}, {}});
    EXPECT_LT(context.scratch_bytes(), std::size_t{1} << 20U);
}

TEST(ContextTest, ViewsWithoutElementsAreNotLookedAt) {
    Context context;
    constexpr std::int64_t kWild = std::numeric_limits<std::int64_t>::max();
    const float query[2] = {1.0F, 2.0F};
    float output[2] = {7.0F, 7.0F};
    const InputTensor<4> no_keys{nullptr, DType::f32, {2, 1, 0, 1}, {kWild, kWild, kWild, kWild}};
    AttentionOptions options;
    AttentionMask mask;
    mask.rank = 4;
    mask.extents = {2, 1, 1, 0};
    mask.strides = {kWild, kWild, kWild, kWild};
    options.mask = mask;
    attend(context, InputTensor<4>::dense(query, {2, 1, 1, 1}), no_keys, no_keys, options,
           OutputTensor<4>::dense(output, {2, 1, 1, 1}));
    EXPECT_EQ(output[0], 0.0F);
    EXPECT_EQ(output[1], 0.0F);
    // an empty sequence at the end of a packed batch, behind a row whose stride nobody needs
    output[0] = 7.0F;
    const InputTensor<3> row{query, DType::f32, {1, 1, 1}, {kWild / 8, kWild / 8, 1}};
    const std::int64_t offsets[3] = {0, 1, 1};
    attend_packed(context, row, row, row, offsets, offsets, {}, OutputTensor<3>::dense(output, {1, 1, 1}));
    EXPECT_EQ(output[0], 1.0F);
}

TEST(ContextTest, BadCallsAreNamedAndRefused) {
    Context context;
    const auto refused = [&](const auto& change, ErrorCode code, const std::string& text) {
        Tensors t(4, 2, 3, 5, 8);
        AttentionOptions options;
        change(t, options);
        EXPECT_TRUE(says(refusal([&] { t.run(context, options); }, code), text));
    };
    const auto invalid = ErrorCode::invalid_argument;
    refused(
        [](Tensors& t, auto&) {
            t.query.extents[3] = 0;
            t.key.extents[3] = 0;
        },
        invalid, "head_dim is 0");
    refused(
        [](Tensors& t, auto&) {
            t.query.extents[1] = 3;
            t.output.extents[1] = 3;
        },
        invalid, "3 heads");
    refused([](Tensors& t, auto&) { t.key.extents[0] = 2; }, invalid, "key: extent 0 is 2; it must be 1");
    refused([](Tensors& t, auto&) { t.value.extents[2] = 4; }, invalid, "value: extent 2 is 4; it must be 5");
    refused([](Tensors& t, auto&) { t.output.extents[3] = 9; }, invalid, "output: extent 3 is 9; it must be 8");
    refused([](Tensors& t, auto&) { t.query.extents[2] = -3; }, invalid, "query: extent 2 is -3");
    refused([](Tensors& t, auto&) { t.key.data = nullptr; }, invalid, "key: data is null");
    refused([](Tensors& t, auto&) { t.output.strides[2] = 0; }, invalid, "output: stride 2 is 0");
    refused([](Tensors& t, auto&) { t.key.strides[2] = std::numeric_limits<std::int64_t>::max() / 3; }, invalid,
            "64-bit");
    refused([](Tensors& t, auto&) { t.key.strides[2] = std::numeric_limits<std::int64_t>::min(); }, invalid, "64-bit");
    refused([](Tensors& t, auto&) { t.query.dtype = static_cast<DType>(7); }, invalid, "query: dtype is 7");
    refused([](Tensors&, auto& o) { o.scale = std::numeric_limits<float>::quiet_NaN(); }, invalid, "scale is nan");
    refused([](Tensors&, auto& o) { o.scale = std::numeric_limits<float>::infinity(); }, invalid, "scale is inf");
    refused([](Tensors&, auto& o) { o.scale = 3e38F; }, invalid, "scale is 3e+38");
    refused([](Tensors&, auto& o) { o.alignment = static_cast<Alignment>(9); }, invalid, "alignment is 9");

    // sizes that would leave 64 bits, in tensors that are empty all the same
    refused(
        [](Tensors& t, auto&) {
            for (auto* view : {&t.query, &t.key, &t.value}) view->extents = {92233720368547759, 1, 0, 1};
            t.output.extents = {92233720368547759, 1, 0, 1};
        },
        invalid, "query: batch is 92233720368547759");
    refused(
        [](Tensors& t, auto&) {
            t.query.extents = t.output.extents = {1, 4, 0, std::int64_t{1} << 40};
            t.key.extents = t.value.extents = {1, 2, 0, std::int64_t{1} << 40};
        },
        invalid, "head_dim is 1099511627776");
    Tensors empty(4, 2, 3, 5, 8);
    empty.query.extents[2] = empty.output.extents[2] = 0;
    for (auto* view : {&empty.query, &empty.key, &empty.value}) view->extents[0] = std::int64_t{1} << 32;
    empty.output.extents[0] = std::int64_t{1} << 32;
    for (auto* view : {&empty.query, &empty.key, &empty.value}) view->strides[0] = 0;
    empty.run(context);  // nothing to do, whatever the batch

    CachedQuery none;
    EXPECT_TRUE(says(refusal([&] { attend(context, std::span(&none, 1)); }, invalid), "cache is null"));
}

TEST(ContextTest, ErrorsAndVersionsHaveNames) {
    EXPECT_STREQ(to_string(ErrorCode::would_forget), "would_forget");
    EXPECT_STREQ(to_string(KvType::int4), "int4");
    EXPECT_STREQ(to_string(DType::bf16), "bf16");
    EXPECT_EQ(std::string(version()), std::to_string(HEADLONG_VERSION_MAJOR) + "." +
                                          std::to_string(HEADLONG_VERSION_MINOR) + "." +
                                          std::to_string(HEADLONG_VERSION_PATCH));
}

}  // namespace
}  // namespace headlong::test
