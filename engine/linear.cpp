#include "engine/linear.hpp"

#include <algorithm>

#include "engine/block_rows.hpp"
#include "engine/parallel.hpp"
#include "engine/validate.hpp"

namespace headlong {
namespace {

using kernels::ElementType;
using kernels::kPanelTokens;

// From so many rows on, a slice of the rows is packed, and 16-bit weights are widened, before they are multiplied:
// fewer rows do not pay for it, and the weights' way from memory bounds them anyway.
constexpr std::size_t kManyRows = 16;
// A slice of 256 inputs: 264 rows of it (281 KiB, whole register tiles of 3, 6 and 12) stay in an L2 of 512 KiB while
// the panels pass, and two panels of it (32 KiB) near L1 while the rows pass. Half of a prompt's chunk of 512: 144 rows
// widened 16-bit weights four times, and left a small block over. Sums reload from y between slices, which changes no
// bit.
constexpr std::size_t kDepthSlice = 256;
constexpr std::size_t kRowsPerTask = 264;
// Packing a slice of the rows costs a hundredth of what 32 panels make of it.
constexpr std::size_t kPanelsPerTask = 32;
// Of these a 16-bit slice is widened at a time, to 64 KiB.
constexpr std::size_t kWidePanels = 4;
// Not 256: rows a multiple of 1 KiB apart would meet in a quarter of the sets of L1.
constexpr std::size_t kSliceStride = kDepthSlice + kPanelTokens;
// At most so many panels in a task that streams weights past a few rows: 2 MiB of floats at 4096 inputs.
constexpr std::size_t kStreamPanels = 8;

std::size_t ceil_div(std::size_t a, std::size_t b) noexcept { return (a + b - 1) / b; }
std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

kernels::StoredType stored_type(WeightType type) noexcept {
    switch (type) {
        case WeightType::f32:
            break;
        case WeightType::f16:
            return kernels::StoredType::f16;
        case WeightType::bf16:
            return kernels::StoredType::bf16;
        case WeightType::int8:
            return kernels::StoredType::int8;
        case WeightType::int4:
            return kernels::StoredType::int4;
    }
    return kernels::StoredType::f32;
}

bool has_codes(WeightType type) noexcept { return kernels::has_codes(stored_type(type)); }

/// Of one without codes.
ElementType element_type(WeightType type) noexcept { return kernels::element_type(stored_type(type)); }

std::size_t panel_bytes_of(std::size_t inputs, WeightType type) noexcept {
    if (has_codes(type)) return kernels::code_panel_bytes(stored_type(type), inputs);
    return saturating_product(inputs, kPanelTokens * kernels::element_bytes(element_type(type)));
}

/// A worker's own memory.
struct Slices {
    float* rows;  ///< [kRowsPerTask][kSliceStride]
    float* wide;  ///< [kWidePanels][kDepthSlice][16], of 16-bit weights

    Slices(Carver& carver, WeightType type) noexcept
        : rows(carver.take<float>(kRowsPerTask * kSliceStride)),
          wide(carver.take<float>(type == WeightType::f32 ? 0 : kWidePanels * kDepthSlice * kPanelTokens)) {}

    static std::size_t bytes(WeightType type) noexcept {
        Carver counter(nullptr);
        const Slices counted(counter, type);
        static_cast<void>(counted);
        return counter.used();
    }
};

}  // namespace

/// Rows and panels of y that a task computes.
struct Linear::Tile {
    std::size_t first_row;
    std::size_t rows;
    std::size_t first_panel;
    std::size_t columns;
};

/// One call of apply().
struct Linear::Call {
    Context::Impl& context;
    Workspace& workspace;
    const float* x;
    std::int64_t x_stride;
    std::size_t rows;
    float* y;
    std::int64_t y_stride;
    Into into;

    const float* row(std::size_t r) const noexcept { return x + static_cast<std::int64_t>(r) * x_stride; }
    float* out(std::size_t r, std::size_t panel) const noexcept {
        return y + static_cast<std::int64_t>(r) * y_stride + panel * kPanelTokens;
    }
};

Linear::Linear(std::pmr::memory_resource& memory, std::int64_t inputs, std::int64_t outputs, WeightType type)
    : inputs_(inputs), outputs_(outputs), type_(type), panels_(memory), bias_(memory) {}

std::size_t Linear::panel_bytes() const noexcept { return panel_bytes_of(size(inputs_), type_); }

Linear::Linear(Context::Impl& context, std::pmr::memory_resource& memory, const InputTensor<2>& weight,
               const InputTensor<1>& bias, WeightType type)
    : Linear(memory, weight.extents[0], weight.extents[1], type) {
    const std::size_t outputs = size(outputs_);
    const std::size_t panels = ceil_div(outputs, kPanelTokens);
    std::byte* out = panels_.ensure(saturating_product(panels, panel_bytes()));
    const FloatEnvironment environment;
    for (std::size_t panel = 0; panel < panels; ++panel) {
        const std::size_t first = panel * kPanelTokens;
        pack(context,
             {floats(weight.data) + static_cast<std::int64_t>(first) * weight.strides[1], ElementType::f32,
              static_cast<std::ptrdiff_t>(weight.strides[1]), static_cast<std::ptrdiff_t>(weight.strides[0]),
              std::min(kPanelTokens, outputs - first), size(inputs_)},
             out + panel * panel_bytes());
    }
    if (bias.data != nullptr) {
        float* b = bias_.ensure_floats(std::max<std::size_t>(outputs, 1));
        for (std::int64_t i = 0; i < outputs_; ++i) b[i] = floats(bias.data)[i * bias.strides[0]];
    }
}

void Linear::pack(const Context::Impl& context, const kernels::Rows& rows, std::byte* panel) const noexcept {
    if (rows.row_count < kPanelTokens) std::fill_n(panel, panel_bytes(), std::byte{0});
    if (has_codes(type_)) {
        context.kernels.quantise_keys({rows, reinterpret_cast<std::uint8_t*>(panel), 0, stored_type(type_)});
    } else {
        context.kernels.pack_panels({rows, panel, 0, element_type(type_)});
    }
}

std::size_t Linear::bytes_for(std::int64_t inputs, std::int64_t outputs, bool has_bias, WeightType type) noexcept {
    const std::size_t panels =
        saturating_product(ceil_div(size(outputs), kPanelTokens), panel_bytes_of(size(inputs), type));
    return saturating_sum(panels, has_bias ? saturating_product(size(outputs), sizeof(float)) : 0);
}

float Linear::weight(std::size_t input, std::size_t output) const noexcept {
    const kernels::BlockLayout layout{.head_dim = size(inputs_), .value_dim = 0, .key_type = stored_type(type_)};
    return read_key(layout, panel(output / kPanelTokens), output % kPanelTokens, input);
}

Linear::Scratch Linear::scratch(const Context::Impl& context, std::int64_t inputs, std::int64_t rows,
                                WeightType type) noexcept {
    Scratch scratch;
    if (has_codes(type)) {
        scratch.quantised = saturating_product(kernels::code_row_bytes(size(inputs)), size(rows));
    } else if (size(rows) >= kManyRows) {
        scratch.workers = saturating_product(Slices::bytes(type), context.executor->worker_slots());
    }
    return scratch;
}

bool Linear::begin(const Call& call, const Tile& tile) const noexcept {
    const auto* bias = reinterpret_cast<const float*>(bias_.data());
    const bool adds = call.into == Into::add;
    if (bias == nullptr) return adds;
    const float* b = bias + tile.first_panel * kPanelTokens;
    for (std::size_t r = 0; r < tile.rows; ++r) {
        float* row = call.out(tile.first_row + r, tile.first_panel);
        for (std::size_t c = 0; c < tile.columns; ++c) row[c] = adds ? row[c] + b[c] : b[c];
    }
    return true;
}

void Linear::apply(Context::Impl& context, Workspace& workspace, const float* x, std::int64_t x_stride,
                   std::int64_t rows, float* y, std::int64_t y_stride, Into into) const {
    if (rows == 0 || outputs_ == 0) return;
    const Call call{context, workspace, x, x_stride, size(rows), y, y_stride, into};
    if (has_codes(type_)) return multiply_codes(call);
    call.rows >= kManyRows ? multiply(call) : stream(call);
}

/// Few rows: the weights pass once, panel by panel from front to back, as memory likes it.
void Linear::stream(const Call& call) const {
    const std::size_t panels = ceil_div(size(outputs_), kPanelTokens);
    // Four tasks a thread even out what other programs make uneven.
    const std::size_t run =
        std::clamp<std::size_t>(panels / (4 * call.context.executor->concurrency()), 1, kStreamPanels);
    parallel_for(*call.context.executor, ceil_div(panels, run), [&](std::size_t task, std::size_t) noexcept {
        if (call.workspace.interrupted()) return;
        const std::size_t first = task * run;
        const Tile tile{0, call.rows, first, std::min(size(outputs_) - first * kPanelTokens, run * kPanelTokens)};
        call.context.kernels.dot_panels({.rows = call.x,
                                         .row_stride = size(call.x_stride),
                                         .row_count = call.rows,
                                         .panels = panel(first),
                                         .panel_stride = size(inputs_) * kPanelTokens,
                                         .depth = size(inputs_),
                                         .out = call.out(0, first),
                                         .out_stride = size(call.y_stride),
                                         .columns = tile.columns,
                                         .accumulate = begin(call, tile),
                                         .canonical = true,
                                         .type = element_type(type_)});
    });
}

/// Many rows: a matrix product blocked over the depth (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix
/// Multiplication"), the weights being packed already.
void Linear::multiply(const Call& call) const {
    const std::size_t inputs = size(inputs_);
    const std::size_t outputs = size(outputs_);
    const std::size_t panels = ceil_div(outputs, kPanelTokens);
    const kernels::KernelTable& kernels = call.context.kernels;
    const std::size_t row_blocks = ceil_div(call.rows, kRowsPerTask);
    const std::size_t tasks_wanted = 4 * call.context.executor->concurrency();
    const std::size_t run = std::clamp<std::size_t>(panels * row_blocks / tasks_wanted, 1, kPanelsPerTask);
    const std::size_t slices_bytes = Slices::bytes(type_);
    std::byte* memory =
        call.workspace.workers.ensure(saturating_product(slices_bytes, call.context.executor->worker_slots()));
    const ElementType type = element_type(type_);
    // Neighbouring tasks share their weights, which the last-level cache then holds.
    parallel_for(
        *call.context.executor, row_blocks * ceil_div(panels, run), [&](std::size_t task, std::size_t worker) noexcept {
            if (call.workspace.interrupted()) return;
            Carver carver(memory + worker * slices_bytes);
            const Slices slices(carver, type_);
            Tile tile{};
            tile.first_row = task % row_blocks * kRowsPerTask;
            tile.rows = std::min(kRowsPerTask, call.rows - tile.first_row);
            tile.first_panel = task / row_blocks * run;
            tile.columns = std::min(outputs - tile.first_panel * kPanelTokens, run * kPanelTokens);
            const bool accumulate = begin(call, tile);
            std::size_t k = 0;
            do {  // once for a depth of 0, which writes the bias or zeros
                const std::size_t depth = std::min(kDepthSlice, inputs - k);
                kernels.scale_rows({{call.row(tile.first_row) + k, ElementType::f32,
                                     static_cast<std::ptrdiff_t>(call.x_stride), 1, tile.rows, depth},
                                    1.0F,
                                    slices.rows,
                                    kSliceStride});
                const std::size_t step = type == ElementType::f32 ? tile.columns : kWidePanels * kPanelTokens;
                for (std::size_t column = 0; column < tile.columns; column += step) {
                    const std::size_t columns = std::min(step, tile.columns - column);
                    const std::size_t first = tile.first_panel + column / kPanelTokens;
                    const std::size_t offset = k * kPanelTokens * kernels::element_bytes(type);
                    const void* weights = panel(first) + offset;
                    std::size_t stride = inputs * kPanelTokens;
                    if (type != ElementType::f32) {
                        stride = kDepthSlice * kPanelTokens;
                        for (std::size_t p = 0; p * kPanelTokens < columns; ++p) {
                            kernels.widen(
                                {panel(first + p) + offset, type, slices.wide + p * stride, depth * kPanelTokens});
                        }
                        weights = slices.wide;
                    }
                    kernels.dot_panels({.rows = slices.rows,
                                        .row_stride = kSliceStride,
                                        .row_count = tile.rows,
                                        .panels = weights,
                                        .panel_stride = stride,
                                        .depth = depth,
                                        .out = call.out(tile.first_row, first),
                                        .out_stride = size(call.y_stride),
                                        .columns = columns,
                                        .accumulate = accumulate || k > 0,
                                        .canonical = k + depth == inputs});
                }
                k += depth;
            } while (k < inputs);
        });
}

/// In integers: rows are quantised too, once for all outputs. Blocked like the products of floats.
void Linear::multiply_codes(const Call& call) const {
    const std::size_t inputs = size(inputs_);
    const std::size_t outputs = size(outputs_);
    const std::size_t panels = ceil_div(outputs, kPanelTokens);
    const std::size_t row_bytes = kernels::code_row_bytes(inputs);
    const kernels::KernelTable& kernels = call.context.kernels;
    auto* quantised =
        reinterpret_cast<std::uint8_t*>(call.workspace.quantised.ensure(saturating_product(row_bytes, call.rows)));
    const auto elements = static_cast<std::int64_t>(saturating_product(call.rows, inputs));
    parallel_for(*call.context.executor, call.rows, elements, [&](std::size_t r, std::size_t) noexcept {
        kernels.quantise_rows({call.row(r), 0, 1, inputs, quantised + r * row_bytes, row_bytes});
    });

    const bool many = call.rows >= kManyRows;
    const std::size_t block = many ? kRowsPerTask : call.rows;
    const std::size_t row_blocks = ceil_div(call.rows, block);
    const std::size_t run = std::clamp<std::size_t>(panels * row_blocks / (4 * call.context.executor->concurrency()), 1,
                                                    many ? kPanelsPerTask : kStreamPanels);
    const std::size_t groups = kernels::code_groups(inputs);
    const std::size_t slice = many ? kDepthSlice / kernels::kCodeGroup : std::max<std::size_t>(groups, 1);
    parallel_for(*call.context.executor, row_blocks * ceil_div(panels, run),
                 [&](std::size_t task, std::size_t) noexcept {
                     if (call.workspace.interrupted()) return;
                     Tile tile{};
                     tile.first_row = task % row_blocks * block;
                     tile.rows = std::min(block, call.rows - tile.first_row);
                     tile.first_panel = task / row_blocks * run;
                     tile.columns = std::min(outputs - tile.first_panel * kPanelTokens, run * kPanelTokens);
                     const bool accumulate = begin(call, tile);
                     std::size_t group = 0;
                     do {  // once for a depth of 0, which writes the bias or zeros
                         const std::size_t end = std::min(group + slice, groups);
                         kernels.dot_codes({.rows = quantised + tile.first_row * row_bytes,
                                            .row_stride = row_bytes,
                                            .row_count = tile.rows,
                                            .panels = reinterpret_cast<const std::uint8_t*>(panel(tile.first_panel)),
                                            .panel_stride = panel_bytes(),
                                            .depth = inputs,
                                            .group_begin = group,
                                            .group_end = end,
                                            .out = call.out(tile.first_row, tile.first_panel),
                                            .out_stride = size(call.y_stride),
                                            .columns = tile.columns,
                                            .accumulate = accumulate || group > 0,
                                            .canonical = end == groups,
                                            .type = stored_type(type_)});
                         group = end;
                     } while (group < groups);
                 });
}

}  // namespace headlong
