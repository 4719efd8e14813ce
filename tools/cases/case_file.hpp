// A case file: a safetensors file whose metadata say what to compute from its tensors, and what must come out.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <headlong/tensor.hpp>

#include "engine/safetensors.hpp"
#include "tools/cases/comparison.hpp"

namespace headlong::tools {

/// Whatever is wrong with the file is thrown as BadFile, in one line that names the file and the key or tensor.
class CaseFile {
  public:
    /// Cases are read into memory, not mapped: a file that shrinks under us must not end the process.
    explicit CaseFile(const std::string& path);

    const SafetensorsFile& file() const noexcept { return file_; }
    const FileTensor* find(std::string_view tensor) const noexcept { return file_.find(tensor); }
    const FileTensor& at(std::string_view tensor) const { return file_.at(tensor); }

    /// Metadata, absent or as text, number or comma list. An empty place in a list is an empty string.
    std::optional<std::string> text(std::string_view key) const;
    std::optional<std::int64_t> integer(std::string_view key) const;
    std::optional<double> number(std::string_view key) const;
    std::vector<std::string> list(std::string_view key) const;

    /// The file's own tolerance, of this tensor (`atol.Y`) or of all (`atol`), otherwise that of the tensor's type.
    Tolerance tolerance(const FileTensor& expected) const;

    /// Throws BadFile unless the tensor has exactly this shape.
    void expect_shape(const FileTensor& tensor, const std::vector<std::int64_t>& shape) const;
    [[noreturn]] void fail(const std::string& what) const;

  private:
    SafetensorsFile file_;
};

/// The library's type of a file's floats; f64, which the library has not, is rounded to f32.
inline DType dtype_of(FileType type) noexcept {
    return type == FileType::f16 ? DType::f16 : type == FileType::bf16 ? DType::bf16 : DType::f32;
}

}  // namespace headlong::tools
