// The softmax of one span. Compiled per instruction set.
#pragma once

#include "kernels/exp2-inl.hpp"
#include "kernels/kernel_table.hpp"
#include "kernels/reduce-inl.hpp"

namespace headlong::HEADLONG_ISA {

inline constexpr float kInfinity = compiler::kInfinity;

/// The lanes of register v that the row sees, as [begin, end) in 0..kLanes; end <= begin: none.
struct Lanes {
    std::uint32_t begin;
    std::uint32_t end;
};
/// The row sees all of the panels from `token` on.
HEADLONG_INLINE bool is_whole(kernels::TokenRange range, std::size_t token, std::size_t panels = 1) noexcept {
    return range.begin <= token && token + panels * 16 <= range.end;
}

/// Panels whose exponentials are computed side by side: at least 2 registers. 4 would spill where there are 16 in all.
inline constexpr std::size_t kChainPanels = kPanelVectors < 2 ? 2 : 1;

/// exp2(score - base) in place for whole panels, added to the sums in the order of the panels.
template <std::size_t Panels>
HEADLONG_INLINE void weights_of(float* scores, F32 base, F32 (&sums)[kPanelVectors]) noexcept {
    F32 weights[Panels * kPanelVectors];
    HEADLONG_UNROLL for (std::size_t v = 0; v < Panels * kPanelVectors; ++v) weights[v] =
        load(scores + v * kLanes) - base;
    exp2(weights);
    HEADLONG_UNROLL for (std::size_t v = 0; v < Panels * kPanelVectors; ++v) {
        sums[v % kPanelVectors] = sums[v % kPanelVectors] + weights[v];
        store(scores + v * kLanes, weights[v]);
    }
}
HEADLONG_INLINE Lanes lanes_of(kernels::TokenRange range, std::size_t first_token) noexcept {
    const auto first = static_cast<std::uint32_t>(first_token);
    const auto clamp = [first](std::uint32_t token) noexcept -> std::uint32_t {
        if (token <= first) return 0;
        return token - first < kLanes ? token - first : static_cast<std::uint32_t>(kLanes);
    };
    return {clamp(range.begin), clamp(range.end)};
}

/// The largest score of the row's range; NaN if all others are -infinity and one is NaN.
HEADLONG_INLINE float range_maximum(const float* scores, kernels::TokenRange range) noexcept {
    F32 largest[kPanelVectors];
    HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) largest[v] = broadcast(-kInfinity);
    for (std::size_t token = range.begin / 16 * 16; token < range.end; token += 16) {
        const bool whole = is_whole(range, token);
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
            F32 s = load(scores + token + v * kLanes);
            if (!whole) {
                const Lanes lanes = lanes_of(range, token + v * kLanes);
                s = select_lanes(lanes.begin, lanes.end, s, broadcast(-kInfinity));
            }
            largest[v] = max(largest[v], s);
        }
    }
    HEADLONG_UNROLL for (std::size_t v = 1; v < kPanelVectors; ++v) largest[0] = max(largest[0], largest[v]);
    float lanes[kLanes];
    store(lanes, largest[0]);
    float result = lanes[0];
    for (std::size_t i = 1; i < kLanes; ++i) result = lanes[i] > result ? lanes[i] : result;
    if (result > -kInfinity) return result;
    // All -infinity, or a maximum dropped a NaN (x86 returns the second operand). Only a look at each score tells.
    for (std::size_t token = range.begin; token < range.end; ++token) {
        if (scores[token] != scores[token]) return compiler::kNan;
    }
    return result;
}

/// Applies the rules to one row. Works on whole panels: lanes outside the range get values that nobody reads.
inline void adjust_row(float* scores, kernels::TokenRange range, const kernels::ScoreRules& rules,
                       std::size_t row) noexcept {
    static constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F32 shift = broadcast(rules.shifts != nullptr ? rules.shifts[row] : 0.0F);
    const F32 softcap = broadcast(rules.softcap);
    const F32 inverse_softcap = divide(broadcast(1.0F), softcap);
    const F32 minus_slope = broadcast(rules.slopes != nullptr ? -rules.slopes[row] : 0.0F);
    const F32 position = broadcast(rules.slopes != nullptr ? rules.positions[row] : 0.0F);
    const float* bias = rules.bias != nullptr ? rules.bias[row] : nullptr;
    if (range.begin >= range.end) return;
    for (std::size_t token = range.begin / 16 * 16; token < range.end; token += kLanes) {
        F32 s = load(scores + token);
        if (rules.shifts != nullptr) s = s + shift;
        if (rules.softcap != 0.0F) s = softcap * tanh(s * inverse_softcap);
        if (rules.slopes != nullptr) {
            const F32 at = broadcast(static_cast<float>(token / 16 * 16)) + load(kLaneNumbers + token % 16);
            s = fma(minus_slope, absolute(position - at), s);
        }
        if (bias != nullptr) {
            const F32 b = load(bias + token);
            s = select_below(b, -__FLT_MAX__, b, s + b);
        }
        store(scores + token, s);
    }
}

inline void adjust_scores(const kernels::AdjustScores& a) noexcept {
    for (std::size_t r = 0; r < a.row_count; ++r) {
        adjust_row(a.scores + r * a.score_stride, a.ranges[r], a.rules, r);
    }
}

inline void softmax_span(const kernels::SoftmaxSpan& a) noexcept {
    const bool adjusts =
        a.rules.shifts != nullptr || a.rules.softcap != 0.0F || a.rules.slopes != nullptr || a.rules.bias != nullptr;
    for (std::size_t r = 0; r < a.row_count; ++r) {
        float* scores = a.scores + r * a.score_stride;
        const float* bias = a.rules.bias != nullptr ? a.rules.bias[r] : nullptr;
        kernels::TokenRange range = a.ranges[r];
        float maximum = -kInfinity;
        if (adjusts) adjust_row(scores, range, a.rules, r);
        if (range.begin < range.end) maximum = range_maximum(scores, range);
        if (maximum == -kInfinity) range = {0, 0};  // the empty state: no token weighs anything

        const F32 base = broadcast(maximum);
        const F32 masked = broadcast(-0.0F);
        F32 sums[kPanelVectors];
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) sums[v] = broadcast(0.0F);
        const std::size_t begin = range.begin < range.end ? range.begin / 16 * 16 : a.last;
        for (std::size_t token = a.first; token < begin && token < a.last; token += kLanes)
            store(scores + token, masked);
        std::size_t token = begin;
        while (token < range.end) {
            if (bias == nullptr && is_whole(range, token, kChainPanels)) {
                weights_of<kChainPanels>(scores + token, base, sums);
                token += kChainPanels * 16;
                continue;
            }
            F32 weights[kPanelVectors];
            HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) weights[v] =
                load(scores + token + v * kLanes) - base;
            exp2(weights);
            HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
                const std::size_t at = token + v * kLanes;
                const Lanes lanes = lanes_of(range, at);
                if (bias != nullptr) weights[v] = select_below(load(bias + at), -__FLT_MAX__, masked, weights[v]);
                weights[v] = select_lanes(lanes.begin, lanes.end, weights[v], masked);
                sums[v] = sums[v] + weights[v];
                store(scores + at, weights[v]);
            }
            token += 16;
        }
        for (; token < a.last; token += kLanes) store(scores + token, masked);

        float partial[16];
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) store(partial + v * kLanes, sums[v]);
        a.max[r] = maximum;
        a.sum[r] = reduce_tree(partial);
    }
}

}  // namespace headlong::HEADLONG_ISA
