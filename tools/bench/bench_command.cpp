#include "tools/bench/bench_command.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>

#include <fmt/format.h>

#include <headlong/error.hpp>

#include "engine/mapped_file.hpp"
#include "tools/bench/attention_workload.hpp"
#include "tools/bench/linear_workload.hpp"
#include "tools/bench/model_workload.hpp"
#include "tools/bench/plot.hpp"
#include "tools/bench/report.hpp"
#include "tools/bench/schedule.hpp"
#include "tools/commands.hpp"
#include "tools/embedded_model.hpp"
#include "tools/measure/contexts.hpp"
#include "tools/measure/lists.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/progress.hpp"
#include "tools/shapes/model_shape.hpp"

namespace headlong::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMostTokens = std::int64_t{1} << 40U;
constexpr std::int64_t kMostHeads = std::int64_t{1} << 16U;
constexpr std::int64_t kMostDim = std::int64_t{1} << 20U;  // as in a cache
constexpr std::int64_t kMostThreads = 4096;

[[noreturn]] void refuse(const std::string& why) { throw InvalidArgument(why); }

std::int64_t within(const char* option, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value < least || value > most) refuse(fmt::format("{} is {}; allowed: {} to {}", option, value, least, most));
    return value;
}

/// A file that results go to. Opened before any work, so that a wrong name costs nothing; what it held stays until
/// there is something new.
class ResultFile {
  public:
    ResultFile(const char* option, const std::string& path) : option_(option), path_(path) {
        if (path.empty()) return;
        file_.open(path, std::ios::binary | std::ios::app);
        if (!file_) throw IoError(fmt::format("{} {}: cannot be written", option, one_line(path)));
    }
    void write(const std::string& text) {
        file_.close();
        file_.open(path_, std::ios::binary | std::ios::trunc);
        file_ << text;
        file_.close();
        if (!file_) throw IoError(fmt::format("{} {}: writing failed", option_, one_line(path_)));
    }

  private:
    const char* option_;
    std::string path_;
    std::ofstream file_;
};

/// What becomes of a plan.
class Output {
  public:
    /// Checks everything that can be wrong without a plan.
    explicit Output(const BenchArguments& arguments) : arguments_(arguments), format_(parse_format(arguments.format)) {
        if (arguments.fail_below) {
            if (arguments.compare.empty()) refuse("--fail-below needs --compare BASE.json");
            if (!(*arguments.fail_below > 0.0 && *arguments.fail_below <= 100.0)) {
                refuse(fmt::format("--fail-below is {}; allowed: above 0, to 100", *arguments.fail_below));
            }
        }
        if (!arguments.compare.empty()) baseline_.emplace(arguments.compare);
        if (!arguments.plot.empty()) check_plot(arguments.plot);
    }

    /// Measures and reports. Returns the exit code.
    int run(const BenchPlan& plan) {
        if (baseline_ && !baseline_->has_any(planned_rows(plan))) {
            refuse(fmt::format("--compare {}: has none of these rows", one_line(arguments_.compare)));
        }
        ResultFile out("--out", arguments_.out);
        ResultFile picture("--plot", arguments_.plot);
        std::vector<Json> rows = report_rows(plan, measure(plan));
        if (baseline_) baseline_->compare(rows);
        if (arguments_.fail_below) measure_again(plan, rows);
        const std::string report = format_report(format_, machine_json(), rows);
        if (arguments_.out.empty()) {
            std::fwrite(report.data(), 1, report.size(), stdout);  // main() tells whether it got through
        } else {
            out.write(report);
        }
        const int code = std::max(judge_deviations(rows), judge_speedups(rows));
        if (!arguments_.plot.empty()) picture.write(plot(arguments_.plot, rows));
        return code;
    }

  private:
    static std::vector<RowResult> measure(const BenchPlan& plan) {
        const Progress progress;
        return run_bench(plan, [&](std::size_t rows_done, std::size_t rows, double seconds) {
            progress.show(fmt::format("{} of {} rows, about {:.0f} s left", rows_done, rows, std::max(seconds, 1.0)));
        });
    }

    /// What a row is judged by: a slower program is slower at its best, too, and each time; a disturbed one is not.
    static double best_speedup(const Json& row) {
        double best = 0.0;
        for (const char* field : {"speedup", "speedup_min", "speedup_retried"}) {
            if (row.contains(field) && !row[field].is_null()) best = std::max(best, row[field].get<double>());
        }
        return best;
    }

    /// Rows that are too slow get two more chances, whose best is speedup_retried. The row's own figures stay those of
    /// the first time.
    void measure_again(const BenchPlan& plan, std::vector<Json>& rows) const {
        for (int retry = 0; retry < 2; ++retry) {
            BenchPlan rest = plan;
            rest.rows.clear();
            std::vector<std::size_t> below;
            for (std::size_t r = 0; r < rows.size(); ++r) {
                if (rows[r]["speedup"].is_null() || best_speedup(rows[r]) >= *arguments_.fail_below) continue;
                below.push_back(r);
                rest.rows.push_back(plan.rows[r]);
            }
            if (below.empty()) return;
            std::vector<Json> again = report_rows(rest, measure(rest));
            baseline_->compare(again);
            for (std::size_t i = 0; i < below.size(); ++i) {
                Json& row = rows[below[i]];
                const double before = row.contains("speedup_retried") ? row["speedup_retried"].get<double>() : 0.0;
                row["speedup_retried"] = std::max(before, best_speedup(again[i]));
            }
        }
    }

    static int judge_deviations(const std::vector<Json>& rows) {
        int code = done;
        for (const Json& row : rows) {
            if (!row.contains("max_abs_err")) continue;
            const auto error = row["max_abs_err"].get<double>();
            const auto tolerance = row["tolerance"].get<double>();
            if (error <= tolerance) continue;
            complain(fmt::format("{}: is {:.3g} off the reference; allowed: {:.3g}", row_name(row), error, tolerance));
            code = check_failed;
        }
        return code;
    }

    /// Throttled rows say nothing: they are named, and not judged.
    int judge_speedups(const std::vector<Json>& rows) const {
        if (!arguments_.fail_below) return done;
        std::size_t judged = 0;
        int code = done;
        for (const Json& row : rows) {
            if (row["speedup"].is_null()) continue;
            if (row["throttled"] == true || row.contains("base_throttled")) {
                complain(row_name(row) + ": not judged, a core was throttled");
                continue;
            }
            ++judged;
            const double speedup = best_speedup(row);
            if (speedup >= *arguments_.fail_below) continue;
            complain(fmt::format("{}: {:.3f} times as fast as in {}; allowed: {} and more", row_name(row), speedup,
                                 arguments_.compare, *arguments_.fail_below));
            code = check_failed;
        }
        if (judged > 0) return code;
        complain("--fail-below: no row could be judged");
        return check_failed;
    }

    const BenchArguments& arguments_;
    Format format_;
    std::optional<Baseline> baseline_;
};

BenchPlan common_plan(const BenchArguments& arguments) {
    BenchPlan plan;
    if (arguments.repetitions) {
        plan.repetitions = static_cast<std::size_t>(within("-r", *arguments.repetitions, 1, 1'000'000));
    }
    plan.check = arguments.check;
    return plan;
}

/// A row of each workload for each instruction set and number of threads.
void add_rows(BenchPlan& plan, const BenchArguments& arguments) {
    std::vector<std::int64_t> threads{static_cast<std::int64_t>(default_concurrency())};
    if (!arguments.threads.empty()) threads = parse_list("-t", arguments.threads, 1, kMostThreads);
    const std::vector<Isa> isas = parse_isas(arguments.isa);
    constexpr std::size_t kMostRows = 10'000;
    if (isas.size() * threads.size() * plan.workloads.size() > kMostRows) {
        refuse(fmt::format("these are {} rows; at most {} are allowed",
                           isas.size() * threads.size() * plan.workloads.size(), kMostRows));
    }
    for (const Isa isa : isas) {
        for (const std::int64_t count : threads) {
            for (std::size_t w = 0; w < plan.workloads.size(); ++w) {
                plan.rows.push_back({.workload = w, .isa = isa, .threads = static_cast<std::size_t>(count)});
            }
        }
    }
}

/// Heads and dims, from wherever they are given.
AttentionShape attention_shape(const BenchAttentionArguments& a) {
    AttentionShape shape;
    const bool by_flags = a.heads || a.kv_heads || a.head_dim;
    if (static_cast<int>(by_flags) + static_cast<int>(!a.config.empty()) + static_cast<int>(!a.preset.empty()) > 1) {
        refuse(
            "--config, --preset, and --heads with --kv-heads and --head-dim are three ways to say the same: give one");
    }
    if (!a.config.empty() || !a.preset.empty()) {
        const ModelShape model = a.config.empty() ? model_preset(a.preset) : read_model_shape(a.config);
        shape.heads = model.heads;
        shape.kv_heads = model.kv_heads;
        shape.head_dim = model.head_dim;
        shape.value_dim = model.value_dim;
    } else {
        shape.heads = within("--heads", a.heads.value_or(32), 1, kMostHeads);
        shape.kv_heads = within("--kv-heads", a.kv_heads.value_or(a.heads ? *a.heads : 8), 1, kMostHeads);
        shape.head_dim = within("--head-dim", a.head_dim.value_or(128), 1, kMostDim);
        shape.value_dim = shape.head_dim;
        if (shape.heads % shape.kv_heads != 0) {
            refuse(fmt::format("--kv-heads is {}; it must divide the {} heads", shape.kv_heads, shape.heads));
        }
    }
    shape.causal = !a.no_causal;
    if (a.window) shape.window = within("--window", *a.window, 1, kMostTokens);
    if (a.sink_tokens) {
        shape.ring = true;
        shape.sink_tokens = *a.sink_tokens;
        check_ring("--window", "--sink-tokens", shape.window, shape.sink_tokens);
    }
    shape.layers = within("--layers", a.layers, 0, 1 << 20U);
    return shape;
}

/// The rows that are asked for, without types.
std::vector<AttentionShape> attention_shapes(const BenchAttentionArguments& a) {
    const AttentionShape shape = attention_shape(a);
    if (a.batch && !a.lens.empty()) refuse("-b and --lens: a batch has equal lengths or given ones: give one of them");
    if (!a.lens.empty() && (!a.prefill.empty() || !a.depths.empty())) {
        refuse(
            "--lens gives the lengths of a batch's sequences itself: not with -p or -d (with -q, a chunk of each; "
            "with -q 1, decode alone)");
    }
    if (a.queries && a.depths.empty() && a.lens.empty()) refuse("-q needs depths: give -d, or --lens");
    const auto batch = static_cast<std::size_t>(within("-b", a.batch.value_or(1), 1, 65'536));
    const std::int64_t queries = within("-q", a.queries.value_or(1), 1, kMostTokens);
    const bool nothing = a.prefill.empty() && a.depths.empty() && a.lens.empty();

    std::vector<AttentionShape> shapes;
    std::size_t sequences = 0;
    const auto add = [&](Phase phase, std::vector<std::int64_t> q_lens, std::vector<std::int64_t> kv_lens) {
        constexpr std::size_t kMostSequences = 1'000'000;
        sequences += kv_lens.size();
        if (sequences > kMostSequences) {
            refuse(fmt::format("these are more than {} sequences in all; give fewer lengths or a smaller -b",
                               kMostSequences));
        }
        if (shape.ring && phase == Phase::prefill) refuse("--sink-tokens: rings are for -d, or --lens with -q");
        shapes.push_back(shape);
        shapes.back().phase = phase;
        shapes.back().q_lens = std::move(q_lens);
        shapes.back().kv_lens = std::move(kv_lens);
    };
    const auto add_over_caches = [&](const std::vector<std::int64_t>& kv_lens) {
        const std::int64_t shortest = std::ranges::min(kv_lens);
        if (queries > shortest) {
            refuse(fmt::format("-q is {}; the last query sees {} keys, and the queries' own are among them", queries,
                               shortest));
        }
        add(queries == 1 ? Phase::decode : Phase::chunk, std::vector(kv_lens.size(), queries), kv_lens);
    };
    if (!a.lens.empty()) {
        const std::vector<std::int64_t> lens = parse_list("--lens", a.lens, 1, kMostTokens, Repeats::kept);
        if (!a.queries) add(Phase::prefill, lens, lens);
        add_over_caches(lens);
        return shapes;
    }
    if (nothing || !a.prefill.empty()) {
        for (const std::int64_t n : parse_list("-p", nothing ? "512,2048" : a.prefill, 1, kMostTokens)) {
            add(Phase::prefill, std::vector(batch, n), std::vector(batch, n));
        }
    }
    if (nothing || !a.depths.empty()) {
        for (const std::int64_t n : parse_list("-d", nothing ? "4096,32768" : a.depths, 1, kMostTokens)) {
            add_over_caches(std::vector(batch, n));
        }
    }
    return shapes;
}

/// How the command line called a row.
std::string asked_for(const AttentionShape& s) {
    const std::int64_t longest = std::ranges::max(s.kv_lens);
    return fmt::format("{} {}{}", s.phase == Phase::prefill ? "-p" : "-d", longest,
                       s.kv_lens.size() > 1 ? fmt::format(" (a batch of {})", s.kv_lens.size()) : "");
}

/// The last part of a folder's path.
std::string model_name(const std::string& folder) {
    const std::filesystem::path path = std::filesystem::path(folder + "/").lexically_normal().parent_path();
    return one_line(path.filename().empty() ? folder : path.filename().string());
}

std::vector<LinearShape> linear_shapes(const BenchLinearArguments& a) {
    std::vector<LinearShape> shapes;
    const std::int64_t layers = within("--layers", a.layers, 0, 1 << 20U);
    for (std::size_t begin = 0; begin <= a.shapes.size();) {
        const std::size_t end = std::min(a.shapes.find(',', begin), a.shapes.size());
        const std::string one = a.shapes.substr(begin, end - begin);
        begin = end + 1;
        std::vector<std::int64_t> sizes;
        for (std::size_t digit = 0; digit <= one.size();) {
            const std::size_t x = std::min(one.find('x', digit), one.size());
            const std::string digits = one.substr(digit, x - digit);
            const bool number = !digits.empty() && digits.size() < 8 &&
                                std::ranges::all_of(digits, [](char c) { return c >= '0' && c <= '9'; });
            sizes.push_back(number ? std::stoll(digits) : 0);
            digit = x + 1;
        }
        if (sizes.size() != 3 || std::ranges::min(sizes) < 1) {
            refuse(fmt::format("--shape holds '{}'; each is MxKxN (rows x inputs x outputs), numbers from 1 to 9999999",
                               one.substr(0, 60)));
        }
        shapes.push_back({.rows = sizes[0], .inputs = sizes[1], .outputs = sizes[2], .layers = layers});
    }
    return shapes;
}

}  // namespace

int run_bench_attention(const BenchAttentionArguments& arguments) {
    Output output(arguments.common);
    BenchPlan plan = common_plan(arguments.common);
    for (const KvTypes& types : parse_kv_types("--kv", arguments.kv)) {
        for (AttentionShape shape : attention_shapes(arguments)) {
            shape.kv = types;
            plan.workloads.push_back(plan_attention(shape, asked_for(shape)));
        }
    }
    add_rows(plan, arguments.common);
    return output.run(plan);
}

int run_bench_linear(const BenchLinearArguments& arguments) {
    Output output(arguments.common);
    BenchPlan plan = common_plan(arguments.common);
    const std::vector<WeightType> types = parse_weight_types("--weights", arguments.weights);
    for (LinearShape shape : linear_shapes(arguments)) {
        for (const WeightType type : types) {
            shape.weights = type;
            plan.workloads.push_back(
                plan_linear(shape, fmt::format("--shape {}x{}x{}", shape.rows, shape.inputs, shape.outputs)));
        }
    }
    add_rows(plan, arguments.common);
    return output.run(plan);
}

int run_bench_model(const BenchModelArguments& arguments) {
    Output output(arguments.common);
    BenchPlan plan = common_plan(arguments.common);
    const DecoderConfig config = load_config(arguments.model);
    const std::string name = arguments.model.empty() ? "embedded" : model_name(arguments.model);
    const bool nothing = arguments.prefill.empty() && arguments.depths.empty();
    if (arguments.steps && arguments.depths.empty() && !nothing) refuse("-n counts decode steps: give -d");
    const std::int64_t steps = within("-n", arguments.steps.value_or(1), 1, kMostTokens);
    const std::string usual = std::to_string(std::min<std::int64_t>(512, config.max_positions));
    std::vector<std::optional<WeightType>> weight_types{std::nullopt};
    if (!arguments.weights.empty()) {
        const std::vector<WeightType> types = parse_weight_types("--weights", arguments.weights);
        weight_types.assign(types.begin(), types.end());
    }
    const auto add = [&](std::optional<WeightType> weights, const KvTypes& types, bool prefill,
                         const std::string& option, const std::string& lengths, const auto& model) {
        if (lengths.empty() && !nothing) return;
        for (const std::int64_t n : parse_list(option, nothing ? usual : lengths, 1, kMostTokens)) {
            const ModelRun run{
                .prefill = prefill, .length = n, .steps = prefill ? 1 : steps, .kv = types, .weights = weights};
            plan.workloads.push_back(plan_model(run, config, name, model));
        }
    };
    for (const std::optional<WeightType> weights : weight_types) {
        auto made = std::make_shared<std::shared_ptr<const Model>>();
        const auto model = [made, weights, path = arguments.model](Context& context) {
            if (*made == nullptr) {
                *made = std::make_shared<const Model>(load_model(context, path, {.weights = weights}));
            }
            return *made;
        };
        for (const KvTypes& types : parse_kv_types("--kv", arguments.kv)) {
            add(weights, types, true, "-p", arguments.prefill, model);
            add(weights, types, false, "-d", arguments.depths, model);
        }
    }
    add_rows(plan, arguments.common);
    return output.run(plan);
}

}  // namespace headlong::tools
