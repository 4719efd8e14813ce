#include "engine/output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include <headlong/error.hpp>

#include "engine/mapped_file.hpp"

namespace headlong {

OutputFile::OutputFile(const std::string& path) : path_(path) {
    static std::atomic<unsigned> count{0};  // of this process: two threads may save to the same place
    do {                                    // what an earlier process of the same number left behind is in the way
        beside_ = path + ".part-" + std::to_string(::getpid()) + "-" + std::to_string(count.fetch_add(1));
        descriptor_ = ::open(beside_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (descriptor_ < 0 && errno == EEXIST);
    if (descriptor_ < 0) fail("cannot be created", errno);
}

OutputFile::~OutputFile() {
    if (descriptor_ < 0) return;
    ::close(descriptor_);
    ::unlink(beside_.c_str());
}

void OutputFile::write(std::span<const std::byte> bytes) {
    constexpr std::size_t kMostAtOnce = std::size_t{1} << 30U;
    while (!bytes.empty()) {
        const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMostAtOnce));
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) fail("cannot be written", written < 0 ? errno : ENOSPC);
        bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
}

void OutputFile::commit() {
    if (::fsync(descriptor_) != 0) fail("cannot be written to the disk", errno);
    if (std::rename(beside_.c_str(), path_.c_str()) != 0) fail("cannot be replaced", errno);
    ::close(std::exchange(descriptor_, -1));
    // The move itself reaches the disk with the folder; where a folder cannot be flushed, it does so in its own time.
    const std::string folder = std::filesystem::path(path_).parent_path().string();
    const int parent = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0) return;
    static_cast<void>(::fsync(parent));
    ::close(parent);
}

void OutputFile::fail(const char* what, int error) const {
    throw IoError(one_line(path_) + ": " + what + ": " + std::system_category().message(error));
}

}  // namespace headlong
