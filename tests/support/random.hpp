// Random numbers that are the same on every platform, so that a seed printed by a failing test replays it anywhere.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace headlong::test {

/// The seed of a test: HEADLONG_SEED if it is set, otherwise `usual`.
inline std::uint64_t seed_or(std::uint64_t usual) {
    const char* text = std::getenv("HEADLONG_SEED");
    return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 0) : usual;
}

/// mt19937_64 is specified exactly; the standard's distributions and the C library's logarithm are not, so the
/// transforms are made of integer arithmetic here.
class Random {
  public:
    explicit Random(std::uint64_t seed) : seed_(seed), engine_(seed) {}

    std::uint64_t seed() const noexcept { return seed_; }
    std::uint64_t bits() { return engine_(); }

    /// In [0, 1), a multiple of 2^-53.
    double uniform() { return static_cast<double>(bits() >> 11U) * 0x1p-53; }
    double uniform(double low, double high) { return low + (high - low) * uniform(); }
    bool chance(double probability) { return uniform() < probability; }

    /// In [low, high], both included. The bias of the remainder is below 2^-40 for the ranges of tests.
    std::int64_t integer(std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
    }

    /// Mean 0, variance 1, in (-6, 6): the sum of twelve uniform numbers less 6 (Irwin-Hall), which is exact.
    double normal() {
        std::uint64_t sum = 0;
        for (int i = 0; i < 6; ++i) {
            const std::uint64_t two = bits();
            sum += (two >> 32U) + (two & 0xFFFFFFFFU);
        }
        return static_cast<double>(sum) * 0x1p-32 - 6.0;
    }
    float normal_f32() { return static_cast<float>(normal()); }

    template <typename T>
    const T& pick(const std::vector<T>& choices) {
        return choices[static_cast<std::size_t>(bits() % choices.size())];
    }

    template <typename T>
    void shuffle(T& sequence) {
        for (std::size_t i = sequence.size(); i > 1; --i) {
            std::swap(sequence[i - 1], sequence[static_cast<std::size_t>(bits() % i)]);
        }
    }

  private:
    std::uint64_t seed_;
    std::mt19937_64 engine_;
};

}  // namespace headlong::test

/// Adds the seed to every failure in this scope.
#define HEADLONG_TRACE_SEED(random) SCOPED_TRACE("HEADLONG_SEED=" + std::to_string((random).seed()))
