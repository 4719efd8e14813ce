// A saved cache. A file whose checksum is not that of its bytes is never restored. Where it is (the fuzzer puts it
// right in some modes), the file is refused and the cache as it was, or what is restored can be gone on with, and is
// saved to a file that restores to the same.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <headlong/headlong.hpp>

#include "tests/fuzz/fuzzer.hpp"
#include "tests/fuzz/reader.hpp"

namespace headlong::fuzz {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::size_t kHashBytes = 8;
constexpr std::size_t kSizeWord = 2;  // of the words at the beginning: engine/saved_cache.cpp

Context& context() {
    static Context one([] {
        ContextOptions options;
        options.threads = 1;
        return options;
    }());
    return one;
}

std::uint64_t hash_of(Input bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

bool has_right_hash(Input file) {
    if (file.size() < kHashBytes) return false;
    std::uint64_t hash = 0;
    std::memcpy(&hash, file.data() + file.size() - kHashBytes, kHashBytes);
    return hash == hash_of(file.first(file.size() - kHashBytes));
}

/// What a file says of its size and its checksum is made true.
void put_right(Bytes& file) {
    if (file.size() < (kSizeWord + 1) * 8 + kHashBytes) return;
    const std::uint64_t size = file.size();
    std::memcpy(file.data() + kSizeWord * 8, &size, 8);
    const std::uint64_t hash = hash_of(Input(file).first(file.size() - kHashBytes));
    std::memcpy(file.data() + file.size() - kHashBytes, &hash, kHashBytes);
}

/// Options of small caches of every kind.
struct Kind {
    KvCacheOptions options;
    std::vector<std::int64_t> windows;
    std::vector<float> centre;
    std::int64_t tokens = 0;

    explicit Kind(Reader& reader) {
        options.shape.kv_heads = 1 + static_cast<std::int64_t>(reader.below(2));
        options.shape.head_dim = reader.one_of<std::int64_t>({4, 1, 16, 66});
        options.shape.value_dim = reader.one_of<std::int64_t>({4, 1, 16, 130, 0});
        for (KvType* type : {&options.shape.key_type, &options.shape.value_type}) {
            *type = reader.one_of({KvType::f32, KvType::f16, KvType::bf16, KvType::int8, KvType::int4});
        }
        options.layers = 1 + static_cast<std::int64_t>(reader.below(2));
        const auto is_code = [](KvType type) { return type == KvType::int8 || type == KvType::int4; };
        if (reader.flag()) {
            options.ring = true;
            options.capacity = reader.one_of<std::int64_t>({70, 1, 2, 64, 65, 200});
            options.sink_tokens = static_cast<std::int64_t>(reader.below(static_cast<std::size_t>(options.capacity)));
            options.max_chunk = 1 + static_cast<std::int64_t>(reader.below(80));
            options.f16_sinks = options.sink_tokens > 0 && reader.flag() &&
                                (is_code(options.shape.key_type) || is_code(options.shape.value_type));
        } else if (reader.flag()) {
            for (std::int64_t layer = 0; layer < options.layers; ++layer) {
                windows.push_back(static_cast<std::int64_t>(reader.below(100)));
            }
            options.layer_windows = windows;
            options.max_chunk = 64;
        }
        if (is_code(options.shape.key_type)) {
            options.hadamard_keys = reader.flag();
            if (reader.flag()) {
                centre.assign(static_cast<std::size_t>(options.shape.kv_heads * options.shape.head_dim), 0.25F);
                options.key_centre = centre;
            }
        }
        if (reader.flag() && options.shape.head_dim % 2 == 0) {
            options.rotary.emplace(RotaryOptions{.head_dim = options.shape.head_dim});
        }
        tokens = static_cast<std::int64_t>(reader.below(150));
    }
    Kind(const Kind&) = delete;
    Kind& operator=(const Kind&) = delete;
};

void append(KvCache& cache, std::int64_t tokens) {
    const KvShape& shape = cache.shape();
    const auto rows = static_cast<std::size_t>(shape.kv_heads * tokens);
    std::vector<float> keys(rows * static_cast<std::size_t>(shape.head_dim));
    std::vector<float> values(rows * static_cast<std::size_t>(shape.value_dim));
    for (std::vector<float>* elements : {&keys, &values}) {
        for (std::size_t i = 0; i < elements->size(); ++i)
            (*elements)[i] = static_cast<float>(i * 37 % 101) / 50.0F - 1.0F;
    }
    for (std::size_t layer = 0; layer < cache.layers(); ++layer) {
        cache.append(context(), layer, InputTensor<3>::dense(keys.data(), {shape.kv_heads, tokens, shape.head_dim}),
                     InputTensor<3>::dense(values.data(), {shape.kv_heads, tokens, shape.value_dim}));
    }
}

void attend_newest(const KvCache& cache) {
    if (cache.length() == 0) return;
    const KvShape& shape = cache.shape();
    const std::vector<float> query(static_cast<std::size_t>(2 * shape.kv_heads * shape.head_dim), 0.5F);
    std::vector<float> output(static_cast<std::size_t>(2 * shape.kv_heads * shape.value_dim));
    for (std::size_t layer = 0; layer < cache.layers(); ++layer) {
        CachedQuery sequence;
        sequence.query = InputTensor<3>::dense(query.data(), {2 * shape.kv_heads, 1, shape.head_dim});
        sequence.cache = &cache;
        sequence.layer = layer;
        sequence.output = OutputTensor<3>::dense(output.data(), {2 * shape.kv_heads, 1, shape.value_dim});
        attend(context(), {&sequence, 1});
    }
}

Bytes saved(const KvCache& cache, Input attachment = {}) {
    Bytes file(cache.saved_bytes(attachment.size()));
    cache.save(file, attachment);
    return file;
}

/// Appends as many as the cache's ring and windows take at once.
void fill(KvCache& cache, std::int64_t tokens) {
    while (tokens > 0) {
        const std::int64_t chunk = cache.forgets() ? std::min(tokens, cache.max_chunk()) : tokens;
        append(cache, chunk);
        tokens -= chunk;
    }
}

}  // namespace

void saved_cache(Input input) {
    Reader reader(input);
    const std::uint8_t mode = reader.byte();
    Kind kind(reader);
    Bytes file;
    Bytes untouched;
    if (mode % 4 < 2) {
        const Input rest = reader.rest();
        file.assign(rest.begin(), rest.end());
    } else {  // a saved file of that kind, with bytes changed here and there
        KvCache cache(kind.options);
        fill(cache, kind.tokens);
        file = saved(cache, reader.bytes(reader.below(8)));
        untouched = file;
        while (!reader.empty()) {
            const std::size_t at = reader.take<std::uint16_t>() % file.size();
            const Input bytes = reader.bytes(1 + reader.below(8));
            std::copy_n(bytes.begin(), std::min(bytes.size(), file.size() - at),
                        file.begin() + static_cast<std::ptrdiff_t>(at));
        }
    }
    if (mode % 2 == 1) put_right(file);

    KvCache cache(kind.options);
    if (mode >= 128) fill(cache, 3);
    const Bytes before = saved(cache);
    Bytes attachment;
    const bool restored = done([&] { attachment = cache.restore(file); });
    require(restored || file != untouched || untouched.empty(), "a file that nobody changed is restored");
    if (!restored) {
        require(saved(cache) == before, "a refused file leaves the cache as it was");
        return;
    }
    require(has_right_hash(file), "a file whose checksum is wrong is refused");
    const Bytes again = saved(cache, attachment);
    KvCache other(kind.options);
    require(done([&] { other.restore(again); }), "what was restored can be saved and restored");
    require(saved(other, attachment) == again, "and is the same then");
    done([&] { attend_newest(cache); });
    done([&] { fill(cache, 70); });
    done([&] { attend_newest(cache); });
    done([&] { cache.truncate(cache.length() / 2); });
}

}  // namespace headlong::fuzz
