#include "tools/bench/plot.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include <fmt/format.h>

#include <headlong/error.hpp>

#include "engine/mapped_file.hpp"

namespace headlong::tools {
namespace {

using Json = nlohmann::ordered_json;

/// In gnuplot's single quotes, in which only the quote itself means something.
std::string quoted(const std::string& text) {
    std::string result = "'";
    for (const char letter : text) result += letter == '\'' ? "''" : std::string(1, letter);
    return result + "'";
}

/// What tells a line from the others.
std::string series(const Json& row) {
    const auto text = [&](const char* field) {
        if (!row.contains(field) || row[field].is_null()) return std::string();
        return row[field].is_string() ? row[field].get<std::string>() : row[field].dump();
    };
    std::string name = text("phase");
    if (row.contains("model")) name += " " + text("model");
    if (row["phase"] == "chunk") name += " of " + text("q_len");
    if (row["phase"] == "linear") {
        name += fmt::format(" {}x{}", text("inputs"), text("outputs"));
    } else {
        name += fmt::format(" {}/{}x{}", text("heads"), text("kv_heads"), text("head_dim"));
        if (row["batch"] != 1) name += " x " + text("batch");
        if (row.contains("causal") && row["causal"] == false) name += " full";
        if (row.contains("window") && row["window"] != 0) name += " window " + text("window");
    }
    return name + fmt::format(" {}{}, {} threads, {}", text("kv_type"), text("weights"), text("threads"), text("isa"));
}

struct Point {
    double tokens, throughput, of_limit;
};

}  // namespace

void check_plot(const std::string& path) {
    if (!path.ends_with(".svg") && !path.ends_with(".png")) {
        throw InvalidArgument(fmt::format("--plot is '{}'; the file's name must end in .svg or .png", path));
    }
    if (std::system("command -v gnuplot >/dev/null 2>&1") != 0) {
        throw Unsupported("--plot: gnuplot draws it, and is not installed (Debian: apt-get install gnuplot-nox)");
    }
}

std::string plot_program(const std::string& terminal, const std::vector<Json>& rows) {
    std::map<std::string, std::vector<Point>> decode, others;
    for (const Json& row : rows) {
        const bool is_decode = row["phase"] == "decode";
        const double tokens = row["phase"] == "linear" ? row["q_len"].get<double>() : row["kv_len"].get<double>();
        (is_decode ? decode : others)[series(row)].push_back(
            {tokens, row[is_decode ? "gbps" : "gflops"].get<double>(), row["of_limit"].get<double>()});
    }
    std::string program;
    std::vector<std::pair<std::string, std::string>> panels[3];  // (data block, title) of GFLOP/s, GB/s, of limit
    int count = 0;
    for (auto* group : {&others, &decode}) {
        for (auto& [name, points] : *group) {
            std::ranges::sort(points, {}, &Point::tokens);
            const std::string block = fmt::format("$series{}", count++);
            program += block + " << END\n";
            for (const Point& p : points) program += fmt::format("{} {} {}\n", p.tokens, p.throughput, p.of_limit);
            program += "END\n";
            panels[group == &decode ? 1 : 0].emplace_back(block, name);
            panels[2].emplace_back(block, name);
        }
    }
    const auto filled = std::ranges::count_if(panels, [](const auto& panel) { return !panel.empty(); });
    program += fmt::format("set terminal {} size 900,{} noenhanced\n", terminal, 420 * filled);
    program += fmt::format("set multiplot layout {},1\nset logscale x 2\nset grid\nset key below\n", filled);
    program += "set xlabel 'tokens'\nset yrange [0:*]\n";
    const std::pair<const char*, int> axes[3] = {{"GFLOP/s", 2}, {"GB/s", 2}, {"fraction of the limit", 3}};
    for (std::size_t panel = 0; panel < 3; ++panel) {
        if (panels[panel].empty()) continue;
        program += fmt::format("set ylabel {}\n", quoted(axes[panel].first));
        std::string lines;
        for (const auto& [block, title] : panels[panel]) {
            lines += fmt::format("{}{} using 1:{} with linespoints title {}", lines.empty() ? "plot " : ", ", block,
                                 axes[panel].second, quoted(title));
        }
        program += lines + "\n";
    }
    return program + "unset multiplot\n";
}

std::string plot(const std::string& path, const std::vector<Json>& rows) {
    // The program goes through a file that no one else can name, and the picture comes through a pipe: gnuplot and the
    // shell never see a name of the user's, which both would interpret.
    std::string program_path = (std::filesystem::temp_directory_path() / "headlong-plot-XXXXXX").string();
    const int descriptor = ::mkstemp(program_path.data());
    if (descriptor < 0) throw IoError(fmt::format("--plot: no temporary file: {}", std::strerror(errno)));
    ::close(descriptor);
    std::ofstream(program_path) << plot_program(path.ends_with(".png") ? "pngcairo" : "svg", rows);
    std::string picture;
    std::FILE* const pipe = ::popen(fmt::format("gnuplot '{}' 2>/dev/null", program_path).c_str(), "r");
    bool good = pipe != nullptr;
    if (good) {
        char buffer[4096];
        for (std::size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) picture.append(buffer, n);
        const int status = ::pclose(pipe);
        good = WIFEXITED(status) && WEXITSTATUS(status) == 0 && !picture.empty();
    }
    std::filesystem::remove(program_path);
    if (!good) throw IoError(fmt::format("--plot {}: gnuplot could not draw it", one_line(path)));
    return picture;
}

}  // namespace headlong::tools
