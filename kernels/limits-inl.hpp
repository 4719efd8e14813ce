// Loops that do nothing but what a machine is limited by: multiply-adds in registers, integer dot products in
// registers, loads. Instruments measure with them how far a kernel is from the limit. Each returns a sum that is known
// beforehand, so that no compiler can leave work out unseen. Compiled per instruction set.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/simd/native.hpp"

namespace headlong::HEADLONG_ISA {

// As many independent sums as the score kernel's register tile has: enough to hide the latency, which is what the
// tile's size was chosen for.
inline constexpr std::size_t kFmaSums = kTileVectors;
// A product is a register of its own here, and adding it takes one cycle.
inline constexpr std::size_t kDotSums = kTileVectors * 2 / 3;

/// Every sum runs x = x / 2 + 1 from its own number, which ends at 2: [sums][lanes] of them.
inline float fma_loop(std::size_t rounds) noexcept {
    F32 sums[kFmaSums];
    HEADLONG_UNROLL for (std::size_t i = 0; i < kFmaSums; ++i) sums[i] = broadcast(static_cast<float>(i));
    F32 half = broadcast(0.5F);
    F32 one = broadcast(1.0F);
    hide(half);
    hide(one);
    for (std::size_t round = 0; round < rounds; ++round) {
        HEADLONG_UNROLL for (std::size_t i = 0; i < kFmaSums; ++i) sums[i] = fma(sums[i], half, one);
    }
    float total = 0.0F;
    for (const F32& sum : sums) {
        float lanes[kLanes];
        store(lanes, sum);
        for (const float lane : lanes) total += lane;
    }
    return total;
}

/// Every sum gains kDotProducts products 1 * 1 a round.
inline std::uint32_t dot_loop(std::size_t rounds) noexcept {
    I32 sums[kDotSums];
    HEADLONG_UNROLL for (std::size_t i = 0; i < kDotSums; ++i) sums[i] = zero_i32();
    DotOperand left = dot_ones();
    DotOperand right = dot_ones();
    for (std::size_t round = 0; round < rounds; ++round) {
        HEADLONG_UNROLL for (std::size_t i = 0; i < kDotSums; ++i) {
            hide(left);  // or the product would be computed once for all
            sums[i] = dot_add(sums[i], left, right);
        }
        hide(right);
    }
    std::uint32_t total = 0;
    for (const I32& sum : sums) {
        std::uint32_t lanes[sizeof(I32) / 4];
        std::memcpy(lanes, &sum, sizeof sum);
        for (const std::uint32_t lane : lanes) total += lane;
    }
    return total;
}

/// Adds up memory; with `prefetch_bytes`, each line that far ahead is asked for.
inline float read_loop(const kernels::ReadLoop& a) noexcept {
    constexpr std::size_t kLineVectors = 16 / kLanes;
    constexpr std::size_t kLines = kLineVectors >= 4 ? 2 : 8 / kLineVectors;  // 8 sums: latency 4, two a cycle
    constexpr std::size_t kSums = kLines * kLineVectors;
    static_assert(kernels::kReadFloats % (kLines * 16) == 0);
    F32 sums[kSums];
    HEADLONG_UNROLL for (std::size_t i = 0; i < kSums; ++i) sums[i] = broadcast(0.0F);
    const auto add = [&](const float* p) __attribute__((always_inline)) {
        HEADLONG_UNROLL for (std::size_t i = 0; i < kSums; ++i) sums[i] = sums[i] + load(p + i * kLanes);
    };
    if (a.prefetch_bytes == 0) {
        for (std::size_t i = 0; i < a.count; i += kLines * 16) add(a.data + i);
    } else {
        for (std::size_t i = 0; i < a.count; i += kLines * 16) {
            // an address past the end is never read, only asked for
            const auto next = reinterpret_cast<std::uintptr_t>(a.data + i) + a.prefetch_bytes;
            HEADLONG_UNROLL for (std::size_t line = 0; line < kLines; ++line) {
                __builtin_prefetch(reinterpret_cast<const char*>(next) + line * 64);
            }
            add(a.data + i);
        }
    }
    float total = 0.0F;
    for (const F32& sum : sums) {
        float lanes[kLanes];
        store(lanes, sum);
        for (const float lane : lanes) total += lane;
    }
    return total;
}

}  // namespace headlong::HEADLONG_ISA
