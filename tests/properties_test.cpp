// Random combinations of everything that attention does, against the double-precision reference: features, shapes,
// strides, element types, and the ways to call it. What no row sees holds NaN or infinity, holes hold canaries, guard
// pages surround everything. Each draw also checks one relation that must hold to the bit (or, for merged parts, within
// the bounds). Each draw has a seed of its own: HEADLONG_SEED=<the printed one> HEADLONG_DRAWS=1 replays it alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>

#include "tests/support/any_tensor.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ------------------------------------------------------------------------------------------------------ what is drawn

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

Element draw_element(Random& random) {
    return random.chance(0.6) ? Element::f32 : random.chance(0.5) ? Element::f16 : Element::bf16;
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

/// A NaN that some rows may see: it must reach exactly those.
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

// ------------------------------------------------------------------------------------------------------ what is
// checked

std::size_t draw_threads(Random& random) {
    return random.chance(0.5) ? 1 : static_cast<std::size_t>(random.integer(2, 3));
}

/// Another computation of the same rows.
void check_relation(const AttentionCase& c, Route route, const Outcome& outcome, Isa isa, Random& random) {
    Context& context = shared_context(isa, draw_threads(random));
    const bool tree = c.mask && c.mask->keys == AttentionMask::Keys::last_q;
    const std::int64_t which = random.integer(0, 6);
    if (which == 1) {
        SCOPED_TRACE(std::string(to_string(route)) + " on 1 and 3 threads");
        EXPECT_TRUE(
            same_bits(run(shared_context(isa, 1), c, route, &random), run(shared_context(isa, 3), c, route, &random)));
        return;
    }
    if (which == 2 && can_run_in_chunks(c)) {
        SCOPED_TRACE("in chunks through a cache");
        EXPECT_TRUE(same_bits(outcome, run_in_chunks(context, c, 0, &random)));
        return;
    }
    if (which >= 3 && c.sequences() > 0) {
        const std::int64_t s = random.integer(0, c.sequences() - 1);
        const AttentionCase one = sequence_of(c, s);
        const Outcome own = sequence_of(c, outcome, s);
        const std::vector<Route> routes = possible_routes(one);
        if (which == 3 || (tree && which != 5)) {
            const Route alone = random.pick(routes);
            SCOPED_TRACE("sequence " + std::to_string(s) + " alone: " + to_string(alone));
            EXPECT_TRUE(same_bits(own, run(context, one, alone, &random)));
        } else if (which == 4) {
            const std::int64_t first = random.integer(0, one.q_lens[0]);
            const std::int64_t count = random.integer(0, one.q_lens[0] - first);
            const Route alone = random.pick(routes);
            SCOPED_TRACE("rows " + std::to_string(first) + " to " + std::to_string(first + count) + " of sequence " +
                         std::to_string(s) + " alone: " + to_string(alone));
            EXPECT_TRUE(
                same_bits(rows_of(one, own, first, count), run(context, rows_of(one, first, count), alone, &random)));
        } else if (const std::int64_t prefix = random.integer(0, one.live_of(0));
                   which == 5 && can_share_prefix(one, prefix)) {
            SCOPED_TRACE("sequence " + std::to_string(s) + ", " + std::to_string(prefix) + " keys as a shared prefix");
            EXPECT_TRUE(close(one, run_with_shared_prefix(context, one, prefix), own, expected(one)));
        } else if (!tree) {
            std::vector<std::int64_t> cuts;
            for (std::int64_t i = random.integer(1, 4); i > 0; --i) cuts.push_back(random.integer(0, one.kv_lens[0]));
            std::sort(cuts.begin(), cuts.end());
            SCOPED_TRACE("sequence " + std::to_string(s) + " merged from " + std::to_string(cuts.size() + 1) +
                         " parts");
            const auto sink = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(cuts.size())));
            EXPECT_TRUE(close(one, run_merged(context, one, cuts, sink), own, expected(one)));
        }
        return;
    }
    const Route other = random.pick(possible_routes(c));
    SCOPED_TRACE(std::string(to_string(route)) + " and " + to_string(other));
    EXPECT_TRUE(same_bits(outcome, run(context, c, other, &random)));
}

void check_on(Isa isa, const AttentionCase& c, const Expected& want, Random& random) {
    const std::vector<Route> routes = possible_routes(c);
    if (routes.empty()) return;
    const Route route = random.pick(routes);
    const std::size_t threads = draw_threads(random);
    SCOPED_TRACE(std::string(to_string(route)) + ", " + std::to_string(threads) + " threads");
    const Outcome outcome = run(shared_context(isa, threads), c, route, &random);
    EXPECT_TRUE(agrees(c, outcome, want));
    check_relation(c, route, outcome, isa, random);
}

/// A matrix of scores against the reference's, plainly and over a cache.
void check_scores(Isa isa, const AttentionCase& c, ScoreStage stage, Random& random) {
    Context& context = shared_context(isa, draw_threads(random));
    const auto which = static_cast<reference::Scores>(stage);
    // Of all pairs: what is not allowed has a score as well, and its size counts
    AttentionCase open = c;
    const bool all_pairs = stage == ScoreStage::scaled || stage == ScoreStage::softcapped;
    if (all_pairs) {
        open.causal = false;
        open.features.window_left = open.features.window_right = -1;
        open.mask.reset();
        open.live.clear();
    }
    const Expected want = expected(open, which);
    const AttentionCase one = c.sequences() > 0 ? sequence_of(c, 0) : c;
    const bool over_cache = c.sequences() > 0 && random.chance(0.5) && possible(c, Route::cache);
    if (!over_cache && !c.uniform()) return;
    const Element element = draw_element(random);
    const std::int64_t sequences = over_cache ? 1 : c.sequences();
    const auto scores = AnyTensor<4>::random(
        element,
        {sequences, c.heads, over_cache ? one.q_lens[0] : c.longest_q(), over_cache ? one.kv_lens[0] : c.longest_kv()},
        random);
    SCOPED_TRACE("scores, stage " + std::to_string(static_cast<int>(stage)) + (over_cache ? ", over a cache" : ""));
    if (over_cache) {
        KvCacheOptions options;
        options.shape = c.cache_shape();
        KvCache cache(options);
        const auto of = [](const InputTensor<4>& view) {
            return InputTensor<3>{view.data,
                                  view.dtype,
                                  {view.extents[1], view.extents[2], view.extents[3]},
                                  {view.strides[1], view.strides[2], view.strides[3]}};
        };
        cache.append(context, 0, of(one.key), of(one.value));
        const OutputTensor<4> all = scores.output();
        attention_scores(context, of(one.query), cache, 0, one.options(), stage,
                         OutputTensor<3>{all.data,
                                         all.dtype,
                                         {all.extents[1], all.extents[2], all.extents[3]},
                                         {all.strides[1], all.strides[2], all.strides[3]}});
    } else {
        attention_scores(context, c.query, c.key, c.options(), stage, scores.output());
    }
    EXPECT_TRUE(scores.written_exactly()) << scores.describe();
    const double factor = stage == ScoreStage::weights ? 2.0 : 1.0;  // of a score and of their sum
    std::size_t wrong = 0;
    for_each_index<4>(scores.extents(), [&](const Extents<4>& i) {
        const reference::AttentionResult& part = want.parts[c.uniform() ? 0 : static_cast<std::size_t>(i[0])];
        const double expected_score = part.scores.at(i[0], i[1], i[2], i[3]);
        // a biased score is rounded at its own size, however little it weighs
        const double size = std::isfinite(expected_score) ? std::abs(expected_score) : 0.0;
        double bound = factor * lse_tolerance(part.magnitudes) + 4.0 * 0x1p-24 * size;
        bound += half_ulp(dtype_of(element), std::abs(expected_score) + bound);
        const double got = scores.get(i);
        const double rounded = value_of(element, bits_of(element, expected_score));  // infinite beyond float16
        const bool fits = got == rounded || std::abs(got - expected_score) <= bound ||
                          (std::isnan(got) && std::isnan(expected_score));
        if (fits || wrong++ != 0) return;
        ADD_FAILURE() << "at " << i[0] << " " << i[1] << " " << i[2] << " " << i[3] << ": got " << got << ", want "
                      << expected_score << ", allowed " << bound;
    });
    EXPECT_EQ(wrong, 0U);
}

void check_draw(std::uint64_t seed) {
    Random random(seed);
    AttentionCase c;
    draw_shape(c, random);
    draw_features(c, random);
    const Element query = draw_element(random);
    const Element key = draw_element(random);
    const Element value = draw_element(random);
    fill_normal(c, random, true, query, key, value);
    // a cache of the rows' own type holds them exactly: every way to compute the case stays comparable to the bit
    if (random.chance(0.5)) c.cache = {cache_type_of(key), cache_type_of(value)};
    SCOPED_TRACE("HEADLONG_SEED=" + std::to_string(seed) + " HEADLONG_DRAWS=1: " + c.describe());
    if (random.chance(0.05)) draw_visible_nan(c, random);
    const bool with_scores = random.chance(0.1);
    const auto stage = static_cast<ScoreStage>(random.integer(0, 3));
    const Expected want = expected(c, reference::Scores::masked);
    const bool all_pairs = stage == ScoreStage::scaled || stage == ScoreStage::softcapped;
    // what an instruction set draws does not depend on which others there are
    const auto own = [&](Isa isa) { return Random(seed ^ (static_cast<std::uint64_t>(isa) + 1) << 56U); };
    if (with_scores && all_pairs) {
        HEADLONG_FOR_EACH_ISA(isa) {
            Random isa_random = own(isa);
            check_scores(isa, c, stage, isa_random);
        }
    }
    poison_dead_keys(c, want, random);
    HEADLONG_FOR_EACH_ISA(isa) {
        Random isa_random = own(isa);
        check_on(isa, c, want, isa_random);
        if (with_scores && !all_pairs) check_scores(isa, c, stage, isa_random);
    }
}

std::uint64_t draws_or(std::uint64_t usual) {
    const char* text = std::getenv("HEADLONG_DRAWS");
    return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 0) : usual;
}

TEST(PropertiesTest, RandomCombinationsOfFeatures) {
    const std::uint64_t first = seed_or(20250000);
    const std::uint64_t draws = draws_or(emulated() ? 200 : 2000);
    const bool progress = std::getenv("HEADLONG_PROGRESS") != nullptr;  // tools/check
    for (std::uint64_t i = 0; i < draws && !HasFailure(); ++i) {
        try {
            check_draw(first + i);
        } catch (const std::exception& error) {
            ADD_FAILURE() << "HEADLONG_SEED=" << first + i << " HEADLONG_DRAWS=1 threw: " << error.what();
        }
        if (progress && (i + 1) % 1000 == 0)
            std::fprintf(stderr, "%llu draws\n", static_cast<unsigned long long>(i + 1));
    }
}

}  // namespace
}  // namespace headlong::test
