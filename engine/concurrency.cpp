// How many processors this process may use. oneTBB 2021 knows the affinity mask but not the cgroup's quota: an arena
// larger than the quota is throttled for most of every period.
#include "engine/concurrency.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <headlong/context.hpp>
#include <limits>
#include <string>
#include <thread>

#include "engine/processors.hpp"

namespace headlong {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

/// cgroup v2: "max 100000" or "150000 100000" (quota and period in microseconds).
double quota_v2(const std::string& folder) {
    std::ifstream file(folder + "/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max" || period <= 0) return kNoLimit;
    const double microseconds = std::atof(quota.c_str());
    return microseconds > 0 ? microseconds / period : kNoLimit;
}

/// cgroup v1: -1 = no quota.
double quota_v1(const std::string& folder) {
    std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
    std::ifstream period_file(folder + "/cpu.cfs_period_us");
    double quota = 0;
    double period = 0;
    if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return kNoLimit;
    return quota / period;
}

}  // namespace

std::vector<CgroupFolder> cgroup_folders(const std::string& root, const std::string& membership,
                                         const std::string& controller) {
    const std::string v1_root = root + "/" + controller;
    std::vector<CgroupFolder> folders{{root, true}, {v1_root, false}};
    std::ifstream file(membership);
    for (std::string line; std::getline(file, line);) {  // "0::/path" or "4:cpu,cpuacct:/path"
        const std::size_t first = line.find(':');
        const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool v2 = controllers.empty();
        const bool v1 = ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
        if (!v1 && !v2) continue;
        for (std::string path = line.substr(second + 1); path.size() > 1;) {
            folders.push_back({(v2 ? root : v1_root) + path, v2});
            const std::size_t slash = path.rfind('/');
            if (slash == std::string::npos) break;
            path.resize(slash);
        }
    }
    return folders;
}

double cgroup_cpus(const std::string& root, const std::string& membership) {
    double cpus = kNoLimit;
    for (const CgroupFolder& group : cgroup_folders(root, membership, "cpu")) {
        cpus = std::min(cpus, group.v2 ? quota_v2(group.path) : quota_v1(group.path));
    }
    return cpus;
}

std::size_t default_concurrency() {
    std::size_t cpus = std::max(1U, std::thread::hardware_concurrency());
    if (const auto allowed = processors_of_this_thread())
        cpus = std::min(cpus, std::max<std::size_t>(1, allowed->count()));
#if defined(__linux__)
    const double quota = cgroup_cpus("/sys/fs/cgroup", "/proc/self/cgroup");
    if (quota < static_cast<double>(cpus)) cpus = static_cast<std::size_t>(std::max(1.0, std::ceil(quota)));
#endif
    return cpus;
}

}  // namespace headlong
