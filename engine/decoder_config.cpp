#include "engine/decoder_config.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include <headlong/error.hpp>

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

// A key that holds one of these words changes what the model computes. Unless it is handled here, or says "off", the
// model is refused rather than computed wrongly; all other keys are ignored.
constexpr std::array kWordsThatMatter{
    "rope",     "rotary", "scal",       "window",          "softcap", "cap",  "bias",   "norm",        "multiplier",
    "quant",    "act_fn", "hidden_act", "activation",      "alibi",   "sink", "expert", "layer_types", "pattern",
    "parallel", "qk",     "partial",    "attention_chunk", "no_rope"};
const std::set<std::string, std::less<>> kHandled{"rope_theta",     "rope_scaling", "rope_parameters", "rms_norm_eps",
                                                  "attention_bias", "mlp_bias",     "hidden_act"};
// Words inside of them are about something else: training, or how a checkpoint was stored.
const std::set<std::string, std::less<>> kHarmless{"initializer_range", "pretraining_tp", "max_window_layers"};

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
        for (const auto& [key, value] : json_.items()) {
            if (kHandled.contains(key) || kHarmless.contains(key)) continue;
            bool matters = false;
            for (const char* word : kWordsThatMatter) matters = matters || key.find(word) != std::string::npos;
            const bool off = value.is_null() || value == Json(false) || (value.is_array() && value.empty());
            if (matters && !off) unsupported(key, fmt::format("is {}; this version does not handle it", shown(value)));
        }
    }

    /// rope_theta, or the newer rope_parameters; any scaling is refused.
    double rope_theta() const {
        constexpr double kUsual = 10000.0;  // what Llama's own configuration defaults to
        double theta = kUsual;
        if (const Json* value = find("rope_theta")) theta = positive("rope_theta", *value);
        for (const char* key : {"rope_scaling", "rope_parameters"}) {
            const Json* value = find(key);
            if (value == nullptr) continue;
            if (!value->is_object()) bad(key, fmt::format("is {}; it must be an object", shown(*value)));
            for (const auto& [inner, setting] : value->items()) {
                const std::string path = std::string(key) + "." + inner;
                if (inner == "rope_theta") {
                    theta = positive(path, setting);
                } else if (inner != "rope_type" && inner != "type") {
                    unsupported(path, fmt::format("is {}; this version does not handle it", shown(setting)));
                } else if (setting != "default") {
                    unsupported(path, fmt::format("is {}; this version handles only 'default'", shown(setting)));
                }
            }
        }
        return theta;
    }

  private:
    const Json& json_;
    const std::string& name_;
};

Json parse_json(std::string_view text, const std::string& name) {
    constexpr int kDeepest = 16;  // configurations nest three deep
    try {
        return Json::parse(text, [](int depth, Json::parse_event_t, const Json&) {
            if (depth > kDeepest) throw BadFile("nests too deep");
            return true;
        });
    } catch (const Json::exception& error) {
        throw BadFile(fmt::format("{}: is not valid JSON: {}", one_line(name), one_line(error.what())));
    } catch (const BadFile&) {
        throw BadFile(fmt::format("{}: is nested more than {} deep", one_line(name), kDeepest));
    }
}

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
    constexpr std::int64_t kMaxWidth = std::int64_t{1} << 30;
    if (config.heads * config.head_dim > kMaxWidth) {
        reader.bad("head_dim",
                   fmt::format("is {}; {} heads of it are more than 2^30 wide", config.head_dim, config.heads));
    }
    config.max_positions = reader.size("max_position_embeddings", 2048);
    config.norm_epsilon =
        reader.find("rms_norm_eps") != nullptr ? reader.positive("rms_norm_eps", *reader.find("rms_norm_eps")) : 1e-6;
    config.rope_theta = reader.rope_theta();
    config.attention_bias = reader.flag("attention_bias", false);
    config.mlp_bias = reader.flag("mlp_bias", false);
    config.tied_embeddings = reader.flag("tie_word_embeddings", false);
    if (const Json* act = reader.find("hidden_act"); act != nullptr && *act != "silu") {
        reader.unsupported("hidden_act", fmt::format("is {}; this version handles only 'silu'", Reader::shown(*act)));
    }
    if (const Json* eos = reader.find("eos_token_id")) {
        for (const Json& id : eos->is_array() ? *eos : Json::array({*eos})) {
            config.eos_ids.push_back(reader.token("eos_token_id", id, config.vocab_size));
        }
    }
    return config;
}

}  // namespace headlong
