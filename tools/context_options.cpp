#include "tools/context_options.hpp"

#include <fmt/format.h>

#include <headlong/error.hpp>

#if HEADLONG_HAVE_MIMALLOC
#include <headlong/mimalloc.hpp>
#endif

namespace headlong::tools {

ContextOptions context_options_of(const std::string& isa) {
    ContextOptions options;
    if (!isa.empty()) {
        options.isa = parse_isa(isa);
        if (!options.isa)
            throw InvalidArgument(fmt::format("--isa is '{}', which is no instruction set; see headlong info", isa));
    }
#if HEADLONG_HAVE_MIMALLOC
    options.memory = &mimalloc_resource();
#endif
    return options;
}

}  // namespace headlong::tools
