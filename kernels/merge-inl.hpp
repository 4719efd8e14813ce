// Folding softmax states, and the division at the end. Compiled per instruction set.
#pragma once

#include "kernels/exp2-inl.hpp"
#include "kernels/kernel_table.hpp"

namespace headlong::HEADLONG_ISA {

inline void merge(const kernels::Merge& a) noexcept {
    constexpr float kInfinity = compiler::kInfinity;
    for (std::size_t r = 0; r < a.row_count; ++r) {
        const float m1 = a.into.max[r];
        const float m2 = a.from.max[r];
        const float m = m1 > m2 ? m1 : m2;  // a NaN in m2 wins here, one in m1 through its factor
        const float base = m == -kInfinity ? 0.0F : m;
        const F32 factor1 = exp2(broadcast(m1 - base));
        const F32 factor2 = exp2(broadcast(m2 - base));
        float* into = a.into.output + r * a.into.stride;
        const float* from = a.from.output + r * a.from.stride;
        for (std::size_t c = 0; c < a.columns; c += kLanes) {
            store(into + c, fma(load(from + c), factor2, load(into + c) * factor1));
        }
        a.into.max[r] = m;
        a.into.sum[r] = first_lane(fma(broadcast(a.from.sum[r]), factor2, broadcast(a.into.sum[r]) * factor1));
    }
}

inline void finish(const kernels::Finish& a) noexcept {
    for (std::size_t r = 0; r < a.row_count; ++r) {
        const float* output = a.states.output + r * a.states.stride;
        float* out = a.out + r * a.out_stride;
        const float sum = a.states.sum[r];
        const bool empty = sum == 0.0F;  // any score above -infinity, or a NaN, has left a sum of 1 or more, or NaN
        const F32 divisor = broadcast(sum);
        for (std::size_t c = 0; c < a.columns; c += kLanes) {
            const std::size_t n = a.columns - c < kLanes ? a.columns - c : kLanes;
            F32 y = broadcast(0.0F);
            if (!empty) y = canonical_nan(divide(load(output + c), divisor) + broadcast(0.0F));
            store_n(out + c, y, n);
        }
    }
}

}  // namespace headlong::HEADLONG_ISA
