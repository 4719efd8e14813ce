#include <headlong/multi_head_attention.hpp>

#include <fmt/format.h>

#include <new>
#include <utility>

#include "engine/kv_cache_impl.hpp"
#include "engine/linear.hpp"
#include "engine/parallel.hpp"
#include "engine/validate.hpp"
#include "kernels/compiler.hpp"

namespace headlong {
namespace {

/// Shapes of the four projections.
struct Shape {
    std::int64_t d_model;
    std::int64_t heads;
    std::int64_t kv_heads;
    std::int64_t head_dim;
};

Shape shape_of(const MultiHeadAttentionOptions& options, const MultiHeadAttentionWeights& weights) {
    check_f32_input("query weight", weights.query);
    check_f32_input("key weight", weights.key);
    check_f32_input("value weight", weights.value);
    check_f32_input("output weight", weights.output);
    if (options.heads < 1) {
        throw InvalidArgument(
            fmt::format("MultiHeadAttentionOptions: heads is {}; it must be at least 1", options.heads));
    }
    const std::int64_t kv_heads = options.kv_heads == 0 ? options.heads : options.kv_heads;
    if (kv_heads < 0 || kv_heads > options.heads || options.heads % kv_heads != 0) {
        throw InvalidArgument(fmt::format("MultiHeadAttentionOptions: kv_heads is {}; it must divide the {} heads",
                                          kv_heads, options.heads));
    }
    const std::int64_t d_model = weights.query.extents[0];
    const std::int64_t width = weights.query.extents[1];
    constexpr std::int64_t kMaxWidth = std::int64_t{1} << 30;  // the product of two, in bytes, stays under 2^63
    if (d_model > kMaxWidth || width > kMaxWidth) {
        throw InvalidArgument(fmt::format("query weight: [{}, {}]; at most {} each", d_model, width, kMaxWidth));
    }
    if (d_model < 1 || width < 1 || width % options.heads != 0) {
        throw InvalidArgument(
            fmt::format("query weight: [{}, {}]; it must be [d_model, heads * head_dim] with {} heads", d_model, width,
                        options.heads));
    }
    const Shape shape{d_model, options.heads, kv_heads, width / options.heads};
    const std::int64_t kv_width = kv_heads * shape.head_dim;
    check_extent("key weight", 0, weights.key.extents[0], d_model, "d_model");
    check_extent("key weight", 1, weights.key.extents[1], kv_width, "kv_heads * head_dim");
    check_extent("value weight", 0, weights.value.extents[0], d_model, "d_model");
    check_extent("value weight", 1, weights.value.extents[1], kv_width, "kv_heads * head_dim");
    check_extent("output weight", 0, weights.output.extents[0], width, "heads * head_dim");
    check_extent("output weight", 1, weights.output.extents[1], d_model, "d_model");
    const auto check_bias = [](const char* name, const InputTensor<1>& bias, std::int64_t extent) {
        if (bias.data == nullptr && bias.extents[0] == 0) return;
        check_f32_input(name, bias);
        check_extent(name, 0, bias.extents[0], extent, "the outputs of its weight");
    };
    check_bias("query bias", weights.query_bias, width);
    check_bias("key bias", weights.key_bias, kv_width);
    check_bias("value bias", weights.value_bias, kv_width);
    check_bias("output bias", weights.output_bias, d_model);
    return shape;
}

/// Whether [batch, length] are rows one stride apart with dense columns, as the linear kernel wants them.
bool is_dense(const Extents<3>& extents, const Extents<3>& strides) {
    const std::int64_t row_stride = extents[1] > 1 ? strides[1] : strides[0];
    const bool batch_follows = extents[0] <= 1 || extents[1] <= 1 || strides[0] == extents[1] * strides[1];
    return (strides[2] == 1 || extents[2] <= 1) && row_stride >= 0 && batch_follows;
}

/// Activations of one call, in the workspace: rows of query, key, value and concatenated heads, and dense copies of
/// x and y where the caller's columns are strided.
struct Activations {
    float* query;
    float* key;
    float* value;
    float* heads;
    float* x;
    float* y;
};

}  // namespace

class MultiHeadAttention::Impl {
  public:
    Impl(Context::Impl& context, std::pmr::memory_resource& memory, const Shape& shape,
         const MultiHeadAttentionWeights& weights)
        : shape_(shape),
          query_(context, memory, weights.query, weights.query_bias),
          key_(context, memory, weights.key, weights.key_bias),
          value_(context, memory, weights.value, weights.value_bias),
          output_(context, memory, weights.output, weights.output_bias) {}

    const Shape& shape() const noexcept { return shape_; }

    /// Room for the activations of rows [batch, length]; x and y need some only where a kernel cannot use the caller's.
    Activations reserve(Workspace& workspace, const InputTensor<3>& x, const OutputTensor<3>& y) const {
        const std::int64_t width = shape_.heads * shape_.head_dim;
        const std::int64_t kv_width = shape_.kv_heads * shape_.head_dim;
        const std::int64_t x_width = is_dense(x.extents, x.strides) ? 0 : shape_.d_model;
        const std::int64_t y_width = is_dense(y.extents, y.strides) ? 0 : shape_.d_model;
        std::int64_t rows = 0;
        std::int64_t total = 0;
        if (compiler::mul_overflows(x.extents[0], x.extents[1], rows) ||
            compiler::mul_overflows(2 * width + 2 * kv_width + x_width + y_width, rows, total) ||
            total > (std::int64_t{1} << 60)) {
            throw std::bad_alloc();
        }
        float* p = workspace.rows.ensure_floats(static_cast<std::size_t>(total));
        const auto next = [&](std::int64_t columns) { return std::exchange(p, p + columns * rows); };
        return {next(width), next(kv_width), next(kv_width), next(width), next(x_width), next(y_width)};
    }

    /// Query, key and value rows of all sequences: one pass over the weights, whatever the batch.
    void project(Context::Impl& context, Workspace& workspace, const Activations& a, const InputTensor<3>& x) const {
        const std::int64_t batch = x.extents[0];
        const std::int64_t length = x.extents[1];
        const std::int64_t d_model = x.extents[2];
        const std::int64_t rows = batch * length;
        const float* data = floats(x.data);
        std::int64_t stride = length > 1 ? x.strides[1] : x.strides[0];
        if (!is_dense(x.extents, x.strides)) {
            const FloatEnvironment environment;
            for (std::int64_t b = 0; b < batch; ++b) {
                context.kernels.scale_rows(
                    {{data + b * x.strides[0], kernels::ElementType::f32, x.strides[1], x.strides[2],
                      static_cast<std::size_t>(length), static_cast<std::size_t>(d_model)},
                     1.0F,
                     a.x + b * length * d_model,
                     static_cast<std::size_t>(d_model)});
            }
            data = a.x;
            stride = d_model;
        }
        query_.apply(context, workspace, data, stride, rows, a.query, query_.outputs());
        key_.apply(context, workspace, data, stride, rows, a.key, key_.outputs());
        value_.apply(context, workspace, data, stride, rows, a.value, value_.outputs());
    }

    /// y of all sequences from their concatenated heads.
    void project_output(Context::Impl& context, Workspace& workspace, const Activations& a,
                        const OutputTensor<3>& y) const {
        const std::int64_t batch = y.extents[0];
        const std::int64_t length = y.extents[1];
        const std::int64_t d_model = y.extents[2];
        if (is_dense(y.extents, y.strides)) {
            output_.apply(context, workspace, a.heads, query_.outputs(), batch * length, floats(y.data),
                          length > 1 ? y.strides[1] : y.strides[0]);
            return;
        }
        output_.apply(context, workspace, a.heads, query_.outputs(), batch * length, a.y, d_model);
        const float* row = a.y;
        for (std::int64_t b = 0; b < batch; ++b) {
            for (std::int64_t i = 0; i < length; ++i, row += d_model) {
                float* out = floats(y.data) + b * y.strides[0] + i * y.strides[1];
                for (std::int64_t c = 0; c < d_model; ++c) out[c * y.strides[2]] = row[c];
            }
        }
    }

    /// [heads, length, head_dim] of rows [length, heads * head_dim].
    template <class View, class Pointer>
    View split(Pointer rows, std::int64_t heads, std::int64_t length) const {
        return {rows, DType::f32, {heads, length, shape_.head_dim}, {shape_.head_dim, heads * shape_.head_dim, 1}};
    }

  private:
    Shape shape_;
    Linear query_;
    Linear key_;
    Linear value_;
    Linear output_;
};

MultiHeadAttention::MultiHeadAttention(Context& context, const MultiHeadAttentionOptions& options,
                                       const MultiHeadAttentionWeights& weights) {
    const Shape shape = shape_of(options, weights);
    std::pmr::memory_resource* memory = options.memory != nullptr ? options.memory : std::pmr::new_delete_resource();
    with_memory_errors("MultiHeadAttention",
                       [&] { impl_ = std::make_unique<Impl>(context.impl(), *memory, shape, weights); });
}

MultiHeadAttention::~MultiHeadAttention() = default;
MultiHeadAttention::MultiHeadAttention(MultiHeadAttention&&) noexcept = default;
MultiHeadAttention& MultiHeadAttention::operator=(MultiHeadAttention&&) noexcept = default;

std::int64_t MultiHeadAttention::d_model() const noexcept { return impl_->shape().d_model; }
std::int64_t MultiHeadAttention::heads() const noexcept { return impl_->shape().heads; }
std::int64_t MultiHeadAttention::kv_heads() const noexcept { return impl_->shape().kv_heads; }
std::int64_t MultiHeadAttention::head_dim() const noexcept { return impl_->shape().head_dim; }

void MultiHeadAttention::forward(Context& context, const InputTensor<3>& x, const OutputTensor<3>& y,
                                 const AttentionOptions& options) const {
    check_f32_input("x", x);
    check_f32_output("y", y);
    const std::int64_t batch = x.extents[0];
    const std::int64_t length = x.extents[1];
    check_extent("x", 2, x.extents[2], d_model(), "d_model");
    for (std::size_t i = 0; i < 3; ++i) check_extent("y", i, y.extents[i], x.extents[i], "as in x");

    with_memory_errors("MultiHeadAttention::forward", [&] {
        const Interrupt interrupt{options.stop, options.deadline};
        auto workspace = context.impl().workspaces.lend();
        workspace->interrupt = &interrupt;
        const Activations a = impl_->reserve(*workspace, x, y);
        impl_->project(context.impl(), *workspace, a, x);
        const auto extents = [&](std::int64_t head_count) { return Extents<4>{batch, head_count, length, head_dim()}; };
        const auto strides = [&](std::int64_t head_count) {
            const std::int64_t width = head_count * head_dim();
            return Extents<4>{length * width, head_dim(), width, 1};
        };
        const auto input = [&](const float* rows, std::int64_t head_count) {
            return InputTensor<4>{rows, DType::f32, extents(head_count), strides(head_count)};
        };
        attend(context, input(a.query, heads()), input(a.key, kv_heads()), input(a.value, kv_heads()), options,
               OutputTensor<4>{a.heads, DType::f32, extents(heads()), strides(heads())});
        impl_->project_output(context.impl(), *workspace, a, y);
        interrupt.check("MultiHeadAttention::forward");
    });
}

void MultiHeadAttention::forward(Context& context, const InputTensor<2>& x, KvCache& cache, std::size_t layer,
                                 const OutputTensor<2>& y, const AttentionOptions& options) const {
    check_f32_input("x", x);
    check_f32_output("y", y);
    const std::int64_t length = x.extents[0];
    check_extent("x", 1, x.extents[1], d_model(), "d_model");
    for (std::size_t i = 0; i < 2; ++i) check_extent("y", i, y.extents[i], x.extents[i], "as in x");
    const std::int64_t held = cache.length(layer);

    with_memory_errors("MultiHeadAttention::forward", [&] {
        const Interrupt interrupt{options.stop, options.deadline};
        auto workspace = context.impl().workspaces.lend();
        workspace->interrupt = &interrupt;
        const InputTensor<3> one_x{x.data, x.dtype, {1, length, d_model()}, {0, x.strides[0], x.strides[1]}};
        const OutputTensor<3> one_y{y.data, y.dtype, {1, length, d_model()}, {0, y.strides[0], y.strides[1]}};
        const Activations a = impl_->reserve(*workspace, one_x, one_y);
        impl_->project(context.impl(), *workspace, a, one_x);
        interrupt.check("MultiHeadAttention::forward");
        try {
            cache.append(context, layer,
                         impl_->split<InputTensor<3>>(static_cast<const void*>(a.key), kv_heads(), length),
                         impl_->split<InputTensor<3>>(static_cast<const void*>(a.value), kv_heads(), length));
            const CachedQuery query{
                .query = impl_->split<InputTensor<3>>(static_cast<const void*>(a.query), heads(), length),
                .cache = &cache,
                .layer = layer,
                .output = impl_->split<OutputTensor<3>>(static_cast<void*>(a.heads), heads(), length)};
            attend(context, std::span(&query, 1), options);
            impl_->project_output(context.impl(), *workspace, a, one_y);
            interrupt.check("MultiHeadAttention::forward");
        } catch (...) {
            cache.impl().take_back(layer, held);
            throw;
        }
    });
}

}  // namespace headlong
