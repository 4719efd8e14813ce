// The context that a command asks for.
#pragma once

#include <string>

#include <headlong/context.hpp>

namespace headlong::tools {

/// The instruction set of that name (empty: the context's choice), and mimalloc where the build has it. Throws
/// InvalidArgument, naming --isa, if there is no such instruction set.
ContextOptions context_options_of(const std::string& isa);

}  // namespace headlong::tools
