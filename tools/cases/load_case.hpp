// Cases from paths.
#pragma once

#include <string>
#include <vector>

#include "tools/cases/outcome.hpp"

namespace headlong::tools {

/// Where cases lie.
struct CasePath {
    std::string path;
    bool model = false;  ///< a folder with config.json, otherwise a file
};

/// The cases that a path of the command line names: a file is one, a folder with config.json is one, any other folder
/// is its own *.safetensors in ascending order. Throws IoError if there is nothing at the path or in the folder.
std::vector<CasePath> find_cases(const std::string& path);

/// Never throws for what is wrong with the case: a case that cannot be read is one that fails, and says why.
Case load_case(const CasePath& path);

}  // namespace headlong::tools
