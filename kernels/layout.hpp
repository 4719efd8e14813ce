// The one layout that caches, packed tensors and linear layers share. Every instruction set reads the same bytes.
//
//   panel   16 tokens, tokens in the lanes: float [depth][16]. A score needs no horizontal sum and no transposition;
//           16 floats are one cache line, one AVX-512 register, two AVX2 registers, four NEON registers.
//   values  rows [token][pitch], the pitch being value_dim rounded up to 16 floats, so that every row starts on a
//           cache line and column loops need no tail. Padding columns hold 0.
//   block   64 tokens of one KV head: 4 key panels, then 64 value rows. Position p lies in lane p mod 16 of panel
//           (p mod 64) / 16 of block p / 64.
//   span    512 positions [512 i, 512 (i + 1)): the unit whose softmax state is computed alone, from zero.
//   group   64 spans: states fold span by span inside a group, and the groups fold in ascending order.
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

/// Alignment of every buffer that kernels see: a cache line, and the widest register.
inline constexpr std::size_t kAlignment = 64;

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) noexcept {
    return (value + multiple - 1) / multiple * multiple;
}

/// Floats from one value row to the next.
constexpr std::size_t value_pitch(std::size_t value_dim) noexcept { return round_up(value_dim, kPanelTokens); }

/// Sizes of one block of one KV head, in floats.
struct BlockLayout {
    std::size_t head_dim;
    std::size_t value_dim;

    constexpr std::size_t panel_floats() const noexcept { return head_dim * kPanelTokens; }
    constexpr std::size_t pitch() const noexcept { return value_pitch(value_dim); }
    constexpr std::size_t values_offset() const noexcept { return kBlockPanels * panel_floats(); }
    constexpr std::size_t floats() const noexcept { return values_offset() + kBlockTokens * pitch(); }
    constexpr std::size_t bytes() const noexcept { return floats() * sizeof(float); }
};

}  // namespace headlong::kernels
