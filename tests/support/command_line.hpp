// Runs the command line as others use it.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#ifndef HEADLONG_COMMAND
#error "the build must define HEADLONG_COMMAND as a shell's command for the headlong binary"
#endif

namespace headlong::test {

/// Runs the binary in a shell, with a folder of the test's own for what it prints and reads.
class CommandLine : public testing::Test {
  protected:
    struct Result {
        int code = -1;
        std::string out;
        std::string err;
    };

    CommandLine() {
        const testing::TestInfo* const info = testing::UnitTest::GetInstance()->current_test_info();
        folder_ = std::filesystem::temp_directory_path() /
                  ("headlong-cli-" + std::string(info->name()) + "-" + std::to_string(::getpid()));
        std::filesystem::create_directories(folder_);
    }
    ~CommandLine() override {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }

    /// `before` goes in front of the command: variables of the environment.
    Result run(const std::string& arguments, const std::string& before = "") const {
        const std::string out = (folder_ / "out").string();
        const std::string err = (folder_ / "err").string();
        const std::string command =
            before + " " + HEADLONG_COMMAND + " " + arguments + " >'" + out + "' 2>'" + err + "' </dev/null";
        const int status = std::system(command.c_str());
        Result result;
        result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        result.out = contents(out);
        result.err = contents(err);
        return result;
    }

    /// Runs what must be refused: exit code 2, nothing on stdout, one line on stderr with the texts.
    void expect_bad_call(const std::string& arguments, const std::vector<std::string>& texts,
                         const std::string& before = "") const {
        SCOPED_TRACE(before + " headlong " + arguments);
        const Result result = run(arguments, before);
        EXPECT_EQ(result.code, 2);
        EXPECT_EQ(result.out, "");
        EXPECT_EQ(std::ranges::count(result.err, '\n'), 1) << result.err;
        EXPECT_EQ(result.err.find("headlong: "), 0U) << result.err;
        for (const std::string& text : texts) EXPECT_NE(result.err.find(text), std::string::npos) << result.err;
    }

    static std::string contents(const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    }

    std::filesystem::path folder_;
};

inline bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace headlong::test
