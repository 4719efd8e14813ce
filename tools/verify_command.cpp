#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <headlong/context.hpp>
#include <headlong/error.hpp>

#include "tools/cases/load_case.hpp"
#include "tools/cases/self_test.hpp"
#include "tools/commands.hpp"
#include "tools/measure/contexts.hpp"
#include "tools/measure/lists.hpp"
#include "tools/measure/progress.hpp"

namespace headlong::tools {
namespace {

struct Row {
    std::string name;
    Isa isa = Isa::generic;
    Outcome outcome;
};

struct Summary {
    std::vector<Row> rows;

    std::size_t count(Status status) const {
        return static_cast<std::size_t>(
            std::ranges::count_if(rows, [&](const Row& row) { return row.outcome.status == status; }));
    }
};

std::vector<std::unique_ptr<Context>> make_contexts(const VerifyArguments& arguments) {
    std::vector<std::unique_ptr<Context>> contexts;
    for (const Isa isa : parse_isas(arguments.isa)) contexts.push_back(make_context(isa, arguments.threads));
    return contexts;
}

void run_case(const Case& each, const std::vector<std::unique_ptr<Context>>& contexts, const KvTypes& types,
              const Progress& progress, Summary& summary) {
    for (const std::unique_ptr<Context>& context : contexts) {
        progress.show(fmt::format("{} {}", each.name, to_string(context->isa())));
        summary.rows.push_back({each.name, context->isa(), each.run(*context, types)});
    }
}

Summary run_cases(const VerifyArguments& arguments) {
    // every path, type and instruction set is checked before the first case runs
    const KvTypes types = parse_kv_pair("--kv", arguments.kv);
    std::vector<CasePath> paths;
    for (const std::string& path : arguments.paths) {
        const std::vector<CasePath> found = find_cases(path);
        paths.insert(paths.end(), found.begin(), found.end());
    }
    const std::vector<std::unique_ptr<Context>> contexts = make_contexts(arguments);
    const Progress progress;
    Summary summary;
    // one case in memory at a time
    for (const CasePath& path : paths) run_case(load_case(path), contexts, types, progress, summary);
    if (paths.empty()) {
        for (const Case& each : self_test_cases()) run_case(each, contexts, types, progress, summary);
    }
    return summary;
}

void print_json(const Summary& summary) {
    nlohmann::ordered_json cases = nlohmann::ordered_json::array();
    for (const Row& row : summary.rows) {
        nlohmann::ordered_json each;
        each["name"] = row.name;
        each["isa"] = to_string(row.isa);
        each["status"] = to_string(row.outcome.status);
        each["max_abs_err"] = nullptr;  // where nothing was compared
        if (row.outcome.max_abs_err) each["max_abs_err"] = *row.outcome.max_abs_err;
        each["why"] = row.outcome.why;
        cases.push_back(std::move(each));
    }
    nlohmann::ordered_json whole;
    whole["passed"] = summary.count(Status::passed);
    whole["failed"] = summary.count(Status::failed);
    whole["skipped"] = summary.count(Status::skipped);
    whole["cases"] = std::move(cases);
    // names of files may be no UTF-8
    fmt::print("{}\n", whole.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

void print_table(const Summary& summary) {
    std::size_t name_width = 4;
    std::size_t isa_width = 3;
    for (const Row& row : summary.rows) {
        name_width = std::max(name_width, row.name.size());
        isa_width = std::max(isa_width, std::string_view(to_string(row.isa)).size());
    }
    const auto print = [&](auto name, auto isa, auto status, auto error, auto time, auto speed, auto why) {
        std::string line = fmt::format("{:<{}}  {:<{}}  {:<7}  {:>9}  {:>9}  {:>8}  {}", name, name_width, isa,
                                       isa_width, status, error, time, speed, why);
        line.erase(line.find_last_not_of(' ') + 1);
        fmt::print("{}\n", line);
    };
    print("case", "isa", "status", "max error", "time ms", "GFLOP/s", "why");
    for (const Row& row : summary.rows) {
        const Outcome& outcome = row.outcome;
        const bool timed = outcome.seconds > 0.0;
        print(row.name, to_string(row.isa), to_string(outcome.status),
              outcome.max_abs_err ? fmt::format("{:.2e}", *outcome.max_abs_err) : std::string("-"),
              timed ? fmt::format("{:.3f}", outcome.seconds * 1e3) : std::string("-"),
              timed ? fmt::format("{:.2f}", outcome.flops / outcome.seconds * 1e-9) : std::string("-"), outcome.why);
    }
    fmt::print("{} passed, {} failed, {} skipped\n", summary.count(Status::passed), summary.count(Status::failed),
               summary.count(Status::skipped));
}

}  // namespace

int run_verify(const VerifyArguments& arguments) {
    const Summary summary = run_cases(arguments);
    arguments.json ? print_json(summary) : print_table(summary);
    return summary.count(Status::failed) == 0 ? done : check_failed;
}

}  // namespace headlong::tools
