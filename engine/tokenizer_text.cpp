#include "engine/tokenizer_text.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include <headlong/error.hpp>

#include "engine/mapped_file.hpp"  // one_line
#include "engine/utf8.hpp"

namespace headlong {
namespace {

constexpr std::size_t kLongestPattern = 4096;  // of plain text: a search may take that much per byte

std::string in_quotes(std::string_view text) { return "'" + one_line(text) + "'"; }

[[noreturn]] void fail_to_grow(const std::string& name) {
    throw BadFile(name + " makes the text too long: steps may add 2^20 bytes, and 64 for each byte of the text");
}

/// Leaves an empty text empty.
class Prepend final : public Normalizer {
  public:
    Prepend(std::string text, std::string name) : text_(std::move(text)), name_(std::move(name)) {}
    void apply(std::string& text, RegexBudget& budget) const override {
        if (text.empty()) return;
        if (!budget.grow(text_.size())) fail_to_grow(name_);
        text.insert(0, text_);
    }

  private:
    std::string text_;
    std::string name_;
};

class Replace final : public Normalizer {
  public:
    Replace(Pattern pattern, std::string content, std::string name)
        : pattern_(std::move(pattern)), content_(std::move(content)), name_(std::move(name)) {}
    void apply(std::string& text, RegexBudget& budget) const override {
        text = pattern_.replace(text, content_, name_, budget);
    }

  private:
    Pattern pattern_;
    std::string content_;
    std::string name_;
};

enum class Behavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

/// Cuts a text at the matches of a pattern; the behavior says what becomes of the matches.
class Split final : public PreTokenizer {
  public:
    Split(Pattern pattern, Behavior behavior, bool invert)
        : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert) {}

    void cut(Piece&& piece, std::vector<Piece>& pieces, RegexBudget& budget) const override {
        for (const Match& range : ranges(piece.text, budget)) {
            pieces.push_back(
                {piece.text.substr(range.begin, range.end - range.begin), piece.at_start && range.begin == 0});
        }
    }

  private:
    /// The whole text in order: matches and what lies between them.
    struct Range {
        Match bytes;
        bool matched = false;
    };

    std::vector<Match> ranges(std::string_view text, RegexBudget& budget) const {
        std::vector<Range> all;
        std::size_t end = 0;
        for (const Match& match : pattern_.find_all(text, budget)) {
            if (match.begin != end) all.push_back({{end, match.begin}, invert_});
            all.push_back({match, !invert_});
            end = match.end;
        }
        if (end != text.size()) all.push_back({{end, text.size()}, invert_});

        std::vector<Match> kept;
        bool matched = false;  // the range before
        switch (behavior_) {
            case Behavior::isolated:
                for (const Range& range : all) kept.push_back(range.bytes);
                break;
            case Behavior::removed:
                for (const Range& range : all) {
                    if (!range.matched) kept.push_back(range.bytes);
                }
                break;
            case Behavior::contiguous:
                for (const Range& range : all) {
                    if (range.matched == matched && !kept.empty()) {
                        kept.back().end = range.bytes.end;
                    } else {
                        kept.push_back(range.bytes);
                    }
                    matched = range.matched;
                }
                break;
            case Behavior::merged_with_previous:
                for (const Range& range : all) {
                    if (range.matched && !matched && !kept.empty()) {
                        kept.back().end = range.bytes.end;
                    } else {
                        kept.push_back(range.bytes);
                    }
                    matched = range.matched;
                }
                break;
            case Behavior::merged_with_next:
                std::ranges::reverse(all);
                for (const Range& range : all) {
                    if (range.matched && !matched && !kept.empty()) {
                        kept.back().begin = range.bytes.begin;
                    } else {
                        kept.push_back(range.bytes);
                    }
                    matched = range.matched;
                }
                std::ranges::reverse(kept);
                break;
        }
        return kept;
    }

    Pattern pattern_;
    Behavior behavior_;
    bool invert_;
};

/// One of Unicode's normalisation forms (Unicode Standard Annex 15).
class UnicodeForm final : public Normalizer {
  public:
    UnicodeForm(int options, std::string name)
        : options_(static_cast<utf8proc_option_t>(options | UTF8PROC_STABLE)), name_(std::move(name)) {}

    void apply(std::string& text, RegexBudget& budget) const override {
        if (std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; })) return;
        utf8proc_uint8_t* mapped = nullptr;
        const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                                   static_cast<utf8proc_ssize_t>(text.size()), &mapped, options_);
        const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(mapped, std::free);
        if (size == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
        if (size < 0) throw BadFile(name_ + ": " + utf8proc_errmsg(size));
        const auto bytes = static_cast<std::size_t>(size);
        if (bytes > text.size() && !budget.grow(bytes - text.size())) fail_to_grow(name_);
        text.assign(reinterpret_cast<const char*>(mapped), bytes);
    }

  private:
    utf8proc_option_t options_;
    std::string name_;
};

/// A space in front of a piece that does not begin with one.
class PrefixSpace final : public PreTokenizer {
  public:
    void cut(Piece&& piece, std::vector<Piece>& pieces, RegexBudget&) const override {
        if (!piece.text.starts_with(' ')) piece.text.insert(0, 1, ' ');
        pieces.push_back(std::move(piece));
    }
};

/// Writes each byte as its printable character.
class BytesToCharacters final : public PreTokenizer {
  public:
    void cut(Piece&& piece, std::vector<Piece>& pieces, RegexBudget&) const override {
        std::string text;
        text.reserve(piece.text.size() * 2);
        for (const char byte : piece.text) text += byte_characters()[static_cast<unsigned char>(byte)];
        pieces.push_back({std::move(text), piece.at_start});
    }
};

/// Spaces become a visible character, and each word keeps the one in front of it.
class Metaspace final : public PreTokenizer {
  public:
    enum class Scheme { always, first, never };
    Metaspace(std::string replacement, Scheme scheme, bool split)
        : replacement_(std::move(replacement)), scheme_(scheme), split_(split) {}

    void cut(Piece&& piece, std::vector<Piece>& pieces, RegexBudget&) const override {
        std::string text;
        for (const char c : piece.text) {
            if (c == ' ') {
                text += replacement_;
            } else {
                text += c;
            }
        }
        const bool prepend = scheme_ == Scheme::always || (scheme_ == Scheme::first && piece.at_start);
        if (prepend && !text.starts_with(replacement_)) text.insert(0, replacement_);
        std::size_t begin = 0;
        while (split_) {
            const std::size_t end = text.find(replacement_, begin + 1);
            if (end == std::string::npos) break;
            pieces.push_back({text.substr(begin, end - begin), piece.at_start && begin == 0});
            begin = end;
        }
        pieces.push_back({text.substr(begin), piece.at_start && begin == 0});
    }

  private:
    std::string replacement_;
    Scheme scheme_;
    bool split_;
};

Behavior read_behavior(const JsonNode& node) {
    const std::string& text = node.string();
    if (text == "Isolated") return Behavior::isolated;
    if (text == "Removed") return Behavior::removed;
    if (text == "MergedWithPrevious") return Behavior::merged_with_previous;
    if (text == "MergedWithNext") return Behavior::merged_with_next;
    if (text == "Contiguous") return Behavior::contiguous;
    node.fail("is " + in_quotes(text) +
              ", known are Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous");
}

Metaspace::Scheme read_scheme(const JsonNode& node) {
    const std::optional<JsonNode> scheme = node.find("prepend_scheme");
    if (!scheme) {  // the older form
        return node.boolean_or("add_prefix_space", true) ? Metaspace::Scheme::always : Metaspace::Scheme::never;
    }
    const std::string& text = scheme->string();
    if (text == "always") return Metaspace::Scheme::always;
    if (text == "first") return Metaspace::Scheme::first;
    if (text == "never") return Metaspace::Scheme::never;
    scheme->fail("is " + in_quotes(text) + ", known are always, first, never");
}

void read_into(const JsonNode& node, std::vector<std::unique_ptr<const Normalizer>>& steps) {
    if (node.value().is_null()) return;
    const JsonNode type = node.at("type");
    const std::string& name = type.string();
    if (name == "Sequence") {
        for (const JsonNode& each : node.at("normalizers").items()) read_into(each, steps);
    } else if (name == "Prepend") {
        steps.push_back(std::make_unique<Prepend>(node.at("prepend").string(), node.name()));
    } else if (name == "Replace") {
        steps.push_back(
            std::make_unique<Replace>(Pattern::read(node.at("pattern")), node.at("content").string(), node.name()));
    } else if (name == "NFC") {
        steps.push_back(std::make_unique<UnicodeForm>(UTF8PROC_COMPOSE, node.name()));
    } else if (name == "NFD") {
        steps.push_back(std::make_unique<UnicodeForm>(UTF8PROC_DECOMPOSE, node.name()));
    } else if (name == "NFKC") {
        steps.push_back(std::make_unique<UnicodeForm>(UTF8PROC_COMPOSE | UTF8PROC_COMPAT, node.name()));
    } else if (name == "NFKD") {
        steps.push_back(std::make_unique<UnicodeForm>(UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT, node.name()));
    } else {
        type.refuse("is " + in_quotes(name) + ", built are Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD");
    }
}

void read_into(const JsonNode& node, std::vector<std::unique_ptr<const PreTokenizer>>& steps) {
    if (node.value().is_null()) return;
    const JsonNode type = node.at("type");
    const std::string& name = type.string();
    if (name == "Sequence") {
        for (const JsonNode& each : node.at("pretokenizers").items()) read_into(each, steps);
    } else if (name == "ByteLevel") {
        if (node.at("add_prefix_space").boolean()) steps.push_back(std::make_unique<PrefixSpace>());
        if (node.boolean_or("use_regex", true)) {
            // the pattern of GPT-2: contractions, words, numbers and the rest, each with a space in front
            constexpr std::string_view pattern =
                R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
            steps.push_back(std::make_unique<Split>(Pattern(Regex(pattern, node.name())), Behavior::isolated, false));
        }
        steps.push_back(std::make_unique<BytesToCharacters>());
    } else if (name == "Split") {
        steps.push_back(std::make_unique<Split>(Pattern::read(node.at("pattern")), read_behavior(node.at("behavior")),
                                                node.boolean_or("invert", false)));
    } else if (name == "Digits") {
        const bool each = node.boolean_or("individual_digits", false);
        steps.push_back(std::make_unique<Split>(Pattern(Regex(R"(\p{N})", node.name())),
                                                each ? Behavior::isolated : Behavior::contiguous, false));
    } else if (name == "Metaspace") {
        const JsonNode replacement = node.at("replacement");
        const std::string& text = replacement.string();
        if (text.empty() || utf8_length(text[0]) != text.size()) {
            replacement.fail("is " + in_quotes(text) + ", only one character is allowed");
        }
        steps.push_back(std::make_unique<Metaspace>(text, read_scheme(node), node.boolean_or("split", true)));
    } else {
        type.refuse("is " + in_quotes(name) + ", built are Sequence, ByteLevel, Split, Digits, Metaspace");
    }
}

}  // namespace

Pattern Pattern::read(const JsonNode& node) {
    const std::optional<JsonNode> text = node.find("String");
    const std::optional<JsonNode> regex = node.find("Regex");
    if (text.has_value() == regex.has_value()) node.fail("must have one member, String or Regex");
    const JsonNode& given = text ? *text : *regex;
    if (given.string().empty()) given.fail("is empty");
    if (text && given.string().size() > kLongestPattern) {
        given.fail("has " + std::to_string(given.string().size()) + " bytes, at most " +
                   std::to_string(kLongestPattern) + " are allowed");
    }
    if (text) return Pattern(text->string());
    return Pattern(Regex(regex->string(), regex->name()));
}

std::vector<Match> Pattern::find_all(std::string_view text, RegexBudget& budget) const {
    if (const Regex* regex = std::get_if<Regex>(&what_)) return regex->find_all(text, budget);
    const std::string& wanted = std::get<std::string>(what_);
    std::vector<Match> matches;
    for (std::size_t at = text.find(wanted); at != std::string_view::npos; at = text.find(wanted, at)) {
        matches.push_back({at, at + wanted.size()});
        at += wanted.size();
    }
    return matches;
}

std::string Pattern::replace(std::string_view text, std::string_view content, const std::string& name,
                             RegexBudget& budget) const {
    std::string result;
    if (text.empty()) return result;  // not even an empty match
    std::size_t end = 0;
    const std::vector<Match> matches = find_all(text, budget);
    const std::uint64_t longest = text.size() + budget.growth_left();
    const auto add = [&](std::string_view part) {
        if (part.size() > longest - result.size()) fail_to_grow(name);
        result += part;
    };
    for (const Match& match : matches) {
        add(text.substr(end, match.begin - end));
        add(content);
        end = match.end;
    }
    add(text.substr(end));
    if (result.size() > text.size() && !budget.grow(result.size() - text.size())) fail_to_grow(name);
    return result;
}

std::vector<std::unique_ptr<const Normalizer>> read_normalizers(const JsonNode& node) {
    std::vector<std::unique_ptr<const Normalizer>> steps;
    read_into(node, steps);
    return steps;
}

std::vector<std::unique_ptr<const PreTokenizer>> read_pre_tokenizers(const JsonNode& node) {
    std::vector<std::unique_ptr<const PreTokenizer>> steps;
    read_into(node, steps);
    return steps;
}

const std::array<std::string, 256>& byte_characters() {
    static const std::array<std::string, 256> table = [] {
        std::array<std::string, 256> characters;
        char32_t next = 256;
        for (char32_t byte = 0; byte < 256; ++byte) {
            const bool visible = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
            append_utf8(characters[byte], visible ? byte : next++);
        }
        return characters;
    }();
    return table;
}

}  // namespace headlong
