// Caches that forget: rings with sink tokens, and layers with windows. What they hold, what their queries see, and that
// nothing else (how tokens were split into appends, what was there before) reaches a bit of the results.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <headlong/headlong.hpp>

#include "tests/support/isas.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/token_rows.hpp"

namespace headlong::test {
namespace {

using Tokens = std::vector<std::uint64_t>;
using Kind = TokenRows::Kind;

struct Ring {
    std::int64_t capacity;
    std::int64_t sinks;
    std::int64_t max_chunk = 512;
    bool f16_sinks = false;

    std::string name() const {
        return std::to_string(capacity) + " with " + std::to_string(sinks) + " sinks" + (f16_sinks ? " in f16" : "");
    }
    KvCacheOptions options(const TokenRows& rows, const KvTypes& types) const {
        KvCacheOptions options;
        options.shape = rows.shape(types);
        options.capacity = capacity;
        options.ring = true;
        options.sink_tokens = sinks;
        options.max_chunk = max_chunk;
        options.f16_sinks = f16_sinks;
        return options;
    }
    bool resident(std::int64_t position, std::int64_t tokens) const {
        return position < sinks || position >= tokens - (capacity - sinks);
    }
};

Tokens tokens_up_to(std::size_t count) {
    Tokens tokens(count);
    std::iota(tokens.begin(), tokens.end(), std::uint64_t{1});
    return tokens;
}
Tokens head_of(const Tokens& tokens, std::size_t count) {
    return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count)};
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// A cache of the first `count` tokens in which only the resident ones are what they are: others are NaN.
KvCache copy_of_resident(Context& context, const TokenRows& rows, const Ring& ring, const KvCacheOptions& options,
                         const Tokens& tokens, std::size_t count) {
    KvCache cache(options);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (std::size_t first = 0; first < count;) {
        const std::size_t n = std::min<std::size_t>(static_cast<std::size_t>(options.max_chunk), count - first);
        std::vector<float> key = rows.rows(tokens, first, n, 0, Kind::key);
        std::vector<float> value = rows.rows(tokens, first, n, 0, Kind::value);
        for (std::size_t t = 0; t < n; ++t) {
            if (ring.resident(static_cast<std::int64_t>(first + t), static_cast<std::int64_t>(count))) continue;
            const auto fill = [&](std::vector<float>& x) {
                std::fill_n(x.begin() + static_cast<std::ptrdiff_t>(t * (x.size() / n)), x.size() / n, nan);
            };
            fill(key);
            fill(value);
        }
        const auto m = static_cast<std::int64_t>(n);
        cache.append(context, 0,
                     {key.data(),
                      DType::f32,
                      {rows.kv_heads, m, rows.head_dim},
                      {rows.head_dim, rows.kv_heads * rows.head_dim, 1}},
                     {value.data(),
                      DType::f32,
                      {rows.kv_heads, m, rows.value_dim},
                      {rows.value_dim, rows.kv_heads * rows.value_dim, 1}});
        first += n;
    }
    return cache;
}

const std::vector<Ring>& rings() {
    static const std::vector<Ring> all{{1, 0},
                                       {2, 1},
                                       {5, 0},
                                       {64, 4},
                                       {100, 0},
                                       {130, 67},
                                       {577, 4},
                                       {1100, 530, 96},
                                       {64, 4, 512, true},
                                       {1100, 530, 96, true}};
    return all;
}

TEST(RingTest, SameBitsAsACacheOfTheResidentRowsAtEveryStepAroundEachWrap) {
    TokenRows rows;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto one = make_context(isa, 1);
        const auto three = make_context(isa, 3);
        for (const TypesCase& types : all_kv_types()) {
            SCOPED_TRACE(types.name());
            for (const Ring& ring : rings()) {
                if (emulated() && ring.capacity > 200) continue;
                if (ring.f16_sinks && !types.has_codes()) continue;
                SCOPED_TRACE(ring.name());
                KvCacheOptions options = ring.options(rows, types.types);
                options.rotary = Rotary({.head_dim = rows.head_dim});
                const auto window = static_cast<std::size_t>(ring.capacity - ring.sinks);
                const std::size_t all = 2 * window + static_cast<std::size_t>(ring.sinks) + 70;
                const Tokens tokens = tokens_up_to(all);
                KvCache cache(options);
                for (std::size_t t = 0; t < all; ++t) {
                    rows.append(*one, cache, tokens, t, 1, 0);
                    // around the first time that it forgets, the first round, and the places where a block is dropped
                    const std::size_t past = t + 1 >= static_cast<std::size_t>(ring.sinks)
                                                 ? (t + 1 - static_cast<std::size_t>(ring.sinks)) % window
                                                 : window / 2;
                    const bool at_wrap = past <= 2 || past + 2 >= window;
                    const bool at_block = t > window && (t - window) % 64 <= 1;
                    if (!at_wrap && !at_block && t + 1 != all) continue;
                    if (window > 64 && t % 3 != 0 && !at_wrap) continue;
                    const Tokens seen = head_of(tokens, t + 1);
                    const KvCache copy = copy_of_resident(*one, rows, ring, options, tokens, t + 1);
                    const std::vector<float> expected = rows.attend(*one, copy, seen, 1, 0);
                    ASSERT_TRUE(same(rows.attend(*one, cache, seen, 1, 0), expected)) << "after " << t + 1;
                    ASSERT_TRUE(same(rows.attend(*three, cache, seen, 1, 0), expected)) << "3 threads, " << t + 1;
                }
            }
        }
    }
}

TEST(RingTest, AChunkGivesItsQueriesWhatSingleStepsDo) {
    TokenRows rows;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa, 2);
        for (const TypesCase& types : all_kv_types()) {
            SCOPED_TRACE(types.name());
            for (const Ring& ring : {Ring{100, 4}, Ring{37, 0}, Ring{700, 70}, Ring{100, 4, 512, true}}) {
                if (emulated() && ring.capacity > 200) continue;
                if (ring.f16_sinks && !types.has_codes()) continue;
                SCOPED_TRACE(ring.name());
                KvCacheOptions options = ring.options(rows, types.types);
                options.rotary = Rotary({.head_dim = rows.head_dim});
                const std::size_t all = 1600;
                const Tokens tokens = tokens_up_to(all);
                const auto row_floats = static_cast<std::size_t>(rows.heads() * rows.value_dim);
                std::vector<float> steps;  // outputs alone
                KvCache single(options);
                for (std::size_t t = 0; t < all; ++t) {
                    rows.append(*context, single, tokens, t, 1, 0);
                    const std::vector<float> out = rows.attend(*context, single, head_of(tokens, t + 1), 1, 0);
                    steps.insert(steps.end(), out.begin(), out.begin() + static_cast<std::ptrdiff_t>(row_floats));
                }
                for (const std::size_t chunk : {std::size_t{7}, std::size_t{64}, std::size_t{500}}) {
                    KvCache cache(options);
                    for (std::size_t t = 0; t < all;) {
                        const std::size_t n = std::min(chunk, all - t);
                        rows.append(*context, cache, tokens, t, n, 0);
                        const std::vector<float> out = rows.attend(*context, cache, head_of(tokens, t + n), n, 0);
                        ASSERT_EQ(
                            std::memcmp(out.data(), steps.data() + t * row_floats, n * row_floats * sizeof(float)), 0)
                            << "chunks of " << chunk << ", at " << t;
                        t += n;
                    }
                }
            }
        }
    }
}

/// Centred and turned where keys are codes.
KvCacheOptions transformed(KvCacheOptions options, const TypesCase& types, const std::vector<float>& centre) {
    if (types.types.keys < KvType::int8) return options;
    options.key_centre = centre;
    options.hadamard_keys = true;
    return options;
}

TEST(RingTest, SinksInF16HaveTheBitsOfAnF16Cache) {
    TokenRows rows;
    const std::vector<float> centre(static_cast<std::size_t>(rows.kv_heads * rows.head_dim), 0.25F);
    const std::int64_t sinks = 600;  // of two spans
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa, 2);
        for (const TypesCase& types : all_kv_types()) {
            if (!types.has_codes()) continue;
            for (const bool rotates : {false, true}) {
                SCOPED_TRACE(types.name() + (rotates ? ", rotary" : ""));
                const Ring ring{700, sinks, 700};
                KvCacheOptions plain = ring.options(rows, {KvType::f16, KvType::f16});
                if (rotates) plain.rotary = Rotary({.head_dim = rows.head_dim});
                KvCacheOptions options = transformed(plain, types, centre);
                options.shape = rows.shape(types.types);
                options.f16_sinks = true;
                const Tokens tokens = tokens_up_to(700);
                KvCache cache(options);
                KvCache halves(plain);
                for (const std::size_t length : {1U, 17U, 130U, 600U}) {  // sinks, all of them
                    const auto held = static_cast<std::size_t>(cache.length());
                    rows.append(*context, cache, tokens, held, length - held, 0);
                    rows.append(*context, halves, tokens, held, length - held, 0);
                    const Tokens seen = head_of(tokens, length);
                    const std::size_t queries = std::min<std::size_t>(length, 30);  // 60 rows are widened first
                    ASSERT_TRUE(same(rows.attend(*context, cache, seen, queries, 0),
                                     rows.attend(*context, halves, seen, queries, 0)))
                        << length;
                }
                // and what lies behind them is what it would be without
                options.f16_sinks = false;
                KvCache codes(options);
                rows.append(*context, codes, tokens, 0, 700, 0);
                rows.append(*context, cache, tokens, 600, 100, 0);
                std::vector<float> key[3];
                std::vector<float> value[3];
                const KvCache* const caches[] = {&cache, &halves, &codes};
                for (std::size_t i = 0; i < 3; ++i) {
                    const std::int64_t n = caches[i]->length();
                    key[i].resize(static_cast<std::size_t>(rows.kv_heads * n * rows.head_dim));
                    value[i].resize(static_cast<std::size_t>(rows.kv_heads * n * rows.value_dim));
                    caches[i]->read_back(0, 0, OutputTensor<3>::dense(key[i].data(), {rows.kv_heads, n, rows.head_dim}),
                                         OutputTensor<3>::dense(value[i].data(), {rows.kv_heads, n, rows.value_dim}));
                }
                for (std::int64_t head = 0; head < rows.kv_heads; ++head) {
                    for (std::int64_t t = 0; t < 700; ++t) {
                        const std::size_t like = t < sinks ? 1 : 2;
                        const std::int64_t n = like == 1 ? sinks : 700;
                        const auto row = [&](const std::vector<float>& x, std::int64_t of, std::int64_t columns) {
                            return x.data() + (head * of + t) * columns;
                        };
                        ASSERT_EQ(std::memcmp(row(key[0], 700, rows.head_dim), row(key[like], n, rows.head_dim),
                                              static_cast<std::size_t>(rows.head_dim) * sizeof(float)),
                                  0);
                        ASSERT_EQ(std::memcmp(row(value[0], 700, rows.value_dim), row(value[like], n, rows.value_dim),
                                              static_cast<std::size_t>(rows.value_dim) * sizeof(float)),
                                  0);
                    }
                }
            }
        }
    }
}

TEST(RingTest, SinksInF16AndCodesJoinAsTheirPartsDo) {
    TokenRows rows;
    const std::vector<float> centre(static_cast<std::size_t>(rows.kv_heads * rows.head_dim), 0.25F);
    const std::size_t sinks = 64;  // so that the others keep their places in blocks
    const std::size_t all = 900;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa, 3);
        for (const TypesCase& types : all_kv_types()) {
            if (!types.has_codes()) continue;
            SCOPED_TRACE(types.name());
            const Tokens tokens = tokens_up_to(all);
            KvCacheOptions options;
            options.shape = rows.shape({KvType::f16, KvType::f16});
            KvCache first(options);
            rows.append(*context, first, tokens, 0, sinks, 0);
            options = transformed(options, types, centre);
            options.shape = rows.shape(types.types);
            KvCache others(options);
            rows.append(*context, others, tokens, sinks, all - sinks, 0);
            options.sink_tokens = static_cast<std::int64_t>(sinks);
            options.f16_sinks = true;
            KvCache both(options);
            rows.append(*context, both, tokens, 0, all, 0);

            const std::size_t columns = static_cast<std::size_t>(rows.heads());
            const auto dim = static_cast<std::size_t>(rows.value_dim);
            const std::vector<float> parts[] = {rows.attend(*context, first, tokens, 1, 0),
                                                rows.attend(*context, others, tokens, 1, 0)};
            const std::vector<float> out = rows.attend(*context, both, tokens, 1, 0);
            for (std::size_t h = 0; h < columns; ++h) {
                const double lse[] = {static_cast<double>(parts[0][columns * dim + h]),
                                      static_cast<double>(parts[1][columns * dim + h])};
                const double sum = std::exp(lse[0]) + std::exp(lse[1]);
                EXPECT_NEAR(static_cast<double>(out[columns * dim + h]), std::log(sum), 2e-5);
                for (std::size_t c = 0; c < dim; ++c) {
                    const double expected = (std::exp(lse[0]) * static_cast<double>(parts[0][h * dim + c]) +
                                             std::exp(lse[1]) * static_cast<double>(parts[1][h * dim + c])) /
                                            sum;
                    EXPECT_NEAR(static_cast<double>(out[h * dim + c]), expected, 5e-5);
                }
            }
        }
    }
}

TEST(RingTest, SinksInF16AreCountedAndRefusedWhereThereAreNone) {
    TokenRows rows;
    const auto context = make_context(available_isas().back(), 1);
    KvCacheOptions options = Ring{300, 70, 100, true}.options(rows, {KvType::int8, KvType::int8});
    options.layers = 2;
    const std::int64_t windows[] = {0, 50};  // the second one sees no sinks
    options.layer_windows = windows;
    const std::size_t block = BlockPool(rows.shape({KvType::f16, KvType::f16})).block_bytes();
    KvCache cache(options);
    const Tokens tokens = tokens_up_to(1000);
    cache.reserve(80);
    const std::size_t reserved = cache.pool()->reserved_bytes();
    for (std::size_t t = 0; t < 80; t += 40) {
        for (std::size_t layer = 0; layer < 2; ++layer) rows.append(*context, cache, tokens, t, 40, layer);
    }
    EXPECT_EQ(cache.pool()->reserved_bytes(), reserved) << "what was reserved did not do";
    KvCacheOptions codes = options;
    codes.f16_sinks = false;
    KvCache without(codes);
    for (std::size_t t = 0; t < 1000; t += 40) {
        for (std::size_t layer = 0; layer < 2; ++layer) {
            if (t >= 80) rows.append(*context, cache, tokens, t, 40, layer);
            rows.append(*context, without, tokens, t, 40, layer);
        }
    }
    EXPECT_EQ(cache.used_bytes(), without.used_bytes() + 70 * block / 64);
    EXPECT_EQ(KvCache::estimate_bytes(options, 1000), KvCache::estimate_bytes(codes, 1000) + 2 * block);
    EXPECT_LE(cache.reserved_bytes(), KvCache::estimate_bytes(options, 1000));
    EXPECT_TRUE(cache.f16_sinks());
    cache.reset();
    EXPECT_EQ(cache.pool()->used_bytes(), 0U);

    options.layer_windows = {};
    options.shape = rows.shape({KvType::f32, KvType::bf16});
    EXPECT_NE(refusal([&] { KvCache refused(options); }).find("keys are f32 and values bf16; one must be int8 or int4"),
              std::string::npos);
    options.shape = rows.shape({KvType::int4, KvType::f16});
    options.sink_tokens = 0;
    EXPECT_NE(refusal([&] { KvCache refused(options); }).find("sink_tokens is 0; it must be at least 1"),
              std::string::npos);
}

TEST(RingTest, BeforeItForgetsItIsACacheOfTheSameSinkTokens) {
    TokenRows rows;
    const auto context = make_context(available_isas().back(), 2);
    for (const TypesCase& types : all_kv_types()) {
        for (const std::int64_t sinks : {0, 1, 4, 64, 70, 600}) {
            SCOPED_TRACE(types.name() + ", sinks " + std::to_string(sinks));
            const Ring ring{1300, sinks};
            const Tokens tokens = tokens_up_to(1300);
            KvCacheOptions options = ring.options(rows, types.types);
            options.max_chunk = 1300;
            KvCache cache(options);
            options.ring = false;
            KvCache plain(options);
            for (const std::size_t length : {std::size_t{3}, std::size_t{64}, std::size_t{601}, std::size_t{1300}}) {
                const auto held = static_cast<std::size_t>(cache.length());
                rows.append(*context, cache, tokens, held, length - held, 0);
                rows.append(*context, plain, tokens, held, length - held, 0);
                const Tokens seen = head_of(tokens, length);
                const std::size_t queries = std::min<std::size_t>(length, 5);
                EXPECT_TRUE(same(rows.attend(*context, cache, seen, queries, 0),
                                 rows.attend(*context, plain, seen, queries, 0)));
            }
        }
    }
}

/// Softmax in double over the positions that are resident, with the query's place before the sinks.
std::vector<double> reference(const TokenRows& rows, const Ring& ring, const Tokens& tokens, const Rotary* rotary,
                              const std::vector<float>& slopes) {
    const auto n = static_cast<std::int64_t>(tokens.size());
    const std::int64_t p = n - 1;
    const std::vector<float> key = rows.rows(tokens, 0, tokens.size(), 0, Kind::key);
    const std::vector<float> value = rows.rows(tokens, 0, tokens.size(), 0, Kind::value);
    const std::vector<float> query = rows.rows(tokens, tokens.size() - 1, 1, 0, Kind::query);
    const auto turned = [&](const float* row, std::int64_t position) {
        std::vector<double> x(row, row + rows.head_dim);
        const auto half = static_cast<std::size_t>(rows.head_dim / 2);
        for (std::size_t i = 0; rotary != nullptr && i < half; ++i) {
            const double angle = static_cast<double>(position) * rotary->inverse_frequencies()[i];
            const double a = x[i], b = x[i + half];
            x[i] = a * std::cos(angle) - b * std::sin(angle);
            x[i + half] = b * std::cos(angle) + a * std::sin(angle);
        }
        return x;
    };
    std::vector<double> out;
    for (std::int64_t h = 0; h < rows.heads(); ++h) {
        const std::int64_t g = h / rows.group;
        std::vector<double> sum(static_cast<std::size_t>(rows.value_dim));
        double total = 0.0;
        for (std::int64_t j = 0; j < n; ++j) {
            if (!ring.resident(j, n)) continue;
            const std::int64_t place = j < ring.sinks ? std::min(p, ring.capacity - 1) : p;
            const std::vector<double> q = turned(query.data() + h * rows.head_dim, place);
            const std::vector<double> k = turned(key.data() + (j * rows.kv_heads + g) * rows.head_dim, j);
            double score =
                std::inner_product(q.begin(), q.end(), k.begin(), 0.0) / std::sqrt(static_cast<double>(rows.head_dim));
            if (!slopes.empty())
                score -= static_cast<double>(slopes[static_cast<std::size_t>(h)]) * static_cast<double>(place - j);
            const double weight = std::exp(score);
            total += weight;
            for (std::int64_t c = 0; c < rows.value_dim; ++c) {
                sum[static_cast<std::size_t>(c)] +=
                    weight *
                    static_cast<double>(value[static_cast<std::size_t>((j * rows.kv_heads + g) * rows.value_dim + c)]);
            }
        }
        for (const double x : sum) out.push_back(x / total);
    }
    return out;
}

TEST(RingTest, AgreesWithTheReferenceOverTheResidentPositions) {
    const TokenRows rows;
    const Rotary rotary({.head_dim = rows.head_dim});
    const std::vector<float> slopes = alibi_slopes_for(rows.heads());
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa, 2);
        for (const Ring& ring : {Ring{8, 3}, Ring{70, 4}, Ring{70, 0}, Ring{600, 520}}) {
            for (const bool rotates : {false, true}) {
                for (const bool alibi : {false, true}) {
                    SCOPED_TRACE(ring.name() + (rotates ? ", rotary" : "") + (alibi ? ", alibi" : ""));
                    KvCacheOptions options = ring.options(rows, {});
                    if (rotates) options.rotary = rotary;
                    AttentionOptions attention;
                    if (alibi) attention.alibi_slopes = slopes;
                    const Tokens tokens = tokens_up_to(static_cast<std::size_t>(2 * ring.capacity + 3));
                    KvCache cache(options);
                    for (std::size_t t = 0; t < tokens.size(); ++t) {
                        rows.append(*context, cache, tokens, t, 1, 0);
                        const Tokens seen = head_of(tokens, t + 1);
                        if (t % 7 != 0 && t + 8 < static_cast<std::size_t>(ring.capacity)) continue;
                        if (emulated() && t % 11 != 0) continue;
                        const std::vector<float> out = rows.attend(*context, cache, seen, 1, 0, attention);
                        const std::vector<double> expected = reference(rows, ring, seen, rotates ? &rotary : nullptr,
                                                                       alibi ? slopes : std::vector<float>{});
                        for (std::size_t i = 0; i < expected.size(); ++i) {
                            ASSERT_NEAR(static_cast<double>(out[i]), expected[i], 1e-5) << "after " << t + 1;
                        }
                    }
                }
            }
        }
    }
}

TEST(RingTest, MemoryIsBoundedByCapacityChunkAndTwoBlocks) {
    TokenRows rows;
    const auto context = make_context(available_isas().back(), 1);
    for (const Ring& ring : {Ring{256, 4, 64}, Ring{100, 0, 7}, Ring{1, 0, 1}, Ring{300, 299, 500}}) {
        SCOPED_TRACE(ring.name());
        const KvCacheOptions options = ring.options(rows, {});
        KvCache cache(options);
        const auto block = cache.pool()->block_bytes();
        const std::size_t most = static_cast<std::size_t>((ring.capacity + ring.max_chunk + 63) / 64 + 2) * block;
        const Tokens tokens = tokens_up_to(3000);
        Random random(seed_or(11));
        HEADLONG_TRACE_SEED(random);
        std::size_t warm = 0;
        for (std::size_t t = 0; t < tokens.size();) {
            const auto n = std::min(static_cast<std::size_t>(random.integer(1, ring.max_chunk)), tokens.size() - t);
            if (random.chance(0.5)) cache.reserve(static_cast<std::int64_t>(n));
            rows.append(*context, cache, tokens, t, n, 0);
            t += n;
            ASSERT_LE(cache.reserved_bytes(), most) << "after " << t;
            ASSERT_LE(cache.reserved_bytes(), KvCache::estimate_bytes(options, static_cast<std::int64_t>(t)) + block);
            ASSERT_LE(cache.used_bytes(), static_cast<std::size_t>(ring.capacity + ring.max_chunk) * block / 64);
            if (t < 2000) warm = cache.pool()->reserved_bytes();
            if (t > 2000) {
                ASSERT_EQ(cache.pool()->reserved_bytes(), warm) << "it still grows";
            }
        }
        EXPECT_EQ(cache.length(), 3000);
        cache.reset();
        EXPECT_EQ(cache.pool()->used_bytes(), 0U);
    }
}

TEST(RingTest, LayersHoldWhatTheirWindowsNeed) {
    TokenRows rows;
    const auto context = make_context(available_isas().back(), 2);
    for (const TypesCase& types : all_kv_types()) {
        SCOPED_TRACE(types.name());
        KvCacheOptions options;
        options.shape = rows.shape(types.types);
        options.layers = 3;
        options.max_chunk = 40;
        const std::int64_t windows[] = {0, 100, 1};
        options.layer_windows = windows;
        KvCache cache(options);
        KvCacheOptions all = options;
        all.layer_windows = {};
        KvCache global(all);
        const Tokens tokens = tokens_up_to(900);
        for (std::size_t t = 0; t < tokens.size(); t += 30) {
            for (std::size_t layer = 0; layer < 3; ++layer) {
                rows.append(*context, cache, tokens, t, 30, layer);
                rows.append(*context, global, tokens, t, 30, layer);
                const Tokens seen = head_of(tokens, t + 30);
                AttentionOptions window;
                if (windows[layer] > 0) window.window_left = window_left_of(windows[layer]);
                EXPECT_TRUE(same(rows.attend(*context, cache, seen, 30, layer),
                                 rows.attend(*context, global, seen, 30, layer, window)))
                    << "layer " << layer << " after " << t + 30;
            }
        }
        EXPECT_LT(cache.reserved_bytes(), global.reserved_bytes() / 2);
        EXPECT_LE(cache.reserved_bytes(), KvCache::estimate_bytes(options, 900));
    }
}

TEST(RingTest, WhatIsForgottenIsRefusedAndNothingChanges) {
    TokenRows rows;
    const auto context = make_context(available_isas().back(), 1);
    const Ring ring{100, 4, 50};
    KvCache cache(ring.options(rows, {}));
    const Tokens tokens = tokens_up_to(400);
    for (std::size_t t = 0; t < 400; t += 50) rows.append(*context, cache, tokens, t, 50, 0);
    const std::vector<float> before = rows.attend(*context, cache, tokens, 50, 0);

    EXPECT_NE(refusal([&] { rows.attend(*context, cache, tokens, 52, 0); }, ErrorCode::would_forget)
                  .find("row 0 stands at position 348 and sees the keys from 253 on"),
              std::string::npos);
    EXPECT_NE(refusal([&] { cache.truncate(349); }, ErrorCode::would_forget).find("349 tokens"), std::string::npos);
    refusal([&] { cache.truncate(401); });
    refusal([&] { cache.truncate(-1); });
    refusal([&] { rows.append(*context, cache, tokens, 0, 51, 0); });
    std::vector<float> key(static_cast<std::size_t>(2 * 10 * 8)), value(static_cast<std::size_t>(2 * 10 * 5));
    const auto read = [&](std::int64_t first) {
        cache.read_back(0, first, OutputTensor<3>::dense(key.data(), {2, 10, 8}),
                        OutputTensor<3>::dense(value.data(), {2, 10, 5}));
    };
    refusal([&] { read(100); }, ErrorCode::would_forget);
    refusal([&] { read(0); }, ErrorCode::would_forget);
    read(254);
    EXPECT_TRUE(same(rows.attend(*context, cache, tokens, 50, 0), before));

    cache.truncate(350);  // the last append can always be taken back
    EXPECT_TRUE(same(rows.attend(*context, cache, head_of(tokens, 350), 1, 0),
                     rows.attend(*context, copy_of_resident(*context, rows, ring, ring.options(rows, {}), tokens, 350),
                                 head_of(tokens, 350), 1, 0)));

    KvCacheOptions options = ring.options(rows, {});
    options.sink_tokens = 100;
    EXPECT_NE(refusal([&] { KvCache refused(options); }).find("sink_tokens is 100; allowed: 0 to 99"),
              std::string::npos);
    options.sink_tokens = -1;
    refusal([&] { KvCache refused(options); });
    options.sink_tokens = 0;
    options.max_chunk = 0;
    refusal([&] { KvCache refused(options); });
    options.max_chunk = 1;
    options.capacity = std::numeric_limits<std::int64_t>::max();
    refusal([&] { KvCache refused(options); });
    options.capacity = 8;
    const std::int64_t windows[] = {1, 2};
    options.layer_windows = windows;
    refusal([&] { KvCache refused(options); });
    const std::int64_t negative[] = {-1};
    options.layer_windows = negative;
    refusal([&] { KvCache refused(options); });

    std::vector<float> scores(static_cast<std::size_t>(4 * 350));
    refusal(
        [&] {
            const std::vector<float> query(static_cast<std::size_t>(4 * 8));
            attention_scores(*context, InputTensor<3>::dense(query.data(), {4, 1, 8}), cache, 0, {}, ScoreStage::masked,
                             OutputTensor<3>::dense(scores.data(), {4, 1, 350}));
        },
        ErrorCode::unsupported);
}

TEST(RingTest, PositionsBeyond32Bits) {
    // A ring that stands far out: only the positions of queries and keys know.
    TokenRows rows;
    const auto context = make_context(available_isas().back(), 1);
    AttentionOptions options;
    options.alignment = Alignment::offset;
    options.causal = false;
    options.causal_offset = std::int64_t{1} << 40;
    KvCacheOptions cache_options = Ring{20, 2}.options(rows, {});
    KvCache cache(cache_options);
    const Tokens tokens = tokens_up_to(20);
    rows.append(*context, cache, tokens, 0, 20, 0);
    // so far out the window holds no key: the sinks alone are seen
    const std::vector<float> out = rows.attend(*context, cache, tokens, 1, 0, options);
    const Tokens two = head_of(tokens, 2);
    KvCache sinks(cache_options);
    rows.append(*context, sinks, two, 0, 2, 0);
    AttentionOptions all;
    all.causal = false;
    const std::vector<float> query = rows.rows(tokens, 19, 1, 0, Kind::query);
    std::vector<float> expected(out.size());
    const CachedQuery q = rows.cached(query.data(), sinks, 1, 0, expected.data());
    attend(*context, std::span(&q, 1), all);
    EXPECT_TRUE(same(out, expected));
}

}  // namespace
}  // namespace headlong::test
