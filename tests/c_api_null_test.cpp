// Every pointer of every function of headlong.h as NULL, and every size as 0.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <headlong/headlong.h>

#include "tests/support/c_api.hpp"
#include "tests/support/refusal.hpp"

namespace headlong::test {
namespace {

/// The call is refused, and the message names the argument.
#define EXPECT_REFUSED(context, call, name)                   \
    do {                                                      \
        EXPECT_EQ((call), HL_INVALID_ARGUMENT) << #call;      \
        EXPECT_TRUE(says(hl_context_message(context), name)); \
    } while (false)

struct Arguments {
    Handle<hl_context> context = make_c_context();
    std::vector<float> data = std::vector<float>(2048);
    hl_tensor rank4 = dense_f32<4>(data, {1, 2, 3, 16});
    hl_tensor rank3 = dense_f32<3>(data, {2, 3, 16});
    hl_tensor rank2 = dense_f32<2>(data, {3, 16});
};

TEST(CApiNull, FunctionsWithoutObjects) {
    EXPECT_STREQ(hl_status_name(HL_OK), "ok");
    EXPECT_STREQ(hl_status_name(-1), "unknown");
    EXPECT_NE(hl_version(), nullptr);
    EXPECT_EQ(hl_abi_version(), HL_ABI_VERSION);
    EXPECT_EQ(hl_has_feature(nullptr), 0);
    EXPECT_GE(hl_default_concurrency(), 1U);
    std::size_t count = 77;
    EXPECT_EQ(hl_available_isas(nullptr, 0, &count), HL_OK);
    EXPECT_GE(count, 1U);
    EXPECT_EQ(hl_available_isas(nullptr, 3, &count), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_available_isas(nullptr, 0, nullptr), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_attention_options_init(nullptr, 8), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_rotary_options_init(nullptr, 8), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_cache_options_init(nullptr, 8), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_model_options_init(nullptr, 8), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_generate_options_init(nullptr, 8), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_dense(nullptr, HL_F32, 2, nullptr).rank, -1);
    const std::int64_t extents[4] = {0, 1, 2, 3};
    EXPECT_EQ(hl_dense(nullptr, HL_F32, 4, extents).rank, 4);
    EXPECT_EQ(hl_dense(nullptr, HL_F32, 5, extents).rank, -1);
}

TEST(CApiNull, Context) {
    char message[64] = "before";
    EXPECT_EQ(hl_context_create(nullptr, nullptr, message, sizeof(message)), HL_INVALID_ARGUMENT);
    EXPECT_STREQ(message, "context is NULL");
    EXPECT_EQ(hl_context_create(nullptr, nullptr, message, 0), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_context_create(nullptr, nullptr, nullptr, 64), HL_INVALID_ARGUMENT);
    hl_context_destroy(nullptr);
    EXPECT_STREQ(hl_context_message(nullptr), "");
    EXPECT_STREQ(hl_context_isa(nullptr), "");
    EXPECT_EQ(hl_context_concurrency(nullptr), 0U);
    EXPECT_EQ(hl_context_scratch_bytes(nullptr), 0U);
    EXPECT_EQ(hl_cancel_create(nullptr), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_cancel_reset(nullptr), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_cancel_requested(nullptr), 0);
    hl_cancel_request(nullptr);
    hl_cancel_destroy(nullptr);
}

TEST(CApiNull, Attention) {
    Arguments a;
    hl_context* const c = a.context.get();
    const hl_tensor* const t = &a.rank4;
    EXPECT_EQ(hl_attend(nullptr, t, t, t, nullptr, t, nullptr), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_attend(c, nullptr, t, t, nullptr, t, nullptr), "query is NULL");
    EXPECT_REFUSED(c, hl_attend(c, t, nullptr, t, nullptr, t, nullptr), "key is NULL");
    EXPECT_REFUSED(c, hl_attend(c, t, t, nullptr, nullptr, t, nullptr), "value is NULL");
    EXPECT_REFUSED(c, hl_attend(c, t, t, t, nullptr, nullptr, nullptr), "output is NULL");
    const hl_tensor* const p = &a.rank3;
    const std::int64_t offsets[2] = {0, 3};
    EXPECT_EQ(hl_attend_packed(nullptr, p, p, p, offsets, offsets, 1, nullptr, p, nullptr), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_attend_packed(c, nullptr, p, p, offsets, offsets, 1, nullptr, p, nullptr), "query is NULL");
    EXPECT_REFUSED(c, hl_attend_packed(c, p, nullptr, p, offsets, offsets, 1, nullptr, p, nullptr), "key is NULL");
    EXPECT_REFUSED(c, hl_attend_packed(c, p, p, nullptr, offsets, offsets, 1, nullptr, p, nullptr), "value is NULL");
    EXPECT_REFUSED(c, hl_attend_packed(c, p, p, p, nullptr, offsets, 1, nullptr, p, nullptr), "query_offsets is NULL");
    EXPECT_REFUSED(c, hl_attend_packed(c, p, p, p, offsets, nullptr, 1, nullptr, p, nullptr), "key_offsets is NULL");
    EXPECT_REFUSED(c, hl_attend_packed(c, p, p, p, offsets, offsets, 1, nullptr, nullptr, nullptr), "output is NULL");
    EXPECT_REFUSED(c, hl_attend_packed(c, p, p, p, offsets, offsets, SIZE_MAX, nullptr, p, nullptr), "sequences");
    EXPECT_REFUSED(c, hl_attend_packed(c, p, p, p, offsets, offsets, SIZE_MAX / 4, nullptr, p, nullptr),
                   "offsets: its count");
    EXPECT_EQ(hl_attend_cached(nullptr, nullptr, 0, nullptr), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_attend_cached(c, nullptr, 0, nullptr), HL_OK) << hl_context_message(c);
    EXPECT_REFUSED(c, hl_attend_cached(c, nullptr, 1, nullptr), "queries is NULL");
    hl_cached_query query{};
    query.size = sizeof(query);
    query.query = query.output = a.rank3;
    EXPECT_REFUSED(c, hl_attend_cached(c, &query, 1, nullptr), "cache is NULL");

    hl_attention_options options;
    const auto fresh = [&] { ASSERT_EQ(hl_attention_options_init(&options, sizeof(options)), HL_OK); };
    fresh();
    options.alibi_slopes_count = 2;
    EXPECT_REFUSED(c, hl_attend(c, t, t, t, &options, t, nullptr), "alibi_slopes is NULL");
    fresh();
    options.sink_logits_count = 2;
    EXPECT_REFUSED(c, hl_attend(c, t, t, t, &options, t, nullptr), "sink_logits is NULL");
    fresh();
    options.kv_lengths_count = 1;
    EXPECT_REFUSED(c, hl_attend(c, t, t, t, &options, t, nullptr), "kv_lengths is NULL");
    fresh();
    hl_mask mask{};
    mask.size = sizeof(mask);
    mask.rank = 1;
    mask.extents[0] = 3;
    options.mask = &mask;
    EXPECT_REFUSED(c, hl_attend(c, t, t, t, &options, t, nullptr), "mask");
}

TEST(CApiNull, CachesAndPools) {
    Arguments a;
    hl_context* const c = a.context.get();
    const hl_cache_options options = small_cache();
    hl_cache* made = reinterpret_cast<hl_cache*>(&a);
    EXPECT_EQ(hl_cache_create(nullptr, &options, &made), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_create(c, nullptr, &made), "options is NULL");
    EXPECT_EQ(made, nullptr) << "a failed call must not leave a handle";
    EXPECT_REFUSED(c, hl_cache_create(c, &options, nullptr), "cache is NULL");
    std::size_t bytes = 0;
    EXPECT_EQ(hl_cache_estimate_bytes(nullptr, &options, 1, &bytes), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_estimate_bytes(c, nullptr, 1, &bytes), "options is NULL");
    EXPECT_REFUSED(c, hl_cache_estimate_bytes(c, &options, 1, nullptr), "bytes is NULL");
    for (const bool with : {true, false}) {
        hl_cache_options wrong = options;
        (with ? wrong.layer_windows_count : wrong.key_centre_count) = 1;
        EXPECT_REFUSED(c, hl_cache_create(c, &wrong, &made), with ? "layer_windows is NULL" : "key_centre is NULL");
    }
    hl_cache_options wrong = options;
    wrong.layer_rotary_count = 1;
    EXPECT_REFUSED(c, hl_cache_create(c, &wrong, &made), "layer_rotary is NULL");

    const Handle<hl_cache> owner = make_c_cache(c);
    hl_cache* const cache = owner.get();
    const hl_tensor* const t = &a.rank3;
    EXPECT_EQ(hl_cache_append(nullptr, cache, 0, t, t), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_append(c, nullptr, 0, t, t), "cache is NULL");
    EXPECT_REFUSED(c, hl_cache_append(c, cache, 0, nullptr, t), "keys is NULL");
    EXPECT_REFUSED(c, hl_cache_append(c, cache, 0, t, nullptr), "values is NULL");
    EXPECT_EQ(hl_cache_reserve(nullptr, 1), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_cache_truncate(nullptr, 0), HL_INVALID_ARGUMENT);
    EXPECT_EQ(hl_cache_length(nullptr), -1);
    EXPECT_EQ(hl_cache_layer_length(nullptr, 0), -1);
    EXPECT_EQ(hl_cache_layer_length(cache, 1), -1);
    EXPECT_EQ(hl_cache_used_bytes(nullptr), 0U);
    EXPECT_EQ(hl_cache_reserved_bytes(nullptr), 0U);
    EXPECT_EQ(hl_cache_saved_bytes(nullptr, 0), 0U);
    hl_cache_info info{};
    EXPECT_EQ(hl_cache_get_info(nullptr, &info), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_get_info(cache, nullptr), "info is NULL");
    EXPECT_REFUSED(c, hl_cache_get_info(cache, &info), "size is 0");
    hl_cache_discard_unfinished(nullptr);
    hl_cache_reset(nullptr);
    EXPECT_EQ(hl_cache_fork(nullptr, &made), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_fork(cache, nullptr), "fork is NULL");
    EXPECT_EQ(hl_cache_read_back(nullptr, 0, 0, t, t), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_read_back(cache, 0, 0, nullptr, t), "keys is NULL");
    EXPECT_REFUSED(c, hl_cache_read_back(cache, 0, 0, t, nullptr), "values is NULL");
    EXPECT_EQ(hl_cache_save(nullptr, a.data.data(), 8, nullptr, 0), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_save(cache, nullptr, 8, nullptr, 0), "bytes is NULL");
    EXPECT_REFUSED(c, hl_cache_save(cache, a.data.data(), 8, nullptr, 1), "attachment is NULL");
    EXPECT_EQ(hl_cache_save_file(nullptr, "x", nullptr, 0), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_save_file(cache, nullptr, nullptr, 0), "path is NULL");
    EXPECT_REFUSED(c, hl_cache_save_file(cache, "x", nullptr, 5), "attachment is NULL");
    EXPECT_EQ(hl_cache_restore(nullptr, nullptr, 0), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_restore(cache, nullptr, 8), "bytes is NULL");
    EXPECT_EQ(hl_cache_restore(cache, nullptr, 0), HL_BAD_FILE);
    EXPECT_EQ(hl_cache_restore_file(nullptr, "x"), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_cache_restore_file(cache, nullptr), "path is NULL");
    EXPECT_EQ(hl_cache_attachment(nullptr, nullptr), nullptr);
    EXPECT_EQ(hl_cache_attachment(cache, nullptr), nullptr);
    hl_cache_destroy(nullptr);

    hl_pool* pool = nullptr;
    EXPECT_EQ(hl_pool_create(nullptr, &options.shape, &pool), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_pool_create(c, nullptr, &pool), "shape is NULL");
    EXPECT_REFUSED(c, hl_pool_create(c, &options.shape, nullptr), "pool is NULL");
    EXPECT_EQ(hl_pool_block_bytes(nullptr), 0U);
    EXPECT_EQ(hl_pool_used_bytes(nullptr), 0U);
    EXPECT_EQ(hl_pool_reserved_bytes(nullptr), 0U);
    hl_pool_destroy(nullptr);
}

TEST(CApiNull, Layer) {
    Arguments a;
    hl_context* const c = a.context.get();
    hl_layer_options options{sizeof(hl_layer_options), 2, 0};
    hl_layer_weights weights{};
    weights.size = sizeof(weights);
    weights.query = weights.key = weights.value = weights.output = dense_f32<2>(a.data, {16, 16});
    hl_layer* layer = nullptr;
    EXPECT_EQ(hl_layer_create(nullptr, &options, &weights, &layer), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_layer_create(c, nullptr, &weights, &layer), "options is NULL");
    EXPECT_REFUSED(c, hl_layer_create(c, &options, nullptr, &layer), "weights is NULL");
    EXPECT_REFUSED(c, hl_layer_create(c, &options, &weights, nullptr), "layer is NULL");
    hl_layer_weights without = weights;
    without.value = hl_tensor{};
    EXPECT_REFUSED(c, hl_layer_create(c, &options, &without, &layer), "value: rank is 0");
    ASSERT_EQ(hl_layer_create(c, &options, &weights, &layer), HL_OK) << hl_context_message(c);
    const Handle<hl_layer> owner(layer);
    hl_layer_info info{};
    EXPECT_EQ(hl_layer_get_info(nullptr, &info), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_layer_get_info(layer, nullptr), "info is NULL");
    const hl_tensor x3 = dense_f32<3>(a.data, {1, 3, 16});
    EXPECT_EQ(hl_layer_forward(nullptr, layer, &x3, nullptr, &x3), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_layer_forward(c, nullptr, &x3, nullptr, &x3), "layer is NULL");
    EXPECT_REFUSED(c, hl_layer_forward(c, layer, nullptr, nullptr, &x3), "x is NULL");
    EXPECT_REFUSED(c, hl_layer_forward(c, layer, &x3, nullptr, nullptr), "y is NULL");
    const Handle<hl_cache> cache = make_c_cache(c);
    const hl_tensor* const x = &a.rank2;
    EXPECT_EQ(hl_layer_forward_cached(nullptr, layer, x, cache.get(), 0, nullptr, x), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_layer_forward_cached(c, nullptr, x, cache.get(), 0, nullptr, x), "layer is NULL");
    EXPECT_REFUSED(c, hl_layer_forward_cached(c, layer, nullptr, cache.get(), 0, nullptr, x), "x is NULL");
    EXPECT_REFUSED(c, hl_layer_forward_cached(c, layer, x, nullptr, 0, nullptr, x), "cache is NULL");
    EXPECT_REFUSED(c, hl_layer_forward_cached(c, layer, x, cache.get(), 0, nullptr, nullptr), "y is NULL");
    hl_layer_destroy(nullptr);
}

TEST(CApiNull, Model) {
    Arguments a;
    hl_context* const c = a.context.get();
    hl_model* model = nullptr;
    const char* const folder = HEADLONG_SOURCE_DIR "/tools/models/austen";
    EXPECT_EQ(hl_model_load(nullptr, folder, nullptr, &model), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_model_load(c, nullptr, nullptr, &model), "folder is NULL");
    EXPECT_REFUSED(c, hl_model_load(c, folder, nullptr, nullptr), "model is NULL");
    hl_model_files files{};
    files.size = sizeof(files);
    EXPECT_EQ(hl_model_load_memory(nullptr, &files, nullptr, &model), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_model_load_memory(c, nullptr, nullptr, &model), "files is NULL");
    EXPECT_REFUSED(c, hl_model_load_memory(c, &files, nullptr, nullptr), "model is NULL");
    EXPECT_EQ(hl_model_load_memory(c, &files, nullptr, &model), HL_BAD_FILE) << "empty files";
    files.config_bytes = 3;
    EXPECT_REFUSED(c, hl_model_load_memory(c, &files, nullptr, &model), "config is NULL");
    files.config_bytes = HL_TO_THE_END;
    EXPECT_REFUSED(c, hl_model_load_memory(c, &files, nullptr, &model), "config is NULL");

    ASSERT_EQ(hl_model_load(c, folder, nullptr, &model), HL_OK) << hl_context_message(c);
    const Handle<hl_model> owner(model);
    hl_model_info info{};
    EXPECT_EQ(hl_model_get_info(nullptr, &info), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_model_get_info(model, nullptr), "info is NULL");
    std::size_t count = 9;
    std::int32_t ids[4] = {};
    EXPECT_EQ(hl_model_tokenize(nullptr, "x", 1, 0, ids, 4, &count), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_model_tokenize(model, nullptr, 1, 0, ids, 4, &count), "text is NULL");
    EXPECT_REFUSED(c, hl_model_tokenize(model, nullptr, HL_TO_THE_END, 0, ids, 4, &count), "text is NULL");
    EXPECT_REFUSED(c, hl_model_tokenize(model, "x", 1, 0, nullptr, 4, &count), "ids is NULL");
    EXPECT_REFUSED(c, hl_model_tokenize(model, "x", 1, 0, ids, 4, nullptr), "count is NULL");
    EXPECT_EQ(hl_model_tokenize(model, nullptr, 0, 0, nullptr, 0, &count), HL_OK);
    EXPECT_EQ(count, 0U);
    char text[8];
    EXPECT_EQ(hl_model_detokenize(nullptr, ids, 1, 0, text, 8, &count), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_model_detokenize(model, nullptr, 1, 0, text, 8, &count), "ids is NULL");
    EXPECT_REFUSED(c, hl_model_detokenize(model, ids, 1, 0, nullptr, 8, &count), "text is NULL");
    EXPECT_REFUSED(c, hl_model_detokenize(model, ids, 1, 0, text, 8, nullptr), "bytes is NULL");
    EXPECT_EQ(hl_model_detokenize(model, nullptr, 0, 0, nullptr, 0, &count), HL_OK);
    hl_cache* made = nullptr;
    EXPECT_EQ(hl_model_cache_create(nullptr, model, nullptr, &made), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_model_cache_create(c, nullptr, nullptr, &made), "model is NULL");
    EXPECT_REFUSED(c, hl_model_cache_create(c, model, nullptr, nullptr), "cache is NULL");
    ASSERT_EQ(hl_model_cache_create(c, model, nullptr, &made), HL_OK) << hl_context_message(c);
    const Handle<hl_cache> cache(made);
    EXPECT_EQ(hl_model_forward(nullptr, model, ids, 1, made, nullptr, nullptr), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_model_forward(c, nullptr, ids, 1, made, nullptr, nullptr), "model is NULL");
    EXPECT_REFUSED(c, hl_model_forward(c, model, nullptr, 1, made, nullptr, nullptr), "tokens is NULL");
    EXPECT_REFUSED(c, hl_model_forward(c, model, ids, 1, nullptr, nullptr, nullptr), "cache is NULL");
    EXPECT_EQ(hl_model_forward(c, model, nullptr, 0, made, nullptr, nullptr), HL_OK) << hl_context_message(c);
    EXPECT_EQ(hl_generate(nullptr, model, "x", 1, nullptr, nullptr), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_generate(c, nullptr, "x", 1, nullptr, nullptr), "model is NULL");
    EXPECT_REFUSED(c, hl_generate(c, model, nullptr, 1, nullptr, nullptr), "prompt is NULL");
    hl_generate_options options;
    ASSERT_EQ(hl_generate_options_init(&options, sizeof(options)), HL_OK);
    options.stop_texts_count = 1;
    EXPECT_REFUSED(c, hl_generate(c, model, "x", 1, &options, nullptr), "stop_texts is NULL");
    const char* const none[1] = {nullptr};
    options.stop_texts = none;
    EXPECT_REFUSED(c, hl_generate(c, model, "x", 1, &options, nullptr), "stop_texts: an element is NULL");
    EXPECT_EQ(hl_generate_cached(nullptr, model, made, ids, 1, nullptr, nullptr), HL_INVALID_ARGUMENT);
    EXPECT_REFUSED(c, hl_generate_cached(c, nullptr, made, ids, 1, nullptr, nullptr), "model is NULL");
    EXPECT_REFUSED(c, hl_generate_cached(c, model, nullptr, ids, 1, nullptr, nullptr), "cache is NULL");
    EXPECT_REFUSED(c, hl_generate_cached(c, model, made, nullptr, 1, nullptr, nullptr), "prompt is NULL");
    EXPECT_REFUSED(c, hl_generate_cached(c, model, made, nullptr, 0, nullptr, nullptr), "prompt");
    hl_generation_info result{};
    EXPECT_EQ(hl_generation_get_info(nullptr, &result), HL_INVALID_ARGUMENT);
    hl_generation_destroy(nullptr);
    hl_model_destroy(nullptr);
}

}  // namespace
}  // namespace headlong::test
