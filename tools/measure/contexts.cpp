#include "tools/measure/contexts.hpp"

#include <algorithm>

#include <fmt/format.h>
#include <tbb/global_control.h>

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

void allow_threads(std::size_t threads) {
    using Control = tbb::global_control;
    static std::vector<std::unique_ptr<Control>> limits;
    if (threads > Control::active_value(Control::max_allowed_parallelism)) {
        limits.push_back(std::make_unique<Control>(Control::max_allowed_parallelism, threads));
    }
}

std::unique_ptr<Context> make_context(std::optional<Isa> isa, std::size_t threads) {
    allow_threads(threads);
    ContextOptions options = context_options_of("");
    options.isa = isa;
    options.threads = threads;
    return std::make_unique<Context>(options);
}

std::vector<Isa> parse_isas(const std::string& name) {
    const std::vector<Isa> available = available_isas();
    if (name.empty()) return {available.back()};
    if (name == "all") return available;
    const std::optional<Isa> isa = parse_isa(name);
    if (!isa || std::ranges::count(available, *isa) == 0) {
        std::vector<const char*> names;
        for (const Isa each : available) names.push_back(to_string(each));
        throw InvalidArgument(
            fmt::format("--isa is '{}', this machine and HEADLONG_ISA allow {} and all", name, fmt::join(names, ", ")));
    }
    return {*isa};
}

}  // namespace headlong::tools
