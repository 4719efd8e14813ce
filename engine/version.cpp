#include <headlong/version.hpp>

#define HEADLONG_TEXT_2(x) #x
#define HEADLONG_TEXT(x) HEADLONG_TEXT_2(x)

namespace headlong {

const char* version() noexcept {
    return HEADLONG_TEXT(HEADLONG_VERSION_MAJOR) "." HEADLONG_TEXT(HEADLONG_VERSION_MINOR) "." HEADLONG_TEXT(
        HEADLONG_VERSION_PATCH);
}

}  // namespace headlong
