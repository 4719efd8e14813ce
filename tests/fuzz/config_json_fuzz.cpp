// A model's config.json, and, behind a NUL byte, its generation_config.json. What is accepted describes a decoder whose
// sizes are those that the rest of the engine counts on.
#include <cstdint>
#include <string>

#include <headlong/kv_cache.hpp>

#include "engine/decoder_config.hpp"
#include "tests/fuzz/fuzzer.hpp"

namespace headlong::fuzz {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 24;

void check(const DecoderConfig& config) {
    for (const std::int64_t size : {config.vocab_size, config.hidden_size, config.layers, config.heads, config.kv_heads,
                                    config.head_dim, config.max_positions}) {
        require(size >= 1 && size <= kMost, "sizes are from 1 to 2^24");
    }
    require(config.heads % config.kv_heads == 0, "query heads share key heads evenly");
    const auto layers = static_cast<std::size_t>(config.layers);
    require(config.windows.empty() || config.windows.size() == layers, "a window for every layer");
    require(config.rotaries.empty() || config.rotaries.size() == layers, "a rotary description for every layer");
    require(config.short_rotaries.empty() || config.short_rotaries.size() == layers, "one for short texts too");
    require(config.sparse.empty() || config.sparse.size() == layers, "experts or an MLP in every layer");
    require(config.names != nullptr, "tensors have names");
    for (std::int64_t layer = 0; layer < config.layers; ++layer) {
        require(config.window(layer) >= 0, "windows are not negative");
    }
    for (const auto* rotaries : {&config.rotaries, &config.short_rotaries}) {
        for (const auto& rotary : *rotaries) {
            if (rotary) require(rotary->head_dim() == config.head_dim, "rotary descriptions are of the heads' size");
        }
    }
    if (config.experts.count > 0) {
        require(config.experts.used >= 1 && config.experts.used <= config.experts.count, "experts used are there");
    }
    for (const std::int32_t id : config.eos_ids)
        require(id >= 0 && id < config.vocab_size, "tokens are in the vocabulary");
    if (config.bos_id) require(*config.bos_id >= 0 && *config.bos_id < config.vocab_size, "the first token, too");

    KvCacheOptions options;
    options.shape = {config.kv_heads, config.head_dim, config.head_dim};
    options.layers = config.layers;
    options.layer_windows = config.windows;
    done([&] { KvCache::estimate_bytes(options, config.max_positions); });
}

}  // namespace

void config_json(Input input) {
    const std::string_view text = text_of(input);
    const std::size_t end = std::min(text.find('\0'), text.size());
    done([&] {
        DecoderConfig config = parse_decoder_config(text.substr(0, end), "config.json");
        check(config);
        if (end < text.size()) {
            read_generation_config(text.substr(end + 1), "generation_config.json", config);
            check(config);
        }
    });
}

}  // namespace headlong::fuzz
