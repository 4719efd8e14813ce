// What `headlong profile` found out, and how it is printed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/measure/statistics.hpp"

namespace headlong::tools {

/// One kind of operation.
struct Part {
    std::string kind;
    std::uint64_t calls = 0;
    double seconds = 0.0;  ///< without waiting
    std::uint64_t flops = 0;
    std::uint64_t bytes = 0;
    double waiting_seconds = 0.0;  ///< in its own loops

    /// What rates are over: threads that wait for the slowest one are part of what an operation costs.
    double wall_seconds() const noexcept { return seconds + waiting_seconds; }
};

struct LayerParts {
    std::int64_t layer = -1;  ///< -1 = what belongs to none
    std::vector<Part> parts;
};

struct PhaseReport {
    std::string name;
    std::int64_t tokens = 0;
    double wall_seconds = 0.0;
    std::vector<Part> parts;         ///< the last one is waiting: the sum of all waiting_seconds, as its seconds
    std::vector<LayerParts> layers;  ///< of the same kinds
    double clock_before = 0.0;       ///< Hz
    double clock_after = 0.0;
    bool throttled = false;  ///< one of them is under 0.9 of the best clock seen
};

struct ProfileReport {
    std::string model;
    std::string isa;
    std::size_t threads = 0;
    std::int64_t prompt_tokens = 0;
    std::int64_t prefill_chunk = 0;
    std::int64_t decode_steps = 0;
    double limit_flops = 0.0;  ///< FLOP/s of all threads
    double limit_bytes = 0.0;  ///< bytes/s of all threads
    double best_clock = 0.0;   ///< Hz
    std::size_t read_buffer_bytes = 0;
    Samples step_seconds;          ///< of each decode step
    std::uint64_t peak_bytes = 0;  ///< resident, of loading and the warm-up, without the instruments
    std::string kv_type;
    std::size_t kv_used_bytes = 0;
    std::size_t kv_reserved_bytes = 0;
    std::size_t scratch_bytes = 0;
    std::size_t weight_bytes = 0;
    PhaseReport prefill;
    PhaseReport decode;
};

nlohmann::ordered_json to_json(const ProfileReport& report, bool layers);

/// Aligned tables.
std::string to_text(const ProfileReport& report, bool layers);

}  // namespace headlong::tools
