#include "tools/bench/report.hpp"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include <headlong/error.hpp>

#include "engine/json_node.hpp"
#include "engine/mapped_file.hpp"

namespace headlong::tools {
namespace {

using Json = nlohmann::ordered_json;

// What a row computes. The working set (`layers`) follows from the machine, and is not compared.
constexpr const char* kShapeFields[] = {
    "phase",  "model",  "q_len", "kv_len",      "batch",  "lens",    "heads", "kv_heads", "head_dim", "value_dim",
    "causal", "window", "ring",  "sink_tokens", "inputs", "outputs", "steps", "weights",  "kv_type",  "threads"};

/// A field of a row, or what a report that does not have it means.
nlohmann::json field_of(const nlohmann::json& row, const std::string& field) {
    const auto found = row.find(field);
    if (found != row.end()) return *found;
    const bool attention = row.contains("head_dim") && !row["head_dim"].is_null();
    if (field == "value_dim" && attention) return row["head_dim"];
    if (field == "causal" && attention) return true;
    if ((field == "window" || field == "sink_tokens") && attention) return 0;
    if (field == "ring" && attention) return false;
    return nullptr;
}

bool same_shape(const nlohmann::json& base, const nlohmann::json& row) {
    return std::ranges::all_of(kShapeFields,
                               [&](const char* field) { return field_of(base, field) == field_of(row, field); });
}

std::string plain(const Json& value) {
    if (value.is_null()) return "";
    if (value.is_string()) return value.get<std::string>();
    if (value.is_array()) {
        std::string text;
        for (const Json& element : value) text += (text.empty() ? "" : " ") + plain(element);
        return text;
    }
    return value.dump();
}

std::string csv(const std::vector<Json>& rows) {
    std::vector<std::string> columns;
    for (const Json& row : rows) {
        for (const auto& [key, value] : row.items()) {
            if (std::ranges::count(columns, key) == 0) columns.push_back(key);
        }
    }
    std::string text = fmt::format("{}\n", fmt::join(columns, ","));
    for (const Json& row : rows) {
        for (std::size_t c = 0; c < columns.size(); ++c) {
            std::string cell = row.contains(columns[c]) ? plain(row[columns[c]]) : "";
            if (cell.find_first_of(",\"\n") != std::string::npos) {  // RFC 4180
                std::string quoted = "\"";
                for (const char letter : cell) quoted += letter == '"' ? "\"\"" : std::string(1, letter);
                cell = quoted + '"';
            }
            text += (c == 0 ? "" : ",") + cell;
        }
        text += '\n';
    }
    return text;
}

/// Nanoseconds with the unit that leaves one to three digits before the point.
std::string duration(double ns) {
    if (ns >= 1e9) return fmt::format("{:.3f} s", ns * 1e-9);
    if (ns >= 1e6) return fmt::format("{:.3f} ms", ns * 1e-6);
    return fmt::format("{:.3f} us", ns * 1e-3);
}

/// What stands in a cell of the Markdown table.
std::string cell(const Json& row, std::string_view name) {
    const auto has = [&](const char* field) { return row.contains(field) && !row[field].is_null(); };
    const auto number = [&](const char* field) { return row[field].get<double>(); };
    if (name == "shape") {
        if (has("inputs"))
            return fmt::format("{}x{}x{}", plain(row["q_len"]), plain(row["inputs"]), plain(row["outputs"]));
        std::string text = fmt::format("{}/{}x{}", plain(row["heads"]), plain(row["kv_heads"]), plain(row["head_dim"]));
        if (row["value_dim"] != row["head_dim"]) text += ":" + plain(row["value_dim"]);
        if (!row["causal"].get<bool>()) text += " full";
        if (row["window"] != 0) text += " window " + plain(row["window"]);
        if (row.contains("sink_tokens") && row["sink_tokens"] != 0) text += " sinks " + plain(row["sink_tokens"]);
        return has("model") ? plain(row["model"]) + " " + text : text;
    }
    if (name == "tokens") {
        if (!has("kv_len")) return plain(row["q_len"]);
        std::string text = has("lens") ? plain(row["lens"]) : plain(row["kv_len"]);
        if (row["phase"] == "chunk") text = plain(row["q_len"]) + " of " + text;
        return row["batch"] == 1 || has("lens") ? text : fmt::format("{} x {}", plain(row["batch"]), text);
    }
    if (name == "type") {
        if (has("model")) return fmt::format("{} {}", plain(row["weights"]), plain(row["kv_type"]));
        return has("kv_type") ? plain(row["kv_type"]) : plain(row["weights"]);
    }
    if (name == "median" || name == "min" || name == "p95")
        return duration(number(("ns_" + std::string(name)).c_str()));
    if (name == "GFLOP/s") return fmt::format("{:.1f}", number("gflops"));
    if (name == "GB/s") return fmt::format("{:.2f}", number("gbps"));
    if (name == "of limit") return fmt::format("{:.3f}", number("of_limit"));
    if (name == "limits")
        return fmt::format("{:.0f} GFLOP/s, {:.1f} GB/s", number("limit_gflops"), number("limit_gbps"));
    if (name == "GHz")
        return fmt::format("{:.2f}{}", number("clock_ghz"), row["throttled"].get<bool>() ? " throttled" : "");
    if (name == "tokens/s") return has("tokens_per_s") ? fmt::format("{:.1f}", number("tokens_per_s")) : "";
    if (name == "max error") return has("max_abs_err") ? fmt::format("{:.2e}", number("max_abs_err")) : "";
    if (name == "speedup") return has("speedup") ? fmt::format("{:.3f}", number("speedup")) : "";
    return row.contains(name) ? plain(row[std::string(name)]) : "";
}

std::string markdown(const Json& machine, const std::vector<Json>& rows) {
    std::vector<std::string> columns{"phase",    "shape",  "tokens", "type",      "threads", "isa",
                                     "median",   "min",    "p95",    "tokens/s",  "GFLOP/s", "GB/s",
                                     "of limit", "limits", "GHz",    "max error", "speedup"};
    std::erase_if(columns, [&](const std::string& column) {  // optional ones that no row has
        return std::ranges::all_of(rows, [&](const Json& row) { return cell(row, column).empty(); });
    });
    std::vector<std::size_t> widths;
    for (const std::string& column : columns) {
        widths.push_back(column.size());
        for (const Json& row : rows) widths.back() = std::max(widths.back(), cell(row, column).size());
    }
    const auto is_text = [](const std::string& column) {
        return column == "phase" || column == "shape" || column == "type" || column == "isa" || column == "limits";
    };
    std::string text = fmt::format("{}, {}, {}\n\n", plain(machine["processor"]), plain(machine["compiler"]),
                                   plain(machine["build_type"]));
    std::string rule;
    for (std::size_t c = 0; c < columns.size(); ++c) {
        text += is_text(columns[c]) ? fmt::format("| {:<{}} ", columns[c], widths[c])
                                    : fmt::format("| {:>{}} ", columns[c], widths[c]);
        rule += "|" + std::string(widths[c] + 1, '-') + (is_text(columns[c]) ? "-" : ":");
    }
    text += "|\n" + rule + "|\n";
    for (const Json& row : rows) {
        for (std::size_t c = 0; c < columns.size(); ++c) {
            const std::string value = cell(row, columns[c]);
            text += is_text(columns[c]) ? fmt::format("| {:<{}} ", value, widths[c])
                                        : fmt::format("| {:>{}} ", value, widths[c]);
        }
        text += "|\n";
    }
    return text;
}

}  // namespace

std::vector<Json> planned_rows(const BenchPlan& plan) {
    std::vector<Json> rows;
    for (const PlannedRow& row : plan.rows) {
        rows.push_back(plan.workloads[row.workload].shape);
        rows.back()["threads"] = row.threads;
        rows.back()["isa"] = to_string(row.isa);
    }
    return rows;
}

std::vector<Json> report_rows(const BenchPlan& plan, const std::vector<RowResult>& results) {
    std::vector<Json> rows = planned_rows(plan);
    for (std::size_t r = 0; r < rows.size(); ++r) {
        const RowResult& row = results[r];
        Json& json = rows[r];
        json["samples"] = row.ns.count();
        json["steady"] = row.steady;
        json["ns_median"] = row.ns.median();
        json["ns_min"] = row.ns.min();
        json["ns_p50"] = row.ns.quantile(0.50);
        json["ns_p95"] = row.ns.quantile(0.95);
        json["ns_p99"] = row.ns.quantile(0.99);
        if (row.tokens > 0) json["tokens_per_s"] = static_cast<double>(row.tokens) * 1e9 / row.ns.median();
        json["flops"] = row.flops;
        json["bytes"] = row.bytes;
        json["gflops"] = row.gflops();
        json["gbps"] = row.gbps();
        json["limit_gflops"] = row.limit_flops * 1e-9;
        json["limit_gbps"] = row.limit_bytes * 1e-9;
        json["of_limit"] = row.of_limit();
        json["kv_bytes"] = row.kv_bytes;
        json["walk_bytes"] = row.walk_bytes;
        json["scratch_bytes"] = row.scratch_bytes;
        json["clock_ghz"] = row.clock_hz * 1e-9;
        json["throttled"] = row.throttled();
        if (row.deviation) {
            json["max_abs_err"] = row.deviation->max_abs_err;
            json["tolerance"] = row.deviation->tolerance;
        }
    }
    return rows;
}

Format parse_format(const std::string& name) {
    if (name == "md") return Format::md;
    if (name == "csv") return Format::csv;
    if (name == "json") return Format::json;
    if (name == "jsonl") return Format::jsonl;
    throw InvalidArgument(fmt::format("-o is '{}'; allowed: md, csv, json, jsonl", name));
}

std::string format_report(Format format, const Json& machine, const std::vector<Json>& rows) {
    constexpr auto kReplace = Json::error_handler_t::replace;
    switch (format) {
        case Format::md:
            return markdown(machine, rows);
        case Format::csv:
            return csv(rows);
        case Format::json: {
            Json report;
            report["machine"] = machine;
            report["rows"] = rows;
            return report.dump(2, ' ', false, kReplace) + "\n";
        }
        case Format::jsonl: {
            std::string text;
            for (const Json& row : rows) text += row.dump(-1, ' ', false, kReplace) + "\n";
            return text;
        }
    }
    return "";
}

Baseline::Baseline(const std::string& path) {
    const std::string text = read_text(path, std::uint64_t{1} << 28U);
    const JsonDocument document = parse_json(text, path);
    const nlohmann::json& report = document.root();
    if (!report.is_object() || !report.contains("rows") || !report["rows"].is_array()) {
        throw BadFile(fmt::format("--compare {}: is no report of bench -o json: it has no list of rows", path));
    }
    rows_ = report["rows"];
    for (std::size_t i = 0; i < rows_.size(); ++i) {
        const nlohmann::json& row = rows_[i];
        if (!row.is_object() || !row.contains("phase") || !row.contains("ns_median") || !row["ns_median"].is_number() ||
            !(row["ns_median"].get<double>() > 0.0)) {
            throw BadFile(fmt::format("--compare {}: rows[{}] has no phase, or no ns_median above 0", path, i));
        }
    }
}

const nlohmann::json* Baseline::find(const Json& row) const {
    const nlohmann::json wanted(row);
    const nlohmann::json* match = nullptr;
    for (const nlohmann::json& base : rows_) {
        if (!same_shape(base, wanted)) continue;
        if (field_of(base, "isa") == wanted["isa"]) return &base;
        if (match == nullptr) match = &base;
    }
    return match;
}

bool Baseline::has_any(const std::vector<Json>& rows) const {
    return std::ranges::any_of(rows, [&](const Json& row) { return find(row) != nullptr; });
}

void Baseline::compare(std::vector<Json>& rows) const {
    for (Json& row : rows) {
        const nlohmann::json* const match = find(row);
        row["base_ns_median"] = nullptr;
        row["speedup"] = nullptr;
        row["speedup_min"] = nullptr;
        if (match == nullptr) continue;
        const double base = (*match)["ns_median"].get<double>();
        row["base_ns_median"] = base;
        row["speedup"] = base / row["ns_median"].get<double>();
        if (const nlohmann::json least = field_of(*match, "ns_min"); least.is_number() && row.contains("ns_min")) {
            row["speedup_min"] = least.get<double>() / row["ns_min"].get<double>();
        }
        if (field_of(*match, "throttled") == true) row["base_throttled"] = true;
    }
}

std::string row_name(const Json& row) {
    return fmt::format("{} {} of {} ({}, {} threads, {})", plain(row["phase"]), cell(row, "tokens"), cell(row, "shape"),
                       cell(row, "type"), plain(row["threads"]), plain(row["isa"]));
}

}  // namespace headlong::tools
