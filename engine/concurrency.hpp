// The parts of default_concurrency() that tests need to see.
#pragma once

#include <string>

namespace headlong {

/// The processors that cgroup quotas leave to a process: the least quota of its own cgroup and its ancestors, which
/// `membership` (/proc/self/cgroup) names, under `root` (/sys/fs/cgroup); infinity if there is none.
double cgroup_cpus(const std::string& root, const std::string& membership);

}  // namespace headlong
