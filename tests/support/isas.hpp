// Contexts for tests: every instruction set that this machine can run, on any number of threads.
#pragma once

#include <gtest/gtest.h>
#include <tbb/global_control.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <memory_resource>
#include <string_view>
#include <vector>

#include <headlong/context.hpp>

namespace headlong::test {

/// oneTBB has as many threads as the machine has processors and, asked for more, prints a warning and does not give
/// them. Tests that need 5 threads on 2 processors raise the limit first.
inline void allow_threads(std::size_t threads) {
    static std::unique_ptr<tbb::global_control> limit;  // one: of several the least counts
    if (threads > tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism)) {
        limit.reset();
        limit = std::make_unique<tbb::global_control>(tbb::global_control::max_allowed_parallelism, threads);
    }
}

/// A context for exactly this instruction set. One thread starts none.
inline std::unique_ptr<Context> make_context(Isa isa, std::size_t threads = 1,
                                             std::pmr::memory_resource* memory = nullptr) {
    allow_threads(threads);
    ContextOptions options;
    options.isa = isa;
    options.memory = memory;
    options.threads = threads;
    return std::make_unique<Context>(options);
}

/// Whether the tests run in an emulator (set by the build for emulated targets), where they do less.
inline bool emulated() {
    const char* text = std::getenv("HEADLONG_TEST_EMULATED");
    return text != nullptr && std::string_view(text) != "0" && *text != '\0';
}

/// Whether a test of the engine leaves an instruction set to the native tests: an emulator takes a hundred times as
/// long, and what is above the kernels does not know which ones it calls.
inline bool left_to_native_tests(Isa isa) { return emulated() && isa != available_isas().back(); }

}  // namespace headlong::test

/// for (isa in available) { ... } with the name in every failure: HEADLONG_FOR_EACH_ISA(isa) { ... }
#define HEADLONG_FOR_EACH_ISA(isa)                                 \
    for (const ::headlong::Isa isa : ::headlong::available_isas()) \
        if (const ::testing::ScopedTrace trace_of_##isa(__FILE__, __LINE__, ::headlong::to_string(isa)); true)
