#include "engine/decoder_config.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include <headlong/error.hpp>

#include "engine/json_node.hpp"
#include "engine/mapped_file.hpp"

namespace headlong {
namespace {

using Json = nlohmann::json;

constexpr TensorNames kLlamaNames{
    .embedding = "model.embed_tokens.weight",
    .final_norm = "model.norm.weight",
    .head = "lm_head",
    .attention_norm = "model.layers.{}.input_layernorm.weight",
    .query = "model.layers.{}.self_attn.q_proj",
    .key = "model.layers.{}.self_attn.k_proj",
    .value = "model.layers.{}.self_attn.v_proj",
    .attention_output = "model.layers.{}.self_attn.o_proj",
    .mlp_norm = "model.layers.{}.post_attention_layernorm.weight",
    .gate = "model.layers.{}.mlp.gate_proj",
    .up = "model.layers.{}.mlp.up_proj",
    .down = "model.layers.{}.mlp.down_proj",
};

struct Family {
    const char* architecture;
    const TensorNames* names;
};
constexpr std::array<Family, 1> kFamilies{{{"LlamaForCausalLM", &kLlamaNames}}};

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
                                      "logit"};
const std::set<std::string, std::less<>> kHandled{"rope_theta",     "rope_scaling", "rope_parameters", "rms_norm_eps",
                                                  "attention_bias", "mlp_bias",     "hidden_act"};
// Words inside of these are about something else: training, how a checkpoint was stored, or how it was run.
const std::set<std::string, std::less<>> kHarmless{
    "attn_implementation",  "_attn_implementation",        "attn_pdrop", "embedding_dropout", "max_window_layers",
    "output_router_logits", "_attn_implementation_autoset"};
// Switches whose `true` is what is computed anyway; every other switch changes nothing when it is false.
const std::set<std::string, std::less<>> kOnByDefault{"use_rope", "scale_attn_weights", "is_causal", "causal"};

constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;  // products of two sizes stay far below 2^63

class Reader {
  public:
    Reader(const Json& json, const std::string& name) : json_(json), name_(name) {}

    [[noreturn]] void bad(std::string_view key, const std::string& what) const {
        throw BadFile(fmt::format("{}: {}: {}", one_line(name_), one_line(key), what));
    }
    [[noreturn]] void unsupported(std::string_view key, const std::string& what) const {
        throw Unsupported(fmt::format("{}: {}: {}", one_line(name_), one_line(key), what));
    }
    static std::string shown(const Json& value) {
        return one_line(value.dump(-1, ' ', false, Json::error_handler_t::replace));
    }

    const Json* find(std::string_view key) const {
        const auto found = json_.find(key);
        return found == json_.end() || found->is_null() ? nullptr : &*found;
    }
    const Json& at(std::string_view key) const {
        const Json* value = find(key);
        if (value == nullptr) bad(key, "is missing");
        return *value;
    }
    std::int64_t size(std::string_view key, std::optional<std::int64_t> otherwise = {}) const {
        if (otherwise && find(key) == nullptr) return *otherwise;
        const Json& value = at(key);
        if (!value.is_number_integer() || value.get<std::int64_t>() < 1 || value.get<std::int64_t>() > kMaxSize ||
            (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(kMaxSize))) {
            bad(key, fmt::format("is {}; it must be a whole number from 1 to {}", shown(value), kMaxSize));
        }
        return value.get<std::int64_t>();
    }
    double positive(std::string_view key, const Json& value) const {
        if (!value.is_number() || !(value.get<double>() > 0.0) || !std::isfinite(value.get<double>())) {
            bad(key, fmt::format("is {}; it must be a number above 0", shown(value)));
        }
        return value.get<double>();
    }
    bool flag(std::string_view key, bool otherwise) const {
        const Json* value = find(key);
        if (value == nullptr) return otherwise;
        if (!value->is_boolean()) bad(key, fmt::format("is {}; it must be true or false", shown(*value)));
        return value->get<bool>();
    }
    std::int32_t token(std::string_view key, const Json& value, std::int64_t vocab_size) const {
        if (!value.is_number_integer() || value.get<std::int64_t>() < 0 || value.get<std::int64_t>() >= vocab_size) {
            bad(key, fmt::format("is {}; it must be a token from 0 to {}", shown(value), vocab_size - 1));
        }
        return static_cast<std::int32_t>(value.get<std::int64_t>());
    }

    void refuse_unhandled() const {
        if (const Json* type = find("model_type"); type != nullptr && *type != "llama") {
            unsupported("model_type", fmt::format("is {}; this version handles only \"llama\"", shown(*type)));
        }
        for (const auto& [key, value] : json_.items()) {
            if (kHandled.contains(key) || kHarmless.contains(key)) continue;
            bool matters = false;
            for (const char* word : kWordsThatMatter) matters = matters || key.find(word) != std::string::npos;
            if (matters && !changes_nothing(key, value)) {
                unsupported(key, fmt::format("is {}; this version does not handle it", shown(value)));
            }
        }
    }

    /// Whether a key that could matter holds the value that plain Llama has.
    bool changes_nothing(const std::string& key, const Json& value) const {
        if (value.is_null() || ((value.is_array() || value.is_object()) && value.empty())) return true;
        if (value.is_boolean()) return value.get<bool>() == kOnByDefault.contains(key);
        if (key == "partial_rotary_factor") return value == 1.0;
        if (key == "sliding_window") return flag("use_sliding_window", true) == false;
        if (key == "layer_types" && value.is_array()) {
            for (const Json& type : value) {
                if (type != "full_attention") return false;
            }
            return true;
        }
        return false;
    }

    /// rope_theta, or the newer rope_parameters; any scaling is refused.
    double rope_theta() const {
        constexpr double kUsual = 10000.0;  // what Llama's own configuration defaults to
        std::optional<double> theta;
        const auto take = [&](std::string_view key, const Json& value) {
            constexpr double kLargest = 1e12;  // published models stay under 1e9
            const double given = positive(key, value);
            if (given < 1.0 || given > kLargest)
                bad(key, fmt::format("is {}; it must be from 1 to {}", shown(value), kLargest));
            if (theta && *theta != given)
                bad(key, fmt::format("is {}, but {} is given elsewhere", shown(value), *theta));
            theta = given;
        };
        if (const Json* value = find("rope_theta")) take("rope_theta", *value);
        for (const char* key : {"rope_scaling", "rope_parameters"}) {
            const Json* value = find(key);
            if (value == nullptr) continue;
            if (!value->is_object()) bad(key, fmt::format("is {}; it must be an object", shown(*value)));
            for (const auto& [inner, setting] : value->items()) {
                const std::string path = std::string(key) + "." + inner;
                if (inner == "rope_theta") {
                    take(path, setting);
                } else if (inner == "partial_rotary_factor" && setting == 1.0) {
                    continue;
                } else if (inner != "rope_type" && inner != "type") {
                    unsupported(path, fmt::format("is {}; this version does not handle it", shown(setting)));
                } else if (setting != "default") {
                    unsupported(path, fmt::format("is {}; this version handles only 'default'", shown(setting)));
                }
            }
        }
        return theta.value_or(kUsual);
    }

  private:
    const Json& json_;
    const std::string& name_;
};

}  // namespace

DecoderConfig parse_decoder_config(std::string_view text, const std::string& name) {
    const Json json = parse_json(text, name);
    if (!json.is_object()) throw BadFile(one_line(name) + ": is not a JSON object");
    const Reader reader(json, name);

    const Json& architectures = reader.at("architectures");
    if (!architectures.is_array() || architectures.size() != 1 || !architectures[0].is_string()) {
        reader.bad("architectures", fmt::format("is {}; it must be a list of one name", Reader::shown(architectures)));
    }
    DecoderConfig config;
    config.architecture = architectures[0].get<std::string>();
    std::string known;
    for (const Family& family : kFamilies) {
        if (config.architecture == family.architecture) config.names = family.names;
        known += (known.empty() ? "" : ", ") + std::string(family.architecture);
    }
    if (config.names == nullptr) {
        reader.unsupported("architectures", fmt::format("{} is not handled; this version knows {}",
                                                        Reader::shown(architectures[0]), known));
    }
    reader.refuse_unhandled();

    config.vocab_size = reader.size("vocab_size");
    config.hidden_size = reader.size("hidden_size");
    config.intermediate_size = reader.size("intermediate_size");
    config.layers = reader.size("num_hidden_layers");
    config.heads = reader.size("num_attention_heads");
    config.kv_heads = reader.size("num_key_value_heads", config.heads);
    if (config.heads % config.kv_heads != 0) {
        reader.bad("num_key_value_heads",
                   fmt::format("is {}; it must divide the {} heads", config.kv_heads, config.heads));
    }
    if (reader.find("head_dim") == nullptr && config.hidden_size % config.heads != 0) {
        reader.bad("num_attention_heads", fmt::format("is {}; without head_dim it must divide hidden_size {}",
                                                      config.heads, config.hidden_size));
    }
    config.head_dim =
        reader.size("head_dim", config.hidden_size / config.heads > 0 ? config.hidden_size / config.heads : 1);
    if (config.head_dim % 2 != 0) {
        reader.bad("head_dim", fmt::format("is {}; it must be even for rotary embeddings", config.head_dim));
    }
    constexpr std::int64_t kMaxHeadDim = std::int64_t{1} << 20;  // as in a cache
    if (config.head_dim > kMaxHeadDim) {
        reader.bad("head_dim", fmt::format("is {}; it must be at most {}", config.head_dim, kMaxHeadDim));
    }
    constexpr std::int64_t kMaxWidth = std::int64_t{1} << 30;
    if (config.heads * config.head_dim > kMaxWidth) {
        reader.bad("head_dim",
                   fmt::format("is {}; {} heads of it are more than 2^30 wide", config.head_dim, config.heads));
    }
    config.max_positions = reader.size("max_position_embeddings", 2048);
    config.norm_epsilon = 1e-6;
    if (const Json* epsilon = reader.find("rms_norm_eps")) {
        config.norm_epsilon = reader.positive("rms_norm_eps", *epsilon);
        if (config.norm_epsilon < 1e-30 || config.norm_epsilon > 1e30) {  // must be a normal float32
            reader.bad("rms_norm_eps", fmt::format("is {}; it must be from 1e-30 to 1e30", Reader::shown(*epsilon)));
        }
    }
    config.rope_theta = reader.rope_theta();
    config.attention_bias = reader.flag("attention_bias", false);
    config.mlp_bias = reader.flag("mlp_bias", false);
    config.tied_embeddings = reader.flag("tie_word_embeddings", false);
    for (const char* key : {"torch_dtype", "dtype"}) {
        const Json* type = reader.find(key);
        if (type == nullptr) continue;
        if (*type == "float16") config.stored_type = WeightType::f16;
        if (*type == "bfloat16") config.stored_type = WeightType::bf16;
        break;  // the first that is there decides, as in tools/shapes
    }
    if (const Json* act = reader.find("hidden_act"); act != nullptr && *act != "silu" && *act != "swish") {
        reader.unsupported("hidden_act", fmt::format("is {}; this version handles only 'silu'", Reader::shown(*act)));
    }
    if (const Json* eos = reader.find("eos_token_id")) {
        for (const Json& id : eos->is_array() ? *eos : Json::array({*eos})) {
            config.eos_ids.push_back(reader.token("eos_token_id", id, config.vocab_size));
        }
    }
    if (const Json* bos = reader.find("bos_token_id"))
        config.bos_id = reader.token("bos_token_id", *bos, config.vocab_size);
    return config;
}

}  // namespace headlong
