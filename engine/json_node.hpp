// Reading JSON files that are hostile: values that know their key, so that whatever is wrong with one ends in a
// one-line BadFile that names the file and the key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace headlong {

/// A value in a file's document. Refers to the document, which must outlive it.
class JsonNode {
  public:
    /// `file` is how errors call the file.
    JsonNode(const nlohmann::json& value, const std::string& file) : value_(&value), file_(&file) {}

    const nlohmann::json& value() const noexcept { return *value_; }
    const std::string& key() const noexcept { return key_; }  ///< "model.vocab", "added_tokens[3].id"
    std::string name() const;                                 ///< of the file and the key, to begin an error with

    [[noreturn]] void fail(const std::string& what) const;    ///< BadFile: "file: key what"
    [[noreturn]] void refuse(const std::string& what) const;  ///< Unsupported, likewise

    /// The member of an object, which must be there.
    JsonNode at(std::string_view key) const;
    /// The member, or nothing if it is not there or null.
    std::optional<JsonNode> find(std::string_view key) const;

    /// The value as what it must be.
    const std::string& string() const;
    bool boolean() const;
    std::uint64_t whole_number(std::uint64_t largest, std::uint64_t smallest = 0) const;
    std::vector<JsonNode> items() const;  ///< of an array
    const nlohmann::json::object_t& object() const;
    bool boolean_or(std::string_view key, bool otherwise) const;  ///< a member that may be missing

    /// A member or item of this value, for errors about it.
    JsonNode child(const nlohmann::json& value, std::string key) const;
    JsonNode item(std::size_t index) const;

  private:
    [[noreturn]] void wrong_type(const char* wanted) const;

    const nlohmann::json* value_;
    const std::string* file_;
    std::string key_;
};

/// A whole document. nlohmann's destructor takes memory for values that have elements; this one takes them apart first:
/// where memory is refused, a document ends like anything else.
class JsonDocument {
  public:
    JsonDocument(JsonDocument&&) noexcept = default;
    JsonDocument& operator=(JsonDocument&&) = delete;
    ~JsonDocument();

    const nlohmann::json& root() const noexcept { return root_; }

  private:
    friend JsonDocument parse_json(std::string_view text, const std::string& file);
    JsonDocument() = default;
    nlohmann::json root_;
};

/// Parses a document whose nesting and keys are checked: deeper than 64, or an object with one key twice, is refused,
/// and so is a NUL byte, wherever it is.
JsonDocument parse_json(std::string_view text, const std::string& file);

}  // namespace headlong
