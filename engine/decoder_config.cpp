#include "engine/decoder_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <headlong/error.hpp>
#include <set>
#include <span>
#include <utility>

#include "engine/decoder_families.hpp"
#include "engine/json_node.hpp"
#include "engine/mapped_file.hpp"

namespace headlong {
namespace {

using Json = ConfigReader::Json;

// A key that holds one of these words changes what the model computes. Unless it is handled here, or holds the value
// that changes nothing, the model is refused rather than computed wrongly; all other keys are ignored.
constexpr std::array kWordsThatMatter{"rope",
                                      "rotary",
                                      "scal",
                                      "window",
                                      "cap",
                                      "clip",
                                      "bias",
                                      "norm",
                                      "multiplier",
                                      "quant",
                                      "compress",
                                      "act_fn",
                                      "hidden_act",
                                      "activation",
                                      "alibi",
                                      "sink",
                                      "expert",
                                      "layer_types",
                                      "pattern",
                                      "parallel",
                                      "qk",
                                      "partial",
                                      "position_embedding_type",
                                      "bidirectional",
                                      "causal",
                                      "temperature",
                                      "shared",
                                      "attention_chunk",
                                      "moe",
                                      "attn_",
                                      "embedding_",
                                      "limit",
                                      "logit"};
// Words inside of these are about something else: training, how a checkpoint was stored, or how it was run.
constexpr std::string_view kHarmless[] = {
    "attn_implementation",  "_attn_implementation",         "attn_pdrop",         "embedding_dropout",
    "max_window_layers",    "_attn_implementation_autoset", "attention_dropout",  "original_max_position_embeddings",
    "output_router_logits", "initial_context_length",       "summary_activation", "router_aux_loss_coef"};
// Switches whose `true` is what is computed anyway; every other switch changes nothing when it is false.
constexpr std::string_view kOnByDefault[] = {"use_rope", "scale_attn_weights", "is_causal", "causal"};

bool is_one_of(std::span<const std::string_view> names, std::string_view name) {
    return std::ranges::find(names, name) != names.end();
}

/// Keys that a family has a meaning for.
std::set<std::string_view> handled_keys(const Family& family) {
    const ConfigKeys& keys = family.keys;
    std::set<std::string_view> handled{keys.norm_epsilon, keys.activation};
    if (family.rotates) {
        handled.insert({keys.rope_theta, "rope_scaling", "rope_parameters"});
        if (keys.rotary_part != nullptr) handled.insert(keys.rotary_part);
    }
    if (family.qkv_bias == Bias::by_key || family.output_bias == Bias::by_key) handled.insert("attention_bias");
    if (family.mlp_bias == Bias::by_key) handled.insert("mlp_bias");
    if (family.windows != Windows::none) {
        handled.insert({"sliding_window", "layer_types"});
        if (family.window_switch) handled.insert("use_sliding_window");
    }
    for (const char* key : family.own_keys) {
        if (key != nullptr) handled.insert(key);
    }
    return handled;
}

/// Whether a key that could matter, and that the family does not have, holds the value that changes nothing.
bool changes_nothing(const ConfigReader& config, const std::string& key, const Json& value) {
    if (value.is_null() || ((value.is_array() || value.is_object()) && value.empty())) return true;
    if (value.is_boolean()) return value.get<bool>() == is_one_of(kOnByDefault, key);
    if (key == "partial_rotary_factor" || key == "full_attn_mod") return value == 1.0;
    if (key == "shared_expert_intermediate_size") return value == 0;
    if (key == "sliding_window") return !config.flag("use_sliding_window", true);
    if (key == "layer_types" && value.is_array()) {
        return std::ranges::all_of(value, [](const Json& type) { return ConfigReader::is(type, "full_attention"); });
    }
    return false;
}

void refuse_unhandled(const ConfigReader& config, const Family& family) {
    const std::set<std::string_view> handled = handled_keys(family);
    for (const auto& [key, value] : config.json().get_ref<const Json::object_t&>()) {
        if (handled.contains(key) || is_one_of(kHarmless, key)) continue;
        const std::string& name = key;
        const bool matters = std::ranges::any_of(
            kWordsThatMatter, [&](const char* word) { return name.find(word) != std::string::npos; });
        if (matters && !changes_nothing(config, key, value)) config.not_handled(key);
    }
}

const Family& family_of(const ConfigReader& config) {
    const Json& architectures = config.at("architectures");
    if (!architectures.is_array() || architectures.size() != 1 || !architectures[0].is_string()) {
        config.bad("architectures",
                   fmt::format("is {}; it must be a list of one name", ConfigReader::shown(architectures)));
    }
    std::string known;
    for (const Family& family : decoder_families()) {
        if (ConfigReader::is(architectures[0], family.architecture)) return family;
        known += (known.empty() ? "" : ", ") + std::string(family.architecture);
    }
    config.unsupported("architectures", fmt::format("{} is not handled; this version knows {}",
                                                    ConfigReader::shown(architectures[0]), known));
}

kernels::Activation read_activation(const ConfigReader& config, const char* key, const char* missing) {
    const Json* value = config.find(key);
    const std::string name = value == nullptr     ? missing
                             : value->is_string() ? value->get_ref<const std::string&>()
                                                  : ConfigReader::shown(*value);
    if (name == "silu" || name == "swish") return kernels::Activation::silu;
    if (name == "gelu") return kernels::Activation::gelu;
    if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return kernels::Activation::gelu_tanh;
    config.unsupported(key, fmt::format("is {}; this version handles silu, gelu, gelu_new, gelu_pytorch_tanh",
                                        value == nullptr ? name : ConfigReader::shown(*value)));
}

void read_sizes(const ConfigReader& config, const Family& family, DecoderConfig& decoder) {
    const ConfigKeys& keys = family.keys;
    const UsualSizes& usual = family.usual;
    const auto size = [&](const char* key, std::int64_t missing) {
        return config.size(key, missing > 0 ? std::optional(missing) : std::nullopt);
    };
    decoder.vocab_size = size("vocab_size", usual.vocab_size);
    decoder.hidden_size = size(keys.hidden_size, usual.hidden_size);
    decoder.intermediate_size =
        size(keys.intermediate_size, family.four_times_hidden ? 4 * decoder.hidden_size : usual.intermediate_size);
    decoder.layers = size(keys.layers, usual.layers);
    decoder.heads = size(keys.heads, usual.heads);
    // null is as many as heads; a missing key what the family's class says
    const bool given = config.has("num_key_value_heads") || family.kv_heads == 0;
    decoder.kv_heads = config.size("num_key_value_heads", given ? decoder.heads : family.kv_heads);
    if (decoder.heads % decoder.kv_heads != 0) {
        config.bad("num_key_value_heads",
                   fmt::format("is {}; it must divide the {} heads", decoder.kv_heads, decoder.heads));
    }
    const bool derived = config.find("head_dim") == nullptr && family.head_dim == 0;
    if (derived && decoder.hidden_size % decoder.heads != 0) {
        config.bad(keys.heads, fmt::format("is {}; without head_dim it must divide {} {}", decoder.heads,
                                           keys.hidden_size, decoder.hidden_size));
    }
    decoder.head_dim = derived ? decoder.hidden_size / decoder.heads : config.size("head_dim", family.head_dim);
    if (!family.grouped &&
        (decoder.kv_heads != decoder.heads || decoder.head_dim != decoder.hidden_size / decoder.heads)) {
        config.not_handled(decoder.kv_heads != decoder.heads ? "num_key_value_heads" : "head_dim");
    }
    constexpr std::int64_t kMaxHeadDim = std::int64_t{1} << 20;  // as in a cache
    if (decoder.head_dim > kMaxHeadDim) {
        config.bad("head_dim", fmt::format("is {}; it must be at most {}", decoder.head_dim, kMaxHeadDim));
    }
    constexpr std::int64_t kMaxWidth = std::int64_t{1} << 30;
    if (decoder.heads * decoder.head_dim > kMaxWidth) {
        config.bad("head_dim",
                   fmt::format("is {}; {} heads of it are more than 2^30 wide", decoder.head_dim, decoder.heads));
    }
    constexpr std::int64_t kMaxLayers = std::int64_t{1} << 17;  // lists have an item for each: a few MiB of any file
    if (decoder.layers > kMaxLayers) {
        config.bad(keys.layers, fmt::format("is {}; it must be at most {}", decoder.layers, kMaxLayers));
    }
    decoder.max_positions = config.size(keys.max_positions, family.max_positions);
}

void read_rotaries(const ConfigReader& config, const Family& family, DecoderConfig& decoder) {
    const auto layers = static_cast<std::size_t>(decoder.layers);
    if (!family.rotates) {
        decoder.rotaries.resize(layers);
        return;
    }
    const std::optional<ConfigReader> settings = rotary_object(config);
    const double theta = config.positive(family.keys.rope_theta, config.positive("rope_theta", family.rope_theta));
    if (config.find("rope_theta") != nullptr && config.positive("rope_theta") != theta) {
        config.bad("rope_theta", fmt::format("is {}, but {} is {}", ConfigReader::shown(config.at("rope_theta")),
                                             family.keys.rope_theta, theta));
    }
    if (settings && settings->find("rope_theta") != nullptr && config.find(family.keys.rope_theta) != nullptr &&
        settings->positive("rope_theta") != theta) {
        settings->bad("rope_theta", fmt::format("is {}, but {} is {}", ConfigReader::shown(settings->at("rope_theta")),
                                                family.keys.rope_theta, theta));
    }
    const RotarySettings rotary = read_rotary(config, family, decoder, settings, theta);
    decoder.rotaries.assign(layers, rotary.rotary);
    if (rotary.for_short) {
        decoder.short_rotaries.assign(layers, rotary.for_short);
        decoder.short_context = rotary.short_context;
    }
}

/// A token, or a list of some; none where the key is missing.
std::vector<std::int32_t> tokens_of(const ConfigReader& config, const char* key, std::int64_t vocab_size) {
    std::vector<std::int32_t> ids;
    const Json* value = config.find(key);
    if (value == nullptr) return ids;
    if (!value->is_array()) return {config.token(key, *value, vocab_size)};
    for (const Json& id : *value) ids.push_back(config.token(key, id, vocab_size));
    return ids;
}

void read_ends(const ConfigReader& config, DecoderConfig& decoder) {
    if (auto ids = tokens_of(config, "eos_token_id", decoder.vocab_size); !ids.empty())
        decoder.eos_ids = std::move(ids);
    const auto bos = tokens_of(config, "bos_token_id", decoder.vocab_size);
    if (!bos.empty()) decoder.bos_id = bos.front();
}

}  // namespace

void read_generation_config(std::string_view text, const std::string& name, DecoderConfig& config) {
    const JsonDocument document = parse_json(text, name);
    const Json& json = document.root();
    if (!json.is_object()) throw BadFile(one_line(name) + ": is not a JSON object");
    read_ends(ConfigReader(json, name), config);
}

DecoderConfig parse_decoder_config(std::string_view text, const std::string& name) {
    const JsonDocument document = parse_json(text, name);
    const Json& json = document.root();
    if (!json.is_object()) throw BadFile(one_line(name) + ": is not a JSON object");
    const ConfigReader whole(json, name);
    const Family& family = family_of(whole);
    std::optional<ConfigReader> inner;
    if (family.inner != nullptr) {
        inner = whole.object(family.inner);
        if (!inner) whole.bad(family.inner, "is missing");
        if (whole.find("quantization_config") != nullptr) whole.not_handled("quantization_config");
    }
    const ConfigReader& config = inner ? *inner : whole;
    if (const Json* type = config.find("model_type"); type != nullptr && !ConfigReader::is(*type, family.model_type)) {
        config.unsupported("model_type",
                           fmt::format("is {}; of {} this version handles only \"{}\"", ConfigReader::shown(*type),
                                       family.architecture, family.model_type));
    }
    refuse_unhandled(config, family);

    DecoderConfig decoder;
    decoder.architecture = family.architecture;
    decoder.names = family.names;
    decoder.norm = family.norm;
    decoder.qk_norm = family.qk_norm;
    decoder.fused_rows = family.fused_rows;
    decoder.inputs_first = family.inputs_first;
    read_sizes(config, family, decoder);
    decoder.norm_epsilon = config.positive(family.keys.norm_epsilon, family.norm_epsilon);
    decoder.activation = read_activation(config, family.keys.activation, family.activation);
    const auto biased = [&](Bias bias, const char* key) {
        return bias == Bias::always || (bias == Bias::by_key && config.flag(key, family.biased));
    };
    decoder.qkv_bias = biased(family.qkv_bias, "attention_bias");
    decoder.output_bias = biased(family.output_bias, "attention_bias");
    decoder.mlp_bias = biased(family.mlp_bias, "mlp_bias");
    decoder.tied_embeddings = (config.find("tie_word_embeddings") != nullptr ? config : whole)
                                  .flag("tie_word_embeddings", family.tied_embeddings);
    read_rotaries(config, family, decoder);
    decoder.windows = read_windows(config, family, decoder);
    if (family.read != nullptr) family.read(config, family, decoder);

    for (const char* key : {"torch_dtype", "dtype"}) {
        const Json* type = config.find(key) != nullptr ? config.find(key) : whole.find(key);
        if (type == nullptr) continue;
        if (ConfigReader::is(*type, "float16")) decoder.stored_type = WeightType::f16;
        if (ConfigReader::is(*type, "bfloat16")) decoder.stored_type = WeightType::bf16;
        break;  // the first that is there decides, as in tools/shapes
    }
    if (inner) read_ends(whole, decoder);
    read_ends(config, decoder);
    return decoder;
}

}  // namespace headlong
