// The attention operator in double precision, written to be obviously right: one row at a time, with the whole row of
// scores in memory. Tools and tests measure the engine against it; the engine itself never calls it.
//
//     s_j   = scale * dot(q_i, k_j)
//     s_j   = cap * tanh(s_j / cap)                 softcap, before any mask or bias
//     s_j  -= slope[h] * |p_i - j|                  ALiBi; p_i = i + offset is the query's position
//     s_j  += mask[i, j]                            float mask
//     w     = softmax over the allowed j            a sink logit joins the maximum and the denominator once
//     o_i   = sum_j w_j * v_j,   lse_i = log(sum_j exp(s_j))
//
// What is not allowed is never read: a NaN there reaches nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <headlong/attention.hpp>

#include "engine/reference/tensor.hpp"

namespace headlong::reference {

/// Which matrix of scores to return beside the output (ONNX qk_matmul_output_mode).
enum class Scores : std::uint8_t {
    scaled,      ///< 0: scale * q k^T, of all pairs
    softcapped,  ///< 1: after softcap, of all pairs
    masked,      ///< 2: after ALiBi and masks; -infinity where not allowed
    weights,     ///< 3: after softmax; 0 where not allowed
};

/// Every feature of the operator. Vectors that are empty are off.
struct AttentionOptions {
    std::optional<double> scale;  ///< 1 / sqrt(head_dim) if absent
    bool causal = false;
    Alignment alignment = Alignment::bottom_right;  ///< counts from kv_lengths[b] where that is given
    std::int64_t offset = 0;                        ///< with Alignment::offset
    std::vector<std::int64_t> batch_offsets;        ///< with Alignment::offset: one per sequence, instead of `offset`
    std::int64_t window_left = -1;                  ///< p - left <= j; -1 = unbounded
    std::int64_t window_right = -1;                 ///< j <= p + right; -1 = unbounded
    double softcap = 0.0;                           ///< 0 = off
    std::vector<double> alibi_slopes;               ///< one per query head
    std::optional<Mask> mask;
    std::vector<double> sink_logits;       ///< one per query head
    std::vector<std::int64_t> kv_lengths;  ///< one per sequence: keys from there on are not allowed
    std::optional<Scores> scores;          ///< also return this matrix
};

/// The same options as the library's, which says "not causal" by an absent value: `causal_by_default` is what that
/// means (false for plain tensors, true with a cache).
AttentionOptions widen(const headlong::AttentionOptions& options, bool causal_by_default = false);

/// What float32 errors scale with.
struct Magnitudes {
    double score = 0.0;  ///< largest finite |scale * q k| before softcap and mask, over allowed pairs
    double terms = 0.0;  ///< largest finite |scale| * sum over d of |q_d k_d|, over the same pairs
    double value = 0.0;  ///< largest finite |v| over rows that some query sees
    /// What errors of codes scale with: largest finite |scale| * sum over d of largest |q| of d's group * |k_d|, over
    /// the same pairs. A group is 64 elements of the head dim.
    double code_terms = 0.0;
    /// With ALiBi or a float mask, else 0: the largest sum over a row of weight * (|scaled| + |ALiBi's term| + |mask|).
    /// The score that is rounded is then the biased one. A rounding matters as much as its key weighs: a key that the
    /// bias sends to -1e30 is off by 1e23 and weighs nothing.
    double biased = 0.0;
};

struct AttentionResult {
    Tensor output;  ///< [batch, heads, q_len, value_dim]
    Tensor lse;     ///< [batch, heads, q_len]
    Tensor scores;  ///< [batch, heads, q_len, kv_len] if options.scores
    Magnitudes magnitudes;
};

/// query [batch, heads, q_len, head_dim], key [batch, kv_heads, kv_len, head_dim],
/// value [batch, kv_heads, kv_len, value_dim]. Throws InvalidArgument where the shapes disagree.
AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionOptions& options = {});

/// How far a float32 implementation may be from the reference: max(1e-5, 8 * 2^-24 * max|score| * max|value|), where
/// the score's magnitude is `score`, or `biased` where that is larger. (A softcap needs no more: it makes scores and
/// their errors smaller, and adds a few roundings of the capped score.)
double output_tolerance(const Magnitudes& magnitudes);
/// The same for lse: max(1e-5, 8 * 2^-24 * terms), or `biased` for `terms` where that is larger. A score's error
/// reaches lse in full, and grows with the terms of the product, which may be much larger than the score: with few keys
/// the largest score says nothing about them.
double lse_tolerance(const Magnitudes& magnitudes);

/// How far an output may be from the reference that is evaluated on what caches of int8 or int4 hold (either the keys
/// or the values, or both), where queries and weights have 15 bits: the root mean square of a call's errors may be
/// 1.5e-4 * max(1, max|score| / 8) of the output's, one error ten times that, and the float32 bound comes on top.
struct CodesTolerance {
    double element;
    double root_mean_square;
};
CodesTolerance codes_output_tolerance(const AttentionResult& result);
/// For lse where keys are of int8 or int4 (values do not matter to it). A query has codes of 15 bits: an element of it
/// is wrong by at most half of the 127 * 254th part of the largest one of its group, and a score, by which lse moves at
/// most as much, by the `code_terms` of that. The float32 bound comes on top.
double codes_lse_tolerance(const Magnitudes& magnitudes);

/// Partial results over disjoint keys: output [..., value_dim] and lse [...].
struct State {
    Tensor output;
    Tensor lse;
};

/// l = log(e^l1 + e^l2), o = o1 e^(l1-l) + o2 e^(l2-l); (0, -infinity) is the empty state.
State merge(const State& first, const State& second);

/// With n the largest power of two <= heads: 2^(-8(h+1)/n) for h < n, 2^(-4(2(h-n)+1)/n) beyond.
std::vector<double> alibi_slopes(std::int64_t heads);

/// The window_left of a Hugging Face or ONNX Runtime sliding_window, which counts the query's own position.
std::int64_t window_left_of_sliding_window(std::int64_t sliding_window);

}  // namespace headlong::reference
