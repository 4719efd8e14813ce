// A file that is written whole or not at all: beside its place, then flushed to the disk, then moved over what was
// there.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace headlong {

class OutputFile {
  public:
    /// Creates a file beside `path`, named after it. Throws IoError, naming the path, as all calls do.
    explicit OutputFile(const std::string& path);
    ~OutputFile();  ///< removes it if it was not moved to its place
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;

    void write(std::span<const std::byte> bytes);
    /// Moves the file to its place. What was there is there until then, and whole.
    void commit();

  private:
    [[noreturn]] void fail(const char* what, int error) const;
    std::string path_;
    std::string beside_;
    int descriptor_ = -1;
};

}  // namespace headlong
