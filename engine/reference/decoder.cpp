#include "engine/reference/decoder.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

namespace headlong::reference {
namespace {

using Vector = std::vector<double>;
using Rows = std::vector<Vector>;  // one per token

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

double activated(kernels::Activation activation, double x, double limit) {
    switch (activation) {
        case kernels::Activation::silu:
            return x / (1.0 + std::exp(-x));
        case kernels::Activation::gelu:
            return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
        case kernels::Activation::gelu_tanh:
            return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
        case kernels::Activation::clamped_silu: {
            const double low = std::min(x, limit);
            return low / (1.0 + std::exp(-1.702 * low));
        }
    }
    return 0.0;
}

class Model {
  public:
    Model(const DecoderConfig& config, const WeightFiles& files, std::int64_t capacity)
        : c_(config), files_(files), rotaries_(config.rotaries_for(capacity > 0 ? capacity : config.max_positions)) {}

    Vector logits(std::span<const std::int32_t> tokens) {
        Rows x = embedded(tokens);
        for (layer_ = 0; layer_ < c_.layers; ++layer_) {
            const Rows attention = branch(attend(normed(c_.names->attention_norm, x)), c_.names->attention_post_norm);
            if (c_.parallel) {
                const Rows mlp = branch(fed_forward(normed(c_.names->mlp_norm, x)), c_.names->mlp_post_norm);
                add(x, attention);
                add(x, mlp);
            } else {
                add(x, attention);
                add(x, branch(fed_forward(normed(c_.names->mlp_norm, x)), c_.names->mlp_post_norm));
            }
        }
        x = normed(c_.names->final_norm, x);
        const Vector head =
            c_.tied_embeddings ? tensor(c_.names->embedding, ".weight") : at(std::string(c_.names->head) + ".weight");
        Vector all;
        for (const Vector& row : x) {
            for (std::int64_t v = 0; v < c_.vocab_size; ++v) {
                double sum = 0.0;
                for (std::size_t i = 0; i < row.size(); ++i) sum += row[i] * head[size(v) * row.size() + i];
                sum /= static_cast<double>(c_.logits_divisor);
                const auto cap = static_cast<double>(c_.logit_softcap);
                all.push_back(cap > 0.0 ? cap * std::tanh(sum / cap) : sum);
            }
        }
        return all;
    }

  private:
    // -------------------------------------------------------------------------------------------------- the file

    Vector at(const std::string& name) const { return to_doubles(*files_.at(name).tensor); }

    std::string named(const char* pattern, std::int64_t expert) const {
        std::string name(pattern);
        for (const auto& [place, number] : {std::pair{"{0}", layer_}, {"{1}", expert}}) {
            if (const std::size_t found = name.find(place); found != std::string::npos) {
                name.replace(found, 3, std::to_string(number));
            }
        }
        return name;
    }
    Vector tensor(const char* pattern, const char* suffix, std::int64_t expert = 0) const {
        for (const char* prefix : c_.names->prefixes) {
            if (prefix == nullptr) break;
            const std::string name = prefix + named(pattern, expert) + suffix;
            if (files_.find(name) != nullptr) return at(name);
        }
        return at(named(pattern, expert) + suffix);
    }

    /// W x + b of a whole tensor, whichever way it lies.
    Rows projected(const char* pattern, const Rows& x, std::int64_t outputs, bool has_bias,
                   std::int64_t expert = 0) const {
        const Vector weight = tensor(pattern, ".weight", expert);
        const Vector bias = has_bias ? tensor(pattern, ".bias", expert) : Vector(size(outputs));
        Rows y;
        for (const Vector& row : x) {
            Vector out = bias;
            for (std::size_t o = 0; o < out.size(); ++o) {
                for (std::size_t i = 0; i < row.size(); ++i) {
                    out[o] += row[i] * weight[c_.inputs_first ? i * out.size() + o : o * row.size() + i];
                }
            }
            y.push_back(std::move(out));
        }
        return y;
    }

    // ------------------------------------------------------------------------------------------------- the layers

    Rows embedded(std::span<const std::int32_t> tokens) const {
        const Vector table = tensor(c_.names->embedding, ".weight");
        const Vector positions = c_.learned_positions ? tensor(c_.names->position_embedding, ".weight") : Vector();
        const std::size_t hidden = size(c_.hidden_size);
        Rows x;
        for (std::size_t t = 0; t < tokens.size(); ++t) {
            Vector row(hidden);
            for (std::size_t i = 0; i < hidden; ++i) {
                row[i] = table[size(tokens[t]) * hidden + i] * static_cast<double>(c_.embedding_multiplier);
                if (!positions.empty()) row[i] += positions[t * hidden + i];
            }
            x.push_back(std::move(row));
        }
        return x;
    }

    void normalise(std::span<double> row, const Vector& weight, const Vector& bias) const {
        const auto count = static_cast<double>(row.size());
        const double mean = c_.norm == Norm::layer ? std::accumulate(row.begin(), row.end(), 0.0) / count : 0.0;
        double squares = 0.0;
        for (const double x : row) squares += (x - mean) * (x - mean);
        const double factor = 1.0 / std::sqrt(squares / count + c_.norm_epsilon);
        for (std::size_t i = 0; i < row.size(); ++i) {
            const double gain = weight[i] + (c_.norm == Norm::rms_plus_one ? 1.0 : 0.0);
            row[i] = (row[i] - mean) * factor * gain + (bias.empty() ? 0.0 : bias[i]);
        }
    }
    Rows normed(const char* pattern, Rows x, std::size_t parts = 1) const {
        if (pattern == nullptr) return x;
        const Vector weight = tensor(pattern, ".weight");
        const Vector bias = c_.norm == Norm::layer ? tensor(pattern, ".bias") : Vector();
        for (Vector& row : x) {
            const std::size_t width = row.size() / parts;
            for (std::size_t p = 0; p < parts; ++p) normalise(std::span(row).subspan(p * width, width), weight, bias);
        }
        return x;
    }
    Rows branch(Rows y, const char* post_norm) const {
        y = normed(post_norm, std::move(y));
        for (Vector& row : y) {
            for (double& e : row) e *= static_cast<double>(c_.residual_multiplier);
        }
        return y;
    }
    static void add(Rows& x, const Rows& y) {
        for (std::size_t t = 0; t < x.size(); ++t) {
            for (std::size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
        }
    }

    /// Queries, keys or values (`which` of 0, 1, 2) of all heads.
    Rows part(std::size_t which, const Rows& x) const {
        const TensorNames& names = *c_.names;
        const std::int64_t width = c_.heads * c_.head_dim;
        const std::int64_t kv_width = c_.kv_heads * c_.head_dim;
        const char* const pattern = std::array{names.query, names.key, names.value}[which];
        if (std::string(names.query) != names.key) {
            return projected(pattern, x, which == 0 ? width : kv_width, c_.qkv_bias);
        }
        const Rows all = projected(pattern, x, width + 2 * kv_width, c_.qkv_bias);
        Rows result;
        for (const Vector& row : all) {
            Vector out;
            for (std::int64_t i = 0; i < (which == 0 ? width : kv_width); ++i) {
                const std::int64_t head = i / c_.head_dim;
                const std::int64_t in_turn = (which == 0 ? 0 : which == 1 ? width : width + kv_width) + i;
                const std::int64_t per_head =
                    (3 * head + static_cast<std::int64_t>(which)) * c_.head_dim + i % c_.head_dim;
                out.push_back(row[size(c_.fused_rows == FusedRows::per_head ? per_head : in_turn)]);
            }
            result.push_back(std::move(out));
        }
        return result;
    }

    void rotate(Rows& rows) const {
        const std::optional<Rotary>& rotary = rotaries_[size(layer_)];
        if (!rotary) return;
        const std::span<const double> frequencies = rotary->inverse_frequencies();
        for (std::size_t t = 0; t < rows.size(); ++t) {
            for (std::size_t head = 0; head < rows[t].size(); head += size(c_.head_dim)) {
                for (std::size_t i = 0; i < frequencies.size(); ++i) {
                    const double angle = static_cast<double>(t) * frequencies[i];
                    const double cosine = std::cos(angle) * rotary->attention_factor();
                    const double sine = std::sin(angle) * rotary->attention_factor();
                    double& a = rows[t][head + i];
                    double& b = rows[t][head + i + frequencies.size()];
                    const double first = a * cosine - b * sine;
                    b = b * cosine + a * sine;
                    a = first;
                }
            }
        }
    }

    Rows attend(const Rows& x) const {
        Rows query = part(0, x);
        Rows key = part(1, x);
        const Rows value = part(2, x);
        if (c_.qk_norm != QkNorm::none) {
            const bool whole = c_.qk_norm == QkNorm::all_heads;
            query = normed(c_.names->query_norm, query, whole ? 1 : size(c_.heads));
            key = normed(c_.names->key_norm, key, whole ? 1 : size(c_.kv_heads));
        }
        rotate(query);
        rotate(key);
        const std::size_t dim = size(c_.head_dim);
        const double scale = c_.attention_scale ? static_cast<double>(*c_.attention_scale)
                                                : 1.0 / std::sqrt(static_cast<double>(c_.head_dim));
        const auto cap = static_cast<double>(c_.attention_softcap);
        const Vector sinks = c_.names->sinks != nullptr ? tensor(c_.names->sinks, "") : Vector();
        Rows y;
        for (std::size_t t = 0; t < x.size(); ++t) {
            Vector row(size(c_.heads) * dim);
            for (std::size_t h = 0; h < size(c_.heads); ++h) {
                const std::size_t kv = h / size(c_.heads / c_.kv_heads) * dim;
                const std::size_t window = size(c_.window(layer_));
                const std::size_t first = window > 0 && t + 1 > window ? t + 1 - window : 0;
                Vector scores;
                for (std::size_t j = first; j <= t; ++j) {
                    double s = 0.0;
                    for (std::size_t i = 0; i < dim; ++i) s += query[t][h * dim + i] * key[j][kv + i];
                    s *= scale;
                    scores.push_back(cap > 0.0 ? cap * std::tanh(s / cap) : s);
                }
                double most = *std::ranges::max_element(scores);
                if (!sinks.empty()) most = std::max(most, sinks[h]);
                double sum = sinks.empty() ? 0.0 : std::exp(sinks[h] - most);
                for (double& s : scores) sum += s = std::exp(s - most);
                for (std::size_t j = first; j <= t; ++j) {
                    for (std::size_t i = 0; i < dim; ++i) {
                        row[h * dim + i] += scores[j - first] / sum * value[j][kv + i];
                    }
                }
            }
            y.push_back(std::move(row));
        }
        return projected(c_.names->attention_output, y, c_.hidden_size, c_.output_bias);
    }

    double gated(double gate, double up) const {
        const auto limit = static_cast<double>(c_.activation_limit);
        if (c_.activation == kernels::Activation::clamped_silu) up = std::clamp(up, -limit, limit) + 1.0;
        return activated(c_.activation, gate, limit) * up;
    }

    Rows fed_forward(const Rows& x) const {
        if (c_.is_sparse(layer_)) return mixed(x);
        const TensorNames& names = *c_.names;
        const std::size_t inner = size(c_.intermediate_size);
        Rows up;
        if (names.gate == nullptr) {
            up = projected(names.up, x, c_.intermediate_size, c_.mlp_bias);
            for (Vector& row : up) {
                for (double& e : row) e = activated(c_.activation, e, 0.0);
            }
        } else if (std::string(names.gate) == names.up) {
            for (const Vector& both : projected(names.up, x, 2 * c_.intermediate_size, c_.mlp_bias)) {
                Vector row(inner);
                for (std::size_t i = 0; i < inner; ++i) row[i] = gated(both[i], both[inner + i]);
                up.push_back(std::move(row));
            }
        } else {
            const Rows gate = projected(names.gate, x, c_.intermediate_size, c_.mlp_bias);
            up = projected(names.up, x, c_.intermediate_size, c_.mlp_bias);
            for (std::size_t t = 0; t < up.size(); ++t) {
                for (std::size_t i = 0; i < inner; ++i) up[t][i] = gated(gate[t][i], up[t][i]);
            }
        }
        return projected(names.down, up, c_.hidden_size, c_.mlp_bias);
    }

    /// What one expert makes of a token.
    Vector expert(std::int64_t index, const Vector& x) const {
        const TensorNames& names = *c_.names;
        const Experts& e = c_.experts;
        const std::size_t inner = size(e.intermediate_size);
        const std::size_t hidden = size(c_.hidden_size);
        Vector middle(inner);
        if (std::string(names.expert_gate) != names.expert_up) {
            const Rows gate = projected(names.expert_gate, {x}, e.intermediate_size, e.bias, index);
            const Rows up = projected(names.expert_up, {x}, e.intermediate_size, e.bias, index);
            for (std::size_t i = 0; i < inner; ++i) middle[i] = gated(gate[0][i], up[0][i]);
            return projected(names.expert_down, {middle}, c_.hidden_size, e.bias, index)[0];
        }
        const Vector both = tensor(names.expert_gate, "");  // [expert][hidden][gate, up, gate, up, ...]
        const Vector both_bias = tensor(names.expert_gate, "_bias");
        for (std::size_t i = 0; i < inner; ++i) {
            double sums[2] = {};
            for (std::size_t g = 0; g < 2; ++g) {
                sums[g] = both_bias[size(index) * 2 * inner + 2 * i + g];
                for (std::size_t k = 0; k < hidden; ++k) {
                    sums[g] += x[k] * both[(size(index) * hidden + k) * 2 * inner + 2 * i + g];
                }
            }
            middle[i] = gated(sums[0], sums[1]);
        }
        const Vector down = tensor(names.expert_down, "");  // [expert][inner][hidden]
        const Vector down_bias = tensor(names.expert_down, "_bias");
        Vector y(hidden);
        for (std::size_t o = 0; o < hidden; ++o) {
            y[o] = down_bias[size(index) * hidden + o];
            for (std::size_t i = 0; i < inner; ++i) y[o] += middle[i] * down[(size(index) * inner + i) * hidden + o];
        }
        return y;
    }

    Rows mixed(const Rows& x) const {
        const Experts& e = c_.experts;
        const Rows logits = projected(c_.names->router, x, e.count, e.bias);
        Rows y;
        for (std::size_t t = 0; t < x.size(); ++t) {
            std::vector<std::size_t> order(size(e.count));
            std::iota(order.begin(), order.end(), std::size_t{0});
            std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return logits[t][a] > logits[t][b]; });
            double sum = 0.0;
            for (std::size_t i = 0; i < size(e.normalised ? e.used : e.count); ++i)
                sum += std::exp(logits[t][order[i]]);
            Vector row(x[t].size());
            for (std::size_t i = 0; i < size(e.used); ++i) {
                const Vector one = expert(static_cast<std::int64_t>(order[i]), x[t]);
                for (std::size_t k = 0; k < row.size(); ++k) {
                    row[k] += std::exp(logits[t][order[i]]) / sum * one[k];
                }
            }
            y.push_back(std::move(row));
        }
        return y;
    }

    const DecoderConfig& c_;
    const WeightFiles& files_;
    const std::vector<std::optional<Rotary>>& rotaries_;
    std::int64_t layer_ = 0;
};

}  // namespace

std::vector<double> decoder_logits(const DecoderConfig& config, const WeightFiles& files,
                                   std::span<const std::int32_t> tokens, std::int64_t capacity) {
    return Model(config, files, capacity).logits(tokens);
}

}  // namespace headlong::reference
