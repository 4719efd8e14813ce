// Writes safetensors files for tests: right ones from tensors, and broken ones from any header and data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace headlong::test {

struct TensorToWrite {
    std::string name;
    std::string dtype;  ///< "F32", "I64", ...
    std::vector<std::int64_t> shape;
    std::string bytes;
};

/// A tensor of any element type; the caller says how files call it.
template <typename T>
TensorToWrite tensor_to_write(std::string name, std::string dtype, std::vector<std::int64_t> shape,
                              const std::vector<T>& values) {
    std::string bytes(values.size() * sizeof(T), '\0');
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return {std::move(name), std::move(dtype), std::move(shape), std::move(bytes)};
}

/// A new file of these bytes. An old one is removed, not truncated: file systems may then write to the disk at once.
inline void write_bytes(const std::string& path, const std::string& bytes) {
    std::filesystem::remove(path);
    std::ofstream file(path, std::ios::binary);
    file << bytes;
    if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

/// Any header (JSON or not), with its true length in front or `length` instead, then any data.
inline void write_raw_safetensors(const std::string& path, const std::string& header, const std::string& data,
                                  std::optional<std::uint64_t> length = std::nullopt) {
    const std::uint64_t first = length.value_or(header.size());
    std::string prefix(sizeof first, '\0');
    std::memcpy(prefix.data(), &first, sizeof first);
    write_bytes(path, prefix + header + data);
}

/// A file that keeps the format's rules if the tensors' sizes are right. Data starts 8-byte aligned; tensors follow
/// each other in the order given.
inline void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                              const std::map<std::string, std::string>& metadata = {}) {
    nlohmann::json header = nlohmann::json::object();
    if (!metadata.empty()) header["__metadata__"] = metadata;
    std::string data;
    for (const TensorToWrite& tensor : tensors) {
        const std::size_t begin = data.size();
        data += tensor.bytes;
        header[tensor.name] = {
            {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    write_raw_safetensors(path, text, data);
}

}  // namespace headlong::test
