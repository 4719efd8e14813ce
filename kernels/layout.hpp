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
#pragma once

#include <cstddef>
#include <cstdint>

namespace headlong::kernels {

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

constexpr std::size_t element_bytes(ElementType type) noexcept { return type == ElementType::f32 ? 4 : 2; }

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) noexcept {
    return (value + multiple - 1) / multiple * multiple;
}

/// Columns of the value panels of a block, padding included.
constexpr std::size_t padded_columns(std::size_t value_dim) noexcept { return round_up(value_dim, kPanelTokens); }

/// Element (token, column) of the value panels of a block.
constexpr std::size_t value_index(std::size_t token, std::size_t column) noexcept {
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
