// What a cache does to keys before it quantises them: the Hadamard transform and the centre. Scores must be those of
// the keys as they were, and outliers must cost less.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/context_impl.hpp"
#include "engine/reference/attention.hpp"
#include "engine/reference/tensor.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"

namespace headlong::test {
namespace {

using Floats = std::vector<float>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

double root_mean_square(const std::vector<double>& x) {
    double sum = 0.0;
    for (const double each : x) sum += each * each;
    return std::sqrt(sum / static_cast<double>(std::max<std::size_t>(x.size(), 1)));
}

struct Transform {
    bool centred;
    bool hadamard;
};
constexpr Transform kTransforms[] = {{false, false}, {true, false}, {false, true}, {true, true}};

/// Rows, and caches of them.
struct Rows {
    std::int64_t kv_heads = 2, group = 3, head_dim = 64, value_dim = 24, keys = 150, queries = 5;
    KvTypes types{KvType::int8, KvType::int8};
    Floats key, value, query, centre;

    /// Keys have a mean of their own in every element: that of some elements is large.
    void fill(Random& random) {
        const auto numbers = [&](std::int64_t count) {
            Floats x(size(count));
            for (float& each : x) each = static_cast<float>(random.uniform(-1.0, 1.0));
            return x;
        };
        centre = numbers(kv_heads * head_dim);
        for (std::size_t i = 0; i < centre.size(); i += 7) centre[i] *= 20.0F;
        key = numbers(kv_heads * keys * head_dim);
        for (std::int64_t h = 0; h < kv_heads; ++h) {
            for (std::int64_t i = 0; i < keys * head_dim; ++i) {
                key[size(h * keys * head_dim + i)] += centre[size(h * head_dim + i % head_dim)];
            }
        }
        value = numbers(kv_heads * keys * value_dim);
        query = numbers(kv_heads * group * queries * head_dim);
    }

    KvCacheOptions options(const Transform& transform) const {
        KvCacheOptions options;
        options.shape = {.kv_heads = kv_heads,
                         .head_dim = head_dim,
                         .value_dim = value_dim,
                         .key_type = types.keys,
                         .value_type = types.values};
        if (transform.centred) options.key_centre = centre;
        options.hadamard_keys = transform.hadamard;
        return options;
    }

    InputTensor<3> part(const Floats& data, std::int64_t dim, std::int64_t first, std::int64_t count) const {
        return {data.data() + first * dim, DType::f32, {kv_heads, count, dim}, {keys * dim, dim, 1}};
    }

    void append(Context& context, KvCache& cache, std::int64_t portion) const {
        for (std::int64_t first = cache.length(); first < keys; first += portion) {
            const std::int64_t count = std::min(portion, keys - first);
            cache.append(context, 0, part(key, head_dim, first, count), part(value, value_dim, first, count));
        }
    }

    struct Result {
        Floats output, lse;
        friend bool operator==(const Result& a, const Result& b) {
            return std::memcmp(a.output.data(), b.output.data(), a.output.size() * sizeof(float)) == 0 &&
                   std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
        }
    };
    Result attend(Context& context, const KvCache& cache, const AttentionOptions& options) const {
        const std::int64_t heads = kv_heads * group;
        Result result{Floats(size(heads * queries * value_dim)), Floats(size(heads * queries))};
        const CachedQuery call{.query = InputTensor<3>::dense(query.data(), {heads, queries, head_dim}),
                               .cache = &cache,
                               .layer = 0,
                               .output = OutputTensor<3>::dense(result.output.data(), {heads, queries, value_dim}),
                               .lse = OutputTensor<2>::dense(result.lse.data(), {heads, queries}),
                               .mask = {}};
        headlong::attend(context, std::span(&call, 1), options);
        return result;
    }

    /// By the reference, from these keys and values.
    reference::AttentionResult expected(const Floats& k, const Floats& v, const AttentionOptions& options) const {
        return reference::attention(
            reference::widen(InputTensor<4>::dense(query.data(), {1, kv_heads * group, queries, head_dim})),
            reference::widen(InputTensor<4>::dense(k.data(), {1, kv_heads, keys, head_dim})),
            reference::widen(InputTensor<4>::dense(v.data(), {1, kv_heads, keys, value_dim})),
            reference::widen(options, true));
    }

    void read_back(const KvCache& cache, Floats& k, Floats& v) const {
        k.assign(key.size(), 0.0F);
        v.assign(value.size(), 0.0F);
        cache.read_back(0, 0, OutputTensor<3>::dense(k.data(), {kv_heads, keys, head_dim}),
                        OutputTensor<3>::dense(v.data(), {kv_heads, keys, value_dim}));
    }
};

/// Within SEMANTICS' bounds for codes of what the cache says that it holds. Scores of the transformed parts are what is
/// rounded; in the original ones they may cancel, hence `terms`.
void expect_near(const Rows::Result& got, const reference::AttentionResult& want) {
    const reference::CodesTolerance bound = reference::codes_output_tolerance(want);
    const double lse_bound = reference::codes_lse_tolerance(want.magnitudes);
    std::vector<double> errors;
    for (std::size_t i = 0; i < got.output.size(); ++i) {
        errors.push_back(static_cast<double>(got.output[i]) - want.output.values[i]);
        EXPECT_LE(std::abs(errors.back()), bound.element) << i;
    }
    EXPECT_LE(root_mean_square(errors), bound.root_mean_square);
    for (std::size_t i = 0; i < got.lse.size(); ++i) {
        EXPECT_NEAR(static_cast<double>(got.lse[i]), want.lse.values[i], lse_bound) << i;
    }
}

TEST(KeyTransformTest, HadamardIsItsOwnInverseAndTheSameOnEverySet) {
    Random random(seed_or(110));
    HEADLONG_TRACE_SEED(random);
    for (const std::size_t columns : {1U, 2U, 3U, 6U, 8U, 15U, 16U, 40U, 64U, 80U, 96U, 128U, 203U, 256U}) {
        const std::size_t block = columns & (~columns + 1);
        const std::size_t stride = columns + 5;
        Floats rows(3 * stride);
        for (float& x : rows) x = static_cast<float>(random.uniform(-2.0, 2.0));
        Floats first;
        HEADLONG_FOR_EACH_ISA(isa) {
            const std::unique_ptr<Context> context = make_context(isa);
            const kernels::KernelTable& table = context->impl().kernels;
            Floats turned = rows;
            table.hadamard({turned.data(), stride, 3, columns});
            for (std::size_t r = 0; r < 3; ++r) {
                for (std::size_t c = 0; c < stride; ++c) {
                    if (c >= columns) {
                        ASSERT_EQ(turned[r * stride + c], rows[r * stride + c]) << "beyond the row";
                        continue;
                    }
                    double sum = 0.0;
                    const std::size_t begin = c / block * block;
                    for (std::size_t i = begin; i < begin + block; ++i) {
                        const double sign = std::popcount((i - begin) & (c - begin)) % 2 == 0 ? 1.0 : -1.0;
                        sum += sign * static_cast<double>(rows[r * stride + i]);
                    }
                    ASSERT_NEAR(turned[r * stride + c], sum / std::sqrt(static_cast<double>(block)), 1e-5);
                }
            }
            if (first.empty()) first = turned;
            ASSERT_EQ(std::memcmp(first.data(), turned.data(), first.size() * sizeof(float)), 0);
            table.hadamard({turned.data(), stride, 3, columns});
            for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_NEAR(turned[i], rows[i], 1e-5);
            Floats large(columns, 1e37F);  // sums of what is not yet scaled would not be finite
            table.hadamard({large.data(), columns, 1, columns});
            for (const float x : large) ASSERT_TRUE(std::isfinite(x));
        }
    }
}

TEST(KeyTransformTest, ScoresAreThoseOfTheKeysThatAreHeld) {
    Random random(seed_or(111));
    HEADLONG_TRACE_SEED(random);
    std::vector<AttentionOptions> features(4);
    features[1].softcap = 3.0F;
    const Floats sinks(6, 0.5F);
    features[2].sink_logits = sinks;
    features[2].window_left = 70;
    const Floats slopes = alibi_slopes_for(6);
    features[3].alibi_slopes = slopes;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const std::unique_ptr<Context> context = make_context(isa);
        for (const KvTypes types : {KvTypes{KvType::int8, KvType::int8}, KvTypes{KvType::int4, KvType::f16}}) {
            for (const std::int64_t head_dim : {1, 15, 64, 80, 96}) {
                Rows rows;
                rows.types = types;
                rows.head_dim = head_dim;
                rows.fill(random);
                for (const Transform& transform : kTransforms) {
                    KvCache cache(rows.options(transform));
                    rows.append(*context, cache, 1 + random.integer(1, 90));
                    Floats k, v;
                    rows.read_back(cache, k, v);
                    for (const AttentionOptions& options : features) {
                        SCOPED_TRACE(std::string(to_string(types.keys)) + " dim " + std::to_string(head_dim) +
                                     (transform.centred ? " centred" : "") + (transform.hadamard ? " turned" : ""));
                        expect_near(rows.attend(*context, cache, options), rows.expected(k, v, options));
                    }
                }
            }
        }
    }
}

TEST(KeyTransformTest, OutliersCostLess) {
    Random random(seed_or(112));
    HEADLONG_TRACE_SEED(random);
    Rows rows;
    rows.types = {KvType::int4, KvType::f32};
    rows.fill(random);
    const std::unique_ptr<Context> context = make_context(available_isas().back());
    std::vector<double> of_keys;
    for (const Transform& transform : kTransforms) {
        KvCache cache(rows.options(transform));
        rows.append(*context, cache, rows.keys);
        Floats k, v;
        rows.read_back(cache, k, v);
        std::vector<double> errors;
        for (std::size_t i = 0; i < k.size(); ++i) errors.push_back(static_cast<double>(k[i]) - rows.key[i]);
        of_keys.push_back(root_mean_square(errors));
    }
    EXPECT_LT(of_keys[1], 0.2 * of_keys[0]) << "what all keys share is not quantised";
    EXPECT_LT(of_keys[2], 0.8 * of_keys[0]) << "an outlier is spread";
    EXPECT_LT(of_keys[3], 0.2 * of_keys[0]);
}

TEST(KeyTransformTest, SameBits) {
    Random random(seed_or(113));
    HEADLONG_TRACE_SEED(random);
    Rows rows;
    rows.keys = 600;
    rows.queries = 70;
    rows.fill(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        for (const Transform& transform : kTransforms) {
            const std::unique_ptr<Context> one = make_context(isa);
            KvCache whole(rows.options(transform));
            rows.append(*one, whole, rows.keys);
            const Rows::Result want = rows.attend(*one, whole, {});
            const std::unique_ptr<Context> five = make_context(isa, 5);
            KvCache parts(rows.options(transform));
            rows.append(*five, parts, 7);
            EXPECT_TRUE(rows.attend(*five, parts, {}) == want);
            // the last query alone
            Rows last = rows;
            last.queries = 1;
            for (std::int64_t h = 0; h < rows.kv_heads * rows.group; ++h) {
                std::copy_n(rows.query.data() + ((h + 1) * rows.queries - 1) * rows.head_dim, rows.head_dim,
                            last.query.data() + h * rows.head_dim);
            }
            const Rows::Result alone = last.attend(*one, whole, {});
            for (std::int64_t h = 0; h < rows.kv_heads * rows.group; ++h) {
                EXPECT_EQ(std::memcmp(alone.output.data() + h * rows.value_dim,
                                      want.output.data() + ((h + 1) * rows.queries - 1) * rows.value_dim,
                                      size(rows.value_dim) * sizeof(float)),
                          0);
            }
        }
    }
}

TEST(KeyTransformTest, RotatedKeysAreTransformedAfterwards) {
    Random random(seed_or(114));
    HEADLONG_TRACE_SEED(random);
    Rows rows;
    rows.types = {KvType::int8, KvType::f32};
    rows.fill(random);
    const std::unique_ptr<Context> context = make_context(available_isas().back());
    for (const Transform& transform : kTransforms) {
        KvCacheOptions options = rows.options(transform);
        options.rotary = Rotary({.head_dim = rows.head_dim});
        KvCache cache(options);
        rows.append(*context, cache, 33);
        // read_back gives rotated keys: their distance from the rotated originals is that of quantising
        KvCacheOptions exact = rows.options({false, false});
        exact.shape.key_type = KvType::f32;
        exact.rotary = options.rotary;
        KvCache plain(exact);
        rows.append(*context, plain, rows.keys);
        Floats k, v, want_k;
        rows.read_back(plain, want_k, v);
        rows.read_back(cache, k, v);
        float largest = 0.0F;
        for (const float x : want_k) largest = std::max(largest, std::abs(x));
        for (std::size_t i = 0; i < k.size(); ++i) {
            ASSERT_NEAR(k[i], want_k[i], 3.0F * largest / 127.0F) << i;
        }
        const Rows::Result got = rows.attend(*context, cache, {});
        const Rows::Result want = rows.attend(*context, plain, {});
        for (std::size_t i = 0; i < got.output.size(); ++i) EXPECT_NEAR(got.output[i], want.output[i], 0.15) << i;
    }
}

// A layer that holds nothing has no blocks, and no room was made for what a centre adds.
TEST(KeyTransformTest, EmptyCaches) {
    Random random(seed_or(115));
    Rows rows;
    rows.fill(random);
    for (const std::size_t threads : {1U, 3U}) {
        const std::unique_ptr<Context> context = make_context(available_isas().back(), threads);
        for (const Transform& transform : kTransforms) {
            const KvCache cache(rows.options(transform));
            const Rows::Result got = rows.attend(*context, cache, {});
            for (const float x : got.output) EXPECT_EQ(x, 0.0F);
            for (const float x : got.lse) EXPECT_EQ(x, -std::numeric_limits<float>::infinity());
        }
    }
}

TEST(KeyTransformTest, BadOptionsAreNamed) {
    Random random(seed_or(116));
    Rows rows;
    rows.fill(random);
    const auto refused = [](const KvCacheOptions& options) { return refusal([&] { KvCache cache(options); }); };
    KvCacheOptions options = rows.options({true, false});
    options.shape.key_type = KvType::f16;
    EXPECT_TRUE(says(refused(options), "key_centre is given and keys are f16; allowed: int8, int4"));
    options.key_centre = {};
    options.hadamard_keys = true;
    EXPECT_TRUE(says(refused(options), "hadamard_keys is true and keys are f16; allowed: int8, int4"));
    options = rows.options({true, true});
    options.key_centre = options.key_centre.first(5);
    EXPECT_TRUE(says(refused(options), "key_centre has 5 elements; it must have kv_heads x head_dim, 128"));
    rows.centre[3] = std::numeric_limits<float>::infinity();
    EXPECT_TRUE(says(refused(rows.options({true, true})), "key_centre[3] is inf; it must be finite"));
}

}  // namespace
}  // namespace headlong::test
