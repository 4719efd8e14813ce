// A call of attention that does not say through which function: what is attended, and every way to compute it. Tests
// describe a case once and run it over plain tensors, caches, pages, packed rows, chunks and parts.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/reference/attention.hpp"
#include "tests/support/any_tensor.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {

/// Contexts are made once: these tests are not about making them.
Context& shared_context(Isa isa, std::size_t threads = 1);

/// Any number of sequences, each of its own lengths. Tensors are padded to the longest one; what lies behind a
/// sequence's own rows belongs to nobody. Copies share the memory, so that a changed copy costs little.
struct AttentionCase {
    std::int64_t heads = 1;
    std::int64_t kv_heads = 1;
    std::int64_t head_dim = 1;
    std::int64_t value_dim = 1;
    std::vector<std::int64_t> q_lens = {1};   ///< per sequence
    std::vector<std::int64_t> kv_lens = {1};  ///< per sequence
    InputTensor<4> query = {};                ///< [sequences, heads, longest q_len, head_dim]
    InputTensor<4> key = {};                  ///< [sequences, kv_heads, longest kv_len, head_dim]
    InputTensor<4> value = {};                ///< [sequences, kv_heads, longest kv_len, value_dim]
    DType output_type = DType::f32;
    KvTypes cache = {};  ///< how caches hold the rows

    bool causal = false;             ///< said in every call, whatever its default
    AttentionOptions features = {};  ///< without the spans, which are these:
    std::vector<float> alibi_slopes = {};
    std::vector<float> sink_logits = {};
    std::vector<std::int64_t> live = {};     ///< kv_lengths; empty = all
    std::optional<AttentionMask> mask = {};  ///< against [sequences, heads, longest q_len, longest kv_len]

    std::vector<std::shared_ptr<const void>> memory = {};  ///< what the views look at

    std::int64_t sequences() const noexcept { return static_cast<std::int64_t>(q_lens.size()); }
    std::int64_t longest_q() const noexcept;
    std::int64_t longest_kv() const noexcept;
    bool uniform() const noexcept;  ///< all sequences have the same lengths
    std::int64_t live_of(std::int64_t s) const noexcept;
    /// The position of row 0 of a sequence.
    std::int64_t offset_of(std::int64_t s) const noexcept;
    /// The place of a row in an Outcome's lse.
    std::size_t row_of(std::int64_t s, std::int64_t head, std::int64_t row) const noexcept;
    std::size_t rows() const noexcept;
    /// Of a cache for one sequence.
    KvShape cache_shape() const noexcept;

    /// Options of a call; their spans look at this case.
    AttentionOptions options() const;
    std::string describe() const;
};

/// A tensor whose memory a case keeps.
const AnyTensor<4>& keep(AttentionCase& c, AnyTensor<4> tensor);

/// Gives a case dense or (with `layouts`) strided tensors of normal numbers.
void fill_normal(AttentionCase& c, Random& random, bool layouts = true, Element query = Element::f32,
                 Element key = Element::f32, Element value = Element::f32);

/// One sequence with dense float tensors, given row-major.
AttentionCase dense_case(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, std::int64_t value_dim,
                         const std::vector<double>& query, const std::vector<double>& key,
                         const std::vector<double>& value, Element element = Element::f32);

/// A dense mask of the last `extents.size()` dimensions, which the case keeps.
void set_mask(AttentionCase& c, Element element, const std::vector<std::int64_t>& extents,
              const std::vector<double>& values, AttentionMask::Keys keys = AttentionMask::Keys::all);

// ------------------------------------------------------------------------------------------------- parts of a case

/// Sequence s alone; a mask of the case becomes one of rank 3 at most.
AttentionCase sequence_of(const AttentionCase& c, std::int64_t s);
/// Rows [first, first + count) of a single sequence, at their positions. Not with a mask of the last q_len keys.
AttentionCase rows_of(const AttentionCase& c, std::int64_t first, std::int64_t count);
/// Keys [first, first + count) of a single sequence, or fewer: without those that a short mask does not reach. Not with
/// a mask of the last q_len keys.
AttentionCase keys_of(const AttentionCase& c, std::int64_t first, std::int64_t count);
/// The case as a cache of its types holds it: keys and values rounded to them, by the reference, or scale * code. What
/// other routes make of it is what caches must make of either.
AttentionCase as_stored(const AttentionCase& c);
/// The same case in memory of its own, laid out alike: what is written there reaches no other case.
AttentionCase with_own_memory(const AttentionCase& c);
/// Copies of the tensors and of the mask, if there is one, of other element types or dense.
enum class Part : std::uint8_t { query, key, value, mask };
AttentionCase with_copy_of(const AttentionCase& c, Part part, Element element, bool dense);
Element element_of(const AttentionCase& c, Part part);
/// Whether a part lies as a dense tensor does.
bool is_dense(const AttentionCase& c, Part part);
/// The single sequence between two that are empty: one without keys, and one with keys that nobody asks for.
AttentionCase between_empty_sequences(const AttentionCase& c);

// ---------------------------------------------------------------------------------------------- ways to compute it

/// What a call wrote: bits of the output's type and of float. Sequence by sequence, [head][row][column].
struct Outcome {
    DType type = DType::f32;
    std::vector<std::uint32_t> output;
    std::vector<std::uint32_t> lse;
};

enum class Route : std::uint8_t { plain, cache, paged, packed };
const char* to_string(Route route) noexcept;
bool possible(const AttentionCase& c, Route route) noexcept;
std::vector<Route> possible_routes(const AttentionCase& c);

/// One call. With `random` outputs have any layout, caches are filled in chunks and pages are cut at random; without,
/// outputs are dense, caches are filled at once, and pages have odd sizes. Fails if anything else was written.
Outcome run(Context& context, const AttentionCase& c, Route route, Random* random = nullptr);

/// Whether rows can be computed as soon as the keys they see are there: causal, no mask of the last q_len keys.
bool can_run_in_chunks(const AttentionCase& c) noexcept;
/// Each sequence through a cache that grows with its rows, `chunk` rows at a time (0: random sizes).
Outcome run_in_chunks(Context& context, const AttentionCase& c, std::int64_t chunk, Random* random = nullptr);

/// A single sequence in parts of its keys, cut at `cuts` (ascending, each in [0, kv_len]), joined by merge(); a sink
/// joins part `sink_part`.
Outcome run_merged(Context& context, const AttentionCase& c, const std::vector<std::int64_t>& cuts,
                   std::size_t sink_part);

/// Whether the first `prefix` keys of all sequences can be read as their common prefix, if they hold the same numbers.
bool can_share_prefix(const AttentionCase& c, std::int64_t prefix) noexcept;
Outcome run_with_shared_prefix(Context& context, const AttentionCase& c, std::int64_t prefix);

/// Rows [first, first + count) of every head of a single sequence's outcome.
Outcome rows_of(const AttentionCase& c, const Outcome& outcome, std::int64_t first, std::int64_t count);
/// Sequence s's part of an outcome.
Outcome sequence_of(const AttentionCase& c, const Outcome& outcome, std::int64_t s);

// ------------------------------------------------------------------------------------------------------ comparisons

/// What the reference makes of a case, in the order of an Outcome, and how far a result may be from it.
struct Expected {
    std::vector<double> output;
    std::vector<double> lse;
    std::vector<double> output_bound;               ///< per row
    std::vector<double> lse_bound;                  ///< per row
    std::vector<reference::AttentionResult> parts;  ///< one per sequence, or one for all if they are uniform
};

Expected expected(const AttentionCase& c, std::optional<reference::Scores> scores = {});

/// Fills every row of keys and values that no query sees with NaN and infinities; `masked` is what the reference says
/// of the clean case, with Scores::masked.
void poison_dead_keys(AttentionCase& c, const Expected& masked, Random& random);

/// Half of the distance between neighbours of a 16-bit type at a number; 0 for float, whose rounding the bounds
/// include.
double half_ulp(DType type, double x) noexcept;

/// Within the bounds, and half a unit of the output's type for its rounding.
testing::AssertionResult agrees(const AttentionCase& c, const Outcome& got, const Expected& want);
/// The same where a cache holds codes, and arithmetic is in integers: the root mean square of the error over the call
/// is at most 1.5e-4 * max(1, largest |score| / 8) of the output's plus the float's bound, and no error is above ten
/// times that, of the largest row's, plus the bounds.
testing::AssertionResult agrees_in_codes(const AttentionCase& c, const Outcome& got, const Expected& want);
/// Two outcomes within the bounds of each other, twice over: both may be off.
testing::AssertionResult close(const AttentionCase& c, const Outcome& a, const Outcome& b, const Expected& bounds);
/// memcmp.
testing::AssertionResult same_bits(const Outcome& a, const Outcome& b);

}  // namespace headlong::test
