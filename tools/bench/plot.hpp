// Pictures of a benchmark, drawn by gnuplot.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace headlong::tools {

/// Throws InvalidArgument for a file name that ends neither in .svg nor in .png, Unsupported if gnuplot is not
/// installed.
void check_plot(const std::string& path);

/// gnuplot's program, which writes the picture to its standard output: throughput (GFLOP/s of prefills, chunks and
/// linear layers; GB/s of decode steps) and the fraction of the limit over the number of tokens; a line per phase,
/// shape, type, threads and instruction set. `terminal` is "svg" or "pngcairo".
std::string plot_program(const std::string& terminal, const std::vector<nlohmann::ordered_json>& rows);

/// The picture. Throws IoError.
std::string plot(const std::string& path, const std::vector<nlohmann::ordered_json>& rows);

}  // namespace headlong::tools
