// The one layout that caches, packed tensors and linear layers share. Every instruction set reads the same bytes.
//
//   key panel    16 tokens, tokens in the lanes: [head_dim][16]. A score needs no horizontal sum and no transposition;
//                16 floats are one cache line, one AVX-512 register, two AVX2 registers, four NEON registers.
//   value panel  16 columns, columns in the lanes, over the 64 tokens of a block: [64][16]. What a register tile reads
//                is contiguous: rows of 128 floats, 512 bytes apart, ran at 0.71 of the limit where panels ran at 0.86.
//                value_dim is rounded up to 16; padding columns hold 0.
//   block        64 tokens of one KV head: 4 key panels, then the value panels. Position p lies in lane p mod 16 of key
//                panel (p mod 64) / 16 of block p / 64, and in row p mod 64 of its value panels.
//   span         512 positions [512 i, 512 (i + 1)): the unit whose softmax state is computed alone, from zero.
//   group        64 spans: states fold span by span inside a group, and the groups fold in ascending order.
//
// Weights of int8 lie in panels of 16 output features, and rows that meet them are quantised too. Inputs are cut into
// groups of 64, the last one shorter, and groups into quads of 4 inputs, the last one filled up with zeros:
//
//   int8 panel  per group 16 scales (float), then per quad uint8 [16][4]: 128 + q with q in [-127, 127]; a weight is
//               scale * q. A full group is 64 + 1024 bytes, read from front to back. Starts on a cache line.
//   int8 row    per quad 8 bytes; then per group a factor (float), and per group the sum of its codes C (int32). An
//               input is factor * C. C = 254 A + B has 15 bits: A in [-127, 127] rounds the input, B in [-127, 127]
//               what is left. A quad is int16 C[4], or where the set multiplies bytes (KernelTable::int8_terms) int8
//               A[4], B[4]: such rows are scratch of one call, and no other set reads them.
//
// A sum over a group, of C * (128 + q), stays below 64 * 32385 * 255 < 2^31.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headlong::kernels {

// Functions are forced inline: no unit of an instruction set may share a symbol with the baseline.

inline constexpr std::size_t kPanelTokens = 16;
inline constexpr std::size_t kBlockTokens = 64;
inline constexpr std::size_t kBlockPanels = kBlockTokens / kPanelTokens;
inline constexpr std::size_t kSpanTokens = 512;
inline constexpr std::size_t kSpanBlocks = kSpanTokens / kBlockTokens;
inline constexpr std::size_t kGroupSpans = 64;
/// Elements of a value panel.
inline constexpr std::size_t kValuePanel = kBlockTokens * kPanelTokens;

/// Alignment of every buffer that kernels see: a cache line, and the widest register.
inline constexpr std::size_t kAlignment = 64;

/// Element types: IEEE 754 binary32 and binary16, and bfloat16.
enum class ElementType : std::uint8_t { f32, f16, bf16 };

[[gnu::always_inline]] constexpr std::size_t element_bytes(ElementType type) noexcept {
    return type == ElementType::f32 ? 4 : 2;
}

[[gnu::always_inline]] constexpr std::size_t round_up(std::size_t value, std::size_t multiple) noexcept {
    return (value + multiple - 1) / multiple * multiple;
}

/// Columns of the value panels of a block, padding included.
[[gnu::always_inline]] constexpr std::size_t padded_columns(std::size_t value_dim) noexcept {
    return round_up(value_dim, kPanelTokens);
}

inline constexpr std::size_t kQuantGroup = 64;  ///< inputs
inline constexpr std::size_t kQuadInputs = 4;
inline constexpr std::size_t kInt8ScaleBytes = kPanelTokens * sizeof(float);  ///< of one group of a panel
inline constexpr std::size_t kInt8QuadBytes = kPanelTokens * kQuadInputs;     ///< of a panel
inline constexpr std::size_t kInt8GroupBytes = kInt8ScaleBytes + kQuantGroup * kPanelTokens;  ///< from group to group
inline constexpr std::size_t kRowQuadBytes = 2 * kQuadInputs;
inline constexpr std::size_t kRowGroupBytes = 2 * kQuantGroup;

[[gnu::always_inline]] constexpr std::size_t quant_groups(std::size_t depth) noexcept {
    return (depth + kQuantGroup - 1) / kQuantGroup;
}
[[gnu::always_inline]] constexpr std::size_t quant_quads(std::size_t depth) noexcept {
    return (depth + kQuadInputs - 1) / kQuadInputs;
}

/// Bytes of one int8 panel: a multiple of a cache line.
[[gnu::always_inline]] constexpr std::size_t int8_panel_bytes(std::size_t depth) noexcept {
    return quant_groups(depth) * kInt8ScaleBytes + quant_quads(depth) * kInt8QuadBytes;
}
/// Where an int8 row's factors and sums begin, and its bytes: a multiple of a cache line.
[[gnu::always_inline]] constexpr std::size_t int8_row_factors(std::size_t depth) noexcept {
    return quant_quads(depth) * kRowQuadBytes;
}
[[gnu::always_inline]] constexpr std::size_t int8_row_sums(std::size_t depth) noexcept {
    return int8_row_factors(depth) + quant_groups(depth) * sizeof(float);
}
[[gnu::always_inline]] constexpr std::size_t int8_row_bytes(std::size_t depth) noexcept {
    return round_up(int8_row_sums(depth) + quant_groups(depth) * sizeof(std::int32_t), kAlignment);
}

/// Element (token, column) of the value panels of a block.
[[gnu::always_inline]] constexpr std::size_t value_index(std::size_t token, std::size_t column) noexcept {
    return column / kPanelTokens * kValuePanel + token * kPanelTokens + column % kPanelTokens;
}

/// Sizes of one block of one KV head.
struct BlockLayout {
    std::size_t head_dim;
    std::size_t value_dim;
    ElementType key_type = ElementType::f32;
    ElementType value_type = ElementType::f32;

    constexpr std::size_t panel_elements() const noexcept { return head_dim * kPanelTokens; }
    constexpr std::size_t columns() const noexcept { return padded_columns(value_dim); }
    constexpr std::size_t key_elements() const noexcept { return kBlockPanels * panel_elements(); }
    constexpr std::size_t value_elements() const noexcept { return kBlockTokens * columns(); }
    /// Bytes from the block to its value panels: of 64 tokens, hence whole cache lines.
    constexpr std::size_t values_offset() const noexcept { return key_elements() * element_bytes(key_type); }
    constexpr std::size_t bytes() const noexcept {
        return values_offset() + value_elements() * element_bytes(value_type);
    }
};

}  // namespace headlong::kernels
