// The library's version (semantic versioning; CMakeLists.txt reads it from here).
#pragma once

#include <headlong/export.hpp>

#define HEADLONG_VERSION_MAJOR 0
#define HEADLONG_VERSION_MINOR 1
#define HEADLONG_VERSION_PATCH 0

namespace headlong HEADLONG_API {

/// "major.minor.patch" of the library that is linked, which may differ from the header's macros.
HEADLONG_API const char* version() noexcept;

}  // namespace headlong
