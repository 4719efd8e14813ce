// Loops that find a processor's limits in another way than the engine's do (kernels/limits-inl.hpp), to check those:
// instructions are written by hand, in as many independent sums as there are registers; sums of integers are read.
// Each returns a number that is known beforehand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <headlong/context.hpp>

namespace headlong::bench {

struct OwnLoops {
    /// Multiply-adds from zero in many sums; returns what each holds at the end, NaN unless all are the same.
    float (*fma)(std::size_t rounds) noexcept;
    float (*fma_result)(std::size_t rounds) noexcept;
    std::size_t flops;  ///< a round

    /// Sums of products 3 * 5 of 8, 16 or 32 bits, mod 2^32.
    std::uint32_t (*dot)(std::size_t rounds) noexcept;
    std::size_t products;  ///< a round

    /// The sum of `count` integers, a multiple of 64 of them in 64-byte-aligned memory, `passes` times over. Lines are
    /// asked for `ahead` bytes before they are read, if that is not 0.
    std::uint64_t (*read)(const std::uint64_t* data, std::size_t count, std::size_t passes, std::size_t ahead) noexcept;
};

#if defined(__clang__)
#define OWN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OWN_UNROLL _Pragma("GCC unroll 64")
#endif

// What own_loops-inl.hpp makes the loops of a set from:
//   OWN_FMA         %0 = %0 * %1 + %2 with 1/4 and 3, which ends at 4, or where OWN_ACCUMULATES is 1, %0 += %1 * %2
//   OWN_DOT         %0 += products of %3 and %4, which hold OWN_ELEMENTs; %1 and %2 are to spare
//   OWN_*_SUMS      as many as leave registers for the other operands
#if defined(__aarch64__)

#define OWN_SET own_generic
#define OWN_TARGET
#define OWN_BYTES 16
#define OWN_REGISTER "w"
#define OWN_ACCUMULATES 0
#define OWN_FMA_SUMS 28
#define OWN_FMA "fmul %0.4s, %0.4s, %1.4s\n\tfadd %0.4s, %0.4s, %2.4s"
#define OWN_ELEMENT std::int32_t
#define OWN_DOT_SUMS 24
#define OWN_DOT "mla %0.4s, %3.4s, %4.4s"
#include "bench/own_loops-inl.hpp"

#define OWN_SET own_neon
#define OWN_TARGET
#define OWN_BYTES 16
#define OWN_REGISTER "w"
#define OWN_ACCUMULATES 1
#define OWN_FMA_SUMS 28
#define OWN_FMA "fmla %0.4s, %1.4s, %2.4s"
#define OWN_ELEMENT std::int8_t
#define OWN_DOT_SUMS 24
#define OWN_DOT                        \
    "smull %1.8h, %3.8b, %4.8b\n\t"    \
    "smull2 %2.8h, %3.16b, %4.16b\n\t" \
    "sadalp %0.4s, %1.8h\n\t"          \
    "sadalp %0.4s, %2.8h"
#include "bench/own_loops-inl.hpp"

#define OWN_SET own_neondot
#define OWN_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define OWN_BYTES 16
#define OWN_REGISTER "w"
#define OWN_ACCUMULATES 1
#define OWN_FMA_SUMS 28
#define OWN_FMA "fmla %0.4s, %1.4s, %2.4s"
#define OWN_ELEMENT std::int8_t
#define OWN_DOT_SUMS 24
#define OWN_DOT "sdot %0.4s, %3.16b, %4.16b"
#include "bench/own_loops-inl.hpp"

#else

#define OWN_SET own_generic
#define OWN_TARGET
#define OWN_BYTES 16
#define OWN_REGISTER "x"
#define OWN_ACCUMULATES 0
#define OWN_FMA_SUMS 14
#define OWN_FMA "mulps %1, %0\n\taddps %2, %0"
#define OWN_ELEMENT std::int32_t
#define OWN_DOT_SUMS 10
#define OWN_DOT             \
    "movdqa %3, %1\n\t"     \
    "movdqa %3, %2\n\t"     \
    "pmuludq %4, %1\n\t"    \
    "psrlq $32, %2\n\t"     \
    "pmuludq %4, %2\n\t"    \
    "pshufd $8, %1, %1\n\t" \
    "pshufd $8, %2, %2\n\t" \
    "punpckldq %2, %1\n\t"  \
    "paddd %1, %0"  // SSE2 multiplies every other lane
#include "bench/own_loops-inl.hpp"

#define OWN_SET own_avx2
#define OWN_TARGET __attribute__((target("avx2,fma")))
#define OWN_BYTES 32
#define OWN_REGISTER "x"
#define OWN_ACCUMULATES 0
#define OWN_FMA_SUMS 14
#define OWN_FMA "vfmadd213ps %2, %1, %0"
#define OWN_ELEMENT std::int16_t
#define OWN_DOT_SUMS 12
#define OWN_DOT "vpmaddwd %4, %3, %1\n\tvpaddd %1, %0, %0"
#include "bench/own_loops-inl.hpp"

#define OWN_SET own_avx2vnni
#define OWN_TARGET __attribute__((target("avx2,fma,avxvnni")))
#define OWN_BYTES 32
#define OWN_REGISTER "x"
#define OWN_ACCUMULATES 0
#define OWN_FMA_SUMS 14
#define OWN_FMA "vfmadd213ps %2, %1, %0"
#define OWN_ELEMENT std::int8_t
#define OWN_DOT_SUMS 12
#define OWN_DOT "%{vex%} vpdpbusd %4, %3, %0"
#include "bench/own_loops-inl.hpp"

#define OWN_SET own_avx512
#define OWN_TARGET __attribute__((target("avx512f,avx512bw")))
#define OWN_BYTES 64
#define OWN_REGISTER "v"
#define OWN_ACCUMULATES 0
#define OWN_FMA_SUMS 28
#define OWN_FMA "vfmadd213ps %2, %1, %0"
#define OWN_ELEMENT std::int16_t
#define OWN_DOT_SUMS 24
#define OWN_DOT "vpmaddwd %4, %3, %1\n\tvpaddd %1, %0, %0"
#include "bench/own_loops-inl.hpp"

#define OWN_SET own_avx512vnni
#define OWN_TARGET __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define OWN_BYTES 64
#define OWN_REGISTER "v"
#define OWN_ACCUMULATES 0
#define OWN_FMA_SUMS 28
#define OWN_FMA "vfmadd213ps %2, %1, %0"
#define OWN_ELEMENT std::int8_t
#define OWN_DOT_SUMS 24
#define OWN_DOT "vpdpbusd %4, %3, %0"
#include "bench/own_loops-inl.hpp"

#endif

/// Those of a set, or null.
inline const OwnLoops* own_loops_of(Isa isa) noexcept {
    switch (isa) {
        case Isa::generic:
            return &own_generic::loops;
#if defined(__aarch64__)
        case Isa::neon:
            return &own_neon::loops;
        case Isa::neondot:
            return &own_neondot::loops;
#else
        case Isa::avx2:
            return &own_avx2::loops;
        case Isa::avx2vnni:
            return &own_avx2vnni::loops;
        case Isa::avx512:
            return &own_avx512::loops;
        case Isa::avx512vnni:
            return &own_avx512vnni::loops;
#endif
        default:
            return nullptr;
    }
}

}  // namespace headlong::bench
