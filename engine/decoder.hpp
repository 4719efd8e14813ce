// A decoder-only transformer, built from a description (decoder_config.hpp) and weight files. decoder_weights.cpp loads
// it, decoder.cpp runs it.
#pragma once

#include <cstdint>
#include <functional>
#include <headlong/kv_cache.hpp>
#include <headlong/rotary.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/decoder_config.hpp"
#include "engine/forward_log.hpp"
#include "engine/interrupt.hpp"
#include "engine/linear.hpp"
#include "engine/weight_files.hpp"

namespace headlong {

/// Options of a cache for such a decoder: its layers and shape, and `capacity` (0: max_positions). Windows and rotary
/// descriptions are the description's own.
KvCacheOptions cache_options_of(const DecoderConfig& config, const KvTypes& types = {}, std::int64_t capacity = 0);

/// Called while weights are loaded, with the bytes of the files that are done and all of them.
using LoadProgress = std::function<void(std::uint64_t done, std::uint64_t all)>;

struct TensorShape {
    std::string name;
    std::vector<std::int64_t> shape;
};

/// Who wants to know what a call of Decoder::forward() does; costs a branch an operation where nobody does.
struct ForwardHooks {
    /// Shown, for tests, what a layer computes: rows [tokens][columns], valid during the call.
    /// Names: "embedding", "q" and "k" (rotated), "v", "attn" (before its projection), "out" (the residual stream).
    using Observer =
        std::function<void(std::int64_t layer, std::string_view name, const float* rows, std::int64_t columns)>;
    Observer observer = {};
    ForwardLog* log = nullptr;  ///< outlives the call
    Interrupt interrupt = {};
};

/// Immutable once made: any number of threads may call forward() at once, each with a cache of its own.
class Decoder {
  public:
    /// Throws BadFile, naming the tensor, if one is missing, superfluous, or of another shape or type.
    /// Without `type` the linear layers store their weights as the file does.
    Decoder(Context::Impl& context, std::pmr::memory_resource& memory, DecoderConfig config,
            std::shared_ptr<const WeightFiles> weights, std::optional<WeightType> type = {},
            const LoadProgress& on_load = {});
    ~Decoder();
    Decoder(const Decoder&) = delete;
    Decoder& operator=(const Decoder&) = delete;

    const DecoderConfig& config() const noexcept { return config_; }

    /// Appends the tokens to the cache, in which they stand at its length, and writes the logits that follow each of
    /// the last `logit_rows` of them, row by row at `logits`, `logit_stride` floats apart. The tokens are valid,
    /// logit_rows is at most their number. If anything is thrown, the cache holds what it held before. The cache has
    /// the description's windows, and a layer that forgets takes at most max_chunk() tokens.
    void forward(Context& context, std::span<const std::int32_t> tokens, KvCache& cache, float* logits,
                 std::int64_t logit_rows, std::int64_t logit_stride, const ForwardHooks& hooks = {}) const;

    /// The tensors that a decoder of such a description takes from its files, in the order in which it does, with the
    /// first of the family's prefixes.
    static std::vector<TensorShape> tensors(const DecoderConfig& config);

    /// Bytes that the linear layers of such a decoder take from its memory resource, with weights of `type` or, without
    /// one, as the description says that they are stored. (Norms and a list of the layers take some KiB a layer more;
    /// its weight file is mapped, or held by whoever opened it.)
    static std::size_t weight_bytes(const DecoderConfig& config, std::optional<WeightType> type = {}) noexcept;
    /// What this decoder took.
    std::size_t weight_bytes() const noexcept;

    /// Bytes of scratch that a context holds after calls of forward() with these numbers of tokens, one at a time,
    /// whatever the caches, of these types and with so many sink tokens, held before.
    static std::size_t scratch_bytes(const Context::Impl& context, const DecoderConfig& config,
                                     std::span<const std::int64_t> token_counts, const KvTypes& types = {},
                                     std::optional<WeightType> type = {}, std::int64_t sink_tokens = 0) noexcept;

  private:
    struct NormWeights {  ///< empty where there is no norm
        explicit NormWeights(std::pmr::memory_resource& memory) noexcept : weight(&memory), bias(&memory) {}

        std::pmr::vector<float> weight;
        std::pmr::vector<float> bias;  ///< of Norm::layer
        bool empty() const noexcept { return weight.empty(); }
    };
    struct Mlp {
        std::unique_ptr<Linear> gate;  ///< null: a plain one, activation(up)
        std::unique_ptr<Linear> up;
        std::unique_ptr<Linear> down;
    };
    struct Layer {
        explicit Layer(std::pmr::memory_resource& memory) noexcept
            : attention_norm(memory),
              attention_post_norm(memory),
              query_norm(memory),
              key_norm(memory),
              mlp_norm(memory),
              mlp_post_norm(memory),
              sinks(&memory),
              mlps(&memory) {}

        NormWeights attention_norm, attention_post_norm, query_norm, key_norm, mlp_norm, mlp_post_norm;
        std::unique_ptr<Linear> query, key, value, attention_output;
        std::pmr::vector<float> sinks;   ///< per head; empty: none
        std::unique_ptr<Linear> router;  ///< null: no experts
        std::pmr::vector<Mlp> mlps;      ///< one, or one per expert
    };
    class Source;
    class Files;
    class Wishes;
    class Loader;
    struct Activations;
    class Segments;
    class Pass;

    Decoder(std::pmr::memory_resource& memory, DecoderConfig config);

    /// The most that any linear layer takes for so many rows.
    static Linear::Scratch linear_scratch(const Context::Impl& context, const DecoderConfig& config,
                                          std::int64_t tokens, std::optional<WeightType> type) noexcept;

    DecoderConfig config_;
    std::shared_ptr<const WeightFiles> weights_;  ///< the embeddings' rows are read from it
    const FileTensor* embedding_ = nullptr;
    const FileTensor* position_embedding_ = nullptr;
    std::pmr::vector<Layer> layers_;
    NormWeights final_norm_;  ///< divided by what logits are divided by
    std::unique_ptr<Linear> head_;
};

}  // namespace headlong
