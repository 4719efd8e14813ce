// What a host may rely on: whose memory is taken, that a call ends when it is to end and leaves everything usable, and
// that a library that has nothing to do does nothing.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <headlong/headlong.hpp>

#if defined(__linux__)
#include <sched.h>
#endif

#include "tests/support/isas.hpp"
#include "tests/support/operator_new.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/token_rows.hpp"

namespace headlong::test {
namespace {

using Clock = std::chrono::steady_clock;
using Tokens = std::vector<std::uint64_t>;

Tokens tokens_up_to(std::size_t count) {
    Tokens tokens(count);
    for (std::size_t t = 0; t < count; ++t) tokens[t] = t + 1;
    return tokens;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Takes from malloc, so that what operator new counts is what did not come here. Thread-safe.
class MallocResource final : public std::pmr::memory_resource {
  public:
    std::size_t live() const {
        const std::lock_guard lock(mutex_);
        return live_;
    }

  private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        const std::lock_guard lock(mutex_);
        void* const p = std::aligned_alloc(std::max(alignment, sizeof(void*)),
                                           (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment);
        if (p == nullptr) throw std::bad_alloc();
        live_ += bytes;
        return p;
    }
    void do_deallocate(void* p, std::size_t bytes, std::size_t) override {
        const std::lock_guard lock(mutex_);
        live_ -= bytes;
        std::free(p);
    }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

    mutable std::mutex mutex_;
    std::size_t live_ = 0;
};

/// Bytes that operator new gave out while a cache of `count` tokens lived: appends, attention, forks, a save.
std::size_t news_of_a_cache(std::size_t count, MallocResource& memory, bool ring) {
    const TokenRows rows;
    const auto context = make_context(available_isas().back(), 2, &memory);
    const Tokens tokens = tokens_up_to(count);
    KvCacheOptions options;
    options.shape = rows.shape({KvType::int8, KvType::int8});
    options.memory = &memory;
    options.sink_tokens = 4;
    options.f16_sinks = true;
    options.ring = ring;
    if (ring) options.capacity = 300;
    options.rotary = Rotary({.head_dim = rows.head_dim});
    const std::vector<float> centre(static_cast<std::size_t>(rows.kv_heads * rows.head_dim), 0.5F);
    options.key_centre = centre;
    std::vector<std::byte> saved;
    std::size_t news = 0;
    const auto counted = [&](const auto& operation) {
        const std::size_t before = operator_new_bytes();
        operation();
        news += operator_new_bytes() - before;
    };
    std::optional<KvCache> cache;
    std::optional<KvCache> fork;
    counted([&] { cache.emplace(options); });
    const std::vector<float> key = rows.rows(tokens, 0, count, 0, TokenRows::Kind::key);
    const std::vector<float> value = rows.rows(tokens, 0, count, 0, TokenRows::Kind::value);
    const std::vector<float> query = rows.rows(tokens, count - 1, 1, 0, TokenRows::Kind::query);
    std::vector<float> out(static_cast<std::size_t>(rows.heads() * (rows.value_dim + 1)));
    counted([&] {
        const std::int64_t kv = rows.kv_heads;
        for (std::size_t t = 0; t < count; t += 500) {
            const auto n = static_cast<std::int64_t>(std::min<std::size_t>(500, count - t));
            const auto at = static_cast<std::int64_t>(t);
            cache->append(*context, 0,
                          {key.data() + at * kv * rows.head_dim,
                           DType::f32,
                           {kv, n, rows.head_dim},
                           {rows.head_dim, kv * rows.head_dim, 1}},
                          {value.data() + at * kv * rows.value_dim,
                           DType::f32,
                           {kv, n, rows.value_dim},
                           {rows.value_dim, kv * rows.value_dim, 1}});
        }
        const CachedQuery q = rows.cached(query.data(), *cache, 1, 0, out.data());
        attend(*context, std::span(&q, 1));
        fork.emplace(cache->fork());
        cache->truncate(cache->length() - 3);
    });
    saved.resize(fork->saved_bytes());
    counted([&] {
        fork->save(saved);
        cache->restore(saved);
    });
    return news;
}

TEST(HostTest, WhatGrowsComesFromTheHostsMemory) {
    for (const bool ring : {false, true}) {
        MallocResource memory;
        {
            const std::size_t few = news_of_a_cache(1000, memory, ring);
            const std::size_t many = news_of_a_cache(emulated() ? 5000 : 50000, memory, ring);
            EXPECT_LT(few, 16384U) << "the objects themselves";
            EXPECT_LT(many, few + 1024U) << "something grows with the tokens";
        }
        EXPECT_EQ(memory.live(), 0U);
    }
}

std::string austen() { return HEADLONG_SOURCE_DIR "/tools/models/austen"; }

TEST(HostTest, AModelComputesInTheHostsMemory) {
    MallocResource memory;
    {
        const auto context = make_context(available_isas().back(), 2, &memory);
        const Model model(*context, austen(), {.weights = WeightType::int8, .map = false, .memory = &memory});
        EXPECT_GT(memory.live(), std::filesystem::file_size(austen() + "/model.safetensors"));
        KvCacheOptions options = model.cache_options({KvType::int8, KvType::int8});
        options.memory = &memory;
        KvCache cache(options);
        const std::vector<std::int32_t> tokens(300, 17);
        std::vector<float> logits(static_cast<std::size_t>(model.info().vocab_size));
        const auto row = OutputTensor<2>::dense(logits.data(), {1, model.info().vocab_size});
        const std::size_t before = operator_new_bytes();
        for (int i = 0; i < 3; ++i) model.forward(*context, tokens, cache, row);
        EXPECT_LT(operator_new_bytes() - before, 65536U);  // lists of a call, oneTBB's tasks
    }
    EXPECT_EQ(memory.live(), 0U);
}

TEST(HostTest, DeadlinesEndAttention) {
    const TokenRows rows;
    for (const std::size_t threads : {1U, 2U}) {
        const auto context = make_context(available_isas().back(), threads);
        const Tokens tokens = tokens_up_to(emulated() ? 1500 : 6000);
        KvCacheOptions options;
        options.shape = rows.shape({});
        KvCache cache(options);
        rows.append(*context, cache, tokens, 0, tokens.size(), 0);
        const std::size_t queries = tokens.size() / 2;
        const std::vector<float> expected = rows.attend(*context, cache, tokens, queries, 0);
        AttentionOptions attention;
        attention.deadline = Clock::now();
        const std::string message =
            refusal([&] { rows.attend(*context, cache, tokens, queries, 0, attention); }, ErrorCode::cancelled);
        EXPECT_NE(message.find("the deadline has passed"), std::string::npos) << message;
        // later and later, until it is late enough; what was cancelled leaves nothing behind
        int cancelled = 0;
        for (auto budget = std::chrono::microseconds(20);; budget *= 2) {
            attention.deadline = Clock::now() + budget;
            try {
                const std::vector<float> out = rows.attend(*context, cache, tokens, queries, 0, attention);
                EXPECT_TRUE(same(out, expected));
                break;
            } catch (const Cancelled&) {
                ++cancelled;
                EXPECT_TRUE(
                    same(rows.attend(*context, cache, tokens, 1, 0), rows.attend(*context, cache, tokens, 1, 0)));
            }
        }
        EXPECT_GT(cancelled, 0) << "too fast for this test";
    }
}

TEST(HostTest, ACancelledStepIsAsIfItHadNotBeen) {
    for (const std::size_t threads : {1U, 2U}) {
        const auto context = make_context(available_isas().back(), threads);
        const Model model(*context, austen());
        KvCache cache(model.cache_options());
        KvCache undisturbed(model.cache_options());
        std::vector<std::int32_t> tokens(emulated() ? 40 : 400);
        for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i * 7 % 500);
        const auto vocab = model.info().vocab_size;
        std::vector<float> logits(static_cast<std::size_t>(vocab));
        std::vector<float> expected(logits.size());
        model.forward(*context, tokens, undisturbed, OutputTensor<2>::dense(expected.data(), {1, vocab}));
        const auto row = OutputTensor<2>::dense(logits.data(), {1, vocab});

        std::stop_source stopped;
        stopped.request_stop();
        refusal([&] { model.forward(*context, tokens, cache, row, {.stop = stopped.get_token(), .deadline = {}}); },
                ErrorCode::cancelled);
        int cancelled = 0;
        for (auto budget = std::chrono::microseconds(10);; budget = budget * 3 / 2 + std::chrono::microseconds(1)) {
            try {
                model.forward(*context, tokens, cache, row, {.stop = {}, .deadline = Clock::now() + budget});
                break;
            } catch (const Cancelled&) {
                ++cancelled;
                ASSERT_EQ(cache.length(), 0);
                for (std::size_t layer = 0; layer < cache.layers(); ++layer) ASSERT_EQ(cache.length(layer), 0);
            }
        }
        EXPECT_GT(cancelled, 3);
        EXPECT_TRUE(same(logits, expected));

        // text: what was computed stays, and it can go on
        GenerateOptions options;
        options.max_tokens = 20;
        options.ignore_eos = true;
        const std::string whole = generate(*context, model, "It is", options).text;
        std::stop_source source;
        options.stop_token = source.get_token();
        int pieces = 0;
        options.on_text = [&](std::string_view) {
            if (++pieces == 3) source.request_stop();
            return true;
        };
        const Generation part = generate(*context, model, "It is", options);
        EXPECT_EQ(part.reason, StopReason::cancelled);
        EXPECT_EQ(whole.compare(0, part.text.size(), part.text), 0);
        options.on_text = {};
        options.stop_token = {};
        options.deadline = Clock::now();
        EXPECT_EQ(generate(*context, model, "It is", options).reason, StopReason::cancelled);
    }
}

TEST(HostTest, AGenerationThatFailsLeavesItsCache) {
    const auto context = make_context(available_isas().back(), 1);
    const Model model(*context, austen());
    KvCache cache(model.cache_options({}, 60));
    const std::vector<std::int32_t> first(20, 7);
    model.forward(*context, first, cache, {});
    GenerateOptions options;
    options.prefill_chunk = 16;
    options.max_tokens = 4;
    const std::vector<std::int32_t> long_prompt(41, 5);  // its first two chunks would fit
    const std::string message =
        refusal([&] { generate(*context, model, cache, long_prompt, options); }, ErrorCode::out_of_memory);
    EXPECT_NE(message.find("41 tokens after 20 exceed the cache's capacity of 60"), std::string::npos) << message;
    EXPECT_EQ(cache.length(), 20);
    options.max_tokens = 30;  // which end in the midst of decoding
    const std::vector<std::int32_t> prompt(35, 5);
    options.ignore_eos = true;
    refusal([&] { generate(*context, model, cache, prompt, options); }, ErrorCode::out_of_memory);
    EXPECT_EQ(cache.length(), 20);
    options.on_prefill = [](std::int64_t done, std::int64_t) {
        if (done > 16) throw std::runtime_error("the host's");
    };
    EXPECT_THROW(generate(*context, model, cache, prompt, options), std::runtime_error);
    EXPECT_EQ(cache.length(), 20);
    options.on_prefill = {};
    options.max_tokens = 3;
    const Generation after = generate(*context, model, cache, prompt, options);
    KvCache other(model.cache_options({}, 60));
    model.forward(*context, first, other, {});
    EXPECT_EQ(after.tokens, generate(*context, model, other, prompt, options).tokens);
}

TEST(HostTest, ALayerThatIsCancelledHoldsWhatItHeld) {
    const std::int64_t width = 256;
    const auto context = make_context(available_isas().back(), 2);
    const std::vector<float> weight(static_cast<std::size_t>(width * width), 0.01F);
    const auto w = InputTensor<2>::dense(weight.data(), {width, width});
    MultiHeadAttentionWeights weights;
    weights.query = weights.key = weights.value = weights.output = w;
    const MultiHeadAttention layer(*context, {.heads = 4, .kv_heads = 4, .memory = nullptr}, weights);
    KvCacheOptions options;
    options.shape = {.kv_heads = 4, .head_dim = 64, .value_dim = 64};
    KvCache cache(options);
    const std::int64_t length = 300;
    const std::vector<float> x(static_cast<std::size_t>(length * width), 0.5F);
    std::vector<float> y(x.size());
    int cancelled = 0;
    for (auto budget = std::chrono::microseconds(1);; budget *= 2) {
        AttentionOptions attention;
        attention.deadline = Clock::now() + budget;
        try {
            layer.forward(*context, InputTensor<2>::dense(x.data(), {length, width}), cache, 0,
                          OutputTensor<2>::dense(y.data(), {length, width}), attention);
            break;
        } catch (const Cancelled&) {
            ++cancelled;
            ASSERT_EQ(cache.length(), 0);
        }
    }
    EXPECT_GT(cancelled, 0);
    EXPECT_EQ(cache.length(), length);
}

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

TEST(HostTest, AnIdleContextUsesNoProcessor) {
    const auto context = make_context(available_isas().back(), 2);
    const TokenRows rows;
    const Tokens tokens = tokens_up_to(3000);
    KvCacheOptions options;
    options.shape = rows.shape({});
    KvCache cache(options);
    rows.append(*context, cache, tokens, 0, tokens.size(), 0);
    rows.attend(*context, cache, tokens, 100, 0);                 // all threads have worked
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // oneTBB's look for work before they sleep
    const double before = cpu_seconds();
    std::this_thread::sleep_for(std::chrono::seconds(5));
    EXPECT_LT(cpu_seconds() - before, 0.05);
}

#if defined(__linux__)
TEST(HostTest, OneProcessorIsOneThread) {
    cpu_set_t all;
    ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
    }
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(default_concurrency(), 1U);
    EXPECT_EQ(Context().concurrency(), 1U);
    ASSERT_EQ(sched_setaffinity(0, sizeof all, &all), 0);
}
#endif

TEST(HostTest, ContextsOfDifferentKindsWorkSideBySide) {
    const TokenRows rows;
    const Tokens tokens = tokens_up_to(700);
    const std::vector<Isa> isas = available_isas();
    std::vector<std::unique_ptr<Context>> contexts;
    contexts.push_back(make_context(isas.front(), 1));
    contexts.push_back(make_context(isas.back(), 2));
    contexts.push_back(make_context(isas[isas.size() / 2], 2));
    const auto compute = [&](Context& context) {
        KvCacheOptions options;
        options.shape = rows.shape({KvType::int8, KvType::f16});
        KvCache cache(options);
        rows.append(context, cache, tokens, 0, tokens.size(), 0);
        return rows.attend(context, cache, tokens, 200, 0);
    };
    std::vector<std::vector<float>> alone;
    for (const auto& context : contexts) alone.push_back(compute(*context));
    std::vector<std::vector<float>> together(contexts.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < contexts.size(); ++i) {
        threads.emplace_back([&, i] {
            for (int n = 0; n < (emulated() ? 1 : 5); ++n) together[i] = compute(*contexts[i]);
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < contexts.size(); ++i) EXPECT_TRUE(same(together[i], alone[i])) << i;
}

TEST(HostTest, AThousandLivesLeaveNothing) {  // (under a leak checker, of what is not the resource's, too)
    MallocResource memory;
    const TokenRows rows;
    const Tokens tokens = tokens_up_to(70);
    for (int i = 0; i < (emulated() ? 50 : 1000); ++i) {
        const auto context = make_context(available_isas().back(), 1 + static_cast<std::size_t>(i % 2), &memory);
        KvCacheOptions options;
        options.shape = rows.shape({KvType::int4, KvType::int4});
        options.memory = &memory;
        KvCache cache(options);
        rows.append(*context, cache, tokens, 0, tokens.size(), 0);
        const KvCache fork = cache.fork();
        rows.attend(*context, fork, tokens, 2, 0);
    }
    EXPECT_EQ(memory.live(), 0U);
}

}  // namespace
}  // namespace headlong::test
