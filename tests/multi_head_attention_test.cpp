// The layer against its formula in double precision, with and without a cache.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <stop_token>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/reference/multi_head.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

struct LayerData {
    std::int64_t d_model, heads, kv_heads, head_dim;
    GuardedTensor<2> query, key, value, output;
    GuardedTensor<1> query_bias, key_bias, value_bias, output_bias;
    bool biases;

    LayerData(std::int64_t d_model_, std::int64_t heads_, std::int64_t kv_heads_, std::int64_t head_dim_, bool biases_,
              Random& random)
        : d_model(d_model_),
          heads(heads_),
          kv_heads(kv_heads_),
          head_dim(head_dim_),
          query(GuardedTensor<2>::random({d_model, heads * head_dim}, random)),
          key(GuardedTensor<2>::random({d_model, kv_heads * head_dim}, random)),
          value(GuardedTensor<2>::random({d_model, kv_heads * head_dim}, random)),
          output(GuardedTensor<2>::random({heads * head_dim, d_model}, random)),
          query_bias(GuardedTensor<1>::random({heads * head_dim}, random)),
          key_bias(GuardedTensor<1>::random({kv_heads * head_dim}, random)),
          value_bias(GuardedTensor<1>::random({kv_heads * head_dim}, random)),
          output_bias(GuardedTensor<1>::random({d_model}, random)),
          biases(biases_) {
        const double factor = 1.0 / std::sqrt(static_cast<double>(d_model));
        for (const auto* w : {&query, &key, &value, &output}) w->fill_normal(random, factor);
        for (const auto* b : {&query_bias, &key_bias, &value_bias, &output_bias}) b->fill_normal(random, 0.3);
    }

    MultiHeadAttention layer(Context& context) const {
        MultiHeadAttentionOptions options;
        options.heads = heads;
        options.kv_heads = kv_heads;
        MultiHeadAttentionWeights weights{query.input(), key.input(), value.input(), output.input(), {}, {}, {}, {}};
        if (biases) {
            weights.query_bias = query_bias.input();
            weights.key_bias = key_bias.input();
            weights.value_bias = value_bias.input();
            weights.output_bias = output_bias.input();
        }
        return {context, options, weights};
    }

    reference::Tensor expected(const GuardedTensor<2>& x, bool causal) const {
        reference::MultiHeadWeights weights;
        weights.query = query.widened();
        weights.key = key.widened();
        weights.value = value.widened();
        weights.output = output.widened();
        if (biases) {
            weights.query_bias = query_bias.widened();
            weights.key_bias = key_bias.widened();
            weights.value_bias = value_bias.widened();
            weights.output_bias = output_bias.widened();
        }
        reference::AttentionOptions options;
        options.causal = causal;
        return reference::multi_head(x.widened(), weights, heads, kv_heads, options).y;
    }
};

InputTensor<2> rows_of(const InputTensor<2>& x, std::int64_t first, std::int64_t count) {
    InputTensor<2> part = x;
    part.data = static_cast<const float*>(x.data) + first * x.strides[0];
    part.extents[0] = count;
    return part;
}
OutputTensor<2> rows_of(const OutputTensor<2>& y, std::int64_t first, std::int64_t count) {
    OutputTensor<2> part = y;
    part.data = static_cast<float*>(y.data) + first * y.strides[0];
    part.extents[0] = count;
    return part;
}
template <class View>
auto one_batch(const View& x) {
    using Batched = std::conditional_t<std::is_same_v<View, InputTensor<2>>, InputTensor<3>, OutputTensor<3>>;
    return Batched{x.data, x.dtype, {1, x.extents[0], x.extents[1]}, {1, x.strides[0], x.strides[1]}};
}

struct LayerShape {
    std::int64_t d_model, heads, kv_heads, head_dim, length;
    bool biases;
};
constexpr LayerShape kShapes[] = {{8, 2, 2, 4, 5, false},     {24, 6, 2, 7, 40, true},    {1, 1, 1, 1, 3, true},
                                  {100, 5, 1, 20, 130, true}, {300, 3, 3, 33, 20, false}, {64, 4, 4, 16, 1, true}};

TEST(MultiHeadAttentionTest, AgreesWithTheFormula) {
    Random random(seed_or(31));
    HEADLONG_TRACE_SEED(random);
    for (const LayerShape& shape : kShapes) {
        const LayerData data(shape.d_model, shape.heads, shape.kv_heads, shape.head_dim, shape.biases, random);
        const auto x = GuardedTensor<2>::random({shape.length, shape.d_model}, random);
        x.fill_normal(random);
        for (const bool causal : {false, true}) {
            const reference::Tensor want = data.expected(x, causal);
            HEADLONG_FOR_EACH_ISA(isa) {
                SCOPED_TRACE("d_model " + std::to_string(shape.d_model) + (causal ? ", causal" : ""));
                const auto context = make_context(isa, 2);
                const MultiHeadAttention layer = data.layer(*context);
                EXPECT_EQ(layer.head_dim(), shape.head_dim);
                const auto y = GuardedTensor<2>::random({shape.length, shape.d_model}, random);
                AttentionOptions options;
                options.causal = causal;
                layer.forward(*context, one_batch(x.input()), one_batch(y.output()), options);
                EXPECT_TRUE(y.written_exactly());
                EXPECT_TRUE(within(y.dense(), want, 2e-5));
            }
        }
    }
}

// Steps and chunks through a cache have the bits of one causal pass, whatever the threads and the batch.
TEST(MultiHeadAttentionTest, CacheStepsHaveTheBitsOfOnePass) {
    Random random(seed_or(32));
    HEADLONG_TRACE_SEED(random);
    const LayerData data(96, 6, 2, 16, true, random);
    const std::int64_t length = 150;
    const auto x = GuardedTensor<2>::random({length, 96}, random);
    x.fill_normal(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        std::vector<float> first;
        for (const std::size_t threads : {1U, 2U, 5U}) {
            const auto context = make_context(isa, threads);
            const MultiHeadAttention layer = data.layer(*context);
            const GuardedTensor<2> whole({length, 96});
            AttentionOptions causal;
            causal.causal = true;
            layer.forward(*context, one_batch(x.input()), one_batch(whole.output()), causal);
            if (first.empty()) first = whole.dense();
            EXPECT_TRUE(same_bits(first, whole.dense())) << threads << " threads";
            for (const std::int64_t chunk : {1, 7, 64}) {
                KvCacheOptions options;
                options.shape = {.kv_heads = 2, .head_dim = 16, .value_dim = 16};
                KvCache cache(options);
                const GuardedTensor<2> y({length, 96});
                for (std::int64_t t = 0; t < length; t += chunk) {
                    const std::int64_t count = std::min(chunk, length - t);
                    layer.forward(*context, rows_of(x.input(), t, count), cache, 0, rows_of(y.output(), t, count));
                }
                EXPECT_EQ(cache.length(), length);
                EXPECT_TRUE(same_bits(first, y.dense())) << threads << " threads, chunks of " << chunk;
            }
            // the same sequence twice in a batch
            std::vector<float> twice(static_cast<std::size_t>(2 * length * 96));
            InputTensor<3> batch = one_batch(x.input());
            batch.extents[0] = 2;
            batch.strides[0] = 0;
            layer.forward(*context, batch, OutputTensor<3>::dense(twice.data(), {2, length, 96}), causal);
            EXPECT_TRUE(same_bits(first.data(), twice.data(), first.size()));
            EXPECT_TRUE(same_bits(first.data(), twice.data() + first.size(), first.size()));
        }
    }
}

TEST(MultiHeadAttentionTest, ChangingATokenLeavesEarlierRows) {
    Random random(33);
    const LayerData data(40, 4, 4, 10, false, random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa);
        const MultiHeadAttention layer = data.layer(*context);
        AttentionOptions causal;
        causal.causal = true;
        GuardedTensor<2> x({60, 40});
        x.fill_normal(random);
        const auto run = [&] {
            const GuardedTensor<2> y({60, 40});
            layer.forward(*context, one_batch(x.input()), one_batch(y.output()), causal);
            return y.dense();
        };
        const std::vector<float> before = run();
        for (const float poison :
             {1.5F, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
            for (std::int64_t d = 0; d < 40; ++d) x.at({33, d}) = poison;
            const std::vector<float> after = run();
            EXPECT_TRUE(same_bits(before.data(), after.data(), 33 * 40));
            EXPECT_FALSE(same_bits(before.data() + 33 * 40, after.data() + 33 * 40, 40));
        }
    }
}

TEST(MultiHeadAttentionTest, AFailedStepLeavesTheCache) {
    Random random(34);
    const LayerData data(16, 2, 2, 8, false, random);
    Context context;
    const MultiHeadAttention layer = data.layer(context);
    KvCacheOptions options;
    options.shape = {.kv_heads = 2, .head_dim = 8, .value_dim = 8};
    options.capacity = 10;
    KvCache cache(options);
    const std::vector<float> x(16 * 16, 0.5F);
    std::vector<float> y(16 * 16);
    const auto step = [&](std::int64_t count, const AttentionOptions& attention = {}) {
        layer.forward(context, InputTensor<2>::dense(x.data(), {count, 16}), cache, 0,
                      OutputTensor<2>::dense(y.data(), {count, 16}), attention);
    };
    step(8);
    EXPECT_THROW(step(3), OutOfMemory);
    EXPECT_EQ(cache.length(), 8);
    std::stop_source source;
    source.request_stop();
    AttentionOptions stopped;
    stopped.stop = source.get_token();
    EXPECT_THROW(step(1, stopped), Cancelled);
    EXPECT_EQ(cache.length(), 8);
    AttentionOptions nonsense;
    nonsense.softcap = -3.0F;
    EXPECT_THROW(step(1, nonsense), InvalidArgument);
    EXPECT_EQ(cache.length(), 8);
    step(2);
    EXPECT_EQ(cache.length(), 10);
    EXPECT_THROW(layer.forward(context, InputTensor<2>::dense(x.data(), {1, 16}), cache, 1,
                               OutputTensor<2>::dense(y.data(), {1, 16})),
                 InvalidArgument);
}

/// Runs tasks, but refuses the n-th loop.
class FailingExecutor final : public Executor {
  public:
    explicit FailingExecutor(int loops) : loops_(loops) {}
    std::size_t concurrency() const noexcept override { return 2; }
    void run(std::size_t tasks, Body body, void* state) override {
        if (loops_-- == 0) throw std::bad_alloc();
        for (std::size_t task = 0; task < tasks; ++task) body(state, task, 0);
    }

  private:
    int loops_;
};

TEST(MultiHeadAttentionTest, AStepThatFailsAnywhereLeavesTheCache) {
    Random random(36);
    const LayerData data(64, 4, 2, 16, false, random);
    Context good;
    const MultiHeadAttention layer = data.layer(good);
    const std::vector<float> x(40 * 64, 0.5F);
    std::vector<float> y(40 * 64);
    int failures = 0;
    for (int loops = 0;; ++loops) {
        ASSERT_LT(loops, 20);
        ContextOptions options;
        options.executor = std::make_shared<FailingExecutor>(loops);
        Context context(options);
        KvCacheOptions cache_options;
        cache_options.shape = {.kv_heads = 2, .head_dim = 16, .value_dim = 16};
        KvCache cache(cache_options);
        try {
            layer.forward(context, InputTensor<2>::dense(x.data(), {40, 64}), cache, 0,
                          OutputTensor<2>::dense(y.data(), {40, 64}));
            EXPECT_EQ(cache.length(), 40);
            break;
        } catch (const OutOfMemory&) {
            ++failures;
            EXPECT_EQ(cache.length(), 0) << "after loop " << loops;
        }
    }
    EXPECT_GE(failures, 5) << "three projections, attention, the output projection";
}

TEST(MultiHeadAttentionTest, WeightsComeFromTheGivenResource) {
    Random random(35);
    const LayerData data(32, 2, 1, 16, true, random);
    Context context;
    CountingResource memory;
    {
        MultiHeadAttentionOptions options;
        options.heads = 2;
        options.kv_heads = 1;
        options.memory = &memory;
        const MultiHeadAttention layer(
            context, options,
            {data.query.input(), data.key.input(), data.value.input(), data.output.input(), {}, {}, {}, {}});
        EXPECT_GE(memory.counts().live_bytes, (32U * 32 + 2 * 32 * 16 + 32 * 32) * sizeof(float));
    }
    EXPECT_EQ(memory.counts().live_bytes, 0U);
}

TEST(MultiHeadAttentionTest, BadShapesAreNamed) {
    Context context;
    const std::vector<float> data(64 * 64);
    const auto square = InputTensor<2>::dense(data.data(), {12, 12});
    const auto message_of = [&](std::int64_t heads, std::int64_t kv_heads,
                                const MultiHeadAttentionWeights& weights) -> std::string {
        MultiHeadAttentionOptions options;
        options.heads = heads;
        options.kv_heads = kv_heads;
        try {
            const MultiHeadAttention layer(context, options, weights);
        } catch (const InvalidArgument& error) {
            return error.what();
        }
        return "nothing was thrown";
    };
    const MultiHeadAttentionWeights good{square, square, square, square, {}, {}, {}, {}};
    EXPECT_NE(message_of(0, 0, good).find("heads is 0"), std::string::npos);
    EXPECT_NE(message_of(5, 0, good).find("query weight: [12, 12]"), std::string::npos);
    EXPECT_NE(message_of(4, 3, good).find("kv_heads is 3"), std::string::npos);
    EXPECT_NE(message_of(4, 2, good).find("key weight: extent 1 is 12; it must be 6"), std::string::npos);
    MultiHeadAttentionWeights wrong = good;
    wrong.output = InputTensor<2>::dense(data.data(), {12, 11});
    EXPECT_NE(message_of(4, 0, wrong).find("output weight: extent 1 is 11; it must be 12"), std::string::npos);
    for (const Extents<2> huge : {Extents<2>{2, std::int64_t{1} << 61},
                                  {std::int64_t{1} << 30, std::int64_t{1} << 32},
                                  {1, std::numeric_limits<std::int64_t>::max() / 8}}) {
        wrong.query = wrong.key = wrong.value = {data.data(), DType::f32, huge, {0, 0}};
        wrong.output = {data.data(), DType::f32, {huge[1], huge[0]}, {0, 0}};
        EXPECT_NE(message_of(1, 0, wrong).find("at most"), std::string::npos);
    }
    wrong = good;
    wrong.value_bias = InputTensor<1>::dense(data.data(), {5});
    EXPECT_NE(message_of(4, 0, wrong).find("value bias: extent 0 is 5; it must be 12"), std::string::npos);
}

}  // namespace
}  // namespace headlong::test
