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
// A fused dot product has the latency of a multiply-add. Otherwise a product is a register of its own, and adding it
// takes one cycle.
inline constexpr std::size_t kDotSums = kDotFused ? kTileVectors : kTileVectors * 2 / 3;

/// The lanes of vectors whose number is a power of two, pair by pair: few dependent steps beside a short loop.
template <std::size_t Count>
HEADLONG_INLINE float total_of(F32 (&sums)[Count]) noexcept {
    HEADLONG_UNROLL for (std::size_t half = Count / 2; half > 0; half /= 2) {
        HEADLONG_UNROLL for (std::size_t i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
    }
    float lanes[kLanes];
    store(lanes, sums[0]);
    float total = 0.0F;
    for (const float lane : lanes) total += lane;
    return total;
}

/// Every lane of every sum gains 2^-20 a round, exactly for 2^24 rounds.
inline double fma_loop(std::size_t rounds) noexcept {
    constexpr float kStep = 0x1p-20F;
    F32 sums[kFmaSums];
    HEADLONG_UNROLL for (std::size_t i = 0; i < kFmaSums; ++i) {
        sums[i] = broadcast(0.0F);
        hide(sums[i]);  // or one sum would do for all
    }
    F32 one = broadcast(1.0F);
    F32 step = broadcast(kStep);
    hide(one);
    for (std::size_t round = 0; round < rounds; ++round) {
        HEADLONG_UNROLL for (std::size_t i = 0; i < kFmaSums; ++i) {
#if defined(HEADLONG_ISA_GENERIC)
            sums[i] = fma(sums[i], one, step);  // a product of its own would cost a register, and a copy
#else
            hide(step);
            sums[i] = fma(one, step, sums[i]);
#endif
        }
    }
    double total = 0.0;
    HEADLONG_UNROLL for (std::size_t i = 0; i < kFmaSums; ++i) {  // unrolled: an index would put the sums in memory
        float lanes[kLanes];
        store(lanes, sums[i]);
        for (const float lane : lanes) total += static_cast<double>(lane);
    }
    return total;
}

/// Every sum gains kDotProducts products 1 * 1 a round.
inline std::uint32_t dot_loop(std::size_t rounds) noexcept {
    I32 sums[kDotSums];
    HEADLONG_UNROLL for (std::size_t i = 0; i < kDotSums; ++i) {
        sums[i] = zero_i32();
        hide(sums[i]);
    }
    DotOperand left = dot_ones();
    DotOperand right = dot_ones();
    hide(right);  // or a product with 1 would be none
    for (std::size_t round = 0; round < rounds; ++round) {
        HEADLONG_UNROLL for (std::size_t i = 0; i < kDotSums; ++i) {
            hide(left);
            sums[i] = dot_add(sums[i], left, right);
        }
    }
    std::uint32_t total = 0;
    HEADLONG_UNROLL for (std::size_t i = 0; i < kDotSums; ++i) {
        std::uint32_t lanes[sizeof(I32) / 4];
        std::memcpy(lanes, &sums[i], sizeof sums[i]);
        for (const std::uint32_t lane : lanes) total += lane;
    }
    return total;
}

/// Adds up memory; with `prefetch_bytes`, each line that far ahead is asked for.
inline float read_loop(const kernels::ReadLoop& a) noexcept {
    constexpr std::size_t kLineVectors = 16 / kLanes;
    constexpr std::size_t kSums = 8;  // latency 4, two a cycle
    constexpr std::size_t kStep = kSums * kLanes;
    static_assert(kernels::kReadFloats % kStep == 0);
    constexpr std::size_t kLines = kSums / kLineVectors;
    F32 sums[kSums];
    HEADLONG_UNROLL for (std::size_t i = 0; i < kSums; ++i) sums[i] = broadcast(0.0F);
    const float* const end = a.data + a.count;
    for (std::size_t pass = 0; pass < a.passes; ++pass) {
        if (a.prefetch_bytes == 0) {
            for (const float* p = a.data; p != end; p += kStep) {
                HEADLONG_UNROLL for (std::size_t i = 0; i < kSums; ++i) sums[i] = sums[i] + load(p + i * kLanes);
            }
        } else {
            for (const float* p = a.data; p != end; p += kStep) {
                // an address past the end is never read, only asked for
                const std::uintptr_t ahead = reinterpret_cast<std::uintptr_t>(p) + a.prefetch_bytes;
                HEADLONG_UNROLL for (std::size_t line = 0; line < kLines; ++line) {
                    compiler::prefetch(reinterpret_cast<const char*>(ahead) + line * 64);
                }
                HEADLONG_UNROLL for (std::size_t i = 0; i < kSums; ++i) sums[i] = sums[i] + load(p + i * kLanes);
            }
        }
    }
    return total_of(sums);
}

}  // namespace headlong::HEADLONG_ISA
