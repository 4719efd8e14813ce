// The reader of safetensors files: what it gives of good files, and that every broken one ends in one clear line.
#include "engine/safetensors.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <headlong/error.hpp>

#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/shared_data.hpp"
#include "tests/support/write_safetensors.hpp"

namespace headlong::test {
namespace {

/// A folder of the test's own, removed with everything in it.
class SafetensorsTest : public testing::Test {
  protected:
    SafetensorsTest() {
        const testing::TestInfo* const info = testing::UnitTest::GetInstance()->current_test_info();
        folder_ = std::filesystem::temp_directory_path() /
                  ("headlong-" + std::string(info->name()) + "-" + std::to_string(::getpid()));
        std::filesystem::create_directories(folder_);
    }
    ~SafetensorsTest() override {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }

    std::string path(const std::string& name = "case.safetensors") const { return (folder_ / name).string(); }

    /// Opens the file and expects a BadFile of one line that names the file and holds each of the texts.
    void expect_bad_file(const std::vector<std::string>& texts) const {
        for (const bool map : {true, false}) {
            try {
                const SafetensorsFile file(path(), {.map = map});
                ADD_FAILURE() << "the file was accepted";
            } catch (const BadFile& error) {
                const std::string message = error.what();
                EXPECT_EQ(message.find('\n'), std::string::npos) << message;
                EXPECT_LT(message.size(), 1500U) << message;
                EXPECT_EQ(message.find(path()), 0U) << message;
                for (const std::string& text : texts) EXPECT_NE(message.find(text), std::string::npos) << message;
            } catch (const std::exception& error) {
                ADD_FAILURE() << "not a BadFile: " << error.what();
            }
        }
    }

    void expect_bad_header(const std::string& header, const std::string& data,
                           const std::vector<std::string>& texts) const {
        SCOPED_TRACE(header.substr(0, 200));
        write_raw_safetensors(path(), header, data);
        expect_bad_file(texts);
    }

    std::filesystem::path folder_;
};

const std::string kFourBytes(4, '\0');

TEST_F(SafetensorsTest, ReadsWhatWasWritten) {
    const std::vector<float> a{1.5F, -2.0F, std::numeric_limits<float>::infinity(), 0.0F, 1e-45F, 6.0F};
    const std::vector<std::int64_t> b{-1, std::numeric_limits<std::int64_t>::max()};
    write_safetensors(path(),
                      {tensor_to_write("weight", "F32", {2, 3}, a), tensor_to_write("ids", "I64", {2}, b),
                       tensor_to_write("none", "F16", {0, 5}, std::vector<std::uint16_t>{}),
                       tensor_to_write("scalar", "F64", {}, std::vector<double>{0.1})},
                      {{"name", "a case"}, {"op", "Attention"}});
    for (const bool map : {true, false}) {
        const SafetensorsFile file(path(), {.map = map});
        EXPECT_EQ(file.mapped(), map);
        EXPECT_EQ(file.path(), path());
        ASSERT_EQ(file.tensors().size(), 4U);
        EXPECT_EQ(file.metadata().at("name"), "a case");
        EXPECT_EQ(file.metadata().size(), 2U);
        const FileTensor& weight = file.at("weight");
        EXPECT_EQ(weight.type, FileType::f32);
        EXPECT_EQ(weight.shape, (std::vector<std::int64_t>{2, 3}));
        EXPECT_EQ(weight.count(), 6U);
        EXPECT_EQ(describe(weight), "F32[2, 3]");
        EXPECT_EQ(to_floats(weight), a);
        EXPECT_EQ(to_doubles(weight)[4], 0x1p-149);
        EXPECT_EQ(to_int64s(file.at("ids")), b);
        EXPECT_TRUE(to_floats(file.at("none")).empty());
        EXPECT_EQ(describe(file.at("scalar")), "F64[]");
        EXPECT_EQ(to_doubles(file.at("scalar")), std::vector<double>{0.1});
        EXPECT_EQ(file.find("bias"), nullptr);
        try {
            file.at("bias");
            ADD_FAILURE();
        } catch (const BadFile& error) {
            EXPECT_EQ(std::string(error.what()), path() + ": tensor 'bias' is missing");
        }
    }
}

TEST_F(SafetensorsTest, UnalignedTensorsAreReadAsTheyLie) {
    const std::vector<float> floats{1.0F, 2.0F, 3.0F};
    const std::vector<double> doubles{0.25, -8.0};
    write_safetensors(path(), {tensor_to_write("one byte", "U8", {1}, std::vector<std::uint8_t>{200}),
                               tensor_to_write("floats", "F32", {3}, floats),
                               tensor_to_write("flags", "BOOL", {2}, std::vector<std::uint8_t>{1, 0}),
                               tensor_to_write("doubles", "F64", {2}, doubles)});
    const SafetensorsFile file(path());
    EXPECT_NE(reinterpret_cast<std::uintptr_t>(file.at("floats").bytes.data()) % sizeof(float), 0U);
    EXPECT_EQ(to_int64s(file.at("one byte")), std::vector<std::int64_t>{200});
    EXPECT_EQ(to_floats(file.at("floats")), floats);
    EXPECT_EQ(to_int64s(file.at("flags")), (std::vector<std::int64_t>{1, 0}));
    EXPECT_EQ(to_doubles(file.at("doubles")), doubles);
}

TEST_F(SafetensorsTest, WidensEveryHalfExactly) {
    std::vector<std::uint16_t> all(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    write_safetensors(path(),
                      {tensor_to_write("f16", "F16", {65536}, all), tensor_to_write("bf16", "BF16", {65536}, all)});
    const SafetensorsFile file(path());
    const std::vector<double> f16 = to_doubles(file.at("f16"));
    const std::vector<float> bf16 = to_floats(file.at("bf16"));
    for (int i = 0; i < 65536; ++i) {
        const int exponent = i >> 10 & 31;
        const int mantissa = i & 1023;
        double want = exponent == 0    ? std::ldexp(mantissa, -24)
                      : exponent != 31 ? std::ldexp(1024 + mantissa, exponent - 25)
                      : mantissa == 0  ? std::numeric_limits<double>::infinity()
                                       : std::numeric_limits<double>::quiet_NaN();
        if ((i & 0x8000) != 0) want = -want;
        const auto place = static_cast<std::size_t>(i);
        EXPECT_TRUE(f16[place] == want || (std::isnan(f16[place]) && std::isnan(want))) << i;
        EXPECT_EQ(std::signbit(f16[place]), (i & 0x8000) != 0) << i;
        std::uint32_t bits = 0;
        std::memcpy(&bits, &bf16[place], sizeof bits);
        EXPECT_EQ(bits, static_cast<std::uint32_t>(i) << 16) << i;
    }
}

TEST_F(SafetensorsTest, EveryIntegerTypeConverts) {
    write_safetensors(path(), {tensor_to_write("i32", "I32", {1}, std::vector<std::int32_t>{-7}),
                               tensor_to_write("i16", "I16", {1}, std::vector<std::int16_t>{-7}),
                               tensor_to_write("i8", "I8", {1}, std::vector<std::int8_t>{-7}),
                               tensor_to_write("u32", "U32", {1}, std::vector<std::uint32_t>{4'000'000'000U}),
                               tensor_to_write("u16", "U16", {1}, std::vector<std::uint16_t>{65535}),
                               tensor_to_write("u64", "U64", {1}, std::vector<std::uint64_t>{1ULL << 62}),
                               tensor_to_write("big", "U64", {1}, std::vector<std::uint64_t>{1ULL << 63})});
    const SafetensorsFile file(path());
    for (const char* name : {"i32", "i16", "i8"}) EXPECT_EQ(to_int64s(file.at(name)), std::vector<std::int64_t>{-7});
    EXPECT_EQ(to_int64s(file.at("u32")), std::vector<std::int64_t>{4'000'000'000});
    EXPECT_EQ(to_int64s(file.at("u16")), std::vector<std::int64_t>{65535});
    EXPECT_EQ(to_int64s(file.at("u64")), std::vector<std::int64_t>{std::int64_t{1} << 62});
    EXPECT_THROW(to_int64s(file.at("big")), InvalidArgument);
    EXPECT_THROW(to_floats(file.at("i32")), InvalidArgument);
}

TEST_F(SafetensorsTest, ShippedCasesOpen) {
    std::size_t files = 0;
    for (const char* folder : {"multi_head", "attention_edges"}) {
        for (const auto& entry : std::filesystem::directory_iterator(shipped_case(folder))) {
            if (entry.path().extension() != ".safetensors") continue;
            const SafetensorsFile file(entry.path().string());
            EXPECT_EQ(file.metadata().at("name"), entry.path().stem().string());
            EXPECT_FALSE(file.tensors().empty());
            ++files;
        }
    }
    EXPECT_GE(files, 8U);
}

TEST_F(SafetensorsTest, SharedFilesOpen) {
    const std::filesystem::path shared = shared_data("conformance");
    if (shared.empty()) GTEST_SKIP() << "needs the shared data's folder conformance (set HEADLONG_SHARED)";
    for (const auto& entry : std::filesystem::recursive_directory_iterator(shared)) {
        if (entry.path().extension() != ".safetensors") continue;
        EXPECT_NO_THROW(SafetensorsFile(entry.path().string())) << entry.path();
    }
}

TEST_F(SafetensorsTest, DataThatIsReadComesFromTheGivenResource) {
    write_safetensors(path(), {tensor_to_write("x", "F32", {256}, std::vector<float>(256, 1.0F))});
    CountingResource memory;
    {
        const SafetensorsFile read(path(), {.map = false, .memory = &memory});
        EXPECT_EQ(memory.counts().live_bytes, 1024U);
        const SafetensorsFile mapped(path(), {.map = true, .memory = &memory});
        EXPECT_EQ(memory.counts().live_bytes, 1024U);
    }
    EXPECT_EQ(memory.counts().live_bytes, 0U);
    memory.fail_after(0);
    EXPECT_THROW(SafetensorsFile(path(), {.map = false, .memory = &memory}), OutOfMemory);
}

// The six of the issue, as hand-made variants of a file that is right.

TEST_F(SafetensorsTest, Truncated) {
    write_safetensors(path(), {tensor_to_write("x", "F32", {100}, std::vector<float>(100, 1.0F))});
    const std::uintmax_t size = std::filesystem::file_size(path());
    for (std::uintmax_t cut = 1; cut <= size; ++cut) {
        std::filesystem::resize_file(path(), size - cut);
        expect_bad_file(cut <= 400        ? std::vector<std::string>{"tensor 'x'", "data_offsets [0, 400]"}
                        : size - cut >= 8 ? std::vector<std::string>{"header length"}
                                          : std::vector<std::string>{"8 of header length"});
        if (HasFailure()) break;
    }
}

TEST_F(SafetensorsTest, Overlapping) {
    expect_bad_header(
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
        std::string(12, '\0'), {"tensor 'b'", "[4, 12]", "overlap", "tensor 'a'"});
    expect_bad_header(
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
        std::string(8, '\0'), {"overlap"});
}

TEST_F(SafetensorsTest, LyingSizes) {
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}})", kFourBytes,
                      {"tensor 'x'", "4 bytes", "F32", "[3]", "needs 12"});
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}})", kFourBytes,
                      {"tensor 'x'", "[0, 4000000]", "past the end", "4 bytes"});
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[0],"data_offsets":[4,0]}})", kFourBytes,
                      {"tensor 'x'", "[4, 0]", "end before they begin"});
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", kFourBytes + kFourBytes,
                      {"8 bytes of data", "end at 4"});
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", kFourBytes + kFourBytes,
                      {"tensor 'x'", "[4, 8]", "hole"});
    expect_bad_header("{}", kFourBytes, {"4 bytes of data", "end at 0"});
}

TEST_F(SafetensorsTest, WrongDtype) {
    expect_bad_header(R"({"x":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", kFourBytes,
                      {"tensor 'x'", "dtype", "'F33'", "BF16"});
    expect_bad_header(R"({"x":{"dtype":"f32","shape":[1],"data_offsets":[0,4]}})", kFourBytes, {"'f32'"});
    expect_bad_header(R"({"x":{"dtype":32,"shape":[1],"data_offsets":[0,4]}})", kFourBytes,
                      {"tensor 'x': dtype is 32", "a string"});
    expect_bad_header(R"({"x":{"dtype":null,"shape":[1],"data_offsets":[0,4]}})", kFourBytes, {"dtype is null"});
    expect_bad_header(R"({"x":{"dtype":"F64","shape":[1],"data_offsets":[0,4]}})", kFourBytes, {"needs 8"});
}

TEST_F(SafetensorsTest, HugeHeader) {
    for (const std::uint64_t length : {std::uint64_t{1'000'000}, std::uint64_t{100'000'001}, std::uint64_t{1} << 32,
                                       std::uint64_t{1} << 63, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
        write_raw_safetensors(path(), "{}", kFourBytes, length);
        expect_bad_file({"header length is " + std::to_string(length), "at most 6 are allowed"});
    }
    // a sparse file that really is that long: the bound holds whatever the file's size
    write_raw_safetensors(path(), "{}", "", 100'000'001);
    std::filesystem::resize_file(path(), 100'000'009);
    expect_bad_file({"header length is 100000001", "at most 100000000 are allowed"});
}

TEST_F(SafetensorsTest, CyclicNonsense) {
    // metadata that holds the header that holds the metadata, tensors that are made of tensors
    expect_bad_header(R"({"__metadata__":{"__metadata__":{"__metadata__":{}}}})", "",
                      {"metadata '__metadata__' is an object"});
    expect_bad_header(R"({"x":{"x":{"x":{}}}})", "", {"tensor 'x'", "the key 'x'"});
    expect_bad_header(R"({"x":{"dtype":{"dtype":"F32"},"shape":[1],"data_offsets":[0,4]}})", kFourBytes,
                      {"tensor 'x': dtype is an object"});
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", kFourBytes,
                      {"tensor 'x': shape holds an array"});
    expect_bad_header(R"({"x":"x"})", "", {"tensor 'x' is the string 'x'"});
    // the header's length, then the file again
    write_raw_safetensors(path(), "{}", "");
    std::ifstream whole(path(), std::ios::binary);
    const std::string itself((std::istreambuf_iterator<char>(whole)), std::istreambuf_iterator<char>());
    whole.close();
    expect_bad_header(itself + itself, "", {"the header begins with '\\x02'"});
}

TEST_F(SafetensorsTest, DeepNesting) {
    const std::string deep(1'000'000, '[');
    expect_bad_header("{\"x\":" + deep, "", {"tensor 'x' is an array"});
    expect_bad_header(R"({"x":{"dtype":"F32","data_offsets":[0,0],"shape":)" + deep, "", {"shape holds an array"});
    std::string objects;
    for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
    expect_bad_header(objects, "", {"tensor 'a'", "the key 'a'"});
    expect_bad_header(deep, "", {"the header begins with '['"});
}

TEST_F(SafetensorsTest, DuplicateKeys) {
    const std::string x = R"("x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
    expect_bad_header("{" + x + "," + x + "}", kFourBytes, {"tensor 'x' is given twice"});
    expect_bad_header(R"({"x":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}})", kFourBytes,
                      {"tensor 'x': dtype is given twice"});
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}})", kFourBytes,
                      {"tensor 'x': shape is given twice"});
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"data_offsets":[0,4]}})", kFourBytes,
                      {"tensor 'x': data_offsets is given twice"});
    expect_bad_header(R"({"__metadata__":{"a":"1","a":"2"}})", "", {"metadata 'a' is given twice"});
    expect_bad_header(R"({"__metadata__":{},"__metadata__":{}})", "", {"'__metadata__' is given twice"});
    // the same name, written with an escape
    expect_bad_header("{" + x + R"(,"\u0078":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", kFourBytes,
                      {"tensor 'x' is given twice"});
}

TEST_F(SafetensorsTest, ImpossibleNumbers) {
    const auto with = [](const std::string& shape, const std::string& offsets) {
        return R"({"x":{"dtype":"F32","shape":[)" + shape + R"(],"data_offsets":[)" + offsets + "]}}";
    };
    const std::vector<std::string> numbers{"-1",
                                           "-4",
                                           "0.5",
                                           "4.0",
                                           "4e0",
                                           "1e300",
                                           "9223372036854775808",
                                           "18446744073709551615",
                                           "18446744073709551616",
                                           "-9223372036854775809",
                                           "null",
                                           "true",
                                           "\"4\""};
    for (const std::string& number : numbers) {
        expect_bad_header(with("1", "0," + number), kFourBytes, {"tensor 'x': data_offsets holds", "2^63 - 1"});
        expect_bad_header(with(number, "0,4"), kFourBytes, {"tensor 'x': shape holds", "2^63 - 1"});
    }
    expect_bad_header(with("1", "0,9223372036854775807"), kFourBytes, {"[0, 9223372036854775807]", "past the end"});
    expect_bad_header(with("1", "9223372036854775807,9223372036854775807"), kFourBytes, {"past the end"});
    expect_bad_header(with("1", "0,4,4"), kFourBytes, {"data_offsets has more than 2 numbers"});
    expect_bad_header(with("1", "0"), kFourBytes, {"data_offsets [0] must be two numbers"});
    expect_bad_header(with("1", ""), kFourBytes, {"data_offsets [] must be two numbers"});
    expect_bad_header(with("04", "0,4"), kFourBytes, {"not valid JSON"});
}

TEST_F(SafetensorsTest, ShapeProductsThatOverflow) {
    const auto with = [](const std::string& dtype, const std::string& shape) {
        return R"({"x":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":[0,4]}})";
    };
    // 2^32 * 2^32 is 0 in 64 bits, (2^62 + 1) * 4 is 4
    expect_bad_header(with("U8", "[4294967296,4294967296]"), kFourBytes, {"tensor 'x'", "2^63 - 1 bytes"});
    expect_bad_header(with("F32", "[4611686018427387905]"), kFourBytes, {"tensor 'x'", "2^63 - 1 bytes"});
    expect_bad_header(with("F64", "[2305843009213693952,8]"), kFourBytes, {"2^63 - 1 bytes"});
    // an extent of 0 hides nothing: strides are products of the others
    expect_bad_header(with("F32", "[4294967296,0,4294967296]"), kFourBytes, {"2^63 - 1 bytes"});
    std::string many = "[1";
    for (int i = 0; i < 64; ++i) many += ",1";
    expect_bad_header(with("F32", many + "]"), kFourBytes, {"shape has more than 64 numbers"});
}

TEST_F(SafetensorsTest, FilesThatAreNoneAtAll) {
    write_raw_safetensors(path(), "", "");
    std::filesystem::resize_file(path(), 0);
    expect_bad_file({"has 0 bytes"});
    std::filesystem::resize_file(path(), 7);
    expect_bad_file({"has 7 bytes"});
    expect_bad_header("", "", {"the header is empty"});
    expect_bad_header("not JSON", "", {"the header begins with 'n'"});
    expect_bad_header("[]", "", {"the header begins with '['"});
    expect_bad_header(" {}", "", {"the header begins with ' '"});
    expect_bad_header("{", "", {"not valid JSON"});
    expect_bad_header("{} {}", "", {"not valid JSON"});
    expect_bad_header("{}x", "", {"not valid JSON"});
    expect_bad_header("{\"a\n\":1}", "", {"not valid JSON"});
    expect_bad_header("{\"\xff\":{}}", "", {"not valid JSON"});
    expect_bad_header(R"({"x":})", "", {"not valid JSON"});
    expect_bad_header(R"({/* x */})", "", {"not valid JSON"});
    expect_bad_header(std::string("{\"x\0\":{}}", 10), "", {"not valid JSON"});
    expect_bad_header(R"({"x":{}})", "", {"tensor 'x': dtype is missing"});
    expect_bad_header(R"({"x":{"dtype":"F32"}})", "", {"tensor 'x': shape is missing"});
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[]}})", "", {"tensor 'x': data_offsets is missing"});
    expect_bad_header(R"({"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"strides":[1]}})", "",
                      {"tensor 'x' has the key 'strides'"});
    expect_bad_header(R"({"x":[]})", "", {"tensor 'x' is an array"});
    expect_bad_header(R"({"x":5})", "", {"tensor 'x' is 5"});
}

TEST_F(SafetensorsTest, MetadataThatAreNotStrings) {
    expect_bad_header(R"({"__metadata__":{"heads":8}})", "", {"metadata 'heads' is 8", "a string"});
    expect_bad_header(R"({"__metadata__":{"heads":["8"]}})", "", {"metadata 'heads' is an array"});
    expect_bad_header(R"({"__metadata__":{"heads":null}})", "", {"metadata 'heads' is null"});
    expect_bad_header(R"({"__metadata__":"none"})", "", {"'__metadata__' is the string 'none'"});
    expect_bad_header(R"({"__metadata__":[]})", "", {"'__metadata__' is an array"});
}

TEST_F(SafetensorsTest, NamesCannotBreakTheLine) {
    expect_bad_header(R"({"a\nb\u0000\u001b[31m":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", kFourBytes,
                      {R"(tensor 'a\x0ab\x00\x1b[31m')"});
    const std::string name(100'000, 'n');
    expect_bad_header("{\"" + name + R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", kFourBytes, {"nnn..."});
    expect_bad_header(R"({"x":{"dtype":")" + name + R"(","shape":[1],"data_offsets":[0,4]}})", kFourBytes, {"nnn..."});
}

TEST_F(SafetensorsTest, WhatCannotBeReadIsAnIoError) {
    const auto expect_io_error = [](const std::string& name, const std::string& text) {
        try {
            const SafetensorsFile file(name);
            ADD_FAILURE() << name << " was accepted";
        } catch (const IoError& error) {
            EXPECT_EQ(std::string(error.what()).find(name), 0U) << error.what();
            EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
        }
    };
    expect_io_error(path("absent"), "No such file");
    expect_io_error(folder_.string(), "not a regular file");
    expect_io_error("/dev/null", "not a regular file");
}

TEST_F(SafetensorsTest, AnyChangedByteIsReadOrRefused) {
    write_safetensors(path(),
                      {tensor_to_write("a", "F32", {2, 2}, std::vector<float>(4, 1.0F)),
                       tensor_to_write("b", "I64", {1}, std::vector<std::int64_t>{3})},
                      {{"op", "Attention"}});
    std::ifstream whole(path(), std::ios::binary);
    const std::string good((std::istreambuf_iterator<char>(whole)), std::istreambuf_iterator<char>());
    whole.close();
    Random random(seed_or(20));
    HEADLONG_TRACE_SEED(random);
    std::size_t accepted = 0;
    for (int round = 0; round < (emulated() ? 500 : 5000); ++round) {
        std::string bytes = good;
        for (std::int64_t change = random.integer(1, 4); change > 0; --change) {
            const auto place = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(bytes.size()) - 1));
            switch (random.integer(0, 3)) {
                case 0:
                    bytes[place] = static_cast<char>(random.bits());
                    break;
                case 1:
                    bytes.erase(place, static_cast<std::size_t>(random.integer(1, 9)));
                    break;
                case 2:
                    bytes.insert(place, bytes.substr(static_cast<std::size_t>(random.integer(0, 90)), 12));
                    break;
                default:
                    bytes[place] = random.pick(std::vector<char>{'0', '9', '-', '[', ']', '{', '}', '"', ',', ':'});
            }
            if (bytes.empty()) break;
        }
        write_bytes(path(), bytes);
        try {
            const SafetensorsFile file(path());
            for (const FileTensor& tensor : file.tensors()) {
                ASSERT_EQ(tensor.bytes.size(), tensor.count() * size_of(tensor.type));
                unsigned sum = 0;
                for (const std::byte byte : tensor.bytes) sum += static_cast<unsigned>(byte);
                ASSERT_LE(sum, 255U * tensor.bytes.size());
            }
            ++accepted;
        } catch (const BadFile& error) {
            ASSERT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
        }
    }
    EXPECT_GT(accepted, 0U);
}

}  // namespace
}  // namespace headlong::test
