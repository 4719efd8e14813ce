#include <headlong/error.hpp>

namespace headlong {

const char* to_string(ErrorCode code) noexcept {
    switch (code) {
        case ErrorCode::invalid_argument:
            return "invalid_argument";
        case ErrorCode::unsupported:
            return "unsupported";
        case ErrorCode::out_of_memory:
            return "out_of_memory";
        case ErrorCode::would_forget:
            return "would_forget";
        case ErrorCode::bad_file:
            return "bad_file";
        case ErrorCode::io:
            return "io";
        case ErrorCode::cancelled:
            return "cancelled";
    }
    return "unknown";
}

}  // namespace headlong
