#include <headlong/model.hpp>

#include <fmt/format.h>

#include <string>
#include <utility>

#include "engine/context_impl.hpp"
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
    }
    return "unknown";
}

Model::Impl::Impl(Context& context, std::pmr::memory_resource& memory, const DecoderConfig& config,
                  std::shared_ptr<const SafetensorsFile> weights, Tokenizer tokenizer_of_model,
                  std::optional<WeightType> type)
    : decoder(context.impl(), memory, config, std::move(weights), type), tokenizer(std::move(tokenizer_of_model)) {
    if (tokenizer.vocab_size() > static_cast<std::size_t>(config.vocab_size)) {
        throw BadFile(fmt::format("tokenizer.json: has {} tokens, but config.json's vocab_size is {}",
                                  tokenizer.vocab_size(), config.vocab_size));
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
        const DecoderConfig config = parse_decoder_config(read_text(config_path, kMostConfigBytes), config_path);
        const std::string tokenizer_path = folder + "/tokenizer.json";
        Tokenizer tokenizer = Tokenizer::from_json(read_text(tokenizer_path, kMostTokenizerBytes), tokenizer_path);
        auto weights = std::make_shared<const SafetensorsFile>(
            folder + "/model.safetensors", SafetensorsOptions{.map = options.map, .memory = options.memory});
        impl_ = std::make_unique<Impl>(context, memory_of(options), config, std::move(weights), std::move(tokenizer),
                                       options.weights);
    });
}

Model::Model(Context& context, const ModelFiles& files, const ModelOptions& options) {
    with_memory_errors("Model", [&] {
        const DecoderConfig config = parse_decoder_config(files.config, files.name + "/config.json");
        Tokenizer tokenizer = Tokenizer::from_json(files.tokenizer, files.name + "/tokenizer.json");
        auto weights = std::make_shared<const SafetensorsFile>(files.name + "/model.safetensors", files.weights);
        impl_ = std::make_unique<Impl>(context, memory_of(options), config, std::move(weights), std::move(tokenizer),
                                       options.weights);
    });
}

Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

const ModelInfo& Model::info() const noexcept { return impl_->info; }
const Tokenizer& Model::tokenizer() const noexcept { return impl_->tokenizer; }

KvCacheOptions Model::cache_options(const KvTypes& types) const {
    return cache_options_of(impl_->decoder.config(), types);
}

KvCacheOptions Model::ring_options(std::int64_t window, std::int64_t sink_tokens, const KvTypes& types) const {
    KvCacheOptions options = cache_options(types);
    options.ring = true;
    options.capacity = window;
    options.sink_tokens = sink_tokens;
    return options;
}

void Model::forward(Context& context, std::span<const std::int32_t> tokens, KvCache& cache,
                    const OutputTensor<2>& logits) const {
    const KvCacheOptions wanted = cache_options(cache.shape().types());
    if (!(cache.shape() == wanted.shape) || static_cast<std::int64_t>(cache.layers()) != wanted.layers) {
        throw InvalidArgument("forward: the cache is of another shape than the model's cache_options()");
    }
    if (!(cache.rotary() == wanted.rotary)) {
        throw InvalidArgument("forward: the cache has another rotary description than the model's cache_options()");
    }
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
    if (cache.ring() && count > cache.max_chunk()) {
        throw InvalidArgument(
            fmt::format("forward: {} tokens; a ring takes at most max_chunk, {}, at once", count, cache.max_chunk()));
    }
    if (!cache.ring() && (cache.length() > info().max_positions || count > info().max_positions - cache.length())) {
        throw InvalidArgument(fmt::format("forward: {} tokens after {} exceed max_position_embeddings of {}", count,
                                          cache.length(), info().max_positions));
    }
    with_memory_errors("forward", [&] {
        impl_->decoder.forward(context, tokens, cache, floats(logits.data), logits.extents[0], logits.strides[0]);
    });
}

}  // namespace headlong
