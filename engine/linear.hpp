// A linear layer: y = x W + b. Weights lie in the same panels as keys (16 output features in the lanes), so that the
// score kernel is the linear layer's kernel too.
#pragma once

#include <cstdint>
#include <headlong/model.hpp>
#include <headlong/tensor.hpp>
#include <memory_resource>
#include <span>

#include "engine/context_impl.hpp"
#include "engine/safetensors.hpp"

namespace headlong {

/// A matrix inside a tensor of a file, whichever way it lies there: weight (o, i) is element first + o / group *
/// group_stride + o % group * output_stride + i * input_stride, which the tensor has.
struct FileMatrix {
    const FileTensor* tensor = nullptr;
    std::int64_t inputs = 0;
    std::int64_t outputs = 0;
    std::int64_t first = 0;
    std::int64_t output_stride = 0;
    std::int64_t input_stride = 1;
    std::int64_t group = std::int64_t{1} << 62;
    std::int64_t group_stride = 0;

    std::int64_t element(std::int64_t output, std::int64_t input) const noexcept {
        return first + output / group * group_stride + output % group * output_stride + input * input_stride;
    }
};

class Linear {
  public:
    /// Copies weight [inputs, outputs] and bias [outputs] (data null: none), checked by the caller, into panels of
    /// `type`, rounded to nearest even or quantised.
    Linear(Context::Impl& context, std::pmr::memory_resource& memory, const InputTensor<2>& weight,
           const InputTensor<1>& bias, WeightType type = WeightType::f32);

    /// Copies a weight from a file, on all threads, and a bias [outputs] (empty: none). Throws Unsupported if a weight
    /// would become infinite by rounding.
    Linear(Context::Impl& context, std::pmr::memory_resource& memory, const FileMatrix& weight,
           std::span<const float> bias, WeightType type);

    /// Bytes that such a layer takes from its memory resource for good.
    static std::size_t bytes_for(std::int64_t inputs, std::int64_t outputs, bool has_bias,
                                 WeightType type = WeightType::f32) noexcept;

    std::int64_t inputs() const noexcept { return inputs_; }
    std::int64_t outputs() const noexcept { return outputs_; }
    WeightType type() const noexcept { return type_; }
    float weight(std::size_t input, std::size_t output) const noexcept;             ///< as stored
    std::size_t bytes() const noexcept { return panels_.bytes() + bias_.bytes(); }  ///< as stored, padding included

    /// Bytes of a workspace's buffers that apply() fills.
    struct Scratch {
        std::size_t workers = 0;
        std::size_t quantised = 0;
    };
    static Scratch scratch(const Context::Impl& context, std::int64_t inputs, std::int64_t rows,
                           WeightType type) noexcept;

    /// What apply() does with y's contents.
    enum class Into { overwrite, add };

    /// y[r][0..outputs) = x[r][0..inputs) W + b (added to y with Into::add) for `rows` rows; strides in floats. A row
    /// of y depends on its row of x alone. Where the workspace's call is interrupted, y is unspecified; the caller
    /// looks. Every NaN is written as 0x7fc00000. Throws what the workspace's resource
    /// throws.
    void apply(Context::Impl& context, Workspace& workspace, const float* x, std::int64_t x_stride, std::int64_t rows,
               float* y, std::int64_t y_stride, Into into = Into::overwrite) const;

  private:
    struct Call;
    struct Tile;

    Linear(std::pmr::memory_resource& memory, std::int64_t inputs, std::int64_t outputs, WeightType type);
    /// Packs 16 output features, or the last ones, fewer: strided rows of inputs.
    void pack(const Context::Impl& context, const kernels::Rows& rows, std::byte* panel) const noexcept;
    std::size_t panel_bytes() const noexcept;
    const std::byte* panel(std::size_t index) const noexcept { return panels_.data() + index * panel_bytes(); }
    /// Whether sums start from y: the bias, which this adds to a tile of y or writes there, or what y held.
    bool begin(const Call& call, const Tile& tile) const noexcept;
    void stream(const Call& call) const;
    void multiply(const Call& call) const;
    void multiply_codes(const Call& call) const;

    std::int64_t inputs_;
    std::int64_t outputs_;
    WeightType type_;
    Buffer panels_;  ///< [outputs / 16][inputs][16], or panels of codes (kernels/layout.hpp)
    Buffer bias_;    ///< [outputs], empty if there is none
};

}  // namespace headlong
