// A decoder in double precision, written from the description alone and for nobody's speed: what a model's logits must
// be where there are no golden ones. It has its own idea of where weights lie in a file, and shares no arithmetic with
// the engine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/decoder_config.hpp"
#include "engine/weight_files.hpp"

namespace headlong::reference {

/// Logits [tokens, vocab_size] of tokens that stand at the positions 0, 1, ... of a text that a cache of `capacity`
/// tokens holds (0: max_positions). The files hold all tensors of the description.
std::vector<double> decoder_logits(const DecoderConfig& config, const WeightFiles& files,
                                   std::span<const std::int32_t> tokens, std::int64_t capacity = 0);

}  // namespace headlong::reference
