// What fuzzers compute with.
#pragma once

#include <array>
#include <span>

#include <headlong/context.hpp>

namespace headlong::fuzz {

/// Of one thread each: with the kernels that sanitizers watch, and with this machine's best.
inline std::span<Context* const> contexts() {
    static Context generic({.isa = Isa::generic, .threads = 1});
    static Context best({.threads = 1});
    static const std::array<Context*, 2> both{&generic, &best};
    return both;
}

}  // namespace headlong::fuzz
