// The life of a cache: truncate, fork, reorder, save, restore. A plain list of tokens is the model of what it holds.
#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <headlong/headlong.hpp>

#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/token_rows.hpp"

namespace headlong::test {
namespace {

using Tokens = std::vector<std::uint64_t>;

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<std::byte> saved(const KvCache& cache) {
    std::vector<std::byte> bytes(cache.saved_bytes());
    cache.save(bytes);
    return bytes;
}

/// What a random walk is about.
struct Kind {
    const char* name;
    std::int64_t capacity;
    bool ring;
    std::int64_t sinks;
    std::int64_t max_chunk;
    std::vector<std::int64_t> windows;
    bool f16_sinks = false;  ///< of caches of codes
};

const std::vector<Kind>& kinds() {
    static const std::vector<Kind> all{{"plain", 400, false, 0, 512, {}},
                                       {"plain with sinks", 400, false, 5, 512, {}},
                                       {"plain with a block of sinks", 400, false, 67, 512, {}},
                                       {"ring", 90, true, 0, 40, {}},
                                       {"ring with sinks", 150, true, 67, 70, {}},
                                       {"windows", 400, false, 0, 50, {0, 33}},
                                       {"ring with sinks in f16", 150, true, 67, 70, {}, true},
                                       {"windows, and sinks in f16", 400, false, 5, 50, {0, 33}, true}};
    return all;
}

/// A cache and its model.
struct Pair {
    KvCache cache;
    Tokens tokens;
    /// Of every layer that forgets, the first position that is held.
    std::vector<std::int64_t> held_from;
};

class Walk {
  public:
    Walk(const Kind& kind, const KvTypes& types, std::uint64_t seed)
        : kind_(kind), random_(seed), context_(make_context(available_isas().back(), 1)) {
        options_.shape = rows_.shape(types);
        options_.layers = 2;
        options_.capacity = kind.capacity;
        options_.ring = kind.ring;
        options_.sink_tokens = kind.sinks;
        options_.max_chunk = kind.max_chunk;
        options_.layer_windows = kind.windows;
        options_.rotary = Rotary({.head_dim = rows_.head_dim});
        options_.f16_sinks = kind.f16_sinks;
        options_.pool = std::make_shared<BlockPool>(options_.shape);
        if (types.keys == KvType::int8 || types.keys == KvType::int4) {
            centre_.assign(static_cast<std::size_t>(rows_.kv_heads * rows_.head_dim), 0.25F);
            options_.key_centre = centre_;
            options_.hadamard_keys = true;
        }
        pairs_.push_back(fresh());
    }

    void run(int operations) {
        for (int i = 0; i < operations && !testing::Test::HasFatalFailure(); ++i) step(i);
        check_all();
        pairs_.clear();
        EXPECT_EQ(options_.pool->used_bytes(), 0U) << "a block was lost";
    }

  private:
    Pair fresh() {
        Pair pair{KvCache(options_), {}, {}};
        for (std::size_t layer = 0; layer < 2; ++layer) pair.held_from.push_back(sinks_of(layer));
        return pair;
    }
    std::int64_t window_of(std::size_t layer) const {
        if (!kind_.windows.empty() && kind_.windows[layer] > 0) return kind_.windows[layer];
        return kind_.ring ? kind_.capacity - kind_.sinks : std::int64_t{1} << 40;
    }
    std::int64_t sinks_of(std::size_t layer) const {
        return !kind_.windows.empty() && kind_.windows[layer] > 0 ? 0 : kind_.sinks;
    }
    /// The first position that a layer of so many tokens holds beside its sinks.
    std::int64_t resident_from(std::size_t layer, std::int64_t tokens) const {
        return std::max(sinks_of(layer), tokens - window_of(layer));
    }

    void step(int number) {
        SCOPED_TRACE("operation " + std::to_string(number));
        Pair& pair = pairs_[static_cast<std::size_t>(random_.integer(0, static_cast<std::int64_t>(pairs_.size()) - 1))];
        const auto length = static_cast<std::int64_t>(pair.tokens.size());
        switch (random_.integer(0, 11)) {
            case 0:
            case 1:
            case 2:
                append(pair, random_.integer(0, std::min<std::int64_t>(kind_.max_chunk, 70)));
                break;
            case 3:
                append(pair, 1);
                break;
            case 4:
                truncate(pair, random_.chance(0.7) ? std::max<std::int64_t>(0, length - random_.integer(0, 40))
                                                   : random_.integer(0, length));
                break;
            case 5:
                if (pairs_.size() < 6) {
                    Pair other{pair.cache.fork(), pair.tokens, pair.held_from};
                    pairs_.push_back(std::move(other));
                }
                break;
            case 6:
                if (pairs_.size() > 1 && random_.chance(0.5)) pairs_.erase(pairs_.begin() + (&pair - pairs_.data()));
                break;
            case 7:
                reorder();
                break;
            case 8: {
                // what was saved is restored into another cache, over whatever that holds
                const std::vector<std::byte> bytes = saved(pair.cache);
                Pair& other =
                    pairs_[static_cast<std::size_t>(random_.integer(0, static_cast<std::int64_t>(pairs_.size()) - 1))];
                other.cache.restore(bytes);
                other.tokens = Tokens(pair.tokens);
                other.held_from = std::vector<std::int64_t>(pair.held_from);
                ASSERT_EQ(saved(other.cache), bytes) << "the same tokens, other bytes";
                break;
            }
            case 9:
                pair.cache.reserve(
                    random_.integer(0, kind_.ring ? 200 : std::min<std::int64_t>(100, kind_.capacity - length)));
                break;
            case 10:
                half_a_step(pair);
                break;
            default:
                if (random_.chance(0.1)) {
                    pair.cache.reset();
                    pair.tokens.clear();
                    pair.held_from = fresh().held_from;
                }
                break;
        }
        if (number % 16 == 0) check(pairs_[static_cast<std::size_t>(number / 16) % pairs_.size()]);
    }

    void append(Pair& pair, std::int64_t count) {
        const auto length = static_cast<std::int64_t>(pair.tokens.size());
        const std::size_t first = pair.tokens.size();
        for (std::int64_t i = 0; i < count; ++i) pair.tokens.push_back(random_.bits() % 100000);
        const auto append_to = [&](std::size_t layer) {
            rows_.append(*context_, pair.cache, pair.tokens, first, static_cast<std::size_t>(count), layer);
        };
        if (!kind_.ring && length + count > kind_.capacity) {
            refusal([&] { append_to(0); }, ErrorCode::out_of_memory);
            pair.tokens.resize(first);
            return;
        }
        for (std::size_t layer = 0; layer < 2; ++layer) {
            append_to(layer);
            if (count > 0) pair.held_from[layer] = std::max(pair.held_from[layer], resident_from(layer, length));
        }
        ASSERT_EQ(pair.cache.length(), length + count);
    }

    /// One layer alone, which is then taken back.
    void half_a_step(Pair& pair) {
        const auto length = static_cast<std::int64_t>(pair.tokens.size());
        const std::int64_t count = random_.integer(1, std::min<std::int64_t>(kind_.max_chunk, 20));
        if (!kind_.ring && length + count > kind_.capacity) return;
        Tokens more = pair.tokens;
        for (std::int64_t i = 0; i < count; ++i) more.push_back(random_.bits() % 100000);
        const auto layer = static_cast<std::size_t>(random_.integer(0, 1));
        rows_.append(*context_, pair.cache, more, pair.tokens.size(), static_cast<std::size_t>(count), layer);
        pair.held_from[layer] = std::max(pair.held_from[layer], resident_from(layer, length));
        refusal([&] { saved(pair.cache); });
        pair.cache.discard_unfinished();
        ASSERT_EQ(pair.cache.length(layer), length);
    }

    void truncate(Pair& pair, std::int64_t length) {
        bool exact = true;
        for (std::size_t layer = 0; layer < 2; ++layer) {
            exact = exact && (length <= sinks_of(layer) || pair.held_from[layer] <= resident_from(layer, length));
        }
        if (exact) {
            pair.cache.truncate(length);
            for (std::size_t layer = 0; layer < 2; ++layer) {  // where nothing is left but sinks, none is forgotten
                if (length <= sinks_of(layer)) pair.held_from[layer] = sinks_of(layer);
            }
            pair.tokens.resize(static_cast<std::size_t>(length));
        } else {
            refusal([&] { pair.cache.truncate(length); }, ErrorCode::would_forget);
        }
        ASSERT_EQ(pair.cache.length(), static_cast<std::int64_t>(pair.tokens.size()));
    }

    void reorder() {
        std::vector<KvCache> caches;
        std::vector<std::size_t> parents;
        std::vector<Tokens> tokens;
        std::vector<std::vector<std::int64_t>> held;
        for (Pair& pair : pairs_) caches.push_back(std::move(pair.cache));
        for (std::size_t i = 0; i < caches.size(); ++i) {
            parents.push_back(
                static_cast<std::size_t>(random_.integer(0, static_cast<std::int64_t>(caches.size()) - 1)));
            tokens.push_back(pairs_[parents.back()].tokens);
            held.push_back(pairs_[parents.back()].held_from);
        }
        KvCache::reorder(caches, parents);
        for (std::size_t i = 0; i < caches.size(); ++i) {
            pairs_[i].cache = std::move(caches[i]);
            pairs_[i].tokens = tokens[i];
            pairs_[i].held_from = held[i];
        }
    }

    /// The bits of its attention are those of a cache that got the same tokens and nothing else.
    void check(Pair& pair) {
        ASSERT_EQ(pair.cache.length(), static_cast<std::int64_t>(pair.tokens.size()));
        if (pair.tokens.empty()) return;
        KvCache other(options_);
        const auto chunk = static_cast<std::size_t>(std::min<std::int64_t>(kind_.max_chunk, 33));
        for (std::size_t first = 0; first < pair.tokens.size(); first += chunk) {
            const std::size_t count = std::min(chunk, pair.tokens.size() - first);
            for (std::size_t layer = 0; layer < 2; ++layer) {
                rows_.append(*context_, other, pair.tokens, first, count, layer);
            }
        }
        const auto length = static_cast<std::int64_t>(pair.tokens.size());
        for (std::size_t layer = 0; layer < 2; ++layer) {
            // the oldest row that both must be able to answer: of a query that sees no forgotten key
            std::int64_t rows = 1;
            const std::int64_t chunked =
                length - (length - 1) / static_cast<std::int64_t>(chunk) * static_cast<std::int64_t>(chunk);
            while (rows < std::min<std::int64_t>({chunked, length, 20}) &&
                   pair.held_from[layer] <= resident_from(layer, length - rows)) {
                ++rows;
            }
            ASSERT_TRUE(same(rows_.attend(*context_, pair.cache, pair.tokens, static_cast<std::size_t>(rows), layer),
                             rows_.attend(*context_, other, pair.tokens, static_cast<std::size_t>(rows), layer)))
                << kind_.name << ", layer " << layer << ", " << pair.tokens.size() << " tokens, " << rows << " queries";
        }
    }
    void check_all() {
        for (Pair& pair : pairs_) check(pair);
    }

    const Kind& kind_;
    Random random_;
    std::unique_ptr<Context> context_;
    TokenRows rows_{.kv_heads = 2, .group = 1, .head_dim = 6, .value_dim = 3};
    std::vector<float> centre_;
    KvCacheOptions options_;
    std::vector<Pair> pairs_;
};

TEST(LifeCycleTest, RandomOperationsAgainstAListOfTokens) {
    const std::uint64_t seed = seed_or(20261130);
    SCOPED_TRACE("HEADLONG_SEED=" + std::to_string(seed));
    const int operations = emulated() ? 150 : 2000;  // of each of five kinds and more: 10,000 of every type
    for (const TypesCase& types : all_kv_types()) {
        for (const Kind& kind : kinds()) {
            if (kind.f16_sinks && !types.has_codes()) continue;
            SCOPED_TRACE(types.name() + ", " + kind.name);
            Walk(kind, types.types, seed).run(operations);
            if (HasFatalFailure()) return;
        }
    }
}

/// A cache of one layer with `count` tokens, and its rows.
struct Filled {
    TokenRows rows;
    KvCacheOptions options;
    Tokens tokens;
    std::unique_ptr<Context> context = make_context(available_isas().back(), 1);

    explicit Filled(const KvTypes& types, std::size_t count) {
        options.shape = rows.shape(types);
        for (std::size_t t = 0; t < count; ++t) tokens.push_back(t + 1);
    }
    KvCache cache() const {
        KvCache cache(options);
        rows.append(*context, cache, tokens, 0, tokens.size(), 0);
        return cache;
    }
};

/// Appends what a cache does not have yet, so many tokens at a time.
void rows_into(const Filled& filled, KvCache& cache, std::size_t chunk) {
    for (auto t = static_cast<std::size_t>(cache.length()); t < filled.tokens.size(); t += chunk) {
        filled.rows.append(*filled.context, cache, filled.tokens, t, std::min(chunk, filled.tokens.size() - t), 0);
    }
}

TEST(LifeCycleTest, ForksShareBlocksAndGoTheirOwnWay) {
    for (const TypesCase& types : all_kv_types()) {
        SCOPED_TRACE(types.name());
        Filled filled(types.types, 200);
        KvCache parent = filled.cache();
        const std::size_t block = parent.pool()->block_bytes();
        const std::size_t used = parent.pool()->used_bytes();
        std::vector<KvCache> forks;
        for (int i = 0; i < 3; ++i) forks.push_back(parent.fork());
        EXPECT_EQ(parent.pool()->used_bytes(), used) << "a fork copies nothing";
        for (std::size_t i = 0; i < 3; ++i) {  // each goes on with other tokens
            Tokens tokens = filled.tokens;
            for (std::size_t t = 0; t < 100; ++t) tokens.push_back(1000 * (i + 1) + t);
            filled.rows.append(*filled.context, forks[i], tokens, 200, 100, 0);
            Filled whole(types.types, 0);
            whole.tokens = tokens;
            const KvCache expected = whole.cache();
            EXPECT_TRUE(same(filled.rows.attend(*filled.context, forks[i], tokens, 7, 0),
                             filled.rows.attend(*filled.context, expected, tokens, 7, 0)));
        }
        // 200 tokens are 3 whole blocks and a part: of 300 each fork has that part and another block of its own
        EXPECT_EQ(parent.pool()->used_bytes(), used + 3 * 2 * block);
        const KvCache again = filled.cache();
        EXPECT_TRUE(same(filled.rows.attend(*filled.context, parent, filled.tokens, 7, 0),
                         filled.rows.attend(*filled.context, again, filled.tokens, 7, 0)))
            << "the parent is what it was";
        forks.clear();
        EXPECT_EQ(parent.pool()->used_bytes(), used);
    }
}

TEST(LifeCycleTest, ForksInOneCallGetTheBitsOfCallsOfTheirOwn) {
    TokenRows rows{.kv_heads = 2, .group = 3, .head_dim = 6, .value_dim = 4};
    struct Case {
        std::size_t prefix;
        std::int64_t sinks;
        bool ring;
        std::size_t queries;
    };
    const std::vector<Case> cases{{512, 0, false, 1},   {511, 0, false, 1},    {1100, 0, false, 2},
                                  {1100, 4, false, 1},  {1700, 600, false, 3}, {1100, 70, true, 1},
                                  {33000, 0, false, 1}, {32768, 5, false, 2}};
    const std::vector<float> slopes = alibi_slopes_for(rows.heads());
    for (const TypesCase& types : all_kv_types()) {
        for (const Case& each : cases) {
            if (emulated() && each.prefix > 2000) continue;
            SCOPED_TRACE(types.name() + ", prefix " + std::to_string(each.prefix) + ", sinks " +
                         std::to_string(each.sinks));
            KvCacheOptions options;
            options.shape = rows.shape(types.types);
            options.sink_tokens = each.sinks;
            options.rotary = Rotary({.head_dim = rows.head_dim});
            if (each.ring) {
                options.ring = true;
                options.capacity = 1200;
                options.max_chunk = 1200;
            }
            const auto context = make_context(available_isas().back(), 1);
            Tokens prefix(each.prefix);
            for (std::size_t t = 0; t < prefix.size(); ++t) prefix[t] = t + 1;
            KvCache parent(options);
            rows.append(*context, parent, prefix, 0, prefix.size(), 0);
            std::vector<KvCache> forks;
            std::vector<Tokens> tokens;
            for (std::size_t i = 0; i < 6; ++i) {  // tails of other lengths; the last one is nobody's fork
                tokens.push_back(prefix);
                for (std::size_t t = 0; t < 20 * i + each.queries; ++t) tokens[i].push_back(1000 * (i + 1) + t);
                forks.push_back(i == 5 ? KvCache(options) : parent.fork());
                const std::size_t held = i == 5 ? 0 : prefix.size();
                rows.append(*context, forks[i], tokens[i], held, std::min<std::size_t>(tokens[i].size() - held, 1200),
                            0);
                for (auto done = static_cast<std::size_t>(forks[i].length()); done < tokens[i].size();
                     done = static_cast<std::size_t>(forks[i].length())) {
                    rows.append(*context, forks[i], tokens[i], done,
                                std::min<std::size_t>(tokens[i].size() - done, 1200), 0);
                }
            }
            for (const int rules : {0, 1, 2}) {
                AttentionOptions attention;
                if (rules == 1) attention.window_left = 300;
                if (rules == 2) attention.alibi_slopes = slopes;
                std::vector<std::vector<float>> queries, expected, outputs;
                for (std::size_t i = 0; i < forks.size(); ++i) {
                    expected.push_back(rows.attend(*context, forks[i], tokens[i], each.queries, 0, attention));
                    queries.push_back(
                        rows.rows(tokens[i], tokens[i].size() - each.queries, each.queries, 0, TokenRows::Kind::query));
                }
                for (const std::size_t threads : {std::size_t{1}, std::size_t{2}, std::size_t{5}}) {
                    const auto other = make_context(available_isas().back(), threads);
                    outputs.assign(forks.size(), std::vector<float>(expected[0].size(), -7.0F));
                    std::vector<CachedQuery> calls;
                    for (std::size_t i = 0; i < forks.size(); ++i) {
                        calls.push_back(rows.cached(queries[i].data(), forks[i],
                                                    static_cast<std::int64_t>(each.queries), 0, outputs[i].data()));
                    }
                    attend(*other, calls, attention);
                    for (std::size_t i = 0; i < forks.size(); ++i) {
                        ASSERT_TRUE(same(outputs[i], expected[i]))
                            << "fork " << i << ", " << threads << " threads, rules " << rules;
                    }
                }
            }
        }
    }
}

TEST(LifeCycleTest, ForksMayBeUsedByOtherThreads) {
    // Each goes on with tokens of its own, from the middle of a block that all have; the last one to write to it may
    // write in place while another still copies.
    for (int round = 0; round < 20; ++round) {
        Filled filled({KvType::int8, KvType::int8}, 130);
        std::vector<KvCache> forks;
        {
            const KvCache parent = filled.cache();
            for (int i = 0; i < 4; ++i) forks.push_back(parent.fork());
        }
        const auto tokens_of = [&](std::size_t i) {
            Tokens tokens = filled.tokens;
            for (std::size_t t = 0; t < 50; ++t) tokens.push_back(1000 * (i + 1) + t);
            return tokens;
        };
        std::vector<std::vector<float>> results(4);
        {
            std::vector<std::jthread> threads;
            for (std::size_t i = 0; i < 4; ++i) {
                threads.emplace_back([&, i] {
                    const auto context = make_context(available_isas().back(), 1);
                    const Tokens tokens = tokens_of(i);
                    for (std::size_t t = 130; t < 180; ++t) filled.rows.append(*context, forks[i], tokens, t, 1, 0);
                    results[i] = filled.rows.attend(*context, forks[i], tokens, 1, 0);
                });
            }
        }
        for (std::size_t i = 0; i < 4; ++i) {
            Filled alone({KvType::int8, KvType::int8}, 0);
            alone.tokens = tokens_of(i);
            const KvCache expected = alone.cache();
            ASSERT_TRUE(same(results[i], alone.rows.attend(*alone.context, expected, alone.tokens, 1, 0))) << i;
        }
    }
}

TEST(LifeCycleTest, WhatRunsOutOfMemoryLosesNothing) {
    for (const bool ring : {false, true}) {
        SCOPED_TRACE(ring ? "ring" : "plain");
        Filled filled({}, 400);
        CountingResource memory;
        filled.options.memory = &memory;
        if (ring) {
            filled.options.ring = true;
            filled.options.capacity = 100;
            filled.options.sink_tokens = 4;
            filled.options.max_chunk = 200;
        }
        KvCache parent(filled.options);
        rows_into(filled, parent, 50);
        KvCache fork = parent.fork();
        const std::vector<float> before = filled.rows.attend(*filled.context, fork, filled.tokens, 50, 0);
        Tokens tokens = filled.tokens;
        for (std::size_t t = 0; t < 200; ++t) tokens.push_back(t);
        memory.fail_after(0);
        refusal([&] { filled.rows.append(*filled.context, fork, tokens, 400, 200, 0); }, ErrorCode::out_of_memory);
        memory.never_fail();
        EXPECT_EQ(fork.length(), 400);
        EXPECT_TRUE(same(filled.rows.attend(*filled.context, fork, filled.tokens, 50, 0), before))
            << "what the last chunk sees is still there";
        KvCache other = fork.fork();
        other.truncate(350);
        filled.rows.append(*filled.context, fork, tokens, 400, 200, 0);
        EXPECT_EQ(fork.length(), 600);
    }
}

TEST(LifeCycleTest, WhatIsReservedCanBeAppendedWithoutMemory) {
    struct Case {
        const char* name;
        std::int64_t capacity;
        bool ring;
        std::int64_t sinks;
        std::int64_t window;
    };
    for (const Case& each : {Case{"plain", 5000, false, 0, 0}, Case{"ring", 256, true, 0, 0},
                             Case{"ring with sinks", 300, true, 130, 0}, Case{"window", 5000, false, 0, 200}}) {
        for (const bool forked : {false, true}) {
            for (const std::int64_t tokens : {1, 60, 130, 1000}) {
                for (const std::size_t held : {std::size_t{0}, std::size_t{70}, std::size_t{1024}}) {
                    SCOPED_TRACE(std::string(each.name) + (forked ? ", forked" : "") + ", " + std::to_string(tokens) +
                                 " after " + std::to_string(held));
                    Filled filled({}, held);
                    CountingResource memory;
                    filled.options.memory = &memory;
                    filled.options.capacity = each.capacity;
                    filled.options.ring = each.ring;
                    filled.options.sink_tokens = each.sinks;
                    filled.options.max_chunk = 64;
                    if (each.window > 0) filled.options.layer_windows = std::span(&each.window, 1);
                    KvCache cache(filled.options);
                    rows_into(filled, cache, 64);
                    std::optional<KvCache> fork;
                    if (forked) fork = cache.fork();
                    cache.reserve(tokens);
                    std::vector<KvCache> greedy;  // takes what the pool still has
                    KvCacheOptions options = filled.options;
                    options.memory = nullptr;
                    options.pool = cache.pool();
                    memory.fail_after(0);
                    for (bool more = true; more;) {
                        try {
                            greedy.emplace_back(options);
                            greedy.back().reserve(1);
                        } catch (const OutOfMemory&) {
                            more = false;
                        }
                    }
                    Tokens all = filled.tokens;
                    for (std::int64_t t = 0; t < tokens; ++t) all.push_back(static_cast<std::uint64_t>(t));
                    for (std::size_t t = held; t < all.size(); t += 64) {
                        ASSERT_NO_THROW(filled.rows.append(*filled.context, cache, all, t,
                                                           std::min<std::size_t>(64, all.size() - t), 0))
                            << "at " << t;
                    }
                    memory.never_fail();
                }
            }
        }
    }
}

TEST(LifeCycleTest, ARingGoesBackToItsSinks) {
    Filled filled({}, 400);
    filled.options.ring = true;
    filled.options.capacity = 100;
    filled.options.sink_tokens = 70;
    filled.options.max_chunk = 64;
    KvCache cache(filled.options);
    for (const std::int64_t length : {70, 10, 0}) {
        rows_into(filled, cache, 50);
        cache.truncate(length);
        EXPECT_EQ(cache.length(), length);
        Tokens tokens(filled.tokens.begin(), filled.tokens.begin() + length);
        for (std::size_t t = 0; t < 150; ++t) tokens.push_back(5000 + t);
        KvCache other(filled.options);
        Filled same_tokens({}, 0);
        same_tokens.tokens = tokens;
        rows_into(same_tokens, cache, 50);
        rows_into(same_tokens, other, 50);
        EXPECT_TRUE(same(filled.rows.attend(*filled.context, cache, tokens, 10, 0),
                         filled.rows.attend(*filled.context, other, tokens, 10, 0)));
        cache.reset();
    }
}

TEST(LifeCycleTest, SavedCachesGoOnWithTheSameBits) {
    const std::string path = testing::TempDir() + "headlong_life_cycle.kv";
    for (const TypesCase& types : all_kv_types()) {
        SCOPED_TRACE(types.name());
        Filled filled(types.types, 77);
        filled.options.f16_sinks = types.has_codes();
        filled.options.capacity = 60;
        filled.options.ring = true;
        filled.options.sink_tokens = 3;
        filled.options.max_chunk = 77;
        KvCache cache = filled.cache();
        cache.save(path);
        EXPECT_EQ(std::filesystem::file_size(path), cache.saved_bytes());
        KvCache restored(filled.options);
        restored.restore(path);
        EXPECT_EQ(saved(restored), saved(cache));
        Tokens tokens = filled.tokens;
        for (std::size_t t = 0; t < 90; ++t) {
            tokens.push_back(t);
            filled.rows.append(*filled.context, cache, tokens, tokens.size() - 1, 1, 0);
            filled.rows.append(*filled.context, restored, tokens, tokens.size() - 1, 1, 0);
            ASSERT_TRUE(same(filled.rows.attend(*filled.context, cache, tokens, 1, 0),
                             filled.rows.attend(*filled.context, restored, tokens, 1, 0)));
        }
    }
    std::filesystem::remove(path);
}

TEST(LifeCycleTest, TheBytesOfASavedCacheAreTheSameOnEveryInstructionSet) {
    for (const TypesCase& types : all_kv_types()) {
        SCOPED_TRACE(types.name());
        std::vector<std::byte> first;
        HEADLONG_FOR_EACH_ISA(isa) {
            Filled filled(types.types, 150);
            filled.context = make_context(isa, 1);
            filled.options.rotary = Rotary({.head_dim = filled.rows.head_dim});
            const std::vector<std::byte> bytes = saved(filled.cache());
            if (first.empty()) first = bytes;
            EXPECT_EQ(bytes, first);
        }
    }
}

TEST(LifeCycleTest, DamagedAndForeignCachesAreRefusedAndNothingChanges) {
    Filled filled({KvType::int8, KvType::f16}, 70);
    filled.options.rotary = Rotary({.head_dim = filled.rows.head_dim});
    KvCache cache = filled.cache();
    const std::vector<float> before = filled.rows.attend(*filled.context, cache, filled.tokens, 1, 0);
    const std::vector<std::byte> bytes = saved(cache);
    const auto refused = [&](const std::vector<std::byte>& damaged) {
        const std::string message = refusal([&] { cache.restore(damaged); }, ErrorCode::bad_file);
        EXPECT_EQ(cache.length(), 70);
        return message;
    };
    Random random(seed_or(5));
    HEADLONG_TRACE_SEED(random);
    for (int i = 0; i < 400; ++i) {  // any bit that flips
        std::vector<std::byte> damaged = bytes;
        const auto at = static_cast<std::size_t>(
            i < 200 ? random.integer(0, 255) : random.integer(0, static_cast<std::int64_t>(bytes.size()) - 1));
        damaged[at] ^= static_cast<std::byte>(1U << static_cast<unsigned>(random.integer(0, 7)));
        refused(damaged);
    }
    for (const std::size_t size : {std::size_t{0}, std::size_t{8}, std::size_t{100}, std::size_t{152}, std::size_t{160},
                                   std::size_t{200}, bytes.size() - 1}) {
        refused({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)});
    }
    std::vector<std::byte> longer = bytes;
    longer.push_back({});
    refused(longer);
    std::vector<std::byte> version = bytes;
    version[8] = std::byte{9};
    EXPECT_NE(refused(version).find("version 9; this library reads version 3"), std::string::npos);
    EXPECT_TRUE(same(filled.rows.attend(*filled.context, cache, filled.tokens, 1, 0), before));
    // lies that the checksum does not give away: it comes last, and is that of what is there
    const auto lie = [&](std::size_t word, std::uint64_t value, const char* named) {
        std::vector<std::byte> lying = bytes;
        std::memcpy(lying.data() + 8 * word, &value, sizeof value);
        const std::uint64_t sum = XXH3_64bits(lying.data(), lying.size() - sizeof sum);
        std::memcpy(lying.data() + lying.size() - sizeof sum, &sum, sizeof sum);
        const std::string message = refused(lying);
        EXPECT_NE(message.find(named), std::string::npos) << message;
    };
    for (const std::uint64_t length :
         {std::uint64_t{1} << 60U, std::uint64_t{1} << 47U, std::uint64_t{200}, ~std::uint64_t{0}}) {
        lie(3, length, length == 200 || length == std::uint64_t{1} << 47U ? "what it describes has" : "tokens");
    }
    for (const std::uint64_t attached : {std::uint64_t{1}, ~std::uint64_t{0}, ~std::uint64_t{0} - bytes.size()}) {
        lie(4, attached, "what it describes has");
    }
    // behind 18 words, 3 of the rotary description and its 4 frequencies: the window, and the first position held
    lie(18 + 3 + 4, 7, "windows");
    lie(18 + 3 + 5, 1, "holds positions from 1 on; allowed: 0 to 0");
    // the last row of values, 16 columns of f16, is that of token 127, and there are 70
    lie((bytes.size() - sizeof(std::uint64_t)) / 8 - 4, 1, "the place of a token that it does not hold");

    const auto foreign = [&](const char* named, const auto& change) {
        KvCacheOptions options = filled.options;
        change(options);
        KvCache other(options);
        const std::string message = refusal([&] { other.restore(bytes); }, ErrorCode::bad_file);
        EXPECT_NE(message.find(named), std::string::npos) << message;
    };
    foreign("kv_heads is 2; this cache's is 3", [](KvCacheOptions& o) { o.shape.kv_heads = 3; });
    foreign("value_type", [](KvCacheOptions& o) { o.shape.value_type = KvType::f32; });
    foreign("layers", [](KvCacheOptions& o) { o.layers = 2; });
    foreign("sink_tokens", [](KvCacheOptions& o) { o.sink_tokens = 4; });
    foreign("sink_tokens", [](KvCacheOptions& o) {
        o.sink_tokens = 4;
        o.f16_sinks = true;
    });
    foreign("hadamard_keys", [](KvCacheOptions& o) { o.hadamard_keys = true; });
    foreign("rotary descriptions", [](KvCacheOptions& o) { o.rotary.reset(); });
    foreign("rotary descriptions", [](KvCacheOptions& o) { o.rotary = Rotary({.head_dim = 8, .theta = 9.0}); });
    foreign("capacity is 20", [](KvCacheOptions& o) { o.capacity = 20; });
    foreign("the capacity of a ring", [](KvCacheOptions& o) {
        o.capacity = 100;
        o.ring = true;
    });
    const std::int64_t window = 9;
    foreign("windows", [&](KvCacheOptions& o) { o.layer_windows = std::span(&window, 1); });

    refusal([&] { cache.restore(testing::TempDir() + "no such file"); }, ErrorCode::io);
    refusal([&] { cache.save(testing::TempDir() + "no such folder/cache"); }, ErrorCode::io);
    std::vector<std::byte> small(bytes.size() - 1);
    refusal([&] { cache.save(small); });
    EXPECT_TRUE(same(filled.rows.attend(*filled.context, cache, filled.tokens, 1, 0), before));
}

}  // namespace
}  // namespace headlong::test
