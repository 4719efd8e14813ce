#include "tools/cases/case_file.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include <headlong/error.hpp>

namespace headlong::tools {

CaseFile::CaseFile(const std::string& path) : file_(path, {.map = false}) {
    // What a case allocates is bounded by the bytes of its file, unless a tensor has none and an extent of any size.
    constexpr std::int64_t kMost = 1024;
    for (const FileTensor& tensor : file_.tensors()) {
        if (!tensor.bytes.empty()) continue;
        std::int64_t others = 1;
        for (const std::int64_t extent : tensor.shape)
            others *= std::clamp<std::int64_t>(extent, 1, kMost / others + 1);
        if (others > kMost) {
            fail(fmt::format("tensor '{}' is {}; extents beside a 0 may multiply to {}", one_line(tensor.name),
                             describe(tensor), kMost));
        }
    }
}

std::optional<std::string> CaseFile::text(std::string_view key) const {
    const auto found = file_.metadata().find(key);
    if (found == file_.metadata().end()) return std::nullopt;
    return found->second;
}

std::optional<std::int64_t> CaseFile::integer(std::string_view key) const {
    const std::optional<std::string> written = text(key);
    if (!written) return std::nullopt;
    std::int64_t value = 0;
    const char* const end = written->data() + written->size();
    const auto [stop, error] = std::from_chars(written->data(), end, value);
    if (error != std::errc{} || stop != end) {
        fail(fmt::format("metadata '{}' is '{}', only a whole number is allowed", key, one_line(*written)));
    }
    return value;
}

std::optional<double> CaseFile::number(std::string_view key) const {
    const std::optional<std::string> written = text(key);
    if (!written) return std::nullopt;
    double value = 0.0;
    const char* const end = written->data() + written->size();
    const auto [stop, error] = std::from_chars(written->data(), end, value);
    if (error != std::errc{} || stop != end || !std::isfinite(value)) {
        fail(fmt::format("metadata '{}' is '{}', only a finite number is allowed", key, one_line(*written)));
    }
    return value;
}

std::vector<std::string> CaseFile::list(std::string_view key) const {
    const std::string written = text(key).value_or("");
    std::vector<std::string> items;
    if (written.empty()) return items;
    for (std::size_t begin = 0; begin <= written.size();) {
        const std::size_t end = std::min(written.find(',', begin), written.size());
        items.push_back(written.substr(begin, end - begin));
        begin = end + 1;
    }
    return items;
}

Tolerance CaseFile::tolerance(const FileTensor& expected) const {
    const double usual = expected.type == FileType::f16 || expected.type == FileType::bf16 ? 2e-3 : 1e-5;
    // of this tensor, of the file, of the type
    const auto written = [&](const std::string& key) {
        return number(key + "." + expected.name).value_or(number(key).value_or(usual));
    };
    const Tolerance tolerance{written("atol"), written("rtol")};
    if (tolerance.absolute < 0.0 || tolerance.relative < 0.0) fail("metadata 'atol' and 'rtol' must not be negative");
    return tolerance;
}

void CaseFile::expect_shape(const FileTensor& tensor, const std::vector<std::int64_t>& shape) const {
    if (tensor.shape != shape) {
        fail(fmt::format("tensor '{}' is {}, its shape must be [{}]", one_line(tensor.name), describe(tensor),
                         fmt::join(shape, ", ")));
    }
}

void CaseFile::fail(const std::string& what) const { throw BadFile(one_line(file_.path()) + ": " + what); }

}  // namespace headlong::tools
