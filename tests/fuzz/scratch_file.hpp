// A file whose bytes are an input's.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "tests/fuzz/fuzzer.hpp"

namespace headlong::fuzz {

/// In memory: of a file system, writing thousands of files a second is all that would be seen.
class ScratchFile {
  public:
    ScratchFile() : descriptor_(::memfd_create("headlong-fuzz", 0)) {
        require(descriptor_ >= 0, "a file can be made in memory");
    }
    ~ScratchFile() { ::close(descriptor_); }
    ScratchFile(const ScratchFile&) = delete;
    ScratchFile& operator=(const ScratchFile&) = delete;

    std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }
    /// Whatever has the old bytes mapped must be gone.
    void set(Input bytes) {
        require(::ftruncate(descriptor_, 0) == 0 &&
                    ::pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<::ssize_t>(bytes.size()),
                "the file can be written");
    }

  private:
    int descriptor_;
};

}  // namespace headlong::fuzz
