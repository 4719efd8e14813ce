// The floating-point mode of tasks: round to nearest, denormals kept, no traps, whatever the calling thread or the
// host's threads have set; their mode comes back when the scope ends.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#else
#include <cfenv>
#include <cstdint>
#endif

#include "kernels/compiler.hpp"

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
    FloatEnvironment() noexcept : saved_(compiler::float_control()) { compiler::set_float_control(0); }
    ~FloatEnvironment() { compiler::set_float_control(saved_); }

  private:
    std::uint64_t saved_;
#else
    FloatEnvironment() noexcept : saved_(std::fegetround()) { std::fesetround(FE_TONEAREST); }
    ~FloatEnvironment() { std::fesetround(saved_); }

  private:
    int saved_;
#endif
};

}  // namespace headlong
