// The kernels' features beside the plain operator, on every instruction set: 16-bit elements in and out, masks as
// biases, and the rules for scores (softcap, ALiBi, bias).
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "engine/isa.hpp"
#include "engine/reference/tensor.hpp"
#include "kernels/half.hpp"
#include "kernels/kernel_table.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

using kernels::ElementType;
using kernels::kSpanTokens;
using kernels::TokenRange;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLog2E = 0x1.715476p+0F;

float widen(ElementType type, std::uint16_t bits) {
    return static_cast<float>(type == ElementType::f16 ? reference::widen_f16(bits) : reference::widen_bf16(bits));
}

/// The nearest element, ties to even, found by looking at the two neighbours: shares no code with the kernels.
std::uint16_t nearest(ElementType type, float x) {
    const std::uint16_t sign = std::signbit(x) ? 0x8000U : 0U;
    const std::uint16_t infinity = type == ElementType::f16 ? 0x7C00U : 0x7F80U;
    if (std::isnan(x)) return type == ElementType::f16 ? 0x7E00U : 0x7FC0U;
    const double magnitude = std::abs(static_cast<double>(x));
    // magnitudes grow with their bits, the infinity taking the place of the next power of two
    const auto value = [&](std::uint16_t bits) {
        return bits == infinity ? (type == ElementType::f16 ? 65536.0 : 0x1p128)
                                : static_cast<double>(widen(type, bits));
    };
    std::uint16_t low = 0;
    std::uint16_t high = infinity;
    while (high - low > 1) {
        const auto middle = static_cast<std::uint16_t>((low + high) / 2);
        (value(middle) <= magnitude ? low : high) = middle;
    }
    if (magnitude >= value(high)) return static_cast<std::uint16_t>(sign | high);
    const double below = magnitude - value(low);
    const double above = value(high) - magnitude;
    const bool up = below > above || (below == above && low % 2 == 1);
    return static_cast<std::uint16_t>(sign | (up ? high : low));
}

/// 16-bit elements that end on an inaccessible page.
struct Halves {
    GuardedBytes memory;
    std::size_t count;
    explicit Halves(std::size_t n) : memory(2 * n), count(n) {}
    std::uint16_t* data() const { return reinterpret_cast<std::uint16_t*>(memory.data()); }
    std::uint16_t& operator[](std::size_t i) const { return data()[i]; }
};

const std::vector<ElementType> kHalves{ElementType::f16, ElementType::bf16};

// ---------------------------------------------------------------------------------------------------- 16 bits

TEST(FeatureKernelsTestHalf, EveryElementIsWidenedExactly) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const ElementType type : kHalves) {
            Halves all(65536);
            for (std::size_t i = 0; i < all.count; ++i) all[i] = static_cast<std::uint16_t>(i);
            // 19 columns: whole vectors, and a tail that goes one by one
            for (const std::size_t columns : {std::size_t{65536}, std::size_t{19}, std::size_t{1}}) {
                const std::size_t rows = 65536 / columns;
                std::vector<float> out(rows * columns);
                table_of(isa).scale_rows({{all.data(), type, static_cast<std::ptrdiff_t>(columns), 1, rows, columns},
                                          1.0F,
                                          out.data(),
                                          columns});
                for (std::size_t i = 0; i < out.size(); ++i) {
                    const float want = widen(type, static_cast<std::uint16_t>(i));
                    if (std::isnan(want)) {
                        ASSERT_TRUE(std::isnan(out[i])) << i;
                    } else {
                        ASSERT_TRUE(same_bits(out[i], want)) << i << " is " << out[i] << ", not " << want;
                    }
                }
            }
        }
    }
}

TEST(FeatureKernelsTestHalf, EveryFloatIsRoundedToNearestEven) {
    Random random(seed_or(71));
    HEADLONG_TRACE_SEED(random);
    std::vector<float> inputs{0.0F,     -0.0F,        kInfinity,    -kInfinity, kNaN,
                              65504.0F, 65519.99F,    65520.0F,     65536.0F,   3.4e38F,
                              -3.4e38F, 0x1p-24F,     0x1.8p-24F,   0x1p-25F,   0x1.000002p-25F,
                              0x1p-14F, 0x1.ffcp-15F, 0x1.ffep-15F, 0x1p-126F,  0x1p-149F};
    for (std::uint32_t i = 0; i < (emulated() ? 2000U : 20000U); ++i) {
        const auto bits = static_cast<std::uint32_t>(random.bits());
        inputs.push_back(std::bit_cast<float>(bits));
        inputs.push_back(std::bit_cast<float>(bits & 0xFFFF8000U));     // half-way between two bf16
        inputs.push_back(static_cast<float>(random.normal() * 100.0));  // in the range of f16
        inputs.push_back(std::bit_cast<float>((std::bit_cast<std::uint32_t>(inputs.back()) & 0xFFFFF000U) | 0x1000U));
        inputs.push_back(static_cast<float>(random.normal()) * 0x1p-16F);  // around f16's subnormals
    }
    const std::size_t count = inputs.size();
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const ElementType type : kHalves) {
            for (const std::ptrdiff_t stride : {1, 2}) {
                const Halves out((count - 1) * static_cast<std::size_t>(stride) + 1);
                std::fill_n(out.data(), out.count, std::uint16_t{0x1234});
                table_of(isa).store_rows({inputs.data(), 0, 1, count, out.data(), type, 0, stride});
                for (std::size_t i = 0; i < out.count; ++i) {
                    const std::size_t step = static_cast<std::size_t>(stride);
                    const std::uint16_t want = i % step == 0 ? nearest(type, inputs[i / step]) : 0x1234U;
                    ASSERT_EQ(out[i], want)
                        << "of " << inputs[i / step] << " bits " << std::bit_cast<std::uint32_t>(inputs[i / step]);
                }
            }
        }
    }
}

TEST(FeatureKernelsTestHalf, PackingIsThatOfTheWidenedRows) {
    Random random(seed_or(72));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const kernels::KernelTable& table = table_of(isa);
        for (int draw = 0; draw < (emulated() ? 60 : 400); ++draw) {
            const ElementType type = random.pick(kHalves);
            const auto rows = static_cast<std::size_t>(random.integer(1, 40));
            const auto columns = static_cast<std::size_t>(random.pick(std::vector<int>{1, 3, 7, 8, 9, 16, 17, 33, 64}));
            const bool transposed = random.chance(0.3);
            const auto row_stride = transposed ? 1 : static_cast<std::ptrdiff_t>(columns) + random.integer(0, 2);
            const auto column_stride = transposed           ? static_cast<std::ptrdiff_t>(rows) + random.integer(0, 2)
                                       : random.chance(0.2) ? 0
                                                            : 1;
            const Halves source(static_cast<std::size_t>(static_cast<std::ptrdiff_t>(rows - 1) * row_stride +
                                                         static_cast<std::ptrdiff_t>(columns - 1) * column_stride) +
                                1);
            for (std::size_t i = 0; i < source.count; ++i) source[i] = nearest(type, random.normal_f32());
            std::vector<float> wide(rows * columns);
            for (std::size_t i = 0; i < rows; ++i) {
                for (std::size_t j = 0; j < columns; ++j) {
                    wide[i * columns + j] =
                        widen(type, source[static_cast<std::size_t>(static_cast<std::ptrdiff_t>(i) * row_stride +
                                                                    static_cast<std::ptrdiff_t>(j) * column_stride)]);
                }
            }
            const kernels::Rows narrow{source.data(), type, row_stride, column_stride, rows, columns};
            const kernels::Rows plain{wide.data(), ElementType::f32, static_cast<std::ptrdiff_t>(columns), 1,
                                      rows,        columns};
            const auto lane = static_cast<std::size_t>(random.integer(0, 20));
            const std::size_t tokens = kernels::round_up(lane + rows, 16);
            const GuardedFloats a(tokens * columns);
            const GuardedFloats b(tokens * columns);
            table.pack_panels({narrow, a.data(), lane});
            table.pack_panels({plain, b.data(), lane});
            ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << rows << " x " << columns;
            const std::size_t block = kernels::kBlockTokens * kernels::padded_columns(columns);
            const GuardedFloats c(block);
            const GuardedFloats d(block);
            ASSERT_FALSE(table.pack_values({narrow, c.data(), lane}));
            ASSERT_FALSE(table.pack_values({plain, d.data(), lane}));
            ASSERT_EQ(std::memcmp(c.data(), d.data(), c.size() * sizeof(float)), 0) << rows << " x " << columns;
            // one infinity or NaN anywhere is reported
            source[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(rows) - 1) * row_stride)] =
                type == ElementType::f16 ? 0xFC00U : 0x7F81U;
            ASSERT_TRUE(table.pack_values({narrow, c.data(), lane}));
        }
    }
}

TEST(FeatureKernelsTestHalf, PackingTo16BitsRoundsToNearestEven) {
    Random random(seed_or(77));
    HEADLONG_TRACE_SEED(random);
    const std::vector<float> awkward{65504.0F,        65519.99F, -65520.0F, 3e38F,           0x1.002p0F,
                                     0x1.006p0F,      0x1.01p0F, 0x1.03p0F, 0x1.00200002p0F, 0x1.010002p0F,
                                     0x1.000002p-25F, 0x1p-25F,  -0.0F,     0x1p-149F,       0x1.ffcp-15F,
                                     kInfinity,       kNaN};
    HEADLONG_FOR_EACH_ISA(isa) {
        const kernels::KernelTable& table = table_of(isa);
        for (int draw = 0; draw < (emulated() ? 100 : 800); ++draw) {
            const ElementType from =
                random.pick(std::vector<ElementType>{ElementType::f32, ElementType::f16, ElementType::bf16});
            const ElementType to = random.pick(kHalves);
            const auto rows = static_cast<std::size_t>(random.integer(1, 44));
            const auto columns = static_cast<std::size_t>(random.pick(std::vector<int>{1, 3, 7, 8, 9, 16, 17, 33, 64}));
            const bool transposed = random.chance(0.3);
            const auto row_stride = transposed ? 1 : static_cast<std::ptrdiff_t>(columns) + random.integer(0, 2);
            const auto column_stride = transposed           ? static_cast<std::ptrdiff_t>(rows) + random.integer(0, 2)
                                       : random.chance(0.2) ? 2
                                                            : 1;
            const std::size_t count =
                static_cast<std::size_t>(static_cast<std::ptrdiff_t>(rows - 1) * row_stride +
                                         static_cast<std::ptrdiff_t>(columns - 1) * column_stride) +
                1;
            const std::size_t bytes = kernels::element_bytes(from);
            const GuardedBytes source(count * bytes);
            std::vector<float> numbers(count);  // what the source holds
            const double often = random.pick(std::vector<double>{0.0, 0.02, 0.5});
            for (std::size_t i = 0; i < count; ++i) {
                float x = random.chance(often) ? random.pick(awkward) : random.normal_f32();
                if (from == ElementType::f32) {
                    std::memcpy(source.data() + i * bytes, &x, bytes);
                } else {
                    const std::uint16_t half = nearest(from, x);
                    std::memcpy(source.data() + i * bytes, &half, bytes);
                    x = widen(from, half);
                }
                numbers[i] = x;
            }
            const auto number = [&](std::size_t row, std::size_t column) {
                return numbers[static_cast<std::size_t>(static_cast<std::ptrdiff_t>(row) * row_stride +
                                                        static_cast<std::ptrdiff_t>(column) * column_stride)];
            };
            const kernels::Rows view{source.data(), from, row_stride, column_stride, rows, columns};
            const auto lane = static_cast<std::size_t>(random.integer(0, 20));
            constexpr std::uint16_t kUntouched = 0x7DA5;

            const std::size_t tokens = kernels::round_up(lane + rows, 16);
            const Halves panels(kernels::round_up(tokens * columns, 32));  // begins on a cache line
            std::fill_n(panels.data(), panels.count, kUntouched);
            table.pack_panels({view, panels.data(), lane, to});
            for (std::size_t token = 0; token < tokens; ++token) {
                const bool written = token >= lane && token < lane + rows;
                for (std::size_t c = 0; c < columns; ++c) {
                    ASSERT_EQ(panels[(token / 16 * columns + c) * 16 + token % 16],
                              written ? nearest(to, number(token - lane, c)) : kUntouched)
                        << "token " << token << ", column " << c << " of " << rows << " x " << columns;
                }
            }

            const Halves values(kernels::kBlockTokens * kernels::padded_columns(columns));
            std::fill_n(values.data(), values.count, kUntouched);
            const bool reported = table.pack_values({view, values.data(), lane, to});
            bool nonfinite = false;
            for (std::size_t token = 0; token < kernels::kBlockTokens; ++token) {
                const bool written = token >= lane && token < lane + rows;
                for (std::size_t c = 0; c < kernels::padded_columns(columns); ++c) {
                    std::uint16_t want = kUntouched;
                    if (written) want = c < columns ? nearest(to, number(token - lane, c)) : 0;
                    if (written) nonfinite = nonfinite || !std::isfinite(widen(to, want));
                    ASSERT_EQ(values[kernels::value_index(token, c)], want)
                        << "token " << token << ", column " << c << " of " << rows << " x " << columns;
                }
            }
            ASSERT_EQ(reported, nonfinite);
        }
    }
}

// Finite in the caller's memory, infinite in the cache: that is what the guard must know.
TEST(FeatureKernelsTestHalf, WhatOverflowsWhenRoundedIsReported) {
    HEADLONG_FOR_EACH_ISA(isa) {
        const Halves values(kernels::kBlockTokens * 32);
        std::vector<float> row(23, 1.0F);
        for (const std::size_t column : {std::size_t{0}, std::size_t{15}, std::size_t{16}, std::size_t{22}}) {
            const auto reported = [&](ElementType type, float x) {
                std::vector<float> with = row;
                with[column] = x;
                return table_of(isa).pack_values(
                    {{with.data(), ElementType::f32, 23, 1, 1, 23}, values.data(), 9, type});
            };
            EXPECT_FALSE(reported(ElementType::f16, 65519.99F));
            EXPECT_TRUE(reported(ElementType::f16, 65520.0F));
            EXPECT_TRUE(reported(ElementType::f16, -1e30F));
            EXPECT_FALSE(reported(ElementType::bf16, 0x1.fefffep127F));
            EXPECT_TRUE(reported(ElementType::bf16, 0x1.ffp127F));
        }
    }
}

TEST(FeatureKernelsTestHalf, WidenIsExact) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const ElementType type : kHalves) {
            const Halves all(65536);
            for (std::size_t i = 0; i < all.count; ++i) all[i] = static_cast<std::uint16_t>(i);
            const GuardedFloats out(all.count);
            for (const std::size_t count : {std::size_t{16}, std::size_t{48}, all.count}) {
                table_of(isa).widen({all.data() + (all.count - count), type, out.data() + (all.count - count), count});
                for (std::size_t i = 0; i < all.count; ++i) {
                    const float want = widen(type, static_cast<std::uint16_t>(i));
                    if (i < all.count - count) {
                        ASSERT_TRUE(is_canary(out[i])) << i;
                    } else if (std::isnan(want)) {
                        ASSERT_TRUE(std::isnan(out[i]) && !is_canary(out[i])) << i;
                    } else {
                        ASSERT_TRUE(same_bits(out[i], want)) << i << " is " << out[i] << ", not " << want;
                    }
                }
            }
        }
    }
}

TEST(FeatureKernelsTestHalf, SignallingNaNsOfFloatsKeepTheirBitsInACache) {
    HEADLONG_FOR_EACH_ISA(isa) {
        const std::vector<std::uint32_t> bits{0x7F800001U, 0xFFA00000U, 0x7FC12345U, 0x80000000U, 1U, 0x3F800000U,
                                              2U,          3U,          4U,          5U,          6U};
        std::vector<float> rows(bits.size());
        std::memcpy(rows.data(), bits.data(), bits.size() * sizeof(float));
        const GuardedFloats out(kernels::kBlockTokens * 16);
        EXPECT_TRUE(table_of(isa).pack_values({{rows.data(), ElementType::f32, 0, 1, 1, rows.size()}, out.data(), 0}));
        EXPECT_EQ(std::memcmp(out.data(), bits.data(), bits.size() * sizeof(float)), 0);
    }
}

// ------------------------------------------------------------------------------------------------------- masks

TEST(FeatureKernelsTestMaskRow, BooleansOfAnyStride) {
    Random random(seed_or(73));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (int draw = 0; draw < (emulated() ? 100 : 600); ++draw) {
            const auto begin = static_cast<std::uint32_t>(random.integer(0, 511));
            const auto end = static_cast<std::uint32_t>(random.integer(begin, 512));
            const std::ptrdiff_t stride = random.pick(std::vector<int>{1, 1, 1, 0, 2, 3, -1});
            const std::size_t count = end - begin;
            const auto reach = static_cast<std::size_t>(std::abs(stride)) * (count == 0 ? 0 : count - 1) + 1;
            const GuardedBytes memory(reach, stride < 0 ? Touch::begin : Touch::end);
            const std::byte* first = memory.data() + (stride < 0 ? reach - 1 : 0);
            const double density = random.pick(std::vector<double>{0.0, 0.02, 0.5, 1.0});
            for (std::size_t i = 0; i < reach; ++i) {
                memory.data()[i] = static_cast<std::byte>(random.chance(density) ? random.integer(1, 255) : 0);
            }
            const GuardedFloats bias(kSpanTokens);
            const TokenRange allowed =
                table_of(isa).mask_row({first, true, ElementType::f32, stride, {begin, end}, kLog2E, bias.data()});
            std::uint32_t want_begin = end;
            std::uint32_t want_end = begin;
            for (std::uint32_t t = 0; t < kSpanTokens; ++t) {
                if (t < begin || t >= end) {
                    ASSERT_TRUE(is_canary(bias[t])) << t;
                    continue;
                }
                const bool on = first[static_cast<std::ptrdiff_t>(t - begin) * stride] != std::byte{0};
                ASSERT_TRUE(same_bits(bias[t], on ? 0.0F : -kInfinity)) << t;
                if (on) {
                    want_begin = std::min(want_begin, t);
                    want_end = t + 1;
                }
            }
            if (want_begin < want_end) {
                ASSERT_EQ(allowed.begin, want_begin);
                ASSERT_EQ(allowed.end, want_end);
            } else {
                ASSERT_GE(allowed.begin, allowed.end);
            }
        }
    }
}

TEST(FeatureKernelsTestMaskRow, FloatsOfEveryType) {
    Random random(seed_or(74));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (int draw = 0; draw < (emulated() ? 100 : 600); ++draw) {
            const ElementType type =
                random.pick(std::vector<ElementType>{ElementType::f32, ElementType::f16, ElementType::bf16});
            const auto begin = static_cast<std::uint32_t>(random.integer(0, 60));
            const auto end = static_cast<std::uint32_t>(random.integer(begin + 1, 130));
            const std::ptrdiff_t stride = random.pick(std::vector<int>{1, 1, 0, 2});
            const float unit = random.chance(0.8) ? kLog2E : 1.0F;
            const std::size_t count = static_cast<std::size_t>(stride) * (end - begin - 1) + 1;
            const GuardedBytes memory(count * (type == ElementType::f32 ? 4 : 2));
            std::vector<float> values(count);
            for (std::size_t i = 0; i < count; ++i) {
                float x = random.normal_f32();
                if (random.chance(0.2)) x = -kInfinity;
                if (random.chance(0.02)) x = random.chance(0.5) ? kNaN : kInfinity;
                if (random.chance(0.05)) x = std::numeric_limits<float>::max() * (random.chance(0.5) ? 1.0F : -1.0F);
                if (type == ElementType::f32) {
                    std::memcpy(memory.data() + 4 * i, &x, 4);
                } else {
                    const std::uint16_t half = nearest(type, x);
                    std::memcpy(memory.data() + 2 * i, &half, 2);
                    x = widen(type, half);
                }
                values[i] = x;
            }
            const GuardedFloats bias(kSpanTokens);
            const TokenRange allowed =
                table_of(isa).mask_row({memory.data(), false, type, stride, {begin, end}, unit, bias.data()});
            std::uint32_t want_begin = end;
            std::uint32_t want_end = begin;
            for (std::uint32_t t = begin; t < end; ++t) {
                const float x = values[static_cast<std::size_t>(stride) * (t - begin)];
                if (x != -kInfinity) {
                    want_begin = std::min(want_begin, t);
                    want_end = t + 1;
                }
                if (std::isnan(x)) {
                    ASSERT_TRUE(std::isnan(bias[t])) << t;
                } else if (std::isfinite(x)) {  // finite biases stay finite: -FLT_MAX is not "not allowed"
                    constexpr float kMost = std::numeric_limits<float>::max();
                    ASSERT_EQ(bias[t], std::clamp(x * unit, -kMost, kMost)) << x;
                } else {
                    ASSERT_TRUE(same_bits(bias[t], x)) << t;
                }
            }
            if (want_begin < want_end) {
                ASSERT_EQ(allowed.begin, want_begin);
                ASSERT_EQ(allowed.end, want_end);
            } else {
                ASSERT_GE(allowed.begin, allowed.end);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------- rules

/// A tile of rows of scores with everything that rules may read. Dead lanes hold NaN.
struct RuleBuffers {
    std::size_t rows;
    GuardedFloats scores;
    std::vector<TokenRange> ranges;
    std::vector<float> slopes, positions;
    std::vector<GuardedFloats> bias;
    std::vector<const float*> bias_rows;

    RuleBuffers(std::size_t row_count, Random& random) : rows(row_count), scores(row_count * kSpanTokens) {
        std::fill(scores.begin(), scores.end(), kNaN);
        for (std::size_t r = 0; r < rows; ++r) {
            const auto begin = static_cast<std::uint32_t>(random.integer(0, 300));
            ranges.push_back({begin, static_cast<std::uint32_t>(random.integer(begin, 512))});
            slopes.push_back(static_cast<float>(random.uniform(0.0, 1.0)));
            positions.push_back(static_cast<float>(random.integer(-600, 2000)));
            bias.emplace_back(kSpanTokens);
            for (std::size_t t = ranges[r].begin; t < ranges[r].end; ++t) {
                at(r, t) = static_cast<float>(random.normal() * 8.0);
                bias[r][t] = random.chance(0.3) ? -kInfinity : random.normal_f32();
            }
        }
        for (const GuardedFloats& row : bias) bias_rows.push_back(row.data());
    }
    float& at(std::size_t r, std::size_t t) const { return scores[r * kSpanTokens + t]; }
    kernels::ScoreRules rules(bool softcap, bool alibi, bool biases) const {
        kernels::ScoreRules rules;
        if (softcap) rules.softcap = 7.5F;
        if (alibi) {
            rules.slopes = slopes.data();
            rules.positions = positions.data();
        }
        if (biases) rules.bias = bias_rows.data();
        return rules;
    }
};

TEST(FeatureKernelsTestRules, EveryCombinationAgainstDouble) {
    Random random(seed_or(75));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (unsigned which = 0; which < 8; ++which) {
            const bool softcap = (which & 1U) != 0;
            const bool alibi = (which & 2U) != 0;
            const bool biases = (which & 4U) != 0;
            const RuleBuffers b(5, random);
            std::vector<double> want(b.scores.size());
            for (std::size_t r = 0; r < b.rows; ++r) {
                for (std::size_t t = b.ranges[r].begin; t < b.ranges[r].end; ++t) {
                    double s = static_cast<double>(b.at(r, t));
                    if (softcap) s = 7.5 * std::tanh(s / 7.5);
                    if (alibi) {
                        s -= static_cast<double>(b.slopes[r]) *
                             std::abs(static_cast<double>(b.positions[r]) - static_cast<double>(t));
                    }
                    if (biases) s += static_cast<double>(b.bias[r][t]);
                    want[r * kSpanTokens + t] = s;
                }
            }
            table_of(isa).adjust_scores(
                {b.scores.data(), kSpanTokens, b.rows, b.ranges.data(), b.rules(softcap, alibi, biases)});
            for (std::size_t r = 0; r < b.rows; ++r) {
                for (std::size_t t = b.ranges[r].begin; t < b.ranges[r].end; ++t) {
                    const double expected = want[r * kSpanTokens + t];
                    if (std::isinf(expected)) {
                        ASSERT_EQ(b.at(r, t), -kInfinity);
                        continue;
                    }
                    // each step rounds a number of at most 7.5 + 2600 + 6
                    const double bound = (softcap ? 4e-6 : 0.0) + 3 * 0x1p-24 * std::max(32.0, std::abs(expected));
                    ASSERT_NEAR(b.at(r, t), expected, bound) << which << " row " << r << " token " << t;
                }
            }
        }
    }
}

TEST(FeatureKernelsTestRules, SoftcapIsAccurateEverywhere) {
    // tanh near 0, around the change of formulas at 0.625 and where it saturates; its sign, infinities and NaN
    std::vector<float> inputs{0.0F, -0.0F, kInfinity, -kInfinity, 1e-30F, -1e-30F, 3e38F, -3e38F};
    for (int i = -4000; i <= 4000; ++i) inputs.push_back(static_cast<float>(i) * 0.005F);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const float cap : {1.0F, 30.0F * kLog2E, 1e-30F, 1e30F, 0.37F}) {
            for (std::size_t first = 0; first < inputs.size(); first += kSpanTokens) {
                const auto count = static_cast<std::uint32_t>(std::min(kSpanTokens, inputs.size() - first));
                const GuardedFloats scores(kSpanTokens);
                for (std::size_t i = 0; i < count; ++i) scores[i] = inputs[first + i];
                if (std::isfinite(cap * 20.0F)) {
                    for (std::size_t i = 0; i < count; ++i) scores[i] *= cap;
                }
                const std::vector<float> before(scores.begin(), scores.end());
                const TokenRange range{0, count};
                kernels::ScoreRules rules;
                rules.softcap = cap;
                table_of(isa).adjust_scores({scores.data(), kSpanTokens, 1, &range, rules});
                for (std::size_t i = 0; i < count; ++i) {
                    const double want =
                        static_cast<double>(cap) * std::tanh(static_cast<double>(before[i]) / static_cast<double>(cap));
                    // relative: a small score must not lose its bits to the cap
                    ASSERT_NEAR(scores[i], want, std::abs(want) * 4e-7 + 1e-44) << before[i] << " under " << cap;
                    ASSERT_LE(std::abs(scores[i]), cap);
                }
            }
            GuardedFloats scores(16);
            std::fill(scores.begin(), scores.end(), kNaN);
            const TokenRange range{0, 16};
            kernels::ScoreRules rules;
            rules.softcap = cap;
            table_of(isa).adjust_scores({scores.data(), 16, 1, &range, rules});
            for (const float x : scores) ASSERT_TRUE(std::isnan(x));
        }
    }
}

TEST(FeatureKernelsTestRules, AMaskedNaNIsNotAScore) {
    HEADLONG_FOR_EACH_ISA(isa) {
        GuardedFloats scores(16);
        GuardedFloats bias(16);
        std::fill(scores.begin(), scores.end(), kNaN);
        std::fill(bias.begin(), bias.end(), -kInfinity);
        scores[3] = 2.0F;
        bias[3] = 1.0F;
        const float* const row = bias.data();
        kernels::ScoreRules rules;
        rules.bias = &row;
        const TokenRange range{0, 16};
        float max = 0.0F;
        float sum = 0.0F;
        table_of(isa).softmax_span({scores.data(), 16, 1, &range, 0, 16, &max, &sum, rules});
        EXPECT_EQ(max, 3.0F);
        EXPECT_EQ(sum, 1.0F);
        for (std::size_t t = 0; t < 16; ++t) ASSERT_TRUE(same_bits(scores[t], t == 3 ? 1.0F : -0.0F)) << t;
    }
}

TEST(FeatureKernelsTestRules, SoftmaxIsAdjustmentThenSoftmax) {
    Random random(seed_or(76));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const kernels::KernelTable& table = table_of(isa);
        for (int draw = 0; draw < 20; ++draw) {
            const RuleBuffers b(3, random);
            const kernels::ScoreRules rules = b.rules(random.chance(0.5), random.chance(0.5), random.chance(0.7));
            std::vector<float> adjusted(b.scores.begin(), b.scores.end());
            table.adjust_scores({adjusted.data(), kSpanTokens, b.rows, b.ranges.data(), rules});
            float max[3];
            float sum[3];
            float plain_max[3];
            float plain_sum[3];
            table.softmax_span({b.scores.data(), kSpanTokens, b.rows, b.ranges.data(), 0, 512, max, sum, rules});
            table.softmax_span(
                {adjusted.data(), kSpanTokens, b.rows, b.ranges.data(), 0, 512, plain_max, plain_sum, {}});
            for (std::size_t r = 0; r < b.rows; ++r) {
                ASSERT_TRUE(same_bits(max[r], plain_max[r]));
                ASSERT_TRUE(same_bits(sum[r], plain_sum[r]));
                for (std::size_t t = 0; t < kSpanTokens; ++t) {
                    const bool masked = rules.bias != nullptr && t >= b.ranges[r].begin && t < b.ranges[r].end &&
                                        b.bias[r][t] == -kInfinity;
                    // a score of -infinity weighs +0, a masked one -0
                    ASSERT_TRUE(same_bits(b.at(r, t), masked ? -0.0F : adjusted[r * kSpanTokens + t])) << r << " " << t;
                }
            }
        }
    }
}

}  // namespace
}  // namespace headlong::test
