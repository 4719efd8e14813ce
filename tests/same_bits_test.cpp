// The same-bits contract: for one instruction set a row's output depends only on its query, the keys and values it
// sees at their positions, and the options. Everything here is compared with memcmp.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numbers>
#include <thread>
#include <vector>

#include <headlong/headlong.hpp>

#include "tests/support/compare.hpp"
#include "tests/support/floating_point.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Output and lse of rows, [row][heads * value_dim] and [row][heads].
struct Rows {
    std::vector<float> output;
    std::vector<float> lse;
};

testing::AssertionResult same_bits(const Rows& a, const Rows& b) {
    const testing::AssertionResult output = test::same_bits(a.output, b.output);
    return output ? test::same_bits(a.lse, b.lse) : output;
}

/// One sequence, token-major as a model has it: query [length][heads][head_dim] and so on.
struct SequenceData {
    std::int64_t length, heads, kv_heads, head_dim, value_dim;
    std::vector<float> query, key, value;

    SequenceData(std::int64_t length_, std::int64_t heads_, std::int64_t kv_heads_, std::int64_t head_dim_,
                 std::int64_t value_dim_, std::uint64_t seed)
        : length(length_), heads(heads_), kv_heads(kv_heads_), head_dim(head_dim_), value_dim(value_dim_) {
        Random random(seed);
        const auto fill = [&](std::vector<float>& v, std::int64_t count) {
            v.resize(static_cast<std::size_t>(count));
            for (float& x : v) x = random.normal_f32();
        };
        fill(query, length * heads * head_dim);
        fill(key, length * kv_heads * head_dim);
        fill(value, length * kv_heads * value_dim);
    }

    InputTensor<3> rows(const std::vector<float>& v, std::int64_t head_count, std::int64_t dim, std::int64_t first,
                        std::int64_t count) const {
        return {v.data() + first * head_count * dim, DType::f32, {head_count, count, dim}, {dim, head_count * dim, 1}};
    }
    InputTensor<3> queries(std::int64_t first, std::int64_t count) const {
        return rows(query, heads, head_dim, first, count);
    }
    InputTensor<3> keys(std::int64_t first, std::int64_t count) const {
        return rows(key, kv_heads, head_dim, first, count);
    }
    InputTensor<3> values(std::int64_t first, std::int64_t count) const {
        return rows(value, kv_heads, value_dim, first, count);
    }

    Rows empty_rows(std::int64_t count) const {
        return {std::vector<float>(static_cast<std::size_t>(count * heads * value_dim), -7.0F),
                std::vector<float>(static_cast<std::size_t>(count * heads), -7.0F)};
    }
    OutputTensor<3> output(Rows& r, std::int64_t first, std::int64_t count) const {
        return {r.output.data() + first * heads * value_dim,
                DType::f32,
                {heads, count, value_dim},
                {value_dim, heads * value_dim, 1}};
    }
    OutputTensor<2> lse(Rows& r, std::int64_t first, std::int64_t count) const {
        return {r.lse.data() + first * heads, DType::f32, {heads, count}, {1, heads}};
    }
    void set_token(std::int64_t token, float key_value, float value_value, float query_value) {
        std::fill_n(key.begin() + token * kv_heads * head_dim, kv_heads * head_dim, key_value);
        std::fill_n(value.begin() + token * kv_heads * value_dim, kv_heads * value_dim, value_value);
        std::fill_n(query.begin() + token * heads * head_dim, heads * head_dim, query_value);
    }
};

template <std::size_t Rank, class View>
auto with_batch(const View& view) {
    using Batched =
        std::conditional_t<std::is_same_v<View, InputTensor<Rank>>, InputTensor<Rank + 1>, OutputTensor<Rank + 1>>;
    Batched batched{view.data, view.dtype, {}, {}};
    batched.extents[0] = 1;
    batched.strides[0] = 1;
    for (std::size_t i = 0; i < Rank; ++i) {
        batched.extents[i + 1] = view.extents[i];
        batched.strides[i + 1] = view.strides[i];
    }
    return batched;
}

/// Queries [first, first + count) against the keys [0, first + count), bottom-right, as plain tensors.
Rows plain(Context& context, const SequenceData& s, std::int64_t first, std::int64_t count, bool causal = true) {
    Rows rows = s.empty_rows(count);
    AttentionOptions options;
    options.causal = causal;
    attend(context, with_batch<3>(s.queries(first, count)), with_batch<3>(s.keys(0, first + count)),
           with_batch<3>(s.values(0, first + count)), options, with_batch<3>(s.output(rows, 0, count)),
           with_batch<2>(s.lse(rows, 0, count)));
    return rows;
}

KvCache cache_for(const SequenceData& s, const KvTypes& types = {}) {
    KvCacheOptions options;
    options.shape = {.kv_heads = s.kv_heads,
                     .head_dim = s.head_dim,
                     .value_dim = s.value_dim,
                     .key_type = types.keys,
                     .value_type = types.values};
    return KvCache(options);
}

/// Those whose rows are not the floats that were appended: their bits are those of another call over such a cache.
const std::vector<KvTypes>& narrow_types() {
    static const std::vector<KvTypes> all{{KvType::f16, KvType::f16},
                                          {KvType::bf16, KvType::bf16},
                                          {KvType::int8, KvType::int8},
                                          {KvType::int4, KvType::int4}};
    return all;
}
std::string name_of(const KvTypes& types) {
    return std::string("cache ") + to_string(types.keys) + ":" + to_string(types.values);
}

CachedQuery cached_query(const SequenceData& s, const KvCache& cache, std::int64_t first, std::int64_t count,
                         Rows& rows, std::int64_t row) {
    return {.query = s.queries(first, count),
            .cache = &cache,
            .layer = 0,
            .output = s.output(rows, row, count),
            .lse = s.lse(rows, row, count)};
}

/// Queries [first, first + count) over a cache that already holds [0, first + count).
Rows cached(Context& context, const SequenceData& s, const KvCache& cache, std::int64_t first, std::int64_t count) {
    Rows rows = s.empty_rows(count);
    const CachedQuery query = cached_query(s, cache, first, count, rows, 0);
    attend(context, std::span(&query, 1));
    return rows;
}

/// The whole sequence through a cache, `chunk` tokens at a time.
Rows chunked(Context& context, const SequenceData& s, std::int64_t chunk, const KvTypes& types = {}) {
    Rows rows = s.empty_rows(s.length);
    KvCache cache = cache_for(s, types);
    for (std::int64_t first = 0; first < s.length; first += chunk) {
        const std::int64_t count = std::min(chunk, s.length - first);
        cache.append(context, 0, s.keys(first, count), s.values(first, count));
        const CachedQuery query = cached_query(s, cache, first, count, rows, first);
        attend(context, std::span(&query, 1));
    }
    return rows;
}

/// Rows [first, first + count) of all rows.
Rows part(const SequenceData& s, const Rows& rows, std::int64_t first, std::int64_t count) {
    const std::int64_t width = s.heads * s.value_dim;
    return {{rows.output.begin() + first * width, rows.output.begin() + (first + count) * width},
            {rows.lse.begin() + first * s.heads, rows.lse.begin() + (first + count) * s.heads}};
}

/// Crosses a span, ends inside a panel, has a group of 3, odd dims, and more rows than a row block.
SequenceData usual_sequence() { return {emulated() ? 533 : 700, 6, 2, 21, 13, 1}; }

TEST(SameBitsTest, ChunksAndStepsAndPlainCallsAgree) {
    const SequenceData s = usual_sequence();
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa);
        const Rows whole = plain(*context, s, 0, s.length);
        for (const std::int64_t chunk :
             {std::int64_t{1}, std::int64_t{7}, std::int64_t{64}, std::int64_t{500}, s.length}) {
            SCOPED_TRACE("chunks of " + std::to_string(chunk));
            EXPECT_TRUE(same_bits(whole, chunked(*context, s, chunk)));
        }
        for (const std::int64_t first : {std::int64_t{1}, std::int64_t{511}, std::int64_t{512}, std::int64_t{530}}) {
            SCOPED_TRACE("plain rows from " + std::to_string(first));
            EXPECT_TRUE(
                same_bits(part(s, whole, first, s.length - first), plain(*context, s, first, s.length - first)));
            EXPECT_TRUE(same_bits(part(s, whole, first, 1), plain(*context, s, first, 1)));
        }
        for (const KvTypes& types : narrow_types()) {
            SCOPED_TRACE(name_of(types));
            const Rows at_once = chunked(*context, s, s.length, types);
            EXPECT_FALSE(same_bits(at_once, whole));
            for (const std::int64_t chunk : {1, 7, 64, 500}) {
                if (emulated() && chunk != 64) continue;
                EXPECT_TRUE(same_bits(at_once, chunked(*context, s, chunk, types))) << "chunks of " << chunk;
            }
        }
    }
}

TEST(SameBitsTest, ThreadsDoNotMatter) {
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const SequenceData& s :
             {usual_sequence(), SequenceData(1100, 1, 1, 16, 24, 2), SequenceData(600, 7, 1, 8, 8, 3)}) {
            const auto serial = make_context(isa);
            const Rows whole = plain(*serial, s, 0, s.length);
            const Rows last = plain(*serial, s, s.length - 1, 1);
            for (const std::size_t threads : {2U, 5U}) {
                SCOPED_TRACE(std::to_string(threads) + " threads, " + std::to_string(s.heads) + " heads");
                const auto context = make_context(isa, threads);
                EXPECT_TRUE(same_bits(whole, plain(*context, s, 0, s.length)));
                EXPECT_TRUE(same_bits(last, plain(*context, s, s.length - 1, 1)));
                EXPECT_TRUE(same_bits(whole, chunked(*context, s, 333)));
                EXPECT_TRUE(same_bits(part(s, whole, s.length - 40, 40), plain(*context, s, s.length - 40, 40)));
            }
            for (const KvTypes& types : narrow_types()) {
                SCOPED_TRACE(name_of(types));
                KvCache cache = cache_for(s, types);
                cache.append(*serial, 0, s.keys(0, s.length), s.values(0, s.length));
                const Rows all = cached(*serial, s, cache, 0, s.length);
                for (const std::size_t threads : {2U, 5U}) {
                    const auto context = make_context(isa, threads);
                    EXPECT_TRUE(same_bits(all, chunked(*context, s, 333, types))) << threads;
                    for (const std::int64_t count : {s.length, std::int64_t{40}, std::int64_t{1}}) {
                        EXPECT_TRUE(same_bits(part(s, all, s.length - count, count),
                                              cached(*context, s, cache, s.length - count, count)))
                            << threads << " threads, " << count << " rows";
                    }
                }
            }
        }
    }
}

// More than one group of 64 spans (32,768 positions): groups fold in order whichever way the work is shared.
TEST(SameBitsTest, GroupsOfSpansFoldTheSameWay) {
    const std::int64_t length = 2 * 32768 + 777;
    const SequenceData s(length, 2, 1, 4, 3, 4);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto serial = make_context(isa);
        KvCache cache = cache_for(s);
        cache.append(*serial, 0, s.keys(0, length), s.values(0, length));
        const Rows walked = plain(*serial, s, length - 3, 3);
        for (const std::size_t threads : {1U, 2U, 5U}) {
            SCOPED_TRACE(std::to_string(threads) + " threads");
            const auto context = make_context(isa, threads);
            EXPECT_TRUE(same_bits(walked, cached(*context, s, cache, length - 3, 3)));
            EXPECT_TRUE(same_bits(walked, plain(*context, s, length - 3, 3)));
            EXPECT_TRUE(same_bits(part(s, walked, 2, 1), plain(*context, s, length - 1, 1)));
        }
        for (const KvTypes& types : narrow_types()) {
            SCOPED_TRACE(name_of(types));
            KvCache narrow = cache_for(s, types);
            narrow.append(*serial, 0, s.keys(0, length), s.values(0, length));
            const Rows last = cached(*serial, s, narrow, length - 3, 3);
            for (const std::size_t threads : {2U, 5U}) {
                const auto context = make_context(isa, threads);
                EXPECT_TRUE(same_bits(last, cached(*context, s, narrow, length - 3, 3))) << threads;
                EXPECT_TRUE(same_bits(part(s, last, 2, 1), cached(*context, s, narrow, length - 1, 1))) << threads;
            }
        }
    }
}

// Row blocks that are split, over several waves, beside others that are walked, in one call: a long decode step, short
// ones and a prompt. 24 rows on 5 threads are waves of 64 spans.
TEST(SameBitsTest, LongAndShortSequencesInOneCall) {
    const std::int64_t lengths[] = {90, (emulated() ? 1 : 3) * 32768 + 777, 600, 5000};
    const std::int64_t counts[] = {1, 1, 300, 2};
    std::vector<SequenceData> sequences;
    for (const std::int64_t length : lengths)
        sequences.emplace_back(length, 24, 1, 2, 3, 40 + static_cast<std::uint64_t>(length));
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const std::int64_t window : {-1, 50000}) {  // one that begins inside of a group
            if (emulated() && window >= 0) continue;
            AttentionOptions options;
            options.window_left = window;
            std::vector<Rows> serial;
            for (const std::size_t threads : {1U, 2U, 5U}) {
                const auto context = make_context(isa, threads);
                std::vector<KvCache> caches;
                std::vector<Rows> rows;
                std::vector<CachedQuery> queries;
                for (std::size_t i = 0; i < sequences.size(); ++i) {
                    caches.push_back(cache_for(sequences[i]));
                    caches[i].append(*context, 0, sequences[i].keys(0, lengths[i]), sequences[i].values(0, lengths[i]));
                    rows.push_back(sequences[i].empty_rows(counts[i]));
                }
                for (std::size_t i = 0; i < sequences.size(); ++i) {
                    queries.push_back(
                        cached_query(sequences[i], caches[i], lengths[i] - counts[i], counts[i], rows[i], 0));
                }
                attend(*context, queries, options);
                if (threads == 1 && window < 0) {
                    for (std::size_t i = 0; i < sequences.size(); ++i) {
                        EXPECT_TRUE(
                            same_bits(rows[i], plain(*context, sequences[i], lengths[i] - counts[i], counts[i])))
                            << i;
                    }
                }
                for (std::size_t i = 0; i < sequences.size(); ++i) {
                    if (threads == 1) {
                        serial.push_back(rows[i]);
                    } else {
                        EXPECT_TRUE(same_bits(rows[i], serial[i])) << threads << " threads, sequence " << i;
                    }
                }
            }
        }
    }
}

// Prefill, a chunk, a decode step and an empty query in one call: each as it would be alone.
TEST(SameBitsTest, QueriesOfDifferentLengthsInOneCall) {
    const std::int64_t counts[] = {700, 1, 0, 513, 47};
    std::vector<SequenceData> sequences;
    for (const std::int64_t count : counts)
        sequences.emplace_back(700, 4, 2, 16, 16, 20 + static_cast<std::uint64_t>(count));
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto call = [&](std::size_t threads, const KvTypes& types) {
            SCOPED_TRACE(std::to_string(threads) + " threads, " + name_of(types));
            const auto context = make_context(isa, threads);
            std::vector<KvCache> caches;
            std::vector<Rows> batched;
            std::vector<CachedQuery> queries;
            for (std::size_t i = 0; i < sequences.size(); ++i) {
                caches.push_back(cache_for(sequences[i], types));
                caches[i].append(*context, 0, sequences[i].keys(0, 700), sequences[i].values(0, 700));
                batched.push_back(
                    sequences[i].empty_rows(counts[i] + 2));  // a row in front and one behind stay as they are
            }
            for (std::size_t i = 0; i < sequences.size(); ++i) {
                queries.push_back(cached_query(sequences[i], caches[i], 700 - counts[i], counts[i], batched[i], 1));
            }
            queries[2].query.data = nullptr;  // empty: never looked at
            queries[2].output.data = nullptr;
            queries[2].lse = {};
            attend(*context, queries);
            for (std::size_t i = 0; i < sequences.size(); ++i) {
                const SequenceData& s = sequences[i];
                const Rows alone = types == KvTypes{} ? plain(*context, s, 700 - counts[i], counts[i])
                                                      : cached(*context, s, caches[i], 700 - counts[i], counts[i]);
                EXPECT_TRUE(same_bits(part(s, batched[i], 1, counts[i]), alone)) << i;
                const Rows untouched = s.empty_rows(1);
                EXPECT_TRUE(same_bits(part(s, batched[i], 0, 1), untouched)) << i;
                EXPECT_TRUE(same_bits(part(s, batched[i], counts[i] + 1, 1), untouched)) << i;
            }
        };
        for (const std::size_t threads : {1U, 2U, 5U}) call(threads, {});
        for (const KvTypes& types : narrow_types()) call(2, types);
    }
}

TEST(SameBitsTest, ASequenceAloneOrInABatch) {
    const std::vector<SequenceData> sequences{{600, 4, 2, 16, 16, 5}, {17, 4, 2, 16, 16, 6}, {1030, 4, 2, 16, 16, 7}};
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const std::size_t threads : {1U, 2U}) {
            const auto context = make_context(isa, threads);
            for (const std::int64_t count : {1, 9}) {  // a decode step, a chunk
                std::vector<KvCache> caches;
                std::vector<Rows> alone;
                std::vector<Rows> batched;
                for (const SequenceData& s : sequences) {
                    caches.push_back(cache_for(s));
                    caches.back().append(*context, 0, s.keys(0, s.length), s.values(0, s.length));
                    alone.push_back(plain(*context, s, s.length - count, count));
                    batched.push_back(s.empty_rows(count));
                }
                std::vector<CachedQuery> queries;
                for (std::size_t i = 0; i < sequences.size(); ++i) {
                    queries.push_back(
                        cached_query(sequences[i], caches[i], sequences[i].length - count, count, batched[i], 0));
                }
                attend(*context, queries);
                for (std::size_t i = 0; i < sequences.size(); ++i) EXPECT_TRUE(same_bits(alone[i], batched[i])) << i;
                for (const KvTypes& types : narrow_types()) {
                    for (std::size_t i = 0; i < sequences.size(); ++i) {
                        const SequenceData& s = sequences[i];
                        caches[i] = cache_for(s, types);
                        caches[i].append(*context, 0, s.keys(0, s.length), s.values(0, s.length));
                        alone[i] = cached(*context, s, caches[i], s.length - count, count);
                    }
                    attend(*context, queries);
                    for (std::size_t i = 0; i < sequences.size(); ++i) {
                        EXPECT_TRUE(same_bits(alone[i], batched[i])) << i << ", " << name_of(types);
                    }
                }
            }
            // a batch of plain tensors: the same sequence three times by stride 0
            const SequenceData& s = sequences[0];
            Rows three = s.empty_rows(3 * s.length);
            auto q = with_batch<3>(s.queries(0, s.length));
            auto k = with_batch<3>(s.keys(0, s.length));
            auto v = with_batch<3>(s.values(0, s.length));
            auto o = with_batch<3>(s.output(three, 0, s.length));
            for (auto* view : {&q, &k, &v}) {
                view->extents[0] = 3;
                view->strides[0] = 0;
            }
            o.extents[0] = 3;
            o.strides[0] = s.length * s.heads * s.value_dim;
            attend(*context, q, k, v, {}, o);
            const Rows once = plain(*context, s, 0, s.length, false);
            for (std::int64_t b = 0; b < 3; ++b) {
                EXPECT_TRUE(test::same_bits(part(s, three, b * s.length, s.length).output, once.output));
            }
        }
    }
}

// Changing token t leaves the rows before t as they were; t's own row and the later ones change.
TEST(SameBitsTest, CausalityHoldsToNanAndInfinity) {
    const SequenceData s = usual_sequence();
    std::vector<std::int64_t> tokens{0, 3, 15, 64, 511, 512, s.length - 1};
    std::vector<float> poisons{3.0F, kNaN, kInfinity, -kInfinity};
    if (emulated()) {
        tokens = {15, 512};
        poisons = {kNaN, kInfinity};
    }
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa, 2);
        const Rows before = plain(*context, s, 0, s.length);
        for (const std::int64_t token : tokens) {
            for (const float poison : poisons) {
                SCOPED_TRACE("token " + std::to_string(token) + " = " + std::to_string(poison));
                for (int what = 0; what < 3; ++what) {  // key, value, query
                    SequenceData changed = s;
                    if (what == 0)
                        std::fill_n(changed.key.begin() + token * s.kv_heads * s.head_dim, s.kv_heads * s.head_dim,
                                    poison);
                    if (what == 1)
                        std::fill_n(changed.value.begin() + token * s.kv_heads * s.value_dim, s.kv_heads * s.value_dim,
                                    poison);
                    if (what == 2)
                        std::fill_n(changed.query.begin() + token * s.heads * s.head_dim, s.heads * s.head_dim, poison);
                    const Rows after = plain(*context, changed, 0, s.length);
                    EXPECT_TRUE(same_bits(part(s, before, 0, token), part(s, after, 0, token))) << what;
                    EXPECT_FALSE(same_bits(part(s, before, token, 1), part(s, after, token, 1))) << what;
                    if (what == 2) {  // a query reaches its own row alone
                        EXPECT_TRUE(same_bits(part(s, before, token + 1, s.length - token - 1),
                                              part(s, after, token + 1, s.length - token - 1)));
                    }
                }
                SequenceData changed = s;
                changed.set_token(token, poison, poison, poison);
                const Rows through_cache = chunked(*context, changed, 50);
                EXPECT_TRUE(same_bits(part(s, before, 0, token), part(s, through_cache, 0, token)));
                EXPECT_TRUE(same_bits(plain(*context, changed, 0, s.length), through_cache));
            }
        }
        for (const KvTypes& types : narrow_types()) {
            SCOPED_TRACE(name_of(types));
            const Rows clean = chunked(*context, s, 300, types);
            for (const std::int64_t token : {15, 512}) {
                SCOPED_TRACE("token " + std::to_string(token));
                SequenceData changed = s;
                changed.set_token(token, kNaN, kInfinity, 1.0F);
                const Rows after = chunked(*context, changed, 300, types);
                EXPECT_TRUE(same_bits(part(s, clean, 0, token), part(s, after, 0, token)));
                for (const float x : part(s, after, token, s.length - token).output) ASSERT_TRUE(std::isnan(x));
                EXPECT_TRUE(same_bits(after, chunked(*context, changed, 50, types)));
            }
        }
    }
}

// Rule (b): a fused multiply-add is one rounding, and `generic` is two; neither is left to the compiler.
TEST(SameBitsTest, MultiplyAddIsFusedExceptInGeneric) {
    constexpr float kFactor = 0.5F * std::numbers::log2e_v<float>;  // what the engine multiplies the query by
    Random random(12);
    float q[2] = {};
    float k[2] = {};
    float fused = 0.0F;
    float rounded_twice = 0.0F;
    while (fused == rounded_twice) {  // until the data tells the two apart
        for (float* x : {q, q + 1, k, k + 1}) *x = random.normal_f32();
        const float first = q[0] * kFactor * k[0];
        const float product = q[1] * kFactor * k[1];
        fused = std::fma(q[1] * kFactor, k[1], first);
        rounded_twice = first + product;
    }
    const float v = 1.0F;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa);
        float out = 0.0F;
        float lse = 0.0F;
        AttentionOptions options;
        options.scale = 0.5F;
        attend(*context, InputTensor<4>::dense(q, {1, 1, 1, 2}), InputTensor<4>::dense(k, {1, 1, 1, 2}),
               InputTensor<4>::dense(&v, {1, 1, 1, 1}), options, OutputTensor<4>::dense(&out, {1, 1, 1, 1}),
               OutputTensor<3>::dense(&lse, {1, 1, 1}));
        const float score = isa == Isa::generic ? rounded_twice : fused;  // the only key's score is the lse, in log2
        EXPECT_TRUE(test::same_bits(lse, static_cast<float>(static_cast<double>(score) * std::numbers::ln2)));
    }
}

// Rules (c), (d): what a row does not see is neither added nor multiplied, whatever it holds; seen, it is.
TEST(SameBitsTest, UnseenValuesAreNeverMultiplied) {
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa);
        const SequenceData clean(20, 1, 1, 8, 8, 8);
        SequenceData dirty = clean;
        dirty.set_token(10, kNaN, kNaN, 0.0F);  // in the middle of a panel, a block and a span that rows 0 to 9 use
        const Rows a = plain(*context, clean, 0, 20);
        const Rows b = plain(*context, dirty, 0, 20);
        EXPECT_TRUE(same_bits(part(clean, a, 0, 10), part(clean, b, 0, 10)));
        for (std::int64_t row = 10; row < 20; ++row) {
            for (const float x : part(clean, b, row, 1).output) EXPECT_TRUE(std::isnan(x)) << row;
        }
    }
}

// Rule (e): -0 and +0 differ in memcmp, so no -0 leaves.
TEST(SameBitsTest, NoNegativeZeroIsWritten) {
    const std::vector<float> zeros(8, 0.0F);
    const std::vector<float> values{-0x1p-149F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F};  // the mean rounds to -0
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa);
        float out = 1.0F;
        attend(*context, InputTensor<4>::dense(zeros.data(), {1, 1, 1, 1}),
               InputTensor<4>::dense(zeros.data(), {1, 1, 8, 1}), InputTensor<4>::dense(values.data(), {1, 1, 8, 1}),
               {}, OutputTensor<4>::dense(&out, {1, 1, 1, 1}));
        EXPECT_TRUE(test::same_bits(out, 0.0F));
    }
}

// Rule (f): a span whose scores are all -infinity folds as the empty state, unless one of them is NaN.
TEST(SameBitsTest, ASpanOfMinusInfinityFoldsAsEmpty) {
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const std::size_t threads : {1U, 2U}) {
            const auto context = make_context(isa, threads);
            const SequenceData tail(100, 1, 1, 1, 4, 9);
            SequenceData s(612, 1, 1, 1, 4, 9);
            std::fill(s.query.begin(), s.query.end(), 1.0F);
            std::fill_n(s.key.begin(), 512, -kInfinity);
            std::copy(tail.key.begin(), tail.key.end(), s.key.begin() + 512);
            std::copy(tail.value.begin(), tail.value.end(), s.value.begin() + 512 * 4);
            SequenceData t = tail;
            std::fill(t.query.begin(), t.query.end(), 1.0F);
            EXPECT_TRUE(same_bits(plain(*context, t, 99, 1), plain(*context, s, 611, 1)));

            SequenceData all = s;
            std::fill(all.key.begin(), all.key.end(), -kInfinity);
            const Rows nothing = plain(*context, all, 611, 1);
            for (const float x : nothing.output) EXPECT_TRUE(test::same_bits(x, 0.0F));
            EXPECT_EQ(nothing.lse[0], -kInfinity);

            for (const std::int64_t place : {0, 5, 17, 511}) {  // a maximum may drop a NaN
                all = s;
                all.key[static_cast<std::size_t>(place)] = kNaN;
                for (const float x : plain(*context, all, 611, 1).output) EXPECT_TRUE(std::isnan(x)) << place;
                std::fill(all.key.begin(), all.key.end(), -kInfinity);
                all.key[static_cast<std::size_t>(place)] = kNaN;
                const Rows nan = plain(*context, all, 611, 1);
                for (const float x : nan.output) EXPECT_TRUE(std::isnan(x)) << place;
                EXPECT_TRUE(std::isnan(nan.lse[0]));
            }
        }
    }
}

/// Runs tasks on threads whose mode is odd.
class OddExecutor final : public Executor {
  public:
    std::size_t concurrency() const noexcept override { return 2; }
    void run(std::size_t tasks, Body body, void* state) override {
        for (std::size_t task = 0; task < tasks; ++task) {
            std::thread([&] {
                const OddFloatingPoint odd;
                body(state, task, task % 2);
                if (!OddFloatingPoint::is_set()) lost_.fetch_add(1);
            }).join();
        }
    }
    int lost() const { return lost_.load(); }

  private:
    std::atomic<int> lost_{0};
};

// Rule (h): the floating-point mode of the caller and of the threads changes nothing, and is theirs again afterwards.
TEST(SameBitsTest, FloatingPointModesDoNotMatter) {
    const SequenceData s(150, 6, 2, 21, 13, 12);
    SequenceData tiny = s;  // denormal values: flushing them would show
    for (float& x : tiny.value) x *= 0x1p-130F;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa);
        const auto odd_workers = std::make_shared<OddExecutor>();
        ContextOptions options;
        options.isa = isa;
        options.executor = odd_workers;
        Context odd_context(options);
        for (const SequenceData* data : {&s, static_cast<const SequenceData*>(&tiny)}) {
            const Rows usual = plain(*context, *data, 0, 100);
            const Rows usual_cached = chunked(*context, *data, 64);
            EXPECT_TRUE(same_bits(usual, plain(odd_context, *data, 0, 100)));
            EXPECT_TRUE(same_bits(usual_cached, chunked(odd_context, *data, 64)));
            Rows odd;
            Rows odd_cached;
            bool kept = false;
            {
                const OddFloatingPoint mode;
                odd = plain(*context, *data, 0, 100);
                odd_cached = chunked(*context, *data, 64);
                kept = OddFloatingPoint::is_set();
            }
            EXPECT_TRUE(kept);
            EXPECT_TRUE(same_bits(usual, odd));
            EXPECT_TRUE(same_bits(usual_cached, odd_cached));
            for (const KvTypes& types : narrow_types()) {
                SCOPED_TRACE(name_of(types));
                const Rows narrow = chunked(*context, *data, 64, types);
                EXPECT_TRUE(same_bits(narrow, chunked(odd_context, *data, 64, types)));
                const OddFloatingPoint mode;
                odd_cached = chunked(*context, *data, 64, types);
                EXPECT_TRUE(same_bits(narrow, odd_cached));
            }
        }
        EXPECT_EQ(odd_workers->lost(), 0);
    }
}

// Rule (i): rows that see nothing are +0 and -infinity, whatever earlier calls left in scratch memory or outputs.
TEST(SameBitsTest, SlopesDoNotDependOnTheCallersMode) {
    const std::vector<float> want = alibi_slopes_for(71);
    std::vector<float> got;
    {
        const OddFloatingPoint odd;
        got = alibi_slopes_for(71);
    }
    EXPECT_EQ(got, want);
}

TEST(SameBitsTest, RowsThatSeeNothingAreZero) {
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const std::size_t threads : {1U, 2U}) {
            const auto context = make_context(isa, threads);
            SequenceData s(700, 2, 1, 8, 8, 10);
            SequenceData poison = s;
            for (auto* v : {&poison.query, &poison.key, &poison.value}) std::fill(v->begin(), v->end(), kNaN);
            for (const std::int64_t offset :
                 {std::int64_t{-5}, std::int64_t{-600}, std::int64_t{-700}, std::numeric_limits<std::int64_t>::min(),
                  std::numeric_limits<std::int64_t>::max()}) {
                plain(*context, poison, 0, 700);
                Rows rows = s.empty_rows(700);
                AttentionOptions options;
                options.causal = true;
                options.alignment = Alignment::offset;
                options.causal_offset = offset;
                attend(*context, with_batch<3>(s.queries(0, 700)), with_batch<3>(s.keys(0, 700)),
                       with_batch<3>(s.values(0, 700)), options, with_batch<3>(s.output(rows, 0, 700)),
                       with_batch<2>(s.lse(rows, 0, 700)));
                const std::int64_t dead = offset > 0 ? 0 : offset < -700 ? 700 : -offset;
                const Rows nothing = part(s, rows, 0, dead);
                for (const float x : nothing.output) ASSERT_TRUE(test::same_bits(x, 0.0F)) << offset;
                for (const float x : nothing.lse) ASSERT_EQ(x, -kInfinity) << offset;
                const Rows alive = part(s, rows, dead, 700 - dead);
                for (const float x : alive.lse) ASSERT_TRUE(std::isfinite(x)) << offset;
                for (const KvTypes& types : narrow_types()) {
                    chunked(*context, poison, 700, types);
                    KvCache cache = cache_for(s, types);
                    cache.append(*context, 0, s.keys(0, 700), s.values(0, 700));
                    Rows few = s.empty_rows(9);
                    const CachedQuery query = cached_query(s, cache, 0, 9, few, 0);
                    attend(*context, std::span(&query, 1), options);
                    const std::int64_t blind = std::min<std::int64_t>(dead, 9);
                    const Rows none = part(s, few, 0, blind);
                    for (const float x : none.output) ASSERT_TRUE(test::same_bits(x, 0.0F)) << offset;
                    for (const float x : none.lse) ASSERT_EQ(x, -kInfinity) << offset;
                    for (const float x : part(s, few, blind, 9 - blind).lse) ASSERT_TRUE(std::isfinite(x)) << offset;
                }
            }
        }
    }
}

// Every NaN leaves as 0x7fc00000: which payload a sum keeps would depend on the tile.
TEST(SameBitsTest, NanIsCanonical) {
    SequenceData s(30, 3, 1, 8, 8, 11);
    s.set_token(7, -kNaN, std::bit_cast<float>(0xFFC12345U), 1.0F);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa);
        const auto check = [](const Rows& rows) {
            std::size_t nans = 0;
            for (const float x : rows.output) {
                if (!std::isnan(x)) continue;
                ++nans;
                EXPECT_EQ(std::bit_cast<std::uint32_t>(x), 0x7FC00000U);
            }
            EXPECT_EQ(nans, 23U * 3U * 8U);
            for (std::size_t i = 0; i < rows.lse.size(); ++i) {
                if (i < 7 * 3) {
                    EXPECT_TRUE(std::isfinite(rows.lse[i])) << i;
                } else {
                    EXPECT_EQ(std::bit_cast<std::uint32_t>(rows.lse[i]), 0x7FC00000U) << i;
                }
            }
        };
        check(plain(*context, s, 0, 30));
        for (const KvTypes& types : narrow_types()) {
            SCOPED_TRACE(name_of(types));
            check(chunked(*context, s, 30, types));
            check(chunked(*context, s, 4, types));
        }
    }
}

}  // namespace
}  // namespace headlong::test
