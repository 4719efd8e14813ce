// The loops of one set, from the macros that own_loops.hpp defines. No include guard: once per set.

namespace OWN_SET {

using Floats = float __attribute__((vector_size(OWN_BYTES)));
using Elements = OWN_ELEMENT __attribute__((vector_size(OWN_BYTES)));
using Words = std::uint32_t __attribute__((vector_size(OWN_BYTES)));
using Longs = std::uint64_t __attribute__((vector_size(OWN_BYTES), may_alias));

OWN_TARGET inline float fma(std::size_t rounds) noexcept {
    Floats sums[OWN_FMA_SUMS];
    OWN_UNROLL for (std::size_t i = 0; i < OWN_FMA_SUMS; ++i) sums[i] = Floats{};
    const Floats quarter = Floats{} + 0.25F;
    const Floats three = Floats{} + 3.0F;
    for (std::size_t round = 0; round < rounds; ++round) {
        OWN_UNROLL for (std::size_t i = 0; i < OWN_FMA_SUMS; ++i) {
            asm volatile(OWN_FMA : "+" OWN_REGISTER(sums[i]) : OWN_REGISTER(quarter), OWN_REGISTER(three));
        }
    }
    float lanes[OWN_FMA_SUMS * OWN_BYTES / sizeof(float)];
    std::memcpy(lanes, sums, sizeof lanes);
    for (const float lane : lanes) {
        if (lane != lanes[0]) return __builtin_nanf("");
    }
    return lanes[0];
}

inline float fma_result(std::size_t rounds) noexcept {
    return OWN_ACCUMULATES != 0 ? 0.75F * static_cast<float>(rounds) : 4.0F;
}

OWN_TARGET inline std::uint32_t dot(std::size_t rounds) noexcept {
    Words sums[OWN_DOT_SUMS];
    OWN_UNROLL for (std::size_t i = 0; i < OWN_DOT_SUMS; ++i) sums[i] = Words{};
    const Elements left = Elements{} + OWN_ELEMENT{3};
    const Elements right = Elements{} + OWN_ELEMENT{5};
    for (std::size_t round = 0; round < rounds; ++round) {
        OWN_UNROLL for (std::size_t i = 0; i < OWN_DOT_SUMS; ++i) {
            Words spare, other;
            asm volatile(OWN_DOT
                         : "+" OWN_REGISTER(sums[i]), "=&" OWN_REGISTER(spare), "=&" OWN_REGISTER(other)
                         : OWN_REGISTER(left), OWN_REGISTER(right));
        }
    }
    std::uint32_t lanes[OWN_DOT_SUMS * OWN_BYTES / sizeof(std::uint32_t)];
    std::memcpy(lanes, sums, sizeof lanes);
    std::uint32_t total = 0;
    for (const std::uint32_t lane : lanes) total += lane;
    return total;
}

OWN_TARGET inline std::uint64_t read(const std::uint64_t* data, std::size_t count, std::size_t passes,
                                     std::size_t ahead) noexcept {
    constexpr std::size_t kSums = 8;
    constexpr std::size_t kStep = kSums * OWN_BYTES;
    static_assert(64 * sizeof(std::uint64_t) % kStep == 0);
    Longs sums[kSums];
    OWN_UNROLL for (std::size_t i = 0; i < kSums; ++i) sums[i] = Longs{};
    const std::size_t bytes = count * sizeof(std::uint64_t);
    for (std::size_t pass = 0; pass < passes; ++pass) {
        const auto* p = reinterpret_cast<const char*>(data);
        for (std::size_t at = 0; at < bytes; at += kStep) {
            if (ahead != 0) {
                const auto next = reinterpret_cast<std::uintptr_t>(p + at) + ahead;  // may lie behind the end
                OWN_UNROLL for (std::size_t line = 0; line < kStep; line += 64) {
                    __builtin_prefetch(reinterpret_cast<const char*>(next + line));
                }
            }
            OWN_UNROLL for (std::size_t i = 0; i < kSums; ++i) {
                sums[i] += *reinterpret_cast<const Longs*>(p + at + i * OWN_BYTES);
            }
        }
    }
    std::uint64_t lanes[kSums * OWN_BYTES / sizeof(std::uint64_t)];
    std::memcpy(lanes, sums, sizeof lanes);
    std::uint64_t total = 0;
    for (const std::uint64_t lane : lanes) total += lane;
    return total;
}

inline constexpr OwnLoops loops{
    fma,  fma_result, OWN_FMA_SUMS* OWN_BYTES / sizeof(float) * 2, dot, OWN_DOT_SUMS* OWN_BYTES / sizeof(OWN_ELEMENT),
    read,
};

}  // namespace OWN_SET

#undef OWN_SET
#undef OWN_TARGET
#undef OWN_BYTES
#undef OWN_REGISTER
#undef OWN_ACCUMULATES
#undef OWN_FMA_SUMS
#undef OWN_FMA
#undef OWN_ELEMENT
#undef OWN_DOT_SUMS
#undef OWN_DOT
