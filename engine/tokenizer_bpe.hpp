// Byte-pair encoding: a piece of text becomes its characters' tokens, and neighbours are merged, the pair that comes
// first in the file's list before all others, the leftmost first among equals.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/json_node.hpp"

namespace headlong {

inline constexpr std::int32_t kLargestTokenId = (1 << 22) - 1;  // bounds the tables that a hostile file can ask for

/// Lookup by std::string_view without making a string.
struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>()(text); }
};
using TokenIds = std::unordered_map<std::string, std::int32_t, TextHash, std::equal_to<>>;

/// The model of a tokenizer. Immutable.
class BytePairEncoding {
  public:
    /// Reads the "model" of a tokenizer.json.
    explicit BytePairEncoding(const JsonNode& node);

    const TokenIds& vocab() const noexcept { return vocab_; }

    /// Memory that one encode reuses for its pieces.
    struct Scratch {
        struct Symbol {
            std::int32_t id = 0;
            std::uint32_t before = 0;
            std::uint32_t after = 0;
            bool gone = false;  // merged into the one before it
        };
        struct Candidate {
            std::uint32_t rank = 0;
            std::uint32_t at = 0;  // the left symbol
            std::int32_t merged = 0;
        };
        std::vector<Symbol> symbols;
        std::vector<Candidate> heap;
    };

    /// Appends the tokens of a piece of valid UTF-8, shorter than 2^32 - 1 bytes, in O(n log n).
    void encode(std::string_view piece, std::vector<std::int32_t>& ids, Scratch& scratch) const;

  private:
    struct Merge {
        std::uint32_t rank = 0;
        std::int32_t merged = 0;
    };
    struct PairHash {
        std::size_t operator()(std::uint64_t pair) const noexcept {
            pair *= 0x9E3779B97F4A7C15U;  // spreads the left id, which is high, over the buckets
            return static_cast<std::size_t>(pair ^ pair >> 32U);
        }
    };

    std::optional<std::int32_t> id_of(std::string_view token) const;
    void read_vocab(const JsonNode& node);
    void read_merges(const JsonNode& node);
    const Merge* merge_of(std::int32_t left, std::int32_t right) const;
    void split(std::string_view piece, Scratch& scratch) const;

    TokenIds vocab_;
    std::unordered_map<std::uint64_t, Merge, PairHash> merges_;  // left id << 32 | right id
    std::array<std::optional<std::int32_t>, 256> bytes_;         // <0x00> to <0xFF>, with byte fallback
    std::optional<std::int32_t> unknown_;
    bool fuse_unknown_ = false;
    bool ignore_merges_ = false;
};

}  // namespace headlong
