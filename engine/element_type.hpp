// Element types as kernels name them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <headlong/tensor.hpp>

#include "kernels/kernel_table.hpp"

namespace headlong {

/// The type has been checked.
inline kernels::ElementType element_type(DType type) noexcept {
    switch (type) {
        case DType::f16:
            return kernels::ElementType::f16;
        case DType::bf16:
            return kernels::ElementType::bf16;
        case DType::f32:
            break;
    }
    return kernels::ElementType::f32;
}

/// The element `offset` elements behind `data`.
inline const void* element_at(const void* data, DType type, std::int64_t offset) noexcept {
    return static_cast<const std::byte*>(data) + offset * static_cast<std::int64_t>(size_of(type));
}
inline void* element_at(void* data, DType type, std::int64_t offset) noexcept {
    return static_cast<std::byte*>(data) + offset * static_cast<std::int64_t>(size_of(type));
}

}  // namespace headlong
