#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <headlong/context.hpp>
#include <headlong/error.hpp>
#include <headlong/kv_cache.hpp>
#include <headlong/model.hpp>

#include "engine/carver.hpp"
#include "engine/decoder.hpp"
#include "engine/decoder_families.hpp"
#include "engine/linear.hpp"
#include "engine/mapped_file.hpp"
#include "kernels/compiler.hpp"
#include "tools/commands.hpp"
#include "tools/measure/lists.hpp"
#include "tools/measure/memory.hpp"
#include "tools/shapes/model_shape.hpp"

namespace headlong::tools {
namespace {

constexpr std::size_t kUncountable = std::numeric_limits<std::size_t>::max();

/// "64G", "512M" or bytes.
std::uint64_t parse_size(const std::string& option, const std::string& text) {
    constexpr std::string_view kUnits = "KMGT";
    const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    const std::size_t unit = digits + 1 == text.size() ? kUnits.find(text[digits]) : std::string_view::npos;
    std::uint64_t size = 0;
    bool fits = digits > 0 && (digits == text.size() || unit != std::string_view::npos);
    for (const char c : text.substr(0, digits)) {
        fits = fits && !compiler::mul_overflows(size, std::uint64_t{10}, size) &&
               !compiler::add_overflows(size, static_cast<std::uint64_t>(c - '0'), size);
    }
    if (fits && digits < text.size()) {
        fits = !compiler::mul_overflows(size, std::uint64_t{1} << (10 * (unit + 1)), size);
    }
    if (!fits || size == 0) {
        throw InvalidArgument(
            fmt::format("{} is '{}'; allowed are bytes from 1 to 2^64 - 1, or a number with K, M, G or T (of 1024) as "
                        "in 64G",
                        option, one_line(text.substr(0, 80))));
    }
    return size;
}

std::string human(std::uint64_t bytes) {
    constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes < 1024) return fmt::format("{} B", bytes);
    auto value = static_cast<double>(bytes);
    std::size_t unit = 0;
    for (value /= 1024; value >= 1023.95 && unit + 1 < kUnits.size(); ++unit) value /= 1024;  // as it is rounded below
    return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

/// The model that is meant, and how the engine would run it, if it does.
struct Target {
    ModelShape shape;
    std::optional<DecoderConfig> decoder;
    std::string why_not;  ///< why there is no decoder
};

/// What is known of weights and scratch.
enum class Known : std::uint8_t { exact, estimated, not_known };

const char* to_string(Known known) {
    return known == Known::exact ? "exact" : known == Known::estimated ? "estimated" : "not known";
}

Known known_of(const Target& target) {
    if (target.decoder) return Known::exact;
    const ModelShape& s = target.shape;
    const bool sized = s.hidden_size > 0 && s.intermediate_size > 0 && s.vocab_size > 0;
    return s.mlp_projections > 0 && sized ? Known::estimated : Known::not_known;
}

/// The linear layers of a dense decoder of such a shape as this engine holds them, without biases: shapes do not tell
/// of any, and they are some thousandths.
std::size_t estimated_weights(const ModelShape& s) {
    std::size_t layer = 0;
    const auto add = [&](std::int64_t inputs, std::int64_t outputs) {
        layer = saturating_sum(layer, Linear::bytes_for(inputs, outputs, false, s.stored_type));
    };
    add(s.hidden_size, s.heads * s.head_dim);
    add(s.hidden_size, s.kv_heads * s.head_dim);
    add(s.hidden_size, s.kv_heads * s.value_dim);
    add(s.heads * s.value_dim, s.hidden_size);
    for (std::int64_t i = 1; i < s.mlp_projections; ++i) add(s.hidden_size, s.intermediate_size);
    add(s.intermediate_size, s.hidden_size);
    return saturating_sum(saturating_product(layer, static_cast<std::size_t>(s.layers)),
                          Linear::bytes_for(s.hidden_size, s.vocab_size, false, s.stored_type));
}

/// As much of such a decoder as its scratch depends on.
DecoderConfig scratch_config(const ModelShape& s) {
    DecoderConfig config;
    config.hidden_size = s.hidden_size;
    // the engine's MLP is gated and keeps two rows of that size a token; a plain one would keep one
    config.intermediate_size = s.mlp_projections == 3 ? s.intermediate_size : (s.intermediate_size + 1) / 2;
    config.heads = s.heads;
    config.kv_heads = s.kv_heads;
    config.head_dim = s.head_dim;
    config.stored_type = s.stored_type;
    config.names = decoder_families().front().names;  // Llama's, whose MLP is gated
    if (s.head_dim % 2 == 0) config.rotaries.emplace_back(Rotary({.head_dim = s.head_dim}));
    return config;
}

Target target_of(const std::string& config) {
    std::error_code ignored;
    const bool folder = std::filesystem::is_directory(config, ignored);
    const bool file = config.ends_with(".json") || config.find('/') != std::string::npos;
    if (!folder && !file && !std::filesystem::exists(config, ignored)) {
        try {
            return {model_preset(config), {}, "a preset has no config.json to read more from"};
        } catch (const InvalidArgument& error) {
            throw InvalidArgument(fmt::format("CONFIG is no file and no folder, and as a {}", error.what()));
        }
    }
    Target target{read_model_shape(config), {}, {}};
    const std::string path = folder ? config + "/config.json" : config;
    try {
        target.decoder = parse_decoder_config(read_text(path, kMostConfigBytes), path);
    } catch (const Unsupported& error) {
        target.why_not = error.what();
    } catch (const BadFile& error) {  // what the shape does not need
        target.why_not = error.what();
    }
    return target;
}

struct Row {
    std::int64_t depth = 0;
    KvTypes types;
    std::size_t cache = 0;
    std::optional<std::size_t> scratch = {};  ///< this and the rest: unless it is not known
    std::optional<std::size_t> total = {};
    std::optional<bool> fits = {};
};

std::size_t cache_bytes(const Target& target, const KvTypes& types, std::int64_t depth) {
    const ModelShape& shape = target.shape;
    KvCacheOptions options;
    if (target.decoder) {
        options = cache_options_of(*target.decoder, types);
        options.capacity = std::numeric_limits<std::int64_t>::max();
    } else {
        options.shape = {.kv_heads = shape.kv_heads,
                         .head_dim = shape.head_dim,
                         .value_dim = shape.value_dim,
                         .key_type = types.keys,
                         .value_type = types.values};
        options.layers = shape.layers;
    }
    try {
        return KvCache::estimate_bytes(options, depth);
    } catch (const OutOfMemory&) {  // more than 64 bits
        return kUncountable;
    }
}

/// Footnotes: what the figures do not say.
std::vector<std::string> notes_on(const Target& target, Known known, const std::vector<std::int64_t>& depths) {
    std::vector<std::string> notes;
    if (known == Known::not_known) notes.push_back("weights and scratch are not known: " + target.why_not);
    if (known == Known::estimated) {
        notes.push_back(
            "weights and scratch are estimates, of the linear layers of a dense decoder of this shape in "
            "32 bits, without biases: " +
            target.why_not);
    }
    if (target.decoder && !target.decoder->windows.empty()) {
        const auto& windows = target.decoder->windows;
        notes.push_back(fmt::format("{} of {} layers hold their sliding window of {} tokens and a chunk alone",
                                    std::ranges::count_if(windows, [](std::int64_t w) { return w > 0; }),
                                    windows.size(), std::ranges::max(windows)));
    } else if (!target.decoder && target.shape.sliding_window > 0) {
        notes.push_back(
            fmt::format("the model has layers with a sliding window of {} tokens; which ones is not known, and this "
                        "plan is for caches that keep all tokens",
                        target.shape.sliding_window));
    }
    if (target.shape.max_positions > 0 && std::ranges::max(depths) > target.shape.max_positions) {
        notes.push_back(fmt::format("the model's max_position_embeddings is {}: generate refuses what is deeper",
                                    target.shape.max_positions));
    }
    return notes;
}

template <class T>
nlohmann::ordered_json json_or_null(const std::optional<T>& value) {
    return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace

int run_memory(const MemoryArguments& arguments) {
    const std::vector<std::int64_t> depths =
        parse_list("-d", arguments.depths, 1, std::numeric_limits<std::int64_t>::max());
    const std::vector<KvTypes> types = parse_kv_types("--kv", arguments.kv);
    const bool planned = arguments.ram.has_value();
    const std::uint64_t memory = planned ? parse_size("--ram", *arguments.ram) : total_memory();
    const std::uint64_t available = planned ? memory : available_memory();

    const Target target = target_of(arguments.config);
    const ModelShape& shape = target.shape;
    std::vector<Row> rows;
    for (const std::int64_t depth : depths) {
        for (const KvTypes& each : types) {
            const std::size_t bytes = cache_bytes(target, each, depth);
            if (bytes > memory) {
                throw InvalidArgument(fmt::format("-d is {}: a cache of {} needs {}{} bytes, but {} {}{}", depth,
                                                  kv_types_name(each), bytes == kUncountable ? "more than " : "", bytes,
                                                  planned ? "--ram is" : "there are", memory,
                                                  planned ? "" : "; --ram SIZE plans for another machine"));
            }
            rows.push_back({.depth = depth, .types = each, .cache = bytes});
        }
    }

    const Known known = known_of(target);
    std::optional<std::size_t> weights;
    if (known != Known::not_known) {
        weights = target.decoder ? Decoder::weight_bytes(*target.decoder) : estimated_weights(shape);
        const DecoderConfig decoder = target.decoder ? *target.decoder : scratch_config(shape);
        const Context context;
        const std::int64_t chunk = GenerateOptions().prefill_chunk;
        for (Row& row : rows) {
            // what generate() calls with a prompt of this depth: chunks, what is left of it, and tokens one by one
            const std::array calls{std::min(row.depth, chunk), row.depth % chunk, std::int64_t{1}};
            row.scratch = Decoder::scratch_bytes(context.impl(), decoder, calls, row.types);
            row.total = saturating_sum(saturating_sum(row.cache, *weights), *row.scratch);
            row.fits = *row.total <= available;
        }
    }
    const std::vector<std::string> notes = notes_on(target, known, depths);

    if (arguments.json) {
        nlohmann::ordered_json json;
        json["model"] = {{"name", shape.name},         {"layers", shape.layers},     {"heads", shape.heads},
                         {"kv_heads", shape.kv_heads}, {"head_dim", shape.head_dim}, {"value_dim", shape.value_dim}};
        json["memory"] = {{"total_bytes", memory}, {"available_bytes", available}};
        json["weights_are"] = to_string(known);  // and so are scratch, total and fits
        json["rows"] = nlohmann::ordered_json::array();
        for (const Row& row : rows) {
            json["rows"].push_back({{"depth", row.depth},
                                    {"kv_type", kv_types_name(row.types)},
                                    {"kv_bytes", row.cache},
                                    {"weight_bytes", json_or_null(weights)},
                                    {"scratch_bytes", json_or_null(row.scratch)},
                                    {"total_bytes", json_or_null(row.total)},
                                    {"fits", json_or_null(row.fits)}});
        }
        json["notes"] = notes;
        fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
        return done;
    }
    const auto shown = [&](const std::optional<std::size_t>& bytes) {
        return bytes ? (known == Known::estimated ? "~" : "") + human(*bytes) : "not known";
    };
    fmt::print("{}: {} layers, {} heads, {} KV heads, keys of {}, values of {}\n", shape.name, shape.layers,
               shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim);
    fmt::print("{}: {} of memory, {} available\n\n", planned ? "--ram" : "this machine", human(memory),
               human(available));
    constexpr const char* kLine = "{:>10}  {:<9}  {:>10}  {:>10}  {:>10}  {:>10}  {}\n";
    fmt::print(fmt::runtime(kLine), "depth", "type", "cache", "weights", "scratch", "total", "fits");
    for (const Row& row : rows) {
        fmt::print(fmt::runtime(kLine), row.depth, kv_types_name(row.types), human(row.cache), shown(weights),
                   shown(row.scratch), shown(row.total),
                   !row.fits   ? "not known"
                   : *row.fits ? "yes"
                               : "no");
    }
    if (!notes.empty()) fmt::print("\n");
    for (const std::string& note : notes) fmt::print("* {}\n", note);
    return done;
}

}  // namespace headlong::tools
