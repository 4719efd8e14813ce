#include "engine/config_reader.hpp"

#include <fmt/format.h>

#include <cmath>
#include <headlong/error.hpp>

#include "engine/mapped_file.hpp"

namespace headlong {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;

}  // namespace

std::string ConfigReader::shown(const Json& value) {
    return one_line(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void ConfigReader::bad(std::string_view key, const std::string& what) const {
    throw BadFile(fmt::format("{}: {}: {}", one_line(*name_), one_line(path_ + std::string(key)), what));
}
void ConfigReader::unsupported(std::string_view key, const std::string& what) const {
    throw Unsupported(fmt::format("{}: {}: {}", one_line(*name_), one_line(path_ + std::string(key)), what));
}
void ConfigReader::not_handled(std::string_view key) const {
    unsupported(key, fmt::format("is {}; this version does not handle it", shown(json_->at(std::string(key)))));
}

const ConfigReader::Json* ConfigReader::find(std::string_view key) const {
    const auto found = json_->find(key);
    return found == json_->end() || found->is_null() ? nullptr : &*found;
}

const ConfigReader::Json& ConfigReader::at(std::string_view key) const {
    const Json* value = find(key);
    if (value == nullptr) bad(key, "is missing");
    return *value;
}

std::int64_t ConfigReader::size(std::string_view key, std::optional<std::int64_t> otherwise, std::int64_t least) const {
    if (otherwise && find(key) == nullptr) return *otherwise;
    const Json& value = at(key);
    if (!value.is_number_integer() || value.get<std::int64_t>() < least || value.get<std::int64_t>() > kMaxSize ||
        (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(kMaxSize))) {
        bad(key, fmt::format("is {}; it must be a whole number from {} to {}", shown(value), least, kMaxSize));
    }
    return value.get<std::int64_t>();
}

double ConfigReader::positive(std::string_view key, double otherwise) const {
    return find(key) == nullptr ? otherwise : positive(key);
}

double ConfigReader::positive(std::string_view key) const {
    constexpr double kLeast = 1e-30;
    constexpr double kMost = 1e30;
    const Json& value = at(key);
    if (!value.is_number() || !(value.get<double>() >= kLeast) || value.get<double>() > kMost) {
        bad(key, fmt::format("is {}; it must be a number from {} to {}", shown(value), kLeast, kMost));
    }
    return value.get<double>();
}

bool ConfigReader::flag(std::string_view key, bool otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) bad(key, fmt::format("is {}; it must be true or false", shown(*value)));
    return value->get<bool>();
}

std::int32_t ConfigReader::token(std::string_view key, const Json& value, std::int64_t vocab_size) const {
    if (!value.is_number_integer() || value.get<std::int64_t>() < 0 || value.get<std::int64_t>() >= vocab_size) {
        bad(key, fmt::format("is {}; it must be a token from 0 to {}", shown(value), vocab_size - 1));
    }
    return static_cast<std::int32_t>(value.get<std::int64_t>());
}

std::vector<double> ConfigReader::numbers(std::string_view key) const {
    const Json& value = at(key);
    if (!value.is_array()) bad(key, fmt::format("is {}; it must be a list of numbers above 0", shown(value)));
    std::vector<double> result;
    for (const Json& number : value) {
        if (!number.is_number() || !(number.get<double>() > 0.0) || !std::isfinite(number.get<double>())) {
            bad(key, fmt::format("holds {}; each must be a number above 0", shown(number)));
        }
        result.push_back(number.get<double>());
    }
    return result;
}

std::optional<ConfigReader> ConfigReader::object(std::string_view key) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_object()) bad(key, fmt::format("is {}; it must be an object", shown(*value)));
    if (value->empty()) return {};
    return ConfigReader(*value, *name_, path_ + std::string(key) + ".");
}

}  // namespace headlong
