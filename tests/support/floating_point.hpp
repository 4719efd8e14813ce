// A floating-point mode that a caller may have set, and that must not reach a result.
#pragma once

#include <cstdint>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace headlong::test {

/// Rounding to zero, denormals flushed, for a scope.
class OddFloatingPoint {
  public:
#if defined(__SSE__)
    OddFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(kOdd); }
    ~OddFloatingPoint() { _mm_setcsr(saved_); }
    static bool is_set() { return (_mm_getcsr() & ~0x3FU) == kOdd; }  // the flags may differ, the mode may not

  private:
    static constexpr unsigned kOdd = 0xFFC0U;
    unsigned saved_;
#elif defined(__aarch64__)
    OddFloatingPoint() : saved_(get()) { set(kOdd); }
    ~OddFloatingPoint() { set(saved_); }
    static bool is_set() { return get() == kOdd; }

  private:
    static constexpr std::uint64_t kOdd = std::uint64_t{1} << 24U | std::uint64_t{3} << 22U;
    static std::uint64_t get() {
        std::uint64_t value = 0;
        __asm__ volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void set(std::uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
    std::uint64_t saved_;
#endif
  public:
    OddFloatingPoint(const OddFloatingPoint&) = delete;
    OddFloatingPoint& operator=(const OddFloatingPoint&) = delete;
};

}  // namespace headlong::test
