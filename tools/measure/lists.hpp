// Lists as they are typed: lengths and depths, and types of caches and weights.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <headlong/kv_cache.hpp>
#include <headlong/model.hpp>

namespace headlong::tools {

/// What becomes of a value that a list holds twice.
enum class Repeats : std::uint8_t { dropped, kept };

/// Whole numbers from `least` to `most` with commas between them. One item may stand for several: 1-4 for 1,2,3,4,
/// 512-2048+512 for 512,1024,1536,2048 and 512-8192*2 for 512,1024,2048,4096,8192. At most 1000 values, in the order of
/// their first appearance. Throws InvalidArgument, naming the option.
std::vector<std::int64_t> parse_list(const std::string& option, const std::string& text, std::int64_t least,
                                     std::int64_t most, Repeats repeats = Repeats::dropped);

/// Types of keys and values: `f16` for both, `f16:f32` where they differ. Each pair once. Throws InvalidArgument, or
/// Unsupported for types that caches do not have yet, naming the option.
std::vector<KvTypes> parse_kv_types(const std::string& option, const std::string& text);

/// Types of weights: one, or each of a list once. Throw InvalidArgument, naming the option.
WeightType parse_weight_type(const std::string& option, std::string_view name);
std::vector<WeightType> parse_weight_types(const std::string& option, const std::string& text);

/// The same where no list is allowed.
KvTypes parse_kv_pair(const std::string& option, const std::string& text);

/// What a ring is typed as: a window (0: none), and fewer sink tokens than that. Throws InvalidArgument, naming the
/// options.
void check_ring(const char* window_option, const char* sinks_option, std::int64_t window, std::int64_t sink_tokens);

/// "f16", or "f16:f32" where they differ.
std::string kv_types_name(const KvTypes& types);

}  // namespace headlong::tools
