#include <headlong/rotary.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "engine/carver.hpp"
#include "engine/context_impl.hpp"
#include "engine/parallel.hpp"
#include "engine/rows.hpp"
#include "engine/validate.hpp"

namespace headlong {
namespace {

constexpr std::int64_t kMaxHeadDim = std::int64_t{1} << 20;  // as in a cache

void require(bool allowed, const char* option, double value, const char* what) {
    if (!std::isfinite(value) || !allowed) {
        throw InvalidArgument(fmt::format("RotaryOptions: {} is {}; it must be {}", option, value, what));
    }
}

void check_dims(const RotaryOptions& options) {
    if (options.head_dim < 1 || options.head_dim > kMaxHeadDim) {
        throw InvalidArgument(
            fmt::format("RotaryOptions: head_dim is {}; allowed: 1 to {}", options.head_dim, kMaxHeadDim));
    }
    const std::int64_t dim = options.rotary_dim == 0 ? options.head_dim : options.rotary_dim;
    if (dim < 2 || dim > options.head_dim || dim % 2 != 0) {
        throw InvalidArgument(fmt::format(
            "RotaryOptions: rotary_dim is {}{}; it must be even and from 2 to the head_dim of {}", options.rotary_dim,
            options.rotary_dim == 0 ? ", which stands for head_dim" : "", options.head_dim));
    }
}

void check_context(const RotaryOptions& options, std::int64_t least) {
    if (options.original_context < least) {
        throw InvalidArgument(fmt::format("RotaryOptions: original_context is {}; it must be at least {}",
                                          options.original_context, least));
    }
}

/// What inverse_frequency() below is given for all pairs alike.
struct Ramp {
    double low = 0.0;
    double high = 0.0;
};

/// YaRN: the pair that turns `turns` times over the original context, as a fraction.
double pair_of_turns(const RotaryOptions& options, double dim, double turns) {
    const double context = static_cast<double>(options.original_context);
    return dim * std::log(context / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(options.theta));
}

Ramp yarn_ramp(const RotaryOptions& options, double dim) {
    Ramp ramp{pair_of_turns(options, dim, options.beta_fast), pair_of_turns(options, dim, options.beta_slow)};
    if (options.truncate) ramp = {std::floor(ramp.low), std::ceil(ramp.high)};
    ramp = {std::max(ramp.low, 0.0), std::min(ramp.high, dim - 1.0)};
    if (ramp.low == ramp.high) ramp.high += 0.001;  // a step: the division below needs a width
    return ramp;
}

/// Llama 3.1: long wavelengths are divided, short ones kept, those between are mixed.
double llama3(const RotaryOptions& options, double frequency) {
    const double context = static_cast<double>(options.original_context);
    const double wavelength = 2.0 * std::numbers::pi / frequency;
    if (wavelength < context / options.high_freq_factor) return frequency;
    if (wavelength > context / options.low_freq_factor) return frequency / options.factor;
    const double kept =
        (context / wavelength - options.low_freq_factor) / (options.high_freq_factor - options.low_freq_factor);
    return (1.0 - kept) * frequency / options.factor + kept * frequency;
}

void check_scaling(const RotaryOptions& options, std::size_t pairs) {
    switch (options.scaling) {
        case RotaryScaling::none:
            return;
        case RotaryScaling::ntk:
            if (pairs < 2) {
                throw InvalidArgument("RotaryOptions: rotary_dim is 2; with ntk scaling it must be at least 4");
            }
            [[fallthrough]];
        case RotaryScaling::linear:
            require(options.factor >= 1.0, "factor", options.factor, "finite and at least 1");
            return;
        case RotaryScaling::llama3:
            require(options.factor >= 1.0, "factor", options.factor, "finite and at least 1");
            check_context(options, 1);
            require(options.low_freq_factor > 0.0, "low_freq_factor", options.low_freq_factor, "finite and above 0");
            require(options.high_freq_factor > options.low_freq_factor, "high_freq_factor", options.high_freq_factor,
                    "finite and above low_freq_factor");
            return;
        case RotaryScaling::yarn:
            require(options.theta > 1.0, "theta", options.theta, "finite and, with yarn scaling, above 1");
            require(options.factor >= 1.0, "factor", options.factor, "finite and at least 1");
            check_context(options, 1);
            require(options.beta_slow > 0.0, "beta_slow", options.beta_slow, "finite and above 0");
            require(options.beta_fast > options.beta_slow, "beta_fast", options.beta_fast,
                    "finite and above beta_slow");
            return;
        case RotaryScaling::longrope:
            require(options.factor > 0.0, "factor", options.factor, "finite and above 0");
            check_context(options, !options.attention_factor && options.factor > 1.0 ? 2 : 1);
            if (options.pair_factors.size() != pairs) {
                throw InvalidArgument(
                    fmt::format("RotaryOptions: pair_factors has {} numbers; it must have {}, one per pair",
                                options.pair_factors.size(), pairs));
            }
            for (std::size_t i = 0; i < pairs; ++i) {
                const double value = options.pair_factors[i];
                if (!std::isfinite(value) || value <= 0.0) {
                    throw InvalidArgument(
                        fmt::format("RotaryOptions: pair_factors[{}] is {}; it must be finite and above 0", i, value));
                }
            }
            return;
    }
    throw InvalidArgument(
        fmt::format("RotaryOptions: scaling is {}; allowed: 0 to 5", static_cast<int>(options.scaling)));
}

double attention_factor_of(const RotaryOptions& options) {
    const bool yarn = options.scaling == RotaryScaling::yarn;
    if (!yarn && options.scaling != RotaryScaling::longrope) return 1.0;
    if (options.attention_factor) {
        const double given = *options.attention_factor;
        require(given >= 1e-30 && given <= 1e30, "attention_factor", given, "from 1e-30 to 1e30");
        return given;
    }
    if (options.factor <= 1.0) return 1.0;
    const double logarithm = std::log(options.factor);
    return yarn ? 0.1 * logarithm + 1.0
                : std::sqrt(1.0 + logarithm / std::log(static_cast<double>(options.original_context)));
}

std::vector<double> frequencies_of(const RotaryOptions& options) {
    const double dim = static_cast<double>(options.rotary_dim == 0 ? options.head_dim : options.rotary_dim);
    std::vector<double> frequencies(static_cast<std::size_t>(dim) / 2);
    check_scaling(options, frequencies.size());
    double theta = options.theta;
    if (options.scaling == RotaryScaling::ntk) theta *= std::pow(options.factor, dim / (dim - 2.0));
    const Ramp ramp = options.scaling == RotaryScaling::yarn ? yarn_ramp(options, dim) : Ramp{};
    for (std::size_t i = 0; i < frequencies.size(); ++i) {
        const double pair = static_cast<double>(i);
        double frequency = std::pow(theta, -2.0 * pair / dim);
        switch (options.scaling) {
            case RotaryScaling::none:
            case RotaryScaling::ntk:
                break;
            case RotaryScaling::linear:
                frequency /= options.factor;
                break;
            case RotaryScaling::llama3:
                frequency = llama3(options, frequency);
                break;
            case RotaryScaling::yarn: {
                const double divided = std::clamp((pair - ramp.low) / (ramp.high - ramp.low), 0.0, 1.0);
                frequency = frequency / options.factor * divided + frequency * (1.0 - divided);
                break;
            }
            case RotaryScaling::longrope:
                frequency /= options.pair_factors[i];
                break;
        }
        // bounded so that no position's angle is infinite
        if (!(frequency > 0.0 && frequency <= 1e100)) {
            throw InvalidArgument(
                fmt::format("RotaryOptions: theta is {} with factor {}; pair {} gets the frequency {}, which must be "
                            "above 0 and at most 1e100",
                            options.theta, options.factor, i, frequency));
        }
        frequencies[i] = frequency;
    }
    return frequencies;
}

std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

constexpr std::size_t kScratchFloats = 4096;  // rows at a time: as many heads as fit beside their sources in L1

struct TableRow {
    const float* cosine;
    const float* sine;
};

void check_rows(const InputTensor<3>& rows, const OutputTensor<3>& out) {
    check_input("rows", rows);
    check_output("out", out);
    check_same_extents<3>("out", out.extents, rows.extents, "that of rows");
}

void check_positions(std::span<const std::int64_t> positions, const InputTensor<3>& rows) {
    if (positions.size() != size(rows.extents[1])) {
        throw InvalidArgument(
            fmt::format("positions: there are {}; rows has {}, and each needs one", positions.size(), rows.extents[1]));
    }
}

/// Rotates checked rows, a position at a time. table(i, scratch) gives the cosines and sines of row i; it may write
/// them to `scratch`, 2 * half floats.
template <class Table>
void rotate_rows(Context::Impl& context, std::size_t half, RotaryPairing pairing, const InputTensor<3>& rows,
                 const OutputTensor<3>& out, const Table& table) {
    if (is_empty<3>(rows.extents)) return;
    const std::size_t heads = size(rows.extents[0]);
    const std::size_t head_dim = size(rows.extents[2]);
    const std::size_t pitch = kernels::round_up(head_dim, kernels::kPanelTokens);
    const std::size_t heads_at_once = std::min(heads, std::max<std::size_t>(kScratchFloats / pitch, 1));
    const std::size_t table_floats = kernels::round_up(2 * half, kernels::kPanelTokens);
    const std::size_t region = table_floats + heads_at_once * pitch;
    const InputRows from = input_rows(rows);
    const OutputRows to = output_rows(out);
    const bool interleaved = pairing == RotaryPairing::interleaved;
    const kernels::KernelTable& kernels = context.kernels;
    auto workspace = context.workspaces.lend();
    float* const scratch =
        workspace->workers.ensure_floats(saturating_product(region, context.executor->worker_slots()));

    const auto rotate_position = [&](std::size_t i, std::size_t worker) noexcept {
        float* const own = scratch + worker * region;
        float* const dense = own + table_floats;
        const TableRow row = table(i, own);
        const auto position = static_cast<std::int64_t>(i);
        for (std::size_t head = 0; head < heads; head += heads_at_once) {
            const std::size_t count = std::min(heads_at_once, heads - head);
            const auto first = static_cast<std::int64_t>(head);
            kernels.scale_rows(
                {{from.at(first, position), from.type, from.head_stride, from.column_stride, count, head_dim},
                 1.0F,
                 dense,
                 pitch});
            kernels.rotate({dense, count, pitch, half, row.cosine, row.sine, interleaved});
            kernels.store_rows(
                {dense, pitch, count, head_dim, to.at(first, position), to.type, to.head_stride, to.column_stride});
        }
    };
    parallel_for(*context.executor, size(rows.extents[1]), rows.extents[0] * rows.extents[1] * rows.extents[2],
                 rotate_position);
}

template <class PositionOf>
void rotate_at(Context& context, const Rotary& rotary, const InputTensor<3>& rows, const OutputTensor<3>& out,
               const PositionOf& position_of) {
    const std::size_t half = rotary.inverse_frequencies().size();
    rotate_rows(context.impl(), half, rotary.pairing(), rows, out, [&](std::size_t i, float* scratch) noexcept {
        rotary.tabulate(position_of(i), scratch, scratch + half);
        return TableRow{scratch, scratch + half};
    });
}

}  // namespace

Rotary::Rotary(const RotaryOptions& options) : head_dim_(options.head_dim), pairing_(options.pairing) {
    check_dims(options);
    if (options.pairing != RotaryPairing::halves && options.pairing != RotaryPairing::interleaved) {
        throw InvalidArgument(
            fmt::format("RotaryOptions: pairing is {}; allowed: 0 and 1", static_cast<int>(options.pairing)));
    }
    require(options.theta > 0.0, "theta", options.theta, "finite and above 0");
    const FloatEnvironment environment;  // the same frequencies whatever mode the caller has set
    inverse_frequencies_ = with_memory_errors(
        "Rotary", [&] { return std::make_shared<const std::vector<double>>(frequencies_of(options)); });
    attention_factor_ = attention_factor_of(options);
}

void Rotary::tabulate(std::int64_t position, float* cosine, float* sine) const noexcept {
    const FloatEnvironment environment;
    const std::span<const double> frequencies = inverse_frequencies();
    for (std::size_t i = 0; i < frequencies.size(); ++i) {
        // in double, then rounded: a float angle of 1e5 is off by 4e-3
        const double angle = static_cast<double>(position) * frequencies[i];
        cosine[i] = static_cast<float>(std::cos(angle) * attention_factor_);
        sine[i] = static_cast<float>(std::sin(angle) * attention_factor_);
    }
}

void rotate(Context& context, const Rotary& rotary, const InputTensor<3>& rows, std::span<const std::int64_t> positions,
            const OutputTensor<3>& out) {
    check_rows(rows, out);
    check_extent("rows", 2, rows.extents[2], rotary.head_dim(), "the rotary's head_dim");
    check_positions(positions, rows);
    with_memory_errors(
        "rotate", [&] { rotate_at(context, rotary, rows, out, [&](std::size_t i) noexcept { return positions[i]; }); });
}

void rotate(Context& context, const Rotary& rotary, const InputTensor<3>& rows, std::int64_t first_position,
            const OutputTensor<3>& out) {
    check_rows(rows, out);
    check_extent("rows", 2, rows.extents[2], rotary.head_dim(), "the rotary's head_dim");
    const std::int64_t last = std::max<std::int64_t>(rows.extents[1] - 1, 0);
    if (first_position > std::numeric_limits<std::int64_t>::max() - last) {
        throw InvalidArgument(fmt::format("rotate: first_position is {}; with {} rows positions exceed 64 bits",
                                          first_position, rows.extents[1]));
    }
    with_memory_errors("rotate", [&] {
        rotate_at(context, rotary, rows, out,
                  [&](std::size_t i) noexcept { return first_position + static_cast<std::int64_t>(i); });
    });
}

void rotate(Context& context, const RotaryTable& table, const InputTensor<3>& rows,
            std::span<const std::int64_t> positions, const OutputTensor<3>& out) {
    check_rows(rows, out);
    const auto check_table = [](const char* name, const InputTensor<2>& view) {
        check_f32_input(name, view);
        if (view.extents[1] > 1 && view.strides[1] != 1) {
            throw InvalidArgument(
                fmt::format("{}: stride 1 is {}; it must be 1 (dense in the last dimension)", name, view.strides[1]));
        }
    };
    check_table("cosine", table.cosine);
    check_table("sine", table.sine);
    check_same_extents<2>("sine", table.sine.extents, table.cosine.extents, "that of cosine");
    const std::int64_t head_dim = rows.extents[2];
    if (head_dim < 1 || head_dim > kMaxHeadDim) {
        throw InvalidArgument(fmt::format("rows: head_dim is {}; allowed: 1 to {}", head_dim, kMaxHeadDim));
    }
    const std::int64_t half = table.cosine.extents[1];
    if (half < 1 || half > head_dim / 2) {
        throw InvalidArgument(fmt::format(
            "cosine: extent 1 is {}; it must be from 1 to half of the rows' head_dim of {}", half, head_dim));
    }
    if (table.pairing != RotaryPairing::halves && table.pairing != RotaryPairing::interleaved) {
        throw InvalidArgument(
            fmt::format("RotaryTable: pairing is {}; allowed: 0 and 1", static_cast<int>(table.pairing)));
    }
    check_positions(positions, rows);
    for (std::size_t i = 0; i < positions.size(); ++i) {
        if (positions[i] < 0 || positions[i] >= table.cosine.extents[0]) {
            throw InvalidArgument(fmt::format("positions[{}] is {}; the table has {} rows, from 0", i, positions[i],
                                              table.cosine.extents[0]));
        }
    }
    with_memory_errors("rotate", [&] {
        rotate_rows(context.impl(), size(half), table.pairing, rows, out, [&](std::size_t i, float*) noexcept {
            return TableRow{floats(table.cosine.data) + positions[i] * table.cosine.strides[0],
                            floats(table.sine.data) + positions[i] * table.sine.strides[0]};
        });
    });
}

}  // namespace headlong
