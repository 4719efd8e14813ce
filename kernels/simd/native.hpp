// The vector layer of one instruction set: kernels include this and nothing else about SIMD. It defines, in the
// unit's own namespace headlong::<isa>:
//
//   F32            kLanes floats; + - * / as usual (xsimd, or the compiler's vectors in `generic`)
//   kPanelVectors  registers of one panel row of 16 floats
//   kTileRows      rows of a register tile, kTileVectors accumulators in all (the register plans: README.md)
//   load, store, broadcast, first_lane, fma, max, divide (correctly rounded: xsimd 8 estimates on NEON)
//   round_nearest  (x): to whole numbers, ties to even, for |x| < 2^22
//   exp2 pieces    nearest_power(x): x rounded to a whole exponent n in [-126, 127], and what scale(p, n) wants of it;
//                  scale(p, n): p * 2^n; of other x an exponent that makes no NaN of a finite x, and a scale that
//                  zero_below() hides; zero_below(x, limit, y): +0 where x < limit, else y (NaN keeps y)
//   select_lanes   (begin, end, inside, outside): `inside` in the lanes begin <= i < end
//   select_below   (x, limit, yes, no): `yes` where x < limit, else `no` (also where x is NaN)
//   select_bytes   (p, yes, no): `yes` in the lanes i where the byte p[i] is not 0
//   absolute, copy_sign(magnitude, sign)
//   widen_f16, widen_bf16  kLanes 16-bit floats from memory, exactly; narrow_f16: to memory, to nearest even
//   any_nan        whether a lane is NaN
//   canonical_nan  every NaN becomes 0x7fc00000
//   even_lanes, odd_lanes  (a, b): the even, the odd lanes of a followed by b
//   zip_low, zip_high      (a, b): a0 b0 a1 b1 ..., its first kLanes, and those that follow
//   load_n, store_n  the first n <= kLanes lanes; the rest are +0, or left alone in memory
//   I32, DotOperand, zero_i32, dot_ones   32-bit sums, and what their products are made of
//   dot_add        (sums, a, b): sums + the products of a's and b's 8-bit elements (widened where the set must), in
//                  the set's fastest way; kDotProducts of them. kDotFused: one instruction that multiplies and adds
//   broadcast_i32, add_i32, to_f32   on I32, signed; to_f32 rounds to nearest
//   load_i32, store_i32   sums in memory that floats are in otherwise
//   kCodeTileRows, kCodeTilePanels   the register tile of the kernel on key panels of codes
//   kLineParts     parts that a tile takes the lines of a panel in, one after the other through a whole group
//   kQuadSums      registers that the sums of one row and of a part of one panel take there
//   kQuadLatency   sums under way that hide the latency of adding to one
//   kCodeTerms     rows' codes are two terms of 8 bits (layout.hpp)
//   kCodeOffset<Quads>, add_line<Quads>   of lines of 1 quad (int8) or 2 (int4). (sums, line, panel_stride, rows,
//                  row_stride, part): sums + a part of a line of each panel times the quads of each row; strides in
//                  bytes
//   quad_totals    (sums, totals): those of one row and one panel's part, a column in each lane, kCodeOffset times the
//                  sum of the row's codes too much
//   store_row_quads  (p, first, second): whole numbers, the two terms of kLanes inputs, as the set's codes of a row
//   kPairTileRows, kPairTileVectors   the register tile of weights x value panels of codes
//   kPairCodeOffset<Pairs>, load_pair_codes<Pairs>, broadcast_pair, add_pairs   of lines of 1 pair of tokens (int8) or
//                  2 (int4). (line, pair, v): the codes of a pair for the columns of vector v; (p): a row's weights of
//                  a pair; (sum, weights, codes): sum + their products, kPairCodeOffset times the sum of the row's
//                  weights too much
//   store_weight_codes  (p, weights, sums): 16 weights in [0, 32768) rounded down, as 16 bits; sums + them, in any
//   lanes hide           what a register holds is no longer known to the compiler: nothing is folded or hoisted over it
//   transpose_16   16 strided rows of kTransposeColumns floats -> kTransposeColumns panel rows of 16
//
// The sets of a family share a header, and with it every instruction on floats: avx2 and avx2vnni, avx512 and
// avx512vnni, neon and neondot give the same bits. Only the integer dot products differ.
//
// What xsimd 8 lacks or gets wrong (fused multiply-add on AVX-512, NaN order of max, partial loads) is native here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/compiler.hpp"
#include "kernels/half.hpp"

// Adding it rounds a float under 2^22 to a whole number, and leaves that number + 127 (a float's exponent, biased) in
// the lowest bits of the sum: 1.5 * 2^23 + 127.
namespace headlong::HEADLONG_ISA {
inline constexpr float kExponentMagic = 12583039.0F;
}

#if defined(HEADLONG_ISA_AVX512) || defined(HEADLONG_ISA_AVX512VNNI)
#include "kernels/simd/native_avx512.hpp"
#elif defined(HEADLONG_ISA_AVX2) || defined(HEADLONG_ISA_AVX2VNNI)
#include "kernels/simd/native_avx2.hpp"
#elif defined(HEADLONG_ISA_NEON) || defined(HEADLONG_ISA_NEONDOT)
#include "kernels/simd/native_neon.hpp"
#elif defined(HEADLONG_ISA_GENERIC)
#include "kernels/simd/native_generic.hpp"
#else
#error "kernels are compiled once per instruction set: define HEADLONG_ISA and HEADLONG_ISA_<NAME>"
#endif

namespace headlong::HEADLONG_ISA {
inline constexpr std::size_t kPanelVectors = 16 / kLanes;
}
