// Plans of memory: what is counted against what is allocated, and the command that prints it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <headlong/model.hpp>

#include "engine/decoder.hpp"
#include "engine/mapped_file.hpp"
#include "tests/support/command_line.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/shared_data.hpp"
#include "tests/support/wide_executor.hpp"
#include "tests/support/write_safetensors.hpp"
#include "tools/measure/memory.hpp"
#include "tools/shapes/model_shape.hpp"

namespace headlong::test {
namespace {

using nlohmann::json;

std::string austen() { return (source_dir() / "tools" / "models" / "austen").string(); }

DecoderConfig config_of(const std::string& folder) {
    const std::string path = folder + "/config.json";
    return parse_decoder_config(read_text(path, kMostConfigBytes), path);
}

TEST(MemoryPlanTest, WeightsByHand) {  // decoder_test compares with what loading takes
    // 6 layers of [192 -> 192, 64, 64, 192] and three of 192 x 512, the head 192 x 1024, in bf16
    EXPECT_EQ(Decoder::weight_bytes(config_of(austen())),
              (6 * (2 * 192 + 2 * 64 + 3 * 512) * 192 + 192 * 1024) * 2U);  // bfloat16
}

TEST(MemoryPlanTest, ScratchIsWhatGeneratingLeaves) {
    const DecoderConfig config = config_of(austen());
    std::vector<std::int32_t> tokens;
    for (std::int32_t i = 0; i < 700; ++i) tokens.push_back(i);
    for (const std::size_t threads : {1U, 2U, 3U, 8U}) {
        for (const std::size_t depth : {1U, 5U, 100U, 512U, 513U, 700U}) {
            if (emulated() && depth > 100) continue;
            SCOPED_TRACE(std::to_string(threads) + " threads, " + std::to_string(depth) + " tokens");
            ContextOptions context_options;
            context_options.executor = std::make_shared<WideExecutor>(threads, threads + 1);
            Context context(context_options);
            const Model model(context, austen());
            const KvTypes types{depth == 5       ? KvType::int4
                                : depth % 2 == 0 ? KvType::f32
                                                 : KvType::f16,
                                depth % 100 == 0 ? KvType::int8
                                : depth % 3 == 0 ? KvType::bf16
                                                 : KvType::f32};
            KvCache cache(model.cache_options(types));
            GenerateOptions options;
            options.max_tokens = 2;  // the second one takes a step of its own
            options.ignore_eos = true;
            generate(context, model, cache, std::span(tokens).first(depth), options);
            const auto length = static_cast<std::int64_t>(depth);
            const std::array calls{std::min<std::int64_t>(length, 512), length % 512, std::int64_t{1}};
            EXPECT_EQ(Decoder::scratch_bytes(context.impl(), config, calls, types), context.scratch_bytes());
        }
    }
}

TEST(MemoryPlanTest, HugeSizesSaturate) {
    DecoderConfig config = config_of(austen());
    config.layers = config.hidden_size = config.intermediate_size = config.vocab_size = std::int64_t{1} << 24;
    config.heads = config.kv_heads = 1 << 15;
    config.head_dim = 1 << 15;
    EXPECT_EQ(Decoder::weight_bytes(config), std::numeric_limits<std::size_t>::max());
    const Context context;
    const std::array calls{std::int64_t{1} << 40};
    EXPECT_EQ(Decoder::scratch_bytes(context.impl(), config, calls), std::numeric_limits<std::size_t>::max());
}

TEST(MemoryPlanTest, MachineHasMemory) {
    EXPECT_GT(tools::available_memory(), 0U);
    EXPECT_LE(tools::available_memory(), tools::total_memory());
}

class MemoryCommandTest : public CommandLine {
  protected:
    json plan(const std::string& arguments) const {
        const Result result = run("memory --json " + arguments);
        EXPECT_EQ(result.code, 0) << result.err;
        EXPECT_EQ(result.err, "");
        json printed = json::parse(result.out, nullptr, false);
        EXPECT_FALSE(printed.is_discarded()) << result.out;
        return printed;
    }
    std::string write(const std::string& text) const {
        const std::string path = (folder_ / "config.json").string();
        write_bytes(path, text);
        return "'" + path + "'";
    }
};

TEST_F(MemoryCommandTest, CachesAreBlocksOf64Tokens) {
    // 2 KV heads, keys of 6, values of 10 padded to 16: a block is 2 * 64 * (6 + 16) floats = 11264 bytes; 3 layers
    const std::string model = write(
        R"({"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
            "v_head_dim": 10})");
    const json rows = plan(model + " -d 1,64,65,1000")["rows"];
    ASSERT_EQ(rows.size(), 4U);
    const std::vector<std::size_t> blocks{1, 1, 2, 16};
    for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(rows[i]["kv_bytes"], blocks[i] * 3 * 11264);
        EXPECT_EQ(rows[i]["kv_type"], "f32");
        EXPECT_EQ(rows[i]["weight_bytes"], nullptr);
        EXPECT_EQ(rows[i]["scratch_bytes"], nullptr);
        EXPECT_EQ(rows[i]["total_bytes"], nullptr);
        EXPECT_EQ(rows[i]["fits"], nullptr);
    }
    // keys of 6, of codes 8, and values of 16 with padding, each at its own width, and scales with codes
    const json typed = plan(model + " -d 65 --kv f16,bf16:f32,f32:f16,int8,int4,f16:int8")["rows"];
    const std::vector<std::pair<std::string, std::size_t>> token_bytes{
        {"f16", 6 * 2 + 16 * 2},  {"bf16:f32", 6 * 2 + 16 * 4}, {"f32:f16", 6 * 4 + 16 * 2},
        {"int8", 4 + 8 + 4 + 16}, {"int4", 4 + 4 + 4 + 8},      {"f16:int8", 6 * 2 + 4 + 16}};
    ASSERT_EQ(typed.size(), token_bytes.size());
    for (std::size_t i = 0; i < typed.size(); ++i) {
        EXPECT_EQ(typed[i]["kv_type"], token_bytes[i].first);
        EXPECT_EQ(typed[i]["kv_bytes"], 2 * 64 * 3 * 2 * token_bytes[i].second);
    }
    // Llama 3.1 8B at 8192 tokens: 32 layers * 8 KV heads * (128 + 128) floats a token
    EXPECT_EQ(plan("llama-3.1-8b -d 8192 --ram 64G")["rows"][0]["kv_bytes"], 8192ULL * 32 * 8 * 256 * 4);
    // DeepSeek-V2-Lite, expanded: 27 layers * 16 heads * (192 + 128) floats a token
    EXPECT_EQ(plan("DeepSeek-V2-Lite -d 128 --ram 64G")["rows"][0]["kv_bytes"], 128ULL * 27 * 16 * 320 * 4);
}

TEST_F(MemoryCommandTest, AModelOfTheEngineIsKnownInFull) {
    const json printed = plan("'" + austen() + "' -d 512,700 --ram 64G");
    EXPECT_EQ(printed["weights_are"], "exact");
    EXPECT_EQ(printed["model"]["name"], "austen");
    EXPECT_EQ(printed["memory"]["total_bytes"], std::uint64_t{64} << 30);
    EXPECT_EQ(printed["notes"], json::array());
    const Context context;
    const DecoderConfig config = config_of(austen());
    for (const json& row : printed["rows"]) {
        const auto depth = row["depth"].get<std::int64_t>();
        const std::array calls{std::int64_t{512}, depth % 512, std::int64_t{1}};
        const std::size_t scratch = Decoder::scratch_bytes(context.impl(), config, calls);
        // 6 layers, 2 KV heads, 64 floats a token
        const auto cache = static_cast<std::size_t>((depth + 63) / 64) * 64 * 6 * 2 * 64 * 4;
        EXPECT_EQ(row["kv_bytes"], cache);
        EXPECT_EQ(row["weight_bytes"], Decoder::weight_bytes(config));
        EXPECT_EQ(row["scratch_bytes"], scratch);
        EXPECT_EQ(row["total_bytes"], cache + Decoder::weight_bytes(config) + scratch);
        EXPECT_EQ(row["fits"], true);
    }
    const json tight = plan("'" + austen() + "/config.json' -d 512 --ram 2M")["rows"][0];
    EXPECT_EQ(tight["kv_bytes"], 3 << 19);
    EXPECT_EQ(tight["fits"], false) << "the cache does, with the weights it does not";

    const Result text = run("memory '" + austen() + "' -d 512,2000 --kv f32");
    EXPECT_EQ(text.code, 0) << text.err;
    for (const char* part : {"austen: 6 layers", "512  f32", "1.5 MiB", "4.9 MiB", "yes",
                             "* the model's max_position_embeddings is 1024"}) {
        EXPECT_TRUE(holds(text.out, part)) << part << "\n" << text.out;
    }
}

TEST_F(MemoryCommandTest, EveryPresetPrints) {
    for (const tools::ModelShape& preset : tools::model_presets()) {
        const Result result = run("memory '" + preset.name + "' -d 64-256*2 --ram 64G");
        EXPECT_EQ(result.code, 0) << result.err;
        EXPECT_TRUE(holds(result.out, preset.name + ": "));
        EXPECT_EQ(holds(result.out, "are not known: a preset"), preset.mlp_projections == 0) << result.out;
        EXPECT_EQ(holds(result.out, "are estimates"), preset.mlp_projections != 0) << result.out;
        EXPECT_EQ(holds(result.out, "  ~"), preset.mlp_projections != 0) << result.out;
        EXPECT_EQ(holds(result.out, "sliding window"), preset.sliding_window > 0) << result.out;
    }
}

TEST_F(MemoryCommandTest, WhatTheEngineDoesNotRunIsNotGuessed) {
    const json printed = plan(write(
                                  R"({"architectures": ["OtherForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 4, "sliding_window": 7})") +
                              " -d 100");
    EXPECT_EQ(printed["rows"][0]["weight_bytes"], nullptr);
    EXPECT_EQ(printed["weights_are"], "not known");
    ASSERT_EQ(printed["notes"].size(), 2U) << printed;
    EXPECT_TRUE(holds(printed["notes"][0], "OtherForCausalLM")) << printed;
    EXPECT_TRUE(holds(printed["notes"][1], "sliding window of 7 tokens")) << printed;
}

TEST_F(MemoryCommandTest, DenseDecodersAreEstimated) {
    const json llama = plan("Llama-3.2-1B -d 1024 --ram 64G");
    EXPECT_EQ(llama["weights_are"], "estimated");
    // 16 layers of 2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192 weights, the head 2048 * 128256, in bf16
    const json& row = llama["rows"][0];
    EXPECT_EQ(row["weight_bytes"], 2471493632);
    EXPECT_EQ(row["total_bytes"],
              row["kv_bytes"].get<std::size_t>() + 2471493632 + row["scratch_bytes"].get<std::size_t>());
    EXPECT_EQ(row["fits"], true);
    // 512 tokens of the residual stream twice, query and output, key and value, gate and up, and the angles' cosines
    // and sines; attention's own comes on top
    EXPECT_GT(row["scratch_bytes"], 512 * 4 * (2 * 2048 + 2 * 2048 + 2 * 512 + 2 * 8192 + 64));
    EXPECT_EQ(plan("Llama-3.2-1B -d 1024 --ram 2300M")["rows"][0]["fits"], false);
    // 12 layers of 4 * 768 * 768 + 2 * 768 * 3072 weights, the head 768 * 50272 (50257 in panels of 16)
    EXPECT_EQ(plan("GPT-2 -d 64 --ram 64G")["rows"][0]["weight_bytes"], 494174208);
    EXPECT_EQ(plan("Qwen3-30B-A3B -d 64 --ram 64G")["weights_are"], "not known");

    // where a family is run, its estimate is what it takes
    json config = json::parse(contents(austen() + "/config.json"));
    const json exact = plan("'" + austen() + "' -d 700 --ram 64G")["rows"][0];
    config["architectures"] = {"MiniCPMForCausalLM"};
    config["model_type"] = "minicpm";
    const json near = plan(write(config.dump()) + " -d 700 --ram 64G");
    EXPECT_EQ(near["weights_are"], "estimated");
    EXPECT_TRUE(holds(near["notes"][0], "MiniCPMForCausalLM")) << near;
    EXPECT_EQ(near["rows"][0], exact);
    config["num_local_experts"] = 8;
    EXPECT_EQ(plan(write(config.dump()) + " -d 700 --ram 64G")["weights_are"], "not known");
    config.erase("num_local_experts");
    config["architectures"] = {"LlamaForCausalLM"};
    config["model_type"] = "llama";
    config["vocab_size"] = "many";
    const json unsized = plan(write(config.dump()) + " -d 700 --ram 64G");
    EXPECT_EQ(unsized["weights_are"], "not known");
    EXPECT_TRUE(holds(unsized["notes"][0], "vocab_size")) << unsized;
}

TEST_F(MemoryCommandTest, BadCallsAreNamed) {
    const std::string good = "'" + austen() + "' ";
    expect_bad_call("memory", {"headlong memory --help"});
    expect_bad_call("memory -d 512", {"config"});
    expect_bad_call("memory " + good, {"--depth"});
    expect_bad_call("memory Llama-9 -d 512", {"CONFIG", "'Llama-9'", "Llama-3.2-1B", "Granite-3.3-8B"});
    expect_bad_call("memory ./absent -d 512", {"./absent"});
    expect_bad_call("memory absent.json -d 512", {"absent.json", "No such file"});
    expect_bad_call("memory '" + folder_.string() + "' -d 512", {"config.json"});
    expect_bad_call("memory " + write("heads = 8") + " -d 512", {"config.json", "not valid JSON"});
    expect_bad_call("memory " + write(R"({"num_hidden_layers": 2, "num_attention_heads": 0})") + " -d 512",
                    {"num_attention_heads is 0"});
    expect_bad_call("memory " + good + "-d 512,", {"-d is '512,'", "512-8192*2"});
    expect_bad_call("memory " + good + "-d 0", {"-d is '0'", "from 1"});
    expect_bad_call("memory " + good + "-d 512 --kv f64", {"--kv is 'f64'", "f32, f16, bf16, int8 and int4"});
    for (const char* size : {"0", "-1", "G", "5X", "5GB", "1.5G", "16777216T", "18446744073709551616"}) {
        expect_bad_call("memory " + good + "-d 512 --ram " + size, {"--ram", "64G"});
    }
    // 600 tokens of austen are 10 blocks of 196608 bytes
    expect_bad_call("memory " + good + "-d 512,600 --ram 1900K", {"-d is 600", "needs 1966080 bytes", "1945600"});
    expect_bad_call("memory Llama-3.1-70B -d 1000000000000",
                    {"needs 655360000000000000 bytes", std::to_string(tools::total_memory()), "--ram SIZE"});
    expect_bad_call("memory Llama-3.1-70B -d 9223372036854775807", {"more than 18446744073709551615 bytes"});
}

}  // namespace
}  // namespace headlong::test
