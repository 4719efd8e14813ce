#include "tools/embedded_model.hpp"

#include <cstddef>
#include <span>
#include <string_view>

#include "engine/mapped_file.hpp"

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

constexpr const char* kName = "embedded model";
std::string_view embedded_config() { return text(headlong_model_config_begin, headlong_model_config_end); }

}  // namespace

DecoderConfig load_config(const std::string& folder) {
    if (folder.empty()) return parse_decoder_config(embedded_config(), kName);
    const std::string path = folder + "/config.json";
    return parse_decoder_config(read_text(path, kMostConfigBytes), path);
}

Model load_model(Context& context, const std::string& folder, const ModelOptions& options) {
    if (!folder.empty()) return Model(context, folder, options);
    const std::string_view weights = text(headlong_model_weights_begin, headlong_model_weights_end);
    return Model(context,
                 ModelFiles{.name = kName,
                            .config = embedded_config(),
                            .tokenizer = text(headlong_model_tokenizer_begin, headlong_model_tokenizer_end),
                            .weights = std::as_bytes(std::span(weights))},
                 options);
}

}  // namespace headlong::tools
