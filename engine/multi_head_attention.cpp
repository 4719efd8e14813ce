#include <headlong/multi_head_attention.hpp>

#include <fmt/format.h>

#include <utility>

#include "engine/kv_cache_impl.hpp"
#include "engine/linear.hpp"
#include "engine/parallel.hpp"
#include "engine/validate.hpp"

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
    check_input("query weight", weights.query);
    check_input("key weight", weights.key);
    check_input("value weight", weights.value);
    check_input("output weight", weights.output);
    if (options.heads < 1) {
        throw InvalidArgument(
            fmt::format("MultiHeadAttentionOptions: heads is {}; it must be at least 1", options.heads));
    }
    const std::int64_t kv_heads = options.kv_heads == 0 ? options.heads : options.kv_heads;
    if (kv_heads < 0 || kv_heads > options.heads || options.heads % kv_heads != 0) {
        throw InvalidArgument(fmt::format("MultiHeadAttentionOptions: kv_heads is {}; it must divide the {} heads",
                                          kv_heads, options.heads));
    }
    const auto [d_model, width] = weights.query.extents;
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
        check_input(name, bias);
        check_extent(name, 0, bias.extents[0], extent, "the outputs of its weight");
    };
    check_bias("query bias", weights.query_bias, width);
    check_bias("key bias", weights.key_bias, kv_width);
    check_bias("value bias", weights.value_bias, kv_width);
    check_bias("output bias", weights.output_bias, d_model);
    return shape;
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

    Activations reserve(Workspace& workspace, std::int64_t rows) const {
        const std::int64_t width = shape_.heads * shape_.head_dim;
        const std::int64_t kv_width = shape_.kv_heads * shape_.head_dim;
        const std::int64_t row_floats = 2 * width + 2 * kv_width + 2 * shape_.d_model;
        std::int64_t total = 0;
        if (__builtin_mul_overflow(row_floats, rows, &total) || total > (std::int64_t{1} << 60)) throw std::bad_alloc();
        float* p = workspace.rows.ensure_floats(static_cast<std::size_t>(total));
        return {p,
                p + rows * width,
                p + rows * (width + kv_width),
                p + rows * (width + 2 * kv_width),
                p + rows * (2 * width + 2 * kv_width),
                p + rows * (2 * width + 2 * kv_width + shape_.d_model)};
    }

    /// Query, key and value rows of one sequence.
    void project(Context::Impl& context, const Activations& a, std::int64_t first_row, const InputTensor<2>& x) const {
        const std::int64_t rows = x.extents[0];
        const float* data = floats(x.data);
        std::int64_t stride = x.strides[0];
        if (x.strides[1] != 1 || stride < 0) {  // the kernel reads dense rows forwards
            const FloatEnvironment environment;
            context.kernels.scale_rows({{x.data, kernels::SourceType::f32, x.strides[0], x.strides[1],
                                         static_cast<std::size_t>(rows), static_cast<std::size_t>(shape_.d_model)},
                                        1.0F,
                                        a.x,
                                        static_cast<std::size_t>(shape_.d_model)});
            data = a.x;
            stride = shape_.d_model;
        }
        const std::int64_t width = query_.outputs();
        const std::int64_t kv_width = key_.outputs();
        query_.apply(context, data, stride, rows, a.query + first_row * width, width);
        key_.apply(context, data, stride, rows, a.key + first_row * kv_width, kv_width);
        value_.apply(context, data, stride, rows, a.value + first_row * kv_width, kv_width);
    }

    /// y of one sequence from its concatenated heads.
    void project_output(Context::Impl& context, const Activations& a, std::int64_t first_row,
                        const OutputTensor<2>& y) const {
        const std::int64_t rows = y.extents[0];
        const float* heads = a.heads + first_row * query_.outputs();
        if (y.strides[1] == 1 && y.strides[0] >= 0) {
            output_.apply(context, heads, query_.outputs(), rows, floats(y.data), y.strides[0]);
            return;
        }
        output_.apply(context, heads, query_.outputs(), rows, a.y, shape_.d_model);
        for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t c = 0; c < shape_.d_model; ++c) {
                floats(y.data)[r * y.strides[0] + c * y.strides[1]] = a.y[r * shape_.d_model + c];
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
    check_input("x", x);
    check_output("y", y);
    const auto [batch, length, d_model] = x.extents;
    check_extent("x", 2, d_model, this->d_model(), "d_model");
    for (std::size_t i = 0; i < 3; ++i) check_extent("y", i, y.extents[i], x.extents[i], "as in x");

    with_memory_errors("MultiHeadAttention::forward", [&] {
        auto workspace = context.impl().workspaces.lend();
        const Activations a = impl_->reserve(*workspace, batch * length);
        for (std::int64_t b = 0; b < batch; ++b) {
            impl_->project(
                context.impl(), a, b * length,
                {floats(x.data) + b * x.strides[0], x.dtype, {length, d_model}, {x.strides[1], x.strides[2]}});
        }
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
        for (std::int64_t b = 0; b < batch; ++b) {
            impl_->project_output(
                context.impl(), a, b * length,
                {floats(y.data) + b * y.strides[0], y.dtype, {length, d_model}, {y.strides[1], y.strides[2]}});
        }
    });
}

void MultiHeadAttention::forward(Context& context, const InputTensor<2>& x, KvCache& cache, std::size_t layer,
                                 const OutputTensor<2>& y, const AttentionOptions& options) const {
    check_input("x", x);
    check_output("y", y);
    const auto [length, d_model] = x.extents;
    check_extent("x", 1, d_model, this->d_model(), "d_model");
    for (std::size_t i = 0; i < 2; ++i) check_extent("y", i, y.extents[i], x.extents[i], "as in x");
    const std::int64_t held = cache.length(layer);

    with_memory_errors("MultiHeadAttention::forward", [&] {
        auto workspace = context.impl().workspaces.lend();
        const Activations a = impl_->reserve(*workspace, length);
        impl_->project(context.impl(), a, 0, x);
        cache.append(context, layer, impl_->split<InputTensor<3>>(static_cast<const void*>(a.key), kv_heads(), length),
                     impl_->split<InputTensor<3>>(static_cast<const void*>(a.value), kv_heads(), length));
        const CachedQuery query{
            .query = impl_->split<InputTensor<3>>(static_cast<const void*>(a.query), heads(), length),
            .cache = &cache,
            .layer = layer,
            .output = impl_->split<OutputTensor<3>>(static_cast<void*>(a.heads), heads(), length),
            .lse = {}};
        try {
            attend(context, std::span(&query, 1), options);
        } catch (...) {
            cache.impl().shorten(layer, held);
            throw;
        }
        impl_->project_output(context.impl(), a, 0, y);
    });
}

}  // namespace headlong
