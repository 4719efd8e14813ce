#include <headlong/tensor.hpp>

namespace headlong {

const char* to_string(DType type) noexcept {
    switch (type) {
        case DType::f32:
            return "f32";
        case DType::f16:
            return "f16";
        case DType::bf16:
            return "bf16";
    }
    return "unknown";
}

}  // namespace headlong
