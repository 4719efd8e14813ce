// Every kernel of the table on every instruction set that this machine can run. Where the kernels promise bits, the
// expected value is computed here in the promised order, with the promised operations, and compared with memcmp.
#include "kernels/kernel_table.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "engine/isa.hpp"
#include "engine/limits.hpp"
#include "kernels/half.hpp"
#include "kernels/layout.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

using kernels::KernelTable;
using kernels::kSpanTokens;
using kernels::round_up;
using kernels::TokenRange;
using Sizes = std::vector<std::size_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// What dead memory may hold: nothing of it may reach a result.
constexpr std::array<float, 4> kGarbage{kNaN, kInfinity, -kInfinity, 3e38F};

/// a * b + c as the instruction set does it: `generic` rounds twice.
float multiply_add(Isa isa, float a, float b, float c) {
    if (isa != Isa::generic) return std::fma(a, b, c);
    const float product = a * b;  // the build compiles with -ffp-contract=off
    return product + c;
}

float fresh_normal(Random& random) { return random.normal_f32(); }

void fill_normal(const GuardedFloats& floats, Random& random) {
    for (float& x : floats) x = fresh_normal(random);
}

/// Floats as 16-bit elements in guarded memory; the floats become what these are when widened. The memory begins on a
/// cache line, so that up to 62 bytes behind the last element are not guarded.
GuardedBytes narrow(kernels::ElementType type, const GuardedFloats& floats) {
    GuardedBytes bytes(round_up(2 * floats.size(), kernels::kAlignment));
    auto* halves = reinterpret_cast<std::uint16_t*>(bytes.data());
    for (std::size_t i = 0; i < floats.size(); ++i) {
        const bool f16 = type == kernels::ElementType::f16;
        halves[i] = f16 ? kernels::narrow_f16(floats[i]) : kernels::narrow_bf16(floats[i]);
        floats[i] = f16 ? kernels::widen_f16(halves[i]) : kernels::widen_bf16(halves[i]);
    }
    return bytes;
}

constexpr std::array kHalves{kernels::ElementType::f16, kernels::ElementType::bf16};

// ---------------------------------------------------------------------------------------------------- dot_panels

struct DotCase {
    std::size_t rows, columns, depth;
    std::size_t row_padding = 0, panel_padding = 0, out_padding = 3;
    bool accumulate = false;
    bool canonical = false;
};

struct DotBuffers {
    DotCase shape;
    std::size_t panel_count, row_stride, panel_stride, out_stride;
    GuardedFloats rows, panels, out;

    DotBuffers(const DotCase& c, Random& random)
        : shape(c),
          panel_count((c.columns + 15) / 16),
          row_stride(c.depth + c.row_padding),
          panel_stride(c.depth * 16 + c.panel_padding * 16),
          out_stride(c.columns + c.out_padding),
          rows(c.rows == 0 ? 0 : (c.rows - 1) * row_stride + c.depth),
          panels(panel_count == 0 ? 0 : (panel_count - 1) * panel_stride + c.depth * 16),
          out(c.rows * out_stride) {
        for (std::size_t r = 0; r < c.rows; ++r) {
            for (std::size_t k = 0; k < c.depth; ++k) rows[r * row_stride + k] = fresh_normal(random);
        }
        for (std::size_t column = 0; column < panel_count * 16; ++column) {
            for (std::size_t k = 0; k < c.depth; ++k) {
                panel(k, column) = column < c.columns ? fresh_normal(random) : kGarbage[(k + column) % kGarbage.size()];
            }
        }
        if (c.accumulate) {
            for (std::size_t r = 0; r < c.rows; ++r) {
                for (std::size_t column = 0; column < c.columns; ++column) at(r, column) = fresh_normal(random);
            }
        }
    }

    float& panel(std::size_t k, std::size_t column) const {
        return panels[column / 16 * panel_stride + k * 16 + column % 16];
    }
    float& at(std::size_t r, std::size_t column) const { return out[r * out_stride + column]; }

    void run(const KernelTable& table) const {
        table.dot_panels({rows.data(), row_stride, shape.rows, panels.data(), panel_stride, shape.depth, out.data(),
                          out_stride, shape.columns, shape.accumulate, shape.canonical});
    }

    /// All of `out`, canaries included.
    std::vector<float> expected(Isa isa) const {
        std::vector<float> want(out.begin(), out.end());
        for (std::size_t r = 0; r < shape.rows; ++r) {
            for (std::size_t column = 0; column < shape.columns; ++column) {
                float sum = shape.accumulate ? at(r, column) : 0.0F;
                for (std::size_t k = 0; k < shape.depth; ++k) {
                    sum = multiply_add(isa, rows[r * row_stride + k], panel(k, column), sum);
                }
                want[r * out_stride + column] = sum;
            }
        }
        return want;
    }
};

// One accumulator per (row, token) in ascending order: bits that know nothing of tiles, whatever the shape.
TEST(KernelsTestDotPanels, SumsInAscendingOrderForEveryShape) {
    const Sizes depths = emulated() ? Sizes{1, 17, 64} : Sizes{1, 2, 3, 8, 15, 16, 17, 33, 64, 130};
    Random random(seed_or(21));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (std::size_t rows = 1; rows <= 20; ++rows) {
            for (const std::size_t columns : Sizes{1, 15, 16, 17, 32, 40, 64, 79, 97, 144}) {
                const std::size_t depth = random.pick(depths);
                const DotCase shape{rows,
                                    columns,
                                    depth,
                                    static_cast<std::size_t>(random.integer(0, 3)),
                                    static_cast<std::size_t>(random.integer(0, 2)),
                                    static_cast<std::size_t>(random.integer(0, 20)),
                                    random.chance(0.3)};
                const DotBuffers buffers(shape, random);
                const std::vector<float> want = buffers.expected(isa);
                buffers.run(table_of(isa));
                ASSERT_TRUE(same_bits(buffers.out.data(), want.data(), want.size()))
                    << rows << " rows, " << columns << " columns, depth " << depth
                    << (shape.accumulate ? ", accumulating" : "");
            }
        }
    }
}

TEST(KernelsTestDotPanels, EveryDepthIsExactInIntegers) {
    Random random(seed_or(22));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (std::size_t depth = 1; depth <= 130; depth += emulated() ? 9 : 1) {
            const DotBuffers buffers({7, 37, depth}, random);
            const auto small = [&] { return static_cast<float>(random.integer(-16, 16)); };
            for (std::size_t r = 0; r < 7; ++r) {
                for (std::size_t k = 0; k < depth; ++k) buffers.rows[r * buffers.row_stride + k] = small();
            }
            for (std::size_t column = 0; column < 37; ++column) {
                for (std::size_t k = 0; k < depth; ++k) buffers.panel(k, column) = small();
            }
            buffers.run(table_of(isa));
            for (std::size_t r = 0; r < 7; ++r) {
                for (std::size_t column = 0; column < 37; ++column) {
                    std::int64_t sum = 0;
                    for (std::size_t k = 0; k < depth; ++k) {
                        sum += static_cast<std::int64_t>(buffers.rows[r * buffers.row_stride + k]) *
                               static_cast<std::int64_t>(buffers.panel(k, column));
                    }
                    ASSERT_EQ(buffers.at(r, column), static_cast<float>(sum)) << depth << " " << r << " " << column;
                }
            }
        }
    }
}

TEST(KernelsTestDotPanels, SumsOfPartsOfTheDepthAreTheWhole) {
    Random random(seed_or(23));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const DotBuffers buffers({11, 70, 96}, random);
        buffers.run(table_of(isa));
        const std::vector<float> whole(buffers.out.begin(), buffers.out.end());
        std::fill(buffers.out.begin(), buffers.out.end(), kCanary);
        for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{0, 1}, {1, 40}, {40, 96}}) {
            table_of(isa).dot_panels({buffers.rows.data() + begin, buffers.row_stride, 11,
                                      buffers.panels.data() + begin * 16, buffers.panel_stride, end - begin,
                                      buffers.out.data(), buffers.out_stride, 70, begin != 0, false});
        }
        EXPECT_TRUE(same_bits(buffers.out.data(), whole.data(), whole.size()));
    }
}

TEST(KernelsTestDotPanels, PanelsOf16BitsGiveTheBitsOfWidenedOnes) {
    Random random(seed_or(46));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const kernels::ElementType type : kHalves) {
            for (std::size_t rows = 1; rows <= 13; ++rows) {
                for (const std::size_t columns : Sizes{1, 16, 40, 64, 97}) {
                    const std::size_t depth = random.pick(Sizes{1, 3, 15, 17, 33, 64, 111});
                    DotCase shape{rows, columns, depth, 1, 2};
                    shape.accumulate = random.chance(0.3);
                    const DotBuffers buffers(shape, random);
                    const GuardedBytes halves = narrow(type, buffers.panels);
                    const std::vector<float> before(buffers.out.begin(), buffers.out.end());
                    buffers.run(table_of(isa));
                    const std::vector<float> want(buffers.out.begin(), buffers.out.end());
                    std::copy(before.begin(), before.end(), buffers.out.begin());
                    table_of(isa).dot_panels({buffers.rows.data(), buffers.row_stride, rows, halves.data(),
                                              buffers.panel_stride, depth, buffers.out.data(), buffers.out_stride,
                                              columns, shape.accumulate, false, type});
                    ASSERT_TRUE(same_bits(buffers.out.data(), want.data(), want.size()))
                        << rows << " rows, " << columns << " columns, depth " << depth;
                }
            }
        }
    }
}

TEST(KernelsTestDotPanels, NaNStaysInItsRowAndLane) {
    Random random(seed_or(24));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t bad_row : Sizes{0, 4, 12}) {
            for (const std::size_t bad_column : Sizes{0, 13, 21, 63, 69}) {
                const DotBuffers buffers({13, 70, 9}, random);
                const std::vector<float> want = buffers.expected(isa);
                buffers.panel(3, bad_column) = bad_column == 13 ? kInfinity : kNaN;
                buffers.rows[bad_row * buffers.row_stride + 5] = kNaN;
                buffers.run(table_of(isa));
                for (std::size_t r = 0; r < 13; ++r) {
                    for (std::size_t column = 0; column < 70; ++column) {
                        const float got = buffers.at(r, column);
                        if (r == bad_row || column == bad_column) {
                            ASSERT_FALSE(std::isfinite(got)) << r << " " << column;
                        } else {
                            ASSERT_TRUE(same_bits(got, want[r * buffers.out_stride + column])) << r << " " << column;
                        }
                    }
                }
            }
        }
    }
}

TEST(KernelsTestDotPanels, WritesOneNaN) {
    Random random(seed_or(45));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t columns : Sizes{5, 16, 37, 80}) {
            DotCase shape{9, columns, 6};
            shape.canonical = true;
            const DotBuffers buffers(shape, random);
            // NaNs with a sign and a payload on both sides, and one that the sum makes itself
            for (std::size_t k = 0; k < 6; ++k)
                buffers.rows[2 * buffers.row_stride + k] = std::bit_cast<float>(0xFFC12345U);
            buffers.panel(1, 3) = std::bit_cast<float>(0x7FE00007U);
            buffers.panel(0, 4) = kInfinity;
            buffers.panel(1, 4) = -kInfinity;
            buffers.rows[5 * buffers.row_stride + 0] = 1.0F;
            buffers.rows[5 * buffers.row_stride + 1] = 1.0F;
            const std::vector<float> want = buffers.expected(isa);
            buffers.run(table_of(isa));
            EXPECT_TRUE(std::isnan(buffers.at(5, 4)));
            for (std::size_t r = 0; r < 9; ++r) {
                for (std::size_t column = 0; column < columns; ++column) {
                    const float exact = want[r * buffers.out_stride + column];
                    const float canonical = std::isnan(exact) ? std::bit_cast<float>(0x7FC00000U) : exact;
                    ASSERT_TRUE(same_bits(buffers.at(r, column), canonical)) << bits_text(buffers.at(r, column));
                }
            }
        }
    }
}

TEST(KernelsTestDotPanels, NothingToDo) {
    Random random(seed_or(25));
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const DotCase& shape : {DotCase{0, 20, 4}, DotCase{3, 0, 4}}) {
            const DotBuffers buffers(shape, random);
            buffers.run(table_of(isa));
            for (const float x : buffers.out) ASSERT_TRUE(is_canary(x));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- exp2

float exp2_of(const KernelTable& table, float x) {
    float y = 0.0F;
    table.exp2(&x, &y, 1);
    return y;
}

TEST(KernelsTestExp2, ExactValues) {
    HEADLONG_FOR_EACH_ISA(isa) {
        const KernelTable& table = table_of(isa);
        EXPECT_TRUE(same_bits(exp2_of(table, 0.0F), 1.0F));
        EXPECT_TRUE(same_bits(exp2_of(table, -0.0F), 1.0F));
        for (int n = -126; n <= 127; ++n) {
            ASSERT_TRUE(same_bits(exp2_of(table, static_cast<float>(n)), std::ldexp(1.0F, n))) << n;
        }
        // under 2^-126 there is only +0
        const float below = std::nextafter(-126.0F, -kInfinity);
        for (const float x : {below, -126.25F, -127.0F, -130.0F, -149.0F, -150.5F, -256.0F, -1e4F, -4194304.5F, -1e9F,
                              -1e30F, -std::numeric_limits<float>::max(), -kInfinity}) {
            EXPECT_TRUE(same_bits(exp2_of(table, x), 0.0F)) << x << " gives " << bits_text(exp2_of(table, x));
        }
        for (const std::uint32_t nan : {0x7FC00000U, 0xFFC00000U, 0x7FE5A1C3U, 0x7F800001U}) {
            EXPECT_TRUE(std::isnan(exp2_of(table, std::bit_cast<float>(nan))));
        }
    }
}

// Relative error in units of 2^-23, the spacing of floats at 1.
TEST(KernelsTestExp2, IsAccurate) {
    const int draws = emulated() ? 20'000 : 400'000;
    Random random(seed_or(26));
    HEADLONG_TRACE_SEED(random);
    std::vector<float> x;
    for (int i = 0; i < draws; ++i) x.push_back(static_cast<float>(random.uniform(-126.0, 0.0)));
    for (int i = 0; i < draws; ++i) x.push_back(static_cast<float>(-random.uniform() * random.uniform()));
    // the ends of the polynomial's interval, and numbers near 0 of any size
    for (int n = -125; n <= 0; ++n) {
        for (const float end : {static_cast<float>(n) - 0.5F, static_cast<float>(n)}) {
            x.push_back(end);
            x.push_back(std::nextafter(end, -kInfinity));
            if (end < 0.0F) x.push_back(std::nextafter(end, 0.0F));
        }
        x.push_back(-std::ldexp(1.0F, n));
    }
    std::vector<float> y(x.size());
    HEADLONG_FOR_EACH_ISA(isa) {
        table_of(isa).exp2(x.data(), y.data(), x.size());
        double worst = 0.0;
        float worst_x = 0.0F;
        for (std::size_t i = 0; i < x.size(); ++i) {
            const double exact = std::exp2(static_cast<double>(x[i]));
            const double error = std::abs(static_cast<double>(y[i]) / exact - 1.0) * 0x1p23;
            if (!(error <= worst)) {
                worst = error;
                worst_x = x[i];
            }
            ASSERT_LE(y[i], 1.0F) << x[i];
        }
        // measured: 1.38 with a fused multiply-add, 1.54 with two roundings
        EXPECT_LE(worst, isa == Isa::generic ? 1.6 : 1.45) << "at " << bits_text(worst_x);
        RecordProperty(std::string("worst_error_") + to_string(isa), std::to_string(worst));
    }
}

TEST(KernelsTestExp2, AnyCountAndPlace) {
    Random random(seed_or(27));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (std::size_t count = 0; count <= 40; ++count) {
            const GuardedFloats x(count);
            for (float& value : x) value = static_cast<float>(random.uniform(-130.0, 0.0));
            const GuardedFloats y(count);
            table_of(isa).exp2(x.data(), y.data(), count);
            for (std::size_t i = 0; i < count; ++i) ASSERT_TRUE(same_bits(y[i], exp2_of(table_of(isa), x[i])));
        }
    }
}

// -------------------------------------------------------------------------------------------------- softmax_span

struct SpanRow {
    std::vector<float> weights;
    float max;
    float sum;
};

/// What softmax_span promises for one row: weights, and the sum as 16 partial sums and a tree. NaN aside, in bits.
SpanRow expected_span(const KernelTable& table, const std::vector<float>& scores, TokenRange range, std::size_t first,
                      std::size_t last) {
    SpanRow row{scores, -kInfinity, 0.0F};
    std::fill(row.weights.begin() + static_cast<std::ptrdiff_t>(first),
              row.weights.begin() + static_cast<std::ptrdiff_t>(last), -0.0F);
    for (std::size_t t = range.begin; t < range.end; ++t) row.max = std::max(row.max, scores[t]);
    if (row.max == -kInfinity) return row;
    std::array<float, 16> partial{};
    for (std::size_t t = range.begin; t < range.end; ++t) {
        row.weights[t] = exp2_of(table, scores[t] - row.max);
        partial[t % 16] += row.weights[t];
    }
    for (std::size_t half = 8; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) partial[i] += partial[i + half];
    }
    row.sum = partial[0];
    return row;
}

struct SpanBuffers {
    std::size_t rows, stride;
    GuardedFloats scores, max, sum;
    std::vector<TokenRange> ranges;
    std::size_t first = 0, last = kSpanTokens;

    /// All scores are garbage.
    explicit SpanBuffers(std::size_t row_count, std::size_t padding = 16)
        : rows(row_count),
          stride(kSpanTokens + padding),
          scores((row_count - 1) * stride + kSpanTokens),
          max(row_count),
          sum(row_count),
          ranges(row_count, TokenRange{0, 0}) {
        for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = kGarbage[i % kGarbage.size()];
    }

    float* row(std::size_t r) const { return scores.data() + r * stride; }
    std::vector<float> copy(std::size_t r) const { return {row(r), row(r) + kSpanTokens}; }
    void run(const KernelTable& table) const {
        table.softmax_span({scores.data(), stride, rows, ranges.data(), first, last, max.data(), sum.data()});
    }
};

testing::AssertionResult is_span(const SpanBuffers& buffers, std::size_t r, const SpanRow& want) {
    if (!same_bits(buffers.max[r], want.max)) {
        return testing::AssertionFailure()
               << "maximum " << bits_text(buffers.max[r]) << ", want " << bits_text(want.max);
    }
    if (!same_bits(buffers.sum[r], want.sum)) {
        return testing::AssertionFailure() << "sum " << bits_text(buffers.sum[r]) << ", want " << bits_text(want.sum);
    }
    return same_bits(buffers.row(r), want.weights.data(), kSpanTokens);
}

TEST(KernelsTestSoftmaxSpan, WeightsAndSumsOfAnyRange) {
    Random random(seed_or(28));
    HEADLONG_TRACE_SEED(random);
    const std::vector<TokenRange> ranges{{0, 512}, {0, 1},   {511, 512}, {17, 18},   {5, 5},     {100, 99}, {3, 250},
                                         {16, 32}, {15, 17}, {31, 33},   {0, 0},     {512, 512}, {64, 128}, {63, 129},
                                         {1, 511}, {0, 496}, {16, 512},  {480, 500}, {0, 15},    {0, 17},   {250, 260}};
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t rows : Sizes{1, 2, 3, 5, 8, 13, 20}) {
            SpanBuffers buffers(rows, rows % 2 == 0 ? 16 : 0);
            std::vector<SpanRow> want;
            for (std::size_t r = 0; r < rows; ++r) {
                buffers.ranges[r] = random.pick(ranges);
                const double spread = random.pick(std::vector<double>{0.1, 3.0, 60.0, 1e4});
                for (std::size_t t = buffers.ranges[r].begin; t < buffers.ranges[r].end; ++t) {
                    buffers.row(r)[t] = static_cast<float>(random.normal() * spread);
                }
                want.push_back(expected_span(table_of(isa), buffers.copy(r), buffers.ranges[r], 0, kSpanTokens));
            }
            buffers.run(table_of(isa));
            for (std::size_t r = 0; r < rows; ++r) {
                ASSERT_TRUE(is_span(buffers, r, want[r])) << "row " << r << " of " << rows << ", range "
                                                          << buffers.ranges[r].begin << " " << buffers.ranges[r].end;
            }
        }
    }
}

TEST(KernelsTestSoftmaxSpan, EveryShortRange) {
    Random random(seed_or(29));
    HEADLONG_TRACE_SEED(random);
    const std::uint32_t step = emulated() ? 5 : 1;
    HEADLONG_FOR_EACH_ISA(isa) {
        for (std::uint32_t begin = 0; begin <= 36; begin += step) {
            for (std::uint32_t end = begin; end <= 52; end += step) {
                SpanBuffers buffers(1);
                buffers.last = 64;
                buffers.ranges[0] = {begin, end};
                for (std::size_t t = begin; t < end; ++t) buffers.row(0)[t] = random.normal_f32();
                const SpanRow want = expected_span(table_of(isa), buffers.copy(0), {begin, end}, 0, 64);
                buffers.run(table_of(isa));
                ASSERT_TRUE(is_span(buffers, 0, want)) << "range " << begin << " " << end;
            }
        }
    }
}

TEST(KernelsTestSoftmaxSpan, LeavesTokensOutsideFirstAndLastAlone) {
    Random random(seed_or(30));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const auto& [first, last] :
             {std::pair<std::size_t, std::size_t>{32, 496}, {0, 16}, {496, 512}, {64, 64}, {16, 48}}) {
            SpanBuffers buffers(3);
            buffers.first = first;
            buffers.last = last;
            std::vector<SpanRow> want;
            const auto begin = static_cast<std::uint32_t>(first);
            const auto end = static_cast<std::uint32_t>(last);
            if (first != last) buffers.ranges = {{begin + 3, end - 1}, {begin, end}, {begin, begin}};
            for (std::size_t r = 0; r < 3; ++r) {
                for (std::size_t t = buffers.ranges[r].begin; t < buffers.ranges[r].end; ++t) {
                    buffers.row(r)[t] = random.normal_f32();
                }
                want.push_back(expected_span(table_of(isa), buffers.copy(r), buffers.ranges[r], first, last));
            }
            buffers.run(table_of(isa));
            for (std::size_t r = 0; r < 3; ++r)
                ASSERT_TRUE(is_span(buffers, r, want[r])) << first << " " << last << " " << r;
        }
    }
}

TEST(KernelsTestSoftmaxSpan, WeightsAgainstDouble) {
    Random random(seed_or(31));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        SpanBuffers buffers(1);
        buffers.ranges[0] = {2, 509};
        for (std::size_t t = 2; t < 509; ++t) buffers.row(0)[t] = static_cast<float>(random.normal() * 4.0);
        const std::vector<float> scores = buffers.copy(0);
        buffers.run(table_of(isa));
        double sum = 0.0;
        for (std::size_t t = 2; t < 509; ++t) {
            const double weight = std::exp2(static_cast<double>(scores[t]) - static_cast<double>(buffers.max[0]));
            sum += weight;
            // the difference of two scores below 32 in magnitude is off by 2^-20 at the most
            ASSERT_NEAR(buffers.row(0)[t], weight, weight * 2e-6) << t;
        }
        EXPECT_NEAR(buffers.sum[0], sum, sum * 2e-6);
    }
}

TEST(KernelsTestSoftmaxSpan, MinusInfinityEverywhereIsTheEmptyState) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const TokenRange range : {TokenRange{0, 512}, TokenRange{7, 8}, TokenRange{100, 133}}) {
            SpanBuffers buffers(1);
            buffers.ranges[0] = range;
            std::fill(buffers.row(0) + range.begin, buffers.row(0) + range.end, -kInfinity);
            buffers.run(table_of(isa));
            EXPECT_TRUE(same_bits(buffers.max[0], -kInfinity));
            EXPECT_TRUE(same_bits(buffers.sum[0], 0.0F)) << bits_text(buffers.sum[0]);
            // no token weighs anything: a NaN among the values of such a span must not be multiplied
            for (std::size_t t = 0; t < kSpanTokens; ++t) ASSERT_TRUE(same_bits(buffers.row(0)[t], -0.0F)) << t;
        }
    }
}

TEST(KernelsTestSoftmaxSpan, MinusInfinityBesideAScoreWeighsPlusZero) {
    HEADLONG_FOR_EACH_ISA(isa) {
        SpanBuffers buffers(1);
        buffers.ranges[0] = {1, 40};
        std::fill(buffers.row(0) + 1, buffers.row(0) + 40, -kInfinity);
        buffers.row(0)[20] = -3e38F;
        buffers.run(table_of(isa));
        EXPECT_EQ(buffers.max[0], -3e38F);
        EXPECT_EQ(buffers.sum[0], 1.0F);
        // visible, if without weight: not the -0 of a masked token
        for (std::size_t t = 1; t < 40; ++t) ASSERT_TRUE(same_bits(buffers.row(0)[t], t == 20 ? 1.0F : 0.0F)) << t;
        ASSERT_TRUE(same_bits(buffers.row(0)[0], -0.0F));
        ASSERT_TRUE(same_bits(buffers.row(0)[40], -0.0F));
    }
}

TEST(KernelsTestSoftmaxSpan, NaNAmongTheScoresIsNeverLost) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const float other : {0.0F, -kInfinity, 5.0F, kInfinity}) {
            for (std::size_t place = 3; place < 75; ++place) {
                SpanBuffers buffers(2);
                buffers.ranges[0] = {3, 75};
                buffers.ranges[1] = {3, 75};
                std::fill(buffers.row(0) + 3, buffers.row(0) + 75, other);
                buffers.row(0)[place] = kNaN;
                std::fill(buffers.row(1) + 3, buffers.row(1) + 75, 1.0F);
                buffers.run(table_of(isa));
                ASSERT_TRUE(std::isnan(buffers.max[0]) || std::isnan(buffers.sum[0])) << other << " " << place;
                ASSERT_TRUE(std::isnan(buffers.sum[0])) << other << " " << place;
                ASSERT_TRUE(same_bits(buffers.row(0)[2], -0.0F) && same_bits(buffers.row(0)[75], -0.0F));
                ASSERT_EQ(buffers.sum[1], 72.0F);
            }
        }
    }
}

TEST(KernelsTestSoftmaxSpan, PlusInfinityMakesTheStateNaN) {
    HEADLONG_FOR_EACH_ISA(isa) {
        SpanBuffers buffers(1);
        buffers.ranges[0] = {0, 20};
        std::fill(buffers.row(0), buffers.row(0) + 20, 1.0F);
        buffers.row(0)[17] = kInfinity;
        buffers.run(table_of(isa));
        EXPECT_TRUE(std::isnan(buffers.sum[0]));
    }
}

// ------------------------------------------------------------------------------------------------- weighted_rows

struct ValueSpan {
    std::vector<GuardedFloats> blocks;
    std::array<const void*, kernels::kSpanBlocks> pointers{};

    ValueSpan(std::size_t columns, Random& random) {
        for (std::size_t b = 0; b < kernels::kSpanBlocks; ++b) {
            blocks.emplace_back(kernels::kBlockTokens * columns);
            fill_normal(blocks.back(), random);
            pointers[b] = blocks.back().data();
        }
    }
    float& at(std::size_t token, std::size_t column) const {
        return blocks[token / kernels::kBlockTokens][kernels::value_index(token % kernels::kBlockTokens, column)];
    }
};

struct WeightedBuffers {
    std::size_t rows, columns, stride, out_stride;
    std::size_t first = 0, last = kSpanTokens;
    std::uint32_t nonfinite = 0;
    GuardedFloats weights, out;

    /// Weights are those of a softmax: in [0, 1], garbage outside [first, last), -0 outside a row's range.
    WeightedBuffers(std::size_t row_count, std::size_t column_count, std::size_t first_token, std::size_t last_token,
                    Random& random)
        : rows(row_count),
          columns(column_count),
          stride(kSpanTokens + 16),
          out_stride(column_count + 16),
          first(first_token),
          last(last_token),
          weights((row_count - 1) * stride + kSpanTokens),
          out(row_count * out_stride) {
        for (std::size_t r = 0; r < rows; ++r) {
            for (std::size_t t = first; t < last; ++t) {
                weight(r, t) = random.chance(0.02) ? 0.0F : static_cast<float>(random.uniform());
            }
        }
    }
    float& weight(std::size_t r, std::size_t token) const { return weights[r * stride + token]; }
    /// Masks what is not in [begin, end).
    void mask(std::size_t r, std::size_t begin, std::size_t end) const {
        for (std::size_t t = first; t < last; ++t) {
            if (t < begin || t >= end) weight(r, t) = -0.0F;
        }
    }
    void run(const KernelTable& table, const ValueSpan& values) const {
        table.weighted_rows({weights.data(), stride, rows, values.pointers.data(), nonfinite, first, last, columns,
                             out.data(), out_stride});
    }
    /// The sums, tokens in ascending order; masked ones skipped. All of `out`, canaries included.
    std::vector<float> expected(Isa isa, const ValueSpan& values) const {
        std::vector<float> want(out.begin(), out.end());
        for (std::size_t r = 0; r < rows; ++r) {
            for (std::size_t c = 0; c < columns; ++c) {
                float sum = 0.0F;
                for (std::size_t t = first; t < last; ++t) {
                    if (same_bits(weight(r, t), -0.0F)) continue;
                    sum = multiply_add(isa, weight(r, t), values.at(t, c), sum);
                }
                want[r * out_stride + c] = sum;
            }
        }
        return want;
    }
};

/// Bits, but zeros of either sign are the same, and so are all NaNs (canaries are compared in full).
testing::AssertionResult same_but_for_zero_signs(const GuardedFloats& got, const std::vector<float>& want) {
    for (std::size_t i = 0; i < want.size(); ++i) {
        const bool both_nan = std::isnan(got[i]) && std::isnan(want[i]) && !is_canary(got[i]) && !is_canary(want[i]);
        const bool both_zero = got[i] == 0.0F && want[i] == 0.0F;
        if (same_bits(got[i], want[i]) || both_nan || both_zero) continue;
        return testing::AssertionFailure()
               << "float " << i << " is " << bits_text(got[i]) << ", want " << bits_text(want[i]);
    }
    return testing::AssertionSuccess();
}

TEST(KernelsTestWeightedRows, SumsInAscendingOrderForEveryShape) {
    Random random(seed_or(32));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t columns : Sizes{16, 32, 48, 64, 80, 112, 144}) {
            const ValueSpan values(columns, random);
            for (std::size_t rows = 1; rows <= 20; rows += emulated() ? 4 : 1) {
                const std::size_t first = static_cast<std::size_t>(random.integer(0, 8)) * 16;
                const std::size_t last = first + static_cast<std::size_t>(random.integer(1, emulated() ? 5 : 12)) * 16;
                WeightedBuffers buffers(rows, columns, first, last, random);
                for (std::size_t r = 0; r < rows; ++r) {
                    const auto begin = static_cast<std::size_t>(
                        random.integer(static_cast<std::int64_t>(first), static_cast<std::int64_t>(last)));
                    buffers.mask(r, begin, last - static_cast<std::size_t>(random.integer(0, 15)));
                }
                const std::vector<float> want = buffers.expected(isa, values);
                // the guarded loop adds in the same order: the same bits, in any mix of blocks
                for (const std::uint32_t nonfinite : {0x00U, 0xFFU, 0xA5U}) {
                    std::fill(buffers.out.begin(), buffers.out.end(), kCanary);
                    buffers.nonfinite = nonfinite;
                    buffers.run(table_of(isa), values);
                    ASSERT_TRUE(same_but_for_zero_signs(buffers.out, want))
                        << rows << " rows, " << columns << " columns, tokens " << first << " to " << last
                        << ", blocks to guard " << nonfinite;
                }
            }
        }
    }
}

TEST(KernelsTestWeightedRows, ValuesOf16BitsGiveTheBitsOfWidenedOnes) {
    Random random(seed_or(47));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const kernels::ElementType type : kHalves) {
            for (const std::size_t columns : Sizes{16, 48, 80, 128}) {
                const ValueSpan values(columns, random);
                values.at(100, 5) = kInfinity;  // block 1 is guarded
                std::vector<GuardedBytes> halves;
                std::array<const void*, kernels::kSpanBlocks> blocks{};
                for (std::size_t b = 0; b < kernels::kSpanBlocks; ++b) {
                    blocks[b] = halves.emplace_back(narrow(type, values.blocks[b])).data();
                }
                for (std::size_t rows = 1; rows <= 13; ++rows) {
                    const std::size_t first = static_cast<std::size_t>(random.integer(0, 8)) * 16;
                    const std::size_t last = first + static_cast<std::size_t>(random.integer(1, 12)) * 16;
                    WeightedBuffers buffers(rows, columns, first, last, random);
                    for (std::size_t r = 0; r < rows; ++r) buffers.mask(r, first + r % 4, last - r % 16);
                    buffers.nonfinite = 1U << 1U;
                    buffers.run(table_of(isa), values);
                    const std::vector<float> want(buffers.out.begin(), buffers.out.end());
                    std::fill(buffers.out.begin(), buffers.out.end(), kCanary);
                    table_of(isa).weighted_rows({buffers.weights.data(), buffers.stride, rows, blocks.data(),
                                                 buffers.nonfinite, first, last, columns, buffers.out.data(),
                                                 buffers.out_stride, type});
                    ASSERT_TRUE(same_bits(buffers.out.data(), want.data(), want.size()))
                        << rows << " rows, " << columns << " columns, tokens " << first << " to " << last;
                }
            }
        }
    }
}

TEST(KernelsTestWeightedRows, ReadsOnlyBlocksBetweenFirstAndLast) {
    Random random(seed_or(33));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const auto& [first, last] :
             {std::pair<std::size_t, std::size_t>{0, 16}, {48, 80}, {64, 128}, {448, 512}, {496, 512}, {112, 400}}) {
            ValueSpan values(32, random);
            WeightedBuffers buffers(7, 32, first, last, random);
            const std::vector<float> want = buffers.expected(isa, values);
            for (std::size_t b = 0; b < kernels::kSpanBlocks; ++b) {
                if ((b + 1) * 64 <= first || b * 64 >= last) values.pointers[b] = nullptr;
                for (std::size_t t = b * 64; t < (b + 1) * 64; ++t) {
                    if (t >= first && t < last) continue;
                    for (std::size_t c = 0; c < 32; ++c) values.at(t, c) = kNaN;
                }
            }
            buffers.run(table_of(isa), values);
            ASSERT_TRUE(same_but_for_zero_signs(buffers.out, want)) << first << " " << last;
        }
    }
}

TEST(KernelsTestWeightedRows, NoTokensGiveZeros) {
    Random random(seed_or(34));
    HEADLONG_FOR_EACH_ISA(isa) {
        ValueSpan values(32, random);
        values.pointers = {};
        const WeightedBuffers buffers(7, 32, 64, 64, random);
        buffers.run(table_of(isa), values);
        for (std::size_t r = 0; r < 7; ++r) {
            for (std::size_t c = 0; c < 32; ++c) ASSERT_TRUE(same_bits(buffers.out[r * buffers.out_stride + c], 0.0F));
            ASSERT_TRUE(is_canary(buffers.out[r * buffers.out_stride + 32]));
        }
    }
}

TEST(KernelsTestWeightedRows, NonFiniteValuesReachExactlyTheRowsThatSeeThem) {
    Random random(seed_or(35));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t rows : Sizes{1, 2, 6, 7, 13}) {
            const ValueSpan values(48, random);
            WeightedBuffers buffers(rows, 48, 0, 256, random);
            for (std::size_t r = 0; r < rows; ++r) buffers.mask(r, 0, 70 + 10 * r);  // causal: row r sees 70 + 10 r
            // a bad value at token 100, seen by the rows from 4 on; one that no row sees
            values.at(100, 5) = kNaN;
            values.at(100, 20) = kInfinity;
            for (std::size_t c = 0; c < 48; ++c) values.at(255, c) = kNaN;
            buffers.nonfinite = 1U << 1U | 1U << 3U;
            for (std::size_t r = 0; r < rows; ++r) {
                if (100 < 70 + 10 * r) buffers.weight(r, 100) = 0.5F;
            }
            const std::vector<float> want = buffers.expected(isa, values);
            buffers.run(table_of(isa), values);
            ASSERT_TRUE(same_but_for_zero_signs(buffers.out, want));
            for (std::size_t r = 0; r < rows; ++r) {
                for (std::size_t c = 0; c < 48; ++c) {
                    const float got = buffers.out[r * buffers.out_stride + c];
                    const bool sees = 100 < 70 + 10 * r;
                    ASSERT_EQ(std::isnan(got), sees && c == 5) << r << " " << c;
                    ASSERT_EQ(std::isinf(got), sees && c == 20) << r << " " << c;
                }
            }
        }
    }
}

TEST(KernelsTestWeightedRows, AVisibleTokenOfNoWeightStillShowsItsNaN) {
    Random random(seed_or(36));
    HEADLONG_FOR_EACH_ISA(isa) {
        const ValueSpan values(16, random);
        WeightedBuffers buffers(2, 16, 0, 64, random);
        values.at(30, 3) = kNaN;
        buffers.weight(0, 30) = 0.0F;   // exp2 of something far below the maximum
        buffers.weight(1, 30) = -0.0F;  // masked
        buffers.nonfinite = 1;
        buffers.run(table_of(isa), values);
        EXPECT_TRUE(std::isnan(buffers.out[3]));
        EXPECT_TRUE(std::isfinite(buffers.out[buffers.out_stride + 3]));
        EXPECT_TRUE(std::isfinite(buffers.out[2]));
    }
}

// --------------------------------------------------------------------------------------------------------- packing

struct Strides {
    const char* name;
    std::ptrdiff_t row, column;
};

std::vector<Strides> all_strides(std::size_t rows, std::size_t columns) {
    const auto r = static_cast<std::ptrdiff_t>(rows);
    const auto c = static_cast<std::ptrdiff_t>(columns);
    return {{"dense", c, 1},
            {"padded", c + 3, 1},
            {"rows backwards", -c, 1},
            {"columns backwards", c, -1},
            {"both backwards", -c - 1, -1},
            {"transposed", 1, r},
            {"transposed, padded", 1, r + 5},
            {"transposed, rows backwards", -1, r},
            {"transposed, columns backwards", 1, -r},
            {"one row for all", 0, 1},
            {"one column for all", 1, 0},
            {"one element for all", 0, 0},
            {"every second column", 2 * c, 2},
            {"every third row and column", 3, 3 * r}};
}

/// A strided source that touches guard pages on one side; its holes are canaries (NaN).
struct Source {
    std::ptrdiff_t low = 0, high = 0;
    GuardedFloats memory;
    kernels::Rows rows;

    Source(std::size_t row_count, std::size_t column_count, const Strides& strides, Touch touch, Random& random)
        : low(lowest(row_count, column_count, strides)),
          high(highest(row_count, column_count, strides)),
          memory(row_count * column_count == 0 ? 0 : static_cast<std::size_t>(high - low + 1), touch),
          rows{memory.data() - low, kernels::ElementType::f32, strides.row, strides.column, row_count, column_count} {
        for (std::size_t i = 0; i < row_count; ++i) {
            for (std::size_t j = 0; j < column_count; ++j) at(i, j) = fresh_normal(random);
        }
    }
    float& at(std::size_t i, std::size_t j) const {
        return memory[static_cast<std::size_t>(static_cast<std::ptrdiff_t>(i) * rows.row_stride +
                                               static_cast<std::ptrdiff_t>(j) * rows.column_stride - low)];
    }

  private:
    static std::ptrdiff_t span_of(std::size_t count, std::ptrdiff_t stride) {
        return count == 0 ? 0 : static_cast<std::ptrdiff_t>(count - 1) * stride;
    }
    static std::ptrdiff_t lowest(std::size_t m, std::size_t n, const Strides& s) {
        return std::min<std::ptrdiff_t>(0, span_of(m, s.row)) + std::min<std::ptrdiff_t>(0, span_of(n, s.column));
    }
    static std::ptrdiff_t highest(std::size_t m, std::size_t n, const Strides& s) {
        return std::max<std::ptrdiff_t>(0, span_of(m, s.row)) + std::max<std::ptrdiff_t>(0, span_of(n, s.column));
    }
};

/// Calls test(rows, columns, strides, touch) over sizes around vectors, panels and tiles.
template <typename Test>
void for_each_source(const Test& test) {
    const Sizes row_counts = emulated() ? Sizes{1, 17, 32} : Sizes{1, 2, 7, 15, 16, 17, 31, 32, 40};
    const Sizes column_counts =
        emulated() ? Sizes{1, 9, 24} : Sizes{1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 31, 33, 64};
    for (const std::size_t rows : row_counts) {
        for (const std::size_t columns : column_counts) {
            for (const Strides& strides : all_strides(rows, columns)) {
                for (const Touch touch : {Touch::end, Touch::begin}) {
                    SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(columns) + " columns, " +
                                 strides.name);
                    test(rows, columns, strides, touch);
                    if (testing::Test::HasFatalFailure()) return;
                }
            }
        }
    }
}

TEST(KernelsTestPackPanels, AnyStridesAndLanes) {
    Random random(seed_or(37));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for_each_source([&](std::size_t rows, std::size_t columns, const Strides& strides, Touch touch) {
            const Source source(rows, columns, strides, touch, random);
            for (const std::size_t first_lane : {std::size_t{0}, static_cast<std::size_t>(random.integer(1, 33))}) {
                const std::size_t tokens = round_up(first_lane + rows, 16);
                const GuardedFloats panels(tokens * columns);
                table_of(isa).pack_panels({source.rows, panels.data(), first_lane});
                for (std::size_t t = 0; t < tokens; ++t) {
                    for (std::size_t j = 0; j < columns; ++j) {
                        const float got = panels[t / 16 * columns * 16 + j * 16 + t % 16];
                        const bool written = t >= first_lane && t < first_lane + rows;
                        const float want = written ? source.at(t - first_lane, j) : kCanary;
                        ASSERT_TRUE(same_bits(got, want))
                            << "first lane " << first_lane << ", token " << t << ", column " << j;
                    }
                }
            }
        });
    }
}

TEST(KernelsTestPackValues, AnyStrides) {
    Random random(seed_or(38));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for_each_source([&](std::size_t rows, std::size_t columns, const Strides& strides, Touch touch) {
            const Source source(rows, columns, strides, touch, random);
            const std::size_t padded = kernels::padded_columns(columns);
            const std::size_t count = std::min(rows, kernels::kBlockTokens);  // a block holds no more
            const auto first =
                static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(kernels::kBlockTokens - count)));
            const GuardedFloats packed(kernels::kBlockTokens * padded);
            kernels::Rows part = source.rows;
            part.row_count = count;
            ASSERT_FALSE(table_of(isa).pack_values({part, packed.data(), first}));
            for (std::size_t i = 0; i < kernels::kBlockTokens; ++i) {
                for (std::size_t j = 0; j < padded; ++j) {
                    const float x = packed[kernels::value_index(i, j)];
                    if (i < first || i >= first + count) {
                        ASSERT_TRUE(is_canary(x)) << i << " " << j;
                    } else {
                        ASSERT_TRUE(same_bits(x, j < columns ? source.at(i - first, j) : 0.0F)) << i << " " << j;
                    }
                }
            }
        });
    }
}

TEST(KernelsTestPackValues, ReportsEveryNonFiniteValue) {
    Random random(seed_or(39));
    HEADLONG_TRACE_SEED(random);
    constexpr std::size_t kRows = 3;
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t columns : Sizes{1, 5, 16, 19, 40}) {
            for (const Strides& strides :
                 {Strides{"dense", static_cast<std::ptrdiff_t>(columns), 1}, Strides{"transposed", 1, kRows}}) {
                const Source source(kRows, columns, strides, Touch::end, random);
                const GuardedFloats packed(kernels::kBlockTokens * kernels::padded_columns(columns));
                const auto pack = [&] { return table_of(isa).pack_values({source.rows, packed.data(), 61}); };
                for (std::size_t i = 0; i < kRows; ++i) {
                    for (std::size_t j = 0; j < columns; ++j) {
                        const float before = source.at(i, j);
                        for (const float bad : {kNaN, -kNaN, kInfinity, -kInfinity}) {
                            source.at(i, j) = bad;
                            ASSERT_TRUE(pack()) << bad << " at " << i << " " << j << ", " << strides.name;
                        }
                        for (const float good :
                             {std::numeric_limits<float>::max(), std::numeric_limits<float>::lowest(),
                              std::numeric_limits<float>::denorm_min(), -0.0F}) {
                            source.at(i, j) = good;
                            ASSERT_FALSE(pack()) << good << " at " << i << " " << j << ", " << strides.name;
                        }
                        source.at(i, j) = before;
                    }
                }
            }
        }
    }
}

TEST(KernelsTestScaleRows, AnyStrides) {
    Random random(seed_or(40));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for_each_source([&](std::size_t rows, std::size_t columns, const Strides& strides, Touch touch) {
            const Source source(rows, columns, strides, touch, random);
            const std::size_t stride = columns + static_cast<std::size_t>(random.integer(0, 3));
            const GuardedFloats out((rows - 1) * stride + columns);
            const float factor = fresh_normal(random);
            table_of(isa).scale_rows({source.rows, factor, out.data(), stride});
            for (std::size_t i = 0; i < rows; ++i) {
                for (std::size_t j = 0; j < stride && i * stride + j < out.size(); ++j) {
                    const float want = j < columns ? source.at(i, j) * factor : kCanary;
                    ASSERT_TRUE(same_bits(out[i * stride + j], want)) << i << " " << j;
                }
            }
        });
    }
}

TEST(KernelsTestPackValues, NoRowsOrColumns) {
    HEADLONG_FOR_EACH_ISA(isa) {
        const GuardedFloats out(32);
        const kernels::Rows no_rows{nullptr, kernels::ElementType::f32, 4, 1, 0, 4};
        table_of(isa).pack_panels({no_rows, out.data(), 0});
        EXPECT_FALSE(table_of(isa).pack_values({no_rows, out.data(), 0}));
        table_of(isa).scale_rows({no_rows, 2.0F, out.data(), 4});
        for (const float x : out) ASSERT_TRUE(is_canary(x));
    }
}

// -------------------------------------------------------------------------------------------------- merge, finish

struct StateBuffers {
    std::size_t rows, columns, stride;
    GuardedFloats output, max, sum;

    StateBuffers(std::size_t row_count, std::size_t column_count, std::size_t padding = 0)
        : rows(row_count),
          columns(column_count),
          stride(column_count + padding),
          output((row_count - 1) * stride + column_count),
          max(row_count),
          sum(row_count) {}

    static StateBuffers random(std::size_t row_count, std::size_t column_count, Random& random,
                               std::size_t padding = 0) {
        StateBuffers states(row_count, column_count, padding);
        for (std::size_t r = 0; r < row_count; ++r) {
            states.max[r] = static_cast<float>(random.normal() * 20.0);
            states.sum[r] = static_cast<float>(random.uniform(1.0, 512.0));
            for (std::size_t c = 0; c < column_count; ++c) states.at(r, c) = fresh_normal(random);
        }
        return states;
    }
    static StateBuffers empty(std::size_t row_count, std::size_t column_count) {
        StateBuffers states(row_count, column_count);
        std::fill(states.output.begin(), states.output.end(), 0.0F);
        std::fill(states.max.begin(), states.max.end(), -kInfinity);
        std::fill(states.sum.begin(), states.sum.end(), 0.0F);
        return states;
    }
    float& at(std::size_t r, std::size_t c) const { return output[r * stride + c]; }
    kernels::States states() const { return {output.data(), stride, max.data(), sum.data()}; }
    void copy_from(const StateBuffers& other) const {
        for (std::size_t r = 0; r < rows; ++r) {
            max[r] = other.max[r];
            sum[r] = other.sum[r];
            for (std::size_t c = 0; c < columns; ++c) at(r, c) = other.at(r, c);
        }
    }
};

testing::AssertionResult same_states(const StateBuffers& a, const StateBuffers& b) {
    for (std::size_t r = 0; r < a.rows; ++r) {
        if (!same_bits(a.max[r], b.max[r]) || !same_bits(a.sum[r], b.sum[r])) {
            return testing::AssertionFailure()
                   << "row " << r << ": maximum " << bits_text(a.max[r]) << " and " << bits_text(b.max[r]) << ", sum "
                   << bits_text(a.sum[r]) << " and " << bits_text(b.sum[r]);
        }
        for (std::size_t c = 0; c < a.columns; ++c) {
            if (!same_bits(a.at(r, c), b.at(r, c))) {
                return testing::AssertionFailure() << "row " << r << ", column " << c << ": " << bits_text(a.at(r, c))
                                                   << " and " << bits_text(b.at(r, c));
            }
        }
    }
    return testing::AssertionSuccess();
}

void merge(const KernelTable& table, const StateBuffers& into, const StateBuffers& from) {
    table.merge({into.states(), from.states(), into.rows, into.columns});
}

TEST(KernelsTestMerge, TheFormula) {
    Random random(seed_or(41));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const KernelTable& table = table_of(isa);
        for (const std::size_t columns : Sizes{16, 32, 80}) {
            const StateBuffers into = StateBuffers::random(9, columns, random, 16);
            const StateBuffers from = StateBuffers::random(9, columns, random);
            StateBuffers want(9, columns);
            for (std::size_t r = 0; r < 9; ++r) {
                want.max[r] = std::max(into.max[r], from.max[r]);
                const float f1 = exp2_of(table, into.max[r] - want.max[r]);
                const float f2 = exp2_of(table, from.max[r] - want.max[r]);
                want.sum[r] = multiply_add(isa, from.sum[r], f2, into.sum[r] * f1);
                for (std::size_t c = 0; c < columns; ++c) {
                    want.at(r, c) = multiply_add(isa, from.at(r, c), f2, into.at(r, c) * f1);
                }
            }
            merge(table, into, from);
            EXPECT_TRUE(same_states(into, want));
            // what lies between the rows was left alone
            for (std::size_t r = 0; r + 1 < 9; ++r) {
                for (std::size_t c = columns; c < columns + 16; ++c)
                    ASSERT_TRUE(is_canary(into.output[r * into.stride + c]));
            }
        }
    }
}

TEST(KernelsTestMerge, EmptyStatesAreNeutral) {
    Random random(seed_or(42));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const StateBuffers x = StateBuffers::random(5, 48, random);
        x.max[1] = -3e38F;
        x.max[2] = 3e38F;
        const StateBuffers into = StateBuffers::empty(5, 48);
        merge(table_of(isa), into, x);
        EXPECT_TRUE(same_states(into, x));
        merge(table_of(isa), into, StateBuffers::empty(5, 48));
        EXPECT_TRUE(same_states(into, x));
        const StateBuffers empty = StateBuffers::empty(5, 48);
        merge(table_of(isa), empty, StateBuffers::empty(5, 48));
        EXPECT_TRUE(same_states(empty, StateBuffers::empty(5, 48)));
    }
}

TEST(KernelsTestMerge, NaNPassesAndStaysInItsRow) {
    Random random(seed_or(43));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        // a NaN in the maximum, in the sum alone, or in one column, on either side; beside something or nothing
        for (const bool other_empty : {false, true}) {
            for (const bool nan_in_into : {false, true}) {
                const StateBuffers bad = StateBuffers::random(4, 32, random);
                bad.max[0] = kNaN;
                bad.sum[0] = kNaN;
                bad.sum[1] = kNaN;
                bad.at(2, 7) = kNaN;
                const StateBuffers other =
                    other_empty ? StateBuffers::empty(4, 32) : StateBuffers::random(4, 32, random);
                const StateBuffers& into = nan_in_into ? bad : other;
                merge(table_of(isa), into, nan_in_into ? other : bad);
                EXPECT_TRUE(std::isnan(into.sum[0]));
                EXPECT_TRUE(std::isnan(into.sum[1]));
                EXPECT_TRUE(std::isnan(into.at(2, 7)));
                EXPECT_TRUE(std::isfinite(into.sum[2]) && std::isfinite(into.max[2]));
                for (std::size_t c = 0; c < 32; ++c) {
                    ASSERT_EQ(std::isnan(into.at(2, c)), c == 7);
                    ASSERT_TRUE(std::isfinite(into.at(3, c)));
                }
                // whatever is merged later, the row stays NaN
                merge(table_of(isa), into, StateBuffers::random(4, 32, random));
                EXPECT_TRUE(std::isnan(into.sum[0]) && std::isnan(into.sum[1]) && std::isnan(into.at(2, 7)));
            }
        }
    }
}

TEST(KernelsTestFinish, DividesAndCleans) {
    Random random(seed_or(44));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (std::size_t columns = 1; columns <= 50; ++columns) {
            const StateBuffers states = StateBuffers::random(6, kernels::padded_columns(columns), random);
            states.at(0, 0) = -0.0F;
            states.at(1, 0) = std::bit_cast<float>(0xFFC12345U);  // NaN with a sign and a payload
            states.at(2, columns - 1) = -kInfinity;
            states.max[3] = kNaN;
            states.sum[3] = kNaN;
            states.max[4] = -kInfinity;  // empty, with the output of an empty state
            states.sum[4] = 0.0F;
            for (std::size_t c = 0; c < kernels::padded_columns(columns); ++c) states.at(4, c) = 0.0F;
            states.at(5, 0) = -1e-40F;  // its quotient may round to -0
            states.sum[5] = 512.0F;
            const std::size_t stride = columns + static_cast<std::size_t>(random.integer(0, 3));
            const GuardedFloats out(5 * stride + columns);
            table_of(isa).finish({states.states(), 6, columns, out.data(), stride});
            for (std::size_t r = 0; r < 6; ++r) {
                for (std::size_t c = 0; c < stride && r * stride + c < out.size(); ++c) {
                    float want = kCanary;
                    if (c < columns) {
                        want = r == 4 ? 0.0F : states.at(r, c) / states.sum[r] + 0.0F;
                        if (std::isnan(want)) want = std::bit_cast<float>(0x7FC00000U);
                    }
                    ASSERT_TRUE(same_bits(out[r * stride + c], want))
                        << columns << " columns, " << r << " " << c << ": " << bits_text(out[r * stride + c])
                        << ", want " << bits_text(want);
                }
            }
        }
    }
}

TEST(KernelsTestTables, NamesAndEntries) {
    HEADLONG_FOR_EACH_ISA(isa) {
        const KernelTable& table = table_of(isa);
        EXPECT_STREQ(table.name, to_string(isa));
        EXPECT_TRUE(table.dot_panels && table.softmax_span && table.weighted_rows && table.pack_panels &&
                    table.pack_values && table.widen && table.merge && table.finish && table.scale_rows && table.exp2);
    }
}

// ------------------------------------------------------------------------------------------------------- families

/// What the kernels of a table make of the same numbers: every kernel whose arithmetic is on floats.
std::vector<float> outputs_of(const KernelTable& table) {
    Random random(seed_or(46));
    std::vector<float> all;
    const auto keep = [&](const float* data, std::size_t count) { all.insert(all.end(), data, data + count); };

    constexpr std::size_t kRows = 11, kDepth = 37, kColumns = 80;
    const DotBuffers dots({kRows, kColumns, kDepth}, random);
    dots.run(table);
    keep(dots.out.data(), dots.out.size());

    GuardedFloats scores(kRows * kSpanTokens);
    GuardedFloats bias(kSpanTokens);
    for (float& x : scores) x = 4.0F * random.normal_f32();
    fill_normal(bias, random);
    bias[70] = -kInfinity;
    std::vector<TokenRange> ranges;
    std::vector<float> slopes, positions, max(kRows), sum(kRows);
    std::vector<const float*> biases;
    for (std::uint32_t r = 0; r < kRows; ++r) {
        ranges.push_back({3 * r, 500 + r});
        slopes.push_back(0.01F * static_cast<float>(r));
        positions.push_back(400.0F);
        biases.push_back(bias.data());
    }
    table.softmax_span({scores.data(),
                        kSpanTokens,
                        kRows,
                        ranges.data(),
                        0,
                        kSpanTokens,
                        max.data(),
                        sum.data(),
                        {20.0F, slopes.data(), positions.data(), biases.data()}});
    keep(scores.data(), scores.size());
    keep(max.data(), kRows);
    keep(sum.data(), kRows);

    constexpr std::size_t kPitch = 48;
    GuardedFloats values(kSpanTokens * kPitch);
    fill_normal(values, random);
    std::vector<const void*> blocks;
    for (std::size_t b = 0; b < 8; ++b) blocks.push_back(values.data() + b * 64 * kPitch);
    GuardedFloats output(2 * kRows * kPitch);
    for (const std::uint32_t nonfinite : {0U, 0xFFU}) {
        table.weighted_rows({scores.data(), kSpanTokens, kRows, blocks.data(), nonfinite, 0, kSpanTokens, kPitch,
                             output.data() + (nonfinite != 0 ? kRows * kPitch : 0), kPitch});
    }
    keep(output.data(), output.size());

    std::vector<float> other_max(kRows, 3.0F), other_sum(kRows, 1.5F);
    const kernels::States into{output.data(), kPitch, max.data(), sum.data()};
    table.merge({into, {output.data() + kRows * kPitch, kPitch, other_max.data(), other_sum.data()}, kRows, kPitch});
    keep(output.data(), output.size());
    GuardedFloats finished(kRows * kPitch);
    table.finish({into, kRows, kPitch, finished.data(), kPitch});
    keep(finished.data(), finished.size());

    GuardedFloats made(kColumns), weight(kColumns), cosine(kColumns / 2), sine(kColumns / 2);
    for (const GuardedFloats* floats : {&made, &weight, &cosine, &sine}) fill_normal(*floats, random);
    table.rms_norm({dots.out.data(), kColumns, 1, kColumns, weight.data(), 1e-5F, made.data(), kColumns});
    keep(made.data(), kColumns);
    for (const bool interleaved : {false, true}) {
        table.rotate({made.data(), 1, kColumns, kColumns / 2, cosine.data(), sine.data(), interleaved});
        keep(made.data(), kColumns);
    }
    table.layer_norm({made.data(), kColumns, 1, kColumns, weight.data(), weight.data(), 1e-5F, made.data(), kColumns});
    keep(made.data(), kColumns);
    for (const kernels::Activation activation : {kernels::Activation::silu, kernels::Activation::gelu,
                                                 kernels::Activation::gelu_tanh, kernels::Activation::clamped_silu}) {
        table.activate({made.data(), weight.data(), made.data(), kColumns, activation, 7.0F});
        keep(made.data(), kColumns);
    }
    table.add_scaled({weight.data(), 0.3F, made.data(), kColumns});
    keep(made.data(), kColumns);
    table.exp2(made.data(), made.data(), kColumns);
    keep(made.data(), kColumns);
    return all;
}

// A cache filled on a machine with dot products goes on, bit for bit, on one without.
TEST(KernelsTestFamilies, GiveTheSameBitsInFloats) {
    const std::vector<Isa> isas = available_isas();
    const auto available = [&](Isa isa) { return std::find(isas.begin(), isas.end(), isa) != isas.end(); };
    for (const auto& [plain, with_dot_products] :
         {std::pair{Isa::avx2, Isa::avx2vnni}, {Isa::avx512, Isa::avx512vnni}, {Isa::neon, Isa::neondot}}) {
        if (!available(plain) || !available(with_dot_products)) continue;
        SCOPED_TRACE(to_string(with_dot_products));
        EXPECT_TRUE(same_bits(outputs_of(table_of(plain)), outputs_of(table_of(with_dot_products))));
    }
}

// ------------------------------------------------------------------------------------------------ the limits' loops

TEST(LimitsTest, LoopsGiveTheirSums) {
    HEADLONG_FOR_EACH_ISA(isa) {
        const KernelTable& table = table_of(isa);
        for (const std::size_t rounds : {0U, 1U, 7U, 1000U}) {
            EXPECT_EQ(table.fma_loop(rounds), static_cast<double>(rounds * table.fma_flops / 2) * 0x1p-20);
            EXPECT_EQ(table.dot_loop(rounds), static_cast<std::uint32_t>(rounds * table.dot_ops / 2));
        }
        // small whole numbers: every order of adding them up gives the same
        GuardedFloats floats(3 * kernels::kReadFloats);
        double sum = 0.0;
        for (std::size_t i = 0; i < floats.size(); ++i) {
            floats[i] = static_cast<float>(i % 7);
            sum += static_cast<double>(i % 7);
        }
        for (const std::size_t prefetch : {0U, 64U, 4096U}) {
            EXPECT_EQ(table.read_loop({floats.data(), floats.size(), 1, prefetch}), static_cast<float>(sum));
            EXPECT_EQ(table.read_loop({floats.data(), floats.size(), 5, prefetch}), static_cast<float>(5 * sum));
        }
    }
}

TEST(LimitsTest, SumsAreKnown) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t threads : {1U, 2U}) {
            const std::unique_ptr<Context> context = make_context(isa, threads);
            // they throw if a loop's sum is not the known one
            EXPECT_GT(measure_flops(*context), 0.0);
            EXPECT_GT(measure_int8_ops(*context), 0.0);
            EXPECT_GT(measure_clock(*context), 0.0);
            ReadBuffer buffer(5'000'000, context->memory());
            EXPECT_GE(buffer.bytes(), 5'000'000U);
            EXPECT_GT(buffer.measure(*context, buffer.bytes(), 10'000'000), 0.0);
            EXPECT_GT(buffer.measure(*context, 1, 1), 0.0) << "of almost nothing, a little more";
        }
    }
}

}  // namespace
}  // namespace headlong::test
