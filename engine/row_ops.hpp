// Operations on single rows of a layer's activations, for what has no API of its own: the decoder, and the case files
// of the command line.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/context_impl.hpp"
#include "engine/parallel.hpp"

namespace headlong {

// Row operations move a few KiB a row: below this many rows a thread is not worth waking.
inline constexpr std::int64_t kParallelRows = 16;

/// Calls body(row) for every row, on the executor if there are many.
template <class Body>
void for_rows(Context::Impl& context, std::int64_t rows, const Body& body) {
    const auto run = [&](std::size_t task, std::size_t) noexcept { body(static_cast<std::int64_t>(task)); };
    if (rows >= kParallelRows) {
        parallel_for(*context.executor, static_cast<std::size_t>(rows), run);
    } else {
        const FloatEnvironment environment;
        for (std::int64_t row = 0; row < rows; ++row) body(row);
    }
}

/// x [rows][columns] / sqrt(mean of a row's squares + epsilon) * weight [columns], dense; out may be x. columns >= 1.
inline void rms_norm(Context::Impl& context, const float* x, std::int64_t rows, std::int64_t columns,
                     const float* weight, float epsilon, float* out) {
    for_rows(context, rows, [&](std::int64_t row) noexcept {
        context.kernels.rms_norm(
            {x + row * columns, 0, 1, static_cast<std::size_t>(columns), weight, epsilon, out + row * columns, 0});
    });
}

/// The same with the mean taken off, and a bias [columns] added.
inline void layer_norm(Context::Impl& context, const float* x, std::int64_t rows, std::int64_t columns,
                       const float* weight, const float* bias, float epsilon, float* out) {
    for_rows(context, rows, [&](std::int64_t row) noexcept {
        context.kernels.layer_norm({x + row * columns, 0, 1, static_cast<std::size_t>(columns), weight, bias, epsilon,
                                    out + row * columns, 0});
    });
}

/// activation(gate) * up, or without up (null), all [rows][columns] and dense; out may be gate or up. `limit` is
/// clamped_silu's.
inline void activate(Context::Impl& context, kernels::Activation activation, const float* gate, const float* up,
                     std::int64_t rows, std::int64_t columns, float* out, float limit = 0.0F) {
    for_rows(context, rows, [&](std::int64_t row) noexcept {
        const std::int64_t first = row * columns;
        context.kernels.activate({gate + first, up == nullptr ? nullptr : up + first, out + first,
                                  static_cast<std::size_t>(columns), activation, limit});
    });
}

/// out += factor * x, both [rows][columns] and dense.
inline void add_scaled(Context::Impl& context, const float* x, float factor, std::int64_t rows, std::int64_t columns,
                       float* out) {
    for_rows(context, rows, [&](std::int64_t row) noexcept {
        const std::int64_t first = row * columns;
        context.kernels.add_scaled({x + first, factor, out + first, static_cast<std::size_t>(columns)});
    });
}

}  // namespace headlong
