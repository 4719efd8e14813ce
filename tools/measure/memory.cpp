#include "tools/measure/memory.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include <fmt/format.h>

#include <headlong/error.hpp>

#include "engine/concurrency.hpp"

namespace headlong::tools {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

/// The number behind a name in a file of lines "name number" or "name: number".
std::optional<std::uint64_t> number_in(const std::string& path, const std::string& name) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string word;
        std::uint64_t number = 0;
        if (words >> word && word == name && words >> number) return number;
    }
    return {};
}

/// The number that a file holds; nothing for "max".
std::optional<std::uint64_t> number_of(const std::string& path) {
    std::ifstream file(path);
    std::uint64_t number = 0;
    if (file >> number) return number;
    return {};
}

std::uint64_t meminfo(const std::string& root, const std::string& name) {
    const auto kib = number_in(root + "/proc/meminfo", name);
    return kib && *kib < kNoLimit / 1024 ? *kib * 1024 : kNoLimit;
}

/// The least that `bytes_of` says of the process's cgroups.
template <class BytesOf>
std::uint64_t least(const std::string& root, const BytesOf& bytes_of) {
    std::uint64_t bytes = kNoLimit;
    for (const CgroupFolder& group : cgroup_folders(root + "/sys/fs/cgroup", root + "/proc/self/cgroup", "memory")) {
        // v1 says "no limit" with a number of 63 bits, which the machine's memory is below anyway
        const auto limit = number_of(group.path + (group.v2 ? "/memory.max" : "/memory.limit_in_bytes"));
        if (limit) bytes = std::min(bytes, bytes_of(group, *limit));
    }
    return bytes;
}

}  // namespace

std::uint64_t total_memory(const std::string& root) {
    return std::min(meminfo(root, "MemTotal:"),
                    least(root, [](const CgroupFolder&, std::uint64_t limit) { return limit; }));
}

std::uint64_t available_memory(const std::string& root) {
    const auto left = [](const CgroupFolder& group, std::uint64_t limit) {
        const std::uint64_t used =
            number_of(group.path + (group.v2 ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
        const std::uint64_t reclaimable =
            number_in(group.path + "/memory.stat", group.v2 ? "inactive_file" : "total_inactive_file").value_or(0);
        const std::uint64_t held = used - std::min(used, reclaimable);
        return limit - std::min(limit, held);
    };
    return std::min(meminfo(root, "MemAvailable:"), least(root, left));
}

void check_memory(const std::string& what, double bytes) {
    const auto available = static_cast<double>(available_memory());
    if (bytes > 0.95 * available) {
        throw OutOfMemory(fmt::format("{}: needs {:.4g} GiB of memory, {:.4g} GiB are available", what, bytes * 0x1p-30,
                                      available * 0x1p-30));
    }
}

}  // namespace headlong::tools
