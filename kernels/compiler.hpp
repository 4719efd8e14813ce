// What gcc and clang understand and the standard does not: the one header for it, which a port to another compiler
// rewrites (tests/check_portability.sh looks for others). Everything is forced inline, as all that kernels share with
// the engine must be.
#pragma once

#include <cstddef>
#include <cstdint>

#define HEADLONG_INLINE [[gnu::always_inline]] inline

// In front of a loop: written out in full, or left as it is.
#if defined(__clang__)
#define HEADLONG_UNROLL _Pragma("clang loop unroll(full)")
#define HEADLONG_KEEP_LOOP _Pragma("clang loop unroll(disable)")
#else
#define HEADLONG_UNROLL _Pragma("GCC unroll 64")
#define HEADLONG_KEEP_LOOP _Pragma("GCC unroll 1")
#endif

// HEADLONG_HIDE(file, x): what variable x holds is no longer known to the compiler, which keeps it in a register of
// that file: nothing is folded or hoisted over it.
#define HEADLONG_HIDE(file, x) asm volatile("" : "+" file(x))
#define HEADLONG_GENERAL_REGISTER "r"
#define HEADLONG_MEMORY "m"
#if defined(__aarch64__)
#define HEADLONG_VECTOR_REGISTER "w"
#else
#define HEADLONG_VECTOR_REGISTER "x"
#define HEADLONG_AVX512_REGISTER "v"  // 16 to 31 among them
// sum += x, of 32-bit lanes, in the register of sum: gcc would keep the old and the new one side by side.
#define HEADLONG_ADD_IN_PLACE(file, sum, x) asm("vpaddd %1, %0, %0" : "+" file(sum) : file(x))
#endif

// A vector type of 16 bytes: + - * / and comparisons lane by lane, [] for a lane.
#define HEADLONG_VECTOR_OF(element) element __attribute__((vector_size(16)))
#define HEADLONG_CONVERT_VECTOR(x, vector) __builtin_convertvector(x, vector)

namespace headlong::compiler {

// Of the standard's, constants and functions, debug builds would leave symbols that units share.
inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kNan = __builtin_nanf("");
HEADLONG_INLINE float square_root(float x) noexcept { return __builtin_sqrtf(x); }

/// Asks for the cache line of an address, which need not be one that can be read.
HEADLONG_INLINE void prefetch(const void* address) noexcept { __builtin_prefetch(address); }
HEADLONG_INLINE void prefetch_to_write(const void* address) noexcept { __builtin_prefetch(address, 1); }
HEADLONG_INLINE void prefetch_to_second_level(const void* address) noexcept { __builtin_prefetch(address, 0, 2); }

/// a * b, a + b into `result`; true if it does not fit.
template <class T>
HEADLONG_INLINE constexpr bool mul_overflows(T a, T b, T& result) noexcept {
    return __builtin_mul_overflow(a, b, &result);
}
template <class T>
HEADLONG_INLINE constexpr bool add_overflows(T a, T b, T& result) noexcept {
    return __builtin_add_overflow(a, b, &result);
}

#if defined(__x86_64__) || defined(__i386__)
/// Which registers the operating system saves (XGETBV, register 0); only where CPUID says OSXSAVE.
HEADLONG_INLINE std::uint64_t saved_register_files() noexcept {
    std::uint32_t low = 0;
    std::uint32_t high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low | std::uint64_t{high} << 32U;
}
#elif defined(__aarch64__)
HEADLONG_INLINE std::uint64_t float_control() noexcept {
    std::uint64_t value = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}
HEADLONG_INLINE void set_float_control(std::uint64_t value) noexcept {
    __asm__ volatile("msr fpcr, %0" : : "r"(value));
}
#endif

}  // namespace headlong::compiler
