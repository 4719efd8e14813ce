// attend() against the double-precision reference: sizes that cross every boundary of the engine (lanes, panels,
// blocks, tiles, spans, groups, row blocks), one axis at a time and in random combinations; random strides, NaN in
// every hole of the inputs, canaries in every hole of the outputs, guard pages around all of them; plainly and
// through a cache; on one thread and on several.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <headlong/headlong.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/reference/attention.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

const std::vector<std::int64_t> kLengths{1,   2,   3,   5,   15,  16,  17,  31,  32,  33,   63,   64,   65,   97,  113,
                                         127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1177, 1999};
// (head_dim, value_dim)
const std::vector<std::pair<std::int64_t, std::int64_t>> kDims{
    {1, 1},   {2, 2},     {8, 8},     {15, 15},   {21, 21},   {40, 40},   {59, 59},   {64, 64},   {72, 72},  {80, 80},
    {96, 96}, {111, 111}, {112, 112}, {128, 128}, {192, 128}, {203, 203}, {256, 256}, {512, 512}, {576, 512}};
// (heads, kv_heads)
const std::vector<std::pair<std::int64_t, std::int64_t>> kHeads{{1, 1},  {5, 1},  {6, 2},  {7, 1},  {9, 3},
                                                                {14, 2}, {16, 4}, {27, 1}, {65, 5}, {71, 1}};

struct Shape {
    std::int64_t batch = 1;
    std::int64_t heads = 2;
    std::int64_t kv_heads = 1;
    std::int64_t q_len = 5;
    std::int64_t kv_len = 97;
    std::int64_t head_dim = 16;
    std::int64_t value_dim = 16;
    AttentionOptions options = causal(Alignment::bottom_right);
    double spread = 1.0;  ///< standard deviation of the queries; more makes peaked rows

    static AttentionOptions causal(Alignment alignment, std::int64_t offset = 0) {
        AttentionOptions options;
        options.causal = true;
        options.alignment = alignment;
        options.causal_offset = offset;
        return options;
    }

    /// Floating-point operations if every query saw every key.
    double cost() const {
        return 2.0 * static_cast<double>(batch * heads * q_len) * static_cast<double>(kv_len * (head_dim + value_dim));
    }

    std::string text() const {
        std::string name = "batch " + std::to_string(batch) + ", heads " + std::to_string(heads) + "/" +
                           std::to_string(kv_heads) + ", q " + std::to_string(q_len) + ", kv " +
                           std::to_string(kv_len) + ", dims " + std::to_string(head_dim) + "/" +
                           std::to_string(value_dim);
        if (options.causal) name += *options.causal ? ", causal" : ", not causal";
        name += options.alignment == Alignment::bottom_right ? ", bottom-right"
                : options.alignment == Alignment::top_left   ? ", top-left"
                                                             : ", offset " + std::to_string(options.causal_offset);
        if (options.scale) name += ", scale " + std::to_string(*options.scale);
        return name;
    }
};

InputTensor<3> sequence_of(const InputTensor<4>& view, std::int64_t b) {
    return {static_cast<const float*>(view.data) + b * view.strides[0],
            view.dtype,
            {view.extents[1], view.extents[2], view.extents[3]},
            {view.strides[1], view.strides[2], view.strides[3]}};
}

OutputTensor<3> sequence_of(const OutputTensor<4>& view, std::int64_t b) {
    return {static_cast<float*>(view.data) + b * view.strides[0],
            view.dtype,
            {view.extents[1], view.extents[2], view.extents[3]},
            {view.strides[1], view.strides[2], view.strides[3]}};
}

OutputTensor<2> sequence_of(const OutputTensor<3>& view, std::int64_t b) {
    return {static_cast<float*>(view.data) + b * view.strides[0],
            view.dtype,
            {view.extents[1], view.extents[2]},
            {view.strides[1], view.strides[2]}};
}

/// Tokens [first, first + count) of [heads, tokens, dim].
InputTensor<3> tokens_of(const InputTensor<3>& view, std::int64_t first, std::int64_t count) {
    InputTensor<3> part = view;
    part.data = static_cast<const float*>(view.data) + first * view.strides[1];
    part.extents[1] = count;
    return part;
}

/// Contexts are made once: a test of sizes is not about making them.
Context& context_of(Isa isa, std::size_t threads) {
    static std::map<std::pair<Isa, std::size_t>, std::unique_ptr<Context>> contexts;
    std::unique_ptr<Context>& context = contexts[{isa, threads}];
    if (context == nullptr) context = make_context(isa, threads);
    return *context;
}

struct Outputs {
    GuardedTensor<4> output;
    GuardedTensor<3> lse;

    static Outputs random(const Shape& shape, Random& random) {
        return {GuardedTensor<4>::random({shape.batch, shape.heads, shape.q_len, shape.value_dim}, random),
                GuardedTensor<3>::random({shape.batch, shape.heads, shape.q_len}, random)};
    }
};

/// Of the inputs' dimensions batch and heads may have stride 0. Tokens or a head dim of equal elements would make sums
/// of equal terms, whose roundings all go one way: a float32 sum of 512 of them is off by more than the tolerance.
constexpr std::size_t kBroadcastable = 2;

/// The inputs of a shape, and what the reference makes of them.
struct Case {
    Shape shape;
    GuardedTensor<4> query, key, value;

    Case(const Shape& s, Random& random)
        : shape(s),
          query(GuardedTensor<4>::random({s.batch, s.heads, s.q_len, s.head_dim}, random, kBroadcastable)),
          key(GuardedTensor<4>::random({s.batch, s.kv_heads, s.kv_len, s.head_dim}, random, kBroadcastable)),
          value(GuardedTensor<4>::random({s.batch, s.kv_heads, s.kv_len, s.value_dim}, random, kBroadcastable)) {
        query.fill_normal(random, s.spread);
        key.fill_normal(random);
        value.fill_normal(random);
    }

    reference::AttentionResult reference() const {
        return reference::attention(query.widened(), key.widened(), value.widened(), reference::widen(shape.options));
    }

    void attend_plain(Context& context, const Outputs& out) const {
        attend(context, query.input(), key.input(), value.input(), shape.options, out.output.output(),
               out.lse.output());
    }

    /// Fills a cache per sequence, in chunks of random sizes, and attends over all of them in one call.
    void attend_cached(Context& context, const Outputs& out, Random& random) const {
        KvCacheOptions options;
        options.shape.kv_heads = shape.kv_heads;
        options.shape.head_dim = shape.head_dim;
        options.shape.value_dim = shape.value_dim;
        options.pool = std::make_shared<BlockPool>(options.shape);
        std::vector<std::unique_ptr<KvCache>> caches;
        std::vector<CachedQuery> queries;
        for (std::int64_t b = 0; b < shape.batch; ++b) {
            caches.push_back(std::make_unique<KvCache>(options));
            const InputTensor<3> keys = sequence_of(key.input(), b);
            const InputTensor<3> values = sequence_of(value.input(), b);
            const std::int64_t largest = random.pick(std::vector<std::int64_t>{1, 7, 64, 500, shape.kv_len + 1});
            for (std::int64_t first = 0; first < shape.kv_len;) {
                // tokens one by one only for the first few: a long cache of single appends is slow and shows no more
                const std::int64_t most =
                    std::min(first > 200 ? std::max<std::int64_t>(largest, 100) : largest, shape.kv_len - first);
                const std::int64_t count = random.integer(1, most);
                caches.back()->append(context, 0, tokens_of(keys, first, count), tokens_of(values, first, count));
                first += count;
            }
            ASSERT_EQ(caches.back()->length(), shape.kv_len);
            CachedQuery cached;
            cached.query = sequence_of(query.input(), b);
            cached.cache = caches.back().get();
            cached.output = sequence_of(out.output.output(), b);
            cached.lse = sequence_of(out.lse.output(), b);
            queries.push_back(cached);
        }
        AttentionOptions with_cache = shape.options;
        with_cache.causal = shape.options.causal.value_or(false);
        // causal is what a cache does unasked
        if (*with_cache.causal && random.chance(0.5)) with_cache.causal.reset();
        attend(context, queries, with_cache);
    }

    bool fits_a_cache() const { return shape.kv_heads > 0 && shape.value_dim > 0 && shape.batch > 0; }
};

void check(const Outputs& out, const reference::AttentionResult& want) {
    EXPECT_TRUE(out.output.written_exactly()) << "output: " << out.output.describe();
    EXPECT_TRUE(out.lse.written_exactly()) << "lse: " << out.lse.describe();
    EXPECT_TRUE(within(out.output.dense(), want.output, output_tolerance(want.magnitudes))) << "output";
    EXPECT_TRUE(within(out.lse.dense(), want.lse, lse_tolerance(want.magnitudes))) << "lse";
}

/// One shape on every instruction set, plainly and through a cache, on 1 thread and on 3.
void check_everywhere(const Shape& shape, Random& random) {
    SCOPED_TRACE(shape.text());
    const Case inputs(shape, random);
    SCOPED_TRACE("query " + inputs.query.describe() + "; key " + inputs.key.describe() + "; value " +
                 inputs.value.describe());
    const reference::AttentionResult want = inputs.reference();
    HEADLONG_FOR_EACH_ISA(isa) {
        const bool threads_plain = random.chance(0.5);
        {
            SCOPED_TRACE(threads_plain ? "plain tensors, 3 threads" : "plain tensors, 1 thread");
            const Outputs out = Outputs::random(shape, random);
            inputs.attend_plain(context_of(isa, threads_plain ? 3 : 1), out);
            check(out, want);
        }
        if (!inputs.fits_a_cache()) continue;
        SCOPED_TRACE(threads_plain ? "cache, 1 thread" : "cache, 3 threads");
        const Outputs out = Outputs::random(shape, random);
        inputs.attend_cached(context_of(isa, threads_plain ? 1 : 3), out, random);
        check(out, want);
    }
}

/// Under an emulator what would cost more than this has one head of few dims, and is left out if that is not enough:
/// 1999 queries over 97 keys, lengths from 511 on for queries and keys together, and of Large 16 x 20000 and
/// 1023 x 1024.
constexpr double kEmulatedCost = 1.4e6;

void check_if_affordable(Shape shape, Random& random) {
    if (emulated() && shape.cost() > kEmulatedCost) {
        shape.heads = 1;
        shape.kv_heads = 1;
        shape.head_dim = std::min<std::int64_t>(shape.head_dim, 3);
        shape.value_dim = std::min<std::int64_t>(shape.value_dim, 2);
        if (shape.cost() > kEmulatedCost) return;
    }
    check_everywhere(shape, random);
}

// ----------------------------------------------------------------------------------------------- one axis at a time

TEST(AttentionSizesTest, QueryLengths) {
    Random random(seed_or(101));
    HEADLONG_TRACE_SEED(random);
    for (const std::int64_t length : kLengths) {
        Shape shape;
        shape.q_len = length;
        check_if_affordable(shape, random);
    }
}

TEST(AttentionSizesTest, KeyLengths) {
    Random random(seed_or(102));
    HEADLONG_TRACE_SEED(random);
    for (const std::int64_t length : kLengths) {
        Shape shape;
        shape.kv_len = length;
        check_if_affordable(shape, random);
        shape.q_len = 1;
        check_if_affordable(shape, random);
    }
}

TEST(AttentionSizesTest, QueryAndKeyLengthsTogether) {
    Random random(seed_or(103));
    HEADLONG_TRACE_SEED(random);
    for (const std::int64_t length : kLengths) {
        Shape shape;
        shape.heads = 1;
        shape.q_len = length;
        shape.kv_len = length;
        shape.head_dim = 8;
        shape.value_dim = 5;
        check_if_affordable(shape, random);
    }
}

TEST(AttentionSizesTest, Dims) {
    Random random(seed_or(104));
    HEADLONG_TRACE_SEED(random);
    for (const auto& [head_dim, value_dim] : kDims) {
        Shape shape;
        shape.q_len = 7;
        shape.kv_len = emulated() ? 37 : 70;
        shape.head_dim = head_dim;
        shape.value_dim = value_dim;
        check_everywhere(shape, random);
        shape.value_dim = random.pick(kDims).second;  // independent of each other
        check_everywhere(shape, random);
    }
}

TEST(AttentionSizesTest, Heads) {
    Random random(seed_or(105));
    HEADLONG_TRACE_SEED(random);
    for (const auto& [heads, kv_heads] : kHeads) {
        for (const std::int64_t q_len : {1, 3, 20}) {
            Shape shape;
            shape.heads = heads;
            shape.kv_heads = kv_heads;
            shape.q_len = q_len;
            shape.kv_len = 65;
            check_if_affordable(shape, random);
        }
    }
}

TEST(AttentionSizesTest, Batches) {
    Random random(seed_or(106));
    HEADLONG_TRACE_SEED(random);
    for (const std::int64_t batch : {1, 2, 3, 5, 9}) {
        Shape shape;
        shape.batch = batch;
        shape.kv_len = 33;
        check_everywhere(shape, random);
    }
}

TEST(AttentionSizesTest, Alignments) {
    Random random(seed_or(107));
    HEADLONG_TRACE_SEED(random);
    for (const auto& [q_len, kv_len] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{5, 97}, {97, 5}, {33, 33}, {70, 600}, {600, 70}}) {
        Shape shape;
        shape.q_len = q_len;
        shape.kv_len = kv_len;
        shape.head_dim = 3;
        shape.value_dim = 2;
        for (const Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
            shape.options = Shape::causal(alignment);
            check_if_affordable(shape, random);
        }
        for (const std::int64_t offset : {-1000000, -40, -1, 0, 1, 63, 64, 511, 1000000}) {
            shape.options = Shape::causal(Alignment::offset, offset);
            check_if_affordable(shape, random);
        }
        shape.options = {};
        check_if_affordable(shape, random);
    }
}

TEST(AttentionSizesTest, Scales) {
    Random random(seed_or(108));
    HEADLONG_TRACE_SEED(random);
    for (const float scale : {0.0F, 1.0F, -0.5F, 1e-30F, 20.0F}) {
        Shape shape;
        shape.options.scale = scale;
        check_everywhere(shape, random);
    }
    Shape peaked;
    peaked.spread = 50.0;
    check_everywhere(peaked, random);
}

TEST(AttentionSizesTest, NothingAtAll) {
    Random random(seed_or(109));
    HEADLONG_TRACE_SEED(random);
    Shape shape;
    shape.batch = 0;
    check_everywhere(shape, random);
    shape = {};
    shape.heads = 0;
    check_everywhere(shape, random);
    shape.kv_heads = 0;
    check_everywhere(shape, random);
    shape = {};
    shape.q_len = 0;
    check_everywhere(shape, random);
    shape = {};
    shape.kv_len = 0;  // rows without a key
    check_everywhere(shape, random);
    shape.options = {};
    check_everywhere(shape, random);
    shape = {};
    shape.value_dim = 0;  // lse is still asked for
    check_everywhere(shape, random);
}

// Where spans make groups, and where there are more positions than one row block takes. With head dims of 2 to 4.
TEST(AttentionSizesTest, Large) {
    Random random(seed_or(110));
    HEADLONG_TRACE_SEED(random);
    for (const auto& [q_len, kv_len] : std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 131072},
                                                                                          {16, 20000},
                                                                                          {3, 799},
                                                                                          {799, 3},
                                                                                          {1023, 1024},
                                                                                          {2, 32768},
                                                                                          {2, 32769},
                                                                                          {1100, 130},
                                                                                          {2100, 70}}) {
        Shape shape;
        shape.q_len = q_len;
        shape.kv_len = kv_len;
        shape.head_dim = 4;
        shape.value_dim = 2;
        check_if_affordable(shape, random);
    }
}

// ---------------------------------------------------------------------------------------------- random combinations

TEST(AttentionSizesTest, RandomCombinations) {
    Random random(seed_or(111));
    HEADLONG_TRACE_SEED(random);
    const double most = emulated() ? kEmulatedCost : 5e7;
    for (int i = 0; i < 200; ++i) {
        Shape shape;
        // small ones are as good at crossing boundaries, so that the bound is drawn too
        const double bound = most * std::max(random.uniform() * random.uniform(), 0.01);
        do {
            std::tie(shape.heads, shape.kv_heads) = random.pick(kHeads);
            shape.head_dim = random.pick(kDims).first;
            shape.value_dim = random.chance(0.5) ? shape.head_dim : random.pick(kDims).second;
            shape.q_len = random.chance(0.3) ? 1 : random.pick(kLengths);
            shape.kv_len = random.pick(kLengths);
            shape.batch = random.integer(1, 3);
        } while (shape.cost() > bound);
        shape.options = {};
        if (random.chance(0.8)) shape.options.causal = random.chance(0.8);
        shape.options.alignment =
            random.pick(std::vector<Alignment>{Alignment::bottom_right, Alignment::top_left, Alignment::offset});
        if (shape.options.alignment == Alignment::offset) {
            shape.options.causal_offset = random.integer(-shape.q_len - 2, shape.kv_len + 2);
        }
        if (random.chance(0.2)) shape.options.scale = random.normal_f32();
        shape.spread = random.pick(std::vector<double>{0.01, 1.0, 1.0, 1.0, 1.0, 20.0});
        SCOPED_TRACE("combination " + std::to_string(i));
        check_everywhere(shape, random);
        if (HasFailure()) break;
    }
}

// ------------------------------------------------------------------------------------------------------ named layouts

TEST(AttentionSizesTest, BroadcastAndTransposedInputs) {
    Random random(seed_or(112));
    HEADLONG_TRACE_SEED(random);
    Shape shape;
    shape.batch = 2;
    shape.heads = 4;
    shape.kv_heads = 2;
    shape.q_len = 9;
    shape.kv_len = 40;
    shape.head_dim = 24;
    shape.value_dim = 17;
    Case inputs(shape, random);
    const auto refill = [&](const GuardedTensor<4>& tensor) { tensor.fill_normal(random); };
    // all heads of all sequences share one key tensor; one value row for all tokens
    inputs.key = GuardedTensor<4>({2, 2, 40, 24}, {{0, 0, 24, 1}, 0, 40 * 24});
    inputs.value = GuardedTensor<4>({2, 2, 40, 17}, {{34, 17, 0, 1}, 0, 68});
    // [batch, dim, heads, length]: tokens are contiguous
    inputs.query = GuardedTensor<4>({2, 4, 9, 24}, {{24 * 36, 9, 1, 36}, 0, 2 * 24 * 36});
    refill(inputs.key);
    refill(inputs.value);
    refill(inputs.query);
    const reference::AttentionResult want = inputs.reference();
    HEADLONG_FOR_EACH_ISA(isa) {
        const Outputs out = Outputs::random(shape, random);
        inputs.attend_plain(context_of(isa, 1), out);
        check(out, want);
        const Outputs cached = Outputs::random(shape, random);
        inputs.attend_cached(context_of(isa, 1), cached, random);
        check(cached, want);
    }
}

TEST(AttentionSizesTest, LseIsOptional) {
    Random random(seed_or(113));
    HEADLONG_TRACE_SEED(random);
    const Shape shape;
    const Case inputs(shape, random);
    const reference::AttentionResult want = inputs.reference();
    HEADLONG_FOR_EACH_ISA(isa) {
        const Outputs out = Outputs::random(shape, random);
        attend(context_of(isa, 1), inputs.query.input(), inputs.key.input(), inputs.value.input(), shape.options,
               out.output.output());
        EXPECT_TRUE(out.output.written_exactly());
        EXPECT_TRUE(within(out.output.dense(), want.output, output_tolerance(want.magnitudes)));
    }
}

// With one key the logarithm of the sum of exp(score) is the score.
TEST(AttentionSizesTest, LogitsOfUnitVarianceHaveUnitVariance) {
    Random random(seed_or(114));
    HEADLONG_TRACE_SEED(random);
    const std::int64_t draws = emulated() ? 400 : 4000;
    for (const std::int64_t head_dim : {1, 8, 59, 64, 128, 576}) {
        if (emulated() && head_dim > 64) continue;
        const GuardedTensor<4> query({draws, 1, 1, head_dim});
        const GuardedTensor<4> key({draws, 1, 1, head_dim});
        const GuardedTensor<4> value({draws, 1, 1, 1});
        query.fill_normal(random);
        key.fill_normal(random);
        value.fill_normal(random);
        HEADLONG_FOR_EACH_ISA(isa) {
            const GuardedTensor<4> output({draws, 1, 1, 1});
            const GuardedTensor<3> lse({draws, 1, 1});
            attend(context_of(isa, 1), query.input(), key.input(), value.input(), {}, output.output(), lse.output());
            double sum = 0.0;
            double squares = 0.0;
            lse.for_each([&](const float& score) {
                sum += static_cast<double>(score);
                squares += static_cast<double>(score) * static_cast<double>(score);
            });
            const auto n = static_cast<double>(draws);
            const double mean = sum / n;
            const double variance = squares / n - mean * mean;
            // of 4000 draws the variance is within 5 % of 1 (14 % for head_dim 1, whose products have heavy tails)
            const double slack = (head_dim == 1 ? 0.2 : 0.1) * (emulated() ? 3.0 : 1.0);
            EXPECT_NEAR(variance, 1.0, slack) << "head_dim " << head_dim;
            EXPECT_NEAR(mean, 0.0, slack) << "head_dim " << head_dim;
            // the weight of the only key is 1
            EXPECT_TRUE(same_bits(output.dense(), value.dense()));
        }
    }
}

}  // namespace
}  // namespace headlong::test
