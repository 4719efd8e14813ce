// A fuzzer is a function that takes any bytes, does with them what a hostile file or caller could, and ends the process
// if something that is promised does not hold. What the library throws as its own error is a refusal, and right.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>

#include <headlong/error.hpp>

namespace headlong::fuzz {

using Input = std::span<const std::byte>;

// One function a fuzzer, defined in <name>_fuzz.cpp. The list is CMakeLists.txt's.
#define HEADLONG_FUZZER(name) void name(Input input);
#include "fuzzers.inc"
#undef HEADLONG_FUZZER

/// Says what does not hold and ends the process, as a sanitizer would.
[[noreturn]] void fail(std::string_view what);

inline void require(bool holds, std::string_view what) {
    if (!holds) fail(what);
}

inline std::string_view text_of(Input bytes) noexcept {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Whether an operation was done, and not refused. Other exceptions than the library's own pass. A refusal has a
/// message of one line.
bool done(const std::function<void()>& operation);

}  // namespace headlong::fuzz
