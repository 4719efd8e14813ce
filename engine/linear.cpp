#include "engine/linear.hpp"

#include <algorithm>

#include "engine/parallel.hpp"
#include "engine/validate.hpp"

namespace headlong {
namespace {

using kernels::kPanelTokens;

// 256 inputs of 8 panels are 128 KiB: they stay in L2 while the rows pass. Sums reload from y between slices of the
// depth, which changes no bit.
constexpr std::size_t kDepthSlice = 256;
constexpr std::size_t kRowsPerTask = 96;
constexpr std::size_t kPanelsPerTask = 8;

std::size_t ceil_div(std::size_t a, std::size_t b) noexcept { return (a + b - 1) / b; }

std::size_t floats_of_panels(std::size_t inputs, std::size_t outputs) noexcept {
    return saturating_product(kernels::round_up(outputs, kPanelTokens), inputs);
}

}  // namespace

Linear::Linear(Context::Impl& context, std::pmr::memory_resource& memory, const InputTensor<2>& weight,
               const InputTensor<1>& bias)
    : inputs_(weight.extents[0]), outputs_(weight.extents[1]), panels_(memory), bias_(memory) {
    const auto inputs = static_cast<std::size_t>(inputs_);
    const auto outputs = static_cast<std::size_t>(outputs_);
    const std::size_t panels = ceil_div(outputs, kPanelTokens);
    float* memory_of_panels = panels_.ensure_floats(floats_of_panels(inputs, outputs));
    const FloatEnvironment environment;
    if (panels > 0) std::fill_n(memory_of_panels + (panels - 1) * inputs * kPanelTokens, inputs * kPanelTokens, 0.0F);
    context.kernels.pack_panels(
        {{weight.data, kernels::ElementType::f32, weight.strides[1], weight.strides[0], outputs, inputs},
         memory_of_panels,
         0});
    if (bias.data != nullptr) {
        float* out = bias_.ensure_floats(std::max<std::size_t>(outputs, 1));
        for (std::int64_t i = 0; i < outputs_; ++i) out[i] = floats(bias.data)[i * bias.strides[0]];
    }
}

Linear::Linear(Context::Impl& context, std::pmr::memory_resource& memory, const FileTensor& weight,
               const FileTensor* bias)
    : inputs_(weight.shape[1]), outputs_(weight.shape[0]), panels_(memory), bias_(memory) {
    const auto inputs = static_cast<std::size_t>(inputs_);
    const auto outputs = static_cast<std::size_t>(outputs_);
    float* panel = panels_.ensure_floats(floats_of_panels(inputs, outputs));
    Buffer widened(memory);  // of one panel's rows: a second copy of all weights would be the peak of loading
    float* rows = widened.ensure_floats(inputs * kPanelTokens);
    const FloatEnvironment environment;
    for (std::size_t first = 0; first < outputs; first += kPanelTokens, panel += inputs * kPanelTokens) {
        const std::size_t count = std::min(kPanelTokens, outputs - first);
        copy_floats(weight, first * inputs, {rows, count * inputs});
        if (count < kPanelTokens) std::fill_n(panel, inputs * kPanelTokens, 0.0F);
        context.kernels.pack_panels(
            {{rows, kernels::ElementType::f32, static_cast<std::ptrdiff_t>(inputs), 1, count, inputs}, panel, 0});
    }
    if (bias != nullptr) copy_floats(*bias, 0, {bias_.ensure_floats(outputs), outputs});
}

std::size_t Linear::bytes_for(std::int64_t inputs, std::int64_t outputs, bool has_bias) noexcept {
    const auto width = static_cast<std::size_t>(outputs);
    const std::size_t floats =
        saturating_sum(floats_of_panels(static_cast<std::size_t>(inputs), width), has_bias ? width : 0);
    return saturating_product(floats, sizeof(float));
}

void Linear::apply(Context::Impl& context, const float* x, std::int64_t x_stride, std::int64_t rows, float* y,
                   std::int64_t y_stride, Into into) const {
    if (rows == 0 || outputs_ == 0) return;
    const auto inputs = static_cast<std::size_t>(inputs_);
    const auto outputs = static_cast<std::size_t>(outputs_);
    const std::size_t panels = ceil_div(outputs, kPanelTokens);
    const float* weights = reinterpret_cast<const float*>(panels_.data());
    const float* bias = reinterpret_cast<const float*>(bias_.data());

    const std::size_t row_blocks = ceil_div(static_cast<std::size_t>(rows), kRowsPerTask);
    // A single row streams the weights once: enough tasks for all threads, then runs as long as the cache likes.
    const std::size_t tasks_wanted = 4 * context.executor->concurrency();
    const std::size_t run = std::clamp<std::size_t>(panels * row_blocks / tasks_wanted, 1, kPanelsPerTask);
    const std::size_t runs = ceil_div(panels, run);
    parallel_for(*context.executor, row_blocks * runs, [&](std::size_t task, std::size_t) noexcept {
        const std::size_t first_panel = task % runs * run;
        const std::size_t first_row = task / runs * kRowsPerTask;
        const std::size_t row_count = std::min(kRowsPerTask, static_cast<std::size_t>(rows) - first_row);
        const std::size_t columns = std::min(outputs - first_panel * kPanelTokens, run * kPanelTokens);
        float* out = y + static_cast<std::int64_t>(first_row) * y_stride + first_panel * kPanelTokens;
        if (bias != nullptr) {
            for (std::size_t r = 0; r < row_count; ++r) {
                float* row = out + static_cast<std::int64_t>(r) * y_stride;
                const float* b = bias + first_panel * kPanelTokens;
                for (std::size_t c = 0; c < columns; ++c) row[c] = into == Into::add ? row[c] + b[c] : b[c];
            }
        }
        std::size_t k = 0;
        do {  // once for a depth of 0, which writes the bias or zeros
            const std::size_t depth = std::min(kDepthSlice, inputs - k);
            context.kernels.dot_panels({.rows = x + static_cast<std::int64_t>(first_row) * x_stride + k,
                                        .row_stride = static_cast<std::size_t>(x_stride),
                                        .row_count = row_count,
                                        .panels = weights + (first_panel * inputs + k) * kPanelTokens,
                                        .panel_stride = inputs * kPanelTokens,
                                        .depth = depth,
                                        .out = out,
                                        .out_stride = static_cast<std::size_t>(y_stride),
                                        .columns = columns,
                                        .accumulate = into == Into::add || bias != nullptr || k > 0,
                                        .canonical = k + depth == inputs});
            k += depth;
        } while (k < inputs);
    });
}

}  // namespace headlong
