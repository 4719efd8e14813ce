// The cache and its pool: growth, read-back, refusals that lose nothing, bytes, and memory that runs out.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/reference/tensor.hpp"
#include "kernels/half.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

constexpr KvShape kShape{.kv_heads = 3, .head_dim = 5, .value_dim = 7};

KvCacheOptions options_of(const KvShape& shape, std::int64_t layers = 1) {
    KvCacheOptions options;
    options.shape = shape;
    options.layers = layers;
    return options;
}

/// Rows of a cache as a plain list, to compare with.
struct Model {
    std::vector<float> keys, values;  // [token][head][dim]
};

/// Appends `count` random rows to a layer and to the model.
void append_random(KvCache& cache, Context& context, std::size_t layer, std::int64_t count, Model& model,
                   Random& random) {
    const KvShape& shape = cache.shape();
    const auto keys = GuardedTensor<3>::random({shape.kv_heads, count, shape.head_dim}, random);
    const auto values = GuardedTensor<3>::random({shape.kv_heads, count, shape.value_dim}, random);
    keys.fill_normal(random);
    values.fill_normal(random);
    for (std::int64_t t = 0; t < count; ++t) {
        for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
            for (std::int64_t d = 0; d < shape.head_dim; ++d) model.keys.push_back(keys.at({h, t, d}));
            for (std::int64_t d = 0; d < shape.value_dim; ++d) model.values.push_back(values.at({h, t, d}));
        }
    }
    cache.append(context, layer, keys.input(), values.input());
}

void expect_holds(const KvCache& cache, std::size_t layer, const Model& model, std::int64_t first, std::int64_t count,
                  Random& random) {
    const KvShape& shape = cache.shape();
    const auto keys = GuardedTensor<3>::random({shape.kv_heads, count, shape.head_dim}, random);
    const auto values = GuardedTensor<3>::random({shape.kv_heads, count, shape.value_dim}, random);
    cache.read_back(layer, first, keys.output(), values.output());
    EXPECT_TRUE(keys.written_exactly());
    EXPECT_TRUE(values.written_exactly());
    for (std::int64_t t = 0; t < count; ++t) {
        for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
            const auto row = static_cast<std::size_t>((first + t) * shape.kv_heads + h);
            for (std::int64_t d = 0; d < shape.head_dim; ++d) {
                ASSERT_TRUE(same_bits(
                    keys.at({h, t, d}),
                    model.keys[row * static_cast<std::size_t>(shape.head_dim) + static_cast<std::size_t>(d)]));
            }
            for (std::int64_t d = 0; d < shape.value_dim; ++d) {
                ASSERT_TRUE(same_bits(
                    values.at({h, t, d}),
                    model.values[row * static_cast<std::size_t>(shape.value_dim) + static_cast<std::size_t>(d)]));
            }
        }
    }
}

template <class Operation>
ErrorCode code_of(const Operation& operation, std::string* message = nullptr) {
    try {
        operation();
    } catch (const Error& error) {
        if (message != nullptr) *message = error.what();
        return error.code();
    }
    ADD_FAILURE() << "nothing was thrown";
    return ErrorCode::io;
}

TEST(KvCacheTest, GivesBackTheBitsThatWereAppended) {
    Random random(seed_or(21));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa, 2);
        for (const KvShape& shape : {kShape, KvShape{.kv_heads = 1, .head_dim = 1, .value_dim = 1},
                                     KvShape{.kv_heads = 2, .head_dim = 64, .value_dim = 48}}) {
            KvCache cache(options_of(shape, 2));
            Model models[2];
            for (const std::int64_t count : {1, 15, 1, 47, 63, 64, 65, 0, 3, 200}) {
                for (std::size_t layer : {0U, 1U}) append_random(cache, *context, layer, count, models[layer], random);
            }
            EXPECT_EQ(cache.length(), 459);
            for (std::size_t layer : {0U, 1U}) {
                expect_holds(cache, layer, models[layer], 0, 459, random);
                expect_holds(cache, layer, models[layer], 61, 70, random);
                expect_holds(cache, layer, models[layer], 459, 0, random);
            }
        }
    }
}

TEST(KvCacheTest, RowsOf16BitsAreWidenedAndRoundedOnce) {
    const auto narrow = [](DType type, float x) {
        return type == DType::f16 ? kernels::narrow_f16(x) : kernels::narrow_bf16(x);
    };
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa, 2);
        for (const KvShape& shape : {kShape, KvShape{.kv_heads = 2, .head_dim = 64, .value_dim = 48}}) {
            const std::int64_t n = 150;
            for (const DType key_type : {DType::f16, DType::bf16}) {
                Random random(seed_or(28));
                HEADLONG_TRACE_SEED(random);
                const DType value_type = key_type == DType::f16 ? DType::bf16 : DType::f16;
                std::vector<std::uint16_t> keys(static_cast<std::size_t>(shape.kv_heads * n * shape.head_dim));
                std::vector<std::uint16_t> values(static_cast<std::size_t>(shape.kv_heads * n * shape.value_dim));
                for (std::uint16_t& x : keys) x = narrow(key_type, random.normal_f32());
                for (std::uint16_t& x : values) x = narrow(value_type, random.normal_f32());
                keys[0] = 0x8001;  // denormal
                values[0] = 0x8000;
                KvCache cache(options_of(shape));
                cache.append(*context, 0,
                             InputTensor<3>::dense(keys.data(), key_type, {shape.kv_heads, n, shape.head_dim}),
                             InputTensor<3>::dense(values.data(), value_type, {shape.kv_heads, n, shape.value_dim}));
                const GuardedTensor<3> wide_keys({shape.kv_heads, n, shape.head_dim});
                const auto wide_values = GuardedTensor<3>::random({shape.kv_heads, n, shape.value_dim}, random);
                cache.read_back(0, 0, wide_keys.output(), wide_values.output());
                EXPECT_TRUE(wide_values.written_exactly());
                const auto want_key =
                    reference::widen(InputTensor<3>::dense(keys.data(), key_type, {shape.kv_heads, n, shape.head_dim}));
                const auto want_value = reference::widen(
                    InputTensor<3>::dense(values.data(), value_type, {shape.kv_heads, n, shape.value_dim}));
                EXPECT_TRUE(within(wide_keys.dense(), want_key, 0.0));
                EXPECT_TRUE(within(wide_values.dense(), want_value, 0.0));

                // as they came, and each in the other type
                for (const DType to : {DType::f16, DType::bf16}) {
                    std::vector<std::uint16_t> keys_back(keys.size() + 1, 0xABCD);
                    std::vector<std::uint16_t> values_back(values.size() + 1, 0xABCD);
                    cache.read_back(
                        0, 0, OutputTensor<3>::dense(keys_back.data(), to, {shape.kv_heads, n, shape.head_dim}),
                        OutputTensor<3>::dense(values_back.data(), to, {shape.kv_heads, n, shape.value_dim}));
                    for (std::size_t i = 0; i < keys.size(); ++i) {
                        const auto x = static_cast<float>(want_key.values[i]);
                        ASSERT_EQ(keys_back[i], to == key_type ? keys[i] : narrow(to, x)) << i;
                    }
                    for (std::size_t i = 0; i < values.size(); ++i) {
                        const auto x = static_cast<float>(want_value.values[i]);
                        ASSERT_EQ(values_back[i], to == value_type ? values[i] : narrow(to, x)) << i;
                    }
                    EXPECT_EQ(keys_back.back(), 0xABCD);
                    EXPECT_EQ(values_back.back(), 0xABCD);
                }
            }
        }
    }
}

TEST(KvCacheTest, AFullCacheRefusesAndKeepsWhatItHolds) {
    Random random(22);
    Context context;
    KvCacheOptions options = options_of(kShape);
    options.capacity = 100;
    KvCache cache(options);
    Model model;
    append_random(cache, context, 0, 97, model, random);
    const std::size_t held = cache.reserved_bytes();
    for (const std::int64_t count : {4, 100, 5000}) {
        Model refused;
        std::string message;
        EXPECT_EQ(code_of([&] { append_random(cache, context, 0, count, refused, random); }, &message),
                  ErrorCode::out_of_memory);
        EXPECT_NE(message.find("capacity of 100"), std::string::npos) << message;
        EXPECT_EQ(code_of([&] { cache.reserve(count); }), ErrorCode::out_of_memory);
        EXPECT_EQ(cache.length(), 97);
        EXPECT_EQ(cache.reserved_bytes(), held);
    }
    append_random(cache, context, 0, 3, model, random);
    expect_holds(cache, 0, model, 0, 100, random);
}

TEST(KvCacheTest, BytesFollowTheLengthAndAreKnownBefore) {
    Random random(23);
    Context context;
    KvCacheOptions options = options_of(kShape, 3);
    options.capacity = std::int64_t{1} << 40;
    KvCache cache(options);
    EXPECT_EQ(cache.used_bytes(), 0U);
    EXPECT_EQ(cache.reserved_bytes(), 0U);
    // a block: 3 heads of 64 keys of 5 and 64 values of 7, padded to 16
    constexpr std::size_t kBlockBytes = 3 * 64 * (5 + 16) * 4;
    EXPECT_EQ(cache.pool()->block_bytes(), kBlockBytes);
    Model models[3];
    for (const std::int64_t length : {1, 64, 65, 1000}) {
        for (std::size_t layer = 0; layer < 3; ++layer) {
            append_random(cache, context, layer, length - cache.length(layer), models[layer], random);
        }
        const std::size_t blocks = 3 * static_cast<std::size_t>((length + 63) / 64);
        EXPECT_EQ(cache.reserved_bytes(), blocks * kBlockBytes);
        EXPECT_EQ(cache.reserved_bytes(), KvCache::estimate_bytes(options, length));
        EXPECT_EQ(cache.used_bytes(), 3 * static_cast<std::size_t>(length) * kBlockBytes / 64);
        EXPECT_EQ(cache.pool()->used_bytes(), blocks * kBlockBytes);
        EXPECT_GE(cache.pool()->reserved_bytes(), cache.pool()->used_bytes());
        EXPECT_LE(cache.pool()->reserved_bytes(), 3 * cache.pool()->used_bytes() + 65536) << "slabs double";
    }
    cache.reset();
    EXPECT_EQ(cache.length(), 0);
    EXPECT_EQ(cache.reserved_bytes(), 0U);
    EXPECT_EQ(cache.pool()->used_bytes(), 0U);
    EXPECT_EQ(code_of([&] { KvCache::estimate_bytes(options, -1); }), ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { KvCache::estimate_bytes(options, options.capacity + 1); }), ErrorCode::invalid_argument);
    options.capacity = std::numeric_limits<std::int64_t>::max();
    EXPECT_EQ(code_of([&] { KvCache::estimate_bytes(options, options.capacity); }), ErrorCode::out_of_memory);
}

// A block that was full of NaN comes back cleared: dead lanes and old values reach nothing.
TEST(KvCacheTest, ReusedBlocksCarryNothingOver) {
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa);
        const std::vector<float> nans(3 * 70 * 7, std::numeric_limits<float>::quiet_NaN());
        std::vector<float> ones(3 * 70 * 7, 1.0F);
        KvCache cache(options_of(kShape));
        const auto append = [&](const std::vector<float>& data, std::int64_t count) {
            cache.append(*context, 0, InputTensor<3>::dense(data.data(), {3, count, 5}),
                         InputTensor<3>::dense(data.data(), {3, count, 7}));
        };
        append(nans, 70);
        cache.reset();
        append(ones, 3);
        std::vector<float> out(3 * 7);
        const CachedQuery query{.query = InputTensor<3>::dense(ones.data(), {3, 1, 5}),
                                .cache = &cache,
                                .layer = 0,
                                .output = OutputTensor<3>::dense(out.data(), {3, 1, 7}),
                                .lse = {}};
        attend(*context, std::span(&query, 1));
        for (const float x : out) EXPECT_EQ(x, 1.0F);
    }
}

TEST(KvCacheTest, LayersAdvanceAloneAndHalfStepsCanBeTakenBack) {
    Random random(24);
    Context context;
    KvCache cache(options_of(kShape, 2));
    Model models[2];
    for (std::size_t layer : {0U, 1U}) append_random(cache, context, layer, 10, models[layer], random);
    Model dropped = models[0];
    append_random(cache, context, 0, 5, dropped, random);
    EXPECT_EQ(cache.length(), 10);
    EXPECT_EQ(cache.length(0), 15);
    EXPECT_EQ(cache.length(1), 10);
    cache.discard_unfinished();
    EXPECT_EQ(cache.length(0), 10);
    append_random(cache, context, 0, 60, models[0], random);  // over what was taken back
    expect_holds(cache, 0, models[0], 0, 70, random);
    expect_holds(cache, 1, models[1], 0, 10, random);
}

TEST(KvCacheTest, ReserveTakesAllOrNothing) {
    Random random(25);
    Context context;
    for (std::size_t failing = 0; failing < 6; ++failing) {
        CountingResource memory;
        KvCacheOptions options = options_of(kShape, 4);
        options.memory = &memory;
        KvCache cache(options);
        Model models[4];
        for (std::size_t layer = 0; layer < 4; ++layer) append_random(cache, context, layer, 65, models[layer], random);
        const std::size_t held = cache.reserved_bytes();
        memory.fail_after(failing);
        bool refused = false;
        try {
            cache.reserve(20000);
        } catch (const OutOfMemory&) {
            refused = true;
        }
        EXPECT_EQ(cache.reserved_bytes(), refused ? held : KvCache::estimate_bytes(options, 20065));
        EXPECT_EQ(cache.length(), 65);
        if (!refused) memory.fail_after(0);  // what was reserved needs no memory any more
        for (std::size_t layer = 0; layer < 4; ++layer) {
            if (!refused) append_random(cache, context, layer, 20000, models[layer], random);
            expect_holds(cache, layer, models[layer], 0, 65, random);
        }
        EXPECT_EQ(cache.length(), refused ? 65 : 20065);
    }
}

TEST(KvCacheTest, AnAppendThatRunsOutOfMemoryChangesNothing) {
    Random random(26);
    Context context;
    CountingResource memory;
    {
        KvCacheOptions options = options_of(kShape);
        options.memory = &memory;
        KvCache cache(options);
        Model model;
        append_random(cache, context, 0, 100, model, random);
        memory.fail_after(0);
        int refusals = 0;
        for (int i = 0; i < 40; ++i) {
            Model tried = model;
            try {
                append_random(cache, context, 0, 50, tried, random);
                model = tried;
            } catch (const OutOfMemory&) {
                ++refusals;
            }
            EXPECT_EQ(cache.length() * 15, static_cast<std::int64_t>(model.keys.size()));
        }
        EXPECT_GT(refusals, 0);
        expect_holds(cache, 0, model, 0, cache.length(), random);
        memory.never_fail();
        append_random(cache, context, 0, 50, model, random);
        expect_holds(cache, 0, model, 0, cache.length(), random);
    }
    EXPECT_EQ(memory.counts().live_bytes, 0U);
}

TEST(KvCacheTest, CachesShareAPool) {
    Random random(27);
    Context context;
    KvCacheOptions options = options_of(kShape);
    options.pool = std::make_shared<BlockPool>(kShape);
    KvCache a(options);
    Model model_a;
    append_random(a, context, 0, 200, model_a, random);
    {
        KvCache b(options);
        Model model_b;
        append_random(b, context, 0, 300, model_b, random);
        append_random(a, context, 0, 100, model_a, random);
        expect_holds(b, 0, model_b, 0, 300, random);
        EXPECT_EQ(options.pool->used_bytes(), 10 * options.pool->block_bytes());
    }
    EXPECT_EQ(options.pool->used_bytes(), 5 * options.pool->block_bytes());
    KvCache c = std::move(a);
    expect_holds(c, 0, model_a, 0, 300, random);
    const std::size_t reserved = options.pool->reserved_bytes();
    KvCache d(options);
    Model model_d;
    append_random(d, context, 0, 64, model_d, random);
    EXPECT_EQ(options.pool->reserved_bytes(), reserved) << "returned blocks are used again";
}

// One pool, several writers and readers at once; each cache has one writer.
TEST(KvCacheTest, APoolServesManyThreads) {
    KvCacheOptions options = options_of(kShape);
    options.pool = std::make_shared<BlockPool>(kShape);
    Context context;
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            Random random(100 + t);
            for (int round = 0; round < 5; ++round) {
                KvCache cache(options);
                Model model;
                for (int i = 0; i < 10; ++i) append_random(cache, context, 0, random.integer(1, 90), model, random);
                expect_holds(cache, 0, model, 0, cache.length(), random);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(options.pool->used_bytes(), 0U);
}

TEST(KvCacheTest, BadArgumentsAreNamed) {
    Context context;
    KvCache cache(options_of(kShape));
    const std::vector<float> data(1000);
    const auto keys = InputTensor<3>::dense(data.data(), {3, 2, 5});
    const auto values = InputTensor<3>::dense(data.data(), {3, 2, 7});
    const auto refused = [&](const auto& operation, ErrorCode code, const std::string& text) {
        std::string message;
        EXPECT_EQ(code_of(operation, &message), code) << message;
        EXPECT_NE(message.find(text), std::string::npos) << message;
        EXPECT_EQ(cache.length(), 0);
    };
    refused([&] { cache.append(context, 1, keys, values); }, ErrorCode::invalid_argument, "layer is 1");
    auto wrong = keys;
    wrong.extents[0] = 2;
    refused([&] { cache.append(context, 0, wrong, values); }, ErrorCode::invalid_argument,
            "keys: extent 0 is 2; it must be 3");
    wrong = keys;
    wrong.extents[2] = 6;
    refused([&] { cache.append(context, 0, wrong, values); }, ErrorCode::invalid_argument,
            "keys: extent 2 is 6; it must be 5");
    wrong = values;
    wrong.extents[1] = 3;
    refused([&] { cache.append(context, 0, keys, wrong); }, ErrorCode::invalid_argument,
            "values: extent 1 is 3; it must be 2");
    wrong = keys;
    wrong.extents[1] = -1;
    refused([&] { cache.append(context, 0, wrong, values); }, ErrorCode::invalid_argument, "keys: extent 1 is -1");
    wrong = keys;
    wrong.data = nullptr;
    refused([&] { cache.append(context, 0, wrong, values); }, ErrorCode::invalid_argument, "keys: data is null");
    wrong = keys;
    wrong.dtype = static_cast<DType>(3);
    refused([&] { cache.append(context, 0, wrong, values); }, ErrorCode::invalid_argument, "keys: dtype is 3");
    wrong = keys;
    wrong.strides[1] = std::numeric_limits<std::int64_t>::max() / 2;
    refused([&] { cache.append(context, 0, wrong, values); }, ErrorCode::invalid_argument, "64-bit");
    refused([&] { cache.reserve(-1); }, ErrorCode::invalid_argument, "tokens is -1");
    std::vector<float> out(1000);
    refused(
        [&] {
            cache.read_back(0, 0, OutputTensor<3>::dense(out.data(), {3, 1, 5}),
                            OutputTensor<3>::dense(out.data(), {3, 1, 7}));
        },
        ErrorCode::invalid_argument, "positions 0 to 1");

    const auto refused_options = [&](KvCacheOptions options, ErrorCode code, const std::string& text) {
        refused([&] { KvCache made(options); }, code, text);
    };
    KvCacheOptions options = options_of(kShape);
    options.capacity = 0;
    refused_options(options, ErrorCode::invalid_argument, "capacity is 0");
    refused_options(options_of(kShape, 0), ErrorCode::invalid_argument, "layers is 0");
    refused_options(options_of({.kv_heads = 0, .head_dim = 1, .value_dim = 1}), ErrorCode::invalid_argument,
                    "kv_heads is 0");
    refused_options(options_of({.kv_heads = 1, .head_dim = 0, .value_dim = 1}), ErrorCode::invalid_argument,
                    "head_dim is 0");
    refused_options(options_of({.kv_heads = 1, .head_dim = 1, .value_dim = -3}), ErrorCode::invalid_argument,
                    "value_dim is -3");
    KvShape shape = kShape;
    shape.key_type = static_cast<KvType>(5);
    refused_options(options_of(shape), ErrorCode::invalid_argument,
                    "key_type is 5; allowed: f32, f16, bf16, int8, int4");
    shape = kShape;
    shape.value_type = static_cast<KvType>(255);
    refused_options(options_of(shape), ErrorCode::invalid_argument, "value_type is 255");
    options = options_of(kShape);
    options.pool = std::make_shared<BlockPool>(KvShape{.kv_heads = 1, .head_dim = 1, .value_dim = 1});
    refused_options(options, ErrorCode::invalid_argument, "another shape");
}

}  // namespace
}  // namespace headlong::test
