#include "tools/cases/multi_head_case.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <headlong/kv_cache.hpp>
#include <headlong/multi_head_attention.hpp>

#include "engine/reference/attention.hpp"
#include "engine/reference/multi_head.hpp"
#include "engine/reference/quantise.hpp"
#include "tools/cases/timing.hpp"

namespace headlong::tools {
namespace {

/// Everything that a case says, checked.
struct Problem {
    std::int64_t length = 0, d_model = 0, heads = 0, kv_heads = 0, head_dim = 0;
    bool causal = false;
    std::vector<float> x, query, key, value, output;
    std::vector<double> y;
    Tolerance tolerance;
};

/// Reads a matrix of floats. The layer computes in f32: f64 is rounded.
std::vector<float> matrix(const CaseFile& file, const char* name) {
    const FileTensor& tensor = file.at(name);
    if (tensor.shape.size() != 2) {
        file.fail(fmt::format("tensor '{}' is {}, it must have 2 dimensions", name, describe(tensor)));
    }
    switch (tensor.type) {
        case FileType::f32:
        case FileType::f16:
        case FileType::bf16:
        case FileType::f64:
            break;
        default:
            file.fail(fmt::format("tensor '{}' is {}, its type must be F32, F16, BF16 or F64", name, describe(tensor)));
    }
    return to_floats(tensor);
}

std::int64_t positive(const CaseFile& file, const char* key, std::int64_t usual) {
    const std::int64_t value = file.integer(key).value_or(usual);
    if (value < 1) file.fail(fmt::format("metadata '{}' is {}, at least 1 is allowed", key, value));
    return value;
}

Problem read(const CaseFile& file) {
    Problem p;
    if (!file.text("heads")) file.fail("metadata 'heads' is missing");
    p.heads = positive(file, "heads", 1);
    p.kv_heads = positive(file, "kv_heads", p.heads);
    p.causal = file.integer("causal").value_or(0) != 0;
    p.x = matrix(file, "x");
    p.query = matrix(file, "Wq");
    p.key = matrix(file, "Wk");
    p.value = matrix(file, "Wv");
    p.output = matrix(file, "Wo");
    matrix(file, "y");
    p.length = file.at("x").shape[0];
    p.d_model = file.at("x").shape[1];
    const std::int64_t query_width = file.at("Wq").shape[1];
    if (p.d_model == 0) file.fail(fmt::format("tensor 'x' is {}, it must have columns", describe(file.at("x"))));
    if (query_width % p.heads != 0 || query_width == 0) {
        file.fail(fmt::format("tensor 'Wq' is {}, its columns must be a multiple of the {} heads",
                              describe(file.at("Wq")), p.heads));
    }
    p.head_dim = query_width / p.heads;
    if (p.heads % p.kv_heads != 0) {
        file.fail(fmt::format("metadata 'kv_heads' is {}, it must divide the {} heads", p.kv_heads, p.heads));
    }
    file.expect_shape(file.at("Wq"), {p.d_model, query_width});
    file.expect_shape(file.at("Wk"), {p.d_model, p.kv_heads * p.head_dim});
    file.expect_shape(file.at("Wv"), {p.d_model, p.kv_heads * p.head_dim});
    file.expect_shape(file.at("Wo"), {query_width, p.d_model});
    file.expect_shape(file.at("y"), {p.length, p.d_model});
    p.y = to_doubles(file.at("y"));
    p.tolerance = file.tolerance(file.at("y"));
    return p;
}

/// The layer of one case, with its weights packed for one context.
class Runner {
  public:
    Runner(const Problem& p, Context& context) : p_(p), context_(context), layer_(make_layer(p, context)) {}

    /// One call without a cache.
    void plain(const std::vector<float>& x, std::vector<float>& y) {
        AttentionOptions options;
        options.causal = p_.causal;
        const Extents<3> extents{1, p_.length, p_.d_model};
        layer_.forward(context_, InputTensor<3>::dense(x.data(), extents), OutputTensor<3>::dense(y.data(), extents),
                       options);
    }

    /// Through a cache, `chunk` tokens at a time; all at once where they see each other.
    KvCache cached(std::int64_t chunk, const KvTypes& types, std::vector<float>& y) {
        KvCacheOptions options;
        options.shape = {.kv_heads = p_.kv_heads,
                         .head_dim = p_.head_dim,
                         .value_dim = p_.head_dim,
                         .key_type = types.keys,
                         .value_type = types.values};
        options.capacity = p_.length;
        KvCache cache(options);
        AttentionOptions attention;
        attention.causal = p_.causal;
        for (std::int64_t first = 0; first < p_.length; first += chunk) {
            const Extents<2> extents{std::min(chunk, p_.length - first), p_.d_model};
            layer_.forward(context_, InputTensor<2>::dense(p_.x.data() + first * p_.d_model, extents), cache, 0,
                           OutputTensor<2>::dense(y.data() + first * p_.d_model, extents), attention);
        }
        return cache;
    }

  private:
    static MultiHeadAttention make_layer(const Problem& p, Context& context) {
        MultiHeadAttentionWeights weights;
        const std::int64_t query_width = p.heads * p.head_dim;
        const std::int64_t kv_width = p.kv_heads * p.head_dim;
        weights.query = InputTensor<2>::dense(p.query.data(), {p.d_model, query_width});
        weights.key = InputTensor<2>::dense(p.key.data(), {p.d_model, kv_width});
        weights.value = InputTensor<2>::dense(p.value.data(), {p.d_model, kv_width});
        weights.output = InputTensor<2>::dense(p.output.data(), {query_width, p.d_model});
        MultiHeadAttentionOptions options;
        options.heads = p.heads;
        options.kv_heads = p.kv_heads;
        return MultiHeadAttention(context, options, weights);
    }

    const Problem& p_;
    Context& context_;
    MultiHeadAttention layer_;
};

double flops_of(const Problem& p) {
    const double length = static_cast<double>(p.length);
    const double pairs = p.causal ? length * (length + 1.0) / 2.0 : length * length;
    const double widths = static_cast<double>(2 * p.heads * p.head_dim + 2 * p.kv_heads * p.head_dim);
    return 2.0 * length * static_cast<double>(p.d_model) * widths +
           4.0 * static_cast<double>(p.heads * p.head_dim) * pairs;
}

/// Token by token, and in chunks that end inside panels, blocks and beside them.
std::vector<std::int64_t> chunk_lengths(std::int64_t length) {
    std::vector<std::int64_t> chunks{1};
    for (const std::int64_t chunk : {(length + 1) / 2, std::int64_t{7}, std::int64_t{64}}) {
        if (chunk > 1 && chunk < length && std::ranges::count(chunks, chunk) == 0) chunks.push_back(chunk);
    }
    return chunks;
}

/// What must come out of a cache, and how near.
struct Wanted {
    std::vector<double> y;
    Tolerance tolerance;
};

/// y by the reference, of the keys and values that a cache holds.
///
/// What integers add to the layer's float bound: attention's rows A may be off by E, of root mean square e, and y by
/// E Wo. Roundings do not follow the columns of Wo, so a column adds them up as it does independent numbers: to e times
/// its length, over all columns to a root mean square of e times |Wo| / sqrt(d_model). (If every error pointed along
/// its column, it would be sqrt(inputs) times as much: that would be a bias, and is not let pass.) One error may be ten
/// times that, as in attention.
Wanted wanted_of_stored(const Problem& p, const KvCache& cache) {
    const auto dims = static_cast<std::size_t>(p.kv_heads * p.length * p.head_dim);
    std::vector<float> keys(dims);
    std::vector<float> values(dims);
    const Extents<3> rows{p.kv_heads, p.length, p.head_dim};
    cache.read_back(0, 0, OutputTensor<3>::dense(keys.data(), rows), OutputTensor<3>::dense(values.data(), rows));
    const auto matrix = [](const std::vector<float>& elements, std::int64_t inputs, std::int64_t outputs) {
        return reference::Tensor({inputs, outputs}, {elements.begin(), elements.end()});
    };
    const std::int64_t width = p.heads * p.head_dim;
    const reference::Tensor projected =
        reference::linear(matrix(p.x, p.length, p.d_model), matrix(p.query, p.d_model, width));
    reference::Tensor query({1, p.heads, p.length, p.head_dim});
    for (std::int64_t h = 0; h < p.heads; ++h) {
        for (std::int64_t t = 0; t < p.length; ++t) {
            for (std::int64_t d = 0; d < p.head_dim; ++d) query.at(0, h, t, d) = projected.at(t, h * p.head_dim + d);
        }
    }
    reference::AttentionOptions options;
    options.causal = p.causal;
    const reference::AttentionResult attended = reference::attention(
        query, reference::Tensor({1, p.kv_heads, p.length, p.head_dim}, {keys.begin(), keys.end()}),
        reference::Tensor({1, p.kv_heads, p.length, p.head_dim}, {values.begin(), values.end()}), options);
    reference::Tensor heads({p.length, width});
    for (std::int64_t h = 0; h < p.heads; ++h) {
        for (std::int64_t t = 0; t < p.length; ++t) {
            for (std::int64_t d = 0; d < p.head_dim; ++d) {
                heads.at(t, h * p.head_dim + d) = attended.output.at(0, h, t, d);
            }
        }
    }
    const reference::Tensor weight = matrix(p.output, width, p.d_model);
    Wanted wanted{reference::linear(heads, weight).values, p.tolerance};
    const KvTypes types = cache.shape().types();
    if (reference::has_codes(types.keys) || reference::has_codes(types.values)) {
        // the root mean square of a column's length
        const double length = reference::root_mean_square(weight.values) * std::sqrt(static_cast<double>(width));
        const reference::CodesTolerance codes = reference::codes_output_tolerance(attended);
        wanted.tolerance.rms = wanted.tolerance.absolute + codes.root_mean_square * length;
        wanted.tolerance.absolute += codes.element * length;
    }
    return wanted;
}

/// Through caches of other types than f32 alone.
Outcome run_stored(const Problem& p, Context& context, const KvTypes& types) {
    if (p.length == 0) return skipped("needs keys: there is nothing to store");
    const std::array shape{p.length, p.d_model};
    Comparison comparison;
    Runner runner(p, context);
    std::vector<std::int64_t> chunks = p.causal ? chunk_lengths(p.length) : std::vector<std::int64_t>{};
    if (std::ranges::count(chunks, p.length) == 0) chunks.push_back(p.length);
    std::vector<float> y(p.y.size());
    for (const std::int64_t chunk : chunks) {
        std::ranges::fill(y, std::numeric_limits<float>::quiet_NaN());
        const KvCache cache = runner.cached(chunk, types, y);
        const Wanted wanted = wanted_of_stored(p, cache);
        comparison.compare("y", chunk == 1 ? "token by token" : fmt::format("in chunks of {}", chunk), shape,
                           std::vector<double>(y.begin(), y.end()), wanted.y, wanted.tolerance);
    }
    Outcome outcome = comparison.outcome();
    outcome.seconds = median_seconds([&] { static_cast<void>(runner.cached(p.length, types, y)); });
    outcome.flops = flops_of(p);
    return outcome;
}

Outcome run(const Problem& p, Context& context) {
    const float nothing = std::numeric_limits<float>::quiet_NaN();
    const std::array shape{p.length, p.d_model};
    Comparison comparison;
    Runner runner(p, context);
    const auto compare = [&](const std::string& path, const std::vector<float>& y) {
        comparison.compare("y", path, shape, std::vector<double>(y.begin(), y.end()), p.y, p.tolerance);
    };

    std::vector<float> plain(p.y.size(), nothing);
    runner.plain(p.x, plain);
    compare("plain call", plain);
    if (p.causal && p.length > 0) {
        for (const std::int64_t chunk : chunk_lengths(p.length)) {
            std::vector<float> y(p.y.size(), nothing);
            runner.cached(chunk, {}, y);
            compare(chunk == 1 ? "token by token" : fmt::format("in chunks of {}", chunk), y);
        }
        // what the last token is must not matter to the rows before it
        std::vector<float> x = p.x;
        const auto last = static_cast<std::size_t>((p.length - 1) * p.d_model);
        for (std::size_t i = last; i < x.size(); ++i) x[i] = 1.0F - 3.0F * x[i];
        std::vector<float> y(p.y.size(), nothing);
        runner.plain(x, y);
        if (last != 0 && std::memcmp(y.data(), plain.data(), last * sizeof(float)) != 0) {
            comparison.fail("rows before the last one changed with the last token");
        }
    }

    Outcome outcome = comparison.outcome();
    outcome.seconds = median_seconds([&] { runner.plain(p.x, plain); });
    outcome.flops = flops_of(p);
    return outcome;
}

}  // namespace

Case multi_head_case(std::string name, const CaseFile& file) {
    const auto problem = std::make_shared<const Problem>(read(file));
    return {std::move(name), [problem](Context& context, const KvTypes& types) {
                return types == KvTypes{} ? run(*problem, context) : run_stored(*problem, context, types);
            }};
}

}  // namespace headlong::tools
