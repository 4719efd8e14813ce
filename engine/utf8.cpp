#include "engine/utf8.hpp"

namespace headlong {

Utf8Front utf8_front(std::string_view bytes) noexcept {
    using enum Utf8Front::Kind;
    const auto at = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
    const unsigned char first = at(0);
    if (first < 0x80) return {character, 1};
    if (first < 0xC2 || first > 0xF4) return {invalid, 1};  // continuation bytes; C0 and C1 only begin overlong forms
    // the second byte has a narrower range after four of the first ones: overlong, surrogates, above U+10FFFF
    const unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    const unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    const std::size_t length = utf8_length(bytes[0]);
    for (std::size_t i = 1; i < length; ++i) {
        if (i == bytes.size()) return {incomplete, i};
        const bool fits = i == 1 ? at(i) >= low && at(i) <= high : (at(i) & 0xC0U) == 0x80;
        if (!fits) return {invalid, i};
    }
    return {character, length};
}

std::optional<std::size_t> find_invalid_utf8(std::string_view text) noexcept {
    std::size_t offset = 0;
    while (offset < text.size()) {
        const Utf8Front front = utf8_front(text.substr(offset));
        if (front.kind != Utf8Front::Kind::character) return offset;
        offset += front.length;
    }
    return std::nullopt;
}

void append_utf8(std::string& text, char32_t code_point) {
    const auto add = [&](char32_t byte) { text += static_cast<char>(static_cast<unsigned char>(byte)); };
    if (code_point < 0x80) {
        add(code_point);
        return;
    }
    if (code_point < 0x800) {
        add(0xC0U | code_point >> 6U);
    } else if (code_point < 0x10000) {
        add(0xE0U | code_point >> 12U);
        add(0x80U | (code_point >> 6U & 0x3FU));
    } else {
        add(0xF0U | code_point >> 18U);
        add(0x80U | (code_point >> 12U & 0x3FU));
        add(0x80U | (code_point >> 6U & 0x3FU));
    }
    add(0x80U | (code_point & 0x3FU));
}

void LossyUtf8::push(std::string_view bytes, std::string& text) {
    pending_ += bytes;
    std::string_view rest = pending_;
    while (!rest.empty()) {
        const Utf8Front front = utf8_front(rest);
        if (front.kind == Utf8Front::Kind::incomplete) break;
        text += front.kind == Utf8Front::Kind::character ? rest.substr(0, front.length) : kReplacementCharacter;
        rest.remove_prefix(front.length);
    }
    pending_.erase(0, pending_.size() - rest.size());
}

void LossyUtf8::finish(std::string& text) {
    if (!pending_.empty()) text += kReplacementCharacter;
    pending_.clear();
}

}  // namespace headlong
