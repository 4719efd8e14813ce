#include "tests/support/draw_case.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

namespace headlong::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::int64_t draw_length(Random& random) {
    static const std::vector<std::int64_t> kShort{1, 1, 1, 2, 2, 3, 5, 7, 15, 16, 17, 31, 33};
    static const std::vector<std::int64_t> kMiddle{63, 64, 65, 97, 113, 127, 128, 129, 255, 257};
    static const std::vector<std::int64_t> kLong{511, 512, 513, 513, 577, 1023, 1024, 1025};
    const double which = random.uniform();
    if (which < 0.01) return 0;
    return random.pick(which < 0.5 ? kShort : which < 0.8 ? kMiddle : kLong);
}

std::int64_t draw_dim(Random& random) {
    static const std::vector<std::int64_t> kSmall{1, 2, 3, 8, 15, 16, 17, 21};
    static const std::vector<std::int64_t> kAll{40,  59,  64,  72,  80,  96,  111,
                                                112, 128, 192, 203, 256, 512, 576};  // SEMANTICS.md, section 5
    return random.pick(random.chance(0.8) ? kSmall : kAll);
}

KvType cache_type_of(Element element) {
    return element == Element::f16 ? KvType::f16 : element == Element::bf16 ? KvType::bf16 : KvType::f32;
}

/// Floating-point operations if every query saw every key, and some for every element.
double cost_of(const AttentionCase& c) {
    double cost = 0.0;
    for (std::size_t s = 0; s < c.q_lens.size(); ++s) {
        const auto q = static_cast<double>(c.q_lens[s]);
        const auto kv = static_cast<double>(c.kv_lens[s]);
        const auto dims = static_cast<double>(c.head_dim + c.value_dim);
        cost += static_cast<double>(c.heads) * q * kv * (2.0 * dims + 20.0);
        cost += 60.0 * dims * (static_cast<double>(c.heads) * q + static_cast<double>(c.kv_heads) * kv);
    }
    return cost;
}

void draw_shape(AttentionCase& c, Random& random) {
    static const std::vector<std::pair<std::int64_t, std::int64_t>> kHeads{
        {1, 1}, {1, 1}, {1, 1}, {2, 1}, {2, 1},  {2, 2},  {3, 1},  {5, 1},  {6, 2},  {6, 2},
        {7, 1}, {9, 3}, {9, 1}, {8, 2}, {12, 1}, {14, 2}, {16, 4}, {27, 1}, {65, 5}, {71, 1}};
    const double bound = 3e4 + 6e6 * random.uniform() * random.uniform() * random.uniform();
    do {
        std::tie(c.heads, c.kv_heads) = random.pick(kHeads);
        c.head_dim = draw_dim(random);
        c.value_dim = random.chance(0.5) ? c.head_dim : draw_dim(random);
        const auto sequences = static_cast<std::size_t>(random.chance(0.6) ? 1 : random.integer(2, 3));
        c.q_lens.assign(sequences, random.chance(0.25) ? 1 : draw_length(random));
        c.kv_lens.assign(sequences, draw_length(random));
        if (random.chance(0.4)) {  // ragged, if there is more than one
            for (std::int64_t& length : c.q_lens) length = draw_length(random);
            for (std::int64_t& length : c.kv_lens) length = draw_length(random);
        }
    } while (cost_of(c) > bound);
    if (random.chance(0.01)) c.value_dim = 0;
    if (random.chance(0.005)) c.heads = 0;
    if (random.chance(0.005)) c.heads = c.kv_heads = 0;
    if (random.chance(0.005)) c.q_lens = c.kv_lens = {};
}

std::int64_t draw_window(const AttentionCase& c, Random& random) {
    const std::int64_t kv = c.longest_kv();
    return random.pick(std::vector<std::int64_t>{-1, 0, 1, 2, 7, 15, 16, 63, 64, 100, 511, 512, kv / 2,
                                                 kv - 1 < 0 ? 0 : kv - 1, kv, kv + 5,
                                                 std::numeric_limits<std::int64_t>::max()});
}

void draw_mask(AttentionCase& c, Random& random) {
    const bool tree = random.chance(0.15);
    const auto rank = static_cast<std::size_t>(random.integer(1, 4));
    const std::int64_t q = c.longest_q();
    const std::int64_t kv = c.longest_kv();
    Extents<4> extents{c.sequences(), c.heads, q, tree ? q : kv};
    for (std::size_t i = 0; i < 4; ++i) {
        if (i + rank < 4 || random.chance(0.25)) extents[i] = 1;
    }
    if (!tree && extents[3] == kv && kv > 0 && random.chance(0.2)) {
        extents[3] = random.integer(0, kv - 1);  // the others are not allowed; 1 is a broadcast
    }
    const Element element = static_cast<Element>(random.integer(0, 3));
    const AnyTensor<4>& mask = keep(c, AnyTensor<4>::random(element, extents, random, 4));
    // Where not all is allowed, whole rows and runs of keys are not either now and then, so that spans are dead.
    const double dead = random.pick(std::vector<double>{0.0, 0.1, 0.5, 0.95});
    const double dead_row = random.pick(std::vector<double>{0.0, 0.0, 0.2});
    const std::int64_t from = random.chance(0.3) ? random.integer(0, extents[3]) : 0;
    const std::int64_t to = random.chance(0.3) ? random.integer(from, extents[3]) : from;
    std::int64_t row_of_last = -1;
    bool row_is_dead = false;
    for_each_index<4>(extents, [&](const Extents<4>& i) {
        const std::int64_t row = (i[0] * extents[1] + i[1]) * extents[2] + i[2];
        if (row != row_of_last) row_is_dead = random.chance(dead_row);
        row_of_last = row;
        const bool allowed = !row_is_dead && !(from <= i[3] && i[3] < to) && !random.chance(dead);
        if (element == Element::boolean) {
            mask.set(i, allowed ? static_cast<double>(random.integer(1, 255)) : 0.0);
        } else {
            // finite stand-ins for -infinity that other systems use count as allowed, and weigh nothing
            mask.set(i, !allowed ? -static_cast<double>(kInfinity) : random.chance(0.05) ? -1e4 : random.normal());
        }
    });
    AttentionMask view;
    view.data = mask.data();
    view.type = static_cast<AttentionMask::Type>(element);
    view.rank = rank;
    std::copy(extents.end() - static_cast<std::ptrdiff_t>(rank), extents.end(), view.extents.begin());
    std::copy(mask.strides().end() - static_cast<std::ptrdiff_t>(rank), mask.strides().end(), view.strides.begin());
    view.keys = tree ? AttentionMask::Keys::last_q : AttentionMask::Keys::all;
    c.mask = view;
}

void draw_features(AttentionCase& c, Random& random) {
    c.output_type = dtype_of(draw_element(random));
    c.causal = random.chance(0.5);
    const double alignment = random.uniform();
    c.features.alignment = alignment < 0.6   ? Alignment::bottom_right
                           : alignment < 0.8 ? Alignment::top_left
                                             : Alignment::offset;
    if (c.features.alignment == Alignment::offset) {
        c.features.causal_offset = random.chance(0.1) ? random.pick(std::vector<std::int64_t>{-1000000, 1000000})
                                                      : random.integer(-c.longest_q() - 2, c.longest_kv() + 2);
    }
    if (random.chance(0.2))
        c.features.scale = random.normal_f32() * random.pick(std::vector<float>{0.01F, 1.0F, 10.0F});
    if (random.chance(0.35)) {
        c.features.window_left = draw_window(c, random);
        if (random.chance(0.5)) c.features.window_right = draw_window(c, random);
    }
    if (random.chance(0.2)) {
        c.features.softcap =
            random.pick(std::vector<float>{0.5F, 1.0F, 5.0F, 30.0F, 50.0F, 1000.0F, 1e6F, 1e30F, 1e-30F});
    }
    const auto heads = static_cast<std::size_t>(c.heads);
    if (random.chance(0.2) && heads > 0) {
        if (random.chance(0.5)) c.alibi_slopes = alibi_slopes_for(c.heads);
        c.alibi_slopes.resize(heads);
        if (random.chance(0.3)) {
            for (float& slope : c.alibi_slopes) slope = random.normal_f32() * 0.3F;
        }
    }
    if (random.chance(0.2)) {
        for (std::size_t h = 0; h < heads; ++h) {
            c.sink_logits.push_back(random.chance(0.2) ? -kInfinity : random.normal_f32() * 2.0F);
        }
    }
    if (random.chance(0.3)) {
        for (const std::int64_t kv : c.kv_lens) c.live.push_back(random.chance(0.2) ? kv : random.integer(0, kv));
    }
    if (random.chance(0.4)) draw_mask(c, random);
}

}  // namespace

Element draw_element(Random& random) {
    return random.chance(0.6) ? Element::f32 : random.chance(0.5) ? Element::f16 : Element::bf16;
}

AttentionCase draw_case(Random& random) {
    AttentionCase c;
    draw_shape(c, random);
    draw_features(c, random);
    const Element query = draw_element(random);
    const Element key = draw_element(random);
    const Element value = draw_element(random);
    fill_normal(c, random, true, query, key, value);
    // a cache of the rows' own type holds them exactly: every way to compute the case stays comparable to the bit
    if (random.chance(0.5)) c.cache = {cache_type_of(key), cache_type_of(value)};
    return c;
}

void draw_visible_nan(const AttentionCase& c, Random& random) {
    const InputTensor<4>& view = random.chance(0.3) ? c.query : random.chance(0.5) ? c.key : c.value;
    std::int64_t place = 0;
    for (std::size_t d = 0; d < 4; ++d) {
        if (view.extents[d] == 0) return;
        place += random.integer(0, view.extents[d] - 1) * view.strides[d];
    }
    const Element element = element_of(view.dtype);
    const std::uint32_t bits = bits_of(element, std::numeric_limits<double>::quiet_NaN());
    auto* data = static_cast<std::byte*>(const_cast<void*>(view.data));
    std::memcpy(data + place * static_cast<std::int64_t>(size_of(element)), &bits, size_of(element));
}

}  // namespace headlong::test
