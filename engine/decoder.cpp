#include "engine/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <headlong/attention.hpp>
#include <headlong/error.hpp>
#include <set>
#include <string>
#include <utility>

#include "engine/attention/call.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/mapped_file.hpp"
#include "engine/row_ops.hpp"

namespace headlong {
namespace {

/// Takes tensors from a weight file by name, checks them, and remembers which ones were asked for.
class Weights {
  public:
    explicit Weights(const SafetensorsFile& file) : file_(file) {}

    const FileTensor& take(const std::string& name, const std::vector<std::int64_t>& shape) {
        const FileTensor& tensor = file_.at(name);
        if (tensor.type != FileType::f32 && tensor.type != FileType::f16 && tensor.type != FileType::bf16) {
            fail(tensor, "F32, F16 or BF16");
        }
        if (tensor.shape != shape) fail(tensor, fmt::format("of shape [{}]", fmt::join(shape, ", ")));
        taken_.insert(name);
        return tensor;
    }

    /// A tensor that is not used would change what the model computes, if we knew how.
    void refuse_rest(bool tied_embeddings, const std::string& head) const {
        for (const FileTensor& tensor : file_.tensors()) {
            const bool computed =
                tensor.name.ends_with(".rotary_emb.inv_freq");  // old files store what config.json says
            const bool tied_copy = tied_embeddings && tensor.name == head + ".weight";
            if (!taken_.contains(tensor.name) && !computed && !tied_copy) {
                throw BadFile(fmt::format("{}: tensor '{}' is not part of this architecture", one_line(file_.path()),
                                          one_line(tensor.name)));
            }
        }
    }

  private:
    [[noreturn]] void fail(const FileTensor& tensor, const std::string& allowed) const {
        throw BadFile(fmt::format("{}: tensor '{}' is {}; it must be {}", one_line(file_.path()), one_line(tensor.name),
                                  describe(tensor), allowed));
    }
    const SafetensorsFile& file_;
    std::set<std::string, std::less<>> taken_;
};

std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

constexpr std::int64_t kNoLayer = -1;
// FLOPs of one element: a square and its sum, two factors; negation, exp, sum, quotient, gate.
constexpr std::int64_t kNormFlops = 4;
constexpr std::int64_t kActivationFlops = 5;

WeightType stored_type(const FileTensor& weight) noexcept {
    return weight.type == FileType::f16    ? WeightType::f16
           : weight.type == FileType::bf16 ? WeightType::bf16
                                           : WeightType::f32;
}

}  // namespace

KvCacheOptions cache_options_of(const DecoderConfig& config, const KvTypes& types) {
    KvCacheOptions options;
    options.shape = {.kv_heads = config.kv_heads,
                     .head_dim = config.head_dim,
                     .value_dim = config.head_dim,
                     .key_type = types.keys,
                     .value_type = types.values};
    options.layers = config.layers;
    options.capacity = config.max_positions;
    options.rotary = Rotary({.head_dim = config.head_dim, .theta = config.rope_theta});
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
    float* gate;       ///< [tokens][intermediate]
    float* up;         ///< the same

    static std::size_t bytes(const DecoderConfig& c, std::int64_t tokens) noexcept {
        const std::int64_t row =
            2 * c.hidden_size + 2 * c.heads * c.head_dim + 2 * c.kv_heads * c.head_dim + 2 * c.intermediate_size;
        return saturating_product(saturating_product(size(row), size(tokens)), sizeof(float));
    }

    Activations(Workspace& workspace, const DecoderConfig& c, std::int64_t tokens) {
        const std::int64_t width = c.heads * c.head_dim;
        const std::int64_t kv_width = c.kv_heads * c.head_dim;
        auto* p = reinterpret_cast<float*>(workspace.rows.ensure(bytes(c, tokens)));
        const auto next = [&](std::int64_t columns) { return std::exchange(p, p + columns * tokens); };
        residual = next(c.hidden_size);
        normed = next(c.hidden_size);
        query = next(width);
        key = next(kv_width);
        value = next(kv_width);
        attention = next(width);
        gate = next(c.intermediate_size);
        up = next(c.intermediate_size);
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

Decoder::Decoder(Context::Impl& context, std::pmr::memory_resource& memory, DecoderConfig config,
                 std::shared_ptr<const SafetensorsFile> weights, std::optional<WeightType> type)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      rotary_(RotaryOptions{.head_dim = config_.head_dim, .theta = config_.rope_theta}) {
    const DecoderConfig& c = config_;
    const TensorNames& names = *c.names;
    Weights file(*weights_);
    const auto linear = [&](const std::string& name, std::int64_t inputs, std::int64_t outputs, bool has_bias) {
        const FileTensor& weight = file.take(name + ".weight", {outputs, inputs});
        const FileTensor* bias = has_bias ? &file.take(name + ".bias", {outputs}) : nullptr;
        return Linear(context, memory, weight, bias, type.value_or(stored_type(weight)));
    };
    const auto norm = [&](const std::string& name) { return to_floats(file.take(name, {c.hidden_size})); };

    embedding_ = &file.take(names.embedding, {c.vocab_size, c.hidden_size});
    const std::int64_t width = c.heads * c.head_dim;
    const std::int64_t kv_width = c.kv_heads * c.head_dim;
    for (std::int64_t i = 0; i < c.layers; ++i) {
        const auto named = [i](const char* pattern) { return fmt::format(fmt::runtime(pattern), i); };
        layers_.push_back(std::unique_ptr<Layer>(new Layer{
            .attention_norm = norm(named(names.attention_norm)),
            .query = linear(named(names.query), c.hidden_size, width, c.attention_bias),
            .key = linear(named(names.key), c.hidden_size, kv_width, c.attention_bias),
            .value = linear(named(names.value), c.hidden_size, kv_width, c.attention_bias),
            .attention_output = linear(named(names.attention_output), width, c.hidden_size, c.attention_bias),
            .mlp_norm = norm(named(names.mlp_norm)),
            .gate = linear(named(names.gate), c.hidden_size, c.intermediate_size, c.mlp_bias),
            .up = linear(named(names.up), c.hidden_size, c.intermediate_size, c.mlp_bias),
            .down = linear(named(names.down), c.intermediate_size, c.hidden_size, c.mlp_bias),
        }));
    }
    final_norm_ = norm(names.final_norm);
    if (c.tied_embeddings) {
        head_ =
            std::make_unique<Linear>(context, memory, *embedding_, nullptr, type.value_or(stored_type(*embedding_)));
    } else {
        head_ = std::unique_ptr<Linear>(new Linear(linear(names.head, c.hidden_size, c.vocab_size, false)));
    }
    file.refuse_rest(c.tied_embeddings, names.head);
}

std::size_t Decoder::weight_bytes(const DecoderConfig& c, std::optional<WeightType> type) noexcept {
    const std::int64_t width = c.heads * c.head_dim;
    const std::int64_t kv_width = c.kv_heads * c.head_dim;
    std::size_t layer = 0;
    const auto add = [&](std::int64_t inputs, std::int64_t outputs, bool has_bias) {
        layer = saturating_sum(layer, Linear::bytes_for(inputs, outputs, has_bias, type.value_or(c.stored_type)));
    };
    add(c.hidden_size, width, c.attention_bias);
    add(c.hidden_size, kv_width, c.attention_bias);
    add(c.hidden_size, kv_width, c.attention_bias);
    add(width, c.hidden_size, c.attention_bias);
    add(c.hidden_size, c.intermediate_size, c.mlp_bias);
    add(c.hidden_size, c.intermediate_size, c.mlp_bias);
    add(c.intermediate_size, c.hidden_size, c.mlp_bias);
    return saturating_sum(saturating_product(layer, size(c.layers)),
                          Linear::bytes_for(c.hidden_size, c.vocab_size, false, type.value_or(c.stored_type)));
}

std::size_t Decoder::weight_bytes() const noexcept {
    std::size_t bytes = head_->bytes();
    for (const auto& layer : layers_) {
        for (const Linear* linear : {&layer->query, &layer->key, &layer->value, &layer->attention_output, &layer->gate,
                                     &layer->up, &layer->down}) {
            bytes += linear->bytes();
        }
    }
    return bytes;
}

std::size_t Decoder::scratch_bytes(const Context::Impl& context, const DecoderConfig& c,
                                   std::span<const std::int64_t> token_counts, const KvTypes& types,
                                   std::optional<WeightType> type, std::int64_t sink_tokens) noexcept {
    std::size_t rows = 0;
    std::size_t tables = 0;  // of angles
    AttentionScratch attention;
    Linear::Scratch linear;
    for (const std::int64_t tokens : token_counts) {  // buffers grow to the most that any call needs of them
        if (tokens == 0) continue;
        const BlockTable blocks;
        Sequence sequence;
        sequence.q_len = tokens;
        sequence.blocks = &blocks;
        sequence.key_type = stored_type(types.keys);
        sequence.value_type = stored_type(types.values);
        AttentionProblem problem;
        problem.heads = c.heads;
        problem.kv_heads = c.kv_heads;
        problem.head_dim = problem.value_dim = c.head_dim;
        problem.sequences = {&sequence, 1};
        const AttentionScratch of_call = attention_scratch(context, problem);
        rows = std::max(rows, Activations::bytes(c, tokens));
        const KvCache::Impl::AppendScratch of_append =
            KvCache::Impl::append_scratch(context, c.head_dim, c.head_dim, tokens);
        tables = std::max({tables, of_append.tables,
                           saturating_product(size((sink_tokens > 0 ? 2 : 1) * c.head_dim * tokens), sizeof(float))});
        attention.workers = std::max(attention.workers, of_append.workers);
        for (const std::int64_t inputs : {c.hidden_size, c.heads * c.head_dim, c.intermediate_size}) {
            const Linear::Scratch of_layer = Linear::scratch(context, inputs, tokens, type.value_or(c.stored_type));
            linear.workers = std::max(linear.workers, of_layer.workers);
            linear.quantised = std::max(linear.quantised, of_layer.quantised);
        }
        attention.workers = std::max(attention.workers, of_call.workers);
        attention.units = std::max(attention.units, of_call.units);
        attention.states = std::max(attention.states, of_call.states);
    }
    if (rows == 0) return 0;
    return saturating_sum(saturating_sum(saturating_sum(saturating_sum(rows, tables), list_bytes(1, 0)),
                                         saturating_sum(linear.workers, linear.quantised)),
                          saturating_sum(saturating_sum(attention.workers, attention.units), attention.states));
}

void Decoder::forward(Context& context, std::span<const std::int32_t> tokens, KvCache& cache, float* logits,
                      std::int64_t logit_rows, std::int64_t logit_stride, const ForwardHooks& hooks) const {
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
    cache.reserve(static_cast<std::int64_t>(tokens.size()));
    try {
        run(context, tokens, cache, logits, logit_rows, logit_stride, hooks, segments);
    } catch (...) {
        cache.impl().take_back(held);  // exact: nothing that a cache of `held` tokens holds is forgotten yet
        throw;
    }
}

void Decoder::run(Context& context, std::span<const std::int32_t> tokens, KvCache& cache, float* logits,
                  std::int64_t logit_rows, std::int64_t logit_stride, const ForwardHooks& hooks,
                  const Segments& segments) const {
    const DecoderConfig& c = config_;
    const auto count = static_cast<std::int64_t>(tokens.size());
    if (count == 0) return;
    const std::int64_t first_position = cache.length();
    const std::int64_t width = c.heads * c.head_dim;
    const std::int64_t kv_width = c.kv_heads * c.head_dim;
    Context::Impl& impl = context.impl();
    auto workspace = impl.workspaces.lend();
    const Activations a(*workspace, c, count);
    const auto observe = [&](std::int64_t layer, std::string_view name, const float* rows, std::int64_t columns) {
        if (hooks.observer) hooks.observer(layer, name, rows, columns);
    };
    // The cache rotates what it stores and what it is asked; who looks on sees rows as they are then.
    const auto observe_rotated = [&](std::int64_t layer, std::string_view name, const float* rows, std::int64_t heads) {
        if (!hooks.observer) return;
        std::vector<float> rotated(size(count * heads * c.head_dim));
        const Extents<3> extents{heads, count, c.head_dim};
        const Extents<3> strides{c.head_dim, heads * c.head_dim, 1};
        rotate(context, rotary_, {rows, DType::f32, extents, strides}, first_position,
               {rotated.data(), DType::f32, extents, strides});
        observe(layer, name, rotated.data(), heads * c.head_dim);
    };
    const auto norm = [&](std::int64_t layer, const float* rows, std::int64_t row_count,
                          const std::vector<float>& weight) {
        segments.begin(Operation::norm, layer, kNormFlops * row_count * c.hidden_size, weight.size() * sizeof(float));
        rms_norm(impl, rows, row_count, c.hidden_size, weight.data(), static_cast<float>(c.norm_epsilon), a.normed);
    };
    const auto extents = [&](std::int64_t heads) { return Extents<3>{heads, count, c.head_dim}; };
    const auto strides = [&](std::int64_t heads) { return Extents<3>{c.head_dim, heads * c.head_dim, 1}; };
    const auto input = [&](const float* rows, std::int64_t heads) {
        return InputTensor<3>{rows, DType::f32, extents(heads), strides(heads)};
    };
    const auto output = [&](float* rows, std::int64_t heads) {
        return OutputTensor<3>{rows, DType::f32, extents(heads), strides(heads)};
    };

    const auto apply = [&](Operation operation, std::int64_t layer, const Linear& linear, const float* x,
                           std::int64_t rows, float* y, std::int64_t y_stride, Linear::Into into) {
        segments.begin(operation, layer, 2 * linear.inputs() * linear.outputs() * rows, linear.bytes());
        linear.apply(impl, *workspace, x, linear.inputs(), rows, y, y_stride, into);
    };
    const auto project = [&](std::int64_t layer, const Linear& linear, const float* x, float* y,
                             Linear::Into into = Linear::Into::overwrite) {
        apply(Operation::projection, layer, linear, x, count, y, linear.outputs(), into);
    };
    const auto kv_bytes = [&](std::int64_t rows) { return size(rows) * token_bytes_of(cache.shape()); };

    segments.begin(Operation::embedding, kNoLayer, 0, size(count * c.hidden_size) * size_of(embedding_->type));
    for_rows(impl, count, [&](std::int64_t row) noexcept {
        copy_floats(*embedding_, size(tokens[size(row)]) * size(c.hidden_size),
                    {a.residual + row * c.hidden_size, size(c.hidden_size)});
    });
    observe(0, "embedding", a.residual, c.hidden_size);

    for (std::int64_t index = 0; index < c.layers; ++index) {
        const Layer& layer = *layers_[size(index)];
        norm(index, a.residual, count, layer.attention_norm);
        project(index, layer.query, a.normed, a.query);
        project(index, layer.key, a.normed, a.key);
        project(index, layer.value, a.normed, a.value);
        observe_rotated(index, "q", a.query, c.heads);
        observe_rotated(index, "k", a.key, c.kv_heads);
        observe(index, "v", a.value, kv_width);
        segments.begin(Operation::append, index, 0, kv_bytes(count));
        cache.append(context, size(index), input(a.key, c.kv_heads), input(a.value, c.kv_heads));
        const CachedQuery query{.query = input(a.query, c.heads),
                                .cache = &cache,
                                .layer = size(index),
                                .output = output(a.attention, c.heads)};
        const KvCache::Impl::Layer& held = cache.impl().layer(size(index));
        std::int64_t seen_pairs = 0;
        for (std::int64_t i = 0; i < count; ++i) seen_pairs += held.seen_at(first_position + i);
        segments.begin(Operation::attention, index, 4 * width * seen_pairs, kv_bytes(held.held()));
        attend(context, std::span(&query, 1));
        observe(index, "attn", a.attention, width);
        project(index, layer.attention_output, a.attention, a.residual, Linear::Into::add);

        norm(index, a.residual, count, layer.mlp_norm);
        project(index, layer.gate, a.normed, a.gate);
        project(index, layer.up, a.normed, a.up);
        segments.begin(Operation::activation, index, kActivationFlops * c.intermediate_size * count, 0);
        swiglu(impl, a.gate, a.up, count, c.intermediate_size, a.gate);
        project(index, layer.down, a.gate, a.residual, Linear::Into::add);
        observe(index, "out", a.residual, c.hidden_size);
    }
    if (logit_rows == 0) return;
    norm(kNoLayer, a.residual + (count - logit_rows) * c.hidden_size, logit_rows, final_norm_);
    apply(Operation::output_head, kNoLayer, *head_, a.normed, logit_rows, logits, logit_stride,
          Linear::Into::overwrite);
}

}  // namespace headlong
