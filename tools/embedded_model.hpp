// The model that is linked into the command line: tools/models/austen.
#pragma once

#include <memory>
#include <string>

#include <headlong/model.hpp>

#include "engine/decoder_config.hpp"

namespace headlong::tools {

/// What config.json says of the model in a folder, or of the embedded one if the path is empty: read without the rest,
/// to refuse what cannot be computed before weights are loaded.
DecoderConfig load_config(const std::string& folder);

/// The model in a folder, or the embedded one if the path is empty.
Model load_model(Context& context, const std::string& folder, const ModelOptions& options = {});

}  // namespace headlong::tools
