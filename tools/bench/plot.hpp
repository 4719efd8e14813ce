// Pictures of a benchmark, drawn by gnuplot.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace headlong::tools {

/// Throws InvalidArgument for a file name that ends neither in .svg nor in .png, Unsupported if gnuplot is not
/// installed.
void check_plot(const std::string& path);

/// gnuplot's program for throughput (GFLOP/s of prefills, chunks and linear layers; GB/s of decode steps) and the
/// fraction of the limit over the number of tokens; a line per phase, shape, type, threads and instruction set.
std::string plot_program(const std::string& path, const std::vector<nlohmann::ordered_json>& rows);

/// Draws it. Throws IoError.
void plot(const std::string& path, const std::vector<nlohmann::ordered_json>& rows);

}  // namespace headlong::tools
