#include "engine/regex.hpp"

#include <algorithm>
#include <array>
#include <limits>
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
constexpr std::uint32_t kLongestLookBehind = 255;  // characters; a search takes them at every start
constexpr std::uint32_t kFreeSteps = 100;          // of one starting position; enough for nearly all
constexpr std::size_t kFreeWindow = 64;            // bytes that the free steps see
constexpr std::size_t kLightCode = 4096;           // compiled bytes; a step through larger code may cost more

constexpr std::uint64_t kEarned = 8;  // steps for each byte of a match; useful patterns take a few

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
std::string with_unicode_spaces(std::string_view pattern, const std::string& name) {
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
        } else if (escaped == 'G') {  // a search begins more than once
            throw Unsupported(name + " has \\G, which is not built");
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

/// How often an item of a pattern, as written, is matched at least: 1000 for 'a{1000,}'.
std::uint64_t least_count(std::string_view item) noexcept {
    const std::size_t open = item.rfind('{');
    if (!item.ends_with('}') && !item.ends_with("}?") && !item.ends_with("}+")) return 0;
    if (open == std::string_view::npos) return 0;
    std::uint64_t count = 0;
    for (std::size_t i = open + 1; i < item.size() && item[i] >= '0' && item[i] <= '9'; ++i) {
        count = std::min<std::uint64_t>(count * 10 + static_cast<std::uint64_t>(item[i] - '0'), 65'535);
    }
    return count;
}

bool is_back_reference(std::string_view item) noexcept {
    if (item.starts_with("(?P=")) return true;
    return item.size() > 1 && item[0] == '\\' &&
           ((item[1] >= '1' && item[1] <= '9') || item[1] == 'g' || item[1] == 'k');
}

/// Searches one text. Not shared between threads.
///
/// PCRE2 limits the steps of backtracking from one starting position, but neither what a step scans nor how many
/// starts there are. So a start is first tried with few steps in a window of few bytes, in which PCRE2 reports that it
/// wanted to see more: that is bounded, whatever the pattern, and free. A start that needs more is tried alone, with
/// code that reports before every item of the pattern where in the text it is, so that each item and each byte between
/// two reports is counted. A match earns a multiple of its length, since it brings the search forward; the budget pays
/// what a start costs beyond that. This does not depend on the machine.
class Search {
  public:
    Search(const pcre2_code* quick, const pcre2_code* counted, std::uint64_t weight, std::string_view pattern,
           const std::string& name, std::string_view text, RegexBudget& budget)
        : quick_(quick),
          counted_(counted),
          weight_(weight),
          pattern_(pattern),
          name_(name),
          text_(text),
          budget_(budget),
          data_(checked(MatchData(pcre2_match_data_create(1, nullptr)))),
          free_(checked(MatchContext(pcre2_match_context_create(nullptr)))),
          paid_(checked(MatchContext(pcre2_match_context_create(nullptr)))) {
        pcre2_set_heap_limit(free_.get(), kHeapKibibytes);
        pcre2_set_match_limit(free_.get(), kFreeSteps);
        pcre2_set_depth_limit(free_.get(), kFreeSteps);
        pcre2_set_heap_limit(paid_.get(), kHeapKibibytes);
        pcre2_set_match_limit(paid_.get(), kNoLimit);
        pcre2_set_depth_limit(paid_.get(), kNoLimit);  // the heap's limit is the lower one
        pcre2_set_callout(paid_.get(), &Search::report, this);
    }

    /// The first match that starts at `from` or later.
    std::optional<Match> find(std::size_t from) {
        std::size_t alone = from;  // starts before this are tried one by one
        while (true) {
            const std::size_t end = window_end(from);
            const bool anchored = from < alone;
            if (weight_ > 1 && !budget_.take(weight_ - 1)) exhausted(from);
            const int result = run(quick_, free_.get(), end, from,
                                   (anchored ? PCRE2_ANCHORED : 0U) | (end < text_.size() ? PCRE2_PARTIAL_HARD : 0U));
            std::size_t next = from;  // where no search has looked yet
            if (result >= 0) {
                const Match match = found(from);
                if (pcre2_get_startchar(data_.get()) < end || end == text_.size()) return match;
                next = end;  // what follows the window may matter there
            } else if (result == PCRE2_ERROR_NOMATCH) {
                if (!anchored && end == text_.size()) return std::nullopt;
                next = anchored ? after(from) : end;
            } else if (result == PCRE2_ERROR_PARTIAL) {
                next = pcre2_get_ovector_pointer(data_.get())[0];
            } else if (!anchored) {
                alone = end == from ? from + 1 : end;  // one of them takes more steps
                continue;
            }
            if (next <= from) {
                if (pay(from)) return found(from);
                next = after(from);
            }
            if (next > text_.size()) return std::nullopt;
            from = next;
        }
    }

  private:
    static constexpr std::uint32_t kNoLimit = std::numeric_limits<std::uint32_t>::max();

    std::size_t window_end(std::size_t from) const noexcept {
        if (text_.size() - from <= kFreeWindow) return text_.size();
        std::size_t end = from + kFreeWindow;
        while (end < text_.size() && (static_cast<unsigned char>(text_[end]) & 0xC0U) == 0x80U) ++end;
        // PCRE2's repeated \R would not ask what follows a \r
        if (end < text_.size() && text_[end] == '\n' && text_[end - 1] == '\r') ++end;
        return end;
    }

    /// The start that follows one.
    std::size_t after(std::size_t from) const noexcept {
        return from < text_.size() ? from + utf8_length(text_[from]) : from + 1;
    }

    /// Not negative if there is a match; otherwise that there is none, or that steps or bytes did not suffice.
    int run(const pcre2_code* code, pcre2_match_context* context, std::size_t end, std::size_t from,
            std::uint32_t options) {
        // the text has been checked once, not once a match
        const int result =
            pcre2_match(code, units(text_), end, from, options | PCRE2_NO_UTF_CHECK, data_.get(), context);
        switch (result) {
            case PCRE2_ERROR_NOMATCH:
            case PCRE2_ERROR_PARTIAL:
            case PCRE2_ERROR_MATCHLIMIT:
            case PCRE2_ERROR_DEPTHLIMIT:
            case PCRE2_ERROR_CALLOUT:
                return result;
            case PCRE2_ERROR_NOMEMORY:
                throw std::bad_alloc();
            default:
                if (result < 0) fail("fails at byte " + std::to_string(from) + " of a text: " + message_of(result));
                return result;
        }
    }

    /// Whether a match starts at `from`, for which the budget pays.
    bool pay(std::size_t from) {
        from_ = last_ = farthest_ = from;
        spent_ = 0;
        const int result = run(counted_, paid_.get(), text_.size(), from, PCRE2_ANCHORED);
        if (result < 0 && result != PCRE2_ERROR_NOMATCH) exhausted(from);
        std::uint64_t earned = 0;
        if (result >= 0) {
            const Match match = found(from);
            earned = kEarned * static_cast<std::uint64_t>(match.end - match.begin);
        }
        if (spent_ > earned && !budget_.take(spent_ - earned)) exhausted(from);
        return result >= 0;
    }

    static int report(pcre2_callout_block* block, void* search) noexcept {
        return static_cast<Search*>(search)->charge(*block) ? 0 : PCRE2_ERROR_CALLOUT;
    }

    bool charge(const pcre2_callout_block& block) noexcept {
        const std::size_t at = block.current_position;
        std::uint64_t cost = 1 + (at < last_ ? last_ - at : at - last_);
        last_ = at;
        farthest_ = std::max(farthest_, at);
        const std::string_view item =
            pattern_.substr(std::min<std::size_t>(block.pattern_position, pattern_.size()), block.next_item_length);
        // items that may fail after a long way, which the next report would not show
        const std::uint64_t left = text_.size() - at;
        if (is_back_reference(item)) {
            std::size_t longest = 0;
            for (std::size_t i = 1; i < block.capture_top; ++i) {
                const PCRE2_SIZE begin = block.offset_vector[2 * i];
                const PCRE2_SIZE end = block.offset_vector[2 * i + 1];
                if (begin < end && end <= text_.size()) longest = std::max<std::size_t>(longest, end - begin);
            }
            cost += block.capture_top + longest;
        } else if (item.ends_with('}') || item.ends_with("}?") || item.ends_with("}+")) {
            cost += std::min(least_count(item), left);
        }
        spent_ += cost * weight_;
        return spent_ <= budget_.steps_left() + kEarned * static_cast<std::uint64_t>(farthest_ - from_);
    }

    Match found(std::size_t from) const {
        const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data_.get());
        // \K in a lookaround can set the start past the end, or before where the search began
        if (ends[0] > ends[1] || ends[0] < from) fail("matches from a place outside of the match");
        return Match{ends[0], ends[1]};
    }

    [[noreturn]] void exhausted(std::size_t from) const {
        fail("takes too many steps at byte " + std::to_string(from) + " of a text of " + std::to_string(text_.size()));
    }
    [[noreturn]] void fail(const std::string& what) const { throw BadFile(name_ + " " + what); }

    const pcre2_code* quick_;
    const pcre2_code* counted_;
    std::uint64_t weight_;
    std::string_view pattern_;
    const std::string& name_;
    std::string_view text_;
    RegexBudget& budget_;
    MatchData data_;
    MatchContext free_;
    MatchContext paid_;
    std::size_t from_ = 0;      // the start that the budget pays
    std::size_t last_ = 0;      // where the last report was
    std::size_t farthest_ = 0;  // of all reports
    std::uint64_t spent_ = 0;
};

CodePointer compile(std::string_view pattern, std::uint32_t options, const std::string& name) {
    const auto context = checked(CompileContext(pcre2_compile_context_create(nullptr)));
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    pcre2_set_parens_nest_limit(context.get(), kDeepestBracket);
    int code = 0;
    PCRE2_SIZE offset = 0;
    CodePointer compiled(pcre2_compile(units(pattern), pattern.size(),
                                       options | PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                                       &code, &offset, context.get()));
    if (!compiled) {
        if (code == PCRE2_ERROR_NOMEMORY) throw std::bad_alloc();
        throw BadFile(name + " is not a valid regular expression: " + message_of(code) + ", in '" + one_line(pattern) +
                      "'");
    }
    return compiled;
}

}  // namespace

struct Regex::Code {
    CodePointer quick;
    CodePointer counted;  // reports before every item
    std::uint64_t weight = 1;
    std::string pattern;
};

Regex::Regex(std::string_view pattern, std::string name) : name_(std::move(name)) {
    if (pattern.size() > kLongestPattern) {
        throw BadFile(name_ + " has " + std::to_string(pattern.size()) + " bytes, at most " +
                      std::to_string(kLongestPattern) + " are allowed");
    }
    std::string translated = with_unicode_spaces(pattern, name_);
    CodePointer quick = compile(translated, 0, name_);
    CodePointer counted = compile(translated, PCRE2_AUTO_CALLOUT, name_);
    std::uint32_t behind = 0;
    pcre2_pattern_info(quick.get(), PCRE2_INFO_MAXLOOKBEHIND, &behind);
    if (behind > kLongestLookBehind) {
        throw BadFile(name_ + " looks " + std::to_string(behind) + " characters behind, at most " +
                      std::to_string(kLongestLookBehind) + " are allowed");
    }
    std::size_t size = 0;
    pcre2_pattern_info(quick.get(), PCRE2_INFO_SIZE, &size);
    code_ = std::make_unique<const Code>(
        Code{std::move(quick), std::move(counted), 1 + size / kLightCode, std::move(translated)});
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;

std::vector<Match> Regex::find_all(std::string_view text, RegexBudget& budget) const {
    Search search(code_->quick.get(), code_->counted.get(), code_->weight, code_->pattern, name_, text, budget);
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
