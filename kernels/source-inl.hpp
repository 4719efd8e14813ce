// Element types of the caller's memory: how each is read and written as floats. Compiled per instruction set.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/simd/native.hpp"

namespace headlong::HEADLONG_ISA {

struct F32Elements {
    using Element = float;
    HEADLONG_INLINE static F32 load(const float* p) noexcept { return HEADLONG_ISA::load(p); }
    HEADLONG_INLINE static void store(float* p, F32 x) noexcept { HEADLONG_ISA::store(p, x); }
    HEADLONG_INLINE static float value(float x) noexcept { return x; }
    HEADLONG_INLINE static float element(float x) noexcept { return x; }
};

struct F16Elements {
    using Element = std::uint16_t;
    HEADLONG_INLINE static F32 load(const std::uint16_t* p) noexcept { return widen_f16(p); }
    HEADLONG_INLINE static void store(std::uint16_t* p, F32 x) noexcept {
        narrow_f16(p, canonical_nan(x));  // hardware keeps a part of other payloads, and of signs
    }
    HEADLONG_INLINE static float value(std::uint16_t x) noexcept { return kernels::widen_f16(x); }
    HEADLONG_INLINE static std::uint16_t element(float x) noexcept { return kernels::narrow_f16(x); }
};

struct Bf16Elements {
    using Element = std::uint16_t;
    HEADLONG_INLINE static F32 load(const std::uint16_t* p) noexcept { return widen_bf16(p); }
    HEADLONG_INLINE static void store(std::uint16_t* p, F32 x) noexcept {
        float lanes[kLanes];
        HEADLONG_ISA::store(lanes, x);
        for (std::size_t i = 0; i < kLanes; ++i) p[i] = kernels::narrow_bf16(lanes[i]);
    }
    HEADLONG_INLINE static float value(std::uint16_t x) noexcept { return kernels::widen_bf16(x); }
    HEADLONG_INLINE static std::uint16_t element(float x) noexcept { return kernels::narrow_bf16(x); }
};

/// Calls body(Elements{}) for the type.
template <class Body>
HEADLONG_INLINE auto with_elements(kernels::ElementType type, const Body& body) noexcept {
    switch (type) {
        case kernels::ElementType::f16:
            return body(F16Elements{});
        case kernels::ElementType::bf16:
            return body(Bf16Elements{});
        case kernels::ElementType::f32:
            break;
    }
    return body(F32Elements{});
}

}  // namespace headlong::HEADLONG_ISA
