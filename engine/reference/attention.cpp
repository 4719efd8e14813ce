#include "engine/reference/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include <headlong/error.hpp>

#include "engine/reference/quantise.hpp"

namespace headlong::reference {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void require(bool condition, const char* what) {
    if (!condition) throw InvalidArgument(std::string("reference attention: ") + what);
}

struct Shape {
    std::int64_t batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim;
};

Shape checked_shape(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
    require(query.rank() == 4 && key.rank() == 4 && value.rank() == 4, "query, key and value must have rank 4");
    const Shape shape{query.extents[0], query.extents[1], key.extents[1],  query.extents[2],
                      key.extents[2],   query.extents[3], value.extents[3]};
    require(shape.head_dim >= 1, "head_dim must be at least 1");
    require(key.extents[0] == shape.batch && value.extents[0] == shape.batch, "batch differs");
    require(value.extents[1] == shape.kv_heads, "kv_heads of key and value differ");
    require(value.extents[2] == shape.kv_len, "kv_len of key and value differ");
    require(key.extents[3] == shape.head_dim, "head_dim of query and key differ");
    require(shape.heads == 0 || (shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0),
            "heads must be a multiple of kv_heads");
    const auto heads = static_cast<std::size_t>(shape.heads);
    const auto batch = static_cast<std::size_t>(shape.batch);
    require(options.alibi_slopes.empty() || options.alibi_slopes.size() == heads, "one ALiBi slope per head");
    require(options.sink_logits.empty() || options.sink_logits.size() == heads, "one sink logit per head");
    require(options.kv_lengths.empty() || options.kv_lengths.size() == batch, "one length per sequence");
    require(options.batch_offsets.empty() || options.batch_offsets.size() == batch, "one offset per sequence");
    for (const std::int64_t length : options.kv_lengths) {
        require(length >= 0 && length <= shape.kv_len, "a length must be in [0, kv_len]");
    }
    if (options.mask) {
        const std::vector<std::int64_t>& extents = options.mask->values.extents;
        require(!extents.empty() && extents.size() <= 4, "a mask has rank 1 to 4");
        const std::int64_t full[4] = {shape.batch, shape.heads, shape.q_len, shape.kv_len};
        for (std::size_t back = 1; back <= extents.size(); ++back) {
            const std::int64_t extent = extents[extents.size() - back];
            const std::int64_t target = full[4 - back];
            // only the last dimension may be short: it is padded with "not allowed"
            const bool short_or_broadcast = extent == 1 || extent == target || (back == 1 && extent < target);
            const bool tree = back == 1 && options.mask->last_q;
            require(tree ? extent == 1 || extent == shape.q_len : short_or_broadcast, "the mask does not broadcast");
        }
    }
    return shape;
}

// The mask's element for a pair (query i, key j), or nothing where a short mask is padded.
std::optional<double> mask_element(const Mask& full_mask, const Shape& shape, std::int64_t live,
                                   std::int64_t (&&index)[4]) {
    const Tensor& mask = full_mask.values;
    if (full_mask.last_q) {
        index[3] -= live - shape.q_len;
        if (index[3] < 0) return full_mask.boolean ? 1.0 : 0.0;  // an earlier key: attend, with no bias
    }
    std::size_t flat = 0;
    for (std::size_t i = 0; i < mask.rank(); ++i) {
        const std::int64_t extent = mask.extents[i];
        const std::int64_t full_index = index[4 - mask.rank() + i];
        const std::int64_t used_index = extent == 1 ? 0 : full_index;
        if (used_index >= extent) return std::nullopt;
        flat = flat * static_cast<std::size_t>(extent) + static_cast<std::size_t>(used_index);
    }
    return mask.values[flat];
}

std::int64_t position_offset(const Shape& shape, const AttentionOptions& options, std::int64_t b) {
    const auto sequence = static_cast<std::size_t>(b);
    switch (options.alignment) {
        case Alignment::top_left:
            return 0;
        case Alignment::offset:
            return options.batch_offsets.empty() ? options.offset : options.batch_offsets[sequence];
        case Alignment::bottom_right:
            break;
    }
    return (options.kv_lengths.empty() ? shape.kv_len : options.kv_lengths[sequence]) - shape.q_len;
}

}  // namespace

AttentionOptions widen(const headlong::AttentionOptions& options, bool causal_by_default) {
    AttentionOptions wide;
    if (options.scale) wide.scale = static_cast<double>(*options.scale);
    wide.causal = options.causal.value_or(causal_by_default);
    wide.alignment = options.alignment;
    wide.offset = options.causal_offset;
    wide.window_left = options.window_left;
    wide.window_right = options.window_right;
    wide.softcap = static_cast<double>(options.softcap);
    wide.alibi_slopes.assign(options.alibi_slopes.begin(), options.alibi_slopes.end());
    if (options.mask) wide.mask = widen(*options.mask);
    wide.sink_logits.assign(options.sink_logits.begin(), options.sink_logits.end());
    wide.kv_lengths.assign(options.kv_lengths.begin(), options.kv_lengths.end());
    return wide;
}

AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionOptions& options) {
    const Shape shape = checked_shape(query, key, value, options);
    const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
    const auto head_dim = static_cast<std::size_t>(shape.head_dim);
    const auto value_dim = static_cast<std::size_t>(shape.value_dim);
    const auto kv_len = static_cast<std::size_t>(shape.kv_len);

    AttentionResult result;
    result.output = Tensor({shape.batch, shape.heads, shape.q_len, shape.value_dim});
    result.lse = Tensor({shape.batch, shape.heads, shape.q_len}, -kInfinity);
    if (options.scores) result.scores = Tensor({shape.batch, shape.heads, shape.q_len, shape.kv_len});

    const auto note = [](double& largest, double x) {
        if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    };

    std::vector<double> row(kv_len);  // scores, then weights
    std::vector<char> allowed(kv_len);
    const bool is_biased = !options.alibi_slopes.empty() || (options.mask && !options.mask->boolean);
    std::vector<double> sizes(kv_len);      // |scaled| + |ALiBi's term| + |mask|
    std::vector<double> largest(head_dim);  // |q| of an element's group
    for (std::int64_t b = 0; b < shape.batch; ++b) {
        const std::int64_t offset = position_offset(shape, options, b);
        const std::int64_t live =
            options.kv_lengths.empty() ? shape.kv_len : options.kv_lengths[static_cast<std::size_t>(b)];
        for (std::int64_t h = 0; h < shape.heads; ++h) {
            const std::int64_t g = h / (shape.heads / shape.kv_heads);
            for (std::int64_t i = 0; i < shape.q_len; ++i) {
                // offsets and windows may be anything; this far out a position sees all or nothing
                constexpr std::int64_t kFar = std::int64_t{1} << 61;
                const std::int64_t p = i + std::clamp(offset, -kFar, kFar);
                const double* q = query.values.data() + query.place(b, h, i, 0);
                for (std::size_t first = 0; first < head_dim; first += kKeyGroup) {
                    const std::size_t end = std::min(first + kKeyGroup, head_dim);
                    double most = 0.0;
                    for (std::size_t d = first; d < end; ++d) most = std::max(most, std::abs(q[d]));
                    for (std::size_t d = first; d < end; ++d) largest[d] = most;
                }
                double* all_scores =
                    options.scores ? result.scores.values.data() + result.scores.place(b, h, i, 0) : nullptr;
                const bool all_pairs = options.scores == Scores::scaled || options.scores == Scores::softcapped;

                // scores of the allowed keys, and their maximum; a NaN is remembered, since a maximum may drop it
                double maximum = -kInfinity;
                bool nan_seen = false;
                for (std::int64_t j = 0; j < shape.kv_len; ++j) {
                    const auto slot = static_cast<std::size_t>(j);
                    bool visible = j < live;
                    if (options.causal) visible = visible && j <= p;
                    if (options.window_left >= 0) visible = visible && j >= p - std::min(options.window_left, kFar);
                    if (options.window_right >= 0) visible = visible && j <= p + std::min(options.window_right, kFar);
                    double bias = 0.0;
                    if (options.mask) {
                        const std::optional<double> element = mask_element(*options.mask, shape, live, {b, h, i, j});
                        if (!element) {
                            visible = false;
                        } else if (options.mask->boolean) {
                            visible = visible && *element != 0.0;
                        } else {
                            bias = *element;
                            visible = visible && bias != -kInfinity;
                        }
                    }
                    allowed[slot] = visible ? 1 : 0;
                    row[slot] = -kInfinity;
                    if (!visible && !all_pairs) continue;

                    const double* k = key.values.data() + key.place(b, g, j, 0);
                    double score = 0.0;
                    double terms = 0.0;
                    double code_terms = 0.0;
                    for (std::size_t d = 0; d < head_dim; ++d) {
                        score += q[d] * k[d];
                        terms += std::abs(q[d] * k[d]);
                        code_terms += largest[d] * std::abs(k[d]);
                    }
                    score *= scale;
                    const double scaled = score;
                    if (options.softcap != 0.0) score = options.softcap * std::tanh(score / options.softcap);
                    if (all_pairs) all_scores[slot] = options.scores == Scores::scaled ? scaled : score;
                    if (!visible) continue;

                    note(result.magnitudes.score, scaled);
                    note(result.magnitudes.terms, terms * scale);
                    note(result.magnitudes.code_terms, code_terms * scale);
                    double alibi = 0.0;
                    if (!options.alibi_slopes.empty()) {
                        alibi =
                            options.alibi_slopes[static_cast<std::size_t>(h)] * static_cast<double>(std::abs(p - j));
                    }
                    score -= alibi;
                    score += bias;
                    sizes[slot] = std::abs(scaled) + std::abs(alibi) + std::abs(bias);
                    row[slot] = score;
                    nan_seen = nan_seen || std::isnan(score);
                    maximum = std::max(maximum, score);
                }
                if (options.scores == Scores::masked) std::copy(row.begin(), row.end(), all_scores);

                const bool has_sink = !options.sink_logits.empty();
                const double sink = has_sink ? options.sink_logits[static_cast<std::size_t>(h)] : -kInfinity;
                if (std::isnan(sink)) nan_seen = true;
                // with a sink alone to weigh, the keys' part is the empty state, whatever their values
                const bool keys_weigh = maximum != -kInfinity;
                maximum = std::max(maximum, sink);

                double* o = result.output.values.data() + result.output.place(b, h, i, 0);
                double& lse = result.lse.at(b, h, i);
                if (nan_seen) {
                    std::fill(o, o + value_dim, kNaN);
                    lse = kNaN;
                    if (options.scores == Scores::weights) {
                        for (std::size_t j = 0; j < kv_len; ++j) all_scores[j] = allowed[j] != 0 ? kNaN : 0.0;
                    }
                    continue;
                }
                // no allowed key, or only scores of -infinity, and no sink: the zeros and -infinity that are there
                if (maximum == -kInfinity) continue;

                double sum = has_sink ? std::exp(sink - maximum) : 0.0;
                for (std::size_t j = 0; j < kv_len; ++j) {
                    if (allowed[j] != 0) sum += row[j] = std::exp(row[j] - maximum);
                }
                lse = maximum + std::log(sum);
                double biased = 0.0;
                for (std::size_t j = 0; j < kv_len; ++j) {
                    if (allowed[j] == 0) continue;
                    const double weight = row[j] / sum;
                    if (weight > 0.0) biased += weight * sizes[j];
                    if (options.scores == Scores::weights) all_scores[j] = weight;
                    const double* v = value.values.data() + value.place(b, g, j, 0);
                    for (std::size_t c = 0; c < value_dim; ++c) {
                        if (keys_weigh) o[c] += weight * v[c];
                        note(result.magnitudes.value, v[c]);
                    }
                }
                if (is_biased) note(result.magnitudes.biased, biased);
            }
        }
    }
    return result;
}

double output_tolerance(const Magnitudes& magnitudes) {
    return std::max(1e-5,
                    8.0 * std::ldexp(1.0, -24) * std::max(magnitudes.score, magnitudes.biased) * magnitudes.value);
}

double lse_tolerance(const Magnitudes& magnitudes) {
    return std::max(1e-5, 8.0 * std::ldexp(1.0, -24) * std::max(magnitudes.terms, magnitudes.biased));
}

CodesTolerance codes_output_tolerance(const AttentionResult& result) {
    const double rms = 1.5e-4 * std::max(1.0, result.magnitudes.score / 8.0) * root_mean_square(result.output.values);
    const double float32 = output_tolerance(result.magnitudes);
    return {10.0 * rms + float32, rms + float32};
}

double codes_lse_tolerance(const Magnitudes& magnitudes) {
    // A half, and a hundredth for the float32 roundings on the way to the codes.
    return lse_tolerance(magnitudes) + 0.505 / (127.0 * 254.0) * magnitudes.code_terms;
}

State merge(const State& first, const State& second) {
    require(first.output.extents == second.output.extents && first.lse.extents == second.lse.extents,
            "merge: the states differ in shape");
    State result = first;
    const std::size_t rows = first.lse.values.size();
    const std::size_t columns = rows == 0 ? 0 : first.output.values.size() / rows;
    for (std::size_t r = 0; r < rows; ++r) {
        const double l1 = first.lse.values[r];
        const double l2 = second.lse.values[r];
        // an empty part leaves the other as it is; two empty parts are empty
        const bool nan_seen = std::isnan(l1) || std::isnan(l2);
        const double maximum = nan_seen ? kNaN : std::max(l1, l2);
        const double shift = maximum == -kInfinity ? 0.0 : maximum;
        const double e1 = std::exp(l1 - shift);
        const double e2 = std::exp(l2 - shift);
        const double sum = e1 + e2;
        result.lse.values[r] = sum == 0.0 ? -kInfinity : shift + std::log(sum);
        for (std::size_t c = 0; c < columns; ++c) {
            const std::size_t place = r * columns + c;
            const double o1 = l1 == -kInfinity ? 0.0 : first.output.values[place] * e1;
            const double o2 = l2 == -kInfinity ? 0.0 : second.output.values[place] * e2;
            result.output.values[place] = sum == 0.0 ? 0.0 : (o1 + o2) / sum;
        }
    }
    return result;
}

std::vector<double> alibi_slopes(std::int64_t heads) {
    require(heads >= 1, "alibi_slopes: heads must be at least 1");
    std::int64_t n = 1;
    while (2 * n <= heads) n *= 2;
    std::vector<double> slopes;
    for (std::int64_t h = 0; h < heads; ++h) {
        const auto exponent = static_cast<double>(h < n ? -8 * (h + 1) : -4 * (2 * (h - n) + 1));
        slopes.push_back(std::exp2(exponent / static_cast<double>(n)));
    }
    return slopes;
}

std::int64_t window_left_of_sliding_window(std::int64_t sliding_window) {
    require(sliding_window >= 1, "a sliding window holds at least the query's own position");
    return sliding_window - 1;
}

}  // namespace headlong::reference
