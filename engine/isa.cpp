#include "engine/isa.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <headlong/error.hpp>
#include <string>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels/compiler.hpp"

namespace headlong {
namespace {

struct IsaName {
    Isa isa;
    const char* name;
    bool of_this_architecture;
};

#if defined(__aarch64__)
constexpr bool kX86 = false;
constexpr bool kArm = true;
#else
constexpr bool kX86 = true;
constexpr bool kArm = false;
#endif

constexpr std::array<IsaName, 7> kNames{{
    {Isa::generic, "generic", true},
    {Isa::avx2, "avx2", kX86},
    {Isa::avx2vnni, "avx2vnni", kX86},
    {Isa::avx512, "avx512", kX86},
    {Isa::avx512vnni, "avx512vnni", kX86},
    {Isa::neon, "neon", kArm},
    {Isa::neondot, "neondot", kArm},
}};

const kernels::KernelTable* find_table(Isa isa) noexcept {
    switch (isa) {
        case Isa::generic:
            return kernels::generic_table;
        case Isa::avx2:
            return kernels::avx2_table;
        case Isa::avx2vnni:
            return kernels::avx2vnni_table;
        case Isa::avx512:
            return kernels::avx512_table;
        case Isa::avx512vnni:
            return kernels::avx512vnni_table;
        case Isa::neon:
            return kernels::neon_table;
        case Isa::neondot:
            return kernels::neondot_table;
    }
    return nullptr;
}

#if defined(__x86_64__) || defined(__i386__)

/// Bits of CPUID and XCR0 (Intel SDM volume 2, CPUID; volume 1, chapter 13). Every feature that a unit's compile
/// flags enable is looked at, and the operating system must save the registers: CPUID alone does not say so.
struct X86Features {
    bool avx2 = false;
    bool avx2vnni = false;
    bool avx512 = false;
    bool avx512vnni = false;

    X86Features() noexcept {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (__get_cpuid(1, &a, &b, &c, &d) == 0) return;
        constexpr unsigned kFma = 1U << 12U, kOsXsave = 1U << 27U, kAvx = 1U << 28U, kF16c = 1U << 29U;
        constexpr unsigned kLeaf1 = kFma | kOsXsave | kAvx | kF16c;
        if ((c & kLeaf1) != kLeaf1) return;
        const std::uint64_t xcr0 = compiler::saved_register_files();
        if ((xcr0 & 0x6U) != 0x6U) return;  // xmm and ymm state
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return;
        const unsigned subleaves = a;
        avx2 = (b & 1U << 5U) != 0;
        constexpr unsigned kF = 1U << 16U, kDq = 1U << 17U, kCd = 1U << 28U, kBw = 1U << 30U, kVl = 1U << 31U;
        constexpr unsigned kAvx512 = kF | kDq | kCd | kBw | kVl;
        avx512 = avx2 && (b & kAvx512) == kAvx512 && (xcr0 & 0xE6U) == 0xE6U;  // and opmask, zmm
        avx512vnni = avx512 && (c & 1U << 11U) != 0;
        if (subleaves < 1 || __get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return;
        avx2vnni = avx2 && (a & 1U << 4U) != 0;
    }
};

bool can_run(Isa isa) noexcept {
    static const X86Features features;
    switch (isa) {
        case Isa::generic:
            return true;
        case Isa::avx2:
            return features.avx2;
        case Isa::avx2vnni:
            return features.avx2vnni;
        case Isa::avx512:
            return features.avx512;
        case Isa::avx512vnni:
            return features.avx512vnni;
        default:
            return false;
    }
}

#else

/// The dot products, and what else -march=armv8.2-a lets a compiler use.
bool has_dot_products() noexcept {
#if defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long kFlags = HWCAP_ASIMDDP | HWCAP_ASIMDRDM | HWCAP_ATOMICS | HWCAP_CRC32;
    return (getauxval(AT_HWCAP) & kFlags) == kFlags;
#else
    return false;
#endif
}

// Advanced SIMD is part of every AArch64 system that runs Linux.
bool can_run(Isa isa) noexcept {
    static const bool dot_products = has_dot_products();
    switch (isa) {
        case Isa::generic:
            return true;
        case Isa::neon:
            return kArm;
        case Isa::neondot:
            return dot_products;
        default:
            return false;
    }
}

#endif

/// The cap that the environment sets, if any.
std::optional<Isa> environment_cap() {
    const char* value = std::getenv("HEADLONG_ISA");  // NOLINT(concurrency-mt-unsafe): read only
    if (value == nullptr || *value == '\0') return std::nullopt;
    std::string allowed;
    for (const IsaName& entry : kNames) {
        if (!entry.of_this_architecture) continue;
        if (entry.name == std::string_view(value)) return entry.isa;
        allowed += allowed.empty() ? "" : ", ";
        allowed += entry.name;
    }
    throw InvalidArgument(fmt::format("HEADLONG_ISA is '{}'; allowed: {}", value, allowed));
}

}  // namespace

const char* to_string(Isa isa) noexcept {
    for (const IsaName& entry : kNames) {
        if (entry.isa == isa) return entry.name;
    }
    return "unknown";
}

std::optional<Isa> parse_isa(std::string_view name) noexcept {
    for (const IsaName& entry : kNames) {
        if (entry.name == name) return entry.isa;
    }
    return std::nullopt;
}

const kernels::KernelTable& table_of(Isa isa) {
    const kernels::KernelTable* table = find_table(isa);
    if (table == nullptr)
        throw Unsupported(fmt::format("instruction set {}: this build has no kernels for it", to_string(isa)));
    return *table;
}

bool is_of_this_architecture(Isa isa) noexcept {
    for (const IsaName& entry : kNames) {
        if (entry.isa == isa) return entry.of_this_architecture;
    }
    return false;
}

bool is_built(Isa isa) noexcept { return find_table(isa) != nullptr; }

bool is_supported(Isa isa) noexcept { return can_run(isa); }

std::vector<Isa> available_isas() {
    const std::optional<Isa> cap = environment_cap();
    std::vector<Isa> isas;
    for (const IsaName& entry : kNames) {
        if (is_built(entry.isa) && is_supported(entry.isa) && (!cap || entry.isa <= *cap)) isas.push_back(entry.isa);
    }
    return isas;
}

}  // namespace headlong
