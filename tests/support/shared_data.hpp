// Where tests find data: cases that ship with the sources, and the shared data beside the checkout, which may be
// absent.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#ifndef HEADLONG_SOURCE_DIR
#error "the build must define HEADLONG_SOURCE_DIR as the root of the sources"
#endif

namespace headlong::test {

/// The root of the sources.
inline std::filesystem::path source_dir() { return HEADLONG_SOURCE_DIR; }

/// A file or folder among the cases that ship with the sources.
inline std::filesystem::path shipped_case(const std::string& name) { return source_dir() / "tests" / "cases" / name; }

/// A file or folder of the shared data: $HEADLONG_SHARED, or ../shared of the checkout. Empty if it is not there.
inline std::filesystem::path shared_data(const std::string& name) {
    const char* root = std::getenv("HEADLONG_SHARED");
    const std::filesystem::path path =
        (root != nullptr && *root != '\0' ? std::filesystem::path(root) : source_dir().parent_path() / "shared") / name;
    std::error_code ignored;
    return std::filesystem::exists(path, ignored) ? path : std::filesystem::path();
}

}  // namespace headlong::test

/// Declares `variable` as the path of shared data, or skips the test and says what it would have needed.
#define HEADLONG_SHARED_OR_SKIP(variable, name)                                 \
    const std::filesystem::path variable = ::headlong::test::shared_data(name); \
    if ((variable).empty())                                                     \
    GTEST_SKIP() << "needs " << (name) << " of the shared data (set HEADLONG_SHARED to its folder)"
