#include "engine/tokenizer_bpe.hpp"

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "engine/mapped_file.hpp"  // one_line
#include "engine/utf8.hpp"

namespace headlong {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

std::string in_quotes(std::string_view text) { return "'" + one_line(text) + "'"; }

std::uint64_t pair_of(std::int32_t left, std::int32_t right) noexcept {
    return static_cast<std::uint64_t>(left) << 32U | static_cast<std::uint64_t>(right);
}

std::string byte_token(std::size_t byte) {
    constexpr char digits[] = "0123456789ABCDEF";
    return std::string("<0x") + digits[byte >> 4U] + digits[byte & 15U] + ">";
}

/// Options that change what a text becomes and are not built.
void refuse_options(const JsonNode& node) {
    if (const auto dropout = node.find("dropout")) {
        if (!dropout->value().is_number() || dropout->value().get<double>() != 0.0) {
            dropout->refuse("is not null, which is not built");
        }
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
        const auto affix = node.find(key);
        if (affix && !affix->string().empty()) {
            affix->refuse("is " + in_quotes(affix->string()) + ", only null and '' are built");
        }
    }
}

/// Whether a candidate comes after another one.
struct Later {
    bool operator()(const BytePairEncoding::Scratch::Candidate& a,
                    const BytePairEncoding::Scratch::Candidate& b) const noexcept {
        return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
    }
};

}  // namespace

BytePairEncoding::BytePairEncoding(const JsonNode& node) {
    // files of the first years have no type
    if (const auto type = node.find("type"); type || !node.find("merges")) {
        const JsonNode given = node.at("type");
        if (given.string() != "BPE") given.refuse("is " + in_quotes(given.string()) + ", only BPE is built");
    }
    refuse_options(node);
    fuse_unknown_ = node.boolean_or("fuse_unk", false);
    ignore_merges_ = node.boolean_or("ignore_merges", false);
    read_vocab(node.at("vocab"));
    read_merges(node.at("merges"));
    if (const auto token = node.find("unk_token")) {
        unknown_ = id_of(token->string());
        if (!unknown_) token->fail("is " + in_quotes(token->string()) + ", which is not in the vocab");
    }
    if (node.boolean_or("byte_fallback", false)) {
        for (std::size_t byte = 0; byte < bytes_.size(); ++byte) bytes_[byte] = id_of(byte_token(byte));
    }
}

std::optional<std::int32_t> BytePairEncoding::id_of(std::string_view token) const {
    const auto found = vocab_.find(token);
    return found == vocab_.end() ? std::nullopt : std::optional(found->second);
}

void BytePairEncoding::read_vocab(const JsonNode& node) {
    std::unordered_set<std::int32_t> taken;
    vocab_.reserve(node.object().size());
    taken.reserve(node.object().size());
    for (const auto& [token, value] : node.object()) {
        const bool good = value.is_number_unsigned() && value.get<std::uint64_t>() <= kLargestTokenId;
        if (!good) {  // the key is made for the error alone
            node.child(value, node.key() + "[" + in_quotes(token) + "]").whole_number(kLargestTokenId);
        }
        const auto id = static_cast<std::int32_t>(value.get<std::uint64_t>());
        if (!taken.insert(id).second) {
            node.fail("gives the id " + std::to_string(id) + " twice, the second time to " + in_quotes(token));
        }
        vocab_.emplace(token, id);
    }
}

void BytePairEncoding::read_merges(const JsonNode& node) {
    if (!node.value().is_array()) static_cast<void>(node.items());  // throws
    merges_.reserve(node.value().size());
    std::uint32_t rank = 0;
    std::string merged;
    for (std::size_t i = 0; i < node.value().size(); ++i) {
        const nlohmann::json& value = node.value()[i];
        std::string_view left;
        std::string_view right;
        if (value.is_string()) {
            const std::string_view text = value.get_ref<const std::string&>();
            if (text.starts_with("#version")) continue;
            const std::size_t space = text.find(' ');
            if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
                node.item(i).fail("is " + in_quotes(text) + ", it must be two tokens with a space between them");
            }
            left = text.substr(0, space);
            right = text.substr(space + 1);
        } else if (value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_string()) {
            left = value[0].get_ref<const std::string&>();
            right = value[1].get_ref<const std::string&>();
        } else {
            node.item(i).fail("must be a string or an array of two strings");
        }
        merged.assign(left);
        merged += right;
        const auto known = [&](std::string_view token) {
            const auto id = id_of(token);
            if (!id) node.item(i).fail("needs the token " + in_quotes(token) + ", which is not in the vocab");
            return *id;
        };
        const std::uint64_t pair = pair_of(known(left), known(right));
        merges_.insert_or_assign(pair, Merge{rank++, known(merged)});
    }
}

const BytePairEncoding::Merge* BytePairEncoding::merge_of(std::int32_t left, std::int32_t right) const {
    const auto found = merges_.find(pair_of(left, right));
    return found == merges_.end() ? nullptr : &found->second;
}

void BytePairEncoding::split(std::string_view piece, Scratch& scratch) const {
    auto& symbols = scratch.symbols;
    symbols.clear();
    const auto add = [&](std::int32_t id) { symbols.push_back({.id = id}); };
    bool unknown_waits = false;  // until it is certain that no unknown character follows that it is fused with
    while (!piece.empty()) {
        const std::string_view character = piece.substr(0, utf8_length(piece[0]));
        piece.remove_prefix(character.size());
        if (const auto id = id_of(character)) {
            if (std::exchange(unknown_waits, false)) add(*unknown_);
            add(*id);
            continue;
        }
        const auto byte_of = [&](char byte) { return bytes_[static_cast<unsigned char>(byte)]; };
        if (std::ranges::all_of(character, [&](char byte) { return byte_of(byte).has_value(); })) {
            // an unknown character that waits stays behind these: odd, but the order that trained models have seen
            for (const char byte : character) add(*byte_of(byte));
            continue;
        }
        if (!unknown_) continue;  // there is no token for it
        if (unknown_waits && !fuse_unknown_) add(*unknown_);
        unknown_waits = true;
    }
    if (unknown_waits) add(*unknown_);
}

void BytePairEncoding::encode(std::string_view piece, std::vector<std::int32_t>& ids, Scratch& scratch) const {
    if (ignore_merges_) {
        if (const auto id = id_of(piece)) {
            ids.push_back(*id);
            return;
        }
    }
    split(piece, scratch);
    auto& symbols = scratch.symbols;
    auto& heap = scratch.heap;
    const auto count = static_cast<std::uint32_t>(symbols.size());
    heap.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
        symbols[i].before = i == 0 ? kNone : i - 1;
        symbols[i].after = i + 1 == count ? kNone : i + 1;
        if (i + 1 == count) break;
        if (const Merge* merge = merge_of(symbols[i].id, symbols[i + 1].id)) {
            heap.push_back({merge->rank, i, merge->merged});
        }
    }
    std::ranges::make_heap(heap, Later());
    const auto consider = [&](std::uint32_t left) {
        if (const Merge* merge = merge_of(symbols[left].id, symbols[symbols[left].after].id)) {
            heap.push_back({merge->rank, left, merge->merged});
            std::ranges::push_heap(heap, Later());
        }
    };
    while (!heap.empty()) {
        std::ranges::pop_heap(heap, Later());
        const Scratch::Candidate best = heap.back();
        heap.pop_back();
        auto& left = symbols[best.at];
        if (left.gone || left.after == kNone) continue;
        auto& right = symbols[left.after];
        // a candidate is not taken out when its symbols change; it counts if they still merge into the same token
        const Merge* merge = merge_of(left.id, right.id);
        if (merge == nullptr || merge->merged != best.merged) continue;
        left.id = best.merged;
        left.after = right.after;
        right.gone = true;
        if (left.after != kNone) symbols[left.after].before = best.at;
        if (left.before != kNone) consider(left.before);
        if (left.after != kNone) consider(best.at);
    }
    for (std::uint32_t i = 0; i < count; i = symbols[i].after) ids.push_back(symbols[i].id);
}

}  // namespace headlong
