// A weight file. What is accepted has every tensor inside of the file, of the size that its type and shape say, and no
// byte twice or not at all; mapped, read and in memory it is the same.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/safetensors.hpp"
#include "tests/fuzz/fuzzer.hpp"
#include "tests/fuzz/scratch_file.hpp"

namespace headlong::fuzz {
namespace {

void check(const SafetensorsFile& file, std::size_t file_bytes) {
    std::vector<Input> parts;
    for (const FileTensor& tensor : file.tensors()) {
        std::uint64_t count = 1;
        for (const std::int64_t extent : tensor.shape) {
            require(extent >= 0, "extents are not negative");
            if (extent != 0 && count > file_bytes) require(false, "a tensor is not larger than its file");
            count *= static_cast<std::uint64_t>(extent);
        }
        require(tensor.bytes.size() == count * size_of(tensor.type), "a tensor has the bytes that its shape says");
        require(file.find(tensor.name) == &tensor, "a tensor is found by its name");
        require(!describe(tensor).empty(), "a tensor can be described");
        parts.push_back(tensor.bytes);
        const bool floats = done([&] { to_floats(tensor); });
        const bool integers = done([&] { to_int64s(tensor); });
        require(!(floats && integers) || count == 0, "no type is both floats and integers");
    }
    std::ranges::sort(parts, {}, [](const Input& part) { return part.data(); });
    std::erase_if(parts, [](const Input& part) { return part.empty(); });
    for (std::size_t i = 1; i < parts.size(); ++i) {
        require(parts[i - 1].data() + parts[i - 1].size() == parts[i].data(), "tensors lie one behind the other");
    }
    std::size_t sum = 8;
    for (const Input& part : parts) sum += part.size();
    require(sum <= file_bytes, "tensors have no more bytes than the file");
}

void check_same(const SafetensorsFile& a, const SafetensorsFile& b) {
    require(a.metadata() == b.metadata(), "the same metadata");
    require(a.tensors().size() == b.tensors().size(), "the same tensors");
    for (std::size_t i = 0; i < a.tensors().size(); ++i) {
        const FileTensor& one = a.tensors()[i];
        const FileTensor& other = b.tensors()[i];
        require(one.name == other.name && one.type == other.type && one.shape == other.shape, "the same tensor");
        require(std::ranges::equal(one.bytes, other.bytes), "the same bytes");
    }
}

}  // namespace

void safetensors(Input input) {
    static ScratchFile scratch;
    scratch.set(input);
    bool accepted = false;
    done([&] {
        const SafetensorsFile file("input", input);
        accepted = true;
        check(file, input.size());
        for (const bool map : {true, false}) check_same(file, SafetensorsFile(scratch.path(), {.map = map}));
    });
    const bool from_file = done([&] { SafetensorsFile file(scratch.path()); });
    require(from_file == accepted, "a file on the disk and one in memory are judged alike");
}

}  // namespace headlong::fuzz
