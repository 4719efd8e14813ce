#include "tools/bench/attention_workload.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <fmt/format.h>

#include <headlong/attention.hpp>
#include <headlong/error.hpp>

#include "engine/block_pool.hpp"
#include "engine/reference/attention.hpp"
#include "engine/reference/quantise.hpp"
#include "tools/bench/random_floats.hpp"
#include "tools/measure/lists.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/memory.hpp"

namespace headlong::tools {
namespace {

std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::int64_t sum(const std::vector<std::int64_t>& lengths) {
    std::int64_t total = 0;
    for (const std::int64_t length : lengths) total += length;
    return total;
}

/// Keys [begin, end).
struct Range {
    std::int64_t begin;
    std::int64_t end;
};

/// What query row i of a sequence sees, sinks aside: the last row stands on the last key.
Range seen(const AttentionShape& s, std::size_t sequence, std::int64_t row) noexcept {
    const std::int64_t kv_len = s.kv_lens[sequence];
    const std::int64_t position = row + kv_len - s.q_lens[sequence];
    const std::int64_t window = s.window - s.sink_tokens;
    return {std::max(s.window > 0 ? position - window + 1 : 0, std::min(s.sink_tokens, kv_len)),
            s.causal ? position + 1 : kv_len};
}
/// The sinks that it sees.
Range seen_sinks(const AttentionShape& s, std::size_t sequence, std::int64_t row) noexcept {
    return {0, std::min(s.sink_tokens,
                        s.causal ? row + s.kv_lens[sequence] - s.q_lens[sequence] + 1 : s.kv_lens[sequence])};
}
std::int64_t count(const Range& range) noexcept { return std::max<std::int64_t>(range.end - range.begin, 0); }

/// Caches of such a shape. Throws Unsupported for a type that they do not have.
KvCacheOptions cache_options_of(const AttentionShape& s) {
    KvCacheOptions options;
    options.shape = {.kv_heads = s.kv_heads,
                     .head_dim = s.head_dim,
                     .value_dim = s.value_dim,
                     .key_type = s.kv.keys,
                     .value_type = s.kv.values};
    if (s.ring) {
        options.ring = true;
        options.capacity = s.window;
        options.sink_tokens = s.sink_tokens;
        options.max_chunk = std::max(options.max_chunk, std::ranges::max(s.q_lens));
    }
    check_shape(options.shape);
    return options;
}

/// Whether its rows go through caches: of plain f32 tensors a prefill needs none.
bool has_caches(const AttentionShape& s) { return s.phase != Phase::prefill || s.kv != KvTypes{}; }

AttentionOptions options_of(const AttentionShape& s) {
    AttentionOptions options;
    options.causal = s.causal;
    if (s.window > 0 && !s.ring) options.window_left = window_left_of(s.window);
    return options;
}

/// What is common to both kinds: the sampled check against the reference.
class AttentionWorkload : public Workload {
  public:
    explicit AttentionWorkload(const AttentionShape& shape) : shape_(shape), options_(options_of(shape)) {}

    double flops() const override {
        return 2.0 * static_cast<double>(shape_.heads * (shape_.head_dim + shape_.value_dim)) * visible_pairs(shape_);
    }
    double bytes() const override { return live_kv_bytes(shape_); }

    std::optional<Deviation> check(Context& context) override {
        forget_output();
        run(context);
        Deviation worst;
        Random random(7);
        constexpr int kRows = 6;
        for (int i = 0; i < kRows; ++i) {
            // the first and the last row of all, then rows anywhere
            const std::size_t last = shape_.q_lens.size() - 1;
            const std::size_t sequence = i == 0 ? 0 : i == 1 ? last : random.below(last + 1);
            const std::int64_t q_len = shape_.q_lens[sequence];
            const auto any_row = static_cast<std::int64_t>(random.below(size(q_len)));
            const auto any_head = static_cast<std::int64_t>(random.below(size(shape_.heads)));
            const std::int64_t row = i == 0 ? 0 : i == 1 ? q_len - 1 : any_row;
            const std::int64_t head = i == 0 ? 0 : i == 1 ? shape_.heads - 1 : any_head;
            worst = worse(worst, check_row(sequence, head, row));
        }
        return worst;
    }

  protected:
    /// Overwrites the output, so that nothing of an earlier run can pass for this one's.
    virtual void forget_output() = 0;
    /// Pointers to head_dim and value_dim floats: of the row's query and its output.
    virtual const float* query_row(std::size_t sequence, std::int64_t head, std::int64_t row) const = 0;
    virtual const float* output_row(std::size_t sequence, std::int64_t head, std::int64_t row) const = 0;
    /// Appends keys [rows, head_dim] and values [rows, value_dim] of one head as they are stored.
    virtual void read(std::size_t sequence, std::int64_t kv_head, Range rows, std::vector<double>& keys,
                      std::vector<double>& values) const = 0;

    const AttentionShape shape_;
    const AttentionOptions options_;

  private:
    Deviation check_row(std::size_t sequence, std::int64_t head, std::int64_t row) const {
        // what the row sees, and nothing else
        std::vector<double> keys, values;
        const std::int64_t kv_head = head / (shape_.heads / shape_.kv_heads);
        for (const Range& rows : {seen_sinks(shape_, sequence, row), seen(shape_, sequence, row)}) {
            if (count(rows) > 0) read(sequence, kv_head, rows, keys, values);
        }
        const std::int64_t kv_len = static_cast<std::int64_t>(keys.size()) / shape_.head_dim;
        const float* q = query_row(sequence, head, row);
        const reference::AttentionOptions options;
        const reference::AttentionResult expected = reference::attention(
            reference::Tensor({1, 1, 1, shape_.head_dim}, std::vector<double>(q, q + shape_.head_dim)),
            reference::Tensor({1, 1, kv_len, shape_.head_dim}, std::move(keys)),
            reference::Tensor({1, 1, kv_len, shape_.value_dim}, std::move(values)), options);
        const float* out = output_row(sequence, head, row);
        Deviation worst;
        // of a call the row is what is looked at here
        const reference::CodesTolerance codes = reference::codes_output_tolerance(expected);
        const bool integers = reference::has_codes(shape_.kv.keys) || reference::has_codes(shape_.kv.values);
        const double tolerance = integers ? codes.element : reference::output_tolerance(expected.magnitudes);
        std::vector<double> errors;
        for (std::int64_t d = 0; d < shape_.value_dim; ++d) {
            errors.push_back(std::abs(static_cast<double>(out[d]) - expected.output.values[size(d)]));
            worst = worse(worst, {errors.back(), tolerance});
        }
        const double rms = reference::root_mean_square(errors);
        // both bounds as one: what the largest error may be where the root mean square is what it is
        if (integers && rms > 0.0) {
            worst.tolerance = std::min(worst.tolerance, worst.max_abs_err * codes.root_mean_square / rms);
        }
        return worst;
    }
};

/// Prompts that lie token by token, [rows][heads][dim], the sequences one behind the other.
class Prompts : public AttentionWorkload {
  public:
    explicit Prompts(const AttentionShape& shape) : AttentionWorkload(shape), rows_(sum(shape.q_lens)), offsets_{0} {
        for (const std::int64_t length : shape_.q_lens) offsets_.push_back(offsets_.back() + length);
        Random random(1);
        query_ = random.floats(size(rows_ * shape_.heads * shape_.head_dim), 4.0F);
        key_ = random.floats(size(rows_ * shape_.kv_heads * shape_.head_dim));
        value_ = random.floats(size(rows_ * shape_.kv_heads * shape_.value_dim));
        output_.resize(size(rows_ * shape_.heads * shape_.value_dim));
    }

  protected:
    void forget_output() override { std::ranges::fill(output_, kNaN); }
    const float* query_row(std::size_t sequence, std::int64_t head, std::int64_t row) const override {
        return query_.data() + ((offsets_[sequence] + row) * shape_.heads + head) * shape_.head_dim;
    }
    const float* output_row(std::size_t sequence, std::int64_t head, std::int64_t row) const override {
        return output_.data() + ((offsets_[sequence] + row) * shape_.heads + head) * shape_.value_dim;
    }

    std::int64_t rows_;
    std::vector<std::int64_t> offsets_;  ///< first row of each sequence, and the end
    std::vector<float> query_, key_, value_, output_;
};

/// One call from plain tensors. Keys are packed in the call: that is part of what is timed.
class Prefill final : public Prompts {
  public:
    using Prompts::Prompts;

    void run(Context& context) override {
        const bool equal = std::ranges::count(shape_.q_lens, shape_.q_lens.front()) ==
                           static_cast<std::ptrdiff_t>(shape_.q_lens.size());
        if (equal) {
            const auto batch = static_cast<std::int64_t>(shape_.q_lens.size());
            const std::int64_t length = shape_.q_lens.front();
            const auto extents = [&](std::int64_t heads, std::int64_t dim) {
                return Extents<4>{batch, heads, length, dim};
            };
            const auto strides = [&](std::int64_t heads, std::int64_t dim) {
                return Extents<4>{length * heads * dim, dim, heads * dim, 1};
            };
            const auto input = [&](const std::vector<float>& data, std::int64_t heads, std::int64_t dim) {
                return InputTensor<4>{data.data(), DType::f32, extents(heads, dim), strides(heads, dim)};
            };
            const std::int64_t heads = shape_.heads;
            attend(context, input(query_, heads, shape_.head_dim), input(key_, shape_.kv_heads, shape_.head_dim),
                   input(value_, shape_.kv_heads, shape_.value_dim), options_,
                   OutputTensor<4>{output_.data(), DType::f32, extents(heads, shape_.value_dim),
                                   strides(heads, shape_.value_dim)});
        } else {
            const auto extents = [&](std::int64_t heads, std::int64_t dim) { return Extents<3>{heads, rows_, dim}; };
            const auto strides = [&](std::int64_t heads, std::int64_t dim) { return Extents<3>{dim, heads * dim, 1}; };
            const auto input = [&](const std::vector<float>& data, std::int64_t heads, std::int64_t dim) {
                return InputTensor<3>{data.data(), DType::f32, extents(heads, dim), strides(heads, dim)};
            };
            attend_packed(context, input(query_, shape_.heads, shape_.head_dim),
                          input(key_, shape_.kv_heads, shape_.head_dim),
                          input(value_, shape_.kv_heads, shape_.value_dim), offsets_, offsets_, options_,
                          OutputTensor<3>{output_.data(), DType::f32, extents(shape_.heads, shape_.value_dim),
                                          strides(shape_.heads, shape_.value_dim)});
        }
    }

    std::size_t kv_bytes() const override { return (key_.size() + value_.size()) * sizeof(float); }
    std::size_t walk_bytes() const override { return kv_bytes(); }

  private:
    void read(std::size_t sequence, std::int64_t kv_head, Range rows, std::vector<double>& keys,
              std::vector<double>& values) const override {
        for (std::int64_t row = offsets_[sequence] + rows.begin; row < offsets_[sequence] + rows.end; ++row) {
            const float* k = key_.data() + (row * shape_.kv_heads + kv_head) * shape_.head_dim;
            const float* v = value_.data() + (row * shape_.kv_heads + kv_head) * shape_.value_dim;
            keys.insert(keys.end(), k, k + shape_.head_dim);
            values.insert(values.end(), v, v + shape_.value_dim);
        }
    }
};

/// The rows of one KV head as a cache holds them.
void read_rows(const KvCache& cache, std::size_t layer, std::int64_t kv_head, Range rows, std::vector<double>& keys,
               std::vector<double>& values) {
    const KvShape& shape = cache.shape();
    constexpr std::int64_t kChunk = 512;
    std::vector<float> k(size(shape.kv_heads * kChunk * shape.head_dim));
    std::vector<float> v(size(shape.kv_heads * kChunk * shape.value_dim));
    for (std::int64_t first = rows.begin; first < rows.end; first += kChunk) {
        const std::int64_t count = std::min(kChunk, rows.end - first);
        cache.read_back(layer, first, OutputTensor<3>::dense(k.data(), {shape.kv_heads, count, shape.head_dim}),
                        OutputTensor<3>::dense(v.data(), {shape.kv_heads, count, shape.value_dim}));
        const float* head_keys = k.data() + kv_head * count * shape.head_dim;
        const float* head_values = v.data() + kv_head * count * shape.value_dim;
        keys.insert(keys.end(), head_keys, head_keys + count * shape.head_dim);
        values.insert(values.end(), head_values, head_values + count * shape.value_dim);
    }
}

/// Prompts into empty caches of other types than f32, and attention over them: rounding and packing are part of what is
/// timed. Blocks come from the pools, which have them from the first repetition on.
class CachedPrefill final : public Prompts {
  public:
    CachedPrefill(const AttentionShape& shape, Context& context) : Prompts(shape) {
        KvCacheOptions options = cache_options_of(shape_);
        options.memory = &context.memory();
        for (std::size_t s = 0; s < shape_.q_lens.size(); ++s) caches_.emplace_back(options);
        for (std::size_t s = 0; s < caches_.size(); ++s) {
            calls_.push_back({.query = rows<InputTensor<3>>(query_.data(), s, shape_.heads, shape_.head_dim),
                              .cache = &caches_[s],
                              .layer = 0,
                              .output = rows<OutputTensor<3>>(output_.data(), s, shape_.heads, shape_.value_dim),
                              .lse = {},
                              .mask = {}});
        }
        append(context);  // kv_bytes() is known before the first repetition
    }

    void run(Context& context) override {
        append(context);
        attend(context, calls_, options_);
    }

    std::size_t kv_bytes() const override {
        std::size_t bytes = 0;
        for (const KvCache& cache : caches_) bytes += cache.used_bytes();
        return bytes;
    }
    std::size_t walk_bytes() const override { return (key_.size() + value_.size()) * sizeof(float) + kv_bytes(); }

  private:
    /// One sequence of rows that lie token by token.
    template <class View, class Float>
    View rows(Float* data, std::size_t sequence, std::int64_t heads, std::int64_t dim) const {
        return {data + offsets_[sequence] * heads * dim,
                DType::f32,
                {heads, shape_.q_lens[sequence], dim},
                {dim, heads * dim, 1}};
    }

    void append(Context& context) {
        for (std::size_t s = 0; s < caches_.size(); ++s) {
            caches_[s].reset();
            caches_[s].append(context, 0, rows<InputTensor<3>>(key_.data(), s, shape_.kv_heads, shape_.head_dim),
                              rows<InputTensor<3>>(value_.data(), s, shape_.kv_heads, shape_.value_dim));
        }
    }

    void read(std::size_t sequence, std::int64_t kv_head, Range rows, std::vector<double>& keys,
              std::vector<double>& values) const override {
        read_rows(caches_[sequence], 0, kv_head, rows, keys, values);
    }

    std::vector<KvCache> caches_;
    std::vector<CachedQuery> calls_;
};

/// Queries over caches that hold all their keys. Each repetition takes the next layer.
class OverCaches final : public AttentionWorkload {
  public:
    OverCaches(const AttentionShape& shape, Context& context) : AttentionWorkload(shape) {
        Random random(1);
        for (std::size_t s = 0; s < shape_.q_lens.size(); ++s) {
            KvCacheOptions options = cache_options_of(shape_);
            options.layers = shape_.layers;
            options.memory = &context.memory();
            caches_.emplace_back(options);
            fill(context, s, random);
            queries_.push_back(random.floats(size(shape_.q_lens[s] * shape_.heads * shape_.head_dim), 4.0F));
            outputs_.emplace_back(size(shape_.q_lens[s] * shape_.heads * shape_.value_dim));
        }
        for (std::size_t s = 0; s < caches_.size(); ++s) {
            const auto extents = [&](std::int64_t dim) { return Extents<3>{shape_.heads, shape_.q_lens[s], dim}; };
            const auto strides = [&](std::int64_t dim) { return Extents<3>{dim, shape_.heads * dim, 1}; };
            calls_.push_back(
                {.query = {queries_[s].data(), DType::f32, extents(shape_.head_dim), strides(shape_.head_dim)},
                 .cache = &caches_[s],
                 .layer = 0,
                 .output = {outputs_[s].data(), DType::f32, extents(shape_.value_dim), strides(shape_.value_dim)},
                 .lse = {},
                 .mask = {}});
        }
    }

    void run(Context& context) override {
        layer_ = (layer_ + 1) % size(shape_.layers);
        for (CachedQuery& call : calls_) call.layer = layer_;
        attend(context, calls_, options_);
    }

    std::size_t kv_bytes() const override {
        std::size_t bytes = 0;
        for (const KvCache& cache : caches_) bytes += cache.used_bytes() / size(shape_.layers);
        return bytes;
    }
    std::size_t walk_bytes() const override { return static_cast<std::size_t>(bytes()) * size(shape_.layers); }

  private:
    /// Layer by layer, so that a layer's blocks lie together; of rings chunk by chunk, for no layer may run ahead.
    void fill(Context& context, std::size_t sequence, Random& random) {
        const std::int64_t length = shape_.kv_lens[sequence];
        const std::int64_t last = std::max<std::int64_t>(shape_.q_lens[sequence], 1);  // appended as one, in a ring
        const auto append = [&](std::size_t layer, std::int64_t count) {
            const auto keys = random.floats(size(shape_.kv_heads * count * shape_.head_dim));
            const auto values = random.floats(size(shape_.kv_heads * count * shape_.value_dim));
            caches_[sequence].append(context, layer,
                                     InputTensor<3>::dense(keys.data(), {shape_.kv_heads, count, shape_.head_dim}),
                                     InputTensor<3>::dense(values.data(), {shape_.kv_heads, count, shape_.value_dim}));
        };
        const auto chunk_at = [&](std::int64_t done) {
            constexpr std::int64_t kChunk = 512;
            if (!shape_.ring) return std::min(kChunk, length - done);
            return done < length - last ? std::min(kChunk, length - last - done) : length - done;
        };
        const std::size_t together = shape_.ring ? size(shape_.layers) : 1;
        for (std::size_t first = 0; first < size(shape_.layers); first += together) {
            for (std::int64_t done = 0; done < length; done += chunk_at(done)) {
                for (std::size_t layer = first; layer < first + together; ++layer) append(layer, chunk_at(done));
            }
        }
    }

    void forget_output() override {
        for (std::vector<float>& output : outputs_) std::ranges::fill(output, kNaN);
    }
    const float* query_row(std::size_t sequence, std::int64_t head, std::int64_t row) const override {
        return queries_[sequence].data() + (row * shape_.heads + head) * shape_.head_dim;
    }
    const float* output_row(std::size_t sequence, std::int64_t head, std::int64_t row) const override {
        return outputs_[sequence].data() + (row * shape_.heads + head) * shape_.value_dim;
    }
    void read(std::size_t sequence, std::int64_t kv_head, Range rows, std::vector<double>& keys,
              std::vector<double>& values) const override {
        read_rows(caches_[sequence], layer_, kv_head, rows, keys, values);
    }

    std::vector<KvCache> caches_;
    std::vector<std::vector<float>> queries_, outputs_;
    std::vector<CachedQuery> calls_;
    std::size_t layer_ = 0;
};

nlohmann::ordered_json shape_json(const AttentionShape& s) {
    const bool equal =
        std::ranges::count(s.kv_lens, s.kv_lens.front()) == static_cast<std::ptrdiff_t>(s.kv_lens.size());
    nlohmann::ordered_json json;
    json["phase"] = to_string(s.phase);
    json["q_len"] = std::ranges::max(s.q_lens);
    json["kv_len"] = std::ranges::max(s.kv_lens);
    json["batch"] = s.q_lens.size();
    json["lens"] = nullptr;  // of an unequal batch
    if (!equal) json["lens"] = s.kv_lens;
    json["heads"] = s.heads;
    json["kv_heads"] = s.kv_heads;
    json["head_dim"] = s.head_dim;
    json["value_dim"] = s.value_dim;
    json["causal"] = s.causal;
    json["window"] = s.window;
    json["ring"] = s.ring;
    json["sink_tokens"] = s.sink_tokens;
    json["kv_type"] = kv_types_name(s.kv);
    json["layers"] = s.phase == Phase::prefill ? 1 : s.layers;
    return json;
}

}  // namespace

const char* to_string(Phase phase) noexcept {
    switch (phase) {
        case Phase::prefill:
            return "prefill";
        case Phase::decode:
            return "decode";
        case Phase::chunk:
            return "chunk";
    }
    return "";
}

double visible_pairs(const AttentionShape& s) {
    double pairs = 0.0;
    for (std::size_t sequence = 0; sequence < s.q_lens.size(); ++sequence) {
        for (std::int64_t row = 0; row < s.q_lens[sequence]; ++row) {
            pairs += static_cast<double>(count(seen_sinks(s, sequence, row)) + count(seen(s, sequence, row)));
        }
    }
    return pairs;
}

double live_kv_bytes(const AttentionShape& s) {
    const auto bytes_of_token = static_cast<double>(token_bytes_of(cache_options_of(s).shape));  // of all KV heads
    double tokens = 0.0;
    for (std::size_t sequence = 0; sequence < s.q_lens.size(); ++sequence) {
        if (s.q_lens[sequence] == 0) continue;
        const std::int64_t last = s.q_lens[sequence] - 1;
        tokens += static_cast<double>(count(seen_sinks(s, sequence, last)) +
                                      count({seen(s, sequence, 0).begin, seen(s, sequence, last).end}));
    }
    return tokens * bytes_of_token;
}

PlannedWorkload plan_attention(const AttentionShape& shape, const std::string& what) {
    AttentionShape s = shape;
    // in double: what is too large for 64 bits is too large for the memory
    const auto floats = [](double rows, std::int64_t heads, std::int64_t columns) {
        return 4.0 * rows * static_cast<double>(heads) * static_cast<double>(columns);
    };
    const auto q_rows = static_cast<double>(sum(s.q_lens));
    const auto kv_rows = static_cast<double>(sum(s.kv_lens));
    const double live = live_kv_bytes(s);
    double bytes = floats(q_rows, s.heads, s.head_dim) + floats(q_rows, s.heads, s.value_dim);
    KvCacheOptions options = cache_options_of(s);
    double walk = has_caches(s) ? kv_rows * static_cast<double>(token_bytes_of(options.shape)) : 0.0;
    if (s.phase == Phase::prefill) {
        bytes += floats(kv_rows, s.kv_heads, s.head_dim) + floats(kv_rows, s.kv_heads, s.value_dim);
    }
    check_memory(what, bytes + walk);  // before anything that counts in 64 bits
    double layer_bytes = 0.0;          // as blocks hold them, which for short caches is more than the rows
    for (const std::int64_t length : has_caches(s) ? s.kv_lens : std::vector<std::int64_t>{}) {
        layer_bytes += static_cast<double>(KvCache::estimate_bytes(options, length));
    }
    if (s.phase == Phase::prefill) {
        bytes += layer_bytes;
        walk = floats(kv_rows, s.kv_heads, s.head_dim) + floats(kv_rows, s.kv_heads, s.value_dim) + layer_bytes;
    } else {
        if (s.layers == 0) {
            // twice the last-level cache, so that no step finds its keys where the last one left them; with very short
            // caches not quite, and never more than half of what is free
            constexpr double kMostLayers = 1024;
            const double wanted = std::ceil(2.0 * static_cast<double>(last_level_cache_bytes()) / live);
            const double possible = (static_cast<double>(available_memory()) / 2.0 - bytes) / layer_bytes;
            s.layers = static_cast<std::int64_t>(std::max(1.0, std::min({wanted, possible, kMostLayers})));
        }
        options.layers = s.layers;
        static_cast<void>(KvCache::estimate_bytes(options, 0));  // refuses what a cache would refuse
        walk = live * static_cast<double>(s.layers);
        bytes += layer_bytes * static_cast<double>(s.layers);
    }
    check_memory(what, bytes + std::min(walk, static_cast<double>(read_buffer_cap())));
    return {.shape = shape_json(s),
            .memory_bytes = static_cast<std::size_t>(bytes),
            .make = [s](Context& context) -> std::unique_ptr<Workload> {
                if (!has_caches(s)) return std::make_unique<Prefill>(s);
                if (s.phase == Phase::prefill) return std::make_unique<CachedPrefill>(s, context);
                return std::make_unique<OverCaches>(s, context);
            }};
}

}  // namespace headlong::tools
