#include "tools/embedded_model.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string_view>

#include "engine/decoder.hpp"
#include "engine/mapped_file.hpp"
#include "tools/measure/memory.hpp"

// The assembler copies a file into the object: a generated array of 5 MB would take the compiler a minute. The weights
// are aligned to a cache line. HEADLONG_MODEL_DIR comes from the build.
#define HEADLONG_EMBED(symbol, file)                                                                  \
    __asm__(".section .rodata\n.balign 64\n.global " #symbol "_begin\n" #symbol                       \
            "_begin:\n.incbin \"" HEADLONG_MODEL_DIR "/" file "\"\n.global " #symbol "_end\n" #symbol \
            "_end:\n.byte 0\n.previous\n");                                                           \
    extern "C" const char symbol##_begin[];                                                           \
    extern "C" const char symbol##_end[]

HEADLONG_EMBED(headlong_model_config, "config.json");
HEADLONG_EMBED(headlong_model_tokenizer, "tokenizer.json");
HEADLONG_EMBED(headlong_model_weights, "model.safetensors");

namespace headlong::tools {
namespace {

std::string_view text(const char* begin, const char* end) { return {begin, static_cast<std::size_t>(end - begin)}; }

/// That of most bytes, whatever config.json calls it.
WeightType stored_type(const WeightFiles& files) {
    std::array<std::uint64_t, 3> bytes{};
    constexpr std::array kTypes{WeightType::f32, WeightType::f16, WeightType::bf16};
    for (const auto& [tensor, file] : files.entries()) {
        bytes[tensor->type == FileType::bf16 ? 2 : tensor->type == FileType::f16 ? 1 : 0] += tensor->bytes.size();
    }
    return kTypes[static_cast<std::size_t>(std::ranges::max_element(bytes) - bytes.begin())];
}

/// A line that is written over, once a hundredth, and taken away at the end.
void show_loading(std::uint64_t done, std::uint64_t all) {
    static std::uint64_t shown = 101;
    const std::uint64_t percent = all == 0 ? 100 : 100 * done / all;
    if (percent == shown) return;
    shown = percent;
    if (percent < 100) {
        fmt::print(stderr, "\rloading {}%", percent);
    } else {
        fmt::print(stderr, "\r            \r");
    }
    std::fflush(stderr);
}

constexpr const char* kName = "embedded model";
std::string_view embedded_config() { return text(headlong_model_config_begin, headlong_model_config_end); }

}  // namespace

DecoderConfig load_config(const std::string& folder) {
    if (folder.empty()) return parse_decoder_config(embedded_config(), kName);
    const std::string path = folder + "/config.json";
    return parse_decoder_config(read_text(path, kMostConfigBytes), path);
}

Model load_model(Context& context, const std::string& folder, const ModelOptions& options) {
    if (!folder.empty()) {
        const DecoderConfig config = load_config(folder);
        const WeightType type = options.weights.value_or(stored_type(WeightFiles::open(folder)));
        check_memory(fmt::format("{}: weights of {}", one_line(folder), to_string(type)),
                     static_cast<double>(Decoder::weight_bytes(config, type)));
        ModelOptions shown = options;
        if (!shown.on_load && isatty(STDERR_FILENO) != 0) shown.on_load = show_loading;
        return Model(context, folder, shown);
    }
    const std::string_view weights = text(headlong_model_weights_begin, headlong_model_weights_end);
    return Model(context,
                 ModelFiles{.name = kName,
                            .config = embedded_config(),
                            .tokenizer = text(headlong_model_tokenizer_begin, headlong_model_tokenizer_end),
                            .weights = std::as_bytes(std::span(weights))},
                 options);
}

}  // namespace headlong::tools
