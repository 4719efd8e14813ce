// A model's config.json, and, behind a NUL byte, its generation_config.json. What is accepted describes a decoder whose
// sizes are those that the rest of the engine counts on: what is computed from them, down to bytes, fits into 63 bits.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include <headlong/kv_cache.hpp>
#include <headlong/rotary.hpp>

#include "engine/carver.hpp"
#include "engine/context_impl.hpp"
#include "engine/decoder.hpp"
#include "tests/fuzz/contexts.hpp"
#include "tests/fuzz/fuzzer.hpp"

namespace headlong::fuzz {
namespace {

// The limits that engine/config_reader.cpp and engine/decoder_config.cpp state.
constexpr std::int64_t kMostSize = std::int64_t{1} << 24;
constexpr std::int64_t kMostLayers = std::int64_t{1} << 17;
constexpr std::int64_t kMostHeadDim = std::int64_t{1} << 20;
constexpr std::int64_t kMostWidth = std::int64_t{1} << 30;
// A list of tensors is as long as layers and experts are many: longer ones are honest work.
constexpr std::int64_t kListed = 64;

void check_sizes(const DecoderConfig& config) {
    for (const std::int64_t size :
         {config.vocab_size, config.hidden_size, config.heads, config.kv_heads, config.max_positions}) {
        require(size >= 1 && size <= kMostSize, "sizes are from 1 to 2^24");
    }
    require(config.intermediate_size >= 1 && config.intermediate_size <= 4 * kMostSize, "at most four times that");
    require(config.layers >= 1 && config.layers <= kMostLayers, "layers are from 1 to 2^17");
    require(config.head_dim >= 1 && config.head_dim <= kMostHeadDim, "head dims are from 1 to 2^20");
    require(config.heads * config.head_dim <= kMostWidth, "all heads are at most 2^30 wide");
    require(config.kv_heads <= config.heads && config.heads % config.kv_heads == 0, "KV heads divide heads");
    require(config.names != nullptr, "tensors have names");
    const Experts& experts = config.experts;
    if (experts.count != 0) {
        require(experts.count >= 1 && experts.count <= kMostSize, "experts are at most 2^24");
        require(experts.used >= 1 && experts.used <= experts.count, "experts that are used are there");
        require(experts.intermediate_size >= 1 && experts.intermediate_size <= 4 * kMostSize, "experts have a size");
    }
}

void check_layers(const DecoderConfig& config) {
    const auto layers = static_cast<std::size_t>(config.layers);
    require(config.windows.empty() || config.windows.size() == layers, "a window for every layer");
    require(std::ranges::all_of(config.windows, [](std::int64_t window) { return window >= 0 && window <= kMostSize; }),
            "windows are from 0 to 2^24");
    require(config.rotaries.size() == layers, "a rotary description, or none, for every layer");
    require(config.short_rotaries.empty() || config.short_rotaries.size() == layers, "and for short texts");
    require(config.sparse.empty() || config.sparse.size() == layers, "experts or an MLP in every layer");
    std::set<const double*> seen;  // most descriptions are copies, which share their frequencies
    for (const auto* rotaries : {&config.rotaries, &config.short_rotaries}) {
        for (const std::optional<Rotary>& rotary : *rotaries) {
            if (!rotary || !seen.insert(rotary->inverse_frequencies().data()).second) continue;
            require(rotary->head_dim() == config.head_dim && rotary->rotary_dim() <= config.head_dim,
                    "rotary descriptions are of the heads' size");
            std::vector<float> cosine(rotary->inverse_frequencies().size());
            std::vector<float> sine(cosine.size());
            rotary->tabulate(config.max_positions, cosine.data(), sine.data());
            const auto finite = [](float x) { return std::abs(x) <= std::numeric_limits<float>::max(); };
            require(std::ranges::all_of(cosine, finite) && std::ranges::all_of(sine, finite), "angles are finite");
        }
    }
}

void check_numbers(const DecoderConfig& config) {
    const auto positive = [](double x) { return x > 0.0 && x <= 1e38; };
    require(positive(config.norm_epsilon) && positive(static_cast<double>(config.embedding_multiplier)) &&
                positive(static_cast<double>(config.residual_multiplier)) &&
                positive(static_cast<double>(config.logits_divisor)) &&
                (!config.attention_scale || positive(static_cast<double>(*config.attention_scale))),
            "factors are above 0 and finite");
    for (const float cap : {config.attention_softcap, config.logit_softcap, config.activation_limit}) {
        require(cap >= 0.0F && cap <= 1e38F, "caps are 0 or more, and finite");
    }
    const auto is_token = [&](std::int32_t id) { return id >= 0 && id < config.vocab_size; };
    require(std::ranges::all_of(config.eos_ids, is_token), "tokens that end a text are in the vocabulary");
    require(!config.bos_id || is_token(*config.bos_id), "the token that begins a text, too");
}

/// What the engine computes from sizes before it allocates: "does not fit" is an answer, a wrapped product is none.
void check_bytes(const DecoderConfig& config) {
    constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
    done([&] {
        const KvCacheOptions options = cache_options_of(config);
        const KvShape& shape = options.shape;
        const std::size_t token = static_cast<std::size_t>(shape.kv_heads * (shape.head_dim + shape.value_dim)) * 4;
        const bool windows = std::ranges::any_of(config.windows, [](std::int64_t window) { return window > 0; });
        const std::size_t all = KvCache::estimate_bytes(options, config.max_positions);
        require(windows || all >= saturating_product(saturating_product(token, static_cast<std::size_t>(config.layers)),
                                                     static_cast<std::size_t>(config.max_positions)),
                "a cache has the bytes of its tokens");
    });
    const auto wide = static_cast<std::size_t>(config.heads * config.head_dim);
    const auto hidden = static_cast<std::size_t>(config.hidden_size);
    const auto vocab = static_cast<std::size_t>(config.vocab_size);
    const std::size_t weights = Decoder::weight_bytes(config, WeightType::f32);
    require(weights >= saturating_product(wide * 4, hidden) && weights >= saturating_product(vocab * 4, hidden),
            "weights have the bytes of their parts");
    const std::int64_t tokens[] = {1, 512};
    const std::size_t scratch = Decoder::scratch_bytes(contexts().front()->impl(), config, tokens);
    require(scratch == kMost || scratch >= 512 * 4 * hidden, "scratch has the bytes of its rows");
}

void check_tensors(const DecoderConfig& config) {
    if (config.layers * (1 + config.experts.count) > kListed) return;
    const std::vector<TensorShape> tensors = Decoder::tensors(config);
    require(!tensors.empty(), "a decoder has tensors");
    for (const TensorShape& tensor : tensors) {
        require(!tensor.name.empty(), "tensors have names");
        std::int64_t bytes = 4;
        for (const std::int64_t extent : tensor.shape) {
            require(extent >= 1, "tensors have no extent of 0");
            require(bytes <= std::numeric_limits<std::int64_t>::max() / extent, "tensors have at most 2^63 - 1 bytes");
            bytes *= extent;
        }
    }
}

void check(const DecoderConfig& config) {
    check_sizes(config);
    check_layers(config);
    check_numbers(config);
    check_bytes(config);
    check_tensors(config);
}

}  // namespace

void config_json(Input input) {
    const std::string_view text = text_of(input);
    const std::size_t end = std::min(text.find('\0'), text.size());
    std::optional<DecoderConfig> config;
    if (!done([&] { config = parse_decoder_config(text.substr(0, end), "config.json"); })) return;
    check(*config);
    if (end == text.size()) return;
    done([&] { read_generation_config(text.substr(end + 1), "generation_config.json", *config); });
    check_numbers(*config);
}

}  // namespace headlong::fuzz
