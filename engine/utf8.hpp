// UTF-8: where characters end, what is not valid, and what takes its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace headlong {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

/// What bytes begin with.
struct Utf8Front {
    enum class Kind : std::uint8_t {
        character,   ///< `length` bytes are one character
        incomplete,  ///< all of the bytes, `length` of them, could begin a character
        invalid,     ///< no character begins with these `length` bytes; all but the last of them could begin one, or
                     ///< there is one alone: what Unicode calls a maximal subpart, replaced by a single U+FFFD
    };
    Kind kind = Kind::character;
    std::size_t length = 0;
};

/// Looks at the first character of bytes that are not empty. Overlong forms, surrogates and what lies above U+10FFFF
/// are invalid.
Utf8Front utf8_front(std::string_view bytes) noexcept;

/// The offset of the first byte that is not part of a character, or nothing if the text is valid UTF-8.
std::optional<std::size_t> find_invalid_utf8(std::string_view text) noexcept;

/// The number of bytes of the character that begins with this byte, in text that is known to be valid.
inline std::size_t utf8_length(char first) noexcept {
    const auto byte = static_cast<unsigned char>(first);
    return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

/// Code points from 0 to U+10FFFF, surrogates excluded.
void append_utf8(std::string& text, char32_t code_point);

/// Makes valid text of bytes that come in parts, with U+FFFD for each maximal part that is not valid.
class LossyUtf8 {
  public:
    /// Appends to `text` what has become certain; at most three bytes stay behind.
    void push(std::string_view bytes, std::string& text);
    /// What stayed behind cannot become a character any more.
    void finish(std::string& text);

  private:
    std::string pending_;
};

}  // namespace headlong
