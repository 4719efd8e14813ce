// Reads safetensors files: a little-endian 64-bit header length N, N bytes of JSON, raw little-endian data. The JSON
// maps tensor names to {"dtype", "shape", "data_offsets": [begin, end)}, and "__metadata__" to strings.
//
// Files are hostile: every length, offset, count and product is checked before it is used, tensors must cover the
// data without overlap or hole (as the format demands), and whatever is wrong is a BadFile of one line that names
// the file, the tensor or key, the value and what is allowed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/mapped_file.hpp"

namespace headlong {

/// Element types of the format that have whole bytes.
enum class FileType : std::uint8_t {
    f64,
    f32,
    f16,
    bf16,
    f8_e4m3,
    f8_e5m2,
    i64,
    i32,
    i16,
    i8,
    u64,
    u32,
    u16,
    u8,
    boolean,
};

/// The name that files use: "F64", "BF16", "BOOL" ...
const char* to_string(FileType type) noexcept;
std::optional<FileType> parse_file_type(std::string_view name) noexcept;
std::size_t size_of(FileType type) noexcept;

/// One tensor: dense, row-major. `bytes` points into the file's data and need not be aligned.
struct FileTensor {
    std::string name;
    FileType type = FileType::f32;
    std::vector<std::int64_t> shape;
    std::span<const std::byte> bytes;

    std::size_t count() const noexcept { return bytes.size() / size_of(type); }
};

/// "F32[2, 3]", for messages.
std::string describe(const FileTensor& tensor);

/// Copies of the elements: floats from F64, F32, F16 and BF16, integers from every integer type and BOOL.
/// Throw InvalidArgument, naming the tensor, if its type is another one or (to_int64) a value does not fit.
std::vector<float> to_floats(const FileTensor& tensor);
std::vector<double> to_doubles(const FileTensor& tensor);
std::vector<std::int64_t> to_int64s(const FileTensor& tensor);

/// Widens the elements [first, first + into.size()), which the tensor has, to float; types as for to_floats().
void copy_floats(const FileTensor& tensor, std::size_t first, std::span<float> into);

struct SafetensorsOptions {
    bool map = true;                              ///< false reads the data into memory
    std::pmr::memory_resource* memory = nullptr;  ///< for data that is read; nullptr = aligned operator new
};

/// An open file; constant. Movable; the tensors' bytes live as long as the object.
class SafetensorsFile {
  public:
    /// Throws IoError, BadFile or OutOfMemory.
    explicit SafetensorsFile(const std::string& path, const SafetensorsOptions& options = {});

    /// A file's bytes in memory, which are not copied and must outlive the object. `name` is for messages.
    SafetensorsFile(const std::string& name, std::span<const std::byte> bytes);

    const std::string& path() const noexcept { return path_; }
    bool mapped() const noexcept { return data_.mapped(); }

    /// In ascending order of name.
    std::span<const FileTensor> tensors() const noexcept { return tensors_; }
    /// The tensor of that name, or nullptr.
    const FileTensor* find(std::string_view name) const noexcept;
    /// The tensor of that name. Throws BadFile, naming it, if there is none.
    const FileTensor& at(std::string_view name) const;

    const std::map<std::string, std::string, std::less<>>& metadata() const noexcept { return metadata_; }

  private:
    /// `open_data(size)` gives the FileData that follows the header.
    template <typename OpenData>
    void set_tensors(const std::string& header, std::uint64_t data_size, const OpenData& open_data);

    std::string path_;
    FileData data_;
    std::vector<FileTensor> tensors_;
    std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace headlong
