#include "engine/attention/call.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numbers>
#include <type_traits>
#include <utility>

#include "engine/carver.hpp"
#include "engine/float_environment.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/parallel.hpp"

namespace headlong {
namespace {

// Bounds under which positions and the floats of a row stay in 64 bits. Products of lengths with them are bounded by
// the outputs, which are memory of the caller's, or saturate (carver.hpp).
constexpr std::int64_t kMaxLength = std::int64_t{1} << 48;
constexpr std::int64_t kMaxBatch = std::int64_t{1} << 32;
constexpr std::int64_t kMaxHeads = std::int64_t{1} << 20;
constexpr std::int64_t kMaxDim = std::int64_t{1} << 20;
// Softcaps under which neither the cap nor its inverse leaves the normal floats, in units of log2 too.
constexpr float kLeastSoftcap = 1e-30F;
constexpr float kMostSoftcap = 1e30F;

void check_at_most(const char* name, std::int64_t value, std::int64_t most) {
    if (value > most) throw InvalidArgument(fmt::format("{} is {}; at most {} are allowed", name, value, most));
}

void refuse(const char* option, const std::string& value, const char* allowed) {
    throw InvalidArgument(fmt::format("AttentionOptions: {} is {}; allowed: {}", option, value, allowed));
}

float scale_of(const AttentionOptions& options, std::int64_t head_dim) {
    if (options.scale) return *options.scale;
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

void check_window(const char* name, std::int64_t value) {
    if (value < -1) refuse(name, std::to_string(value), "-1 (unbounded), 0 and more");
}

void check_per_head(const char* name, std::span<const float> values, std::int64_t heads, bool minus_infinity) {
    if (values.empty()) return;
    if (values.size() != static_cast<std::size_t>(heads)) {
        throw InvalidArgument(fmt::format("AttentionOptions: {} has {} elements; it must have one per query head, {}",
                                          name, values.size(), heads));
    }
    for (std::size_t h = 0; h < values.size(); ++h) {
        const bool off = minus_infinity && values[h] == -std::numeric_limits<float>::infinity();
        if (off || std::isfinite(values[h] * std::numbers::log2e_v<float>)) continue;
        throw InvalidArgument(
            fmt::format("AttentionOptions: {}[{}] is {}; it must be finite{}, and so must it times "
                        "log2(e)",
                        name, h, values[h], minus_infinity ? " or -infinity" : ""));
    }
}

std::int64_t offset_of(const AttentionOptions& options, const Lengths& live) noexcept {
    switch (options.alignment) {
        case Alignment::top_left:
            return 0;
        case Alignment::offset:
            return std::clamp(options.causal_offset, -kFarPosition, kFarPosition);
        case Alignment::bottom_right:
            break;
    }
    return live.kv_len - live.q_len;
}

void check_alignment(const AttentionOptions& options) {
    switch (options.alignment) {
        case Alignment::bottom_right:
        case Alignment::top_left:
            if (options.causal_offset != 0) {
                refuse("causal_offset", std::to_string(options.causal_offset),
                       "0, unless alignment is Alignment::offset");
            }
            return;
        case Alignment::offset:
            return;
    }
    refuse("alignment", std::to_string(static_cast<int>(options.alignment)), "bottom_right, top_left, offset");
}

std::size_t mask_element_bytes(AttentionMask::Type type) noexcept {
    return type == AttentionMask::Type::boolean ? 1 : type == AttentionMask::Type::f32 ? 4 : 2;
}

/// Extent and stride in a dimension of [sequences, heads, q_len, kv_len]; what the mask does not have broadcasts.
struct MaskDimension {
    std::int64_t extent = 1;
    std::int64_t stride = 0;
};
MaskDimension dimension_of(const AttentionMask& mask, std::size_t dimension) noexcept {
    if (dimension + mask.rank < 4) return {};
    const std::size_t own = dimension + mask.rank - 4;
    return {mask.extents[own], mask.extents[own] == 1 ? 0 : mask.strides[own]};
}

void apply_mask(const AttentionMask& mask, std::size_t index, Sequence& sequence) noexcept {
    MaskRows& rows = sequence.mask;
    rows.boolean = mask.type == AttentionMask::Type::boolean;
    switch (mask.type) {
        case AttentionMask::Type::f16:
            rows.type = kernels::ElementType::f16;
            break;
        case AttentionMask::Type::bf16:
            rows.type = kernels::ElementType::bf16;
            break;
        case AttentionMask::Type::boolean:
        case AttentionMask::Type::f32:
            rows.type = kernels::ElementType::f32;
            break;
    }
    const MaskDimension keys = dimension_of(mask, 3);
    rows.head_stride = dimension_of(mask, 1).stride;
    rows.row_stride = dimension_of(mask, 2).stride;
    rows.key_stride = keys.stride;
    bool elements = mask.data != nullptr;
    for (std::size_t i = 0; i < mask.rank; ++i) elements = elements && mask.extents[i] != 0;
    if (elements) {
        rows.base =
            static_cast<const std::byte*>(mask.data) + static_cast<std::int64_t>(index) * dimension_of(mask, 0).stride *
                                                           static_cast<std::int64_t>(mask_element_bytes(mask.type));
    }
    if (mask.keys == AttentionMask::Keys::last_q) {
        rows.first_key = sequence.kv_len - sequence.q_len;
    } else if (keys.extent != 1) {  // fewer keys than there are: the others are not allowed
        sequence.kv_end = std::min(sequence.kv_end, keys.extent);
    }
}

AttentionProblem problem_in(float unit, const AttentionOptions& options, const CallShape& shape,
                            bool causal_by_default) {
    const FloatEnvironment environment;  // the caller's rounding must not reach these
    AttentionProblem problem;
    problem.heads = shape.heads;
    problem.kv_heads = shape.kv_heads;
    problem.head_dim = shape.head_dim;
    problem.value_dim = shape.value_dim;
    problem.unit = unit;
    problem.factor = scale_of(options, shape.head_dim) * unit;
    problem.causal = options.causal.value_or(causal_by_default);
    problem.window_left = std::min(options.window_left, kFarPosition);
    problem.window_right = std::min(options.window_right, kFarPosition);
    problem.softcap = options.softcap * unit;
    if (!options.alibi_slopes.empty()) problem.alibi_slopes = options.alibi_slopes.data();
    if (!options.sink_logits.empty()) problem.sink_logits = options.sink_logits.data();
    problem.interrupt = {options.stop, options.deadline};
    return problem;
}

}  // namespace

void check_shape(const CallShape& shape) {
    if (shape.head_dim < 1) throw InvalidArgument("query: extent of head_dim is 0; it must be at least 1");
    check_at_most("query: head_dim", shape.head_dim, kMaxDim);
    check_at_most("value: value_dim", shape.value_dim, kMaxDim);
    check_at_most("query: heads", shape.heads, kMaxHeads);
    check_at_most("key: heads", shape.kv_heads, kMaxHeads);
    if (shape.kv_heads == 0 ? shape.heads != 0 : shape.heads % shape.kv_heads != 0) {
        throw InvalidArgument(
            fmt::format("query: {} heads; they must be a multiple of the {} KV heads", shape.heads, shape.kv_heads));
    }
}

void check_lengths(const Lengths& lengths) {
    check_at_most("query: length", lengths.q_len, kMaxLength);
    check_at_most("key: length", lengths.kv_len, kMaxLength);
}

void LongestLengths::add(const Lengths& lengths) {
    check_lengths(lengths);
    rows_ += lengths.q_len;
    check_lengths({rows_, 0});
    longest_.q_len = std::max(longest_.q_len, lengths.q_len);
    longest_.kv_len = std::max(longest_.kv_len, lengths.kv_len);
}

void check_batch(std::int64_t sequences) { check_at_most("query: batch", sequences, kMaxBatch); }

void check_mask(const char* name, const AttentionMask& mask, std::size_t rank, std::int64_t sequences,
                std::int64_t heads, const Lengths& longest) {
    using Type = AttentionMask::Type;
    using Keys = AttentionMask::Keys;
    if (mask.rank < 1 || mask.rank > rank) {
        throw InvalidArgument(fmt::format("{}: rank is {}; allowed: 1 to {}", name, mask.rank, rank));
    }
    if (mask.type != Type::boolean && mask.type != Type::f32 && mask.type != Type::f16 && mask.type != Type::bf16) {
        throw InvalidArgument(
            fmt::format("{}: type is {}; allowed: boolean, f32, f16, bf16", name, static_cast<int>(mask.type)));
    }
    if (mask.keys != Keys::all && mask.keys != Keys::last_q) {
        throw InvalidArgument(fmt::format("{}: keys is {}; allowed: all, last_q", name, static_cast<int>(mask.keys)));
    }
    Extents<4> extents{1, 1, 1, 1};
    Extents<4> strides{};
    const std::int64_t whole[4] = {sequences, heads, longest.q_len,
                                   mask.keys == Keys::last_q ? longest.q_len : longest.kv_len};
    for (std::size_t i = 0; i < mask.rank; ++i) {
        const std::size_t dimension = 4 - mask.rank + i;
        const std::int64_t extent = mask.extents[i];
        extents[dimension] = extent;
        strides[dimension] = mask.strides[i];
        const bool shorter = dimension == 3 && mask.keys == Keys::all && extent >= 0 && extent < whole[3];
        if (extent != 1 && extent != whole[dimension] && !shorter) {
            throw InvalidArgument(fmt::format("{}: extent {} is {}; it must be 1{} {}", name, i, extent,
                                              dimension == 3 && mask.keys == Keys::all ? " or at most" : " or",
                                              whole[dimension]));
        }
    }
    check_extents<4>(name, extents, strides, mask_element_bytes(mask.type));
    if (mask.data == nullptr && !is_empty<4>(extents)) {
        throw InvalidArgument(fmt::format("{}: data is null, but the mask has elements", name));
    }
}

void check_options(const AttentionOptions& options, const CallShape& shape, std::size_t sequences,
                   const Lengths& longest) {
    {
        const FloatEnvironment environment;
        const float scale = scale_of(options, shape.head_dim);
        if (!std::isfinite(scale * std::numbers::log2e_v<float>)) {
            refuse("scale", fmt::format("{}", scale), "finite numbers, finite also times log2(e)");
        }
        check_per_head("alibi_slopes", options.alibi_slopes, shape.heads, false);
        check_per_head("sink_logits", options.sink_logits, shape.heads, true);
    }
    check_alignment(options);
    check_window("window_left", options.window_left);
    check_window("window_right", options.window_right);
    if (options.softcap != 0.0F && !(options.softcap >= kLeastSoftcap && options.softcap <= kMostSoftcap)) {
        refuse("softcap", fmt::format("{}", options.softcap), "0 (off), 1e-30 to 1e30");
    }
    if (options.mask) {
        check_mask("AttentionOptions: mask", *options.mask, 4, static_cast<std::int64_t>(sequences), shape.heads,
                   longest);
    }
    check_kv_lengths(options, sequences);
}

void check_kv_lengths(const AttentionOptions& options, std::size_t sequences) {
    if (options.kv_lengths.empty() || options.kv_lengths.size() == sequences) return;
    throw InvalidArgument(fmt::format("AttentionOptions: kv_lengths has {} elements; it must have one per sequence, {}",
                                      options.kv_lengths.size(), sequences));
}

void check_kv_length(const AttentionOptions& options, std::size_t index, std::int64_t kv_len) {
    if (options.kv_lengths.empty()) return;
    const std::int64_t length = options.kv_lengths[index];
    if (length >= 0 && length <= kv_len) return;
    throw InvalidArgument(
        fmt::format("AttentionOptions: kv_lengths[{}] is {}; allowed: 0 to {}", index, length, kv_len));
}

AttentionProblem problem_of(const AttentionOptions& options, const CallShape& shape, bool causal_by_default) {
    return problem_in(std::numbers::log2e_v<float>, options, shape, causal_by_default);
}

AttentionProblem scores_problem_of(const AttentionOptions& options, const CallShape& shape, bool causal_by_default) {
    return problem_in(1.0F, options, shape, causal_by_default);
}

void apply_options(const AttentionOptions& options, std::size_t index, const Lengths& lengths,
                   const std::optional<AttentionMask>& own_mask, Sequence& sequence) {
    sequence.q_len = lengths.q_len;
    sequence.kv_len = options.kv_lengths.empty() ? lengths.kv_len : options.kv_lengths[index];
    sequence.kv_end = sequence.kv_len;
    sequence.offset = offset_of(options, {sequence.q_len, sequence.kv_len});
    if (own_mask) apply_mask(*own_mask, 0, sequence);
    if (options.mask) apply_mask(*options.mask, index, sequence);
}

PlainCall check_plain(const InputTensor<4>& query, const InputTensor<4>& key, std::int64_t value_dim,
                      const AttentionOptions& options) {
    check_input("query", query);
    check_input("key", key);
    const PlainCall call{query.extents[0],
                         {query.extents[1], key.extents[1], query.extents[3], value_dim},
                         {query.extents[2], key.extents[2]}};
    check_extent("key", 0, key.extents[0], call.batch, "query's batch");
    check_extent("key", 3, key.extents[3], call.shape.head_dim, "query's head_dim");
    check_shape(call.shape);
    check_batch(call.batch);
    check_lengths(call.lengths);
    check_options(options, call.shape, static_cast<std::size_t>(call.batch), call.lengths);
    for (std::size_t i = 0; i < options.kv_lengths.size(); ++i) check_kv_length(options, i, call.lengths.kv_len);
    return call;
}

void check_rows(const InputTensor<3>& query, const OutputTensor<3>& output, const OutputTensor<2>& lse,
                const CallShape& shape) {
    check_input("query", query);
    check_output("output", output);
    check_extent("query", 0, query.extents[0], shape.heads, "the heads of the call's first query");
    check_extent("query", 2, query.extents[2], shape.head_dim, "head_dim of the keys");
    check_extent("output", 0, output.extents[0], shape.heads, "query's heads");
    check_extent("output", 1, output.extents[1], query.extents[1], "query's length");
    check_extent("output", 2, output.extents[2], shape.value_dim, "value_dim of the values");
    if (lse.data == nullptr) return;
    check_f32_output("lse", lse);
    check_same_extents<2>("lse", lse.extents, {query.extents[0], query.extents[1]}, "as in query");
}

void set_rows(const InputTensor<3>& query, const OutputTensor<3>& output, const OutputTensor<2>& lse,
              Sequence& sequence) noexcept {
    sequence.query = input_rows(query);
    sequence.output = output_rows(output);
    sequence.lse = {static_cast<std::byte*>(lse.data), kernels::ElementType::f32, lse.strides[0], lse.strides[1], 0};
}

void check_own_mask(const AttentionOptions& options, const std::optional<AttentionMask>& mask, const CallShape& shape,
                    const Lengths& lengths) {
    if (!mask) return;
    if (options.mask) throw InvalidArgument("mask: AttentionOptions and a query both have one; give one");
    check_mask("mask", *mask, 3, 1, shape.heads, lengths);
}

CallShape check_cached_queries(std::span<const CachedQuery> queries, const AttentionOptions& options) {
    for (const CachedQuery& q : queries) {
        if (q.cache == nullptr) throw InvalidArgument("CachedQuery: cache is null");
    }
    const KvCache& model = *queries.front().cache;
    const KvShape& kv = model.shape();
    const CallShape shape{queries.front().query.extents[0], kv.kv_heads, kv.head_dim, kv.value_dim};
    LongestLengths lengths_of_call;
    for (const CachedQuery& q : queries) {
        if (!(q.cache->shape() == kv)) {
            throw InvalidArgument("CachedQuery: the caches of one call must have the same KvShape");
        }
        const bool same_layer = q.cache == &model && q.layer == queries.front().layer;
        if (!same_layer && !(q.cache->rotary(q.layer) == model.rotary(queries.front().layer))) {
            throw InvalidArgument("CachedQuery: the layers of one call must have the same rotary description");
        }
        check_rows(q.query, q.output, q.lse, shape);
        const Lengths lengths{q.query.extents[1], q.cache->length(q.layer)};
        lengths_of_call.add(lengths);
        check_own_mask(options, q.mask, shape, lengths);
        check_ring_mask(q.mask, *q.cache, q.layer);
        check_ring_mask(options.mask, *q.cache, q.layer);
    }
    check_shape(shape);
    check_options(options, shape, queries.size(), lengths_of_call.longest());
    for (std::size_t i = 0; i < queries.size(); ++i) {
        check_kv_length(options, i, queries[i].cache->length(queries[i].layer));
    }
    return shape;
}

void check_plain_layer(const char* name, const KvCache& cache, std::size_t index) {
    const KvCache::Impl::Layer& layer = cache.impl().layer(index);
    if (layer.sinks == 0 && !layer.forgets()) return;
    throw Unsupported(
        fmt::format("{}: is a ring, or has sink_tokens or a window in layer {}; this call takes caches "
                    "without",
                    name, index));
}

namespace {

CachedRows cached_rows(const KvCache::Impl& cache, const KvCache::Impl::Layer& layer) noexcept {
    const KvShape& shape = cache.pool->shape();
    return {.blocks = &layer.blocks,
            .key_type = stored_type(shape.key_type),
            .value_type = stored_type(shape.value_type),
            .transform = cache.transform->changes_keys() ? cache.transform.get() : nullptr};
}

}  // namespace

void set_blocks(const KvCache& cache, std::size_t layer, Sequence& sequence) {
    const KvCache::Impl::Layer& held = cache.impl().layer(layer);
    sequence.sinks = held.sinks;
    sequence.window = held.window;
    sequence.last_place = cache.impl().last_place();
    sequence.cached = cached_rows(cache.impl(), held);
    const KvCache::Impl::Layer* own = cache.impl().own_sinks(held);
    sequence.cached_sinks = own != nullptr ? cached_rows(*cache.impl().f16_sinks, *own) : sequence.cached;
}

void set_cached(const CachedQuery& query, const AttentionOptions& options, std::size_t index, Sequence& sequence) {
    const KvCache::Impl::Layer& layer = query.cache->impl().layer(query.layer);
    sequence.query = input_rows(query.query);
    set_blocks(*query.cache, query.layer, sequence);
    apply_options(options, index, {query.query.extents[1], layer.length}, query.mask, sequence);
}

void check_held(const AttentionProblem& problem, const Sequence& sequence, std::int64_t held_from) {
    if (held_from <= sequence.sinks || sequence.kv_end <= sequence.sinks) return;
    // The first row that sees keys at all sees the oldest ones.
    const std::int64_t row = std::max(sequence.sinks - sequence.offset, std::int64_t{0});
    if (row >= sequence.q_len) return;
    const std::int64_t position = row + sequence.offset;
    const Range keys = visible_keys(problem, sequence, position);
    if (keys.empty() || keys.begin >= held_from) return;
    throw WouldForget(
        fmt::format("query: row {} stands at position {} and sees the keys from {} on; the layer has "
                    "forgotten those before {}",
                    row, position, keys.begin, held_from));
}

void check_ring_mask(const std::optional<AttentionMask>& mask, const KvCache& cache, std::size_t index) {
    const KvCache::Impl::Layer& layer = cache.impl().layer(index);
    if (!mask || layer.held_from <= layer.sinks || mask->keys == AttentionMask::Keys::last_q) return;
    if (mask->rank >= 1 && mask->rank <= 4 && mask->extents[mask->rank - 1] == 1) return;
    throw Unsupported(
        "mask: keys is all; over a layer that has forgotten positions it must be last_q, or have an extent of 1");
}

namespace {

CallLists carve_lists(Carver& carver, std::size_t sequences, std::size_t pages) noexcept {
    return CallLists{{carver.take<Sequence>(sequences), sequences},
                     {carver.take<Page>(pages), pages},
                     {carver.take<OutputRows>(sequences), sequences}};
}

}  // namespace

std::size_t list_bytes(std::size_t sequences, std::size_t pages) noexcept {
    Carver counter(nullptr);
    static_cast<void>(carve_lists(counter, sequences, pages));
    return counter.used();
}

CallLists lists_in(Workspace& workspace, std::size_t sequences, std::size_t pages) {
    static_assert(std::is_trivially_destructible_v<Sequence> && std::is_trivially_destructible_v<Page>);
    Carver carver(workspace.lists.ensure(list_bytes(sequences, pages)));
    const CallLists lists = carve_lists(carver, sequences, pages);
    std::uninitialized_value_construct_n(lists.sequences.data(), sequences);
    std::uninitialized_value_construct_n(lists.pages.data(), pages);
    std::uninitialized_value_construct_n(lists.scores.data(), sequences);
    return lists;
}

std::size_t rotary_floats(const std::optional<Rotary>& rotary, std::span<const Sequence> sequences) noexcept {
    std::size_t floats = 0;
    for (const Sequence& sequence : sequences) {
        if (!rotary) break;
        const std::size_t tables = sequence.sinks > 0 ? 2 : 1;
        floats = saturating_sum(floats, saturating_product(tables * static_cast<std::size_t>(rotary->rotary_dim()),
                                                           static_cast<std::size_t>(sequence.q_len)));
    }
    return floats;
}

void tabulate_queries(Context::Impl& context, const std::optional<Rotary>& rotary, std::span<Sequence> sequences,
                      float* memory, AttentionProblem& problem) {
    if (!rotary) return;
    const std::int64_t half = rotary->rotary_dim() / 2;
    problem.rotary_half = half;
    problem.rotary_interleaved = rotary->pairing() == RotaryPairing::interleaved;
    for (Sequence& sequence : sequences) {
        const std::int64_t floats = half * sequence.q_len;
        const bool sinks = sequence.sinks > 0;
        float* cosine = std::exchange(memory, memory + floats);
        float* sine = std::exchange(memory, memory + floats);
        float* sink_cosine = std::exchange(memory, memory + (sinks ? floats : 0));
        float* sink_sine = std::exchange(memory, memory + (sinks ? floats : 0));
        sequence.cosine = cosine;
        sequence.sine = sine;
        if (sinks) {
            sequence.sink_cosine = sink_cosine;
            sequence.sink_sine = sink_sine;
        }
        parallel_for(*context.executor, static_cast<std::size_t>(sequence.q_len), 2 * floats,
                     [&](std::size_t i, std::size_t) noexcept {
                         const auto row = static_cast<std::int64_t>(i);
                         const std::int64_t position = row + sequence.offset;
                         rotary->tabulate(position, cosine + row * half, sine + row * half);
                         if (!sinks) return;
                         rotary->tabulate(std::min(position, sequence.last_place), sink_cosine + row * half,
                                          sink_sine + row * half);
                     });
    }
}

void run_or_cancel(Context& context, Workspace& workspace, const AttentionProblem& problem, const char* what) {
    problem.interrupt.check(what);
    if (!run_attention(context.impl(), workspace, problem)) problem.interrupt.check(what);
}

}  // namespace headlong
