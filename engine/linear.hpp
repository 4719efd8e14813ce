// A linear layer: y = x W + b. Weights lie in the same panels as keys (16 output features in the lanes), so that the
// score kernel is the linear layer's kernel too.
#pragma once

#include <cstdint>
#include <headlong/tensor.hpp>
#include <memory_resource>

#include "engine/context_impl.hpp"
#include "engine/safetensors.hpp"

namespace headlong {

class Linear {
  public:
    /// Copies weight [inputs, outputs] and bias [outputs] (data null: none), checked by the caller, into panels.
    Linear(Context::Impl& context, std::pmr::memory_resource& memory, const InputTensor<2>& weight,
           const InputTensor<1>& bias);

    /// Copies weight [outputs, inputs] of a file, as Hugging Face models store it (applied as x W^T), and its bias
    /// [outputs] (null: none), widened to f32. Shapes have been checked by the caller.
    Linear(Context::Impl& context, std::pmr::memory_resource& memory, const FileTensor& weight, const FileTensor* bias);

    /// Bytes that such a layer takes from its memory resource for good.
    static std::size_t bytes_for(std::int64_t inputs, std::int64_t outputs, bool has_bias) noexcept;

    std::int64_t inputs() const noexcept { return inputs_; }
    std::int64_t outputs() const noexcept { return outputs_; }
    std::size_t bytes() const noexcept { return panels_.bytes() + bias_.bytes(); }  ///< as stored, padding included

    /// What apply() does with y's contents.
    enum class Into { overwrite, add };

    /// y[r][0..outputs) = x[r][0..inputs) W + b (added to y with Into::add) for `rows` rows; strides in floats. A row
    /// of y depends on its row of x alone. Every NaN is written as 0x7fc00000.
    void apply(Context::Impl& context, const float* x, std::int64_t x_stride, std::int64_t rows, float* y,
               std::int64_t y_stride, Into into = Into::overwrite) const;

  private:
    std::int64_t inputs_;
    std::int64_t outputs_;
    Buffer panels_;  ///< [outputs / 16][inputs][16]
    Buffer bias_;    ///< [outputs], empty if there is none
};

}  // namespace headlong
