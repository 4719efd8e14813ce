// The kernels of one instruction set. Compiled once per set, with that set's flags, into a namespace of its own; no
// other file may be compiled with them. Standard containers and algorithms stay out: their inline functions would be
// shared with the baseline by the linker, and might carry this unit's instructions there.
#include "kernels/kernel_table.hpp"

#include "kernels/dot_codes-inl.hpp"
#include "kernels/dot_panels-inl.hpp"
#include "kernels/limits-inl.hpp"
#include "kernels/merge-inl.hpp"
#include "kernels/pack-inl.hpp"
#include "kernels/quantise-inl.hpp"
#include "kernels/rows-inl.hpp"
#include "kernels/softmax_span-inl.hpp"
#include "kernels/weighted_codes-inl.hpp"
#include "kernels/weighted_rows-inl.hpp"

#define HEADLONG_NAME_OF_2(isa) #isa
#define HEADLONG_NAME_OF(isa) HEADLONG_NAME_OF_2(isa)

namespace headlong::HEADLONG_ISA {

inline void exp2_array(const float* x, float* y, std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; i += kLanes) {
        const std::size_t n = count - i < kLanes ? count - i : kLanes;
        store_n(y + i, exp2(load_n(x + i, n)), n);
    }
}

extern const kernels::KernelTable table;
constinit const kernels::KernelTable table{
    .name = HEADLONG_NAME_OF(HEADLONG_ISA),
    .dot_panels = dot_panels,
    .adjust_scores = adjust_scores,
    .softmax_span = softmax_span,
    .weighted_rows = weighted_rows,
    .pack_panels = pack_panels,
    .pack_values = pack_values,
    .widen = widen,
    .merge = merge,
    .finish = finish,
    .scale_rows = scale_rows,
    .store_rows = store_rows,
    .mask_row = mask_row,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .rotate = rotate,
    .activate = activate,
    .add_scaled = add_scaled,
    .hadamard = hadamard,
    .quantise_panels = quantise_panels,
    .quantise_rows = quantise_rows,
    .dot_codes = dot_codes,
    .quantise_keys = quantise_keys,
    .quantise_values = quantise_values,
    .weighted_codes = weighted_codes,
    .code_terms = kCodeTerms,
    .exp2 = exp2_array,
    .fma_loop = fma_loop,
    .dot_loop = dot_loop,
    .read_loop = read_loop,
    .fma_sums = kFmaSums,
    .fma_flops = kFmaSums * kLanes * 2,
    .dot_sums = kDotSums,
    .dot_ops = kDotSums * kDotProducts * 2,
};

}  // namespace headlong::HEADLONG_ISA
