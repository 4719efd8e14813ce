// Weights x value panels of codes, in integers: the output of one span. Compiled per instruction set.
//
// The scales of the values are folded into the weights, and these rounded to 15 bits beside the largest of their block
// of 64 tokens; a block's sum of products is an integer below 2^31, the same one in any order and on every set, and the
// blocks are added up in floats, in ascending order. (One factor for a span of 512 would let a single large weight take
// the precision of all others: 2.8e-4 of the output where this has 1e-4.)
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/tiles-inl.hpp"
#include "kernels/weighted_rows-inl.hpp"

namespace headlong::HEADLONG_ISA {

// What the largest weight of a block must reach: the inverse of its 32767th part stays in range.
inline constexpr float kLeastWeight = 0x1p-110F;
inline constexpr float kMostWeightCode = 32767.0F;

/// (i with its four bits reversed + 0.5) / 16: what is added before rounding down, so that over 16 tokens the rounding
/// errors of equal weights cancel.
alignas(kernels::kAlignment) inline constexpr float kDither[16] = {
    0.5F / 16, 8.5F / 16, 4.5F / 16, 12.5F / 16, 2.5F / 16, 10.5F / 16, 6.5F / 16, 14.5F / 16,
    1.5F / 16, 9.5F / 16, 5.5F / 16, 13.5F / 16, 3.5F / 16, 11.5F / 16, 7.5F / 16, 15.5F / 16};

/// The tokens of one panel as products of weight and scale. `guarded`: a scale may be NaN, and what is not allowed must
/// not meet it.
HEADLONG_INLINE void scaled_weights(const float* weights, const float* scales, bool guarded,
                                    F32 (&p)[kPanelVectors]) noexcept {
    if (!guarded) {
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
            p[v] = load(weights + v * kLanes) * load(scales + v * kLanes);
        }
        return;
    }
    float lanes[16];
    for (std::size_t i = 0; i < 16; ++i) lanes[i] = is_masked(weights[i]) ? 0.0F : weights[i] * scales[i];
    HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) p[v] = load(lanes + v * kLanes);
}

/// One group of columns of a span.
template <kernels::StoredType Type>
struct WeightedCodeTile {
    using Tiles = PairTiles;
    static constexpr std::size_t kPairs = kernels::codes_in_byte(Type);  ///< pairs of tokens in a line of 32 bytes
    static constexpr std::size_t kStepTokens = 2 * kPairs;
    const kernels::WeightedCodes& a;
    std::size_t column;   ///< the group's first
    std::size_t columns;  ///< of the group
    std::size_t first;    ///< tokens [first, last) are added to what `out` holds
    std::size_t last;
    const float (*factors)[kernels::kSpanBlocks];           ///< [rows][blocks]
    const std::int32_t (*code_sums)[kernels::kSpanBlocks];  ///< of a row's codes

    HEADLONG_INLINE const std::uint8_t* group_of(std::size_t token) const noexcept {
        return static_cast<const std::uint8_t*>(a.value_blocks[token / kernels::kBlockTokens]) +
               kernels::value_block_bytes(Type, column);
    }
    HEADLONG_INLINE std::size_t block_end(std::size_t token) const noexcept {
        const std::size_t end = (token / kernels::kBlockTokens + 1) * kernels::kBlockTokens;
        return end < last ? end : last;
    }
    /// What is read after the group's part of a token's block: that of the next block, or the next group's first.
    HEADLONG_INLINE const void* after(std::size_t token) const noexcept {
        const std::size_t end = (token / kernels::kBlockTokens + 1) * kernels::kBlockTokens;
        if (end < a.last) return group_of(end);
        if (column + columns < a.columns) return group_of(a.first) + part_bytes();
        return a.next;
    }
    /// Bytes of the group in a block.
    HEADLONG_INLINE std::size_t part_bytes() const noexcept {
        return kernels::kValueScaleBytes + columns / 16 * kernels::value_code_bytes(Type);
    }

    /// Codes of one row for the tokens [first, last) of one block. Returns their factor.
    HEADLONG_INLINE float quantise(std::size_t row, std::int32_t& code_sum) const noexcept {
        const float* weights = a.weights + row * a.weight_stride;
        std::int16_t* codes = a.codes + row * a.code_stride;
        const float* scales = reinterpret_cast<const float*>(group_of(first));
        const std::size_t block = first / kernels::kBlockTokens;
        const bool guarded = (a.nonfinite_blocks >> block & 1U) != 0;
        F32 largest[kPanelVectors];
        F32 probe = broadcast(0.0F);  // NaN if a product of a guarded block is
        HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) largest[v] = broadcast(0.0F);
        for (std::size_t token = first; token < last; token += 16) {
            F32 p[kPanelVectors];
            scaled_weights(weights + token, scales + token % kernels::kBlockTokens, guarded, p);
            HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
                if (guarded) probe = probe + p[v] * broadcast(0.0F);
                largest[v] = max(largest[v], p[v]);
            }
        }
        HEADLONG_UNROLL for (std::size_t v = 1; v < kPanelVectors; ++v) largest[0] = max(largest[0], largest[v]);
        float lanes[kLanes];
        store(lanes, largest[0]);
        float most = 0.0F;
        for (const float lane : lanes) most = lane > most ? lane : most;
        code_sum = 0;
        const bool nan = any_nan(probe) || a.sums[row] != a.sums[row];
        if (nan || most < kLeastWeight) {
            std::memset(codes + first, 0, (last - first) * sizeof *codes);
            return nan ? compiler::kNan : 0.0F;
        }
        const F32 inverse = broadcast(kMostWeightCode / most);
        I32 sums = zero_i32();
        for (std::size_t token = first; token < last; token += 16) {
            F32 p[kPanelVectors];
            scaled_weights(weights + token, scales + token % kernels::kBlockTokens, guarded, p);
            HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
                p[v] = p[v] * inverse + load(kDither + v * kLanes);  // rounded twice, on every set
            }
            store_weight_codes(codes + token, p, sums);
        }
        std::int32_t lane_sums[sizeof sums / sizeof(std::int32_t)];
        std::memcpy(lane_sums, &sums, sizeof sums);
        for (const std::int32_t lane : lane_sums) code_sum += lane;
        return most / kMostWeightCode;
    }

    template <std::size_t Rows, std::size_t Panels>
    HEADLONG_INLINE void operator()(std::size_t row, std::size_t panel) const noexcept {
        constexpr std::size_t kVectors = Panels * kPanelVectors;
        float* const out = a.out + row * a.out_stride + column + panel * 16;
        for (std::size_t token = first; token < last; token = block_end(token)) {
            const std::uint8_t* value = group_of(token) + kernels::kValueScaleBytes +
                                        panel * kernels::value_code_bytes(Type) +
                                        token % kernels::kBlockTokens / kStepTokens * 32;
            const std::int16_t* x = a.codes + row * a.code_stride + token;
            I32 sums[Rows][kVectors];
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) sums[r][v] = zero_i32();
            }
            const auto step = [&](std::size_t i) noexcept {
                HEADLONG_UNROLL for (std::size_t pair = 0; pair < kPairs; ++pair) {
                    multiply_add(
                        sums,
                        [&](std::size_t r) noexcept {
                            return broadcast_pair(x + r * a.code_stride + i * kStepTokens + 2 * pair);
                        },
                        [&](std::size_t v) noexcept {
                            return load_pair_codes<kPairs>(
                                value + v / kPanelVectors * kernels::value_code_bytes(Type) + i * 32, pair,
                                v % kPanelVectors);
                        },
                        [](auto w, auto pair_codes, I32& sum) noexcept { add_pairs(sum, w, pair_codes); });
                }
            };
            const Ahead ahead(group_of(token), part_bytes(), after(token), a.row_count);
            for_steps<Tiles, Rows, Panels>((block_end(token) - token) / kStepTokens, step, [&](std::size_t i) noexcept {
                if (row != 0) return;  // the others find them near
                HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                    ahead.ask<kStepsAtOnce * 32>(value + p * kernels::value_code_bytes(Type) + i * 32);
                }
            });

            const std::size_t block = token / kernels::kBlockTokens;
            const bool fresh = token == a.first;  // nothing has been added yet
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                const F32 factor = broadcast(factors[row + r][block]);
                const I32 offset = broadcast_i32(-kPairCodeOffset<kPairs> * code_sums[row + r][block]);
                HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                    float* p = out + r * a.out_stride + v * kLanes;
                    const I32 total = kPairCodeOffset<kPairs> == 0 ? sums[r][v] : add_i32(sums[r][v], offset);
                    const F32 part = to_f32(total) * factor;
                    store(p, fresh ? part : load(p) + part);  // rounded twice, on every set
                }
            }
        }
    }
};

template <kernels::StoredType Type>
inline void weighted_group(const kernels::WeightedCodes& a, std::size_t column, std::size_t columns) noexcept {
    constexpr std::size_t kRowsAtOnce = 48;  // a row tile's: their factors and sums are 3 KiB
    for (std::size_t row = 0; row < a.row_count; row += kRowsAtOnce) {
        kernels::WeightedCodes part = a;
        part.weights += row * a.weight_stride;
        part.sums += row;
        part.codes += row * a.code_stride;
        part.out += row * a.out_stride;
        part.row_count = a.row_count - row < kRowsAtOnce ? a.row_count - row : kRowsAtOnce;
        float factors[kRowsAtOnce][kernels::kSpanBlocks];
        std::int32_t code_sums[kRowsAtOnce][kernels::kSpanBlocks];
        WeightedCodeTile<Type> run{part, column, columns, a.first, a.last, factors, code_sums};
        for (; run.first < a.last; run.first = run.last) {
            run.last = a.last;  // for block_end()
            run.last = run.block_end(run.first);
            const std::size_t block = run.first / kernels::kBlockTokens;
            for (std::size_t r = 0; r < part.row_count; ++r) {
                factors[r][block] = run.quantise(r, code_sums[r][block]);
            }
            // Many rows take a tile through the whole span, few rows all tiles through a block: memory is read from
            // front to back.
            if (part.row_count < kManyRows) for_tiles(part.row_count, columns / 16, run);
        }
        if (part.row_count >= kManyRows) {
            run.first = a.first;
            run.last = a.last;
            for_tiles(part.row_count, columns / 16, run);
        }
    }
}

template <kernels::StoredType Type>
inline void weighted_codes_of(const kernels::WeightedCodes& a) noexcept {
    for (std::size_t column = 0; column < a.columns; column += kernels::kValueGroup) {
        const std::size_t left = a.columns - column;
        weighted_group<Type>(a, column, left < kernels::kValueGroup ? left : kernels::kValueGroup);
    }
}

inline void weighted_codes(const kernels::WeightedCodes& a) noexcept {
    if (a.first >= a.last) {
        for (std::size_t r = 0; r < a.row_count; ++r) {
            for (std::size_t c = 0; c < a.columns; c += kLanes) store(a.out + r * a.out_stride + c, broadcast(0.0F));
        }
    } else if (a.type == kernels::StoredType::int4) {
        weighted_codes_of<kernels::StoredType::int4>(a);
    } else {
        weighted_codes_of<kernels::StoredType::int8>(a);
    }
}

}  // namespace headlong::HEADLONG_ISA
