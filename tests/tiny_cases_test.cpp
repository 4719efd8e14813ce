// The tiny cases whose answers are known (SEMANTICS.md, section 3), by their numbers, on every instruction set and
// through everything that computes attention: plain tensors, a cache at once and in chunks of 1, 2 and 3 queries,
// pages, packed rows between empty sequences, parts that merge() joins, a shared prefix.
// Case 9 (rotary) is in rotary_test.cpp.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/reference/attention.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// What is known about a case: [heads][q_len][value_dim], and lse [heads][q_len] or nothing.
struct Known {
    std::vector<double> output;
    std::vector<double> lse = {};
    double relative = 1e-6;  ///< 0: exactly
    double absolute = 0.0;   ///< for large scores, which cost bits in any float32 (SEMANTICS.md, section 6)
};

void expect_known(const AttentionCase& c, const Outcome& got, const Known& known) {
    ASSERT_EQ(got.output.size(), known.output.size());
    for (std::size_t i = 0; i < known.output.size(); ++i) {
        const double value = value_of(element_of(got.type), got.output[i]);
        const double size = std::isfinite(known.output[i]) ? std::abs(known.output[i]) : 0.0;
        const double bound = known.relative * size + known.absolute;
        ASSERT_TRUE(agree(value, known.output[i], bound))
            << "output " << i << ": got " << value << ", want " << known.output[i] << "; " << c.describe();
    }
    for (std::size_t i = 0; i < known.lse.size(); ++i) {
        const double value = value_of(Element::f32, got.lse.at(i));
        const double size = std::isfinite(known.lse[i]) ? std::max(1.0, std::abs(known.lse[i])) : 0.0;
        const double bound = std::max(known.relative, 1e-7) * size + known.absolute;
        ASSERT_TRUE(agree(value, known.lse[i], bound))
            << "lse " << i << ": got " << value << ", want " << known.lse[i] << "; " << c.describe();
    }
}

/// Cuts into two and three parts, of which some are empty.
std::vector<std::vector<std::int64_t>> cuts_of(std::int64_t kv_len) {
    std::vector<std::vector<std::int64_t>> cuts{{0}, {kv_len / 2}, {kv_len}, {kv_len / 3, kv_len - kv_len / 3}};
    if (kv_len >= 2) cuts.push_back({1, 1});
    return cuts;
}

void expect_everywhere(const AttentionCase& c, const Known& known) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t threads : {1U, 3U}) {
            SCOPED_TRACE(std::to_string(threads) + " threads");
            Context& context = shared_context(isa, threads);
            for (const Route route : possible_routes(c)) {
                SCOPED_TRACE(to_string(route));
                expect_known(c, run(context, c, route), known);
            }
            {
                SCOPED_TRACE("packed between empty sequences");
                const AttentionCase three = between_empty_sequences(c);
                for (const Route route : {Route::packed, Route::cache, Route::paged}) {
                    SCOPED_TRACE(to_string(route));
                    expect_known(c, run(context, three, route), known);
                }
            }
            if (can_run_in_chunks(c)) {
                for (const std::int64_t chunk : {1, 2, 3}) {
                    SCOPED_TRACE("chunks of " + std::to_string(chunk));
                    expect_known(c, run_in_chunks(context, c, chunk), known);
                }
            }
            if (!(c.mask && c.mask->keys == AttentionMask::Keys::last_q)) {
                for (const std::vector<std::int64_t>& cuts : cuts_of(c.kv_lens[0])) {
                    for (std::size_t sink = 0; sink <= (c.sink_logits.empty() ? 0 : cuts.size()); ++sink) {
                        SCOPED_TRACE("merged from " + std::to_string(cuts.size() + 1) + " parts, cut at " +
                                     std::to_string(cuts.front()) + ", the sink in part " + std::to_string(sink));
                        expect_known(c, run_merged(context, c, cuts, sink), known);
                    }
                }
            }
            for (const std::int64_t prefix : {std::int64_t{0}, std::int64_t{1}, c.live_of(0) - c.q_lens[0]}) {
                if (prefix < 0 || !can_share_prefix(c, prefix)) continue;
                SCOPED_TRACE("shared prefix of " + std::to_string(prefix));
                expect_known(c, run_with_shared_prefix(context, c, prefix), known);
            }
            if (testing::Test::HasFailure()) return;
        }
    }
}

std::vector<double> zeros(std::size_t count) { return std::vector<double>(count, 0.0); }

/// One head of head_dim 1 and scale 1, all scores 0.
AttentionCase equal_scores(std::size_t q_len, const std::vector<double>& value, Element element = Element::f32) {
    return dense_case(1, 1, 1, 1, zeros(q_len), zeros(value.size()), value, element);
}

/// One query of 1: the keys are the scores.
AttentionCase scores_of(const std::vector<double>& scores, const std::vector<double>& value,
                        Element element = Element::f32) {
    AttentionCase c = dense_case(1, 1, 1, 1, {1.0}, scores, value, element);
    c.features.scale = 1.0F;
    return c;
}

AttentionCase causal(AttentionCase c, Alignment alignment = Alignment::bottom_right, std::int64_t offset = 0) {
    c.causal = true;
    c.features.alignment = alignment;
    c.features.causal_offset = offset;
    return c;
}

TEST(TinyCasesTest, Case01CausalAlignments) {
    const AttentionCase c = equal_scores(2, {1, 2, 4, 8, 16});
    expect_everywhere(causal(c), {{3.75, 6.2}, {std::log(4.0), std::log(5.0)}});
    expect_everywhere(causal(c, Alignment::top_left), {{1, 1.5}, {0, std::log(2.0)}});
    expect_everywhere(causal(c, Alignment::offset, 3), {{3.75, 6.2}, {std::log(4.0), std::log(5.0)}});
    expect_everywhere(causal(c, Alignment::offset, -1), {{0, 1}, {-kInfinity, 0}});
    expect_everywhere(c, {{6.2, 6.2}, {std::log(5.0), std::log(5.0)}});
}

TEST(TinyCasesTest, Case02MoreQueriesThanKeys) {
    const AttentionCase c = equal_scores(5, {3, 5});
    expect_everywhere(causal(c), {{0, 0, 0, 3, 4}, {-kInfinity, -kInfinity, -kInfinity, 0, std::log(2.0)}});
}

TEST(TinyCasesTest, Case03Windows) {
    AttentionCase c = causal(equal_scores(4, {1, 2, 4, 8}));
    c.features.window_left = window_left_of(2);
    expect_everywhere(c, {{1, 1.5, 3, 6}});
    c.features.window_left = 2;
    expect_everywhere(c, {{1, 1.5, 7.0 / 3.0, 14.0 / 3.0}});
    c.features.window_left = 0;
    expect_everywhere(c, {{1, 2, 4, 8}, {0, 0, 0, 0}});
    c.causal = false;
    c.features.window_right = 1;
    expect_everywhere(c, {{1.5, 3, 6, 8}});
    c.features.window_left = -1;
    expect_everywhere(c, {{1.5, 7.0 / 3.0, 3.75, 3.75}});
}

TEST(TinyCasesTest, Case04SinkLogits) {
    AttentionCase c = scores_of({0}, {4});
    c.sink_logits = {0.0F};
    expect_everywhere(c, {{2}, {std::log(2.0)}});
    expect_everywhere(causal(c), {{2}, {std::log(2.0)}});
    c.sink_logits = {std::log(3.0F)};
    expect_everywhere(c, {{1}, {std::log(4.0)}});
    c.sink_logits = {-std::numeric_limits<float>::infinity()};
    expect_everywhere(c, {{4}, {0}});
    c = scores_of({0, 0}, {6, 6});
    c.sink_logits = {0.0F};
    expect_everywhere(c, {{4}, {std::log(3.0)}});
    expect_everywhere(causal(c), {{4}, {std::log(3.0)}});
    // no key at all: nothing, and the sink's logit
    c.live = {0};
    c.sink_logits = {0.75F};
    expect_everywhere(c, {{0}, {0.75}, 0.0});
}

TEST(TinyCasesTest, Case05Merge) {
    const auto merged = [](Context& context, std::vector<float> outputs, std::vector<float> logs) {
        std::vector<AttentionPart> parts;
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            parts.push_back(
                {InputTensor<4>::dense(&outputs[i], {1, 1, 1, 1}), InputTensor<3>::dense(&logs[i], {1, 1, 1})});
        }
        float output = -7.0F;
        float lse = -7.0F;
        merge(context, parts, OutputTensor<4>::dense(&output, {1, 1, 1, 1}), OutputTensor<3>::dense(&lse, {1, 1, 1}));
        return std::vector<float>{output, lse};
    };
    const float empty = -std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    HEADLONG_FOR_EACH_ISA(isa) {
        Context& context = shared_context(isa);
        std::vector<float> got = merged(context, {2.0F, 10.0F}, {std::log(3.0F), 0.0F});
        EXPECT_NEAR(got[0], 4.0, 4e-6);
        EXPECT_NEAR(got[1], std::log(4.0), 1e-6);
        const std::vector<float> nothing{0.0F, empty};
        EXPECT_TRUE(same_bits(merged(context, {}, {}), nothing));
        EXPECT_TRUE(same_bits(merged(context, {0.0F}, {empty}), nothing));
        EXPECT_TRUE(same_bits(merged(context, {0.0F, 0.0F}, {empty, empty}), nothing));
        // an empty part changes nothing, whatever it holds
        const std::vector<float> same{3.25F, 0.5F};
        EXPECT_TRUE(same_bits(merged(context, {3.25F, nan}, {0.5F, empty}), same));
        EXPECT_TRUE(same_bits(merged(context, {0.0F, 3.25F, 0.0F}, {empty, 0.5F, empty}), same));
        got = merged(context, {1.0F, 2.0F}, {nan, 0.0F});
        EXPECT_TRUE(std::isnan(got[0]) && std::isnan(got[1]));
        // far apart, and far from 0
        EXPECT_TRUE(same_bits(merged(context, {1.0F, 2.0F}, {-1e30F, 1e30F}), std::vector<float>{2.0F, 1e30F}));
    }
}

TEST(TinyCasesTest, Case06ARewoundSlot) {
    AttentionCase c = scores_of({2, 0}, {1, 0});
    c.live = {1};
    expect_everywhere(c, {{1}, {2}, 0.0});
    expect_everywhere(causal(c), {{1}, {2}, 0.0});
    // a slot that was written and taken back: it holds NaN, in the midst of a block and of a panel
    const std::vector<float> nan(3, static_cast<float>(kNaN));
    const auto bad = InputTensor<3>::dense(nan.data(), {1, 3, 1});
    HEADLONG_FOR_EACH_ISA(isa) {
        Context& context = shared_context(isa);
        for (std::int64_t length = 1; length <= 70; ++length) {
            KvCacheOptions options;
            options.shape = {.kv_heads = 1, .head_dim = 1, .value_dim = 1};
            options.layers = 2;
            KvCache cache(options);
            const std::vector<float> keys(static_cast<std::size_t>(length), 0.0F);
            std::vector<float> values(keys.size());
            std::iota(values.begin(), values.end(), 0.0F);
            for (std::size_t layer = 0; layer < 2; ++layer) {
                cache.append(context, layer, InputTensor<3>::dense(keys.data(), {1, length, 1}),
                             InputTensor<3>::dense(values.data(), {1, length, 1}));
            }
            cache.append(context, 0, bad, bad);
            cache.discard_unfinished();
            ASSERT_EQ(cache.length(0), length);
            float output = 0.0F;
            float lse = 0.0F;
            const float query = 1.0F;
            CachedQuery cached;
            cached.query = InputTensor<3>::dense(&query, {1, 1, 1});
            cached.cache = &cache;
            cached.output = OutputTensor<3>::dense(&output, {1, 1, 1});
            cached.lse = OutputTensor<2>::dense(&lse, {1, 1});
            attend(context, {&cached, 1});
            ASSERT_NEAR(output, static_cast<double>(length - 1) / 2, 1e-5);
            ASSERT_NEAR(lse, std::log(static_cast<double>(length)), 1e-6);
        }
    }
}

TEST(TinyCasesTest, Case07SoftcapBeforeTheMask) {
    AttentionCase c = scores_of({3, 10}, {1, 100});
    c.features.softcap = 1.0F;
    const double first = std::tanh(3.0);
    const double second = std::tanh(10.0);
    for (const Element element : {Element::f32, Element::f16, Element::bf16}) {
        set_mask(c, element, {2}, {0.0, -kInfinity});
        expect_everywhere(c, {{1}, {first}});
    }
    set_mask(c, Element::boolean, {1, 1, 2}, {1, 0});
    expect_everywhere(c, {{1}, {first}});
    // its weight is 0, not small
    HEADLONG_FOR_EACH_ISA(isa) {
        const AnyTensor<4> weights(Element::f32, {1, 1, 1, 2});
        attention_scores(shared_context(isa), c.query, c.key, c.options(), ScoreStage::weights, weights.output());
        EXPECT_EQ(weights.get({0, 0, 0, 0}), 1.0);
        EXPECT_EQ(weights.get({0, 0, 0, 1}), 0.0);
    }
    c.mask.reset();
    const double weight = 1.0 / (1.0 + std::exp(second - first));
    expect_everywhere(c, {{weight + 100.0 * (1.0 - weight)}});
    // a mask that is added afterwards is not capped
    set_mask(c, Element::f32, {2}, {5.0, 0.0});
    const double biased = 1.0 / (1.0 + std::exp(second - first - 5.0));
    expect_everywhere(c, {{biased + 100.0 * (1.0 - biased)}, {}, 3e-6});
}

TEST(TinyCasesTest, Case08Alibi) {
    AttentionCase c = equal_scores(1, {1, 2, 4, 8});
    c.alibi_slopes = {0.5F};
    expect_everywhere(c, {{5.180798}});
    expect_everywhere(causal(c), {{5.180798}});
    // a query that stands on key 0 weighs the other way round
    c = causal(equal_scores(4, {8, 4, 2, 1}), Alignment::top_left);
    c.causal = false;
    c.q_lens = {1};
    c.query.extents[2] = 1;
    c.alibi_slopes = {0.5F};
    expect_everywhere(c, {{5.180798}});
    const std::vector<double> want{.5,       .25,       .125,    .0625,   .03125,  .015625,
                                   .0078125, .00390625, .707107, .353553, .176777, .088388};
    const std::vector<float> got = alibi_slopes_for(12);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t h = 0; h < want.size(); ++h) EXPECT_NEAR(got[h], want[h], h < 8 ? 0.0 : 5e-7) << h;
    for (const std::int64_t heads : {1, 2, 3, 7, 16, 71}) {
        const std::vector<double> reference = reference::alibi_slopes(heads);
        const std::vector<float> slopes = alibi_slopes_for(heads);
        ASSERT_EQ(slopes.size(), reference.size());
        for (std::size_t h = 0; h < reference.size(); ++h) EXPECT_FLOAT_EQ(slopes[h], static_cast<float>(reference[h]));
    }
}

TEST(TinyCasesTest, Case10HeadsRepeat) {
    const AttentionCase c = dense_case(6, 2, 1, 1, zeros(6), zeros(2), {1, 2});
    expect_everywhere(c, {{1, 1, 1, 2, 2, 2}, zeros(6), 0.0});
    expect_everywhere(causal(c), {{1, 1, 1, 2, 2, 2}, zeros(6), 0.0});
}

TEST(TinyCasesTest, Case11ManyEqualAndLargeScores) {
    for (const Element element : {Element::f16, Element::bf16, Element::f32}) {
        AttentionCase c = equal_scores(1, std::vector<double>(4096, 20.0), element);
        c.output_type = dtype_of(element);
        expect_everywhere(c, {{20}, {std::log(4096.0)}, 1e-6});
        c.output_type = DType::f32;
        expect_everywhere(causal(c), {{20}, {std::log(4096.0)}, 1e-6});
    }
    const AttentionCase c = scores_of({1e4, 1e4 - 1}, {1, 0});
    const double bound = 8.0 * 0x1p-24 * 1e4;
    expect_everywhere(c, {{0.731059}, {1e4 + std::log1p(std::exp(-1.0))}, 1e-6, bound});
}

TEST(TinyCasesTest, Case12LargeNegativeScores) {
    expect_everywhere(scores_of({-524288, -524288}, {3, 5}), {{4}, {}, 0.0});
    // what is masked weighs exactly 0, however large the others' scores are: 0 * NaN would be seen
    AttentionCase c = scores_of({-2.45e5, -2.45e5, -2.45e5, -2.45e5}, {3, kNaN, 5, kNaN});
    set_mask(c, Element::boolean, {4}, {1, 0, 1, 0});
    expect_everywhere(c, {{4}, {}, 0.0});
    for (const Element element : {Element::f32, Element::f16, Element::bf16}) {
        set_mask(c, element, {1, 4}, {0, -kInfinity, 0, -kInfinity});
        expect_everywhere(c, {{4}, {}, 0.0});
    }
    c = causal(dense_case(1, 1, 1, 1, {1, 1, 1}, {-2.45e5, -2.45e5, -2.45e5}, {3, 5, kNaN}), Alignment::top_left);
    c.features.scale = 1.0F;
    expect_everywhere(c, {{3, 4, kNaN}, {}, 0.0});
}

TEST(TinyCasesTest, Case13AnAllZeroRowOfCodes) {
    for (const KvType type : {KvType::int8, KvType::int4}) {
        for (const KvTypes& types : {KvTypes{type, type}, KvTypes{type, KvType::f32}, KvTypes{KvType::f16, type}}) {
            SCOPED_TRACE(std::string(to_string(types.keys)) + ":" + to_string(types.values));
            AttentionCase c = dense_case(1, 1, 3, 2, zeros(6), zeros(9), zeros(6));
            c.cache = types;
            expect_everywhere(c, {zeros(4), {std::log(3.0), std::log(3.0)}, 0.0});
            expect_everywhere(causal(c), {zeros(4), {std::log(2.0), std::log(3.0)}, 0.0});
            // such a key among others has score 0, such a value takes its weight
            c = dense_case(1, 1, 1, 1, {1}, {std::log(3.0), 0, 0}, {8, 0, 5});
            c.cache = types;
            expect_everywhere(c, {{29.0 / 5.0}, {std::log(5.0)}, 1e-4});
            c = dense_case(1, 1, 1, 1, {0}, {7, -7}, {8, 4});
            c.cache = types;
            expect_everywhere(c, {{6}, {std::log(2.0)}, 1e-4});
        }
    }
}

TEST(TinyCasesTest, Case13LargestCodesDoNotSaturate) {
    // Every key is +-127 or +-7 in codes, 255 or 15 in a byte, and every query +-127 in the upper bytes of its codes;
    // values are +-127 or +-7, and weights the largest that there are. Signs alternate by element or by token, so that
    // sums are at either end, or a sum of pairs is and the whole is not.
    const auto sign = [](std::int64_t i, std::int64_t period) { return i / period % 2 == 0 ? 1.0 : -1.0; };
    Random random(seed_or(113));
    HEADLONG_TRACE_SEED(random);
    for (const KvTypes& types : {KvTypes{KvType::int8, KvType::int8}, KvTypes{KvType::int4, KvType::int4},
                                 KvTypes{KvType::int8, KvType::f32}, KvTypes{KvType::int4, KvType::int8}}) {
        for (const std::int64_t dim : {4, 64, 130, 256}) {
            for (const std::int64_t q_len : {1, 5, 20}) {
                constexpr std::int64_t kLength = 520;
                constexpr std::array<std::int64_t, 5> kPeriods{1, 2, 4, 32, 1 << 20};
                std::vector<double> query, key, value;
                for (std::int64_t i = 0; i < q_len; ++i) {
                    const std::int64_t period = kPeriods[static_cast<std::size_t>((i + 4) % 5)];
                    for (std::int64_t d = 0; d < dim; ++d) query.push_back(sign(d, period));
                }
                for (std::int64_t j = 0; j < kLength; ++j) {
                    const std::int64_t period = kPeriods[static_cast<std::size_t>(j % 5)];
                    const double flip = random.chance(0.5) ? 1.0 : -1.0;
                    for (std::int64_t d = 0; d < dim; ++d) key.push_back(flip * sign(d, period));
                    for (std::int64_t d = 0; d < dim; ++d) value.push_back(d % 2 == 0 ? 1.0 : sign(j, d / 2 + 1));
                }
                AttentionCase c = dense_case(1, 1, dim, dim, query, key, value);
                c.cache = types;
                for (const float scale : {0.0F, 4.0F / static_cast<float>(dim), -4.0F / static_cast<float>(dim)}) {
                    c.features.scale = scale;
                    SCOPED_TRACE(c.describe());
                    Expected want = expected(as_stored(c));
                    const reference::AttentionResult& result = want.parts.front();
                    want.output_bound.assign(want.lse.size(), reference::codes_output_tolerance(result).element);
                    want.lse_bound.assign(want.lse.size(), reference::codes_lse_tolerance(result.magnitudes));
                    HEADLONG_FOR_EACH_ISA(isa) {
                        ASSERT_TRUE(agrees(c, run(shared_context(isa), c, Route::cache), want));
                    }
                }
            }
        }
    }
}

TEST(TinyCasesTest, Case14NaNInADeadSlot) {
    // dead by length, by causality, by a window, by a mask
    const std::vector<double> key{0, kNaN, 0, 0, kNaN};
    const std::vector<double> value{1, kNaN, 3, 8, kInfinity};
    AttentionCase c = dense_case(1, 1, 1, 1, zeros(1), key, value);
    c.features.alignment = Alignment::offset;
    set_mask(c, Element::boolean, {5}, {1, 0, 1, 1, 0});
    expect_everywhere(c, {{4}, {std::log(3.0)}});
    set_mask(c, Element::f32, {5}, {0, -kInfinity, 0, 0, -kInfinity});
    expect_everywhere(c, {{4}, {std::log(3.0)}});
    c.mask.reset();
    c.live = {1};
    expect_everywhere(c, {{1}, {0}});
    c.live = {4};
    c.features.window_left = 1;
    c.features.causal_offset = 3;
    expect_everywhere(c, {{5.5}, {std::log(2.0)}});
    expect_everywhere(causal(c, Alignment::offset, 3), {{5.5}, {std::log(2.0)}});
    c.live.clear();
    c.features.window_right = 0;
    expect_everywhere(c, {{5.5}, {std::log(2.0)}});
    c = dense_case(1, 1, 1, 1, zeros(4), {0, 0, 0, kNaN}, {1, 3, 8, kNaN});
    expect_everywhere(causal(c), {{1, 2, 4, kNaN}, {0, std::log(2.0), std::log(3.0), kNaN}});
}

TEST(TinyCasesTest, Case14NaNInAVisibleSlot) {
    const auto attended = [](const std::vector<double>& query, const std::vector<double>& key,
                             const std::vector<double>& value, const Known& known) {
        expect_everywhere(causal(dense_case(1, 1, 1, 1, query, key, value)), known);
    };
    const double l2 = std::log(2.0);
    const double l3 = std::log(3.0);
    const double l4 = std::log(4.0);
    attended(zeros(4), zeros(4), {1, 3, kNaN, 5}, {{1, 2, kNaN, kNaN}, {0, l2, l3, l4}});
    attended(zeros(4), zeros(4), {1, 3, kInfinity, 5}, {{1, 2, kInfinity, kInfinity}, {0, l2, l3, l4}});
    attended(zeros(4), {0, 0, kNaN, 0}, {1, 3, 8, 5}, {{1, 2, kNaN, kNaN}, {0, l2, kNaN, kNaN}});
    attended({0, kNaN, 0, 0}, zeros(4), {1, 3, 8, 5}, {{1, kNaN, 4, 4.25}, {0, kNaN, l3, l4}});
    // a NaN of a mask reaches the rows that see it
    AttentionCase c = causal(dense_case(1, 1, 1, 1, zeros(3), zeros(3), {1, 3, 8}));
    for (const Element element : {Element::f32, Element::f16, Element::bf16}) {
        set_mask(c, element, {3, 3}, {kNaN, 0, 0, 0, 0, kNaN, 0, kNaN, 0});
        expect_everywhere(c, {{kNaN, 2, kNaN}, {kNaN, l2, kNaN}});
    }
}

TEST(TinyCasesTest, Case15BandedMask) {
    // 10 keys wide: the first span of keys of the late rows is wholly masked
    constexpr std::int64_t kLength = 640;
    std::vector<double> value(kLength);
    std::iota(value.begin(), value.end(), 0.0);
    AttentionCase c = equal_scores(kLength, value);
    Known known;
    std::vector<double> band;
    std::vector<double> bias;
    for (std::int64_t i = 0; i < kLength; ++i) {
        const std::int64_t first = std::max<std::int64_t>(i - 9, 0);
        known.output.push_back(static_cast<double>(first + i) / 2.0);
        known.lse.push_back(std::log(static_cast<double>(i - first + 1)));
        for (std::int64_t j = 0; j < kLength; ++j) {
            band.push_back(first <= j && j <= i ? 1.0 : 0.0);
            bias.push_back(band.back() == 1.0 ? 0.0 : -kInfinity);
        }
    }
    c.features.window_left = 9;
    c.features.window_right = 0;
    expect_everywhere(c, known);
    c.features.window_left = c.features.window_right = -1;
    set_mask(c, Element::boolean, {kLength, kLength}, band);
    expect_everywhere(c, known);
    set_mask(c, Element::f16, {kLength, kLength}, bias);
    expect_everywhere(causal(c), known);
}

}  // namespace
}  // namespace headlong::test
