#include "engine/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <headlong/attention.hpp>
#include <headlong/error.hpp>
#include <limits>
#include <numeric>
#include <utility>

#include "engine/attention/call.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/row_ops.hpp"

namespace headlong {
namespace {

std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

constexpr std::int64_t kNoLayer = -1;
// FLOPs of one element: a square and its sum, two factors; negation, exp, sum, quotient, gate.
constexpr std::int64_t kNormFlops = 4;
constexpr std::int64_t kActivationFlops = 5;

}  // namespace

KvCacheOptions cache_options_of(const DecoderConfig& config, const KvTypes& types, std::int64_t capacity) {
    if (capacity < 0 || capacity > config.max_positions) {
        throw InvalidArgument(fmt::format("cache_options: capacity is {}; allowed: 0 to max_positions, {}", capacity,
                                          config.max_positions));
    }
    KvCacheOptions options;
    options.shape = {.kv_heads = config.kv_heads,
                     .head_dim = config.head_dim,
                     .value_dim = config.head_dim,
                     .key_type = types.keys,
                     .value_type = types.values};
    options.layers = config.layers;
    options.capacity = capacity > 0 ? capacity : config.max_positions;
    options.layer_windows = config.windows;
    options.layer_rotary = config.rotaries_for(options.capacity);
    return options;
}

/// Rows of one call, in the workspace.
struct Decoder::Activations {
    float* residual;   ///< [tokens][hidden]
    float* normed;     ///< [tokens][hidden]
    float* query;      ///< [tokens][heads * head_dim]
    float* key;        ///< [tokens][kv_heads * head_dim]
    float* value;      ///< the same
    float* attention;  ///< [tokens][heads * head_dim]
    float* gate;       ///< [tokens][intermediate], the larger of MLPs and experts
    float* up;         ///< the same
    float* branch;     ///< [tokens][hidden]: what is to be added to the residual stream, if it is not added at once

    // of experts
    float* gathered;       ///< [tokens][hidden]: rows of one expert
    float* result;         ///< the same
    float* router;         ///< [tokens][experts]
    float* chosen_weight;  ///< [tokens][used]
    std::int32_t* chosen;  ///< [tokens][experts]: the first so many of them

    /// Calls take(columns) for one array after the other, which gives where it lies.
    template <class Take>
    Activations(const DecoderConfig& c, const Take& take) {
        const Experts& e = c.experts;
        const std::int64_t inner = std::max(c.intermediate_size, e.intermediate_size);
        const std::int64_t routed = e.count > 0 ? c.hidden_size : 0;
        residual = take(c.hidden_size);
        normed = take(c.hidden_size);
        query = take(c.heads * c.head_dim);
        key = take(c.kv_heads * c.head_dim);
        value = take(c.kv_heads * c.head_dim);
        attention = take(c.heads * c.head_dim);
        gate = take(c.gated() ? inner : 0);
        up = take(inner);
        branch = take(has_branch(c) ? c.hidden_size : 0);
        gathered = take(routed);
        result = take(routed);
        router = take(e.count);
        chosen_weight = take(e.used);
        chosen = reinterpret_cast<std::int32_t*>(take(e.count));
    }

    /// Whether something happens to what attention or an MLP gives before it is added.
    static bool has_branch(const DecoderConfig& c) noexcept {
        return c.parallel || c.residual_multiplier != 1.0F || c.experts.count > 0 ||
               c.names->attention_post_norm != nullptr || c.names->mlp_post_norm != nullptr;
    }

    static std::size_t bytes(const DecoderConfig& c, std::int64_t tokens) noexcept {
        std::int64_t row = 0;
        const Activations counted(c, [&](std::int64_t columns) noexcept -> float* {
            row += columns;
            return nullptr;
        });
        static_cast<void>(counted);
        return saturating_product(saturating_product(size(row), size(tokens)), sizeof(float));
    }

    static Activations in(Workspace& workspace, const DecoderConfig& c, std::int64_t tokens) {
        auto* p = reinterpret_cast<float*>(workspace.rows.ensure(bytes(c, tokens)));
        return {c, [&](std::int64_t columns) { return std::exchange(p, p + columns * tokens); }};
    }
};

/// The open segment of a log, if there is one; closed at the end of the call, however it ends.
class Decoder::Segments {
  public:
    explicit Segments(ForwardLog* log) noexcept : log_(log) {}
    ~Segments() {
        if (log_ != nullptr) log_->end();
    }
    Segments(const Segments&) = delete;
    Segments& operator=(const Segments&) = delete;

    void begin(Operation operation, std::int64_t layer, std::int64_t flops, std::size_t bytes) const noexcept {
        if (log_ != nullptr) log_->begin(operation, layer, {static_cast<std::uint64_t>(flops), bytes});
    }

  private:
    ForwardLog* log_;
};

std::size_t Decoder::scratch_bytes(const Context::Impl& context, const DecoderConfig& c,
                                   std::span<const std::int64_t> token_counts, const KvTypes& types,
                                   std::optional<WeightType> type, std::int64_t sink_tokens) noexcept {
    std::size_t rows = 0;
    std::size_t tables = 0;  // of angles
    AttentionScratch attention;
    Linear::Scratch linear;
    std::int64_t rotary_dim = 0;
    for (const std::optional<Rotary>& rotary : c.rotaries) {
        if (rotary) rotary_dim = std::max(rotary_dim, rotary->rotary_dim());
    }
    for (const std::int64_t tokens : token_counts) {  // buffers grow to the most that any call needs of them
        if (tokens == 0) continue;
        const BlockTable blocks;
        Sequence sequence;
        sequence.q_len = tokens;
        sequence.cached = {&blocks, stored_type(types.keys), stored_type(types.values)};
        AttentionProblem problem;
        problem.heads = c.heads;
        problem.kv_heads = c.kv_heads;
        problem.head_dim = problem.value_dim = c.head_dim;
        problem.sequences = {&sequence, 1};
        const AttentionScratch of_call = attention_scratch(context, problem);
        rows = std::max(rows, Activations::bytes(c, tokens));
        if (rotary_dim > 0) {  // else keys are stored as they come, unless they are centred or transformed
            const KvCache::Impl::AppendScratch of_append =
                KvCache::Impl::append_scratch(context, c.head_dim, rotary_dim, tokens);
            tables =
                std::max({tables, of_append.tables,
                          saturating_product(size((sink_tokens > 0 ? 2 : 1) * rotary_dim * tokens), sizeof(float))});
            attention.workers = std::max(attention.workers, of_append.workers);
        }
        const Linear::Scratch of_layers = linear_scratch(context, c, tokens, type);
        linear.workers = std::max(linear.workers, of_layers.workers);
        linear.quantised = std::max(linear.quantised, of_layers.quantised);
        attention.workers = std::max(attention.workers, of_call.workers);
        attention.units = std::max(attention.units, of_call.units);
        attention.states = std::max(attention.states, of_call.states);
    }
    if (rows == 0) return 0;
    return saturating_sum(saturating_sum(saturating_sum(saturating_sum(rows, tables), list_bytes(1, 0)),
                                         saturating_sum(linear.workers, linear.quantised)),
                          saturating_sum(saturating_sum(attention.workers, attention.units), attention.states));
}

/// One call of forward(), its tokens there.
class Decoder::Pass {
  public:
    Pass(const Decoder& decoder, Context& context, Workspace& workspace, KvCache& cache, std::int64_t count,
         const ForwardHooks& hooks, const Segments& segments)
        : decoder_(decoder),
          c_(decoder.config_),
          context_(context),
          impl_(context.impl()),
          workspace_(workspace),
          cache_(cache),
          count_(count),
          first_position_(cache.length()),
          hooks_(hooks),
          segments_(segments),
          a_(Activations::in(workspace, decoder.config_, count)) {}

    void run(std::span<const std::int32_t> tokens, float* logits, std::int64_t logit_rows, std::int64_t logit_stride) {
        embed(tokens);
        observe(0, "embedding", a_.residual, c_.hidden_size);
        for (index_ = 0; index_ < c_.layers; ++index_) {
            const Layer& layer = decoder_.layers_[size(index_)];
            attention(layer);
            mlp(layer);
            hooks_.interrupt.check("forward");
            observe(index_, "out", a_.residual, c_.hidden_size);
        }
        index_ = kNoLayer;
        if (logit_rows > 0) head(logits, logit_rows, logit_stride);
        hooks_.interrupt.check("forward");
    }

  private:
    void embed(std::span<const std::int32_t> tokens) {
        const FileTensor& table = *decoder_.embedding_;
        const FileTensor* const positions = decoder_.position_embedding_;
        segments_.begin(Operation::embedding, kNoLayer, 0, size(count_ * c_.hidden_size) * size_of(table.type));
        for_rows(impl_, count_, [&](std::int64_t row) noexcept {
            const std::span<float> x(a_.residual + row * c_.hidden_size, size(c_.hidden_size));
            copy_floats(table, size(tokens[size(row)]) * x.size(), x);
            if (c_.embedding_multiplier != 1.0F) {
                for (float& element : x) element *= c_.embedding_multiplier;
            }
            if (positions == nullptr) return;
            float* const position = a_.normed + row * c_.hidden_size;
            copy_floats(*positions, size(first_position_ + row) * x.size(), {position, x.size()});
            for (std::size_t i = 0; i < x.size(); ++i) x[i] += position[i];
        });
    }

    void attention(const Layer& layer) {
        const std::int64_t width = c_.heads * c_.head_dim;
        const std::int64_t kv_width = c_.kv_heads * c_.head_dim;
        const float* const x = normalised(layer.attention_norm);
        project(*layer.query, x, a_.query);
        project(*layer.key, x, a_.key);
        project(*layer.value, x, a_.value);
        const bool whole = c_.qk_norm == QkNorm::all_heads;
        if (!layer.query_norm.empty()) {
            norm(layer.query_norm, a_.query, whole ? count_ : count_ * c_.heads, a_.query);
            norm(layer.key_norm, a_.key, whole ? count_ : count_ * c_.kv_heads, a_.key);
        }
        observe_rotated("q", a_.query, c_.heads);
        observe_rotated("k", a_.key, c_.kv_heads);
        observe(index_, "v", a_.value, kv_width);
        hooks_.interrupt.check("forward");  // what was projected may be unspecified
        segments_.begin(Operation::append, index_, 0, kv_bytes(count_));
        cache_.append(context_, size(index_), input(a_.key, c_.kv_heads), input(a_.value, c_.kv_heads));
        const CachedQuery query{.query = input(a_.query, c_.heads),
                                .cache = &cache_,
                                .layer = size(index_),
                                .output = {a_.attention, DType::f32, extents(c_.heads), strides(c_.heads)}};
        AttentionOptions options;
        options.scale = c_.attention_scale;
        options.softcap = c_.attention_softcap;
        options.sink_logits = layer.sinks;
        options.stop = hooks_.interrupt.stop;
        options.deadline = hooks_.interrupt.deadline;
        const KvCache::Impl::Layer& held = cache_.impl().layer(size(index_));
        std::int64_t seen_pairs = 0;
        for (std::int64_t i = 0; i < count_; ++i) seen_pairs += held.seen_at(first_position_ + i);
        segments_.begin(Operation::attention, index_, 4 * width * seen_pairs, kv_bytes(held.held()));
        attend(context_, std::span(&query, 1), options);
        observe(index_, "attn", a_.attention, width);
        add(*layer.attention_output, a_.attention, layer.attention_post_norm, c_.parallel);
    }

    void mlp(const Layer& layer) {
        const float* const x = normalised(layer.mlp_norm);
        if (c_.parallel) add_branch();  // attention's, now that the MLP's input has been made without it
        if (layer.router != nullptr) {
            mix(layer, x);
        } else {
            inner(layer.mlps.front(), x, count_);
            add(*layer.mlps.front().down, activated(layer.mlps.front()), layer.mlp_post_norm, false);
        }
    }

    /// What an MLP has before its last projection, of `rows` rows.
    void inner(const Mlp& mlp, const float* x, std::int64_t rows) {
        if (mlp.gate != nullptr) apply(Operation::projection, *mlp.gate, x, rows, a_.gate);
        apply(Operation::projection, *mlp.up, x, rows, a_.up);
        const std::int64_t columns = mlp.up->outputs();
        segments_.begin(Operation::activation, index_, kActivationFlops * columns * rows, 0);
        float* const out = activated(mlp);
        activate(impl_, c_.activation, out, mlp.gate != nullptr ? a_.up : nullptr, rows, columns, out,
                 c_.activation_limit);
    }
    float* activated(const Mlp& mlp) const noexcept { return mlp.gate != nullptr ? a_.gate : a_.up; }

    /// A mixture of experts, expert by expert in ascending order: what a token gets does not depend on the others.
    void mix(const Layer& layer, const float* x) {
        const std::int64_t hidden = c_.hidden_size;
        apply(Operation::projection, *layer.router, x, count_, a_.router);
        route();
        std::fill_n(a_.branch, count_ * hidden, 0.0F);
        const Experts& e = c_.experts;
        for (std::int64_t expert = 0; expert < e.count; ++expert) {
            // Calls visit(token, weight) for the tokens that use the expert, at most once each.
            const auto for_tokens = [&](const auto& visit) {
                for (std::int64_t i = 0; i < count_ * e.used; ++i) {
                    const std::int64_t token = i / e.used;
                    if (a_.chosen[token * e.count + i % e.used] == expert) visit(token, a_.chosen_weight[i]);
                }
            };
            std::int64_t rows = 0;
            for_tokens([&](std::int64_t token, float) {
                std::copy_n(x + token * hidden, hidden, a_.gathered + rows++ * hidden);
            });
            if (rows == 0) continue;
            const Mlp& mlp = layer.mlps[size(expert)];
            inner(mlp, a_.gathered, rows);
            apply(Operation::projection, *mlp.down, activated(mlp), rows, a_.result);
            rows = 0;
            for_tokens([&](std::int64_t token, float weight) {
                add_scaled(impl_, a_.result + rows++ * hidden, weight, 1, hidden, a_.branch + token * hidden);
            });
        }
        finish_branch(layer.mlp_post_norm, false);
    }

    /// The experts of each token, those of its largest router logits (of equals the first, a NaN last), and their
    /// weights.
    void route() {
        const Experts& e = c_.experts;
        for_rows(impl_, count_, [&](std::int64_t row) noexcept {
            const float* const logit = a_.router + row * e.count;
            std::int32_t* const chosen = a_.chosen + row * e.count;
            float* const weight = a_.chosen_weight + row * e.used;
            const auto rank = [&](std::int32_t i) noexcept {
                return std::isnan(logit[i]) ? -std::numeric_limits<float>::infinity() : logit[i];
            };
            std::iota(chosen, chosen + e.count, 0);
            std::partial_sort(chosen, chosen + e.used, chosen + e.count, [&](std::int32_t a, std::int32_t b) noexcept {
                return rank(a) > rank(b) || (rank(a) == rank(b) && a < b);
            });
            const float largest = logit[chosen[0]];
            float sum = 0.0F;
            for (std::int64_t i = 0; !e.normalised && i < e.count; ++i) sum += std::exp(logit[i] - largest);
            for (std::int64_t i = 0; i < e.used; ++i) {
                weight[i] = std::exp(logit[chosen[i]] - largest);
                if (e.normalised) sum += weight[i];
            }
            for (std::int64_t i = 0; i < e.used; ++i) weight[i] /= sum;
        });
    }

    void head(float* logits, std::int64_t rows, std::int64_t stride) {
        norm(decoder_.final_norm_, a_.residual + (count_ - rows) * c_.hidden_size, rows, a_.normed);
        const Linear& head = *decoder_.head_;
        segments_.begin(Operation::output_head, kNoLayer, 2 * head.inputs() * head.outputs() * rows, head.bytes());
        head.apply(impl_, workspace_, a_.normed, head.inputs(), rows, logits, stride);
        if (c_.logit_softcap > 0.0F) {
            for_rows(impl_, rows, [&](std::int64_t row) noexcept { cap(logits + row * stride); });
        }
    }

    /// softcap * tanh(x / softcap) of a row of logits, as attention does it to a span of scores.
    void cap(float* row) const noexcept {
        kernels::ScoreRules rules;
        rules.softcap = c_.logit_softcap;
        std::array<float, kernels::kSpanTokens> scores{};
        for (std::int64_t first = 0; first < c_.vocab_size; first += kernels::kSpanTokens) {
            const auto n = std::min<std::int64_t>(kernels::kSpanTokens, c_.vocab_size - first);
            const kernels::TokenRange range{0, static_cast<std::uint32_t>(n)};
            std::copy_n(row + first, n, scores.data());
            impl_.kernels.adjust_scores({scores.data(), kernels::kSpanTokens, 1, &range, rules});
            std::copy_n(scores.data(), n, row + first);
        }
    }

    // ------------------------------------------------------------------------------------------------ what all share

    /// The residual stream, normalised if there is a norm.
    const float* normalised(const NormWeights& weights) {
        if (weights.empty()) return a_.residual;
        norm(weights, a_.residual, count_, a_.normed);
        return a_.normed;
    }

    void norm(const NormWeights& weights, const float* x, std::int64_t rows, float* out) {
        const auto columns = static_cast<std::int64_t>(weights.weight.size());
        const auto epsilon = static_cast<float>(c_.norm_epsilon);
        segments_.begin(Operation::norm, index_, kNormFlops * rows * columns,
                        (weights.weight.size() + weights.bias.size()) * sizeof(float));
        if (c_.norm == Norm::layer) {
            layer_norm(impl_, x, rows, columns, weights.weight.data(), weights.bias.data(), epsilon, out);
        } else {
            rms_norm(impl_, x, rows, columns, weights.weight.data(), epsilon, out);
        }
    }

    void apply(Operation operation, const Linear& linear, const float* x, std::int64_t rows, float* y,
               Linear::Into into = Linear::Into::overwrite) {
        segments_.begin(operation, index_, 2 * linear.inputs() * linear.outputs() * rows, linear.bytes());
        linear.apply(impl_, workspace_, x, linear.inputs(), rows, y, linear.outputs(), into);
    }
    void project(const Linear& linear, const float* x, float* y) { apply(Operation::projection, linear, x, count_, y); }

    /// Adds what `linear` makes of x to the residual stream, or, `later`, leaves it in `branch`.
    void add(const Linear& linear, const float* x, const NormWeights& post_norm, bool later) {
        if (!later && post_norm.empty() && c_.residual_multiplier == 1.0F) {
            apply(Operation::projection, linear, x, count_, a_.residual, Linear::Into::add);
        } else {
            project(linear, x, a_.branch);
            finish_branch(post_norm, later);
        }
    }
    void finish_branch(const NormWeights& post_norm, bool later) {
        if (!post_norm.empty()) norm(post_norm, a_.branch, count_, a_.branch);
        if (!later) add_branch();
    }
    void add_branch() { add_scaled(impl_, a_.branch, c_.residual_multiplier, count_, c_.hidden_size, a_.residual); }

    std::size_t kv_bytes(std::int64_t rows) const noexcept { return size(rows) * token_bytes_of(cache_.shape()); }
    Extents<3> extents(std::int64_t heads) const noexcept { return {heads, count_, c_.head_dim}; }
    Extents<3> strides(std::int64_t heads) const noexcept { return {c_.head_dim, heads * c_.head_dim, 1}; }
    InputTensor<3> input(const float* rows, std::int64_t heads) const noexcept {
        return {rows, DType::f32, extents(heads), strides(heads)};
    }

    void observe(std::int64_t layer, std::string_view name, const float* rows, std::int64_t columns) const {
        if (hooks_.observer) hooks_.observer(layer, name, rows, columns);
    }
    /// The cache rotates what it stores and what it is asked; who looks on sees rows as they are then.
    void observe_rotated(std::string_view name, const float* rows, std::int64_t heads) const {
        if (!hooks_.observer) return;
        const std::optional<Rotary>& rotary = cache_.rotary(size(index_));
        if (!rotary) return observe(index_, name, rows, heads * c_.head_dim);
        std::vector<float> rotated(size(count_ * heads * c_.head_dim));
        rotate(context_, *rotary, input(rows, heads), first_position_,
               {rotated.data(), DType::f32, extents(heads), strides(heads)});
        observe(index_, name, rotated.data(), heads * c_.head_dim);
    }

    const Decoder& decoder_;
    const DecoderConfig& c_;
    Context& context_;
    Context::Impl& impl_;
    Workspace& workspace_;
    KvCache& cache_;
    const std::int64_t count_;
    const std::int64_t first_position_;
    const ForwardHooks& hooks_;
    const Segments& segments_;
    const Activations a_;
    std::int64_t index_ = kNoLayer;  ///< the layer that is computed
};

void Decoder::forward(Context& context, std::span<const std::int32_t> tokens, KvCache& cache, float* logits,
                      std::int64_t logit_rows, std::int64_t logit_stride, const ForwardHooks& hooks) const {
    hooks.interrupt.check("forward");
    const Segments segments(hooks.log);
    segments.begin(Operation::reserve, kNoLayer, 0, 0);
    const std::int64_t held = cache.length();
    for (std::size_t layer = 0; layer < cache.layers(); ++layer) {
        if (cache.length(layer) != held) {
            throw InvalidArgument(
                fmt::format("forward: layer {} of the cache holds {} tokens, others {}; a step was left half done",
                            layer, cache.length(layer), held));
        }
    }
    const auto count = static_cast<std::int64_t>(tokens.size());
    if (position_embedding_ != nullptr && (held > config_.max_positions || count > config_.max_positions - held)) {
        throw InvalidArgument(fmt::format("forward: {} tokens after {}; the model has embeddings of {} positions",
                                          count, held, config_.max_positions));
    }
    cache.reserve(count);
    if (tokens.empty()) return;
    try {
        auto workspace = context.impl().workspaces.lend();
        workspace->interrupt = &hooks.interrupt;
        Pass pass(*this, context, *workspace, cache, count, hooks, segments);
        pass.run(tokens, logits, logit_rows, logit_stride);
    } catch (...) {
        cache.impl().take_back(held);  // exact: nothing that a cache of `held` tokens holds is forgotten yet
        throw;
    }
}

}  // namespace headlong
