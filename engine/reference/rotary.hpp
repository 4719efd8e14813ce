// Rotary position embedding in double precision, written from the papers' own statements: pairs as complex numbers,
// frequencies by how often a pair turns over the trained context.
#pragma once

#include <cstdint>
#include <vector>

#include <headlong/rotary.hpp>

#include "engine/reference/tensor.hpp"

namespace headlong::reference {

/// Radians per position of each pair. The options must be valid ones.
std::vector<double> rotary_frequencies(const RotaryOptions& options);

/// What cosine and sine are multiplied by.
double rotary_attention_factor(const RotaryOptions& options);

/// rows [heads, n, head_dim], row i of every head at positions[i].
Tensor rotate(const RotaryOptions& options, const Tensor& rows, const std::vector<std::int64_t>& positions);

/// The same with tables [entries, rotary_dim / 2]; row i uses entry positions[i].
Tensor rotate(const Tensor& cosine, const Tensor& sine, RotaryPairing pairing, const Tensor& rows,
              const std::vector<std::int64_t>& positions);

}  // namespace headlong::reference
