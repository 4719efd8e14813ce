#include "engine/safetensors.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <type_traits>
#include <utility>

#include <nlohmann/json.hpp>

#include <headlong/error.hpp>

#include "kernels/half.hpp"

namespace headlong {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian, and bytes are used as they are");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLongestHeader = 100'000'000;  // the bound of the format's own implementation
constexpr std::size_t kHighestRank = 64;
constexpr std::string_view kMetadata = "__metadata__";

struct TypeRow {
    FileType type;
    const char* name;
    std::size_t size;
};

constexpr std::array kTypes{
    TypeRow{FileType::f64, "F64", 8},         TypeRow{FileType::f32, "F32", 4},
    TypeRow{FileType::f16, "F16", 2},         TypeRow{FileType::bf16, "BF16", 2},
    TypeRow{FileType::f8_e4m3, "F8_E4M3", 1}, TypeRow{FileType::f8_e5m2, "F8_E5M2", 1},
    TypeRow{FileType::i64, "I64", 8},         TypeRow{FileType::i32, "I32", 4},
    TypeRow{FileType::i16, "I16", 2},         TypeRow{FileType::i8, "I8", 1},
    TypeRow{FileType::u64, "U64", 8},         TypeRow{FileType::u32, "U32", 4},
    TypeRow{FileType::u16, "U16", 2},         TypeRow{FileType::u8, "U8", 1},
    TypeRow{FileType::boolean, "BOOL", 1},
};

constexpr bool rows_follow_the_enumeration() {
    for (std::size_t i = 0; i < kTypes.size(); ++i) {
        if (kTypes[i].type != static_cast<FileType>(i)) return false;
    }
    return true;
}
static_assert(rows_follow_the_enumeration());

const TypeRow& row_of(FileType type) noexcept { return kTypes[static_cast<std::size_t>(type)]; }

std::string known_types() {
    std::string names;
    for (const TypeRow& row : kTypes) names += (names.empty() ? "" : ", ") + std::string(row.name);
    return names;
}

std::string in_brackets(std::span<const std::uint64_t> numbers) {
    std::string text = "[";
    for (const std::uint64_t number : numbers) text += (text.size() > 1 ? ", " : "") + std::to_string(number);
    return text + "]";
}

std::string in_quotes(std::string_view text) { return "'" + one_line(text) + "'"; }

/// What the header says of one tensor, before any of it is believed.
struct Entry {
    std::optional<std::string> dtype;
    std::optional<std::vector<std::uint64_t>> shape;
    std::optional<std::vector<std::uint64_t>> offsets;
};

/// Receives the header's JSON event by event. The format nests at most three deep and allows few things in each
/// place, so that anything else is refused where it begins: no document is built, and nesting costs nothing.
class HeaderReader {
  public:
    explicit HeaderReader(const std::string& path) : path_(path) {}

    std::map<std::string, Entry, std::less<>> entries;
    std::map<std::string, std::string, std::less<>> metadata;

    // the events of nlohmann::json::sax_parse
    bool null() { refuse("null"); }
    bool boolean(bool value) { refuse(value ? "true" : "false"); }
    bool number_integer(std::int64_t value) { refuse(std::to_string(value)); }  // only negative numbers come here
    bool number_float(double, const std::string& text) { refuse(text); }        // fractions, exponents, above 2^64
    bool binary(const nlohmann::json::binary_t&) { refuse("binary data"); }

    bool number_unsigned(std::uint64_t value) {
        if (place_ != Place::in_shape && place_ != Place::in_offsets) refuse(std::to_string(value));
        if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) refuse(std::to_string(value));
        std::vector<std::uint64_t>& list = place_ == Place::in_shape ? *entry_->shape : *entry_->offsets;
        const std::size_t longest = place_ == Place::in_shape ? kHighestRank : 2;
        if (list.size() == longest) {
            fail(place() + " has more than " + std::to_string(longest) + " numbers");
        }
        list.push_back(value);
        return true;
    }

    bool string(std::string& value) {
        if (place_ == Place::in_metadata) {
            metadata[key_] = std::move(value);
        } else if (place_ == Place::in_tensor && key_ == "dtype") {
            entry_->dtype = std::move(value);
        } else {
            refuse("the string " + in_quotes(value));
        }
        return true;
    }

    bool start_object(std::size_t) {
        if (place_ == Place::before) {
            place_ = Place::in_header;
        } else if (place_ == Place::in_header && key_ == kMetadata) {
            place_ = Place::in_metadata;
        } else if (place_ == Place::in_header) {
            place_ = Place::in_tensor;
            tensor_ = key_;
            entry_ = &entries[tensor_];
            return true;
        } else {
            refuse("an object");
        }
        return true;
    }

    bool key(std::string& name) {
        bool seen = false;
        if (place_ == Place::in_header) {
            seen = name == kMetadata ? std::exchange(metadata_seen_, true) : entries.contains(name);
        } else if (place_ == Place::in_metadata) {
            seen = metadata.contains(name);
        } else if (name == "dtype") {
            seen = entry_->dtype.has_value();
        } else if (name == "shape") {
            seen = entry_->shape.has_value();
        } else if (name == "data_offsets") {
            seen = entry_->offsets.has_value();
        } else {
            fail("tensor " + in_quotes(tensor_) + " has the key " + in_quotes(name) +
                 ", only dtype, shape and data_offsets are allowed");
        }
        key_ = std::move(name);
        if (seen) fail(place() + " is given twice");
        return true;
    }

    bool start_array(std::size_t) {
        if (place_ == Place::in_tensor && key_ == "shape") {
            place_ = Place::in_shape;
            entry_->shape.emplace();
        } else if (place_ == Place::in_tensor && key_ == "data_offsets") {
            place_ = Place::in_offsets;
            entry_->offsets.emplace();
        } else {
            refuse("an array");
        }
        return true;
    }

    bool end_array() {
        place_ = Place::in_tensor;
        return true;
    }

    bool end_object() {
        if (place_ == Place::in_tensor || place_ == Place::in_metadata) place_ = Place::in_header;
        return true;
    }

    bool parse_error(std::size_t position, const std::string& token, const nlohmann::json::exception&) {
        fail("the header is not valid JSON at its byte " + std::to_string(position) + ", near " + in_quotes(token));
    }

  private:
    enum class Place { before, in_header, in_metadata, in_tensor, in_shape, in_offsets };

    std::string place() const {
        switch (place_) {
            case Place::before:
                return "the header";
            case Place::in_header:
                return key_ == kMetadata ? "'__metadata__'" : "tensor " + in_quotes(key_);
            case Place::in_metadata:
                return "metadata " + in_quotes(key_);
            case Place::in_tensor:
            case Place::in_shape:
            case Place::in_offsets:
                break;
        }
        return "tensor " + in_quotes(tensor_) + ": " + key_;
    }

    [[noreturn]] void fail(const std::string& what) const { throw BadFile(one_line(path_) + ": " + what); }

    [[noreturn]] void refuse(const std::string& found) const {
        const char* allowed = "";
        switch (place_) {
            case Place::before:
            case Place::in_header:
                allowed = "an object";
                break;
            case Place::in_metadata:
                allowed = "a string";
                break;
            case Place::in_tensor:
                allowed = key_ == "dtype" ? "a string" : "an array";
                break;
            case Place::in_shape:
            case Place::in_offsets:
                allowed = "whole numbers from 0 to 2^63 - 1";
                break;
        }
        const bool list = place_ == Place::in_shape || place_ == Place::in_offsets;
        fail(place() + (list ? " holds " : " is ") + found + ", only " + allowed + (list ? " are" : " is") +
             " allowed");
    }

    const std::string& path_;
    Place place_ = Place::before;
    std::string key_;     // the last key, unescaped
    std::string tensor_;  // the tensor that is being read
    Entry* entry_ = nullptr;
    bool metadata_seen_ = false;
};

/// The tensor that an entry describes, in data of data_size bytes.
struct Placed {
    FileTensor tensor;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

Placed place_tensor(const std::string& path, const std::string& name, const Entry& entry, std::uint64_t data_size) {
    const auto fail = [&](const std::string& what) {
        throw BadFile(one_line(path) + ": tensor " + in_quotes(name) + ": " + what);
    };
    if (!entry.dtype) fail("dtype is missing");
    if (!entry.shape) fail("shape is missing");
    if (!entry.offsets) fail("data_offsets is missing");
    const std::optional<FileType> type = parse_file_type(*entry.dtype);
    if (!type) fail("dtype is " + in_quotes(*entry.dtype) + ", known are " + known_types());

    Placed placed;
    placed.tensor.name = name;
    placed.tensor.type = *type;
    // the extents that are not 0 must multiply to a size that fits, even if another one is 0: strides come of them
    std::uint64_t bytes = size_of(*type);
    bool empty = false;
    for (const std::uint64_t extent : *entry.shape) {
        placed.tensor.shape.push_back(static_cast<std::int64_t>(extent));
        if (extent == 0) {
            empty = true;
        } else if (bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) / extent) {
            fail("shape " + in_brackets(*entry.shape) + " of " + *entry.dtype + " needs more than 2^63 - 1 bytes");
        } else {
            bytes *= extent;
        }
    }
    if (empty) bytes = 0;

    const std::string offsets = "data_offsets " + in_brackets(*entry.offsets);
    if (entry.offsets->size() != 2) fail(offsets + " must be two numbers");
    placed.begin = (*entry.offsets)[0];
    placed.end = (*entry.offsets)[1];
    if (placed.begin > placed.end) fail(offsets + " end before they begin");
    if (placed.end > data_size) {
        fail(offsets + " reach past the end of the data, which has " + std::to_string(data_size) + " bytes");
    }
    if (placed.end - placed.begin != bytes) {
        fail(offsets + " hold " + std::to_string(placed.end - placed.begin) + " bytes, but " + *entry.dtype +
             " of shape " + in_brackets(*entry.shape) + " needs " + std::to_string(bytes));
    }
    return placed;
}

/// The format demands that tensors cover the data, each byte once.
void check_cover(const std::string& path, const std::vector<Placed>& placed, std::uint64_t data_size) {
    std::vector<const Placed*> order;
    for (const Placed& each : placed) order.push_back(&each);
    std::ranges::sort(order, [](const Placed* a, const Placed* b) {
        return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
    });
    std::uint64_t covered = 0;
    std::string before = "the start of the data";
    for (const Placed* each : order) {
        const std::string name = "tensor " + in_quotes(each->tensor.name);
        const std::string offsets = in_brackets(std::array{each->begin, each->end});
        if (each->begin < covered) {
            throw BadFile(one_line(path) + ": " + name + ": data_offsets " + offsets + " overlap " + before +
                          ", which ends at " + std::to_string(covered));
        }
        if (each->begin > covered) {
            throw BadFile(one_line(path) + ": " + name + ": data_offsets " + offsets + " leave a hole after " + before +
                          ", which ends at " + std::to_string(covered));
        }
        covered = each->end;
        before = name;
    }
    if (covered != data_size) {
        throw BadFile(one_line(path) + ": has " + std::to_string(data_size) +
                      " bytes of data, but its tensors end at " + std::to_string(covered));
    }
}

/// `read(offset, bytes)` reads from a file of `size` bytes.
template <typename Read>
std::string read_header(const std::string& path, std::uint64_t size, const Read& read) {
    const auto fail = [&](const std::string& what) { throw BadFile(one_line(path) + ": " + what); };
    if (size < kLengthBytes) {
        fail("has " + std::to_string(size) + " bytes, a safetensors file starts with 8 of header length");
    }
    std::uint64_t length = 0;
    read(std::uint64_t{0}, std::as_writable_bytes(std::span(&length, 1)));
    const std::uint64_t allowed = std::min(kLongestHeader, size - kLengthBytes);
    if (length > allowed) {
        fail("header length is " + std::to_string(length) + " bytes, at most " + std::to_string(allowed) +
             " are allowed" + (allowed < kLongestHeader ? " in a file of " + std::to_string(size) : std::string()));
    }
    std::string header(static_cast<std::size_t>(length), '\0');
    read(kLengthBytes, std::as_writable_bytes(std::span(header)));
    if (!header.starts_with('{')) {
        fail(header.empty()
                 ? std::string("the header is empty, it must be a JSON object")
                 : "the header begins with " + in_quotes(header.substr(0, 1)) + ", it must be a JSON object");
    }
    return header;
}

/// Elements of any alignment, widened one by one.
template <typename Stored, typename Result, typename Widen>
void convert(std::span<const std::byte> bytes, std::span<Result> into, Widen widen) {
    for (std::size_t i = 0; i < into.size(); ++i) {
        Stored stored;
        std::memcpy(&stored, bytes.data() + i * sizeof(Stored), sizeof(Stored));
        into[i] = widen(stored);
    }
}
template <typename Stored, typename Result, typename Widen>
std::vector<Result> convert(std::span<const std::byte> bytes, Widen widen) {
    std::vector<Result> result(bytes.size() / sizeof(Stored));
    convert<Stored, Result>(bytes, std::span(result), widen);
    return result;
}

template <typename Result>
void copy_floating(const FileTensor& tensor, std::size_t first, std::span<Result> into) {
    const auto cast = [](auto value) { return static_cast<Result>(value); };
    const std::span<const std::byte> bytes = tensor.bytes.subspan(first * size_of(tensor.type));
    switch (tensor.type) {
        case FileType::f64:
            return convert<double>(bytes, into, cast);
        case FileType::f32:
            return convert<float>(bytes, into, cast);
        case FileType::f16:
            return convert<std::uint16_t>(bytes, into, [](auto bits) { return Result{kernels::widen_f16(bits)}; });
        case FileType::bf16:
            return convert<std::uint16_t>(bytes, into, [](auto bits) { return Result{kernels::widen_bf16(bits)}; });
        default:
            break;
    }
    throw InvalidArgument("tensor " + in_quotes(tensor.name) + " is " + to_string(tensor.type) +
                          ", only F64, F32, F16 and BF16 are allowed here");
}

template <typename Result>
std::vector<Result> to_floating(const FileTensor& tensor) {
    std::vector<Result> result(tensor.count());
    copy_floating<Result>(tensor, 0, result);
    return result;
}

}  // namespace

const char* to_string(FileType type) noexcept { return row_of(type).name; }

std::size_t size_of(FileType type) noexcept { return row_of(type).size; }

std::optional<FileType> parse_file_type(std::string_view name) noexcept {
    for (const TypeRow& row : kTypes) {
        if (name == row.name) return row.type;
    }
    return std::nullopt;
}

std::string describe(const FileTensor& tensor) {
    std::string text = std::string(to_string(tensor.type)) + "[";
    for (std::size_t i = 0; i < tensor.shape.size(); ++i)
        text += (i == 0 ? "" : ", ") + std::to_string(tensor.shape[i]);
    return text + "]";
}

std::vector<float> to_floats(const FileTensor& tensor) { return to_floating<float>(tensor); }

void copy_floats(const FileTensor& tensor, std::size_t first, std::span<float> into) {
    copy_floating<float>(tensor, first, into);
}

std::vector<double> to_doubles(const FileTensor& tensor) { return to_floating<double>(tensor); }

std::vector<std::int64_t> to_int64s(const FileTensor& tensor) {
    using Result = std::int64_t;
    const auto cast = [](auto value) { return static_cast<Result>(value); };
    switch (tensor.type) {
        case FileType::i64:
            return convert<std::int64_t, Result>(tensor.bytes, cast);
        case FileType::i32:
            return convert<std::int32_t, Result>(tensor.bytes, cast);
        case FileType::i16:
            return convert<std::int16_t, Result>(tensor.bytes, cast);
        case FileType::i8:
            return convert<std::int8_t, Result>(tensor.bytes, cast);
        case FileType::u32:
            return convert<std::uint32_t, Result>(tensor.bytes, cast);
        case FileType::u16:
            return convert<std::uint16_t, Result>(tensor.bytes, cast);
        case FileType::u8:
        case FileType::boolean:
            return convert<std::uint8_t, Result>(tensor.bytes, cast);
        case FileType::u64:
            return convert<std::uint64_t, Result>(tensor.bytes, [&](std::uint64_t value) {
                if (value > static_cast<std::uint64_t>(std::numeric_limits<Result>::max())) {
                    throw InvalidArgument("tensor " + in_quotes(tensor.name) + " holds " + std::to_string(value) +
                                          ", at most 2^63 - 1 is allowed");
                }
                return static_cast<Result>(value);
            });
        default:
            break;
    }
    throw InvalidArgument("tensor " + in_quotes(tensor.name) + " is " + to_string(tensor.type) +
                          ", only integers and BOOL are allowed here");
}

SafetensorsFile::SafetensorsFile(const std::string& path, const SafetensorsOptions& options) : path_(path) {
    const InputFile file(path);
    const std::string header =
        read_header(path_, file.size(), [&](auto offset, auto into) { file.read(offset, into); });
    const std::uint64_t data_begin = kLengthBytes + header.size();
    std::pmr::memory_resource& memory = options.memory != nullptr ? *options.memory : *std::pmr::new_delete_resource();
    set_tensors(header, file.size() - data_begin, [&](std::uint64_t size) {
        return options.map ? FileData::map(file, data_begin, size, memory)
                           : FileData::read(file, data_begin, size, memory);
    });
}

SafetensorsFile::SafetensorsFile(const std::string& name, std::span<const std::byte> bytes) : path_(name) {
    const std::string header = read_header(path_, bytes.size(), [&](std::uint64_t offset, std::span<std::byte> into) {
        std::memcpy(into.data(), bytes.data() + offset, into.size());
    });
    const std::size_t data_begin = static_cast<std::size_t>(kLengthBytes) + header.size();
    set_tensors(header, bytes.size() - data_begin,
                [&](std::uint64_t) { return FileData::borrow(bytes.subspan(data_begin)); });
}

template <typename OpenData>
void SafetensorsFile::set_tensors(const std::string& header, std::uint64_t data_size, const OpenData& open_data) {
    HeaderReader reader(path_);
    // strict: nothing but white space may follow the object
    nlohmann::json::sax_parse(header.begin(), header.end(), &reader, nlohmann::json::input_format_t::json, true);
    metadata_ = std::move(reader.metadata);
    std::vector<Placed> placed;
    for (const auto& [name, entry] : reader.entries) placed.push_back(place_tensor(path_, name, entry, data_size));
    check_cover(path_, placed, data_size);

    data_ = open_data(data_size);
    for (Placed& each : placed) {
        each.tensor.bytes = data_.bytes().subspan(static_cast<std::size_t>(each.begin),
                                                  static_cast<std::size_t>(each.end - each.begin));
        tensors_.push_back(std::move(each.tensor));
    }
}

const FileTensor* SafetensorsFile::find(std::string_view name) const noexcept {
    const auto found = std::ranges::lower_bound(tensors_, name, {}, &FileTensor::name);
    return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

const FileTensor& SafetensorsFile::at(std::string_view name) const {
    const FileTensor* const tensor = find(name);
    if (tensor == nullptr) throw BadFile(one_line(path_) + ": tensor " + in_quotes(name) + " is missing");
    return *tensor;
}

}  // namespace headlong
