// Linear layers of int8 weights, in integers: quantising weights and rows, and rows x panels. Compiled per instruction
// set. The layouts are in layout.hpp.
//
// A weight is scale * q with q in [-127, 127], a row's input factor * C with C = 254 A + B in 15 bits: A rounds the
// input to 8 bits, B rounds what is left to 8 more. Over a group of 64 inputs sum(C * q) is an integer below 2^31,
// the same one on every set; the groups' integers are added up in floats, in ascending order.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/simd/native.hpp"

namespace headlong::HEADLONG_ISA {

// A group whose largest magnitude is smaller is zero: its scale's inverse would come near the end of the range.
inline constexpr float kLeastMagnitude = 0x1p-100F;

/// Inputs of group `group`.
HEADLONG_INLINE std::size_t group_inputs(std::size_t depth, std::size_t group) noexcept {
    const std::size_t left = depth - group * kernels::kQuantGroup;
    return left < kernels::kQuantGroup ? left : kernels::kQuantGroup;
}

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
        scales[c] = !finite ? __builtin_nanf("") : zero ? 0.0F : magnitudes[c] / 127.0F;
        inverses[c] = zero ? 0.0F : 127.0F / magnitudes[c];
    }
    std::memcpy(out, scales, sizeof scales);

    std::uint8_t* codes = out + kernels::kInt8ScaleBytes;
    for (std::size_t k = 0; k < inputs; k += kernels::kQuadInputs, codes += kernels::kInt8QuadBytes) {
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
    const std::size_t groups = kernels::quant_groups(a.depth);
    for (std::size_t p = 0; p < a.panel_count; ++p) {
        const float* panel = a.panels + p * a.panel_stride;
        std::uint8_t* out = a.out + p * a.out_stride;
        for (std::size_t g = 0; g < groups; ++g) {
            quantise_group(panel + g * kernels::kQuantGroup * 16, group_inputs(a.depth, g),
                           out + g * kernels::kInt8GroupBytes);
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

    const std::size_t bytes = (inputs + kernels::kQuadInputs - 1) / kernels::kQuadInputs * kernels::kRowQuadBytes;
    sum = 0;
    factor = 0.0F;
    if (any_nan(nonfinite) || magnitude < kLeastMagnitude) {
        if (any_nan(nonfinite)) factor = __builtin_nanf("");
        std::memset(codes, 0, bytes);
        return;
    }
    factor = magnitude / (127.0F * 254.0F);
    const F32 inverse = broadcast(127.0F / magnitude);
    const F32 unit = broadcast(254.0F);
    F32 sums = broadcast(0.0F);  // of whole numbers below 2^24: exact
    alignas(kernels::kAlignment)
        std::uint8_t quads[kernels::kQuantGroup / kernels::kQuadInputs * kernels::kRowQuadBytes];
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
    const std::size_t groups = kernels::quant_groups(a.depth);
    for (std::size_t r = 0; r < a.row_count; ++r) {
        std::uint8_t* out = a.out + r * a.out_stride;
        float* factors = reinterpret_cast<float*>(out + kernels::int8_row_factors(a.depth));
        std::int32_t* sums = reinterpret_cast<std::int32_t*>(out + kernels::int8_row_sums(a.depth));
        for (std::size_t g = 0; g < groups; ++g) {
            quantise_row_group(a.rows + r * a.row_stride + g * kernels::kQuantGroup, group_inputs(a.depth, g),
                               out + g * kernels::kRowGroupBytes, factors[g], sums[g]);
        }
    }
}

// How far ahead panels are asked for. With few rows a linear layer is a stream from memory: of 1, 2, 4 and 8 KiB, 1 and
// 2 read at least as fast as the best plain loop, and 2 is for memory that is further away.
inline constexpr std::size_t kInt8PrefetchBytes = 2048;

inline constexpr std::size_t kInt8Streams = 4;

struct Int8Tile {
    const kernels::DotPanelsInt8& a;

    /// Lane by lane a sum over the groups in ascending order, from +0 or from what `out` holds. The order inside a
    /// group is free: its sum is an integer. Tiles of few sums therefore sum several quads side by side.
    template <std::size_t Rows, std::size_t Panels>
    HEADLONG_INLINE void operator()(std::size_t row, std::size_t panel) const noexcept {
        constexpr std::size_t kVectors = Panels * kPanelVectors;
        const std::uint8_t* rows = a.rows + row * a.row_stride;
        const std::uint8_t* panels = a.panels + panel * a.panel_stride;
        float* out = a.out + row * a.out_stride + panel * 16;
        const std::size_t columns = a.columns - panel * 16;  // valid ones from here on; the tile may have fewer
        const bool whole = columns >= Panels * 16;
        // The first rows bring a panel in; to the others it is near, and a line asked for costs nothing.
        const std::size_t ahead = row == 0 ? kInt8PrefetchBytes : 0;

        F32 sums[Rows][kVectors];
        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                const float* p = out + r * a.out_stride + v * kLanes;
                sums[r][v] = !a.accumulate ? broadcast(0.0F) : whole ? load(p) : load_n(p, valid_lanes(columns, v));
            }
        }

        for (std::size_t group = a.group_begin; group < a.group_end; ++group) {
            if constexpr (Rows == 1) {  // panel by panel: their sums would not all have a register
                HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                    add_group<1, 1>(rows, panels + p * a.panel_stride, group, ahead, sums[0] + p * kPanelVectors);
                }
            } else {
                add_group<Rows, Panels>(rows, panels, group, ahead, sums[0]);
            }
        }

        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            HEADLONG_UNROLL for (std::size_t v = 0; v < kVectors; ++v) {
                float* p = out + r * a.out_stride + v * kLanes;
                const F32 lanes = a.canonical ? canonical_nan(sums[r][v]) : sums[r][v];
                if (whole) {
                    store(p, lanes);
                } else {
                    store_n(p, lanes, valid_lanes(columns, v));
                }
            }
        }
    }

    /// Adds one group's sums: sums[r][p * kPanelVectors + v], one after the other.
    template <std::size_t Rows, std::size_t Panels>
    HEADLONG_INLINE void add_group(const std::uint8_t* rows, const std::uint8_t* panels, std::size_t group,
                                   std::size_t ahead, F32* sums) const noexcept {
        constexpr std::size_t kSums = Rows * Panels * kQuadSums;
        constexpr std::size_t kSplits = kSums < kQuadLatency ? kQuadLatency / kSums : 1;
        const std::uint8_t* scales = panels + group * kernels::kInt8GroupBytes;
        const std::uint8_t* codes = scales + kernels::kInt8ScaleBytes;
        const std::uint8_t* x = rows + group * kernels::kRowGroupBytes;
        const std::size_t quads = kernels::quant_quads(group_inputs(a.depth, group));
        HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) ask_for(scales + p * a.panel_stride, ahead);

        I32 dots[kSplits][Rows][Panels][kQuadSums];
        HEADLONG_UNROLL for (std::size_t s = 0; s < kSplits; ++s) {
            HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
                HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                    HEADLONG_UNROLL for (std::size_t i = 0; i < kQuadSums; ++i) dots[s][r][p][i] = zero_i32();
                }
            }
        }
        std::size_t quad = 0;
        for (; quad + kSplits <= quads; quad += kSplits) {
            HEADLONG_UNROLL for (std::size_t s = 0; s < kSplits; ++s) {
                const std::uint8_t* at = codes + (quad + s) * kernels::kInt8QuadBytes;
                HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) ask_for(at + p * a.panel_stride, ahead);
                add_quads(dots[s], at, a.panel_stride, x + (quad + s) * kernels::kRowQuadBytes, a.row_stride);
            }
        }
        if constexpr (kSplits > 1) {
            for (; quad < quads; ++quad) {
                add_quads(dots[0], codes + quad * kernels::kInt8QuadBytes, a.panel_stride,
                          x + quad * kernels::kRowQuadBytes, a.row_stride);
            }
        }

        HEADLONG_UNROLL for (std::size_t r = 0; r < Rows; ++r) {
            const std::uint8_t* record = rows + r * a.row_stride;
            float factor = 0.0F;
            std::int32_t sum = 0;
            std::memcpy(&factor, record + kernels::int8_row_factors(a.depth) + group * sizeof factor, sizeof factor);
            std::memcpy(&sum, record + kernels::int8_row_sums(a.depth) + group * sizeof sum, sizeof sum);
            const F32 row_factor = broadcast(factor);
            const I32 offset = broadcast_i32(-kQuadOffset * sum);
            HEADLONG_UNROLL for (std::size_t p = 0; p < Panels; ++p) {
                HEADLONG_UNROLL for (std::size_t s = 1; s < kSplits; ++s) {
                    HEADLONG_UNROLL for (std::size_t i = 0; i < kQuadSums; ++i) {
                        dots[0][r][p][i] = add_i32(dots[0][r][p][i], dots[s][r][p][i]);
                    }
                }
                I32 totals[kPanelVectors];
                quad_totals(dots[0][r][p], totals);
                const float* scale = reinterpret_cast<const float*>(scales + p * a.panel_stride);
                HEADLONG_UNROLL for (std::size_t v = 0; v < kPanelVectors; ++v) {
                    F32& lanes = sums[(r * Panels + p) * kPanelVectors + v];
                    lanes = fma(to_f32(add_i32(totals[v], offset)) * load(scale + v * kLanes), row_factor, lanes);
                }
            }
        }
    }

    /// Valid lanes of vector v when `columns` are left from the tile's start.
    HEADLONG_INLINE static std::size_t valid_lanes(std::size_t columns, std::size_t v) noexcept {
        const std::size_t start = v * kLanes;
        if (columns <= start) return 0;
        return columns - start < kLanes ? columns - start : kLanes;
    }

    /// An address past the end is never read, only asked for.
    HEADLONG_INLINE static void ask_for(const std::uint8_t* line, std::size_t ahead) noexcept {
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(line) + ahead));
    }
};

template <std::size_t Rows, std::size_t Panels>
HEADLONG_INLINE void int8_rest_rows(const Int8Tile& tile, std::size_t row, std::size_t rows,
                                    std::size_t panel) noexcept {
    if (rows == Rows) {
        tile.operator()<Rows, Panels>(row, panel);
    } else if constexpr (Rows > 1) {
        int8_rest_rows<Rows - 1, Panels>(tile, row, rows, panel);
    }
}

/// All rows of `Panels` panels, so that these come from memory once.
template <std::size_t Panels>
inline void int8_panels(const kernels::DotPanelsInt8& a, std::size_t panel) noexcept {
    const Int8Tile tile{a};
    std::size_t row = 0;
    for (; row + kInt8TileRows <= a.row_count; row += kInt8TileRows) {
        tile.operator()<kInt8TileRows, Panels>(row, panel);
    }
    if constexpr (kInt8TileRows > 1) {
        if (row < a.row_count) int8_rest_rows<kInt8TileRows - 1, Panels>(tile, row, a.row_count - row, panel);
    }
}

inline void dot_panels_int8(const kernels::DotPanelsInt8& a) noexcept {
    const std::size_t panel_count = (a.columns + 15) / 16;
    std::size_t panel = 0;
    if (a.row_count == 1) {
        // A stream from memory: several panels at a time keep more of the processor's prefetchers busy than one.
        for (; panel + kInt8Streams <= panel_count; panel += kInt8Streams) {
            Int8Tile{a}.operator()<1, kInt8Streams>(0, panel);
        }
    } else if constexpr (kInt8TilePanels > 1) {
        for (; panel + kInt8TilePanels <= panel_count; panel += kInt8TilePanels) {
            int8_panels<kInt8TilePanels>(a, panel);
        }
    }
    for (; panel < panel_count; ++panel) int8_panels<1>(a, panel);
}

}  // namespace headlong::HEADLONG_ISA
