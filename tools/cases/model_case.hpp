// A model folder as a case: config.json, model.safetensors, and golden.safetensors with what must come out.
#pragma once

#include <string>

#include "tools/cases/outcome.hpp"

namespace headlong::tools {

/// Loads the model anew for each context. What is wrong with the folder is thrown when the case runs.
Case model_case(std::string name, std::string folder);

}  // namespace headlong::tools
