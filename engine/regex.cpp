#include "engine/regex.hpp"

#include <array>
#include <new>
#include <optional>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <headlong/error.hpp>

#include "engine/mapped_file.hpp"  // one_line
#include "engine/utf8.hpp"

#if PCRE2_MAJOR < 10 || (PCRE2_MAJOR == 10 && PCRE2_MINOR < 40)
#error "PCRE2 10.40 or later is needed: it is the first to know White_Space"
#endif

namespace headlong {
namespace {

constexpr std::size_t kLongestPattern = 65'536;
constexpr std::uint32_t kDeepestBracket = 100;
constexpr std::uint32_t kHeapKibibytes = 65'536;
constexpr std::uint32_t kFreeSteps = 100;  // of one starting position; enough for nearly all
constexpr std::uint32_t kStepsGrow = 4;
constexpr std::uint32_t kMostSteps = 100'000'000;  // of one starting position, if a long text gave the budget for it

template <auto Function>
struct Free {
    template <typename T>
    void operator()(T* object) const noexcept {
        Function(object);
    }
};
using CodePointer = std::unique_ptr<pcre2_code, Free<pcre2_code_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Free<pcre2_compile_context_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Free<pcre2_match_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>>;

template <typename Pointer>
Pointer checked(Pointer pointer) {
    if (!pointer) throw std::bad_alloc();
    return pointer;
}

/// PCRE2's \s has one character more than White_Space, U+180E: one id more in a text that holds it.
std::string with_unicode_spaces(std::string_view pattern) {
    std::string result;
    for (std::size_t i = 0; i < pattern.size(); ++i) {
        if (pattern[i] != '\\' || i + 1 == pattern.size()) {
            result += pattern[i];
            continue;
        }
        const char escaped = pattern[++i];
        if (escaped == 's') {
            result += "\\p{White_Space}";
        } else if (escaped == 'S') {
            result += "\\P{White_Space}";
        } else {
            result += '\\';
            result += escaped;
        }
    }
    return result;
}

std::string message_of(int code) {
    std::array<PCRE2_UCHAR, 256> text{};
    const int length = pcre2_get_error_message(code, text.data(), text.size());
    std::string message;
    for (int i = 0; i < length; ++i) message += static_cast<char>(text[static_cast<std::size_t>(i)]);
    return message.empty() ? "error " + std::to_string(code) : one_line(message);
}

PCRE2_SPTR units(std::string_view text) noexcept {
    // an empty view may have no address, and PCRE2 wants one
    return reinterpret_cast<PCRE2_SPTR>(text.empty() ? "" : text.data());
}

/// Searches one text. Not shared between threads.
class Search {
  public:
    Search(const pcre2_code* code, const std::string& name, std::string_view text, RegexBudget& budget)
        : code_(code),
          name_(name),
          text_(text),
          budget_(budget),
          data_(checked(MatchData(pcre2_match_data_create(1, nullptr)))),
          context_(checked(MatchContext(pcre2_match_context_create(nullptr)))) {
        pcre2_set_heap_limit(context_.get(), kHeapKibibytes);
    }

    /// The first match that starts at `from` or later.
    std::optional<Match> find(std::size_t from) {
        // PCRE2 counts the steps of each starting position apart. So this quick search is bounded too, and one that
        // runs out of steps is repeated with each position on its own, whose steps the budget pays.
        std::optional<Match> match;
        if (run(from, 0, kFreeSteps, match)) return match;
        while (true) {
            std::uint32_t steps = kFreeSteps;
            while (!run(from, PCRE2_ANCHORED, steps, match)) {
                if (steps > kMostSteps / kStepsGrow || !budget_.take(std::uint64_t{steps} * kStepsGrow)) {
                    fail("takes too many steps of backtracking at byte " + std::to_string(from) + " of a text of " +
                         std::to_string(text_.size()));
                }
                steps *= kStepsGrow;
            }
            if (match || from == text_.size()) return match;
            from += utf8_length(text_[from]);
        }
    }

  private:
    /// False if the steps did not suffice.
    bool run(std::size_t from, std::uint32_t options, std::uint32_t steps, std::optional<Match>& match) {
        match.reset();
        pcre2_set_match_limit(context_.get(), steps);
        pcre2_set_depth_limit(context_.get(), steps);
        // the text has been checked once, not once a match
        const int result = pcre2_match(code_, units(text_), text_.size(), from, options | PCRE2_NO_UTF_CHECK,
                                       data_.get(), context_.get());
        if (result == PCRE2_ERROR_NOMATCH) return true;
        if (result == PCRE2_ERROR_MATCHLIMIT || result == PCRE2_ERROR_DEPTHLIMIT) return false;
        if (result == PCRE2_ERROR_NOMEMORY) throw std::bad_alloc();
        if (result < 0) fail("fails at byte " + std::to_string(from) + " of a text: " + message_of(result));
        const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data_.get());
        // \K in a lookaround can set the start past the end, or before where the search began
        if (ends[0] > ends[1] || ends[0] < from) fail("matches from a place outside of the match");
        match = Match{ends[0], ends[1]};
        return true;
    }

    [[noreturn]] void fail(const std::string& what) const { throw BadFile(name_ + " " + what); }

    const pcre2_code* code_;
    const std::string& name_;
    std::string_view text_;
    RegexBudget& budget_;
    MatchData data_;
    MatchContext context_;
};

}  // namespace

struct Regex::Code {
    CodePointer pointer;
};

Regex::Regex(std::string_view pattern, std::string name) : name_(std::move(name)) {
    if (pattern.size() > kLongestPattern) {
        throw BadFile(name_ + " has " + std::to_string(pattern.size()) + " bytes, at most " +
                      std::to_string(kLongestPattern) + " are allowed");
    }
    const std::string translated = with_unicode_spaces(pattern);
    const auto context = checked(CompileContext(pcre2_compile_context_create(nullptr)));
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    pcre2_set_parens_nest_limit(context.get(), kDeepestBracket);
    int code = 0;
    PCRE2_SIZE offset = 0;
    CodePointer compiled(pcre2_compile(units(translated), translated.size(),
                                       PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code,
                                       &offset, context.get()));
    if (!compiled) {
        if (code == PCRE2_ERROR_NOMEMORY) throw std::bad_alloc();
        throw BadFile(name_ + " is not a valid regular expression: " + message_of(code) + ", in '" + one_line(pattern) +
                      "'");
    }
    code_ = std::make_unique<const Code>(Code{std::move(compiled)});
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;

std::vector<Match> Regex::find_all(std::string_view text, RegexBudget& budget) const {
    Search search(code_->pointer.get(), name_, text, budget);
    std::vector<Match> matches;
    std::size_t from = 0;
    while (from <= text.size()) {
        const std::optional<Match> match = search.find(from);
        if (!match) break;
        const bool again = match->begin == match->end && !matches.empty() && matches.back().end == match->end;
        if (!again) {
            matches.push_back(*match);
            from = match->end;
        } else {
            if (from == text.size()) break;
            from += utf8_length(text[from]);
        }
    }
    return matches;
}

}  // namespace headlong
