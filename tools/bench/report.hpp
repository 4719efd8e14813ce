// Reports of benchmarks: what becomes of results on their way out.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/bench/schedule.hpp"

namespace headlong::tools {

/// One object per row: the workload's shape, then what was measured (bench/README.md lists the fields).
std::vector<nlohmann::ordered_json> report_rows(const BenchPlan& plan, const std::vector<RowResult>& results);

/// The same before anything is measured: what rows compute, and by what.
std::vector<nlohmann::ordered_json> planned_rows(const BenchPlan& plan);

enum class Format : std::uint8_t { md, csv, json, jsonl };

/// Throws InvalidArgument.
Format parse_format(const std::string& name);

std::string format_report(Format format, const nlohmann::ordered_json& machine,
                          const std::vector<nlohmann::ordered_json>& rows);

/// An earlier report to compare with.
class Baseline {
  public:
    /// Reads a file of `-o json`. Throws IoError, BadFile.
    explicit Baseline(const std::string& path);

    /// Whether the earlier report has one of these rows: all fields of the shape and the number of threads agree,
    /// whatever the instruction set.
    bool has_any(const std::vector<nlohmann::ordered_json>& rows) const;

    /// Adds base_ns_median, speedup (base / new of the medians) and speedup_min (of the minima) to each row; null where
    /// the earlier report does not have it. Of several instruction sets the same one's counts, else the first.
    void compare(std::vector<nlohmann::ordered_json>& rows) const;

  private:
    const nlohmann::json* find(const nlohmann::ordered_json& row) const;

    nlohmann::json rows_;
};

/// What a row is called in messages.
std::string row_name(const nlohmann::ordered_json& row);

}  // namespace headlong::tools
