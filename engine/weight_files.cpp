#include "engine/weight_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <headlong/error.hpp>
#include <map>
#include <system_error>
#include <utility>

#include "engine/json_node.hpp"
#include "engine/mapped_file.hpp"

namespace headlong {
namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr std::uint64_t kMostIndexBytes = std::uint64_t{1} << 26;  // that of a model of 671 billion weights has 9 MB

const std::string& name_of(const WeightFiles::Entry& entry) noexcept { return entry.tensor->name; }

/// File by file the tensors that an index promises.
std::map<std::string, std::vector<std::string>, std::less<>> read_index(const std::string& path) {
    const JsonDocument document = parse_json(read_text(path, kMostIndexBytes), path);
    const JsonNode root(document.root(), path);
    const JsonNode map = root.at("weight_map");
    std::map<std::string, std::vector<std::string>, std::less<>> files;
    for (const auto& [tensor, value] : map.object()) {
        const JsonNode node = map.child(value, fmt::format("weight_map['{}']", one_line(tensor)));
        const std::string& file = node.string();
        // a file beside the index, and nowhere else
        if (file.empty() || file.find_first_of("/\\") != std::string::npos || file == "." || file == "..") {
            node.fail(fmt::format("is '{}'; it must be the name of a file in this folder", one_line(file)));
        }
        files[file].push_back(tensor);
    }
    if (files.empty()) map.fail("is empty");
    return files;
}

}  // namespace

WeightFiles::WeightFiles(SafetensorsFile file) : path_(file.path()) {
    files_.push_back(std::move(file));
    for (const FileTensor& tensor : files_.front().tensors()) entries_.push_back({&tensor, &files_.front()});
}

WeightFiles WeightFiles::open(const std::string& folder, const SafetensorsOptions& options) {
    const std::string single = folder + "/" + kSingle;
    const std::string index = folder + "/" + kIndex;
    std::error_code ignored;
    if (std::filesystem::exists(single, ignored) || !std::filesystem::exists(index, ignored)) {
        return WeightFiles(SafetensorsFile(single, options));
    }
    WeightFiles weights;
    weights.path_ = index;
    const auto listed = read_index(index);
    weights.files_.reserve(listed.size());
    for (const auto& [file, tensors] : listed) {
        const SafetensorsFile& opened = weights.files_.emplace_back(folder + "/" + file, options);
        for (const std::string& name : tensors) weights.entries_.push_back({&opened.at(name), &opened});
        if (opened.tensors().size() == tensors.size()) continue;
        for (const FileTensor& tensor : opened.tensors()) {
            if (std::ranges::binary_search(tensors, tensor.name)) continue;  // in order, as JSON's keys are here
            throw BadFile(fmt::format("{}: tensor '{}' is not in the index for this file", one_line(opened.path()),
                                      one_line(tensor.name)));
        }
    }
    std::ranges::sort(weights.entries_, {}, name_of);
    return weights;
}

const WeightFiles::Entry* WeightFiles::find(std::string_view name) const noexcept {
    const auto found = std::ranges::lower_bound(entries_, name, std::less<>(), name_of);
    return found != entries_.end() && found->tensor->name == name ? &*found : nullptr;
}

const WeightFiles::Entry& WeightFiles::at(std::string_view name) const {
    const Entry* const entry = find(name);
    if (entry == nullptr) {
        throw BadFile(fmt::format("{}: tensor '{}' is missing", one_line(path_), one_line(std::string(name))));
    }
    return *entry;
}

}  // namespace headlong
