// Reports of benchmarks: what becomes of results on their way out.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/bench/schedule.hpp"

namespace headlong::tools {

/// One object per row: the workload's shape, then what was measured (bench/README.md lists the fields).
std::vector<nlohmann::ordered_json> report_rows(const BenchPlan& plan, const BenchResult& result);

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

    /// Adds base_ns_median and speedup (base / new) to the rows of which the earlier report has the same: all fields of
    /// the shape and the number of threads agree; of several instruction sets, the same one's, else the first. Fields
    /// are null in other rows. Returns how many rows matched.
    std::size_t compare(std::vector<nlohmann::ordered_json>& rows) const;

  private:
    nlohmann::json rows_;
};

/// What a row is called in messages.
std::string row_name(const nlohmann::ordered_json& row);

}  // namespace headlong::tools
