// Decoders: golden models layer by layer, the same bits, small random models of every storage, and hostile folders.
#include "engine/decoder.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <headlong/error.hpp>
#include <headlong/model.hpp>

#include "engine/context_impl.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/shared_data.hpp"
#include "tests/support/small_model.hpp"
#include "tests/support/write_safetensors.hpp"

namespace headlong::test {
namespace {

using nlohmann::json;

KvCache cache_for(const Model& model) { return KvCache(model.cache_options()); }

std::string austen() { return (source_dir() / "tools" / "models" / "austen").string(); }

/// Logits of all tokens, `chunk` at a time.
std::vector<float> logits_of(Context& context, const Model& model, const std::vector<std::int32_t>& tokens,
                             std::size_t chunk) {
    KvCache cache = cache_for(model);
    const auto vocab = static_cast<std::size_t>(model.info().vocab_size);
    std::vector<float> logits(tokens.size() * vocab);
    for (std::size_t first = 0; first < tokens.size(); first += chunk) {
        const std::size_t count = std::min(chunk, tokens.size() - first);
        model.forward(context, std::span(tokens).subspan(first, count), cache,
                      OutputTensor<2>::dense(logits.data() + first * vocab,
                                             {static_cast<std::int64_t>(count), model.info().vocab_size}));
    }
    return logits;
}

TEST(DecoderTest, LayersOfStoriesAgreeWithTheGoldenPrompt) {
    HEADLONG_SHARED_OR_SKIP(folder, "models/stories260k");
    const SafetensorsFile golden((folder / "golden_prompt.safetensors").string());
    std::vector<std::int32_t> tokens;
    for (const std::int64_t id : to_int64s(golden.at("input_ids"))) tokens.push_back(static_cast<std::int32_t>(id));
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa, 2);
        const Model model(*context, folder.string());
        const DecoderConfig& config = [&]() -> const DecoderConfig& {
            static DecoderConfig parsed;
            std::string text;
            parsed = parse_decoder_config(
                R"({"architectures":["LlamaForCausalLM"],"vocab_size":512,"hidden_size":64,"intermediate_size":172,
                "num_hidden_layers":5,"num_attention_heads":8,"num_key_value_heads":4,"rms_norm_eps":1e-5,"tie_word_embeddings":true})",
                "test");
            return parsed;
        }();
        const Decoder decoder(context->impl(), context->memory(), config,
                              std::make_shared<const WeightFiles>(WeightFiles::open(folder.string())));
        KvCache cache = cache_for(model);
        std::vector<float> logits(tokens.size() * 512);
        std::size_t compared = 0;
        decoder.forward(
            *context, tokens, cache, logits.data(), static_cast<std::int64_t>(tokens.size()), 512,
            {.observer = [&](std::int64_t layer, std::string_view name, const float* rows, std::int64_t columns) {
                const std::string tensor =
                    name == "embedding" ? "embedding" : "layer" + std::to_string(layer) + "." + std::string(name);
                const std::vector<double> want = to_doubles(golden.at(tensor));
                ASSERT_EQ(want.size(), tokens.size() * static_cast<std::size_t>(columns)) << tensor;
                for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(rows[i], want[i], 1e-4) << tensor << " " << i;
                ++compared;
            }});
        EXPECT_EQ(compared, 1U + 5U * 5U);
        const std::vector<double> want = to_doubles(golden.at("logits"));
        for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(logits[i], want[i], 5e-4) << i;
    }
}

TEST(DecoderTest, GreedyIdsOfStoriesAreTheGoldenOnes) {
    HEADLONG_SHARED_OR_SKIP(folder, "models/stories260k");
    const std::vector<std::int64_t> golden =
        to_int64s(SafetensorsFile((folder / "golden_greedy.safetensors").string()).at("ids"));
    ASSERT_EQ(golden.size(), 346U);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa);
        const Model model(*context, folder.string());
        KvCache cache = cache_for(model);
        Sampler greedy({});
        std::vector<float> logits(512);
        for (std::size_t i = 0; i + 1 < golden.size(); ++i) {
            const auto token = static_cast<std::int32_t>(golden[i]);
            model.forward(*context, std::span(&token, 1), cache, OutputTensor<2>::dense(logits.data(), {1, 512}));
            ASSERT_EQ(greedy.pick(logits), golden[i + 1]) << i;
        }
    }
}

TEST(DecoderTest, LogitsHaveTheSameBitsHoweverThePromptIsCut) {
    Random random(51);
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < (emulated() ? 40 : 130); ++i)
        tokens.push_back(static_cast<std::int32_t>(random.integer(0, 1023)));
    HEADLONG_FOR_EACH_ISA(isa) {
        std::vector<float> first;
        for (const std::size_t threads : {1U, 2U}) {
            const auto context = make_context(isa, threads);
            const Model model(*context, austen());
            for (const std::size_t chunk : {tokens.size(), std::size_t{1}, std::size_t{7}, std::size_t{64}}) {
                const std::vector<float> logits = logits_of(*context, model, tokens, chunk);
                if (first.empty()) first = logits;
                EXPECT_TRUE(same_bits(first, logits)) << threads << " threads, chunks of " << chunk;
            }
        }
    }
}

// ------------------------------------------------------------------------------------------- folders made by tests

/// A model folder in the temporary folder, removed at the end.
class DecoderFolderTest : public testing::Test {
  protected:
    DecoderFolderTest() {
        folder_ = std::filesystem::temp_directory_path() /
                  ("headlong-model-" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()) +
                   "-" + std::to_string(::getpid()));
        std::filesystem::create_directories(folder_);
        write(small_config(), small_tensors());
    }
    ~DecoderFolderTest() override {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }
    void write(const json& config, const std::vector<TensorToWrite>& tensors) const {
        write_bytes((folder_ / "config.json").string(), config.dump());
        write_bytes((folder_ / "tokenizer.json").string(), kSmallTokenizer);
        write_safetensors((folder_ / "model.safetensors").string(), tensors);
    }
    Model load(bool map = true) {
        ModelOptions options;
        options.map = map;
        return Model(context_, folder_.string(), options);
    }
    std::vector<float> logits(const Model& model) { return logits_of(context_, model, {0, 5, 10, 3, 3, 7}, 6); }

    void expect_refused(ErrorCode code, const std::string& text) {
        try {
            load();
            ADD_FAILURE() << "nothing was thrown; expected '" << text << "'";
        } catch (const Error& error) {
            const std::string message = error.what();
            EXPECT_EQ(error.code(), code) << message;
            EXPECT_NE(message.find(text), std::string::npos) << message;
            EXPECT_EQ(message.find('\n'), std::string::npos) << message;
        }
    }
    void expect_config_refused(const std::string& key, const json& value, ErrorCode code, const std::string& text) {
        SCOPED_TRACE(key);
        json config = small_config();
        config[key] = value;
        write(config, small_tensors());
        expect_refused(code, text);
    }

    std::filesystem::path folder_;
    Context context_{[] {
        ContextOptions options;
        options.threads = 1;
        return options;
    }()};
};

TEST_F(DecoderFolderTest, StorageDoesNotMatter) {
    const std::vector<float> want = logits(load());
    for (const float x : want) EXPECT_TRUE(std::isfinite(x));
    EXPECT_TRUE(same_bits(want, logits(load(false)))) << "read instead of mapped";
    std::vector<TensorToWrite> tensors = small_tensors();
    for (std::size_t i = 0; i < tensors.size(); i += 2) {  // mixed types; what follows an odd tensor is unaligned
        std::string half;
        for (std::size_t b = 2; b < tensors[i].bytes.size(); b += 4) half += tensors[i].bytes.substr(b, 2);
        tensors[i].bytes = half;
        tensors[i].dtype = "BF16";
    }
    tensors.insert(tensors.begin(),
                   tensor_to_write<std::uint8_t>("model.layers.0.self_attn.rotary_emb.inv_freq", "U8", {1}, {1}));
    write(small_config(), tensors);
    EXPECT_TRUE(same_bits(want, logits(load()))) << "BF16 and unaligned";
}

TEST_F(DecoderFolderTest, ShardsAreOneModel) {
    const std::vector<float> want = logits(load());
    const std::vector<TensorToWrite> tensors = small_tensors();
    std::filesystem::remove(folder_ / "model.safetensors");
    const auto file = [&](std::size_t i) { return i % 3 == 0 ? "a.safetensors" : "b.safetensors"; };
    json map = json::object();
    std::map<std::string, std::vector<TensorToWrite>> shards;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        map[tensors[i].name] = file(i);
        shards[file(i)].push_back(tensors[i]);
    }
    for (const auto& [name, held] : shards) write_safetensors((folder_ / name).string(), held);
    const auto write_index = [&](const json& document) {
        write_bytes((folder_ / "model.safetensors.index.json").string(), document.dump());
    };
    write_index({{"metadata", {{"total_size", 1}}}, {"weight_map", map}});
    EXPECT_TRUE(same_bits(want, logits(load())));
    EXPECT_TRUE(same_bits(want, logits(load(false))));

    const auto broken = [&](const auto& change, ErrorCode code, const std::string& text) {
        json changed = map;
        change(changed);
        write_index({{"weight_map", changed}});
        expect_refused(code, text);
    };
    const auto bad = ErrorCode::bad_file;
    const std::string norm = "model.norm.weight";
    broken([&](json& m) { m[norm] = "a.safetensors"; }, bad, "a.safetensors: tensor 'model.norm.weight' is missing");
    broken([&](json& m) { m.erase(norm); }, bad, "b.safetensors: tensor 'model.norm.weight' is not in the index");
    broken([&](json& m) { m[norm] = "../b.safetensors"; }, bad, "is '../b.safetensors'; it must be the name of a file");
    broken([&](json& m) { m[norm] = ".."; }, bad, "is '..'");
    broken([&](json& m) { m[norm] = ""; }, bad, "is ''");
    broken([&](json& m) { m[norm] = 7; }, bad, "weight_map['model.norm.weight']");
    broken([&](json& m) { m["other"] = "c.safetensors"; }, ErrorCode::io, "c.safetensors");
    broken([&](json& m) { m = json::object(); }, bad, "weight_map is empty");
    write_index({{"metadata", json::object()}});
    expect_refused(bad, "weight_map is missing");
}

TEST_F(DecoderFolderTest, GenerationConfigSaysWhatEndsAText) {
    const std::string path = (folder_ / "generation_config.json").string();
    EXPECT_EQ(load().info().eos_ids, (std::vector<std::int32_t>{2}));
    write_bytes(path, R"({"eos_token_id": [5, 6], "bos_token_id": 3, "temperature": 0.6})");
    EXPECT_EQ(load().info().eos_ids, (std::vector<std::int32_t>{5, 6}));
    EXPECT_EQ(load().info().bos_id, 3);
    write_bytes(path, R"({"do_sample": true})");
    EXPECT_EQ(load().info().eos_ids, (std::vector<std::int32_t>{2}));
    write_bytes(path, R"({"eos_token_id": 11})");
    expect_refused(ErrorCode::bad_file, "generation_config.json: eos_token_id: is 11");
    write_bytes(path, "[1]");
    expect_refused(ErrorCode::bad_file, "generation_config.json: is not a JSON object");
}

TEST_F(DecoderFolderTest, LoadingTellsHowFarItIs) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> told;
    ModelOptions options;
    options.on_load = [&](std::uint64_t done, std::uint64_t all) { told.emplace_back(done, all); };
    const Model model(context_, folder_.string(), options);
    std::uint64_t bytes = 0;
    for (const TensorToWrite& tensor : small_tensors()) bytes += tensor.bytes.size();
    ASSERT_GE(told.size(), 15U) << "a call for each linear layer, and the end";
    for (std::size_t i = 0; i < told.size(); ++i) {
        EXPECT_EQ(told[i].second, bytes);
        EXPECT_GE(told[i].first, i == 0 ? 1 : told[i - 1].first);
    }
    EXPECT_EQ(told.back().first, bytes);
}

TEST_F(DecoderFolderTest, TiedEmbeddingsAreTheHead) {
    std::vector<TensorToWrite> tensors = small_tensors();
    tensors[1].bytes = tensors[0].bytes;
    write(small_config(), tensors);
    const std::vector<float> want = logits(load());
    json config = small_config();
    config["tie_word_embeddings"] = true;
    write(config, tensors);  // a stored copy of the head is allowed
    EXPECT_TRUE(same_bits(want, logits(load())));
    tensors.erase(tensors.begin() + 1);
    write(config, tensors);
    EXPECT_TRUE(same_bits(want, logits(load())));
}

TEST_F(DecoderFolderTest, BiasesCountOnlyWhereConfigSaysSo) {
    const std::vector<float> without = logits(load());
    json config = small_config();
    config["attention_bias"] = true;
    config["mlp_bias"] = true;
    std::vector<TensorToWrite> tensors = small_tensors(true);
    write(config, tensors);
    EXPECT_FALSE(same_bits(without, logits(load())));
    for (TensorToWrite& tensor : tensors) {
        if (tensor.name.ends_with(".bias")) tensor.bytes.assign(tensor.bytes.size(), '\0');
    }
    std::vector<TensorToWrite> plain = tensors;  // the random weights differ from those without biases
    std::erase_if(plain, [](const TensorToWrite& tensor) { return tensor.name.ends_with(".bias"); });
    write(config, tensors);
    const std::vector<float> zero_bias = logits(load());
    write(small_config(), plain);
    const std::vector<float> no_bias = logits(load());
    for (std::size_t i = 0; i < no_bias.size(); ++i) EXPECT_NEAR(zero_bias[i], no_bias[i], 1e-5);
    write(small_config(), tensors);
    expect_refused(ErrorCode::bad_file, ".bias' is not part");
}

TEST_F(DecoderFolderTest, WeightBytesAreWhatLoadingTakes) {
    const auto expect_planned = [&](const json& config_json, const std::string& folder) {
        CountingResource resource;
        const DecoderConfig config = parse_decoder_config(config_json.dump(), "test");
        const Decoder decoder(context_.impl(), resource, config,
                              std::make_shared<const WeightFiles>(WeightFiles::open(folder)));
        const std::size_t taken = resource.counts().live_bytes;
        EXPECT_LT(Decoder::weight_bytes(config), taken) << config_json;
        // on top of it norms, and a list of the layers
        const auto norms = static_cast<std::size_t>((2 * config.layers + 1) * config.hidden_size) * sizeof(float);
        EXPECT_LE(taken, Decoder::weight_bytes(config) + norms + static_cast<std::size_t>(config.layers) * 1024);
    };
    expect_planned(small_config(), folder_.string());  // outputs that are no whole panels
    json config = small_config();
    config["attention_bias"] = true;
    config["mlp_bias"] = true;
    write(config, small_tensors(true));
    expect_planned(config, folder_.string());
    std::ifstream file(austen() + "/config.json");
    expect_planned(json::parse(file), austen());
}

TEST_F(DecoderFolderTest, BrokenConfigsAreNamed) {
    const auto bad = ErrorCode::bad_file;
    const auto unsupported = ErrorCode::unsupported;
    expect_config_refused("architectures", {"MambaForCausalLM"}, unsupported, "MambaForCausalLM");
    expect_config_refused("architectures", json::array(), bad, "architectures");
    expect_config_refused("vocab_size", -3, bad, "vocab_size: is -3");
    expect_config_refused("hidden_size", "64", bad, "hidden_size: is \"64\"");
    expect_config_refused("num_hidden_layers", 0, bad, "num_hidden_layers: is 0");
    expect_config_refused("num_hidden_layers", 1.5, bad, "num_hidden_layers: is 1.5");
    expect_config_refused("num_hidden_layers", (1 << 17) + 1, bad, "is 131073; it must be at most 131072");
    expect_config_refused("intermediate_size", std::numeric_limits<std::uint64_t>::max(), bad, "intermediate_size");
    expect_config_refused("num_key_value_heads", 3, bad, "num_key_value_heads: is 3");
    expect_config_refused("head_dim", 5, bad, "head_dim: is 5");
    expect_config_refused("head_dim", (1 << 20) + 2, bad, "head_dim: is 1048578; it must be at most 1048576");
    expect_config_refused("rms_norm_eps", -1.0, bad, "rms_norm_eps: is -1");
    expect_config_refused("rms_norm_eps", 1e-60, bad, "rms_norm_eps: is 1e-60");
    expect_config_refused("rms_norm_eps", 1e300, bad, "rms_norm_eps: is 1e+300");
    expect_config_refused("rope_theta", 1e-300, bad, "rope_theta: is 1e-300");
    expect_config_refused("rope_parameters", {{"rope_theta", 5e5}}, bad,
                          "rope_parameters.rope_theta: is 500000.0, but rope_theta is 10000");
    expect_config_refused("rope_theta", 0, bad, "rope_theta: is 0");
    expect_config_refused("rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}, bad,
                          "rope_scaling.low_freq_factor: is missing");
    expect_config_refused("rope_parameters", {{"rope_type", "yarn"}}, bad, "rope_parameters.factor: is missing");
    expect_config_refused("rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}, unsupported,
                          "rope_scaling.type: is dynamic");
    expect_config_refused("rope_scaling", {{"type", "linear"}, {"factor", 2.0}, {"stretch", 2}}, unsupported,
                          "rope_scaling.stretch: is 2");
    expect_config_refused("hidden_act", "relu2", unsupported, "hidden_act: is \"relu2\"");
    expect_config_refused("sliding_window", 4096, unsupported, "sliding_window: is 4096");
    expect_config_refused("attn_logit_softcapping", 50.0, unsupported, "attn_logit_softcapping");
    expect_config_refused("partial_rotary_factor", 0.5, unsupported, "partial_rotary_factor");
    expect_config_refused("quantization_config", {{"bits", 4}}, unsupported, "quantization_config");
    expect_config_refused("residual_multiplier", 0.2, unsupported, "residual_multiplier");
    expect_config_refused("use_qk_norm", true, unsupported, "use_qk_norm");
    for (const auto& [key, value] :
         std::map<std::string, json>{{"use_rope", false},
                                     {"scale_attn_weights", false},
                                     {"use_bidirectional_attention", true},
                                     {"attn_temperature_tuning", true},
                                     {"position_embedding_type", "learned"},
                                     {"logit_clip", 5},
                                     {"compression_config", {{"bits", 8}}},
                                     {"num_kv_shared_layers", 3},
                                     {"model_type", "mistral"},
                                     {"partial_rotary_factor", 0.25},
                                     {"layer_types", {"full_attention", "sliding_attention"}}}) {
        expect_config_refused(key, value, unsupported, key);
    }
    expect_config_refused("attention_bias", 1, bad, "attention_bias: is 1");
    expect_config_refused("eos_token_id", 11, bad, "eos_token_id: is 11");
    expect_config_refused("eos_token_id", {2, -1}, bad, "eos_token_id: is -1");
    json config = small_config();
    config.erase("hidden_size");
    write(config, small_tensors());
    expect_refused(bad, "hidden_size: is missing");
    for (const char* text : {"", "[1]", R"({"hidden_size": 12, "hidden_size": 12})", "{\"a\":", "null",
                             "{\"architectures\": [\"Llama\xff\"]}"}) {
        write_bytes((folder_ / "config.json").string(), text);
        EXPECT_THROW(load(), Error) << text;
    }
    write_bytes((folder_ / "config.json").string(), std::string(100000, '['));
    expect_refused(bad, "nests deeper than");

    // what is off, or about something else, is ignored
    config = small_config();
    for (const char* key : {"rope_scaling", "sliding_window", "quantization_config"}) config[key] = nullptr;
    config["mlp_bias"] = false;
    config["use_sliding_window"] = false;
    config["initializer_range"] = 0.02;
    config["transformers_version"] = "4.57";
    config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 10000.0}, {"partial_rotary_factor", 1.0}};
    config["model_type"] = "llama";
    config["hidden_act"] = "swish";
    config["partial_rotary_factor"] = 1.0;
    config["layer_types"] = {"full_attention", "full_attention"};
    config["sliding_window"] = 4096;  // with use_sliding_window false
    config["_attn_implementation"] = "sdpa";
    config["attention_dropout"] = 0.0;
    write(config, small_tensors());
    EXPECT_NO_THROW(load());
}

TEST_F(DecoderFolderTest, BrokenWeightsAreNamed) {
    const auto with = [&](const auto& change, const std::string& text) {
        std::vector<TensorToWrite> tensors = small_tensors();
        change(tensors);
        write(small_config(), tensors);
        expect_refused(ErrorCode::bad_file, text);
    };
    with([](auto& t) { t.pop_back(); }, "model.layers.1.mlp.down_proj.weight' is missing");
    with(
        [](auto& t) {
            t[0].shape = {12, 11};
        },
        "model.embed_tokens.weight' is F32[12, 11]; it must be of shape [11, 12]");
    with([](auto& t) { t[2].shape = {3, 4}; }, "model.norm.weight' is F32[3, 4]");
    with([](auto& t) { t[2].dtype = "I32"; }, "model.norm.weight' is I32[12]; it must be F32, F16 or BF16");
    with(
        [](auto& t) {
            t.push_back(tensor_to_write<float>("model.layers.0.self_attn.q_norm.weight", "F32", {1}, {1.0F}));
        },
        "q_norm.weight' is not part");
    write(small_config(), small_tensors());
    write_bytes((folder_ / "model.safetensors").string(), "short");
    expect_refused(ErrorCode::bad_file, "model.safetensors");
    std::filesystem::remove(folder_ / "model.safetensors");
    expect_refused(ErrorCode::io, "model.safetensors");
    write(small_config(), small_tensors());
    std::filesystem::remove(folder_ / "config.json");
    expect_refused(ErrorCode::io, "config.json");
}

// Whichever allocation of a call fails, the cache is as it was, and the call can be made again.
TEST_F(DecoderFolderTest, AnyRefusedAllocationLeavesTheCache) {
    for (const std::int64_t layers : {1, 2}) {
        json config = small_config();
        config["num_hidden_layers"] = layers;
        config["max_position_embeddings"] = 400;
        std::vector<TensorToWrite> tensors = small_tensors();
        if (layers == 1)
            std::erase_if(tensors, [](const TensorToWrite& t) { return t.name.starts_with("model.layers.1."); });
        write(config, tensors);
        const Model model = load();
        const std::vector<std::int32_t> tokens(200, 1);
        std::vector<float> logits(11);
        const auto row = OutputTensor<2>::dense(logits.data(), {1, 11});
        int refusals = 0;
        for (std::size_t failing = 0;; ++failing) {
            ASSERT_LT(failing, 30U);
            CountingResource scratch;
            CountingResource blocks;
            KvCacheOptions options = model.cache_options();
            options.memory = &blocks;
            KvCache cache(options);
            const auto context = make_context(available_isas().back(), 2, &scratch);
            scratch.fail_after(failing);
            try {
                model.forward(*context, tokens, cache, row);
            } catch (const OutOfMemory&) {
                ++refusals;
                EXPECT_EQ(cache.length(), 0);
                for (std::size_t layer = 0; layer < cache.layers(); ++layer) EXPECT_EQ(cache.length(layer), 0);
                scratch.never_fail();
                model.forward(*context, tokens, cache, row);
                EXPECT_EQ(cache.length(), 200);
                continue;
            }
            break;
        }
        EXPECT_GE(refusals, 3);
    }
}

// Steps, and a prompt that is long enough to be widened a span at a time, read the same rounded rows.
TEST_F(DecoderFolderTest, CachesOf16BitsGiveTheSameBitsHoweverTokensAreSplit) {
    const Model model = load();
    const std::vector<std::int32_t> tokens{1, 2, 3, 4, 5, 6, 7,  8, 9, 10, 1, 3, 5,
                                           7, 9, 2, 4, 6, 8, 10, 1, 1, 2,  3, 5, 8};
    const auto logits_of = [&](const KvTypes& types, std::size_t chunk) {
        KvCache cache(model.cache_options(types));
        std::vector<float> logits(tokens.size() * 11);
        for (std::size_t first = 0; first < tokens.size(); first += chunk) {
            const std::size_t count = std::min(chunk, tokens.size() - first);
            model.forward(context_, std::span(tokens).subspan(first, count), cache,
                          OutputTensor<2>::dense(logits.data() + first * 11, {static_cast<std::int64_t>(count), 11}));
        }
        return logits;
    };
    const std::vector<float> floats = logits_of({}, 26);
    for (const KvTypes& types : {KvTypes{KvType::f16, KvType::f16}, KvTypes{KvType::bf16, KvType::f32}}) {
        const std::vector<float> whole = logits_of(types, 26);
        EXPECT_TRUE(same_bits(whole, logits_of(types, 1)));
        EXPECT_TRUE(same_bits(whole, logits_of(types, 7)));
        EXPECT_FALSE(same_bits(whole, floats)) << "nothing was rounded";
        for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(whole[i], floats[i], 0.05);
    }
}

TEST_F(DecoderFolderTest, BadCallsLeaveTheCache) {
    const Model model = load();
    KvCache cache = cache_for(model);
    std::vector<float> logits(11 * 4);
    const std::vector<std::int32_t> tokens{1, 2, 3};
    const auto forward = [&](const std::vector<std::int32_t>& t, std::int64_t rows) {
        model.forward(context_, t, cache, OutputTensor<2>::dense(logits.data(), {rows, 11}));
    };
    forward(tokens, 1);
    EXPECT_EQ(cache.length(), 3);
    EXPECT_THROW(forward({1, 11}, 1), InvalidArgument);
    EXPECT_THROW(forward({-1}, 1), InvalidArgument);
    EXPECT_THROW(forward(tokens, 4), InvalidArgument);
    EXPECT_THROW(forward(std::vector<std::int32_t>(38, 1), 1), InvalidArgument) << "41 of 40 positions";
    EXPECT_THROW(model.forward(context_, tokens, cache, OutputTensor<2>::dense(logits.data(), {1, 10})),
                 InvalidArgument);
    KvCacheOptions other = model.cache_options();
    other.layers = 1;
    other.layer_rotary = {};
    KvCache wrong(other);
    EXPECT_THROW(model.forward(context_, tokens, wrong, {}), InvalidArgument);
    other = model.cache_options();
    other.layer_rotary = {};
    KvCache unrotated(other);
    EXPECT_THROW(model.forward(context_, tokens, unrotated, {}), InvalidArgument) << "nobody would rotate the keys";
    EXPECT_EQ(cache.length(), 3);
    KvCache half = cache_for(model);  // a step that a caller left half done
    const std::vector<float> rows(2 * 6);
    half.append(context_, 0, InputTensor<3>::dense(rows.data(), {2, 1, 6}),
                InputTensor<3>::dense(rows.data(), {2, 1, 6}));
    EXPECT_THROW(model.forward(context_, tokens, half, {}), InvalidArgument);
    half.discard_unfinished();
    EXPECT_NO_THROW(model.forward(context_, tokens, half, {}));
    forward({}, 0);
    forward(std::vector<std::int32_t>(37, 1), 0);
    EXPECT_EQ(cache.length(), 40);
}

}  // namespace
}  // namespace headlong::test
