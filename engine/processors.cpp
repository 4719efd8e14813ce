#include "engine/processors.hpp"

#if defined(__linux__)
#include <sched.h>
#endif

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <headlong/error.hpp>
#include <system_error>
#include <utility>
#include <vector>

namespace headlong {
namespace {

/// Reads a number at the beginning of `text` and takes it away.
std::optional<std::size_t> take_number(std::string_view& text) {
    std::size_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{}) return {};
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return number;
}

std::string list_of(const ProcessorSet& processors) {
    std::string text;
    for (std::size_t first = 0; first < processors.size(); ++first) {
        if (!processors[first]) continue;
        std::size_t last = first;
        while (last + 1 < processors.size() && processors[last + 1]) ++last;
        text += fmt::format("{}{}", text.empty() ? "" : ",", first);
        if (last > first) text += fmt::format("-{}", last);
        first = last;
    }
    return text;
}

std::optional<ProcessorSet> read_list(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    if (!std::getline(file, line)) return {};
    return parse_processor_list(line);
}

/// Intel's hybrid processors list their performance cores. Others tell each processor's capacity, relative to the
/// largest's 1024: those above the least are performance cores. Where all are alike, or nothing is told, all are.
ProcessorSet performance_cores(const ProcessorSet& allowed, const std::string& devices) {
    if (const auto cores = read_list(devices + "/cpu_core/cpus")) return *cores & allowed;
    std::vector<std::pair<std::size_t, long>> capacities;
    for (std::size_t number = 0; number < allowed.size(); ++number) {
        if (!allowed[number]) continue;
        std::ifstream file(fmt::format("{}/system/cpu/cpu{}/cpu_capacity", devices, number));
        long capacity = 0;
        if (!(file >> capacity)) return allowed;
        capacities.emplace_back(number, capacity);
    }
    const auto [least, most] = std::minmax_element(capacities.begin(), capacities.end(),
                                                   [](const auto& a, const auto& b) { return a.second < b.second; });
    if (capacities.empty() || least->second == most->second) return allowed;
    ProcessorSet cores;
    for (const auto& [number, capacity] : capacities) {
        if (capacity > least->second) cores.set(number);
    }
    return cores;
}

}  // namespace

std::optional<ProcessorSet> parse_processor_list(std::string_view text) {
    ProcessorSet processors;
    for (;;) {
        const auto first = take_number(text);
        if (!first) return {};
        auto last = first;
        if (text.starts_with('-')) {
            text.remove_prefix(1);
            last = take_number(text);
        }
        if (!last || *last < *first || *last >= processors.size()) return {};
        for (std::size_t number = *first; number <= *last; ++number) processors.set(number);
        if (text.empty()) return processors;
        if (!text.starts_with(',')) return {};
        text.remove_prefix(1);
    }
}

ProcessorSet choose_processors(const std::string& text, const std::string& devices) {
    const auto allowed = processors_of_this_thread();
    if (!allowed) throw Unsupported("ContextOptions: processors: this system cannot keep threads to processors");
    constexpr std::string_view kNode = "node";
    std::optional<ProcessorSet> named;
    if (text == "performance") {
        named = performance_cores(*allowed, devices);
    } else if (std::string_view number = text; number.starts_with(kNode)) {
        number.remove_prefix(kNode.size());
        const auto node = take_number(number);
        if (node && number.empty()) {
            named = read_list(fmt::format("{}/system/node/node{}/cpulist", devices, *node)).value_or(ProcessorSet{});
        }
    } else {
        named = parse_processor_list(text);
    }
    if (!named) {
        throw InvalidArgument(
            fmt::format("ContextOptions: processors is \"{}\"; allowed: \"performance\", \"node\" and a number, a list "
                        "as \"0-3,8\" of numbers below {}",
                        text, ProcessorSet().size()));
    }
    *named &= *allowed;
    if (named->none()) {
        throw InvalidArgument(
            fmt::format("ContextOptions: processors is \"{}\", none of which this thread may use; those it may: {}",
                        text, list_of(*allowed)));
    }
    return *named;
}

#if defined(__linux__)

std::optional<ProcessorSet> processors_of_this_thread() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return {};
    ProcessorSet processors;
    static_assert(processors.size() == CPU_SETSIZE);
    for (std::size_t number = 0; number < processors.size(); ++number) processors[number] = CPU_ISSET(number, &set);
    return processors;
}

void keep_this_thread_to(const ProcessorSet& processors) noexcept {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (std::size_t number = 0; number < processors.size(); ++number) {
        if (processors[number]) CPU_SET(number, &set);
    }
    sched_setaffinity(0, sizeof set, &set);
}

#else

std::optional<ProcessorSet> processors_of_this_thread() { return {}; }
void keep_this_thread_to(const ProcessorSet&) noexcept {}

#endif

}  // namespace headlong
