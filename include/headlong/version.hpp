/// \file
/// The library's version (semantic versioning; CMakeLists.txt reads it from here).
#pragma once

#include <headlong/export.hpp>

#define HEADLONG_VERSION_MAJOR 0  ///< changes when programs must be rewritten
#define HEADLONG_VERSION_MINOR 1  ///< changes when something is added (and, while MAJOR is 0, changed)
#define HEADLONG_VERSION_PATCH 0  ///< changes when something is mended

namespace headlong HEADLONG_API {

/// "major.minor.patch" of the library that is linked, which may differ from the header's macros.
HEADLONG_API const char* version() noexcept;

}  // namespace headlong
