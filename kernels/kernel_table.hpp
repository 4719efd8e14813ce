// The kernels of one instruction set, reached through a table of function pointers. Kernels work on raw memory:
// no allocation, no threads, no exceptions, no state. Scratch comes from the caller. All are noexcept, and trust
// their arguments: the engine validates once, at the API.
//
// Numerics that all of them keep (the same-bits contract, engine/README.md):
//   - one accumulator per (row, token) over the depth, one per (row, value column) over the tokens of a span, always
//     in ascending order, whatever the tile; explicit fused multiply-add (`generic` multiplies, then adds);
//   - a token outside a row's range weighs exactly -0.0f. No exp2 gives that value, so it marks "not allowed": the
//     guarded loop skips it, and elsewhere its product with a finite value adds a zero;
//   - scores are in units of log2: the caller has multiplied the query by scale * log2(e).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/layout.hpp"

namespace headlong::kernels {

/// out[r][c] = sum over k < depth of rows[r][k] * panels[c / 16][k][c % 16], for c < columns.
/// With `accumulate` the sums start from out's contents (a k-blocked linear layer, a bias), otherwise from +0.
struct DotPanels {
    const float* rows;       ///< [row_count][depth]
    std::size_t row_stride;  ///< floats
    std::size_t row_count;
    const void* panels;        ///< ceil(columns / 16) panels of [depth][16] of `type`, any alignment
    std::size_t panel_stride;  ///< elements from one panel to the next
    std::size_t depth;
    float* out;              ///< [row_count][columns]; columns past `columns` are not written
    std::size_t out_stride;  ///< floats
    std::size_t columns;
    bool accumulate;
    bool canonical;                       ///< write every NaN as 0x7fc00000 (which one a sum keeps depends on the tile)
    ElementType type = ElementType::f32;  ///< of the panels; widened in registers, exactly
    const void* next = nullptr;  ///< read after these panels: brought near meanwhile, as many bytes; null: what
                                 ///< follows in memory is
};

/// The positions of a span that a row sees: [begin, end), in tokens from the span's start; empty if begin >= end.
struct TokenRange {
    std::uint32_t begin;
    std::uint32_t end;
};

/// What becomes of a score between the product and the softmax, in this order; all in units of log2.
///   shift      s = s + shift: what the centre of the keys adds
///   softcap    s = softcap * tanh(s / softcap)
///   ALiBi      s = s - slope * |position - token|
///   bias       s = s + bias, or -infinity where the bias is: selected, not added, so that a NaN does not get through
struct ScoreRules {
    float softcap = 0.0F;                ///< 0 = off
    const float* slopes = nullptr;       ///< [row_count]; null = off
    const float* positions = nullptr;    ///< [row_count] with slopes: the query's position, from the span's start
    const float* const* bias = nullptr;  ///< [row_count] rows of [512], read in the panels of the row's range,
                                         ///< used in the range; null = off.
                                         ///< -infinity: not allowed
    const float* shifts = nullptr;       ///< [row_count]; null = off
};

/// Applies the rules to the scores of each row's range; other scores are unspecified afterwards.
struct AdjustScores {
    float* scores;             ///< [row_count][512]
    std::size_t score_stride;  ///< floats
    std::size_t row_count;
    const TokenRange* ranges;  ///< [row_count]
    ScoreRules rules;
};

/// Turns scores into weights in place: the rules, then weight = exp2(score - max) where the row's range and its bias
/// allow the token, and -0.0f elsewhere, over the tokens [first, last). max and sum are the row's state: -infinity
/// and 0 where no score is above -infinity and none is NaN; a NaN among the scores makes both NaN or the sum NaN.
/// The sum is one partial sum per token mod 16, then the tree of reduce_tree().
struct SoftmaxSpan {
    float* scores;             ///< [row_count][512]
    std::size_t score_stride;  ///< floats
    std::size_t row_count;
    const TokenRange* ranges;  ///< [row_count], each inside [first, last) or empty
    std::size_t first;         ///< multiple of 16
    std::size_t last;          ///< multiple of 16, at most 512
    float* max;                ///< [row_count]
    float* sum;                ///< [row_count]
    ScoreRules rules = {};
};

/// out[r][c] = sum over t in [first, last) of weights[r][t] * value(t)[c], for c < columns.
struct WeightedRows {
    const float* weights;       ///< [row_count][512]
    std::size_t weight_stride;  ///< floats
    std::size_t row_count;
    const void* const* value_blocks;  ///< [8]: the value panels of each block of the span; those that
                                      ///< [first, last) does not touch may be null
    std::uint32_t nonfinite_blocks;   ///< bit b: block b may hold a NaN or infinity; tokens of weight -0.0f
                                      ///< are then skipped, not multiplied
    std::size_t first;
    std::size_t last;
    std::size_t columns;                  ///< a multiple of 16
    float* out;                           ///< [row_count][columns], overwritten
    std::size_t out_stride;               ///< floats
    ElementType type = ElementType::f32;  ///< of the values; widened in registers, exactly
    const void* next = nullptr;           ///< read after the last block: brought near meanwhile; or null
};

/// Rows of a strided tensor: element (i, j) at data + i * row_stride + j * column_stride, strides in elements.
struct Rows {
    const void* data;
    ElementType type;
    std::ptrdiff_t row_stride;
    std::ptrdiff_t column_stride;
    std::size_t row_count;
    std::size_t column_count;
};

/// Writes rows as tokens first_lane, first_lane + 1, ... of consecutive panels of [column_count][16] of `type`: the
/// very bits where the types are the same floats, else rounded to nearest even.
struct PackPanels {
    Rows source;
    void* panels;            ///< any alignment
    std::size_t first_lane;  ///< token of `panels` that row 0 becomes
    ElementType type = ElementType::f32;
};

/// Writes rows as tokens first_token, first_token + 1, ... of a block's value panels, padding columns as 0, in the same
/// way. Returns whether a value, as written, is NaN or infinite.
struct PackValues {
    Rows source;
    void* values;             ///< 64-byte aligned
    std::size_t first_token;  ///< first_token + rows <= 64
    ElementType type = ElementType::f32;
};

/// Widens 16-bit elements to floats, exactly.
struct Widen {
    const void* from;
    ElementType type;
    float* to;
    std::size_t count;  ///< a multiple of 16
};

/// Gathers rows into dense memory and multiplies them by `factor`.
struct ScaleRows {
    Rows source;
    float factor;
    float* out;              ///< [row_count][out_stride]
    std::size_t out_stride;  ///< floats
};

/// The way back: writes dense rows of floats to strided memory, rounded to nearest even where the type is narrower.
/// Of 16 bits every NaN is 0x7e00 or 0x7fc0; floats are copied bit by bit.
struct StoreRows {
    const float* rows;      ///< [row_count][column_count]
    std::size_t row_pitch;  ///< floats
    std::size_t row_count;
    std::size_t column_count;
    void* out;
    ElementType type;
    std::ptrdiff_t row_stride;     ///< elements
    std::ptrdiff_t column_stride;  ///< elements
};

/// One row of a mask as biases: mask * unit, or 0 and -infinity of a boolean mask, for the tokens of a range. Finite
/// elements stay finite. Returns the smallest range that holds all tokens allowed, empty if there is none.
struct MaskRow {
    const void* data;  ///< the element of token range.begin
    bool boolean;      ///< bytes, nonzero = allowed; `type` does not matter then
    ElementType type;
    std::ptrdiff_t stride;  ///< elements from one token to the next
    TokenRange range;
    float unit;   ///< log2(e) where scores are in units of log2
    float* bias;  ///< [512]; written in the range
};

/// Softmax states of consecutive rows: output before division, maximum (log2 units) and sum.
/// The empty state is output +0, max -infinity, sum 0.
struct States {
    float* output;       ///< [row_count][stride]
    std::size_t stride;  ///< floats
    float* max;
    float* sum;
};

/// Folds `from` into `into`, row by row (Milakov and Gimelshein 2018): m = max(m1, m2),
/// x = x1 * exp2(m1 - m) + x2 * exp2(m2 - m) for output and sum; 0 is subtracted where m is -infinity.
struct Merge {
    States into;
    States from;
    std::size_t row_count;
    std::size_t columns;  ///< a multiple of 16
};

/// out = output / sum + 0.0f, so that no -0 is written; 0 for an empty state; every NaN becomes 0x7fc00000.
struct Finish {
    States states;
    std::size_t row_count;
    std::size_t columns;     ///< the real value_dim
    float* out;              ///< [row_count][columns]
    std::size_t out_stride;  ///< floats between the dense rows of out
};

/// out[r][c] = rows[r][c] / sqrt(mean of the row's squares + epsilon) * weight[c] (Zhang and Sennrich 2019, "Root Mean
/// Square Layer Normalization"). The sum of squares is one partial sum per column mod 16, then the tree of
/// reduce_tree(). out may be rows.
struct RmsNorm {
    const float* rows;
    std::size_t row_stride;  ///< floats
    std::size_t row_count;
    std::size_t columns;
    const float* weight;  ///< [columns]
    float epsilon;
    float* out;
    std::size_t out_stride;  ///< floats
};

/// out[r][c] = (rows[r][c] - mean) / sqrt(variance + epsilon) * weight[c] + bias[c], the row's own mean and the mean
/// square of what differs from it (Ba et al. 2016, "Layer Normalization"). Sums as in RmsNorm. out may be rows.
struct LayerNorm {
    const float* rows;
    std::size_t row_stride;  ///< floats
    std::size_t row_count;
    std::size_t columns;
    const float* weight;  ///< [columns]
    const float* bias;    ///< [columns]
    float epsilon;
    float* out;
    std::size_t out_stride;  ///< floats
};

/// Rotary embedding in place (Su et al. 2021, "RoFormer"): pair i of each head, (x, y), becomes (x cos - y sin,
/// y cos + x sin) with the cosine and sine of pair i. Pairs are (v[i], v[i + half]), or (v[2 i], v[2 i + 1]) if
/// `interleaved`; what lies beyond 2 * half is left alone.
struct Rotate {
    float* row;  ///< the heads of one token
    std::size_t heads;
    std::size_t head_stride;  ///< floats
    std::size_t half;         ///< pairs
    const float* cosine;      ///< [half]
    const float* sine;        ///< [half]
    bool interleaved;
};

/// The Walsh-Hadamard transform in place: a row is cut into blocks of b elements, the largest power of two that divides
/// its length; a block is multiplied by the matrix of +1 and -1 (Sylvester's order) / sqrt(b), which is its own
/// inverse. One multiplication, then additions in a fixed order: the same bits on every set.
struct Hadamard {
    float* rows;
    std::size_t row_stride;  ///< floats
    std::size_t row_count;
    std::size_t columns;
};

/// What a layer makes of a gate.
enum class Activation : std::uint8_t {
    silu,       ///< x sigmoid(x) (Elfwing et al. 2018), also called swish
    gelu,       ///< x Phi(x), Phi the normal distribution's (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units")
    gelu_tanh,  ///< its approximation x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), from the same paper
    clamped_silu,  ///< x' sigmoid(1.702 x') with x' = min(x, limit), and up' + 1 in the place of up, with up' = up
                   ///< clamped to [-limit, limit] (gpt-oss' model code)
};

/// out[i] = activation(gate[i]) * up[i] (Shazeer 2020, "GLU Variants Improve Transformer"), or activation(gate[i])
/// without up. out may be gate or up.
struct Activate {
    const float* gate;
    const float* up;  ///< or null, but for clamped_silu
    float* out;
    std::size_t count;
    Activation activation = Activation::silu;
    float limit = 0.0F;  ///< of clamped_silu
};

/// out[i] += factor * rows[i], a multiply-add.
struct AddScaled {
    const float* rows;
    float factor;
    float* out;
    std::size_t count;
};

/// Panels of floats to int8 panels (layout.hpp), symmetric: scale = largest magnitude / 127 per output feature and
/// group of 64 inputs, q = round(w * (127 / largest magnitude)), to even. Scale 0 and q 0 where the largest magnitude
/// is below 2^-100; scale NaN and q 0 where a weight is not finite. The same bytes on every set.
struct QuantisePanels {
    const float* panels;       ///< panel_count panels of [depth][16]
    std::size_t panel_stride;  ///< floats
    std::size_t panel_count;
    std::size_t depth;
    std::uint8_t* out;       ///< code_panel_bytes(StoredType::int8, depth) each, 64-byte aligned
    std::size_t out_stride;  ///< bytes, a multiple of 64
};

/// Rows of floats to int8 rows (layout.hpp): with s = largest magnitude / 127 of a group of 64 inputs, A = round(x /
/// s), B = round((x / s - A) * 254), factor = s / 254; x / s is x * (127 / largest magnitude). Factor 0 and codes 0
/// where the largest magnitude is below 2^-100; factor NaN and codes 0 where an input is not finite. What becomes of a
/// row depends on nothing else, and A, B, factors and sums are the same on every set.
struct QuantiseRows {
    const float* rows;       ///< [row_count][depth]
    std::size_t row_stride;  ///< floats
    std::size_t row_count;
    std::size_t depth;
    std::uint8_t* out;       ///< code_row_bytes(depth) each, 64-byte aligned; what fills the last line is not written
    std::size_t out_stride;  ///< bytes, a multiple of 64
};

/// out[r][c] = sum over the groups of (float(sum over the group of C[r] * q[c]) * scale[c]) * factor[r], for c <
/// columns: a multiplication, which scales from 2^100 on may overflow, then a fused multiply-add onto the groups
/// before. The inner sum is an integer, the same one on every set. A NaN scale or factor makes the sum NaN, whatever it
/// meets. With `accumulate` the sums start from out's contents, otherwise from +0.
struct DotCodes {
    const std::uint8_t* rows;  ///< code rows of this set's quantise_rows
    std::size_t row_stride;    ///< bytes
    std::size_t row_count;
    const std::uint8_t* panels;  ///< ceil(columns / 16) key panels of `type`
    std::size_t panel_stride;    ///< bytes; code_panel_bytes() lets one row read on from panel to panel
    std::size_t depth;
    std::size_t group_begin;  ///< the groups that are summed: 0 and code_groups(depth), or a part with `accumulate`
    std::size_t group_end;
    float* out;              ///< [row_count][columns]; columns past `columns` are not written
    std::size_t out_stride;  ///< floats
    std::size_t columns;
    bool accumulate;
    bool canonical;                      ///< write every NaN as 0x7fc00000
    StoredType type = StoredType::int8;  ///< or int4
    const void* next = nullptr;          ///< read after these panels: brought near meanwhile, as many bytes; null: the
                                         ///< panels are one stream, of which what comes next is brought near
};

/// Strided rows to tokens first_lane, first_lane + 1, ... of consecutive key panels of codes, a scale per token and
/// group, as in QuantisePanels; of int4 with 7 in the place of 127. The same bytes on every set.
struct QuantiseKeys {
    Rows source;
    std::uint8_t* panels;
    std::size_t first_lane;  ///< token of `panels` that row 0 becomes
    StoredType type;
};

/// Strided rows to tokens first_token, first_token + 1, ... of a value block of codes, padding columns of the last
/// panel as 0. Returns whether a scale is NaN.
struct QuantiseValues {
    Rows source;
    std::uint8_t* values;
    std::size_t first_token;  ///< first_token + rows <= 64
    StoredType type;
};

/// out[r][c] = sum over the blocks of factor[r] * float(sum over the block's t in [first, last) of P[r][t] * q(t)[c]),
/// for c < columns: products and sums rounded one by one, blocks in ascending order. For every block of 64 tokens and
/// group of 128 columns, p = weights[r][t] * scale(t), 0 where the weight is -0.0f, and with m the largest p of the
/// row, P = floor(p * (32767 / m) + u[t mod 16]), u[i] = (i with its four bits reversed + 0.5) / 16, and factor = m /
/// 32767: rounding to nearest would drop the many small weights beside a large one together. The sum is an integer, the
/// same one on every set. Factor and codes are 0 if m is below 2^-110. A NaN weight of the row makes all of it NaN, a
/// NaN scale under a weight that is not -0.0f its group's columns.
struct WeightedCodes {
    const float* weights;       ///< [row_count][512]
    std::size_t weight_stride;  ///< floats
    std::size_t row_count;
    const float* sums;                ///< [row_count]: NaN if a weight is
    const void* const* value_blocks;  ///< [8]: the values of each block of the span; those that [first, last) does not
                                      ///< touch may be null
    std::uint32_t nonfinite_blocks;   ///< bit b: a scale of block b may be NaN
    std::size_t first;                ///< multiple of 16
    std::size_t last;                 ///< multiple of 16
    std::size_t columns;              ///< a multiple of 16
    float* out;                       ///< [row_count][columns], overwritten
    std::size_t out_stride;           ///< floats
    StoredType type;                  ///< int8 or int4
    std::int16_t* codes;              ///< scratch: [row_count][code_stride]
    std::size_t code_stride;          ///< at least 512, a multiple of 16
    const void* next = nullptr;       ///< read after the last block: brought near meanwhile; or null
};

/// Reads memory, and returns the sum of all floats that it read: what bandwidth is measured with.
struct ReadLoop {
    const float* data;           ///< 64-byte aligned
    std::size_t count;           ///< a multiple of kReadFloats
    std::size_t passes;          ///< how often it is read
    std::size_t prefetch_bytes;  ///< how far ahead lines are asked for; 0: not at all, the processor guesses
};
inline constexpr std::size_t kReadFloats = 128;

struct KernelTable {
    const char* name;  ///< the instruction set's name
    void (*dot_panels)(const DotPanels&) noexcept;
    void (*adjust_scores)(const AdjustScores&) noexcept;
    void (*softmax_span)(const SoftmaxSpan&) noexcept;
    void (*weighted_rows)(const WeightedRows&) noexcept;
    void (*pack_panels)(const PackPanels&) noexcept;
    bool (*pack_values)(const PackValues&) noexcept;
    void (*widen)(const Widen&) noexcept;
    void (*merge)(const Merge&) noexcept;
    void (*finish)(const Finish&) noexcept;
    void (*scale_rows)(const ScaleRows&) noexcept;
    void (*store_rows)(const StoreRows&) noexcept;
    TokenRange (*mask_row)(const MaskRow&) noexcept;
    void (*rms_norm)(const RmsNorm&) noexcept;
    void (*layer_norm)(const LayerNorm&) noexcept;
    void (*rotate)(const Rotate&) noexcept;
    void (*activate)(const Activate&) noexcept;
    void (*add_scaled)(const AddScaled&) noexcept;
    void (*hadamard)(const Hadamard&) noexcept;
    void (*quantise_panels)(const QuantisePanels&) noexcept;
    void (*quantise_rows)(const QuantiseRows&) noexcept;
    void (*dot_codes)(const DotCodes&) noexcept;
    void (*quantise_keys)(const QuantiseKeys&) noexcept;
    bool (*quantise_values)(const QuantiseValues&) noexcept;
    void (*weighted_codes)(const WeightedCodes&) noexcept;
    /// A code row's quad is A[4], B[4], not C[4].
    bool code_terms;
    void (*exp2)(const float* x, float* y, std::size_t count) noexcept;  ///< the exponential of softmax_span

    // What instruments measure the machine's limits with (limits-inl.hpp).
    double (*fma_loop)(std::size_t rounds) noexcept;         ///< fma_flops FLOPs a round; gives
                                                             ///< rounds * fma_flops / 2 * 2^-20, if rounds <= 2^24
    std::uint32_t (*dot_loop)(std::size_t rounds) noexcept;  ///< dot_ops integer operations a round; gives
                                                             ///< rounds * dot_ops / 2, mod 2^32
    float (*read_loop)(const ReadLoop&) noexcept;
    std::size_t fma_sums;  ///< multiply-adds a round of fma_loop
    std::size_t fma_flops;
    std::size_t dot_sums;  ///< dot products a round of dot_loop
    std::size_t dot_ops;
};

/// Tables that this build holds, in the order of headlong::Isa; null where the architecture has no such unit.
/// Calling through a table that the processor cannot run ends in an illegal instruction: the engine chooses.
extern const KernelTable* const generic_table;
extern const KernelTable* const avx2_table;
extern const KernelTable* const avx2vnni_table;
extern const KernelTable* const avx512_table;
extern const KernelTable* const avx512vnni_table;
extern const KernelTable* const neon_table;
extern const KernelTable* const neondot_table;

}  // namespace headlong::kernels
