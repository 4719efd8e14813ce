#include "tools/measure/memory.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace headlong::tools {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

std::uint64_t meminfo(const std::string& wanted) {
    std::ifstream file("/proc/meminfo");
    std::string name;
    std::uint64_t kib = 0;
    for (std::string line; file >> name >> kib; std::getline(file, line)) {
        if (name == wanted) return kib * 1024;
    }
    return kNoLimit;
}

std::uint64_t number_in(const std::string& path, std::uint64_t otherwise) {
    std::ifstream file(path);
    std::uint64_t number = 0;
    return file >> number ? number : otherwise;
}

/// What a cgroup allows, less what it uses if that is asked.
std::uint64_t allowed(const std::string& folder, const char* limit_file, const char* usage_file, bool less_used) {
    const std::uint64_t limit = number_in(folder + limit_file, kNoLimit);  // v2 says "max" where there is none
    const std::uint64_t used = less_used && limit != kNoLimit ? number_in(folder + usage_file, 0) : 0;
    return limit - std::min(limit, used);
}

/// The least of all cgroups that the process is in, their ancestors included.
std::uint64_t cgroups_allow(bool less_used) {
    const auto v2 = [&](const std::string& path) {
        return allowed("/sys/fs/cgroup" + path, "/memory.max", "/memory.current", less_used);
    };
    const auto v1 = [&](const std::string& path) {
        return allowed("/sys/fs/cgroup/memory" + path, "/memory.limit_in_bytes", "/memory.usage_in_bytes", less_used);
    };
    std::uint64_t least = std::min(v2(""), v1(""));  // a container sees its own cgroup at the root
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {  // "0::/path" or "4:memory:/path"
        const std::size_t slash = line.find('/');
        if (slash == std::string::npos) continue;
        for (std::string path = line.substr(slash); path.size() > 1; path.resize(path.rfind('/'))) {
            if (line.starts_with("0::")) least = std::min(least, v2(path));
            if (line.find(":memory:") != std::string::npos) least = std::min(least, v1(path));
        }
    }
    return least;
}

}  // namespace

std::uint64_t total_memory() { return std::min(meminfo("MemTotal:"), cgroups_allow(false)); }

std::uint64_t available_memory() { return std::min(meminfo("MemAvailable:"), cgroups_allow(true)); }

}  // namespace headlong::tools
