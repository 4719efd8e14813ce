/// \file
/// Rotary position embedding (Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding"): pair i
/// of a row at position p is turned by the angle p * inverse_frequency[i], which takes (x, y) to (x cos - y sin,
/// y cos + x sin). Frequencies and angles are computed in double precision; sine and cosine are rounded to float once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <headlong/context.hpp>
#include <headlong/export.hpp>
#include <headlong/tensor.hpp>

namespace headlong HEADLONG_API {

/// Which elements of a row are turned together.
enum class RotaryPairing : std::uint8_t {
    halves,       ///< x[i] with x[i + rotary_dim / 2] (GPT-NeoX, Llama in Hugging Face's layout)
    interleaved,  ///< x[2 i] with x[2 i + 1] (GPT-J, Llama in its original layout)
};

/// How frequencies are stretched to contexts beyond the trained one.
enum class RotaryScaling : std::uint8_t {
    none,      ///< not at all (Su et al. 2021, "RoFormer")
    linear,    ///< all divided by `factor` (Chen et al. 2023, "Extending Context Window via Positional Interpolation")
    ntk,       ///< theta times factor^(r / (r - 2)): static "NTK-aware" scaling (bloc97 2023)
    llama3,    ///< long wavelengths divided, short ones kept, between them a ramp (Llama 3.1's model code)
    yarn,      ///< a ramp over pairs, and an attention factor (Peng et al. 2023, "YaRN")
    longrope,  ///< one divisor per pair, and an attention factor (Ding et al. 2024, "LongRoPE"; as in Phi-3)
};

/// Numbers are finite. Those that belong to other scalings than the chosen one are not looked at. The formulas are
/// those of Hugging Face transformers' modeling_rope_utils, in double precision.
struct RotaryOptions {
    std::int64_t head_dim = 0;    ///< 1 to 2^20
    std::int64_t rotary_dim = 0;  ///< even, 2 to head_dim: what is turned; the rest passes through. 0 = head_dim
    /// Base of the frequencies theta^(-2i / rotary_dim), > 0; with yarn > 1. All frequencies, scaled, must be above 0
    /// and at most 1e100.
    double theta = 10000.0;
    RotaryPairing pairing = RotaryPairing::halves;  ///< of elements

    RotaryScaling scaling = RotaryScaling::none;  ///< of frequencies
    /// linear, ntk (whose rotary_dim is at least 4), llama3, yarn: >= 1. longrope: the extended context by the original
    /// one, if given; > 0.
    double factor = 1.0;
    /// llama3, yarn, longrope: the context trained at, >= 1. Where longrope's attention factor is made from its
    /// logarithm, >= 2.
    std::int64_t original_context = 0;

    double low_freq_factor = 1.0;   ///< llama3: wavelengths over original_context / this are divided by factor; > 0
    double high_freq_factor = 4.0;  ///< llama3: those under original_context / this are kept; > low_freq_factor

    double beta_fast = 32.0;  ///< yarn: pairs with more turns than this over the original context are kept
    double beta_slow = 1.0;   ///< yarn: those with fewer turns than this are divided; > 0, < beta_fast
    bool truncate = true;     ///< yarn: whether the ramp's ends are rounded outwards to whole pairs

    /// longrope: one divisor per pair, each > 0. Where a model has two lists, by length, the caller chooses once: keys
    /// that a cache holds are rotated already.
    std::vector<double> pair_factors = {};

    /// yarn, longrope: factor of cosine and sine. Absent: yarn 0.1 ln(factor) + 1, longrope sqrt(1 + ln(factor) /
    /// ln(original_context)), both 1 for a factor <= 1. From 1e-30 to 1e30.
    std::optional<double> attention_factor = {};
};

/// A checked description, ready to rotate with. A value: copies are independent; const use is thread-safe.
class Rotary {
  public:
    /// Throws InvalidArgument, naming the option, its value and what is allowed, or OutOfMemory.
    explicit Rotary(const RotaryOptions& options);
    Rotary(const Rotary&) = default;             ///< (there is no move: nothing is left without frequencies)
    Rotary& operator=(const Rotary&) = default;  ///< shares the other's frequencies
    ~Rotary() = default;

    std::int64_t head_dim() const noexcept { return head_dim_; }  ///< elements of a row
    /// Elements of a row that are turned, the first ones.
    std::int64_t rotary_dim() const noexcept { return 2 * static_cast<std::int64_t>(inverse_frequencies_->size()); }
    RotaryPairing pairing() const noexcept { return pairing_; }  ///< which are turned together
    std::span<const double> inverse_frequencies() const noexcept { return *inverse_frequencies_; }  ///< one per pair
    double attention_factor() const noexcept { return attention_factor_; }  ///< of cosine and sine

    /// Cosine and sine of all pairs at a position, times the attention factor; each of rotary_dim / 2 floats. Any
    /// position; angles are as exact as doubles are, so that from about 2^50 on they mean little.
    void tabulate(std::int64_t position, float* cosine, float* sine) const noexcept;

    /// Whether both turn all rows alike.
    friend bool operator==(const Rotary& a, const Rotary& b) noexcept {
        return a.head_dim_ == b.head_dim_ && a.pairing_ == b.pairing_ && a.attention_factor_ == b.attention_factor_ &&
               (a.inverse_frequencies_ == b.inverse_frequencies_ || *a.inverse_frequencies_ == *b.inverse_frequencies_);
    }

  private:
    std::int64_t head_dim_;
    RotaryPairing pairing_;
    std::shared_ptr<const std::vector<double>> inverse_frequencies_;  ///< copies share them
    double attention_factor_ = 1.0;
};

/// Rotates rows [heads, n, head_dim], row i of every head at positions[i]. Computed in float32; 16-bit rows are widened
/// exactly, 16-bit results rounded once, to nearest even. `out` has the shape of `rows`, may have another element type,
/// and may be the same memory with the same strides and type. Every extent but head_dim may be 0. A row's bits depend
/// on the row, its position and the instruction set only. Throws InvalidArgument, OutOfMemory.
HEADLONG_API void rotate(Context& context, const Rotary& rotary, const InputTensor<3>& rows,
                         std::span<const std::int64_t> positions, const OutputTensor<3>& out);

/// The same at the positions first_position, first_position + 1, ...
HEADLONG_API void rotate(Context& context, const Rotary& rotary, const InputTensor<3>& rows,
                         std::int64_t first_position, const OutputTensor<3>& out);

/// Cosines and sines that the caller has: [positions, rotary_dim / 2], f32, dense in the last dimension (stride 1).
struct RotaryTable {
    InputTensor<2> cosine = {};                     ///< of the angles, times an attention factor if there is one
    InputTensor<2> sine = {};                       ///< likewise; of the same shape
    RotaryPairing pairing = RotaryPairing::halves;  ///< which elements are turned together
};

/// Rotates with a table; positions[i] is a row of it. rotary_dim is twice the table's columns, at most the rows'
/// head_dim; what lies beyond passes through.
HEADLONG_API void rotate(Context& context, const RotaryTable& table, const InputTensor<3>& rows,
                         std::span<const std::int64_t> positions, const OutputTensor<3>& out);

}  // namespace headlong
