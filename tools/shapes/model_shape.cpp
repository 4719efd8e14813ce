#include "tools/shapes/model_shape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <system_error>

#include <headlong/error.hpp>

#include "engine/decoder_config.hpp"
#include "engine/json_node.hpp"
#include "engine/mapped_file.hpp"

namespace headlong::tools {
namespace {

using Keys = std::initializer_list<const char*>;  // one thing as the families spell it

constexpr std::uint64_t kMostParts = std::uint64_t{1} << 20;  // layers, heads, elements of one: as in a cache
constexpr std::uint64_t kMostSize = std::uint64_t{1} << 24;   // as the engine's reader of config.json allows
constexpr std::int64_t kMostWidth = std::int64_t{1} << 30;    // of all heads

constexpr std::array kFourTimesHidden{"gpt2",  "gptj",   "gpt_neo",    "gpt_bigcode",
                                      "bloom", "falcon", "RefinedWeb", "RefinedWebModel"};

// dense decoders by model_type, with a gated MLP and with a plain one
constexpr std::array kGated{"llama",       "mistral", "qwen2", "qwen3",   "gemma",   "gemma2",
                            "gemma3_text", "phi3",    "olmo2", "granite", "smollm3", "minicpm"};
constexpr std::array kPlain{"gpt2", "gpt_neox", "falcon", "RefinedWeb", "RefinedWebModel", "starcoder2", "bloom"};

constexpr Keys kHidden{"hidden_size", "n_embd", "d_model", "n_embed"};

/// What the configuration classes of transformers assume where a file has no such key, unlike what is usual. 0: the
/// usual.
struct Defaults {
    std::string_view type;
    std::int64_t kv_heads;
    std::int64_t head_dim;
};
constexpr std::array kDefaults{Defaults{"gemma", 16, 256}, Defaults{"gemma2", 4, 256}, Defaults{"gemma3_text", 4, 256},
                               Defaults{"mistral", 8, 0}};

Defaults defaults_of(std::string_view type) {
    const auto* const found = std::ranges::find(kDefaults, type, &Defaults::type);
    return found != kDefaults.end() ? *found : Defaults{type, 0, 0};
}

std::optional<JsonNode> find(const JsonNode& config, Keys keys) {
    for (const char* key : keys) {
        if (auto node = config.find(key)) return node;
    }
    return std::nullopt;
}

std::int64_t size_of(const JsonNode& node, std::uint64_t most) {
    return static_cast<std::int64_t>(node.whole_number(most, 1));
}

/// A size that attention does not need: 0 where there is a key, but no size.
std::int64_t size_if_usable(const JsonNode& config, Keys keys, std::int64_t otherwise) {
    const auto node = find(config, keys);
    if (!node) return otherwise;
    const bool usable = node->value().is_number_unsigned() && node->value().get<std::uint64_t>() <= kMostSize;
    return usable ? node->value().get<std::int64_t>() : 0;
}

/// What config.json calls the type of the weight file; only what plans of memory need: f32 where it says nothing
/// usable.
WeightType stored_type_of(const JsonNode& config) {
    const auto node = find(config, {"torch_dtype", "dtype"});
    if (!node || !node->value().is_string()) return WeightType::f32;
    const auto name = node->value().get<std::string>();
    return name == "float16" ? WeightType::f16 : name == "bfloat16" ? WeightType::bf16 : WeightType::f32;
}

JsonNode required(const JsonNode& config, Keys keys) {
    const auto node = find(config, keys);
    return node ? *node : config.at(*keys.begin());
}

std::string text_or_nothing(const JsonNode& config, const char* key) {
    const auto node = config.find(key);
    return node ? node->string() : std::string();
}

/// How many KV heads a key says there are, if any does.
std::optional<JsonNode> kv_heads_node(const JsonNode& config) {
    if (auto node = find(config, {"num_key_value_heads", "num_kv_heads", "n_head_kv"})) return node;
    if (config.boolean_or("multi_query_attention", false)) return config.find("multi_query_group_num");  // ChatGLM
    const auto attention = config.find("attn_config");                                                   // MPT, DBRX
    return attention ? attention->find("kv_n_heads") : std::nullopt;
}

std::int64_t sliding_window_of(const JsonNode& config) {
    const auto window = config.find("sliding_window");
    if (!window || !config.boolean_or("use_sliding_window", true)) return 0;
    if (const auto types = config.find("layer_types")) {
        const std::vector<JsonNode> layers = types->items();
        if (std::ranges::all_of(layers, [](const JsonNode& layer) { return layer.string() == "full_attention"; })) {
            return 0;
        }
    }
    return static_cast<std::int64_t>(window->whole_number(kMostSize));  // 0 is none, as some files write it
}

std::int64_t mlp_projections_of(const JsonNode& config, std::string_view type) {
    for (const char* key : {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}) {
        if (const auto experts = config.find(key); experts && experts->value() != 0) return 0;
    }
    return std::ranges::count(kGated, type) != 0 ? 3 : std::ranges::count(kPlain, type) != 0 ? 2 : 0;
}

std::string name_of(const std::string& file) {
    const std::filesystem::path path = std::filesystem::absolute(file).lexically_normal();
    return one_line((path.filename() == "config.json" ? path.parent_path().filename() : path.stem()).string());
}

std::string lower(std::string_view text) {
    std::string result(text);
    for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return result;
}

}  // namespace

const ModelShape& model_preset(std::string_view name) {
    std::vector<std::string_view> names;
    for (const ModelShape& preset : model_presets()) {
        if (lower(preset.name) == lower(name)) return preset;
        names.push_back(preset.name);
    }
    throw InvalidArgument(
        fmt::format("preset is '{}'; allowed are {}", one_line(name.substr(0, 80)), fmt::join(names, ", ")));
}

ModelShape read_model_shape(const std::string& path) {
    std::error_code ignored;
    const std::string file =
        std::filesystem::is_directory(path, ignored) ? (std::filesystem::path(path) / "config.json").string() : path;
    const std::string shown = one_line(file);
    const JsonDocument document = parse_json(read_text(file, kMostConfigBytes), shown);
    const JsonNode root(document.root(), shown);
    // a model that also sees or hears has its decoder in an object of its own
    const JsonNode config = find(root, {"text_config", "llm_config", "language_config"}).value_or(root);
    const std::string type = text_or_nothing(config, "model_type");
    // published Gemma 3 files leave out what is the default of its family
    const bool gemma3 = type == "gemma3_text";
    const Defaults defaults = defaults_of(type);

    ModelShape shape;
    shape.name = name_of(file);
    shape.layers = size_of(required(config, {"num_hidden_layers", "n_layer", "num_layers", "n_layers"}), kMostParts);
    shape.hidden_size = size_if_usable(config, kHidden, 0);
    const Keys heads_keys{"num_attention_heads", "n_head", "num_heads", "n_heads"};
    shape.heads = gemma3 && !find(config, heads_keys) ? 8 : size_of(required(config, heads_keys), kMostParts);

    const bool latent = config.find("kv_lora_rank").has_value();  // MLA, whose expanded form this is
    const bool one_kv_head =
        config.boolean_or("multi_query", type == "falcon") && !config.boolean_or("new_decoder_architecture", false);
    const auto kv_heads = kv_heads_node(config);
    shape.kv_heads = shape.heads;
    if (defaults.kv_heads > 0 && !config.object().contains("num_key_value_heads")) {  // null is as many as heads
        shape.kv_heads = defaults.kv_heads;
    }
    if (one_kv_head) {  // whatever num_kv_heads says: Falcon 7B's says 71
        shape.kv_heads = 1;
    } else if (kv_heads && !latent) {
        shape.kv_heads = size_of(*kv_heads, kMostParts);
    }
    if (shape.heads % shape.kv_heads != 0) {
        if (kv_heads) kv_heads->fail(fmt::format("is {}, it must divide the {} heads", shape.kv_heads, shape.heads));
        config.fail(fmt::format("has {} heads, which must be a multiple of {} KV heads", shape.heads, shape.kv_heads));
    }

    if (latent) {
        shape.head_dim =
            size_of(config.at("qk_nope_head_dim"), kMostParts) + size_of(config.at("qk_rope_head_dim"), kMostParts);
        static_cast<void>(config.at("v_head_dim"));
    } else if (const auto head_dim = find(config, {"head_dim", "kv_channels"})) {
        shape.head_dim = size_of(*head_dim, kMostParts);
    } else if (defaults.head_dim > 0) {
        shape.head_dim = defaults.head_dim;
    } else {
        const std::int64_t hidden = size_of(required(config, kHidden), kMostSize);
        if (hidden % shape.heads != 0) {
            required(config, heads_keys)
                .fail(fmt::format("is {}, without head_dim it must divide hidden_size {}", shape.heads, hidden));
        }
        shape.head_dim = hidden / shape.heads;
    }
    const auto value_dim = config.find("v_head_dim");
    // files of families that may have latent attention say 0 where there is none
    shape.value_dim =
        value_dim && (latent || value_dim->value() != 0) ? size_of(*value_dim, kMostParts) : shape.head_dim;
    const std::int64_t dim = std::max(shape.head_dim, shape.value_dim);
    if (dim > static_cast<std::int64_t>(kMostParts) || shape.heads * dim > kMostWidth) {
        config.fail(fmt::format("has {} heads of {} elements; allowed are {} elements, and {} in all heads",
                                shape.heads, dim, kMostParts, kMostWidth));
    }

    shape.intermediate_size = size_if_usable(config, {"intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"},
                                             std::ranges::count(kFourTimesHidden, type) * 4 * shape.hidden_size);
    shape.vocab_size = size_if_usable(config, {"vocab_size", "padded_vocab_size"}, gemma3 ? 262208 : 0);
    shape.max_positions = size_if_usable(
        config, {"max_position_embeddings", "n_positions", "max_seq_len", "seq_length"}, gemma3 ? 131072 : 0);
    shape.sliding_window = sliding_window_of(config);
    shape.stored_type = stored_type_of(config);
    if (!latent && shape.value_dim == shape.head_dim) shape.mlp_projections = mlp_projections_of(config, type);
    return shape;
}

}  // namespace headlong::tools
