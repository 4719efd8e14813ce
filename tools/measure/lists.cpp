#include "tools/measure/lists.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string_view>

#include <headlong/error.hpp>

#include "kernels/compiler.hpp"

namespace headlong::tools {
namespace {

constexpr std::size_t kMostValues = 1000;

/// The text for a message, in which what is allowed must have room too.
std::string quoted(std::string_view text) {
    constexpr std::size_t kShown = 80;
    return fmt::format("'{}{}'", text.substr(0, kShown), text.size() > kShown ? "..." : "");
}

std::vector<std::string_view> items_of(std::string_view text) {
    std::vector<std::string_view> items;
    for (;;) {
        const std::size_t comma = text.find(',');
        items.push_back(text.substr(0, comma));
        if (comma == std::string_view::npos) return items;
        text.remove_prefix(comma + 1);
    }
}

/// Takes the digits that `text` begins with; nothing if there are none or they are more than 64 bits.
std::optional<std::int64_t> take_number(std::string_view& text) {
    if (text.empty() || text.front() < '0' || text.front() > '9') return std::nullopt;
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc()) return std::nullopt;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return value;
}

/// What one item stands for: `first`, then by the step or the factor up to `last`.
struct Range {
    std::int64_t first = 0;
    std::int64_t last = 0;
    std::int64_t step = 1;
    std::int64_t factor = 1;
};

std::optional<Range> parse_range(std::string_view text) {
    Range range;
    const auto first = take_number(text);
    if (!first) return std::nullopt;
    range.first = range.last = *first;
    if (text.empty()) return range;
    if (text.front() != '-') return std::nullopt;
    text.remove_prefix(1);
    const auto last = take_number(text);
    if (!last || *last < *first) return std::nullopt;
    range.last = *last;
    if (text.empty()) return range;
    const char sign = text.front();
    text.remove_prefix(1);
    const auto by = take_number(text);
    if (!by || !text.empty()) return std::nullopt;
    if (sign == '+' && *by >= 1) {
        range.step = *by;
    } else if (sign == '*' && *by >= 2 && *first >= 1) {
        range.step = 0;
        range.factor = *by;
    } else {
        return std::nullopt;
    }
    return range;
}

template <class T>
void keep_once(std::vector<T>& values, const T& value) {
    if (std::ranges::find(values, value) == values.end()) values.push_back(value);
}

}  // namespace

std::vector<std::int64_t> parse_list(const std::string& option, const std::string& text, std::int64_t least,
                                     std::int64_t most, Repeats repeats) {
    const auto fail = [&](const std::string& what) {
        throw InvalidArgument(
            fmt::format("{} is {}: {}; allowed are whole numbers from {} to {} as in 512,2048 or 512-8192*2 or 1-4+1",
                        option, quoted(text), what, least, most));
    };
    std::vector<std::int64_t> values;
    std::size_t count = 0;  // with what is there twice, which bounds the work
    for (const std::string_view item : items_of(text)) {
        const std::optional<Range> range = parse_range(item);
        if (!range) fail(quoted(item) + " is no number and no range");
        if (range->first < least || range->last > most) fail(quoted(item) + " is out of range");
        for (std::int64_t value = range->first;;) {
            if (++count > kMostValues) fail(fmt::format("these are more than {} values", kMostValues));
            if (repeats == Repeats::kept) {
                values.push_back(value);
            } else {
                keep_once(values, value);
            }
            std::int64_t next = 0;
            if (compiler::mul_overflows(value, range->factor, next) ||
                compiler::add_overflows(next, range->step, next) || next > range->last) {
                break;
            }
            value = next;
        }
    }
    return values;
}

std::vector<KvTypes> parse_kv_types(const std::string& option, const std::string& text) {
    constexpr const char* kAllowed =
        "allowed are f32, f16, bf16, int8 and int4, as in f32,int8 or int8:f16 (keys:values)";
    const auto type_of = [&](std::string_view name) {
        for (const KvType type : {KvType::f32, KvType::f16, KvType::bf16, KvType::int8, KvType::int4}) {
            if (name == to_string(type)) return type;
        }
        throw InvalidArgument(fmt::format("{} is {}: {} is no type; {}", option, quoted(text), quoted(name), kAllowed));
    };
    std::vector<KvTypes> types;
    for (const std::string_view item : items_of(text)) {
        const std::size_t colon = item.find(':');
        const KvType keys = type_of(item.substr(0, colon));
        keep_once(types, {keys, colon == std::string_view::npos ? keys : type_of(item.substr(colon + 1))});
    }
    return types;
}

WeightType parse_weight_type(const std::string& option, std::string_view name) {
    for (const WeightType type :
         {WeightType::f32, WeightType::f16, WeightType::bf16, WeightType::int8, WeightType::int4}) {
        if (name == to_string(type)) return type;
    }
    throw InvalidArgument(
        fmt::format("{}: {} is no type of weights; allowed are f32, f16, bf16, int8 and int4", option, quoted(name)));
}

std::vector<WeightType> parse_weight_types(const std::string& option, const std::string& text) {
    std::vector<WeightType> types;
    for (const std::string_view item : items_of(text)) keep_once(types, parse_weight_type(option, item));
    return types;
}

KvTypes parse_kv_pair(const std::string& option, const std::string& text) {
    const std::vector<KvTypes> types = parse_kv_types(option, text);
    if (text.find(',') == std::string::npos) return types.front();
    throw InvalidArgument(fmt::format(
        "{} is {}: a list; allowed is one of f32, f16, bf16, int8 and int4, or two as in int8:f16 (keys:values)",
        option, quoted(text)));
}

std::string kv_types_name(const KvTypes& types) {
    std::string name = to_string(types.keys);
    if (types.values != types.keys) name += std::string(":") + to_string(types.values);
    return name;
}

void check_ring(const char* window_option, const char* sinks_option, std::int64_t window, std::int64_t sink_tokens) {
    constexpr std::int64_t kMost = std::int64_t{1} << 40;
    if (window < 0 || window > kMost) {
        throw InvalidArgument(fmt::format("{} is {}; allowed: 1 to {}", window_option, window, kMost));
    }
    if (sink_tokens < 0 || (sink_tokens > 0 && sink_tokens >= window)) {
        throw InvalidArgument(fmt::format("{} is {}; it must be 0 or more, and less than {} ({})", sinks_option,
                                          sink_tokens, window_option,
                                          window > 0 ? std::to_string(window) : std::string("not given")));
    }
}

}  // namespace headlong::tools
