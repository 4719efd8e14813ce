// Lists as they are typed, and shapes of models: published ones, and config.json files as the families write them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/support/refusal.hpp"
#include "tests/support/shared_data.hpp"
#include "tests/support/write_safetensors.hpp"
#include "tools/measure/lists.hpp"
#include "tools/shapes/model_shape.hpp"

namespace headlong::test {
namespace {

using nlohmann::json;
using tools::ModelShape;
using tools::parse_kv_types;
using tools::parse_list;

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

std::vector<std::int64_t> list(const std::string& text) { return parse_list("-d", text, 1, kLargest); }

TEST(ListsTest, ValuesAndRanges) {
    using Values = std::vector<std::int64_t>;
    EXPECT_EQ(list("7"), Values({7}));
    EXPECT_EQ(list("512,2048"), Values({512, 2048}));
    EXPECT_EQ(list("512-8192*2"), Values({512, 1024, 2048, 4096, 8192}));
    EXPECT_EQ(list("500-8192*3"), Values({500, 1500, 4500}));
    EXPECT_EQ(list("1-4+1"), Values({1, 2, 3, 4}));
    EXPECT_EQ(list("1-4"), Values({1, 2, 3, 4}));
    EXPECT_EQ(list("1-8+3"), Values({1, 4, 7}));
    EXPECT_EQ(list("5-5*2"), Values({5}));
    EXPECT_EQ(list("4,1-5,4,9"), Values({4, 1, 2, 3, 5, 9})) << "each once, in order";
    EXPECT_EQ(parse_list("--lens", "4,1-3,4", 1, 9, tools::Repeats::kept), Values({4, 1, 2, 3, 4}));
    EXPECT_EQ(parse_list("-t", "0", 0, 8), Values({0}));
    EXPECT_EQ(parse_list("-t", "0-2", 0, 8), Values({0, 1, 2}));
    EXPECT_EQ(list("1-1000").size(), 1000U);
    // the value after the last one is more than 64 bits
    EXPECT_EQ(list("9223372036854775806-9223372036854775807"), Values({kLargest - 1, kLargest}));
    EXPECT_EQ(list("4611686018427387904-9223372036854775807*2"), Values({kLargest / 2 + 1}));
    EXPECT_EQ(list("1-9223372036854775807+9223372036854775807"), Values({1}));
}

TEST(ListsTest, NonsenseIsRefused) {
    for (const char* text : {"",
                             ",",
                             "1,",
                             ",1",
                             "1,,2",
                             "a",
                             "-1",
                             "+1",
                             " 1",
                             "1 ",
                             "1-",
                             "-",
                             "1--2",
                             "2-1",
                             "1-4+0",
                             "1-4*1",
                             "1-4*0",
                             "1-4+",
                             "1-4-1",
                             "1-4+1+1",
                             "1-4/2",
                             "1.5",
                             "1e3",
                             "0x10",
                             "9223372036854775808",
                             "99999999999999999999999"}) {
        SCOPED_TRACE(text);
        const std::string message = refusal([&] { list(text); });
        EXPECT_TRUE(says(message, std::string("-d is '") + text + "'"));
        EXPECT_TRUE(says(message, "512,2048 or 512-8192*2 or 1-4+1"));
    }
    EXPECT_TRUE(says(refusal([&] { list("0"); }), "from 1 to 9223372036854775807"));
    EXPECT_TRUE(says(refusal([&] { parse_list("-t", "0-8*2", 0, 8); }), "'0-8*2'")) << "it would never end";
    EXPECT_TRUE(says(refusal([&] { parse_list("-t", "1,9", 1, 8); }), "'9' is out of range"));
    EXPECT_TRUE(says(refusal([&] { list("1-1001"); }), "more than 1000 values"));
    EXPECT_TRUE(says(refusal([&] { list("1-9223372036854775807"); }), "more than 1000 values"));
    EXPECT_TRUE(says(refusal([&] { list("1-600,1-600"); }), "more than 1000 values"));
    EXPECT_TRUE(says(refusal([&] { list(std::string(100000, '7')); }), "512,2048 or")) << "long ones are cut";
}

TEST(ListsTest, KvTypes) {
    using Types = std::vector<KvTypes>;
    const KvTypes f32{};
    const KvTypes f16{KvType::f16, KvType::f16};
    const KvTypes mixed{KvType::bf16, KvType::f32};
    EXPECT_EQ(parse_kv_types("--kv", "f32"), Types({f32}));
    EXPECT_EQ(parse_kv_types("--kv", "f32,f16,bf16:f32,f16:f16"), Types({f32, f16, mixed}));
    const KvTypes codes{KvType::int8, KvType::int4};
    EXPECT_EQ(parse_kv_types("--kv", "int8,int4,int8:int4"),
              Types({{KvType::int8, KvType::int8}, {KvType::int4, KvType::int4}, codes}));
    EXPECT_EQ(tools::parse_kv_pair("--kv", "int8:int4"), codes);
    EXPECT_EQ(tools::kv_types_name(codes), "int8:int4");
    EXPECT_EQ(tools::parse_kv_pair("--kv", "f16"), f16);
    EXPECT_EQ(tools::parse_kv_pair("--kv", "bf16:f32"), mixed);
    EXPECT_EQ(tools::kv_types_name(f16), "f16");
    EXPECT_EQ(tools::kv_types_name(mixed), "bf16:f32");
    for (const char* text : {"", "f32,", "f64", "F32", "int2", "int16", "f32:", ":f32", "f32:f32:f32", "f16 "}) {
        SCOPED_TRACE(text);
        const std::string message = refusal([&] { parse_kv_types("--kv", text); });
        EXPECT_TRUE(says(message, std::string("--kv is '") + text + "'"));
        EXPECT_TRUE(says(message, "no type; allowed are f32, f16, bf16, int8 and int4"));
    }
    const std::string message = refusal([&] { tools::parse_kv_pair("--kv", "f16,f32"); });
    EXPECT_TRUE(says(message, "--kv is 'f16,f32': a list; allowed is one of f32, f16, bf16, int8 and int4"));
}

TEST(ModelShapeTest, PresetsHoldTogether) {
    EXPECT_EQ(tools::model_presets().size(), 37U);
    for (const ModelShape& preset : tools::model_presets()) {
        SCOPED_TRACE(preset.name);
        for (const std::int64_t size :
             {preset.layers, preset.hidden_size, preset.heads, preset.kv_heads, preset.head_dim, preset.value_dim,
              preset.intermediate_size, preset.vocab_size, preset.max_positions}) {
            EXPECT_GE(size, 1);
        }
        EXPECT_EQ(preset.heads % preset.kv_heads, 0);
        std::string shouted = preset.name;
        for (char& c : shouted) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
        EXPECT_EQ(&tools::model_preset(shouted), &preset);
    }
    const ModelShape& llama = tools::model_preset("llama-3.1-8b");
    EXPECT_EQ(llama.layers, 32);
    EXPECT_EQ(llama.heads, 32);
    EXPECT_EQ(llama.kv_heads, 8);
    EXPECT_EQ(llama.head_dim, 128);
    EXPECT_EQ(tools::model_preset("Mistral-7B-v0.1").sliding_window, 4096);
    const std::string message = refusal([] { tools::model_preset("Llama-9"); });
    for (const ModelShape& preset : tools::model_presets()) EXPECT_TRUE(says(message, preset.name));
}

class ModelShapeFileTest : public testing::Test {
  protected:
    ModelShapeFileTest() {
        folder_ = std::filesystem::temp_directory_path() /
                  ("headlong-shape-" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()) +
                   "-" + std::to_string(::getpid()));
        std::filesystem::create_directories(folder_);
    }
    ~ModelShapeFileTest() override {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }

    std::string write(const std::string& text) const {
        const std::string path = (folder_ / "config.json").string();
        write_bytes(path, text);
        return path;
    }
    ModelShape read(const json& config) const { return tools::read_model_shape(write(config.dump())); }
    std::string why_bad(const json& config) const {
        return refusal([&] { read(config); }, ErrorCode::bad_file);
    }

    std::filesystem::path folder_;
};

void expect_shape(const ModelShape& shape, const std::vector<std::int64_t>& sizes) {
    EXPECT_EQ(
        (std::vector<std::int64_t>{shape.layers, shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim,
                                   shape.value_dim, shape.intermediate_size, shape.vocab_size, shape.max_positions}),
        sizes);
}

TEST_F(ModelShapeFileTest, FamiliesSpellThingsTheirWay) {
    const json llama{{"hidden_size", 64},
                     {"intermediate_size", 100},
                     {"num_hidden_layers", 3},
                     {"num_attention_heads", 8},
                     {"num_key_value_heads", 2},
                     {"vocab_size", 1000},
                     {"max_position_embeddings", 512}};
    expect_shape(read(llama), {3, 64, 8, 2, 8, 8, 100, 1000, 512});
    EXPECT_EQ(read(llama).name, folder_.filename().string());
    EXPECT_EQ(tools::read_model_shape(folder_.string()).heads, 8) << "the folder will do";
    json wide = llama;
    wide["head_dim"] = 32;
    wide["num_key_value_heads"] = nullptr;
    wide["sliding_window"] = 77;
    expect_shape(read(wide), {3, 64, 8, 8, 32, 32, 100, 1000, 512});
    EXPECT_EQ(read(wide).sliding_window, 77);
    wide["use_sliding_window"] = false;
    EXPECT_EQ(read(wide).sliding_window, 0);

    const json gpt2{{"model_type", "gpt2"}, {"n_embd", 60},      {"n_layer", 3},     {"n_head", 5},
                    {"n_inner", nullptr},   {"n_positions", 96}, {"vocab_size", 143}};
    expect_shape(read(gpt2), {3, 60, 5, 5, 12, 12, 240, 143, 96});
    const json gpt_neo{{"model_type", "gpt_neo"}, {"hidden_size", 32}, {"num_layers", 2}, {"num_heads", 4}};
    expect_shape(read(gpt_neo), {2, 32, 4, 4, 8, 8, 128, 0, 0});
    const json opt{{"hidden_size", 48}, {"num_hidden_layers", 2}, {"num_attention_heads", 4}, {"ffn_dim", 99}};
    expect_shape(read(opt), {2, 48, 4, 4, 12, 12, 99, 0, 0});
    const json mpt{{"d_model", 48}, {"n_layers", 2}, {"n_heads", 6}, {"attn_config", {{"kv_n_heads", 2}}}};
    expect_shape(read(mpt), {2, 48, 6, 2, 8, 8, 0, 0, 0});

    json falcon{{"model_type", "falcon"}, {"hidden_size", 4544}, {"num_hidden_layers", 32}, {"num_attention_heads", 71},
                {"num_kv_heads", 71},     {"multi_query", true}, {"vocab_size", 65024}};
    falcon["new_decoder_architecture"] = false;
    expect_shape(read(falcon), {32, 4544, 71, 1, 64, 64, 18176, 65024, 0});
    const json falcon_40b{{"hidden_size", 8192}, {"n_layer", 60},       {"n_head", 128},
                          {"n_head_kv", 8},      {"multi_query", true}, {"new_decoder_architecture", true}};
    expect_shape(read(falcon_40b), {60, 8192, 128, 8, 64, 64, 0, 0, 0});

    falcon.erase("multi_query");
    expect_shape(read(falcon), {32, 4544, 71, 1, 64, 64, 18176, 65024, 0});  // true is the default
    falcon["multi_query"] = false;
    EXPECT_EQ(read(falcon).kv_heads, 71);
    falcon.erase("multi_query");
    falcon["new_decoder_architecture"] = true;
    EXPECT_EQ(read(falcon).kv_heads, 71);

    const json bloom{{"model_type", "bloom"}, {"n_embed", 64}, {"n_layer", 3}, {"num_attention_heads", 4}};
    expect_shape(read(bloom), {3, 64, 4, 4, 16, 16, 256, 0, 0});

    json mistral{{"model_type", "mistral"}, {"hidden_size", 64}, {"num_hidden_layers", 3}, {"num_attention_heads", 16}};
    EXPECT_EQ(read(mistral).kv_heads, 8);
    mistral["num_key_value_heads"] = nullptr;
    EXPECT_EQ(read(mistral).kv_heads, 16) << "null is as many as heads";
    mistral["num_key_value_heads"] = 2;
    EXPECT_EQ(read(mistral).kv_heads, 2);

    for (const char* type : {"gemma", "gemma2"}) {
        json gemma{{"model_type", type},
                   {"hidden_size", 48},
                   {"num_hidden_layers", 2},
                   {"num_attention_heads", 16},
                   {"num_key_value_heads", 2}};
        EXPECT_EQ(read(gemma).head_dim, 256);
        gemma["head_dim"] = 24;
        EXPECT_EQ(read(gemma).head_dim, 24);
        gemma.erase("num_key_value_heads");
        EXPECT_EQ(read(gemma).kv_heads, std::string(type) == "gemma" ? 16 : 4);
    }

    json no_latent = llama;
    no_latent["kv_lora_rank"] = nullptr;
    expect_shape(read(no_latent), {3, 64, 8, 2, 8, 8, 100, 1000, 512});
    for (const json& nothing : {json(0), json(nullptr)}) {
        no_latent["v_head_dim"] = nothing;
        expect_shape(read(no_latent), {3, 64, 8, 2, 8, 8, 100, 1000, 512});
    }
    no_latent["sliding_window"] = 0;
    EXPECT_EQ(read(no_latent).sliding_window, 0);

    const json deepseek{{"hidden_size", 2048},       {"num_hidden_layers", 27}, {"num_attention_heads", 16},
                        {"num_key_value_heads", 16}, {"kv_lora_rank", 512},     {"qk_nope_head_dim", 128},
                        {"qk_rope_head_dim", 64},    {"v_head_dim", 128}};
    expect_shape(read(deepseek), {27, 2048, 16, 16, 192, 128, 0, 0, 0});

    // Gemma 3 12B as published: what is the family's default is left out, head_dim among it
    const json gemma3{{"model_type", "gemma3"},
                      {"vision_config", {{"num_attention_heads", 16}, {"hidden_size", 1152}}},
                      {"text_config",
                       {{"model_type", "gemma3_text"},
                        {"hidden_size", 3840},
                        {"intermediate_size", 15360},
                        {"num_attention_heads", 16},
                        {"num_hidden_layers", 48},
                        {"num_key_value_heads", 8},
                        {"sliding_window", 1024}}}};
    expect_shape(read(gemma3), {48, 3840, 16, 8, 256, 256, 15360, 262208, 131072});
    EXPECT_EQ(read(gemma3).sliding_window, 1024);
}

TEST_F(ModelShapeFileTest, DenseDecodersAreKnownByTheirFamily) {
    json config{{"hidden_size", 64}, {"num_hidden_layers", 3}, {"num_attention_heads", 8}, {"num_key_value_heads", 8}};
    const auto projections = [&] { return read(config).mlp_projections; };
    EXPECT_EQ(projections(), 0);
    for (const auto& [type, count] :
         {std::pair{"llama", 3}, std::pair{"gemma3_text", 3}, std::pair{"smollm3", 3}, std::pair{"gpt2", 2},
          std::pair{"starcoder2", 2}, std::pair{"mixtral", 0}, std::pair{"qwen3_moe", 0}, std::pair{"gpt_oss", 0}}) {
        config["model_type"] = type;
        EXPECT_EQ(projections(), count) << type;
    }
    config["model_type"] = "minicpm";
    EXPECT_EQ(projections(), 3);
    config["num_experts"] = 0;
    EXPECT_EQ(projections(), 3);
    config["num_experts"] = 8;
    EXPECT_EQ(projections(), 0);
    config.erase("num_experts");
    config["v_head_dim"] = 4;
    EXPECT_EQ(projections(), 0) << "no family of these has two dims";
}

TEST_F(ModelShapeFileTest, HostileFilesAreNamed) {
    const json good{{"hidden_size", 64}, {"num_hidden_layers", 3}, {"num_attention_heads", 8}};
    EXPECT_EQ(read(good).kv_heads, 8);
    const auto with = [&](const char* key, const json& value) {
        json config = good;
        config[key] = value;
        return why_bad(config);
    };
    EXPECT_TRUE(says(with("num_attention_heads", 0),
                     "config.json: num_attention_heads is 0, only a whole number from 1 to 1048576 is allowed"));
    EXPECT_TRUE(says(with("num_attention_heads", -8), "num_attention_heads is -8"));
    EXPECT_TRUE(says(with("num_attention_heads", 8.0), "num_attention_heads is 8.0"));
    EXPECT_TRUE(says(with("num_attention_heads", "8"), "num_attention_heads is the string '8'"));
    EXPECT_TRUE(says(with("num_attention_heads", json::array({8, 4})), "num_attention_heads is an array"));
    EXPECT_TRUE(says(with("num_attention_heads", std::numeric_limits<std::uint64_t>::max()), "18446744073709551615"));
    EXPECT_TRUE(says(with("num_attention_heads", 7), "num_attention_heads is 7, without head_dim it must divide"));
    EXPECT_TRUE(says(with("num_attention_heads", nullptr), "num_attention_heads"));
    EXPECT_TRUE(says(with("num_key_value_heads", 0), "num_key_value_heads is 0"));
    EXPECT_TRUE(says(with("num_key_value_heads", 3), "num_key_value_heads is 3, it must divide the 8 heads"));
    EXPECT_TRUE(says(with("num_hidden_layers", 1 << 21), "num_hidden_layers is 2097152"));
    EXPECT_TRUE(says(with("head_dim", 0), "head_dim is 0"));
    EXPECT_TRUE(says(with("head_dim", (1 << 20) + 1), "head_dim is 1048577"));
    EXPECT_TRUE(says(with("kv_lora_rank", 64), "qk_nope_head_dim is missing"));
    EXPECT_TRUE(says(with("multi_query", 1), "multi_query is 1"));
    EXPECT_TRUE(says(with("text_config", 1), "text_config"));
    EXPECT_TRUE(says(with("text_config", json::object()), "text_config.num_hidden_layers is missing"));
    EXPECT_TRUE(says(with("sliding_window", -1), "sliding_window is -1"));
    EXPECT_TRUE(says(with("v_head_dim", -1), "v_head_dim is -1"));
    for (const json& nonsense : {json(1 << 25), json("many"), json(-1), json(0.5), json::array()}) {
        json config = good;
        for (const char* key : {"vocab_size", "intermediate_size", "max_position_embeddings"}) config[key] = nonsense;
        config["head_dim"] = 8;
        config["hidden_size"] = nonsense;
        expect_shape(read(config), {3, 0, 8, 8, 8, 8, 0, 0, 0});  // attention needs none of them
        config.erase("head_dim");
        EXPECT_TRUE(says(why_bad(config), "hidden_size is"));
    }
    json wide = good;
    wide["num_attention_heads"] = 1 << 20;
    wide["head_dim"] = 1 << 20;
    EXPECT_TRUE(says(why_bad(wide), "has 1048576 heads of 1048576 elements"));
    EXPECT_TRUE(says(why_bad(json::array()), "is an array"));
    EXPECT_TRUE(says(why_bad({{"hidden_size", 64}}), "num_hidden_layers is missing"));
    const auto broken = [&](const std::string& text) {
        return refusal([&] { tools::read_model_shape(write(text)); }, ErrorCode::bad_file);
    };
    EXPECT_TRUE(says(broken("heads: 8"), "is not valid JSON"));
    EXPECT_TRUE(says(broken(""), "is not valid JSON"));
    using namespace std::string_literals;
    EXPECT_TRUE(
        says(broken(good.dump() + "\0"s), fmt::format("is not valid JSON at its byte {}", good.dump().size() + 1)))
        << "a NUL is no end";
    EXPECT_TRUE(says(broken(good.dump() + "\0]]]"s), "is not valid JSON at its byte"));
    EXPECT_TRUE(says(broken("{\0}"s), "is not valid JSON at its byte 2"));
    EXPECT_TRUE(says(broken("{\"a\0\": 1}"s), "is not valid JSON at its byte 4"));
    EXPECT_TRUE(says(broken(std::string(100000, '[')), "nests deeper"));
    EXPECT_TRUE(says(refusal([&] { tools::read_model_shape((folder_ / "absent.json").string()); }, ErrorCode::io),
                     "absent.json"));
}

TEST_F(ModelShapeFileTest, SharedFamiliesAreRead) {
    HEADLONG_SHARED_OR_SKIP(families, "models/families");
    std::size_t read = 0;
    for (const auto& entry : std::filesystem::directory_iterator(families)) {
        if (!entry.is_directory()) continue;
        SCOPED_TRACE(entry.path().string());
        const ModelShape shape = tools::read_model_shape(entry.path().string());
        EXPECT_EQ(shape.name, entry.path().filename().string());
        EXPECT_GE(shape.intermediate_size, 1);
        EXPECT_GE(shape.vocab_size, 1);
        EXPECT_GE(shape.max_positions, 1);
        ++read;
    }
    EXPECT_EQ(read, 20U);
    expect_shape(tools::read_model_shape((families / "gpt2_prefix").string()), {4, 80, 5, 5, 16, 16, 112, 166, 128});
    expect_shape(tools::read_model_shape((families / "gemma2").string()), {4, 48, 6, 2, 24, 24, 80, 135, 512});
}

}  // namespace
}  // namespace headlong::test
