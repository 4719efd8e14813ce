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

/// Of exactly so many threads, more than the processor has if asked for; 0 = as many as this process may use.
std::shared_ptr<Executor> make_executor(std::size_t threads);

/// On so many threads. Without an instruction set, the best one.
std::unique_ptr<Context> make_context(std::optional<Isa> isa, std::size_t threads);

/// What --isa asks for: an instruction set, "all" for every one that this machine has and HEADLONG_ISA allows, or ""
/// for the best. Throws InvalidArgument, naming those that are allowed.
std::vector<Isa> parse_isas(const std::string& name);

}  // namespace headlong::tools
