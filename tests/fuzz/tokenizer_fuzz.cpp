// A tokenizer.json and a text: any file with any text behind a NUL byte, a right file with any text, and a right file
// with any regular expression. What is accepted gives ids of its vocabulary, the same every time, and text that a
// stream of ids gives too; where nothing is lost, the text itself.
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <headlong/tokenizer.hpp>

#include "tests/fuzz/fuzzer.hpp"
#include "tests/fuzz/reader.hpp"

namespace headlong::fuzz {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<std::int32_t>;

/// GPT-2's printable character for a byte.
std::string printable(unsigned byte) {
    unsigned code = byte;
    if (!((byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174)) {
        code = 256;
        for (unsigned other = 0; other < byte; ++other) {
            if (!((other >= 33 && other <= 126) || (other >= 161 && other <= 172) || other >= 174)) ++code;
        }
    }
    if (code < 0x80) return {static_cast<char>(code)};
    return {static_cast<char>(0xC0U | code >> 6U), static_cast<char>(0x80U | (code & 0x3FU))};
}

/// All bytes, some merges, an added token: nothing is lost.
Json byte_level(const std::string& pattern) {
    Json vocab = Json::object();
    for (unsigned byte = 0; byte < 256; ++byte) vocab[printable(byte)] = byte;
    int id = 256;
    for (const char* token : {"th", "the", "in", "an", "ing"}) vocab[token] = id++;
    Json split = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}}}}};
    if (pattern.empty()) {
        split = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
    }
    return {{"added_tokens",
             {{{"id", 300},
               {"content", "<end>"},
               {"single_word", false},
               {"lstrip", false},
               {"rstrip", false},
               {"normalized", false},
               {"special", true}}}},
            {"pre_tokenizer", split},
            {"decoder", {{"type", "ByteLevel"}}},
            {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"t h", "th e", "i n", "a n", "in g"}}}}};
}

/// Words, spaces as U+2581, bytes where a character is no token: Llama's kind.
Json byte_fallback() {
    Json vocab = Json::object();
    int id = 0;
    for (unsigned byte = 0; byte < 256; ++byte) {
        static constexpr char kDigits[] = "0123456789ABCDEF";
        vocab[std::string("<0x") + kDigits[byte / 16] + kDigits[byte % 16] + ">"] = id++;
    }
    for (const char* token : {"\xE2\x96\x81", "a", "b", "t", "h", "e", "th", "the", "\xE2\x96\x81the", "\xC3\xA9"}) {
        vocab[token] = id++;
    }
    return {{"normalizer",
             {{"type", "Sequence"},
              {"normalizers",
               {{{"type", "Prepend"}, {"prepend", "\xE2\x96\x81"}},
                {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\xE2\x96\x81"}}}}}},
            {"decoder",
             {{"type", "Sequence"},
              {"decoders",
               {{{"type", "Replace"}, {"pattern", {{"String", "\xE2\x96\x81"}}}, {"content", " "}},
                {{"type", "ByteFallback"}},
                {{"type", "Fuse"}},
                {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
            {"model",
             {{"type", "BPE"},
              {"byte_fallback", true},
              {"fuse_unk", true},
              {"vocab", vocab},
              {"merges", {"t h", "th e", "\xE2\x96\x81 the"}}}}};
}

/// `lossless`: text comes back as it was.
void check(const Tokenizer& tokenizer, std::string_view text, bool lossless) {
    const bool specials = text.size() % 2 == 0;
    Ids ids;
    if (!done([&] { ids = tokenizer.encode(text, specials); })) return;
    require(tokenizer.encode(text, specials) == ids, "the same ids again");
    for (const std::int32_t id : ids) {
        require(id >= 0 && static_cast<std::size_t>(id) < tokenizer.vocab_size(), "ids are in the vocabulary");
        const auto token = tokenizer.id_to_token(id);
        require(token.has_value(), "an id has a token");
        require(tokenizer.token_to_id(*token).has_value(), "a token has an id");
    }
    std::string all;
    std::string streamed;
    for (const bool skip : {false, true}) {
        const bool decoded = done([&] { all = tokenizer.decode(ids, skip); });
        const bool in_pieces = done([&] {
            TokenStream stream(tokenizer, skip);
            streamed.clear();
            for (const std::int32_t id : ids) streamed += stream.push(id);
            streamed += stream.finish();
        });
        require(decoded == in_pieces, "a stream decodes what the whole does");
        if (decoded) require(streamed == all, "a stream gives the same text");
        if (decoded && lossless && !skip) require(all == text, "a text comes back as it was");
    }
    done([&] { tokenizer.decode(std::array<std::int32_t, 2>{-1, 1 << 30}); });
}

}  // namespace

void tokenizer(Input input) {
    if (input.empty()) return;
    const auto mode = std::to_integer<unsigned>(input[0]) % 4;
    const std::string_view bytes = text_of(input.subspan(1));
    const std::size_t end = std::min(bytes.find('\0'), bytes.size());
    const std::string_view first = bytes.substr(0, end);
    const std::string_view rest = end < bytes.size() ? bytes.substr(end + 1) : std::string_view{};
    static const Tokenizer kBytes = Tokenizer::from_json(byte_level("").dump());
    static const Tokenizer kFallback = Tokenizer::from_json(byte_fallback().dump());
    switch (mode) {
        case 0:
            done([&] { check(Tokenizer::from_json(first), rest, false); });
            break;
        case 1:
            check(kBytes, bytes, true);
            break;
        case 2:
            check(kFallback, bytes, false);
            break;
        default: {
            std::string json;
            try {
                json = byte_level(first.empty() ? "x" : std::string(first)).dump();
            } catch (const Json::exception&) {
                return;  // a pattern that is no UTF-8 cannot be written
            }
            done([&] { check(Tokenizer::from_json(json), rest, false); });
            break;
        }
    }
}

}  // namespace headlong::fuzz
