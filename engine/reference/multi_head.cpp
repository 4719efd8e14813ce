#include "engine/reference/multi_head.hpp"

#include <cstddef>
#include <string>

#include <headlong/error.hpp>

namespace headlong::reference {

namespace {

void require(bool condition, const char* what) {
    if (!condition) throw InvalidArgument(std::string("reference multi_head: ") + what);
}

// [length, heads * dim] -> [1, heads, length, dim]
Tensor split_heads(const Tensor& x, std::int64_t heads) {
    const std::int64_t length = x.extents[0];
    const std::int64_t dim = x.extents[1] / heads;
    Tensor result({1, heads, length, dim});
    for (std::int64_t t = 0; t < length; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
            for (std::int64_t d = 0; d < dim; ++d) result.at(0, h, t, d) = x.at(t, h * dim + d);
        }
    }
    return result;
}

// [1, heads, length, dim] -> [length, heads * dim]
Tensor concatenate_heads(const Tensor& x) {
    const std::int64_t heads = x.extents[1];
    const std::int64_t length = x.extents[2];
    const std::int64_t dim = x.extents[3];
    Tensor result({length, heads * dim});
    for (std::int64_t t = 0; t < length; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
            for (std::int64_t d = 0; d < dim; ++d) result.at(t, h * dim + d) = x.at(0, h, t, d);
        }
    }
    return result;
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
    require(x.rank() == 2 && weight.rank() == 2 && x.extents[1] == weight.extents[0], "x and a weight do not fit");
    const std::int64_t length = x.extents[0];
    const std::int64_t inputs = weight.extents[0];
    const std::int64_t outputs = weight.extents[1];
    require(bias.absent() || bias.extents == std::vector<std::int64_t>{outputs}, "a bias does not fit its weight");
    Tensor y({length, outputs});
    for (std::int64_t t = 0; t < length; ++t) {
        for (std::int64_t c = 0; c < outputs; ++c) {
            double sum = bias.absent() ? 0.0 : bias.at(c);
            for (std::int64_t k = 0; k < inputs; ++k) sum += x.at(t, k) * weight.at(k, c);
            y.at(t, c) = sum;
        }
    }
    return y;
}

MultiHeadResult multi_head(const Tensor& x, const MultiHeadWeights& weights, std::int64_t heads, std::int64_t kv_heads,
                           const AttentionOptions& options) {
    if (kv_heads == 0) kv_heads = heads;
    require(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
    require(weights.query.rank() == 2 && weights.query.extents[1] % heads == 0,
            "query outputs do not split into heads");
    require(weights.key.rank() == 2 && weights.key.extents[1] % kv_heads == 0, "key outputs do not split into heads");
    require(weights.value.rank() == 2 && weights.value.extents[1] % kv_heads == 0,
            "value outputs do not split into heads");

    MultiHeadResult result;
    const Tensor queries = split_heads(linear(x, weights.query, weights.query_bias), heads);
    result.keys = split_heads(linear(x, weights.key, weights.key_bias), kv_heads);
    result.values = split_heads(linear(x, weights.value, weights.value_bias), kv_heads);
    result.attention = attention(queries, result.keys, result.values, options);
    result.y = linear(concatenate_heads(result.attention.output), weights.output, weights.output_bias);
    return result;
}

}  // namespace headlong::reference
