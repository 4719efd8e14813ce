// Contexts of the command line.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <headlong/context.hpp>

namespace headlong::tools {

/// The instruction set of that name (empty: the context's choice), and mimalloc where the build has it. Throws
/// InvalidArgument, naming --isa, if there is no such instruction set.
ContextOptions context_options_of(const std::string& isa);

/// Lets oneTBB have so many threads. Otherwise it has as many as the process may use processors, and gives an arena
/// that asks for more fewer without a word.
void allow_threads(std::size_t threads);

/// On exactly so many threads, more than the processor has if asked for. Without an instruction set, the best one.
std::unique_ptr<Context> make_context(std::optional<Isa> isa, std::size_t threads);

/// What --isa asks for: an instruction set, "all" for every one that this machine has and HEADLONG_ISA allows, or ""
/// for the best. Throws InvalidArgument, naming those that are allowed.
std::vector<Isa> parse_isas(const std::string& name);

}  // namespace headlong::tools
