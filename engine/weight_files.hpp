// The weights of a model: the tensors of one safetensors file, or of several that an index lists.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/safetensors.hpp"

namespace headlong {

/// Constant; tensors live as long as the object. Movable.
class WeightFiles {
  public:
    struct Entry {
        const FileTensor* tensor;
        const SafetensorsFile* file;
    };

    explicit WeightFiles(SafetensorsFile file);
    WeightFiles(const WeightFiles&) = delete;
    WeightFiles& operator=(const WeightFiles&) = delete;
    WeightFiles(WeightFiles&&) noexcept = default;
    WeightFiles& operator=(WeightFiles&&) noexcept = default;
    /// model.safetensors of a folder or, if it is not there, the files of model.safetensors.index.json. Throws IoError,
    /// BadFile (a tensor that is not in the file that the index names, or not in the index), OutOfMemory.
    static WeightFiles open(const std::string& folder, const SafetensorsOptions& options = {});

    /// What errors call the weights: the file, or the index.
    const std::string& path() const noexcept { return path_; }
    /// All tensors, in ascending order of name.
    const std::vector<Entry>& entries() const noexcept { return entries_; }
    /// The entry of that name, or nullptr.
    const Entry* find(std::string_view name) const noexcept;
    /// The entry of that name. Throws BadFile, naming it, if there is none.
    const Entry& at(std::string_view name) const;

  private:
    WeightFiles() = default;

    std::string path_;
    std::vector<SafetensorsFile> files_;
    std::vector<Entry> entries_;
};

}  // namespace headlong
