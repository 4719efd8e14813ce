// The model that is linked into the command line: tools/models/austen.
#pragma once

#include <memory>
#include <string>

#include <headlong/model.hpp>

namespace headlong::tools {

/// The model in a folder, or the embedded one if the path is empty.
Model load_model(Context& context, const std::string& folder);

}  // namespace headlong::tools
