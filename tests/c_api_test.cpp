// The C interface: the same bits as the C++ one, errors, structures that grow, memory that runs out, threads,
// callbacks, cancellation, lifetimes.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <headlong/headlong.h>
#include <headlong/headlong.hpp>

#include "engine/c_api/c_api.hpp"
#include "tests/c_api_c99.h"
#include "tests/support/c_api.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"

namespace headlong::test {

/// A structure that has grown: its first version ended before `added`.
struct Grown {
    std::size_t size;
    std::int64_t first;
    std::int64_t added;
};

}  // namespace headlong::test

namespace headlong::c_api {
template <>
inline constexpr std::size_t kFirstSize<test::Grown> = offsetof(test::Grown, added);
template <>
test::Grown defaults() noexcept {
    return {0, 1, 2};
}
}  // namespace headlong::c_api

namespace headlong::test {
namespace {

const char* const kModel = HEADLONG_SOURCE_DIR "/tools/models/austen";

std::vector<float> random_floats(std::size_t count, std::uint64_t seed) {
    Random random(seed);
    std::vector<float> floats(count);
    for (float& x : floats) x = random.normal_f32();
    return floats;
}

testing::AssertionResult same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0) {
        return testing::AssertionSuccess();
    }
    return testing::AssertionFailure() << "the bits differ";
}

hl_attention_options attention_defaults() {
    hl_attention_options options;
    EXPECT_EQ(hl_attention_options_init(&options, sizeof(options)), HL_OK);
    return options;
}

/// [2, 4, 19, 16] queries over [2, 2, 33, 16] keys.
struct Plain {
    std::vector<float> q = random_floats(std::size_t{2} * 4 * 19 * 16, 1);
    std::vector<float> k = random_floats(std::size_t{2} * 2 * 33 * 16, 2);
    std::vector<float> v = random_floats(std::size_t{2} * 2 * 33 * 16, 3);
    std::vector<float> out = std::vector<float>(q.size());
    std::vector<float> lse = std::vector<float>(std::size_t{2} * 4 * 19);
    hl_tensor query = dense_f32<4>(q, {2, 4, 19, 16});
    hl_tensor key = dense_f32<4>(k, {2, 2, 33, 16});
    hl_tensor value = dense_f32<4>(v, {2, 2, 33, 16});
    hl_tensor output = dense_f32<4>(out, {2, 4, 19, 16});
    hl_tensor sums = dense_f32<3>(lse, {2, 4, 19});

    hl_status attend(hl_context* context, const hl_attention_options* options = nullptr) {
        return hl_attend(context, &query, &key, &value, options, &output, &sums);
    }
    void attend_cpp(Context& context, const AttentionOptions& options) {
        headlong::attend(
            context, InputTensor<4>::dense(q.data(), {2, 4, 19, 16}), InputTensor<4>::dense(k.data(), {2, 2, 33, 16}),
            InputTensor<4>::dense(v.data(), {2, 2, 33, 16}), options,
            OutputTensor<4>::dense(out.data(), {2, 4, 19, 16}), OutputTensor<3>::dense(lse.data(), {2, 4, 19}));
    }
};

TEST(CApi, AttentionHasTheBitsOfTheCppInterface) {
    const std::vector<float> slopes{0.5F, 0.25F, 0.125F, 0.0625F};
    const std::vector<float> sinks{0.5F, -1.0F, 2.0F, -std::numeric_limits<float>::infinity()};
    const std::vector<std::int64_t> lengths{33, 20};
    std::vector<std::uint8_t> allowed(std::size_t{19} * 33, 1);
    for (std::size_t i = 0; i < allowed.size(); i += 7) allowed[i] = 0;
    hl_mask mask{};
    mask.size = sizeof(mask);
    mask.data = allowed.data();
    mask.type = HL_MASK_BOOLEAN;
    mask.rank = 2;
    mask.extents[0] = 19;
    mask.extents[1] = 33;
    mask.strides[0] = 33;
    mask.strides[1] = 1;

    Plain c;
    Plain cpp;
    const auto context = make_c_context();
    Context cpp_context;
    ASSERT_STREQ(hl_context_isa(context.get()), to_string(cpp_context.isa()));
    for (int step = 0; step < 4; ++step) {
        SCOPED_TRACE(step);
        hl_attention_options options = attention_defaults();
        AttentionOptions cpp_options;
        if (step >= 1) {
            options.causal = HL_CAUSAL_YES;
            options.alignment = HL_OFFSET;
            options.causal_offset = 9;
            options.has_scale = 1;
            options.scale = 0.3F;
            cpp_options.causal = true;
            cpp_options.alignment = Alignment::offset;
            cpp_options.causal_offset = 9;
            cpp_options.scale = 0.3F;
        }
        if (step >= 2) {
            options.window_left = 11;
            options.window_right = 3;
            options.softcap = 5.0F;
            options.alibi_slopes = slopes.data();
            options.alibi_slopes_count = slopes.size();
            cpp_options.window_left = 11;
            cpp_options.window_right = 3;
            cpp_options.softcap = 5.0F;
            cpp_options.alibi_slopes = slopes;
        }
        if (step >= 3) {
            options.sink_logits = sinks.data();
            options.sink_logits_count = sinks.size();
            options.kv_lengths = lengths.data();
            options.kv_lengths_count = lengths.size();
            options.mask = &mask;
            cpp_options.sink_logits = sinks;
            cpp_options.kv_lengths = lengths;
            const std::int64_t extents[2] = {19, 33};
            cpp_options.mask = AttentionMask::dense(allowed.data(), AttentionMask::Type::boolean, extents);
        }
        ASSERT_EQ(c.attend(context.get(), &options), HL_OK) << hl_context_message(context.get());
        cpp.attend_cpp(cpp_context, cpp_options);
        EXPECT_TRUE(same_bits(c.out, cpp.out));
        EXPECT_TRUE(same_bits(c.lse, cpp.lse));
    }
    EXPECT_GT(hl_context_scratch_bytes(context.get()), 0U);
    EXPECT_EQ(hl_context_concurrency(context.get()), cpp_context.concurrency());
}

TEST(CApi, FromC99) {
    const std::size_t count = std::size_t{C99_HEADS} * C99_LENGTH * C99_DIM;
    const auto q = random_floats(count, 1);
    const auto k = random_floats(count, 2);
    const auto v = random_floats(count, 3);
    std::vector<float> c(count);
    std::vector<float> cpp(count);
    ASSERT_STREQ(c99_attend(q.data(), k.data(), v.data(), c.data()), "");
    Context context;
    const Extents<4> shape{1, C99_HEADS, C99_LENGTH, C99_DIM};
    AttentionOptions options;
    options.causal = true;
    attend(context, InputTensor<4>::dense(q.data(), shape), InputTensor<4>::dense(k.data(), shape),
           InputTensor<4>::dense(v.data(), shape), options, OutputTensor<4>::dense(cpp.data(), shape));
    EXPECT_TRUE(same_bits(c, cpp));
}

TEST(CApi, PackedAttentionHasTheBitsOfTheCppInterface) {
    const auto q = random_floats(std::size_t{4} * 30 * 16, 1);
    const auto k = random_floats(std::size_t{2} * 50 * 16, 2);
    const std::vector<std::int64_t> q_offsets{0, 7, 7, 30};
    const std::vector<std::int64_t> k_offsets{0, 20, 25, 50};
    std::vector<float> c(q.size());
    std::vector<float> cpp(q.size());
    const auto context = make_c_context();
    const hl_tensor query = dense_f32<3>(q, {4, 30, 16});
    const hl_tensor key = dense_f32<3>(k, {2, 50, 16});
    const hl_tensor output = dense_f32<3>(c, {4, 30, 16});
    ASSERT_EQ(hl_attend_packed(context.get(), &query, &key, &key, q_offsets.data(), k_offsets.data(), 3, nullptr,
                               &output, nullptr),
              HL_OK)
        << hl_context_message(context.get());
    Context cpp_context;
    const auto rows = InputTensor<3>::dense(k.data(), {2, 50, 16});
    attend_packed(cpp_context, InputTensor<3>::dense(q.data(), {4, 30, 16}), rows, rows, q_offsets, k_offsets, {},
                  OutputTensor<3>::dense(cpp.data(), {4, 30, 16}));
    EXPECT_TRUE(same_bits(c, cpp));
}

/// Rows of a small cache, and what a query sees in it.
struct Cached {
    std::vector<float> rows = random_floats(std::size_t{2} * 70 * 16, 5);
    std::vector<float> q = random_floats(std::size_t{4} * 3 * 16, 6);
    std::vector<float> out = std::vector<float>(q.size());
    hl_tensor keys = dense_f32<3>(rows, {2, 70, 16});

    hl_cached_query query(const hl_cache* cache) {
        hl_cached_query made{};
        made.size = sizeof(made);
        made.query = dense_f32<3>(q, {4, 3, 16});
        made.cache = cache;
        made.output = dense_f32<3>(out, {4, 3, 16});
        return made;
    }
};

TEST(CApi, CacheHasTheBitsOfTheCppInterface) {
    hl_rotary_options rotary;
    ASSERT_EQ(hl_rotary_options_init(&rotary, sizeof(rotary)), HL_OK);
    rotary.head_dim = 16;
    rotary.rotary_dim = 8;
    rotary.scaling = HL_ROTARY_LINEAR;
    rotary.factor = 2.0;
    const RotaryOptions cpp_rotary{.head_dim = 16, .rotary_dim = 8, .scaling = RotaryScaling::linear, .factor = 2.0};
    const std::vector<float> centre(32, 0.25F);
    const std::vector<std::int64_t> windows{0, 9};
    for (const std::int32_t type : {HL_KV_F32, HL_KV_F16, HL_KV_BF16, HL_KV_INT8, HL_KV_INT4}) {
        SCOPED_TRACE(type);
        hl_cache_options options = small_cache();
        options.shape.key_type = options.shape.value_type = type;
        options.layers = 2;
        options.layer_windows = windows.data();
        options.layer_windows_count = 2;
        options.max_chunk = 80;
        options.rotary = &rotary;
        KvCacheOptions cpp_options;
        cpp_options.shape = {2, 16, 16, static_cast<KvType>(type), static_cast<KvType>(type)};
        cpp_options.layers = 2;
        cpp_options.layer_windows = windows;
        cpp_options.max_chunk = 80;
        cpp_options.rotary = Rotary(cpp_rotary);
        if (type >= HL_KV_INT8) {
            options.hadamard_keys = 1;
            options.key_centre = centre.data();
            options.key_centre_count = centre.size();
            cpp_options.hadamard_keys = true;
            cpp_options.key_centre = centre;
        }
        const auto context = make_c_context();
        const auto cache = make_c_cache(context.get(), options);
        Context cpp_context;
        KvCache cpp_cache(cpp_options);
        Cached c;
        Cached cpp;
        for (std::size_t layer = 0; layer < 2; ++layer) {
            ASSERT_EQ(hl_cache_append(context.get(), cache.get(), layer, &c.keys, &c.keys), HL_OK)
                << hl_context_message(context.get());
            const auto rows = InputTensor<3>::dense(cpp.rows.data(), {2, 70, 16});
            cpp_cache.append(cpp_context, layer, rows, rows);
            hl_cached_query query = c.query(cache.get());
            query.layer = layer;
            ASSERT_EQ(hl_attend_cached(context.get(), &query, 1, nullptr), HL_OK) << hl_context_message(context.get());
            const CachedQuery cpp_query{InputTensor<3>::dense(cpp.q.data(), {4, 3, 16}), &cpp_cache, layer,
                                        OutputTensor<3>::dense(cpp.out.data(), {4, 3, 16})};
            attend(cpp_context, std::span(&cpp_query, 1));
            EXPECT_TRUE(same_bits(c.out, cpp.out));
        }
        EXPECT_EQ(hl_cache_length(cache.get()), 70);
        EXPECT_EQ(hl_cache_layer_length(cache.get(), 1), 70);
        hl_cache_info info{};
        info.size = sizeof(info);
        ASSERT_EQ(hl_cache_get_info(cache.get(), &info), HL_OK);
        EXPECT_EQ(info.shape.key_type, type);
        EXPECT_EQ(info.layers, 2);
        EXPECT_EQ(info.forgets, 1);
        EXPECT_EQ(info.length, 70);
        EXPECT_EQ(info.used_bytes, cpp_cache.used_bytes());
        EXPECT_EQ(info.reserved_bytes, hl_cache_reserved_bytes(cache.get()));
        std::size_t estimate = 0;
        ASSERT_EQ(hl_cache_estimate_bytes(context.get(), &options, 70, &estimate), HL_OK);
        EXPECT_EQ(estimate, KvCache::estimate_bytes(cpp_options, 70));
    }
}

TEST(CApi, LifeOfACache) {
    const auto context = make_c_context();
    hl_context* const c = context.get();
    const auto cache = make_c_cache(c);
    Cached data;
    EXPECT_EQ(hl_cache_reserve(cache.get(), 140), HL_OK);
    ASSERT_EQ(hl_cache_append(c, cache.get(), 0, &data.keys, &data.keys), HL_OK);
    hl_cache* made = nullptr;
    ASSERT_EQ(hl_cache_fork(cache.get(), &made), HL_OK);
    const Handle<hl_cache> fork(made);
    ASSERT_EQ(hl_cache_append(c, fork.get(), 0, &data.keys, &data.keys), HL_OK);
    EXPECT_EQ(hl_cache_length(fork.get()), 140);
    EXPECT_EQ(hl_cache_length(cache.get()), 70);
    ASSERT_EQ(hl_cache_truncate(fork.get(), 70), HL_OK);

    std::vector<float> keys(data.rows.size());
    std::vector<float> values(data.rows.size());
    const hl_tensor to_keys = dense_f32<3>(keys, {2, 70, 16});
    const hl_tensor to_values = dense_f32<3>(values, {2, 70, 16});
    ASSERT_EQ(hl_cache_read_back(fork.get(), 0, 0, &to_keys, &to_values), HL_OK);
    EXPECT_TRUE(same_bits(keys, data.rows));
    EXPECT_TRUE(same_bits(values, data.rows));

    const std::string note = "seventy tokens";
    std::vector<std::byte> bytes(hl_cache_saved_bytes(cache.get(), note.size()));
    ASSERT_EQ(hl_cache_save(cache.get(), bytes.data(), bytes.size(), note.data(), note.size()), HL_OK);
    EXPECT_EQ(hl_cache_save(cache.get(), bytes.data(), bytes.size() - 1, note.data(), note.size()),
              HL_INVALID_ARGUMENT);
    const std::string path = testing::TempDir() + "headlong_c_api_cache";
    ASSERT_EQ(hl_cache_save_file(cache.get(), path.c_str(), note.data(), note.size()), HL_OK);
    EXPECT_EQ(std::filesystem::file_size(path), bytes.size());
    for (const bool file : {false, true}) {
        hl_cache_reset(fork.get());
        EXPECT_EQ(hl_cache_length(fork.get()), 0);
        ASSERT_EQ(file ? hl_cache_restore_file(fork.get(), path.c_str())
                       : hl_cache_restore(fork.get(), bytes.data(), bytes.size()),
                  HL_OK)
            << hl_context_message(c);
        EXPECT_EQ(hl_cache_length(fork.get()), 70);
        std::size_t count = 0;
        const void* const attachment = hl_cache_attachment(fork.get(), &count);
        ASSERT_EQ(count, note.size());
        EXPECT_EQ(std::memcmp(attachment, note.data(), count), 0);
    }
    std::filesystem::remove(path);
    EXPECT_EQ(hl_cache_restore_file(fork.get(), path.c_str()), HL_IO);
    bytes[bytes.size() / 2] ^= std::byte{1};
    EXPECT_EQ(hl_cache_restore(fork.get(), bytes.data(), bytes.size()), HL_BAD_FILE);
    EXPECT_EQ(hl_cache_length(fork.get()), 70) << "a failed restore leaves the cache";
    std::size_t count = 0;
    EXPECT_NE(hl_cache_attachment(fork.get(), &count), nullptr) << "and its attachment";

    hl_cache_options ring = small_cache();
    ring.ring = 1;
    ring.capacity = 16;
    ring.sink_tokens = 2;
    ring.max_chunk = 70;
    const auto forgetful = make_c_cache(c, ring);
    ASSERT_EQ(hl_cache_append(c, forgetful.get(), 0, &data.keys, &data.keys), HL_OK);
    ASSERT_EQ(hl_cache_append(c, forgetful.get(), 0, &data.keys, &data.keys), HL_OK);
    EXPECT_EQ(hl_cache_truncate(forgetful.get(), 20), HL_WOULD_FORGET);
    EXPECT_EQ(hl_cache_read_back(forgetful.get(), 0, 0, &to_keys, &to_values), HL_WOULD_FORGET);
    EXPECT_EQ(hl_cache_length(forgetful.get()), 140);
    ring = small_cache();
    ring.capacity = 69;
    const auto small = make_c_cache(c, ring);
    EXPECT_EQ(hl_cache_append(c, small.get(), 0, &data.keys, &data.keys), HL_OUT_OF_MEMORY);
    EXPECT_EQ(hl_cache_length(small.get()), 0);
}

TEST(CApi, SharedPoolOutlivesItsHandleAndItsContext) {
    WatchedMemory memory;
    const hl_memory callbacks = memory.callbacks();
    hl_context_options options{};
    options.size = sizeof(options);
    options.memory = &callbacks;
    auto context = make_c_context(&options);
    const auto other = make_c_context();
    hl_pool* made = nullptr;
    const hl_cache_options of = small_cache();
    ASSERT_EQ(hl_pool_create(context.get(), &of.shape, &made), HL_OK);
    Handle<hl_pool> pool(made);
    hl_cache_options shared = of;
    shared.pool = pool.get();
    auto first = make_c_cache(context.get(), shared);
    auto second = make_c_cache(other.get(), shared);
    Cached data;
    ASSERT_EQ(hl_cache_append(other.get(), second.get(), 0, &data.keys, &data.keys), HL_OK);
    EXPECT_EQ(hl_pool_used_bytes(pool.get()), 2 * hl_pool_block_bytes(pool.get()));
    EXPECT_GE(hl_pool_reserved_bytes(pool.get()), hl_pool_used_bytes(pool.get()));
    EXPECT_GT(memory.live(), 0U);
    context.reset();
    pool.reset();
    first.reset();
    ASSERT_EQ(hl_cache_append(other.get(), second.get(), 0, &data.keys, &data.keys), HL_OK);
    second.reset();
    EXPECT_EQ(memory.live(), 0U);
    EXPECT_EQ(memory.faults(), 0U);
}

TEST(CApi, LayerHasTheBitsOfTheCppInterface) {
    const auto w = random_floats(std::size_t{32} * 32, 1);
    const auto narrow = random_floats(std::size_t{32} * 16, 2);
    const auto bias = random_floats(32, 3);
    const auto x = random_floats(std::size_t{2} * 9 * 32, 4);
    std::vector<float> c(x.size());
    std::vector<float> cpp(x.size());
    const auto context = make_c_context();
    const hl_layer_options options{sizeof(hl_layer_options), 4, 2};
    hl_layer_weights weights{};
    weights.size = sizeof(weights);
    weights.query = weights.output = dense_f32<2>(w, {32, 32});
    weights.key = weights.value = dense_f32<2>(narrow, {32, 16});
    weights.query_bias = weights.output_bias = dense_f32<1>(bias, {32});
    hl_layer* made = nullptr;
    ASSERT_EQ(hl_layer_create(context.get(), &options, &weights, &made), HL_OK) << hl_context_message(context.get());
    const Handle<hl_layer> layer(made);
    hl_layer_info info{};
    info.size = sizeof(info);
    ASSERT_EQ(hl_layer_get_info(layer.get(), &info), HL_OK);
    EXPECT_EQ(info.d_model, 32);
    EXPECT_EQ(info.heads, 4);
    EXPECT_EQ(info.kv_heads, 2);
    EXPECT_EQ(info.head_dim, 8);

    Context cpp_context;
    MultiHeadAttentionWeights cpp_weights;
    cpp_weights.query = cpp_weights.output = InputTensor<2>::dense(w.data(), {32, 32});
    cpp_weights.key = cpp_weights.value = InputTensor<2>::dense(narrow.data(), {32, 16});
    cpp_weights.query_bias = cpp_weights.output_bias = InputTensor<1>::dense(bias.data(), {32});
    const MultiHeadAttention cpp_layer(cpp_context, {.heads = 4, .kv_heads = 2}, cpp_weights);

    const hl_tensor in = dense_f32<3>(x, {2, 9, 32});
    const hl_tensor out = dense_f32<3>(c, {2, 9, 32});
    ASSERT_EQ(hl_layer_forward(context.get(), layer.get(), &in, nullptr, &out), HL_OK);
    cpp_layer.forward(cpp_context, InputTensor<3>::dense(x.data(), {2, 9, 32}),
                      OutputTensor<3>::dense(cpp.data(), {2, 9, 32}));
    EXPECT_TRUE(same_bits(c, cpp));

    hl_cache_options of = small_cache();
    of.shape.head_dim = of.shape.value_dim = 8;
    const auto cache = make_c_cache(context.get(), of);
    KvCacheOptions cpp_of;
    cpp_of.shape = {2, 8, 8};
    KvCache cpp_cache(cpp_of);
    const hl_tensor rows = dense_f32<2>(x, {18, 32});
    const hl_tensor results = dense_f32<2>(c, {18, 32});
    ASSERT_EQ(hl_layer_forward_cached(context.get(), layer.get(), &rows, cache.get(), 0, nullptr, &results), HL_OK);
    cpp_layer.forward(cpp_context, InputTensor<2>::dense(x.data(), {18, 32}), cpp_cache, 0,
                      OutputTensor<2>::dense(cpp.data(), {18, 32}));
    EXPECT_TRUE(same_bits(c, cpp));
}

TEST(CApi, ModelHasTheBitsOfTheCppInterface) {
    const auto context = make_c_context();
    hl_context* const c = context.get();
    hl_model_options model_options;
    ASSERT_EQ(hl_model_options_init(&model_options, sizeof(model_options)), HL_OK);
    std::uint64_t loaded = 0;
    model_options.user = &loaded;
    model_options.on_load = [](void* user, std::uint64_t done, std::uint64_t) {
        *static_cast<std::uint64_t*>(user) = done;
    };
    hl_model* made = nullptr;
    ASSERT_EQ(hl_model_load(c, kModel, &model_options, &made), HL_OK) << hl_context_message(c);
    const Handle<hl_model> model(made);
    EXPECT_GT(loaded, 0U);
    Context cpp_context;
    const Model cpp_model(cpp_context, kModel);
    hl_model_info info{};
    info.size = sizeof(info);
    ASSERT_EQ(hl_model_get_info(model.get(), &info), HL_OK);
    EXPECT_EQ(info.architecture, cpp_model.info().architecture);
    EXPECT_EQ(info.vocab_size, cpp_model.info().vocab_size);
    EXPECT_EQ(info.max_positions, cpp_model.info().max_positions);
    EXPECT_EQ(info.eos_ids_count, cpp_model.info().eos_ids.size());
    EXPECT_EQ(info.has_bos_id != 0, cpp_model.info().bos_id.has_value());

    const std::string prompt = "It is a truth universally acknowledged";
    std::size_t count = 0;
    ASSERT_EQ(hl_model_tokenize(model.get(), prompt.c_str(), HL_TO_THE_END, 1, nullptr, 0, &count), HL_OK);
    std::vector<std::int32_t> ids(count);
    EXPECT_EQ(hl_model_tokenize(model.get(), prompt.data(), prompt.size(), 1, ids.data(), count - 1, &count),
              HL_INVALID_ARGUMENT);
    EXPECT_EQ(count, ids.size());
    ASSERT_EQ(hl_model_tokenize(model.get(), prompt.data(), prompt.size(), 1, ids.data(), count, &count), HL_OK);
    EXPECT_EQ(ids, cpp_model.tokenizer().encode(prompt));
    ASSERT_EQ(hl_model_detokenize(model.get(), ids.data(), ids.size(), 1, nullptr, 0, &count), HL_OK);
    std::string text(count + 1, 'x');
    EXPECT_EQ(hl_model_detokenize(model.get(), ids.data(), ids.size(), 1, text.data(), count, &count),
              HL_INVALID_ARGUMENT);
    ASSERT_EQ(hl_model_detokenize(model.get(), ids.data(), ids.size(), 1, text.data(), count + 1, &count), HL_OK);
    EXPECT_EQ(text.c_str(), cpp_model.tokenizer().decode(ids));

    hl_model_cache_options cache_options{};
    cache_options.size = sizeof(cache_options);
    cache_options.key_type = HL_KV_INT8;
    cache_options.value_type = HL_KV_F16;
    cache_options.capacity = 100;
    hl_cache* made_cache = nullptr;
    ASSERT_EQ(hl_model_cache_create(c, model.get(), &cache_options, &made_cache), HL_OK) << hl_context_message(c);
    const Handle<hl_cache> cache(made_cache);
    KvCache cpp_cache(cpp_model.cache_options({KvType::int8, KvType::f16}, 100));
    std::vector<float> logits(static_cast<std::size_t>(info.vocab_size) * 2);
    std::vector<float> cpp_logits(logits.size());
    const hl_tensor rows = dense_f32<2>(logits, {2, info.vocab_size});
    ASSERT_EQ(hl_model_forward(c, model.get(), ids.data(), ids.size(), cache.get(), &rows, nullptr), HL_OK);
    cpp_model.forward(cpp_context, ids, cpp_cache, OutputTensor<2>::dense(cpp_logits.data(), {2, info.vocab_size}));
    EXPECT_TRUE(same_bits(logits, cpp_logits));

    hl_generate_options options;
    ASSERT_EQ(hl_generate_options_init(&options, sizeof(options)), HL_OK);
    options.max_tokens = 12;
    options.temperature = 0.7F;
    options.top_k = 20;
    options.top_p = 0.9F;
    options.seed = 3;
    std::string streamed;
    options.user = &streamed;
    options.on_text = [](void* user, const char* piece, std::size_t bytes) -> std::int32_t {
        EXPECT_EQ(std::strlen(piece), bytes);
        static_cast<std::string*>(user)->append(piece, bytes);
        return 0;
    };
    hl_generation* generated = nullptr;
    ASSERT_EQ(hl_generate(c, model.get(), prompt.c_str(), HL_TO_THE_END, &options, &generated), HL_OK)
        << hl_context_message(c);
    const Handle<hl_generation> generation(generated);
    hl_generation_info result{};
    result.size = sizeof(result);
    ASSERT_EQ(hl_generation_get_info(generation.get(), &result), HL_OK);
    GenerateOptions cpp_options;
    cpp_options.max_tokens = 12;
    cpp_options.sampling = {0.7F, 20, 0.9F, 3};
    const Generation expected = generate(cpp_context, cpp_model, prompt, cpp_options);
    EXPECT_EQ(std::vector<std::int32_t>(result.tokens, result.tokens + result.tokens_count), expected.tokens);
    EXPECT_EQ(result.text, expected.text);
    EXPECT_EQ(result.text_bytes, expected.text.size());
    EXPECT_EQ(streamed, expected.text);
    EXPECT_EQ(result.reason, HL_STOP_MAX_TOKENS);
    EXPECT_EQ(result.prefill_tokens, expected.prefill_tokens);

    // a callback that has enough, a dialogue that goes on, a callback that must not throw but does
    options.on_text = [](void*, const char*, std::size_t) -> std::int32_t { return 1; };
    generated = nullptr;
    ASSERT_EQ(hl_generate_cached(c, model.get(), cache.get(), ids.data(), ids.size(), &options, &generated), HL_OK);
    const Handle<hl_generation> ended(generated);
    ASSERT_EQ(hl_generation_get_info(ended.get(), &result), HL_OK);
    EXPECT_EQ(result.reason, HL_STOP_CANCELLED);
    options.on_text = [](void*, const char*, std::size_t) -> std::int32_t { throw std::runtime_error("no\nmore"); };
    EXPECT_EQ(hl_generate(c, model.get(), "x", 1, &options, nullptr), HL_INTERNAL);
    EXPECT_STREQ(hl_context_message(c), "no more");
    options.on_text = nullptr;

    hl_cancel* token = nullptr;
    ASSERT_EQ(hl_cancel_create(&token), HL_OK);
    const Handle<hl_cancel> cancel(token);
    hl_cancel_request(token);
    options.cancel = token;
    generated = nullptr;
    ASSERT_EQ(hl_generate(c, model.get(), "x", 1, &options, &generated), HL_OK);
    const Handle<hl_generation> cancelled(generated);
    ASSERT_EQ(hl_generation_get_info(cancelled.get(), &result), HL_OK);
    EXPECT_EQ(result.reason, HL_STOP_CANCELLED);
    EXPECT_EQ(result.tokens_count, 0U);

    EXPECT_EQ(hl_model_load(c, "/no/such/folder", nullptr, &made), HL_IO);
    EXPECT_EQ(made, nullptr);
}

TEST(CApiErrors, HostileNumbersAreRefusedByName) {
    const auto context = make_c_context();
    hl_context* const c = context.get();
    Plain plain;
    const auto refused = [&](auto change, const char* name) {
        hl_attention_options options = attention_defaults();
        change(options);
        EXPECT_EQ(plain.attend(c, &options), HL_INVALID_ARGUMENT) << name;
        EXPECT_TRUE(says(hl_context_message(c), name));
    };
    for (const std::int32_t wrong : {-1, 3, std::numeric_limits<std::int32_t>::max()}) {
        refused([&](hl_attention_options& o) { o.causal = wrong; }, "causal is");
        refused([&](hl_attention_options& o) { o.alignment = wrong; }, "alignment is");
        refused([&](hl_attention_options& o) { o.reserved = wrong; }, "reserved is");
        hl_mask mask{};
        mask.size = sizeof(mask);
        mask.rank = wrong == 3 ? 5 : wrong;
        refused([&](hl_attention_options& o) { o.mask = &mask; }, "mask: rank is");
        mask.rank = 2;
        mask.type = wrong == 3 ? 4 : wrong;
        refused([&](hl_attention_options& o) { o.mask = &mask; }, "mask: type is");
        mask.type = 0;
        mask.keys = wrong;
        refused([&](hl_attention_options& o) { o.mask = &mask; }, "mask: keys is");
        mask.keys = 0;
        mask.reserved = wrong;
        refused([&](hl_attention_options& o) { o.mask = &mask; }, "mask: reserved is");
        hl_tensor* const tensors[] = {&plain.query, &plain.key, &plain.value, &plain.output, &plain.sums};
        const char* const names[] = {"query", "key", "value", "output", "lse"};
        for (std::size_t i = 0; i < 5; ++i) {
            const hl_tensor whole = *tensors[i];
            tensors[i]->dtype = wrong;
            EXPECT_EQ(plain.attend(c), HL_INVALID_ARGUMENT);
            EXPECT_TRUE(says(hl_context_message(c), std::string(names[i]) + ": dtype is"));
            *tensors[i] = whole;
            tensors[i]->rank = wrong == 3 ? 2 : wrong;
            EXPECT_EQ(plain.attend(c), HL_INVALID_ARGUMENT);
            EXPECT_TRUE(says(hl_context_message(c), std::string(names[i]) + ": rank is"));
            *tensors[i] = whole;
            tensors[i]->data = nullptr;  // an lse would be left unwritten
            EXPECT_EQ(plain.attend(c), HL_INVALID_ARGUMENT);
            EXPECT_TRUE(says(hl_context_message(c), std::string(names[i]) + ": data is"));
            *tensors[i] = whole;
        }
        hl_cache* cache = nullptr;
        hl_cache_options options = small_cache();
        options.shape.key_type = wrong == 3 ? 5 : wrong;
        EXPECT_EQ(hl_cache_create(c, &options, &cache), HL_INVALID_ARGUMENT);
        EXPECT_TRUE(says(hl_context_message(c), "key_type is"));
        options = small_cache();
        hl_rotary_options rotary;
        ASSERT_EQ(hl_rotary_options_init(&rotary, sizeof(rotary)), HL_OK);
        rotary.head_dim = 16;
        rotary.pairing = wrong;
        options.rotary = &rotary;
        EXPECT_EQ(hl_cache_create(c, &options, &cache), HL_INVALID_ARGUMENT);
        EXPECT_TRUE(says(hl_context_message(c), "pairing is"));
        rotary.pairing = 0;
        rotary.scaling = wrong == 3 ? 6 : wrong;
        EXPECT_EQ(hl_cache_create(c, &options, &cache), HL_INVALID_ARGUMENT);
        EXPECT_TRUE(says(hl_context_message(c), "scaling is"));
        EXPECT_STREQ(hl_status_name(wrong == 3 ? 9 : wrong), "unknown");
    }
    EXPECT_EQ(plain.attend(c), HL_OK) << hl_context_message(c);
    EXPECT_STREQ(hl_status_name(HL_WOULD_FORGET), "would_forget");
    EXPECT_STREQ(hl_status_name(HL_INTERNAL), "internal");
}

TEST(CApiErrors, CppErrorsKeepTheirMessage) {
    const auto context = make_c_context();
    hl_cache_options options = small_cache();
    options.layers = 0;
    hl_cache* cache = nullptr;
    EXPECT_EQ(hl_cache_create(context.get(), &options, &cache), HL_INVALID_ARGUMENT);
    KvCacheOptions cpp_options;
    cpp_options.shape = {2, 16, 16};
    cpp_options.layers = 0;
    EXPECT_EQ(hl_context_message(context.get()), refusal([&] { const KvCache made(cpp_options); }));
}

TEST(CApiErrors, ContextOptions) {
    const auto refused = [](auto change, hl_status status, const char* name) {
        hl_context_options options{};
        options.size = sizeof(options);
        change(options);
        hl_context* context = nullptr;
        char message[256];
        EXPECT_EQ(hl_context_create(&options, &context, message, sizeof(message)), status) << message;
        EXPECT_EQ(context, nullptr);
        EXPECT_TRUE(says(message, name));
        char shorter[9];
        EXPECT_EQ(hl_context_create(&options, &context, shorter, sizeof(shorter)), status);
        EXPECT_EQ(std::string(shorter), std::string(message).substr(0, 8)) << "cut, and ended by a 0";
    };
    refused([](auto& o) { o.isa = "sse9"; }, HL_INVALID_ARGUMENT, "isa is \"sse9\"");
    refused([](auto& o) { o.isa_cap = ""; }, HL_INVALID_ARGUMENT, "isa_cap is \"\"");
    refused([](auto& o) { o.isa = o.isa_cap = "generic"; }, HL_INVALID_ARGUMENT, "isa_cap");
    refused([](auto& o) { o.threads = 1U << 20U; }, HL_INVALID_ARGUMENT, "threads is");
    refused([](auto& o) { o.size = 8; }, HL_INVALID_ARGUMENT, "options: size is 8");
    hl_memory memory{};
    memory.size = sizeof(memory);
    refused([&](auto& o) { o.memory = &memory; }, HL_INVALID_ARGUMENT, "allocate is NULL");
    memory.allocate = [](void*, std::size_t, std::size_t) -> void* { return nullptr; };
    refused([&](auto& o) { o.memory = &memory; }, HL_INVALID_ARGUMENT, "deallocate is NULL");
    memory.size = 0;
    refused([&](auto& o) { o.memory = &memory; }, HL_INVALID_ARGUMENT, "memory: size is 0");
    hl_executor executor{};
    executor.size = sizeof(executor);
    refused([&](auto& o) { o.executor = &executor; }, HL_INVALID_ARGUMENT, "run is NULL");
    executor.run = [](void*, std::size_t, hl_task, void*) {};
    refused([&](auto& o) { o.executor = &executor; }, HL_INVALID_ARGUMENT, "concurrency is 0");
    executor.concurrency = 4;
    executor.worker_slots = 3;
    refused([&](auto& o) { o.executor = &executor; }, HL_INVALID_ARGUMENT, "worker_slots is 3");
    executor.worker_slots = 0;
    refused(
        [&](auto& o) {
            o.executor = &executor;
            o.threads = 2;
        },
        HL_INVALID_ARGUMENT, "threads and executor");

    std::vector<const char*> names(8);
    std::size_t count = 0;
    ASSERT_EQ(hl_available_isas(names.data(), names.size(), &count), HL_OK);
    ASSERT_EQ(count, available_isas().size());
    for (std::size_t i = 0; i < count; ++i) {
        hl_context_options options{};
        options.size = sizeof(options);
        options.isa = names[i];
        options.threads = 1;
        EXPECT_STREQ(hl_context_isa(make_c_context(&options).get()), names[i]);
    }
    EXPECT_STREQ(names[0], "generic");
}

TEST(CApiErrors, EachThreadHasItsMessage) {
    const auto context = make_c_context();
    hl_context* const c = context.get();
    EXPECT_STREQ(hl_context_message(c), "");
    std::atomic<int> failed = 0;
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    constexpr int kThreads = 12;  // more than there are slots at first
    for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([&, i] {
            hl_cache_options options = small_cache();
            options.layers = -100 - i;
            hl_cache* cache = nullptr;
            if (hl_cache_create(c, &options, &cache) != HL_INVALID_ARGUMENT) ++wrong;
            ++failed;
            while (failed < kThreads) std::this_thread::yield();
            const std::string expected = "layers is " + std::to_string(options.layers);
            for (int k = 0; k < 100; ++k) {
                if (std::string(hl_context_message(c)).find(expected) == std::string::npos) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_STREQ(hl_context_message(c), "") << "this thread has not failed";
}

TEST(CApiErrors, TextsAreCutBetweenCharacters) {
    char text[6];
    c_api::copy_text("ab\ncdefg", text, sizeof(text));
    EXPECT_STREQ(text, "ab cd");
    c_api::copy_text("abcd\xC3\xA9", text, sizeof(text));
    EXPECT_STREQ(text, "abcd") << "half a character is none";
    c_api::copy_text("abc\xC3\xA9", text, sizeof(text));
    EXPECT_STREQ(text, "abc\xC3\xA9");
    c_api::copy_text("x", text, 1);
    EXPECT_STREQ(text, "");
}

TEST(CApiStructs, SizesThatAreNotKnown) {
    const auto context = make_c_context();
    hl_context* const c = context.get();
    Plain plain;
    for (const std::size_t size : {std::size_t{0}, sizeof(hl_attention_options) - 8, sizeof(hl_attention_options) + 8,
                                   std::numeric_limits<std::size_t>::max()}) {
        hl_attention_options options = attention_defaults();
        options.size = size;
        EXPECT_EQ(plain.attend(c, &options), HL_INVALID_ARGUMENT);
        EXPECT_TRUE(says(hl_context_message(c), "options: size is " + std::to_string(size)));
        struct {
            hl_attention_options options;
            std::byte behind[64];
        } guarded;
        std::memset(&guarded, 0x5A, sizeof(guarded));
        EXPECT_EQ(hl_attention_options_init(&guarded.options, size), HL_INVALID_ARGUMENT);
        if (size != 0) {
            EXPECT_EQ(guarded.options.size, 0U) << "which the call then refuses";
        }
        for (const std::byte b : guarded.behind) EXPECT_EQ(b, std::byte{0x5A});
    }
    const auto cache = make_c_cache(c);
    Cached data;
    hl_cached_query queries[2] = {data.query(cache.get()), data.query(cache.get())};
    queries[1].size = sizeof(hl_cached_query) - 8;
    EXPECT_EQ(hl_attend_cached(c, queries, 2, nullptr), HL_INVALID_ARGUMENT);
    queries[0].size += 8;
    EXPECT_EQ(hl_attend_cached(c, queries, 1, nullptr), HL_INVALID_ARGUMENT);
}

TEST(CApiStructs, OlderCallersGetDefaults) {
    Grown given{sizeof(Grown), 10, 20};
    EXPECT_EQ(c_api::read("grown", &given).added, 20);
    given.size = offsetof(Grown, added);
    EXPECT_EQ(c_api::read("grown", &given).first, 10);
    EXPECT_EQ(c_api::read("grown", &given).added, 2) << "of which the caller knew nothing";
    EXPECT_EQ(c_api::read<Grown>("grown", nullptr).first, 1);
    given.size = offsetof(Grown, added) - 1;
    EXPECT_TRUE(says(refusal([&] { c_api::read("grown", &given); }), "grown: size is 15; this library knows 16 to 24"));

    given = {0, 10, 20};
    EXPECT_EQ(c_api::init(&given, offsetof(Grown, added)), HL_OK);
    EXPECT_EQ(given.size, offsetof(Grown, added));
    EXPECT_EQ(given.first, 1);
    EXPECT_EQ(given.added, 20) << "not the caller's structure any more";

    given = {offsetof(Grown, added), 10, 20};
    c_api::write("grown", &given, Grown{0, 5, 6});
    EXPECT_EQ(given.first, 5);
    EXPECT_EQ(given.added, 20);
    EXPECT_EQ(given.size, offsetof(Grown, added));
}

TEST(CApiMemory, EveryRefusedAllocationIsOutOfMemoryAndChangesNothing) {
    Cached expected;
    {
        const auto context = make_c_context();
        const auto cache = make_c_cache(context.get());
        ASSERT_EQ(hl_cache_append(context.get(), cache.get(), 0, &expected.keys, &expected.keys), HL_OK);
        const hl_cached_query query = expected.query(cache.get());
        ASSERT_EQ(hl_attend_cached(context.get(), &query, 1, nullptr), HL_OK);
    }
    WatchedMemory memory;
    const hl_memory callbacks = memory.callbacks();
    hl_context_options options{};
    options.size = sizeof(options);
    options.memory = &callbacks;
    options.threads = 1;
    hl_rotary_options rotary;
    ASSERT_EQ(hl_rotary_options_init(&rotary, sizeof(rotary)), HL_OK);
    int refusals = 0;
    for (std::size_t n = 0;; ++n) {
        SCOPED_TRACE(n);
        const std::size_t before = memory.calls();
        memory.refuse_after(n);
        hl_context* made = nullptr;
        const hl_status created = hl_context_create(&options, &made, nullptr, 0);
        const Handle<hl_context> context(made);
        if (created != HL_OK) {
            EXPECT_EQ(created, HL_OUT_OF_MEMORY);
            ++refusals;
            continue;
        }
        const hl_cache_options of = small_cache();
        hl_cache* made_cache = nullptr;
        hl_status status = hl_cache_create(context.get(), &of, &made_cache);
        Handle<hl_cache> cache(made_cache);
        bool refused = status != HL_OK;
        if (refused) {
            EXPECT_EQ(status, HL_OUT_OF_MEMORY);
            EXPECT_EQ(made_cache, nullptr);
            memory.refuse_nothing();
            cache = make_c_cache(context.get());
        }
        Cached data;
        status = hl_cache_append(context.get(), cache.get(), 0, &data.keys, &data.keys);
        if (status != HL_OK) {
            refused = true;
            EXPECT_EQ(status, HL_OUT_OF_MEMORY);
            EXPECT_EQ(hl_cache_length(cache.get()), 0);
            EXPECT_EQ(hl_cache_used_bytes(cache.get()), 0U);
            EXPECT_STRNE(hl_context_message(context.get()), "");
            memory.refuse_nothing();
            ASSERT_EQ(hl_cache_append(context.get(), cache.get(), 0, &data.keys, &data.keys), HL_OK);
        }
        const hl_cached_query query = data.query(cache.get());
        status = hl_attend_cached(context.get(), &query, 1, nullptr);
        if (status != HL_OK) {
            refused = true;
            EXPECT_EQ(status, HL_OUT_OF_MEMORY);
            EXPECT_EQ(hl_cache_length(cache.get()), 70);
            memory.refuse_nothing();
            ASSERT_EQ(hl_attend_cached(context.get(), &query, 1, nullptr), HL_OK);
        }
        EXPECT_TRUE(same_bits(data.out, expected.out));
        memory.refuse_nothing();
        if (!refused) {
            EXPECT_EQ(memory.calls() - before, n);
            break;
        }
        ++refusals;
        ASSERT_LT(n, 1000U);
    }
    EXPECT_GT(refusals, 1);
    EXPECT_EQ(memory.live(), 0U);
    EXPECT_EQ(memory.faults(), 0U);
}

TEST(CApiMemory, ThousandLivesAreBalanced) {
    WatchedMemory memory;
    const hl_memory callbacks = memory.callbacks();
    hl_context_options options{};
    options.size = sizeof(options);
    options.memory = &callbacks;
    options.threads = 1;
    const auto w = random_floats(std::size_t{32} * 32, 1);
    hl_layer_weights weights{};
    weights.size = sizeof(weights);
    weights.query = weights.key = weights.value = weights.output = dense_f32<2>(w, {32, 32});
    const hl_layer_options of{sizeof(hl_layer_options), 2, 0};
    const hl_tensor row = dense_f32<2>(w, {1, 32});
    std::vector<float> out(32);
    const hl_tensor y = dense_f32<2>(out, {1, 32});
    for (int i = 0; i < (emulated() ? 20 : 1000); ++i) {
        auto context = make_c_context(&options);
        const auto cache = make_c_cache(context.get());
        hl_layer* layer = nullptr;
        ASSERT_EQ(hl_layer_create(context.get(), &of, &weights, &layer), HL_OK);
        const Handle<hl_layer> owner(layer);
        ASSERT_EQ(hl_layer_forward_cached(context.get(), layer, &row, cache.get(), 0, nullptr, &y), HL_OK)
            << hl_context_message(context.get());
        if (i % 2 == 0) context.reset();  // any order will do
    }
    EXPECT_EQ(memory.live(), 0U);
    EXPECT_EQ(memory.faults(), 0U);
    EXPECT_GT(memory.calls(), 1000U / (emulated() ? 50 : 1));
}

TEST(CApiThreads, TwoContextsSideBySide) {
    Plain expected[2];
    const char* const isas[2] = {"generic", hl_context_isa(make_c_context().get())};
    Plain plain[2];
    std::vector<std::thread> threads;
    std::atomic<int> wrong = 0;
    for (std::size_t i = 0; i < 2; ++i) {
        hl_context_options options{};
        options.size = sizeof(options);
        options.isa = isas[i];
        options.threads = 1 + i;
        ASSERT_EQ(expected[i].attend(make_c_context(&options).get()), HL_OK);
        threads.emplace_back([&, i, options] {
            hl_context* context = nullptr;
            if (hl_context_create(&options, &context, nullptr, 0) != HL_OK) ++wrong;
            const Handle<hl_context> owner(context);
            for (int k = 0; k < 50; ++k) {
                if (plain[i].attend(context) != HL_OK || !same_bits(plain[i].out, expected[i].out)) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
}

TEST(CApiThreads, BorrowedThreadPool) {
    struct Pool {
        std::atomic<std::size_t> loops = 0;
        int fault = 0;
    } pool;
    hl_executor executor{};
    executor.size = sizeof(executor);
    executor.user = &pool;
    executor.concurrency = 3;
    executor.run = [](void* user, std::size_t tasks, hl_task task, void* state) {
        Pool& in = *static_cast<Pool*>(user);
        ++in.loops;
        if (in.fault == 1) return;
        if (in.fault == 2) task(state, 0, 3);
        if (in.fault == 3) task(state, tasks, 0);
        if (in.fault == 4) throw std::runtime_error("the pool is closed");
        std::atomic<std::size_t> next = 0;
        std::vector<std::thread> threads;
        for (std::size_t worker = 0; worker < 3; ++worker) {
            threads.emplace_back([&, worker] {
                for (std::size_t t = next++; t < tasks; t = next++) task(state, t, worker);
            });
        }
        for (std::thread& thread : threads) thread.join();
    };
    hl_context_options options{};
    options.size = sizeof(options);
    options.executor = &executor;
    const auto context = make_c_context(&options);
    EXPECT_EQ(hl_context_concurrency(context.get()), 3U);
    Plain expected;
    Plain plain;
    ASSERT_EQ(expected.attend(make_c_context().get()), HL_OK);
    ASSERT_EQ(plain.attend(context.get()), HL_OK) << hl_context_message(context.get());
    EXPECT_TRUE(same_bits(plain.out, expected.out));
    EXPECT_GT(pool.loops, 0U);
    for (pool.fault = 1; pool.fault <= 4; ++pool.fault) {
        SCOPED_TRACE(pool.fault);
        EXPECT_EQ(plain.attend(context.get()), pool.fault == 4 ? HL_INTERNAL : HL_INVALID_ARGUMENT);
        EXPECT_TRUE(
            says(hl_context_message(context.get()), pool.fault == 4 ? "the pool is closed" : "hl_executor: run"));
    }
    pool.fault = 0;
    plain.out.assign(plain.out.size(), 0.0F);
    ASSERT_EQ(plain.attend(context.get()), HL_OK);
    EXPECT_TRUE(same_bits(plain.out, expected.out)) << "a pool that failed may be right again";
}

TEST(CApiThreads, CancelledCallsLeaveAllUsable) {
    const auto context = make_c_context();
    const auto cache = make_c_cache(context.get());
    Cached data;
    ASSERT_EQ(hl_cache_append(context.get(), cache.get(), 0, &data.keys, &data.keys), HL_OK);
    const hl_cached_query query = data.query(cache.get());
    ASSERT_EQ(hl_attend_cached(context.get(), &query, 1, nullptr), HL_OK);
    const std::vector<float> expected = data.out;

    hl_cancel* token = nullptr;
    ASSERT_EQ(hl_cancel_create(&token), HL_OK);
    const Handle<hl_cancel> cancel(token);
    hl_attention_options options = attention_defaults();
    options.cancel = token;
    for (int i = 0; i < 100; ++i) {
        ASSERT_EQ(hl_cancel_requested(token), 0);
        std::thread other([&] { hl_cancel_request(token); });
        const hl_status status = hl_attend_cached(context.get(), &query, 1, &options);
        EXPECT_TRUE(status == HL_OK || status == HL_CANCELLED);
        other.join();
        ASSERT_EQ(hl_cancel_requested(token), 1);
        EXPECT_EQ(hl_attend_cached(context.get(), &query, 1, &options), HL_CANCELLED);
        ASSERT_EQ(hl_cancel_reset(token), HL_OK);
        ASSERT_EQ(hl_attend_cached(context.get(), &query, 1, &options), HL_OK);
        EXPECT_TRUE(same_bits(data.out, expected));
        EXPECT_EQ(hl_cache_length(cache.get()), 70);
    }
}

TEST(CApiThreads, TimeoutsEndCalls) {
    const auto context = make_c_context();
    const auto cache = make_c_cache(context.get());
    Cached data;
    ASSERT_EQ(hl_cache_append(context.get(), cache.get(), 0, &data.keys, &data.keys), HL_OK);
    const hl_cached_query query = data.query(cache.get());
    hl_attention_options options = attention_defaults();
    EXPECT_EQ(options.timeout_seconds, 0.0);
    options.timeout_seconds = 1e-9;
    EXPECT_EQ(hl_attend_cached(context.get(), &query, 1, &options), HL_CANCELLED);
    EXPECT_TRUE(says(hl_context_message(context.get()), "the deadline has passed"));
    for (const double much : {60.0, 1e300}) {
        options.timeout_seconds = much;
        EXPECT_EQ(hl_attend_cached(context.get(), &query, 1, &options), HL_OK);
    }
    for (const double wrong : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
        options.timeout_seconds = wrong;
        EXPECT_EQ(hl_attend_cached(context.get(), &query, 1, &options), HL_INVALID_ARGUMENT);
        EXPECT_TRUE(says(hl_context_message(context.get()), "timeout_seconds is"));
    }

    hl_model* made = nullptr;
    ASSERT_EQ(hl_model_load(context.get(), HEADLONG_SOURCE_DIR "/tools/models/austen", nullptr, &made), HL_OK);
    const Handle<hl_model> model(made);
    hl_cache* made_cache = nullptr;
    ASSERT_EQ(hl_model_cache_create(context.get(), made, nullptr, &made_cache), HL_OK);
    const Handle<hl_cache> of_model(made_cache);
    const std::vector<std::int32_t> tokens(100, 5);
    hl_forward_options forward{};
    forward.size = sizeof(forward);
    forward.timeout_seconds = 1e-6;
    EXPECT_EQ(hl_model_forward(context.get(), made, tokens.data(), tokens.size(), made_cache, nullptr, &forward),
              HL_CANCELLED);
    EXPECT_EQ(hl_cache_length(made_cache), 0);
    forward.timeout_seconds = 0.0;
    EXPECT_EQ(hl_model_forward(context.get(), made, tokens.data(), tokens.size(), made_cache, nullptr, &forward),
              HL_OK);
    EXPECT_EQ(hl_cache_length(made_cache), 100);

    hl_generate_options generate;
    ASSERT_EQ(hl_generate_options_init(&generate, sizeof(generate)), HL_OK);
    generate.timeout_seconds = 1e-6;
    hl_generation* generation = nullptr;
    ASSERT_EQ(hl_generate(context.get(), made, "It is", HL_TO_THE_END, &generate, &generation), HL_OK);
    const Handle<hl_generation> generated(generation);
    hl_generation_info info{};
    info.size = sizeof(info);
    ASSERT_EQ(hl_generation_get_info(generation, &info), HL_OK);
    EXPECT_EQ(info.reason, HL_STOP_CANCELLED);
}

TEST(CApi, SinksInF16) {
    const auto context = make_c_context();
    hl_cache_options options = small_cache();
    options.shape.key_type = options.shape.value_type = HL_KV_INT8;
    options.f16_sinks = 1;
    hl_cache* made = nullptr;
    EXPECT_EQ(hl_cache_create(context.get(), &options, &made), HL_INVALID_ARGUMENT);
    EXPECT_TRUE(says(hl_context_message(context.get()), "sink_tokens is 0"));
    options.sink_tokens = 100;
    options.capacity = 200;
    const auto cache = make_c_cache(context.get(), options);
    options.shape.key_type = options.shape.value_type = HL_KV_F16;
    options.f16_sinks = 0;
    const auto halves = make_c_cache(context.get(), options);
    std::vector<std::vector<float>> out;
    for (hl_cache* each : {cache.get(), halves.get()}) {  // all tokens are sinks
        Cached data;
        ASSERT_EQ(hl_cache_append(context.get(), each, 0, &data.keys, &data.keys), HL_OK);
        const hl_cached_query query = data.query(each);
        ASSERT_EQ(hl_attend_cached(context.get(), &query, 1, nullptr), HL_OK);
        out.push_back(data.out);
    }
    EXPECT_TRUE(same_bits(out[0], out[1]));
}

}  // namespace
}  // namespace headlong::test
