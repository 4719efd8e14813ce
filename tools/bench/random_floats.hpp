// Numbers to compute with, the same in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace headlong::tools {

/// A linear congruential generator (Knuth 1997, TAOCP 2, 3.3.4): quick, and random enough for timings and samples.
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint32_t next() noexcept {
        state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
        return static_cast<std::uint32_t>(state_ >> 32U);
    }
    /// In [0, bound), bound below 2^32.
    std::size_t below(std::size_t bound) noexcept { return static_cast<std::size_t>(next()) * bound >> 32U; }

    /// In [-scale, scale).
    std::vector<float> floats(std::size_t count, float scale = 1.0F) {
        std::vector<float> result(count);
        for (float& x : result) x = (static_cast<float>(next() >> 8U) * 0x1p-23F - 1.0F) * scale;
        return result;
    }

  private:
    std::uint64_t state_;
};

}  // namespace headlong::tools
