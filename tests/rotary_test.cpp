// Rotary embedding: frequencies against numbers from the papers' formulas, rows against the oracle, the same bits
// however a call is cut, caches that rotate, and refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/reference/rotary.hpp"
#include "kernels/half.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/counting_resource.hpp"
#include "tests/support/floating_point.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/operator_new.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"

namespace headlong::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kLast = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kFirst = std::numeric_limits<std::int64_t>::min();

constexpr RotaryPairing kPairings[] = {RotaryPairing::halves, RotaryPairing::interleaved};

RotaryOptions options_of(std::int64_t head_dim, RotaryScaling scaling = RotaryScaling::none) {
    RotaryOptions options;
    options.head_dim = head_dim;
    options.scaling = scaling;
    return options;
}

/// One of each scaling that these dims allow, as models have them.
std::vector<RotaryOptions> every_scaling(std::int64_t head_dim, std::int64_t rotary_dim) {
    RotaryOptions plain = options_of(head_dim);
    plain.rotary_dim = rotary_dim;
    plain.theta = 500000.0;
    std::vector<RotaryOptions> all{plain};
    const auto add = [&](RotaryScaling scaling, double factor, std::int64_t context) {
        RotaryOptions& options = all.emplace_back(plain);
        options.scaling = scaling;
        options.factor = factor;
        options.original_context = context;
        return &options;
    };
    add(RotaryScaling::linear, 4.0, 0);
    if (rotary_dim >= 4) add(RotaryScaling::ntk, 8.0, 0);
    add(RotaryScaling::llama3, 8.0, 8192);
    add(RotaryScaling::yarn, 4.0, 32768);
    RotaryOptions* yarn = add(RotaryScaling::yarn, 40.0, 4096);
    yarn->truncate = false;
    yarn->beta_fast = 16.0;
    yarn->attention_factor = 0.75;
    RotaryOptions* longrope = add(RotaryScaling::longrope, 32.0, 4096);
    for (std::int64_t i = 0; i < rotary_dim / 2; ++i) {
        longrope->pair_factors.push_back(1.0 + 0.37 * static_cast<double>(i));
    }
    return all;
}

/// Positions of n rows: those that matter, then more of them.
std::vector<std::int64_t> positions_of(std::int64_t n) {
    std::vector<std::int64_t> positions{0, 1, 1'000'000, -3, 4096, 17, -1'000'000};
    while (static_cast<std::int64_t>(positions.size()) < n)
        positions.push_back(static_cast<std::int64_t>(positions.size()) * 113);
    positions.resize(static_cast<std::size_t>(n));
    return positions;
}

/// Dense rows, rotated into new memory.
std::vector<float> rotated(Context& context, const Rotary& rotary, const std::vector<float>& rows, std::int64_t heads,
                           const std::vector<std::int64_t>& positions) {
    const Extents<3> extents{heads, static_cast<std::int64_t>(positions.size()), rotary.head_dim()};
    std::vector<float> out(rows.size(), kCanary);
    rotate(context, rotary, InputTensor<3>::dense(rows.data(), extents), positions,
           OutputTensor<3>::dense(out.data(), extents));
    return out;
}

std::vector<float> normal_floats(std::int64_t count, Random& random) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& x : values) x = random.normal_f32();
    return values;
}

// -------------------------------------------------------------------------------------------------- descriptions

TEST(RotaryTest, FrequenciesAreThoseOfTheFormulas) {
    const auto expect = [](const RotaryOptions& options, const std::vector<std::pair<std::size_t, double>>& pairs) {
        const Rotary rotary(options);
        for (const auto& [pair, want] : pairs) {
            EXPECT_NEAR(rotary.inverse_frequencies()[pair] / want, 1.0, 1e-9) << "pair " << pair;
        }
        return rotary.attention_factor();
    };
    // 10000^(-2i/8) = 10^-i
    EXPECT_EQ(expect(options_of(8), {{0, 1.0}, {1, 0.1}, {2, 0.01}, {3, 0.001}}), 1.0);
    RotaryOptions partial = options_of(80);
    partial.rotary_dim = 8;
    expect(partial, {{0, 1.0}, {1, 0.1}, {2, 0.01}, {3, 0.001}});
    EXPECT_EQ(Rotary(partial).rotary_dim(), 8);
    EXPECT_EQ(Rotary(partial).head_dim(), 80);

    RotaryOptions options = options_of(8, RotaryScaling::linear);
    options.factor = 4.0;
    EXPECT_EQ(expect(options, {{0, 0.25}, {1, 0.025}, {2, 0.0025}, {3, 0.00025}}), 1.0);

    // 10000 * 8^(8/6) = 160000, whose fourth root is 20: the slowest pair turns 8 times slower, the fastest as before
    options = options_of(8, RotaryScaling::ntk);
    options.factor = 8.0;
    EXPECT_EQ(expect(options, {{0, 1.0}, {1, 0.05}, {2, 0.0025}, {3, 0.000125}}), 1.0);

    // SEMANTICS 1, Llama 3.1
    options = options_of(128, RotaryScaling::llama3);
    options.theta = 5e5;
    options.factor = 8.0;
    options.original_context = 8192;
    EXPECT_EQ(expect(options, {{0, 1.0},
                               {28, 3.211445994752591e-3},
                               {29, 2.166570763503359e-3},
                               {30, 1.371893567761138e-3},
                               {32, 5.248461609929547e-4},
                               {35, 9.556212353964683e-5},
                               {36, 7.784655273932450e-5},
                               {63, 3.068925988914511e-7}}),
              1.0);

    // Qwen2.5's: the ramp runs from pair 23 (23.596 turns 32 times) to pair 40 (39.651 turns once)
    options = options_of(128, RotaryScaling::yarn);
    options.theta = 1e6;
    options.factor = 4.0;
    options.original_context = 32768;
    EXPECT_NEAR(expect(options, {{0, 1.0},
                                 {23, 6.978305848598663e-3},
                                 {24, 5.375321490790102e-3},
                                 {31, 8.029597275452303e-4},
                                 {39, 6.490394320837029e-5},
                                 {40, 4.445698525097307e-5},
                                 {63, 3.102344401879299e-7}}),
                1.138629436111989, 1e-14);
    options.truncate = false;
    expect(options, {{23, 6.978305848598663e-3},
                     {24, 5.517270475134122e-3},
                     {31, 8.117253745814111e-4},
                     {39, 6.187806812450694e-5},
                     {40, 4.445698525097307e-5}});
    options.attention_factor = 0.707;
    EXPECT_EQ(Rotary(options).attention_factor(), 0.707);
    options.attention_factor.reset();
    options.factor = 1.0;
    EXPECT_EQ(Rotary(options).attention_factor(), 1.0);

    // 1e6^(-2i/6) = 100^-i; sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5/12)
    options = options_of(6, RotaryScaling::longrope);
    options.theta = 1e6;
    options.pair_factors = {1.0, 2.0, 4.0};
    options.original_context = 4096;
    EXPECT_EQ(expect(options, {{0, 1.0}, {1, 0.005}, {2, 0.000025}}), 1.0) << "no factor is given";
    options.factor = 32.0;
    EXPECT_NEAR(Rotary(options).attention_factor(), 1.190238071423808, 1e-14);
    options.factor = 0.5;
    EXPECT_EQ(Rotary(options).attention_factor(), 1.0);
    options.attention_factor = 1.25;
    EXPECT_EQ(Rotary(options).attention_factor(), 1.25);
}

TEST(RotaryTest, FrequenciesMatchTheOracle) {
    for (const std::int64_t dim : {2, 4, 6, 64, 80, 128, 256}) {
        for (std::int64_t rotary_dim = 2; rotary_dim <= dim; rotary_dim = rotary_dim < 6 ? rotary_dim + 2 : dim) {
            for (const RotaryOptions& options : every_scaling(dim, rotary_dim)) {
                SCOPED_TRACE("dim " + std::to_string(dim) + ", rotary_dim " + std::to_string(rotary_dim) +
                             ", scaling " + std::to_string(static_cast<int>(options.scaling)));
                const Rotary rotary(options);
                const std::vector<double> want = reference::rotary_frequencies(options);
                ASSERT_EQ(rotary.inverse_frequencies().size(), want.size());
                for (std::size_t i = 0; i < want.size(); ++i) {
                    ASSERT_NEAR(rotary.inverse_frequencies()[i] / want[i], 1.0, 1e-13) << i;
                }
                EXPECT_NEAR(rotary.attention_factor(), reference::rotary_attention_factor(options), 1e-14);
                EXPECT_EQ(rotary, Rotary(options));
                if (rotary_dim == dim) break;
            }
            if (rotary_dim == dim) break;
        }
    }
    RotaryOptions other = options_of(64);
    other.pairing = RotaryPairing::interleaved;
    EXPECT_NE(Rotary(options_of(64)), Rotary(other));
}

// YaRN where no pair turns as often as beta_slow asks, or all turn more often than beta_fast: the clamped ramp of
// transformers, whatever one thinks of it.
TEST(RotaryTest, YarnsClampedRampsMatchTheOracle) {
    for (const std::int64_t context : {std::int64_t{1}, std::int64_t{4}, std::int64_t{40}, std::int64_t{1} << 50}) {
        for (const bool truncate : {true, false}) {
            RotaryOptions options = options_of(32, RotaryScaling::yarn);
            options.factor = 4.0;
            options.original_context = context;
            options.truncate = truncate;
            const Rotary rotary(options);
            const std::vector<double> want = reference::rotary_frequencies(options);
            for (std::size_t i = 0; i < want.size(); ++i) {
                ASSERT_NEAR(rotary.inverse_frequencies()[i] / want[i], 1.0, 1e-12) << context << ", pair " << i;
            }
        }
    }
}

TEST(RotaryTest, TablesAreRoundedOnce) {
    for (const RotaryOptions& options : every_scaling(64, 64)) {
        const Rotary rotary(options);
        std::vector<float> cosine(32), sine(32);
        for (const std::int64_t position : {std::int64_t{0}, std::int64_t{1}, std::int64_t{-1}, std::int64_t{1'000'000},
                                            std::int64_t{1} << 40, kLast, kFirst}) {
            rotary.tabulate(position, cosine.data(), sine.data());
            for (std::size_t i = 0; i < 32; ++i) {
                const double angle = static_cast<double>(position) * rotary.inverse_frequencies()[i];
                const double factor = rotary.attention_factor();
                ASSERT_EQ(cosine[i], static_cast<float>(std::cos(angle) * factor));
                ASSERT_EQ(sine[i], static_cast<float>(std::sin(angle) * factor));
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- rows

TEST(RotaryTest, TinyCase) {
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa);
        const std::vector<float> row{1, 2, 3, 4};
        RotaryOptions options = options_of(4);
        const auto expect = [&](const std::vector<double>& want) {
            const std::vector<float> got = rotated(*context, Rotary(options), row, 1, {1});
            for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(got[i], want[i], 1e-6) << i;
        };
        expect({-1.984111, 1.959901, 2.462378, 4.0198});
        options.pairing = RotaryPairing::interleaved;
        expect({-1.14264, 1.922076, 2.959851, 4.0298});
        options.rotary_dim = 2;
        expect({-1.14264, 1.922076, 3, 4});
    }
}

TEST(RotaryTest, RowsMatchTheOracle) {
    Random random(seed_or(71));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa, 2);
        for (const std::int64_t dim : {2, 3, 6, 10, 15, 34, 64, 80, 128, 130}) {
            const std::int64_t even = dim / 2 * 2;
            for (const std::int64_t rotary_dim : {std::int64_t{2}, (even + 2) / 4 * 2, even}) {
                for (RotaryOptions options : every_scaling(dim, rotary_dim)) {
                    for (const RotaryPairing pairing : kPairings) {
                        options.pairing = pairing;
                        const std::int64_t heads = random.integer(1, 40);
                        const std::int64_t n = random.integer(1, 9);
                        const std::vector<std::int64_t> positions = positions_of(n);
                        const auto rows = GuardedTensor<3>::random({heads, n, dim}, random, 2);
                        const auto out = GuardedTensor<3>::random({heads, n, dim}, random);
                        rows.fill_normal(random);
                        SCOPED_TRACE("rows " + rows.describe() + ", out " + out.describe() + ", rotary_dim " +
                                     std::to_string(rotary_dim) + ", scaling " +
                                     std::to_string(static_cast<int>(options.scaling)) + ", pairing " +
                                     std::to_string(static_cast<int>(pairing)));
                        const Rotary rotary(options);
                        rotate(*context, rotary, rows.input(), positions, out.output());
                        EXPECT_TRUE(out.written_exactly());
                        // two products and their sum, of factors that are rounded
                        const double bound = 4 * 0x1p-24 * 12.0 * std::max(1.0, rotary.attention_factor());
                        ASSERT_TRUE(within(out.dense(), reference::rotate(options, rows.widened(), positions), bound));
                        for (std::int64_t h = 0; h < heads; ++h) {
                            for (std::int64_t d = rotary_dim; d < dim; ++d) {
                                ASSERT_TRUE(same_bits(out.at({h, n - 1, d}), rows.at({h, n - 1, d})));
                            }
                        }
                    }
                }
            }
        }
    }
}

TEST(RotaryTest, TheWayBackIsTheNegativePosition) {
    Random random(72);
    Context context;
    for (const RotaryPairing pairing : kPairings) {
        RotaryOptions options = options_of(64);
        options.pairing = pairing;
        const Rotary rotary(options);
        const std::vector<float> rows = normal_floats(3 * 5 * 64, random);
        const std::vector<float> there = rotated(context, rotary, rows, 3, {7, 100, 1'000'000, -9, 12345});
        const std::vector<float> back = rotated(context, rotary, there, 3, {-7, -100, -1'000'000, 9, -12345});
        double turned = 0.0;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            ASSERT_NEAR(back[i], rows[i], 4e-6);
            turned = std::max(turned, std::abs(static_cast<double>(there[i]) - static_cast<double>(rows[i])));
        }
        EXPECT_GT(turned, 1.0);
    }
}

/// Places of 16-bit elements that read the same as a tensor of float; the strides are its strides.
template <class Narrow>
std::vector<std::uint16_t> narrowed(const std::vector<float>& values, const Narrow& narrow) {
    std::vector<std::uint16_t> bits;
    for (const float x : values) bits.push_back(narrow(x));
    return bits;
}

TEST(RotaryTest, HalvesOfFloatsAreWidenedAndRoundedOnce) {
    Random random(73);
    const auto narrow = [](DType type, float x) {
        return type == DType::f16 ? kernels::narrow_f16(x) : kernels::narrow_bf16(x);
    };
    const auto widen = [](DType type, std::uint16_t x) {
        return static_cast<float>(type == DType::f16 ? reference::widen_f16(x) : reference::widen_bf16(x));
    };
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa, 2);
        for (const std::int64_t dim : {2, 6, 23, 80, 128}) {
            for (const RotaryPairing pairing : kPairings) {
                RotaryOptions options = options_of(dim);
                options.rotary_dim = dim / 2 * 2;
                options.pairing = pairing;
                const Rotary rotary(options);
                for (const std::int64_t heads : {3, 70}) {
                    const std::vector<std::int64_t> positions = positions_of(8);
                    const Extents<3> extents{heads, 8, dim};
                    const std::vector<float> values = normal_floats(heads * 8 * dim, random);
                    for (const DType from : {DType::f16, DType::bf16}) {
                        const auto bits = narrowed(values, [&](float x) { return narrow(from, x); });
                        std::vector<float> wide;
                        for (const std::uint16_t x : bits) wide.push_back(widen(from, x));
                        const std::vector<float> want = rotated(*context, rotary, wide, heads, positions);
                        std::vector<float> out(want.size(), kCanary);
                        rotate(*context, rotary, InputTensor<3>::dense(bits.data(), from, extents), positions,
                               OutputTensor<3>::dense(out.data(), extents));
                        EXPECT_TRUE(same_bits(out, want));
                        for (const DType to : {DType::f16, DType::bf16}) {
                            std::vector<std::uint16_t> short_out(want.size() + 1, 0xABCD);
                            rotate(*context, rotary, InputTensor<3>::dense(bits.data(), from, extents), positions,
                                   OutputTensor<3>::dense(short_out.data(), to, extents));
                            for (std::size_t i = 0; i < want.size(); ++i) {
                                ASSERT_EQ(short_out[i], narrow(to, want[i])) << i;
                            }
                            EXPECT_EQ(short_out.back(), 0xABCD);
                        }
                        // in place, reversed: the last row first
                        std::vector<std::uint16_t> place = bits;
                        const std::int64_t last = (heads * 8 - 1) * dim;
                        const Extents<3> back{-8 * dim, -dim, 1};
                        rotate(*context, rotary, {place.data() + last, from, extents, back}, positions,
                               {place.data() + last, from, extents, back});
                        std::vector<float> reversed_rows;  // of what is read in this order
                        for (std::int64_t row = heads * 8 - 1; row >= 0; --row) {
                            reversed_rows.insert(reversed_rows.end(), wide.begin() + row * dim,
                                                 wide.begin() + (row + 1) * dim);
                        }
                        const std::vector<float> turned = rotated(*context, rotary, reversed_rows, heads, positions);
                        for (std::int64_t row = 0; row < heads * 8; ++row) {
                            for (std::int64_t d = 0; d < dim; ++d) {
                                const auto i = static_cast<std::size_t>((heads * 8 - 1 - row) * dim + d);
                                ASSERT_EQ(place[i], narrow(from, turned[static_cast<std::size_t>(row * dim + d)]));
                            }
                        }
                    }
                }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------- same bits

TEST(RotaryTest, ARowsBitsDependOnNothingElse) {
    Random random(seed_or(74));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const RotaryPairing pairing : kPairings) {
            for (const std::int64_t dim : {6, 80, 128}) {
                RotaryOptions options = every_scaling(dim, dim)[4];
                options.rotary_dim = dim == 80 ? 32 : dim;
                options.pairing = pairing;
                const Rotary rotary(options);
                constexpr std::int64_t kHeads = 35;
                constexpr std::int64_t kRows = 33;
                constexpr std::int64_t kStart = 4090;
                std::vector<std::int64_t> positions;
                for (std::int64_t i = 0; i < kRows; ++i) positions.push_back(kStart + i);
                const std::vector<float> rows = normal_floats(kHeads * kRows * dim, random);
                const auto serial = make_context(isa, 1);
                const std::vector<float> whole = rotated(*serial, rotary, rows, kHeads, positions);
                const Extents<3> extents{kHeads, kRows, dim};
                const Extents<3> dense = dense_strides<3>(extents);
                for (const std::size_t threads : {1U, 2U, 5U}) {
                    const auto context = make_context(isa, threads);
                    EXPECT_TRUE(same_bits(rotated(*context, rotary, rows, kHeads, positions), whole));
                    // counted positions
                    std::vector<float> out(rows.size(), kCanary);
                    rotate(*context, rotary, {rows.data(), DType::f32, extents, dense}, kStart,
                           {out.data(), DType::f32, extents, dense});
                    EXPECT_TRUE(same_bits(out, whole));
                    // in place
                    out = rows;
                    rotate(*context, rotary, {out.data(), DType::f32, extents, dense}, kStart,
                           {out.data(), DType::f32, extents, dense});
                    EXPECT_TRUE(same_bits(out, whole));
                    // one row, one head at a time, and in the other order
                    std::fill(out.begin(), out.end(), kCanary);
                    for (std::int64_t i = kRows; i-- > 0;) {
                        for (std::int64_t h = kHeads; h-- > 0;) {
                            const std::int64_t place = (h * kRows + i) * dim;
                            rotate(*context, rotary, {rows.data() + place, DType::f32, {1, 1, dim}, dense}, kStart + i,
                                   {out.data() + place, DType::f32, {1, 1, dim}, dense});
                        }
                    }
                    EXPECT_TRUE(same_bits(out, whole));
                    // any strides
                    const auto source = GuardedTensor<3>::random(extents, random);
                    const auto target = GuardedTensor<3>::random(extents, random);
                    source.assign(rows);
                    rotate(*context, rotary, source.input(), positions, target.output());
                    EXPECT_TRUE(target.written_exactly());
                    EXPECT_TRUE(same_bits(target.dense(), whole)) << source.describe() << "; " << target.describe();
                    rotate(*context, rotary, source.input(), positions, source.output());
                    EXPECT_TRUE(same_bits(source.dense(), whole)) << source.describe();
                }
            }
        }
    }
}

TEST(RotaryTest, TheCallersFloatModeDoesNotMatter) {
    Random random(75);
    const RotaryOptions options = every_scaling(64, 64)[4];
    const std::vector<float> rows = normal_floats(7 * 64, random);
    std::vector<float> small = rows;
    for (float& x : small) x *= 0x1p-128F;  // denormal
    const std::vector<std::int64_t> positions = positions_of(7);
    Context context;
    const Rotary rotary(options);
    const std::vector<float> want = rotated(context, rotary, rows, 1, positions);
    const std::vector<float> want_small = rotated(context, rotary, small, 1, positions);
    std::vector<float> cosine(64), cosine_wanted(64);
    rotary.tabulate(12345, cosine_wanted.data(), cosine_wanted.data() + 32);
    std::vector<float> got;
    std::vector<float> got_small;
    bool equal = false;
    bool kept = false;
    {
        const OddFloatingPoint odd;
        const Rotary made(options);
        equal = made == rotary;
        made.tabulate(12345, cosine.data(), cosine.data() + 32);
        got = rotated(context, made, rows, 1, positions);
        got_small = rotated(context, made, small, 1, positions);
        kept = OddFloatingPoint::is_set();
    }
    EXPECT_TRUE(equal);
    EXPECT_TRUE(same_bits(cosine, cosine_wanted));
    EXPECT_TRUE(same_bits(got, want));
    EXPECT_TRUE(same_bits(got_small, want_small));
    EXPECT_TRUE(kept) << "the caller's mode is given back";
}

TEST(RotaryTest, TablesOfTheCallerGiveTheSameBits) {
    Random random(76);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa, 2);
        for (const RotaryPairing pairing : kPairings) {
            RotaryOptions options = options_of(23);
            options.rotary_dim = 18;
            options.pairing = pairing;
            const Rotary rotary(options);
            // entries at the positions 100, 107, 114, ...; the sines lie backwards, with holes
            const GuardedTensor<2> cosine({40, 9});
            const GuardedTensor<2> sine({40, 9}, {{-11, 1}, 39 * 11, 39 * 11 + 9});
            for (std::int64_t entry = 0; entry < 40; ++entry) {
                rotary.tabulate(100 + 7 * entry, &cosine.at({entry, 0}), &sine.at({entry, 0}));
            }
            const RotaryTable table{cosine.input(), sine.input(), pairing};
            std::vector<std::int64_t> entries, positions;
            for (int i = 0; i < 50; ++i) {
                entries.push_back(random.integer(0, 39));
                positions.push_back(100 + 7 * entries.back());
            }
            for (const std::int64_t heads : {1, 20}) {
                const auto rows = GuardedTensor<3>::random({heads, 50, 23}, random);
                const auto out = GuardedTensor<3>::random({heads, 50, 23}, random);
                rows.fill_normal(random);
                rotate(*context, table, rows.input(), entries, out.output());
                EXPECT_TRUE(out.written_exactly());
                EXPECT_TRUE(same_bits(out.dense(), rotated(*context, rotary, rows.dense(), heads, positions)));
                EXPECT_TRUE(within(
                    out.dense(), reference::rotate(cosine.widened(), sine.widened(), pairing, rows.widened(), entries),
                    3e-6));
            }
            // one entry for all positions: a stride of 0
            RotaryTable broadcast = table;
            broadcast.cosine.strides[0] = broadcast.sine.strides[0] = 0;
            const GuardedTensor<3> rows({2, 3, 23});
            const GuardedTensor<3> out({2, 3, 23});
            rows.fill_normal(random);
            rotate(*context, broadcast, rows.input(), std::vector<std::int64_t>{5, 39, 0}, out.output());
            EXPECT_TRUE(same_bits(out.dense(), rotated(*context, rotary, rows.dense(), 2, {100, 100, 100})));
        }
    }
}

// ------------------------------------------------------------------------------------------------------- caches

KvCacheOptions cache_options(const KvShape& shape, const std::optional<Rotary>& rotary) {
    KvCacheOptions options;
    options.shape = shape;
    options.rotary = rotary;
    return options;
}

/// All keys and values of a layer.
std::pair<std::vector<float>, std::vector<float>> contents(const KvCache& cache, std::size_t layer) {
    const KvShape& s = cache.shape();
    const std::int64_t n = cache.length(layer);
    std::vector<float> keys(static_cast<std::size_t>(s.kv_heads * n * s.head_dim));
    std::vector<float> values(static_cast<std::size_t>(s.kv_heads * n * s.value_dim));
    cache.read_back(layer, 0, OutputTensor<3>::dense(keys.data(), {s.kv_heads, n, s.head_dim}),
                    OutputTensor<3>::dense(values.data(), {s.kv_heads, n, s.value_dim}));
    return {std::move(keys), std::move(values)};
}

TEST(RotaryTest, AppendingRotatesAsRotateDoes) {
    Random random(seed_or(77));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const RotaryPairing pairing : kPairings) {
            for (const KvShape& shape : {KvShape{.kv_heads = 3, .head_dim = 23, .value_dim = 7},
                                         KvShape{.kv_heads = 2, .head_dim = 128, .value_dim = 64},
                                         KvShape{.kv_heads = 1, .head_dim = 2, .value_dim = 0}}) {
                const std::int64_t rotary_dim = shape.head_dim == 23 ? 14 : shape.head_dim;
                RotaryOptions options = every_scaling(shape.head_dim, rotary_dim)[3];
                options.pairing = pairing;
                const Rotary rotary(options);
                for (const std::size_t threads : {1U, 3U}) {
                    const auto context = make_context(isa, threads);
                    KvCacheOptions with = cache_options(shape, rotary);
                    KvCacheOptions without = cache_options(shape, {});
                    with.layers = without.layers = 2;
                    KvCache fused(with);
                    KvCache plain(without);
                    ASSERT_TRUE(fused.rotary().has_value());
                    EXPECT_EQ(*fused.rotary(), rotary);
                    EXPECT_FALSE(plain.rotary().has_value());
                    // over panels, blocks, and the rounds of 4096 that long appends are cut into
                    for (const std::int64_t n : {1, 5, 16, 1, 43, 0, 129, emulated() ? 70 : 9000, 2}) {
                        const auto keys = GuardedTensor<3>::random({shape.kv_heads, n, shape.head_dim}, random);
                        const auto values = GuardedTensor<3>::random({shape.kv_heads, n, shape.value_dim}, random);
                        keys.fill_normal(random);
                        values.fill_normal(random);
                        for (const std::size_t layer : {0U, 1U}) {  // each has its own positions
                            if (layer == 1 && n == 43) continue;
                            const GuardedTensor<3> turned({shape.kv_heads, n, shape.head_dim});
                            rotate(*context, rotary, keys.input(), plain.length(layer), turned.output());
                            fused.append(*context, layer, keys.input(), values.input());
                            plain.append(*context, layer, turned.input(), values.input());
                        }
                    }
                    for (const std::size_t layer : {0U, 1U}) {
                        const auto [keys, values] = contents(fused, layer);
                        const auto [want_keys, want_values] = contents(plain, layer);
                        EXPECT_TRUE(same_bits(keys, want_keys));
                        EXPECT_TRUE(same_bits(values, want_values));
                    }
                    EXPECT_NE(fused.length(0), fused.length(1));
                }
            }
        }
    }
}

TEST(RotaryTest, AppendingKeysOfHalvesOfFloats) {
    Random random(78);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa, 2);
        const Rotary rotary(options_of(40));
        KvCache fused(cache_options({.kv_heads = 2, .head_dim = 40, .value_dim = 9}, rotary));
        KvCache plain(cache_options({.kv_heads = 2, .head_dim = 40, .value_dim = 9}, {}));
        for (const DType type : {DType::f16, DType::bf16}) {
            std::vector<std::uint16_t> keys, values;
            std::vector<float> wide_keys;
            for (int i = 0; i < 2 * 77 * 40; ++i) {
                const float x = random.normal_f32();
                keys.push_back(type == DType::f16 ? kernels::narrow_f16(x) : kernels::narrow_bf16(x));
                wide_keys.push_back(static_cast<float>(type == DType::f16 ? reference::widen_f16(keys.back())
                                                                          : reference::widen_bf16(keys.back())));
            }
            values.assign(keys.begin(), keys.begin() + 2 * 77 * 9);
            const Extents<3> extents{2, 77, 40};
            const auto value_rows = InputTensor<3>::dense(values.data(), type, {2, 77, 9});
            std::vector<float> turned(wide_keys.size());
            rotate(*context, rotary, InputTensor<3>::dense(wide_keys.data(), extents), plain.length(),
                   OutputTensor<3>::dense(turned.data(), extents));
            fused.append(*context, 0, InputTensor<3>::dense(keys.data(), type, extents), value_rows);
            plain.append(*context, 0, InputTensor<3>::dense(turned.data(), extents), value_rows);
        }
        EXPECT_EQ(fused.length(), 154);
        EXPECT_TRUE(same_bits(contents(fused, 0).first, contents(plain, 0).first));
        EXPECT_TRUE(same_bits(contents(fused, 0).second, contents(plain, 0).second));
    }
}

// Of a cache that rotates, attend() turns the queries, each at its position: what rotate() before both would give.
TEST(RotaryTest, AttendingRotatesTheQueries) {
    Random random(seed_or(81));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa, 2);
        for (const RotaryPairing pairing : kPairings) {
            RotaryOptions options = every_scaling(24, 14)[4];
            options.pairing = pairing;
            const Rotary rotary(options);
            KvCache fused(cache_options({.kv_heads = 2, .head_dim = 24, .value_dim = 9}, rotary));
            KvCache plain(cache_options({.kv_heads = 2, .head_dim = 24, .value_dim = 9}, {}));
            for (const std::int64_t n : {1, 37, 1, 600}) {
                const std::int64_t first = plain.length();
                const GuardedTensor<3> query({6, n, 24});
                const GuardedTensor<3> keys({2, n, 24});
                const GuardedTensor<3> values({2, n, 9});
                for (const auto* tensor : {&query, &keys, &values}) tensor->fill_normal(random);
                fused.append(*context, 0, keys.input(), values.input());
                const GuardedTensor<3> turned_keys({2, n, 24});
                const GuardedTensor<3> turned_query({6, n, 24});
                rotate(*context, rotary, keys.input(), first, turned_keys.output());
                rotate(*context, rotary, query.input(), first, turned_query.output());
                plain.append(*context, 0, turned_keys.input(), values.input());
                const GuardedTensor<3> got({6, n, 9});
                const GuardedTensor<3> want({6, n, 9});
                CachedQuery call{.query = query.input(), .cache = &fused, .layer = 0, .output = got.output()};
                attend(*context, std::span(&call, 1));
                call = {.query = turned_query.input(), .cache = &plain, .layer = 0, .output = want.output()};
                attend(*context, std::span(&call, 1));
                EXPECT_TRUE(same_bits(got.dense(), want.dense())) << n;
            }
        }
    }
}

TEST(RotaryTest, AnAppendThatRunsOutOfMemoryChangesNothing) {
    Random random(79);
    const std::vector<float> data = normal_floats(2 * 5000 * 6, random);
    bool finished = false;
    for (std::size_t failing = 0; !finished; ++failing) {
        ASSERT_LT(failing, 100U);
        CountingResource context_memory;
        CountingResource cache_memory;
        {
            const auto context = make_context(available_isas().back(), 2, &context_memory);
            KvCacheOptions options =
                cache_options({.kv_heads = 2, .head_dim = 6, .value_dim = 6}, Rotary(options_of(6)));
            options.memory = &cache_memory;
            KvCache cache(options);
            const auto rows = [&](std::int64_t n) { return InputTensor<3>::dense(data.data(), {2, n, 6}); };
            cache.append(*context, 0, rows(100), rows(100));
            const auto held = contents(cache, 0);
            const std::size_t bytes = cache.reserved_bytes();
            // the context's allocations fail first, then the cache's
            (failing < 2 ? context_memory : cache_memory).fail_after(failing < 2 ? failing : failing - 2);
            try {
                cache.append(*context, 0, rows(5000), rows(5000));
                finished = failing >= 2;
            } catch (const OutOfMemory& error) {
                EXPECT_TRUE(says(error.what(), "append"));
                EXPECT_EQ(cache.length(), 100);
                EXPECT_EQ(cache.reserved_bytes(), bytes);
                const auto still = contents(cache, 0);
                EXPECT_TRUE(same_bits(still.first, held.first));
                EXPECT_TRUE(same_bits(still.second, held.second));
                context_memory.never_fail();
                cache_memory.never_fail();
                cache.append(*context, 0, rows(5000), rows(5000));
            }
            EXPECT_EQ(cache.length(), 5100);
        }
        EXPECT_EQ(context_memory.counts().live_bytes, 0U);
        EXPECT_EQ(cache_memory.counts().live_bytes, 0U);
    }
}

// ------------------------------------------------------------------------------------------------------- memory

TEST(RotaryTest, ARepeatedCallAllocatesNothing) {
    Random random(80);
    for (const std::size_t threads : {1U, 2U}) {
        CountingResource memory;
        const auto context = make_context(available_isas().back(), threads, &memory);
        const Rotary rotary(options_of(64));
        const std::vector<float> rows = normal_floats(8 * 100 * 64, random);
        std::vector<float> out(rows.size());
        const auto unchanged = [&](const auto& call) {
            call();
            const std::size_t allocations = memory.counts().allocations;
            const std::size_t news = operator_new_calls();
            call();
            const std::size_t news_after = operator_new_calls();
            EXPECT_EQ(news_after, news);
            EXPECT_EQ(memory.counts().allocations, allocations);
            EXPECT_EQ(context->scratch_bytes(), memory.counts().live_bytes);
        };
        const std::vector<std::int64_t> positions = positions_of(100);
        for (const std::int64_t n : {std::int64_t{1}, std::int64_t{100}}) {
            unchanged([&] {
                rotate(*context, rotary, InputTensor<3>::dense(rows.data(), {8, n, 64}), 5,
                       OutputTensor<3>::dense(out.data(), {8, n, 64}));
            });
            unchanged([&] {
                rotate(*context, rotary, InputTensor<3>::dense(rows.data(), {8, n, 64}),
                       std::span(positions).first(static_cast<std::size_t>(n)),
                       OutputTensor<3>::dense(out.data(), {8, n, 64}));
            });
        }
        const std::size_t scratch = context->scratch_bytes();
        rotate(*context, rotary, InputTensor<3>::dense(rows.data(), {1, 800, 64}), 5,
               OutputTensor<3>::dense(out.data(), {1, 800, 64}));
        EXPECT_EQ(context->scratch_bytes(), scratch) << "scratch does not grow with the number of rows";

        KvCache cache(cache_options({.kv_heads = 8, .head_dim = 64, .value_dim = 1}, rotary));
        cache.reserve(1000);
        for (const std::int64_t n : {std::int64_t{1}, std::int64_t{100}}) {
            unchanged([&] {
                cache.append(*context, 0, InputTensor<3>::dense(rows.data(), {8, n, 64}),
                             InputTensor<3>::dense(rows.data(), {8, n, 1}));
            });
        }
    }
}

TEST(RotaryTest, EveryRefusedAllocationIsOneError) {
    std::vector<float> rows(8 * 64 * 64, 1.0F);
    const auto view = InputTensor<3>::dense(rows.data(), {8, 64, 64});
    const auto out = OutputTensor<3>::dense(rows.data(), {8, 64, 64});
    bool refused = false;
    CountingResource memory;
    {
        const auto context = make_context(available_isas().back(), 2, &memory);
        memory.fail_after(0);
        try {
            rotate(*context, Rotary(options_of(64)), view, 0, out);
        } catch (const OutOfMemory& error) {
            refused = true;
            EXPECT_TRUE(says(error.what(), "rotate"));
        }
        memory.never_fail();
        rotate(*context, Rotary(options_of(64)), view, 0, out);
    }
    EXPECT_TRUE(refused);
    EXPECT_EQ(memory.counts().live_bytes, 0U);
}

TEST(RotaryTest, ZeroExtentsSucceed) {
    Context context;
    const Rotary rotary(options_of(4));
    const std::vector<std::int64_t> two{0, 1};
    for (const Extents<3>& extents : {Extents<3>{0, 2, 4}, Extents<3>{2, 0, 4}, Extents<3>{0, 0, 4}}) {
        const auto positions = std::span(two).first(static_cast<std::size_t>(extents[1]));
        const InputTensor<3> rows{nullptr, DType::f32, extents, dense_strides<3>(extents)};
        const OutputTensor<3> out{nullptr, DType::f32, extents, dense_strides<3>(extents)};
        rotate(context, rotary, rows, positions, out);
        rotate(context, rotary, rows, kLast - 1, out);
        const float numbers[4] = {};
        const RotaryTable table{InputTensor<2>::dense(numbers, {2, 2}), InputTensor<2>::dense(numbers, {2, 2})};
        rotate(context, table, rows, positions, out);
    }
    // no entries at all, for no rows
    const RotaryTable none{InputTensor<2>::dense(nullptr, DType::f32, {0, 2}),
                           InputTensor<2>::dense(nullptr, DType::f32, {0, 2})};
    rotate(context, none, InputTensor<3>::dense(nullptr, DType::f32, {2, 0, 4}), std::span(two).first(0),
           OutputTensor<3>::dense(nullptr, DType::f32, {2, 0, 4}));
}

// ----------------------------------------------------------------------------------------------------- refusals

TEST(RotaryTest, BadOptionsAreNamedAndRefused) {
    const auto refused = [](RotaryScaling scaling, const auto& change, const std::string& text) {
        RotaryOptions options = options_of(8, scaling);
        options.factor = 4.0;
        options.original_context = 4096;
        options.pair_factors = {1.0, 1.0, 1.0, 1.0};
        Rotary{options};  // right before the change
        change(options);
        EXPECT_TRUE(says(refusal([&] { Rotary rotary(options); }), text));
    };
    using O = RotaryOptions;
    using S = RotaryScaling;
    for (const std::int64_t dim : {std::int64_t{0}, std::int64_t{-8}, kFirst, kLast, (std::int64_t{1} << 20) + 1}) {
        refused(
            S::none, [=](O& o) { o.head_dim = dim; }, "head_dim is " + std::to_string(dim) + "; allowed: 1 to 1048576");
    }
    refused(
        S::none, [](O& o) { o.head_dim = 7; }, "rotary_dim is 0, which stands for head_dim; it must be even");
    refused(
        S::none, [](O& o) { o.head_dim = 1; }, "rotary_dim is 0");
    for (const std::int64_t dim : {std::int64_t{-2}, std::int64_t{1}, std::int64_t{3}, std::int64_t{10}, kLast}) {
        refused(
            S::none, [=](O& o) { o.rotary_dim = dim; },
            "rotary_dim is " + std::to_string(dim) + "; it must be even and from 2 to the head_dim of 8");
    }
    for (const double theta : {0.0, -1.0, kInfinity, kNaN}) {
        refused(
            S::none, [=](O& o) { o.theta = theta; }, "theta is ");
        refused(
            S::ntk, [=](O& o) { o.theta = theta; }, "theta is ");
    }
    refused(
        S::none, [](O& o) { o.theta = 1e-300; }, "theta is 1e-300 with factor 4; pair 2 gets the frequency ");
    refused(
        S::ntk, [](O& o) { o.factor = 1e300; }, "pair 1 gets the frequency 0");
    refused(
        S::linear,
        [](O& o) {
            o.theta = 1e300;
            o.factor = 1e300;
        },
        "gets the frequency ");
    refused(
        S::none, [](O& o) { o.pairing = static_cast<RotaryPairing>(2); }, "pairing is 2");
    refused(
        S::none, [](O& o) { o.scaling = static_cast<S>(6); }, "scaling is 6");

    for (const S scaling : {S::linear, S::ntk, S::llama3, S::yarn}) {
        for (const double factor : {0.999, 0.0, -4.0, kInfinity, kNaN}) {
            refused(
                scaling, [=](O& o) { o.factor = factor; }, "factor is ");
        }
    }
    for (const double factor : {0.0, -4.0, kInfinity, kNaN}) {
        refused(
            S::longrope, [=](O& o) { o.factor = factor; }, "factor is ");
    }
    refused(
        S::ntk, [](O& o) { o.rotary_dim = 2; }, "rotary_dim is 2; with ntk scaling it must be at least 4");
    for (const S scaling : {S::llama3, S::yarn}) {
        for (const std::int64_t context : {std::int64_t{0}, std::int64_t{-1}, kFirst}) {
            refused(
                scaling, [=](O& o) { o.original_context = context; },
                "original_context is " + std::to_string(context) + "; it must be at least 1");
        }
    }
    refused(
        S::longrope, [](O& o) { o.original_context = 1; }, "original_context is 1; it must be at least 2");
    refused(
        S::longrope,
        [](O& o) {
            o.original_context = 0;
            o.attention_factor = 1.5;
        },
        "original_context is 0; it must be at least 1");
    for (const double low : {0.0, -1.0, kInfinity, kNaN}) {
        refused(
            S::llama3, [=](O& o) { o.low_freq_factor = low; }, "low_freq_factor is ");
    }
    for (const double high : {1.0, 0.5, kInfinity, kNaN}) {
        refused(
            S::llama3, [=](O& o) { o.high_freq_factor = high; }, "high_freq_factor is ");
    }
    for (const double theta : {1.0, 0.5}) {
        refused(
            S::yarn, [=](O& o) { o.theta = theta; }, "with yarn scaling, above 1");
    }
    for (const double slow : {0.0, -1.0, kInfinity, kNaN}) {
        refused(
            S::yarn, [=](O& o) { o.beta_slow = slow; }, "beta_slow is ");
    }
    for (const double fast : {1.0, 0.5, kInfinity, kNaN}) {
        refused(
            S::yarn, [=](O& o) { o.beta_fast = fast; }, "beta_fast is ");
    }
    for (const S scaling : {S::yarn, S::longrope}) {
        for (const double given : {0.0, -1.0, 1e31, 1e-31, kInfinity, kNaN}) {
            refused(
                scaling, [=](O& o) { o.attention_factor = given; }, "attention_factor is ");
        }
    }
    refused(
        S::longrope, [](O& o) { o.pair_factors.clear(); }, "pair_factors has 0 numbers; it must have 4");
    refused(
        S::longrope, [](O& o) { o.pair_factors.push_back(1.0); }, "pair_factors has 5 numbers");
    for (const double bad : {0.0, -1.0, kInfinity, kNaN}) {
        refused(
            S::longrope, [=](O& o) { o.pair_factors[2] = bad; }, "pair_factors[2] is ");
    }
    // what belongs to another scaling is not looked at
    RotaryOptions options = options_of(8);
    options.factor = kNaN;
    options.original_context = -1;
    options.pair_factors = {1.0};
    options.attention_factor = 0.0;
    EXPECT_EQ(Rotary(options), Rotary(options_of(8)));
}

TEST(RotaryTest, BadCallsAreNamedAndRefused) {
    Context context;
    const Rotary rotary(options_of(8));
    std::vector<float> data(1000);
    struct Call {
        InputTensor<3> rows;
        OutputTensor<3> out;
        std::vector<std::int64_t> positions{0, 1, 2};
        RotaryTable table;
    };
    const auto good = [&] {
        Call call;
        call.rows = InputTensor<3>::dense(data.data(), {2, 3, 8});
        call.out = OutputTensor<3>::dense(data.data() + 100, {2, 3, 8});
        call.table.cosine = call.table.sine = InputTensor<2>::dense(data.data() + 500, {5, 4});
        return call;
    };
    /// Says of a changed call what all three overloads say of it.
    const auto refused = [&](const auto& change, const std::string& text) {
        Call call = good();
        change(call);
        EXPECT_TRUE(says(refusal([&] { rotate(context, rotary, call.rows, call.positions, call.out); }), text));
        EXPECT_TRUE(says(refusal([&] { rotate(context, rotary, call.rows, 7, call.out); }), text));
        EXPECT_TRUE(says(refusal([&] { rotate(context, call.table, call.rows, call.positions, call.out); }), text));
    };
    refused([](Call& c) { c.rows.extents[1] = -1; }, "rows: extent 1 is -1");
    refused([](Call& c) { c.rows.data = nullptr; }, "rows: data is null");
    refused([](Call& c) { c.out.data = nullptr; }, "out: data is null");
    refused([](Call& c) { c.out.strides[1] = 0; }, "out: stride 1 is 0");
    refused([](Call& c) { c.rows.strides[0] = kFirst; }, "64-bit");
    refused([](Call& c) { c.out.extents[0] = 3; }, "out: extent 0 is 3; it must be 2");
    refused([](Call& c) { c.out.extents[1] = 2; }, "out: extent 1 is 2; it must be 3");
    refused([](Call& c) { c.out.extents[2] = 7; }, "out: extent 2 is 7; it must be 8");

    Call call = good();
    call.rows.extents[2] = call.out.extents[2] = 6;
    EXPECT_TRUE(says(refusal([&] { rotate(context, rotary, call.rows, call.positions, call.out); }),
                     "rows: extent 2 is 6; it must be 8"));
    EXPECT_TRUE(
        says(refusal([&] { rotate(context, rotary, call.rows, 0, call.out); }), "rows: extent 2 is 6; it must be 8"));
    call = good();
    for (const std::size_t count : {0U, 2U, 4U}) {
        call.positions.assign(count, 0);
        const std::string text = "positions: there are " + std::to_string(count) + "; rows has 3";
        EXPECT_TRUE(says(refusal([&] { rotate(context, rotary, call.rows, call.positions, call.out); }), text));
        EXPECT_TRUE(says(refusal([&] { rotate(context, call.table, call.rows, call.positions, call.out); }), text));
    }
    call = good();
    EXPECT_TRUE(says(refusal([&] { rotate(context, rotary, call.rows, kLast - 1, call.out); }),
                     "first_position is 9223372036854775806"));
    rotate(context, rotary, call.rows, kLast - 2, call.out);
    rotate(context, rotary, call.rows, kFirst, call.out);
    for (const float x : data) ASSERT_TRUE(std::isfinite(x));

    const auto refused_table = [&](const auto& change, const std::string& text) {
        Call changed = good();
        change(changed);
        EXPECT_TRUE(
            says(refusal([&] { rotate(context, changed.table, changed.rows, changed.positions, changed.out); }), text));
    };
    refused_table([](Call& c) { c.positions[1] = -1; }, "positions[1] is -1; the table has 5 rows");
    refused_table([](Call& c) { c.positions[2] = 5; }, "positions[2] is 5; the table has 5 rows");
    refused_table([](Call& c) { c.positions[0] = kFirst; }, "positions[0] is -9223372036854775808");
    refused_table([](Call& c) { c.table.cosine.dtype = DType::f16; }, "cosine: elements are f16; they must be f32");
    refused_table([](Call& c) { c.table.sine.dtype = DType::bf16; }, "sine: elements are bf16");
    refused_table([](Call& c) { c.table.sine.data = nullptr; }, "sine: data is null");
    refused_table([](Call& c) { c.table.sine.extents[0] = 4; }, "sine: extent 0 is 4; it must be 5");
    refused_table([](Call& c) { c.table.sine.extents[1] = 3; }, "sine: extent 1 is 3; it must be 4");
    refused_table([](Call& c) { c.table.cosine.strides[1] = 2; }, "cosine: stride 1 is 2; it must be 1");
    refused_table([](Call& c) { c.table.cosine.extents[1] = c.table.sine.extents[1] = 5; },
                  "cosine: extent 1 is 5; it must be from 1 to half of the rows' head_dim of 8");
    refused_table([](Call& c) { c.table.cosine.extents[1] = c.table.sine.extents[1] = 0; }, "cosine: extent 1 is 0");
    refused_table([](Call& c) { c.table.pairing = static_cast<RotaryPairing>(3); }, "pairing is 3");
    refused_table([](Call& c) { c.table.cosine.extents[0] = c.table.sine.extents[0] = -1; }, "cosine: extent 0 is -1");

    KvCacheOptions options = cache_options({.kv_heads = 1, .head_dim = 6, .value_dim = 1}, rotary);
    const std::string text = "KvCacheOptions: rotary is made for a head_dim of 8; the shape's is 6";
    EXPECT_TRUE(says(refusal([&] { KvCache cache(options); }), text));
    EXPECT_TRUE(says(refusal([&] { KvCache::estimate_bytes(options, 1); }), text));
}

}  // namespace
}  // namespace headlong::test
