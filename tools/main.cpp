// The headlong command line: what may be typed, and how errors are told. The commands are in files of their own.
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <headlong/version.hpp>

#include "engine/mapped_file.hpp"
#include "tools/commands.hpp"

namespace headlong::tools {
namespace {

constexpr const char* kExamples = R"(Examples:
  headlong info                       what this machine can do, and what will be used
  headlong verify                     a self-test against the double-precision reference
  headlong verify tests/cases/multi_head --isa all
                                      case files, on every instruction set of this machine

Exit codes: 0 done, 1 a check failed, 2 a bad call or input.)";

constexpr const char* kVerifyExamples = R"(A FILE is a case in a safetensors file. A FOLDER is its own *.safetensors.

Examples:
  headlong verify
  headlong verify tests/cases/multi_head tests/cases/attention_edges --isa all
  headlong verify case.safetensors --isa generic --json

Exit codes: 0 nothing failed, 1 a case failed, 2 a bad call or input.)";

/// One line on stderr, whatever the text holds.
int complain(const std::string& text) {
    fmt::print(stderr, "headlong: {}\n", one_line(text));
    return bad_call;
}

int run(int argc, char** argv) {
    CLI::App app("Headlong: exact attention on CPUs.", "headlong");
    app.footer(kExamples);
    app.set_version_flag("--version", std::string("headlong ") + version(), "Print the version and exit");
    app.set_help_flag("-h,--help", "Print this help and exit");
    app.require_subcommand(0, 1);  // at most one; that there is one is checked below, after what is not known

    InfoArguments info;
    CLI::App* const info_command = app.add_subcommand("info", "Show what this build and this machine can do");
    info_command->add_flag("--json", info.json, "Print JSON");

    VerifyArguments verify;
    CLI::App* const verify_command =
        app.add_subcommand("verify", "Compute cases and compare them with what they expect; without any, a self-test");
    verify_command->footer(kVerifyExamples);
    verify_command->add_option("paths", verify.paths, "Case files, and folders of them")->type_name("FILE|FOLDER");
    verify_command->add_option("--isa", verify.isa, "Exactly this instruction set, or all; the best one if not given")
        ->type_name("NAME|all");
    verify_command->add_option("--threads", verify.threads, "Threads; as many as this process may use if not given")
        ->type_name("N")
        ->check(CLI::Range(1, 4096).description(""));
    verify_command->add_flag("--json", verify.json, "Print JSON");

    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& request) {  // --help and --version
        return app.exit(request);
    } catch (const CLI::ParseError& error) {
        const std::string command = *info_command ? "headlong info" : *verify_command ? "headlong verify" : "headlong";
        return complain(fmt::format("{} (see {} --help)", error.what(), command));
    }
    if (*info_command) return run_info(info);
    if (*verify_command) return run_verify(verify);
    return complain("a command is needed: info or verify (see headlong --help)");
}

}  // namespace
}  // namespace headlong::tools

int main(int argc, char** argv) {
    using headlong::tools::complain;
    try {
        const int code = headlong::tools::run(argc, argv);
        // results that did not reach their reader are not done
        if (std::fflush(stdout) != 0) return complain("writing the results failed");
        return code;
    } catch (const std::bad_alloc&) {
        return complain("out of memory");
    } catch (const std::exception& error) {
        return complain(error.what());
    }
}
