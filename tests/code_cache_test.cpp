// Caches of int8 and int4: what they hold of rows of any type, by a quantiser of the tests' own; the reference on what
// they hold; and the same bits, whatever was appended when, whoever asks, and with how many rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/reference/tensor.hpp"
#include "tests/support/any_tensor.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/codes.hpp"
#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"

namespace headlong::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const std::vector<KvTypes> kTypes{{KvType::int8, KvType::int8}, {KvType::int4, KvType::int4},
                                  {KvType::int8, KvType::f16},  {KvType::f32, KvType::int8},
                                  {KvType::int4, KvType::int8}, {KvType::bf16, KvType::int4}};

std::string name_of(const KvTypes& types) {
    return std::string("cache ") + to_string(types.keys) + ":" + to_string(types.values);
}
bool has_codes(KvType type) { return type == KvType::int8 || type == KvType::int4; }

KvCacheOptions options_of(const KvShape& shape, std::int64_t layers = 1) {
    KvCacheOptions options;
    options.shape = shape;
    options.layers = layers;
    return options;
}

// ------------------------------------------------------------------------------------------------------ what is held

/// What a cache of that type holds of a row: `group` elements share a scale, if it is of codes.
std::vector<double> stored(KvType type, const std::vector<double>& row, std::size_t group) {
    std::vector<double> held;
    if (!has_codes(type)) {
        const Element element = type == KvType::f16    ? Element::f16
                                : type == KvType::bf16 ? Element::bf16
                                                       : Element::f32;
        for (const double x : row) held.push_back(value_of(element, bits_of(element, x)));
        return held;
    }
    std::vector<float> floats;
    for (const double x : row) floats.push_back(static_cast<float>(x));
    const Codes codes(floats, group, type == KvType::int8 ? 127 : 7);
    for (std::size_t i = 0; i < row.size(); ++i) {
        held.push_back(static_cast<double>(codes.scales[i / group] * static_cast<float>(codes.codes[i])));
    }
    return held;
}
constexpr std::size_t kKeyGroup = 64;
constexpr std::size_t kValueGroup = 128;

/// Equal, zeros with their signs; all NaNs are one.
bool same(double a, double b) {
    return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

TEST(CodeCacheTest, HoldsRowsOfAnyTypeAndStrideAsTheFormulaSays) {
    Random random(seed_or(330));
    HEADLONG_TRACE_SEED(random);
    const std::vector<std::pair<std::int64_t, std::int64_t>> dims{{15, 21}, {1, 2},    {80, 96},   {64, 128}, {128, 15},
                                                                  {203, 0}, {72, 203}, {576, 512}, {192, 128}};
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 2);
        std::size_t next = 0;
        for (const auto& [dim_of_keys, dim_of_values] : dims) {
            const std::int64_t head_dim = dim_of_keys, value_dim = dim_of_values;
            const KvTypes types = kTypes[next++ % kTypes.size()];
            SCOPED_TRACE(name_of(types) + " of " + std::to_string(head_dim) + " and " + std::to_string(value_dim));
            const KvShape shape{.kv_heads = 2,
                                .head_dim = head_dim,
                                .value_dim = value_dim,
                                .key_type = types.keys,
                                .value_type = types.values};
            KvCache cache(options_of(shape));
            std::vector<double> keys, values;  // [token][head][dim], as they must be held
            const std::vector<std::int64_t> counts = head_dim > 100
                                                         ? std::vector<std::int64_t>{1, 14, 2, 66}
                                                         : std::vector<std::int64_t>{1, 15, 1, 47, 63, 64, 65, 0, 3};
            for (const std::int64_t count : counts) {
                const auto rows = [&](std::int64_t dim, KvType type, std::size_t group, std::vector<double>& held) {
                    const auto from = static_cast<Element>(random.integer(1, 3));
                    auto tensor = AnyTensor<3>::random(from, {shape.kv_heads, count, dim}, random, 1);
                    const auto start = static_cast<std::size_t>(random.integer(0, 100));
                    for_each_index<3>(tensor.extents(), [&](const Extents<3>& i) {
                        const auto d = static_cast<std::size_t>(i[2]);
                        const std::size_t special = start + static_cast<std::size_t>(i[1]) + d / group;
                        const Kind kind = special % 2 == 0 ? Kind::normal : kKinds[special / 2 % kKinds.size()];
                        tensor.set(i, static_cast<double>(number(kind, (d + special) % group, random)));
                    });
                    for (std::int64_t t = 0; t < count; ++t) {
                        for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
                            std::vector<double> row;
                            for (std::int64_t d = 0; d < dim; ++d) row.push_back(tensor.get({h, t, d}));
                            const std::vector<double> as = stored(type, row, group);
                            held.insert(held.end(), as.begin(), as.end());
                        }
                    }
                    return tensor;
                };
                const AnyTensor<3> key = rows(head_dim, types.keys, kKeyGroup, keys);
                const AnyTensor<3> value = rows(value_dim, types.values, kValueGroup, values);
                cache.append(context, 0, key.input(), value.input());
            }
            const std::int64_t length = cache.length();
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

// Keys are rotated in float, and rounded once.
TEST(CodeCacheTest, RotatedKeysAreRoundedOnce) {
    Random random(seed_or(331));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 2);
        for (const KvTypes& types : kTypes) {
            SCOPED_TRACE(name_of(types));
            RotaryOptions rotary;
            rotary.head_dim = 72;
            rotary.pairing = random.chance(0.5) ? RotaryPairing::halves : RotaryPairing::interleaved;
            KvCacheOptions options = options_of({.kv_heads = 2, .head_dim = 72, .value_dim = 9});
            options.rotary = Rotary(rotary);
            KvCache floats(options);
            options.shape.key_type = types.keys;
            options.shape.value_type = types.values;
            KvCache codes(options);
            for (const std::int64_t count : {1, 20, 64, 65}) {
                const auto key = AnyTensor<3>::random(Element::f32, {2, count, 72}, random, 1);
                const auto value = AnyTensor<3>::random(Element::f32, {2, count, 9}, random, 1);
                key.fill_normal(random);
                value.fill_normal(random);
                for (KvCache* cache : {&floats, &codes}) cache->append(context, 0, key.input(), value.input());
            }
            const AnyTensor<3> key_floats(Element::f32, {2, 150, 72}), key_codes(Element::f32, {2, 150, 72});
            const AnyTensor<3> value_floats(Element::f32, {2, 150, 9}), value_codes(Element::f32, {2, 150, 9});
            floats.read_back(0, 0, key_floats.output(), value_floats.output());
            codes.read_back(0, 0, key_codes.output(), value_codes.output());
            for (std::int64_t h = 0; h < 2; ++h) {
                for (std::int64_t t = 0; t < 150; ++t) {
                    std::vector<double> row;
                    for (std::int64_t d = 0; d < 72; ++d) row.push_back(key_floats.get({h, t, d}));
                    const std::vector<double> want = stored(types.keys, row, kKeyGroup);
                    for (std::int64_t d = 0; d < 72; ++d) {
                        ASSERT_TRUE(same(key_codes.get({h, t, d}), want[static_cast<std::size_t>(d)]))
                            << h << " " << t << " " << d;
                    }
                }
            }
        }
    }
}

TEST(CodeCacheTest, BytesAreThoseOfTheLayout) {
    // a block: 3 heads of 64 keys of 5, two quads of inputs or one line of two; and 64 values of 7, padded to 16
    const std::size_t key8 = 4 * (64 + 2 * 64), key4 = 4 * (64 + 64), value8 = 256 + 1024, value4 = 256 + 512;
    const std::size_t key_f32 = 64 * 5 * 4, key_bf16 = 64 * 5 * 2, value_f16 = 64 * 16 * 2;
    const std::vector<std::size_t> expected{3 * (key8 + value8),    3 * (key4 + value4), 3 * (key8 + value_f16),
                                            3 * (key_f32 + value8), 3 * (key4 + value8), 3 * (key_bf16 + value4)};
    Context context;
    for (std::size_t i = 0; i < kTypes.size(); ++i) {
        SCOPED_TRACE(name_of(kTypes[i]));
        KvCacheOptions options = options_of(
            {.kv_heads = 3, .head_dim = 5, .value_dim = 7, .key_type = kTypes[i].keys, .value_type = kTypes[i].values},
            2);
        KvCache cache(options);
        EXPECT_EQ(cache.pool()->block_bytes(), expected[i]);
        EXPECT_EQ(KvCache::estimate_bytes(options, 65), 2 * 2 * expected[i]);
        const std::vector<float> rows(3 * 65 * 7);
        for (std::size_t layer = 0; layer < 2; ++layer) {
            cache.append(context, layer, InputTensor<3>::dense(rows.data(), {3, 65, 5}),
                         InputTensor<3>::dense(rows.data(), {3, 65, 7}));
        }
        EXPECT_EQ(cache.reserved_bytes(), KvCache::estimate_bytes(options, 65));
        EXPECT_EQ(cache.used_bytes(), 2 * 65 * (expected[i] / 64));
    }
}

TEST(CodeCacheTest, TypesThatAreNoneAreRefused) {
    const auto none = static_cast<KvType>(5);
    EXPECT_TRUE(says(refusal([&] { KvCache(options_of({.head_dim = 8, .value_dim = 8, .key_type = none})); }),
                     "key_type is 5; allowed: f32, f16, bf16, int8, int4"));
    EXPECT_TRUE(says(refusal([&] { KvCache(options_of({.head_dim = 8, .value_dim = 8, .value_type = none})); }),
                     "value_type is 5"));
}

// --------------------------------------------------------------------------------------------------------- attention

struct Sizes {
    std::int64_t heads = 3, kv_heads = 1, head_dim = 40, value_dim = 24, q_len = 5, kv_len = 100;
};

AttentionCase case_of(const Sizes& s, const KvTypes& types, Random& random, bool any_types = false) {
    AttentionCase c;
    c.heads = s.heads;
    c.kv_heads = s.kv_heads;
    c.head_dim = s.head_dim;
    c.value_dim = s.value_dim;
    c.q_lens = {s.q_len};
    c.kv_lens = {s.kv_len};
    c.causal = true;
    c.cache = types;
    const auto element = [&] { return any_types ? static_cast<Element>(random.integer(1, 3)) : Element::f32; };
    const Element query = element(), key = element(), value = element();
    fill_normal(c, random, true, query, key, value);
    return c;
}

/// Through caches, at once and as they grow: against the reference on what they hold, and bit by bit against each
/// other.
void check(Isa isa, const AttentionCase& c, Random& random) {
    SCOPED_TRACE(c.describe());
    const Outcome outcome = run(shared_context(isa, 1), c, Route::cache);
    EXPECT_TRUE(agrees_in_codes(c, outcome, expected(as_stored(c))));
    EXPECT_TRUE(same_bits(outcome, run(shared_context(isa, 2), c, Route::cache, &random)));
    if (can_run_in_chunks(c)) {
        EXPECT_TRUE(same_bits(outcome, run_in_chunks(shared_context(isa, 1), c, 0, &random)));
    }
}

TEST(CodeCacheTest, AgreesWithTheReferenceOnWhatItHolds) {
    std::vector<Sizes> sizes;
    for (const auto& [head_dim, value_dim] : {std::pair{1, 1},
                                              {2, 5},
                                              {15, 21},
                                              {40, 59},
                                              {64, 64},
                                              {80, 96},
                                              {96, 80},
                                              {111, 112},
                                              {128, 128},
                                              {192, 128},
                                              {203, 203},
                                              {576, 512},
                                              {256, 129}}) {
        for (const std::int64_t q_len : {1, 5}) {
            sizes.push_back({.head_dim = head_dim, .value_dim = value_dim, .q_len = q_len});
        }
    }
    for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {3, 1}, {10, 2}, {6, 1}, {7, 1}, {24, 2}, {71, 1}, {5, 5}}) {
        for (const std::int64_t q_len : {1, 2, 16}) {
            sizes.push_back({.heads = heads, .kv_heads = kv_heads, .head_dim = 21, .value_dim = 17, .q_len = q_len});
        }
    }
    for (const std::int64_t kv_len : {1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 511, 512, 513, 577, 1025}) {
        for (const std::int64_t q_len : {1, 3, 50}) {
            if (q_len <= kv_len) sizes.push_back({.head_dim = 16, .value_dim = 16, .q_len = q_len, .kv_len = kv_len});
        }
    }
    Random random(seed_or(332));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        std::size_t next = 0;
        for (const Sizes& s : sizes) {
            ++next;
            if ((emulated() || isa == Isa::generic) && next % 3 != 0) continue;
            // every type meets every axis, not every size
            check(isa, case_of(s, kTypes[next % kTypes.size()], random, true), random);
            if (HasFailure()) return;
        }
    }
}

// Scores that are far apart, and rows with outliers: what codes are worst at.
TEST(CodeCacheTest, LargeScoresAndOutliersStayWithinTheTolerance) {
    Random random(seed_or(333));
    HEADLONG_TRACE_SEED(random);
    std::size_t next = 0;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const KvTypes& types : kTypes) {
            for (const double factor : {4.0, 16.0, 50.0}) {
                for (const bool outliers : {false, true}) {
                    if (next++ % 3 != 0) continue;
                    AttentionCase c =
                        case_of({.head_dim = 80, .value_dim = 64, .q_len = 9, .kv_len = 600}, types, random);
                    const auto larger = [&](InputTensor<4>& view, double by, double rare) {
                        const AnyTensor<4>& tensor = keep(c, AnyTensor<4>(Element::f32, view.extents));
                        std::vector<double> values = reference::widen(view).values;
                        for (double& x : values) x *= by * (random.chance(rare) ? 30.0 : 1.0);
                        tensor.assign(values);
                        view = tensor.input();
                    };
                    larger(c.query, factor, 0.0);
                    if (outliers) larger(c.key, 0.25, 0.01);
                    if (outliers) larger(c.value, 1.0, 0.01);
                    check(isa, c, random);
                }
            }
        }
    }
}

TEST(CodeCacheTest, EveryFeature) {
    Random random(seed_or(334));
    HEADLONG_TRACE_SEED(random);
    std::size_t next = 0;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const KvTypes& types : kTypes) {
            // of groups of 3: decoding, a few rows, more than a row tile
            for (const std::int64_t q_len : {1, 7, 30}) {
                if (next++ % 4 != 0) continue;
                const Sizes sizes{.heads = 6, .kv_heads = 2, .head_dim = 21, .q_len = q_len, .kv_len = 600};
                const AttentionCase plain = case_of(sizes, types, random);
                std::vector<double> allowed, bias;
                for (std::int64_t i = 0; i < q_len * 600; ++i) {
                    allowed.push_back(random.chance(0.3) && i / 100 % 3 != 1 ? 1.0 : 0.0);
                    bias.push_back(random.chance(0.3) ? -kInfinity : random.normal());
                }
                AttentionCase c = plain;
                c.features.window_left = 70;
                check(isa, c, random);
                c.features.window_left = 520;
                c.features.window_right = 3;
                c.causal = false;
                check(isa, c, random);
                c = plain;
                c.causal = false;
                check(isa, c, random);
                c = plain;
                c.features.softcap = 2.0F;
                check(isa, c, random);
                c.alibi_slopes = alibi_slopes_for(c.heads);
                check(isa, c, random);
                c = plain;
                c.sink_logits = {0.0F, 1.0F, -1.0F, 3.0F, 2.0F, 0.5F};
                c.live = {513};
                check(isa, c, random);
                c = plain;
                set_mask(c, Element::boolean, {q_len, 600}, allowed);
                check(isa, c, random);
                c = plain;
                set_mask(c, Element::f32, {q_len, 600}, bias);
                check(isa, c, random);
                // all of them
                c.features.softcap = 3.0F;
                c.features.window_left = 300;
                c.alibi_slopes = alibi_slopes_for(c.heads);
                c.sink_logits = {0.0F, 1.0F, -1.0F, 3.0F, 2.0F, 0.5F};
                c.live = {580};
                check(isa, c, random);
                if (HasFailure()) return;
            }
        }
    }
}

TEST(CodeCacheTest, ZeroRowsAreZeros) {
    Random random(seed_or(335));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const KvTypes& types : kTypes) {
            for (const double zero : {0.0, -0.0, 0x1p-101}) {
                AttentionCase c = case_of({.q_len = 3, .kv_len = 90}, types, random);
                SCOPED_TRACE(c.describe());
                const AnyTensor<4>& key = keep(c, AnyTensor<4>(Element::f32, {1, 1, 90, 40}));
                const AnyTensor<4>& value = keep(c, AnyTensor<4>(Element::f32, {1, 1, 90, 24}));
                for_each_index<4>(key.extents(), [&](const Extents<4>& i) { key.set(i, zero); });
                for_each_index<4>(value.extents(),
                                  [&](const Extents<4>& i) { value.set(i, 1.0 + static_cast<double>(i[3])); });
                c.key = key.input();
                c.value = value.input();
                check(isa, c, random);  // the mean of the values
                const Outcome mean = run(shared_context(isa), c, Route::cache);
                EXPECT_NEAR(value_of(Element::f32, mean.lse[2]), std::log(90.0), 1e-5);
                for_each_index<4>(value.extents(), [&](const Extents<4>& i) { value.set(i, zero); });
                if (!has_codes(types.values) && zero > 0.0) continue;
                for (const std::uint32_t bits : run(shared_context(isa), c, Route::cache).output) ASSERT_EQ(bits, 0U);
            }
        }
    }
}

// A row that holds a NaN or an infinity is none: the rows of queries that see it are NaN, all of them for a key, in the
// 128 columns of its group for a value, and no other one changes a bit.
TEST(CodeCacheTest, NonfiniteElementsReachExactlyTheRowsThatSeeThem) {
    constexpr std::int64_t kLength = 150;
    constexpr std::int64_t kWindow = 40;
    Random random(seed_or(336));
    HEADLONG_TRACE_SEED(random);
    std::size_t next = 0;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 1);
        for (const KvTypes& types : kTypes) {
            for (const std::int64_t value_dim : {20, 150}) {
                if (value_dim == 150 && (!has_codes(types.values) || emulated())) continue;
                const Sizes sizes{.head_dim = 70, .value_dim = value_dim, .q_len = kLength, .kv_len = kLength};
                AttentionCase clean = case_of(sizes, types, random);
                fill_normal(clean, random, false);
                clean.features.window_left = kWindow;
                SCOPED_TRACE(clean.describe());
                const Outcome before = run(context, clean, Route::cache);
                for (const bool of_key : {true, false}) {
                    if (!has_codes(of_key ? types.keys : types.values)) continue;
                    for (const auto& [bad, token, column] :
                         std::vector<std::tuple<double, std::int64_t, std::int64_t>>{{kNaN, 0, 0},
                                                                                     {kInfinity, 15, 17},
                                                                                     {-kInfinity, 64, 3},
                                                                                     {kNaN, 130, 19},
                                                                                     {kInfinity, 66, 5}}) {
                        if (next++ % 5 != 0 && !(emulated() && token == 130)) continue;
                        const std::int64_t at = !of_key && value_dim == 150 && token % 2 == 0 ? 130 + column : column;
                        SCOPED_TRACE((of_key ? "key " : "value ") + std::to_string(bad) + " at token " +
                                     std::to_string(token) + ", column " + std::to_string(at));
                        AttentionCase c = clean;
                        InputTensor<4>& view = of_key ? c.key : c.value;
                        const AnyTensor<4>& changed = keep(c, AnyTensor<4>(Element::f32, view.extents));
                        changed.assign(reference::widen(view).values);
                        changed.set({0, 0, token, at}, bad);
                        view = changed.input();
                        const Outcome after = run(context, c, Route::cache);
                        EXPECT_TRUE(same_bits(after, run_in_chunks(context, c, 4)));
                        EXPECT_TRUE(same_bits(after, run_in_chunks(context, c, 17)));
                        for (std::int64_t h = 0; h < 3; ++h) {
                            for (std::int64_t row = 0; row < kLength; ++row) {
                                const bool sees = row >= token && row <= token + kWindow;
                                const std::size_t place = c.row_of(0, h, row);
                                for (std::int64_t d = 0; d < value_dim; ++d) {
                                    const std::size_t i =
                                        place * static_cast<std::size_t>(value_dim) + static_cast<std::size_t>(d);
                                    if (sees && (of_key || d / 128 == at / 128)) {
                                        ASSERT_EQ(after.output[i], 0x7FC00000U) << h << " " << row << " " << d;
                                    } else {
                                        ASSERT_EQ(after.output[i], before.output[i]) << h << " " << row << " " << d;
                                    }
                                }
                                if (sees && of_key) {
                                    ASSERT_EQ(after.lse[place], 0x7FC00000U);
                                } else {
                                    ASSERT_EQ(after.lse[place], before.lse[place]);
                                }
                            }
                        }
                        // a mask in the place of causality, and a length that ends before the token
                        AttentionCase masked = c;
                        std::vector<double> allowed(static_cast<std::size_t>(kLength), 1.0);
                        allowed[static_cast<std::size_t>(token)] = 0.0;
                        set_mask(masked, Element::boolean, {kLength}, allowed);
                        AttentionCase masked_clean = clean;
                        masked_clean.mask = masked.mask;
                        EXPECT_TRUE(
                            same_bits(run(context, masked, Route::cache), run(context, masked_clean, Route::cache)));
                        EXPECT_TRUE(
                            same_bits(run_in_chunks(context, masked, 10), run_in_chunks(context, masked_clean, 10)));
                        AttentionCase shorter = rows_of(c, 0, 5);
                        shorter.features.alignment = Alignment::bottom_right;
                        shorter.features.causal_offset = 0;
                        shorter.features.window_left = -1;
                        shorter.live = {token};
                        AttentionCase shorter_clean = shorter;
                        shorter_clean.key = clean.key;
                        shorter_clean.value = clean.value;
                        EXPECT_TRUE(
                            same_bits(run(context, shorter, Route::cache), run(context, shorter_clean, Route::cache)));
                    }
                }
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- bits

InputTensor<3> head_rows(const InputTensor<4>& view, std::int64_t first, std::int64_t count) {
    const std::int64_t bytes = first * view.strides[2] * static_cast<std::int64_t>(headlong::size_of(view.dtype));
    return {static_cast<const std::byte*>(view.data) + bytes,
            view.dtype,
            {view.extents[1], count, view.extents[3]},
            {view.strides[1], view.strides[2], view.strides[3]}};
}

void append(Context& context, KvCache& cache, std::size_t layer, const AttentionCase& c, std::int64_t first,
            std::int64_t count) {
    cache.append(context, layer, head_rows(c.key, first, count), head_rows(c.value, first, count));
}

/// The case's queries over a layer of a cache, as it is.
Outcome attend_over(Context& context, const AttentionCase& c, const KvCache& cache, std::size_t layer = 0) {
    const AnyTensor<3> output(Element::f32, {c.heads, c.q_lens[0], c.value_dim});
    const AnyTensor<2> lse(Element::f32, {c.heads, c.q_lens[0]});
    CachedQuery query;
    query.query = head_rows(c.query, 0, c.q_lens[0]);
    query.cache = &cache;
    query.layer = layer;
    query.output = output.output();
    query.lse = lse.output();
    attend(context, {&query, 1}, c.options());
    return {DType::f32, output.all_bits(), lse.all_bits()};
}

// However the tokens came, the cache attends alike.
TEST(CodeCacheTest, PortionsOfAppendsDoNotMatter) {
    Random random(seed_or(337));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 2);
        for (const KvTypes& types : kTypes) {
            const AttentionCase c =
                case_of({.heads = 4, .kv_heads = 2, .head_dim = 15, .value_dim = 21, .q_len = 20, .kv_len = 600}, types,
                        random, true);
            SCOPED_TRACE(c.describe());
            const Outcome want = run(context, c, Route::cache);
            for (const std::int64_t portion : {1, 7, 64, 500, 0}) {
                KvCache cache(options_of(c.cache_shape()));
                while (cache.length() < 600) {
                    const std::int64_t count = portion == 0 ? random.integer(0, 90) : portion;
                    append(context, cache, 0, c, cache.length(), std::min(count, 600 - cache.length()));
                }
                EXPECT_TRUE(same_bits(attend_over(context, c, cache), want)) << "portions of " << portion;
            }
        }
    }
}

// Chunks of any size, more rows than a tile among them, threads, decode steps and batches.
TEST(CodeCacheTest, ChunksThreadsAndBatchesGiveTheSameBits) {
    Random random(seed_or(338));
    HEADLONG_TRACE_SEED(random);
    struct Heads {
        std::int64_t heads, kv_heads, head_dim, value_dim, length;
    };
    const std::vector<Heads> shapes{{1, 1, 15, 21, 530},  {2, 1, 80, 96, 520},    {10, 2, 64, 64, 100},
                                    {6, 1, 15, 144, 150}, {7, 1, 11, 21, 520},    {12, 1, 40, 16, 150},
                                    {71, 1, 15, 21, 70},  {2, 1, 576, 512, 70},   {3, 3, 192, 128, 90},
                                    {4, 1, 203, 203, 90}, {16, 4, 128, 128, 100}, {1, 1, 16, 20, 1100}};
    std::size_t isas = 0;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        ++isas;
        std::size_t next = 0;
        for (const Heads& shape : shapes) {
            const std::size_t turn = next++;
            // the set without vectors takes several times as long
            if ((emulated() || isa == Isa::generic) && turn % 3 != 0) continue;
            const std::int64_t group = shape.heads / shape.kv_heads;
            const std::int64_t length = shape.length;
            // every type meets every set, and every shape some types
            const KvTypes& types = kTypes[(turn + isas) % kTypes.size()];
            AttentionCase c = case_of({.heads = shape.heads,
                                       .kv_heads = shape.kv_heads,
                                       .head_dim = shape.head_dim,
                                       .value_dim = shape.value_dim,
                                       .q_len = length,
                                       .kv_len = length},
                                      types, random, true);
            SCOPED_TRACE(c.describe());
            const Outcome whole = run(shared_context(isa, 1), c, Route::cache);
            std::vector<std::int64_t> chunks{7, 64};
            if (length < 100) chunks.push_back(1);
            if (length > 500) chunks.push_back(500);
            chunks.push_back(std::max<std::int64_t>((turn % 2 == 0 ? 48 : 49) / group, 1));
            if (emulated()) chunks = {17, 64};
            for (const std::int64_t chunk : chunks) {
                SCOPED_TRACE("chunks of " + std::to_string(chunk));
                EXPECT_TRUE(same_bits(whole, run_in_chunks(shared_context(isa, 1), c, chunk)));
            }
            EXPECT_TRUE(same_bits(whole, run_in_chunks(shared_context(isa, 2), c, 0, &random)));
            EXPECT_TRUE(same_bits(whole, run(shared_context(isa, 2), c, Route::cache, &random)));
            EXPECT_TRUE(same_bits(whole, run(shared_context(isa, 5), c, Route::cache)));
            // the last rows alone: a decode step, and around a row tile
            KvCache cache(options_of(c.cache_shape()));
            append(shared_context(isa, 2), cache, 0, c, 0, length);
            for (const std::int64_t rows : {1, 2, 5, 47, 48, 49}) {
                if (emulated() && rows != 1 && rows != 48) continue;
                const std::int64_t count = std::max<std::int64_t>(rows / group, 1);
                SCOPED_TRACE("the last " + std::to_string(count));
                const AttentionCase part = rows_of(c, length - count, count);
                const Outcome want = rows_of(c, whole, length - count, count);
                for (const std::size_t threads : {1U, 5U}) {
                    EXPECT_TRUE(same_bits(want, attend_over(shared_context(isa, threads), part, cache)));
                }
            }
            if (HasFailure()) return;
        }
        for (const KvTypes& types : kTypes) {
            // sequences of one call, each as it is alone, in any order
            AttentionCase batch = case_of({.heads = 4, .kv_heads = 2, .head_dim = 21}, types, random);
            batch.q_lens = {130, 1, 0, 30};
            batch.kv_lens = {513, 600, 40, 65};
            fill_normal(batch, random);
            AttentionCase other = batch;
            other.q_lens = {30, 130};
            other.kv_lens = {65, 513};
            fill_normal(other, random);
            const auto as = [&](InputTensor<4>& view, const InputTensor<4>& from, std::int64_t s, std::int64_t to) {
                const AnyTensor<4>& tensor = keep(other, AnyTensor<4>(Element::f32, view.extents));
                const reference::Tensor old = reference::widen(view), wide = reference::widen(from);
                for_each_index<4>(tensor.extents(), [&](const Extents<4>& i) {
                    const bool held = i[0] == to && i[2] < from.extents[2];
                    tensor.set(i, held ? wide.at(s, i[1], i[2], i[3]) : old.at(i[0], i[1], i[2], i[3]));
                });
                view = tensor.input();
            };
            for (const auto& [s, to] : {std::pair{3, 0}, {0, 1}}) {
                as(other.query, batch.query, s, to);
                as(other.key, batch.key, s, to);
                as(other.value, batch.value, s, to);
            }
            SCOPED_TRACE(batch.describe());
            std::vector<Outcome> alone;
            for (std::int64_t s = 0; s < batch.sequences(); ++s) {
                alone.push_back(run(shared_context(isa, 1), sequence_of(batch, s), Route::cache, &random));
            }
            for (const std::size_t threads : {1U, 2U, 5U}) {
                if (emulated() && threads == 1) continue;
                const Outcome together = run(shared_context(isa, threads), batch, Route::cache, &random);
                for (std::int64_t s = 0; s < batch.sequences(); ++s) {
                    EXPECT_TRUE(same_bits(sequence_of(batch, together, s), alone[static_cast<std::size_t>(s)])) << s;
                }
                const Outcome reordered = run(shared_context(isa, threads), other, Route::cache, &random);
                EXPECT_TRUE(same_bits(sequence_of(other, reordered, 0), alone[3]));
                EXPECT_TRUE(same_bits(sequence_of(other, reordered, 1), alone[0]));
            }
        }
    }
}

TEST(CodeCacheTest, FeaturesGiveTheSameBitsInChunksAndSteps) {
    Random random(seed_or(339));
    HEADLONG_TRACE_SEED(random);
    std::size_t next = 0;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        ++next;
        for (const KvTypes& types : kTypes) {
            const std::int64_t length = emulated() ? 130 : 530;
            AttentionCase c =
                case_of({.heads = 6, .kv_heads = 2, .head_dim = 15, .value_dim = 21, .q_len = length, .kv_len = length},
                        types, random);
            std::vector<double> bias;
            for (std::int64_t i = 0; i < length * length; ++i) {
                bias.push_back(random.chance(0.3) || i / 90 % 4 == 0 ? -kInfinity : random.normal());
            }
            const std::size_t turn = next++ % 3;  // the one features, the others, all
            if (isa == Isa::generic && turn != 2) continue;
            if (turn != 1) {
                c.features.window_left = 100;
                c.features.softcap = 3.0F;
                c.sink_logits = {0.0F, 1.0F, -1.0F, 3.0F, 2.0F, 0.5F};
            }
            if (turn != 0) {
                c.alibi_slopes = alibi_slopes_for(6);
                set_mask(c, Element::f32, {length, length}, bias);
            }
            SCOPED_TRACE(c.describe());
            const Outcome whole = run(shared_context(isa, 1), c, Route::cache);
            for (const std::int64_t chunk : {1, 7, 64, 500}) {
                if (emulated() ? chunk != 7 : chunk == 1 && turn != 2) continue;
                EXPECT_TRUE(same_bits(whole, run_in_chunks(shared_context(isa, chunk == 7 ? 2 : 1), c, chunk)))
                    << "chunks of " << chunk;
            }
            EXPECT_TRUE(same_bits(whole, run(shared_context(isa, 5), c, Route::cache)));
        }
    }
}

// What was taken back is as if it had never been, whatever it was: the bits of a cache that never held it.
TEST(CodeCacheTest, RewoundAndReusedBlocksCarryNothingOver) {
    Random random(seed_or(340));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 1);
        for (const KvTypes& types : kTypes) {
            const AttentionCase all =
                case_of({.heads = 3, .head_dim = 21, .value_dim = 37, .q_len = 3, .kv_len = 250}, types, random);
            KvCache cache(options_of(all.cache_shape(), 2));
            for (const std::int64_t kept : {1, 2, 3, 5, 15, 16, 17, 63, 64, 70, 130}) {
                if (emulated() && kept % 2 == 0) continue;
                for (const double bad : {kNaN, kInfinity, 1e20}) {
                    const std::int64_t dropped = random.pick(std::vector<std::int64_t>{1, 2, 3, 20, 64, 100});
                    SCOPED_TRACE(name_of(types) + ", " + std::to_string(kept) + " kept, " + std::to_string(dropped) +
                                 " dropped, of " + std::to_string(bad));
                    const auto fresh = [&](std::int64_t length) {
                        KvCache other(options_of(all.cache_shape()));
                        append(context, other, 0, all, 0, length);
                        return attend_over(context, all, other);
                    };
                    for (const std::size_t layer : {0U, 1U}) append(context, cache, layer, all, 0, kept);
                    const auto keys = AnyTensor<3>::random(Element::f32, {1, dropped, 21}, random);
                    const auto values = AnyTensor<3>::random(Element::f32, {1, dropped, 37}, random);
                    for (const AnyTensor<3>* tensor : {&keys, &values}) {
                        for_each_index<3>(tensor->extents(), [&](const Extents<3>& i) {
                            tensor->set(i, random.chance(0.5) ? bad : random.normal());
                        });
                    }
                    cache.append(context, 0, keys.input(), values.input());
                    cache.discard_unfinished();
                    ASSERT_EQ(cache.length(0), kept);
                    EXPECT_TRUE(same_bits(attend_over(context, all, cache), fresh(kept)));
                    const std::int64_t more = random.integer(1, 120);
                    append(context, cache, 0, all, kept, more);
                    EXPECT_TRUE(same_bits(attend_over(context, all, cache), fresh(kept + more)));
                    cache.reset();  // the next turn takes the same blocks
                }
            }
        }
    }
}

TEST(CodeCacheTest, AnAppendThatRunsOutOfMemoryChangesNothing) {
    Random random(seed_or(341));
    HEADLONG_TRACE_SEED(random);
    Context context;
    for (const KvTypes& types : kTypes) {
        SCOPED_TRACE(name_of(types));
        const AttentionCase c =
            case_of({.heads = 3, .head_dim = 70, .value_dim = 37, .q_len = 3, .kv_len = 2200}, types, random, true);
        CountingResource memory;
        {
            KvCacheOptions options = options_of(c.cache_shape());
            options.memory = &memory;
            options.capacity = 2150;
            KvCache cache(options);
            append(context, cache, 0, c, 0, 100);
            const auto agrees_with_fresh = [&] {
                KvCache fresh(options_of(c.cache_shape()));
                append(context, fresh, 0, c, 0, cache.length());
                EXPECT_TRUE(same_bits(attend_over(context, c, cache), attend_over(context, c, fresh)));
            };
            memory.fail_after(0);
            int refusals = 0;
            for (int i = 0; i < 40; ++i) {
                const std::int64_t held = cache.length();
                try {
                    append(context, cache, 0, c, held, 50);
                    EXPECT_EQ(cache.length(), held + 50);
                } catch (const OutOfMemory&) {
                    ++refusals;
                    EXPECT_EQ(cache.length(), held);
                    if (refusals == 1) agrees_with_fresh();
                }
            }
            EXPECT_GT(refusals, 0);
            memory.never_fail();
            append(context, cache, 0, c, cache.length(), 50);
            agrees_with_fresh();
            // beyond the capacity
            const std::int64_t held = cache.length();
            EXPECT_TRUE(says(refusal([&] { append(context, cache, 0, c, 0, 2151 - held); }, ErrorCode::out_of_memory),
                             "capacity of 2150"));
            EXPECT_EQ(cache.length(), held);
            agrees_with_fresh();
        }
        EXPECT_EQ(memory.counts().live_bytes, 0U);
    }
}

TEST(CodeCacheTest, CachesOfDifferentTypesInOneCallAreRefused) {
    Context context;
    const std::vector<float> rows(8, 1.0F);
    const auto view = InputTensor<3>::dense(rows.data(), {1, 1, 8});
    std::vector<KvCache> caches;
    std::vector<float> outputs(2 * 8, 7.0F);
    for (const KvType type : {KvType::int8, KvType::int4}) {
        caches.emplace_back(options_of({.head_dim = 8, .value_dim = 8, .key_type = type, .value_type = KvType::int8}))
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

TEST(CodeCacheTest, SharedPrefixesAndScores) {
    Random random(seed_or(342));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const KvTypes& types : kTypes) {
            for (const std::int64_t q_len : {1, 60}) {
                const AttentionCase c = case_of({.head_dim = 72, .q_len = q_len, .kv_len = 150}, types, random);
                SCOPED_TRACE(c.describe());
                const AttentionCase rounded = as_stored(c);
                const Expected want = expected(rounded);
                // a prefix whose end is a panel's, a pair of tokens', and nothing's
                for (const std::int64_t prefix : {64, 70, 81}) {
                    const Outcome shared = run_with_shared_prefix(shared_context(isa, 1), c, prefix);
                    EXPECT_TRUE(agrees_in_codes(c, shared, want)) << prefix;
                    EXPECT_TRUE(same_bits(shared, run_with_shared_prefix(shared_context(isa, 5), c, prefix))) << prefix;
                }
                KvCache cache(options_of(c.cache_shape()));
                append(shared_context(isa), cache, 0, c, 0, 150);
                const double score = want.parts[0].magnitudes.score;
                for (const auto& [stage, of] : {std::pair{ScoreStage::scaled, reference::Scores::scaled},
                                                {ScoreStage::masked, reference::Scores::masked},
                                                {ScoreStage::weights, reference::Scores::weights}}) {
                    const AnyTensor<3> got(Element::f32, {c.heads, q_len, 150});
                    attention_scores(shared_context(isa, 2), head_rows(c.query, 0, q_len), cache, 0, c.options(), stage,
                                     got.output());
                    EXPECT_TRUE(got.written_exactly());
                    const Expected scores = expected(rounded, of);
                    std::size_t i = 0;
                    for_each_index<3>(got.extents(), [&](const Extents<3>& index) {
                        const double exact = scores.parts[0].scores.values[i++];
                        if (HasFailure()) return;
                        if (std::isinf(exact)) {
                            ASSERT_EQ(got.get(index), exact);
                        } else {
                            ASSERT_NEAR(got.get(index), exact, 1.5e-3 * std::max(1.0, score / 8.0)) << index[2];
                        }
                    });
                    // a row's scores know of no other row
                    const AnyTensor<3> last(Element::f32, {c.heads, 1, 150});
                    attention_scores(shared_context(isa, 1), head_rows(c.query, q_len - 1, 1), cache, 0, c.options(),
                                     stage, last.output());
                    for_each_index<3>(last.extents(), [&](const Extents<3>& index) {
                        EXPECT_EQ(last.bits(index), got.bits({index[0], q_len - 1, index[2]})) << index[2];
                    });
                }
            }
        }
    }
}

}  // namespace
}  // namespace headlong::test
