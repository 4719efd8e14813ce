// The families of decoders: golden models layer by layer on every instruction set, keys that must change what is
// computed, what a missing key means, and keys that are refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <headlong/error.hpp>

#include "engine/decoder.hpp"
#include "engine/decoder_families.hpp"
#include "engine/mapped_file.hpp"
#include "engine/reference/decoder.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/shared_data.hpp"
#include "tests/support/write_safetensors.hpp"

namespace headlong::test {
namespace {

using nlohmann::json;

const std::vector<std::string> kModels{
    "gemma2",           "gemma3",         "gpt2",    "gpt2_prefix",   "gptoss",  "granite",       "llama3_rope",
    "llama_plain",      "llama_v5_bias",  "mixtral", "neox_parallel", "olmo2",   "phi3",          "phi3_partial_long",
    "mistral_nowindow", "mistral_window", "qwen3",   "qwen3moe",      "smollm3", "qwen2_nowindow"};

/// A folder of the shared data, and what its golden files say.
struct Golden {
    std::filesystem::path folder;
    json config;
    std::vector<std::int32_t> tokens;
    std::vector<float> logits;
    std::vector<std::int64_t> greedy;
    std::vector<double> gaps;  ///< between the two largest logits before each greedy id

    explicit Golden(const std::filesystem::path& from)
        : folder(from), config(json::parse(read_text((from / "config.json").string(), kMostConfigBytes))) {
        const SafetensorsFile golden((from / "golden.safetensors").string());
        for (const std::int64_t id : to_int64s(golden.at("tokens"))) tokens.push_back(static_cast<std::int32_t>(id));
        logits = to_floats(golden.at("logits"));
        greedy = to_int64s(golden.at("greedy"));
        std::string text = golden.metadata().at("greedy_gaps");
        std::ranges::replace(text, ',', ' ');
        std::istringstream numbers(text);
        for (double gap = 0.0; numbers >> gap;) gaps.push_back(gap);
    }
    std::size_t vocab() const { return logits.size() / tokens.size(); }
    DecoderConfig parsed(const std::function<void(json&)>& change = {}) const {
        json changed = config;
        if (change) change(changed);
        return parse_decoder_config(changed.dump(), "config.json");
    }
    std::unique_ptr<Decoder> decoder(Context& context, const DecoderConfig& of,
                                     std::optional<WeightType> type = {}) const {
        return std::make_unique<Decoder>(context.impl(), context.memory(), of,
                                         std::make_shared<const WeightFiles>(WeightFiles::open(folder.string())), type);
    }
};

double largest_difference(const std::vector<float>& a, const float* b) {
    double most = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        most = std::max(most, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    }
    return most;
}

std::vector<float> logits_of(Context& context, const Decoder& decoder, const std::vector<std::int32_t>& tokens,
                             KvCache& cache, std::size_t chunk, const ForwardHooks& hooks = {}) {
    const auto vocab = static_cast<std::size_t>(decoder.config().vocab_size);
    std::vector<float> logits(tokens.size() * vocab);
    for (std::size_t first = 0; first < tokens.size(); first += chunk) {
        const std::size_t count = std::min(chunk, tokens.size() - first);
        decoder.forward(context, std::span(tokens).subspan(first, count), cache, logits.data() + first * vocab,
                        static_cast<std::int64_t>(count), static_cast<std::int64_t>(vocab), hooks);
    }
    return logits;
}

TEST(FamiliesTest, EveryLayerOfTheGoldenModels) {
    HEADLONG_SHARED_OR_SKIP(families, "models/families");
    for (const std::string& name : kModels) {
        if (emulated() && name != "gemma3" && name != "gptoss") continue;
        SCOPED_TRACE(name);
        const Golden golden(families / name);
        const SafetensorsFile layers((golden.folder / "layers.safetensors").string());
        const DecoderConfig config = golden.parsed();
        HEADLONG_FOR_EACH_ISA(isa) {
            if (left_to_native_tests(isa)) continue;
            const auto context = make_context(isa, 2);
            const auto decoder = golden.decoder(*context, config);
            std::size_t compared = 0;
            KvCache cache(cache_options_of(config));
            const std::vector<float> logits =
                logits_of(*context, *decoder, golden.tokens, cache, golden.tokens.size(),
                          {.observer = [&](std::int64_t layer, std::string_view what, const float* rows, std::int64_t) {
                              if (what != "out" && what != "embedding") return;
                              const std::int64_t index = what == "out" ? layer + 1 : 0;
                              const std::vector<float> want = to_floats(layers.at("x." + std::to_string(index)));
                              double size = 0.0;
                              for (const float x : want) size = std::max(size, std::abs(static_cast<double>(x)));
                              EXPECT_LE(largest_difference(want, rows), 1e-5 * size + 1e-5) << what << " " << layer;
                              ++compared;
                          }});
            EXPECT_EQ(compared, static_cast<std::size_t>(config.layers) + 1);
            EXPECT_LE(largest_difference(logits, golden.logits.data()), 5e-4);
            // windows and experts, too: the same bits token by token, in chunks, on one thread
            for (const std::size_t chunk : {std::size_t{1}, std::size_t{7}}) {
                const auto alone = make_context(isa, 1);
                KvCache other(cache_options_of(config));
                EXPECT_TRUE(same_bits(logits_of(*alone, *decoder, golden.tokens, other, chunk), logits)) << chunk;
            }
        }
    }
}

// Caches of fewer bits move logits. Those of f16 choose the same ids; of int8 the first one that differs must have been
// a close call: its gap is no larger than what the logits of the prompt moved. (Mixtures are left out of int8: a token
// that takes another expert moves by more than any gap.)
TEST(FamiliesTest, GreedyIdsOfSmallerCaches) {
    HEADLONG_SHARED_OR_SKIP(families, "models/families");
    const auto context = make_context(available_isas().back(), 2);
    for (const std::string& name : kModels) {
        const Golden golden(families / name);
        const DecoderConfig config = golden.parsed();
        const auto decoder = golden.decoder(*context, config);
        for (const KvType type : {KvType::f32, KvType::f16, KvType::int8}) {
            if (type == KvType::int8 && config.experts.count > 0) continue;
            SCOPED_TRACE(name + " " + to_string(type));
            KvCache cache(cache_options_of(config, {type, type}));
            const std::vector<float> logits = logits_of(*context, *decoder, golden.tokens, cache, golden.tokens.size());
            const double moved = largest_difference(logits, golden.logits.data());
            EXPECT_LE(moved, type == KvType::f32 ? 5e-4 : type == KvType::f16 ? 0.1 : 1.0);
            std::vector<float> row(logits.end() - static_cast<std::ptrdiff_t>(golden.vocab()), logits.end());
            for (std::size_t i = 0; i < golden.greedy.size(); ++i) {
                const std::vector<std::int32_t> token{
                    static_cast<std::int32_t>(std::ranges::max_element(row) - row.begin())};
                if (token[0] != golden.greedy[i] && type == KvType::int8) {
                    EXPECT_LE(golden.gaps[i], 2.0 * moved) << i;
                    break;
                }
                ASSERT_EQ(token[0], golden.greedy[i]) << i << ", where the gap is " << golden.gaps[i];
                row = logits_of(*context, *decoder, token, cache, 1);
            }
        }
    }
}

// Quantised weights are another arithmetic, and not another model.
TEST(FamiliesTest, EveryFamilyRunsWithEveryTypeOfWeights) {
    HEADLONG_SHARED_OR_SKIP(families, "models/families");
    const auto context = make_context(available_isas().back(), 2);
    for (const std::string& name : kModels) {
        const Golden golden(families / name);
        const DecoderConfig config = golden.parsed();
        double squares = 0.0;
        for (const float x : golden.logits) squares += std::pow(static_cast<double>(x), 2);
        const auto distance = [&](WeightType type) {
            const auto decoder = golden.decoder(*context, config, type);
            EXPECT_EQ(decoder->weight_bytes(), Decoder::weight_bytes(config, type));
            KvCache cache(cache_options_of(config));
            const std::vector<float> logits = logits_of(*context, *decoder, golden.tokens, cache, golden.tokens.size());
            double errors = 0.0;
            for (std::size_t i = 0; i < logits.size(); ++i) {
                errors += std::pow(static_cast<double>(logits[i]) - static_cast<double>(golden.logits[i]), 2);
            }
            return std::sqrt(errors / squares);
        };
        SCOPED_TRACE(name);
        EXPECT_LT(distance(WeightType::f32), 1e-4);
        EXPECT_LT(distance(WeightType::f16), 0.01);
        EXPECT_LT(distance(WeightType::bf16), 0.08);
        const double int8 = distance(WeightType::int8);
        EXPECT_GT(int8, 1e-4);
        EXPECT_LT(int8, 0.25);
        EXPECT_GT(distance(WeightType::int4), int8);
    }
}

struct Change {
    const char* model;
    const char* key;
    json value;  ///< null: the key is taken away
};

// Every key that a family reads is heeded: another value gives other logits.
TEST(FamiliesTest, KeysChangeWhatIsComputed) {
    HEADLONG_SHARED_OR_SKIP(families, "models/families");
    const json llama3 = {{"factor", 4.0},
                         {"high_freq_factor", 4.0},
                         {"low_freq_factor", 1.0},
                         {"original_max_position_embeddings", 64},
                         {"rope_type", "llama3"}};
    const json yarn = {{"beta_fast", 8.0},    {"beta_slow", 1.0},
                       {"factor", 8.0},       {"original_max_position_embeddings", 64},
                       {"rope_type", "yarn"}, {"truncate", true}};
    const std::vector<Change> changes{
        {"llama_plain", "rope_theta", 9000.0},
        {"llama_plain", "rms_norm_eps", 1e-2},
        {"llama_plain", "hidden_act", "gelu"},
        {"llama_plain", "rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
        {"llama3_rope", "rope_scaling", llama3},
        {"llama3_rope", "rope_scaling", nullptr},
        {"mistral_window", "sliding_window", 8},
        {"mistral_window", "sliding_window", 6},
        {"qwen2_nowindow", "use_sliding_window", true},
        {"qwen3", "rope_theta", 9000},
        {"qwen3moe", "norm_topk_prob", false},
        {"qwen3moe", "num_experts_per_tok", 3},
        {"mixtral", "num_experts_per_tok", 1},
        {"smollm3", "no_rope_layer_interval", 3},
        {"smollm3", "no_rope_layers", {1, 1, 1, 1, 1}},
        {"smollm3", "no_rope_layers", {0, 0, 0, 1, 0}},
        {"gptoss", "rope_scaling", yarn},
        {"gptoss", "swiglu_limit", 2.0},
        {"gptoss", "sliding_window", 7},
        {"gptoss", "layer_types", {"full_attention", "sliding_attention", "full_attention", "sliding_attention"}},
        {"phi3", "sliding_window", 20},
        {"phi3_partial_long", "max_position_embeddings", 200},  // of which the attention factor is made
        {"olmo2", "rms_norm_eps", 1e-3},
        {"granite", "embedding_multiplier", 5.0},
        {"granite", "attention_multiplier", nullptr},
        {"granite", "residual_multiplier", 1.0},
        {"granite", "logits_scaling", 1.0},
        {"gemma2", "attn_logit_softcapping", nullptr},
        {"gemma2", "final_logit_softcapping", 30.0},
        {"gemma2", "query_pre_attn_scalar", 24},
        {"gemma2", "sliding_window", 5},
        {"gemma2", "hidden_activation", "gelu"},
        {"gemma2", "layer_types", {"full_attention", "sliding_attention", "full_attention", "sliding_attention"}},
        {"gemma3", "sliding_window_pattern", 5},
        {"gemma3", "rope_local_base_freq", 20000.0},
        {"gemma3", "rope_scaling", nullptr},
        {"gemma3", "final_logit_softcapping", 5.0},
        {"gpt2", "layer_norm_epsilon", 1e-2},
        {"gpt2", "activation_function", "gelu"},
        {"neox_parallel", "use_parallel_residual", false},
        {"neox_parallel", "rotary_pct", 0.5},
        {"neox_parallel", "rotary_emb_base", 5000},
        {"neox_parallel", "hidden_act", "gelu_new"},
    };
    const auto context = make_context(available_isas().back(), 2);
    std::map<std::string, Golden> read;
    for (const Change& change : changes) {
        SCOPED_TRACE(std::string(change.model) + ": " + change.key + " = " + change.value.dump());
        const Golden& golden = read.try_emplace(change.model, families / change.model).first->second;
        const DecoderConfig config = golden.parsed([&](json& c) {
            if (change.value.is_null()) {
                c.erase(change.key);
            } else {
                c[change.key] = change.value;
            }
        });
        const auto decoder = golden.decoder(*context, config);
        KvCache cache(cache_options_of(config));
        const std::vector<float> logits = logits_of(*context, *decoder, golden.tokens, cache, golden.tokens.size());
        EXPECT_GT(largest_difference(logits, golden.logits.data()), 1e-3);
    }
}

// The same settings, as newer and older files write them, give the same bits.
TEST(FamiliesTest, OldAndNewFormsOfKeys) {
    HEADLONG_SHARED_OR_SKIP(families, "models/families");
    struct Form {
        const char* model;
        std::function<void(json&)> change;
    };
    const auto erase_into = [](json& c, const char* key) {
        const json value = c[key];
        c.erase(key);
        return value;
    };
    const std::vector<Form> forms{
        {"llama3_rope",
         [&](json& c) {
             c["rope_parameters"] = erase_into(c, "rope_scaling");
             c["rope_parameters"]["rope_theta"] = erase_into(c, "rope_theta");
         }},
        {"llama_plain",
         [](json& c) {
             c["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 10000.0}};
         }},
        {"llama_plain", [](json& c) { c.erase("rope_theta"); }},
        {"llama_plain", [](json& c) { c["head_dim"] = nullptr; }},
        {"qwen3",
         [](json& c) {
             c["layer_types"] = {"full_attention", "full_attention", "full_attention"};
         }},
        {"gemma2",
         [](json& c) {
             c["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention", "full_attention"};
             c["hidden_act"] = "silu";  // Gemma's key is another one
         }},
        {"gemma3",
         [](json& c) {
             c.erase("sliding_window_pattern");
             json types(7, "sliding_attention");
             types[5] = "full_attention";
             c["layer_types"] = types;
         }},
        {"gemma3", [](json& c) { c.erase("sliding_window_pattern"); }},
        {"gemma3",
         [](json& c) {
             c.erase("rope_scaling");
             c.erase("rope_theta");
             c.erase("rope_local_base_freq");
             c["rope_parameters"] = {
                 {"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
                 {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}};
         }},
        {"gemma3",
         [](json& c) {
             json inner = c;
             inner.erase("architectures");
             c = {{"architectures", {"Gemma3ForConditionalGeneration"}},
                  {"model_type", "gemma3"},
                  {"text_config", inner},
                  {"vision_config", {{"hidden_size", 8}}}};
         }},
        {"phi3_partial_long", [](json& c) { c["rope_scaling"]["type"] = "su"; }},
        {"smollm3",
         [](json& c) {
             c["no_rope_layers"] = {1, 1, 1, 0, 1};
         }},
        {"gptoss", [](json& c) { c.erase("num_experts_per_tok"); }},
        {"gptoss", [](json& c) { c.erase("layer_types"); }},
        {"qwen3moe", [](json& c) { c["mlp_only_layers"] = nullptr; }},
        {"gpt2_prefix", [](json& c) { c.erase("tie_word_embeddings"); }},
        {"neox_parallel",
         [](json& c) {
             c["partial_rotary_factor"] = 0.25;
             c["rope_theta"] = 10000;
         }},
        {"qwen3moe", [&](json& c) { c["num_local_experts"] = erase_into(c, "num_experts"); }},
        {"neox_parallel", [](json& c) { c.erase("use_parallel_residual"); }},
        {"granite",
         [](json& c) {
             c["rope_scaling"] = {{"rope_type", "default"}};
         }},
    };
    const auto context = make_context(available_isas().back(), 2);
    for (std::size_t i = 0; i < forms.size(); ++i) {
        SCOPED_TRACE(std::string(forms[i].model) + ", form " + std::to_string(i));
        const Golden golden(families / forms[i].model);
        const auto logits = [&](const DecoderConfig& config) {
            const auto decoder = golden.decoder(*context, config);
            KvCache cache(cache_options_of(config));
            return logits_of(*context, *decoder, golden.tokens, cache, golden.tokens.size());
        };
        EXPECT_TRUE(same_bits(logits(golden.parsed(forms[i].change)), logits(golden.parsed())));
    }
}

// A LongRoPE model turns short texts by its short factors: those of a model that has them as long ones.
TEST(FamiliesTest, TheCacheOfAShortTextTurnsByShortFactors) {
    HEADLONG_SHARED_OR_SKIP(families, "models/families");
    const auto context = make_context(available_isas().back(), 2);
    const Golden golden(families / "phi3_partial_long");
    const std::vector<std::int32_t> tokens(golden.tokens.begin(), golden.tokens.begin() + 30);
    const auto logits = [&](const DecoderConfig& config, std::int64_t capacity) {
        const auto decoder = golden.decoder(*context, config);
        KvCache cache(cache_options_of(config, {}, capacity));
        return logits_of(*context, *decoder, tokens, cache, tokens.size());
    };
    const DecoderConfig swapped =
        golden.parsed([](json& c) { std::swap(c["rope_scaling"]["long_factor"], c["rope_scaling"]["short_factor"]); });
    const std::vector<float> by_short = logits(golden.parsed(), 32);
    EXPECT_TRUE(same_bits(by_short, logits(swapped, 33)));
    EXPECT_TRUE(same_bits(by_short, logits(swapped, 0)));
    EXPECT_TRUE(same_bits(logits(golden.parsed(), 33), logits(swapped, 32)));
    EXPECT_FALSE(same_bits(by_short, logits(golden.parsed(), 33)));
}

// Where every expert is used, the softmax over those used is that over all.
TEST(FamiliesTest, WeightsOfAllExpertsNeedNoNormalising) {
    HEADLONG_SHARED_OR_SKIP(families, "models/families");
    const auto context = make_context(available_isas().back(), 2);
    const Golden golden(families / "qwen3moe");
    const auto logits = [&](bool normalised) {
        const DecoderConfig config = golden.parsed([&](json& c) {
            c["num_experts_per_tok"] = 6;
            c["norm_topk_prob"] = normalised;
        });
        const auto decoder = golden.decoder(*context, config);
        KvCache cache(cache_options_of(config));
        return logits_of(*context, *decoder, golden.tokens, cache, golden.tokens.size());
    };
    EXPECT_LE(largest_difference(logits(true), logits(false).data()), 1e-4);
}

// A router that is no number chooses experts all the same, each once, and what it makes of a token is no number.
TEST(FamiliesTest, RoutersThatAreNoNumbers) {
    HEADLONG_SHARED_OR_SKIP(families, "models/families");
    const auto context = make_context(available_isas().back(), 2);
    const Golden golden(families / "mixtral");
    const SafetensorsFile file((golden.folder / "model.safetensors").string());
    std::vector<TensorToWrite> tensors;
    for (const FileTensor& tensor : file.tensors()) {
        std::vector<float> values = to_floats(tensor);
        if (tensor.name == "model.layers.1.block_sparse_moe.gate.weight") {
            for (std::size_t i = 0; i < values.size(); ++i) {
                if (i / 48 != 2)
                    values[i] =
                        i / 48 == 0 ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
            }
        }
        tensors.push_back(tensor_to_write(tensor.name, "F32", tensor.shape, values));
    }
    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() / ("headlong-router-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
    write_safetensors((folder / "model.safetensors").string(), tensors);
    const DecoderConfig config = golden.parsed();
    const Decoder decoder(context->impl(), context->memory(), config,
                          std::make_shared<const WeightFiles>(WeightFiles::open(folder.string())));
    std::filesystem::remove_all(folder);
    KvCache cache(cache_options_of(config));
    const std::vector<float> logits = logits_of(*context, decoder, golden.tokens, cache, golden.tokens.size());
    for (const float x : logits) ASSERT_TRUE(std::isnan(x));
}

json small(const char* architecture, const json& more = json::object()) {
    json config = {{"architectures", {architecture}},
                   {"vocab_size", 64},
                   {"hidden_size", 64},
                   {"intermediate_size", 64},
                   {"num_hidden_layers", 4},
                   {"num_attention_heads", 32},
                   {"n_embd", 64},
                   {"n_layer", 4},
                   {"n_head", 32}};
    config.update(more);
    return config;
}

DecoderConfig parsed(const json& config) { return parse_decoder_config(config.dump(), "config.json"); }

/// A model of random weights in the temporary folder, removed at the end.
class RandomModel {
  public:
    RandomModel(const DecoderConfig& config, std::uint64_t seed) {
        folder_ = std::filesystem::temp_directory_path() / ("headlong-random-model-" + std::to_string(::getpid()));
        std::filesystem::create_directories(folder_);
        Random random(seed);
        std::vector<TensorToWrite> tensors;
        for (const TensorShape& tensor : Decoder::tensors(config)) {
            std::size_t count = 1;
            for (const std::int64_t extent : tensor.shape) count *= static_cast<std::size_t>(extent);
            const bool gain = tensor.shape.size() == 1 && tensor.name.ends_with(".weight");
            const float mean = gain && config.norm != Norm::rms_plus_one ? 1.0F : 0.0F;
            const float deviation =
                tensor.shape.size() == 1 ? 0.3F : 1.5F / std::sqrt(static_cast<float>(config.hidden_size));
            std::vector<float> values(count);
            for (float& x : values) x = mean + deviation * random.normal_f32();
            tensors.push_back(tensor_to_write(tensor.name, "F32", tensor.shape, values));
        }
        write_safetensors((folder_ / "model.safetensors").string(), tensors);
        files = std::make_shared<const WeightFiles>(WeightFiles::open(folder_.string()));
    }
    ~RandomModel() {
        files.reset();
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }
    RandomModel(const RandomModel&) = delete;
    RandomModel& operator=(const RandomModel&) = delete;

    std::shared_ptr<const WeightFiles> files;

  private:
    std::filesystem::path folder_;
};

// Against the decoder in double precision, which has its own idea of what a description means: what no golden model
// has, and every family where there is no shared data.
TEST(FamiliesTest, AgreeWithDoublePrecision) {
    struct Model {
        const char* architecture;
        json more;
    };
    const json sizes = {{"vocab_size", 50},         {"hidden_size", 40},
                        {"intermediate_size", 36},  {"num_hidden_layers", 4},
                        {"num_attention_heads", 4}, {"num_key_value_heads", 2},
                        {"head_dim", 12},           {"max_position_embeddings", 64}};
    const json plain = {{"vocab_size", 50},       {"hidden_size", 48},        {"intermediate_size", 36},
                        {"num_hidden_layers", 3}, {"num_attention_heads", 4}, {"max_position_embeddings", 64}};
    const auto with = [](json config, const json& more) {
        config.update(more);
        return config;
    };
    const json yarn = {{"rope_type", "yarn"},
                       {"factor", 4.0},
                       {"beta_fast", 8.0},
                       {"original_max_position_embeddings", 16},
                       {"truncate", false}};
    const json longrope = {
        {"type", "longrope"}, {"long_factor", {1.0, 1.5, 2.0, 3.0}}, {"short_factor", {1.0, 1.0, 1.1, 1.3}}};
    const json experts = {{"num_local_experts", 5}, {"num_experts_per_tok", 2}};
    const json qwen_experts = {{"num_experts", 5}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", 20}};
    const std::vector<Model> models{
        {"LlamaForCausalLM", with(sizes, {{"attention_bias", true}, {"mlp_bias", true}})},
        {"LlamaForCausalLM",
         with(sizes, {{"rope_scaling", {{"type", "linear"}, {"factor", 3.0}}}, {"hidden_act", "gelu"}})},
        {"MistralForCausalLM", with(sizes, {{"sliding_window", 5}})},
        {"MixtralForCausalLM", with(with(sizes, experts), {{"sliding_window", 4}})},
        {"Qwen2ForCausalLM",
         with(sizes, {{"use_sliding_window", true}, {"sliding_window", 5}, {"max_window_layers", 2}})},
        {"Qwen3ForCausalLM", with(sizes, {{"attention_bias", true}})},
        {"Qwen3MoeForCausalLM", with(with(sizes, qwen_experts), {{"norm_topk_prob", false}})},
        {"Qwen3MoeForCausalLM",
         with(with(sizes, qwen_experts), {{"norm_topk_prob", true}, {"decoder_sparse_step", 2}})},
        {"Qwen3MoeForCausalLM", with(with(sizes, qwen_experts), {{"mlp_only_layers", {0, 3}}, {"rope_scaling", yarn}})},
        {"SmolLM3ForCausalLM",
         with(sizes, {{"use_sliding_window", true}, {"sliding_window", 5}, {"no_rope_layers", {0, 1, 1, 0}}})},
        {"GptOssForCausalLM",
         with(with(sizes, experts), {{"rope_scaling", yarn}, {"sliding_window", 3}, {"swiglu_limit", 1.0}})},
        {"GptOssForCausalLM", with(with(sizes, experts), {{"rope_scaling", yarn}, {"attention_bias", false}})},
        {"Phi3ForCausalLM",
         with(plain, {{"num_key_value_heads", 2}, {"partial_rotary_factor", 0.5}, {"sliding_window", 7}})},
        {"Phi3ForCausalLM",
         with(sizes, {{"head_dim", 8}, {"original_max_position_embeddings", 16}, {"rope_scaling", longrope}})},
        {"Olmo2ForCausalLM", with(sizes, {{"rope_theta", 500.0}})},
        {"GraniteForCausalLM", with(sizes, {{"embedding_multiplier", 3.0},
                                            {"attention_multiplier", 0.2},
                                            {"residual_multiplier", 0.5},
                                            {"logits_scaling", 2.0}})},
        {"Gemma2ForCausalLM",
         with(sizes, {{"sliding_window", 6}, {"attn_logit_softcapping", 2.0}, {"final_logit_softcapping", 3.0}})},
        {"Gemma3ForCausalLM", with(sizes, {{"sliding_window", 6},
                                           {"sliding_window_pattern", 3},
                                           {"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}}})},
        {"GPT2LMHeadModel", {{"vocab_size", 50}, {"n_embd", 48}, {"n_layer", 2}, {"n_head", 3}, {"n_positions", 64}}},
        {"GPTNeoXForCausalLM",
         with(plain, {{"rotary_pct", 0.5}, {"use_parallel_residual", false}, {"hidden_act", "gelu"}})},
        {"GPTNeoXForCausalLM",
         with(plain, {{"rotary_pct", 0.5}, {"hidden_act", "gelu_new"}, {"attention_bias", false}})},
    };
    std::uint64_t seed = seed_or(7);
    Random random(seed);
    HEADLONG_TRACE_SEED(random);
    std::vector<std::int32_t> tokens(20);
    for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(random.integer(0, 49));
    for (const Model& model : models) {
        json whole = model.more;
        whole["architectures"] = {model.architecture};
        SCOPED_TRACE(whole.dump());
        const DecoderConfig config = parsed(whole);
        const RandomModel weights(config, ++seed);
        for (const std::int64_t capacity : {16, 0}) {  // of which the first is a short text's, where it matters
            if (capacity > 0 && config.short_rotaries.empty()) continue;
            const std::span<const std::int32_t> text = std::span(tokens).first(capacity > 0 ? 16 : tokens.size());
            const std::vector<double> want = reference::decoder_logits(config, *weights.files, text, capacity);
            double squares = 0.0;
            for (const double x : want) squares += x * x;
            const double size = std::sqrt(squares / static_cast<double>(want.size()));
            EXPECT_GT(size, 0.1);
            HEADLONG_FOR_EACH_ISA(isa) {
                if (left_to_native_tests(isa)) continue;
                const auto context = make_context(isa, 2);
                const Decoder decoder(context->impl(), context->memory(), config, weights.files);
                KvCache cache(cache_options_of(config, {}, capacity));
                const std::vector<float> got =
                    logits_of(*context, decoder, {text.begin(), text.end()}, cache, text.size());
                double worst = 0.0;
                for (std::size_t i = 0; i < want.size(); ++i) {
                    worst = std::max(worst, std::abs(static_cast<double>(got[i]) - want[i]));
                }
                EXPECT_LE(worst, 3e-5 * (1.0 + size));
            }
        }
    }
}

// What the configuration classes of transformers say where a key is missing; and null is not missing.
TEST(FamiliesTest, WhatIsMissing) {
    EXPECT_EQ(parsed(small("Qwen3ForCausalLM")).head_dim, 128);
    EXPECT_EQ(parsed(small("Qwen3MoeForCausalLM")).head_dim, 2);
    EXPECT_EQ(parsed(small("Gemma2ForCausalLM")).head_dim, 256);
    EXPECT_EQ(parsed(small("Gemma3ForCausalLM")).head_dim, 256);
    EXPECT_EQ(parsed(small("LlamaForCausalLM")).head_dim, 2);
    EXPECT_EQ(parsed(small("LlamaForCausalLM")).kv_heads, 32);
    EXPECT_EQ(parsed(small("MistralForCausalLM")).kv_heads, 8);
    EXPECT_EQ(parsed(small("MistralForCausalLM", {{"num_key_value_heads", nullptr}})).kv_heads, 32);
    const json yarn = {
        {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 32.0}, {"original_max_position_embeddings", 4096}}}};
    EXPECT_EQ(parsed(small("GptOssForCausalLM", yarn)).head_dim, 64);
    EXPECT_TRUE(parsed(small("GptOssForCausalLM", yarn)).qkv_bias);

    using Windows = std::vector<std::int64_t>;
    EXPECT_EQ(parsed(small("MistralForCausalLM")).windows, Windows(4, 4096));
    EXPECT_EQ(parsed(small("MistralForCausalLM", {{"sliding_window", nullptr}})).windows, Windows());
    EXPECT_EQ(parsed(small("MixtralForCausalLM")).windows, Windows());
    EXPECT_EQ(parsed(small("Phi3ForCausalLM", {{"num_attention_heads", 4}})).windows, Windows());
    EXPECT_EQ(parsed(small("Gemma2ForCausalLM")).windows, (Windows{4096, 0, 4096, 0}));
    EXPECT_EQ(parsed(small("Gemma3ForCausalLM", {{"num_hidden_layers", 7}})).windows,
              (Windows{4096, 4096, 4096, 4096, 4096, 0, 4096}));
    EXPECT_EQ(parsed(small("GptOssForCausalLM", yarn)).windows, (Windows{128, 0, 128, 0}));
    const json switched = {{"use_sliding_window", true}, {"max_window_layers", 3}};
    EXPECT_EQ(parsed(small("Qwen2ForCausalLM")).windows, Windows());
    EXPECT_EQ(parsed(small("Qwen2ForCausalLM", switched)).windows, (Windows{0, 0, 0, 4096}));
    EXPECT_EQ(parsed(small("Qwen3MoeForCausalLM", switched)).windows, Windows(4, 4096));
    EXPECT_EQ(parsed(small("SmolLM3ForCausalLM", {{"use_sliding_window", true}, {"sliding_window", 9}})).windows,
              (Windows{0, 0, 0, 9}));  // those without rotation

    EXPECT_EQ(parsed(small("Gemma2ForCausalLM")).attention_softcap, 50.0F);
    EXPECT_EQ(parsed(small("Gemma2ForCausalLM")).logit_softcap, 30.0F);
    EXPECT_EQ(parsed(small("Gemma2ForCausalLM", {{"attn_logit_softcapping", nullptr}})).attention_softcap, 0.0F);
    EXPECT_EQ(parsed(small("Gemma3ForCausalLM")).logit_softcap, 0.0F);
    EXPECT_FALSE(parsed(small("Qwen3MoeForCausalLM")).experts.normalised);
    EXPECT_EQ(parsed(small("GPT2LMHeadModel")).intermediate_size, 64 * 4);
    const DecoderConfig dense = parsed(small("Qwen3MoeForCausalLM", {{"decoder_sparse_step", 2}}));
    EXPECT_EQ(dense.sparse, (std::vector<bool>{false, true, false, true}));
    EXPECT_EQ(parsed(small("Qwen3MoeForCausalLM", {{"mlp_only_layers", {1}}})).sparse,
              (std::vector<bool>{true, false, true, true}));

    for (const Family& family : decoder_families()) {
        const std::string name = family.architecture;
        if (name == "Gemma3ForConditionalGeneration") continue;
        json config = small(family.architecture, name == "GptOssForCausalLM" ? yarn : json::object());
        if (name == "GPTNeoXForCausalLM" || name == "Phi3ForCausalLM") config["num_attention_heads"] = 4;
        const bool tied = name.starts_with("Gemma") || name == "GPT2LMHeadModel" || name == "SmolLM3ForCausalLM";
        EXPECT_EQ(parsed(config).tied_embeddings, tied) << name;
    }
}

// A Gemma 3's layers (1 B: 26, every sixth of them global, windows of 512) at 32,768 tokens: what memory plans, a cache
// takes, and it is under a quarter of what it would be without windows. Heads are narrower, which changes no ratio.
TEST(FamiliesTest, WindowsSaveMostOfACache) {
    constexpr std::int64_t kTokens = 32768;
    const DecoderConfig config = parsed(small("Gemma3ForCausalLM", {{"num_hidden_layers", 26},
                                                                    {"num_attention_heads", 4},
                                                                    {"num_key_value_heads", 1},
                                                                    {"head_dim", 16},
                                                                    {"sliding_window", 512},
                                                                    {"max_position_embeddings", kTokens}}));
    KvCacheOptions options = cache_options_of(config);
    KvCache cache(options);
    const auto context = make_context(available_isas().back());
    const std::int64_t chunk = cache.max_chunk();
    const std::vector<float> rows(static_cast<std::size_t>(chunk * 16), 0.5F);
    const auto view = InputTensor<3>::dense(rows.data(), {1, chunk, 16});
    for (std::int64_t done = 0; done < kTokens; done += chunk) {
        cache.reserve(chunk);
        for (std::size_t layer = 0; layer < cache.layers(); ++layer) cache.append(*context, layer, view, view);
    }
    EXPECT_EQ(cache.length(), kTokens);
    EXPECT_EQ(cache.reserved_bytes(), KvCache::estimate_bytes(options, kTokens));
    options.layer_windows = {};
    EXPECT_LT(4 * cache.reserved_bytes(), KvCache::estimate_bytes(options, kTokens));
}

// What published files say, beside what the golden models do: shortened, their odd keys verbatim.
TEST(FamiliesTest, PublishedFiles) {
    const DecoderConfig gemma = parsed(json::parse(R"({"architectures":["Gemma3ForConditionalGeneration"],
        "boi_token_index":255999,"eos_token_id":[1,106],"image_token_index":262144,"mm_tokens_per_image":256,
        "model_type":"gemma3","text_config":{"hidden_size":2560,"intermediate_size":10240,"model_type":"gemma3_text",
        "num_hidden_layers":34,"rope_scaling":{"factor":8.0,"rope_type":"linear"},"sliding_window":1024},
        "torch_dtype":"bfloat16","vision_config":{"hidden_size":1152,"vision_use_head":false}})"));
    EXPECT_EQ(gemma.vocab_size, 262208);
    EXPECT_EQ(gemma.heads, 8);
    EXPECT_EQ(gemma.stored_type, WeightType::bf16);
    EXPECT_EQ(gemma.eos_ids, (std::vector<std::int32_t>{1, 106}));
    EXPECT_EQ(gemma.window(0), 1024);
    EXPECT_EQ(gemma.window(5), 0);
    EXPECT_NO_THROW(parsed(small("Phi3ForCausalLM", json::parse(R"({"num_attention_heads":4,"attention_bias":false,
        "embd_pdrop":0.0,"full_attn_mod":1,"interpolate_factor":1,"lm_head_bias":false,"mlp_bias":false,
        "original_max_position_embeddings":4096,"max_position_embeddings":131072,"partial_rotary_factor":0.75,
        "resid_pdrop":0.0,"rope_scaling":{"long_factor":[1,1.1,1.2,1.3,1.4,1.5],"short_factor":[1,1,1,1,1,1],
        "type":"longrope"},"sliding_window":262144,"tie_word_embeddings":true,"auto_map":{"AutoConfig":"x"}})"))));
    EXPECT_NO_THROW(parsed(small("Gemma2ForCausalLM", json::parse(R"({"cache_implementation":"hybrid",
        "hidden_act":"gelu_pytorch_tanh","sliding_window":4096,"sliding_window_size":4096})"))));
    EXPECT_NO_THROW(parsed(small("Qwen3MoeForCausalLM", json::parse(R"({"qkv_bias":false,"use_qk_norm":true,
        "shared_expert_intermediate_size":0,"mlp_only_layers":[],"router_aux_loss_coef":0.0,"num_experts":128,
        "rope_scaling":null,"sliding_window":null,"use_sliding_window":false})"))));
    EXPECT_EQ(parsed(small("Qwen3MoeForCausalLM", {{"num_local_experts", 16}})).experts.count, 16);
    EXPECT_NO_THROW(parsed(small("GPTNeoXForCausalLM", json::parse(R"({"num_attention_heads":4,"rotary_pct":0.25,
        "partial_rotary_factor":0.25,"rope_theta":10000,"rotary_emb_base":10000,"rope_scaling":null,
        "classifier_dropout":0.1,"hidden_act":"gelu_fast","attention_probs_dropout_prob":0})"))));
    EXPECT_NO_THROW(parsed(small("GPT2LMHeadModel", json::parse(R"({"activation_function":"gelu_new","attn_pdrop":0.1,
        "embd_pdrop":0.1,"n_ctx":1024,"summary_activation":null,"summary_first_dropout":0.1,"summary_type":"cls_index",
        "summary_proj_to_labels":true,"summary_use_proj":true,"task_specific_params":{"text-generation":{}}})"))));
    EXPECT_NO_THROW(parsed(small("SmolLM3ForCausalLM", json::parse(R"({"max_window_layers":28,"mlp_bias":false,
        "layer_types":["full_attention","full_attention","full_attention","full_attention"],"pretraining_tp":2,
        "no_rope_layer_interval":4,"no_rope_layers":[1,1,1,0,1,1,1,0],"rope_scaling":null,"sliding_window":null})"))));
    EXPECT_NO_THROW(parsed(small("GptOssForCausalLM", json::parse(R"({"initial_context_length":4096,
        "swiglu_limit":7.0,"experts_per_token":4,"num_experts_per_tok":4,"router_aux_loss_coef":0.9,
        "layer_types":["sliding_attention","full_attention","sliding_attention","full_attention"],
        "rope_scaling":{"beta_fast":32.0,"beta_slow":1.0,"factor":32.0,"original_max_position_embeddings":4096,
        "rope_type":"yarn","truncate":false},"output_router_logits":false})"))));
    // Phi-3's class has 4096 where the key is missing
    const DecoderConfig phi = parsed(small("Phi3ForCausalLM", json::parse(R"({"num_attention_heads":16,
        "max_position_embeddings":131072,"rope_scaling":{"long_factor":[2,2],"short_factor":[1,1],"type":"yarn"}})")));
    EXPECT_EQ(phi.short_context, 4096);
    EXPECT_NEAR(phi.rotaries[0]->attention_factor(), std::sqrt(1.0 + std::log(32.0) / std::log(4096.0)), 1e-12);
}

// Gemma's embedding is multiplied by a number of the embedding's own type.
TEST(FamiliesTest, GemmasMultiplierIsOfTheEmbeddingsType) {
    const DecoderConfig config = parsed(small("Gemma2ForCausalLM"));
    EXPECT_TRUE(config.round_embedding_multiplier);
    EXPECT_FALSE(parsed(small("GraniteForCausalLM")).round_embedding_multiplier);
}

TEST(FamiliesTest, KeysThatAreNotHandledAreNamed) {
    struct Refusal {
        const char* architecture;
        json more;
        const char* named;
    };
    const json yarn = {{"rope_type", "yarn"}, {"factor", 8.0}, {"original_max_position_embeddings", 64}};
    const std::vector<Refusal> refusals{
        {"MistralForCausalLM", {{"layer_types", {"full_attention", "chunked_attention", "x", "y"}}}, "layer_types"},
        {"MistralForCausalLM", {{"attention_bias", true}}, "attention_bias"},
        {"Qwen2ForCausalLM",
         {{"rope_scaling", {{"type", "mrope"}, {"mrope_section", {1}}}}},
         "rope_scaling.mrope_section"},
        {"Phi3ForCausalLM",
         {{"num_attention_heads", 4},
          {"rope_scaling",
           {{"type", "longrope"}, {"long_factor", {1.0}}, {"short_factor", {1.0}}, {"long_mscale", 2}}}},
         "rope_scaling.long_mscale"},
        {"GPT2LMHeadModel", {{"scale_attn_by_inverse_layer_idx", true}}, "scale_attn_by_inverse_layer_idx"},
        {"GPT2LMHeadModel", {{"scale_attn_weights", false}}, "scale_attn_weights"},
        {"Qwen3MoeForCausalLM", {{"shared_expert_intermediate_size", 32}}, "shared_expert_intermediate_size"},
        {"GptOssForCausalLM",
         {{"rope_scaling", yarn}, {"quantization_config", {{"quant_method", "mxfp4"}}}},
         "quantization_config"},
        {"Olmo2ForCausalLM", {{"clip_qkv", 8.0}}, "clip_qkv"},
        {"GraniteForCausalLM", {{"sliding_window", 7}}, "sliding_window"},
        {"LlamaForCausalLM", {{"embedding_multiplier", 2.0}}, "embedding_multiplier"},
        {"Gemma2ForCausalLM", {{"use_bidirectional_attention", true}}, "use_bidirectional_attention"},
        {"Qwen3ForCausalLM", {{"model_type", "qwen2"}}, "model_type"},
        {"FalconForCausalLM", json::object(), "FalconForCausalLM"},
        {"GPTNeoXForCausalLM", {{"num_attention_heads", 4}, {"num_key_value_heads", 2}}, "num_key_value_heads"},
        {"GPT2LMHeadModel", {{"head_dim", 16}}, "head_dim"},
        {"GptOssForCausalLM", {{"rope_scaling", yarn}, {"swiglu_alpha", 2.0}}, "swiglu_alpha"},
        {"Phi3ForCausalLM", {{"num_attention_heads", 4}, {"full_attn_mod", 2}}, "full_attn_mod"},
        {"MistralForCausalLM",
         {{"layer_types", {"full_attention", "full_attention", "full_attention", "full_attention"}}},
         "layer_types"},
        {"LlamaForCausalLM",
         {{"rope_parameters", {{"partial_rotary_factor", 0.5}}}},
         "rope_parameters.partial_rotary_factor"},
    };
    for (const Refusal& each : refusals) {
        const std::string message =
            refusal([&] { parsed(small(each.architecture, each.more)); }, ErrorCode::unsupported);
        EXPECT_NE(message.find(each.named), std::string::npos) << message;
    }
    const std::vector<Refusal> bad{
        {"MixtralForCausalLM", {{"num_experts_per_tok", 9}}, "num_experts_per_tok: is 9"},
        {"GptOssForCausalLM", json::object(), "rope_scaling: is missing"},
        {"GptOssForCausalLM",
         {{"rope_scaling", yarn}, {"experts_per_token", 2}, {"num_experts_per_tok", 4}},
         "experts_per_token: is 2"},
        {"SmolLM3ForCausalLM", {{"no_rope_layers", {1, 0}}}, "no_rope_layers: is [1,0]"},
        {"SmolLM3ForCausalLM", {{"no_rope_layers", {1, 0, 2, 1}}}, "no_rope_layers: holds 2"},
        {"Qwen3MoeForCausalLM", {{"mlp_only_layers", {4}}}, "mlp_only_layers: holds 4"},
        {"Gemma2ForCausalLM", {{"layer_types", {"full_attention"}}}, "layer_types"},
        {"Phi3ForCausalLM", {{"num_attention_heads", 4}, {"partial_rotary_factor", 0.7}}, "partial_rotary_factor"},
        {"Phi3ForCausalLM",
         {{"num_attention_heads", 4},
          {"original_max_position_embeddings", 32},
          {"rope_scaling", {{"type", "longrope"}, {"long_factor", {1.0}}, {"short_factor", {1.0}}}}},
         "rope_scaling.long_factor"},
        {"GraniteForCausalLM", {{"logits_scaling", 0.0}}, "logits_scaling: is 0"},
        {"Phi3ForCausalLM", {{"partial_rotary_factor", 1e30}}, "partial_rotary_factor: is 1e+30"},
        {"GPTNeoXForCausalLM",
         {{"num_attention_heads", 4}, {"partial_rotary_factor", 0.5}, {"rotary_pct", 0.25}},
         "partial_rotary_factor: is 0.5"},
        {"GPTNeoXForCausalLM",
         {{"num_attention_heads", 4}, {"rope_theta", 500}, {"rotary_emb_base", 1000}},
         "rope_theta: is 500"},
        {"MixtralForCausalLM", {{"num_local_experts", 8}, {"num_experts", 9}}, "num_experts: is 9"},
        {"MixtralForCausalLM", {{"num_local_experts", 1 << 20}, {"num_hidden_layers", 2}}, "num_local_experts"},
        {"Gemma3ForConditionalGeneration", json::object(), "text_config: is missing"},
    };
    for (const Refusal& each : bad) {
        const std::string message = refusal([&] { parsed(small(each.architecture, each.more)); }, ErrorCode::bad_file);
        EXPECT_NE(message.find(each.named), std::string::npos) << message;
    }
}

}  // namespace
}  // namespace headlong::test
