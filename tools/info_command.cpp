#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <headlong/context.hpp>
#include <headlong/version.hpp>

#include "engine/isa.hpp"
#include "engine/mapped_file.hpp"
#include "tools/commands.hpp"
#include "tools/measure/machine.hpp"

#ifndef HEADLONG_BUILD_TYPE
#error "the build must define HEADLONG_BUILD_TYPE"
#endif

namespace headlong::tools {
namespace {

constexpr const char* kArchitecture =
#if defined(__x86_64__)
    "x86_64";
#elif defined(__aarch64__)
    "aarch64";
#else
    "unknown";
#endif

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

}  // namespace

int run_info(const InfoArguments& arguments) {
    std::vector<std::string> compiled;
    for (const Isa isa :
         {Isa::generic, Isa::avx2, Isa::avx2vnni, Isa::avx512, Isa::avx512vnni, Isa::neon, Isa::neondot}) {
        if (is_built(isa)) compiled.emplace_back(to_string(isa));
    }
    std::vector<std::string> available;
    for (const Isa isa : available_isas()) available.emplace_back(to_string(isa));
    ContextOptions options;
    options.threads = 1;
    const std::string chosen = to_string(Context(options).isa());
    const char* const set = std::getenv("HEADLONG_ISA");
    const std::string cap = set != nullptr ? set : "";
    const std::vector<CacheLevel> caches = cache_levels();

    if (arguments.json) {
        nlohmann::ordered_json info;
        info["version"] = version();
        info["processor"] = processor();
        info["architecture"] = kArchitecture;
        info["isa"] = {{"compiled", compiled}, {"available", available}, {"chosen", chosen}};
        info["HEADLONG_ISA"] = nullptr;
        if (!cap.empty()) info["HEADLONG_ISA"] = cap;
        info["threads"] = {{"hardware", std::thread::hardware_concurrency()}, {"default", default_concurrency()}};
        info["caches_kib"] = nlohmann::ordered_json::object();
        for (const CacheLevel& cache : caches) info["caches_kib"][cache.name] = cache.kib;
        info["compiler"] = compiler();
        info["build_type"] = HEADLONG_BUILD_TYPE;
        fmt::print("{}\n", info.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
        return done;
    }
    const auto print = [](const char* name, const std::string& value) { fmt::print("{:<18}{}\n", name, value); };
    print("version", version());
    print("processor", fmt::format("{} ({})", processor(), kArchitecture));
    print("instruction sets", fmt::format("compiled {}", fmt::join(compiled, ", ")));
    print("", fmt::format("available {}", fmt::join(available, ", ")));
    print("", "chosen " + chosen);
    if (!cap.empty()) print("HEADLONG_ISA", one_line(cap));
    print("threads", fmt::format("{} by default, the hardware has {}", default_concurrency(),
                                 std::thread::hardware_concurrency()));
    if (!caches.empty()) {
        std::vector<std::string> sizes;
        for (const CacheLevel& cache : caches) sizes.push_back(fmt::format("{} {} KiB", cache.name, cache.kib));
        print("caches", fmt::format("{}", fmt::join(sizes, ", ")));
    }
    print("compiler", compiler());
    print("build type", HEADLONG_BUILD_TYPE);
    return done;
}

}  // namespace headlong::tools
