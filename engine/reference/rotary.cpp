#include "engine/reference/rotary.hpp"

#include <cmath>
#include <complex>
#include <cstddef>
#include <string>

#include <headlong/error.hpp>

namespace headlong::reference {

namespace {

constexpr double kTurn = 6.283185307179586476925;  // radians

void require(bool condition, const char* what) {
    if (!condition) throw InvalidArgument(std::string("reference rotary: ") + what);
}

std::int64_t rotary_dim_of(const RotaryOptions& options) {
    return options.rotary_dim == 0 ? options.head_dim : options.rotary_dim;
}

// 0 up to `low`, 1 from `high` on, a line between.
double ramp(double x, double low, double high) {
    if (low == high) high = low + 0.001;
    const double t = (x - low) / (high - low);
    return t < 0.0 ? 0.0 : (t > 1.0 ? 1.0 : t);
}

double llama3_frequency(const RotaryOptions& o, double plain) {
    const double turns = static_cast<double>(o.original_context) * plain / kTurn;
    if (turns > o.high_freq_factor) return plain;
    if (turns < o.low_freq_factor) return plain / o.factor;
    const double share_kept = (turns - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor);
    return plain * (share_kept + (1.0 - share_kept) / o.factor);
}

double yarn_frequency(const RotaryOptions& o, double pair, double plain) {
    // theta^(-2 p / dim) * context / turn = turns, solved for p
    const double dim = static_cast<double>(rotary_dim_of(o));
    const auto pair_that_turns = [&](double turns) {
        const double whole = static_cast<double>(o.original_context) / kTurn;
        return 0.5 * dim * (std::log(whole) - std::log(turns)) / std::log(o.theta);
    };
    double low = pair_that_turns(o.beta_fast);
    double high = pair_that_turns(o.beta_slow);
    if (o.truncate) {
        low = std::floor(low);
        high = std::ceil(high);
    }
    if (low < 0.0) low = 0.0;
    if (high > dim - 1.0) high = dim - 1.0;
    const double share_divided = ramp(pair, low, high);
    return plain * (1.0 - share_divided + share_divided / o.factor);
}

// Turns the pairs of one row; `turn(i)` is the complex number that pair i is multiplied by.
template <class Turn>
void rotate_row(Tensor& rows, std::int64_t head, std::int64_t i, std::int64_t pairs, RotaryPairing pairing,
                const Turn& turn) {
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
        const bool interleaved = pairing == RotaryPairing::interleaved;
        const std::int64_t real = interleaved ? 2 * pair : pair;
        const std::int64_t imaginary = interleaved ? 2 * pair + 1 : pair + pairs;
        const std::complex<double> turned =
            std::complex<double>(rows.at(head, i, real), rows.at(head, i, imaginary)) * turn(pair);
        rows.at(head, i, real) = turned.real();
        rows.at(head, i, imaginary) = turned.imag();
    }
}

void check(const Tensor& rows, std::int64_t rotary_dim, const std::vector<std::int64_t>& positions) {
    require(rows.rank() == 3, "rows must be [heads, n, head_dim]");
    require(rotary_dim <= rows.extents[2], "rotary_dim exceeds head_dim");
    require(static_cast<std::int64_t>(positions.size()) == rows.extents[1], "each row needs a position");
}

}  // namespace

std::vector<double> rotary_frequencies(const RotaryOptions& options) {
    const std::int64_t dim = rotary_dim_of(options);
    double theta = options.theta;
    if (options.scaling == RotaryScaling::ntk) {
        // so that the slowest pair, i = dim / 2 - 1, turns `factor` times slower
        const double exponent = static_cast<double>(dim) / static_cast<double>(dim - 2);
        theta *= std::pow(options.factor, exponent);
    }
    std::vector<double> frequencies;
    for (std::int64_t i = 0; i < dim / 2; ++i) {
        const double pair = static_cast<double>(i);
        const double plain = std::exp(-2.0 * pair / static_cast<double>(dim) * std::log(theta));
        switch (options.scaling) {
            case RotaryScaling::none:
            case RotaryScaling::ntk:
                frequencies.push_back(plain);
                break;
            case RotaryScaling::linear:
                frequencies.push_back(plain / options.factor);
                break;
            case RotaryScaling::llama3:
                frequencies.push_back(llama3_frequency(options, plain));
                break;
            case RotaryScaling::yarn:
                frequencies.push_back(yarn_frequency(options, pair, plain));
                break;
            case RotaryScaling::longrope:
                frequencies.push_back(plain / options.pair_factors.at(static_cast<std::size_t>(i)));
                break;
        }
    }
    return frequencies;
}

double rotary_attention_factor(const RotaryOptions& options) {
    const bool yarn = options.scaling == RotaryScaling::yarn;
    const bool longrope = options.scaling == RotaryScaling::longrope;
    if (!yarn && !longrope) return 1.0;
    if (options.attention_factor) return *options.attention_factor;
    if (options.factor <= 1.0) return 1.0;
    if (yarn) return 1.0 + std::log(options.factor) / 10.0;
    return std::sqrt(1.0 + std::log(options.factor) / std::log(static_cast<double>(options.original_context)));
}

Tensor rotate(const RotaryOptions& options, const Tensor& rows, const std::vector<std::int64_t>& positions) {
    check(rows, rotary_dim_of(options), positions);
    const std::vector<double> frequencies = rotary_frequencies(options);
    const double length = rotary_attention_factor(options);
    Tensor result = rows;
    for (std::int64_t head = 0; head < rows.extents[0]; ++head) {
        for (std::int64_t i = 0; i < rows.extents[1]; ++i) {
            const double position = static_cast<double>(positions[static_cast<std::size_t>(i)]);
            rotate_row(result, head, i, rotary_dim_of(options) / 2, options.pairing, [&](std::int64_t pair) {
                return std::polar(length, position * frequencies[static_cast<std::size_t>(pair)]);
            });
        }
    }
    return result;
}

Tensor rotate(const Tensor& cosine, const Tensor& sine, RotaryPairing pairing, const Tensor& rows,
              const std::vector<std::int64_t>& positions) {
    require(cosine.rank() == 2 && cosine.extents == sine.extents, "tables must be [entries, rotary_dim / 2]");
    check(rows, 2 * cosine.extents[1], positions);
    Tensor result = rows;
    for (std::int64_t head = 0; head < rows.extents[0]; ++head) {
        for (std::int64_t i = 0; i < rows.extents[1]; ++i) {
            const std::int64_t entry = positions[static_cast<std::size_t>(i)];
            rotate_row(result, head, i, cosine.extents[1], pairing, [&](std::int64_t pair) {
                return std::complex<double>(cosine.at(entry, pair), sine.at(entry, pair));
            });
        }
    }
    return result;
}

}  // namespace headlong::reference
