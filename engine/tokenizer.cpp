// The road of a text:
//
//     added tokens that are matched as written
//       -> between them: normalizers -> added tokens that are matched as normalized
//         -> between those: pre-tokenizers -> byte-pair encoding
//           -> the ids that the post-processor adds
//
// and back: tokens -> the decoder's chain.
#include <headlong/tokenizer.hpp>

#include <algorithm>
#include <array>
#include <limits>
#include <unordered_map>
#include <utility>

#include <headlong/error.hpp>

#include "engine/context_impl.hpp"  // with_memory_errors
#include "engine/json_node.hpp"
#include "engine/mapped_file.hpp"
#include "engine/tokenizer_bpe.hpp"
#include "engine/tokenizer_decoders.hpp"
#include "engine/tokenizer_text.hpp"
#include "engine/utf8.hpp"

namespace headlong {
namespace {

constexpr std::uint64_t kLargestFile = std::uint64_t{1} << 28;
constexpr std::size_t kLongestAddedToken = 1024;            // of bytes: a search may take that much per byte
constexpr std::size_t kLongestText = std::size_t{1} << 30;  // grown by normalizers it still has 32-bit offsets

std::string in_quotes(std::string_view text) { return "'" + one_line(text) + "'"; }

/// Bytes of the white space that a text in valid UTF-8 begins with, or ends with: characters of Unicode's property
/// White_Space.
constexpr std::array<std::string_view, 25> kSpaces{" ",      "\t",     "\n",     "\v",     "\f",     "\r",     "\u0085",
                                                   "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004",
                                                   "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200a", "\u2028",
                                                   "\u2029", "\u202f", "\u205f", "\u3000"};
std::size_t leading_space(std::string_view text) noexcept {
    std::size_t bytes = 0;
    const auto begins = [&](std::string_view space) { return text.substr(bytes).starts_with(space); };
    for (auto found = kSpaces.begin(); (found = std::ranges::find_if(kSpaces, begins)) != kSpaces.end();) {
        bytes += found->size();
    }
    return bytes;
}
std::size_t trailing_space(std::string_view text) noexcept {
    std::size_t left = text.size();
    const auto ends = [&](std::string_view space) { return text.substr(0, left).ends_with(space); };
    for (auto found = kSpaces.begin(); (found = std::ranges::find_if(kSpaces, ends)) != kSpaces.end();) {
        left -= found->size();
    }
    return text.size() - left;
}

/// An added token, and whether the white space before and behind it belongs to it.
struct AddedToken {
    std::int32_t id = -1;
    bool strips_left = false;
    bool strips_right = false;
};

/// Finds added tokens in a text, in time of its length times the longest token's: the leftmost first, and of those that
/// begin there the longest.
class TokenMatcher {
  public:
    void add(std::string_view token, const AddedToken& added_token) {
        if (token.empty()) return;
        std::uint32_t node = 0;
        for (const char c : token) {
            const auto [found, added] = children_.try_emplace(key(node, c), static_cast<std::uint32_t>(tokens_.size()));
            if (added) tokens_.emplace_back();
            node = found->second;
        }
        tokens_[node] = added_token;
        begins_[static_cast<unsigned char>(token[0])] = true;
    }

    /// Calls text(part) and token(id) in the order of the text. Parts are not empty.
    template <typename Text, typename Token>
    void split(std::string_view whole, Text text, Token token) const {
        std::size_t done = 0;
        std::size_t at = 0;
        while (at < whole.size()) {
            AddedToken found;
            const std::size_t length =
                begins_[static_cast<unsigned char>(whole[at])] ? longest(whole.substr(at), found) : 0;
            if (length == 0) {
                ++at;
                continue;
            }
            std::string_view before = whole.substr(done, at - done);
            if (found.strips_left) before.remove_suffix(trailing_space(before));
            if (!before.empty()) text(done, before);
            token(found.id);
            at += length;
            if (found.strips_right) at += leading_space(whole.substr(at));
            done = at;
        }
        if (done < whole.size()) text(done, whole.substr(done));
    }

  private:
    static std::uint64_t key(std::uint32_t node, char c) noexcept {
        return std::uint64_t{node} << 8U | static_cast<unsigned char>(c);
    }

    std::size_t longest(std::string_view text, AddedToken& token) const {
        std::size_t length = 0;
        std::uint32_t node = 0;
        for (std::size_t i = 0; i < text.size(); ++i) {
            const auto found = children_.find(key(node, text[i]));
            if (found == children_.end()) break;
            node = found->second;
            if (tokens_[node].id >= 0) {
                token = tokens_[node];
                length = i + 1;
            }
        }
        return length;
    }

    std::unordered_map<std::uint64_t, std::uint32_t> children_;  // a tree: node and byte to node
    std::vector<AddedToken> tokens_ = {{}};                      // that end in a node
    std::array<bool, 256> begins_{};
};

/// A post-processor's template: ids, and where the text's own are.
struct TemplatePart {
    bool text = false;
    std::vector<std::int32_t> ids;
};
using Template = std::vector<TemplatePart>;

struct Token {
    std::string text;
    bool used = false;
    bool special = false;
};

}  // namespace

struct Tokenizer::Impl {
    Impl(std::string_view json, const std::string& file) : Impl(parse_json(json, file).root(), file) {}
    Impl(const nlohmann::json& document, const std::string& file)
        : Impl(JsonNode(document, file), part(document, file, "decoder")) {}
    Impl(const JsonNode& root, const JsonNode& decoder);

    /// A member that may be missing, which is the same as null.
    static JsonNode part(const nlohmann::json& document, const std::string& file, const char* key) {
        static const nlohmann::json null;
        const JsonNode root(document, file);
        return root.find(key).value_or(root.child(null, key));
    }

    void add_token(std::string_view text, std::int32_t id);
    void read_added_tokens(const JsonNode& node);
    void read_post_processor(const JsonNode& node);
    Template read_template(const JsonNode& node) const;
    void encode_part(std::string_view text, bool at_start, RegexBudget& budget, BytePairEncoding::Scratch& scratch,
                     std::vector<std::int32_t>& ids) const;
    const Token& token(std::int32_t id) const;

    BytePairEncoding model;
    std::vector<std::unique_ptr<const Normalizer>> normalizers;
    std::vector<std::unique_ptr<const PreTokenizer>> pre_tokenizers;
    std::vector<Template> templates;
    DecoderChain decoder;
    TokenIds ids;               // of all tokens
    std::vector<Token> tokens;  // by id
    std::size_t added = 0;      // of them
    TokenMatcher as_written;
    TokenMatcher as_normalized;
};

Tokenizer::Impl::Impl(const JsonNode& root, const JsonNode& decoder_node)
    : model(root.at("model")), decoder(decoder_node) {
    for (const auto& [text, id] : model.vocab()) add_token(text, id);
    if (const auto node = root.find("normalizer")) normalizers = read_normalizers(*node);
    if (const auto node = root.find("pre_tokenizer")) pre_tokenizers = read_pre_tokenizers(*node);
    if (const auto node = root.find("added_tokens")) read_added_tokens(*node);
    if (const auto node = root.find("post_processor")) read_post_processor(*node);
    // truncation and padding are requests to whoever makes batches; they are no part of what a text is in tokens
}

void Tokenizer::Impl::add_token(std::string_view text, std::int32_t id) {
    const auto index = static_cast<std::size_t>(id);
    if (index >= tokens.size()) tokens.resize(index + 1);
    tokens[index].text = text;
    tokens[index].used = true;
    ids.emplace(text, id);
}

void Tokenizer::Impl::read_added_tokens(const JsonNode& node) {
    TokenIds seen;
    RegexBudget budget;
    for (const JsonNode& each : node.items()) {
        const JsonNode id_node = each.at("id");
        const JsonNode content = each.at("content");
        const auto id = static_cast<std::int32_t>(id_node.whole_number(kLargestTokenId));
        const std::string& text = content.string();
        if (text.empty()) content.fail("is empty");
        if (text.size() > kLongestAddedToken) {
            content.fail("has " + std::to_string(text.size()) + " bytes, at most " +
                         std::to_string(kLongestAddedToken) + " are allowed");
        }
        if (!seen.emplace(text, id).second) content.fail("is " + in_quotes(text) + ", which is there twice");
        if (each.boolean_or("single_word", false)) each.at("single_word").refuse("is true, only false is built");
        if (const auto known = ids.find(text); known != ids.end() && known->second != id) {
            id_node.fail("is " + std::to_string(id) + ", but " + in_quotes(text) + " has the id " +
                         std::to_string(known->second));
        }
        if (const auto index = static_cast<std::size_t>(id);
            index < tokens.size() && tokens[index].used && tokens[index].text != text) {
            id_node.fail("is " + std::to_string(id) + " for " + in_quotes(text) + ", but that is the id of " +
                         in_quotes(tokens[index].text));
        }
        add_token(text, id);
        ++added;
        const bool special = each.boolean_or("special", false);
        const AddedToken stripping{id, each.boolean_or("lstrip", false), each.boolean_or("rstrip", false)};
        tokens[static_cast<std::size_t>(id)].special = special;
        if (each.boolean_or("normalized", !special)) {
            std::string normalized = text;
            budget.allow(text.size());
            for (const auto& step : normalizers) step->apply(normalized, budget);
            if (normalized.size() > kLongestAddedToken) {
                content.fail("has " + std::to_string(normalized.size()) + " bytes once it is normalized, at most " +
                             std::to_string(kLongestAddedToken) + " are allowed");
            }
            as_normalized.add(normalized, stripping);
        } else {
            as_written.add(text, stripping);
        }
    }
}

Template Tokenizer::Impl::read_template(const JsonNode& node) const {
    const auto special_tokens = node.find("special_tokens");
    Template result;
    for (const JsonNode& each : node.at("single").items()) {
        const auto sequence = each.find("Sequence");
        const auto special = each.find("SpecialToken");
        if (sequence.has_value() == special.has_value()) {
            each.fail("must have one member, Sequence or SpecialToken");
        }
        if (sequence) {
            const JsonNode id = sequence->at("id");
            if (id.string() != "A") id.fail("is " + in_quotes(id.string()) + ", only A is there in a single text");
            result.push_back({.text = true, .ids = {}});
            continue;
        }
        const JsonNode id = special->at("id");
        if (!special_tokens || !special_tokens->find(id.string())) {
            id.fail("is " + in_quotes(id.string()) + ", which is not among special_tokens");
        }
        TemplatePart part;
        for (const JsonNode& number : special_tokens->at(id.string()).at("ids").items()) {
            const auto value = static_cast<std::size_t>(number.whole_number(kLargestTokenId));
            if (value >= tokens.size() || !tokens[value].used) {
                number.fail("is " + std::to_string(value) + ", which is the id of no token");
            }
            part.ids.push_back(static_cast<std::int32_t>(value));
        }
        result.push_back(std::move(part));
    }
    if (std::ranges::count_if(result, [](const TemplatePart& part) { return part.text; }) > 1) {
        node.at("single").fail("has the text more than once");  // in a Sequence, that doubles again and again
    }
    return result;
}

void Tokenizer::Impl::read_post_processor(const JsonNode& node) {
    const JsonNode type = node.at("type");
    const std::string& name = type.string();
    if (name == "Sequence") {
        for (const JsonNode& each : node.at("processors").items()) read_post_processor(each);
    } else if (name == "TemplateProcessing") {
        templates.push_back(read_template(node));
    } else if (name != "ByteLevel") {  // which trims offsets alone
        type.refuse("is " + in_quotes(name) + ", built are Sequence, TemplateProcessing, ByteLevel");
    }
}

void Tokenizer::Impl::encode_part(std::string_view text, bool at_start, RegexBudget& budget,
                                  BytePairEncoding::Scratch& scratch, std::vector<std::int32_t>& result) const {
    std::vector<Piece> pieces;
    pieces.push_back({std::string(text), at_start});
    std::vector<Piece> next;
    for (const auto& step : pre_tokenizers) {
        for (Piece& piece : pieces) step->cut(std::move(piece), next, budget);
        std::erase_if(next, [](const Piece& piece) { return piece.text.empty(); });
        pieces.swap(next);
        next.clear();
    }
    for (const Piece& piece : pieces) model.encode(piece.text, result, scratch);
}

const Token& Tokenizer::Impl::token(std::int32_t id) const {
    const auto index = static_cast<std::size_t>(id);
    if (id < 0 || index >= tokens.size() || !tokens[index].used) {
        throw InvalidArgument("the token id is " + std::to_string(id) +
                              ", which the tokenizer does not have: its "
                              "ids are in [0, " +
                              std::to_string(tokens.size()) + ")");
    }
    return tokens[index];
}

Tokenizer Tokenizer::from_file(const std::string& path) {
    return with_memory_errors("reading a tokenizer", [&] {
        const InputFile file(path);
        if (file.size() > kLargestFile) {
            throw BadFile(one_line(path) + ": has " + std::to_string(file.size()) + " bytes, at most " +
                          std::to_string(kLargestFile) + " are allowed");
        }
        std::string text(static_cast<std::size_t>(file.size()), '\0');
        file.read(0, std::as_writable_bytes(std::span(text)));
        return from_json(text, path);
    });
}

Tokenizer Tokenizer::from_json(std::string_view text, std::string_view name) {
    return with_memory_errors("reading a tokenizer",
                              [&] { return Tokenizer(std::make_shared<const Impl>(text, one_line(name))); });
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
    return with_memory_errors("encoding a text", [&] {
        if (text.size() > kLongestText) {
            throw InvalidArgument("the text has " + std::to_string(text.size()) + " bytes, at most " +
                                  std::to_string(kLongestText) + " are allowed");
        }
        if (const auto offset = find_invalid_utf8(text)) {
            throw InvalidArgument("the text is not valid UTF-8 at its byte " + std::to_string(*offset));
        }
        RegexBudget budget;
        budget.allow(text.size());
        BytePairEncoding::Scratch scratch;
        std::vector<std::int32_t> ids;
        const auto add = [&](std::int32_t id) { ids.push_back(id); };
        impl_->as_written.split(
            text,
            [&](std::size_t offset, std::string_view part) {
                std::string normalized(part);
                for (const auto& step : impl_->normalizers) step->apply(normalized, budget);
                impl_->as_normalized.split(
                    normalized,
                    [&](std::size_t inner, std::string_view piece) {
                        impl_->encode_part(piece, offset == 0 && inner == 0, budget, scratch, ids);
                    },
                    add);
            },
            add);
        if (!add_special_tokens) return ids;
        for (const Template& parts : impl_->templates) {
            std::vector<std::int32_t> whole;
            for (const TemplatePart& part : parts) {
                const std::vector<std::int32_t>& more = part.text ? ids : part.ids;
                whole.insert(whole.end(), more.begin(), more.end());
            }
            ids.swap(whole);
        }
        return ids;
    });
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special_tokens) const {
    return with_memory_errors("decoding tokens", [&] {
        DecoderChain decoder = impl_->decoder;
        std::string text;
        for (const std::int32_t id : ids) {
            const Token& token = impl_->token(id);
            if (!skip_special_tokens || !token.special) decoder.push(token.text, text);
        }
        decoder.finish(text);
        return text;
    });
}

std::size_t Tokenizer::vocab_size() const noexcept { return impl_->tokens.size(); }
std::size_t Tokenizer::added_tokens() const noexcept { return impl_->added; }

std::optional<std::int32_t> Tokenizer::token_to_id(std::string_view token) const {
    const auto found = impl_->ids.find(token);
    return found == impl_->ids.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::string_view> Tokenizer::id_to_token(std::int32_t id) const noexcept {
    const auto index = static_cast<std::size_t>(id);
    if (id < 0 || index >= impl_->tokens.size() || !impl_->tokens[index].used) return std::nullopt;
    return impl_->tokens[index].text;
}

struct TokenStream::State {
    State(std::shared_ptr<const Tokenizer::Impl> tables, bool skip)
        : impl(std::move(tables)), skip_special_tokens(skip), decoder(impl->decoder) {}

    /// What of a text is to be returned: not what the prompt would have ended with by itself, and now comes late.
    void withhold(std::string& text) {
        std::size_t same = 0;
        while (same < text.size() && same < prompt_rest.size()) {
            const std::size_t length = utf8_length(text[same]);
            if (prompt_rest.compare(same, length, text, same, length) != 0) {
                prompt_rest.clear();  // the prompt's text is no prefix: this belongs to both
                break;
            }
            same += length;
        }
        text.erase(0, same);
        prompt_rest.erase(0, same);
    }

    std::shared_ptr<const Tokenizer::Impl> impl;
    bool skip_special_tokens;
    DecoderChain decoder;
    std::string prompt_rest;
    bool begun = false;
};

TokenStream::TokenStream(const Tokenizer& tokenizer, bool skip_special_tokens)
    : state_(with_memory_errors("decoding tokens",
                                [&] { return std::make_unique<State>(tokenizer.impl_, skip_special_tokens); })) {}
TokenStream::~TokenStream() = default;
TokenStream::TokenStream(TokenStream&&) noexcept = default;
TokenStream& TokenStream::operator=(TokenStream&&) noexcept = default;

void TokenStream::prime(std::span<const std::int32_t> ids) {
    return with_memory_errors("decoding tokens", [&] {
        if (state_->begun) throw InvalidArgument("a stream of tokens is primed before its first token");
        DecoderChain decoder = state_->impl->decoder;
        std::string text;
        for (const std::int32_t id : ids) {
            const Token& token = state_->impl->token(id);
            if (!state_->skip_special_tokens || !token.special) decoder.push(token.text, text);
            text.clear();
        }
        DecoderChain(decoder).finish(text);
        state_->decoder = std::move(decoder);
        state_->prompt_rest = std::move(text);
    });
}

std::string TokenStream::push(std::int32_t id) {
    return with_memory_errors("decoding tokens", [&] {
        const Token& token = state_->impl->token(id);
        state_->begun = true;
        std::string text;
        if (!state_->skip_special_tokens || !token.special) state_->decoder.push(token.text, text);
        state_->withhold(text);
        return text;
    });
}

std::string TokenStream::finish() {
    return with_memory_errors("decoding tokens", [&] {
        std::string text;
        state_->decoder.finish(text);
        state_->withhold(text);
        state_ = std::make_unique<State>(state_->impl, state_->skip_special_tokens);
        return text;
    });
}

}  // namespace headlong
