// Models and text. In a build without them, model_left_out.cpp has these functions.
#include "engine/c_api/features.hpp"

#if HEADLONG_MODELS

#include <headlong/model.hpp>

#include <cstring>
#include <string>
#include <utility>

#include "engine/c_api/c_api.hpp"

struct hl_model {
    std::shared_ptr<headlong::c_api::Core> core;  ///< before `model`, whose weights may be in its memory
    headlong::Model model;
};

struct hl_generation {
    std::shared_ptr<headlong::c_api::Core> core;
    headlong::Generation made;
};

namespace headlong::c_api {
namespace {

static_assert(static_cast<int>(StopReason::cancelled) == HL_STOP_CANCELLED);
static_assert(static_cast<int>(WeightType::int4) + 1 == HL_WEIGHTS_INT4);

ModelOptions model_options(Context& context, const hl_model_options* given) {
    const hl_model_options from = read("options", given);
    ModelOptions options;
    enum class Weights : std::uint8_t { as_file };
    const auto weights = enum_of<Weights>("weights", from.weights, 6,
                                          "HL_WEIGHTS_AS_FILE, HL_WEIGHTS_F32, HL_WEIGHTS_F16, HL_WEIGHTS_BF16, "
                                          "HL_WEIGHTS_INT8, HL_WEIGHTS_INT4");
    if (weights != Weights::as_file) options.weights = static_cast<WeightType>(from.weights - 1);
    options.map = from.map != 0;
    if (from.on_load != nullptr) {
        options.on_load = [from](std::uint64_t done, std::uint64_t all) { from.on_load(from.user, done, all); };
    }
    options.memory = &context.memory();
    return options;
}

GenerateOptions generate_options(const hl_generate_options* given) {
    const hl_generate_options from = read("options", given);
    GenerateOptions options;
    options.max_tokens = from.max_tokens;
    options.sampling = {from.temperature, from.top_k, from.top_p, from.seed};
    options.ignore_eos = from.ignore_eos != 0;
    for (const char* text : list("stop_texts", from.stop_texts, from.stop_texts_count)) {
        options.stop.emplace_back(&required("stop_texts: an element", text));
    }
    options.kv = {kv_type_of("key_type", from.key_type), kv_type_of("value_type", from.value_type)};
    options.window = from.window;
    options.sink_tokens = from.sink_tokens;
    options.f16_sinks = from.f16_sinks != 0;
    options.prefill_chunk = from.prefill_chunk;
    if (from.on_prefill != nullptr) {
        options.on_prefill = [from](std::int64_t done, std::int64_t all) { from.on_prefill(from.user, done, all); };
    }
    if (from.on_text != nullptr) {
        options.on_text = [from, text = std::string()](std::string_view piece) mutable {
            text = piece;  // which ends with a 0
            return from.on_text(from.user, text.c_str(), text.size()) == 0;
        };
    }
    options.stop_token = stop_of(from.cancel);
    options.deadline = deadline_of(from.timeout_seconds);
    return options;
}

Core* core_of(const hl_model* model) noexcept { return model == nullptr ? nullptr : model->core.get(); }

/// The two-call convention of texts and lists: the length always, the elements if there is room, and a refusal if there
/// is too little of it.
template <class T>
void copy_out(const char* name, std::span<const T> from, std::size_t terminator, T* to, std::size_t capacity,
              std::size_t& count) {
    count = from.size();
    if (to == nullptr && capacity == 0) return;
    required(name, to);
    if (capacity < from.size() + terminator) {
        throw InvalidArgument(
            fmt::format("{}: capacity is {}; {} are needed", name, capacity, from.size() + terminator));
    }
    std::copy(from.begin(), from.end(), to);
    if (terminator != 0) to[from.size()] = T{};
}

void hand_over(hl_context* context, Generation made, hl_generation** generation) {
    if (generation != nullptr) *generation = new hl_generation{context->core, std::move(made)};
}

}  // namespace
}  // namespace headlong::c_api

using namespace headlong::c_api;

extern "C" {

hl_status hl_model_load(hl_context* context, const char* folder, const hl_model_options* options,
                        hl_model** model) noexcept {
    return guard(context, [&](headlong::Context& with) {
        hl_model*& made = result("model", model);
        const std::string path(&required("folder", folder));
        made = new hl_model{context->core, headlong::Model(with, path, model_options(with, options))};
    });
}

hl_status hl_model_load_memory(hl_context* context, const hl_model_files* files, const hl_model_options* options,
                               hl_model** model) noexcept {
    return guard(context, [&](headlong::Context& with) {
        hl_model*& made = result("model", model);
        const hl_model_files from = read_required("files", files);
        headlong::ModelFiles taken;
        taken.name = from.name == nullptr ? "model" : from.name;
        taken.config = text_of("files: config", from.config, from.config_bytes);
        taken.tokenizer = text_of("files: tokenizer", from.tokenizer, from.tokenizer_bytes);
        taken.weights = bytes_of("files: weights", from.weights, from.weights_bytes);
        made = new hl_model{context->core, headlong::Model(with, taken, model_options(with, options))};
    });
}

void hl_model_destroy(hl_model* model) noexcept { delete model; }

hl_status hl_model_get_info(const hl_model* model, hl_model_info* info) noexcept {
    return guard(core_of(model), [&] {
        const headlong::ModelInfo& from = required("model", model).model.info();
        hl_model_info all{};
        all.architecture = from.architecture.c_str();
        all.vocab_size = from.vocab_size;
        all.hidden_size = from.hidden_size;
        all.layers = from.layers;
        all.heads = from.heads;
        all.kv_heads = from.kv_heads;
        all.head_dim = from.head_dim;
        all.max_positions = from.max_positions;
        all.eos_ids = from.eos_ids.data();
        all.eos_ids_count = from.eos_ids.size();
        all.has_bos_id = from.bos_id ? 1 : 0;
        all.bos_id = from.bos_id.value_or(0);
        write("info", info, all);
    });
}

hl_status hl_model_tokenize(const hl_model* model, const char* text, size_t bytes, int32_t add_special_tokens,
                            int32_t* ids, size_t capacity, size_t* count) noexcept {
    return guard(core_of(model), [&] {
        std::size_t& length = required("count", count);
        length = 0;
        const std::vector<std::int32_t> made =
            required("model", model).model.tokenizer().encode(text_of("text", text, bytes), add_special_tokens != 0);
        copy_out<std::int32_t>("ids", made, 0, ids, capacity, length);
    });
}

hl_status hl_model_detokenize(const hl_model* model, const int32_t* ids, size_t count, int32_t skip_special_tokens,
                              char* text, size_t capacity, size_t* bytes) noexcept {
    return guard(core_of(model), [&] {
        std::size_t& length = required("bytes", bytes);
        length = 0;
        const std::string made =
            required("model", model).model.tokenizer().decode(list("ids", ids, count), skip_special_tokens != 0);
        copy_out<char>("text", made, 1, text, capacity, length);
    });
}

hl_status hl_model_cache_create(hl_context* context, const hl_model* model, const hl_model_cache_options* options,
                                hl_cache** cache) noexcept {
    return guard(context, [&](headlong::Context& with) {
        hl_cache*& made = result("cache", cache);
        const headlong::Model& of = required("model", model).model;
        const hl_model_cache_options from = read("options", options);
        headlong::c_api::check_reserved("options", from.reserved);
        const headlong::KvTypes types{kv_type_of("key_type", from.key_type), kv_type_of("value_type", from.value_type)};
        if (from.window == 0 && from.sink_tokens != 0) {
            throw headlong::InvalidArgument(
                fmt::format("sink_tokens is {}, and window is 0; sinks belong to a ring", from.sink_tokens));
        }
        if (from.window != 0 && from.capacity != 0) {
            throw headlong::InvalidArgument("capacity and window are both given; give one");
        }
        headlong::KvCacheOptions taken = from.window != 0 ? of.ring_options(from.window, from.sink_tokens, types)
                                                          : of.cache_options(types, from.capacity);
        if (from.max_chunk != 0) taken.max_chunk = from.max_chunk;
        taken.f16_sinks = from.f16_sinks != 0;
        taken.pool = pool_of(from.pool);
        if (taken.pool == nullptr) taken.memory = &with.memory();
        made = new hl_cache{context->core, headlong::KvCache(taken), {}};
    });
}

hl_status hl_model_forward(hl_context* context, const hl_model* model, const int32_t* tokens, size_t count,
                           hl_cache* cache, const hl_tensor* logits, const hl_forward_options* options) noexcept {
    return guard(context, [&](headlong::Context& with) {
        const hl_forward_options from = read("options", options);
        required("model", model)
            .model.forward(with, list("tokens", tokens, count), required("cache", cache).cache,
                           optional_output<2>("logits", logits),
                           {.stop = stop_of(from.cancel), .deadline = deadline_of(from.timeout_seconds)});
    });
}

hl_status hl_generate(hl_context* context, const hl_model* model, const char* prompt, size_t bytes,
                      const hl_generate_options* options, hl_generation** generation) noexcept {
    return guard(context, [&](headlong::Context& with) {
        if (generation != nullptr) *generation = nullptr;
        const headlong::Model& of = required("model", model).model;
        hand_over(context, headlong::generate(with, of, text_of("prompt", prompt, bytes), generate_options(options)),
                  generation);
    });
}

hl_status hl_generate_cached(hl_context* context, const hl_model* model, hl_cache* cache, const int32_t* prompt,
                             size_t count, const hl_generate_options* options, hl_generation** generation) noexcept {
    return guard(context, [&](headlong::Context& with) {
        if (generation != nullptr) *generation = nullptr;
        const headlong::Model& of = required("model", model).model;
        headlong::KvCache& in = required("cache", cache).cache;
        hl_generate_options own = read("options", options);
        own.key_type = own.value_type = HL_KV_F32;  // the cache is there: what it would be made of is not looked at
        own.window = own.sink_tokens = own.f16_sinks = 0;
        own.size = sizeof(own);
        hand_over(context, headlong::generate(with, of, in, list("prompt", prompt, count), generate_options(&own)),
                  generation);
    });
}

void hl_generation_destroy(hl_generation* generation) noexcept { delete generation; }

hl_status hl_generation_get_info(const hl_generation* generation, hl_generation_info* info) noexcept {
    return guard(generation == nullptr ? nullptr : generation->core.get(), [&] {
        const headlong::Generation& from = required("generation", generation).made;
        hl_generation_info all{};
        all.prompt_tokens = from.prompt_tokens.data();
        all.prompt_tokens_count = from.prompt_tokens.size();
        all.tokens = from.tokens.data();
        all.tokens_count = from.tokens.size();
        all.text = from.text.c_str();
        all.text_bytes = from.text.size();
        all.reason = static_cast<std::int32_t>(from.reason);
        all.prefill_tokens = from.prefill_tokens;
        all.prefill_seconds = from.prefill_seconds;
        all.decode_steps = from.decode_steps;
        all.decode_seconds = from.decode_seconds;
        all.kv_bytes = from.kv_bytes;
        write("info", info, all);
    });
}
}

#endif
