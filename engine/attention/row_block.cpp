#include "engine/attention/row_block.hpp"

#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/compiler.hpp"

namespace headlong {

using kernels::kPanelTokens;
using kernels::kSpanBlocks;
using kernels::StoredType;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// max is in units of log2, the result a natural logarithm.
float log_sum_exp(float max, float sum) noexcept {
    const double lse = static_cast<double>(max) * std::numbers::ln2 + std::log(static_cast<double>(sum));
    return std::isnan(lse) ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(lse);
}

// Rows of an output are often a page or more apart: a write would wait for memory that the processor did not foresee.
constexpr std::int64_t kRowsAhead = 8;

void ask_to_write(const std::byte* row, std::size_t bytes) noexcept {
    for (std::size_t i = 0; i < bytes; i += kernels::kAlignment) compiler::prefetch_to_write(row + i);
}

constexpr bool is_half(StoredType type) noexcept { return type == StoredType::f16 || type == StoredType::bf16; }

}  // namespace

kernels::States take_states(Carver& carver, std::size_t rows, std::size_t pitch) noexcept {
    kernels::States s{};
    s.output = carver.take<float>(rows * pitch);
    s.stride = pitch;
    s.max = carver.take<float>(rows);
    s.sum = carver.take<float>(rows);
    return s;
}

kernels::States rows_from(const kernels::States& states, std::size_t row) noexcept {
    return {states.output + row * states.stride, states.stride, states.max + row, states.sum + row};
}

void make_empty(const kernels::States& states, std::size_t rows) noexcept {
    std::fill_n(states.output, rows * states.stride, 0.0F);
    std::fill_n(states.max, rows, -kInfinity);
    std::fill_n(states.sum, rows, 0.0F);
}

Plan::Plan(const Context::Impl& context, const AttentionProblem& p) noexcept
    : problem(p),
      kernels(context.kernels),
      layout{size(p.head_dim), size(p.value_dim)},
      heads_per_kv_head(p.kv_heads == 0 ? 1 : p.heads / p.kv_heads),
      threads(static_cast<std::int64_t>(context.executor->concurrency())),
      longest(0),
      block_positions(1),
      family_rows(0),
      family_positions(1),
      units(0),
      packs(false),
      key_codes(false),
      value_codes(false),
      centred(false),
      masked(false) {
    bool halves = false;
    for (const Sequence& sequence : p.sequences) {
        longest = std::max(longest, sequence.q_len);
        packs = packs || sequence.cached.blocks == nullptr;
        for (const CachedRows* cached : {&sequence.cached, &sequence.cached_sinks}) {
            if (cached->blocks == nullptr) continue;
            halves = halves || is_half(cached->key_type) || is_half(cached->value_type);
            key_codes = key_codes || kernels::has_codes(cached->key_type);
            value_codes = value_codes || kernels::has_codes(cached->value_type);
            centred = centred || cached->centred();
        }
        masked = masked || sequence.mask.base != nullptr;
    }
    for (const Sequence& sequence : p.sequences) {
        if (sequence.family == 1) continue;
        family_positions = std::max(family_positions, sequence.q_len);
        family_rows = std::max(family_rows, sequence.family * sequence.q_len * heads_per_kv_head);
    }
    if (longest == 0 || heads_per_kv_head == 0) return;
    block_positions = std::clamp<std::int64_t>(kRowBlock / heads_per_kv_head, 1, longest);
    count_units();
    // Smaller row blocks where there would not be four for every thread, which even out what causality and other
    // programs make uneven; then the spans are split.
    while (threads > 1 && block_positions >= 2 * family_positions && units * p.kv_heads < 4 * threads &&
           block_rows() > kRowTile && block_positions > 1) {
        block_positions = ceil_div(block_positions, 2);
        count_units();
    }
    packs = packs || (halves && most_rows() >= kWideningRows);
}

void Plan::count_units() noexcept {
    units = 0;
    for (const Sequence& sequence : problem.sequences) units += ceil_div(sequence.q_len, block_positions);
}

Scratch::Scratch(const Plan& plan, Carver& carver) noexcept {
    const std::size_t rows = size(plan.most_rows());
    const std::size_t pitch = plan.layout.columns();
    query = carver.take<float>(rows * plan.layout.head_dim);
    total = take_states(carver, rows, pitch);
    group = take_states(carver, rows, pitch);
    tile = take_states(carver, size(kRowTile), pitch);
    sink = take_states(carver, 1, pitch);
    scores = carver.take<float>(size(kRowTile) * kScoreStride);
    ranges = carver.take<kernels::TokenRange>(size(kRowTile));
    begun = carver.take<bool>(size(ceil_div(plan.most_rows(), kRowTile)));
    slopes = carver.take<float>(size(kRowTile));
    positions = carver.take<float>(size(kRowTile));
    bias = carver.take<float>(plan.masked ? size(kRowTile) * kScoreStride : 0);
    bias_rows = carver.take<const float*>(size(kRowTile));
    packed = carver.take<float>(plan.packs ? kSpanBlocks * plan.layout.bytes() / sizeof(float) : 0);
    query_codes = carver.take<std::uint8_t>(plan.key_codes ? rows * kernels::code_row_bytes(plan.layout.head_dim) : 0);
    shifts = carver.take<float>(plan.centred ? rows : 0);
    weight_codes = carver.take<std::int16_t>(plan.value_codes ? size(kRowTile) * kScoreStride : 0);
}

void RowBlock::load_query_for(const SpanList& spans, std::int64_t n) const noexcept {
    const bool sinks = is_sink_span(spans[n]);
    if (n > 0 && is_sink_span(spans[n - 1]) == sinks) return;
    const bool apart = sequence_.cached_sinks.blocks != sequence_.cached.blocks;
    if (n > 0 && sequence_.cosine == nullptr && !apart) return;  // the rows are the same
    load_query(sinks);
}

void RowBlock::load_query(bool sinks) const noexcept {
    const AttentionProblem& problem = plan_.problem;
    const std::size_t depth = plan_.layout.head_dim;
    const std::int64_t group = plan_.heads_per_kv_head;
    for (std::int64_t m = 0; m < members_; ++m) {
        const Sequence& sequence = (&sequence_)[m];
        float* const query = scratch_.query + size(m * member_rows()) * depth;
        const bool rotates = sequence.cosine != nullptr;
        for (std::int64_t g = 0; g < group; ++g) {
            plan_.kernels.scale_rows({sequence.query.rows(kv_head_ * group + g, first_row_, positions_, depth),
                                      rotates ? 1.0F : problem.factor, query + size(g) * depth, size(group) * depth});
        }
        if (rotates) {
            rotate_query(query, sinks ? sequence.sink_cosine : sequence.cosine,
                         sinks ? sequence.sink_sine : sequence.sine);
        }
    }
    const CachedRows& meets = cached(sinks);
    if (meets.transform != nullptr) transform_query(*meets.transform);
    if (kernels::has_codes(meets.key_type)) {
        plan_.kernels.quantise_rows(
            {scratch_.query, depth, rows(), depth, scratch_.query_codes, kernels::code_row_bytes(depth)});
    }
}

void RowBlock::transform_query(const KeyTransform& transform) const noexcept {
    const std::size_t depth = plan_.layout.head_dim;
    if (const float* centre = transform.centre_of(size(kv_head_), depth)) {
        for (std::size_t r = 0; r < rows(); ++r) {
            double sum = 0.0;
            for (std::size_t d = 0; d < depth; ++d) {
                sum += static_cast<double>(scratch_.query[r * depth + d]) * static_cast<double>(centre[d]);
            }
            scratch_.shifts[r] = static_cast<float>(sum);
        }
    }
    if (transform.hadamard) plan_.kernels.hadamard({scratch_.query, depth, rows(), depth});
}

void RowBlock::rotate_query(float* rows, const float* cosine, const float* sine) const noexcept {
    const AttentionProblem& problem = plan_.problem;
    const std::size_t depth = plan_.layout.head_dim;
    // Rotated as rows of their own would be, and only then scaled: the same bits either way.
    for (std::int64_t i = 0; i < positions_; ++i) {
        const std::int64_t angles = (first_row_ + i) * problem.rotary_half;
        plan_.kernels.rotate({.row = rows + size(i * plan_.heads_per_kv_head) * depth,
                              .heads = size(plan_.heads_per_kv_head),
                              .head_stride = depth,
                              .half = size(problem.rotary_half),
                              .cosine = cosine + angles,
                              .sine = sine + angles,
                              .interleaved = problem.rotary_interleaved});
    }
    plan_.kernels.scale_rows(
        {{rows, kernels::ElementType::f32, static_cast<std::ptrdiff_t>(depth), 1, size(member_rows()), depth},
         problem.factor,
         rows,
         depth});
}

namespace {

/// What causality, windows and length of the call leave of all keys.
Range allowed_keys(const AttentionProblem& problem, const Sequence& sequence, std::int64_t position) noexcept {
    Range keys{0, sequence.kv_end};
    if (problem.causal) keys.end = std::min(keys.end, position + 1);
    if (problem.window_left >= 0) keys.begin = std::max(keys.begin, position - problem.window_left);
    if (problem.window_right >= 0) keys.end = std::min(keys.end, position + problem.window_right + 1);
    return keys;
}

}  // namespace

Range visible_keys(const AttentionProblem& problem, const Sequence& sequence, std::int64_t position) noexcept {
    Range keys = allowed_keys(problem, sequence, position);
    keys.begin = std::max(keys.begin, sequence.sinks);
    if (sequence.window != kForever) keys.begin = std::max(keys.begin, position + 1 - sequence.window);
    return keys.empty() ? Range{} : keys;
}

Range visible_sinks(const AttentionProblem& problem, const Sequence& sequence, std::int64_t position) noexcept {
    Range keys = allowed_keys(problem, sequence, position);
    keys.end = std::min(keys.end, sequence.sinks);
    return keys.empty() ? Range{} : keys;
}

Range RowBlock::keys_of(const Sequence& sequence, std::int64_t query_row, bool sinks) const noexcept {
    const std::int64_t position = position_of(sequence, query_row);
    Range keys =
        sinks ? visible_sinks(plan_.problem, sequence, position) : visible_keys(plan_.problem, sequence, position);
    keys.begin = std::max(keys.begin, bounds_.begin);
    keys.end = std::min(keys.end, bounds_.end);
    return keys.empty() ? Range{} : keys;
}

Range RowBlock::keys_of_block(bool sinks) const noexcept {
    if (sinks && sequence_.sinks == 0) return {};
    Range all{kForever, 0};
    for (std::int64_t m = 0; m < members_; ++m) {
        for (std::int64_t i = 0; i < positions_; ++i) {
            const Range keys = keys_of((&sequence_)[m], first_row_ + i, sinks);
            if (keys.empty()) continue;
            all.begin = std::min(all.begin, keys.begin);
            all.end = std::max(all.end, keys.end);
        }
    }
    return all.empty() ? Range{} : all;
}

SpanList RowBlock::spans() const noexcept {
    SpanList spans;
    if (!sinks_.empty()) spans.sinks = {sinks_.begin / kSpan - kSinkSpans, ceil_div(sinks_.end, kSpan) - kSinkSpans};
    if (!keys_.empty()) spans.others = {keys_.begin / kSpan, ceil_div(keys_.end, kSpan)};
    return spans;
}

RowBlock::SpanBlocks RowBlock::blocks_of(std::int64_t span) const noexcept {
    const std::int64_t span_begin = begin_of(span);
    const Range& seen = is_sink_span(span) ? sinks_ : keys_;
    const Range keys{std::max(seen.begin - span_begin, std::int64_t{0}), std::min(seen.end - span_begin, kSpan)};
    SpanBlocks blocks =
        sequence_.cached.blocks != nullptr ? cached_blocks(span, keys) : packed_blocks(span_begin, keys);
    if (static_cast<std::int64_t>(rows()) >= kWideningRows) widen(blocks, keys);
    blocks.ready = true;
    return blocks;
}

RowBlock::SpanBlocks RowBlock::cached_blocks(std::int64_t span, Range keys) const noexcept {
    SpanBlocks blocks;
    const CachedRows& rows = cached(is_sink_span(span));
    blocks.key_type = rows.key_type;
    blocks.value_type = rows.value_type;
    for (std::int64_t b = keys.begin / kBlock; b * kBlock < keys.end; ++b) {
        const Block& block = (*rows.blocks)[begin_of(span) / kBlock + b];
        blocks.keys[b] = block.keys(size(kv_head_));
        blocks.values[b] = block.values(size(kv_head_));
        if (block.nonfinite(size(kv_head_)) != 0) blocks.nonfinite |= 1U << static_cast<unsigned>(b);
    }
    blocks.streams = true;
    const SpanList all = spans();
    const bool more = span + 1 < (is_sink_span(span) ? all.sinks.end : all.others.end);
    if (more) {
        blocks.next = (*rows.blocks)[begin_of(span + 1) / kBlock].keys(size(kv_head_));
    } else if (is_sink_span(span) && !keys_.empty()) {
        blocks.next = (*sequence_.cached.blocks)[keys_.begin / kBlock].keys(size(kv_head_));
    }
    return blocks;
}

void RowBlock::widen(SpanBlocks& blocks, Range keys) const noexcept {
    const bool keys_too = is_half(blocks.key_type);
    const bool values_too = is_half(blocks.value_type);
    if (!keys_too && !values_too) return;
    const std::size_t panel = plan_.layout.head_dim * kPanelTokens;
    const std::size_t half = sizeof(std::uint16_t);
    for (std::int64_t b = keys.begin / kBlock; b * kBlock < keys.end; ++b) {
        float* block = packed_block(b);
        // the panels that hold visible tokens: others may hold anything
        const std::int64_t from = std::max(keys.begin - b * kBlock, std::int64_t{0}) / kPanel;
        const std::int64_t to = ceil_div(std::min(keys.end - b * kBlock, kBlock), kPanel);
        if (keys_too) {
            plan_.kernels.widen({blocks.keys[b] + size(from) * panel * half, kernels::element_type(blocks.key_type),
                                 block + size(from) * panel, size(to - from) * panel});
            blocks.keys[b] = reinterpret_cast<const std::byte*>(block);
        }
        if (values_too) {
            float* values = packed_values(block);
            const auto* stored = static_cast<const std::byte*>(blocks.values[b]);
            for (std::size_t column = 0; column < plan_.layout.columns(); column += kPanelTokens) {
                const std::size_t first = kernels::value_index(size(from * kPanel), column);
                plan_.kernels.widen({stored + first * half, kernels::element_type(blocks.value_type), values + first,
                                     size((to - from) * kPanel) * kPanelTokens});
            }
            blocks.values[b] = values;
        }
    }
    if (keys_too) blocks.key_type = StoredType::f32;
    if (values_too) blocks.value_type = StoredType::f32;
    blocks.streams = false;
    blocks.next = nullptr;
}

RowBlock::SpanBlocks RowBlock::packed_blocks(std::int64_t span_begin, Range keys) const noexcept {
    SpanBlocks blocks;
    const std::size_t panel = plan_.layout.head_dim * kPanelTokens;
    for (std::int64_t b = keys.begin / kBlock; b * kBlock < keys.end; ++b) {
        float* block = packed_block(b);
        float* values = packed_values(block);
        // whole panels from the first visible one on; of the last one the tail is cleared like a cache's dead lanes
        const std::int64_t from = std::max(keys.begin - b * kBlock, std::int64_t{0}) / kPanel * kPanel;
        const std::int64_t to = std::min(keys.end - b * kBlock, kBlock);
        if (to % kPanel != 0) {
            std::fill_n(block + size(to / kPanel) * panel, panel, 0.0F);
            for (std::size_t column = 0; column < plan_.layout.columns(); column += kPanelTokens) {
                std::fill(values + kernels::value_index(size(to), column),
                          values + kernels::value_index(size(ceil_div(to, kPanel) * kPanel), column), 0.0F);
            }
        }
        if (pack(span_begin + b * kBlock + from, to - from, block, size(from))) {
            blocks.nonfinite |= 1U << static_cast<unsigned>(b);
        }
        blocks.keys[b] = reinterpret_cast<const std::byte*>(block);
        blocks.values[b] = values;
    }
    return blocks;
}

bool RowBlock::pack(std::int64_t position, std::int64_t count, float* block, std::size_t token) const noexcept {
    bool nonfinite = false;
    const auto holds = [](std::int64_t at, const Page& page) noexcept { return at < page.end; };
    for (auto page = std::upper_bound(sequence_.pages.begin(), sequence_.pages.end(), position, holds); count > 0;
         ++page) {
        const std::int64_t part = std::min(count, page->end - position);
        if (part == 0) continue;
        const std::int64_t row = position - page->begin;
        plan_.kernels.pack_panels({page->key.rows(kv_head_, row, part, plan_.layout.head_dim), block, token});
        nonfinite |= plan_.kernels.pack_values(
            {page->value.rows(kv_head_, row, part, plan_.layout.value_dim), packed_values(block), token});
        position += part;
        count -= part;
        token += size(part);
    }
    return nonfinite;
}

RowBlock::Tile RowBlock::tile_at(std::int64_t span, std::int64_t row) const noexcept {
    const AttentionProblem& problem = plan_.problem;
    const MaskRows& mask = sequence_.mask;
    const std::int64_t span_begin = begin_of(span);
    const bool sinks = is_sink_span(span);
    Tile tile{row, std::min(kRowTile, static_cast<std::int64_t>(rows()) - row), kSpan, 0};
    tile.sinks = sinks;
    tile.masked = mask.base != nullptr && span_begin + kSpan > mask.first_key;
    // Neighbouring rows often share a row of the mask (heads of a group, a mask that broadcasts).
    const std::byte* mask_data = nullptr;
    kernels::TokenRange mask_range{0, 0};
    std::int64_t mask_row = -1;
    for (std::int64_t r = 0; r < tile.count; ++r) {
        const std::int64_t query_row = query_row_of(row + r);
        const Sequence& sequence = sequence_of(row + r);
        const Range keys = keys_of(sequence, query_row, sinks);
        const std::int64_t begin = std::max(keys.begin - span_begin, std::int64_t{0});
        const std::int64_t end = std::min(keys.end - span_begin, kSpan);
        kernels::TokenRange range{0, 0};
        if (begin < end) range = {static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end)};
        scratch_.bias_rows[r] = scratch_.bias;
        if (tile.masked && begin < end) {
            // of keys before the first column there is no element to point to
            const std::int64_t key = std::max(span_begin + begin - mask.first_key, std::int64_t{0});
            const std::int64_t bytes = mask.boolean ? 1 : stride_bytes(mask.type);
            const std::byte* data =
                mask.base +
                (head_of(row + r) * mask.head_stride + query_row * mask.row_stride + key * mask.key_stride) * bytes;
            if (mask_row >= 0 && data == mask_data && range.begin == mask_range.begin && range.end == mask_range.end) {
                scratch_.bias_rows[r] = scratch_.bias_rows[mask_row];
                range = scratch_.ranges[mask_row];
            } else {
                mask_data = data;
                mask_range = range;
                mask_row = r;
                float* bias = scratch_.bias + size(r) * kScoreStride;
                scratch_.bias_rows[r] = bias;
                range = masked_range(span_begin, data, range, bias);
            }
        }
        scratch_.ranges[r] = range;
        if (range.begin < range.end) {
            tile.first = std::min<std::int64_t>(tile.first, range.begin);
            tile.last = std::max<std::int64_t>(tile.last, range.end);
        }
        if (problem.alibi_slopes != nullptr) {
            scratch_.slopes[r] = problem.alibi_slopes[head_of(row + r)] * problem.unit;
            const std::int64_t position = position_of(sequence, query_row);
            scratch_.positions[r] =
                static_cast<float>((sinks ? std::min(position, sequence.last_place) : position) - span_begin);
        }
    }
    if (tile.empty()) return tile;
    tile.first = tile.first / kPanel * kPanel;
    tile.last = ceil_div(tile.last, kPanel) * kPanel;
    return tile;
}

kernels::TokenRange RowBlock::masked_range(std::int64_t span_begin, const std::byte* data, kernels::TokenRange range,
                                           float* bias) const noexcept {
    const MaskRows& mask = sequence_.mask;
    // keys before the mask's first column are allowed
    const auto masked_from =
        static_cast<std::uint32_t>(std::clamp<std::int64_t>(mask.first_key - span_begin, range.begin, range.end));
    std::fill(bias + range.begin, bias + masked_from, 0.0F);
    kernels::TokenRange allowed{0, 0};
    if (masked_from < range.end) {
        allowed = plan_.kernels.mask_row({data,
                                          mask.boolean,
                                          mask.type,
                                          static_cast<std::ptrdiff_t>(mask.key_stride),
                                          {masked_from, range.end},
                                          plan_.problem.unit,
                                          bias});
    }
    if (range.begin < masked_from) {
        allowed = {range.begin, allowed.begin < allowed.end ? allowed.end : masked_from};
    }
    return allowed;
}

kernels::ScoreRules RowBlock::rules(const Tile& tile) const noexcept {
    kernels::ScoreRules rules;
    rules.softcap = plan_.problem.softcap;
    if (cached(tile.sinks).centred()) rules.shifts = scratch_.shifts + tile.row;
    if (plan_.problem.alibi_slopes != nullptr) {
        rules.slopes = scratch_.slopes;
        rules.positions = scratch_.positions;
    }
    if (tile.masked) rules.bias = scratch_.bias_rows;
    return rules;
}

void RowBlock::dot(const SpanBlocks& blocks, const Tile& tile) const noexcept {
    const std::size_t depth = plan_.layout.head_dim;
    const std::size_t panel_bytes = kernels::key_panel_bytes(blocks.key_type, depth);
    for (std::int64_t b = tile.first / kBlock; b * kBlock < tile.last; ++b) {
        const std::int64_t from = std::max(tile.first - b * kBlock, std::int64_t{0});
        const std::int64_t to = std::min(tile.last - b * kBlock, kBlock);
        const std::byte* panels = blocks.keys[b] + size(from / kPanel) * panel_bytes;
        float* const scores = scratch_.scores + b * kBlock + from;
        const void* next = nullptr;
        if (blocks.streams) {
            next = (b + 1) * kBlock < tile.last ? blocks.keys[b + 1] : blocks.values[tile.first / kBlock];
            if (tile.row == 0) ask_for_scales(blocks, b);
        }
        if (kernels::has_codes(blocks.key_type)) {
            const std::size_t row_bytes = kernels::code_row_bytes(depth);
            plan_.kernels.dot_codes({.rows = scratch_.query_codes + size(tile.row) * row_bytes,
                                     .row_stride = row_bytes,
                                     .row_count = size(tile.count),
                                     .panels = reinterpret_cast<const std::uint8_t*>(panels),
                                     .panel_stride = panel_bytes,
                                     .depth = depth,
                                     .group_begin = 0,
                                     .group_end = kernels::code_groups(depth),
                                     .out = scores,
                                     .out_stride = kScoreStride,
                                     .columns = size(to - from),
                                     .accumulate = false,
                                     .canonical = false,
                                     .type = blocks.key_type,
                                     .next = next});
        } else {
            const kernels::ElementType type = kernels::element_type(blocks.key_type);
            plan_.kernels.dot_panels({.rows = scratch_.query + size(tile.row) * depth,
                                      .row_stride = depth,
                                      .row_count = size(tile.count),
                                      .panels = panels,
                                      .panel_stride = panel_bytes / kernels::element_bytes(type),
                                      .depth = depth,
                                      .out = scores,
                                      .out_stride = kScoreStride,
                                      .columns = size(to - from),
                                      .accumulate = false,
                                      .canonical = false,
                                      .type = type,
                                      .next = next});
        }
    }
}

void RowBlock::ask_for_scales(const SpanBlocks& blocks, std::int64_t b) const noexcept {
    if (!kernels::has_codes(blocks.value_type)) return;
    for (std::size_t group = 0; group < plan_.layout.columns(); group += kernels::kValueGroup) {
        const auto* scales =
            static_cast<const std::byte*>(blocks.values[b]) + kernels::value_block_bytes(blocks.value_type, group);
        for (std::size_t i = 0; i < kernels::kValueScaleBytes; i += kernels::kAlignment) compiler::prefetch(scales + i);
    }
}

void RowBlock::weigh(const SpanBlocks& blocks, const Tile& tile, const kernels::States& out) const noexcept {
    if (kernels::has_codes(blocks.value_type)) {
        plan_.kernels.weighted_codes({.weights = scratch_.scores,
                                      .weight_stride = kScoreStride,
                                      .row_count = size(tile.count),
                                      .sums = out.sum,
                                      .value_blocks = blocks.values,
                                      .nonfinite_blocks = blocks.nonfinite,
                                      .first = size(tile.first),
                                      .last = size(tile.last),
                                      .columns = plan_.layout.columns(),
                                      .out = out.output,
                                      .out_stride = out.stride,
                                      .type = blocks.value_type,
                                      .codes = scratch_.weight_codes,
                                      .code_stride = kScoreStride,
                                      .next = blocks.next});
    } else {
        plan_.kernels.weighted_rows({.weights = scratch_.scores,
                                     .weight_stride = kScoreStride,
                                     .row_count = size(tile.count),
                                     .value_blocks = blocks.values,
                                     .nonfinite_blocks = blocks.nonfinite,
                                     .first = size(tile.first),
                                     .last = size(tile.last),
                                     .columns = plan_.layout.columns(),
                                     .out = out.output,
                                     .out_stride = out.stride,
                                     .type = kernels::element_type(blocks.value_type),
                                     .next = blocks.next});
    }
}

void RowBlock::span_state(const SpanBlocks& blocks, const Tile& tile, const kernels::States& out) const noexcept {
    dot(blocks, tile);
    plan_.kernels.softmax_span({scratch_.scores, kScoreStride, size(tile.count), scratch_.ranges, size(tile.first),
                                size(tile.last), out.max, out.sum, rules(tile)});
    weigh(blocks, tile, out);
}

void RowBlock::begin_group() const noexcept {
    std::fill_n(scratch_.begun, size(ceil_div(static_cast<std::int64_t>(rows()), kRowTile)), false);
}

void RowBlock::fold_span(std::int64_t span) const noexcept {
    SpanBlocks blocks;
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(rows()); row += kRowTile) {
        const Tile tile = tile_at(span, row);
        if (tile.empty()) continue;
        if (!blocks.ready) blocks = blocks_of(span);
        const kernels::States into = rows_from(scratch_.group, size(row));
        bool& begun = scratch_.begun[row / kRowTile];
        span_state(blocks, tile, begun ? scratch_.tile : into);
        if (begun) plan_.kernels.merge({into, scratch_.tile, size(tile.count), plan_.layout.columns()});
        begun = true;
    }
}

void RowBlock::end_group() const noexcept {
    const auto count = static_cast<std::int64_t>(rows());
    for (std::int64_t row = 0; row < count; row += kRowTile) {
        if (scratch_.begun[row / kRowTile]) continue;
        make_empty(rows_from(scratch_.group, size(row)), size(std::min(kRowTile, count - row)));
    }
}

void RowBlock::store_span(std::int64_t span, const kernels::States& out) const noexcept {
    SpanBlocks blocks;
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(rows()); row += kRowTile) {
        const Tile tile = tile_at(span, row);
        const kernels::States rows = rows_from(out, size(row));
        if (tile.empty()) {
            make_empty(rows, size(tile.count));
            continue;
        }
        if (!blocks.ready) blocks = blocks_of(span);
        span_state(blocks, tile, rows);
    }
}

void RowBlock::write_scores(std::int64_t span, const OutputRows& out, bool weights) const noexcept {
    SpanBlocks blocks;
    const std::int64_t span_begin = span * kSpan;
    const std::size_t tokens = size(std::min(kSpan, sequence_.kv_len - span_begin));
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(rows()); row += kRowTile) {
        const Tile tile = tile_at(span, row);
        if (!tile.empty()) {
            if (!blocks.ready) blocks = blocks_of(span);
            dot(blocks, tile);
            plan_.kernels.adjust_scores(
                {scratch_.scores, kScoreStride, size(tile.count), scratch_.ranges, rules(tile)});
        }
        for (std::int64_t r = 0; r < tile.count; ++r) {
            const std::int64_t head = head_of(row + r);
            const std::int64_t query_row = query_row_of(row + r);
            const kernels::TokenRange range = scratch_.ranges[r];
            float* scores = scratch_.scores + size(r) * kScoreStride;
            std::fill(scores, scores + std::min<std::size_t>(range.begin, tokens), -kInfinity);
            std::fill(scores + std::min<std::size_t>(range.end, tokens), scores + tokens, -kInfinity);
            if (weights) to_weights(scores, tokens, head * sequence_.q_len + query_row);
            for (std::size_t t = 0; t < tokens; ++t) {
                scores[t] = std::isnan(scores[t]) ? std::numeric_limits<float>::quiet_NaN() : scores[t] + 0.0F;
            }
            OutputRows place = out;
            place.base = out.at(head, query_row) + span_begin * out.column_stride * stride_bytes(out.type);
            store_rows(plan_.kernels, scores, 0, 1, tokens, place, 0, 0);
        }
    }
}

void RowBlock::to_weights(float* scores, std::size_t count, std::int64_t state) const noexcept {
    const float max = sequence_.maxima[state];
    const float sum = sequence_.sums[state];
    if (std::isnan(sum)) {  // of the row's weights none is a number, however small it would have been
        for (std::size_t t = 0; t < count; ++t) scores[t] = scores[t] == -kInfinity ? 0.0F : sum;
        return;
    }
    for (std::size_t t = 0; t < count; ++t) {
        // a row that sees nothing has no maximum to subtract
        if (scores[t] != -kInfinity) scores[t] -= max;
    }
    plan_.kernels.exp2(scores, scores, count);
    for (std::size_t t = 0; t < count; ++t) {
        if (scores[t] != 0.0F) scores[t] /= sum;
    }
}

void RowBlock::finish(const kernels::States& states) const noexcept {
    const AttentionProblem& problem = plan_.problem;
    const std::size_t columns = plan_.layout.value_dim;
    make_empty(scratch_.sink, 1);
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(rows()); ++row) {
        const std::int64_t head = head_of(row);
        const std::int64_t query_row = query_row_of(row);
        const Sequence& sequence = sequence_of(row);
        const kernels::States state = rows_from(states, size(row));
        float lse = -kInfinity;
        const bool empty = *state.sum == 0.0F;
        if (problem.sink_logits != nullptr && problem.sink_logits[head] > -kInfinity) {
            *scratch_.sink.max = problem.sink_logits[head] * problem.unit;
            *scratch_.sink.sum = 1.0F;
            plan_.kernels.merge({state, scratch_.sink, 1, plan_.layout.columns()});
            lse = problem.sink_logits[head];  // of a row without keys, exactly
        }
        if (sequence.lse.base != nullptr) {
            if (!empty) lse = log_sum_exp(*state.max, *state.sum);
            *reinterpret_cast<float*>(sequence.lse.at(head, query_row)) = lse;
        }
        if (sequence.maxima != nullptr) {
            sequence.maxima[head * sequence.q_len + query_row] = *state.max;
            sequence.sums[head * sequence.q_len + query_row] = *state.sum;
        }
        const OutputRows& output = sequence.output;
        if (output.base == nullptr) continue;
        if (const std::int64_t ahead = row + kRowsAhead;
            output.column_stride == 1 && ahead < static_cast<std::int64_t>(rows())) {
            ask_to_write(sequence_of(ahead).output.at(head_of(ahead), query_row_of(ahead)),
                         columns * kernels::element_bytes(output.type));
        }
        if (output.type == kernels::ElementType::f32 && output.column_stride == 1) {
            plan_.kernels.finish({state, 1, columns, reinterpret_cast<float*>(output.at(head, query_row)), 0});
        } else {
            plan_.kernels.finish({state, 1, columns, state.output, 0});
            store_rows(plan_.kernels, state.output, 0, 1, columns, output, head, query_row);
        }
    }
}

}  // namespace headlong
