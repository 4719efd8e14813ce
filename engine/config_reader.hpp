// Reads keys of a config.json, each as what it must be.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace headlong {

/// An object of a config.json. Refers to the document and its name, which must outlive it. A key that is null is
/// missing, except to has().
class ConfigReader {
  public:
    using Json = nlohmann::json;

    /// `name` is how errors call the file, `path` the object in it, with a dot behind ("" for the whole document).
    ConfigReader(const Json& json, const std::string& name, std::string path = {})
        : json_(&json), name_(&name), path_(std::move(path)) {}

    const Json& json() const noexcept { return *json_; }
    static std::string shown(const Json& value);
    /// Whether a value is that text. (nlohmann's comparison makes a value of the text first, which takes memory, and is
    /// noexcept: refused memory would end the process.)
    static bool is(const Json& value, std::string_view text) noexcept {
        const auto* const string = value.get_ptr<const Json::string_t*>();
        return string != nullptr && *string == text;
    }

    [[noreturn]] void bad(std::string_view key, const std::string& what) const;          ///< BadFile, naming the key
    [[noreturn]] void unsupported(std::string_view key, const std::string& what) const;  ///< Unsupported, likewise
    [[noreturn]] void not_handled(std::string_view key) const;  ///< Unsupported, with its value

    bool has(std::string_view key) const { return json_->contains(key); }  ///< null too
    const Json* find(std::string_view key) const;
    const Json& at(std::string_view key) const;

    /// A whole number from 1 to 2^24, or from `least`. Products of two stay far below 2^63.
    std::int64_t size(std::string_view key, std::optional<std::int64_t> otherwise = {}, std::int64_t least = 1) const;
    /// A number that is a normal float32, above 0.
    double positive(std::string_view key, double otherwise) const;
    double positive(std::string_view key) const;
    bool flag(std::string_view key, bool otherwise) const;
    std::int32_t token(std::string_view key, const Json& value, std::int64_t vocab_size) const;
    std::vector<double> numbers(std::string_view key) const;  ///< each above 0
    /// The object of that key, or nothing if it is missing or empty.
    std::optional<ConfigReader> object(std::string_view key) const;

  private:
    const Json* json_;
    const std::string* name_;
    std::string path_;
};

}  // namespace headlong
