// Floats to codes: weights of a linear layer, rows that meet codes, and the keys and values of a cache. Products and
// differences are rounded one by one, so that every set finds the same codes. Compiled per instruction set.
//
// What shares a scale is scale * q; a row's input is factor * C with C = 254 A + B in 15 bits: A rounds the input to 8
// bits, B rounds what is left to 8 more (layout.hpp).
#pragma once

#include "kernels/pack-inl.hpp"

namespace headlong::HEADLONG_ISA {

// What shares a scale and whose largest magnitude is smaller is zero: the scale's inverse would come near the end of
// the range.
inline constexpr float kLeastMagnitude = 0x1p-100F;

/// One group of one panel: 16 scales, then quads of codes.
HEADLONG_INLINE void quantise_group(const float* panel, std::size_t inputs, std::uint8_t* out) noexcept {
    F32 largest[kPanelVectors];
    F32 nonfinite[kPanelVectors];  // NaN where a weight is: x - x is 0 otherwise. A maximum may drop a NaN
    HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) largest[v] = nonfinite[v] = broadcast(0.0F);
    for (std::size_t k = 0; k < inputs; ++k) {
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
            const F32 x = load(panel + k * 16 + v * kLanes);
            largest[v] = max(largest[v], absolute(x));
            nonfinite[v] = nonfinite[v] + (x - x);
        }
    }
    float magnitudes[16];
    float marks[16];
    HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
        store(magnitudes + v * kLanes, largest[v]);
        store(marks + v * kLanes, nonfinite[v]);
    }
    float scales[16];
    float inverses[16];
    for (std::size_t c = 0; c < 16; ++c) {
        const bool finite = marks[c] == 0.0F;
        const bool zero = !finite || magnitudes[c] < kLeastMagnitude;
        scales[c] = !finite ? compiler::kNan : zero ? 0.0F : magnitudes[c] / 127.0F;
        inverses[c] = zero ? 0.0F : 127.0F / magnitudes[c];
    }
    std::memcpy(out, scales, sizeof scales);

    std::uint8_t* codes = out + kernels::kCodeScaleBytes;
    for (std::size_t k = 0; k < inputs; k += kernels::kQuadInputs, codes += kernels::kCodeLineBytes) {
        float low[16];   // the codes of inputs k and k + 1 as one number of 16 bits
        float high[16];  // of k + 2 and k + 3
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
            F32 quad[kernels::kQuadInputs];
            HEADLONG_UNROLL for (std::size_t i = 0; i < kernels::kQuadInputs; ++i) {
                const F32 x = k + i < inputs ? load(panel + (k + i) * 16 + v * kLanes) : broadcast(0.0F);
                const F32 q = round_nearest(x * load(inverses + v * kLanes));
                // infinity * 0 is NaN, and no code
                quad[i] = select_below(absolute(q), 128.0F, q, broadcast(0.0F)) + broadcast(128.0F);
            }
            store(low + v * kLanes, quad[0] + quad[1] * broadcast(256.0F));
            store(high + v * kLanes, quad[2] + quad[3] * broadcast(256.0F));
        }
        for (std::size_t c = 0; c < 16; ++c) {
            const std::uint32_t word = static_cast<std::uint32_t>(static_cast<std::int32_t>(low[c])) |
                                       static_cast<std::uint32_t>(static_cast<std::int32_t>(high[c])) << 16U;
            std::memcpy(codes + c * sizeof word, &word, sizeof word);
        }
    }
}

inline void quantise_panels(const kernels::QuantisePanels& a) noexcept {
    const std::size_t groups = kernels::code_groups(a.depth);
    for (std::size_t p = 0; p < a.panel_count; ++p) {
        const float* panel = a.panels + p * a.panel_stride;
        std::uint8_t* out = a.out + p * a.out_stride;
        for (std::size_t g = 0; g < groups; ++g) {
            quantise_group(panel + g * kernels::kCodeGroup * 16, kernels::code_group_inputs(a.depth, g),
                           out + g * kernels::code_group_bytes(kernels::StoredType::int8));
        }
    }
}

/// One group of one row. Products and differences are rounded one by one, so that every set finds the same codes.
HEADLONG_INLINE void quantise_row_group(const float* x, std::size_t inputs, std::uint8_t* codes, float& factor,
                                        std::int32_t& sum) noexcept {
    F32 largest = broadcast(0.0F);
    F32 nonfinite = broadcast(0.0F);
    for (std::size_t i = 0; i < inputs; i += kLanes) {
        const F32 lanes = inputs - i < kLanes ? load_n(x + i, inputs - i) : load(x + i);
        largest = max(largest, absolute(lanes));
        nonfinite = nonfinite + (lanes - lanes);
    }
    float lanes_of[kLanes];
    store(lanes_of, largest);
    float magnitude = 0.0F;
    for (const float lane : lanes_of) magnitude = lane > magnitude ? lane : magnitude;

    // the last group's quads are filled up to an even number
    const std::size_t bytes = kernels::round_up(kernels::code_quads(inputs), 2) * kernels::kRowQuadBytes;
    sum = 0;
    factor = 0.0F;
    if (any_nan(nonfinite) || magnitude < kLeastMagnitude) {
        if (any_nan(nonfinite)) factor = compiler::kNan;
        std::memset(codes, 0, bytes);
        return;
    }
    factor = magnitude / (127.0F * 254.0F);
    const F32 inverse = broadcast(127.0F / magnitude);
    const F32 unit = broadcast(254.0F);
    F32 sums = broadcast(0.0F);  // of whole numbers below 2^24: exact
    alignas(kernels::kAlignment) std::uint8_t quads[kernels::kRowGroupBytes] = {};
    for (std::size_t i = 0; i < inputs; i += kLanes) {
        const F32 lanes = inputs - i < kLanes ? load_n(x + i, inputs - i) : load(x + i);
        const F32 scaled = lanes * inverse;
        const F32 first = round_nearest(scaled);
        const F32 second = round_nearest((scaled - first) * unit);
        store_row_quads(quads + i / kernels::kQuadInputs * kernels::kRowQuadBytes, first, second);
        sums = sums + (first * unit + second);
    }
    std::memcpy(codes, quads, bytes);
    store(lanes_of, sums);
    float total = 0.0F;
    for (const float lane : lanes_of) total += lane;
    sum = static_cast<std::int32_t>(total);
}

inline void quantise_rows(const kernels::QuantiseRows& a) noexcept {
    const std::size_t groups = kernels::code_groups(a.depth);
    for (std::size_t r = 0; r < a.row_count; ++r) {
        std::uint8_t* out = a.out + r * a.out_stride;
        float* factors = reinterpret_cast<float*>(out + kernels::code_row_factors(a.depth));
        std::int32_t* sums = reinterpret_cast<std::int32_t*>(out + kernels::code_row_sums(a.depth));
        for (std::size_t g = 0; g < groups; ++g) {
            quantise_row_group(a.rows + r * a.row_stride + g * kernels::kCodeGroup,
                               kernels::code_group_inputs(a.depth, g), out + g * kernels::kRowGroupBytes, factors[g],
                               sums[g]);
        }
    }
}

/// One group of a token's elements: codes in [-largest, largest], and the scale.
HEADLONG_INLINE float quantise_token_group(const float* x, std::size_t count, float largest_code,
                                           std::int8_t* codes) noexcept {
    F32 largest = broadcast(0.0F);
    F32 nonfinite = broadcast(0.0F);
    for (std::size_t i = 0; i < count; i += kLanes) {
        const F32 lanes = count - i < kLanes ? load_n(x + i, count - i) : load(x + i);
        largest = max(largest, absolute(lanes));
        nonfinite = nonfinite + (lanes - lanes);
    }
    float lanes_of[kLanes];
    store(lanes_of, largest);
    float magnitude = 0.0F;
    for (const float lane : lanes_of) magnitude = lane > magnitude ? lane : magnitude;
    if (any_nan(nonfinite) || magnitude < kLeastMagnitude) {
        std::memset(codes, 0, count);
        return any_nan(nonfinite) ? compiler::kNan : 0.0F;
    }
    const F32 inverse = broadcast(largest_code / magnitude);
    for (std::size_t i = 0; i < count; i += kLanes) {
        const std::size_t n = count - i < kLanes ? count - i : kLanes;
        store(lanes_of, round_nearest((n < kLanes ? load_n(x + i, n) : load(x + i)) * inverse));
        for (std::size_t lane = 0; lane < n; ++lane) codes[i + lane] = static_cast<std::int8_t>(lanes_of[lane]);
    }
    return magnitude / largest_code;
}

/// One half of a byte.
HEADLONG_INLINE void store_half(std::uint8_t* byte, bool high, std::int8_t code) noexcept {
    const auto half = static_cast<std::uint32_t>(code + 8);
    *byte = static_cast<std::uint8_t>(high ? (*byte & 0x0FU) | half << 4U : (*byte & 0xF0U) | half);
}

/// Calls body(group, codes) for the groups of one row, of at most kMostGroup elements each; codes beyond its `count`
/// are 0.
template <std::size_t kMostGroup, class Elements, class Body>
HEADLONG_INLINE void for_code_groups(const kernels::Rows& source, std::size_t row, float largest_code,
                                     const Body& body) noexcept {
    for (std::size_t first = 0; first < source.column_count; first += kMostGroup) {
        const std::size_t left = source.column_count - first;
        const std::size_t count = left < kMostGroup ? left : kMostGroup;
        float x[kMostGroup];
        std::int8_t codes[kMostGroup + kernels::kPanelTokens] = {};
        kernels::Rows part = source;
        part.data = row_of<Elements>(source, row) + static_cast<std::ptrdiff_t>(first) * source.column_stride;
        part.column_count = count;
        gather_row<Elements>(part, 0, x, [](F32 lanes) noexcept { return lanes; });
        body(first, count, quantise_token_group(x, count, largest_code, codes), codes);
    }
}

inline void quantise_keys(const kernels::QuantiseKeys& a) noexcept {
    const auto largest_code = static_cast<float>(kernels::largest_code(a.type));
    const std::size_t panel_bytes = kernels::code_panel_bytes(a.type, a.source.column_count);
    with_elements(a.source.type, [&](auto elements) {
        for (std::size_t row = 0; row < a.source.row_count; ++row) {
            const std::size_t token = a.first_lane + row;
            const std::size_t lane = token % kernels::kPanelTokens;
            std::uint8_t* panel = a.panels + token / kernels::kPanelTokens * panel_bytes;
            prefetch_row<decltype(elements)>(a.source, row + kRowsAhead);
            for_code_groups<kernels::kCodeGroup, decltype(elements)>(
                a.source, row, largest_code,
                [&](std::size_t first, std::size_t count, float scale, const std::int8_t* codes) noexcept {
                    std::uint8_t* group = panel + first / kernels::kCodeGroup * kernels::code_group_bytes(a.type);
                    std::memcpy(group + lane * sizeof scale, &scale, sizeof scale);
                    std::uint8_t* at = group + kernels::kCodeScaleBytes + lane * kernels::kQuadInputs;
                    if (a.type == kernels::StoredType::int8) {
                        for (std::size_t i = 0; i < count; i += kernels::kQuadInputs, at += kernels::kCodeLineBytes) {
                            std::uint32_t quad = 0;
                            std::memcpy(&quad, codes + i, sizeof quad);
                            quad ^= 0x80808080U;  // 128 + q
                            std::memcpy(at, &quad, sizeof quad);
                        }
                    } else {
                        for (std::size_t i = 0; i < count;
                             i += 2 * kernels::kQuadInputs, at += kernels::kCodeLineBytes) {
                            std::uint32_t low = 0;
                            std::uint32_t high = 0;
                            std::memcpy(&low, codes + i, sizeof low);
                            std::memcpy(&high, codes + i + kernels::kQuadInputs, sizeof high);
                            // 8 + q of a byte: the lowest four bits, the uppermost of them flipped
                            low = (low & 0x0F0F0F0FU) ^ 0x08080808U;
                            high = (high & 0x0F0F0F0FU) ^ 0x08080808U;
                            const std::uint32_t both = low | high << 4U;
                            std::memcpy(at, &both, sizeof both);
                        }
                    }
                });
        }
    });
}

inline bool quantise_values(const kernels::QuantiseValues& a) noexcept {
    const auto largest_code = static_cast<float>(kernels::largest_code(a.type));
    bool nonfinite = false;
    with_elements(a.source.type, [&](auto elements) {
        for (std::size_t row = 0; row < a.source.row_count; ++row) {
            const std::size_t token = a.first_token + row;
            prefetch_row<decltype(elements)>(a.source, row + kRowsAhead);
            for_code_groups<kernels::kValueGroup, decltype(elements)>(
                a.source, row, largest_code,
                [&](std::size_t first, std::size_t count, float scale, const std::int8_t* codes) noexcept {
                    nonfinite = nonfinite || scale != scale;
                    std::uint8_t* group = a.values + kernels::value_block_bytes(a.type, first);
                    std::memcpy(group + token * sizeof scale, &scale, sizeof scale);
                    std::uint8_t* at = a.values + kernels::value_code_index(a.type, token, first);
                    const bool high = kernels::in_high_half(token);
                    // padding columns too
                    for (std::size_t c = 0; c < count; c += 16, at += kernels::value_code_bytes(a.type)) {
                        if (a.type == kernels::StoredType::int8) {
                            for (std::size_t i = 0; i < 16; ++i) at[2 * i] = static_cast<std::uint8_t>(codes[c + i]);
                        } else {
                            for (std::size_t i = 0; i < 16; ++i) store_half(at + 2 * i, high, codes[c + i]);
                        }
                    }
                });
        }
    });
    return nonfinite;
}

}  // namespace headlong::HEADLONG_ISA
