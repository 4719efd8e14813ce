// What may be typed after `headlong bench`.
#pragma once

#include <functional>

#include <CLI/CLI.hpp>

namespace headlong::tools {

/// Adds the command. Once the command line is parsed, `chosen` runs what was asked for, if it was one of these.
void add_bench(CLI::App& app, std::function<int()>& chosen);

}  // namespace headlong::tools
