// The steps of a tokenizer that come before its model: normalizers rewrite a text, pre-tokenizers cut it. To add one:
// a class in tokenizer_text.cpp and a line in the function that reads its type.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/json_node.hpp"
#include "engine/regex.hpp"

namespace headlong {

/// What a step looks for: a text or a regular expression.
class Pattern {
  public:
    /// Reads {"String": ..} or {"Regex": ..}.
    static Pattern read(const JsonNode& node);
    explicit Pattern(Regex regex) : what_(std::move(regex)) {}

    /// All matches in valid UTF-8, from left to right.
    std::vector<Match> find_all(std::string_view text, RegexBudget& budget) const;
    /// The text with every match replaced. Throws BadFile, with `name`, if it grows beyond the budget.
    std::string replace(std::string_view text, std::string_view content, const std::string& name,
                        RegexBudget& budget) const;

  private:
    explicit Pattern(std::string text) : what_(std::move(text)) {}
    std::variant<std::string, Regex> what_;
};

/// A part of the text on its way to the model. Always valid UTF-8.
struct Piece {
    std::string text;
    bool at_start = false;  ///< the whole text begins with it
};

class Normalizer {
  public:
    Normalizer() = default;
    Normalizer(const Normalizer&) = delete;
    Normalizer& operator=(const Normalizer&) = delete;
    virtual ~Normalizer() = default;
    virtual void apply(std::string& text, RegexBudget& budget) const = 0;
};

class PreTokenizer {
  public:
    PreTokenizer() = default;
    PreTokenizer(const PreTokenizer&) = delete;
    PreTokenizer& operator=(const PreTokenizer&) = delete;
    virtual ~PreTokenizer() = default;
    /// Appends what a piece becomes. Empty pieces may be among it; they are dropped after each step.
    virtual void cut(Piece&& piece, std::vector<Piece>& pieces, RegexBudget& budget) const = 0;
};

/// Sequences are read as their steps, so that what is applied is a plain list.
std::vector<std::unique_ptr<const Normalizer>> read_normalizers(const JsonNode& node);
std::vector<std::unique_ptr<const PreTokenizer>> read_pre_tokenizers(const JsonNode& node);

/// The printable characters that byte-level tokenizers write bytes as, in UTF-8: visible Latin-1 stands for itself,
/// the other bytes in order for U+0100 and on.
const std::array<std::string, 256>& byte_characters();

}  // namespace headlong
