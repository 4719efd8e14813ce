#include "tools/bench/plot.hpp"

#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
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
    if (row["phase"] == "chunk") name += " of " + text("q_len");
    if (row["phase"] == "linear") {
        name += fmt::format(" {}x{}", text("inputs"), text("outputs"));
    } else {
        name += fmt::format(" {}/{}x{}", text("heads"), text("kv_heads"), text("head_dim"));
        if (row["batch"] != 1) name += " x " + text("batch");
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

std::string plot_program(const std::string& path, const std::vector<Json>& rows) {
    std::map<std::string, std::vector<Point>> decode, others;
    for (const Json& row : rows) {
        const bool is_decode = row["phase"] == "decode";
        const double tokens = row.contains("kv_len") ? row["kv_len"].get<double>() : row["q_len"].get<double>();
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
    const std::string terminal = path.ends_with(".png") ? "pngcairo" : "svg";
    program +=
        fmt::format("set terminal {} size 900,{} noenhanced\nset output {}\n", terminal, 420 * filled, quoted(path));
    program += fmt::format("set multiplot layout {},1\nset logscale x 2\nset grid\nset key below\n", filled);
    program += "set xlabel 'tokens'\nset yrange [0:*]\n";
    const std::pair<const char*, int> axes[3] = {{"GFLOP/s", 2}, {"GB/s", 2}, {"fraction of the limit", 3}};
    for (std::size_t panel = 0; panel < 3; ++panel) {
        if (panels[panel].empty()) continue;
        if (panel == 2) program += "set yrange [0:1.1]\n";
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

void plot(const std::string& path, const std::vector<Json>& rows) {
    const std::string program = plot_program(path, rows);
    auto* const before = std::signal(SIGPIPE, SIG_IGN);  // a gnuplot that dies is an error to tell, not the end
    std::FILE* const pipe = ::popen("gnuplot", "w");
    bool good = pipe != nullptr;
    if (good) {
        good = std::fwrite(program.data(), 1, program.size(), pipe) == program.size();
        const int status = ::pclose(pipe);
        good = good && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    std::signal(SIGPIPE, before);
    if (!good) throw IoError(fmt::format("--plot {}: gnuplot could not draw it", one_line(path)));
}

}  // namespace headlong::tools
