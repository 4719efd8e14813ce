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

/// The model in a folder, or the embedded one if the path is empty. Shows on stderr how far loading is, if that is a
/// terminal and options.on_load is empty. Throws OutOfMemory, with the numbers, before anything is loaded that does not
/// fit.
Model load_model(Context& context, const std::string& folder, const ModelOptions& options = {});

}  // namespace headlong::tools
