// A weight file. What is accepted has every tensor inside of the file, of the size that its type and shape say, and no
// byte twice or not at all; mapped, read and in memory it is the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine/safetensors.hpp"
#include "tests/fuzz/fuzzer.hpp"
#include "tests/fuzz/scratch_file.hpp"

namespace headlong::fuzz {
namespace {

void check(const SafetensorsFile& file, Input input) {
    std::vector<Input> parts;
    for (const FileTensor& tensor : file.tensors()) {
        const bool empty = std::ranges::count(tensor.shape, 0) != 0;
        std::uint64_t bytes = empty ? 0 : size_of(tensor.type);
        for (const std::int64_t extent : tensor.shape) {
            require(extent >= 0, "extents are not negative");
            if (empty) continue;
            require(bytes <= input.size() / static_cast<std::uint64_t>(extent), "a tensor is not larger than its file");
            bytes *= static_cast<std::uint64_t>(extent);
        }
        require(tensor.bytes.size() == bytes, "a tensor has the bytes that its type and shape say");
        require(tensor.count() == bytes / size_of(tensor.type), "and as many elements");
        require(file.find(tensor.name) == &tensor && &file.at(tensor.name) == &tensor, "a tensor has its name");
        require(describe(tensor).starts_with(to_string(tensor.type)), "a description begins with the type");
        require(parse_file_type(to_string(tensor.type)) == tensor.type, "types have names");
        // all of its bytes are read
        std::vector<double> doubles;
        std::vector<std::int64_t> numbers;
        const bool floats = done([&] { doubles = to_doubles(tensor); });
        require(floats == done([&] { to_floats(tensor); }), "what is a double is a float");
        const bool integers = done([&] { numbers = to_int64s(tensor); });
        require(!floats || !integers, "no type is both floats and integers");
        require(doubles.size() == (floats ? tensor.count() : 0), "all floats are there");
        require(numbers.size() == (integers ? tensor.count() : 0), "all integers are there");
        if (!tensor.bytes.empty()) parts.push_back(tensor.bytes);
    }
    // one behind the other, from the end of the header to the end of the file: each byte once
    std::ranges::sort(parts, {}, [](const Input& part) { return part.data(); });
    const std::byte* end = input.data() + input.size();
    for (std::size_t i = parts.size(); i-- > 0; end = parts[i].data()) {
        require(parts[i].data() + parts[i].size() == end, "tensors lie one behind the other, and end with the file");
    }
    std::uint64_t header = 0;
    std::memcpy(&header, input.data(), sizeof header);
    require(end == input.data() + sizeof header + header, "the first one begins behind the header");
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
        check(file, input);
        for (const bool map : {true, false}) check_same(file, SafetensorsFile(scratch.path(), {.map = map}));
    });
    const bool from_file = done([&] { SafetensorsFile file(scratch.path()); });
    require(from_file == accepted, "a file on the disk and one in memory are judged alike");
}

}  // namespace headlong::fuzz
