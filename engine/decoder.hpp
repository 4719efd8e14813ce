// A decoder-only transformer, built from a description (decoder_config.hpp) and a weight file.
#pragma once

#include <cstdint>
#include <functional>
#include <headlong/kv_cache.hpp>
#include <headlong/rotary.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/decoder_config.hpp"
#include "engine/forward_log.hpp"
#include "engine/linear.hpp"
#include "engine/safetensors.hpp"

namespace headlong {

/// Options of a cache for such a decoder: its layers and shape, and max_positions as the capacity.
KvCacheOptions cache_options_of(const DecoderConfig& config, const KvTypes& types = {});

/// Who wants to know what a call of Decoder::forward() does; costs a branch an operation where nobody does.
struct ForwardHooks {
    /// Shown, for tests, what a layer computes: rows [tokens][columns], valid during the call.
    /// Names: "embedding", "q" and "k" (rotated), "v", "attn" (before its projection), "out" (the residual stream).
    using Observer =
        std::function<void(std::int64_t layer, std::string_view name, const float* rows, std::int64_t columns)>;
    Observer observer = {};
    ForwardLog* log = nullptr;  ///< outlives the call
};

/// Immutable once made: any number of threads may call forward() at once, each with a cache of its own.
class Decoder {
  public:
    /// Throws BadFile, naming the tensor, if one is missing, superfluous, or of another shape or type.
    /// Without `type` the linear layers store their weights as the file does.
    Decoder(Context::Impl& context, std::pmr::memory_resource& memory, DecoderConfig config,
            std::shared_ptr<const SafetensorsFile> weights, std::optional<WeightType> type = {});

    const DecoderConfig& config() const noexcept { return config_; }

    /// Appends the tokens to the cache, in which they stand at its length, and writes the logits that follow each of
    /// the last `logit_rows` of them, row by row at `logits`, `logit_stride` floats apart. The tokens are valid,
    /// logit_rows is at most their number. If anything is thrown, the cache holds what it held before.
    void forward(Context& context, std::span<const std::int32_t> tokens, KvCache& cache, float* logits,
                 std::int64_t logit_rows, std::int64_t logit_stride, const ForwardHooks& hooks = {}) const;

    /// Bytes that a decoder of such a description takes from its memory resource, with weights of `type` or, without
    /// one, as the description says that they are stored. (Beside them, its weight file is
    /// mapped, or held by whoever opened it.)
    static std::size_t weight_bytes(const DecoderConfig& config, std::optional<WeightType> type = {}) noexcept;
    /// What this decoder took.
    std::size_t weight_bytes() const noexcept;

    /// Bytes of scratch that a context holds after calls of forward() with these numbers of tokens, one at a time,
    /// whatever the caches, of these types and with so many sink tokens, held before.
    static std::size_t scratch_bytes(const Context::Impl& context, const DecoderConfig& config,
                                     std::span<const std::int64_t> token_counts, const KvTypes& types = {},
                                     std::optional<WeightType> type = {}, std::int64_t sink_tokens = 0) noexcept;

  private:
    struct Layer {
        std::vector<float> attention_norm;
        Linear query, key, value, attention_output;
        std::vector<float> mlp_norm;
        Linear gate, up, down;
    };
    struct Activations;
    class Segments;

    void run(Context& context, std::span<const std::int32_t> tokens, KvCache& cache, float* logits,
             std::int64_t logit_rows, std::int64_t logit_stride, const ForwardHooks& hooks,
             const Segments& segments) const;

    DecoderConfig config_;
    std::shared_ptr<const SafetensorsFile> weights_;  ///< the embedding's rows are read from it
    const FileTensor* embedding_ = nullptr;
    Rotary rotary_;
    std::vector<std::unique_ptr<Layer>> layers_;
    std::vector<float> final_norm_;
    std::unique_ptr<Linear> head_;
};

}  // namespace headlong
