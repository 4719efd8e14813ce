// headlong make-model: a folder with a model of random weights, of any shape and family that the engine runs, for
// benchmarks that need no download. Its text is noise.
#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <headlong/error.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/carver.hpp"
#include "engine/decoder.hpp"
#include "engine/json_node.hpp"
#include "engine/mapped_file.hpp"
#include "engine/output_file.hpp"
#include "kernels/half.hpp"
#include "tools/commands.hpp"
#include "tools/measure/lists.hpp"
#include "tools/shapes/model_shape.hpp"

namespace headlong::tools {
namespace {

using Json = nlohmann::ordered_json;

/// A Llama of a preset's sizes: only sizes matter for time.
Json config_of(const ModelShape& shape) {
    if (shape.hidden_size == 0 || shape.intermediate_size == 0 || shape.vocab_size == 0 ||
        shape.value_dim != shape.head_dim) {
        throw Unsupported(
            fmt::format("{}: is no dense decoder, or not all of its sizes are known; give a config.json", shape.name));
    }
    return {{"architectures", {"LlamaForCausalLM"}},
            {"model_type", "llama"},
            {"vocab_size", shape.vocab_size},
            {"hidden_size", shape.hidden_size},
            {"intermediate_size", shape.intermediate_size},
            {"num_hidden_layers", shape.layers},
            {"num_attention_heads", shape.heads},
            {"num_key_value_heads", shape.kv_heads},
            {"head_dim", shape.head_dim},
            {"max_position_embeddings", shape.max_positions},
            {"rms_norm_eps", 1e-5},
            {"rope_theta", 500000.0},
            {"tie_word_embeddings", true},
            {"bos_token_id", 0},
            {"eos_token_id", 1}};
}

Json read_config(const std::string& config) {
    std::error_code ignored;
    if (!std::filesystem::exists(config, ignored)) return config_of(model_preset(config));
    const std::string path = std::filesystem::is_directory(config, ignored) ? config + "/config.json" : config;
    const std::string text = read_text(path, kMostConfigBytes);
    static_cast<void>(parse_json(text, path));  // refuses what is hostile
    return Json::parse(text);
}

/// KEY=VALUE, where VALUE is JSON, or else a word.
void set_key(Json& config, const std::string& setting) {
    const std::size_t equals = setting.find('=');
    if (equals == std::string::npos || equals == 0) {
        throw InvalidArgument(fmt::format("--set: '{}' is not KEY=VALUE", one_line(setting)));
    }
    const std::string value = setting.substr(equals + 1);
    Json parsed = Json::parse(value, nullptr, false);
    config[setting.substr(0, equals)] = parsed.is_discarded() ? Json(value) : std::move(parsed);
}

/// A vocabulary of the 256 bytes alone, as byte-level tokenizers write them.
Json byte_tokenizer(std::int64_t vocab_size) {
    Json vocab = Json::object();
    int id = 0;
    char32_t next = 256;
    const auto add = [&](char32_t c) {
        if (id >= vocab_size) return;
        std::string text;
        if (c < 0x80) {
            text += static_cast<char>(c);
        } else {
            text += static_cast<char>(0xC0U | (c >> 6U));
            text += static_cast<char>(0x80U | (c & 0x3FU));
        }
        vocab[text] = id++;
    };
    for (char32_t byte = 0; byte < 256; ++byte) {
        const bool printable =
            (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
        add(printable ? byte : next++);
    }
    const Json byte_level = {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
    return {{"version", "1.0"},
            {"added_tokens", Json::array()},
            {"normalizer", nullptr},
            {"pre_tokenizer", byte_level},
            {"post_processor", nullptr},
            {"decoder", byte_level},
            {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}};
}

/// Even numbers of a standard deviation, four to a hash (Steele et al. 2014, "Fast Splittable Pseudorandom Number
/// Generators").
class Noise {
  public:
    explicit Noise(std::uint64_t seed) noexcept : state_(seed) {}
    float next(float deviation) noexcept {
        if (left_ == 0) {
            state_ += 0x9E3779B97F4A7C15U;
            bits_ = (state_ ^ (state_ >> 30U)) * 0xBF58476D1CE4E5B9U;
            bits_ = (bits_ ^ (bits_ >> 27U)) * 0x94D049BB133111EBU;
            bits_ ^= bits_ >> 31U;
            left_ = 4;
        }
        const auto word = static_cast<float>(static_cast<std::int16_t>(bits_ & 0xFFFFU));
        bits_ >>= 16U;
        --left_;
        constexpr float kSqrt3 = 1.7320508F;
        return word * (kSqrt3 / 32768.0F) * deviation;
    }

  private:
    std::uint64_t state_;
    std::uint64_t bits_ = 0;
    int left_ = 0;
};

std::size_t elements_of(const TensorShape& tensor) {
    std::size_t count = 1;
    for (const std::int64_t extent : tensor.shape) count = saturating_product(count, static_cast<std::size_t>(extent));
    return count;
}

/// What a tensor's elements are near, and how far off.
struct Spread {
    float mean = 0.0F;
    float deviation = 0.0F;
};

Spread spread_of(const TensorShape& tensor, const DecoderConfig& config) {
    if (tensor.shape.size() == 1) {
        const bool gain = tensor.name.ends_with(".weight") && config.norm != Norm::rms_plus_one;
        return {gain ? 1.0F : 0.0F, 0.05F};
    }
    const bool inputs_first = tensor.shape.size() == 3 || config.inputs_first;
    const std::int64_t inputs = inputs_first ? tensor.shape[tensor.shape.size() - 2] : tensor.shape.back();
    return {0.0F, 1.0F / std::sqrt(static_cast<float>(inputs))};
}

void write_weights(const std::string& path, const DecoderConfig& config, WeightType type, std::uint64_t seed) {
    const std::vector<TensorShape> tensors = Decoder::tensors(config);
    const std::size_t element = type == WeightType::f32 ? 4 : 2;
    Json header = Json::object();
    std::size_t offset = 0;
    for (const TensorShape& tensor : tensors) {
        const std::size_t end = offset + elements_of(tensor) * element;
        header[tensor.name] = {{"dtype", type == WeightType::f32    ? "F32"
                                         : type == WeightType::bf16 ? "BF16"
                                                                    : "F16"},
                               {"shape", tensor.shape},
                               {"data_offsets", {offset, end}}};
        offset = end;
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const std::uint64_t length = text.size();

    OutputFile file(path);
    file.write(std::as_bytes(std::span(&length, 1)));
    file.write(std::as_bytes(std::span(text)));
    constexpr std::size_t kPiece = std::size_t{1} << 20;
    std::vector<std::byte> piece(kPiece * element);
    std::uint64_t stream = seed;
    for (const TensorShape& tensor : tensors) {
        Noise noise(stream += 0xD1B54A32D192ED03U);
        const Spread spread = spread_of(tensor, config);
        for (std::size_t left = elements_of(tensor); left > 0;) {
            const std::size_t count = std::min(left, kPiece);
            for (std::size_t i = 0; i < count; ++i) {
                const float x = spread.mean + noise.next(spread.deviation);
                if (type == WeightType::f32) {
                    std::memcpy(piece.data() + i * 4, &x, 4);
                } else {
                    const std::uint16_t half =
                        type == WeightType::bf16 ? kernels::narrow_bf16(x) : kernels::narrow_f16(x);
                    std::memcpy(piece.data() + i * 2, &half, 2);
                }
            }
            file.write(std::span(piece).first(count * element));
            left -= count;
        }
    }
    file.commit();
}

/// Refuses what the disk cannot hold, before its tensors are even listed.
void check_space(const std::string& folder, const DecoderConfig& config, WeightType type) {
    std::error_code error;
    const std::filesystem::space_info space = std::filesystem::space(folder, error);
    const std::size_t needed = Decoder::weight_bytes(config, type);
    if (!error && needed > space.available) {
        throw InvalidArgument(
            fmt::format("{}: the model needs {} bytes, {} are free there", one_line(folder), needed, space.available));
    }
}

void write_text(const std::string& path, const std::string& text) {
    OutputFile file(path);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

}  // namespace

int run_make_model(const MakeModelArguments& arguments) {
    const WeightType type = parse_weight_type("--weights", arguments.weights);
    if (type == WeightType::int8 || type == WeightType::int4) {
        throw InvalidArgument(
            fmt::format("--weights: is {}; a model's file holds f32, f16 or bf16, and is quantised "
                        "when it is loaded",
                        to_string(type)));
    }
    Json json = read_config(arguments.config);
    for (const std::string& setting : arguments.settings) set_key(json, setting);
    json.erase("dtype");
    json["torch_dtype"] = type == WeightType::f32 ? "float32" : type == WeightType::bf16 ? "bfloat16" : "float16";
    const std::string text = json.dump(2);
    const DecoderConfig config = parse_decoder_config(text, "config.json");

    std::error_code error;
    std::filesystem::create_directories(arguments.folder, error);
    for (const char* name : {"config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"}) {
        const std::string path = arguments.folder + "/" + name;
        if (std::filesystem::exists(path, error)) {
            throw InvalidArgument(fmt::format("{}: is there already; a model is never written over", one_line(path)));
        }
    }
    const std::string weights = arguments.folder + "/model.safetensors";
    check_space(arguments.folder, config, type);
    write_text(arguments.folder + "/config.json", text + "\n");
    write_text(arguments.folder + "/tokenizer.json", byte_tokenizer(config.vocab_size).dump() + "\n");
    write_weights(weights, config, type, arguments.seed);
    std::size_t elements = 0;
    for (const TensorShape& tensor : Decoder::tensors(config)) elements += elements_of(tensor);
    fmt::print("{}: {}, {} layers, {} weights in {}, {} bytes\n", one_line(arguments.folder),
               one_line(config.architecture), config.layers, elements, to_string(type),
               std::filesystem::file_size(weights, error));
    return done;
}

}  // namespace headlong::tools
