#include "tools/measure/machine.hpp"

#include <fmt/format.h>

#include <fstream>

#include "engine/mapped_file.hpp"

namespace headlong::tools {

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

}  // namespace headlong::tools
