// The same-bits contract for every feature, one at a time and together: threads, chunks, prefill and decode, plain
// tensors, caches, pages and packed rows, a batch and a sequence alone, a row's place in its tile. All by memcmp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>

#include "tests/support/attention_case.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Random elements of a mask of these extents; runs of keys that are not allowed leave spans half empty.
void add_mask(AttentionCase& c, Element element, const std::vector<std::int64_t>& extents, Random& random) {
    std::size_t count = 1;
    for (const std::int64_t extent : extents) count *= static_cast<std::size_t>(extent);
    std::vector<double> values(count);
    for (std::size_t i = 0; i < count; ++i) {
        const bool allowed = !random.chance(0.3) && (i / 100) % 3 != 1;
        values[i] = element == Element::boolean ? (allowed ? 1.0 : 0.0) : allowed ? random.normal() : -kInfinity;
    }
    set_mask(c, element, extents, values);
}

struct Feature {
    const char* name;
    std::function<void(AttentionCase&, Random&)> add;
};

void add_alibi(AttentionCase& c, Random&) { c.alibi_slopes = alibi_slopes_for(c.heads); }
void add_softcap(AttentionCase& c, Random&) { c.features.softcap = 3.0F; }
void add_sinks(AttentionCase& c, Random& random) {
    for (std::int64_t h = 0; h < c.heads; ++h) c.sink_logits.push_back(random.normal_f32());
    c.sink_logits.back() = -std::numeric_limits<float>::infinity();
}
void add_window(AttentionCase& c, Random&) { c.features.window_left = 130; }
void add_lengths(AttentionCase& c, Random&) {
    for (const std::int64_t kv : c.kv_lens) c.live.push_back(kv - kv / 10 - 3);
}

const std::vector<Feature>& features() {
    static const std::vector<Feature> all{
        {"a window", add_window},
        {"a narrow window", [](AttentionCase& c, Random&) { c.features.window_left = 3; }},
        {"a window of the query's own key", [](AttentionCase& c, Random&) { c.features.window_left = 0; }},
        {"a window on both sides, not causal",
         [](AttentionCase& c, Random&) {
             c.causal = false;
             c.features.window_left = 70;
             c.features.window_right = 33;
         }},
        {"not causal", [](AttentionCase& c, Random&) { c.causal = false; }},
        {"top-left", [](AttentionCase& c, Random&) { c.features.alignment = Alignment::top_left; }},
        {"an offset",
         [](AttentionCase& c, Random&) {
             c.features.alignment = Alignment::offset;
             c.features.causal_offset = -5;
         }},
        {"softcap", add_softcap},
        {"ALiBi", add_alibi},
        {"sinks", add_sinks},
        {"lengths", add_lengths},
        {"a boolean mask",
         [](AttentionCase& c, Random& r) {
             add_mask(c, Element::boolean, {c.longest_q(), c.longest_kv()}, r);
         }},
        {"a boolean mask of heads",
         [](AttentionCase& c, Random& r) {
             add_mask(c, Element::boolean, {c.heads, 1, c.longest_kv()}, r);
         }},
        {"a float mask",
         [](AttentionCase& c, Random& r) {
             add_mask(c, Element::f32, {c.longest_q(), c.longest_kv()}, r);
         }},
        {"a short float16 mask",
         [](AttentionCase& c, Random& r) {
             add_mask(c, Element::f16, {c.longest_q(), c.longest_kv() - 40}, r);
         }},
        {"a bfloat16 mask of one column",
         [](AttentionCase& c, Random& r) {
             add_mask(c, Element::bf16, {c.heads, c.longest_q(), 1}, r);
         }},
        {"softcap, sinks and a window",
         [](AttentionCase& c, Random& r) {
             add_softcap(c, r);
             add_sinks(c, r);
             add_window(c, r);
         }},
        {"all with a boolean mask",
         [](AttentionCase& c, Random& r) {
             for (const auto add : {add_softcap, add_alibi, add_sinks, add_window, add_lengths}) add(c, r);
             add_mask(c, Element::boolean, {c.longest_q(), c.longest_kv()}, r);
         }},
        {"all with a float mask", [](AttentionCase& c, Random& r) {
             for (const auto add : {add_softcap, add_alibi, add_sinks, add_window, add_lengths}) add(c, r);
             add_mask(c, Element::f32, {c.heads, 1, c.longest_kv()}, r);
         }}};
    return all;
}

struct Types {
    Element query, key, value;
    DType output;
};

/// Causal with a feature. Crosses a span, ends inside a panel, has groups of 3 and odd dims.
AttentionCase case_with(const Feature& feature, const std::vector<std::int64_t>& lengths, Random& random,
                        const Types& types = {Element::f32, Element::f32, Element::f32, DType::f32}) {
    AttentionCase c;
    c.heads = 6;
    c.kv_heads = 2;
    c.head_dim = 11;
    c.value_dim = 5;
    c.q_lens = lengths;
    c.kv_lens = lengths;
    c.causal = true;
    fill_normal(c, random, true, types.query, types.key, types.value);
    c.output_type = types.output;
    feature.add(c, random);
    return c;
}

std::int64_t usual_length() { return emulated() ? 530 : 600; }

/// Caches that round what they hold have bits of their own.
std::vector<Route> routes(const AttentionCase& c) {
    return c.cache == KvTypes{} ? possible_routes(c) : std::vector<Route>{Route::cache};
}

/// Everything that must have the bits of `want`, which is the whole case through one call.
void expect_same_everywhere(const AttentionCase& c, const Outcome& want, Isa isa) {
    Random random(7);
    // an emulator takes a hundred times as long: it tries the ends of each list
    const auto some = [](const auto& all) {
        return emulated() ? std::remove_cvref_t<decltype(all)>{all.front(), all.back()} : all;
    };
    for (const std::size_t threads : some(std::vector<std::size_t>{1, 2, 5})) {
        SCOPED_TRACE(std::to_string(threads) + " threads");
        Context& context = shared_context(isa, threads);
        for (const Route route : routes(c)) {
            EXPECT_TRUE(same_bits(want, run(context, c, route, &random))) << to_string(route);
        }
    }
    Context& context = shared_context(isa);
    if (can_run_in_chunks(c)) {
        for (const std::int64_t chunk :
             emulated() ? std::vector<std::int64_t>{64} : std::vector<std::int64_t>{7, 64, 500}) {
            EXPECT_TRUE(same_bits(want, run_in_chunks(context, c, chunk))) << "chunks of " << chunk;
        }
    }
    const std::vector<std::pair<std::int64_t, std::int64_t>> parts{
        {511, 2}, {0, 1}, {0, 2}, {1, 1}, {13, 5}, {100, 40}, {511, 1}, {c.q_lens[0] - 1, 1}, {c.q_lens[0] - 20, 20}};
    for (const auto& [first, count] : some(parts)) {
        const AttentionCase part = rows_of(c, first, count);
        for (const Route route : routes(part)) {
            EXPECT_TRUE(same_bits(rows_of(c, want, first, count), run(context, part, route)))
                << "rows " << first << " to " << first + count << ", " << to_string(route);
        }
    }
}

TEST(SameBitsFeaturesTest, ThreadsChunksRoutesAndPlaces) {
    Random random(seed_or(501));
    HEADLONG_TRACE_SEED(random);
    for (const Feature& feature : features()) {
        SCOPED_TRACE(feature.name);
        const AttentionCase c = case_with(feature, {usual_length()}, random);
        HEADLONG_FOR_EACH_ISA(isa) {
            if (left_to_native_tests(isa)) continue;
            expect_same_everywhere(c, run(shared_context(isa), c, Route::plain), isa);
        }
    }
}

TEST(SameBitsFeaturesTest, CachesOfEveryType) {
    Random random(seed_or(507));
    HEADLONG_TRACE_SEED(random);
    const std::vector<KvTypes> all{{KvType::int8, KvType::int8},
                                   {KvType::int4, KvType::int4},
                                   {KvType::f16, KvType::bf16},
                                   {KvType::f32, KvType::int4},
                                   {KvType::int8, KvType::f32}};
    std::size_t next = 0;
    for (const Feature& feature : features()) {
        SCOPED_TRACE(feature.name);
        ++next;
        AttentionCase c = case_with(feature, {usual_length()}, random);
        AttentionCase steps = case_with(feature, {emulated() ? 40 : 150}, random);
        HEADLONG_FOR_EACH_ISA(isa) {
            if (left_to_native_tests(isa)) continue;
            // every type meets every set and every feature, if not all of them together
            c.cache = steps.cache = all[next++ % all.size()];
            SCOPED_TRACE(std::string("cache ") + to_string(c.cache.keys) + ":" + to_string(c.cache.values));
            expect_same_everywhere(c, run(shared_context(isa), c, Route::cache), isa);
            if (!can_run_in_chunks(steps)) continue;
            const Outcome want = run(shared_context(isa), steps, Route::cache);
            EXPECT_TRUE(same_bits(want, run_in_chunks(shared_context(isa), steps, 3)));
            EXPECT_TRUE(same_bits(want, run_in_chunks(shared_context(isa, 3), steps, 1)));
        }
    }
}

TEST(SameBitsFeaturesTest, StepByStep) {
    Random random(seed_or(502));
    HEADLONG_TRACE_SEED(random);
    for (const Feature& feature : features()) {
        SCOPED_TRACE(feature.name);
        const AttentionCase c = case_with(feature, {emulated() ? 40 : 150}, random);
        if (!can_run_in_chunks(c)) continue;
        HEADLONG_FOR_EACH_ISA(isa) {
            if (left_to_native_tests(isa)) continue;
            Context& context = shared_context(isa);
            const Outcome want = run(context, c, Route::plain);
            for (const std::int64_t chunk : {1, 2, 3}) {
                EXPECT_TRUE(same_bits(want, run_in_chunks(context, c, chunk))) << "chunks of " << chunk;
            }
            EXPECT_TRUE(same_bits(want, run_in_chunks(shared_context(isa, 3), c, 1)));
        }
    }
}

TEST(SameBitsFeaturesTest, ElementTypes) {
    Random random(seed_or(503));
    HEADLONG_TRACE_SEED(random);
    const Feature& all = features().back();
    for (const Types& types : {Types{Element::f16, Element::f16, Element::f16, DType::f16},
                               Types{Element::bf16, Element::bf16, Element::bf16, DType::bf16},
                               Types{Element::f32, Element::bf16, Element::f16, DType::f32}}) {
        const AttentionCase c = case_with(all, {usual_length()}, random, types);
        HEADLONG_FOR_EACH_ISA(isa) {
            if (left_to_native_tests(isa)) continue;
            Context& context = shared_context(isa);
            const Outcome want = run(context, c, Route::plain);
            expect_same_everywhere(c, want, isa);
            // widened exactly: the same numbers as float give the same bits
            AttentionCase wide = c;
            for (InputTensor<4>* view : {&wide.query, &wide.key, &wide.value}) {
                const reference::Tensor values = reference::widen(*view);
                const AnyTensor<4>& tensor = keep(wide, AnyTensor<4>(Element::f32, view->extents));
                tensor.assign(values.values);
                *view = tensor.input();
            }
            EXPECT_TRUE(same_bits(want, run(context, wide, Route::plain)));
            // and 16-bit outputs are the float ones, rounded once, to nearest even
            AttentionCase in_float = c;
            in_float.output_type = DType::f32;
            Outcome rounded = run(context, in_float, Route::plain);
            rounded.type = c.output_type;
            for (std::uint32_t& bits : rounded.output) {
                bits = bits_of(element_of(c.output_type), value_of(Element::f32, bits));
            }
            EXPECT_TRUE(same_bits(want, rounded));
        }
    }
}

TEST(SameBitsFeaturesTest, ASequenceAloneOrInABatch) {
    Random random(seed_or(504));
    HEADLONG_TRACE_SEED(random);
    for (const Feature& feature : features()) {
        SCOPED_TRACE(feature.name);
        const AttentionCase c = case_with(feature, {60, 90, 41}, random);
        HEADLONG_FOR_EACH_ISA(isa) {
            if (left_to_native_tests(isa)) continue;
            for (const std::size_t threads : {1U, 2U}) {
                Context& context = shared_context(isa, threads);
                for (const Route route : possible_routes(c)) {
                    const Outcome batch = run(context, c, route);
                    for (std::int64_t s = 0; s < 3; ++s) {
                        const AttentionCase one = sequence_of(c, s);
                        EXPECT_TRUE(same_bits(sequence_of(c, batch, s), run(context, one, Route::plain)))
                            << to_string(route) << ", sequence " << s;
                    }
                }
                for (const KvType type : {KvType::f16, KvType::bf16, KvType::int8, KvType::int4}) {
                    AttentionCase narrow = c;
                    narrow.cache = {type, type};
                    const Outcome batch = run(context, narrow, Route::cache);
                    for (std::int64_t s = 0; s < 3; ++s) {
                        const AttentionCase one = sequence_of(narrow, s);
                        EXPECT_TRUE(same_bits(sequence_of(c, batch, s), run(context, one, Route::cache)))
                            << to_string(type) << ", sequence " << s;
                    }
                }
            }
        }
    }
}

// More than one group of 64 spans (32,768 positions): few rows split the keys among threads, and fold the same way.
TEST(SameBitsFeaturesTest, LongContexts) {
    Random random(seed_or(505));
    HEADLONG_TRACE_SEED(random);
    const std::int64_t kv = emulated() ? 1100 : 33500;
    std::size_t next = 0;
    for (const Feature& feature : features()) {
        ++next;
        SCOPED_TRACE(feature.name);
        AttentionCase c;
        c.heads = 2;
        c.head_dim = 3;
        c.value_dim = 2;
        c.q_lens = {3};
        c.kv_lens = {kv};
        c.causal = true;
        fill_normal(c, random, false);
        feature.add(c, random);
        HEADLONG_FOR_EACH_ISA(isa) {
            if (left_to_native_tests(isa)) continue;
            const Outcome want = run(shared_context(isa), c, Route::plain);
            for (const std::size_t threads : {1U, 2U, 5U}) {
                Context& context = shared_context(isa, threads);
                for (const Route route : possible_routes(c)) {
                    EXPECT_TRUE(same_bits(want, run(context, c, route))) << to_string(route) << ", " << threads;
                }
                EXPECT_TRUE(same_bits(rows_of(c, want, 2, 1), run(context, rows_of(c, 2, 1), Route::cache)));
            }
            AttentionCase narrow = c;
            for (const KvType type : {KvType::int8, KvType::int4}) {
                if (next++ % 4 != 0) continue;
                narrow.cache = {type, type};
                const Outcome walked = run(shared_context(isa), narrow, Route::cache);
                EXPECT_TRUE(same_bits(walked, run(shared_context(isa, 5), narrow, Route::cache))) << to_string(type);
                EXPECT_TRUE(same_bits(rows_of(c, walked, 2, 1),
                                      run(shared_context(isa, 2), rows_of(narrow, 2, 1), Route::cache)))
                    << to_string(type);
            }
        }
    }
}

// The prefix of a shared prefix is read for all rows together: neither their number nor the threads are seen in a row.
TEST(SameBitsFeaturesTest, SharedPrefix) {
    Random random(seed_or(506));
    HEADLONG_TRACE_SEED(random);
    for (const Feature& feature : features()) {
        AttentionCase c = case_with(feature, {600}, random);
        if (c.mask || c.features.alignment != Alignment::bottom_right) continue;
        SCOPED_TRACE(feature.name);
        // the last 30 rows as they are, and one by one
        constexpr std::int64_t kQ = 30;
        AttentionCase rows = c;
        rows.q_lens = {kQ};
        const std::int64_t first = c.live_of(0) - kQ;
        rows.query.data = static_cast<const float*>(c.query.data) + first * c.query.strides[2];
        rows.query.extents[2] = kQ;
        if (!c.live.empty()) rows.live = {c.live_of(0)};
        for (const std::int64_t prefix : {std::int64_t{64}, std::int64_t{100}, std::int64_t{512}}) {
            if (!can_share_prefix(rows, prefix)) continue;
            HEADLONG_FOR_EACH_ISA(isa) {
                if (left_to_native_tests(isa)) continue;
                const Outcome want = run_with_shared_prefix(shared_context(isa), rows, prefix);
                for (const std::size_t threads : {2U, 5U}) {
                    EXPECT_TRUE(same_bits(want, run_with_shared_prefix(shared_context(isa, threads), rows, prefix)));
                }
                for (const KvType type : {KvType::f16, KvType::int8, KvType::int4}) {
                    AttentionCase narrow = rows;
                    narrow.cache = {type, type};
                    EXPECT_TRUE(same_bits(run_with_shared_prefix(shared_context(isa), narrow, prefix),
                                          run_with_shared_prefix(shared_context(isa, 5), narrow, prefix)))
                        << to_string(type);
                }
            }
        }
    }
}

}  // namespace
}  // namespace headlong::test
