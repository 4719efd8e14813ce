// Rows that belong to a token: a sequence is a plain list of tokens, and what a cache holds follows from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <headlong/headlong.hpp>

#include "tests/support/random.hpp"

namespace headlong::test {

struct TypesCase {
    KvTypes types;
    std::string name() const { return std::string(to_string(types.keys)) + ":" + to_string(types.values); }
    bool has_codes() const { return types.keys >= KvType::int8 || types.values >= KvType::int8; }
};
inline const std::vector<TypesCase>& all_kv_types() {
    static const std::vector<TypesCase> all{{{KvType::f32, KvType::f32}},   {{KvType::f16, KvType::f16}},
                                            {{KvType::bf16, KvType::bf16}}, {{KvType::int8, KvType::int8}},
                                            {{KvType::int4, KvType::int4}}, {{KvType::f16, KvType::int8}}};
    return all;
}

/// The rows of a token in a layer are random numbers from the token and the layer.
struct TokenRows {
    std::int64_t kv_heads = 2;
    std::int64_t group = 2;
    std::int64_t head_dim = 8;
    std::int64_t value_dim = 5;

    std::int64_t heads() const { return kv_heads * group; }
    KvShape shape(const KvTypes& types) const {
        return {.kv_heads = kv_heads,
                .head_dim = head_dim,
                .value_dim = value_dim,
                .key_type = types.keys,
                .value_type = types.values};
    }

    enum class Kind : std::uint8_t { key, value, query };
    std::vector<float> rows(const std::vector<std::uint64_t>& tokens, std::size_t first, std::size_t count,
                            std::size_t layer, Kind kind) const {
        const std::int64_t columns = kind == Kind::key     ? kv_heads * head_dim
                                     : kind == Kind::value ? kv_heads * value_dim
                                                           : heads() * head_dim;
        std::vector<float> x;
        x.reserve(count * static_cast<std::size_t>(columns));
        for (std::size_t t = first; t < first + count; ++t) {
            std::uint64_t state = (tokens[t] * 4 + static_cast<std::uint64_t>(kind)) * 64 + layer;
            for (std::int64_t i = 0; i < columns; ++i) {  // splitmix64
                std::uint64_t z = state += 0x9E3779B97F4A7C15U;
                z = (z ^ z >> 30U) * 0xBF58476D1CE4E5B9U;
                z = (z ^ z >> 27U) * 0x94D049BB133111EBU;
                x.push_back(static_cast<float>((z ^ z >> 31U) >> 40U) * 0x1p-23F - 1.0F);
            }
        }
        return x;
    }

    void append(Context& context, KvCache& cache, const std::vector<std::uint64_t>& tokens, std::size_t first,
                std::size_t count, std::size_t layer) const {
        const std::vector<float> key = rows(tokens, first, count, layer, Kind::key);
        const std::vector<float> value = rows(tokens, first, count, layer, Kind::value);
        const auto n = static_cast<std::int64_t>(count);
        cache.append(context, layer,
                     {key.data(), DType::f32, {kv_heads, n, head_dim}, {head_dim, kv_heads * head_dim, 1}},
                     {value.data(), DType::f32, {kv_heads, n, value_dim}, {value_dim, kv_heads * value_dim, 1}});
    }

    /// Output and lse of the last `count` tokens' queries over what the cache holds.
    std::vector<float> attend(Context& context, const KvCache& cache, const std::vector<std::uint64_t>& tokens,
                              std::size_t count, std::size_t layer, const AttentionOptions& options = {}) const {
        const std::vector<float> query = rows(tokens, tokens.size() - count, count, layer, Kind::query);
        const auto n = static_cast<std::int64_t>(count);
        std::vector<float> out(static_cast<std::size_t>(n * heads() * (value_dim + 1)), -7.0F);
        const CachedQuery q = cached(query.data(), cache, n, layer, out.data());
        headlong::attend(context, std::span(&q, 1), options);
        return out;
    }

    /// A query over `out`: outputs [n][heads][value_dim], then lse [n][heads].
    CachedQuery cached(const float* query, const KvCache& cache, std::int64_t n, std::size_t layer, float* out) const {
        return {.query = {query, DType::f32, {heads(), n, head_dim}, {head_dim, heads() * head_dim, 1}},
                .cache = &cache,
                .layer = layer,
                .output = {out, DType::f32, {heads(), n, value_dim}, {value_dim, heads() * value_dim, 1}},
                .lse = {out + n * heads() * value_dim, DType::f32, {heads(), n}, {1, heads()}}};
    }
};

}  // namespace headlong::test
