#include "engine/json_node.hpp"

#include <unordered_set>
#include <utility>

#include <headlong/error.hpp>

#include "engine/mapped_file.hpp"  // one_line

namespace headlong {
namespace {

constexpr std::size_t kDeepest = 64;

std::string in_quotes(std::string_view text) { return "'" + one_line(text) + "'"; }

/// What errors call a value: short ones as they are.
std::string describe(const nlohmann::json& value) {
    if (value.is_object()) return "an object";
    if (value.is_array()) return "an array";
    if (value.is_string()) return "the string " + in_quotes(value.get_ref<const std::string&>());
    return value.dump();
}

/// Watches a document while it is read.
class Watch {
  public:
    explicit Watch(const std::string& file) : file_(file) {}

    bool operator()(int, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
        using Event = nlohmann::json::parse_event_t;
        switch (event) {
            case Event::object_start:
            case Event::array_start:
                if (keys_.size() == kDeepest) {
                    throw BadFile(file_ + ": nests deeper than " + std::to_string(kDeepest) + " below the key " +
                                  in_quotes(key_));
                }
                keys_.emplace_back();
                break;
            case Event::object_end:
            case Event::array_end:
                keys_.pop_back();
                break;
            case Event::key:
                key_ = parsed.get_ref<const std::string&>();
                if (!keys_.back().insert(key_).second) {
                    throw BadFile(file_ + ": the key " + in_quotes(key_) + " is there twice in one object");
                }
                break;
            case Event::value:
                break;
        }
        return true;
    }

  private:
    const std::string& file_;
    std::vector<std::unordered_set<std::string>> keys_;  // of the objects that are open
    std::string key_;
};

}  // namespace

std::string JsonNode::name() const { return *file_ + ": " + (key_.empty() ? "the document" : key_); }

void JsonNode::fail(const std::string& what) const { throw BadFile(name() + " " + what); }

void JsonNode::refuse(const std::string& what) const { throw Unsupported(name() + " " + what); }

void JsonNode::wrong_type(const char* wanted) const {
    fail("is " + describe(*value_) + ", only " + std::string(wanted) + " is allowed");
}

JsonNode JsonNode::child(const nlohmann::json& value, std::string key) const {
    JsonNode node = *this;
    node.value_ = &value;
    node.key_ = std::move(key);
    return node;
}

JsonNode JsonNode::item(std::size_t index) const {
    return child((*value_)[index], key_ + "[" + std::to_string(index) + "]");
}

JsonNode JsonNode::at(std::string_view key) const {
    const auto& members = object();
    const std::string full = (key_.empty() ? "" : key_ + ".") + one_line(key);
    const auto found = members.find(std::string(key));
    if (found == members.end()) throw BadFile(*file_ + ": " + full + " is missing");
    return child(found->second, full);
}

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
    const auto& members = object();
    const auto found = members.find(std::string(key));
    if (found == members.end() || found->second.is_null()) return std::nullopt;
    return at(key);
}

const std::string& JsonNode::string() const {
    if (!value_->is_string()) wrong_type("a string");
    return value_->get_ref<const std::string&>();
}

bool JsonNode::boolean() const {
    if (!value_->is_boolean()) wrong_type("true or false");
    return value_->get<bool>();
}

std::uint64_t JsonNode::whole_number(std::uint64_t largest, std::uint64_t smallest) const {
    // negative numbers are number_integer, fractions and what is above 2^64 number_float
    if (!value_->is_number_unsigned() || value_->get<std::uint64_t>() > largest ||
        value_->get<std::uint64_t>() < smallest) {
        wrong_type(("a whole number from " + std::to_string(smallest) + " to " + std::to_string(largest)).c_str());
    }
    return value_->get<std::uint64_t>();
}

std::vector<JsonNode> JsonNode::items() const {
    if (!value_->is_array()) wrong_type("an array");
    std::vector<JsonNode> nodes;
    nodes.reserve(value_->size());
    for (std::size_t i = 0; i < value_->size(); ++i) nodes.push_back(item(i));
    return nodes;
}

const nlohmann::json::object_t& JsonNode::object() const {
    if (!value_->is_object()) wrong_type("an object");
    return value_->get_ref<const nlohmann::json::object_t&>();
}

bool JsonNode::boolean_or(std::string_view key, bool otherwise) const {
    const std::optional<JsonNode> node = find(key);
    return node ? node->boolean() : otherwise;
}

nlohmann::json parse_json(std::string_view text, const std::string& file) {
    // nlohmann's lexer takes a NUL for the end of the text, and never sees what follows
    if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
        throw BadFile(file + ": is not valid JSON at its byte " + std::to_string(nul + 1));
    }
    try {
        return nlohmann::json::parse(text, Watch(file));
    } catch (const nlohmann::json::parse_error& error) {
        throw BadFile(file + ": is not valid JSON at its byte " + std::to_string(error.byte));
    } catch (const nlohmann::json::exception& error) {
        throw BadFile(file + ": is not valid JSON: " + one_line(error.what()));
    }
}

}  // namespace headlong
