#include "engine/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>
#include <system_error>
#include <utility>

#include <headlong/error.hpp>

namespace headlong {
namespace {

constexpr std::size_t kDataAlignment = 64;

[[noreturn]] void fail(const std::string& path, const std::string& what) {
    throw IoError(one_line(path) + ": " + what);
}

std::string system_message(int error) { return std::system_category().message(error); }

std::size_t checked_size(const InputFile& file, std::uint64_t offset, std::uint64_t size) {
    if (offset > file.size() || size > file.size() - offset) {
        fail(file.path(), "has " + std::to_string(file.size()) + " bytes, " + std::to_string(size) + " from offset " +
                              std::to_string(offset) + " on are needed");
    }
    if (size > std::numeric_limits<std::size_t>::max() / 2) {
        fail(file.path(), std::to_string(size) + " bytes are more than this machine can address");
    }
    return static_cast<std::size_t>(size);
}

}  // namespace

std::string one_line(std::string_view text, std::size_t longest) {
    constexpr char digits[] = "0123456789abcdef";
    std::string line;
    for (const char c : text.substr(0, longest)) {
        const auto code = static_cast<unsigned char>(c);
        if (code < 0x20 || code == 0x7f) {
            line += "\\x";
            line += digits[code >> 4];
            line += digits[code & 15];
        } else {
            line += c;
        }
    }
    if (text.size() > longest) line += "...";
    return line;
}

InputFile::InputFile(const std::string& path) : path_(path) {
    // O_NONBLOCK: opening a pipe must not wait for its writer; regular files ignore it
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor_ < 0) fail(path, "cannot be opened: " + system_message(errno));
    struct stat status {};
    const bool known = ::fstat(descriptor_, &status) == 0;
    if (!known || !S_ISREG(status.st_mode)) {
        const std::string what = known ? "is not a regular file" : "cannot be examined: " + system_message(errno);
        ::close(descriptor_);
        fail(path, what);
    }
    size_ = static_cast<std::uint64_t>(status.st_size);
}

InputFile::~InputFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(std::exchange(other.size_, 0)) {}

void InputFile::read(std::uint64_t offset, std::span<std::byte> into) const {
    checked_size(*this, offset, into.size());
    // systems cap one read near 2 GiB, and may give less than was asked for
    constexpr std::size_t largest = std::size_t{1} << 30;
    std::size_t done = 0;
    while (done < into.size()) {
        const ssize_t got = ::pread(descriptor_, into.data() + done, std::min(into.size() - done, largest),
                                    static_cast<off_t>(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) fail(path_, "cannot be read: " + system_message(errno));
        if (got == 0) fail(path_, "became shorter while it was read");
        done += static_cast<std::size_t>(got);
    }
}

std::string read_text(const std::string& path, std::uint64_t most) {
    const InputFile file(path);
    if (file.size() > most) {
        throw BadFile(one_line(path) + ": has " + std::to_string(file.size()) + " bytes; at most " +
                      std::to_string(most) + " are allowed");
    }
    std::string text(static_cast<std::size_t>(file.size()), '\0');
    file.read(0, std::as_writable_bytes(std::span(text)));
    return text;
}

FileData FileData::map(const InputFile& file, std::uint64_t offset, std::uint64_t size,
                       std::pmr::memory_resource& memory) {
    const std::size_t length = checked_size(file, offset, size);
    if (length == 0) return {};
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t lead = static_cast<std::size_t>(offset % page);  // a mapping starts on a page
    void* const address =
        ::mmap(nullptr, lead + length, PROT_READ, MAP_PRIVATE, file.descriptor_, static_cast<off_t>(offset - lead));
    if (address == MAP_FAILED) return read(file, offset, size, memory);
    FileData data;
    data.owner_ = std::shared_ptr<const void>(
        address, [total = lead + length](const void* mapping) { ::munmap(const_cast<void*>(mapping), total); });
    data.bytes_ = {static_cast<const std::byte*>(address) + lead, length};
    data.mapped_ = true;
    return data;
}

FileData FileData::read(const InputFile& file, std::uint64_t offset, std::uint64_t size,
                        std::pmr::memory_resource& memory) {
    const std::size_t length = checked_size(file, offset, size);
    if (length == 0) return {};
    FileData data;
    try {
        void* const buffer = memory.allocate(length, kDataAlignment);
        data.owner_ = std::shared_ptr<const void>(buffer, [&memory, length](const void* held) {
            memory.deallocate(const_cast<void*>(held), length, kDataAlignment);
        });
        data.bytes_ = {static_cast<const std::byte*>(buffer), length};
        file.read(offset, {static_cast<std::byte*>(buffer), length});
    } catch (const std::bad_alloc&) {
        throw OutOfMemory(one_line(file.path()) + ": no memory for its " + std::to_string(length) + " bytes");
    }
    return data;
}

}  // namespace headlong
