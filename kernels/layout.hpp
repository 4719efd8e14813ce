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
// Codes. Keys, values and weights of int8 and int4 are scale * q: q in [-127, 127] with scale = largest magnitude /
// 127, or in [-7, 7] with the seventh part, symmetric. A scale is that of a *group* of elements that share it, and
// belongs to one token, or one output feature, alone. Where there are codes, arithmetic is in integers.
//
//   key panel    (of keys and of linear weights) the depth is cut into groups of 64, the last one shorter, and groups
//                into quads of 4 inputs, the last one filled up with zeros. Per group 16 scales (float), then lines of
//                64 bytes. int8: a line is a quad, uint8 [16][4], 128 + q. int4: a line is two quads, [16][4] bytes of
//                8 + q, the first quad in the low halves. A full group of int8 is 64 + 1024 bytes, of int4 64 + 512.
//   value block  the columns are cut into groups of 128. Per group 64 scales (float), one a token, then value panels of
//                16 columns: int8 [32][16][2], pairs of tokens, q itself; int4 [16][16][2], of four tokens the first
//                pair in the low halves, 8 + q.
//   code row     (a query, or an input of a linear layer: rows that meet key panels of codes) per quad 8 bytes, quads
//                filled up to an even number with zeros; then per group a factor (float), and per group the sum of its
//                codes C (int32). An element is factor * C. C = 254 A + B has 15 bits: A in [-127, 127] rounds the
//                element, B in [-127, 127] what is left. A quad is int16 C[4], or where the set multiplies bytes
//                (KernelTable::code_terms) int8 A[4], B[4]: such rows are scratch of one call, and no other set reads
//                them.
//
// A sum over a group, of C * (128 + q), stays below 64 * 32385 * 255 < 2^31; so does one over a block of weights, which
// have codes in [0, 32767] there, times q: 64 * 32767 * 127.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/compiler.hpp"

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

HEADLONG_INLINE constexpr std::size_t element_bytes(ElementType type) noexcept {
    return type == ElementType::f32 ? 4 : 2;
}

/// How a cache's block stores keys, or values.
enum class StoredType : std::uint8_t { f32, f16, bf16, int8, int4 };

HEADLONG_INLINE constexpr bool has_codes(StoredType type) noexcept {
    return type == StoredType::int8 || type == StoredType::int4;
}

/// That of one without codes.
HEADLONG_INLINE constexpr ElementType element_type(StoredType type) noexcept {
    return type == StoredType::f16 ? ElementType::f16 : type == StoredType::bf16 ? ElementType::bf16 : ElementType::f32;
}

HEADLONG_INLINE constexpr std::size_t round_up(std::size_t value, std::size_t multiple) noexcept {
    return (value + multiple - 1) / multiple * multiple;
}

/// Columns of the value panels of a block, padding included.
HEADLONG_INLINE constexpr std::size_t padded_columns(std::size_t value_dim) noexcept {
    return round_up(value_dim, kPanelTokens);
}

inline constexpr std::size_t kCodeGroup = 64;  ///< inputs of a key panel that share a scale
inline constexpr std::size_t kQuadInputs = 4;
inline constexpr std::size_t kCodeScaleBytes = kPanelTokens * sizeof(float);  ///< of one group of a key panel
inline constexpr std::size_t kCodeLineBytes = kPanelTokens * kQuadInputs;
inline constexpr std::size_t kRowQuadBytes = 2 * kQuadInputs;
inline constexpr std::size_t kRowGroupBytes = 2 * kCodeGroup;

inline constexpr std::size_t kValueGroup = 128;  ///< columns of a token's values that share a scale
inline constexpr std::size_t kValueScaleBytes = kBlockTokens * sizeof(float);  ///< of one group of a value block

/// Quads of a line, pairs of tokens in the bytes of a value panel that hold one column's: codes in a byte.
HEADLONG_INLINE constexpr std::size_t codes_in_byte(StoredType type) noexcept {
    return type == StoredType::int4 ? 2 : 1;
}
HEADLONG_INLINE constexpr std::int32_t largest_code(StoredType type) noexcept {
    return type == StoredType::int4 ? 7 : 127;
}

HEADLONG_INLINE constexpr std::size_t code_groups(std::size_t depth) noexcept {
    return (depth + kCodeGroup - 1) / kCodeGroup;
}
HEADLONG_INLINE constexpr std::size_t code_quads(std::size_t depth) noexcept {
    return (depth + kQuadInputs - 1) / kQuadInputs;
}
HEADLONG_INLINE constexpr std::size_t code_lines(StoredType type, std::size_t depth) noexcept {
    return (code_quads(depth) + codes_in_byte(type) - 1) / codes_in_byte(type);
}

/// Inputs of group `group`.
HEADLONG_INLINE constexpr std::size_t code_group_inputs(std::size_t depth, std::size_t group) noexcept {
    const std::size_t left = depth - group * kCodeGroup;
    return left < kCodeGroup ? left : kCodeGroup;
}

/// Bytes of a key panel of codes, a multiple of a cache line, and from one full group to the next.
HEADLONG_INLINE constexpr std::size_t code_panel_bytes(StoredType type, std::size_t depth) noexcept {
    return code_groups(depth) * kCodeScaleBytes + code_lines(type, depth) * kCodeLineBytes;
}
HEADLONG_INLINE constexpr std::size_t code_group_bytes(StoredType type) noexcept {
    return code_panel_bytes(type, kCodeGroup);
}

/// Where a code row's factors and sums begin, and its bytes: a multiple of a cache line.
HEADLONG_INLINE constexpr std::size_t code_row_factors(std::size_t depth) noexcept {
    return round_up(code_quads(depth), 2) * kRowQuadBytes;
}
HEADLONG_INLINE constexpr std::size_t code_row_sums(std::size_t depth) noexcept {
    return code_row_factors(depth) + code_groups(depth) * sizeof(float);
}
HEADLONG_INLINE constexpr std::size_t code_row_bytes(std::size_t depth) noexcept {
    return round_up(code_row_sums(depth) + code_groups(depth) * sizeof(std::int32_t), kAlignment);
}

/// Bytes of one value panel of codes.
HEADLONG_INLINE constexpr std::size_t value_code_bytes(StoredType type) noexcept {
    return kValuePanel / codes_in_byte(type);
}
/// Bytes of the groups of a value block before column `column`, a multiple of kValueGroup, or of all its columns.
HEADLONG_INLINE constexpr std::size_t value_block_bytes(StoredType type, std::size_t columns) noexcept {
    return (columns + kValueGroup - 1) / kValueGroup * kValueScaleBytes +
           (columns + kPanelTokens - 1) / kPanelTokens * value_code_bytes(type);
}
/// Where the byte of (token, column) lies in a value block of codes; and of int4, whether in its high half.
HEADLONG_INLINE constexpr std::size_t value_code_index(StoredType type, std::size_t token,
                                                       std::size_t column) noexcept {
    const std::size_t group = column / kValueGroup * kValueGroup;
    const std::size_t panel = (column - group) / kPanelTokens * value_code_bytes(type);
    const std::size_t pairs = token / 2 / codes_in_byte(type) * 2 * kPanelTokens;
    return value_block_bytes(type, group) + kValueScaleBytes + panel + pairs + column % kPanelTokens * 2 + token % 2;
}
HEADLONG_INLINE constexpr bool in_high_half(std::size_t token) noexcept { return token / 2 % 2 != 0; }
/// Where the byte of (input, token) lies in a key panel of codes; and of int4, whether in its high half.
HEADLONG_INLINE constexpr std::size_t key_code_index(StoredType type, std::size_t input, std::size_t lane) noexcept {
    const std::size_t line = input % kCodeGroup / kQuadInputs / codes_in_byte(type);
    return input / kCodeGroup * code_group_bytes(type) + kCodeScaleBytes + line * kCodeLineBytes + lane * kQuadInputs +
           input % kQuadInputs;
}
HEADLONG_INLINE constexpr bool in_high_quad(std::size_t input) noexcept { return input / kQuadInputs % 2 != 0; }

/// Element (token, column) of the value panels of a block.
HEADLONG_INLINE constexpr std::size_t value_index(std::size_t token, std::size_t column) noexcept {
    return column / kPanelTokens * kValuePanel + token * kPanelTokens + column % kPanelTokens;
}

/// Bytes of a key panel.
HEADLONG_INLINE constexpr std::size_t key_panel_bytes(StoredType type, std::size_t head_dim) noexcept {
    return has_codes(type) ? code_panel_bytes(type, head_dim)
                           : head_dim * kPanelTokens * element_bytes(element_type(type));
}

/// Sizes of one block of one KV head.
struct BlockLayout {
    std::size_t head_dim;
    std::size_t value_dim;
    StoredType key_type = StoredType::f32;
    StoredType value_type = StoredType::f32;

    constexpr std::size_t columns() const noexcept { return padded_columns(value_dim); }
    constexpr std::size_t panel_bytes() const noexcept { return key_panel_bytes(key_type, head_dim); }
    /// Bytes from the block to its values: of 64 tokens, hence whole cache lines.
    constexpr std::size_t values_offset() const noexcept { return kBlockPanels * panel_bytes(); }
    constexpr std::size_t value_bytes() const noexcept {
        return has_codes(value_type) ? value_block_bytes(value_type, columns())
                                     : kBlockTokens * columns() * element_bytes(element_type(value_type));
    }
    constexpr std::size_t bytes() const noexcept { return values_offset() + value_bytes(); }
};

}  // namespace headlong::kernels
