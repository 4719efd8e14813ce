// When a call is to end before it is done.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <headlong/error.hpp>
#include <optional>
#include <stop_token>

namespace headlong {

/// Asked for by a stop token, or because time is up: once it is requested, it stays so. Thread-safe.
struct Interrupt {
    std::stop_token stop = {};
    std::optional<std::chrono::steady_clock::time_point> deadline = {};

    bool requested() const noexcept { return stop.stop_requested() || late(); }
    bool late() const noexcept { return deadline && std::chrono::steady_clock::now() >= *deadline; }

    /// Throws Cancelled, saying why.
    void check(const char* what) const {
        if (stop.stop_requested()) throw Cancelled(fmt::format("{}: the stop token asked to end the call", what));
        if (late()) throw Cancelled(fmt::format("{}: the deadline has passed", what));
    }
};

}  // namespace headlong
