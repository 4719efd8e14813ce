// A model's forward passes as rows of a benchmark: a prompt, or decode steps from a depth on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <headlong/model.hpp>

#include "engine/decoder_config.hpp"
#include "tools/bench/workload.hpp"

namespace headlong::tools {

struct ModelRun {
    bool prefill = false;
    std::int64_t length = 0;  ///< tokens of the prompt; or keys that the first decode step sees, its own among them
    std::int64_t steps = 1;   ///< decode steps of one repetition
    KvTypes kv = {};          ///< of the cache
    std::optional<WeightType> weights = {};  ///< empty: as the file stores them
};

/// `model` makes the model when the first workload needs it, and is called again by the others: it keeps what it made.
/// `name` is what rows call it. Throws InvalidArgument if the run exceeds the model's positions, OutOfMemory if its
/// cache exceeds the memory that is available.
PlannedWorkload plan_model(const ModelRun& run, const DecoderConfig& config, const std::string& name,
                           std::function<std::shared_ptr<const Model>(Context&)> model);

}  // namespace headlong::tools
