// Weights x value panels of int8 and int4 codes, on every instruction set that this machine can run: what is quantised
// byte for byte against the formulas, and outputs bit for bit against integers and the few roundings that
// kernel_table.hpp names.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "engine/isa.hpp"
#include "kernels/kernel_table.hpp"
#include "kernels/layout.hpp"
#include "tests/support/any_tensor.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/codes.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

using kernels::StoredType;
using Sizes = std::vector<std::size_t>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint8_t kPoison = 0xA5;
constexpr std::array kTypes{StoredType::int8, StoredType::int4};
const char* name_of(StoredType type) { return type == StoredType::int8 ? "int8" : "int4"; }
int most(StoredType type) { return type == StoredType::int8 ? 127 : 7; }

/// The values of a block in guarded memory. Where what lies is said here again, from the words of layout.hpp.
struct ValueBlock {
    StoredType type;
    std::size_t columns;  ///< padding included
    GuardedBytes bytes;

    ValueBlock(StoredType block_type, std::size_t value_dim)
        : type(block_type),
          columns((value_dim + 15) / 16 * 16),
          bytes((columns + 127) / 128 * 256 + columns / 16 * panel_bytes()) {
        std::fill_n(bytes.data(), bytes.size(), std::byte{kPoison});
    }
    std::uint8_t* data() const { return reinterpret_cast<std::uint8_t*>(bytes.data()); }

    std::size_t panel_bytes() const { return type == StoredType::int8 ? 1024 : 512; }
    std::byte* group(std::size_t g) const { return bytes.data() + g * (256 + 8 * panel_bytes()); }
    std::byte* scale_at(std::size_t g, std::size_t token) const { return group(g) + token * 4; }
    std::byte& byte_of(std::size_t token, std::size_t column) const {
        const std::size_t pairs = type == StoredType::int8 ? token / 2 : token / 4;
        return group(column / 128)[256 + column % 128 / 16 * panel_bytes() + pairs * 32 + column % 16 * 2 + token % 2];
    }
    float scale(std::size_t g, std::size_t token) const {
        float value = 0.0F;
        std::memcpy(&value, scale_at(g, token), sizeof value);
        return value;
    }
    void set_scale(std::size_t g, std::size_t token, float value) const {
        std::memcpy(scale_at(g, token), &value, sizeof value);
    }
    int code(std::size_t token, std::size_t column) const {
        const int byte = std::to_integer<int>(byte_of(token, column));
        if (type == StoredType::int8) return byte < 128 ? byte : byte - 256;
        return (token % 4 < 2 ? byte % 16 : byte / 16) - 8;
    }
    void set_code(std::size_t token, std::size_t column, int code) const {
        std::byte& byte = byte_of(token, column);
        const int other = std::to_integer<int>(byte);
        if (type == StoredType::int8) {
            byte = static_cast<std::byte>(code < 0 ? code + 256 : code);
        } else if (token % 4 < 2) {
            byte = static_cast<std::byte>(other / 16 * 16 + code + 8);
        } else {
            byte = static_cast<std::byte>(other % 16 + (code + 8) * 16);
        }
    }
};

// ------------------------------------------------------------------------------------------------------ quantising

const Sizes& value_dims() {
    static const Sizes all{1, 2, 7, 15, 16, 17, 21, 64, 72, 80, 111, 127, 128, 129, 144, 192, 203, 256, 512};
    static const Sizes fewer{1, 15, 17, 80, 129, 203};
    return emulated() ? fewer : all;
}

TEST(WeightedCodesTestQuantise, TokensAreThoseOfTheFormulaAndOthersStay) {
    Random random(seed_or(91));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) {
        for (const std::size_t value_dim : value_dims()) {
            for (int turn = 0; turn < (emulated() ? 4 : 10); ++turn) {
                // every place among the four tokens of a byte's pairs, and whole blocks
                const auto first = turn < 9 ? static_cast<std::size_t>(random.integer(0, 63)) : std::size_t{0};
                const std::size_t rows =
                    turn < 9 ? static_cast<std::size_t>(random.integer(1, static_cast<std::int64_t>(64 - first))) : 64;
                const auto from = static_cast<Element>(random.integer(1, 3));
                const auto source = AnyTensor<2>::random(
                    from, {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(value_dim)}, random);
                const bool finite = turn % 2 == 0;
                const auto start = static_cast<std::size_t>(random.integer(0, 100));
                for_each_index<2>(source.extents(), [&](const Extents<2>& i) {
                    const auto c = static_cast<std::size_t>(i[1]);
                    const std::size_t special = start + static_cast<std::size_t>(i[0]) + c / 128;
                    Kind kind = special % 2 == 0 ? Kind::normal : kKinds[special / 2 % kKinds.size()];
                    if (finite && (kind == Kind::nan || kind == Kind::infinite || kind == Kind::large)) {
                        kind = Kind::one_outlier;  // of 16 bits the largest floats are infinite
                    }
                    source.set(i, static_cast<double>(number(kind, (c % 128 + special) % 128, random)));
                });
                const ValueBlock want(type, value_dim);
                ASSERT_EQ(want.bytes.size(), kernels::value_block_bytes(type, want.columns));
                bool nonfinite = false;
                for (std::size_t r = 0; r < rows; ++r) {
                    std::vector<float> row;
                    for (std::size_t c = 0; c < value_dim; ++c) {
                        row.push_back(static_cast<float>(
                            source.get({static_cast<std::int64_t>(r), static_cast<std::int64_t>(c)})));
                    }
                    const Codes codes(row, 128, most(type));
                    for (std::size_t g = 0; g < codes.scales.size(); ++g) {
                        want.set_scale(g, first + r, codes.scales[g]);
                        nonfinite = nonfinite || std::isnan(codes.scales[g]);
                    }
                    for (std::size_t c = 0; c < want.columns; ++c) {
                        want.set_code(first + r, c, c < value_dim ? codes.codes[c] : 0);
                    }
                }
                ASSERT_TRUE(!finite || !nonfinite);
                HEADLONG_FOR_EACH_ISA(isa) {
                    const ValueBlock got(type, value_dim);
                    EXPECT_EQ(table_of(isa).quantise_values(
                                  {{source.data(), static_cast<kernels::ElementType>(dtype_of(from)),
                                    source.strides()[0], source.strides()[1], rows, value_dim},
                                   got.data(),
                                   first,
                                   type}),
                              nonfinite);
                    const auto differs =
                        std::mismatch(got.bytes.data(), got.bytes.data() + got.bytes.size(), want.bytes.data());
                    ASSERT_EQ(differs.first - got.bytes.data(), static_cast<std::ptrdiff_t>(got.bytes.size()))
                        << value_dim << " columns of " << name_of(type) << ", " << rows << " tokens from " << first
                        << ", " << source.describe() << ": a byte is " << std::to_integer<int>(*differs.first)
                        << ", want " << std::to_integer<int>(*differs.second);
                }
            }
        }
    }
}

// One element that is no number, wherever it is: the flag says so, and only its group's scale does.
TEST(WeightedCodesTestQuantise, EveryNonfiniteElementIsSeen) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            for (const std::size_t value_dim : emulated() ? Sizes{21} : Sizes{1, 5, 16, 21, 150}) {
                for (std::size_t bad = 0; bad < value_dim; ++bad) {
                    for (const float x : {kNaN, -std::numeric_limits<float>::infinity()}) {
                        const GuardedFloats row(value_dim);
                        std::fill(row.begin(), row.end(), 1.0F);
                        row[bad] = x;
                        const ValueBlock block(type, value_dim);
                        EXPECT_TRUE(table_of(isa).quantise_values(
                            {{row.data(), kernels::ElementType::f32, 0, 1, 1, value_dim}, block.data(), 5, type}));
                        for (std::size_t g = 0; g < (value_dim + 127) / 128; ++g) {
                            ASSERT_EQ(std::isnan(block.scale(g, 5)), bad / 128 == g) << value_dim << " " << bad;
                        }
                        for (std::size_t c = 0; c < value_dim; ++c) {
                            ASSERT_EQ(block.code(5, c), c / 128 == bad / 128 ? 0 : most(type)) << value_dim << " " << c;
                        }
                    }
                }
            }
        }
    }
}

TEST(WeightedCodesTestQuantise, NothingToDo) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            EXPECT_FALSE(
                table_of(isa).quantise_values({{nullptr, kernels::ElementType::f16, 5, 1, 0, 5}, nullptr, 3, type}));
            EXPECT_FALSE(
                table_of(isa).quantise_values({{nullptr, kernels::ElementType::f32, 0, 1, 3, 0}, nullptr, 0, type}));
        }
    }
}

// ------------------------------------------------------------------------------------------------------ the products

constexpr std::size_t kStride = 528;  // as the engine's scores
constexpr std::size_t kTokens = 512;

/// A span: weights of rows, and 8 blocks of values. Everything starts as small as it may be: weights of -0, scales of
/// 0, codes of 0.
struct Span {
    StoredType type;
    std::size_t rows, columns;
    GuardedFloats weights;
    std::vector<float> sums;
    std::vector<ValueBlock> blocks;
    std::uint32_t nonfinite = 0;

    Span(StoredType span_type, std::size_t row_count, std::size_t column_count)
        : type(span_type),
          rows(row_count),
          columns(column_count),
          weights((rows - 1) * kStride + kTokens),
          sums(rows, 1.0F) {
        std::fill(weights.begin(), weights.end(), kCanary);
        for (std::size_t r = 0; r < rows; ++r) std::fill_n(weights.data() + r * kStride, kTokens, -0.0F);
        for (std::size_t b = 0; b < kTokens / 64; ++b) {
            blocks.emplace_back(type, columns);
            std::fill_n(blocks[b].bytes.data(), blocks[b].bytes.size(), std::byte{0});
        }
        for (std::size_t t = 0; t < kTokens; ++t) {
            for (std::size_t c = 0; c < columns; ++c) set_code(t, c, 0);
        }
    }

    float& weight(std::size_t r, std::size_t t) const { return weights[r * kStride + t]; }
    float scale(std::size_t t, std::size_t g) const { return blocks[t / 64].scale(g, t % 64); }
    void set_scale(std::size_t t, std::size_t g, float x) const { blocks[t / 64].set_scale(g, t % 64, x); }
    int code(std::size_t t, std::size_t c) const { return blocks[t / 64].code(t % 64, c); }
    void set_code(std::size_t t, std::size_t c, int code) const { blocks[t / 64].set_code(t % 64, c, code); }
    std::size_t groups() const { return (columns + 127) / 128; }

    /// What softmax leaves: weights up to 1 over a wide range, runs of tokens that a row may not see.
    void fill(Random& random) const {
        for (std::size_t r = 0; r < rows; ++r) {
            const double steep = random.uniform(0.0, 12.0);
            const bool masks = random.chance(0.6);
            const auto begin = static_cast<std::size_t>(masks ? random.integer(0, 200) : 0);
            const auto end = static_cast<std::size_t>(masks ? random.integer(210, 512) : 512);
            for (std::size_t t = 0; t < kTokens; ++t) {
                const bool sees = t >= begin && t < end && !(masks && random.chance(0.1));
                const double x = std::exp2(-random.uniform() * steep);
                weight(r, t) = !sees ? -0.0F : random.chance(0.02) ? 0.0F : static_cast<float>(x);
            }
        }
        for (std::size_t t = 0; t < kTokens; ++t) {
            for (std::size_t g = 0; g < groups(); ++g) {
                set_scale(t, g, random.chance(0.03) ? 0.0F : static_cast<float>(random.uniform(0.001, 0.05)));
            }
            for (std::size_t c = 0; c < columns; ++c) {
                set_code(t, c, static_cast<int>(random.integer(-most(type), most(type))));
            }
        }
    }

    struct Call {
        std::size_t row = 0, rows = 0, columns = 0, first = 0, last = kTokens;
        bool ahead = false;
    };
    Call all() const { return {0, rows, columns, 0, kTokens, false}; }

    /// Rows [row, row + rows) by the kernels of a set: [rows][columns]. Fails if anything else is written. Blocks that
    /// the call does not touch are not there.
    std::vector<float> run(Isa isa, const Call& call) const {
        const void* values[kTokens / 64] = {};
        for (std::size_t b = call.first / 64; b * 64 < call.last; ++b) values[b] = blocks[b].data();
        const std::size_t out_stride = call.columns + 16;
        const GuardedFloats out(call.rows == 0 ? 0 : (call.rows - 1) * out_stride + call.columns);
        std::vector<std::int16_t> codes(call.rows * kStride, 0x5A5A);
        table_of(isa).weighted_codes({.weights = weights.data() + call.row * kStride,
                                      .weight_stride = kStride,
                                      .row_count = call.rows,
                                      .sums = sums.data() + call.row,
                                      .value_blocks = values,
                                      .nonfinite_blocks = nonfinite,
                                      .first = call.first,
                                      .last = call.last,
                                      .columns = call.columns,
                                      .out = out.data(),
                                      .out_stride = out_stride,
                                      .type = type,
                                      .codes = codes.data(),
                                      .code_stride = kStride,
                                      .next = call.ahead ? blocks[0].bytes.data() + blocks[0].bytes.size() : nullptr});
        std::vector<float> got;
        for (std::size_t i = 0; i < out.size(); ++i) {
            if (i % out_stride < call.columns) {
                got.push_back(out[i]);
            } else {
                EXPECT_TRUE(is_canary(out[i])) << "wrote beyond the columns of a row";
            }
        }
        for (std::size_t i = 0; i < codes.size(); ++i) {
            if (i % kStride >= kTokens) {
                EXPECT_EQ(codes[i], 0x5A5A) << "wrote beyond the codes of a row";
            }
        }
        return got;
    }

    /// The same by the words of kernel_table.hpp: one rounding after the other, and sums of integers.
    std::vector<float> expected(const Call& call) const {
        std::vector<float> want;
        for (std::size_t row = call.row; row < call.row + call.rows; ++row) {
            for (std::size_t g = 0; g * 128 < call.columns; ++g) {
                const std::size_t end = std::min(call.columns, g * 128 + 128);
                std::vector<float> out(end - g * 128, 0.0F);
                for (std::size_t b = call.first / 64; b * 64 < call.last; ++b) {
                    const std::size_t first = std::max(call.first, b * 64);
                    const std::size_t last = std::min(call.last, b * 64 + 64);
                    add_block(row, g, first, last, out);
                }
                want.insert(want.end(), out.begin(), out.end());
            }
        }
        return want;
    }

    void add_block(std::size_t row, std::size_t g, std::size_t first, std::size_t last, std::vector<float>& out) const {
        float largest = 0.0F;
        bool nan = std::isnan(sums[row]);
        const auto product = [&](std::size_t t) {
            const float w = weight(row, t);
            return same_bits(w, -0.0F) ? 0.0F : w * scale(t, g);
        };
        for (std::size_t t = first; t < last; ++t) {
            const float p = product(t);
            nan = nan || std::isnan(p);
            largest = p > largest ? p : largest;
        }
        const bool empty = nan || largest < 0x1p-110F;
        std::vector<std::int64_t> codes(last);
        for (std::size_t t = first; t < last && !empty; ++t) {
            static constexpr int kReversed[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
            const float u = (static_cast<float>(kReversed[t % 16]) + 0.5F) / 16.0F;
            const float scaled = product(t) * (32767.0F / largest);
            const float moved = scaled + u;
            codes[t] = static_cast<std::int64_t>(std::floor(moved));
        }
        const float factor = largest / 32767.0F;
        for (std::size_t c = 0; c < out.size(); ++c) {
            std::int64_t sum = 0;
            for (std::size_t t = first; t < last && !empty; ++t) sum += codes[t] * code(t, g * 128 + c);
            const float part = nan ? kNaN : empty ? 0.0F : static_cast<float>(sum) * factor;
            const float sum_of_blocks = out[c] + part;
            out[c] = std::isnan(sum_of_blocks) ? kNaN : sum_of_blocks;  // of infinities, too
        }
    }
};

std::string text(const Span::Call& call) {
    return std::to_string(call.rows) + " rows from " + std::to_string(call.row) + ", " + std::to_string(call.columns) +
           " columns, tokens " + std::to_string(call.first) + " to " + std::to_string(call.last) +
           (call.ahead ? ", asking ahead" : "");
}

/// memcmp, but every NaN is one: which payload stays is free here.
testing::AssertionResult same(const std::vector<float>& got, const std::vector<float>& want) {
    std::vector<float> canonical = got;
    for (float& x : canonical) x = std::isnan(x) ? kNaN : x;
    return same_bits(canonical, want);
}

testing::AssertionResult is_right(const Span& span, Isa isa, const Span::Call& call) {
    const testing::AssertionResult result = same(span.run(isa, call), span.expected(call));
    return result ? result : testing::AssertionFailure() << result.message() << " (" << text(call) << ")";
}

// Every number of rows by every number of panels: what comes out knows of no tile.
TEST(WeightedCodesTest, EveryTileGivesTheSumsOfTheFormula) {
    Random random(seed_or(92));
    HEADLONG_TRACE_SEED(random);
    Sizes row_counts{48, 64, 65};
    for (std::size_t rows = 1; rows <= 13; ++rows) row_counts.push_back(rows);
    for (const StoredType type : kTypes) {
        const std::size_t most_rows = emulated() ? 13 : 65;
        Span span(type, most_rows, emulated() ? 208 : 512);
        span.fill(random);
        const std::vector<float> want = span.expected(span.all());
        HEADLONG_FOR_EACH_ISA(isa) {
            for (const std::size_t rows : row_counts) {
                if (rows > most_rows || (emulated() && rows % 4 != 1)) continue;
                for (std::size_t columns = 16; columns <= span.columns; columns += columns == 208 ? 304 : 16) {
                    if (emulated() && columns % 48 != 0 && columns != 208) continue;
                    Span::Call call = span.all();
                    call.row = columns % 32 == 0 ? most_rows - rows : 0;
                    call.rows = rows;
                    call.columns = columns;
                    call.ahead = (rows + columns / 16) % 2 == 0;
                    const std::vector<float> got = span.run(isa, call);
                    for (std::size_t r = 0; r < rows; ++r) {
                        const std::size_t width = std::min(columns, span.columns);
                        ASSERT_TRUE(same_bits(&got[r * columns], &want[(call.row + r) * span.columns], width))
                            << text(call) << ", row " << r << " of " << name_of(type);
                    }
                }
            }
        }
    }
}

// A tile sees any panels of the span; the largest product is that of these tokens alone.
TEST(WeightedCodesTest, AnyPartOfASpan) {
    Random random(seed_or(93));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) {
        const Span span = [&] {
            Span filled(type, 13, 144);
            filled.fill(random);
            return filled;
        }();
        for (std::size_t first = 0; first <= kTokens; first += 16) {
            for (std::size_t last = first; last <= kTokens; last += 16) {
                const bool near_ends = first < 80 || last > kTokens - 80 || last - first < 80;
                if (!near_ends && (first + last) % 112 != 0) continue;
                if (emulated() && (first / 16 * 3 + last / 16) % 41 != 0) continue;
                Span::Call call{
                    0,    1 + (first / 16 + last / 64) % 13, 16 + (first / 16 * 5 + last / 16) % 9 * 16, first,
                    last, (first + last) / 16 % 2 == 0};
                call.row = 13 - call.rows;
                const std::vector<float> want = span.expected(call);
                HEADLONG_FOR_EACH_ISA(isa) {
                    ASSERT_TRUE(same(span.run(isa, call), want)) << text(call) << ", " << name_of(type);
                }
            }
        }
    }
}

TEST(WeightedCodesTest, AskingAheadChangesNothing) {
    Random random(seed_or(94));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) {
        Span span(type, 13, 272);
        span.fill(random);
        HEADLONG_FOR_EACH_ISA(isa) {
            for (const std::size_t rows : Sizes{1, 3, 13}) {
                Span::Call call = span.all();
                call.rows = rows;
                call.first = 48;
                const std::vector<float> without = span.run(isa, call);
                call.ahead = true;
                EXPECT_TRUE(same_bits(span.run(isa, call), without));
            }
        }
    }
}

// No code is larger: 64 products of 32767 * 127, and the offset of int4 codes comes on top.
TEST(WeightedCodesTest, LargestCodesDoNotOverflow) {
    for (const StoredType type : kTypes) {
        for (const int sign : {1, -1, 0}) {  // 0: alternating
            Span span(type, 7, 48);
            for (std::size_t t = 0; t < kTokens; ++t) {
                for (std::size_t r = 0; r < span.rows; ++r) span.weight(r, t) = r == 6 && t % 2 != 0 ? 0.0F : 1.0F;
                span.set_scale(t, 0, 1.0F);
                for (std::size_t c = 0; c < 48; ++c) {
                    span.set_code(t, c, sign != 0 ? sign * most(type) : (t + c) % 2 != 0 ? most(type) : -most(type));
                }
            }
            HEADLONG_FOR_EACH_ISA(isa) {
                EXPECT_TRUE(is_right(span, isa, span.all()));
                const double whole = 512.0 * 32767 * most(type) / 32767;
                if (sign != 0) {
                    EXPECT_EQ(span.run(isa, span.all())[0], static_cast<float>(sign * whole));
                }
            }
        }
    }
}

// Scales of any size: what is below 2^-110 is nothing, and the largest does not overflow.
TEST(WeightedCodesTest, AnyMagnitude) {
    Random random(seed_or(95));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) {
        for (const float magnitude : {0.0F, 0x1p-149F, 0x1.fffffep-111F, 0x1p-110F, 0x1.000002p-110F, 0x1p-100F,
                                      0x1p100F, std::numeric_limits<float>::max() / 127.0F}) {
            Span span(type, 5, 160);
            span.fill(random);
            for (std::size_t t = 0; t < kTokens; ++t) {
                for (std::size_t g = 0; g < 2; ++g) span.set_scale(t, g, t % 3 == 0 ? magnitude : magnitude * 0.5F);
            }
            for (std::size_t r = 0; r < span.rows; ++r) span.weight(r, 300) = 1.0F;
            HEADLONG_FOR_EACH_ISA(isa) {
                EXPECT_TRUE(is_right(span, isa, span.all())) << magnitude;
                for (const float x : span.run(isa, span.all())) {
                    if (magnitude < 0x1p-110F) {
                        ASSERT_TRUE(same_bits(x, 0.0F)) << magnitude;
                    }
                }
            }
        }
    }
}

// Rows that see nothing of the span, and rows whose weights are all 0.
TEST(WeightedCodesTest, NoWeightsGiveZeros) {
    Random random(seed_or(96));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) {
        Span span(type, 9, 144);
        span.fill(random);
        for (std::size_t t = 0; t < kTokens; ++t) {
            span.weight(1, t) = -0.0F;
            span.weight(4, t) = 0.0F;
            span.weight(8, t) = t % 2 == 0 ? 0.0F : -0.0F;
        }
        for (const std::uint32_t nonfinite : {0U, 0xFFU}) {
            span.nonfinite = nonfinite;
            HEADLONG_FOR_EACH_ISA(isa) {
                EXPECT_TRUE(is_right(span, isa, span.all()));
                const std::vector<float> got = span.run(isa, span.all());
                for (const std::size_t r : {1U, 4U, 8U}) {
                    for (std::size_t c = 0; c < 144; ++c) ASSERT_TRUE(same_bits(got[r * 144 + c], 0.0F)) << r;
                }
            }
        }
    }
}

// A block that may hold NaN gives the bits of one that does not; a NaN scale reaches what is not masked, and nothing
// else: not a masked token, no other row, no other group of columns.
TEST(WeightedCodesTest, NaNScalesReachExactlyTheRowsThatSeeThem) {
    Random random(seed_or(97));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) {
        Span span(type, 9, 272);
        span.fill(random);
        for (std::size_t r = 0; r < 9; ++r) span.weight(r, 0) = 1.0F;  // somebody sees something
        std::vector<std::vector<float>> clean;
        HEADLONG_FOR_EACH_ISA(isa) {
            clean.push_back(span.run(isa, span.all()));
            span.nonfinite = 0xA5U;
            EXPECT_TRUE(same_bits(span.run(isa, span.all()), clean.back()));
            span.nonfinite = 0;
        }
        for (const std::size_t token : Sizes{0, 63, 64, 200, 511}) {
            for (const std::size_t group : Sizes{0, 1, 2}) {
                if (emulated() && (token + group) % 4 != 0) continue;
                Span bad = [&] {
                    Span copy(type, 9, 272);
                    std::copy(span.weights.begin(), span.weights.end(), copy.weights.begin());
                    for (std::size_t b = 0; b < 8; ++b) {
                        std::copy_n(span.blocks[b].bytes.data(), span.blocks[b].bytes.size(),
                                    copy.blocks[b].bytes.data());
                    }
                    return copy;
                }();
                for (std::size_t r = 0; r < 9; ++r)
                    bad.weight(r, token) = r % 3 == 0 ? -0.0F : r % 3 == 1 ? 0.0F : 0.5F;
                for (std::size_t c = group * 128; c < std::min<std::size_t>(272, group * 128 + 128); ++c) {
                    bad.set_code(token, c, 0);  // as quantise_values() leaves it
                }
                const std::vector<float> before = bad.expected(bad.all());
                bad.set_scale(token, group, std::bit_cast<float>(0xFFC12345U));
                bad.nonfinite = 1U << token / 64;
                HEADLONG_FOR_EACH_ISA(isa) {
                    EXPECT_TRUE(is_right(bad, isa, bad.all())) << token << " " << group;
                    const std::vector<float> got = bad.run(isa, bad.all());
                    for (std::size_t r = 0; r < 9; ++r) {
                        for (std::size_t c = 0; c < 272; ++c) {
                            const bool sees = r % 3 != 0 && c / 128 == group;
                            ASSERT_EQ(std::isnan(got[r * 272 + c]), sees) << r << " " << c;
                            if (!sees && r % 3 == 0) {
                                ASSERT_TRUE(same_bits(got[r * 272 + c], before[r * 272 + c])) << r << " " << c;
                            }
                        }
                    }
                    // a call that does not reach the token
                    Span::Call part = bad.all();
                    if (token >= 64) {
                        part.last = token / 16 * 16;
                        EXPECT_TRUE(is_right(bad, isa, part));
                        for (const float x : bad.run(isa, part)) ASSERT_FALSE(std::isnan(x));
                    }
                }
            }
        }
    }
}

// A weight that is no number makes its sum none: then nothing of the row is, and the other rows are as they were.
TEST(WeightedCodesTest, NaNWeightsReachTheirRow) {
    Random random(seed_or(98));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) {
        for (const std::size_t rows : Sizes{1, 4, 9, 131}) {  // 64 rows at a time
            if (emulated() && rows > 64) continue;
            Span span(type, rows, 144);
            span.fill(random);
            const std::vector<float> before = span.expected(span.all());
            const std::size_t bad = rows / 2;
            span.sums[bad] = kNaN;
            for (const bool all : {false, true}) {
                for (std::size_t t = 0; t < kTokens; ++t) {
                    if (all || t == 77) span.weight(bad, t) = kNaN;
                }
                for (const std::uint32_t nonfinite : {0U, 0xFFU}) {
                    span.nonfinite = nonfinite;
                    HEADLONG_FOR_EACH_ISA(isa) {
                        const std::vector<float> got = span.run(isa, span.all());
                        for (std::size_t i = 0; i < got.size(); ++i) {
                            if (i / 144 == bad) {
                                ASSERT_TRUE(std::isnan(got[i])) << i;
                            } else {
                                ASSERT_TRUE(same_bits(got[i], before[i])) << i;
                            }
                        }
                    }
                }
            }
        }
    }
}

// One large weight beside 511 small ones of any size: each of these rounded to nearest would be lost, or doubled, and
// those of its block are as much as a thousandth of the row.
TEST(WeightedCodesTest, SmallWeightsBesideALargeOneAreNotLost) {
    Random random(seed_or(99));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) {
        double lost = 0.0;  // by rounding to nearest
        for (const double units : {0.02, 0.1, 0.3, 0.4, 0.49, 0.51, 0.9, 1.3, 1.49}) {
            for (const bool equal : {true, false}) {
                Span span(type, 3, 16);
                for (std::size_t t = 0; t < kTokens; ++t) {
                    for (std::size_t r = 0; r < 3; ++r) {
                        const double x = units / 32767 * (equal ? 1.0 : random.uniform(0.5, 1.5));
                        span.weight(r, t) = t == 100 * r ? 1.0F : static_cast<float>(x);
                    }
                    span.set_scale(t, 0, 1.0F);
                    for (std::size_t c = 0; c < 16; ++c) {
                        span.set_code(t, c, c == 0 ? most(type) : c == 1 ? -most(type) : t < 32 * c ? most(type) : 0);
                    }
                }
                HEADLONG_FOR_EACH_ISA(isa) {
                    const std::vector<float> got = span.run(isa, span.all());
                    for (std::size_t r = 0; r < 3; ++r) {
                        for (std::size_t c = 0; c < 16; ++c) {
                            double exact = 0.0, nearest = 0.0;
                            for (std::size_t t = 0; t < kTokens; ++t) {
                                const auto w = static_cast<double>(span.weight(r, t));
                                exact += w * span.code(t, c);
                                // of the block that holds the large weight, others have units of their own
                                const bool beside = t / 64 == 100 * r / 64;
                                nearest += (beside ? std::round(w * 32767) / 32767 : w) * span.code(t, c);
                            }
                            ASSERT_LE(std::abs(static_cast<double>(got[r * 16 + c]) - exact),
                                      (equal ? 1.3e-4 : 2e-4) * most(type))
                                << units << " units, row " << r << ", column " << c;
                            lost = std::max(lost, std::abs(nearest - exact));
                        }
                    }
                }
            }
        }
        EXPECT_GT(lost, 9e-4 * most(type)) << "the test must tell the two apart";
    }
}

TEST(WeightedCodesTest, NothingToDo) {
    Random random(seed_or(100));
    for (const StoredType type : kTypes) {
        Span span(type, 5, 144);
        span.fill(random);
        HEADLONG_FOR_EACH_ISA(isa) {
            Span::Call none = span.all();
            none.first = none.last = 64;
            for (const float x : span.run(isa, none)) ASSERT_TRUE(same_bits(x, 0.0F));
            none = span.all();
            none.columns = 0;
            EXPECT_TRUE(span.run(isa, none).empty());
            none = span.all();
            none.rows = 0;
            EXPECT_TRUE(span.run(isa, none).empty());
        }
    }
}

}  // namespace
}  // namespace headlong::test
