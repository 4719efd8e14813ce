// Saved caches: KvCache's save() and restore().
//
// A saved cache is, in little-endian order: words of 64 bits that say what it is (Word), each rotary description, the
// keys' centre, each layer's window and first position held, the caller's attachment, then the blocks of all layers in
// ascending order, those of sinks in f16, and a checksum (XXH3, 64 bits) of all that. A block is, KV head
// by KV head, the bytes of its keys and of its values as they lie in memory, the same on every instruction set. Places of
// tokens that are not held are 0.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>

// The library's whole code, inlined here: no symbol of it is shared with the host.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/block_rows.hpp"
#include "engine/carver.hpp"
#include "engine/context_impl.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/mapped_file.hpp"
#include "engine/output_file.hpp"
#include "engine/validate.hpp"

namespace headlong {
namespace {

static_assert(std::endian::native == std::endian::little, "saved caches are little-endian");

constexpr std::uint64_t kMagic = 0x45484341434C4831;  // "1HLCACHE"
constexpr std::uint64_t kVersion = 3;
constexpr auto kBlock = static_cast<std::int64_t>(kernels::kBlockTokens);

enum Word : std::size_t {
    magic,
    version,
    total_bytes,
    length,
    attachment_bytes,
    kv_heads,
    head_dim,
    value_dim,
    key_type,
    value_type,
    layers,
    ring_capacity,
    sink_tokens,
    max_chunk,
    hadamard,
    centre,
    rotaries,
    f16_sinks,
    word_count,
};
/// Those that a cache and what it is restored from must have in common, from kv_heads on.
constexpr std::array<const char*, word_count> kNames{"",
                                                     "",
                                                     "",
                                                     "",
                                                     "",
                                                     "kv_heads",
                                                     "head_dim",
                                                     "value_dim",
                                                     "key_type",
                                                     "value_type",
                                                     "layers",
                                                     "the capacity of a ring",
                                                     "sink_tokens",
                                                     "max_chunk",
                                                     "hadamard_keys",
                                                     "key_centre",
                                                     "the number of rotary descriptions",
                                                     "f16_sinks"};

using Words = std::array<std::uint64_t, word_count>;
using Layer = KvCache::Impl::Layer;

std::uint64_t word(std::int64_t n) noexcept { return static_cast<std::uint64_t>(n); }

std::int64_t blocks_for(std::int64_t tokens) noexcept { return tokens / kBlock + (tokens % kBlock != 0 ? 1 : 0); }

/// The blocks that a layer holds: [0, sinks) and [first, end).
struct HeldBlocks {
    std::int64_t sinks;
    std::int64_t first;
    std::int64_t end;

    explicit HeldBlocks(const Layer& layer) noexcept
        : sinks(blocks_for(std::min(layer.sinks, layer.length))),
          first(std::max(sinks, layer.held_from / kBlock)),
          end(blocks_for(layer.length)) {}
    std::int64_t count() const noexcept { return sinks + std::max(end - first, std::int64_t{0}); }
};

template <class Visit>
void for_blocks(const Layer& layer, const Visit& visit) {
    const HeldBlocks held(layer);
    for (std::int64_t b = 0; b < held.sinks; ++b) visit(b);
    for (std::int64_t b = held.first; b < held.end; ++b) visit(b);
}

Words words_of(const KvCache::Impl& cache) noexcept {
    const KvShape& shape = cache.pool->shape();
    Words words{};
    words[magic] = kMagic;
    words[version] = kVersion;
    words[length] = word(cache.length());
    words[kv_heads] = word(shape.kv_heads);
    words[head_dim] = word(shape.head_dim);
    words[value_dim] = word(shape.value_dim);
    words[key_type] = static_cast<std::uint64_t>(shape.key_type);
    words[value_type] = static_cast<std::uint64_t>(shape.value_type);
    words[layers] = cache.layers.size();
    words[ring_capacity] = cache.ring ? word(cache.capacity) : 0;
    words[sink_tokens] = word(cache.sink_tokens);
    words[max_chunk] = word(cache.max_chunk);
    words[hadamard] = cache.transform->hadamard ? 1 : 0;
    words[centre] = cache.transform->centre.size();
    words[rotaries] = cache.rotaries->size();
    words[f16_sinks] = cache.with_f16_sinks ? 1 : 0;
    return words;
}

/// Of each rotary description, before its frequencies: pairs (0: none), pairing, attention factor.
constexpr std::size_t kRotaryWords = 3;

/// What a cache is in numbers beside its words: equal in a cache and what it is restored from.
std::vector<std::byte> constants_of(const KvCache::Impl& cache) {
    std::vector<std::byte> bytes;
    const auto add = [&](const auto& numbers) {
        const auto raw = std::as_bytes(std::span(numbers));
        bytes.insert(bytes.end(), raw.begin(), raw.end());
    };
    for (const std::optional<Rotary>& rotary : *cache.rotaries) {
        std::array<std::uint64_t, kRotaryWords> about{};
        if (rotary) {
            about = {rotary->inverse_frequencies().size(), static_cast<std::uint64_t>(rotary->pairing()),
                     std::bit_cast<std::uint64_t>(rotary->attention_factor())};
        }
        add(about);
        if (rotary) add(rotary->inverse_frequencies());
    }
    add(cache.transform->centre);
    return bytes;
}

std::size_t constant_bytes_of(const KvCache::Impl& cache) noexcept {
    std::size_t bytes = cache.transform->centre.size() * sizeof(float);
    for (const std::optional<Rotary>& rotary : *cache.rotaries) {
        bytes += kRotaryWords * sizeof(std::uint64_t);
        if (rotary) bytes += rotary->inverse_frequencies().size() * sizeof(double);
    }
    return bytes;
}

/// [layers][window, first position held]
constexpr std::size_t kLayerWords = 2;

std::size_t all_bytes(const KvCache::Impl& cache, std::span<const Layer> held, std::size_t attachment) noexcept {
    std::size_t blocks = 0;
    std::size_t sink_blocks = 0;
    for (const Layer& layer : held) {
        const HeldBlocks of_layer(layer);
        blocks = saturating_sum(blocks, static_cast<std::size_t>(of_layer.count()));
        if (layer.own_sinks >= 0) sink_blocks += static_cast<std::size_t>(of_layer.sinks);
    }
    const std::size_t f16_bytes =
        cache.f16_sinks == nullptr ? 0 : saturating_product(sink_blocks, cache.f16_sinks->pool->block_bytes());
    return saturating_sum(
        sizeof(Words) + constant_bytes_of(cache) + held.size() * kLayerWords * sizeof(std::uint64_t) +
            sizeof(std::uint64_t),
        saturating_sum(attachment, saturating_sum(f16_bytes, saturating_product(blocks, cache.pool->block_bytes()))));
}

/// Hands bytes on and sums them up.
class Checksum {
  public:
    Checksum() noexcept { XXH3_64bits_reset(&state_); }
    void add(std::span<const std::byte> bytes) noexcept {
        if (!bytes.empty()) XXH3_64bits_update(&state_, bytes.data(), bytes.size());
    }
    std::uint64_t value() const noexcept { return XXH3_64bits_digest(&state_); }

  private:
    XXH3_state_t state_;
};

/// Whether a position lies in one of the layer's blocks without being held.
bool is_dead(const Layer& layer, std::int64_t position) noexcept {
    return position >= layer.length || (position >= layer.sinks && position < layer.held_from);
}

bool has_dead(const Layer& layer, std::int64_t block) noexcept {
    bool any = false;
    for (std::int64_t t = 0; t < kBlock; ++t) any = any || is_dead(layer, block * kBlock + t);
    return any;
}

/// Clears the places of such positions in one head's keys and values.
void clear_dead(const kernels::BlockLayout& layout, const Layer& layer, std::int64_t block, std::byte* keys,
                std::byte* values) noexcept {
    for (std::int64_t t = 0; t < kBlock; ++t) {
        if (is_dead(layer, block * kBlock + t)) clear_token(layout, keys, values, static_cast<std::size_t>(t));
    }
}

template <class Put>
void write_blocks(const KvCache::Impl& cache, const Put& put) {
    const kernels::BlockLayout layout = cache.pool->impl().layout();
    const auto heads = static_cast<std::size_t>(cache.pool->shape().kv_heads);
    std::pmr::vector<std::byte> copy(&cache.memory());
    for (const Layer& layer : cache.layers) {
        for_blocks(layer, [&](std::int64_t b) {
            const Block& block = layer.blocks[b];
            const bool dead = has_dead(layer, b);
            for (std::size_t head = 0; head < heads; ++head) {
                std::span<const std::byte> keys(block.keys(head), layout.values_offset());
                std::span<const std::byte> values(block.values(head), layout.value_bytes());
                if (dead) {
                    copy.assign(keys.begin(), keys.end());
                    copy.insert(copy.end(), values.begin(), values.end());
                    clear_dead(layout, layer, b, copy.data(), copy.data() + layout.values_offset());
                    keys = std::span(copy).first(keys.size());
                    values = std::span(copy).subspan(keys.size());
                }
                put(keys);
                put(values);
            }
        });
    }
}

template <class Write>
void write_all(const KvCache::Impl& cache, std::span<const std::byte> attachment, const Write& write) {
    Checksum checksum;
    const auto put = [&](std::span<const std::byte> bytes) {
        checksum.add(bytes);
        write(bytes);
    };
    Words words = words_of(cache);
    words[total_bytes] = all_bytes(cache, cache.layers, attachment.size());
    words[attachment_bytes] = attachment.size();
    put(std::as_bytes(std::span(words)));
    put(constants_of(cache));
    for (const Layer& layer : cache.layers) {
        const std::uint64_t both[kLayerWords] = {word(layer.window), word(layer.held_from)};
        put(std::as_bytes(std::span(both)));
    }
    put(attachment);
    write_blocks(cache, put);
    if (cache.f16_sinks != nullptr) write_blocks(*cache.f16_sinks, put);
    const std::uint64_t sum = checksum.value();
    write(std::as_bytes(std::span(&sum, 1)));
}

void check_finished(const KvCache::Impl& cache) {
    const std::int64_t length = cache.length();
    for (std::size_t i = 0; i < cache.layers.size(); ++i) {
        if (cache.layers[i].length == length) continue;
        throw InvalidArgument(fmt::format("save: layer {} has {} tokens, others {}; a step was left half done", i,
                                          cache.layers[i].length, length));
    }
}

/// Layers that a file fills, and whose blocks go back to the pool unless they are taken.
class NewLayers {
  public:
    explicit NewLayers(const KvCache::Impl& cache) : layers(&cache.memory()), pool_(cache.pool->impl()) {
        layers.reserve(cache.layers.size());
        for (const Layer& layer : cache.layers) {
            Layer& fresh = layers.emplace_back(cache.memory());
            fresh.sinks = layer.sinks;
            fresh.window = layer.window;
            fresh.own_sinks = layer.own_sinks;
            fresh.blocks = BlockTable(cache.memory(), layer.forgets() ? blocks_for(layer.sinks) : 0);
        }
    }
    ~NewLayers() {
        for (Layer& layer : layers) {
            layer.blocks.for_each([&](const Block& block) noexcept { pool_.give_back(block); });
        }
    }
    NewLayers(const NewLayers&) = delete;
    NewLayers& operator=(const NewLayers&) = delete;

    /// Takes the blocks that the layers' lengths need.
    void take_blocks() {
        std::size_t needed = 0;
        for (Layer& layer : layers) {
            needed += static_cast<std::size_t>(HeldBlocks(layer).count());
            // of a layer that forgets nothing, sinks lie in the queue, too
            layer.blocks.reserve_for(blocks_for(layer.length), layer.forgets() ? layer.held_from / kBlock : 0);
        }
        std::pmr::vector<Block> taken(needed, &pool_.memory());
        pool_.take(taken);
        auto next = taken.begin();
        for (Layer& layer : layers) {
            for_blocks(layer, [&](std::int64_t b) noexcept {
                if (b > layer.blocks.end()) layer.blocks.skip_to(b);
                layer.blocks.push_back(*next++);
            });
        }
    }
    /// Fills them. Returns whether all places of tokens that are not held are 0, as blocks are taken and saved.
    template <class Get>
    bool read_blocks(const Get& get) {
        const kernels::BlockLayout layout = pool_.layout();
        const auto heads = static_cast<std::size_t>(pool_.shape().kv_heads);
        std::pmr::vector<std::byte> copy(&pool_.memory());
        bool clear = true;
        for (Layer& layer : layers) {
            for_blocks(layer, [&](std::int64_t b) {
                const Block& block = layer.blocks[b];
                const bool dead = has_dead(layer, b);
                for (std::size_t h = 0; h < heads; ++h) {
                    const std::span<std::byte> keys(block.keys(h), layout.values_offset());
                    const std::span<std::byte> values(block.values(h), layout.value_bytes());
                    get(keys);
                    get(values);
                    block.nonfinite(h) = holds_nonfinite(layout, values.data()) ? 1 : 0;
                    if (!dead) continue;
                    copy.assign(keys.begin(), keys.end());
                    copy.insert(copy.end(), values.begin(), values.end());
                    clear_dead(layout, layer, b, keys.data(), values.data());
                    clear = clear && std::ranges::equal(keys, std::span(copy).first(keys.size())) &&
                            std::ranges::equal(values, std::span(copy).subspan(keys.size()));
                }
            });
        }
        return clear;
    }

    std::pmr::vector<Layer> layers;

  private:
    BlockPool::Impl& pool_;
};

/// `read` fills a span with the bytes that follow; there are `size` in all.
template <class Read>
std::vector<std::byte> read_all(KvCache::Impl& cache, const std::string& name, std::uint64_t size, const Read& read) {
    const auto bad = [&](const std::string& what) { return BadFile(fmt::format("{}: {}", name, what)); };
    Checksum checksum;
    const auto get = [&](std::span<std::byte> bytes) {
        read(bytes);
        checksum.add(bytes);
    };
    if (size < sizeof(Words))
        throw bad(fmt::format("has {} bytes, fewer than a saved cache's first {}", size, sizeof(Words)));
    Words words{};
    get(std::as_writable_bytes(std::span(words)));
    if (words[magic] != kMagic) throw bad("is not a saved cache");
    if (words[version] != kVersion) {
        throw bad(
            fmt::format("is a saved cache of version {}; this library reads version {}", words[version], kVersion));
    }
    if (words[total_bytes] != size) {
        throw bad(fmt::format("has {} bytes; it says that it has {}", size, words[total_bytes]));
    }
    const Words own = words_of(cache);
    for (std::size_t i = kv_heads; i < word_count; ++i) {
        if (words[i] == own[i]) continue;
        throw bad(fmt::format("is of a cache whose {} is {}; this cache's is {}", kNames[i], words[i], own[i]));
    }
    const std::vector<std::byte> constants = constants_of(cache);
    const std::size_t head =
        sizeof(Words) + constants.size() + cache.layers.size() * kLayerWords * sizeof(std::uint64_t);
    if (size < head + sizeof(std::uint64_t)) throw bad(fmt::format("has {} bytes, fewer than its description", size));
    std::vector<std::byte> given(constants.size());
    get(given);
    if (given != constants) throw bad("is of a cache with other rotary descriptions, or another key_centre");
    const std::int64_t most_tokens = cache.ring ? Layer::kMostTokens : std::min(cache.capacity, Layer::kMostTokens);
    if (words[length] > word(most_tokens)) {
        throw bad(fmt::format("has {} tokens; the cache's capacity is {}", words[length], most_tokens));
    }

    NewLayers fresh(cache);
    std::optional<NewLayers> sinks;
    if (cache.f16_sinks != nullptr) sinks.emplace(*cache.f16_sinks);
    for (Layer& layer : fresh.layers) {
        std::uint64_t both[kLayerWords] = {};
        get(std::as_writable_bytes(std::span(both)));
        layer.length = static_cast<std::int64_t>(words[length]);
        if (both[0] != word(layer.window)) {
            throw bad(
                fmt::format("is of a cache with other windows: {}, where this one has {}", both[0], layer.window));
        }
        const std::int64_t resident = layer.resident_from(layer.length);
        const auto least = static_cast<std::uint64_t>(std::max(layer.sinks, resident - cache.max_chunk));
        const auto most = static_cast<std::uint64_t>(resident);
        if (both[1] < least || both[1] > most) {
            throw bad(fmt::format("holds positions from {} on; allowed: {} to {}", both[1], least, most));
        }
        layer.held_from = static_cast<std::int64_t>(both[1]);
        if (layer.own_sinks >= 0) {
            sinks->layers[static_cast<std::size_t>(layer.own_sinks)].length = std::min(layer.length, layer.sinks);
        }
    }
    const std::size_t described = all_bytes(cache, fresh.layers, words[attachment_bytes]);
    if (described != size) throw bad(fmt::format("has {} bytes; what it describes has {}", size, described));
    std::vector<std::byte> attachment(words[attachment_bytes]);
    get(attachment);

    fresh.take_blocks();
    if (sinks) sinks->take_blocks();
    const bool clear = fresh.read_blocks(get);
    const bool sinks_clear = !sinks || sinks->read_blocks(get);
    std::uint64_t sum = 0;
    read(std::as_writable_bytes(std::span(&sum, 1)));
    if (sum != checksum.value()) throw bad("its checksum is not that of its contents; it was damaged");
    if (!clear || !sinks_clear) throw bad("has something in the place of a token that it does not hold");

    cache.reset();
    cache.layers.swap(fresh.layers);
    if (sinks) cache.f16_sinks->layers.swap(sinks->layers);
    return attachment;
}

}  // namespace

std::size_t KvCache::saved_bytes(std::size_t attachment) const noexcept {
    return all_bytes(*impl_, impl_->layers, attachment);
}

void KvCache::save(std::span<std::byte> bytes, std::span<const std::byte> attachment) const {
    check_finished(*impl_);
    const std::size_t needed = saved_bytes(attachment.size());
    if (bytes.size() != needed) {
        throw InvalidArgument(fmt::format("save: bytes has {}; it must have saved_bytes(), {}", bytes.size(), needed));
    }
    with_memory_errors("KvCache::save", [&] {
        write_all(*impl_, attachment, [&](std::span<const std::byte> part) {
            if (!part.empty()) std::memcpy(bytes.data(), part.data(), part.size());
            bytes = bytes.subspan(part.size());
        });
    });
}

void KvCache::save(const std::string& path, std::span<const std::byte> attachment) const {
    check_finished(*impl_);
    with_memory_errors("KvCache::save", [&] {
        OutputFile file(path);
        write_all(*impl_, attachment, [&](std::span<const std::byte> part) { file.write(part); });
        file.commit();
    });
}

std::vector<std::byte> KvCache::restore(std::span<const std::byte> bytes) {
    return with_memory_errors("KvCache::restore", [&] {
        return read_all(*impl_, "restore: bytes", bytes.size(), [&](std::span<std::byte> into) {
            if (!into.empty()) std::memcpy(into.data(), bytes.data(), into.size());
            bytes = bytes.subspan(into.size());
        });
    });
}

std::vector<std::byte> KvCache::restore(const std::string& path) {
    return with_memory_errors("KvCache::restore", [&] {
        const InputFile file(path);
        std::uint64_t at = 0;
        return read_all(*impl_, one_line(path), file.size(), [&](std::span<std::byte> into) {
            file.read(at, into);
            at += into.size();
        });
    });
}

}  // namespace headlong
