// What verify says of one case on one instruction set.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include <headlong/context.hpp>
#include <headlong/kv_cache.hpp>

namespace headlong::tools {

enum class Status { passed, failed, skipped };

/// "passed", "failed" or "skipped".
constexpr const char* to_string(Status status) noexcept {
    switch (status) {
        case Status::passed:
            return "passed";
        case Status::failed:
            return "failed";
        case Status::skipped:
            break;
    }
    return "skipped";
}

struct Outcome {
    Status status = Status::passed;
    std::optional<double> max_abs_err;  ///< over finite elements; absent if nothing was compared
    std::string why;                    ///< one line; empty if passed
    double seconds = 0.0;               ///< of one computation; 0 = not timed
    double flops = 0.0;                 ///< of that computation
};

inline Outcome failed(std::string why) { return {.status = Status::failed, .max_abs_err = {}, .why = std::move(why)}; }
inline Outcome skipped(std::string why) {
    return {.status = Status::skipped, .max_abs_err = {}, .why = std::move(why)};
}

/// Something to verify. Running it changes nothing, so that it can be run with several contexts. Where caches are of
/// other types than f32, what is expected is what the reference makes of the rows that they hold.
struct Case {
    std::string name;
    std::function<Outcome(Context&, const KvTypes&)> run;
};

}  // namespace headlong::tools
