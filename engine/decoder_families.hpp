// The families of decoders that are known: what each has, and what its config.json means.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "engine/config_reader.hpp"
#include "engine/decoder_config.hpp"

namespace headlong {

/// How a family spells what all have.
struct ConfigKeys {
    const char* hidden_size = "hidden_size";
    const char* intermediate_size = "intermediate_size";
    const char* layers = "num_hidden_layers";
    const char* heads = "num_attention_heads";
    const char* max_positions = "max_position_embeddings";
    const char* norm_epsilon = "rms_norm_eps";
    const char* activation = "hidden_act";
    const char* rope_theta = "rope_theta";
    const char* rotary_part = nullptr;  ///< the share of a head that is turned
};

/// Sizes where their keys are missing; 0: they must be there.
struct UsualSizes {
    std::int64_t vocab_size = 0;
    std::int64_t hidden_size = 0;
    std::int64_t intermediate_size = 0;
    std::int64_t layers = 0;
    std::int64_t heads = 0;
};

/// Where a bias is: by_key asks attention_bias, or mlp_bias.
enum class Bias : std::uint8_t { never, always, by_key };

/// Which layers have sliding_window, where layer_types does not say it.
enum class Windows : std::uint8_t {
    none,
    all,
    from_max_window_layers,
    even,         ///< layer 0, 2, ...
    all_but_nth,  ///< not every sliding_window_pattern'th
    unrotated,    ///< those without rotary embedding
};

/// One family. What a key is where it is missing is what the family's configuration class in transformers says.
struct Family {
    const char* architecture;
    const char* model_type;
    const TensorNames* names;
    const char* inner = nullptr;  ///< the object that describes the decoder, of a model that also sees

    ConfigKeys keys = {};
    UsualSizes usual = {};
    bool four_times_hidden = false;  ///< intermediate_size where it is missing
    bool grouped = true;             ///< may have other KV heads than heads, and heads of any size
    std::int64_t kv_heads = 0;       ///< 0: as many as heads
    std::int64_t head_dim = 0;       ///< 0: hidden_size / heads
    std::int64_t max_positions = 2048;
    std::int64_t original_positions = 0;  ///< original_max_position_embeddings; 0: no such key
    double norm_epsilon = 1e-6;
    double rope_theta = 10000.0;
    double rotary_part = 1.0;
    bool tied_embeddings = false;
    const char* activation = "silu";

    Norm norm = Norm::rms;
    QkNorm qk_norm = QkNorm::none;
    FusedRows fused_rows = FusedRows::in_turn;
    bool inputs_first = false;
    Bias qkv_bias = Bias::never;
    Bias output_bias = Bias::never;
    Bias mlp_bias = Bias::never;
    bool biased = false;  ///< what attention_bias and mlp_bias are where they are missing
    bool rotates = true;

    Windows windows = Windows::none;
    bool window_switch = false;  ///< only if use_sliding_window is true
    std::int64_t window = 0;     ///< sliding_window where it is missing; 0: none
    /// Reads what only this family has, when all else is read.
    void (*read)(const ConfigReader& config, const Family& family, DecoderConfig& decoder) = nullptr;
    std::array<const char*, 10> own_keys = {};  ///< that `read` looks at, or that its model code does not
};

std::span<const Family> decoder_families() noexcept;

/// The windows of all layers, from sliding_window, layer_types and the family's rule.
std::vector<std::int64_t> read_windows(const ConfigReader& config, const Family& family, const DecoderConfig& decoder);

/// Rotary descriptions as rope_scaling or rope_parameters have them: for long texts, and, if it differs, for short
/// ones.
struct RotarySettings {
    Rotary rotary;
    std::optional<Rotary> for_short = {};
    std::int64_t short_context = 0;
};
/// `settings`: the object, or nothing; `theta` where neither it nor the family's key says another.
RotarySettings read_rotary(const ConfigReader& config, const Family& family, const DecoderConfig& decoder,
                           const std::optional<ConfigReader>& settings, double theta);
/// rope_scaling, or else rope_parameters.
std::optional<ConfigReader> rotary_object(const ConfigReader& config);

}  // namespace headlong
