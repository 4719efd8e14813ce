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

/// What the steps of one piece of work, such as encoding a text, may cost together: bytes and items that searches go
/// through, and bytes that replacing adds. A limit per search or per step would not do: a hostile file can stay just
/// under it at every character of a long text. Counted, not timed: the same on every machine.
class RegexBudget {
  public:
    /// Useful patterns take nothing from the budget nearly everywhere: regex.cpp says what is free.
    void allow(std::size_t bytes) noexcept {
        steps_ += 2 * static_cast<std::uint64_t>(bytes);
        growth_ += 64 * static_cast<std::uint64_t>(bytes);
    }
    bool take(std::uint64_t steps) noexcept { return take_from(steps_, steps); }
    /// Whether a text may become so many bytes longer.
    bool grow(std::uint64_t bytes) noexcept { return take_from(growth_, bytes); }
    std::uint64_t steps_left() const noexcept { return steps_; }
    std::uint64_t growth_left() const noexcept { return growth_; }

  private:
    static bool take_from(std::uint64_t& left, std::uint64_t amount) noexcept {
        if (amount > left) return false;
        left -= amount;
        return true;
    }

    std::uint64_t steps_ = 8'000'000;  // less than a tenth of a second
    std::uint64_t growth_ = std::uint64_t{1} << 20;
};

/// A compiled pattern: immutable, safe to use from many threads. Patterns mean what they mean to Oniguruma, in which
/// tokenizers are written, as far as the two agree: characters are those of Unicode, ^ and $ are the ends of lines,
/// and \s is the property White_Space.
class Regex {
  public:
    /// `name` is how errors call the pattern: a file and a key. Throws BadFile if it does not compile or looks more
    /// than 255 characters behind, and Unsupported for \G.
    Regex(std::string_view pattern, std::string name);
    ~Regex();
    Regex(Regex&&) noexcept;

    /// All matches in a text that must be valid UTF-8, from left to right, none overlapping. Empty matches count,
    /// but not where the match before them ended. Throws BadFile when the budget or the limit on memory is
    /// exhausted.
    std::vector<Match> find_all(std::string_view text, RegexBudget& budget) const;

  private:
    struct Code;
    std::unique_ptr<const Code> code_;
    std::string name_;
};

}  // namespace headlong
