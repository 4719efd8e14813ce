// How a decoder takes its weights from files.
#include <fmt/format.h>

#include <algorithm>
#include <headlong/error.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "engine/decoder.hpp"
#include "engine/mapped_file.hpp"
#include "kernels/half.hpp"

namespace headlong {
namespace {

std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

WeightType stored_type(const FileTensor& weight) noexcept {
    return weight.type == FileType::f16    ? WeightType::f16
           : weight.type == FileType::bf16 ? WeightType::bf16
                                           : WeightType::f32;
}

/// Which of a tensor's outputs a linear layer has: output o is number first + o / group * group_stride + o % group.
struct OutputRows {
    std::int64_t count;
    std::int64_t first = 0;
    std::int64_t group = std::int64_t{1} << 62;
    std::int64_t group_stride = 0;

    std::int64_t row(std::int64_t output) const noexcept {
        return first + output / group * group_stride + output % group;
    }
};

bool same_name(const char* a, const char* b) noexcept {
    return a != nullptr && b != nullptr && std::string_view(a) == b;
}

}  // namespace

/// Where tensors come from: files, or nowhere, to learn which ones a decoder takes.
class Decoder::Source {
  public:
    Source() = default;
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;
    virtual ~Source() = default;

    virtual bool has(const std::string& name) const = 0;
    virtual const FileTensor& take(const std::string& name, const std::vector<std::int64_t>& shape) = 0;
    /// `count` elements from the first one on.
    virtual std::vector<float> values(const FileTensor& tensor, std::size_t first, std::size_t count) const = 0;
    virtual std::unique_ptr<Linear> linear(const FileMatrix& weight, std::span<const float> bias,
                                           std::optional<WeightType> type) = 0;
};

/// Checks what it takes, and remembers what was asked for.
class Decoder::Files final : public Source {
  public:
    Files(Context::Impl& context, std::pmr::memory_resource& memory, const WeightFiles& files,
          std::optional<WeightType> type, const LoadProgress& on_load)
        : context_(context), memory_(memory), files_(files), type_(type), on_load_(on_load) {
        for (const WeightFiles::Entry& entry : files.entries()) all_ += entry.tensor->bytes.size();
    }

    bool has(const std::string& name) const override { return files_.find(name) != nullptr; }

    const FileTensor& take(const std::string& name, const std::vector<std::int64_t>& shape) override {
        const WeightFiles::Entry& entry = files_.at(name);
        const FileTensor& tensor = *entry.tensor;
        if (tensor.type != FileType::f32 && tensor.type != FileType::f16 && tensor.type != FileType::bf16) {
            fail(entry, "F32, F16 or BF16");
        }
        if (tensor.shape != shape) fail(entry, fmt::format("of shape [{}]", fmt::join(shape, ", ")));
        if (taken_.insert(name).second) done_ += tensor.bytes.size();
        return tensor;
    }

    std::vector<float> values(const FileTensor& tensor, std::size_t first, std::size_t count) const override {
        std::vector<float> elements(count);
        copy_floats(tensor, first, elements);
        return elements;
    }

    std::unique_ptr<Linear> linear(const FileMatrix& weight, std::span<const float> bias,
                                   std::optional<WeightType> type) override {
        if (!type) type = type_.value_or(stored_type(*weight.tensor));
        auto made = std::make_unique<Linear>(context_, memory_, weight, bias, *type);
        if (on_load_) on_load_(done_, all_);
        return made;
    }

    /// A tensor that is not used would change what the model computes, if we knew how.
    void refuse_rest(const DecoderConfig& config) const {
        for (const auto& [tensor, file] : files_.entries()) {
            const std::string& name = tensor->name;
            if (taken_.contains(name)) continue;
            if (name.ends_with(".rotary_emb.inv_freq")) continue;  // old files store what config.json says
            if (config.tied_embeddings && name.ends_with(std::string(config.names->head) + ".weight")) continue;
            const bool ignored = std::ranges::any_of(config.names->ignored, [&](const char* part) {
                return part != nullptr && (name.starts_with(part) || name.ends_with(part));
            });
            if (ignored) continue;
            throw BadFile(fmt::format("{}: tensor '{}' is not part of this architecture", one_line(file->path()),
                                      one_line(name)));
        }
        if (on_load_) on_load_(all_, all_);
    }

  private:
    [[noreturn]] static void fail(const WeightFiles::Entry& entry, const std::string& allowed) {
        throw BadFile(fmt::format("{}: tensor '{}' is {}; it must be {}", one_line(entry.file->path()),
                                  one_line(entry.tensor->name), describe(*entry.tensor), allowed));
    }

    Context::Impl& context_;
    std::pmr::memory_resource& memory_;
    const WeightFiles& files_;
    const std::optional<WeightType> type_;
    const LoadProgress& on_load_;
    std::set<std::string, std::less<>> taken_;
    std::uint64_t done_ = 0;
    std::uint64_t all_ = 0;
};

/// Lists what is taken.
class Decoder::Wishes final : public Source {
  public:
    bool has(const std::string&) const override { return false; }
    const FileTensor& take(const std::string& name, const std::vector<std::int64_t>& shape) override {
        if (names_.insert(name).second) tensors.push_back({name, shape});
        return none_;
    }
    std::vector<float> values(const FileTensor&, std::size_t, std::size_t) const override { return {}; }
    std::unique_ptr<Linear> linear(const FileMatrix&, std::span<const float>, std::optional<WeightType>) override {
        return nullptr;
    }

    std::vector<TensorShape> tensors;

  private:
    std::set<std::string, std::less<>> names_;
    const FileTensor none_{};
};

/// Knows which tensors a decoder is made of, and where in them its parts lie.
class Decoder::Loader {
  public:
    Loader(const DecoderConfig& config, Source& source, std::pmr::memory_resource& memory)
        : config_(config), source_(source), memory_(memory) {
        for (const char* prefix : config.names->prefixes) {
            if (prefix == nullptr) break;
            if (prefix_.empty()) prefix_ = prefix;  // what errors name, if none is there
            if (!source.has(std::string(prefix) + config.names->embedding + ".weight")) continue;
            prefix_ = prefix;
            break;
        }
    }

    /// All parts, in the order of the layers.
    void load(Decoder& decoder) {
        const DecoderConfig& c = config_;
        const TensorNames& names = *c.names;
        decoder.embedding_ = &embedding(names.embedding, c.vocab_size);
        if (c.learned_positions) decoder.position_embedding_ = &embedding(names.position_embedding, c.max_positions);
        decoder.layers_.reserve(size(c.layers));
        for (std::int64_t i = 0; i < c.layers; ++i) {
            Layer& layer = decoder.layers_.emplace_back(memory_);
            attention(layer, i);
            mlp(layer, i);
        }
        decoder.final_norm_ = norm(names.final_norm, c.hidden_size);
        for (std::pmr::vector<float>* part : {&decoder.final_norm_.weight, &decoder.final_norm_.bias}) {
            for (float& x : *part) x /= c.logits_divisor;
        }
        decoder.head_ = head(*decoder.embedding_);
    }

  private:
    const FileTensor& embedding(const char* name, std::int64_t rows) {
        return source_.take(named(name) + ".weight", {rows, config_.hidden_size});
    }

    NormWeights norm(const char* name, std::int64_t columns, std::int64_t layer = 0) {
        NormWeights result(memory_);
        if (name == nullptr) return result;
        const std::string full = named(name, layer);
        result.weight = kept(values(full + ".weight", {columns}));
        if (config_.norm == Norm::layer) result.bias = kept(values(full + ".bias", {columns}));
        if (config_.norm == Norm::rms_plus_one) {
            for (float& weight : result.weight) weight += 1.0F;
        }
        return result;
    }

    std::pmr::vector<float> kept(const std::vector<float>& floats) { return {floats.begin(), floats.end(), &memory_}; }

    std::pmr::vector<float> floats(const char* name, std::int64_t count, std::int64_t layer) {
        if (name == nullptr) return std::pmr::vector<float>(&memory_);
        return kept(values(named(name, layer), {count}));
    }

    void attention(Layer& layer, std::int64_t index) {
        const DecoderConfig& c = config_;
        const TensorNames& names = *c.names;
        const std::int64_t width = c.heads * c.head_dim;
        const std::int64_t kv_width = c.kv_heads * c.head_dim;
        layer.attention_norm = norm(names.attention_norm, c.hidden_size, index);
        layer.attention_post_norm = norm(names.attention_post_norm, c.hidden_size, index);
        if (!same_name(names.query, names.key)) {
            layer.query = linear(names.query, index, c.hidden_size, width, {width}, c.qkv_bias);
            layer.key = linear(names.key, index, c.hidden_size, kv_width, {kv_width}, c.qkv_bias);
            layer.value = linear(names.value, index, c.hidden_size, kv_width, {kv_width}, c.qkv_bias);
        } else {
            const std::int64_t rows = width + 2 * kv_width;
            const auto part = [&](const OutputRows& outputs) {
                return linear(names.query, index, c.hidden_size, rows, outputs, c.qkv_bias);
            };
            if (c.fused_rows == FusedRows::per_head) {  // of as many heads as KV heads
                const auto of_head = [&](std::int64_t which) {
                    return part({width, which * c.head_dim, c.head_dim, 3 * c.head_dim});
                };
                layer.query = of_head(0);
                layer.key = of_head(1);
                layer.value = of_head(2);
            } else {
                layer.query = part({width});
                layer.key = part({kv_width, width});
                layer.value = part({kv_width, width + kv_width});
            }
        }
        const bool whole = c.qk_norm == QkNorm::all_heads;
        if (c.qk_norm != QkNorm::none) {
            layer.query_norm = norm(names.query_norm, whole ? width : c.head_dim, index);
            layer.key_norm = norm(names.key_norm, whole ? kv_width : c.head_dim, index);
        }
        layer.sinks = floats(names.sinks, c.heads, index);
        layer.attention_output =
            linear(names.attention_output, index, width, c.hidden_size, {c.hidden_size}, c.output_bias);
    }

    void mlp(Layer& layer, std::int64_t index) {
        const DecoderConfig& c = config_;
        const TensorNames& names = *c.names;
        layer.mlp_norm = norm(names.mlp_norm, c.hidden_size, index);
        layer.mlp_post_norm = norm(names.mlp_post_norm, c.hidden_size, index);
        if (c.is_sparse(index)) return experts(layer, index);
        Mlp mlp;
        const std::int64_t inner = c.intermediate_size;
        if (same_name(names.gate, names.up)) {
            mlp.gate = linear(names.gate, index, c.hidden_size, 2 * inner, {inner}, c.mlp_bias);
            mlp.up = linear(names.up, index, c.hidden_size, 2 * inner, {inner, inner}, c.mlp_bias);
        } else {
            if (names.gate != nullptr) {
                mlp.gate = linear(names.gate, index, c.hidden_size, inner, {inner}, c.mlp_bias);
            }
            mlp.up = linear(names.up, index, c.hidden_size, inner, {inner}, c.mlp_bias);
        }
        mlp.down = linear(names.down, index, inner, c.hidden_size, {c.hidden_size}, c.mlp_bias);
        layer.mlps.push_back(std::move(mlp));
    }

    std::unique_ptr<Linear> head(const FileTensor& embedding) {
        const std::int64_t vocab = config_.vocab_size;
        const std::int64_t hidden = config_.hidden_size;
        const FileTensor& weight = config_.tied_embeddings
                                       ? embedding
                                       : source_.take(std::string(config_.names->head) + ".weight", {vocab, hidden});
        return source_.linear(matrix(weight, hidden, vocab, {vocab}, false), {}, {});
    }

    std::string named(const char* pattern, std::int64_t layer = 0, std::int64_t expert = 0) const {
        return prefix_ + fmt::format(fmt::runtime(pattern), layer, expert);
    }

    /// Outputs of a matrix that a tensor holds whole.
    static FileMatrix matrix(const FileTensor& tensor, std::int64_t inputs, std::int64_t all_outputs,
                             const OutputRows& outputs, bool inputs_first) noexcept {
        const std::int64_t stride = inputs_first ? 1 : inputs;
        return {.tensor = &tensor,
                .inputs = inputs,
                .outputs = outputs.count,
                .first = outputs.first * stride,
                .output_stride = stride,
                .input_stride = inputs_first ? all_outputs : 1,
                .group = outputs.group,
                .group_stride = outputs.group_stride * stride};
    }

    std::vector<float> values(const std::string& name, const std::vector<std::int64_t>& shape) {
        const FileTensor& tensor = source_.take(name, shape);
        return source_.values(tensor, 0, tensor.count());
    }

    /// A layer of some outputs of the matrix `name`, which has `all_outputs`.
    std::unique_ptr<Linear> linear(const char* name, std::int64_t layer, std::int64_t inputs, std::int64_t all_outputs,
                                   const OutputRows& outputs, bool has_bias, std::int64_t expert = 0,
                                   std::optional<WeightType> type = {}) {
        const std::string full = named(name, layer, expert);
        const bool inputs_first = config_.inputs_first;
        const FileTensor& weight = source_.take(
            full + ".weight", inputs_first ? std::vector{inputs, all_outputs} : std::vector{all_outputs, inputs});
        std::vector<float> bias;
        if (has_bias) {
            const std::vector<float> all = values(full + ".bias", {all_outputs});
            for (std::int64_t o = 0; !all.empty() && o < outputs.count; ++o) bias.push_back(all[size(outputs.row(o))]);
        }
        return source_.linear(matrix(weight, inputs, all_outputs, outputs, inputs_first), bias, type);
    }

    void experts(Layer& layer, std::int64_t index) {
        const DecoderConfig& c = config_;
        const TensorNames& names = *c.names;
        const Experts& e = c.experts;
        // what chooses stays as exact as it is
        layer.router = linear(names.router, index, c.hidden_size, e.count, {e.count}, e.bias, 0, WeightType::f32);
        const bool stacked = same_name(names.expert_gate, names.expert_up);
        for (std::int64_t i = 0; i < e.count; ++i) {
            const std::int64_t inner = e.intermediate_size;
            Mlp mlp;
            if (stacked) {
                // [experts, inputs, outputs], gate and up alternating
                mlp.gate = expert(names.expert_gate, index, i, c.hidden_size, inner, 2, 0);
                mlp.up = expert(names.expert_up, index, i, c.hidden_size, inner, 2, 1);
                mlp.down = expert(names.expert_down, index, i, inner, c.hidden_size, 1, 0);
            } else {
                mlp.gate = linear(names.expert_gate, index, c.hidden_size, inner, {inner}, e.bias, i);
                mlp.up = linear(names.expert_up, index, c.hidden_size, inner, {inner}, e.bias, i);
                mlp.down = linear(names.expert_down, index, inner, c.hidden_size, {c.hidden_size}, e.bias, i);
            }
            layer.mlps.push_back(std::move(mlp));
        }
    }

    /// One expert's matrix of a tensor [experts, inputs, outputs * step]: outputs offset, offset + step, ...
    std::unique_ptr<Linear> expert(const char* name, std::int64_t layer, std::int64_t index, std::int64_t inputs,
                                   std::int64_t outputs, std::int64_t step, std::int64_t offset) {
        const std::string full = named(name, layer);
        const std::int64_t count = config_.experts.count;
        const std::int64_t row = outputs * step;
        const FileTensor& weight = source_.take(full, {count, inputs, row});
        std::vector<float> bias;
        if (config_.experts.bias) {
            const FileTensor& all = source_.take(full + "_bias", {count, row});
            const std::vector<float> own = source_.values(all, size(index * row), size(row));
            for (std::int64_t o = 0; !own.empty() && o < outputs; ++o) bias.push_back(own[size(o * step + offset)]);
        }
        return source_.linear({.tensor = &weight,
                               .inputs = inputs,
                               .outputs = outputs,
                               .first = index * inputs * row + offset,
                               .output_stride = step,
                               .input_stride = row},
                              bias, {});
    }

    const DecoderConfig& config_;
    Source& source_;
    std::pmr::memory_resource& memory_;  ///< for what is no Linear's
    std::string prefix_;
};

Decoder::Decoder(Context::Impl& context, std::pmr::memory_resource& memory, DecoderConfig config,
                 std::shared_ptr<const WeightFiles> weights, std::optional<WeightType> type,
                 const LoadProgress& on_load)
    : config_(std::move(config)), weights_(std::move(weights)), layers_(&memory), final_norm_(memory) {
    Files files(context, memory, *weights_, type, on_load);
    Loader(config_, files, memory).load(*this);
    files.refuse_rest(config_);
    if (config_.round_embedding_multiplier) {
        float& multiplier = config_.embedding_multiplier;
        if (embedding_->type == FileType::bf16) multiplier = kernels::widen_bf16(kernels::narrow_bf16(multiplier));
        if (embedding_->type == FileType::f16) multiplier = kernels::widen_f16(kernels::narrow_f16(multiplier));
    }
}

Decoder::Decoder(std::pmr::memory_resource& memory, DecoderConfig config)
    : config_(std::move(config)), layers_(&memory), final_norm_(memory) {}

std::vector<TensorShape> Decoder::tensors(const DecoderConfig& config) {
    std::pmr::memory_resource& memory = *std::pmr::new_delete_resource();
    Decoder unfilled(memory, config);
    Wishes wishes;
    Loader(unfilled.config_, wishes, memory).load(unfilled);
    return std::move(wishes.tensors);
}

Decoder::~Decoder() = default;

namespace {

/// Shows every linear layer of such a decoder to visit(inputs, outputs, has_bias, type, how many there are).
template <class Visit>
void for_each_linear(const DecoderConfig& c, std::optional<WeightType> type, const Visit& visit) {
    const WeightType stored = type.value_or(c.stored_type);
    const std::int64_t width = c.heads * c.head_dim;
    const std::int64_t kv_width = c.kv_heads * c.head_dim;
    visit(c.hidden_size, width, c.qkv_bias, stored, c.layers);
    visit(c.hidden_size, kv_width, c.qkv_bias, stored, 2 * c.layers);
    visit(width, c.hidden_size, c.output_bias, stored, c.layers);
    std::int64_t sparse = 0;
    for (std::int64_t i = 0; i < c.layers; ++i) sparse += c.is_sparse(i) ? 1 : 0;
    const std::int64_t dense = c.layers - sparse;
    const std::int64_t inward = c.gated() ? 2 : 1;
    if (dense > 0) {
        visit(c.hidden_size, c.intermediate_size, c.mlp_bias, stored, inward * dense);
        visit(c.intermediate_size, c.hidden_size, c.mlp_bias, stored, dense);
    }
    if (sparse > 0) {
        const Experts& e = c.experts;
        visit(c.hidden_size, e.count, e.bias, WeightType::f32, sparse);
        visit(c.hidden_size, e.intermediate_size, e.bias, stored, inward * e.count * sparse);
        visit(e.intermediate_size, c.hidden_size, e.bias, stored, e.count * sparse);
    }
    visit(c.hidden_size, c.vocab_size, false, stored, 1);
}

}  // namespace

std::size_t Decoder::weight_bytes(const DecoderConfig& c, std::optional<WeightType> type) noexcept {
    std::size_t bytes = 0;
    for_each_linear(
        c, type,
        [&](std::int64_t inputs, std::int64_t outputs, bool has_bias, WeightType stored, std::int64_t count) noexcept {
            bytes = saturating_sum(
                bytes, saturating_product(Linear::bytes_for(inputs, outputs, has_bias, stored), size(count)));
        });
    return bytes;
}

std::size_t Decoder::weight_bytes() const noexcept {
    std::size_t bytes = head_->bytes();
    const auto add = [&](const std::unique_ptr<Linear>& linear) noexcept {
        if (linear != nullptr) bytes += linear->bytes();
    };
    for (const Layer& layer : layers_) {
        for (const auto* linear : {&layer.query, &layer.key, &layer.value, &layer.attention_output, &layer.router}) {
            add(*linear);
        }
        for (const Mlp& mlp : layer.mlps) {
            for (const auto* linear : {&mlp.gate, &mlp.up, &mlp.down}) add(*linear);
        }
    }
    return bytes;
}

Linear::Scratch Decoder::linear_scratch(const Context::Impl& context, const DecoderConfig& c, std::int64_t tokens,
                                        std::optional<WeightType> type) noexcept {
    Linear::Scratch most;
    for_each_linear(c, type, [&](std::int64_t inputs, std::int64_t, bool, WeightType stored, std::int64_t) noexcept {
        const Linear::Scratch scratch = Linear::scratch(context, inputs, tokens, stored);
        most.workers = std::max(most.workers, scratch.workers);
        most.quantised = std::max(most.quantised, scratch.quantised);
    });
    return most;
}

}  // namespace headlong
