// Linear layers whose weights come from a model's files.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <headlong/error.hpp>
#include <limits>
#include <span>

#include "engine/linear.hpp"
#include "engine/parallel.hpp"
#include "engine/safetensors.hpp"

namespace headlong {

using kernels::ElementType;
using kernels::kPanelTokens;

namespace {

// From here on a float rounds to infinity.
constexpr float kF16Infinity = 65520.0F;
constexpr float kBf16Infinity = 0x1.ffp127F;

std::size_t ceil_div(std::size_t a, std::size_t b) noexcept { return (a + b - 1) / b; }
std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

/// The least magnitude that becomes infinite when it is stored as this type; finite floats.
float infinity_of(WeightType type) noexcept {
    return type == WeightType::f16    ? kF16Infinity
           : type == WeightType::bf16 ? kBf16Infinity
                                      : std::numeric_limits<float>::infinity();
}

/// Copies the weights of `count` outputs from `first` on: to rows of inputs, or, where a file has the inputs apart,
/// to [inputs][count]. Returns the rows.
kernels::Rows copy_weights(const FileMatrix& weight, std::size_t first, std::size_t count, float* out,
                           std::span<float> run) {
    const std::size_t inputs = size(weight.inputs);
    const auto element = [&](std::size_t output, std::size_t input) {
        return size(weight.element(static_cast<std::int64_t>(first + output), static_cast<std::int64_t>(input)));
    };
    if (weight.input_stride == 1) {
        for (std::size_t o = 0; o < count; ++o) copy_floats(*weight.tensor, element(o, 0), {out + o * inputs, inputs});
        return {out, ElementType::f32, static_cast<std::ptrdiff_t>(inputs), 1, count, inputs};
    }
    // outputs side by side, or with others between them: a run of all that lies between the first and the last
    const std::size_t step = size(weight.output_stride);
    const std::span<float> elements = run.first((count - 1) * step + 1);
    for (std::size_t i = 0; i < inputs; ++i) {
        copy_floats(*weight.tensor, element(0, i), elements);
        for (std::size_t o = 0; o < count; ++o) out[i * count + o] = elements[o * step];
    }
    return {out, ElementType::f32, 1, static_cast<std::ptrdiff_t>(count), count, inputs};
}

}  // namespace

Linear::Linear(Context::Impl& context, std::pmr::memory_resource& memory, const FileMatrix& weight,
               std::span<const float> bias, WeightType type)
    : Linear(memory, weight.inputs, weight.outputs, type) {
    const std::size_t outputs = size(outputs_);
    const std::size_t panels = ceil_div(outputs, kPanelTokens);
    std::byte* const out = panels_.ensure(saturating_product(panels, panel_bytes()));
    // One panel's weights a worker, widened: a second copy of all of them would be the peak of loading.
    const std::size_t run = weight.input_stride == 1 ? 0 : (kPanelTokens - 1) * size(weight.output_stride) + 1;
    const std::size_t wide = size(inputs_) * kPanelTokens;
    Buffer buffers(memory);
    float* const floats_of = buffers.ensure_floats(saturating_product(wide + run, context.executor->worker_slots()));
    const float infinite = infinity_of(type);
    std::atomic<float> too_large{0.0F};
    parallel_for(*context.executor, panels, static_cast<std::int64_t>(saturating_product(outputs, size(inputs_))),
                 [&](std::size_t panel, std::size_t worker) noexcept {
                     float* const own = floats_of + worker * (wide + run);
                     const std::size_t first = panel * kPanelTokens;
                     const std::size_t count = std::min(kPanelTokens, outputs - first);
                     const kernels::Rows rows = copy_weights(weight, first, count, own, {own + wide, run});
                     for (std::size_t i = 0; i < count * size(inputs_); ++i) {
                         if (std::abs(own[i]) >= infinite && std::isfinite(own[i])) too_large = own[i];
                     }
                     pack(context, rows, out + panel * panel_bytes());
                 });
    if (too_large != 0.0F) {
        throw Unsupported(fmt::format("tensor '{}': a weight is {}; {}", weight.tensor->name, too_large.load(),
                                      type == WeightType::f16 ? "f16 holds at most 65504: use bf16 or f32"
                                                              : "bf16 holds at most 3.3895e38: use f32"));
    }
    if (!bias.empty()) std::ranges::copy(bias, bias_.ensure_floats(outputs));
}

}  // namespace headlong
