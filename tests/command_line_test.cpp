// The command line as others use it: exit codes, one-line errors, and the JSON that programs rely on.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <headlong/context.hpp>
#include <headlong/version.hpp>

#include "engine/decoder_families.hpp"
#include "tests/support/command_line.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/shared_data.hpp"
#include "tests/support/write_safetensors.hpp"

namespace headlong::test {
namespace {

using nlohmann::json;

class CommandLineTest : public CommandLine {
  protected:
    CommandLineTest() { std::filesystem::create_directories(folder_ / "cases"); }

    /// Runs verify --json and returns what it printed.
    json verify(const std::string& arguments, int code, const std::string& before = "") const {
        const Result result = run("verify --json " + arguments, before);
        EXPECT_EQ(result.code, code) << arguments << "\n" << result.out << result.err;
        EXPECT_EQ(result.err, "");
        json report = json::parse(result.out, nullptr, false);
        EXPECT_FALSE(report.is_discarded()) << result.out;
        return report;
    }

    /// The only case of the report, which must have failed.
    std::string why_it_failed(const std::string& arguments) const {
        const json report = verify(arguments, 1);
        if (!report.is_object() || report["cases"].size() != 1) {
            ADD_FAILURE() << report;
            return "";
        }
        EXPECT_EQ(report["failed"], 1);
        EXPECT_EQ(report["passed"], 0);
        EXPECT_EQ(report["cases"][0]["status"], "failed");
        const std::string why = report["cases"][0]["why"];
        EXPECT_EQ(why.find('\n'), std::string::npos) << why;
        return why;
    }

    std::string case_path(const std::string& name = "case.safetensors") const {
        return (folder_ / "cases" / name).string();
    }
};

std::vector<float> ones(std::size_t count) { return std::vector<float>(count, 1.0F); }

/// A case of Attention that passes: one key, so that the output is its value.
std::vector<TensorToWrite> small_attention() {
    return {tensor_to_write("Q", "F32", {1, 2, 1, 4}, ones(8)), tensor_to_write("K", "F32", {1, 1, 1, 4}, ones(4)),
            tensor_to_write("V", "F32", {1, 1, 1, 3}, ones(3)), tensor_to_write("Y", "F32", {1, 2, 1, 3}, ones(6))};
}

const std::map<std::string, std::string> kAttention{
    {"name", "small"}, {"op", "Attention"}, {"opset", "25"}, {"inputs", "Q,K,V"}, {"outputs", "Y"}};

TEST_F(CommandLineTest, HelpAndVersion) {
    for (const char* arguments : {"--help", "-h", "verify --help", "info --help", "profile --help"}) {
        const Result help = run(arguments);
        EXPECT_EQ(help.code, 0) << arguments;
        EXPECT_EQ(help.err, "");
        EXPECT_TRUE(holds(help.out, "Usage: headlong")) << help.out;
    }
    EXPECT_TRUE(holds(run("--help").out, "Examples:"));
    EXPECT_TRUE(holds(run("verify --help").out, "Examples:"));
    const Result number = run("--version");
    EXPECT_EQ(number.code, 0);
    EXPECT_EQ(number.out, std::string("headlong ") + version() + "\n");
}

TEST_F(CommandLineTest, BadCallsAreOneLineAndCodeTwo) {
    expect_bad_call("", {"info", "verify", "profile", "headlong --help"});
    expect_bad_call("--bogus", {"--bogus", "headlong --help"});
    expect_bad_call("bogus", {"bogus", "headlong --help"});
    expect_bad_call("verify --bogus", {"--bogus", "headlong verify --help"});
    expect_bad_call("verify --kv f64", {"--kv is 'f64'", "no type", "f32, f16, bf16, int8 and int4"});
    expect_bad_call("verify --kv int8:int2",
                    {"--kv is 'int8:int2'", "'int2' is no type", "f32, f16, bf16, int8 and int4"});
    expect_bad_call("verify --kv f16,f32", {"--kv is 'f16,f32'", "a list", "int8:f16"});
    expect_bad_call("info --measures", {"--measures"});
    expect_bad_call("info extra", {"extra"});
    expect_bad_call("verify --isa", {"--isa"});
    expect_bad_call("verify --isa nonsense", {"'nonsense'", "generic", "all"});
    expect_bad_call("verify --threads 0", {"--threads", "0"});
    expect_bad_call("verify --threads many", {"--threads", "many"});
    expect_bad_call("verify --threads -1", {"--threads"});
}

TEST_F(CommandLineTest, MissingAndEmptyPathsAreCodeTwo) {
    expect_bad_call("verify '" + case_path("absent") + "'", {"absent", "no such file"});
    expect_bad_call("verify 'a\nb'", {"a\\x0ab"});
    expect_bad_call("verify '" + (folder_ / "cases").string() + "'", {"no *.safetensors"});
    // nothing runs if one of several paths is wrong
    expect_bad_call("verify '" + shipped_case("multi_head").string() + "' '" + case_path("absent") + "'", {"absent"});
}

TEST_F(CommandLineTest, InfoTellsWhatWillBeUsed) {
    const Result text = run("info");
    EXPECT_EQ(text.code, 0);
    EXPECT_EQ(text.err, "");
    EXPECT_TRUE(holds(text.out, version()));

    const Result result = run("info --json");
    EXPECT_EQ(result.code, 0);
    const json info = json::parse(result.out);
    EXPECT_EQ(info["version"], version());
    std::vector<std::string> names;
    for (const Isa isa : available_isas()) names.emplace_back(to_string(isa));
    EXPECT_EQ(info["isa"]["available"], names);
    EXPECT_EQ(info["isa"]["chosen"], names.back());
    EXPECT_EQ(info["threads"]["default"], default_concurrency());

    const json capped = json::parse(run("info --json", "HEADLONG_ISA=generic").out);
    EXPECT_EQ(capped["isa"]["available"], std::vector<std::string>{"generic"});
    EXPECT_EQ(capped["isa"]["chosen"], "generic");
    EXPECT_EQ(capped["HEADLONG_ISA"], "generic");
}

TEST_F(CommandLineTest, EnvironmentVariableOfNonsenseIsABadCall) {
    for (const char* arguments : {"info", "verify", "verify --isa all"}) {
        expect_bad_call(arguments, {"HEADLONG_ISA", "nonsense", "generic"}, "HEADLONG_ISA=nonsense");
    }
}

TEST_F(CommandLineTest, ShippedLayersPassOnEveryInstructionSet) {
    const json report = verify("--isa all '" + shipped_case("multi_head").string() + "'", 0);
    EXPECT_EQ(report["passed"], 8 * available_isas().size());
    EXPECT_EQ(report["failed"], 0);
    EXPECT_EQ(report["skipped"], 0);
    ASSERT_EQ(report["cases"].size(), 8 * available_isas().size());
    std::map<std::string, int> per_isa;
    for (const json& each : report["cases"]) {
        ++per_isa[each["isa"]];
        EXPECT_EQ(each["status"], "passed");
        EXPECT_TRUE(each["max_abs_err"].is_number()) << each;
        EXPECT_EQ(each["why"], "");
        EXPECT_EQ(each.size(), 5U) << each;
    }
    for (const Isa isa : available_isas()) EXPECT_EQ(per_isa[to_string(isa)], 8) << to_string(isa);
}

TEST_F(CommandLineTest, ShippedAttentionPassesOrIsSkippedByName) {
    const json report = verify("--isa all '" + shipped_case("attention_edges").string() + "'", 0);
    EXPECT_EQ(report["failed"], 0);
    EXPECT_GE(report["passed"], 3 * available_isas().size());
    for (const json& each : report["cases"]) {
        if (each["status"] == "passed") continue;
        EXPECT_EQ(each["status"], "skipped");
        EXPECT_EQ(each["why"].get<std::string>().find("needs "), 0U) << each;
        EXPECT_TRUE(each["max_abs_err"].is_null()) << each;
    }
}

TEST_F(CommandLineTest, InstructionSetsAreCountedAsAsked) {
    const std::string file = "'" + shipped_case("multi_head/seed_d8_h2_t5.safetensors").string() + "'";
    const json capped = verify("--isa all " + file, 0, "HEADLONG_ISA=generic");
    EXPECT_EQ(capped["passed"], 1);
    ASSERT_EQ(capped["cases"].size(), 1U);
    EXPECT_EQ(capped["cases"][0]["isa"], "generic");
    EXPECT_EQ(capped["cases"][0]["name"], "seed_d8_h2_t5");

    EXPECT_EQ(verify(file, 0)["cases"][0]["isa"], to_string(available_isas().back()));
    EXPECT_EQ(verify("--isa generic --threads 2 " + file, 0)["cases"][0]["isa"], "generic");
    if (available_isas().size() > 1) {
        expect_bad_call("verify " + file + " --isa " + to_string(available_isas().back()), {"--isa", "generic"},
                        "HEADLONG_ISA=generic");
    }
}

TEST_F(CommandLineTest, SelfTestPasses) {
    const json report = verify("--isa all", 0);
    EXPECT_EQ(report["failed"], 0);
    EXPECT_EQ(report["skipped"], 0);
    EXPECT_GE(report["passed"], 20 * available_isas().size());
}

TEST_F(CommandLineTest, CachesOfOtherTypesPassOnWhatTheyHold) {
    for (const std::string types : {"f16", "bf16", "f16:f32", "int8", "int4", "int8:f16", "f32:int4"}) {
        if (emulated() && types != "bf16" && types != "int8" && types != "f32:int4") continue;
        SCOPED_TRACE(types);
        const std::string kv = "--isa all --kv " + types + " ";
        const json self_test = verify(kv, 0);
        EXPECT_EQ(self_test["failed"], 0);
        EXPECT_EQ(self_test["skipped"], 0);
        EXPECT_GE(self_test["passed"], 20 * available_isas().size());
        const json shipped = verify(
            kv + "'" + shipped_case("multi_head").string() + "' '" + shipped_case("attention_edges").string() + "'", 0);
        EXPECT_EQ(shipped["failed"], 0);
        EXPECT_EQ(shipped["skipped"], 0);
        EXPECT_GE(shipped["passed"], (8 + 3) * available_isas().size());
        for (const json& each : shipped["cases"]) EXPECT_TRUE(each["max_abs_err"].is_number()) << each;
    }
    // the reference must have computed with what is held: 1 + 2^-12 is 1 in f16, and not what the file expects
    std::vector<TensorToWrite> tensors = small_attention();
    tensors[2] = tensor_to_write("V", "F32", {1, 1, 1, 3}, std::vector<float>(3, 1.0F + 0x1p-12F));
    tensors[3] = tensor_to_write("Y", "F32", {1, 2, 1, 3}, std::vector<float>(6, 1.0F + 0x1p-12F));
    write_safetensors(case_path(), tensors, kAttention);
    for (const char* types : {"f32", "f16", "f32:f16", "int8:f16"}) {
        const json report = verify(std::string("--kv ") + types + " '" + case_path() + "'", 0);
        EXPECT_EQ(report["passed"], 1) << report;
        EXPECT_EQ(report["cases"][0]["max_abs_err"], 0.0) << types;
    }
    const json model = verify("--kv f16 '" + (source_dir() / "tools" / "models" / "austen").string() + "'", 0);
    EXPECT_EQ(model["passed"], 1) << model;
    EXPECT_GT(model["cases"][0]["max_abs_err"], 5e-4) << "which f32 stays under: " << model;
}

TEST_F(CommandLineTest, TheTableEndsWithASummary) {
    const Result result = run("verify '" + shipped_case("multi_head/seed_d8_h2_t5.safetensors").string() + "'");
    EXPECT_EQ(result.code, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_TRUE(result.out.ends_with("\n1 passed, 0 failed, 0 skipped\n")) << result.out;
}

TEST_F(CommandLineTest, AWrongExpectationFails) {
    std::vector<TensorToWrite> tensors = small_attention();
    write_safetensors(case_path(), tensors, kAttention);
    EXPECT_EQ(verify("'" + case_path() + "'", 0)["passed"], 1);

    std::vector<float> y = ones(6);
    y[4] = 1.25F;
    tensors[3] = tensor_to_write("Y", "F32", {1, 2, 1, 3}, y);
    write_safetensors(case_path(), tensors, kAttention);
    const json report = verify("'" + case_path() + "'", 1);
    EXPECT_EQ(report["failed"], 1);
    EXPECT_EQ(report["cases"][0]["name"], "small");
    EXPECT_EQ(report["cases"][0]["max_abs_err"], 0.25);
    const std::string why = report["cases"][0]["why"];
    EXPECT_TRUE(holds(why, "Y[0, 1, 0, 1] is 1, expected 1.25") && holds(why, "1 of 6")) << why;

    // infinities and NaN match only themselves, however wide the tolerance
    std::map<std::string, std::string> wide = kAttention;
    wide["atol"] = "1e30";
    wide["rtol"] = "1e30";
    EXPECT_EQ(verify("'" + case_path() + "'", 1)["failed"], 1);
    write_safetensors(case_path(), tensors, wide);
    EXPECT_EQ(verify("'" + case_path() + "'", 0)["passed"], 1);
    for (const float odd : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        y[4] = odd;
        tensors[3] = tensor_to_write("Y", "F32", {1, 2, 1, 3}, y);
        write_safetensors(case_path(), tensors, wide);
        EXPECT_TRUE(holds(why_it_failed("'" + case_path() + "'"), "Y[0, 1, 0, 1]"));
    }
}

TEST_F(CommandLineTest, UnreadableFilesHaveFailed) {
    write_raw_safetensors(case_path(), "{}", "", 1'000'000);
    EXPECT_TRUE(holds(why_it_failed("'" + case_path() + "'"), "header length is 1000000"));
    write_safetensors(case_path(), small_attention());
    EXPECT_TRUE(holds(why_it_failed("'" + case_path() + "'"), "'op' is missing"));
    std::ofstream(case_path(), std::ios::trunc) << "x";
    EXPECT_TRUE(holds(why_it_failed("'" + case_path() + "'"), "has 1 bytes"));
    EXPECT_TRUE(holds(why_it_failed("/dev/null"), "not a regular file"));
    // a broken file beside good ones takes nothing from them
    write_safetensors(case_path("other.safetensors"), small_attention(), kAttention);
    const json report = verify("'" + (folder_ / "cases").string() + "'", 1);
    EXPECT_EQ(report["failed"], 1);
    EXPECT_EQ(report["passed"], 1);
    EXPECT_EQ(report["cases"][0]["name"], "case");
    EXPECT_EQ(report["cases"][1]["name"], "small");
}

TEST_F(CommandLineTest, ExtentsThatNoBytesBoundHaveFailed) {
    const std::vector<float> none;
    const auto write = [&](std::int64_t batch) {
        std::vector<TensorToWrite> tensors;
        for (const char* name : {"Q", "K", "V", "Y"}) {
            tensors.push_back(tensor_to_write(name, "F32", {batch, 1, 0, 2}, none));
        }
        write_safetensors(case_path(), tensors, kAttention);
    };
    const std::string path = "--kv int8 '" + case_path() + "'";
    for (const std::int64_t batch : {std::int64_t{513}, std::int64_t{1} << 24, std::int64_t{1} << 59}) {
        write(batch);  // a cache for each sequence, and nothing in any
        EXPECT_TRUE(holds(why_it_failed(path), "extents beside a 0 may multiply to 1024"));
    }
    write(512);
    EXPECT_EQ(verify(path, 0)["passed"], 1);
}

TEST_F(CommandLineTest, MalformedAttentionHasFailed) {
    struct Change {
        TensorToWrite tensor;  // replaces the one of its name, or is added
        std::map<std::string, std::string> metadata;
        std::string why;
    };
    const TensorToWrite none{};
    const std::vector<Change> changes{
        {tensor_to_write("Q", "F32", {1, 2, 4}, ones(8)), {}, "'q_num_heads' is missing"},
        {tensor_to_write("Q", "F32", {8}, ones(8)), {}, "'Q' has 1 dimensions"},
        {tensor_to_write("K", "F32", {1, 1, 2, 2}, ones(4)), {}, "do not fit together"},
        {tensor_to_write("K", "F32", {1, 1, 4}, ones(4)), {}, "'K' has 3 dimensions"},
        {tensor_to_write("V", "F32", {1, 1, 3, 1}, ones(3)), {}, "do not fit together"},
        {tensor_to_write("Y", "F32", {1, 2, 3}, ones(6)), {}, "tensor 'Y' is F32[1, 2, 3]"},
        {tensor_to_write("Y", "F32", {1, 2, 1, 2}, ones(4)), {}, "tensor 'Y'"},
        {tensor_to_write("Q", "I32", {1, 2, 1, 4}, ones(8)), {}, "tensor 'Q' is I32"},
        {tensor_to_write("lse", "F32", {1, 2}, ones(2)), {}, "tensor 'lse'"},
        {tensor_to_write("past_key", "F32", {1, 1, 1, 4}, ones(4)), {}, "must be given together"},
        {none, {{"inputs", "Q,K,V,attn_mask"}}, "'attn_mask' is missing"},
        {none, {{"outputs", "Y,present_key"}}, "'present_key' is missing"},
        {none, {{"attr.scale", "much"}}, "'attr.scale' is 'much'"},
        {none, {{"attr.scale", "inf"}}, "'attr.scale' is 'inf'"},
        {none, {{"attr.is_causal", "0.5"}}, "'attr.is_causal' is '0.5'"},
        {none, {{"attr.left_window_size", "-2"}}, "'left_window_size' is -2"},
        {none, {{"atol", "-1"}}, "must not be negative"},
        {tensor_to_write("attn_mask", "F32", {3, 1}, ones(3)), {}, "tensor 'attn_mask' is F32[3, 1]"},
        {tensor_to_write("nonpad_kv_seqlen", "I64", {1}, std::vector<std::int64_t>{2}), {}, "holds 2, 0 to 1"},
    };
    for (const Change& change : changes) {
        SCOPED_TRACE(change.why);
        std::vector<TensorToWrite> tensors = small_attention();
        if (!change.tensor.name.empty()) {
            const auto same = std::ranges::find(tensors, change.tensor.name, &TensorToWrite::name);
            same == tensors.end() ? tensors.push_back(change.tensor) : void(*same = change.tensor);
        }
        std::map<std::string, std::string> metadata = kAttention;
        for (const auto& [key, value] : change.metadata) metadata[key] = value;
        write_safetensors(case_path(), tensors, metadata);
        const std::string why = why_it_failed("'" + case_path() + "'");
        EXPECT_TRUE(holds(why, change.why)) << why;
        EXPECT_TRUE(holds(why, case_path())) << why;
    }
}

/// SEMANTICS' tiny case: [1, 2, 3, 4] at position 1, in a table of two positions.
std::vector<TensorToWrite> small_rotary() {
    const std::vector<float> cosine{1.0F, 1.0F, 0.5403023F, 0.99995F};
    const std::vector<float> sine{0.0F, 0.0F, 0.8414710F, 0.00999983F};
    return {tensor_to_write("X", "F32", {1, 1, 1, 4}, std::vector<float>{1, 2, 3, 4}),
            tensor_to_write("cos_cache", "F32", {2, 2}, cosine), tensor_to_write("sin_cache", "F32", {2, 2}, sine),
            tensor_to_write("position_ids", "I64", {1, 1}, std::vector<std::int64_t>{1}),
            tensor_to_write("Y", "F32", {1, 1, 1, 4}, std::vector<float>{-1.984111F, 1.959901F, 2.462378F, 4.0198F})};
}

const std::map<std::string, std::string> kRotary{{"name", "turn"},
                                                 {"op", "RotaryEmbedding"},
                                                 {"opset", "23"},
                                                 {"inputs", "X,cos_cache,sin_cache,position_ids"},
                                                 {"outputs", "Y"}};

TEST_F(CommandLineTest, RowOperatorsReadEveryFloatType) {
    const std::string path = "'" + case_path() + "'";
    std::vector<TensorToWrite> tensors = small_rotary();
    const auto rewrite = [&](const char* name, const char* type, const auto& values) {
        const auto same = std::ranges::find(tensors, name, &TensorToWrite::name);
        *same = tensor_to_write(name, type, same->shape, values);
        write_safetensors(case_path(), tensors, kRotary);
    };
    write_safetensors(case_path(), tensors, kRotary);
    EXPECT_EQ(verify("--isa all " + path, 0)["passed"], available_isas().size());
    rewrite("X", "F64", std::vector<double>{1, 2, 3, 4});
    EXPECT_EQ(verify(path, 0)["passed"], 1);
    rewrite("X", "BF16", std::vector<std::uint16_t>{0x3F80, 0x4000, 0x4040, 0x4080});
    EXPECT_EQ(verify(path, 0)["passed"], 1);
    rewrite("X", "F16", std::vector<std::uint16_t>{0x3C00, 0x4000, 0x4200, 0x4400});
    EXPECT_EQ(verify(path, 0)["passed"], 1);
    // -1.984111, 1.959901, 2.462378 and 4.0198 rounded to float16
    rewrite("Y", "F16", std::vector<std::uint16_t>{0xBFF0, 0x3FD7, 0x40ED, 0x4405});
    const json report = verify(path, 0);
    EXPECT_EQ(report["passed"], 1);
    EXPECT_EQ(report["cases"][0]["max_abs_err"], 0.0) << "rounded once";
    rewrite("Y", "F64", std::vector<double>{-1.984111, 1.959901, 2.462378, 4.1});
    EXPECT_TRUE(holds(why_it_failed(path), "Y[0, 0, 0, 3] is 4.019"));

    // nothing to compute, whatever the other extents are
    const std::vector<float> none;
    write_safetensors(
        case_path(),
        {tensor_to_write("X", "F32", {80, 0, 3, 4}, none), tensor_to_write("cos_cache", "F32", {2, 2}, ones(4)),
         tensor_to_write("sin_cache", "F32", {2, 2}, ones(4)), tensor_to_write("Y", "F32", {80, 0, 3, 4}, none)},
        {{"op", "RotaryEmbedding"}, {"inputs", "X,cos_cache,sin_cache"}});
    EXPECT_TRUE(holds(why_it_failed(path), "tensor 'cos_cache' is F32[2, 2], its shape must be [80, 3, 2]"));
    const std::vector<std::int64_t> empty{0, std::int64_t{1} << 40, std::int64_t{1} << 40};
    write_safetensors(case_path(),
                      {tensor_to_write("X", "F32", empty, none), tensor_to_write("scale", "F32", {empty[2]}, none),
                       tensor_to_write("Y", "F32", empty, none)},
                      {{"op", "RMSNormalization"}});
    EXPECT_EQ(verify(path, 1)["failed"], 1) << "the scale has elements";
    write_safetensors(case_path(),
                      {tensor_to_write("X", "F32", {4, 0}, none), tensor_to_write("scale", "F32", {0}, none),
                       tensor_to_write("Y", "F32", {4, 0}, none)},
                      {{"op", "RMSNormalization"}});
    EXPECT_EQ(verify(path, 0)["passed"], 1);
}

TEST_F(CommandLineTest, MalformedRowOperatorsHaveFailed) {
    struct Change {
        TensorToWrite tensor;  // replaces the one of its name, or is added
        std::map<std::string, std::string> metadata;
        std::string why;
    };
    const TensorToWrite none{};
    const auto check = [&](const std::vector<TensorToWrite>& good, const std::map<std::string, std::string>& metadata,
                           const std::vector<Change>& changes, bool skipped) {
        for (const Change& change : changes) {
            SCOPED_TRACE(change.why);
            std::vector<TensorToWrite> tensors = good;
            if (!change.tensor.name.empty()) {
                const auto same = std::ranges::find(tensors, change.tensor.name, &TensorToWrite::name);
                same == tensors.end() ? tensors.push_back(change.tensor) : void(*same = change.tensor);
            }
            std::map<std::string, std::string> changed = metadata;
            for (const auto& [key, value] : change.metadata) changed[key] = value;
            write_safetensors(case_path(), tensors, changed);
            if (skipped) {
                EXPECT_EQ(verify("'" + case_path() + "'", 0)["cases"][0]["why"], change.why);
            } else {
                const std::string why = why_it_failed("'" + case_path() + "'");
                EXPECT_TRUE(holds(why, change.why)) << why;
            }
        }
    };
    const auto position = [](std::int64_t p) {
        return tensor_to_write("position_ids", "I64", {1, 1}, std::vector<std::int64_t>{p});
    };
    check(small_rotary(), kRotary,
          {
              {position(2), {}, "positions[0] is 2; the table has 2 rows"},
              {position(-1), {}, "positions[0] is -1"},
              {tensor_to_write("position_ids", "I64", {1}, std::vector<std::int64_t>{1}), {}, "'position_ids' is I64"},
              {tensor_to_write("X", "F32", {1, 4}, ones(4)), {}, "it must have 3 or 4 dimensions"},
              {tensor_to_write("X", "F32", {1, 1, 4}, ones(4)), {}, "'num_heads' is missing"},
              {tensor_to_write("X", "F32", {1, 1, 4}, ones(4)), {{"attr.num_heads", "3"}}, "'num_heads' is 3"},
              {tensor_to_write("X", "F32", {1, 1, 4}, ones(4)), {{"attr.num_heads", "0"}}, "'num_heads' is 0"},
              {tensor_to_write("X", "I32", {1, 1, 1, 4}, ones(4)), {}, "tensor 'X' is I32"},
              {tensor_to_write("Y", "F32", {1, 1, 4}, ones(4)), {}, "tensor 'Y' is F32[1, 1, 4]"},
              {tensor_to_write("cos_cache", "F32", {2, 1}, ones(2)), {}, "its shape must be [2, 1]"},
              {tensor_to_write("sin_cache", "F32", {1, 2}, ones(2)), {}, "tensor 'sin_cache'"},
              {none, {{"attr.rotary_embedding_dim", "6"}}, "'rotary_embedding_dim' is 6"},
              {none, {{"attr.rotary_embedding_dim", "3"}}, "'rotary_embedding_dim' is 3"},
              {none, {{"attr.rotary_embedding_dim", "2"}}, "tensor 'cos_cache' is F32[2, 2]"},
              {none, {{"attr.interleaved", "2"}}, "'interleaved' is 2"},
          },
          false);
    check(small_rotary(), kRotary,
          {
              {none, {{"attr.shiny", "1"}}, "needs attribute 'shiny' of RotaryEmbedding"},
              {none, {{"domain", "com.microsoft"}}, "needs domain 'com.microsoft' of RotaryEmbedding"},
              {none, {{"opset", "99"}}, "needs opset '99' of RotaryEmbedding"},
              {tensor_to_write("Z", "F32", {1}, ones(1)), {}, "needs tensor 'Z' of RotaryEmbedding"},
          },
          true);

    const std::vector<TensorToWrite> norm{tensor_to_write("X", "F32", {2, 3}, ones(6)),
                                          tensor_to_write("scale", "F32", {3}, ones(3)),
                                          tensor_to_write("Y", "F32", {2, 3}, ones(6))};
    const std::map<std::string, std::string> rms{{"op", "RMSNormalization"}, {"attr.epsilon", "0"}};
    write_safetensors(case_path(), norm, rms);
    EXPECT_EQ(verify("'" + case_path() + "'", 0)["passed"], 1);
    check(norm, rms,
          {
              {none, {{"attr.axis", "2"}}, "'axis' is 2, -2 to 1 are allowed"},
              {none, {{"attr.axis", "-3"}}, "'axis' is -3"},
              {none, {{"attr.epsilon", "-1"}}, "'epsilon' is -1"},
              {tensor_to_write("Y", "F32", {3, 2}, ones(6)), {}, "tensor 'Y'"},
          },
          false);
    check(norm, rms,
          {{tensor_to_write("scale", "F32", {1}, ones(1)), {}, "needs broadcast 'scale' of RMSNormalization"}}, true);

    const std::vector<TensorToWrite> gates{tensor_to_write("A", "F32", {2}, std::vector<float>{0, 0}),
                                           tensor_to_write("B", "F32", {2}, ones(2)),
                                           tensor_to_write("Y", "F32", {2}, std::vector<float>{0, 0})};
    write_safetensors(case_path(), gates, {{"op", "SwiGLU"}});
    EXPECT_EQ(verify("'" + case_path() + "'", 0)["passed"], 1);
    check(gates, {{"op", "SwiGLU"}}, {{tensor_to_write("B", "F32", {1}, ones(1)), {}, "tensor 'B' is F32[1]"}}, false);
    check(gates, {{"op", "SwiGLU"}}, {{none, {{"attr.alpha", "2"}}, "needs alpha '2' of SwiGLU"}}, true);
}

TEST_F(CommandLineTest, WhatIsNotKnownIsSkippedByName) {
    const auto why = [&](const std::vector<TensorToWrite>& tensors, const std::map<std::string, std::string>& changes) {
        std::map<std::string, std::string> metadata = kAttention;
        for (const auto& [key, value] : changes) metadata[key] = value;
        write_safetensors(case_path(), tensors, metadata);
        const json report = verify("'" + case_path() + "'", 0);
        EXPECT_EQ(report["skipped"], 1);
        return report["cases"][0]["why"].get<std::string>();
    };
    EXPECT_EQ(why(small_attention(), {{"op", "Softmax"}}), "needs op Softmax");
    EXPECT_TRUE(holds(why(small_attention(), {{"attr.shiny", "1"}}), "'shiny'"));
    EXPECT_TRUE(holds(why(small_attention(), {{"opset", "99"}}), "'99'"));
    std::vector<TensorToWrite> more = small_attention();
    more.push_back(tensor_to_write("alibi", "F32", {2}, ones(2)));
    EXPECT_TRUE(holds(why(more, {}), "'alibi'"));

    std::ofstream(folder_ / "cases" / "config.json") << "{}";
    const json report = verify("'" + (folder_ / "cases").string() + "/'", 1);  // a folder with config.json is a model
    EXPECT_EQ(report["failed"], 1);
    EXPECT_EQ(report["cases"][0]["name"], "cases");
    EXPECT_TRUE(holds(report["cases"][0]["why"].get<std::string>(), "architectures: is missing"));
}

TEST_F(CommandLineTest, SharedCasesPassOrAreSkippedByName) {
    const std::filesystem::path shared = shared_data("conformance");
    if (shared.empty()) GTEST_SKIP() << "needs the shared data's folder conformance (set HEADLONG_SHARED)";
    for (const char* folder : {"multi_head", "onnx_attention", "attention_edges", "onnx_ops"}) {
        const json report = verify("--isa all '" + (shared / folder).string() + "'", 0);
        EXPECT_EQ(report["failed"], 0) << folder;
        // what this version has passes; a case may be skipped only by the name of what is missing
        const std::map<std::string, std::size_t> passed{
            {"multi_head", 8}, {"onnx_attention", 52}, {"attention_edges", 20}, {"onnx_ops", 29}};
        EXPECT_EQ(report["passed"].get<std::size_t>(), passed.at(folder) * available_isas().size()) << folder;
        for (const json& each : report["cases"]) {
            if (each["status"] == "skipped") {
                EXPECT_EQ(each["why"].get<std::string>().find("needs "), 0U) << each;
            }
        }
    }
}

TEST_F(CommandLineTest, GenerateContinuesTheGoldenPrompt) {
    std::ifstream file(source_dir() / "tools" / "models" / "austen" / "golden.json");
    const json golden = json::parse(file);
    const std::string prompt = "-p '" + golden["prompt"].get<std::string>() + "' -n 96 ";
    const Result result = run("generate --json " + prompt);
    ASSERT_EQ(result.code, 0) << result.err;
    const json printed = json::parse(result.out);
    EXPECT_EQ(printed["prompt_tokens"], golden["prompt_ids"]);
    EXPECT_EQ(printed["tokens"], golden["greedy"]);
    EXPECT_EQ(printed["text"], golden["text"]);
    EXPECT_GT(printed["prefill_tokens_per_s"].get<double>(), 0.0);
    EXPECT_GT(printed["decode_tokens_per_s"].get<double>(), 0.0);
    EXPECT_GT(printed["kv_bytes"].get<int>(), 0);
    const Result text = run("generate " + prompt + " --isa generic --threads 1");
    EXPECT_EQ(text.out.find(golden["text"].get<std::string>()), 0U) << text.out;
    EXPECT_EQ(text.out, golden["text"].get<std::string>() + "\n") << "the text and nothing else";
    EXPECT_NE(text.err.find("generic]"), std::string::npos) << "the figures name the instruction set";
    const Result folder =
        run("generate '" + (source_dir() / "tools" / "models" / "austen").string() + "' --json " + prompt);
    EXPECT_EQ(json::parse(folder.out)["tokens"], golden["greedy"]);
    const Result stopped = run("generate --json --stop 'dance' --stop room " + prompt);
    EXPECT_EQ(json::parse(stopped.out)["text"], " walked about the ");
    const Result empty = run("generate --json -p '' -n 3 --ignore-eos");
    EXPECT_EQ(json::parse(empty.out)["tokens"].size(), 3U);
    const std::string seeded = "generate --json -p Emma -n 20 --temperature 1 --top-k 40 --top-p 0.9 --seed 5";
    EXPECT_EQ(json::parse(run(seeded).out)["tokens"], json::parse(run(seeded).out)["tokens"]);
}

TEST_F(CommandLineTest, SharedCasesPassWithCachesOfOtherTypes) {
    const std::filesystem::path shared = shared_data("conformance");
    if (shared.empty()) GTEST_SKIP() << "needs the shared data's folder conformance (set HEADLONG_SHARED)";
    for (const std::string types : {"f16", "bf16", "f32:bf16", "int8", "int4", "int8:f16", "f32:int4"}) {
        if (emulated() && types != "bf16" && types != "int8" && types != "f32:int4") continue;
        for (const auto& [folder, passed] :
             std::map<std::string, std::size_t>{{"multi_head", 8}, {"onnx_attention", 52}, {"attention_edges", 20}}) {
            const json report = verify("--kv " + types + " '" + (shared / folder).string() + "'", 0);
            EXPECT_EQ(report["failed"], 0) << folder << " " << types;
            EXPECT_EQ(report["passed"], passed) << folder << " " << types;
        }
    }
}

TEST_F(CommandLineTest, GenerateKeepsKeysAndValuesInTheTypesAskedFor) {
    const auto generated = [&](const std::string& arguments) {
        const Result result = run("generate --json -p 'It is a truth' -n 20 --ignore-eos " + arguments);
        EXPECT_EQ(result.code, 0) << result.err;
        return json::parse(result.out, nullptr, false);
    };
    const json floats = generated("");
    const auto bytes = floats["kv_bytes"].get<std::size_t>();
    EXPECT_EQ(generated("--kv f32")["kv_bytes"], bytes);
    EXPECT_EQ(generated("--kv f16")["kv_bytes"], bytes / 2);
    EXPECT_EQ(generated("--kv bf16")["kv_bytes"], bytes / 2);
    EXPECT_EQ(generated("--kv f16:f32")["kv_bytes"], bytes / 4 * 3);
    // a key and a value of a token: 64 numbers, or as many codes with two scales
    EXPECT_EQ(generated("--kv int8")["kv_bytes"], bytes / 256 * 72);
    EXPECT_EQ(generated("--kv int8:f32")["kv_bytes"], bytes / 256 * (36 + 128));
    for (const char* types : {"f16", "int8", "int4"}) {
        EXPECT_EQ(generated(std::string("--kv ") + types)["tokens"].size(), 20U) << types;
    }
}

TEST_F(CommandLineTest, SavedCachesGoOnAsIfNothingHadBeen) {
    const std::string file = "'" + testing::TempDir() + "headlong_command_line.kv'";
    for (const std::string flags : {"", "--kv int8 --window 40 --sink-tokens 4"}) {
        if (emulated() && flags.empty()) continue;
        const auto generated = [&](const std::string& arguments) {
            const Result result = run("generate --json --ignore-eos " + flags + " " + arguments);
            EXPECT_EQ(result.code, 0) << result.err;
            return json::parse(result.out, nullptr, false);
        };
        const json whole = generated("-p 'It is a truth' -n 60");
        const json first = generated("-p 'It is a truth' -n 25 --save-cache " + file);
        json tokens = first["tokens"];
        const json rest = generated("-p '' -n 35 --load-cache " + file);
        for (const json& token : rest["tokens"]) tokens.push_back(token);
        EXPECT_EQ(tokens, whole["tokens"]) << flags;
        const json more = generated("-p ' and then' -n 5 --load-cache " + file + " --save-cache " + file);
        EXPECT_EQ(more["tokens"].size(), 5U);
        expect_bad_call("generate -p a --kv f16 --load-cache " + file, {"key_type"});
    }
    expect_bad_call("generate -p a --load-cache /nowhere.kv", {"/nowhere.kv"});
    expect_bad_call("generate -p a -n 1 --save-cache /nowhere/a.kv", {"/nowhere/a.kv"});
    std::filesystem::remove(testing::TempDir() + "headlong_command_line.kv");
}

TEST_F(CommandLineTest, PerplexityComparesTypesOfCaches) {
    const std::string path = testing::TempDir() + "headlong_perplexity.txt";
    {
        std::ofstream text(path);
        for (int i = 0; i < (emulated() ? 2 : 20); ++i) {
            text << "Emma was very glad to see them, and they walked about the room together. She had not been long "
                    "there.\n";
        }
    }
    const auto measured = [&](const std::string& arguments) {
        const Result result = run("perplexity --json '" + path + "' " + arguments);
        EXPECT_EQ(result.code, 0) << result.err;
        return json::parse(result.out, nullptr, false);
    };
    const json windows = measured("--kv int8,f16:int4");
    ASSERT_EQ(windows["rows"].size(), 3U) << "f32 is computed too";
    EXPECT_EQ(windows["rows"][0]["kv"], "f32");
    EXPECT_EQ(windows["rows"][0]["difference"], 0.0);
    for (const json& row : windows["rows"]) {
        EXPECT_GT(row["perplexity"].get<double>(), 1.0);
        EXPECT_LT(row["perplexity"].get<double>(), 100.0);
        EXPECT_NEAR(row["difference"].get<double>(), 0.0, 0.1);
        EXPECT_NEAR(std::exp(row["loss"].get<double>()), row["perplexity"].get<double>(), 1e-9);
    }
    if (emulated()) return;
    // a ring that holds all of the text sees what one pass without a ring would
    const json ring = measured("--window 100000 --sink-tokens 4");
    const json small = measured("--window 16 --sink-tokens 4");
    EXPECT_GT(small["rows"][0]["loss"].get<double>(), ring["rows"][0]["loss"].get<double>());
    expect_bad_call("perplexity '" + path + "' --sink-tokens 4", {"--sink-tokens", "--window"});
    expect_bad_call("perplexity '" + path + "' --window 4 --sink-tokens 4", {"--sink-tokens is 4"});
    expect_bad_call("perplexity /nowhere.txt", {"/nowhere.txt"});
    expect_bad_call("perplexity", {"paths"});
    std::filesystem::remove(path);
}

TEST_F(CommandLineTest, GenerateRefusesBadCalls) {
    expect_bad_call("generate -p a --sink-tokens 4", {"--sink-tokens", "--window"});
    expect_bad_call("generate -p a --window 4 --sink-tokens 4", {"--sink-tokens is 4"});
    expect_bad_call("generate -p a --kv int2", {"--kv is 'int2'", "no type", "f32, f16, bf16, int8 and int4"});
    expect_bad_call("generate -p a --kv f16,f32", {"--kv is 'f16,f32'", "a list"});
    expect_bad_call("profile --kv int2", {"--kv is 'int2'", "no type", "f32, f16, bf16, int8 and int4"});

    expect_bad_call("generate /nowhere", {"/nowhere/config.json"});
    expect_bad_call("generate -n -1", {"max_tokens is -1"});
    expect_bad_call("generate -p a --temperature -2", {"temperature is -2"});
    expect_bad_call("generate -p a --top-p 0", {"top_p is 0"});
    expect_bad_call("generate -p a --seed -1", {"--seed"});
    expect_bad_call("generate -p a --stop ''", {"stop"});
    expect_bad_call("generate -p a --isa sse9", {"sse9"});
    expect_bad_call("generate -p a --prompt-file b", {"--prompt-file"});
    expect_bad_call("generate --prompt-file /nowhere.txt", {"/nowhere.txt"});
    expect_bad_call("generate -p a --no-such-flag", {"--no-such-flag"});
}

TEST_F(CommandLineTest, VerifyComputesModels) {
    const std::string austen = (source_dir() / "tools" / "models" / "austen").string();
    const json result = verify("'" + austen + "' --isa all", 0);
    EXPECT_EQ(result["passed"].get<std::size_t>(), available_isas().size());
    EXPECT_EQ(result["failed"], 0);
    EXPECT_LT(result["cases"][0]["max_abs_err"].get<double>(), 6e-5);
}

// A model of each family, as make-model writes it, loads and generates: shapes and names agree, without golden files.
TEST_F(CommandLineTest, MakesModelsOfEveryFamily) {
    for (const Family& family : decoder_families()) {
        const std::string architecture = family.architecture;
        if (emulated() && architecture != "GptOssForCausalLM" && architecture != "GPT2LMHeadModel") continue;
        SCOPED_TRACE(architecture);
        json config = {{"architectures", {architecture}},
                       {"vocab_size", 300},
                       {"hidden_size", 64},
                       {"intermediate_size", 40},
                       {"num_hidden_layers", 2},
                       {"num_attention_heads", 4},
                       {"num_key_value_heads", 4},
                       {"n_embd", 64},
                       {"n_layer", 2},
                       {"n_head", 4},
                       {"num_local_experts", 3},
                       {"num_experts_per_tok", 2},
                       {"moe_intermediate_size", 24},
                       {"sliding_window", 5},
                       {"use_sliding_window", true},
                       {"max_window_layers", 1},
                       {"max_position_embeddings", 512}};
        if (architecture == "GptOssForCausalLM") {
            config["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 8.0}, {"original_max_position_embeddings", 64}};
        }
        if (family.windows == Windows::none) config.erase("sliding_window");
        if (architecture != "MixtralForCausalLM" && architecture != "Qwen3MoeForCausalLM" &&
            architecture != "GptOssForCausalLM") {
            for (const char* key : {"num_local_experts", "num_experts_per_tok", "moe_intermediate_size"})
                config.erase(key);
        } else if (architecture != "Qwen3MoeForCausalLM") {
            config.erase("moe_intermediate_size");
        }
        if (!family.window_switch) config.erase("use_sliding_window");
        if (family.inner != nullptr) {
            json inner = config;
            inner.erase("architectures");
            config = {{"architectures", {architecture}}, {family.inner, inner}};
        }
        const std::filesystem::path source = folder_ / (architecture + ".json");
        const std::filesystem::path model = folder_ / architecture;
        write_bytes(source.string(), config.dump());
        const std::string quoted = "'" + model.string() + "'";
        const Result made = run("make-model " + quoted + " '" + source.string() + "' --weights f16 --seed 3");
        ASSERT_EQ(made.code, 0) << made.err;
        EXPECT_TRUE(holds(made.out, architecture + ", 2 layers")) << made.out;
        const Result generated = run("generate " + quoted + " -p 'abc def' -n 12 --ignore-eos --json --weights int8");
        ASSERT_EQ(generated.code, 0) << generated.err;
        EXPECT_EQ(json::parse(generated.out)["tokens"].size(), 12U) << generated.out;
        expect_bad_call("make-model " + quoted + " '" + source.string() + "'", {"config.json: is there already"});
    }
    expect_bad_call("make-model '" + (folder_ / "x").string() + "' Llama-3.2-1B --weights int8", {"--weights", "int8"});
    expect_bad_call("make-model '" + (folder_ / "x").string() + "' Llama-3.2-1B --set rope_theta",
                    {"--set", "KEY=VALUE"});
    expect_bad_call("make-model '" + (folder_ / "x").string() + "' absent.json", {"absent.json"});
}

TEST_F(CommandLineTest, AModelThatDoesNotFitIsRefusedBeforeItIsLoaded) {
    const std::filesystem::path folder = folder_ / "large";
    const std::filesystem::path austen = source_dir() / "tools" / "models" / "austen";
    std::filesystem::create_directories(folder);
    for (const char* name : {"model.safetensors", "tokenizer.json"}) {
        std::filesystem::create_symlink(austen / name, folder / name);
    }
    std::ifstream file(austen / "config.json");
    json config = json::parse(file);
    config["intermediate_size"] = 1 << 24;
    write_bytes((folder / "config.json").string(), config.dump());
    const std::string quoted = "'" + folder.string() + "'";
    // 6 layers of 3 * 192 * 2^24 weights in bf16, and little beside
    expect_bad_call("generate " + quoted + " -p a -n 1", {"weights of bf16: needs 108 GiB", "GiB are available"});
    expect_bad_call("generate " + quoted + " -p a -n 1 --weights f32", {"weights of f32: needs 216 GiB"});
}

}  // namespace
}  // namespace headlong::test
