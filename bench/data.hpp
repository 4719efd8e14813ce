// What the suites share: numbers to compute with, and contexts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <headlong/context.hpp>

namespace headlong::bench {

/// In [-1, 1), the same in every run.
inline std::vector<float> random_floats(std::int64_t count) {
    std::vector<float> v(static_cast<std::size_t>(count));
    std::uint32_t x = 1;
    for (float& e : v) {
        x = x * 1664525U + 1013904223U;
        e = static_cast<float>(x >> 8U) * 0x1p-23F - 1.0F;
    }
    return v;
}

inline Context context_of(Isa isa, std::size_t threads) {
    ContextOptions options;
    options.isa = isa;
    options.threads = threads;
    return Context(options);
}

}  // namespace headlong::bench
