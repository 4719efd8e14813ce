// A saved cache. A file whose checksum is not that of its bytes is never restored. Where it is (the fuzzer puts it
// right in half of its modes), the file is refused and the cache is as it was; or it is what the cache is saved to
// again, byte for byte, and the cache can be gone on with.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include <headlong/headlong.hpp>

#include "tests/fuzz/contexts.hpp"
#include "tests/fuzz/fuzzer.hpp"
#include "tests/fuzz/reader.hpp"
#include "tests/fuzz/scratch_file.hpp"

namespace headlong::fuzz {
namespace {

using Bytes = std::vector<std::byte>;

// The words that a file begins with, and what is behind them: engine/saved_cache.cpp.
constexpr std::size_t kWords = 18;
constexpr std::size_t kSizeWord = 2;
constexpr std::size_t kLengthWord = 3;
constexpr std::size_t kCentreWord = 15;
constexpr std::size_t kRotariesWord = 16;
constexpr std::size_t kHashBytes = 8;
constexpr std::int64_t kBlockTokens = 64;

std::uint64_t word(Input file, std::size_t at) {
    std::uint64_t value = 0;
    std::memcpy(&value, file.data() + at, sizeof value);
    return value;
}
void set_word(Bytes& file, std::size_t at, std::uint64_t value) { std::memcpy(file.data() + at, &value, sizeof value); }

std::uint64_t hash_of(Input bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

bool has_right_hash(Input file) {
    if (file.size() < kHashBytes) return false;
    const std::size_t end = file.size() - kHashBytes;
    return word(file, end) == hash_of(file.first(end));
}

/// What a file says of its size and its checksum is made true.
void put_right(Bytes& file) {
    if (file.size() < (kSizeWord + 1) * 8 + kHashBytes) return;
    set_word(file, kSizeWord * 8, file.size());
    const std::size_t end = file.size() - kHashBytes;
    set_word(file, end, hash_of(Input(file).first(end)));
}

/// Options of small caches of every kind and type.
struct Kind {
    KvCacheOptions options;
    std::vector<std::int64_t> windows;
    std::vector<float> centre;
    std::int64_t tokens = 0;

    explicit Kind(Reader& reader) {
        constexpr auto is_code = [](KvType type) { return type == KvType::int8 || type == KvType::int4; };
        KvShape& shape = options.shape;
        shape.kv_heads = 1 + static_cast<std::int64_t>(reader.below(2));
        shape.head_dim = reader.one_of<std::int64_t>({4, 1, 16, 66});
        shape.value_dim = reader.one_of<std::int64_t>({4, 1, 16, 130, 0});
        for (KvType* type : {&shape.key_type, &shape.value_type}) {
            *type = reader.one_of({KvType::f32, KvType::f16, KvType::bf16, KvType::int8, KvType::int4});
        }
        options.layers = 1 + static_cast<std::int64_t>(reader.below(2));
        const std::uint8_t forgets = reader.byte();
        if (forgets % 4 == 1) {
            options.ring = true;
            options.capacity = reader.one_of<std::int64_t>({70, 1, 2, 64, 65, 150});
        } else {
            options.capacity = 200;
        }
        if (forgets % 4 == 2) {
            for (std::int64_t layer = 0; layer < options.layers; ++layer) {
                windows.push_back(static_cast<std::int64_t>(reader.below(100)));
            }
            options.layer_windows = windows;
        }
        if (options.ring || reader.flag()) {
            options.sink_tokens = static_cast<std::int64_t>(
                reader.below(static_cast<std::size_t>(std::min<std::int64_t>(options.capacity, 100))));
        }
        options.max_chunk = 1 + static_cast<std::int64_t>(reader.below(80));
        options.f16_sinks =
            reader.flag() && options.sink_tokens > 0 && (is_code(shape.key_type) || is_code(shape.value_type));
        if (is_code(shape.key_type)) {
            options.hadamard_keys = reader.flag();
            if (reader.flag()) {
                centre.assign(static_cast<std::size_t>(shape.kv_heads * shape.head_dim), 0.25F);
                options.key_centre = centre;
            }
        }
        if (reader.flag() && shape.head_dim % 2 == 0) options.rotary.emplace(RotaryOptions{.head_dim = shape.head_dim});
        options.pool = std::make_shared<BlockPool>(shape);
        tokens = static_cast<std::int64_t>(reader.below(200));
    }
    Kind(const Kind&) = delete;  // options refer to it
    Kind& operator=(const Kind&) = delete;
};

std::vector<float> some(std::int64_t rows, std::int64_t columns) {
    std::vector<float> elements(static_cast<std::size_t>(rows * columns));
    for (std::size_t i = 0; i < elements.size(); ++i) elements[i] = static_cast<float>(i * 37 % 101) / 50.0F - 1.0F;
    return elements;
}

void append(Context& context, KvCache& cache, std::int64_t tokens) {
    const KvShape& shape = cache.shape();
    const std::vector<float> keys = some(shape.kv_heads * tokens, shape.head_dim);
    const std::vector<float> values = some(shape.kv_heads * tokens, shape.value_dim);
    for (std::size_t layer = 0; layer < cache.layers(); ++layer) {
        cache.append(context, layer, InputTensor<3>::dense(keys.data(), {shape.kv_heads, tokens, shape.head_dim}),
                     InputTensor<3>::dense(values.data(), {shape.kv_heads, tokens, shape.value_dim}));
    }
}

/// In portions that the cache takes.
void fill(Context& context, KvCache& cache, std::int64_t tokens) {
    while (tokens > 0) {
        const std::int64_t chunk = cache.forgets() ? std::min(tokens, cache.max_chunk()) : tokens;
        append(context, cache, chunk);
        tokens -= chunk;
    }
}

/// Outputs of a query at the end, of all layers.
std::vector<float> attended(Context& context, const KvCache& cache) {
    const KvShape& shape = cache.shape();
    const std::int64_t heads = 2 * shape.kv_heads;
    const std::vector<float> query = some(heads, shape.head_dim);
    std::vector<float> output(cache.layers() * static_cast<std::size_t>(heads * shape.value_dim), -7.0F);
    for (std::size_t layer = 0; layer < cache.layers() && cache.length() > 0; ++layer) {
        CachedQuery each;
        each.query = InputTensor<3>::dense(query.data(), {heads, 1, shape.head_dim});
        each.cache = &cache;
        each.layer = layer;
        each.output = OutputTensor<3>::dense(output.data() + layer * static_cast<std::size_t>(heads * shape.value_dim),
                                             {heads, 1, shape.value_dim});
        attend(context, {&each, 1});
    }
    for (const float x : output) {
        require(!std::isnan(x) || std::bit_cast<std::uint32_t>(x) == 0x7FC00000U, "there is one NaN in outputs");
    }
    return output;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

Bytes saved(const KvCache& cache, Input attachment = {}) {
    Bytes file(cache.saved_bytes(attachment.size()));
    cache.save(file, attachment);
    return file;
}

/// Where the layers' pairs of words begin.
std::size_t layers_at(Input file) {
    std::size_t at = kWords * 8;
    for (std::uint64_t i = 0; i < word(file, kRotariesWord * 8); ++i) at += (3 + word(file, at)) * 8;
    return at + word(file, kCentreWord * 8) * sizeof(float);
}

/// As if so many blocks of tokens had been appended and forgotten before.
void move_on(Bytes& file, std::size_t layer_words, std::size_t layers, std::uint64_t blocks) {
    const std::uint64_t tokens = blocks * static_cast<std::uint64_t>(kBlockTokens);
    set_word(file, kLengthWord * 8, word(file, kLengthWord * 8) + tokens);
    for (std::size_t layer = 0; layer < layers; ++layer) {
        const std::size_t held_from = layer_words + layer * 16 + 8;
        set_word(file, held_from, word(file, held_from) + tokens);
    }
}

/// Changes a file that save() wrote.
void edit(Reader& reader, Bytes& file, std::size_t layers) {
    const std::size_t layer_words = layers_at(file);
    const std::size_t described = layer_words + layers * 16;
    while (!reader.empty()) {
        switch (reader.below(4)) {
            case 0:  // a word of what comes before the blocks
                set_word(file, reader.below(described / 8) * 8, reader.integer<std::uint64_t>());
                break;
            case 1: {  // bytes anywhere
                const std::size_t at = reader.integer<std::uint32_t>() % file.size();
                const Input bytes = reader.bytes(1 + reader.below(8));
                std::copy_n(bytes.begin(), std::min(bytes.size(), file.size() - at),
                            file.begin() + static_cast<std::ptrdiff_t>(at));
                break;
            }
            case 2:  // another length, and positions that go with it
                move_on(file, layer_words, layers, reader.integer<std::uint64_t>());
                break;
            default:  // another end
                file.resize(std::max(described, file.size() - std::min(file.size(), reader.below(256))));
                break;
        }
    }
}

}  // namespace

void saved_cache(Input input) {
    static ScratchFile scratch;
    Reader reader(input);
    const std::uint8_t mode = reader.byte();
    Context& context = *contexts()[mode / 16 % 2];
    const Kind kind(reader);
    Bytes file;
    bool untouched = false;
    if (mode % 2 == 0) {  // a saved file of that kind, changed
        KvCache cache(kind.options);
        if (!done([&] { fill(context, cache, kind.tokens); })) return;
        const Bytes before = saved(cache, reader.bytes(reader.below(8)));
        file = before;
        edit(reader, file, cache.layers());
        untouched = file == before;
    } else {
        const Input rest = reader.rest();
        file.assign(rest.begin(), rest.end());
    }
    if (mode / 2 % 2 == 1) put_right(file);

    {
        KvCache cache(kind.options);
        if (mode / 8 % 2 == 1) fill(context, cache, 3);
        const Bytes before = saved(cache);
        Bytes attachment;
        const bool restored = done([&] {
            if (mode / 4 % 2 == 1) {
                scratch.set(file);
                attachment = cache.restore(scratch.path());
            } else {
                attachment = cache.restore(file);
            }
        });
        require(restored || !untouched, "what save() wrote is restored");
        if (restored) {
            require(has_right_hash(file), "a file whose checksum is wrong is refused");
            require(saved(cache, attachment) == file, "what was restored is saved as it was");
            KvCache other(kind.options);
            other.restore(file);
            std::optional<std::vector<float>> output;
            const bool answered = done([&] { output = attended(context, cache); });
            require(!answered || same_bits(*output, attended(context, other)), "the same file gives the same bits");
            KvCache fork = cache.fork();
            done([&] { fill(context, cache, 70); });
            done([&] { attended(context, cache); });
            done([&] { cache.truncate(cache.length() / 2); });
            done([&] { cache.truncate(std::max<std::int64_t>(cache.length() - 1, 0)); });
            done([&] { attended(context, cache); });
            require(saved(fork, attachment) == file, "a fork does not change with its parent");
        } else {
            require(saved(cache) == before, "a refused file leaves the cache as it was");
        }
    }
    require(kind.options.pool->used_bytes() == 0, "no block is lost");
}

}  // namespace headlong::fuzz
