#include "tests/support/shrink.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "tests/support/views.hpp"

namespace headlong::test {
namespace {

using Cases = std::vector<AttentionCase>;

/// What n may become, the smallest first: taking away all but one, a half, a quarter and so on down to one.
std::vector<std::int64_t> smaller(std::int64_t n) {
    std::vector<std::int64_t> sizes;
    if (n <= 1) return sizes;
    sizes.push_back(1);
    for (std::int64_t less = n / 2; less > 0; less /= 2) {
        if (n - less > sizes.back()) sizes.push_back(n - less);
    }
    return sizes;
}

bool over_last_q(const AttentionCase& c) { return c.mask && c.mask->keys == AttentionMask::Keys::last_q; }

/// Tensors are padded to the longest sequence, and masks lie over it.
AttentionCase fitted(AttentionCase c) {
    c.query = cut(c.query, 2, 0, c.longest_q());
    c.key = cut(c.key, 2, 0, c.longest_kv());
    c.value = cut(c.value, 2, 0, c.longest_kv());
    if (!c.mask) return c;
    AttentionMask& mask = *c.mask;
    const std::size_t last = mask.rank - 1;
    if (mask.rank >= 2) cut_mask(mask, last - 1, 0, std::min(mask.extents[last - 1], c.longest_q()));
    cut_mask(mask, last, 0, std::min(mask.extents[last], over_last_q(c) ? c.longest_q() : c.longest_kv()));
    return c;
}

// ----------------------------------------------------------------------------------------- fewer of what there are
// several of

Cases fewer_sequences(const AttentionCase& c) {
    Cases cases;
    if (c.sequences() < 2) return cases;
    for (std::int64_t s = 0; s < c.sequences(); ++s) cases.push_back(sequence_of(c, s));
    if (c.sequences() == 2) return cases;
    for (const std::int64_t dropped : {c.sequences() - 1, std::int64_t{0}}) {
        AttentionCase fewer = c;
        for (InputTensor<4>* view : {&fewer.query, &fewer.key, &fewer.value}) {
            *view = cut(*view, 0, dropped == 0 ? 1 : 0, c.sequences() - 1);
        }
        for (std::vector<std::int64_t>* lengths : {&fewer.q_lens, &fewer.kv_lens, &fewer.live}) {
            if (!lengths->empty()) lengths->erase(lengths->begin() + dropped);
        }
        if (fewer.mask && fewer.mask->rank == 4) cut_mask(*fewer.mask, 0, dropped == 0 ? 1 : 0, c.sequences() - 1);
        cases.push_back(fitted(std::move(fewer)));
    }
    return cases;
}

/// The query heads first, first + step and so on, `count` of them.
AttentionCase with_heads(AttentionCase c, std::int64_t first, std::int64_t count, std::int64_t step) {
    c.query = cut(c.query, 1, first, count);
    c.query.strides[1] *= step;
    for (std::vector<float>* of_heads : {&c.alibi_slopes, &c.sink_logits}) {
        if (of_heads->empty()) continue;
        std::vector<float> kept;
        for (std::int64_t h = 0; h < count; ++h) {
            kept.push_back((*of_heads)[static_cast<std::size_t>(first + h * step)]);
        }
        *of_heads = std::move(kept);
    }
    if (c.mask && c.mask->rank >= 3 && c.mask->extents[c.mask->rank - 3] != 1) {
        cut_mask(*c.mask, c.mask->rank - 3, first, count);
        c.mask->strides[c.mask->rank - 3] *= step;
    }
    c.heads = count;
    return c;
}

Cases fewer_heads(const AttentionCase& c) {
    Cases cases;
    if (c.heads == 0 || c.kv_heads == 0) return cases;
    const std::int64_t group = c.heads / c.kv_heads;
    for (const std::int64_t count : smaller(c.kv_heads)) {
        for (const std::int64_t first : {std::int64_t{0}, c.kv_heads - count}) {
            AttentionCase fewer = with_heads(c, first * group, count * group, 1);
            fewer.key = cut(c.key, 1, first, count);
            fewer.value = cut(c.value, 1, first, count);
            fewer.kv_heads = count;
            cases.push_back(std::move(fewer));
        }
    }
    for (const std::int64_t count : smaller(group)) {
        if (c.kv_heads == 1) {
            cases.push_back(with_heads(c, 0, count, 1));
            cases.push_back(with_heads(c, group - count, count, 1));
        } else if (count == 1) {
            cases.push_back(with_heads(c, 0, c.kv_heads, group));
        }
    }
    return cases;
}

/// Rows [first, first + count) of all sequences, which have the same number of them. Not by rows_of(): the alignment
/// stays, and with it where a file can say it.
AttentionCase with_rows(AttentionCase c, std::int64_t first, std::int64_t count) {
    c.query = cut(c.query, 2, first, count);
    std::fill(c.q_lens.begin(), c.q_lens.end(), count);
    if (c.features.alignment == Alignment::offset) c.features.causal_offset += first;
    if (c.mask && c.mask->rank >= 2) cut_mask(*c.mask, c.mask->rank - 2, first, count);
    if (over_last_q(c)) cut_mask(*c.mask, c.mask->rank - 1, first, count);
    return c;
}

AttentionCase with_keys(AttentionCase c, std::int64_t first, std::int64_t count) {
    c.key = cut(c.key, 2, first, count);
    c.value = cut(c.value, 2, first, count);
    std::fill(c.kv_lens.begin(), c.kv_lens.end(), count);
    for (std::int64_t& live : c.live) live = std::clamp<std::int64_t>(live - first, 0, count);
    if (c.features.alignment == Alignment::offset) c.features.causal_offset -= first;
    if (c.mask && !over_last_q(c)) {
        const std::int64_t columns = c.mask->extents[c.mask->rank - 1];
        const std::int64_t left = std::clamp<std::int64_t>(columns - first, 0, count);
        cut_mask(*c.mask, c.mask->rank - 1, left == 0 ? 0 : first, left);
    }
    return c;
}

bool all_the_same(const std::vector<std::int64_t>& lengths) {
    return std::all_of(lengths.begin(), lengths.end(), [&](std::int64_t n) { return n == lengths.front(); });
}

/// `lengths` is q_lens or kv_lens, and `part` makes parts of all sequences.
template <class Part>
Cases shorter(const AttentionCase& c, std::vector<std::int64_t> AttentionCase::*lengths, const Part& part) {
    Cases cases;
    if (c.sequences() == 0) return cases;
    if (all_the_same(c.*lengths)) {
        const std::int64_t whole = (c.*lengths).front();
        for (const std::int64_t count : smaller(whole)) {
            cases.push_back(part(c, 0, count));
            cases.push_back(part(c, whole - count, count));
        }
        return cases;
    }
    for (std::size_t s = 0; s < (c.*lengths).size(); ++s) {
        for (const std::int64_t count : smaller((c.*lengths)[s])) {
            AttentionCase fewer = c;
            (fewer.*lengths)[s] = count;
            if (!fewer.live.empty()) fewer.live[s] = std::min(fewer.live[s], fewer.kv_lens[s]);
            cases.push_back(fitted(std::move(fewer)));
        }
    }
    return cases;
}

Cases fewer_rows(const AttentionCase& c) { return shorter(c, &AttentionCase::q_lens, with_rows); }
Cases fewer_keys(const AttentionCase& c) { return shorter(c, &AttentionCase::kv_lens, with_keys); }

Cases fewer_dims(const AttentionCase& c) {
    Cases cases;
    for (const std::int64_t count : smaller(c.head_dim)) {
        for (const std::int64_t first : {std::int64_t{0}, c.head_dim - count}) {
            AttentionCase fewer = c;
            fewer.query = cut(c.query, 3, first, count);
            fewer.key = cut(c.key, 3, first, count);
            fewer.head_dim = count;
            cases.push_back(std::move(fewer));
        }
    }
    for (const std::int64_t count : smaller(c.value_dim)) {
        for (const std::int64_t first : {std::int64_t{0}, c.value_dim - count}) {
            AttentionCase fewer = c;
            fewer.value = cut(c.value, 3, first, count);
            fewer.value_dim = count;
            cases.push_back(std::move(fewer));
        }
    }
    return cases;
}

// ------------------------------------------------------------------------------------------------- fewer features

Cases fewer_features(const AttentionCase& c) {
    Cases cases;
    const auto add_if = [&](bool on, const auto& change) {
        if (!on) return;
        cases.push_back(c);
        change(cases.back());
    };
    add_if(c.causal, [](AttentionCase& less) { less.causal = false; });
    add_if(c.features.alignment != Alignment::bottom_right, [](AttentionCase& less) {
        less.features.alignment = Alignment::bottom_right;
        less.features.causal_offset = 0;
    });
    add_if(c.features.alignment == Alignment::offset, [](AttentionCase& less) {
        less.features.alignment = Alignment::top_left;
        less.features.causal_offset = 0;
    });
    for (const std::int64_t nearer : {std::int64_t{0}, c.features.causal_offset / 2,
                                      c.features.causal_offset + (c.features.causal_offset < 0 ? 1 : -1)}) {
        add_if(c.features.causal_offset != 0 && nearer != c.features.causal_offset,
               [&](AttentionCase& less) { less.features.causal_offset = nearer; });
    }
    add_if(c.features.scale.has_value(), [](AttentionCase& less) { less.features.scale.reset(); });
    for (std::int64_t AttentionOptions::*side : {&AttentionOptions::window_left, &AttentionOptions::window_right}) {
        const std::int64_t width = c.features.*side;
        add_if(width != -1, [&](AttentionCase& less) { less.features.*side = -1; });
        for (const std::int64_t narrower : {std::int64_t{0}, width / 2, width - 1}) {
            add_if(narrower >= 0 && narrower < width, [&](AttentionCase& less) { less.features.*side = narrower; });
        }
    }
    add_if(c.features.softcap != 0.0F, [](AttentionCase& less) { less.features.softcap = 0.0F; });
    add_if(!c.alibi_slopes.empty(), [](AttentionCase& less) { less.alibi_slopes.clear(); });
    add_if(!c.sink_logits.empty(), [](AttentionCase& less) { less.sink_logits.clear(); });
    add_if(!c.live.empty(), [](AttentionCase& less) { less.live.clear(); });
    if (!c.live.empty() && all_the_same(c.live) && all_the_same(c.kv_lens) && c.live[0] < c.kv_lens[0]) {
        cases.push_back(with_keys(c, 0, c.live[0]));
        cases.back().live.clear();
    }
    add_if(c.mask.has_value(), [](AttentionCase& less) { less.mask.reset(); });
    if (c.mask) {
        const std::size_t last = c.mask->rank - 1;
        add_if(c.mask->rank > 1 && c.mask->extents[0] == 1, [](AttentionCase& less) {
            AttentionMask& mask = *less.mask;
            --mask.rank;
            std::copy(mask.extents.begin() + 1, mask.extents.end(), mask.extents.begin());
            std::copy(mask.strides.begin() + 1, mask.strides.end(), mask.strides.begin());
        });
        for (std::size_t d = 0; d <= last; ++d) {
            add_if(c.mask->extents[d] > 1, [&](AttentionCase& less) { less.mask->extents[d] = 1; });
        }
        add_if(over_last_q(c) && c.mask->extents[last] <= c.longest_kv(),
               [](AttentionCase& less) { less.mask->keys = AttentionMask::Keys::all; });
    }
    return cases;
}

Cases plainer_types(const AttentionCase& c) {
    Cases cases;
    if (c.output_type != DType::f32) {
        cases.push_back(c);
        cases.back().output_type = DType::f32;
    }
    if (c.cache.keys != KvType::f32 || c.cache.values != KvType::f32) {
        cases.push_back(c);
        cases.back().cache = {};
    }
    for (const Part part : {Part::query, Part::key, Part::value, Part::mask}) {
        if (part == Part::mask && !c.mask) continue;
        const Element element = element_of(c, part);
        if (element == Element::boolean) continue;
        if (part == Part::mask) cases.push_back(with_copy_of(c, part, Element::boolean, false));
        if (element != Element::f32) cases.push_back(with_copy_of(c, part, Element::f32, false));
    }
    return cases;
}

Cases plainer_strides(const AttentionCase& c) {
    Cases cases;
    for (const Part part : {Part::query, Part::key, Part::value, Part::mask}) {
        if (part == Part::mask && !c.mask) continue;
        if (!is_dense(c, part)) cases.push_back(with_copy_of(c, part, element_of(c, part), true));
    }
    return cases;
}

}  // namespace

AttentionCase shrink(AttentionCase c, const std::function<bool(const AttentionCase&)>& still_fails,
                     std::size_t most_tries) {
    std::size_t tries = 0;
    // the first of them that fails takes the case's place
    const auto take_one = [&](const Cases& candidates) {
        for (const AttentionCase& candidate : candidates) {
            if (tries == most_tries) return false;
            ++tries;
            if (!still_fails(candidate)) continue;
            c = candidate;
            return true;
        }
        return false;
    };
    for (bool smaller_now = true; smaller_now;) {
        smaller_now = false;
        for (const auto& simpler : {fewer_sequences, fewer_heads, fewer_rows, fewer_keys, fewer_features, fewer_dims,
                                    plainer_types, plainer_strides}) {
            while (take_one(simpler(c))) smaller_now = true;
        }
    }
    return c;
}

}  // namespace headlong::test
