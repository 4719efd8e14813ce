#include "engine/decoder_families.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <headlong/error.hpp>

namespace headlong {
namespace {

using Json = ConfigReader::Json;

// ---------------------------------------------------------------------------------------------------- tensor names

constexpr TensorNames kLlamaNames{
    .prefixes = {"model."},
    .embedding = "embed_tokens",
    .final_norm = "norm",
    .head = "lm_head",
    .attention_norm = "layers.{0}.input_layernorm",
    .query = "layers.{0}.self_attn.q_proj",
    .key = "layers.{0}.self_attn.k_proj",
    .value = "layers.{0}.self_attn.v_proj",
    .attention_output = "layers.{0}.self_attn.o_proj",
    .mlp_norm = "layers.{0}.post_attention_layernorm",
    .gate = "layers.{0}.mlp.gate_proj",
    .up = "layers.{0}.mlp.up_proj",
    .down = "layers.{0}.mlp.down_proj",
};

constexpr TensorNames kQwen3Names = [] {
    TensorNames names = kLlamaNames;
    names.query_norm = "layers.{0}.self_attn.q_norm";
    names.key_norm = "layers.{0}.self_attn.k_norm";
    return names;
}();

constexpr TensorNames kQwen3MoeNames = [] {
    TensorNames names = kQwen3Names;
    names.router = "layers.{0}.mlp.gate";
    names.expert_gate = "layers.{0}.mlp.experts.{1}.gate_proj";
    names.expert_up = "layers.{0}.mlp.experts.{1}.up_proj";
    names.expert_down = "layers.{0}.mlp.experts.{1}.down_proj";
    return names;
}();

constexpr TensorNames kMixtralNames = [] {
    TensorNames names = kLlamaNames;
    names.router = "layers.{0}.block_sparse_moe.gate";
    names.expert_gate = "layers.{0}.block_sparse_moe.experts.{1}.w1";
    names.expert_up = "layers.{0}.block_sparse_moe.experts.{1}.w3";
    names.expert_down = "layers.{0}.block_sparse_moe.experts.{1}.w2";
    return names;
}();

constexpr TensorNames kGptOssNames = [] {
    TensorNames names = kLlamaNames;
    names.sinks = "layers.{0}.self_attn.sinks";
    names.router = "layers.{0}.mlp.router";
    names.expert_gate = names.expert_up = "layers.{0}.mlp.experts.gate_up_proj";
    names.expert_down = "layers.{0}.mlp.experts.down_proj";
    return names;
}();

constexpr TensorNames kPhi3Names = [] {
    TensorNames names = kLlamaNames;
    names.query = names.key = names.value = "layers.{0}.self_attn.qkv_proj";
    names.gate = names.up = "layers.{0}.mlp.gate_up_proj";
    return names;
}();

constexpr TensorNames kOlmo2Names = [] {  // nothing is normalised before attention and MLP
    TensorNames names = kQwen3Names;
    names.attention_norm = nullptr;
    names.attention_post_norm = "layers.{0}.post_attention_layernorm";
    names.mlp_norm = nullptr;
    names.mlp_post_norm = "layers.{0}.post_feedforward_layernorm";
    return names;
}();

constexpr TensorNames kGemma2Names = [] {
    TensorNames names = kLlamaNames;
    names.attention_post_norm = "layers.{0}.post_attention_layernorm";
    names.mlp_norm = "layers.{0}.pre_feedforward_layernorm";
    names.mlp_post_norm = "layers.{0}.post_feedforward_layernorm";
    return names;
}();

constexpr TensorNames kGemma3Names = [] {
    TensorNames names = kGemma2Names;
    names.prefixes = {"model.", "language_model.model.", "model.language_model."};  // the latter where it also sees
    names.query_norm = kQwen3Names.query_norm;
    names.key_norm = kQwen3Names.key_norm;
    names.ignored = {"vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."};
    return names;
}();

constexpr TensorNames kGpt2Names{
    .prefixes = {"transformer.", ""},
    .embedding = "wte",
    .position_embedding = "wpe",
    .final_norm = "ln_f",
    .head = "lm_head",
    .attention_norm = "h.{0}.ln_1",
    .query = "h.{0}.attn.c_attn",
    .key = "h.{0}.attn.c_attn",
    .value = "h.{0}.attn.c_attn",
    .attention_output = "h.{0}.attn.c_proj",
    .mlp_norm = "h.{0}.ln_2",
    .up = "h.{0}.mlp.c_fc",
    .down = "h.{0}.mlp.c_proj",
    .ignored = {".attn.bias", ".attn.masked_bias"},  // masks
};

constexpr TensorNames kNeoxNames{
    .prefixes = {"gpt_neox."},
    .embedding = "embed_in",
    .final_norm = "final_layer_norm",
    .head = "embed_out",
    .attention_norm = "layers.{0}.input_layernorm",
    .query = "layers.{0}.attention.query_key_value",
    .key = "layers.{0}.attention.query_key_value",
    .value = "layers.{0}.attention.query_key_value",
    .attention_output = "layers.{0}.attention.dense",
    .mlp_norm = "layers.{0}.post_attention_layernorm",
    .up = "layers.{0}.mlp.dense_h_to_4h",
    .down = "layers.{0}.mlp.dense_4h_to_h",
    .ignored = {".attention.bias", ".attention.masked_bias"},  // masks
};

// ------------------------------------------------------------------------------------- what single families have

/// A number above 0, `missing` where there is no such key, 0 (none) where it is null.
float cap(const ConfigReader& config, const char* key, double missing) {
    if (config.find(key) == nullptr) return config.has(key) ? 0.0F : static_cast<float>(missing);
    return static_cast<float>(config.positive(key));
}

/// no_rope_layers has 1 where a layer does rotate; no_rope_layer_interval leaves out every n-th.
std::vector<bool> rotated_layers(const ConfigReader& config, const DecoderConfig& decoder) {
    std::vector<bool> rotated;
    const auto count = static_cast<std::size_t>(decoder.layers);
    const Json* list = config.find("no_rope_layers");
    if (list == nullptr || (list->is_array() && list->empty())) {
        const std::int64_t interval = config.size("no_rope_layer_interval", 4);
        for (std::int64_t i = 0; i < decoder.layers; ++i) rotated.push_back((i + 1) % interval != 0);
        return rotated;
    }
    if (!list->is_array() || list->size() < count) {
        config.bad("no_rope_layers", fmt::format("is {}; it must be a list of 0 or 1 for each of the {} layers",
                                                 ConfigReader::shown(*list), count));
    }
    for (std::size_t i = 0; i < count; ++i) {
        const Json& layer = (*list)[i];
        if (layer != 0 && layer != 1) {
            config.bad("no_rope_layers", fmt::format("holds {}; allowed: 0, 1", ConfigReader::shown(layer)));
        }
        rotated.push_back(layer == 1);
    }
    return rotated;
}

void read_smollm3(const ConfigReader& config, const Family& /*family*/, DecoderConfig& decoder) {
    const std::vector<bool> rotated = rotated_layers(config, decoder);
    for (auto* rotaries : {&decoder.rotaries, &decoder.short_rotaries}) {
        for (std::size_t i = 0; i < rotaries->size(); ++i) {
            if (!rotated[i]) (*rotaries)[i].reset();
        }
    }
}

void read_gemma(const ConfigReader& config, DecoderConfig& decoder) {
    decoder.attention_scale = static_cast<float>(1.0 / std::sqrt(config.positive("query_pre_attn_scalar", 256.0)));
    decoder.embedding_multiplier = static_cast<float>(std::sqrt(static_cast<double>(decoder.hidden_size)));
    decoder.round_embedding_multiplier = true;
}

void read_gemma2(const ConfigReader& config, const Family& /*family*/, DecoderConfig& decoder) {
    read_gemma(config, decoder);
    decoder.attention_softcap = cap(config, "attn_logit_softcapping", 50.0);
    decoder.logit_softcap = cap(config, "final_logit_softcapping", 30.0);
}

void read_gemma3(const ConfigReader& config, const Family& family, DecoderConfig& decoder) {
    read_gemma(config, decoder);
    decoder.logit_softcap = cap(config, "final_logit_softcapping", 0.0);  // scores are not capped, whatever config says
    // Local layers have frequencies of their own, and no scaling. Newer files describe both kinds by name.
    const std::optional<ConfigReader> named = config.object("rope_parameters");
    const bool by_kind = named && named->has("sliding_attention");
    const double theta = config.positive("rope_local_base_freq", 10000.0);
    const Rotary local =
        read_rotary(config, family, decoder, by_kind ? named->object("sliding_attention") : std::nullopt, theta).rotary;
    for (auto* rotaries : {&decoder.rotaries, &decoder.short_rotaries}) {
        for (std::size_t i = 0; i < rotaries->size(); ++i) {
            if (decoder.window(static_cast<std::int64_t>(i)) > 0) (*rotaries)[i] = local;
        }
    }
}

void read_granite(const ConfigReader& config, const Family& /*family*/, DecoderConfig& decoder) {
    decoder.embedding_multiplier = static_cast<float>(config.positive("embedding_multiplier", 1.0));
    decoder.attention_scale = static_cast<float>(config.positive("attention_multiplier", 1.0));
    decoder.residual_multiplier = static_cast<float>(config.positive("residual_multiplier", 1.0));
    decoder.logits_divisor = static_cast<float>(config.positive("logits_scaling", 1.0));
}

void read_gpt2(const ConfigReader& config, const Family& /*family*/, DecoderConfig& decoder) {
    if (!config.flag("scale_attn_weights", true)) config.not_handled("scale_attn_weights");
    decoder.learned_positions = true;
}

void read_neox(const ConfigReader& config, const Family& /*family*/, DecoderConfig& decoder) {
    decoder.parallel = config.flag("use_parallel_residual", true);
}

/// A size that has had two names; where both are there they must agree.
std::int64_t size_of_either(const ConfigReader& config, const char* key, const char* other, std::int64_t missing) {
    const Json* a = config.find(key);
    const Json* b = config.find(other);
    if (a != nullptr && b != nullptr && *a != *b) {
        config.bad(other, fmt::format("is {}, but {} is {}", ConfigReader::shown(*b), key, ConfigReader::shown(*a)));
    }
    return config.size(a == nullptr && b != nullptr ? other : key, missing);
}

/// Sizes of a mixture that has no layer without.
void read_experts(const ConfigReader& config, DecoderConfig& decoder, std::int64_t count, std::int64_t used) {
    Experts& experts = decoder.experts;
    experts.count = size_of_either(config, "num_local_experts", "num_experts", count);
    constexpr std::int64_t kMostExperts = std::int64_t{1} << 20;  // of all layers; published models have 23,000
    if (experts.count > kMostExperts / decoder.layers) {
        config.bad(config.find("num_experts") != nullptr ? "num_experts" : "num_local_experts",
                   fmt::format("is {} in {} layers; allowed: {} in all", experts.count, decoder.layers, kMostExperts));
    }
    experts.used = config.size("num_experts_per_tok", used);
    if (experts.used > experts.count) {
        config.bad("num_experts_per_tok", fmt::format("is {}; there are {} experts", experts.used, experts.count));
    }
    experts.intermediate_size = decoder.intermediate_size;
    decoder.sparse.assign(static_cast<std::size_t>(decoder.layers), true);
}

void read_mixtral(const ConfigReader& config, const Family& /*family*/, DecoderConfig& decoder) {
    read_experts(config, decoder, 8, 2);
}

void read_qwen3_moe(const ConfigReader& config, const Family& /*family*/, DecoderConfig& decoder) {
    if (!config.flag("use_qk_norm", true)) config.not_handled("use_qk_norm");
    read_experts(config, decoder, 128, 8);
    decoder.experts.intermediate_size = config.size("moe_intermediate_size", 768);
    decoder.experts.normalised = config.flag("norm_topk_prob", false);
    const std::int64_t step = config.size("decoder_sparse_step", 1);
    for (std::int64_t i = 0; i < decoder.layers; ++i) {
        decoder.sparse[static_cast<std::size_t>(i)] = (i + 1) % step == 0;
    }
    const Json* dense = config.find("mlp_only_layers");
    if (dense == nullptr) return;
    if (!dense->is_array()) {
        config.bad("mlp_only_layers", fmt::format("is {}; it must be a list of layers", ConfigReader::shown(*dense)));
    }
    for (const Json& layer : *dense) {
        if (!layer.is_number_integer() || layer < 0 || layer >= decoder.layers) {
            config.bad("mlp_only_layers",
                       fmt::format("holds {}; allowed: 0 to {}", ConfigReader::shown(layer), decoder.layers - 1));
        }
        decoder.sparse[layer.get<std::size_t>()] = false;
    }
}

void read_gpt_oss(const ConfigReader& config, const Family& /*family*/, DecoderConfig& decoder) {
    if (!rotary_object(config)) config.bad("rope_scaling", "is missing");  // and the class' default is no plain one
    if (config.positive("swiglu_alpha", 1.702) != 1.702) config.not_handled("swiglu_alpha");
    read_experts(config, decoder, 128, size_of_either(config, "num_experts_per_tok", "experts_per_token", 4));
    decoder.experts.bias = true;
    decoder.activation = kernels::Activation::clamped_silu;
    // older model code has 7 whatever the key says, newer reads it
    decoder.activation_limit = static_cast<float>(config.positive("swiglu_limit", 7.0));
}

// ------------------------------------------------------------------------------------------------------- the table

constexpr std::int64_t kLong = 131072;

constexpr Family kGemma3{
    .architecture = "Gemma3ForCausalLM",
    .model_type = "gemma3_text",
    .names = &kGemma3Names,
    .keys = {.activation = "hidden_activation"},
    .usual = {.vocab_size = 262208, .hidden_size = 2304, .intermediate_size = 9216, .layers = 26, .heads = 8},
    .kv_heads = 4,
    .head_dim = 256,
    .max_positions = kLong,
    .rope_theta = 1e6,
    .tied_embeddings = true,
    .activation = "gelu_pytorch_tanh",
    .norm = Norm::rms_plus_one,
    .qk_norm = QkNorm::each_head,
    .qkv_bias = Bias::by_key,
    .output_bias = Bias::by_key,
    .windows = Windows::all_but_nth,
    .window = 4096,
    .read = read_gemma3,
    .own_keys = {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq",
                 "sliding_window_pattern", "_sliding_window_pattern", "hidden_act"},
};

constexpr Family kFamilies[] = {
    {
        .architecture = "LlamaForCausalLM",
        .model_type = "llama",
        .names = &kLlamaNames,
        .qkv_bias = Bias::by_key,
        .output_bias = Bias::by_key,
        .mlp_bias = Bias::by_key,
    },
    {
        .architecture = "MistralForCausalLM",
        .model_type = "mistral",
        .names = &kLlamaNames,
        .kv_heads = 8,
        .max_positions = kLong,
        .windows = Windows::all,
        .window = 4096,
    },
    {
        .architecture = "MixtralForCausalLM",
        .model_type = "mixtral",
        .names = &kMixtralNames,
        .kv_heads = 8,
        .max_positions = kLong,
        .norm_epsilon = 1e-5,
        .rope_theta = 1e6,
        .windows = Windows::all,
        .read = read_mixtral,
        .own_keys = {"num_local_experts", "num_experts", "num_experts_per_tok"},
    },
    {
        .architecture = "Qwen2ForCausalLM",
        .model_type = "qwen2",
        .names = &kLlamaNames,
        .kv_heads = 32,
        .max_positions = 32768,
        .qkv_bias = Bias::always,
        .windows = Windows::from_max_window_layers,
        .window_switch = true,
        .window = 4096,
        .own_keys = {"max_window_layers"},
    },
    {
        .architecture = "Qwen3ForCausalLM",
        .model_type = "qwen3",
        .names = &kQwen3Names,
        .kv_heads = 32,
        .head_dim = 128,
        .max_positions = 32768,
        .qk_norm = QkNorm::each_head,
        .qkv_bias = Bias::by_key,
        .output_bias = Bias::by_key,
        .windows = Windows::from_max_window_layers,
        .window_switch = true,
        .window = 4096,
        .own_keys = {"max_window_layers"},
    },
    {
        .architecture = "Qwen3MoeForCausalLM",
        .model_type = "qwen3_moe",
        .names = &kQwen3MoeNames,
        .kv_heads = 4,
        .max_positions = 32768,
        .qk_norm = QkNorm::each_head,
        .qkv_bias = Bias::by_key,
        .output_bias = Bias::by_key,
        .windows = Windows::all,
        .window_switch = true,
        .window = 4096,
        .read = read_qwen3_moe,
        .own_keys = {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
                     "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "max_window_layers", "use_qk_norm"},
    },
    {
        .architecture = "SmolLM3ForCausalLM",
        .model_type = "smollm3",
        .names = &kLlamaNames,
        .kv_heads = 4,
        .max_positions = 32768,
        .rope_theta = 2e6,
        .tied_embeddings = true,
        .qkv_bias = Bias::by_key,
        .output_bias = Bias::by_key,
        .mlp_bias = Bias::by_key,
        .windows = Windows::unrotated,
        .window_switch = true,
        .read = read_smollm3,
        .own_keys = {"no_rope_layers", "no_rope_layer_interval", "max_window_layers"},
    },
    {
        .architecture = "GptOssForCausalLM",
        .model_type = "gpt_oss",
        .names = &kGptOssNames,
        .kv_heads = 8,
        .head_dim = 64,
        .max_positions = kLong,
        .norm_epsilon = 1e-5,
        .rope_theta = 150000.0,
        .qkv_bias = Bias::by_key,
        .output_bias = Bias::by_key,
        .biased = true,
        .windows = Windows::even,
        .window = 128,
        .read = read_gpt_oss,
        .own_keys = {"num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token", "swiglu_limit",
                     "swiglu_alpha"},
    },
    {
        .architecture = "Phi3ForCausalLM",
        .model_type = "phi3",
        .names = &kPhi3Names,
        .keys = {.rotary_part = "partial_rotary_factor"},
        .max_positions = 4096,
        .original_positions = 4096,
        .norm_epsilon = 1e-5,
        .windows = Windows::all,
    },
    {
        .architecture = "Olmo2ForCausalLM",
        .model_type = "olmo2",
        .names = &kOlmo2Names,
        .norm_epsilon = 1e-5,
        .qk_norm = QkNorm::all_heads,
        .qkv_bias = Bias::by_key,
        .output_bias = Bias::by_key,
    },
    {
        .architecture = "GraniteForCausalLM",
        .model_type = "granite",
        .names = &kLlamaNames,
        .qkv_bias = Bias::by_key,
        .output_bias = Bias::by_key,
        .mlp_bias = Bias::by_key,
        .read = read_granite,
        .own_keys = {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"},
    },
    {
        .architecture = "Gemma2ForCausalLM",
        .model_type = "gemma2",
        .names = &kGemma2Names,
        .keys = {.activation = "hidden_activation"},
        .kv_heads = 4,
        .head_dim = 256,
        .max_positions = 8192,
        .tied_embeddings = true,
        .activation = "gelu_pytorch_tanh",
        .norm = Norm::rms_plus_one,
        .qkv_bias = Bias::by_key,
        .output_bias = Bias::by_key,
        .windows = Windows::even,
        .window = 4096,
        .read = read_gemma2,
        .own_keys = {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "hidden_act",
                     "sliding_window_size"},
    },
    kGemma3,
    [] {
        Family family = kGemma3;
        family.architecture = "Gemma3ForConditionalGeneration";
        family.inner = "text_config";
        return family;
    }(),
    {
        .architecture = "GPT2LMHeadModel",
        .model_type = "gpt2",
        .names = &kGpt2Names,
        .keys = {.hidden_size = "n_embd",
                 .intermediate_size = "n_inner",
                 .layers = "n_layer",
                 .heads = "n_head",
                 .max_positions = "n_positions",
                 .norm_epsilon = "layer_norm_epsilon",
                 .activation = "activation_function"},
        .four_times_hidden = true,
        .grouped = false,
        .max_positions = 1024,
        .norm_epsilon = 1e-5,
        .tied_embeddings = true,
        .activation = "gelu_new",
        .norm = Norm::layer,
        .inputs_first = true,
        .qkv_bias = Bias::always,
        .output_bias = Bias::always,
        .mlp_bias = Bias::always,
        .rotates = false,
        .read = read_gpt2,
        .own_keys = {"scale_attn_weights"},
    },
    {
        .architecture = "GPTNeoXForCausalLM",
        .model_type = "gpt_neox",
        .names = &kNeoxNames,
        .keys = {.norm_epsilon = "layer_norm_eps", .rope_theta = "rotary_emb_base", .rotary_part = "rotary_pct"},
        .grouped = false,
        .norm_epsilon = 1e-5,
        .rotary_part = 0.25,
        .activation = "gelu",
        .norm = Norm::layer,
        .fused_rows = FusedRows::per_head,
        .qkv_bias = Bias::by_key,
        .output_bias = Bias::by_key,
        .mlp_bias = Bias::always,
        .biased = true,
        .read = read_neox,
        .own_keys = {"use_parallel_residual", "rope_theta", "partial_rotary_factor"},
    },
};

}  // namespace

std::span<const Family> decoder_families() noexcept { return kFamilies; }

std::vector<std::int64_t> read_windows(const ConfigReader& config, const Family& family, const DecoderConfig& decoder) {
    const auto layers = static_cast<std::size_t>(decoder.layers);
    std::vector<bool> local(layers);
    const Json* types = config.find("layer_types");
    if (types != nullptr) {
        if (!types->is_array() || types->size() != layers) {
            config.bad("layer_types", fmt::format("is {}; it must be a list of one word for each of the {} layers",
                                                  ConfigReader::shown(*types), layers));
        }
        for (std::size_t i = 0; i < layers; ++i) {
            const Json& type = (*types)[i];
            local[i] = ConfigReader::is(type, "sliding_attention");
            if ((local[i] && family.windows != Windows::none) || ConfigReader::is(type, "full_attention")) continue;
            config.unsupported("layer_types",
                               fmt::format("holds {}; this version does not handle it", ConfigReader::shown(type)));
        }
    }
    if (family.windows == Windows::none) return {};
    const std::vector<bool> rotated =
        family.windows == Windows::unrotated ? rotated_layers(config, decoder) : std::vector<bool>();
    const bool on = !family.window_switch || config.flag("use_sliding_window", false);
    const std::int64_t window = config.has("sliding_window")
                                    ? (config.find("sliding_window") == nullptr ? 0 : config.size("sliding_window"))
                                    : family.window;
    // model code whose layers are all alike does not look at layer_types
    const bool alike = family.windows == Windows::all && types != nullptr;
    if (alike && std::ranges::count(local, on && window > 0) != decoder.layers) config.not_handled("layer_types");
    if (!on || window == 0) return {};
    if (types == nullptr) {
        std::size_t first = 0;
        std::size_t nth = 0;
        if (family.windows == Windows::from_max_window_layers) {
            first = static_cast<std::size_t>(config.size("max_window_layers", 28, 0));
        } else if (family.windows == Windows::all_but_nth) {
            const char* const key =
                config.find("sliding_window_pattern") != nullptr ? "sliding_window_pattern" : "_sliding_window_pattern";
            nth = static_cast<std::size_t>(config.size(key, 6));
        }
        for (std::size_t i = 0; i < layers; ++i) {
            switch (family.windows) {
                case Windows::none:
                    break;
                case Windows::all:
                    local[i] = true;
                    break;
                case Windows::from_max_window_layers:
                    local[i] = i >= first;
                    break;
                case Windows::even:
                    local[i] = i % 2 == 0;
                    break;
                case Windows::all_but_nth:
                    local[i] = (i + 1) % nth != 0;
                    break;
                case Windows::unrotated:
                    local[i] = !rotated[i];
                    break;
            }
        }
    }
    std::vector<std::int64_t> windows(layers);
    for (std::size_t i = 0; i < layers; ++i) windows[i] = local[i] ? window : 0;
    return windows;
}

namespace {

/// The share of a head that is turned, under whichever names it is given.
double read_rotary_part(const ConfigReader& config, const Family& family, const std::optional<ConfigReader>& settings) {
    const char* const usual_key = "partial_rotary_factor";
    const char* const own_key = family.keys.rotary_part;
    std::optional<double> part;
    const auto take = [&](const ConfigReader& from, const char* key) {
        if (key == nullptr || from.find(key) == nullptr) return;
        const double given = from.positive(key);
        if (own_key == nullptr && given != 1.0) from.not_handled(key);
        if (given > 1.0) from.bad(key, fmt::format("is {}; it must be at most 1", given));
        if (part && *part != given) from.bad(key, fmt::format("is {}, but {} is given elsewhere", given, *part));
        part = given;
    };
    take(config, own_key);
    take(config, usual_key);
    if (settings) take(*settings, usual_key);
    return part.value_or(family.rotary_part);
}

}  // namespace

std::optional<ConfigReader> rotary_object(const ConfigReader& config) {
    std::optional<ConfigReader> settings = config.object("rope_scaling");  // where both are there, this one counts
    if (!settings) settings = config.object("rope_parameters");
    if (settings && settings->has("full_attention")) settings = settings->object("full_attention");
    return settings;
}

RotarySettings read_rotary(const ConfigReader& config, const Family& family, const DecoderConfig& decoder,
                           const std::optional<ConfigReader>& settings, double theta) {
    constexpr std::array kSettings{"rope_type",        "type",
                                   "rope_theta",       "partial_rotary_factor",
                                   "factor",           "original_max_position_embeddings",
                                   "low_freq_factor",  "high_freq_factor",
                                   "attention_factor", "beta_fast",
                                   "beta_slow",        "truncate",
                                   "mscale",           "mscale_all_dim",
                                   "long_factor",      "short_factor"};
    if (settings) {
        for (const auto& [key, value] : settings->json().get_ref<const Json::object_t&>()) {
            const std::string& name = key;
            if (std::ranges::none_of(kSettings, [&](const char* known) { return name == known; })) {
                settings->not_handled(key);
            }
        }
    }
    RotaryOptions options;
    options.head_dim = decoder.head_dim;
    options.theta = settings ? settings->positive("rope_theta", theta) : theta;
    const double part = read_rotary_part(config, family, settings);
    options.rotary_dim = static_cast<std::int64_t>(static_cast<double>(decoder.head_dim) * part);
    if (options.rotary_dim < 2 || options.rotary_dim > decoder.head_dim || options.rotary_dim % 2 != 0) {
        if (part == 1.0) {
            config.bad("head_dim", fmt::format("is {}; it must be even for rotary embeddings", decoder.head_dim));
        }
        config.bad(family.keys.rotary_part,
                   fmt::format("is {}; it turns {} of a head's {} elements, which must be an even number of them", part,
                               options.rotary_dim, decoder.head_dim));
    }
    const auto made = [&](const char* key) {
        try {
            return Rotary(options);
        } catch (const InvalidArgument& error) {
            (settings ? *settings : config).bad(key, error.what());
        }
    };
    if (!settings) return {made("rope_theta")};

    std::string type = "default";
    for (const char* key : {"type", "rope_type"}) {  // the newer word counts
        const Json* value = settings->find(key);
        if (value != nullptr) type = value->is_string() ? value->get<std::string>() : ConfigReader::shown(*value);
    }
    const char* const original_key = "original_max_position_embeddings";
    const bool has_original = config.find(original_key) != nullptr || family.original_positions > 0;
    const auto original = [&] {
        const std::int64_t usual = family.original_positions > 0 ? family.original_positions : decoder.max_positions;
        return settings->size(original_key, config.size(original_key, usual));
    };
    if (type == "default") return {made("rope_theta")};
    if (type == "linear") {
        options.scaling = RotaryScaling::linear;
        options.factor = settings->positive("factor");
        return {made("factor")};
    }
    if (type == "llama3") {
        options.scaling = RotaryScaling::llama3;
        options.factor = settings->positive("factor");
        options.low_freq_factor = settings->positive("low_freq_factor");
        options.high_freq_factor = settings->positive("high_freq_factor");
        options.original_context = settings->size("original_max_position_embeddings");
        return {made("rope_type")};
    }
    if (settings->find("attention_factor") != nullptr)
        options.attention_factor = settings->positive("attention_factor");
    // Phi-3's model code knows longrope alone, which older files call su or yarn
    const bool longrope = type == "longrope" || type == "su" || (type == "yarn" && family.original_positions > 0);
    if (type == "yarn" && !longrope) {
        options.scaling = RotaryScaling::yarn;
        options.factor = settings->positive("factor");
        options.original_context = original();
        options.beta_fast = settings->positive("beta_fast", 32.0);
        options.beta_slow = settings->positive("beta_slow", 1.0);
        options.truncate = settings->flag("truncate", true);
        if (!options.attention_factor && settings->find("mscale") != nullptr &&
            settings->find("mscale_all_dim") != nullptr && options.factor > 1.0) {
            const double stretched = std::log(options.factor);
            options.attention_factor = (0.1 * settings->positive("mscale") * stretched + 1.0) /
                                       (0.1 * settings->positive("mscale_all_dim") * stretched + 1.0);
        }
        return {made("rope_type")};
    }
    if (longrope) {
        options.scaling = RotaryScaling::longrope;
        options.original_context = original();
        const double stretched =
            static_cast<double>(decoder.max_positions) / static_cast<double>(options.original_context);
        options.factor = has_original ? stretched : settings->positive("factor", stretched);
        options.pair_factors = settings->numbers("long_factor");
        RotarySettings result{made("long_factor")};
        options.pair_factors = settings->numbers("short_factor");
        result.for_short = made("short_factor");
        result.short_context = options.original_context;
        return result;
    }
    settings->unsupported(settings->find("rope_type") != nullptr ? "rope_type" : "type",
                          fmt::format("is {}; this version handles default, linear, llama3, yarn, longrope", type));
}

}  // namespace headlong
