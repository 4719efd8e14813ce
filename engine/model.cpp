#include <headlong/model.hpp>

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "engine/context_impl.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/mapped_file.hpp"
#include "engine/model_impl.hpp"
#include "engine/validate.hpp"

namespace headlong {
namespace {

constexpr std::uint64_t kMostTokenizerBytes = std::uint64_t{1} << 26;  // the largest published one has 35 MB

std::pmr::memory_resource& memory_of(const ModelOptions& options) {
    return options.memory != nullptr ? *options.memory : *std::pmr::new_delete_resource();
}

}  // namespace

const char* to_string(WeightType type) noexcept {
    switch (type) {
        case WeightType::f32:
            return "f32";
        case WeightType::f16:
            return "f16";
        case WeightType::bf16:
            return "bf16";
        case WeightType::int8:
            return "int8";
        case WeightType::int4:
            return "int4";
    }
    return "unknown";
}

namespace {

/// A cache of other windows or frequencies would give other numbers than the model's.
void check_cache(const DecoderConfig& config, const KvCache& cache) {
    KvCacheOptions wanted = cache_options_of(config, cache.shape().types());
    if (!(cache.shape() == wanted.shape) || static_cast<std::int64_t>(cache.layers()) != wanted.layers) {
        throw InvalidArgument("forward: the cache is of another shape than the model's cache_options()");
    }
    const auto turned_by = [&](const std::vector<std::optional<Rotary>>& rotaries) {
        for (std::size_t i = 0; i < rotaries.size(); ++i) {
            if (!(cache.rotary(i) == rotaries[i])) return false;
        }
        return true;
    };
    if (!turned_by(config.rotaries) && (config.short_rotaries.empty() || !turned_by(config.short_rotaries))) {
        throw InvalidArgument("forward: the cache has another rotary description than the model's cache_options()");
    }
    wanted.ring = cache.ring();
    wanted.capacity = cache.capacity();
    wanted.sink_tokens = cache.sink_tokens();
    for (std::size_t i = 0; i < cache.layers(); ++i) {
        const KvCache::Impl::Layer layer = KvCache::Impl::layer_of(wanted, i);
        if (cache.impl().layer(i).window == layer.window && cache.impl().layer(i).sinks == layer.sinks) continue;
        throw InvalidArgument(
            fmt::format("forward: layer {} of the cache has another window than the model's cache_options()", i));
    }
}

}  // namespace

Model::Impl::Impl(Context& context, std::pmr::memory_resource& memory, const DecoderConfig& config,
                  std::shared_ptr<const WeightFiles> weights, Tokenizer tokenizer_of_model, const ModelOptions& options)
    : decoder(context.impl(), memory, config, std::move(weights), options.weights, options.on_load),
      tokenizer(std::move(tokenizer_of_model)) {
    // Tokens that were added for pictures may lie beyond: forward() refuses them by their number.
    if (tokenizer.vocab_size() > static_cast<std::size_t>(config.vocab_size) + tokenizer.added_tokens()) {
        throw BadFile(fmt::format("tokenizer.json: has {} tokens, {} of them added, but config.json's vocab_size is {}",
                                  tokenizer.vocab_size(), tokenizer.added_tokens(), config.vocab_size));
    }
    info = {.architecture = config.architecture,
            .vocab_size = config.vocab_size,
            .hidden_size = config.hidden_size,
            .layers = config.layers,
            .heads = config.heads,
            .kv_heads = config.kv_heads,
            .head_dim = config.head_dim,
            .max_positions = config.max_positions,
            .bos_id = config.bos_id,
            .eos_ids = config.eos_ids};
}

Model::Model(Context& context, const std::string& folder, const ModelOptions& options) {
    with_memory_errors("Model", [&] {
        const std::string config_path = folder + "/config.json";
        DecoderConfig config = parse_decoder_config(read_text(config_path, kMostConfigBytes), config_path);
        const std::string generation_path = folder + "/generation_config.json";
        std::error_code ignored;
        if (std::filesystem::exists(generation_path, ignored)) {
            read_generation_config(read_text(generation_path, kMostConfigBytes), generation_path, config);
        }
        const std::string tokenizer_path = folder + "/tokenizer.json";
        Tokenizer tokenizer = Tokenizer::from_json(read_text(tokenizer_path, kMostTokenizerBytes), tokenizer_path);
        auto weights = std::make_shared<const WeightFiles>(
            WeightFiles::open(folder, {.map = options.map, .memory = options.memory}));
        impl_ = std::make_unique<Impl>(context, memory_of(options), config, std::move(weights), std::move(tokenizer),
                                       options);
    });
}

Model::Model(Context& context, const ModelFiles& files, const ModelOptions& options) {
    with_memory_errors("Model", [&] {
        const DecoderConfig config = parse_decoder_config(files.config, files.name + "/config.json");
        Tokenizer tokenizer = Tokenizer::from_json(files.tokenizer, files.name + "/tokenizer.json");
        auto weights =
            std::make_shared<const WeightFiles>(SafetensorsFile(files.name + "/model.safetensors", files.weights));
        impl_ = std::make_unique<Impl>(context, memory_of(options), config, std::move(weights), std::move(tokenizer),
                                       options);
    });
}

Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

const ModelInfo& Model::info() const noexcept { return impl_->info; }
const Tokenizer& Model::tokenizer() const noexcept { return impl_->tokenizer; }

KvCacheOptions Model::cache_options(const KvTypes& types, std::int64_t capacity) const {
    return cache_options_of(impl_->decoder.config(), types, capacity);
}

KvCacheOptions Model::ring_options(std::int64_t window, std::int64_t sink_tokens, const KvTypes& types) const {
    KvCacheOptions options = cache_options(types);
    options.ring = true;
    options.capacity = window;
    options.sink_tokens = sink_tokens;
    return options;
}

void Model::forward(Context& context, std::span<const std::int32_t> tokens, KvCache& cache,
                    const OutputTensor<2>& logits, const ForwardOptions& options) const {
    const DecoderConfig& config = impl_->decoder.config();
    check_cache(config, cache);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] < 0 || tokens[i] >= info().vocab_size) {
            throw InvalidArgument(
                fmt::format("forward: tokens[{}] is {}; allowed: 0 to {}", i, tokens[i], info().vocab_size - 1));
        }
    }
    check_f32_output("logits", logits);
    const auto count = static_cast<std::int64_t>(tokens.size());
    if (logits.extents[0] > count) {
        throw InvalidArgument(fmt::format("logits: extent 0 is {}; at most the {} tokens", logits.extents[0], count));
    }
    if (logits.extents[0] > 0) {
        check_extent("logits", 1, logits.extents[1], info().vocab_size, "vocab_size");
        if (logits.strides[1] != 1 || (logits.extents[0] > 1 && logits.strides[0] < info().vocab_size)) {
            throw InvalidArgument("logits: rows must be dense (stride 1) and at least vocab_size apart");
        }
    }
    if (const std::int64_t most = cache.impl().most_at_once(); count > most) {
        throw InvalidArgument(
            fmt::format("forward: {} tokens; a ring, or a cache of layers with windows, takes at most max_chunk at "
                        "once, or what all of them hold: {}",
                        count, most));
    }
    const bool bounded = !cache.ring() || config.learned_positions;
    if (bounded && (cache.length() > info().max_positions || count > info().max_positions - cache.length())) {
        throw InvalidArgument(fmt::format("forward: {} tokens after {} exceed max_position_embeddings of {}", count,
                                          cache.length(), info().max_positions));
    }
    with_memory_errors("forward", [&] {
        impl_->decoder.forward(context, tokens, cache, floats(logits.data), logits.extents[0], logits.strides[0],
                               {.interrupt = {options.stop, options.deadline}});
    });
}

}  // namespace headlong
