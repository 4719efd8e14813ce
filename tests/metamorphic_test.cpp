// Relations between calls: a change of the arguments whose effect on the result is known without a reference. Where the
// arithmetic is the same the bits are, elsewhere the results lie within the bounds of each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/reference/tensor.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Longer than a span, unless an emulator would take long over it.
std::int64_t long_kv() { return emulated() ? 530 : 600; }

AttentionCase normal_case(Random& random, std::vector<std::int64_t> q_lens, std::vector<std::int64_t> kv_lens,
                          std::int64_t heads = 6, std::int64_t kv_heads = 2, std::int64_t head_dim = 15,
                          std::int64_t value_dim = 9) {
    AttentionCase c;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.head_dim = head_dim;
    c.value_dim = value_dim;
    c.q_lens = std::move(q_lens);
    c.kv_lens = std::move(kv_lens);
    fill_normal(c, random);
    return c;
}

/// A case and what to call it.
struct Named {
    std::string name;
    std::function<void(AttentionCase&, Random&)> apply;
};

/// Random booleans, or normal numbers and -infinity, over [heads, q, kv] of a case.
void random_mask(AttentionCase& c, Element element, Random& random, double dead = 0.3) {
    std::vector<double> values(static_cast<std::size_t>(c.heads * c.longest_q() * c.longest_kv()));
    for (double& x : values) {
        const bool allowed = !random.chance(dead);
        x = element == Element::boolean ? (allowed ? 1.0 : 0.0) : allowed ? random.normal() : -kInfinity;
    }
    set_mask(c, element, {c.heads, c.longest_q(), c.longest_kv()}, values);
}

/// Features one at a time and together.
std::vector<Named> features() {
    const auto causal = [](AttentionCase& c, Random&) { c.causal = true; };
    const auto window = [](AttentionCase& c, Random&) {
        c.features.window_left = 20;
        c.features.window_right = 7;
    };
    const auto softcap = [](AttentionCase& c, Random&) { c.features.softcap = 2.0F; };
    const auto alibi = [](AttentionCase& c, Random&) { c.alibi_slopes = alibi_slopes_for(c.heads); };
    const auto sinks = [](AttentionCase& c, Random& random) {
        for (std::int64_t h = 0; h < c.heads; ++h) c.sink_logits.push_back(random.normal_f32());
    };
    const auto lengths = [](AttentionCase& c, Random& random) {
        for (const std::int64_t kv : c.kv_lens) c.live.push_back(random.integer(kv / 2, kv));
    };
    const auto mask = [](AttentionCase& c, Random& random) { random_mask(c, Element::boolean, random); };
    const auto bias = [](AttentionCase& c, Random& random) { random_mask(c, Element::f16, random); };
    return {{"plain", [](AttentionCase&, Random&) {}},
            {"causal", causal},
            {"window", window},
            {"softcap", softcap},
            {"ALiBi", alibi},
            {"sinks", sinks},
            {"lengths", lengths},
            {"mask", mask},
            {"bias", bias},
            {"all with a boolean mask",
             [=](AttentionCase& c, Random& r) {
                 for (const auto& feature : {+causal, +window, +softcap, +alibi, +sinks, +lengths, +mask})
                     feature(c, r);
             }},
            {"all with a bias", [=](AttentionCase& c, Random& r) {
                 for (const auto& feature : {+causal, +window, +softcap, +alibi, +sinks, +lengths, +bias})
                     feature(c, r);
             }}};
}

/// Dense float copies of keys and values of a case of one sequence, token t becoming from[t]'s.
void take_keys(AttentionCase& c, const std::vector<std::int64_t>& from) {
    for (InputTensor<4>* view : {&c.key, &c.value}) {
        const reference::Tensor wide = reference::widen(*view);
        const AnyTensor<4>& tensor =
            keep(c, AnyTensor<4>(Element::f32,
                                 {1, view->extents[1], static_cast<std::int64_t>(from.size()), view->extents[3]}));
        for_each_index<4>(tensor.extents(), [&](const Extents<4>& i) {
            tensor.set(i, wide.at(0, i[1], from[static_cast<std::size_t>(i[2])], i[3]));
        });
        *view = tensor.input();
    }
    c.kv_lens = {static_cast<std::int64_t>(from.size())};
}

TEST(MetamorphicTest, TheOrderOfKeysDoesNotMatter) {
    Random random(seed_or(401));
    HEADLONG_TRACE_SEED(random);
    for (const std::int64_t kv : {std::int64_t{17}, std::int64_t{130}, long_kv()}) {
        AttentionCase c = normal_case(random, {5}, {kv});
        c.features.softcap = 3.0F;
        c.sink_logits.assign(6, 0.5F);
        std::vector<double> bias(static_cast<std::size_t>(5 * kv));
        for (double& x : bias) x = random.chance(0.3) ? -kInfinity : random.normal();
        set_mask(c, Element::f32, {5, kv}, bias);
        std::vector<std::int64_t> order(static_cast<std::size_t>(kv));
        std::iota(order.begin(), order.end(), 0);
        random.shuffle(order);
        AttentionCase permuted = c;
        take_keys(permuted, order);
        std::vector<double> moved(bias.size());
        for (std::size_t i = 0; i < bias.size(); ++i) {
            const std::size_t row = i / order.size() * order.size();
            moved[i] = bias[row + static_cast<std::size_t>(order[i % order.size()])];
        }
        set_mask(permuted, Element::f32, {5, kv}, moved);
        const Expected bounds = expected(c);
        HEADLONG_FOR_EACH_ISA(isa) {
            if (left_to_native_tests(isa)) continue;
            Context& context = shared_context(isa);
            for (const Route route : possible_routes(c)) {
                EXPECT_TRUE(close(c, run(context, permuted, route), run(context, c, route), bounds))
                    << to_string(route);
            }
        }
    }
}

TEST(MetamorphicTest, PartsMergeToTheWhole) {
    Random random(seed_or(402));
    HEADLONG_TRACE_SEED(random);
    for (const Named& feature : features()) {
        SCOPED_TRACE(feature.name);
        AttentionCase c = normal_case(random, {7}, {long_kv()});
        feature.apply(c, random);
        const Expected want = expected(c);
        for (std::size_t parts = 2; parts <= 5; ++parts) {
            std::vector<std::int64_t> cuts(parts - 1);
            for (std::int64_t& cut : cuts) cut = random.integer(0, c.kv_lens[0]);
            if (random.chance(0.5)) cuts.back() = random.chance(0.5) ? c.kv_lens[0] : cuts.front();  // an empty part
            std::sort(cuts.begin(), cuts.end());
            const auto sink = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(parts) - 1));
            HEADLONG_FOR_EACH_ISA(isa) {
                if (left_to_native_tests(isa)) continue;
                Context& context = shared_context(isa, 2);
                EXPECT_TRUE(close(c, run_merged(context, c, cuts, sink), run(context, c, Route::plain), want))
                    << parts << " parts";
            }
        }
    }
}

TEST(MetamorphicTest, MergingInPlaceAndOneByOne) {
    Random random(seed_or(403));
    HEADLONG_TRACE_SEED(random);
    constexpr std::int64_t kParts = 4;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 2);
        std::vector<AnyTensor<4>> outputs;
        std::vector<AnyTensor<3>> logs;
        std::vector<AttentionPart> parts;
        for (std::int64_t i = 0; i < kParts; ++i) {
            outputs.push_back(AnyTensor<4>::random(Element::f32, {2, 3, 5, 7}, random));
            logs.push_back(AnyTensor<3>::random(Element::f32, {2, 3, 5}, random));
            outputs.back().fill_normal(random);
            logs.back().fill_normal(random, 3.0);
            logs.back().set({1, 2, i}, -kInfinity);
            for (std::int64_t d = 0; d < 7; ++d) outputs.back().set({1, 2, i, d}, 0.0);
            parts.push_back({outputs.back().input(), logs.back().input()});
        }
        const AnyTensor<4> output(Element::f32, {2, 3, 5, 7});
        const AnyTensor<3> lse(Element::f32, {2, 3, 5});
        merge(context, parts, output.output(), lse.output());
        // against the reference
        reference::State want{reference::widen(parts[0].output), reference::widen(parts[0].lse)};
        for (std::size_t i = 1; i < parts.size(); ++i) {
            want = reference::merge(want, {reference::widen(parts[i].output), reference::widen(parts[i].lse)});
        }
        std::size_t flat = 0;
        for_each_index<4>(output.extents(),
                          [&](const Extents<4>& i) { EXPECT_NEAR(output.get(i), want.output.values[flat++], 1e-6); });
        flat = 0;
        for_each_index<3>(lse.extents(),
                          [&](const Extents<3>& i) { EXPECT_NEAR(lse.get(i), want.lse.values[flat++], 2e-6); });
        // the lse is optional; the others do not depend on it
        const AnyTensor<4> without(Element::f32, {2, 3, 5, 7});
        merge(context, parts, without.output());
        EXPECT_EQ(without.all_bits(), output.all_bits());
        // any of the parts may be the result
        for (std::size_t place = 0; place < parts.size(); ++place) {
            std::vector<AttentionPart> copies = parts;
            const AnyTensor<4> own(Element::f32, {2, 3, 5, 7});
            const AnyTensor<3> own_lse(Element::f32, {2, 3, 5});
            for_each_index<4>(own.extents(), [&](const Extents<4>& i) { own.set_bits(i, outputs[place].bits(i)); });
            for_each_index<3>(own_lse.extents(),
                              [&](const Extents<3>& i) { own_lse.set_bits(i, logs[place].bits(i)); });
            copies[place] = {own.input(), own_lse.input()};
            merge(context, copies, own.output(), own_lse.output());
            EXPECT_EQ(own.all_bits(), output.all_bits()) << place;
            EXPECT_EQ(own_lse.all_bits(), lse.all_bits()) << place;
        }
    }
}

TEST(MetamorphicTest, RepeatedKvHeadsAreGroups) {
    Random random(seed_or(404));
    HEADLONG_TRACE_SEED(random);
    for (const auto& [heads, kv_heads] : std::vector<std::pair<std::int64_t, std::int64_t>>{{6, 2}, {7, 1}, {9, 3}}) {
        for (const Named& feature : features()) {
            SCOPED_TRACE(feature.name);
            AttentionCase c = normal_case(random, {3}, {70}, heads, kv_heads);
            feature.apply(c, random);
            AttentionCase repeated = c;
            repeated.kv_heads = heads;
            for (InputTensor<4>* view : {&repeated.key, &repeated.value}) {
                const reference::Tensor wide = reference::widen(*view);
                const AnyTensor<4>& tensor =
                    keep(repeated, AnyTensor<4>(Element::f32, {1, heads, view->extents[2], view->extents[3]}));
                const std::int64_t group = heads / kv_heads;
                for_each_index<4>(tensor.extents(),
                                  [&](const Extents<4>& i) { tensor.set(i, wide.at(0, i[1] / group, i[2], i[3])); });
                *view = tensor.input();
            }
            HEADLONG_FOR_EACH_ISA(isa) {
                if (left_to_native_tests(isa)) continue;
                Context& context = shared_context(isa);
                for (const Route route : possible_routes(c)) {
                    EXPECT_TRUE(same_bits(run(context, c, route), run(context, repeated, route))) << to_string(route);
                }
            }
        }
    }
}

TEST(MetamorphicTest, AConstantBiasMovesOnlyTheLse) {
    Random random(seed_or(405));
    HEADLONG_TRACE_SEED(random);
    AttentionCase c = normal_case(random, {9}, {long_kv()});
    c.causal = true;
    c.features.softcap = 5.0F;
    for (const Element element : {Element::f32, Element::f16, Element::bf16}) {
        for (const double constant : {0.0, 3.5, -40.0}) {
            AttentionCase moved = c;
            set_mask(moved, element, {1}, {constant});
            const Expected want = expected(moved);
            HEADLONG_FOR_EACH_ISA(isa) {
                if (left_to_native_tests(isa)) continue;
                Context& context = shared_context(isa);
                Outcome before = run(context, c, Route::plain);
                for (std::uint32_t& bits : before.lse) {
                    bits = bits_of(Element::f32, value_of(Element::f32, bits) + constant);
                }
                EXPECT_TRUE(close(c, run(context, moved, Route::plain), before, want)) << constant;
            }
        }
    }
}

TEST(MetamorphicTest, WhatDeadKeysHoldDoesNotMatter) {
    Random random(seed_or(406));
    HEADLONG_TRACE_SEED(random);
    for (const Named& feature : features()) {
        SCOPED_TRACE(feature.name);
        for (const std::int64_t kv : {std::int64_t{40}, long_kv()}) {
            AttentionCase c = normal_case(random, {4, 2}, {kv, kv - 7});
            feature.apply(c, random);
            // a mask that is the same for all rows and heads leaves keys that nobody sees, among them a whole span
            if (c.mask) {
                std::vector<double> row(static_cast<std::size_t>(kv));
                const bool boolean = c.mask->type == AttentionMask::Type::boolean;
                for (std::int64_t j = 0; j < kv; ++j) {
                    const bool allowed = (kv < 512 || j >= 514) && !random.chance(0.5);
                    row[static_cast<std::size_t>(j)] = boolean ? (allowed ? 1.0 : 0.0) : allowed ? 0.25 : -kInfinity;
                }
                set_mask(c, boolean ? Element::boolean : Element::f32, {kv}, row);
            }
            std::vector<std::pair<Isa, std::vector<Outcome>>> clean;
            const auto all = [&](Isa isa) {
                Context& context = shared_context(isa, 2);
                std::vector<Outcome> outcomes;
                for (const Route route : possible_routes(c)) outcomes.push_back(run(context, c, route));
                if (can_run_in_chunks(c)) outcomes.push_back(run_in_chunks(context, c, 3));
                return outcomes;
            };
            HEADLONG_FOR_EACH_ISA(isa) { clean.emplace_back(isa, all(isa)); }
            poison_dead_keys(c, expected(c, reference::Scores::masked), random);
            for (const auto& [isa, outcomes] : clean) {
                const std::vector<Outcome> poisoned = all(isa);
                for (std::size_t i = 0; i < outcomes.size(); ++i) {
                    EXPECT_TRUE(same_bits(outcomes[i], poisoned[i])) << headlong::to_string(isa) << " " << i;
                }
            }
        }
    }
}

TEST(MetamorphicTest, ScalingIsLinearInValuesAndFreeInQueries) {
    Random random(seed_or(407));
    HEADLONG_TRACE_SEED(random);
    for (const Named& feature : features()) {
        SCOPED_TRACE(feature.name);
        AttentionCase c = normal_case(random, {5}, {130});
        feature.apply(c, random);
        c.features.scale = 0.3F;
        // factors of two are exact
        AttentionCase scaled = c;
        scaled.features.scale = 0.6F;
        const auto times = [&](InputTensor<4>& view, double factor) {
            reference::Tensor wide = reference::widen(view);
            for (double& x : wide.values) x *= factor;
            const AnyTensor<4>& tensor = keep(scaled, AnyTensor<4>(Element::f32, view.extents));
            tensor.assign(wide.values);
            view = tensor.input();
        };
        times(scaled.query, 0.5);
        times(scaled.value, 4.0);
        HEADLONG_FOR_EACH_ISA(isa) {
            if (left_to_native_tests(isa)) continue;
            Context& context = shared_context(isa);
            Outcome want = run(context, c, Route::cache);
            for (std::uint32_t& bits : want.output) bits = bits_of(Element::f32, 4.0 * value_of(Element::f32, bits));
            EXPECT_TRUE(same_bits(want, run(context, scaled, Route::cache)));
        }
    }
}

TEST(MetamorphicTest, ASharedPrefixIsOneContext) {
    Random random(seed_or(408));
    HEADLONG_TRACE_SEED(random);
    std::vector<std::int64_t> prefixes{0, 1, 16, 63, 65, 512, 520};
    if (emulated()) prefixes = {0, 65, 512};
    for (const std::int64_t prefix : prefixes) {
        for (const Named& feature : features()) {
            SCOPED_TRACE(feature.name + ", prefix " + std::to_string(prefix));
            AttentionCase c = normal_case(random, {3, 1, 4}, {prefix + 3, prefix + 30, prefix + 90});
            feature.apply(c, random);
            if (!c.live.empty()) {
                for (std::size_t s = 0; s < 3; ++s) {
                    c.live[s] = random.integer(prefix + c.q_lens[s], c.kv_lens[s]);
                }
            }
            // trees of the new tokens only: a mask of all keys is not for a shared prefix
            if (c.mask) {
                const Element element = c.mask->type == AttentionMask::Type::boolean ? Element::boolean : Element::f16;
                c.q_lens = {3, 3, 3};
                c.live.clear();
                AttentionCase square = c;
                square.kv_lens = c.q_lens;
                random_mask(square, element, random);
                c.mask = square.mask;
                c.mask->keys = AttentionMask::Keys::last_q;
                c.memory = square.memory;
            }
            // the prefix of all is the first one's
            const auto same = [&](const InputTensor<4>& view) {
                const reference::Tensor wide = reference::widen(view);
                const AnyTensor<4>& tensor = keep(c, AnyTensor<4>(Element::f32, view.extents));
                for_each_index<4>(view.extents, [&](const Extents<4>& i) {
                    tensor.set(i, wide.at(i[2] < prefix ? 0 : i[0], i[1], i[2], i[3]));
                });
                return tensor.input();
            };
            c.key = same(c.key);
            c.value = same(c.value);
            ASSERT_TRUE(can_share_prefix(c, prefix));
            const Expected want = expected(c);
            HEADLONG_FOR_EACH_ISA(isa) {
                if (left_to_native_tests(isa)) continue;
                Context& context = shared_context(isa, 2);
                const Outcome shared = run_with_shared_prefix(context, c, prefix);
                EXPECT_TRUE(agrees(c, shared, want));
                EXPECT_TRUE(close(c, shared, run(context, c, Route::cache), want));
                // neither threads nor the company matter
                EXPECT_TRUE(same_bits(shared, run_with_shared_prefix(shared_context(isa), c, prefix)));
                const AttentionCase alone = sequence_of(c, 0);
                EXPECT_TRUE(same_bits(sequence_of(c, shared, 0), run_with_shared_prefix(context, alone, prefix)));
            }
        }
    }
}

TEST(MetamorphicTest, ABatchIsItsSequences) {
    Random random(seed_or(409));
    HEADLONG_TRACE_SEED(random);
    for (const Named& feature : features()) {
        SCOPED_TRACE(feature.name);
        for (const bool ragged : {false, true}) {
            AttentionCase c = ragged ? normal_case(random, {9, 1, 30}, {130, 17, 64})
                                     : normal_case(random, {9, 9, 9}, {130, 130, 130});
            feature.apply(c, random);
            HEADLONG_FOR_EACH_ISA(isa) {
                if (left_to_native_tests(isa)) continue;
                Context& context = shared_context(isa, 2);
                for (const Route route : possible_routes(c)) {
                    const Outcome batch = run(context, c, route);
                    for (std::int64_t s = 0; s < 3; ++s) {
                        EXPECT_TRUE(same_bits(sequence_of(c, batch, s), run(context, sequence_of(c, s), route)))
                            << to_string(route) << ", sequence " << s;
                    }
                }
            }
        }
    }
}

/// Checks that two ways to say the same agree, through every route.
void expect_close(const AttentionCase& a, const AttentionCase& b) {
    const Expected want = expected(a);
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa);
        for (const Route route : possible_routes(a)) {
            EXPECT_TRUE(close(a, run(context, a, route), run(context, b, route), want)) << to_string(route);
        }
    }
}

TEST(MetamorphicTest, WindowsCausalityAndLengthsAreMasks) {
    Random random(seed_or(410));
    HEADLONG_TRACE_SEED(random);
    const std::int64_t kv = long_kv();
    constexpr std::int64_t kQ = 20;
    for (const Element element : {Element::boolean, Element::f32, Element::f16, Element::bf16}) {
        for (const std::int64_t offset : {std::int64_t{-3}, std::int64_t{0}, kv / 2, kv - kQ}) {
            AttentionCase c = normal_case(random, {kQ}, {kv}, 2, 1);
            c.features.alignment = Alignment::offset;
            c.features.causal_offset = offset;
            const auto as_mask = [&](const std::function<bool(std::int64_t, std::int64_t)>& allowed) {
                std::vector<double> values;
                for (std::int64_t i = 0; i < kQ; ++i) {
                    for (std::int64_t j = 0; j < kv; ++j) {
                        const bool yes = allowed(i + offset, j);
                        values.push_back(element == Element::boolean ? (yes ? 1.0 : 0.0) : yes ? 0.0 : -kInfinity);
                    }
                }
                AttentionCase masked = c;
                set_mask(masked, element, {kQ, kv}, values);
                return masked;
            };
            AttentionCase causal = c;
            causal.causal = true;
            expect_close(causal, as_mask([](std::int64_t p, std::int64_t j) { return j <= p; }));
            AttentionCase window = c;
            window.features.window_left = 30;
            window.features.window_right = 5;
            expect_close(window, as_mask([](std::int64_t p, std::int64_t j) { return p - 30 <= j && j <= p + 5; }));
            AttentionCase length = c;
            length.live = {kv - 40};
            expect_close(length, as_mask([&](std::int64_t, std::int64_t j) { return j < kv - 40; }));
        }
    }
}

TEST(MetamorphicTest, AlibiIsABiasAndASinkIsAKey) {
    Random random(seed_or(411));
    HEADLONG_TRACE_SEED(random);
    const std::int64_t kv = 130;
    constexpr std::int64_t kQ = 9;
    const AttentionCase c = normal_case(random, {kQ}, {kv});
    AttentionCase alibi = c;
    alibi.causal = true;
    alibi.features.softcap = 4.0F;
    AttentionCase biased = alibi;
    alibi.alibi_slopes = alibi_slopes_for(6);
    std::vector<double> bias;
    for (const float slope : alibi.alibi_slopes) {
        for (std::int64_t i = 0; i < kQ; ++i) {
            for (std::int64_t j = 0; j < kv; ++j) {
                bias.push_back(-static_cast<double>(slope) * static_cast<double>(std::abs(i + kv - kQ - j)));
            }
        }
    }
    set_mask(biased, Element::f32, {6, kQ, kv}, bias);
    expect_close(alibi, biased);

    // one more key of score 0 with the sink's logit as its bias and a value of 0
    AttentionCase sinks = c;
    AttentionCase longer = c;
    std::vector<std::int64_t> order(static_cast<std::size_t>(kv + 1));
    std::iota(order.begin(), order.end(), 0);
    order.back() = 0;
    take_keys(longer, order);
    const auto clear_last = [&](InputTensor<4>& view) {
        reference::Tensor wide = reference::widen(view);
        for (std::int64_t h = 0; h < view.extents[1]; ++h) {
            for (std::int64_t d = 0; d < view.extents[3]; ++d) wide.at(0, h, kv, d) = 0.0;
        }
        const AnyTensor<4>& tensor = keep(longer, AnyTensor<4>(Element::f32, view.extents));
        tensor.assign(wide.values);
        view = tensor.input();
    };
    clear_last(longer.key);
    clear_last(longer.value);
    bias.assign(static_cast<std::size_t>(6 * (kv + 1)), 0.0);
    for (std::size_t h = 0; h < 6; ++h) {
        sinks.sink_logits.push_back(random.normal_f32());
        bias[(h + 1) * static_cast<std::size_t>(kv + 1) - 1] = static_cast<double>(sinks.sink_logits.back());
    }
    set_mask(longer, Element::f32, {6, 1, kv + 1}, bias);
    expect_close(sinks, longer);
}

TEST(MetamorphicTest, AChainIsCausalAndATreeIsItsBranches) {
    Random random(seed_or(412));
    HEADLONG_TRACE_SEED(random);
    // parents of the nodes of a tree that hangs at the past's last token
    const std::vector<std::int64_t> parents{-1, 0, 0, 1, 1, 2, -1, 6, 3};
    const auto q = static_cast<std::int64_t>(parents.size());
    for (const std::int64_t past : {std::int64_t{0}, std::int64_t{5}, std::int64_t{60}, std::int64_t{508}}) {
        AttentionCase c = normal_case(random, {q}, {past + q});
        c.features.softcap = 4.0F;
        c.sink_logits.assign(6, -0.5F);
        for (const Element element : {Element::boolean, Element::f32, Element::bf16}) {
            const auto mask_of = [&](const std::function<std::int64_t(std::int64_t)>& parent) {
                const double no = element == Element::boolean ? 0.0 : -kInfinity;
                std::vector<double> values(static_cast<std::size_t>(q * q), no);
                for (std::int64_t i = 0; i < q; ++i) {
                    for (std::int64_t j = i; j >= 0; j = parent(j)) {
                        values[static_cast<std::size_t>(i * q + j)] = element == Element::boolean ? 1.0 : 0.0;
                    }
                }
                AttentionCase masked = c;
                set_mask(masked, element, {q, q}, values, AttentionMask::Keys::last_q);
                return masked;
            };
            AttentionCase causal = c;
            causal.causal = true;
            expect_close(causal, mask_of([](std::int64_t node) { return node - 1; }));

            const AttentionCase tree =
                mask_of([&](std::int64_t node) { return parents[static_cast<std::size_t>(node)]; });
            for (std::int64_t node = 0; node < q; ++node) {
                std::vector<std::int64_t> keys(static_cast<std::size_t>(past));
                std::iota(keys.begin(), keys.end(), 0);
                std::vector<std::int64_t> path;
                for (std::int64_t n = node; n >= 0; n = parents[static_cast<std::size_t>(n)]) path.push_back(past + n);
                keys.insert(keys.end(), path.rbegin(), path.rend());
                AttentionCase branch = rows_of(c, node, 1);
                branch.features.alignment = Alignment::bottom_right;
                branch.features.causal_offset = 0;
                branch.causal = true;
                take_keys(branch, keys);
                HEADLONG_FOR_EACH_ISA(isa) {
                    if (left_to_native_tests(isa)) continue;
                    Context& context = shared_context(isa);
                    for (const Route route : possible_routes(tree)) {
                        const Outcome alone = run(context, branch, route);
                        const Outcome row = rows_of(tree, run(context, tree, route), node, 1);
                        EXPECT_TRUE(close(branch, row, alone, expected(branch))) << "node " << node;
                    }
                }
            }
        }
    }
}

}  // namespace
}  // namespace headlong::test
