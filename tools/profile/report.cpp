#include "tools/profile/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace headlong::tools {
namespace {

using Json = nlohmann::ordered_json;

double per(double amount, double seconds) { return seconds > 0.0 ? amount / seconds : 0.0; }
double rate(std::uint64_t amount, double seconds) { return per(static_cast<double>(amount), seconds); }

double sum_of(const std::vector<Part>& parts) {
    double seconds = 0.0;
    for (const Part& part : parts) seconds += part.seconds;
    return seconds;
}

/// The share of the machine's limit that a part reached in its wall time; nothing where no work is counted.
std::optional<double> of_limit(const Part& part, const ProfileReport& report) {
    if (part.flops == 0 && part.bytes == 0) return {};
    const double least = std::max(rate(part.flops, report.limit_flops), rate(part.bytes, report.limit_bytes));
    return per(least, part.wall_seconds());
}

Json parts_json(const std::vector<Part>& parts, double wall, const ProfileReport& report) {
    Json list = Json::array();
    for (const Part& part : parts) {
        Json row;
        row["kind"] = part.kind;
        row["seconds"] = part.seconds;
        row["waiting_seconds"] = part.waiting_seconds;
        row["share"] = per(part.seconds, wall);
        row["calls"] = part.calls;
        row["flops"] = part.flops;
        row["bytes"] = part.bytes;
        row["gflops"] = rate(part.flops, part.wall_seconds()) * 1e-9;
        row["gbps"] = rate(part.bytes, part.wall_seconds()) * 1e-9;
        const std::optional<double> limit = of_limit(part, report);
        row["of_limit"] = limit ? Json(*limit) : Json(nullptr);
        list.push_back(std::move(row));
    }
    return list;
}

Json phase_json(const PhaseReport& phase, const ProfileReport& report, bool layers) {
    Json json;
    json["tokens"] = phase.tokens;
    json["wall_seconds"] = phase.wall_seconds;
    json["sum_seconds"] = sum_of(phase.parts);
    json["tokens_per_s"] = per(static_cast<double>(phase.tokens), phase.wall_seconds);
    json["clock_before_ghz"] = phase.clock_before * 1e-9;
    json["clock_after_ghz"] = phase.clock_after * 1e-9;
    json["throttled"] = phase.throttled;
    json["parts"] = parts_json(phase.parts, phase.wall_seconds, report);
    if (!layers) return json;
    json["layers"] = Json::array();
    for (const LayerParts& layer : phase.layers) {
        json["layers"].push_back({{"layer", layer.layer < 0 ? Json(nullptr) : Json(layer.layer)},
                                  {"parts", parts_json(layer.parts, phase.wall_seconds, report)}});
    }
    return json;
}

std::string mebibytes(std::uint64_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); }

void print_phase(std::string& text, const PhaseReport& phase, const ProfileReport& report) {
    const auto out = std::back_inserter(text);
    fmt::format_to(out, "\n{}: {} tokens in {:.3f} ms, {:.0f} tokens/s; clock {:.2f} and {:.2f} GHz{}\n", phase.name,
                   phase.tokens, phase.wall_seconds * 1e3, per(static_cast<double>(phase.tokens), phase.wall_seconds),
                   phase.clock_before * 1e-9, phase.clock_after * 1e-9, phase.throttled ? ", throttled" : "");
    const auto row = [&](const std::string& kind, double seconds) {
        fmt::format_to(out, "  {:<12} {:>10.3f} {:>6.1f}%", kind, seconds * 1e3,
                       100.0 * per(seconds, phase.wall_seconds));
    };
    fmt::format_to(out, "  {:<12} {:>10} {:>7} {:>8} {:>10} {:>9} {:>8} {:>9}\n", "kind", "ms", "share", "calls",
                   "waiting ms", "GFLOP/s", "GB/s", "of limit");
    for (const Part& part : phase.parts) {
        row(part.kind, part.seconds);
        if (part.calls > 0) fmt::format_to(out, " {:>8} {:>10.3f}", part.calls, part.waiting_seconds * 1e3);
        if (const std::optional<double> limit = of_limit(part, report)) {
            fmt::format_to(out, " {:>9.2f} {:>8.2f} {:>8.1f}%", rate(part.flops, part.wall_seconds()) * 1e-9,
                           rate(part.bytes, part.wall_seconds()) * 1e-9, 100.0 * *limit);
        }
        text += '\n';
    }
    row("sum", sum_of(phase.parts));
    text += '\n';
    row("wall", phase.wall_seconds);
    text += '\n';
}

void print_layers(std::string& text, const PhaseReport& phase) {
    const auto out = std::back_inserter(text);
    fmt::format_to(out, "\n{}, ms by layer\n  {:<6}", phase.name, "layer");
    for (const Part& part : phase.parts) fmt::format_to(out, " {:>11}", part.kind);
    fmt::format_to(out, " {:>11}\n", "sum");
    for (const LayerParts& layer : phase.layers) {
        fmt::format_to(out, "  {:<6}", layer.layer < 0 ? "none" : std::to_string(layer.layer));
        for (const Part& part : layer.parts) fmt::format_to(out, " {:>11.3f}", part.seconds * 1e3);
        fmt::format_to(out, " {:>11.3f}\n", sum_of(layer.parts) * 1e3);
    }
}

}  // namespace

Json to_json(const ProfileReport& report, bool layers) {
    Json json;
    json["model"] = report.model;
    json["isa"] = report.isa;
    json["threads"] = report.threads;
    json["prompt_tokens"] = report.prompt_tokens;
    json["prefill_chunk"] = report.prefill_chunk;
    json["decode_steps"] = report.decode_steps;
    json["time_to_first_token_seconds"] = report.prefill.wall_seconds;
    json["decode_latency_seconds"] = nullptr;
    if (const Samples& steps = report.step_seconds; steps.count() > 0) {
        json["decode_latency_seconds"] = {{"min", steps.min()},
                                          {"median", steps.median()},
                                          {"p95", steps.quantile(0.95)},
                                          {"p99", steps.quantile(0.99)},
                                          {"max", steps.max()}};
    }
    json["limits"] = {{"gflops", report.limit_flops * 1e-9},
                      {"gbps", report.limit_bytes * 1e-9},
                      {"read_buffer_bytes", report.read_buffer_bytes},
                      {"best_clock_ghz", report.best_clock * 1e-9}};
    json["memory"] = {{"peak_bytes", report.peak_bytes},
                      {"weight_bytes", report.weight_bytes},
                      {"kv_type", report.kv_type},
                      {"kv_used_bytes", report.kv_used_bytes},
                      {"kv_reserved_bytes", report.kv_reserved_bytes},
                      {"scratch_bytes", report.scratch_bytes}};
    json["prefill"] = phase_json(report.prefill, report, layers);
    json["decode"] = report.decode_steps > 0 ? phase_json(report.decode, report, layers) : Json(nullptr);
    return json;
}

std::string to_text(const ProfileReport& report, bool layers) {
    std::string text;
    const auto line = [&](const char* name, const std::string& value) {
        fmt::format_to(std::back_inserter(text), "{:<18}{}\n", name, value);
    };
    line("model", report.model);
    line("computed by",
         fmt::format("{}, {} {}", report.isa, report.threads, report.threads == 1 ? "thread" : "threads"));
    line("limits",
         fmt::format("{:.1f} GFLOP/s, {:.1f} GB/s over {}, clock {:.2f} GHz", report.limit_flops * 1e-9,
                     report.limit_bytes * 1e-9, mebibytes(report.read_buffer_bytes), report.best_clock * 1e-9));
    line("memory", fmt::format("peak {}: weights {}, cache {} used of {}, scratch {}", mebibytes(report.peak_bytes),
                               mebibytes(report.weight_bytes), mebibytes(report.kv_used_bytes),
                               mebibytes(report.kv_reserved_bytes), mebibytes(report.scratch_bytes)));
    line("first token", fmt::format("after {:.3f} ms: {} tokens, {} at a time", report.prefill.wall_seconds * 1e3,
                                    report.prompt_tokens, report.prefill_chunk));
    if (const Samples& steps = report.step_seconds; steps.count() > 0) {
        line("a decode step", fmt::format("min {:.3f}, median {:.3f}, p95 {:.3f}, p99 {:.3f}, max {:.3f} ms",
                                          steps.min() * 1e3, steps.median() * 1e3, steps.quantile(0.95) * 1e3,
                                          steps.quantile(0.99) * 1e3, steps.max() * 1e3));
    }
    for (const PhaseReport* phase : {&report.prefill, &report.decode}) {
        if (phase->tokens == 0) continue;
        print_phase(text, *phase, report);
        if (layers) print_layers(text, *phase);
    }
    return text;
}

}  // namespace headlong::tools
