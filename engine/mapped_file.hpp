// The one place that maps files: a file opened for reading, whose parts are read into the caller's memory or mapped.
// Files are hostile. What a decision depends on (headers, sizes) is read into memory once, so that another process
// cannot change it between the check and the use; only bulk data (weights) is mapped. A file that shrinks while it
// is mapped makes the system end the process when the lost part is touched: where that matters, read instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <span>
#include <string>
#include <string_view>

namespace headlong {

/// The text for a one-line message: control characters and bytes that would break a line are written as \xNN, and
/// what is longer than `longest` bytes is cut.
std::string one_line(std::string_view text, std::size_t longest = 500);

/// A regular file, open for reading. Movable.
class InputFile {
  public:
    /// Throws IoError if the path does not name a readable regular file.
    explicit InputFile(const std::string& path);
    ~InputFile();
    InputFile(InputFile&& other) noexcept;
    InputFile& operator=(InputFile&&) = delete;

    const std::string& path() const noexcept { return path_; }
    std::uint64_t size() const noexcept { return size_; }  ///< when it was opened

    /// Fills `into` with the bytes at `offset`. Throws IoError if the file does not have them (any more).
    void read(std::uint64_t offset, std::span<std::byte> into) const;

  private:
    friend class FileData;
    std::string path_;
    int descriptor_ = -1;
    std::uint64_t size_ = 0;
};

/// The text of a file. Throws IoError, and BadFile if it has more than `most` bytes.
std::string read_text(const std::string& path, std::uint64_t most);

/// A range of a file's bytes, mapped or held in memory; constant, and freed with the object. Movable.
class FileData {
  public:
    FileData() = default;

    /// Maps [offset, offset + size) of the file, which must lie inside it; reads it where the file cannot be mapped.
    static FileData map(const InputFile& file, std::uint64_t offset, std::uint64_t size,
                        std::pmr::memory_resource& memory);
    /// Reads it into memory of the resource, aligned to 64 bytes. Throws OutOfMemory.
    static FileData read(const InputFile& file, std::uint64_t offset, std::uint64_t size,
                         std::pmr::memory_resource& memory);

    /// Bytes that somebody else owns.
    static FileData borrow(std::span<const std::byte> bytes) noexcept {
        FileData data;
        data.bytes_ = bytes;
        return data;
    }

    std::span<const std::byte> bytes() const noexcept { return bytes_; }
    bool mapped() const noexcept { return mapped_; }

  private:
    std::shared_ptr<const void> owner_;  // unmaps or deallocates
    std::span<const std::byte> bytes_;
    bool mapped_ = false;
};

}  // namespace headlong
