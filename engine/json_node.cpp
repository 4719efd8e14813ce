#include "engine/json_node.hpp"

#include <utility>
#include <vector>

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

/// Makes a document of what nlohmann's parser reads, and checks its nesting and keys. Not by that library's own: where
/// memory is refused, what it has made so far ends in its destructor.
class Builder final : public nlohmann::json_sax<nlohmann::json> {
  public:
    Builder(const std::string& file, nlohmann::json& root) : file_(file), root_(root) { open_.reserve(kDeepest); }

    bool null() override { return put(nullptr); }
    bool boolean(bool value) override { return put(value); }
    bool number_integer(number_integer_t value) override { return put(value); }
    bool number_unsigned(number_unsigned_t value) override { return put(value); }
    bool number_float(number_float_t value, const string_t&) override { return put(value); }
    bool string(string_t& value) override { return put(std::move(value)); }
    bool binary(binary_t&) override { return false; }  // text has none
    bool start_object(std::size_t) override { return open(nlohmann::json::object()); }
    bool start_array(std::size_t) override { return open(nlohmann::json::array()); }
    bool end_object() override { return close(); }
    bool end_array() override { return close(); }
    bool key(string_t& value) override {
        key_ = value;
        if (open_.back()->get_ref<const nlohmann::json::object_t&>().contains(key_)) {
            throw BadFile(file_ + ": the key " + in_quotes(key_) + " is there twice in one object");
        }
        return true;
    }
    bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
        if (const auto* at = dynamic_cast<const nlohmann::json::parse_error*>(&error); at != nullptr) {
            throw BadFile(file_ + ": is not valid JSON at its byte " + std::to_string(at->byte));
        }
        throw BadFile(file_ + ": is not valid JSON: " + one_line(error.what()));
    }

  private:
    bool open(nlohmann::json container) {
        if (open_.size() == kDeepest) {
            throw BadFile(file_ + ": nests deeper than " + std::to_string(kDeepest) + " below the key " +
                          in_quotes(key_));
        }
        open_.push_back(&place(std::move(container)));
        return true;
    }
    bool close() {
        open_.pop_back();
        return true;
    }
    bool put(nlohmann::json value) {
        place(std::move(value));
        return true;
    }
    nlohmann::json& place(nlohmann::json value) {
        if (open_.empty()) return root_ = std::move(value);
        nlohmann::json& into = *open_.back();
        if (into.is_array()) return into.get_ref<nlohmann::json::array_t&>().emplace_back(std::move(value));
        return into.get_ref<nlohmann::json::object_t&>().emplace(key_, std::move(value)).first->second;
    }

    const std::string& file_;
    nlohmann::json& root_;
    std::vector<nlohmann::json*> open_;  ///< the containers around what comes next; each is its parent's newest value
    std::string key_;
};

/// Leaves nothing that has elements.
void take_apart(nlohmann::json& value) noexcept {
    if (value.is_array()) {
        auto& elements = value.get_ref<nlohmann::json::array_t&>();
        for (nlohmann::json& element : elements) take_apart(element);
        elements.clear();
    } else if (value.is_object()) {
        auto& members = value.get_ref<nlohmann::json::object_t&>();
        for (auto& member : members) take_apart(member.second);
        members.clear();
    }
}

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

JsonDocument::~JsonDocument() { take_apart(root_); }

JsonDocument parse_json(std::string_view text, const std::string& file) {
    // nlohmann's lexer takes a NUL for the end of the text, and never sees what follows
    if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
        throw BadFile(file + ": is not valid JSON at its byte " + std::to_string(nul + 1));
    }
    JsonDocument document;
    Builder builder(file, document.root_);
    nlohmann::json::sax_parse(text, &builder);
    return document;
}

}  // namespace headlong
