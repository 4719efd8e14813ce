#include "tools/measure/memory.hpp"
#include <unistd.h>
namespace headlong::tools {
std::uint64_t total_memory(const std::string&) { return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * 4096; }
std::uint64_t available_memory(const std::string&) {
    return static_cast<std::uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * 4096;
}
}  // namespace headlong::tools
