// Rows of codes x key panels of int8 and int4 codes, on every instruction set that this machine can run: quantising bit
// for bit against the formulas, products bit for bit against exact integers, and the whole against double precision.
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
#include <utility>
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

using kernels::code_groups;
using kernels::code_panel_bytes;
using kernels::code_quads;
using kernels::code_row_bytes;
using kernels::kCodeGroup;
using kernels::KernelTable;
using kernels::StoredType;
using Sizes = std::vector<std::size_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::array<float, 4> kGarbage{kNaN, kInfinity, -kInfinity, 3e38F};
constexpr std::uint8_t kPoison = 0xA5;
constexpr int kLargestCode = 127 * 254 + 127;

const Sizes& depths() {
    static const Sizes all{1,  2,  3,  4,  5,   7,   8,   9,   15,  16,  21,  63,  64,
                           65, 72, 80, 96, 111, 112, 127, 128, 129, 192, 203, 256, 576};
    static const Sizes fewer{1, 3, 5, 8, 21, 63, 64, 72, 129, 203};
    return emulated() ? fewer : all;
}

constexpr std::array kTypes{StoredType::int8, StoredType::int4};
const char* name_of(StoredType type) { return type == StoredType::int8 ? "int8" : "int4"; }
/// The largest code of a panel.
int most(StoredType type) { return type == StoredType::int8 ? 127 : 7; }

/// a * b + c as the instruction set does it: `generic` rounds twice.
float multiply_add(Isa isa, float a, float b, float c) {
    if (isa != Isa::generic) return std::fma(a, b, c);
    const float product = a * b;  // the build compiles with -ffp-contract=off
    return product + c;
}

template <typename T>
T read(const std::byte* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
template <typename T>
void write(std::byte* p, T value) {
    std::memcpy(p, &value, sizeof value);
}

/// Key panels of codes in guarded memory, with poison between them. Where what lies is said here again, from the words
/// of layout.hpp.
struct Panels {
    StoredType type;
    std::size_t depth, count, bytes_each, stride;
    GuardedBytes bytes;

    Panels(StoredType panel_type, std::size_t panel_depth, std::size_t panel_count, std::size_t gap = 0)
        : type(panel_type),
          depth(panel_depth),
          count(panel_count),
          bytes_each((depth + 63) / 64 * 64 + lines(depth) * 64),
          stride(bytes_each + gap * 64),
          bytes(count == 0 ? 0 : (count - 1) * stride + bytes_each) {
        std::fill_n(bytes.data(), bytes.size(), std::byte{kPoison});
    }
    std::uint8_t* data() const { return reinterpret_cast<std::uint8_t*>(bytes.data()); }

    std::size_t lines(std::size_t inputs) const {
        return type == StoredType::int8 ? (inputs + 3) / 4 : (inputs + 7) / 8;
    }
    /// Inputs that have a place: those of whole lines.
    std::size_t places() const { return depth / 64 * 64 + lines(depth % 64) * (type == StoredType::int8 ? 4 : 8); }
    std::byte* group(std::size_t g, std::size_t column) const {
        return bytes.data() + column / 16 * stride + g * (64 + lines(64) * 64);
    }
    std::byte* scale_at(std::size_t g, std::size_t column) const { return group(g, column) + column % 16 * 4; }
    std::byte* byte_at(std::size_t k, std::size_t column) const {
        const std::size_t line = type == StoredType::int8 ? k % 64 / 4 : k % 64 / 8;
        return group(k / 64, column) + 64 + line * 64 + column % 16 * 4 + k % 4;
    }
    bool high(std::size_t k) const { return k / 4 % 2 != 0; }
    float scale(std::size_t g, std::size_t column) const { return read<float>(scale_at(g, column)); }
    /// The bits as they lie there: 128 + q, or 8 + q.
    int raw(std::size_t k, std::size_t column) const {
        const int byte = std::to_integer<int>(*byte_at(k, column));
        return type == StoredType::int8 ? byte : high(k) ? byte / 16 : byte % 16;
    }
    int code(std::size_t k, std::size_t column) const { return raw(k, column) - (type == StoredType::int8 ? 128 : 8); }
    void set_raw(std::size_t k, std::size_t column, int value) const {
        std::byte& byte = *byte_at(k, column);
        if (type == StoredType::int8) {
            byte = static_cast<std::byte>(value);
        } else {
            const int other = std::to_integer<int>(byte);
            byte = static_cast<std::byte>(high(k) ? other % 16 + value * 16 : other / 16 * 16 + value);
        }
    }
    void set_code(std::size_t k, std::size_t column, int code) const {
        set_raw(k, column, code + (type == StoredType::int8 ? 128 : 8));
    }
};

/// Code rows in guarded memory, in the table's format.
struct QuantisedRows {
    std::size_t depth, count, stride;
    bool terms;
    GuardedBytes bytes;

    QuantisedRows(const KernelTable& table, std::size_t row_depth, std::size_t row_count, std::size_t gap = 0)
        : depth(row_depth),
          count(row_count),
          stride(code_row_bytes(depth) + gap * 64),
          terms(table.code_terms),
          bytes(count == 0 ? 0 : (count - 1) * stride + code_row_bytes(depth)) {
        std::fill_n(bytes.data(), bytes.size(), std::byte{kPoison});
    }
    std::uint8_t* data() const { return reinterpret_cast<std::uint8_t*>(bytes.data()); }

    std::byte* quad(std::size_t r, std::size_t k) const { return bytes.data() + r * stride + k / 4 * 8; }
    std::byte* factor_at(std::size_t r, std::size_t g) const {
        return bytes.data() + r * stride + kernels::code_row_factors(depth) + g * 4;
    }
    std::byte* sum_at(std::size_t r, std::size_t g) const {
        return bytes.data() + r * stride + kernels::code_row_sums(depth) + g * 4;
    }
    float factor(std::size_t r, std::size_t g) const { return read<float>(factor_at(r, g)); }
    int sum(std::size_t r, std::size_t g) const { return read<std::int32_t>(sum_at(r, g)); }
    int code(std::size_t r, std::size_t k) const {
        if (!terms) return read<std::int16_t>(quad(r, k) + k % 4 * 2);
        return 254 * read<std::int8_t>(quad(r, k) + k % 4) + read<std::int8_t>(quad(r, k) + 4 + k % 4);
    }
    void set_code(std::size_t r, std::size_t k, int code) const {
        if (!terms) {
            write(quad(r, k) + k % 4 * 2, static_cast<std::int16_t>(code));
            return;
        }
        const int first = static_cast<int>(std::lround(code / 254.0));
        write(quad(r, k) + k % 4, static_cast<std::int8_t>(std::clamp(first, -127, 127)));
        write(quad(r, k) + 4 + k % 4, static_cast<std::int8_t>(code - 254 * std::clamp(first, -127, 127)));
    }
};

struct Shape {
    std::size_t rows, columns, depth;
    StoredType type = StoredType::int8;
    bool accumulate = false;
};

std::string text(const Shape& shape) {
    return std::to_string(shape.rows) + " rows, " + std::to_string(shape.columns) + " columns, depth " +
           std::to_string(shape.depth) + " of " + name_of(shape.type) + (shape.accumulate ? ", accumulating" : "");
}

/// Codes, scales and factors set by hand, and what must come out.
struct Product {
    Shape shape;
    Isa isa;
    std::size_t groups, out_stride;
    Panels panels;
    QuantisedRows rows;
    GuardedFloats out;
    const void* next = nullptr;

    Product(Isa set, const Shape& s, std::size_t gap = 0)
        : shape(s),
          isa(set),
          groups(code_groups(s.depth)),
          out_stride(s.columns + 3),
          panels(s.type, s.depth, (s.columns + 15) / 16, gap),
          rows(table_of(set), s.depth, s.rows, gap),
          out(s.rows * out_stride) {}

    /// code(k, column) of panels, row_code(r, k) of rows. Dead columns and padding inputs get the
    /// worst that a layout allows: any code, NaN scales; but padding inputs of rows are zeros.
    template <typename Code, typename RowCode>
    void fill(const Code& code, const RowCode& row_code, Random& random, bool unit_scales = false) {
        for (std::size_t column = 0; column < panels.count * 16; ++column) {
            for (std::size_t g = 0; g < groups; ++g) {
                const float scale = unit_scales ? 1.0F : static_cast<float>(random.uniform(0.001, 0.1));
                write(panels.scale_at(g, column), column < shape.columns ? scale : kGarbage[column % 4]);
            }
            for (std::size_t k = 0; k < panels.places(); ++k) {
                const bool live = column < shape.columns && k < shape.depth;
                if (live) {
                    panels.set_code(k, column, code(k, column));
                } else {
                    panels.set_raw(k, column, shape.type == StoredType::int8 ? 255 : 15);
                }
            }
        }
        for (std::size_t r = 0; r < shape.rows; ++r) {
            for (std::size_t g = 0; g < groups; ++g) {
                write(rows.factor_at(r, g), unit_scales ? 1.0F : static_cast<float>(random.uniform(0.0001, 0.01)));
                int sum = 0;
                for (std::size_t k = g * 64; k < std::min((shape.depth + 7) / 8 * 8, g * 64 + 64); ++k) {
                    rows.set_code(r, k, k < shape.depth ? row_code(r, k) : 0);
                    sum += rows.code(r, k);
                }
                write(rows.sum_at(r, g), static_cast<std::int32_t>(sum));
            }
        }
        if (shape.accumulate) {
            for (std::size_t r = 0; r < shape.rows; ++r) {
                for (std::size_t c = 0; c < shape.columns; ++c) out[r * out_stride + c] = random.normal_f32();
            }
        }
    }

    /// What is brought near meanwhile: memory that nobody may read, for it is never read, only asked for.
    void ask_ahead() { next = panels.bytes.data() + panels.bytes.size(); }

    kernels::DotCodes call() const {
        return {.rows = rows.data(),
                .row_stride = rows.stride,
                .row_count = shape.rows,
                .panels = panels.data(),
                .panel_stride = panels.stride,
                .depth = shape.depth,
                .group_begin = 0,
                .group_end = groups,
                .out = out.data(),
                .out_stride = out_stride,
                .columns = shape.columns,
                .accumulate = shape.accumulate,
                .canonical = false,
                .type = shape.type,
                .next = next};
    }
    void run() const { table_of(isa).dot_codes(call()); }

    std::int64_t integer(std::size_t r, std::size_t column, std::size_t g) const {
        std::int64_t sum = 0;
        for (std::size_t k = g * 64; k < std::min(shape.depth, g * 64 + 64); ++k) {
            sum += static_cast<std::int64_t>(rows.code(r, k)) * panels.code(k, column);
        }
        return sum;
    }

    /// All of `out`, canaries included.
    std::vector<float> expected() const {
        std::vector<float> want(out.begin(), out.end());
        for (std::size_t r = 0; r < shape.rows; ++r) {
            for (std::size_t c = 0; c < shape.columns; ++c) {
                float sum = shape.accumulate ? want[r * out_stride + c] : 0.0F;
                for (std::size_t g = 0; g < groups; ++g) {
                    const float scaled = static_cast<float>(integer(r, c, g)) * panels.scale(g, c);
                    sum = multiply_add(isa, scaled, rows.factor(r, g), sum);
                }
                want[r * out_stride + c] = sum;
            }
        }
        return want;
    }
};

// ---------------------------------------------------------------------------------------------------- the products

int code_of(StoredType type, Random& random) { return static_cast<int>(random.integer(-most(type), most(type))); }
int row_code_of(Random& random) { return static_cast<int>(random.integer(-kLargestCode, kLargestCode)); }

// The sum of a group is an exact integer on every set, and what follows has one order: bits that know of no tile.
TEST(DotCodesTestDot, AddsUpGroupsInAscendingOrderForEveryShape) {
    Random random(seed_or(71));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            for (const std::size_t depth : depths()) {
                for (std::size_t rows = 1; rows <= 9; ++rows) {
                    for (const std::size_t columns : Sizes{1, 15, 16, 17, 33}) {
                        if ((emulated() || depth > 65) && (rows + columns + depth) % 3 != 0) continue;
                        Product product(isa, {rows, columns, depth, type, random.chance(0.3)},
                                        static_cast<std::size_t>(random.integer(0, 2)));
                        if (random.chance(0.5)) product.ask_ahead();
                        product.fill([&](auto, auto) { return code_of(type, random); },
                                     [&](auto, auto) { return row_code_of(random); }, random);
                        const std::vector<float> want = product.expected();
                        product.run();
                        ASSERT_TRUE(same_bits(product.out.data(), want.data(), want.size())) << text(product.shape);
                    }
                }
            }
        }
    }
}

// Every number of rows by every number of columns, from one large product: whatever tiles a set cuts it into.
TEST(DotCodesTestDot, EveryTileGivesTheBitsOfTheWhole) {
    Random random(seed_or(70));
    HEADLONG_TRACE_SEED(random);
    constexpr std::size_t kRows = 48;
    constexpr std::size_t kColumns = 64;
    const Sizes thorough = emulated() ? Sizes{21} : Sizes{21, 72, 203};
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            for (const std::size_t depth : depths()) {
                Product product(isa, {kRows, kColumns, depth, type});
                product.fill([&](auto, auto) { return code_of(type, random); },
                             [&](auto, auto) { return row_code_of(random); }, random);
                const std::vector<float> want = product.expected();
                const bool all = std::find(thorough.begin(), thorough.end(), depth) != thorough.end();
                for (std::size_t rows = 1; rows <= kRows; rows += rows == 13 ? kRows - 13 : 1) {
                    if (emulated() && !all && rows % 4 != 1 && rows != 48) continue;
                    for (std::size_t columns = 1; columns <= kColumns; ++columns) {
                        if (!all && columns % 16 > 1 && columns % 16 != 15) continue;
                        if (emulated() && columns % 16 > 1 && columns % 8 != 7) continue;
                        std::fill(product.out.begin(), product.out.end(), kCanary);
                        kernels::DotCodes call = product.call();
                        const std::size_t row = rows % 3 == 0 ? kRows - rows : 0;
                        call.rows += row * product.rows.stride;
                        call.row_count = rows;
                        call.columns = columns;
                        if (columns % 2 != 0) call.next = product.panels.bytes.data() + product.panels.bytes.size();
                        table_of(isa).dot_codes(call);
                        std::size_t wrong = 0;
                        for (std::size_t i = 0; i < product.out.size(); ++i) {
                            const std::size_t r = i / product.out_stride;
                            const std::size_t c = i % product.out_stride;
                            const bool live = r < rows && c < columns;
                            wrong += same_bits(product.out[i], live ? want[row * product.out_stride + i] : kCanary)
                                         ? 0U
                                         : 1U;
                        }
                        ASSERT_EQ(wrong, 0U) << text({rows, columns, depth, type});
                    }
                }
            }
        }
    }
}

// Integers that a float holds exactly: not one unit may be missing.
TEST(DotCodesTestDot, SumsOfAGroupAreExact) {
    Random random(seed_or(72));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            for (std::size_t depth = 1; depth <= kCodeGroup; depth += emulated() ? 5 : 1) {
                Product product(isa, {9, 33, depth, type});
                product.fill([&](auto, auto) { return code_of(type, random); },
                             [&](auto, auto) { return static_cast<int>(random.integer(-2000, 2000)); }, random, true);
                product.run();
                for (std::size_t r = 0; r < 9; ++r) {
                    for (std::size_t c = 0; c < 33; ++c) {
                        const std::int64_t want = product.integer(r, c, 0);
                        ASSERT_LT(std::abs(want), 1 << 24);
                        ASSERT_EQ(product.out[r * product.out_stride + c], static_cast<float>(want))
                            << text(product.shape) << ", " << r << " " << c;
                    }
                }
            }
        }
    }
}

// Every product as large as it can be: 255 * 127 twice does not fit into 16 bits, and 64 * 255 * 32385 nearly fills 30.
TEST(DotCodesTestDot, LargestCodesDoNotSaturate) {
    Random random(seed_or(73));
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            for (const std::size_t depth : depths()) {
                for (const int weight_sign : {-1, 0, 1}) {  // 0: alternating
                    for (const int row_sign : {-1, 0, 1}) {
                        for (const int row_code : {kLargestCode, 127 * 254, 127, 32258 - 127}) {
                            const auto sign = [](int which, std::size_t k) {
                                return which != 0 ? which : k % 2 != 0 ? -1 : 1;
                            };
                            Product product(isa, {3, 17, depth, type});
                            product.fill([&](std::size_t k, auto) { return most(type) * sign(weight_sign, k); },
                                         [&](auto, std::size_t k) { return row_code * sign(row_sign, k); }, random,
                                         true);
                            const std::vector<float> want = product.expected();
                            product.run();
                            ASSERT_TRUE(same_bits(product.out.data(), want.data(), want.size()))
                                << text(product.shape) << " " << weight_sign << " " << row_sign << " " << row_code;
                        }
                    }
                }
            }
        }
    }
}

TEST(DotCodesTestDot, PartsOfTheGroupsAreTheWhole) {
    Random random(seed_or(74));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            for (const std::size_t depth : Sizes{203, 256, 576}) {
                for (const std::size_t rows : Sizes{1, 7}) {
                    for (const std::size_t columns : Sizes{16, 50, 80}) {
                        Product product(isa, {rows, columns, depth, type});
                        product.fill([&](auto, auto) { return code_of(type, random); },
                                     [&](auto, auto) { return row_code_of(random); }, random);
                        product.run();
                        const std::vector<float> whole(product.out.begin(), product.out.end());
                        std::fill(product.out.begin(), product.out.end(), kCanary);
                        for (std::size_t begin = 0; begin < product.groups;) {
                            kernels::DotCodes part = product.call();
                            part.group_begin = begin;
                            part.group_end = std::min(product.groups, begin + (begin == 0 ? 1 : 2));
                            part.accumulate = begin != 0;
                            if (begin % 2 != 0) part.next = product.panels.data();
                            table_of(isa).dot_codes(part);
                            begin = part.group_end;
                        }
                        EXPECT_TRUE(same_bits(product.out.data(), whole.data(), whole.size())) << text(product.shape);
                    }
                }
            }
        }
    }
}

TEST(DotCodesTestDot, NaNStaysInItsRowAndColumnAndHasOneForm) {
    Random random(seed_or(75));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            for (std::size_t rows = 1; rows <= 9; ++rows) {
                for (const std::size_t columns : Sizes{1, 17, 33}) {
                    Product product(isa, {rows, columns, 130, type});
                    product.fill([&](auto, auto) { return code_of(type, random); },
                                 [&](auto, auto) { return row_code_of(random); }, random);
                    const std::vector<float> want = product.expected();
                    const std::size_t bad_row = rows / 2, bad_column = columns - 1;
                    write(product.rows.factor_at(bad_row, 1), std::bit_cast<float>(0xFFC12345U));
                    write(product.panels.scale_at(2, bad_column), kNaN);
                    kernels::DotCodes call = product.call();
                    call.canonical = true;
                    table_of(isa).dot_codes(call);
                    for (std::size_t r = 0; r < rows; ++r) {
                        for (std::size_t c = 0; c < columns; ++c) {
                            const float got = product.out[r * product.out_stride + c];
                            const bool bad = r == bad_row || c == bad_column;
                            ASSERT_TRUE(same_bits(
                                got, bad ? std::bit_cast<float>(0x7FC00000U) : want[r * product.out_stride + c]))
                                << r << " " << c << " " << bits_text(got);
                        }
                    }
                }
            }
        }
    }
}

TEST(DotCodesTestDot, NothingToDo) {
    Random random(seed_or(76));
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            for (const Shape& shape : {Shape{0, 20, 4, type}, Shape{3, 0, 4, type}}) {
                Product product(isa, shape);
                product.run();
                product.ask_ahead();
                product.run();
                for (const float x : product.out) ASSERT_TRUE(is_canary(x));
            }
            const Product empty(isa, {3, 20, 0, type});  // a sum of nothing
            empty.run();
            for (std::size_t r = 0; r < 3; ++r) {
                for (std::size_t c = 0; c < 20; ++c) ASSERT_TRUE(same_bits(empty.out[r * empty.out_stride + c], 0.0F));
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------ quantising

TEST(DotCodesTestQuantisePanels, CodesAndScalesAreThoseOfTheFormula) {
    Random random(seed_or(77));
    HEADLONG_TRACE_SEED(random);
    for (const std::size_t depth : depths()) {
        const std::size_t panel_count = 2, float_stride = depth * 16 + 32;
        const GuardedFloats floats((panel_count - 1) * float_stride + depth * 16);
        for (std::size_t c = 0; c < panel_count * 16; ++c) {
            for (std::size_t k = 0; k < depth; ++k) {
                const Kind kind = kKinds[(c + k / 64) % kKinds.size()];
                floats[c / 16 * float_stride + k * 16 + c % 16] = number(kind, k % 64, random);
            }
        }
        std::vector<std::byte> first;
        HEADLONG_FOR_EACH_ISA(isa) {
            const Panels panels(StoredType::int8, depth, panel_count, 1);
            ASSERT_EQ(panels.bytes_each, code_panel_bytes(StoredType::int8, depth));
            table_of(isa).quantise_panels(
                {floats.data(), float_stride, panel_count, depth, panels.data(), panels.stride});
            for (std::size_t c = 0; c < panel_count * 16; ++c) {
                for (std::size_t g = 0; g < code_groups(depth); ++g) {
                    GroupScale scale;
                    for (std::size_t k = g * 64; k < std::min(depth, g * 64 + 64); ++k) {
                        scale.add(floats[c / 16 * float_stride + k * 16 + c % 16]);
                    }
                    const float got = panels.scale(g, c);
                    if (!scale.finite) {
                        ASSERT_TRUE(std::isnan(got));
                    } else {
                        ASSERT_TRUE(same_bits(got, scale.empty() ? 0.0F : scale.magnitude / 127.0F)) << bits_text(got);
                    }
                    const std::size_t end = std::min(code_quads(depth) * 4, g * 64 + 64);
                    for (std::size_t k = g * 64; k < end; ++k) {
                        int want = 0;
                        if (k < depth && !scale.empty()) {
                            const float x = floats[c / 16 * float_stride + k * 16 + c % 16];
                            want = static_cast<int>(std::nearbyint(x * (127.0F / scale.magnitude)));
                            // and that is nearest to the weight
                            ASSERT_LE(std::abs(static_cast<double>(x) - want * static_cast<double>(got)),
                                      0.50001 * static_cast<double>(got));
                        }
                        ASSERT_EQ(panels.code(k, c), want) << "depth " << depth << ", " << k << " " << c;
                    }
                }
            }
            const std::byte* gap = panels.bytes.data() + panels.bytes_each;
            ASSERT_TRUE(std::all_of(gap, gap + 64, [](std::byte b) { return b == std::byte{kPoison}; }));
            std::vector<std::byte> all(panels.bytes.data(), panels.bytes.data() + panels.bytes.size());
            if (first.empty()) first = all;
            ASSERT_EQ(all, first) << "the same bytes on every set";
        }
    }
}

TEST(DotCodesTestQuantiseRows, CodesFactorsAndSumsAreThoseOfTheFormula) {
    Random random(seed_or(78));
    HEADLONG_TRACE_SEED(random);
    for (const std::size_t depth : depths()) {
        const std::size_t rows = kKinds.size(), float_stride = depth + 5;
        const GuardedFloats floats((rows - 1) * float_stride + depth);  // canaries, NaN, behind each row
        for (std::size_t r = 0; r < rows; ++r) {
            for (std::size_t k = 0; k < depth; ++k) {
                floats[r * float_stride + k] = number(kKinds[(r + k / 64) % kKinds.size()], k % 64, random);
            }
        }
        HEADLONG_FOR_EACH_ISA(isa) {
            const QuantisedRows got(table_of(isa), depth, rows, 1);
            table_of(isa).quantise_rows({floats.data(), float_stride, rows, depth, got.data(), got.stride});
            for (std::size_t r = 0; r < rows; ++r) {
                for (std::size_t g = 0; g < code_groups(depth); ++g) {
                    GroupScale scale;
                    const std::size_t end = std::min(depth, g * 64 + 64);
                    for (std::size_t k = g * 64; k < end; ++k) scale.add(floats[r * float_stride + k]);
                    const float factor = got.factor(r, g);
                    if (!scale.finite) {
                        ASSERT_TRUE(std::isnan(factor));
                    } else {
                        ASSERT_TRUE(same_bits(factor, scale.empty() ? 0.0F : scale.magnitude / 32258.0F));
                    }
                    int sum = 0;
                    for (std::size_t k = g * 64; k < std::min(code_quads(depth) * 4, g * 64 + 64); ++k) {
                        int first = 0, second = 0;
                        if (k < depth && !scale.empty()) {
                            const float x = floats[r * float_stride + k];
                            const float scaled = x * (127.0F / scale.magnitude);
                            first = static_cast<int>(std::nearbyint(scaled));
                            second = static_cast<int>(std::nearbyint((scaled - std::nearbyint(scaled)) * 254.0F));
                            // 15 bits of the largest input: half a unit, and the float's own rounding
                            ASSERT_LE(std::abs(static_cast<double>(x) -
                                               (254.0 * first + second) * static_cast<double>(factor)),
                                      0.51 * static_cast<double>(factor));
                        }
                        ASSERT_EQ(got.code(r, k), 254 * first + second) << "depth " << depth << ", " << r << " " << k;
                        ASSERT_LE(std::abs(got.code(r, k)), kLargestCode);
                        if (got.terms) {
                            ASSERT_EQ(read<std::int8_t>(got.quad(r, k) + k % 4), first);
                        }
                        sum += got.code(r, k);
                    }
                    ASSERT_EQ(got.sum(r, g), sum);
                }
            }
            const std::byte* gap = got.bytes.data() + code_row_bytes(depth);
            ASSERT_TRUE(std::all_of(gap, gap + 64, [](std::byte b) { return b == std::byte{kPoison}; }));
        }
    }
}

// Keys of a cache: rows of any type and any strides become some lanes of panels, and the other lanes stay as they are.
TEST(DotCodesTestQuantiseKeys, LanesAreThoseOfTheFormulaAndOthersStay) {
    Random random(seed_or(83));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) {
        for (const std::size_t depth : depths()) {
            for (std::size_t first_lane = 0; first_lane < 16; ++first_lane) {
                if (emulated() && (first_lane + depth) % 5 != 0) continue;
                const auto rows = static_cast<std::size_t>(random.integer(1, 40));
                const auto from = static_cast<Element>(random.integer(1, 3));
                const auto source = AnyTensor<2>::random(
                    from, {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(depth)}, random);
                const std::size_t kind = static_cast<std::size_t>(random.integer(0, 100));
                for_each_index<2>(source.extents(), [&](const Extents<2>& i) {
                    const auto k = static_cast<std::size_t>(i[1]);
                    // every other group is a usual one
                    const std::size_t special = kind + static_cast<std::size_t>(i[0]) + k / 64;
                    source.set(i, static_cast<double>(
                                      number(special % 2 == 0 ? Kind::normal : kKinds[special / 2 % kKinds.size()],
                                             (k % 64 + special) % 64, random)));
                });
                const std::size_t panel_count = (first_lane + rows + 15) / 16;
                const Panels want(type, depth, panel_count);
                ASSERT_EQ(want.bytes_each, code_panel_bytes(type, depth));
                for (std::size_t r = 0; r < rows; ++r) {
                    std::vector<float> row;
                    for (std::size_t k = 0; k < depth; ++k) {
                        row.push_back(static_cast<float>(
                            source.get({static_cast<std::int64_t>(r), static_cast<std::int64_t>(k)})));
                    }
                    const Codes codes(row, 64, most(type));
                    const std::size_t token = first_lane + r;
                    for (std::size_t g = 0; g < codes.scales.size(); ++g) {
                        write(want.scale_at(g, token), codes.scales[g]);
                    }
                    for (std::size_t k = 0; k < want.places(); ++k) {
                        want.set_code(k, token, k < depth ? codes.codes[k] : 0);
                    }
                }
                HEADLONG_FOR_EACH_ISA(isa) {
                    const Panels got(type, depth, panel_count);
                    table_of(isa).quantise_keys({{source.data(), static_cast<kernels::ElementType>(dtype_of(from)),
                                                  source.strides()[0], source.strides()[1], rows, depth},
                                                 got.data(),
                                                 first_lane,
                                                 type});
                    const auto differs =
                        std::mismatch(got.bytes.data(), got.bytes.data() + got.bytes.size(), want.bytes.data());
                    ASSERT_EQ(differs.first - got.bytes.data(), static_cast<std::ptrdiff_t>(got.bytes.size()))
                        << "depth " << depth << " of " << name_of(type) << ", " << rows << " rows at " << first_lane
                        << ", " << source.describe() << ": a byte of panel "
                        << static_cast<std::size_t>(differs.first - got.bytes.data()) / got.stride << " is "
                        << std::to_integer<int>(*differs.first) << ", want " << std::to_integer<int>(*differs.second);
                }
            }
        }
    }
}

// What quantise_panels() makes of a linear layer's weights quantise_keys() makes of them row by row.
TEST(DotCodesTestQuantiseKeys, AreThePanelsOfALinearLayer) {
    Random random(seed_or(84));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t depth : depths()) {
            const GuardedFloats floats(depth * 16);
            for (std::size_t i = 0; i < floats.size(); ++i) {
                floats[i] = number(kKinds[(i % 16 + i / 1024) % kKinds.size()], i / 16 % 64, random);
            }
            const Panels at_once(StoredType::int8, depth, 1);
            const Panels by_rows(StoredType::int8, depth, 1);
            table_of(isa).quantise_panels({floats.data(), depth * 16, 1, depth, at_once.data(), at_once.stride});
            table_of(isa).quantise_keys(
                {{floats.data(), kernels::ElementType::f32, 1, 16, 16, depth}, by_rows.data(), 0, StoredType::int8});
            ASSERT_TRUE(std::equal(at_once.data(), at_once.data() + at_once.stride, by_rows.data())) << depth;
        }
    }
}

TEST(DotCodesTestQuantise, NothingToDo) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const StoredType type : kTypes) {
            table_of(isa).quantise_keys({{nullptr, kernels::ElementType::f32, 5, 1, 0, 5}, nullptr, 3, type});
            table_of(isa).quantise_keys({{nullptr, kernels::ElementType::bf16, 0, 1, 3, 0}, nullptr, 0, type});
        }
        table_of(isa).quantise_panels({nullptr, 0, 0, 5, nullptr, 0});
        table_of(isa).quantise_rows({nullptr, 0, 0, 5, nullptr, 0});
        table_of(isa).quantise_rows({nullptr, 0, 3, 0, nullptr, 0});
    }
}

// ------------------------------------------------------------------------------------------------------- the whole

struct Layer {
    Shape shape;
    std::vector<float> inputs;  ///< [rows][depth]
    GuardedFloats float_panels;
    Panels panels;

    Layer(const Shape& s, Random& random, Kind weights = Kind::normal, Kind activations = Kind::normal)
        : shape(s), float_panels((s.columns + 15) / 16 * s.depth * 16), panels(s.type, s.depth, (s.columns + 15) / 16) {
        for (std::size_t c = 0; c < panels.count * 16; ++c) {
            for (std::size_t k = 0; k < s.depth; ++k) {
                float_panels[c / 16 * s.depth * 16 + k * 16 + c % 16] =
                    c < s.columns ? 0.05F * number(weights, k % 64, random) : kGarbage[k % 4];
            }
        }
        for (std::size_t i = 0; i < s.rows * s.depth; ++i) {
            inputs.push_back(number(activations, i % s.depth % 64, random));
        }
    }

    /// Rows [begin, end) by the kernels of a set: [rows][columns].
    std::vector<float> run(Isa isa, std::size_t begin, std::size_t end) const {
        const KernelTable& table = table_of(isa);
        if (shape.type == StoredType::int8) {
            table.quantise_panels(
                {float_panels.data(), shape.depth * 16, panels.count, shape.depth, panels.data(), panels.stride});
        } else {
            for (std::size_t p = 0; p < panels.count; ++p) {
                table.quantise_keys(
                    {{float_panels.data() + p * shape.depth * 16, kernels::ElementType::f32, 1, 16, 16, shape.depth},
                     panels.data(),
                     p * 16,
                     shape.type});
            }
        }
        const QuantisedRows rows(table, shape.depth, end - begin);
        const GuardedFloats source((end - begin) * shape.depth);
        std::copy_n(inputs.data() + begin * shape.depth, source.size(), source.data());
        table.quantise_rows({source.data(), shape.depth, end - begin, shape.depth, rows.data(), rows.stride});
        const GuardedFloats out((end - begin) * shape.columns);
        table.dot_codes({.rows = rows.data(),
                         .row_stride = rows.stride,
                         .row_count = end - begin,
                         .panels = panels.data(),
                         .panel_stride = panels.stride,
                         .depth = shape.depth,
                         .group_begin = 0,
                         .group_end = code_groups(shape.depth),
                         .out = out.data(),
                         .out_stride = shape.columns,
                         .columns = shape.columns,
                         .accumulate = false,
                         .canonical = false,
                         .type = shape.type});
        return {out.begin(), out.end()};
    }
};

// The tolerance of an int8 cache, as it applies to a layer: against double precision on the dequantised weights, the
// root mean square of the error is at most 1.5e-4 of the outputs' root mean square, and no error is above ten times
// that, plus 8 * 2^-24 of the largest output. What large scores add for a cache is the exponential's doing: a layer has
// none. Quantised are the inputs, to 15 bits a group.
void within_the_tolerance(StoredType type, Random& random) {
    for (const Kind weights : {Kind::normal, Kind::one_outlier}) {
        for (const Kind activations : {Kind::normal, Kind::one_outlier}) {
            for (const std::size_t depth : depths()) {
                const Layer layer({9, 33, depth, type}, random, weights, activations);
                HEADLONG_FOR_EACH_ISA(isa) {
                    const std::vector<float> got = layer.run(isa, 0, 9);
                    double square_error = 0.0, square = 0.0, worst = 0.0, largest = 0.0;
                    for (std::size_t r = 0; r < 9; ++r) {
                        for (std::size_t c = 0; c < 33; ++c) {
                            double exact = 0.0;
                            for (std::size_t k = 0; k < depth; ++k) {
                                exact += static_cast<double>(layer.inputs[r * depth + k]) *
                                         static_cast<double>(layer.panels.scale(k / 64, c)) * layer.panels.code(k, c);
                            }
                            const double error = std::abs(static_cast<double>(got[r * 33 + c]) - exact);
                            square_error += error * error;
                            square += exact * exact;
                            worst = std::max(worst, error);
                            largest = std::max(largest, std::abs(exact));
                        }
                    }
                    const double rms = std::sqrt(square / (9 * 33));
                    const double relative = std::sqrt(square_error / square);
                    ASSERT_LE(relative, 1.5e-4) << "depth " << depth;
                    ASSERT_LE(worst, 1.5e-3 * rms + 0x1p-21 * largest) << "depth " << depth;
                    if (depth == 576 && weights == Kind::normal && activations == Kind::normal) {
                        testing::Test::RecordProperty(std::string("rms_error_") + to_string(isa),
                                                      std::to_string(relative));
                    }
                }
            }
        }
    }
}

TEST(DotCodesTestLayer, IsWithinTheToleranceOfDoublePrecision) {
    Random random(seed_or(79));
    HEADLONG_TRACE_SEED(random);
    for (const StoredType type : kTypes) within_the_tolerance(type, random);
}

TEST(DotCodesTestLayer, ARowDependsOnItselfAlone) {
    Random random(seed_or(80));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const std::size_t depth : Sizes{5, 64, 203}) {
            for (const std::size_t columns : Sizes{1, 16, 17, 33}) {
                const StoredType type = kTypes[depth % 2 ^ columns % 2];
                Layer layer({9, columns, depth, type}, random);
                layer.inputs[4 * depth] = kNaN;  // of one row, to which it is left
                const std::vector<float> alone = [&] {
                    std::vector<float> all;
                    for (std::size_t r = 0; r < 9; ++r) {
                        const std::vector<float> row = layer.run(isa, r, r + 1);
                        all.insert(all.end(), row.begin(), row.end());
                    }
                    return all;
                }();
                for (std::size_t begin = 0; begin < 9; ++begin) {
                    for (std::size_t end = begin + 2; end <= 9; ++end) {
                        const std::vector<float> got = layer.run(isa, begin, end);
                        for (std::size_t r = begin; r < end; ++r) {
                            if (r == 4) {
                                for (std::size_t c = 0; c < columns; ++c) {
                                    ASSERT_TRUE(std::isnan(got[(r - begin) * columns + c]));
                                }
                                continue;
                            }
                            ASSERT_TRUE(same_bits(&got[(r - begin) * columns], &alone[r * columns], columns))
                                << r << " of [" << begin << ", " << end << "), depth " << depth;
                        }
                    }
                }
            }
        }
    }
}

TEST(DotCodesTestLayer, SpecialGroups) {
    Random random(seed_or(81));
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const auto& [type, depth] : std::vector<std::pair<StoredType, std::size_t>>{{StoredType::int8, 5},
                                                                                         {StoredType::int8, 64},
                                                                                         {StoredType::int8, 130},
                                                                                         {StoredType::int4, 5},
                                                                                         {StoredType::int4, 64},
                                                                                         {StoredType::int4, 130}}) {
            for (const Kind kind : {Kind::zero, Kind::negative_zero, Kind::tiny}) {
                for (const bool of_weights : {false, true}) {
                    const Layer layer({3, 17, depth, type}, random, of_weights ? kind : Kind::normal,
                                      of_weights ? Kind::normal : kind);
                    for (const float x : layer.run(isa, 0, 3)) ASSERT_TRUE(same_bits(x, 0.0F)) << bits_text(x);
                }
            }
            for (const Kind kind : {Kind::nan, Kind::infinite}) {
                for (const Kind other : {Kind::normal, Kind::zero}) {
                    for (const bool of_weights : {false, true}) {
                        const Layer layer({3, 17, depth, type}, random, of_weights ? kind : other,
                                          of_weights ? other : kind);
                        for (const float x : layer.run(isa, 0, 3)) ASSERT_TRUE(std::isnan(x));
                    }
                }
            }
        }
    }
}

// Sets that multiply and add in one step compute the same integers in the same order: their bits agree, families or
// not.
TEST(DotCodesTestLayer, TheSameBitsOnEverySetWithFusedMultiplyAdd) {
    Random random(seed_or(82));
    HEADLONG_TRACE_SEED(random);
    for (const std::size_t depth : depths()) {
        for (const StoredType type : kTypes) {
            const Layer layer({7, 33, depth, type}, random);
            std::vector<float> first;
            HEADLONG_FOR_EACH_ISA(isa) {
                if (isa == Isa::generic) continue;
                const std::vector<float> got = layer.run(isa, 0, 7);
                if (first.empty()) first = got;
                ASSERT_TRUE(same_bits(got, first));
            }
        }
    }
}

}  // namespace
}  // namespace headlong::test
