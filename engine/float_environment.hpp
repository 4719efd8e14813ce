// The floating-point mode of tasks: round to nearest, denormals kept, no traps, whatever the calling thread or the
// host's threads have set; their mode comes back when the scope ends.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#else
#include <cfenv>
#include <cstdint>
#endif

namespace headlong {

class FloatEnvironment {
  public:
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

#if defined(__SSE__)
    FloatEnvironment() noexcept : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80U); }  // the processor's state at reset
    ~FloatEnvironment() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#elif defined(__aarch64__)
    FloatEnvironment() noexcept {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        set(0);
    }
    ~FloatEnvironment() { set(saved_); }

  private:
    static void set(std::uint64_t value) noexcept { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
    std::uint64_t saved_ = 0;
#else
    FloatEnvironment() noexcept : saved_(std::fegetround()) { std::fesetround(FE_TONEAREST); }
    ~FloatEnvironment() { std::fesetround(saved_); }

  private:
    int saved_;
#endif
};

}  // namespace headlong
