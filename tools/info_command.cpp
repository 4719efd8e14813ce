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
#include "engine/limits.hpp"
#include "engine/mapped_file.hpp"
#include "tools/commands.hpp"
#include "tools/measure/contexts.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/memory.hpp"

namespace headlong::tools {
namespace {

/// Read bandwidth over a buffer of one size.
struct Bandwidth {
    const char* where;
    std::size_t bytes;
    double bytes_per_second = 0.0;
};

/// What a number of threads can do at best with the chosen instruction set.
struct Limits {
    std::size_t threads = 0;
    double clock = 0.0;
    double flops = 0.0;
    double int8_ops = 0.0;
    std::vector<Bandwidth> bandwidths;
};

Limits measure_limits(std::size_t threads) {
    constexpr int kRepetitions = 10;
    const std::unique_ptr<Context> context = make_context({}, threads);
    const std::size_t last = last_level_cache_bytes();
    std::size_t second = std::size_t{256} << 10U;
    for (const CacheLevel& level : cache_levels()) {
        if (level.name == "L2") second = level.kib * 1024;
    }
    Limits limits;
    limits.threads = context->concurrency();
    // halves of a cache, which other programs use too; the first is each thread's own
    limits.bandwidths = {{"L2", second / 2 * threads},
                         {"last-level cache", last / 2},
                         {"memory", std::min(4 * last, available_memory() / 4)}};
    ReadBuffer buffer(limits.bandwidths.back().bytes, context->memory());
    for (int i = 0; i < kRepetitions; ++i) {
        limits.clock = std::max(limits.clock, measure_clock(*context));
        limits.flops = std::max(limits.flops, measure_flops(*context));
        limits.int8_ops = std::max(limits.int8_ops, measure_int8_ops(*context));
        for (Bandwidth& each : limits.bandwidths) {
            const std::size_t least = std::size_t{16} << 20U;
            each.bytes_per_second = std::max(each.bytes_per_second, buffer.measure(*context, each.bytes, least));
        }
    }
    return limits;
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
    std::vector<Limits> limits;
    if (arguments.measure) {
        limits.push_back(measure_limits(1));
        if (default_concurrency() > 1) limits.push_back(measure_limits(default_concurrency()));
    }

    if (arguments.json) {
        nlohmann::ordered_json info;
        info["version"] = version();
        info["processor"] = processor();
        info["architecture"] = architecture();
        info["isa"] = {{"compiled", compiled}, {"available", available}, {"chosen", chosen}};
        info["HEADLONG_ISA"] = nullptr;
        if (!cap.empty()) info["HEADLONG_ISA"] = cap;
        info["threads"] = {{"hardware", std::thread::hardware_concurrency()}, {"default", default_concurrency()}};
        info["caches_kib"] = nlohmann::ordered_json::object();
        for (const CacheLevel& cache : caches) info["caches_kib"][cache.name] = cache.kib;
        info["compiler"] = compiler();
        info["build_type"] = build_type();
        for (const Limits& each : limits) {
            nlohmann::ordered_json json;
            json["threads"] = each.threads;
            json["isa"] = chosen;
            json["clock_ghz"] = each.clock * 1e-9;
            json["f32_gflops"] = each.flops * 1e-9;
            json["int8_gops"] = each.int8_ops * 1e-9;
            for (const Bandwidth& bandwidth : each.bandwidths) {
                json["read"].push_back({{"where", bandwidth.where},
                                        {"bytes", bandwidth.bytes},
                                        {"gbps", bandwidth.bytes_per_second * 1e-9}});
            }
            info["limits"].push_back(std::move(json));
        }
        fmt::print("{}\n", info.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
        return done;
    }
    const auto print = [](const char* name, const std::string& value) { fmt::print("{:<18}{}\n", name, value); };
    print("version", version());
    print("processor", fmt::format("{} ({})", processor(), architecture()));
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
    print("build type", build_type());
    for (const Limits& each : limits) {
        print(each.threads == 1 ? "1 thread" : fmt::format("{} threads", each.threads).c_str(),
              fmt::format("{:.1f} GFLOP/s f32, {:.1f} GOP/s int8, {:.2f} GHz ({})", each.flops * 1e-9,
                          each.int8_ops * 1e-9, each.clock * 1e-9, chosen));
        for (const Bandwidth& bandwidth : each.bandwidths) {
            print("", fmt::format("reads {:.1f} GB/s from {} ({} KiB)", bandwidth.bytes_per_second * 1e-9,
                                  bandwidth.where, bandwidth.bytes / 1024));
        }
    }
    return done;
}

}  // namespace headlong::tools
