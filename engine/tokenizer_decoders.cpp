#include "engine/tokenizer_decoders.hpp"

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>

#include "engine/mapped_file.hpp"  // one_line
#include "engine/tokenizer_text.hpp"
#include "engine/utf8.hpp"

namespace headlong {
namespace {

std::string in_quotes(std::string_view text) { return "'" + one_line(text) + "'"; }

/// Calls function(character) for each character of valid UTF-8.
template <typename Function>
void each_character(std::string_view text, Function function) {
    while (!text.empty()) {
        const std::size_t length = utf8_length(text[0]);
        function(text.substr(0, length));
        text.remove_prefix(length);
    }
}

/// clone() by copying.
template <typename Self, typename Base = DecoderStep>
class Copied : public Base {
  public:
    std::unique_ptr<DecoderStep> clone() const final { return std::make_unique<Self>(static_cast<const Self&>(*this)); }
};

/// A step that needs whole tokens.
class TokenStep : public DecoderStep {
  public:
    void take(Fragment&& fragment, std::vector<Fragment>& out) final {
        token_ += fragment.text;
        if (fragment.ends_token) token(std::exchange(token_, {}), out);
    }

  protected:
    virtual void token(std::string&& text, std::vector<Fragment>& out) = 0;

  private:
    std::string token_;
};

/// A space between tokens: what the format does without a decoder.
class Join final : public Copied<Join> {
  public:
    void take(Fragment&& fragment, std::vector<Fragment>& out) override {
        if (begins_ && !first_) fragment.text.insert(0, 1, ' ');
        begins_ = fragment.ends_token;
        first_ = false;
        out.push_back(std::move(fragment));
    }

  private:
    bool first_ = true;
    bool begins_ = true;
};

/// All tokens become one.
class Fuse final : public Copied<Fuse> {
  public:
    void take(Fragment&& fragment, std::vector<Fragment>& out) override {
        fragment.ends_token = false;
        if (!fragment.text.empty()) out.push_back(std::move(fragment));
    }
    void finish(std::vector<Fragment>& out) override { out.push_back({{}, true}); }
};

/// Characters become the bytes that they stand for, and all tokens one text. A token with a character that stands
/// for none is taken as it is.
class ByteLevel final : public Copied<ByteLevel, TokenStep> {
  public:
    void finish(std::vector<Fragment>& out) override {
        Fragment rest{{}, true};
        text_.finish(rest.text);
        out.push_back(std::move(rest));
    }

  private:
    void token(std::string&& text, std::vector<Fragment>& out) override {
        static const std::unordered_map<std::string_view, char> bytes = [] {
            std::unordered_map<std::string_view, char> table;
            for (std::size_t byte = 0; byte < 256; ++byte) {
                table[byte_characters()[byte]] = static_cast<char>(static_cast<unsigned char>(byte));
            }
            return table;
        }();
        std::string decoded;
        bool all = true;
        each_character(text, [&](std::string_view character) {
            const auto found = bytes.find(character);
            if (found == bytes.end()) {
                all = false;
            } else {
                decoded += found->second;
            }
        });
        Fragment fragment;
        text_.push(all ? decoded : text, fragment.text);
        if (!fragment.text.empty()) out.push_back(std::move(fragment));
    }

    LossyUtf8 text_;
};

/// Replaces within each token.
class Replace final : public Copied<Replace, TokenStep> {
  public:
    Replace(Pattern pattern, std::string content, std::string name)
        : what_(std::make_shared<const What>(What{std::move(pattern), std::move(content), std::move(name)})) {}

  private:
    struct What {
        Pattern pattern;
        std::string content;
        std::string name;
    };

    void token(std::string&& text, std::vector<Fragment>& out) override {
        budget_.allow(text.size());
        out.push_back({what_->pattern.replace(text, what_->content, what_->name, budget_), true});
    }

    std::shared_ptr<const What> what_;
    RegexBudget budget_;  // of all tokens together
};

/// Tokens <0x00> to <0xFF> are bytes. A run of them becomes one text if it is valid UTF-8, and one U+FFFD for each
/// byte otherwise: nothing of it is certain before it ends or breaks.
class ByteFallback final : public Copied<ByteFallback, TokenStep> {
  public:
    void finish(std::vector<Fragment>& out) override { end_run(out); }

  private:
    static std::optional<char> byte_of(std::string_view token) {
        if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
        unsigned value = 0;
        const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, value, 16);
        if (error != std::errc() || end != token.data() + 5) return std::nullopt;
        return static_cast<char>(static_cast<unsigned char>(value));
    }

    void token(std::string&& text, std::vector<Fragment>& out) override {
        const std::optional<char> byte = byte_of(text);
        if (!byte) {
            end_run(out);
            out.push_back({std::move(text), true});
            return;
        }
        run_ += *byte;
        while (!broken_ && checked_ < run_.size()) {
            const Utf8Front front = utf8_front(std::string_view(run_).substr(checked_));
            if (front.kind == Utf8Front::Kind::incomplete) break;
            broken_ = front.kind == Utf8Front::Kind::invalid;
            checked_ += front.length;
        }
        if (broken_) replace_run(out);
    }

    void end_run(std::vector<Fragment>& out) {
        if (checked_ < run_.size()) {
            replace_run(out);
        } else if (!run_.empty()) {
            out.push_back({std::move(run_), true});
        }
        run_.clear();
        checked_ = 0;
        broken_ = false;
    }

    void replace_run(std::vector<Fragment>& out) {
        for (std::size_t i = 0; i < run_.size(); ++i) out.push_back({std::string(kReplacementCharacter), true});
        run_.clear();
        checked_ = 0;
    }

    std::string run_;
    std::size_t checked_ = 0;  // so many bytes are whole characters
    bool broken_ = false;      // what has been replaced is no longer in run_
};

/// Takes up to `start` characters from the beginning of each token, and up to `stop` from its end.
class Strip final : public Copied<Strip> {
  public:
    Strip(std::string character, std::uint64_t start, std::uint64_t stop)
        : character_(std::move(character)), start_(start), stop_(stop), start_left_(start) {}

    void take(Fragment&& fragment, std::vector<Fragment>& out) override {
        Fragment kept{{}, fragment.ends_token};
        each_character(fragment.text, [&](std::string_view character) {
            if (character == character_) {
                if (start_left_ > 0) {
                    --start_left_;
                } else if (held_ < stop_) {
                    ++held_;
                } else {
                    kept.text += character;
                }
                return;
            }
            start_left_ = 0;
            for (; held_ > 0; --held_) kept.text += character_;
            kept.text += character;
        });
        if (fragment.ends_token) {
            start_left_ = start_;
            held_ = 0;
        }
        if (kept.ends_token || !kept.text.empty()) out.push_back(std::move(kept));
    }

  private:
    std::string character_;
    std::uint64_t start_;
    std::uint64_t stop_;
    std::uint64_t start_left_;
    std::uint64_t held_ = 0;  // of these characters: they may be the last of the token
};

/// The visible character becomes a space, and in the first token nothing if encoding puts one in front.
class Metaspace final : public Copied<Metaspace> {
  public:
    Metaspace(std::string replacement, bool prepended) : replacement_(std::move(replacement)), drop_(prepended) {}

    void take(Fragment&& fragment, std::vector<Fragment>& out) override {
        Fragment changed{{}, fragment.ends_token};
        each_character(fragment.text, [&](std::string_view character) {
            if (character != replacement_) {
                changed.text += character;
            } else if (!drop_) {
                changed.text += ' ';
            }
        });
        if (fragment.ends_token) drop_ = false;
        out.push_back(std::move(changed));
    }

  private:
    std::string replacement_;
    bool drop_;
};

std::string one_character(const JsonNode& node) {
    const std::string& text = node.string();
    if (text.empty() || utf8_length(text[0]) != text.size()) {
        node.fail("is " + in_quotes(text) + ", only one character is allowed");
    }
    return text;
}

void read_into(const JsonNode& node, std::vector<std::unique_ptr<DecoderStep>>& steps) {
    const JsonNode type = node.at("type");
    const std::string& name = type.string();
    constexpr std::uint64_t most = std::numeric_limits<std::int64_t>::max();
    if (name == "Sequence") {
        for (const JsonNode& each : node.at("decoders").items()) read_into(each, steps);
    } else if (name == "ByteLevel") {
        steps.push_back(std::make_unique<ByteLevel>());
    } else if (name == "Replace") {
        steps.push_back(
            std::make_unique<Replace>(Pattern::read(node.at("pattern")), node.at("content").string(), node.name()));
    } else if (name == "ByteFallback") {
        steps.push_back(std::make_unique<ByteFallback>());
    } else if (name == "Fuse") {
        steps.push_back(std::make_unique<Fuse>());
    } else if (name == "Strip") {
        steps.push_back(std::make_unique<Strip>(one_character(node.at("content")), node.at("start").whole_number(most),
                                                node.at("stop").whole_number(most)));
    } else if (name == "Metaspace") {
        const auto scheme = node.find("prepend_scheme");
        const bool prepended = scheme ? scheme->string() != "never" : node.boolean_or("add_prefix_space", true);
        steps.push_back(std::make_unique<Metaspace>(one_character(node.at("replacement")), prepended));
    } else {
        type.refuse("is " + in_quotes(name) +
                    ", built are Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace");
    }
}

}  // namespace

DecoderChain::DecoderChain(const JsonNode& node) {
    if (node.value().is_null()) {
        steps_.push_back(std::make_unique<Join>());
    } else {
        read_into(node, steps_);
    }
}

DecoderChain::DecoderChain(const DecoderChain& other) {
    steps_.reserve(other.steps_.size());
    for (const auto& step : other.steps_) steps_.push_back(step->clone());
}

void DecoderChain::run(std::vector<Fragment> fragments, std::size_t first, std::string& text) {
    std::vector<Fragment> next;
    for (std::size_t i = first; i < steps_.size() && !fragments.empty(); ++i) {
        for (Fragment& fragment : fragments) steps_[i]->take(std::move(fragment), next);
        fragments.swap(next);
        next.clear();
    }
    for (const Fragment& fragment : fragments) text += fragment.text;
}

void DecoderChain::push(std::string_view token, std::string& text) {
    std::vector<Fragment> fragments;
    fragments.push_back({std::string(token), true});
    run(std::move(fragments), 0, text);
}

void DecoderChain::finish(std::string& text) {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
        std::vector<Fragment> rest;
        steps_[i]->finish(rest);
        run(std::move(rest), i + 1, text);
    }
}

}  // namespace headlong
