// What a config.json says of a decoder, as a description that the decoder is built from. A family (Llama, ...) is a row
// of a table in decoder_config.cpp: which keys it has, and how its tensors are named. There is no class per model.
#pragma once

#include <cstdint>
#include <headlong/model.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace headlong {

/// Names of a family's tensors. In layer names "{}" stands for the layer's number.
struct TensorNames {
    const char* embedding;
    const char* final_norm;
    const char* head;
    const char* attention_norm;
    const char* query;  ///< projections without ".weight" and ".bias"
    const char* key;
    const char* value;
    const char* attention_output;
    const char* mlp_norm;
    const char* gate;
    const char* up;
    const char* down;
};

/// A decoder-only transformer: pre-norm blocks of attention and gated MLP, both added to the residual stream.
struct DecoderConfig {
    std::string architecture;
    const TensorNames* names = nullptr;
    std::int64_t vocab_size = 0;
    std::int64_t hidden_size = 0;
    std::int64_t intermediate_size = 0;
    std::int64_t layers = 0;
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t max_positions = 0;
    double norm_epsilon = 0.0;
    double rope_theta = 0.0;  ///< rotary embedding of the halves of a whole head
    bool attention_bias = false;
    bool mlp_bias = false;
    bool tied_embeddings = false;  ///< the output head is the embedding
    /// How the weight file stores the linear layers, by config.json's word; the file's own decides when it is loaded.
    WeightType stored_type = WeightType::f32;
    std::optional<std::int32_t> bos_id;  ///< the token that begins a text
    std::vector<std::int32_t> eos_ids;   ///< tokens that end a text; may be empty
};

inline constexpr std::uint64_t kMostConfigBytes = std::uint64_t{1} << 20;  ///< a config.json has a few KiB

/// Reads a config.json. `name` is for messages. Throws BadFile, naming the key, its value and what is allowed, or
/// Unsupported, naming the architecture or the key that this version does not handle.
DecoderConfig parse_decoder_config(std::string_view text, const std::string& name);

}  // namespace headlong
