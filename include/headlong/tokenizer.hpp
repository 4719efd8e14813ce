/// \file
/// Text to token ids and back, as a model's tokenizer.json says (the format of Hugging Face's tokenizers). Built are
/// byte-pair encoding, on bytes or with byte fallback, and the steps around it; a file that asks for anything else is
/// refused by name.
///
///     const auto tokenizer = headlong::Tokenizer::from_file("model/tokenizer.json");
///     const std::vector<std::int32_t> ids = tokenizer.encode("It is a truth");
///     headlong::TokenStream stream(tokenizer);
///     stream.prime(ids);                       // the continuation alone is wanted
///     std::cout << stream.push(next) << ...;   // whole characters, as soon as they are certain
///     std::cout << stream.finish();
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <headlong/export.hpp>

namespace headlong HEADLONG_API {

/// Immutable and safe to use from many threads at once. Copies are cheap and share the tables.
class Tokenizer {
  public:
    /// Reads a tokenizer.json. Throws IoError, BadFile (the message names the file and the key), Unsupported if the
    /// file asks for a step or an option that is not built, or OutOfMemory.
    static Tokenizer from_file(const std::string& path);

    /// The same from text in memory; `name` is what errors call it. Throws as from_file does, but for IoError.
    static Tokenizer from_json(std::string_view text, std::string_view name = "tokenizer.json");

    /// The ids of a text in UTF-8. With add_special_tokens the ids that the file's post_processor adds (such as a
    /// begin token) are there; added tokens that the text spells out are found either way.
    /// Throws InvalidArgument if the text is longer than 2^30 bytes or, naming the byte offset, is not valid UTF-8;
    /// BadFile if a regular expression of the file takes more steps on this text than any useful one, or if its
    /// normalizers make the text longer by more than 2^20 bytes and 64 for each byte of it; and OutOfMemory.
    std::vector<std::int32_t> encode(std::string_view text, bool add_special_tokens = true) const;

    /// The text of ids: valid UTF-8 always; bytes that make no character become U+FFFD. Tokens that the file marks
    /// as special are left out if skip_special_tokens. Throws InvalidArgument naming the first id that is no token,
    /// BadFile if a step of the file's decoder exceeds the limits that encode has, and OutOfMemory.
    std::string decode(std::span<const std::int32_t> ids, bool skip_special_tokens = true) const;

    /// One more than the largest id. Ids in between that belong to no token are possible.
    std::size_t vocab_size() const noexcept;
    /// How many of its tokens the file lists as added to its model's vocabulary.
    std::size_t added_tokens() const noexcept;

    /// The id of a token as the file spells it (byte-level tokens in their printable form).
    std::optional<std::int32_t> token_to_id(std::string_view token) const;

    /// The token as the file spells it, or nothing if the id belongs to none. Valid as long as the tokenizer or a
    /// copy of it.
    std::optional<std::string_view> id_to_token(std::int32_t id) const noexcept;

  private:
    friend class TokenStream;
    struct HEADLONG_LOCAL Impl;
    explicit Tokenizer(std::shared_ptr<const Impl> impl) noexcept : impl_(std::move(impl)) {}
    std::shared_ptr<const Impl> impl_;
};

/// Decodes id by id. All pieces together are what decode() gives of all ids; each piece is valid UTF-8. Text is
/// returned once no later id can change it: a character whose bytes are not all there is held back, and so is a run
/// of byte-fallback tokens, which becomes text or U+FFFD as a whole. Used by one thread at a time; keeps the
/// tokenizer's tables alive. Besides what is said below its functions throw BadFile and OutOfMemory, as decode does,
/// and leave a stream that is good for nothing more.
class TokenStream {
  public:
    /// Without tokens that the file marks as special, or with them. Throws OutOfMemory.
    explicit TokenStream(const Tokenizer& tokenizer, bool skip_special_tokens = true);
    ~TokenStream();
    TokenStream(TokenStream&&) noexcept;             ///< one that was moved from may only be assigned to or destroyed
    TokenStream& operator=(TokenStream&&) noexcept;  ///< likewise

    /// Ids that stand before those to come, and whose text is not returned: what depends on the beginning of the
    /// whole text (such as stripping its first space) sees them. If decode(prompt ids) is a prefix of decode(all
    /// ids), the pieces are exactly the rest. Before the first push; throws InvalidArgument after it, or for an id
    /// that is no token, with nothing changed.
    void prime(std::span<const std::int32_t> ids);

    /// The text that became certain with this id, often empty. Throws InvalidArgument if the id is no token; the
    /// stream is then as it was.
    std::string push(std::int32_t id);

    /// The rest. The stream is then as new, without a prompt.
    std::string finish();

  private:
    struct HEADLONG_LOCAL State;
    std::unique_ptr<State> state_;
};

}  // namespace headlong
