// The double-precision reference against answers that can be worked out by hand. Everything else is measured against
// the reference, so these are exact up to the rounding of double.
#include "engine/reference/attention.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <headlong/error.hpp>

#include "engine/reference/multi_head.hpp"
#include "engine/reference/quantise.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

using reference::AttentionResult;
using reference::Mask;
using reference::Scores;
using reference::State;
using reference::Tensor;
using Options = reference::AttentionOptions;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kExact = 1e-14;

// One head of head_dim 1: queries and keys are scores' factors, values are scalars.
AttentionResult one_head(const std::vector<double>& query, const std::vector<double>& key,
                         const std::vector<double>& value, const Options& options = {}) {
    const auto q_len = static_cast<std::int64_t>(query.size());
    const auto kv_len = static_cast<std::int64_t>(key.size());
    return reference::attention(Tensor({1, 1, q_len, 1}, query), Tensor({1, 1, kv_len, 1}, key),
                                Tensor({1, 1, kv_len, 1}, value), options);
}

// All scores are 0: weights are equal over what is allowed.
AttentionResult zero_scores(std::size_t q_len, const std::vector<double>& value, const Options& options = {}) {
    return one_head(std::vector<double>(q_len, 0.0), std::vector<double>(value.size(), 0.0), value, options);
}

Options causal(Alignment alignment) {
    Options options;
    options.causal = true;
    options.alignment = alignment;
    return options;
}

testing::AssertionResult is(const Tensor& got, const std::vector<double>& want, double bound = kExact) {
    return within(got.values, Tensor(got.extents, want), bound);
}

TEST(ReferenceTest, CausalAlignments) {
    const std::vector<double> value{1, 2, 4, 8, 16};
    EXPECT_TRUE(is(zero_scores(2, value, causal(Alignment::bottom_right)).output, {3.75, 6.2}));
    EXPECT_TRUE(is(zero_scores(2, value, causal(Alignment::top_left)).output, {1, 1.5}));
    Options options = causal(Alignment::offset);
    options.offset = 3;  // a past of 3
    EXPECT_TRUE(is(zero_scores(2, value, options).output, {3.75, 6.2}));
    options.offset = -1;  // not clamped: the first row sees nothing
    EXPECT_TRUE(is(zero_scores(2, value, options).output, {0, 1}));
    EXPECT_TRUE(is(zero_scores(2, value).output, {6.2, 6.2}));
}

TEST(ReferenceTest, MoreQueriesThanKeys) {
    const AttentionResult result = zero_scores(5, {3, 5}, causal(Alignment::bottom_right));
    EXPECT_TRUE(is(result.output, {0, 0, 0, 3, 4}));
    EXPECT_TRUE(is(result.lse, {-kInfinity, -kInfinity, -kInfinity, 0, std::log(2.0)}));
}

TEST(ReferenceTest, Windows) {
    const std::vector<double> value{1, 2, 4, 8};
    Options options = causal(Alignment::bottom_right);
    options.window_left = reference::window_left_of_sliding_window(2);
    EXPECT_TRUE(is(zero_scores(4, value, options).output, {1, 1.5, 3, 6}));
    options.window_left = 2;
    EXPECT_TRUE(is(zero_scores(4, value, options).output, {1, 1.5, 7.0 / 3, 14.0 / 3}));
    options.window_left = 0;
    EXPECT_TRUE(is(zero_scores(4, value, options).output, {1, 2, 4, 8}));
    Options right;
    right.window_right = 1;
    EXPECT_TRUE(is(zero_scores(4, value, right).output, {1.5, 7.0 / 3, 3.75, 3.75}));
}

TEST(ReferenceTest, SinkLogits) {
    Options options;
    options.sink_logits = {0.0};
    AttentionResult result = one_head({0}, {0}, {4}, options);
    EXPECT_TRUE(is(result.output, {2}));
    EXPECT_TRUE(is(result.lse, {std::log(2.0)}));
    EXPECT_TRUE(is(one_head({0}, {0, 0}, {6, 6}, options).output, {4}));
    options.sink_logits = {std::log(3.0)};
    EXPECT_TRUE(is(one_head({0}, {0}, {4}, options).output, {1}));
    // without an allowed key only the sink is left
    options.kv_lengths = {0};
    result = one_head({0}, {0}, {4}, options);
    EXPECT_TRUE(is(result.output, {0}));
    EXPECT_TRUE(is(result.lse, {std::log(3.0)}));
}

TEST(ReferenceTest, Merge) {
    const auto state = [](double output, double lse) { return State{Tensor({1, 1}, output), Tensor({1}, lse)}; };
    const State empty = state(0, -kInfinity);
    State merged = merge(state(2, std::log(3.0)), state(10, 0));
    EXPECT_TRUE(is(merged.output, {4}));
    EXPECT_TRUE(is(merged.lse, {std::log(4.0)}));
    merged = merge(empty, empty);
    EXPECT_TRUE(is(merged.output, {0}, 0.0));
    EXPECT_TRUE(is(merged.lse, {-kInfinity}, 0.0));
    for (const State& one : {merge(empty, state(7, -1000)), merge(state(7, -1000), empty)}) {
        EXPECT_TRUE(is(one.output, {7}, 0.0));
        EXPECT_TRUE(is(one.lse, {-1000}, 0.0));
    }
    EXPECT_TRUE(is(merge(state(1, 0), state(kNaN, 0)).output, {kNaN}));
}

TEST(ReferenceTest, MergeOfPartsIsTheWhole) {
    Random random(seed_or(11));
    HEADLONG_TRACE_SEED(random);
    const auto draw = [&](std::vector<std::int64_t> extents) {
        Tensor tensor(std::move(extents));
        for (double& x : tensor.values) x = random.normal();
        return tensor;
    };
    const Tensor query = draw({2, 4, 3, 5});
    const Tensor key = draw({2, 2, 7, 5});
    const Tensor value = draw({2, 2, 7, 6});
    const AttentionResult whole = reference::attention(query, key, value);
    Options first;
    first.mask = Mask{Tensor({7}, {1, 1, 1, 0, 0, 0, 0}), true};
    Options second;
    second.mask = Mask{Tensor({7}, {0, 0, 0, 1, 1, 1, 1}), true};
    const AttentionResult a = reference::attention(query, key, value, first);
    const AttentionResult b = reference::attention(query, key, value, second);
    const State merged = reference::merge({a.output, a.lse}, {b.output, b.lse});
    EXPECT_TRUE(within(merged.output.values, whole.output, kExact));
    EXPECT_TRUE(within(merged.lse.values, whole.lse, kExact));
}

TEST(ReferenceTest, DeadSlotsDoNotCount) {
    Options options;
    options.kv_lengths = {1};
    EXPECT_TRUE(is(one_head({2}, {1, 0}, {1, 0}, options).output, {1}));
    EXPECT_TRUE(is(one_head({2}, {1, 0}, {1, 0}).output, {1 / (1 + std::exp(-2.0))}));
}

TEST(ReferenceTest, SoftcapComesBeforeTheMask) {
    Options options;
    options.softcap = 1.0;
    options.mask = Mask{Tensor({2}, {0, -kInfinity}), false};
    options.scores = Scores::weights;
    const AttentionResult result = one_head({1}, {0.5, 10}, {3, 5}, options);
    EXPECT_TRUE(is(result.scores, {1, 0}, 0.0));
    EXPECT_TRUE(is(result.output, {3}, 0.0));
    EXPECT_TRUE(is(result.lse, {std::tanh(0.5)}));
}

TEST(ReferenceTest, Alibi) {
    Options options = causal(Alignment::bottom_right);
    options.alibi_slopes = {0.5};
    const double e = std::exp(-0.5);
    const double sum = 1 + e + e * e + e * e * e;
    EXPECT_TRUE(is(zero_scores(1, {1, 2, 4, 8}, options).output, {(8 + 4 * e + 2 * e * e + e * e * e) / sum}));
    EXPECT_TRUE(is(zero_scores(1, {1, 2, 4, 8}, options).output, {5.180798}, 5e-7));
    const std::vector<double> slopes = reference::alibi_slopes(12);
    const Tensor want({12},
                      {.5, .25, .125, .0625, .03125, .015625, .0078125, .00390625, .707107, .353553, .176777, .088388});
    EXPECT_TRUE(within(slopes, want, 5e-7));
}

TEST(ReferenceTest, HeadsRepeatAndDoNotTile) {
    const AttentionResult result =
        reference::attention(Tensor({1, 6, 1, 1}), Tensor({1, 2, 1, 1}), Tensor({1, 2, 1, 1}, {1, 2}));
    EXPECT_TRUE(is(result.output, {1, 1, 1, 2, 2, 2}, 0.0));
}

TEST(ReferenceTest, ManyEqualAndLargeScores) {
    std::vector<double> value(4096, reference::widen_f16(0x4D00));  // 20 in float16
    EXPECT_TRUE(is(zero_scores(1, value).output, {20}, 1e-11));
    EXPECT_TRUE(is(one_head({1}, {1e4, 1e4 - 1}, {1, 0}).output, {1 / (1 + std::exp(-1.0))}, 1e-11));
    const AttentionResult huge = one_head({1}, {-524288, -524288}, {3, 5});
    EXPECT_TRUE(is(huge.output, {4}, 0.0));
    EXPECT_TRUE(is(huge.lse, {-524288 + std::log(2.0)}, 1e-9));
    Options options;
    options.mask = Mask{Tensor({1, 3}, {1, 0, 1}), true};
    options.scores = Scores::weights;
    const AttentionResult masked = one_head({1}, {-2.45e5, -2.45e5, -2.45e5}, {3, 1000, 5}, options);
    EXPECT_TRUE(is(masked.scores, {0.5, 0, 0.5}, 0.0));
    EXPECT_TRUE(is(masked.output, {4}, 0.0));
}

TEST(ReferenceTest, NaNReachesWhatSeesIt) {
    Options options;
    options.kv_lengths = {2};
    EXPECT_TRUE(is(one_head({0}, {0, 0, kNaN}, {3, 5, kNaN}, options).output, {4}, 0.0));
    EXPECT_TRUE(is(one_head({0}, {0, 0, kNaN}, {3, 5, 7}).output, {kNaN}));
    EXPECT_TRUE(is(one_head({0}, {0, 0, 0}, {3, 5, kNaN}).output, {kNaN}));
    EXPECT_TRUE(is(one_head({kNaN}, {0}, {3}).lse, {kNaN}));
    EXPECT_TRUE(is(one_head({1}, {kInfinity, 0}, {3, 5}).output, {kNaN}));
    EXPECT_TRUE(is(one_head({1}, {0, 0}, {3, kInfinity}).output, {kInfinity}));
    // causal: only the rows from the NaN on
    EXPECT_TRUE(is(zero_scores(3, {1, kNaN, 2}, causal(Alignment::top_left)).output, {1, kNaN, kNaN}));
}

TEST(ReferenceTest, ScoresOfMinusInfinityAreAnEmptyRow) {
    const AttentionResult result = one_head({1}, {-kInfinity, -kInfinity}, {3, kNaN});
    EXPECT_TRUE(is(result.output, {0}, 0.0));
    EXPECT_TRUE(is(result.lse, {-kInfinity}, 0.0));
    EXPECT_TRUE(is(one_head({1}, {-kInfinity, 0}, {3, 5}).output, {5}, 0.0));
}

TEST(ReferenceTest, BandedMaskEqualsWindow) {
    constexpr std::int64_t kLength = 640;
    Random random(seed_or(12));
    HEADLONG_TRACE_SEED(random);
    Tensor query({1, 1, kLength, 4});
    Tensor key({1, 1, kLength, 4});
    Tensor value({1, 1, kLength, 3});
    for (Tensor* tensor : {&query, &key, &value}) {
        for (double& x : tensor->values) x = random.normal();
    }
    Options masked;
    masked.mask = Mask{Tensor({kLength, kLength}), true};
    for (std::int64_t i = 0; i < kLength; ++i) {
        for (std::int64_t j = std::max<std::int64_t>(i - 9, 0); j <= i; ++j) masked.mask->values.at(i, j) = 1.0;
    }
    Options window = causal(Alignment::top_left);
    window.window_left = 9;
    const AttentionResult a = reference::attention(query, key, value, masked);
    const AttentionResult b = reference::attention(query, key, value, window);
    EXPECT_EQ(a.output.values, b.output.values);
    for (const double x : a.output.values) ASSERT_TRUE(std::isfinite(x));
}

TEST(ReferenceTest, MasksBroadcastAndPad) {
    // rank 3 is (heads, q, kv): each of 2 heads sees one key, in both sequences
    const Tensor query({2, 2, 1, 1});
    const Tensor key({2, 1, 3, 1});
    const Tensor value({2, 1, 3, 1}, {1, 2, 4, 8, 16, 32});
    Options options;
    options.mask = Mask{Tensor({2, 1, 3}, {1, 0, 0, 0, 1, 0}), true};
    EXPECT_TRUE(is(reference::attention(query, key, value, options).output, {1, 2, 8, 16}, 0.0));
    // a short kv extent is padded with "not allowed", one of 1 is broadcast
    options.mask = Mask{Tensor({1, 2}, {0, 0}), false};
    EXPECT_TRUE(is(reference::attention(query, key, value, options).output, {1.5, 1.5, 12, 12}, kExact));
    options.mask = Mask{Tensor({1}, 1.0), true};
    EXPECT_TRUE(is(reference::attention(query, key, value, options).output, {7.0 / 3, 7.0 / 3, 56.0 / 3, 56.0 / 3}));
    options.mask = Mask{Tensor({2, 2}, {1, 1, 1, 1}), true};
    EXPECT_THROW(reference::attention(query, key, value, options), InvalidArgument);
}

TEST(ReferenceTest, ScoreMatrices) {
    Options options = causal(Alignment::top_left);
    options.softcap = 2.0;
    options.alibi_slopes = {0.25};
    const std::vector<double> query{1, 3};
    const std::vector<double> key{2, 5};
    const std::vector<double> value{1, 2};
    const auto scores = [&](Scores which) {
        options.scores = which;
        return one_head(query, key, value, options).scores;
    };
    const auto cap = [](double x) { return 2 * std::tanh(x / 2); };
    EXPECT_TRUE(is(scores(Scores::scaled), {2, 5, 6, 15}));
    EXPECT_TRUE(is(scores(Scores::softcapped), {cap(2), cap(5), cap(6), cap(15)}));
    EXPECT_TRUE(is(scores(Scores::masked), {cap(2), -kInfinity, cap(6) - 0.25, cap(15)}));
    const double ratio = std::exp(cap(6) - 0.25 - cap(15));
    EXPECT_TRUE(is(scores(Scores::weights), {1, 0, ratio / (1 + ratio), 1 / (1 + ratio)}));
}

TEST(ReferenceTest, ScaleAndMagnitudes) {
    const Tensor query({1, 1, 1, 4}, {1, 1, 1, 1});
    const Tensor key({1, 1, 2, 4}, {1, 2, 3, 4, 100, 100, 100, 100});
    const Tensor value({1, 1, 2, 1}, {-3, 50});
    Options options;
    options.kv_lengths = {1};
    const AttentionResult result = reference::attention(query, key, value, options);
    EXPECT_TRUE(is(result.lse, {5}, 0.0));  // 10 / sqrt(4)
    EXPECT_EQ(result.magnitudes.score, 5.0);
    EXPECT_EQ(result.magnitudes.value, 3.0);
    EXPECT_EQ(result.magnitudes.terms, 5.0);
    EXPECT_EQ(reference::output_tolerance(result.magnitudes), 1e-5);
    EXPECT_EQ(reference::lse_tolerance(result.magnitudes), 1e-5);
    EXPECT_DOUBLE_EQ(reference::output_tolerance({.score = 1000.0, .terms = 0.0, .value = 2.0}), 16000.0 / 16777216);
    EXPECT_DOUBLE_EQ(reference::lse_tolerance({.score = 0.0, .terms = 1000.0, .value = 2.0}), 8000.0 / 16777216);
    options.scale = 3.0;
    EXPECT_TRUE(is(reference::attention(query, key, value, options).lse, {30}, 0.0));
}

TEST(ReferenceTest, TolerancesOfCodes) {
    // two groups, whose largest queries are 4 and 3; the output is 2, all of it
    Tensor query({1, 1, 1, 66}, 1.0);
    query.values[3] = -4.0;
    query.values[65] = 3.0;
    const Tensor key({1, 1, 1, 66}, 0.5);
    Options scaled;
    scaled.scale = 2.0;
    const AttentionResult result = reference::attention(query, key, Tensor({1, 1, 1, 1}, 2.0), scaled);
    EXPECT_DOUBLE_EQ(result.magnitudes.code_terms, 2.0 * 0.5 * (64 * 4 + 2 * 3));
    EXPECT_DOUBLE_EQ(result.magnitudes.score, 63.0);
    const double float32 = reference::output_tolerance(result.magnitudes);
    EXPECT_DOUBLE_EQ(reference::codes_output_tolerance(result).root_mean_square, 1.5e-4 * 63 / 8 * 2 + float32);
    EXPECT_DOUBLE_EQ(reference::codes_output_tolerance(result).element, 1.5e-3 * 63 / 8 * 2 + float32);
    EXPECT_NEAR(reference::codes_lse_tolerance(result.magnitudes), 262.0 / (2 * 127 * 254), 1e-4);
}

TEST(ReferenceTest, WhatCachesHold) {
    using Rows = std::vector<double>;
    const Rows mixed{1.0, -0.5, 0.0, 0x1p-12};
    EXPECT_EQ(reference::stored_keys(KvType::f32, mixed, 4), mixed);
    EXPECT_EQ(reference::stored_keys(KvType::f16, {1.0 + 0x1p-12, 70000.0}, 2), (Rows{1.0, kInfinity}));
    // codes 127, -64 (63.5 to even), 0, 0; with 7 they are 7, -4 (3.5 to even), 0, 0
    const auto scale = [](double largest, double codes) {
        return static_cast<double>(static_cast<float>(largest / codes));
    };
    const double eight = scale(1.0, 127.0);
    const double four = scale(1.0, 7.0);
    EXPECT_TRUE(within(reference::stored_keys(KvType::int8, mixed, 4), Tensor({4}, {1.0, -64 * eight, 0, 0}), 1e-7));
    EXPECT_TRUE(within(reference::stored_values(KvType::int4, mixed, 4), Tensor({4}, {1.0, -4 * four, 0, 0}), 1e-7));
    // rows of their own, and groups of 64 or 128 in them: each largest element stays, and nothing is near it
    Rows rows(2 * 130, 1.0);
    rows[0] = rows[64] = 1000.0;
    const Rows keys = reference::stored_keys(KvType::int8, rows, 130);
    EXPECT_EQ(keys[1], 0.0);
    EXPECT_EQ(keys[65], 0.0);
    EXPECT_NEAR(keys[64], 1000.0, 1e-4);
    EXPECT_NEAR(keys[128], 1.0, 1e-7);
    EXPECT_NEAR(keys[130], 1.0, 1e-7);
    const Rows values = reference::stored_values(KvType::int8, rows, 130);
    EXPECT_EQ(values[127], 0.0);
    EXPECT_NEAR(values[128], 1.0, 1e-7);
    // no scale, and none that is a number
    EXPECT_EQ(reference::stored_keys(KvType::int8, {0.0, -0.0, 0x1.8p-101, 0x1p-140}, 4), Rows(4, 0.0));
    EXPECT_GT(reference::stored_keys(KvType::int8, {0x1p-100}, 1)[0], 0.0);
    for (const double bad : {kInfinity, -kInfinity, kNaN}) {
        for (const double x : reference::stored_values(KvType::int4, {1.0, bad, 2.0}, 3)) EXPECT_TRUE(std::isnan(x));
    }
    EXPECT_TRUE(reference::stored_values(KvType::int8, {}, 0).empty());
}

TEST(ReferenceTest, LengthsMoveTheBottomRight) {
    // two sequences of the same padded tensors, of 1 and 3 live keys
    const Tensor query({2, 1, 2, 1});
    const Tensor key({2, 1, 3, 1});
    const Tensor value({2, 1, 3, 1}, {1, 2, 4, 1, 2, 4});
    Options options = causal(Alignment::bottom_right);
    options.kv_lengths = {1, 3};
    EXPECT_TRUE(is(reference::attention(query, key, value, options).output, {0, 1, 1.5, 7.0 / 3}));
    options.alignment = Alignment::offset;
    options.batch_offsets = {-1, 1};
    EXPECT_TRUE(is(reference::attention(query, key, value, options).output, {0, 1, 1.5, 7.0 / 3}));
}

TEST(ReferenceTest, Half) {
    EXPECT_EQ(reference::widen_f16(0x3C00), 1.0);
    EXPECT_EQ(reference::widen_f16(0xC001), -2.001953125);
    EXPECT_EQ(reference::widen_f16(0x0001), 0x1p-24);
    EXPECT_EQ(reference::widen_f16(0x7BFF), 65504.0);
    EXPECT_EQ(reference::widen_f16(0xFC00), -kInfinity);
    EXPECT_TRUE(std::isnan(reference::widen_f16(0x7E00)));
    EXPECT_TRUE(std::signbit(reference::widen_f16(0x8000)));
    EXPECT_EQ(reference::widen_bf16(0x3F80), 1.0);
    EXPECT_EQ(reference::widen_bf16(0x7F80), kInfinity);
}

TEST(ReferenceTest, WidensStridedViews) {
    const std::vector<float> memory{0, 1, 2, 3, 4, 5};
    const InputTensor<2> transposed{memory.data(), DType::f32, {3, 2}, {1, 3}};
    EXPECT_EQ(reference::widen(transposed).values, (std::vector<double>{0, 3, 1, 4, 2, 5}));
    const InputTensor<2> backwards{memory.data() + 5, DType::f32, {2, 2}, {-2, 0}};
    EXPECT_EQ(reference::widen(backwards).values, (std::vector<double>{5, 5, 3, 3}));
}

TEST(ReferenceTest, MultiHeadLayer) {
    // Two heads of dim 1. With Wq = 0 the attention is a running mean of x Wv, of which Wo swaps the heads.
    const Tensor x({3, 2}, {1, 10, 3, 20, 8, 60});
    reference::MultiHeadWeights weights;
    weights.query = Tensor({2, 2});
    weights.key = Tensor({2, 2}, {1, 0, 0, 1});
    weights.value = Tensor({2, 2}, {1, 0, 0, 2});
    weights.output = Tensor({2, 2}, {0, 1, 1, 0});
    weights.output_bias = Tensor({2}, {0.5, 0});
    EXPECT_TRUE(is(multi_head(x, weights, 2, 0, causal(Alignment::bottom_right)).y, {20.5, 1, 30.5, 2, 60.5, 4}));
    EXPECT_TRUE(is(multi_head(x, weights, 2, 0, {}).y, {60.5, 4, 60.5, 4, 60.5, 4}));
    // x @ W, not x @ W^T
    weights.value = Tensor({2, 2}, {0, 1, 0, 0});
    EXPECT_TRUE(is(multi_head(x, weights, 2, 0, causal(Alignment::bottom_right)).y, {1.5, 0, 2.5, 0, 4.5, 0}));
}

}  // namespace
}  // namespace headlong::test
