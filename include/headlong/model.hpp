/// \file
/// Decoder models from Hugging Face folders, and text from them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include <headlong/context.hpp>
#include <headlong/export.hpp>
#include <headlong/kv_cache.hpp>
#include <headlong/tensor.hpp>
#include <headlong/tokenizer.hpp>

namespace headlong HEADLONG_API {

/// How a linear layer stores its weights.
enum class WeightType : std::uint8_t { f32, f16, bf16, int8, int4 };

/// "f32", "f16", "bf16", "int8" or "int4".
HEADLONG_API const char* to_string(WeightType type) noexcept;

/// How a model is loaded.
struct ModelOptions {
    /// How the linear layers store their weights; empty: as the file does. f16 and bf16 round to nearest
    /// even; a weight that would become infinite is refused. int8 and int4 quantise symmetrically, per output feature
    /// and group of 64 inputs, and compute in integers. The embedding's rows are read from the file as they are, and
    /// what chooses experts is not quantised.
    std::optional<WeightType> weights = {};
    /// Called while weights are loaded, on the calling thread, with the bytes of the file that are done and all of
    /// them.
    std::function<void(std::uint64_t done, std::uint64_t all)> on_load = {};
    bool map = true;  ///< false reads the weight file into memory: a mapped file that shrinks ends the process
    std::pmr::memory_resource* memory =
        nullptr;  ///< for weights; must outlive the model; nullptr = aligned operator new
};

/// The files of a model that the program holds in memory. The weights are not copied and must outlive the model.
struct ModelFiles {
    std::string name;                         ///< for messages
    std::string_view config;                  ///< config.json
    std::string_view tokenizer;               ///< tokenizer.json
    std::span<const std::byte> weights = {};  ///< model.safetensors
};

/// What a model is, from its config.json.
struct ModelInfo {
    std::string architecture;                 ///< as config.json spells it: "LlamaForCausalLM"
    std::int64_t vocab_size = 0;              ///< logits per token
    std::int64_t hidden_size = 0;             ///< elements of the residual stream
    std::int64_t layers = 0;                  ///< blocks of attention and MLP
    std::int64_t heads = 0;                   ///< query heads per layer
    std::int64_t kv_heads = 0;                ///< key and value heads per layer
    std::int64_t head_dim = 0;                ///< elements of a query, key and value
    std::int64_t max_positions = 0;           ///< tokens a text may have
    std::optional<std::int32_t> bos_id = {};  ///< the token that begins a text
    std::vector<std::int32_t> eos_ids;        ///< tokens that end a text
};

/// When a forward pass is to end before it is done, with Cancelled: looked at between the tiles of its products and
/// attention.
struct ForwardOptions {
    std::stop_token stop = {};                                           ///< a stop is requested, or ...
    std::optional<std::chrono::steady_clock::time_point> deadline = {};  ///< ... this time has come
};

/// A decoder and its tokenizer. Immutable once made: any number of threads may use it at once, with contexts of any
/// instruction set.
class Model {
  public:
    /// Reads config.json, tokenizer.json, generation_config.json if it is there, and model.safetensors or the files
    /// that model.safetensors.index.json lists, of a folder. Throws IoError, BadFile (naming the key or tensor),
    /// Unsupported (naming the architecture or key), OutOfMemory.
    Model(Context& context, const std::string& folder, const ModelOptions& options = {});
    /// The same of files in memory. Throws as above, but for IoError.
    Model(Context& context, const ModelFiles& files, const ModelOptions& options = {});
    ~Model();
    Model(Model&&) noexcept;             ///< a model that was moved from may only be assigned to or destroyed
    Model& operator=(Model&&) noexcept;  ///< likewise

    const ModelInfo& info() const noexcept;       ///< lives as long as the model
    const Tokenizer& tokenizer() const noexcept;  ///< lives as long as the model, copies longer

    /// Options of a cache for this model: its layers, their windows and rotary descriptions, its shape. `capacity` 1 to
    /// max_positions tokens, 0 = max_positions. Of a model that turns long texts by other frequencies than short ones
    /// (longrope), the capacity says which a text is. Windows and descriptions are the model's, which must be alive
    /// when the cache is made. Throws InvalidArgument.
    KvCacheOptions cache_options(const KvTypes& types = {}, std::int64_t capacity = 0) const;
    /// The same for a ring of `window` tokens, of which the first sink_tokens stay: a text of any length. A window of
    /// more than max_positions is allowed: queries then stand further from keys than the model was trained for. A model
    /// that learned an embedding per position ends at max_positions all the same. Throws InvalidArgument.
    KvCacheOptions ring_options(std::int64_t window, std::int64_t sink_tokens, const KvTypes& types = {}) const;

    /// Appends tokens to a cache of cache_options() or ring_options(), of any types, and writes the logits [m,
    /// vocab_size] that follow each of the last m of them, m from 0 to their number. A row's bits do not depend on how
    /// tokens were split into calls, or on threads. Throws and leaves the cache as it was if a token or shape is wrong,
    /// the cache is full, memory runs out, or `options` ask for an end.
    void forward(Context& context, std::span<const std::int32_t> tokens, KvCache& cache, const OutputTensor<2>& logits,
                 const ForwardOptions& options = {}) const;

    class HEADLONG_LOCAL Impl;
    const Impl& impl() const noexcept { return *impl_; }  ///< for the library's own use

  private:
    std::unique_ptr<Impl> impl_;
};

/// How the next token is drawn. With temperature 0 it is the one of the largest logit (the first of equals).
struct SamplingOptions {
    float temperature = 0.0F;  ///< >= 0; logits are divided by it, first
    std::int64_t top_k = 0;    ///< then only the k largest stay; 0 = all
    float top_p = 1.0F;        ///< then only the smallest set that holds this share of the probability; in (0, 1]
    std::uint64_t seed = 0;    ///< the same seed, logits and options give the same tokens
};

/// Draws tokens. Not thread-safe: one per text.
class Sampler {
  public:
    /// Throws InvalidArgument, naming the option.
    explicit Sampler(const SamplingOptions& options);

    /// The next token for logits that are not empty. Throws InvalidArgument if one of them is NaN or +infinity, or all
    /// are -infinity.
    std::int32_t pick(std::span<const float> logits);

  private:
    struct Candidate {
        double weight;
        std::int32_t token;
    };
    double uniform() noexcept;

    SamplingOptions options_;
    std::uint64_t state_;
    std::vector<Candidate> candidates_;
};

/// How generate() goes on with a text. A value; what callbacks refer to must outlive the call.
struct GenerateOptions {
    /// Tokens to generate at most; >= 0. Of a model with LongRoPE, prompt and these together say whether generate()
    /// takes the frequencies of short texts or of long ones, from the first token on (Model::cache_options()).
    std::int64_t max_tokens = 256;
    SamplingOptions sampling = {};  ///< how tokens are drawn
    bool ignore_eos = false;        ///< go on after an end-of-text token
    std::vector<std::string> stop =
        {};                            ///< texts that end the generation, and are cut off; UTF-8, 1 to 4,096 bytes each
    KvTypes kv = {};                   ///< of the cache, where generate() makes it
    std::int64_t window = 0;           ///< of a ring cache, where generate() makes it; 0 = none
    std::int64_t sink_tokens = 0;      ///< of the ring
    bool f16_sinks = false;            ///< of the ring: KvCacheOptions::f16_sinks
    std::int64_t prefill_chunk = 512;  ///< tokens of the prompt that are computed at once: bounds scratch; >= 1
    /// Called after each chunk of the prompt with the tokens done and all of them.
    std::function<void(std::int64_t done, std::int64_t all)> on_prefill = {};
    /// Called with each piece of text once it is certain (never half a character, nothing that may be part of a stop
    /// text); returns false to end the generation, and is not called again then.
    std::function<bool(std::string_view piece)> on_text = {};
    std::stop_token stop_token = {};  ///< ends the generation at once: what is computed of a token or chunk is dropped
    std::optional<std::chrono::steady_clock::time_point> deadline = {};  ///< the same once this time has come
};

/// Why a generation ended.
enum class StopReason : std::uint8_t {
    max_tokens,    ///< as many as asked for
    end_of_text,   ///< an end-of-text token, which is not part of the result
    stop_text,     ///< one of GenerateOptions::stop
    context_full,  ///< the text has max_positions tokens, and the cache is no ring
    cancelled,     ///< the stop token, the deadline, or on_text
};

/// "max_tokens", "end_of_text" and so on.
HEADLONG_API const char* to_string(StopReason reason) noexcept;

/// What generate() made, and how long it took.
struct Generation {
    std::vector<std::int32_t> prompt_tokens;  ///< what the prompt became, special tokens included
    std::vector<std::int32_t>
        tokens;        ///< the continuation alone, with the tokens of a stop text that was cut off `text`
    std::string text;  ///< of the continuation alone
    StopReason reason = StopReason::max_tokens;  ///< why it ended
    std::int64_t prefill_tokens = 0;             ///< tokens of the prompt that were computed
    double prefill_seconds = 0.0;                ///< of wall time, for those
    std::int64_t decode_steps = 0;  ///< tokens that were computed one by one; the first one comes with the prefill
    double decode_seconds = 0.0;    ///< of wall time, for those
    std::size_t kv_bytes = 0;       ///< used by the cache at the end
};

/// Continues a prompt, special tokens added as tokenizer.json says. An empty prompt to which nothing is added starts
/// from the model's begin-of-text token, or else its first end-of-text token. Throws InvalidArgument (naming the
/// option; a prompt longer than max_positions without a window), BadFile if the model's logits are no numbers, and what
/// forward() throws.
HEADLONG_API Generation generate(Context& context, const Model& model, std::string_view prompt,
                                 const GenerateOptions& options = {});

/// Continues what a cache of the model's cache_options() or ring_options(), of any types, holds by tokens, at least
/// one, and then generates: for a dialogue that goes on, or a prompt that is no text. `text` is what the new tokens
/// spell. If it throws (OutOfMemory, too, for a prompt that the cache has no room for), the cache holds what it held;
/// but one that forgets may have got chunks of the prompt, and tokens.
HEADLONG_API Generation generate(Context& context, const Model& model, KvCache& cache,
                                 std::span<const std::int32_t> prompt, const GenerateOptions& options = {});

}  // namespace headlong
