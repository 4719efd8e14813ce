// Regular expressions that come from files: PCRE2 with limits, so that no pattern and no text can hold a program up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace headlong {

/// Bytes [begin, end) of a text.
struct Match {
    std::size_t begin = 0;
    std::size_t end = 0;
    bool operator==(const Match&) const = default;
};

/// How many steps of backtracking all searches of one piece of work may take together. A limit per search would not
/// do: a hostile pattern can stay just under it at every character of a long text.
class RegexBudget {
  public:
    /// Useful patterns take a few steps a byte, and none at all from the budget nearly everywhere.
    void allow(std::size_t bytes) noexcept { left_ += 32 * static_cast<std::uint64_t>(bytes); }
    bool take(std::uint64_t steps) noexcept {
        if (steps > left_) return false;
        left_ -= steps;
        return true;
    }

  private:
    std::uint64_t left_ = 2'000'000;  // less than a tenth of a second
};

/// A compiled pattern: immutable, safe to use from many threads. Patterns mean what they mean to Oniguruma, in which
/// tokenizers are written, as far as the two agree: characters are those of Unicode, ^ and $ are the ends of lines,
/// and \s is the property White_Space.
class Regex {
  public:
    /// `name` is how errors call the pattern: a file and a key. Throws BadFile if it does not compile.
    Regex(std::string_view pattern, std::string name);
    ~Regex();
    Regex(Regex&&) noexcept;

    /// All matches in a text that must be valid UTF-8, from left to right, none overlapping. Empty matches count,
    /// but not where the match before them ended. Throws BadFile when the budget or the limits on depth and memory
    /// are exhausted.
    std::vector<Match> find_all(std::string_view text, RegexBudget& budget) const;

  private:
    struct Code;
    std::unique_ptr<const Code> code_;
    std::string name_;
};

}  // namespace headlong
