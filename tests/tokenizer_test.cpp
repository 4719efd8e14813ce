// Tokenizers: the ids and texts of real models' vectors, every step on small files of its own, streams against whole
// texts, and files and patterns that mean harm.
#include <headlong/tokenizer.hpp>

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <headlong/error.hpp>

#include "engine/regex.hpp"
#include "engine/utf8.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/shared_data.hpp"

namespace headlong::test {
namespace {

using nlohmann::json;
using Ids = std::vector<std::int32_t>;

json read_json(const std::filesystem::path& path) {
    std::ifstream file(path);
    return json::parse(file);
}

/// The austen model ships with the sources once it is embedded; before that it is shared data.
std::filesystem::path model_folder(const std::string& name) {
    const std::filesystem::path shipped = source_dir() / "tools" / "models" / name;
    return std::filesystem::exists(shipped / "tokenizer.json") ? shipped : shared_data("models/" + name);
}

#define HEADLONG_MODEL_OR_SKIP(variable, name)                 \
    const std::filesystem::path variable = model_folder(name); \
    if ((variable).empty()) GTEST_SKIP() << "needs the model " << (name) << " of the shared data"

Tokenizer from(const json& document) { return Tokenizer::from_json(document.dump()); }

/// A model on characters: each character of `alphabet`, then `more` tokens, then what the merges make.
json small(const std::string& alphabet, const std::vector<std::string>& more = {},
           const std::vector<std::pair<std::string, std::string>>& merges = {}) {
    json vocab = json::object();
    json list = json::array();
    const auto add = [&](const std::string& token) {
        if (!vocab.contains(token)) vocab[token] = vocab.size();
    };
    for (std::size_t i = 0; i < alphabet.size(); i += utf8_length(alphabet[i])) {
        add(alphabet.substr(i, utf8_length(alphabet[i])));
    }
    for (const std::string& token : more) add(token);
    for (const auto& [left, right] : merges) {
        add(left + right);
        list.push_back({left, right});
    }
    return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", list}}}, {"decoder", {{"type", "Fuse"}}}};
}

/// The same with all 256 byte tokens.
json with_bytes(const std::string& alphabet) {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; ++byte) {
        constexpr char digits[] = "0123456789ABCDEF";
        tokens.push_back(std::string("<0x") + digits[byte / 16] + digits[byte % 16] + ">");
    }
    json document = small(alphabet, tokens);
    document["model"]["byte_fallback"] = true;
    document["decoder"] = {{"type", "Sequence"}, {"decoders", {{{"type", "ByteFallback"}}, {{"type", "Fuse"}}}}};
    return document;
}

json added(std::int32_t id, const std::string& content, bool normalized, bool special) {
    return {{"id", id},        {"content", content},       {"single_word", false}, {"lstrip", false},
            {"rstrip", false}, {"normalized", normalized}, {"special", special}};
}

/// The tokens of a text, spelled as in the file.
std::vector<std::string> tokens_of(const Tokenizer& tokenizer, std::string_view text, bool special = true) {
    std::vector<std::string> tokens;
    for (const std::int32_t id : tokenizer.encode(text, special)) {
        tokens.emplace_back(tokenizer.id_to_token(id).value_or("?"));
    }
    return tokens;
}

using Words = std::vector<std::string>;

std::string text_of(const Tokenizer& tokenizer, const Words& tokens, bool skip = true) {
    Ids ids;
    for (const std::string& token : tokens) ids.push_back(tokenizer.token_to_id(token).value());
    return tokenizer.decode(ids, skip);
}

/// Streams the ids, checks every piece and that all together are what decode says.
void expect_stream_is_decode(const Tokenizer& tokenizer, const Ids& ids, bool skip) {
    const std::string whole = tokenizer.decode(ids, skip);
    EXPECT_EQ(find_invalid_utf8(whole), std::nullopt);
    TokenStream stream(tokenizer, skip);
    for (int round = 0; round < 2; ++round) {  // after finish() it begins anew
        std::string text;
        for (const std::int32_t id : ids) {
            const std::string piece = stream.push(id);
            EXPECT_EQ(find_invalid_utf8(piece), std::nullopt);
            text += piece;
            EXPECT_TRUE(whole.starts_with(text));
        }
        text += stream.finish();
        EXPECT_EQ(text, whole);
    }
}

/// The same with a prompt of every length.
void expect_prompt_is_left_out(const Tokenizer& tokenizer, const Ids& ids) {
    const std::string whole = tokenizer.decode(ids);
    for (std::size_t length = 0; length <= ids.size(); ++length) {
        const std::string before = tokenizer.decode(std::span(ids).first(length));
        TokenStream stream(tokenizer);
        stream.prime(std::span(ids).first(length));
        std::string text;
        for (std::size_t i = length; i < ids.size(); ++i) text += stream.push(ids[i]);
        text += stream.finish();
        EXPECT_EQ(find_invalid_utf8(text), std::nullopt);
        if (whole.starts_with(before)) {
            EXPECT_EQ(before + text, whole) << length;
        }
    }
}

/// One to four bytes a character, all planes, with the characters that tokenizers treat apart more often.
std::string random_text(Random& random, std::int64_t characters) {
    static const std::vector<char32_t> apart{' ',    ' ', 'a',  'b',   'e',    'n',    '\n',   '\r',    '\t',
                                             '\'',   's', '1',  0xE9,  0x2581, 0xA0,   0x85,   0x3000,  0x301,
                                             0x65E5, 0x0, 0x7F, 0x7FF, 0x800,  0xFFFD, 0xFFFF, 0x1F642, 0x10FFFF};
    std::string text;
    for (std::int64_t i = 0; i < characters; ++i) {
        char32_t c = random.pick(apart);
        if (random.chance(0.3)) c = static_cast<char32_t>(random.integer(1, 0x10FFFF));
        if (c >= 0xD800 && c < 0xE000) c = U'x';
        append_utf8(text, c);
    }
    return text;
}

/// Loads a file that is broken: one line, with the name of the file and each of the texts.
template <typename Expected>
void expect_refused(const std::string& text, const std::vector<std::string>& parts) {
    SCOPED_TRACE(text.substr(0, 200));
    try {
        Tokenizer::from_json(text, "folder/tokenizer.json");
        ADD_FAILURE() << "the file was accepted";
    } catch (const Expected& error) {
        const std::string message = error.what();
        EXPECT_EQ(message.find("folder/tokenizer.json: "), 0U) << message;
        EXPECT_EQ(message.find('\n'), std::string::npos) << message;
        EXPECT_LT(message.size(), 1500U) << message;
        for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
    } catch (const std::exception& error) {
        ADD_FAILURE() << "another exception: " << error.what();
    }
}

void record_seconds(const auto& function) {
    const auto start = std::chrono::steady_clock::now();
    function();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    testing::Test::RecordProperty("seconds", std::to_string(seconds.count()));
}

// --- real models ---

class TokenizerTestModel : public testing::TestWithParam<const char*> {};

TEST_P(TokenizerTestModel, VectorsInBothDirections) {
    HEADLONG_MODEL_OR_SKIP(folder, GetParam());
    const auto tokenizer = Tokenizer::from_file((folder / "tokenizer.json").string());
    const json vectors = read_json(folder / "tokenizer_vectors.json");
    EXPECT_GE(vectors.size(), 9U);
    for (const json& vector : vectors) {
        const auto text = vector.at("text").get<std::string>();
        SCOPED_TRACE(text);
        const auto ids = vector.at("ids").get<Ids>();
        EXPECT_EQ(tokenizer.encode(text), ids);
        EXPECT_EQ(tokenizer.decode(ids), vector.value("round_trip", text));
        expect_stream_is_decode(tokenizer, ids, true);
        expect_stream_is_decode(tokenizer, ids, false);
        expect_prompt_is_left_out(tokenizer, ids);
    }
}

TEST_P(TokenizerTestModel, RandomIdsStreamAsTheyDecode) {
    HEADLONG_MODEL_OR_SKIP(folder, GetParam());
    const auto tokenizer = Tokenizer::from_file((folder / "tokenizer.json").string());
    Random random(seed_or(1));
    HEADLONG_TRACE_SEED(random);
    for (int i = 0; i < (emulated() ? 50 : 500); ++i) {
        Ids ids(static_cast<std::size_t>(random.integer(0, 40)));
        // the low ids are bytes and special tokens in both models
        const std::int64_t highest = random.chance(0.5) ? 258 : static_cast<std::int64_t>(tokenizer.vocab_size()) - 1;
        for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.integer(0, highest));
        expect_stream_is_decode(tokenizer, ids, random.chance(0.5));
        expect_prompt_is_left_out(tokenizer, ids);
    }
}

TEST_P(TokenizerTestModel, RandomTextMakesTheRoundTrip) {
    HEADLONG_MODEL_OR_SKIP(folder, GetParam());
    const auto tokenizer = Tokenizer::from_file((folder / "tokenizer.json").string());
    Random random(seed_or(2));
    HEADLONG_TRACE_SEED(random);
    for (int i = 0; i < (emulated() ? 50 : 500); ++i) {
        const std::string text = random_text(random, random.integer(0, 60));
        std::string want = text;
        if (std::string_view(GetParam()) == "stories260k") {  // whose decoder makes every U+2581 a space
            for (std::size_t at = 0; (at = want.find("\u2581", at)) != std::string::npos;) want.replace(at, 3, " ");
        }
        const Ids ids = tokenizer.encode(text);
        EXPECT_EQ(tokenizer.decode(ids), want);
        expect_stream_is_decode(tokenizer, ids, true);
    }
}

INSTANTIATE_TEST_SUITE_P(Models, TokenizerTestModel, testing::Values("austen", "stories260k"));

// --- steps ---

TEST(TokenizerTestModelOfPairs, TheFirstMergeOfTheListWinsAndTheLeftmostAmongEquals) {
    const auto tokenizer = from(small("abc", {}, {{"b", "c"}, {"a", "b"}, {"a", "a"}, {"aa", "a"}}));
    EXPECT_EQ(tokens_of(tokenizer, "abc"), (Words{"a", "bc"}));
    EXPECT_EQ(tokens_of(tokenizer, "aaaaa"), (Words{"aa", "aaa"}));
    EXPECT_EQ(tokens_of(tokenizer, "aab"), (Words{"a", "ab"}));
    EXPECT_EQ(tokens_of(tokenizer, ""), Words{});
}

TEST(TokenizerTestModelOfPairs, IgnoringMergesTakesWholePieces) {
    json document = small("abc", {"abc"}, {{"b", "c"}});
    EXPECT_EQ(tokens_of(from(document), "abc"), (Words{"a", "bc"}));
    document["model"]["ignore_merges"] = true;
    EXPECT_EQ(tokens_of(from(document), "abc"), Words{"abc"});
    EXPECT_EQ(tokens_of(from(document), "abcabc"), (Words{"a", "bc", "a", "bc"}));
}

TEST(TokenizerTestModelOfPairs, MergesAsStrings) {
    json document = small("ab", {"ab"});
    document["model"]["merges"] = {"#version: 0.2", "a b"};
    EXPECT_EQ(tokens_of(from(document), "aab"), (Words{"a", "ab"}));
    document["model"].erase("type");  // as the oldest files
    EXPECT_EQ(tokens_of(from(document), "ab"), Words{"ab"});
}

TEST(TokenizerTestModelOfPairs, UnknownCharacters) {
    json document = small("a", {"?"});
    EXPECT_EQ(tokens_of(from(document), "axya"), (Words{"a", "a"}));
    document["model"]["unk_token"] = "?";
    EXPECT_EQ(tokens_of(from(document), "axyaz"), (Words{"a", "?", "?", "a", "?"}));
    document["model"]["fuse_unk"] = true;
    EXPECT_EQ(tokens_of(from(document), "axyaz"), (Words{"a", "?", "a", "?"}));
}

TEST(TokenizerTestModelOfPairs, ByteFallback) {
    const auto tokenizer = from(with_bytes("a"));
    EXPECT_EQ(tokens_of(tokenizer, "aé\n"), (Words{"a", "<0xC3>", "<0xA9>", "<0x0A>"}));
    EXPECT_EQ(text_of(tokenizer, {"<0xC3>", "<0xA9>", "a"}), "éa");
    EXPECT_EQ(text_of(tokenizer, {"<0xC3>", "a"}), "\uFFFDa");
    EXPECT_EQ(text_of(tokenizer, {"<0xC3>", "<0xA9>", "<0xA9>", "a"}), "\uFFFD\uFFFD\uFFFDa");
    EXPECT_EQ(text_of(tokenizer, {"<0xE6>", "<0x97>"}), "\uFFFD\uFFFD");
}

TEST(TokenizerTestStream, ARunOfBytesIsHeldUntilItIsCertain) {
    const auto tokenizer = from(with_bytes("a"));
    const auto id = [&](const char* token) { return tokenizer.token_to_id(token).value(); };
    TokenStream stream(tokenizer);
    EXPECT_EQ(stream.push(id("<0xC3>")), "");
    EXPECT_EQ(stream.push(id("<0xA9>")), "");  // one bad byte more would make three U+FFFD of it
    EXPECT_EQ(stream.push(id("a")), "éa");
    EXPECT_EQ(stream.push(id("<0xC3>")), "");
    EXPECT_EQ(stream.push(id("<0xC3>")), "\uFFFD\uFFFD");
    EXPECT_EQ(stream.push(id("<0x41>")), "\uFFFD");  // the run is broken already
    EXPECT_EQ(stream.push(id("a")), "a");
    EXPECT_EQ(stream.push(id("<0xC3>")), "");
    EXPECT_EQ(stream.finish(), "\uFFFD");
    EXPECT_EQ(stream.finish(), "");
}

TEST(TokenizerTestStream, BytesOfACharacterWaitForEachOther) {
    json document = small("ðŁĻĤa");  // the bytes F0 9F 99 82, and a
    document["decoder"] = {{"type", "ByteLevel"}};
    const auto tokenizer = from(document);
    TokenStream stream(tokenizer);
    EXPECT_EQ(stream.push(0), "");
    EXPECT_EQ(stream.push(1), "");
    EXPECT_EQ(stream.push(2), "");
    EXPECT_EQ(stream.push(3), "🙂");
    EXPECT_EQ(stream.push(0), "");
    EXPECT_EQ(stream.push(1), "");
    EXPECT_EQ(stream.push(4), "\uFFFDa");  // one for all that could have been a character
    EXPECT_EQ(stream.push(3), "\uFFFD");
    EXPECT_EQ(stream.push(0), "");
    EXPECT_EQ(stream.finish(), "\uFFFD");
}

TEST(TokenizerTestStream, APromptHasTheSpaceThatIsStripped) {
    json document = small("\u2581ab");
    document["decoder"] = json::parse(R"({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");
    const auto tokenizer = from(document);
    const Ids prompt{0, 1};
    TokenStream stream(tokenizer);
    EXPECT_THROW(stream.prime(Ids{0, 9}), InvalidArgument);
    stream.prime(prompt);
    EXPECT_EQ(stream.push(0), " ");
    EXPECT_EQ(stream.push(2), "b");
    EXPECT_THROW(stream.prime(prompt), InvalidArgument);
    EXPECT_THROW(stream.push(9), InvalidArgument);
    EXPECT_EQ(stream.push(0), " ");
    EXPECT_EQ(stream.finish(), "");
    EXPECT_EQ(stream.push(0), "");  // without a prompt again
    EXPECT_EQ(stream.push(2), "b");
}

TEST(TokenizerTestStream, APromptThatEndsInHalfACharacter) {
    const auto tokenizer = from(with_bytes("a"));
    const auto id = [&](const char* token) { return tokenizer.token_to_id(token).value(); };
    TokenStream stream(tokenizer);
    stream.prime(Ids{id("a"), id("<0xC3>")});
    EXPECT_EQ(stream.push(id("<0xA9>")), "");
    EXPECT_EQ(stream.push(id("a")), "éa");
    stream.finish();
    stream.prime(Ids{id("a"), id("<0x0A>")});  // a run that the prompt alone would end
    EXPECT_EQ(stream.push(id("a")), "a");
    stream.finish();
    stream.prime(Ids{id("<0x0A>")});
    EXPECT_EQ(stream.push(id("<0x0A>")), "");
    EXPECT_EQ(stream.push(id("a")), "\na");
}

TEST(TokenizerTestDecoder, Steps) {
    json document = small("ab \u2581", {"  ab  ", "\u2581a\u2581"});
    const auto decode = [&](const char* decoder, const Words& tokens) {
        document["decoder"] = json::parse(decoder);
        return text_of(from(document), tokens);
    };
    EXPECT_EQ(decode("null", {"a", "b", "a"}), "a b a");
    EXPECT_EQ(decode(R"({"type":"Strip","content":" ","start":1,"stop":0})", {"  ab  ", "a"}), " ab  a");
    EXPECT_EQ(decode(R"({"type":"Strip","content":" ","start":9,"stop":1})", {"  ab  ", " ", "a"}), "ab a");
    EXPECT_EQ(decode(R"({"type":"Strip","content":"b","start":0,"stop":1})", {"a", "b", " "}), "a ");
    EXPECT_EQ(decode(R"({"type":"Sequence","decoders":[{"type":"Fuse"},
        {"type":"Strip","content":" ","start":1,"stop":3}]})",
                     {"  ab  ", " ", " "}),
              " ab ");
    EXPECT_EQ(decode(R"({"type":"Replace","pattern":{"Regex":"[ab]+"},"content":"<>"})", {"  ab  ", "a"}), "  <>  <>");
    EXPECT_EQ(decode(R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always"})",
                     {"\u2581a\u2581", "\u2581a\u2581"}),
              "a a ");
    EXPECT_EQ(decode(R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"never"})", {"\u2581a\u2581"}), " a ");
    EXPECT_EQ(decode(R"({"type":"Sequence","decoders":[]})", {"a", "b"}), "ab");
}

TEST(TokenizerTestPreTokenizer, SplitBehaviors) {
    json document = small("the-final--countdown", {}, {});
    document["model"]["ignore_merges"] = true;
    for (const char* word : {"the", "final", "countdown", "the-", "final-", "-final", "-countdown", "--"}) {
        document["model"]["vocab"][word] = document["model"]["vocab"].size();
    }
    const auto words = [&](const char* behavior, bool invert, const char* kind = "String") {
        document["pre_tokenizer"] = {
            {"type", "Split"}, {"pattern", {{kind, "-"}}}, {"behavior", behavior}, {"invert", invert}};
        return tokens_of(from(document), "the-final--countdown");
    };
    for (const char* kind : {"String", "Regex"}) {
        EXPECT_EQ(words("Removed", false, kind), (Words{"the", "final", "countdown"}));
        EXPECT_EQ(words("Isolated", false, kind), (Words{"the", "-", "final", "-", "-", "countdown"}));
        EXPECT_EQ(words("MergedWithPrevious", false, kind), (Words{"the-", "final-", "-", "countdown"}));
        EXPECT_EQ(words("MergedWithNext", false, kind), (Words{"the", "-final", "-", "-countdown"}));
        EXPECT_EQ(words("Contiguous", false, kind), (Words{"the", "-", "final", "--", "countdown"}));
        EXPECT_EQ(words("Removed", true, kind), (Words{"-", "-", "-"}));
    }
}

TEST(TokenizerTestPreTokenizer, MatchesOfNoLengthEnd) {
    json document = small("ab");
    document["model"]["vocab"]["aab"] = 2;
    document["model"]["ignore_merges"] = true;
    for (const char* pattern : {"x*", "(?=b)", "$", "^", "\\b", "|a", "(?:)"}) {
        document["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}};
        const auto tokenizer = from(document);
        EXPECT_EQ(tokenizer.decode(tokenizer.encode("aabaab")), "aabaab") << pattern;
    }
}

TEST(TokenizerTestPreTokenizer, Metaspace) {
    json document = small("\u2581ab", {"\u2581a", "\u2581b", "<x>"});
    document["model"]["ignore_merges"] = true;
    document["added_tokens"] = json::array({added(5, "<x>", false, true)});
    const auto words = [&](const char* scheme, bool split) {
        document["pre_tokenizer"] = {
            {"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", scheme}, {"split", split}};
        return tokens_of(from(document), "a b<x>a");
    };
    EXPECT_EQ(words("always", true), (Words{"\u2581a", "\u2581b", "<x>", "\u2581a"}));
    EXPECT_EQ(words("first", true), (Words{"\u2581a", "\u2581b", "<x>", "a"}));
    EXPECT_EQ(words("never", true), (Words{"a", "\u2581b", "<x>", "a"}));
    EXPECT_EQ(words("first", false), (Words{"\u2581", "a", "\u2581", "b", "<x>", "a"}));
}

// The published split patterns: where each family cuts, spaces and ends of lines as byte-level tokenizers write them.
TEST(TokenizerTestPreTokenizer, CutsAsTheFamiliesDo) {
    const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
    const auto split = [](const char* regex) {
        const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
        const json cut = {
            {"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
        return json{{"type", "Sequence"}, {"pretokenizers", json::array({cut, bytes})}};
    };
    const json smollm = {
        {"type", "Sequence"},
        {"pretokenizers", json::array({{{"type", "Digits"}, {"individual_digits", true}}, byte_level})}};
    const json llama3 = split(
        R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)");
    const json qwen2 = split(
        R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)");
    struct Case {
        const char* family;
        const json& steps;
        Words pieces;
    };
    const std::string text = "I'M 12345 años!?\r\n\n  x's";
    const Case cases[] = {
        {"GPT-2", byte_level, {"I", "'", "M", "Ġ12345", "Ġaños", "!?", "čĊĊĠ", "Ġx", "'s"}},
        {"Llama 3", llama3, {"I", "'M", "Ġ", "123", "45", "Ġaños", "!?čĊĊ", "Ġ", "Ġx", "'s"}},
        {"Qwen2", qwen2, {"I", "'M", "Ġ", "1", "2", "3", "4", "5", "Ġaños", "!?čĊĊ", "Ġ", "Ġx", "'s"}},
        {"SmolLM", smollm, {"I", "'", "M", "Ġ", "1", "2", "3", "4", "5", "Ġaños", "!?", "čĊĊĠ", "Ġx", "'s"}},
    };
    for (const Case& each : cases) {
        SCOPED_TRACE(each.family);
        json document = small("ab");
        json vocab = json::object();
        std::vector<std::int32_t> want;
        for (std::string piece : each.pieces) {
            if (const std::size_t at = piece.find("ñ"); at != std::string::npos) piece.replace(at, 2, "Ã±");
            vocab.emplace(piece, vocab.size());
            want.push_back(vocab[piece].get<std::int32_t>());
        }
        document["model"]["vocab"] = vocab;
        document["model"]["merges"] = json::array();
        document["model"]["ignore_merges"] = true;
        document["added_tokens"] = json::array();
        document["normalizer"] = nullptr;
        document["post_processor"] = nullptr;
        document["pre_tokenizer"] = each.steps;
        EXPECT_EQ(Tokenizer::from_json(document.dump()).encode(text), want);
    }
}

TEST(TokenizerTestNormalizer, UnicodesForms) {
    struct Form {
        const char* type;
        std::string text, becomes;
    };
    // UAX 15's examples: e and an acute accent, the ligature fi, Angstrom's sign, a syllable of Hangul
    const std::vector<Form> forms{
        {"NFC", "e\u0301", "\u00e9"},
        {"NFC", "\ufb01", "\ufb01"},
        {"NFC", "\u212b", "\u00c5"},
        {"NFD", "\u00e9", "e\u0301"},
        {"NFD", "\uac00", "\u1100\u1161"},
        {"NFKC", "\ufb01", "fi"},
        {"NFKD", "\ufb01\u00e9", "fie\u0301"},
        {"NFC", "plain", "plain"},
        {"NFC", "a\u0327\u0301", "\u00e1\u0327"},
        {"NFC", "\u1100\u1161", "\uac00"},
    };
    for (const Form& form : forms) {
        json document = small("ab");
        document["model"]["vocab"] = {{form.becomes, 0}};
        document["model"]["merges"] = json::array();
        document["model"]["ignore_merges"] = true;
        document["added_tokens"] = json::array();
        document["normalizer"] = {{"type", form.type}};
        document["pre_tokenizer"] = nullptr;
        document["post_processor"] = nullptr;
        const Tokenizer tokenizer = Tokenizer::from_json(document.dump());
        EXPECT_EQ(tokenizer.encode(form.text), (std::vector<std::int32_t>{0})) << form.type << " " << form.text;
    }
}

TEST(TokenizerTestNormalizer, PrependLeavesAnEmptyTextAndAppliesBetweenAddedTokens) {
    json document = small("_ab", {"<x>"});
    document["added_tokens"] = json::array({added(3, "<x>", false, true)});
    document["normalizer"] = {{"type", "Prepend"}, {"prepend", "_"}};
    const auto tokenizer = from(document);
    EXPECT_EQ(tokens_of(tokenizer, ""), Words{});
    EXPECT_EQ(tokens_of(tokenizer, "a<x>b<x><x>"), (Words{"_", "a", "<x>", "_", "b", "<x>", "<x>"}));
}

TEST(TokenizerTestAddedTokens, LeftmostThenLongest) {
    json document = small("<>abx", {}, {});
    document["added_tokens"] = {added(5, "<a>", false, true), added(6, "<a><b>", false, false),
                                added(7, "a><", false, false), added(9, "ab", true, false)};
    const auto tokenizer = from(document);
    EXPECT_EQ(tokens_of(tokenizer, "x<a>x"), (Words{"x", "<a>", "x"}));
    EXPECT_EQ(tokens_of(tokenizer, "<a><b>"), Words{"<a><b>"});
    EXPECT_EQ(tokens_of(tokenizer, "<a><a>"), (Words{"<a>", "<a>"}));
    EXPECT_EQ(tokens_of(tokenizer, "a><b"), (Words{"a><", "b"}));
    EXPECT_EQ(tokens_of(tokenizer, "aab"), (Words{"a", "ab"}));
    EXPECT_EQ(text_of(tokenizer, {"x", "<a>", "<a><b>"}), "x<a><b>");
    EXPECT_EQ(text_of(tokenizer, {"x", "<a>", "<a><b>"}, false), "x<a><a><b>");
    EXPECT_EQ(tokenizer.vocab_size(), 10U);
    EXPECT_EQ(tokenizer.id_to_token(8), std::nullopt);  // a gap
    EXPECT_EQ(tokenizer.id_to_token(9), "ab");
    EXPECT_EQ(tokenizer.id_to_token(10), std::nullopt);
    EXPECT_EQ(tokenizer.id_to_token(-1), std::nullopt);
    EXPECT_EQ(tokenizer.token_to_id("<a>"), 5);
    EXPECT_EQ(tokenizer.token_to_id("none"), std::nullopt);
}

// As Phi-3's tokens take what follows them.
TEST(TokenizerTestAddedTokens, WhiteSpaceBesideThemMayBeTheirs) {
    json document = small("ab \n");
    const auto stripping = [](std::int32_t id, const std::string& content, const char* side) {
        json token = added(id, content, false, true);
        token[side] = true;
        return token;
    };
    document["added_tokens"] = {stripping(4, "<l>", "lstrip"), stripping(5, "<r>", "rstrip")};
    const auto tokenizer = from(document);
    EXPECT_EQ(tokens_of(tokenizer, "a \n <r> \n b"), (Words{"a", " ", "\n", " ", "<r>", "b"}));
    EXPECT_EQ(tokens_of(tokenizer, "a \n <l> b"), (Words{"a", "<l>", " ", "b"}));
    EXPECT_EQ(tokens_of(tokenizer, "<r>  <l>  <r>"), (Words{"<r>", "<l>", " ", " ", "<r>"}));
    EXPECT_EQ(tokens_of(tokenizer, "a\u00a0\u3000<l>"), (Words{"a", "<l>"})) << "Unicode's white space";
    EXPECT_EQ(tokens_of(tokenizer, " <l>"), Words{"<l>"});
    EXPECT_EQ(tokens_of(tokenizer, "<r> "), Words{"<r>"});
}

TEST(TokenizerTestAddedTokens, NormalizedOnesAreSoughtInNormalizedText) {
    json document = small("XYb");
    document["normalizer"] = {{"type", "Replace"}, {"pattern", {{"Regex", "a+"}}}, {"content", "X"}};
    document["added_tokens"] = {added(3, "ab", true, false), added(4, "aY", false, false)};
    const auto tokenizer = from(document);
    EXPECT_EQ(tokenizer.encode("aaab"), Ids{3});
    EXPECT_EQ(tokenizer.encode("Xb"), Ids{3});
    EXPECT_EQ(tokenizer.encode("aY"), Ids{4});
    EXPECT_EQ(tokenizer.encode("aaY"), (Ids{0, 4}));
    EXPECT_EQ(tokenizer.encode("XY"), (Ids{0, 1}));
}

TEST(TokenizerTestPostProcessor, Templates) {
    json document = small("a", {"<s>", "</s>"});
    document["added_tokens"] = {added(1, "<s>", false, true), added(2, "</s>", false, true)};
    document["post_processor"] = json::parse(R"({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "trim_offsets": false},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "B", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
         "special_tokens": {"B": {"id": "B", "ids": [1, 1]}, "</s>": {"id": "</s>", "ids": [2]}}}]})");
    const auto tokenizer = from(document);
    EXPECT_EQ(tokenizer.encode("a"), (Ids{1, 1, 0, 2}));
    EXPECT_EQ(tokenizer.encode(""), (Ids{1, 1, 2}));
    EXPECT_EQ(tokenizer.encode("a", false), Ids{0});
    EXPECT_EQ(tokenizer.encode("<s>", false), Ids{1});
}

// --- hostile files and bad calls ---

TEST(TokenizerTestBrokenFiles, EachEndsInOneLineThatNamesTheKey) {
    const json good = small("ab", {}, {{"a", "b"}});
    ASSERT_NO_THROW(from(good));
    const auto with = [&](const char* pointer, const json& value) {
        json changed = good;
        changed[json::json_pointer(pointer)] = value;
        return changed.dump();
    };
    const auto bad = expect_refused<BadFile>;
    bad("", {"not valid JSON"});
    bad("{\"model\": ", {"not valid JSON at its byte"});
    bad("[]", {"the document is an array"});
    bad("{}", {"model is missing"});
    bad(R"({"model": null})", {"model is null"});
    bad("{\"model\": {\"type\": \"\xFF\"}}", {"not valid JSON"});
    bad(R"({"model": {"type": "BPE", "vocab": {"a": 0, "a": 1}, "merges": []}})", {"'a'", "twice"});
    bad(std::string(100'000, '['), {"nests deeper than"});
    bad(R"({"model": )" + std::string(1000, '[') + std::string(1000, ']') + "}", {"nests deeper", "'model'"});
    bad(with("/model/type", 3), {"model.type is 3"});
    bad(R"({"model": {"type": "BPE", "merges": []}})", {"model.vocab is missing"});
    bad(R"({"model": {"type": "BPE", "vocab": {}}})", {"model.merges is missing"});
    bad(R"({"model": {"vocab": {}}})", {"model.type is missing"});
    bad(with("/model/vocab", {"a", "b"}), {"model.vocab is an array"});
    bad(with("/model/vocab/a", -1), {"model.vocab['a'] is -1", "from 0 to"});
    bad(with("/model/vocab/a", 1.5), {"model.vocab['a'] is 1.5"});
    bad(with("/model/vocab/a", "0"), {"model.vocab['a'] is the string '0'"});
    bad(with("/model/vocab/a", 4'294'967'296), {"model.vocab['a'] is 4294967296"});
    bad(with("/model/vocab/a", 1), {"model.vocab gives the id 1 twice"});
    bad(with("/model/vocab/x\ny", 1), {"model.vocab gives the id 1 twice", "x\\x0ay"});
    bad(with("/model/merges", 1), {"model.merges is 1"});
    bad(with("/model/merges/0", {"a", "x"}), {"model.merges[0] needs the token 'x'"});
    bad(with("/model/merges/0", {"b", "a"}), {"model.merges[0] needs the token 'ba'"});
    bad(with("/model/merges/0", {"a"}), {"model.merges[0] must be"});
    bad(with("/model/merges/0", "ab"), {"model.merges[0] is 'ab'"});
    bad(with("/model/merges/0", "a b "), {"model.merges[0] is 'a b '"});
    bad(with("/model/unk_token", "?"), {"model.unk_token is '?'"});
    bad(with("/model/byte_fallback", "yes"), {"model.byte_fallback is the string 'yes'"});
    bad(with("/added_tokens", 5), {"added_tokens is 5"});
    bad(with("/added_tokens", {{{"id", 7}}}), {"added_tokens[0].content is missing"});
    bad(with("/added_tokens", json::array({added(-7, "x", false, true)})), {"added_tokens[0].id is -7"});
    bad(with("/added_tokens", json::array({added(1 << 30, "x", false, true)})), {"added_tokens[0].id is 1073741824"});
    bad(with("/added_tokens", json::array({added(0, "x", false, true)})), {"added_tokens[0].id is 0", "the id of 'a'"});
    bad(with("/added_tokens", json::array({added(9, "a", false, true)})),
        {"added_tokens[0].id is 9", "'a' has the id 0"});
    bad(with("/added_tokens", json::array({added(9, "x", false, true), added(9, "x", false, true)})),
        {"added_tokens[1].content"});
    bad(with("/added_tokens", json::array({added(9, "", false, true)})), {"added_tokens[0].content is empty"});
    bad(with("/normalizer", "Prepend"), {"normalizer is the string"});
    bad(with("/normalizer", {{"type", "Prepend"}}), {"normalizer.prepend is missing"});
    bad(with("/normalizer", {{"type", "Sequence"}, {"normalizers", {{{"x", 1}}}}}),
        {"normalizer.normalizers[0].type is missing"});
    bad(with("/normalizer", {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", ""}}),
        {"normalizer.pattern.String is empty"});
    bad(with("/pre_tokenizer", {{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}}),
        {"pre_tokenizer.pattern.Regex is not a valid regular expression", "(a"});
    bad(with("/pre_tokenizer", {{"type", "Split"}, {"pattern", {{"Glob", "*"}}}, {"behavior", "Isolated"}}),
        {"pre_tokenizer.pattern must have one member"});
    bad(with("/pre_tokenizer", {{"type", "Split"}, {"pattern", {{"String", "a"}}}, {"behavior", "Merged"}}),
        {"pre_tokenizer.behavior is 'Merged'"});
    bad(with("/decoder", {{"type", "Strip"}, {"content", "ab"}, {"start", 0}, {"stop", 0}}), {"decoder.content"});
    bad(with("/decoder", {{"type", "Strip"}, {"content", "a"}, {"start", -1}, {"stop", 0}}), {"decoder.start is -1"});
    bad(with("/post_processor", json::parse(R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"Q"}}]})")),
        {"post_processor.single[0].SpecialToken.id is 'Q'"});
    bad(with("/post_processor", json::parse(R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"Q"}}],
        "special_tokens":{"Q":{"ids":[77]}}})")),
        {"post_processor.special_tokens.Q.ids[0] is 77"});
    bad(with("/post_processor", json::parse(R"({"type":"TemplateProcessing","single":[{"Sequence":{"id":"B"}}]})")),
        {"post_processor.single[0].Sequence.id is 'B'"});
}

TEST(TokenizerTestBrokenFiles, WhatIsNotBuiltIsRefusedByName) {
    const json good = small("ab");
    const auto with = [&](const char* pointer, const json& value) {
        json changed = good;
        changed[json::json_pointer(pointer)] = value;
        return changed.dump();
    };
    const auto refused = expect_refused<Unsupported>;
    refused(with("/model/type", "Unigram"), {"model.type is 'Unigram'"});
    refused(with("/model/dropout", 0.1), {"model.dropout"});
    refused(with("/model/continuing_subword_prefix", "##"), {"model.continuing_subword_prefix is '##'"});
    refused(with("/model/end_of_word_suffix", "</w>"), {"model.end_of_word_suffix is '</w>'"});
    refused(with("/normalizer", {{"type", "BertNormalizer"}}), {"normalizer.type is 'BertNormalizer'"});
    refused(with("/pre_tokenizer", {{"type", "BertPreTokenizer"}}), {"pre_tokenizer.type is 'BertPreTokenizer'"});
    refused(with("/post_processor", {{"type", "RobertaProcessing"}}), {"post_processor.type is 'RobertaProcessing'"});
    refused(with("/decoder", {{"type", "WordPiece"}}), {"decoder.type is 'WordPiece'"});
    json token = added(9, "x", false, true);
    token["single_word"] = true;
    refused(with("/added_tokens", json::array({token})), {"added_tokens[0].single_word is true"});
    EXPECT_NO_THROW(Tokenizer::from_json(with("/model/continuing_subword_prefix", "")));
}

TEST(TokenizerTestBrokenFiles, AMissingFileIsAnInputError) {
    EXPECT_THROW(Tokenizer::from_file("no/such/tokenizer.json"), IoError);
}

TEST(TokenizerTestCalls, TextThatIsNotUtf8) {
    const auto tokenizer = from(small("ab"));
    const std::vector<std::pair<std::string, std::size_t>> bad{
        {"\xFF", 0},           {"ab\x80", 2},           {"a\xC3", 1},   {"a\xC3(", 1}, {"\xC0\x80", 0},
        {"a\xED\xA0\x80z", 1}, {"\xF4\x90\x80\x80", 0}, {"\xE2\x82", 0}};
    for (const auto& [text, offset] : bad) {
        try {
            tokenizer.encode(text);
            ADD_FAILURE() << "accepted";
        } catch (const InvalidArgument& error) {
            EXPECT_NE(std::string(error.what()).find("byte " + std::to_string(offset)), std::string::npos)
                << error.what();
        }
    }
    EXPECT_EQ(tokens_of(tokenizer, std::string_view("a\0b", 3)), (Words{"a", "b"}));
}

TEST(TokenizerTestCalls, IdsThatAreNoToken) {
    const auto tokenizer = from(small("ab"));
    for (const std::int32_t id : {-1, 2, 2'147'483'647}) {
        try {
            static_cast<void>(tokenizer.decode(Ids{0, id}));
            ADD_FAILURE() << "accepted " << id;
        } catch (const InvalidArgument& error) {
            EXPECT_NE(std::string(error.what()).find("is " + std::to_string(id)), std::string::npos) << error.what();
        }
    }
}

TEST(TokenizerTestTime, PatternsThatBacktrackForEverEndInAnError) {
    struct Case {
        const char* pattern;
        std::string text;
    };
    // the last one stays under any limit of a single search for the first half of its text
    std::string steps;
    for (int i = 0; i < 2000; ++i) steps += std::string(13, 'a') + "c";
    const std::vector<Case> cases{{"(a+)+$", std::string(60, 'a') + "b"},
                                  {"(a|aa)+$", std::string(200'000, 'a') + "b"},
                                  {"(?:\\w+\\s?)*!", std::string(200'000, 'a') + "-!"},
                                  {"(?:a+)+b|a", steps + std::string(100'000, 'a')},
                                  // few steps of backtracking, but each scans far, from every start anew
                                  {"\\w++\\d", std::string(200'000, 'a')},
                                  {"\\w++\\d", std::string(2'000'000, 'a')},
                                  {"(?>\\p{L}+)\\p{N}", std::string(200'000, 'a')},
                                  {"(?>a+)(?=b)", std::string(200'000, 'a')},
                                  {"a{60000}b|a{60000}c", std::string(200'000, 'a')},
                                  {"(?=(a++))\\1b", std::string(200'000, 'a')},
                                  {"(?:a++1|a++2|a++3|a++4)", std::string(200'000, 'a')}};
    for (const Case& each : cases) {
        json document = small("ab");
        document["pre_tokenizer"] = {{"type", "Sequence"},
                                     {"pretokenizers",
                                      {{{"type", "Split"},
                                        {"pattern", {{"Regex", each.pattern}}},
                                        {"behavior", "Isolated"},
                                        {"invert", false}}}}};
        const auto tokenizer = from(document);
        std::string message;
        record_seconds([&] {
            try {
                tokenizer.encode(each.text);
            } catch (const BadFile& error) {
                message = error.what();
            }
        });
        EXPECT_NE(message.find("tokenizer.json: pre_tokenizer.pretokenizers[0].pattern.Regex"), std::string::npos)
            << each.pattern << ": " << message;
        EXPECT_NO_THROW(tokenizer.encode("ab"));  // the tokenizer is as good as before
    }
}

TEST(TokenizerTestTime, OrdinaryPatternsCostLittle) {
    const char* const llama =
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
        "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    const char* const gpt2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    std::string text;
    while (text.size() < 200'000) {
        text += "It is a truth universally acknowledged, 1813;\n" + std::string(text.size() % 90, ' ');
        text += std::string(text.size() % 170, 'e') + "\n\n" + std::string(text.size() % 130, '=');
    }
    for (const char* pattern : {llama, gpt2, "\\p{N}"}) {
        json document = small("a");
        document["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}};
        const auto tokenizer = from(document);
        record_seconds([&] { EXPECT_NO_THROW(tokenizer.encode(text)) << pattern; });
    }
}

TEST(TokenizerTestTime, MatchesAreTheSameWhereverSearchesBegin) {
    const std::string far(300, 'x');
    struct Case {
        std::string pattern;
        std::string text;
        std::vector<Match> matches;
    };
    const std::vector<Case> cases{{"x++y", far + "y" + far, {{0, 301}}},
                                  {"x{70}", far, {{0, 70}, {70, 140}, {140, 210}, {210, 280}}},
                                  {"(?<=x)y", far + "yy", {{300, 301}}},
                                  {"(?<=^x{64})", far, {{64, 64}}},
                                  {"(?<!x)x", far, {{0, 1}}},
                                  {"(?<=x{200})y", far + "y", {{300, 301}}},
                                  {"^", far + "\n" + far, {{0, 0}, {301, 301}}},
                                  {"$", far + "\n" + far, {{300, 300}, {601, 601}}},
                                  {"\\z", far, {{300, 300}}},
                                  {"\\b", far + " " + far, {{0, 0}, {300, 300}, {301, 301}, {601, 601}}},
                                  {"y*\\z", far + "yy", {{300, 302}}},
                                  {"x{64}\\K(?=xy)", far + "y", {{299, 299}}},
                                  {"(?!x)", far, {{300, 300}}},
                                  {"\u00e9+", far + "\u00e9\u00e9" + far, {{300, 304}}},
                                  {"(x+)\\1y", far + "y", {{0, 301}}}};
    for (const Case& each : cases) {
        RegexBudget budget;
        budget.allow(each.text.size());
        const auto matches = Regex(each.pattern, "pattern").find_all(each.text, budget);
        EXPECT_TRUE(matches == each.matches) << each.pattern << ": " << matches.size();
    }
    EXPECT_THROW(Regex("(?<=x{256})y", "pattern"), BadFile);
    EXPECT_THROW(Regex("\\Gx", "pattern"), Unsupported);
}

TEST(TokenizerTestTime, LongRunsAreNoCatastrophe) {
    json document = small("a \n");
    document["pre_tokenizer"] = {{"type", "Split"},
                                 {"pattern", {{"Regex", "[^\\r\\n\\p{L}]?\\p{L}+|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}}},
                                 {"behavior", "Isolated"}};
    const auto tokenizer = from(document);
    for (const char c : {'a', ' ', '\n'}) {
        const std::string text(300'000, c);
        EXPECT_EQ(tokenizer.decode(tokenizer.encode(text + "a")), text + "a");
    }
    std::string text;  // and many of them
    for (std::size_t i = 0; i < 300; ++i) text += std::string(i * 3, ' ') + "a";
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

TEST(TokenizerTestTime, ReplacingThatGrowsForEverEndsInAnError) {
    json document = small("a");
    json steps = json::array();
    for (int i = 0; i < 60; ++i) {
        steps.push_back({{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}});
    }
    steps.insert(steps.begin(),
                 {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(100'000, 'a')}});
    document["normalizer"] = {{"type", "Sequence"}, {"normalizers", steps}};
    EXPECT_THROW(from(document).encode("aaa"), BadFile);
    steps = json::array();
    for (int i = 0; i < 8; ++i) {
        steps.push_back({{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", std::string(16, 'a')}});
    }
    document["normalizer"] = {{"type", "Sequence"}, {"normalizers", steps}};
    record_seconds([&] {
        try {
            from(document).encode(std::string(1000, 'a'));
            ADD_FAILURE() << "accepted";
        } catch (const BadFile& error) {
            EXPECT_NE(std::string(error.what()).find("tokenizer.json: normalizer.normalizers["), std::string::npos);
        }
    });
}

TEST(TokenizerTestTime, PrependingThatGrowsForEverEndsInAnError) {
    json document = small("a");
    document["added_tokens"] = json::array({added(9, "<x>", false, true)});
    document["normalizer"] = {{"type", "Prepend"}, {"prepend", std::string(10'000, 'a')}};
    const auto tokenizer = from(document);
    EXPECT_EQ(tokenizer.encode("a").size(), 10'001U);
    std::string text;
    for (int i = 0; i < 1000; ++i) text += "a<x>";  // each part is prepended to: what they grow by is one sum
    EXPECT_THROW(tokenizer.encode(text), BadFile);
}

TEST(TokenizerTestTime, AddedTokensHaveALongestLength) {
    json document = small("a");
    const auto with = [&](std::size_t size, bool normalized) {
        document["added_tokens"] = json::array({added(9, std::string(size, 'a') + "b", normalized, false)});
        return document.dump();
    };
    expect_refused<BadFile>(with(1024, false), {"added_tokens[0].content has 1025 bytes", "1024"});
    const auto tokenizer = Tokenizer::from_json(with(1023, false));
    Ids ids;
    record_seconds([&] { ids = tokenizer.encode(std::string(3000, 'a') + "b"); });
    EXPECT_EQ(ids.size(), 1978U);
    EXPECT_EQ(ids.back(), 9);
    document["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", "b"}}}, {"content", "bbb"}};
    expect_refused<BadFile>(with(1022, true), {"added_tokens[0].content has 1025 bytes once it is normalized"});
}

// A child process that may take hardly any more memory; sanitizers and emulators take what they like.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(TokenizerTestMemory, ARefusalIsTheLibrarysError) {
    if (emulated()) GTEST_SKIP() << "an emulator's memory is not limited";
    const std::string file = small("a").dump();
    const auto tokenizer = Tokenizer::from_json(file);
    const std::string text(20'000'000, 'a');
    const std::string large = "[\"" + text + "\"]";
    const Ids ids(20'000'000, 0);
    const auto refused = [](const auto& operation) {
        try {
            operation();
        } catch (const OutOfMemory&) {
            return true;
        } catch (...) {
        }
        return false;
    };
    const auto child = [&] {
        const rlimit limit{1, 1};
        if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(1);
        if (!refused([&] { static_cast<void>(tokenizer.encode(text)); })) std::_Exit(2);
        if (!refused([&] { static_cast<void>(tokenizer.decode(ids)); })) std::_Exit(3);
        if (!refused([&] { Tokenizer::from_json(large); })) std::_Exit(4);
        std::_Exit(0);
    };
    EXPECT_EXIT(child(), testing::ExitedWithCode(0), "");
}
#endif

TEST(TokenizerTestTime, ALongTextWithoutPreTokenizer) {
    // every merge of the list comes into play: a, aa, aaaa ... and ab, abab ...
    std::vector<std::pair<std::string, std::string>> merges;
    std::string a = "a";
    std::string ab = "ab";
    merges.emplace_back("a", "b");
    for (int i = 0; i < 6; ++i) {
        merges.emplace_back(ab, ab);
        ab += ab;
        merges.emplace_back(a, a);
        a += a;
    }
    const auto tokenizer = from(small("ab ", {}, merges));
    Random random(seed_or(3));
    HEADLONG_TRACE_SEED(random);
    const std::size_t size = emulated() ? 50'000 : 200'000;
    std::string text;
    while (text.size() < size) {
        if (random.chance(0.5)) {
            text.append(static_cast<std::size_t>(random.integer(1, 300)), 'a');
        } else {
            for (std::int64_t i = random.integer(1, 100); i > 0; --i) text += "ab";
        }
        text += random.chance(0.01) ? " " : "";
    }
    Ids ids;
    record_seconds([&] { ids = tokenizer.encode(text); });
    EXPECT_EQ(tokenizer.decode(ids), text);
}

// --- UTF-8 ---

TEST(TokenizerTestUtf8, LossyInPartsIsLossyAsAWhole) {
    // the table of maximal subparts in Unicode, chapter 3
    LossyUtf8 whole;
    std::string text;
    whole.push("\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64", text);
    EXPECT_EQ(text, "a\uFFFD\uFFFD\uFFFDb\uFFFDc\uFFFD\uFFFDd");
    Random random(seed_or(4));
    HEADLONG_TRACE_SEED(random);
    const std::vector<char> bytes{'\x41', '\x80', '\xBF', '\xC2', '\xE0', '\xE1',
                                  '\xED', '\xF0', '\xF4', '\x90', '\xA0'};
    for (int i = 0; i < 2000; ++i) {
        std::string input;
        for (std::int64_t n = random.integer(0, 12); n > 0; --n) input += random.pick(bytes);
        std::string at_once;
        LossyUtf8 first;
        first.push(input, at_once);
        first.finish(at_once);
        std::string in_parts;
        LossyUtf8 second;
        for (const char byte : input) second.push(std::string_view(&byte, 1), in_parts);
        second.finish(in_parts);
        EXPECT_EQ(in_parts, at_once);
        EXPECT_EQ(find_invalid_utf8(at_once), std::nullopt);
        EXPECT_EQ(find_invalid_utf8(input).has_value(), at_once != input);
    }
}

}  // namespace
}  // namespace headlong::test
