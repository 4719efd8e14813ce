#include "tools/measure/machine.hpp"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <thread>

#include <fmt/format.h>

#include <headlong/context.hpp>
#include <headlong/version.hpp>

#include "engine/mapped_file.hpp"
#include "tools/measure/memory.hpp"

#ifndef HEADLONG_BUILD_TYPE
#error "the build must define HEADLONG_BUILD_TYPE"
#endif

namespace headlong::tools {

const char* architecture() noexcept {
#if defined(__x86_64__)
    return "x86_64";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "unknown";
#endif
}

std::string compiler() {
#if defined(__clang__)
    return fmt::format("clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#elif defined(__GNUC__)
    return fmt::format("gcc {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#else
    return "unknown";
#endif
}

std::string processor() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (!line.starts_with("model name")) continue;
        const std::size_t colon = line.find(':');
        if (colon == std::string::npos) continue;
        const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
        if (begin != std::string::npos) return one_line(line.substr(begin));
    }
    return "unknown";
}

const char* build_type() noexcept { return HEADLONG_BUILD_TYPE; }

std::vector<CacheLevel> cache_levels() {
    std::vector<CacheLevel> levels;
    for (int index = 0; index < 8; ++index) {
        const std::string folder = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/", index);
        std::ifstream level_file(folder + "level");
        std::ifstream type_file(folder + "type");
        std::ifstream size_file(folder + "size");
        std::string level, type, unit;
        std::uint64_t size = 0;
        if (!(level_file >> level) || !(type_file >> type) || !(size_file >> size >> unit)) break;
        if (type == "Instruction") continue;
        if (unit == "M") size *= 1024;
        levels.push_back({one_line("L" + level + (type == "Data" ? "d" : "")), size});
    }
    return levels;
}

std::size_t last_level_cache_bytes() {
    std::uint64_t kib = 0;
    for (const CacheLevel& level : cache_levels()) kib = std::max(kib, level.kib);
    return kib > 0 ? kib * 1024 : std::size_t{32} << 20U;
}

std::size_t read_buffer_cap() { return std::max(8 * last_level_cache_bytes(), std::size_t{64} << 20U); }

nlohmann::ordered_json machine_json() {
    nlohmann::ordered_json machine;
    machine["version"] = version();
    machine["processor"] = processor();
    machine["architecture"] = architecture();
    machine["threads"] = {{"hardware", std::thread::hardware_concurrency()}, {"default", default_concurrency()}};
    machine["caches_kib"] = nlohmann::ordered_json::object();
    for (const CacheLevel& cache : cache_levels()) machine["caches_kib"][cache.name] = cache.kib;
    machine["memory_bytes"] = total_memory();
    const char* const cap = std::getenv("HEADLONG_ISA");
    machine["HEADLONG_ISA"] = nullptr;
    if (cap != nullptr && *cap != '\0') machine["HEADLONG_ISA"] = cap;
    machine["compiler"] = compiler();
    machine["build_type"] = build_type();
    return machine;
}

}  // namespace headlong::tools
