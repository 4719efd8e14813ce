// Caches of f16 and bf16: what they hold of rows of any type, and what attention makes of it. Decoding widens 16-bit
// panels in registers, row blocks of 48 rows and more widen a span into scratch first: both must give the bits that
// plain tensors of the rounded rows give.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/reference/tensor.hpp"
#include "tests/support/any_tensor.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"

namespace headlong::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const std::vector<KvTypes> kTypes{{KvType::f16, KvType::f16},
                                  {KvType::bf16, KvType::bf16},
                                  {KvType::f16, KvType::f32},
                                  {KvType::bf16, KvType::f16},
                                  {KvType::f32, KvType::bf16}};

std::string name_of(const KvTypes& types) {
    return std::string("cache ") + to_string(types.keys) + ":" + to_string(types.values);
}

Element element_of(KvType type) {
    return type == KvType::f16 ? Element::f16 : type == KvType::bf16 ? Element::bf16 : Element::f32;
}

/// What a cache of that type holds of a number.
double stored(KvType type, double x) { return value_of(element_of(type), bits_of(element_of(type), x)); }

KvCacheOptions options_of(const KvShape& shape) {
    KvCacheOptions options;
    options.shape = shape;
    return options;
}

/// Numbers that rounding may get wrong: ties to even both ways, ends of ranges, subnormals, what becomes infinite.
double awkward(Random& random) {
    static const std::vector<double> kNumbers{0.0,
                                              -0.0,
                                              0x1.002p0,       // halfway between two f16, the lower one even
                                              0x1.006p0,       // the upper one even
                                              0x1.00200002p0,  // as near as a float comes to the first
                                              0x1.01p0,        // the same for bf16
                                              0x1.03p0,
                                              0x1.010002p0,
                                              65504.0,
                                              65519.99609375,
                                              65520.0,
                                              -65536.0,
                                              0x1p-24,
                                              0x1p-25,
                                              0x1.000002p-25,
                                              -0x1.8p-24,
                                              0x1.ffcp-15,
                                              0x1p-126,
                                              0x1p-133,
                                              0x1p-134,
                                              0x1p-149,
                                              0x1.fep127,
                                              0x1.fefffep127,
                                              0x1.ffp127,
                                              -0x1.fffffep127};
    return random.pick(kNumbers);
}

/// Equal, zeros with their signs; all NaNs are one.
bool same(double a, double b) {
    return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// ------------------------------------------------------------------------------------------------------ what is held

TEST(HalfCacheTest, RowsOfAnyTypeAndStrideAreRoundedToNearestEven) {
    Random random(seed_or(310));
    HEADLONG_TRACE_SEED(random);
    const std::vector<std::pair<std::int64_t, std::int64_t>> dims{{5, 7}, {1, 1}, {64, 48}, {33, 96}};
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 2);
        for (const KvTypes& types : kTypes) {
            SCOPED_TRACE(name_of(types));
            const auto [head_dim, value_dim] = random.pick(dims);
            const KvShape shape{.kv_heads = 2,
                                .head_dim = head_dim,
                                .value_dim = value_dim,
                                .key_type = types.keys,
                                .value_type = types.values};
            KvCache cache(options_of(shape));
            std::vector<double> keys, values;  // [token][head][dim], as they must be held
            for (const std::int64_t count : {1, 15, 1, 47, 63, 64, 65, 0, 3, 150}) {
                const auto rows = [&](std::int64_t dim, KvType type, std::vector<double>& held) {
                    const auto from = static_cast<Element>(random.integer(1, 3));
                    auto tensor = AnyTensor<3>::random(from, {shape.kv_heads, count, dim}, random, 1);
                    for_each_index<3>(tensor.extents(), [&](const Extents<3>& i) {
                        tensor.set(i, random.chance(0.3)    ? awkward(random)
                                      : random.chance(0.02) ? random.pick(std::vector<double>{kNaN, -kInfinity})
                                                            : random.normal());
                    });
                    for (std::int64_t t = 0; t < count; ++t) {
                        for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
                            for (std::int64_t d = 0; d < dim; ++d) held.push_back(stored(type, tensor.get({h, t, d})));
                        }
                    }
                    return tensor;
                };
                const AnyTensor<3> key = rows(head_dim, types.keys, keys);
                const AnyTensor<3> value = rows(value_dim, types.values, values);
                cache.append(context, 0, key.input(), value.input());
            }
            const std::int64_t length = cache.length();
            ASSERT_EQ(length, 409);
            for (const Element to : {Element::f32, Element::f16, Element::bf16}) {
                const auto key = AnyTensor<3>::random(to, {shape.kv_heads, length, head_dim}, random);
                const auto value = AnyTensor<3>::random(to, {shape.kv_heads, length, value_dim}, random);
                cache.read_back(0, 0, key.output(), value.output());
                EXPECT_TRUE(key.written_exactly());
                EXPECT_TRUE(value.written_exactly());
                const auto check = [&](const AnyTensor<3>& got, const std::vector<double>& held, std::int64_t dim) {
                    for_each_index<3>(got.extents(), [&](const Extents<3>& i) {
                        if (HasFailure()) return;
                        const double want = held[static_cast<std::size_t>((i[1] * shape.kv_heads + i[0]) * dim + i[2])];
                        const double rounded = value_of(to, bits_of(to, want));
                        ASSERT_TRUE(same(got.get(i), rounded)) << "head " << i[0] << ", token " << i[1] << ", column "
                                                               << i[2] << ": " << got.get(i) << ", want " << rounded;
                    });
                };
                check(key, keys, head_dim);
                check(value, values, value_dim);
            }
        }
    }
}

// Keys are rotated in float and rounded once.
TEST(HalfCacheTest, RotatedKeysAreRoundedOnce) {
    Random random(seed_or(311));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 2);
        for (const KvTypes& types : kTypes) {
            SCOPED_TRACE(name_of(types));
            KvShape shape{.kv_heads = 2, .head_dim = 24, .value_dim = 9};
            RotaryOptions rotary;
            rotary.head_dim = shape.head_dim;
            rotary.pairing = random.chance(0.5) ? RotaryPairing::halves : RotaryPairing::interleaved;
            KvCacheOptions options = options_of(shape);
            options.rotary = Rotary(rotary);
            KvCache floats(options);
            options.shape.key_type = types.keys;
            options.shape.value_type = types.values;
            KvCache halves(options);
            for (const std::int64_t count : {1, 20, 64, 65}) {
                const auto key = AnyTensor<3>::random(Element::f32, {2, count, 24}, random, 1);
                const auto value = AnyTensor<3>::random(Element::f32, {2, count, 9}, random, 1);
                key.fill_normal(random);
                value.fill_normal(random);
                for (KvCache* cache : {&floats, &halves}) cache->append(context, 0, key.input(), value.input());
            }
            const AnyTensor<3> key_floats(Element::f32, {2, 150, 24}), key_halves(Element::f32, {2, 150, 24});
            const AnyTensor<3> value_floats(Element::f32, {2, 150, 9}), value_halves(Element::f32, {2, 150, 9});
            floats.read_back(0, 0, key_floats.output(), value_floats.output());
            halves.read_back(0, 0, key_halves.output(), value_halves.output());
            for_each_index<3>({2, 150, 24}, [&](const Extents<3>& i) {
                if (HasFailure()) return;
                ASSERT_EQ(key_halves.get(i), stored(types.keys, key_floats.get(i)));
            });
            for_each_index<3>({2, 150, 9}, [&](const Extents<3>& i) {
                if (HasFailure()) return;
                ASSERT_EQ(value_halves.get(i), stored(types.values, value_floats.get(i)));
            });
        }
    }
}

TEST(HalfCacheTest, BytesAreThoseOfTheTypes) {
    // a block: 3 heads of 64 keys of 5, and 64 values of 7, padded to 16
    const auto block = [](std::size_t key, std::size_t value) { return 3 * 64 * (5 * key + 16 * value); };
    const std::vector<std::pair<KvTypes, std::size_t>> expected{{{KvType::f32, KvType::f32}, block(4, 4)},
                                                                {{KvType::f16, KvType::f16}, block(2, 2)},
                                                                {{KvType::bf16, KvType::f16}, block(2, 2)},
                                                                {{KvType::f16, KvType::f32}, block(2, 4)},
                                                                {{KvType::f32, KvType::bf16}, block(4, 2)}};
    Context context;
    for (const auto& [types, bytes] : expected) {
        SCOPED_TRACE(name_of(types));
        KvCacheOptions options = options_of(
            {.kv_heads = 3, .head_dim = 5, .value_dim = 7, .key_type = types.keys, .value_type = types.values});
        options.layers = 2;
        KvCache cache(options);
        EXPECT_EQ(cache.pool()->block_bytes(), bytes);
        EXPECT_EQ(KvCache::estimate_bytes(options, 65), 2 * 2 * bytes);
        const std::vector<float> rows(3 * 65 * 7);
        for (std::size_t layer = 0; layer < 2; ++layer) {
            cache.append(context, layer, InputTensor<3>::dense(rows.data(), {3, 65, 5}),
                         InputTensor<3>::dense(rows.data(), {3, 65, 7}));
        }
        EXPECT_EQ(cache.reserved_bytes(), KvCache::estimate_bytes(options, 65));
        EXPECT_EQ(cache.used_bytes(), 2 * 65 * bytes / 64);
    }
}

// --------------------------------------------------------------------------------------------------------- attention

struct Sizes {
    std::int64_t heads = 3, kv_heads = 1, head_dim = 40, value_dim = 24, q_len = 5, kv_len = 100;
};

AttentionCase case_of(const Sizes& s, const KvTypes& types, Random& random) {
    AttentionCase c;
    c.heads = s.heads;
    c.kv_heads = s.kv_heads;
    c.head_dim = s.head_dim;
    c.value_dim = s.value_dim;
    c.q_lens = {s.q_len};
    c.kv_lens = {s.kv_len};
    c.causal = true;
    c.cache = types;
    fill_normal(c, random);
    return c;
}

/// Through caches, at once and as they grow, against the reference on the rounded rows, and bit by bit against plain
/// tensors that hold these.
void check(Isa isa, const AttentionCase& c, Random& random) {
    SCOPED_TRACE(c.describe());
    const AttentionCase rounded = as_stored(c);
    const Outcome outcome = run(shared_context(isa, 1), c, Route::cache, &random);
    EXPECT_TRUE(agrees(c, outcome, expected(rounded)));
    EXPECT_TRUE(same_bits(outcome, run(shared_context(isa, 2), c, Route::cache, &random)));
    EXPECT_TRUE(same_bits(outcome, run(shared_context(isa, 1), rounded, Route::plain, &random)));
    if (can_run_in_chunks(c)) {
        EXPECT_TRUE(same_bits(outcome, run_in_chunks(shared_context(isa, 1), c, 0, &random)));
    }
}

TEST(HalfCacheTest, AgreesWithTheReferenceOnWhatItHolds) {
    std::vector<Sizes> sizes;
    for (const std::int64_t dim : {1, 15, 40, 64, 80, 96, 112, 128}) {
        sizes.push_back({.head_dim = dim, .value_dim = dim});
        sizes.push_back({.head_dim = dim, .value_dim = dim == 64 ? 15 : 64, .q_len = 1});
    }
    for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {3, 1}, {6, 2}, {16, 4}, {7, 1}, {71, 1}}) {
        for (const std::int64_t q_len : {1, 2, 16}) {
            sizes.push_back({.heads = heads, .kv_heads = kv_heads, .head_dim = 21, .value_dim = 17, .q_len = q_len});
        }
    }
    for (const std::int64_t kv_len : {1, 15, 16, 17, 63, 64, 65, 127, 129, 511, 512, 513, 577, 1025}) {
        for (const std::int64_t q_len : {1, 3, 50}) {
            if (q_len <= kv_len) sizes.push_back({.head_dim = 16, .value_dim = 16, .q_len = q_len, .kv_len = kv_len});
        }
    }
    Random random(seed_or(312));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        std::size_t next = 0;
        for (const Sizes& s : sizes) {
            // every type meets every axis, not every size
            check(isa, case_of(s, kTypes[next++ % kTypes.size()], random), random);
            if (HasFailure()) return;
        }
    }
}

TEST(HalfCacheTest, EveryFeature) {
    Random random(seed_or(313));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const KvTypes& types : kTypes) {
            // of groups of 3: in registers, and widened
            for (const std::int64_t q_len :
                 emulated() ? std::vector<std::int64_t>{1, 17} : std::vector<std::int64_t>{1, 7, 90}) {
                const Sizes sizes{.heads = 6, .kv_heads = 2, .q_len = q_len, .kv_len = 600};
                const AttentionCase plain = case_of(sizes, types, random);
                AttentionCase c = plain;
                c.features.window_left = 70;
                check(isa, c, random);
                c.features.window_left = 520;
                c.features.window_right = 3;
                c.causal = false;
                check(isa, c, random);
                c = plain;
                c.features.softcap = 2.0F;
                c.alibi_slopes = alibi_slopes_for(c.heads);
                check(isa, c, random);
                c = plain;
                c.sink_logits = {0.0F, 1.0F, -1.0F, 3.0F, 2.0F, 0.5F};
                c.live = {513};
                check(isa, c, random);
                c = plain;
                std::vector<double> allowed;
                for (std::int64_t i = 0; i < q_len * 600; ++i) allowed.push_back(random.chance(0.3) ? 1.0 : 0.0);
                set_mask(c, Element::boolean, {q_len, 600}, allowed);
                check(isa, c, random);
                if (HasFailure()) return;
            }
        }
    }
}

// A NaN, an infinity, or a float that overflows in an f16 cache: no row that may not see it changes a bit, and of those
// that see it only its column does.
TEST(HalfCacheTest, NonFiniteValuesReachExactlyTheRowsThatSeeThem) {
    constexpr std::int64_t kLength = 200;
    constexpr std::int64_t kWindow = 60;
    Random random(seed_or(314));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 1);
        for (const KvTypes& types : kTypes) {
            SCOPED_TRACE(name_of(types));
            const Sizes sizes{.heads = 3, .head_dim = 8, .value_dim = 20, .q_len = kLength, .kv_len = kLength};
            AttentionCase clean = case_of(sizes, types, random);
            fill_normal(clean, random, false);
            clean.features.window_left = kWindow;
            const Outcome before = run(context, clean, Route::cache);
            for (const double bad : {65520.0, -1e30, kInfinity, kNaN}) {
                if (std::isfinite(stored(types.values, bad))) continue;
                for (const std::int64_t token :
                     emulated() ? std::vector<std::int64_t>{130} : std::vector<std::int64_t>{0, 15, 64, 130}) {
                    SCOPED_TRACE(std::to_string(bad) + " at token " + std::to_string(token));
                    AttentionCase c = clean;
                    const AnyTensor<4>& value = keep(c, AnyTensor<4>(Element::f32, {1, 1, kLength, 20}));
                    value.assign(reference::widen(clean.value).values);
                    value.set({0, 0, token, 17}, bad);
                    c.value = value.input();
                    const Outcome after = run(context, c, Route::cache);
                    EXPECT_TRUE(same_bits(after, run_in_chunks(context, c, 1)));
                    EXPECT_TRUE(same_bits(after, run_in_chunks(context, c, 15)));  // 45 rows
                    for (std::int64_t h = 0; h < 3; ++h) {
                        for (std::int64_t row = 0; row < kLength; ++row) {
                            const bool sees = row >= token && row <= token + kWindow;
                            const std::size_t place = c.row_of(0, h, row);
                            for (std::size_t d = 0; d < 20; ++d) {
                                const std::uint32_t bits = after.output[place * 20 + d];
                                if (sees && d == 17) {
                                    ASSERT_FALSE(std::isfinite(value_of(Element::f32, bits))) << h << " " << row;
                                } else {
                                    ASSERT_EQ(bits, before.output[place * 20 + d]) << h << " " << row << " " << d;
                                }
                            }
                            ASSERT_EQ(after.lse[place], before.lse[place]);
                        }
                    }
                    // a mask in the place of causality
                    AttentionCase masked = c;
                    std::vector<double> allowed(static_cast<std::size_t>(kLength), 1.0);
                    allowed[static_cast<std::size_t>(token)] = 0.0;
                    set_mask(masked, Element::boolean, {kLength}, allowed);
                    AttentionCase masked_clean = clean;
                    masked_clean.mask = masked.mask;
                    EXPECT_TRUE(
                        same_bits(run(context, masked, Route::cache), run(context, masked_clean, Route::cache)));
                    EXPECT_TRUE(same_bits(run_in_chunks(context, masked, 1), run_in_chunks(context, masked_clean, 1)));
                }
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- bits

// Row blocks around the 48 rows from which on a span is widened into scratch, whatever the group; threads cut them
// further.
TEST(HalfCacheTest, ChunksThreadsAndBatchesGiveTheSameBits) {
    Random random(seed_or(315));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        std::size_t next = 0;
        for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {6, 2}, {4, 1}, {7, 1}, {71, 1}}) {
            const KvTypes types = kTypes[next++ % kTypes.size()];
            const std::int64_t group = heads / kv_heads;
            const std::int64_t length = heads == 71 ? 70 : 530;
            const Sizes sizes{.heads = heads,
                              .kv_heads = kv_heads,
                              .head_dim = 15,
                              .value_dim = 21,
                              .q_len = length,
                              .kv_len = length};
            const AttentionCase c = case_of(sizes, types, random);
            SCOPED_TRACE(c.describe());
            const Outcome whole = run(shared_context(isa, 1), c, Route::cache);
            std::vector<std::int64_t> chunks{1, 7, 64};
            for (const std::int64_t rows : {47, 48, 49}) chunks.push_back(std::max<std::int64_t>(rows / group, 1));
            for (const std::int64_t chunk : chunks) {
                SCOPED_TRACE("chunks of " + std::to_string(chunk));
                EXPECT_TRUE(same_bits(whole, run_in_chunks(shared_context(isa, 1), c, chunk)));
            }
            for (const std::size_t threads : {2U, 5U}) {
                SCOPED_TRACE(std::to_string(threads) + " threads");
                EXPECT_TRUE(same_bits(whole, run(shared_context(isa, threads), c, Route::cache)));
                EXPECT_TRUE(same_bits(whole, run_in_chunks(shared_context(isa, threads), c, 48)));
            }
            // the last rows alone, by every number of them around the limit
            for (const std::int64_t rows : {1, 47, 48, 49}) {
                const std::int64_t count = std::max<std::int64_t>(rows / group, 1);
                SCOPED_TRACE("the last " + std::to_string(count));
                EXPECT_TRUE(
                    same_bits(rows_of(c, whole, length - count, count),
                              run(shared_context(isa, 1), rows_of(c, length - count, count), Route::cache, &random)));
            }
            if (HasFailure()) return;
        }
        // sequences of one call, each as it is alone
        AttentionCase batch = case_of({.heads = 4, .kv_heads = 2}, {KvType::f16, KvType::bf16}, random);
        batch.q_lens = {130, 1, 0, 30};
        batch.kv_lens = {513, 600, 40, 65};
        fill_normal(batch, random);
        for (const std::size_t threads : {1U, 2U, 5U}) {
            const Outcome together = run(shared_context(isa, threads), batch, Route::cache, &random);
            for (std::int64_t s = 0; s < batch.sequences(); ++s) {
                EXPECT_TRUE(same_bits(sequence_of(batch, together, s),
                                      run(shared_context(isa, 1), sequence_of(batch, s), Route::cache, &random)))
                    << s;
            }
        }
    }
}

TEST(HalfCacheTest, CachesOfDifferentTypesInOneCallAreRefused) {
    Context context;
    const std::vector<float> rows(8, 1.0F);
    const auto view = InputTensor<3>::dense(rows.data(), {1, 1, 8});
    std::vector<KvCache> caches;
    std::vector<float> outputs(2 * 8, 7.0F);
    for (const KvType type : {KvType::f16, KvType::bf16}) {
        caches.emplace_back(options_of({.head_dim = 8, .value_dim = 8, .key_type = type, .value_type = KvType::f16}))
            .append(context, 0, view, view);
    }
    std::vector<CachedQuery> calls;
    for (std::size_t i = 0; i < 2; ++i) {
        calls.push_back({.query = view,
                         .cache = &caches[i],
                         .layer = 0,
                         .output = OutputTensor<3>::dense(outputs.data() + 8 * i, {1, 1, 8}),
                         .lse = {},
                         .mask = {}});
    }
    EXPECT_TRUE(says(refusal([&] { attend(context, calls); }), "must have the same KvShape"));
    EXPECT_TRUE(says(refusal([&] { attend_shared_prefix(context, caches[1], std::span(calls).first(1), {}); }),
                     "prefix: its KvShape"));
    EXPECT_EQ(outputs, std::vector<float>(16, 7.0F));
}

TEST(HalfCacheTest, ExactValuesGiveTheBitsOfAFloatCache) {
    Random random(seed_or(317));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const KvTypes& types : kTypes) {
            for (const std::int64_t q_len : {1, 16, 100}) {
                AttentionCase halves =
                    case_of({.heads = 4, .kv_heads = 1, .q_len = q_len, .kv_len = 600}, types, random);
                fill_normal(halves, random, true, Element::f32, element_of(types.keys), element_of(types.values));
                AttentionCase floats = halves;
                floats.cache = {};
                SCOPED_TRACE(halves.describe());
                EXPECT_TRUE(same_bits(run(shared_context(isa, 1), halves, Route::cache, &random),
                                      run(shared_context(isa, 1), floats, Route::cache, &random)));
            }
        }
    }
}

TEST(HalfCacheTest, SharedPrefixesAndScores) {
    Random random(seed_or(318));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 2);
        for (const KvTypes& types : kTypes) {
            for (const std::int64_t q_len : {1, 60}) {
                const AttentionCase c = case_of({.q_len = q_len, .kv_len = 150}, types, random);
                SCOPED_TRACE(c.describe());
                const AttentionCase rounded = as_stored(c);
                EXPECT_TRUE(
                    close(c, run_with_shared_prefix(context, c, 70), run(context, c, Route::cache), expected(rounded)));

                KvCache cache(options_of(c.cache_shape()));
                const auto of = [](const InputTensor<4>& view) {
                    return InputTensor<3>{view.data,
                                          view.dtype,
                                          {view.extents[1], view.extents[2], view.extents[3]},
                                          {view.strides[1], view.strides[2], view.strides[3]}};
                };
                cache.append(context, 0, of(c.key), of(c.value));
                for (const ScoreStage stage : {ScoreStage::scaled, ScoreStage::weights}) {
                    const AnyTensor<4> plain(Element::f32, {1, c.heads, q_len, 150});
                    const AnyTensor<3> cached(Element::f32, {c.heads, q_len, 150});
                    attention_scores(context, c.query, rounded.key, c.options(), stage, plain.output());
                    attention_scores(context, of(c.query), cache, 0, c.options(), stage, cached.output());
                    EXPECT_EQ(plain.all_bits(), cached.all_bits());
                }
            }
        }
    }
}

}  // namespace
}  // namespace headlong::test
