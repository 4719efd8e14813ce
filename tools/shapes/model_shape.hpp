// The shapes of decoders: of published ones by name, and of any config.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <headlong/model.hpp>

namespace headlong::tools {

/// What benchmarks and memory plans need to know of a decoder. 0 = the file does not say, or not as a size, which only
/// what attention does not need may be.
struct ModelShape {
    std::string name;
    std::int64_t layers = 0;
    std::int64_t hidden_size = 0;
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t value_dim = 0;
    std::int64_t intermediate_size = 0;
    std::int64_t vocab_size = 0;
    std::int64_t max_positions = 0;
    std::int64_t sliding_window = 0;  ///< of some layers or all; 0 = none
    /// Of a dense decoder, whose layers have query, key, value and output projections and an MLP: that one's linear
    /// layers, 3 if it is gated, 2 if not. 0 = not known to be one, as mixtures of experts are not.
    std::int64_t mlp_projections = 0;
    WeightType stored_type = WeightType::f32;  ///< of the weight file, if config.json says so
};

/// The shapes of published models: facts of their config.json.
const std::vector<ModelShape>& model_presets();

/// The preset of that name, whatever its case. Throws InvalidArgument listing the names.
const ModelShape& model_preset(std::string_view name);

/// Reads the shape from a Hugging Face config.json, whose path or folder is given; its name is the folder's. Throws
/// IoError, or BadFile naming the key, its value and what is allowed.
ModelShape read_model_shape(const std::string& path);

}  // namespace headlong::tools
