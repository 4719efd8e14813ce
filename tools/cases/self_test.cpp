#include "tools/cases/self_test.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <headlong/attention.hpp>
#include <headlong/kv_cache.hpp>

#include "engine/reference/attention.hpp"
#include "engine/reference/quantise.hpp"
#include "tools/cases/comparison.hpp"
#include "tools/cases/timing.hpp"

namespace headlong::tools {
namespace {

struct Shape {
    std::int64_t batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim;
    bool causal;

    std::int64_t pairs() const noexcept { return batch * heads * q_len * kv_len; }
    std::int64_t multiply_adds() const noexcept { return pairs() * (head_dim + value_dim); }
};

/// What the edges of panels (16), blocks (64) and spans (512) do, always.
constexpr std::array kShapes{
    Shape{1, 1, 1, 1, 1, 1, 1, true},       Shape{1, 4, 4, 1, 1025, 64, 64, true},
    Shape{2, 6, 2, 3, 513, 40, 24, true},   Shape{1, 2, 1, 130, 130, 64, 64, true},
    Shape{3, 3, 3, 17, 64, 128, 80, false}, Shape{1, 7, 1, 65, 33, 15, 21, true},
    Shape{1, 1, 1, 9, 1999, 16, 16, false}, Shape{1, 71, 1, 2, 129, 8, 8, true},
    Shape{1, 2, 2, 5, 70, 256, 192, true},
};
constexpr std::size_t kRandomShapes = 15;
constexpr std::int64_t kMostMultiplyAdds = 4'000'000;  // the reference takes some milliseconds

/// Standard distributions differ between libraries; these do not.
class Random {
  public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}

    std::int64_t integer(std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
    }
    /// Uniform, mean 0, variance 1.
    float number() {
        return static_cast<float>((static_cast<double>(engine_() >> 11) * 0x1p-53 - 0.5) * std::sqrt(12.0));
    }
    std::vector<float> numbers(std::int64_t count) {
        std::vector<float> values(static_cast<std::size_t>(count));
        for (float& value : values) value = number();
        return values;
    }

  private:
    std::mt19937_64 engine_;
};

Shape random_shape(Random& random) {
    static constexpr std::array<std::int64_t, 14> lengths{1, 2, 5, 15, 16, 17, 33, 63, 65, 127, 257, 511, 700, 1177};
    static constexpr std::array<std::int64_t, 10> dims{1, 2, 8, 15, 21, 40, 64, 72, 96, 128};
    static constexpr std::array<std::array<std::int64_t, 2>, 7> heads{
        {{1, 1}, {5, 1}, {6, 2}, {9, 3}, {14, 2}, {16, 4}, {3, 3}}};
    const auto pick = [&](const auto& choices) {
        return choices[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(choices.size()) - 1))];
    };
    while (true) {
        const auto group = pick(heads);
        const Shape shape{random.integer(1, 3), group[0],   group[1],   pick(lengths),
                          pick(lengths),        pick(dims), pick(dims), random.integer(0, 2) != 0};
        if (shape.multiply_adds() <= kMostMultiplyAdds) return shape;
    }
}

/// One shape with its inputs, and what must come of them.
class SelfTest {
  public:
    SelfTest(const Shape& shape, std::uint64_t seed, const KvTypes& types)
        : s_(shape),
          seed_(seed),
          types_(types),
          query_extents_{s_.batch, s_.heads, s_.q_len, s_.head_dim},
          key_extents_{s_.batch, s_.kv_heads, s_.kv_len, s_.head_dim},
          value_extents_{s_.batch, s_.kv_heads, s_.kv_len, s_.value_dim},
          output_extents_{s_.batch, s_.heads, s_.q_len, s_.value_dim} {
        Random random(seed);
        query_ = random.numbers(s_.batch * s_.heads * s_.q_len * s_.head_dim);
        key_ = random.numbers(s_.batch * s_.kv_heads * s_.kv_len * s_.head_dim);
        value_ = random.numbers(s_.batch * s_.kv_heads * s_.kv_len * s_.value_dim);
        const std::vector<double> keys = reference::stored_keys(types_.keys, {key_.begin(), key_.end()}, s_.head_dim);
        const std::vector<double> values =
            reference::stored_values(types_.values, {value_.begin(), value_.end()}, s_.value_dim);
        stored_key_.assign(keys.begin(), keys.end());
        stored_value_.assign(values.begin(), values.end());
        expected_ = reference::attention(reference::widen(InputTensor<4>::dense(query_.data(), query_extents_)),
                                         reference::widen(InputTensor<4>::dense(stored_key_.data(), key_extents_)),
                                         reference::widen(InputTensor<4>::dense(stored_value_.data(), value_extents_)),
                                         reference::widen(options()));
    }

    const KvTypes& types() const noexcept { return types_; }

    Outcome run(Context& context) const {
        Comparison comparison;
        std::vector<float> output;
        std::vector<float> lse;
        clear(output, lse);
        const auto plain = [&] {
            attend(context, InputTensor<4>::dense(query_.data(), query_extents_),
                   InputTensor<4>::dense(stored_key_.data(), key_extents_),
                   InputTensor<4>::dense(stored_value_.data(), value_extents_), options(),
                   OutputTensor<4>::dense(output.data(), output_extents_),
                   OutputTensor<3>::dense(lse.data(), {s_.batch, s_.heads, s_.q_len}));
        };
        plain();
        compare("plain call", {}, output, lse, comparison);
        const double seconds = median_seconds(plain);

        clear(output, lse);
        cached(context, output, lse, comparison);
        compare("through a cache", types_, output, lse, comparison);

        Outcome outcome = comparison.outcome();
        outcome.seconds = seconds;
        outcome.flops = 2.0 * visible_pairs() * static_cast<double>(s_.head_dim + s_.value_dim);
        return outcome;
    }

  private:
    AttentionOptions options() const {
        AttentionOptions options;
        options.causal = s_.causal;
        return options;  // bottom-right
    }

    void clear(std::vector<float>& output, std::vector<float>& lse) const {
        output.assign(expected_.output.values.size(), std::numeric_limits<float>::quiet_NaN());
        lse.assign(expected_.lse.values.size(), std::numeric_limits<float>::quiet_NaN());
    }

    /// A cache for each sequence, filled in portions of random length.
    void cached(Context& context, std::vector<float>& output, std::vector<float>& lse, Comparison& comparison) const {
        Random random(seed_ + 1);
        std::vector<KvCache> caches;
        caches.reserve(static_cast<std::size_t>(s_.batch));
        std::vector<CachedQuery> queries;
        for (std::int64_t b = 0; b < s_.batch; ++b) {
            KvCacheOptions cache_options;
            cache_options.shape = {.kv_heads = s_.kv_heads,
                                   .head_dim = s_.head_dim,
                                   .value_dim = s_.value_dim,
                                   .key_type = types_.keys,
                                   .value_type = types_.values};
            KvCache& cache = caches.emplace_back(cache_options);
            for (std::int64_t first = 0; first < s_.kv_len;) {
                const std::int64_t portion = random.integer(1, s_.kv_len - first);
                const auto rows = [&](const std::vector<float>& from, std::int64_t dim) {
                    return InputTensor<3>{from.data() + (b * s_.kv_heads * s_.kv_len + first) * dim,
                                          DType::f32,
                                          {s_.kv_heads, portion, dim},
                                          {s_.kv_len * dim, dim, 1}};
                };
                cache.append(context, 0, rows(key_, s_.head_dim), rows(value_, s_.value_dim));
                first += portion;
            }
            const std::int64_t row = b * s_.heads * s_.q_len;
            CachedQuery each;
            each.query = InputTensor<3>::dense(query_.data() + row * s_.head_dim, {s_.heads, s_.q_len, s_.head_dim});
            each.cache = &cache;
            each.output =
                OutputTensor<3>::dense(output.data() + row * s_.value_dim, {s_.heads, s_.q_len, s_.value_dim});
            each.lse = OutputTensor<2>::dense(lse.data() + row, {s_.heads, s_.q_len});
            queries.push_back(each);
        }
        attend(context, queries, options());
        read_back(caches, comparison);
    }

    /// What caches hold is exactly what was expected of them.
    void read_back(const std::vector<KvCache>& caches, Comparison& comparison) const {
        std::vector<float> keys(key_.size());
        std::vector<float> values(value_.size());
        for (std::size_t b = 0; b < caches.size(); ++b) {
            const std::int64_t row = static_cast<std::int64_t>(b) * s_.kv_heads * s_.kv_len;
            caches[b].read_back(
                0, 0, OutputTensor<3>::dense(keys.data() + row * s_.head_dim, {s_.kv_heads, s_.kv_len, s_.head_dim}),
                OutputTensor<3>::dense(values.data() + row * s_.value_dim, {s_.kv_heads, s_.kv_len, s_.value_dim}));
        }
        const auto with = [&](const char* name, const Extents<4>& extents, const std::vector<float>& got,
                              const std::vector<float>& want) {
            comparison.compare(name, "read back", extents, std::vector<double>(got.begin(), got.end()),
                               std::vector<double>(want.begin(), want.end()), {});
        };
        with("keys", key_extents_, keys, stored_key_);
        with("values", value_extents_, values, stored_value_);
    }

    void compare(const std::string& path, const KvTypes& types, const std::vector<float>& output,
                 const std::vector<float>& lse, Comparison& comparison) const {
        const auto with = [&](const char* name, const std::vector<float>& got, const reference::Tensor& want,
                              const Tolerance& tolerance) {
            comparison.compare(name, path, want.extents, std::vector<double>(got.begin(), got.end()), want.values,
                               tolerance);
        };
        with("output", output, expected_.output, output_tolerance(expected_, types));
        with("lse", lse, expected_.lse, lse_tolerance(expected_.magnitudes, types));
    }

    double visible_pairs() const {
        if (!s_.causal) return static_cast<double>(s_.pairs());
        std::int64_t pairs = 0;
        for (std::int64_t i = 0; i < s_.q_len; ++i)
            pairs += std::clamp<std::int64_t>(i + 1 + s_.kv_len - s_.q_len, 0, s_.kv_len);
        return static_cast<double>(pairs * s_.batch * s_.heads);
    }

    Shape s_;
    std::uint64_t seed_;
    KvTypes types_;
    Extents<4> query_extents_, key_extents_, value_extents_, output_extents_;
    std::vector<float> query_, key_, value_;
    std::vector<float> stored_key_, stored_value_;  ///< as the caches hold them
    reference::AttentionResult expected_;
};

}  // namespace

std::vector<Case> self_test_cases() {
    std::vector<Shape> shapes(kShapes.begin(), kShapes.end());
    Random random(7);
    for (std::size_t i = 0; i < kRandomShapes; ++i) shapes.push_back(random_shape(random));

    std::vector<Case> cases;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        const Shape& s = shapes[i];
        std::string name = fmt::format("self_test b{} h{}/{} q{} kv{} d{}/{}{}", s.batch, s.heads, s.kv_heads, s.q_len,
                                       s.kv_len, s.head_dim, s.value_dim, s.causal ? " causal" : "");
        // made when it is first run, not here: the reference takes most of the time
        auto test = std::make_shared<std::unique_ptr<const SelfTest>>();
        cases.push_back({std::move(name), [test, s, seed = i + 1](Context& context, const KvTypes& types) {
                             if (!*test || (*test)->types() != types) {
                                 *test = std::make_unique<const SelfTest>(s, seed, types);
                             }
                             return (*test)->run(context);
                         }});
    }
    return cases;
}

}  // namespace headlong::tools
