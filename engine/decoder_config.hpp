// What a config.json says of a decoder, as a description that the decoder is built from. What a family (Llama, ...) has
// is a row of a table in decoder_families.cpp: its keys and what they mean where they are missing, how its tensors are
// named and lie in the file, which parts its layers have. There is no class per model.
#pragma once

#include <array>
#include <cstdint>
#include <headlong/model.hpp>
#include <headlong/rotary.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernel_table.hpp"

namespace headlong {

/// Names of a family's tensors, null for what it has not. "{0}" stands for the layer's number, "{1}" for the expert's.
/// Linear layers and norms are named without ".weight" and ".bias".
struct TensorNames {
    std::array<const char*, 3> prefixes;  ///< of all names but the head's: one of these, as the file has it
    const char* embedding;
    const char* position_embedding = nullptr;
    const char* final_norm;
    const char* head;
    const char* attention_norm = nullptr;
    const char* attention_post_norm = nullptr;
    const char* query;  ///< the same name thrice: one tensor holds all three
    const char* key;
    const char* value;
    const char* query_norm = nullptr;
    const char* key_norm = nullptr;
    const char* attention_output;
    const char* sinks = nullptr;  ///< [heads]
    const char* mlp_norm = nullptr;
    const char* mlp_post_norm = nullptr;
    const char* gate = nullptr;  ///< the same name as up: one tensor holds both
    const char* up = nullptr;
    const char* down = nullptr;
    const char* router = nullptr;
    const char* expert_gate = nullptr;  ///< without "{1}": one tensor holds all experts, and is named as it is
    const char* expert_up = nullptr;
    const char* expert_down = nullptr;
    std::array<const char*, 4> ignored = {};  ///< ends or beginnings of names that hold nothing that is computed with
};

enum class Norm : std::uint8_t {
    rms,           ///< times the weight (Zhang and Sennrich 2019)
    rms_plus_one,  ///< times 1 + the weight
    layer,         ///< mean taken off, weight and bias (Ba et al. 2016)
};

/// What is normalised of queries and keys, before they are rotated.
enum class QkNorm : std::uint8_t { none, each_head, all_heads };

/// How one tensor holds queries, keys and values.
enum class FusedRows : std::uint8_t {
    in_turn,   ///< all queries, all keys, all values
    per_head,  ///< of each head its query, key and value
};

/// A mixture of experts in the place of an MLP (Shazeer et al. 2017; Jiang et al. 2024, "Mixtral of Experts").
struct Experts {
    std::int64_t count = 0;  ///< 0: none
    std::int64_t used = 0;   ///< by a token: those of the largest router logits
    std::int64_t intermediate_size = 0;
    bool normalised = true;  ///< weights are the softmax over those used; false: over all
    bool bias = false;       ///< of the router and the experts
};

/// A decoder-only transformer: blocks of attention and MLP, both added to the residual stream.
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
    Norm norm = Norm::rms;
    QkNorm qk_norm = QkNorm::none;
    FusedRows fused_rows = FusedRows::in_turn;
    bool inputs_first = false;  ///< weights are stored [inputs, outputs]
    bool parallel = false;      ///< attention and MLP read the same residual stream, not one after the other
    bool qkv_bias = false;
    bool output_bias = false;  ///< of attention
    bool mlp_bias = false;
    bool tied_embeddings = false;    ///< the output head is the embedding
    bool learned_positions = false;  ///< an embedding per position, not rotary
    kernels::Activation activation = kernels::Activation::silu;
    float activation_limit = 0.0F;

    std::optional<float> attention_scale = {};  ///< empty: 1 / sqrt(head_dim)
    float attention_softcap = 0.0F;             ///< 0: none
    float logit_softcap = 0.0F;                 ///< 0: none
    float embedding_multiplier = 1.0F;
    bool round_embedding_multiplier = false;  ///< to the type of the embedding
    float residual_multiplier = 1.0F;         ///< of what is added to the residual stream
    float logits_divisor = 1.0F;

    std::vector<std::int64_t> windows = {};             ///< per layer; 0: none. Empty: none in any
    std::vector<std::optional<Rotary>> rotaries = {};   ///< per layer
    std::int64_t short_context = 0;                     ///< for texts of at most so many tokens ...
    std::vector<std::optional<Rotary>> short_rotaries;  ///< ... these; empty: the same

    Experts experts = {};
    std::vector<bool> sparse = {};  ///< per layer: experts in the place of the MLP; empty: none

    /// How the weight file stores the linear layers, by config.json's word; the file's own decides when it is loaded.
    WeightType stored_type = WeightType::f32;
    std::optional<std::int32_t> bos_id = {};  ///< the token that begins a text
    std::vector<std::int32_t> eos_ids = {};   ///< tokens that end a text; may be empty

    bool gated() const noexcept { return names->gate != nullptr || names->expert_gate != nullptr; }
    bool is_sparse(std::int64_t layer) const noexcept {
        return !sparse.empty() && sparse[static_cast<std::size_t>(layer)];
    }
    std::int64_t window(std::int64_t layer) const noexcept {
        return windows.empty() ? 0 : windows[static_cast<std::size_t>(layer)];
    }
    const std::vector<std::optional<Rotary>>& rotaries_for(std::int64_t tokens) const noexcept {
        return tokens <= short_context && !short_rotaries.empty() ? short_rotaries : rotaries;
    }
};

/// Takes from a generation_config.json the tokens that begin and end a text, where it has them: they are those of a
/// model as it is used, where config.json may have those that it was trained with. Throws BadFile, naming the key.
void read_generation_config(std::string_view text, const std::string& name, DecoderConfig& config);

inline constexpr std::uint64_t kMostConfigBytes = std::uint64_t{1} << 20;  ///< a config.json has a few KiB

/// Reads a config.json. `name` is for messages. Throws BadFile, naming the key, its value and what is allowed, or
/// Unsupported, naming the architecture or the key that this version does not handle.
DecoderConfig parse_decoder_config(std::string_view text, const std::string& name);

}  // namespace headlong
