// A file whose bytes are an input's.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "tests/fuzz/fuzzer.hpp"

namespace headlong::fuzz {

class ScratchFile {
  public:
    ScratchFile() {
        const char* folder = std::getenv("TMPDIR");
        path_ = std::string(folder != nullptr ? folder : "/tmp") + "/headlong-fuzz-XXXXXX";
        descriptor_ = ::mkstemp(path_.data());
        require(descriptor_ >= 0, "a file can be made in TMPDIR");
    }
    ~ScratchFile() {
        ::close(descriptor_);
        ::unlink(path_.c_str());
    }
    ScratchFile(const ScratchFile&) = delete;
    ScratchFile& operator=(const ScratchFile&) = delete;

    const std::string& path() const noexcept { return path_; }
    void set(Input bytes) {
        require(::ftruncate(descriptor_, 0) == 0 &&
                    ::pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<::ssize_t>(bytes.size()),
                "the file can be written");
    }

  private:
    std::string path_;
    int descriptor_ = -1;
};

}  // namespace headlong::fuzz
