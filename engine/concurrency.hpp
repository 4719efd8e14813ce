// What the system's control groups leave to a process.
#pragma once

#include <string>
#include <vector>

namespace headlong {

struct CgroupFolder {
    std::string path;
    bool v2 = false;  ///< its files are those of cgroup v2
};

/// Folders of the cgroups that a process is in and of their ancestors, which `membership` (/proc/self/cgroup) names,
/// under `root` (/sys/fs/cgroup): those of v2, and those of v1 that have the controller ("cpu", "memory"). The roots of
/// both are always among them, where a container sees its own. Some may not exist.
std::vector<CgroupFolder> cgroup_folders(const std::string& root, const std::string& membership,
                                         const std::string& controller);

/// The processors that cgroup quotas leave to a process: the least quota of its cgroups; infinity if there is none.
double cgroup_cpus(const std::string& root, const std::string& membership);

}  // namespace headlong
