// The kernels on single rows, every instruction set, against double; a row's bits do not depend on its place.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "engine/isa.hpp"
#include "kernels/kernel_table.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

const std::vector<std::size_t> kSizes{1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 192};

TEST(RowKernelsTest, RmsNorm) {
    Random random(61);
    HEADLONG_FOR_EACH_ISA(isa) {
        const kernels::KernelTable& table = table_of(isa);
        for (const std::size_t n : kSizes) {
            SCOPED_TRACE(n);
            const GuardedFloats x(2 * n), weight(n), out(2 * n), alone(n);
            for (float& v : x) v = random.normal_f32() * 3.0F;
            for (float& v : weight) v = random.normal_f32();
            constexpr float kEpsilon = 1e-3F;
            table.rms_norm({x.data(), n, 2, n, weight.data(), kEpsilon, out.data(), n});
            for (std::size_t r = 0; r < 2; ++r) {
                double sum = 0.0;
                for (std::size_t i = 0; i < n; ++i)
                    sum += static_cast<double>(x[r * n + i]) * static_cast<double>(x[r * n + i]);
                const double factor = 1.0 / std::sqrt(sum / static_cast<double>(n) + static_cast<double>(kEpsilon));
                for (std::size_t i = 0; i < n; ++i) {
                    const double want = static_cast<double>(x[r * n + i]) * factor * static_cast<double>(weight[i]);
                    ASSERT_NEAR(out[r * n + i], want, 1e-6 * std::abs(want) + 1e-9);
                }
            }
            table.rms_norm({x.data() + n, 0, 1, n, weight.data(), kEpsilon, alone.data(), 0});
            EXPECT_TRUE(same_bits(alone.data(), out.data() + n, n));
            table.rms_norm({x.data(), n, 2, n, weight.data(), kEpsilon, x.data(), n});  // in place
            EXPECT_TRUE(same_bits(x.data(), out.data(), 2 * n));
        }
    }
}

TEST(RowKernelsTest, Rotate) {
    Random random(62);
    HEADLONG_FOR_EACH_ISA(isa) {
        const kernels::KernelTable& table = table_of(isa);
        for (const std::size_t half : kSizes) {
            SCOPED_TRACE(half);
            const std::size_t head = 2 * half + 3;  // what lies beyond the pairs stays
            const GuardedFloats row(3 * head), before(3 * head), cosine(half), sine(half);
            for (std::size_t i = 0; i < row.size(); ++i) row[i] = before[i] = random.normal_f32();
            for (std::size_t i = 0; i < half; ++i) {
                const double angle = random.uniform(0.0, 6.0);
                cosine[i] = static_cast<float>(std::cos(angle));
                sine[i] = static_cast<float>(std::sin(angle));
            }
            table.rotate({row.data(), 3, head, half, cosine.data(), sine.data(), false});
            for (std::size_t h = 0; h < 3; ++h) {
                for (std::size_t i = 0; i < half; ++i) {
                    const double x = before[h * head + i];
                    const double y = before[h * head + half + i];
                    const double c = cosine[i];
                    const double s = sine[i];
                    ASSERT_NEAR(row[h * head + i], x * c - y * s, 1e-6);
                    ASSERT_NEAR(row[h * head + half + i], y * c + x * s, 1e-6);
                }
                EXPECT_TRUE(same_bits(row.data() + h * head + 2 * half, before.data() + h * head + 2 * half, 3));
            }
            // the same pairs, each side by side: the same bits
            const GuardedFloats mixed(3 * head);
            for (std::size_t h = 0; h < 3; ++h) {
                const float* from = before.data() + h * head;
                for (std::size_t i = 0; i < 2 * half; ++i) mixed[h * head + i] = from[i % 2 * half + i / 2];
                for (std::size_t i = 2 * half; i < head; ++i) mixed[h * head + i] = from[i];
            }
            table.rotate({mixed.data(), 3, head, half, cosine.data(), sine.data(), true});
            for (std::size_t h = 0; h < 3; ++h) {
                const float* want = row.data() + h * head;
                for (std::size_t i = 0; i < 2 * half; ++i) {
                    ASSERT_TRUE(same_bits(mixed[h * head + i], want[i % 2 * half + i / 2])) << i;
                }
                EXPECT_TRUE(same_bits(mixed.data() + h * head + 2 * half, want + 2 * half, 3));
            }
            // a head that ends at the guard page, of either pairing
            for (const bool interleaved : {false, true}) {
                const GuardedFloats last(2 * half);
                const float* from = (interleaved ? mixed : row).data();
                for (std::size_t i = 0; i < last.size(); ++i) last[i] = from[i];
                const GuardedFloats first(2 * half, Touch::begin);
                for (std::size_t i = 0; i < first.size(); ++i) first[i] = from[i];
                table.rotate({last.data(), 1, 0, half, cosine.data(), sine.data(), interleaved});
                table.rotate({first.data(), 1, 0, half, cosine.data(), sine.data(), interleaved});
                EXPECT_TRUE(same_bits(first.data(), last.data(), last.size()));
            }
        }
        // SEMANTICS' tiny case: [1, 2, 3, 4] at position 1, theta 1e4
        const float cosine[2] = {static_cast<float>(std::cos(1.0)), static_cast<float>(std::cos(0.01))};
        const float sine[2] = {static_cast<float>(std::sin(1.0)), static_cast<float>(std::sin(0.01))};
        const double want[2][4] = {{-1.984111, 1.959901, 2.462378, 4.0198}, {-1.14264, 1.922076, 2.959851, 4.0298}};
        for (const bool interleaved : {false, true}) {
            float v[4] = {1, 2, 3, 4};
            table.rotate({v, 1, 4, 2, cosine, sine, interleaved});
            for (int i = 0; i < 4; ++i) EXPECT_NEAR(v[i], want[interleaved ? 1 : 0][i], 1e-5);
        }
    }
}

TEST(RowKernelsTest, SwiGlu) {
    Random random(63);
    HEADLONG_FOR_EACH_ISA(isa) {
        const kernels::KernelTable& table = table_of(isa);
        for (const std::size_t n : kSizes) {
            const GuardedFloats gate(n), up(n), out(n);
            for (float& v : gate) v = random.normal_f32() * 10.0F;
            for (float& v : up) v = random.normal_f32();
            table.swiglu({gate.data(), up.data(), out.data(), n});
            for (std::size_t i = 0; i < n; ++i) {
                const double g = gate[i];
                const double want = g / (1.0 + std::exp(-g)) * static_cast<double>(up[i]);
                ASSERT_NEAR(out[i], want, 1e-6 * std::abs(want) + 1e-12);
            }
        }
        const float inf = std::numeric_limits<float>::infinity();
        const std::vector<float> gate{-200.0F, 200.0F, -87.0F, 0.0F, std::numeric_limits<float>::quiet_NaN(),
                                      inf,     -1e30F};
        const std::vector<float> up(gate.size(), 2.0F);
        std::vector<float> out(gate.size());
        table.swiglu({gate.data(), up.data(), out.data(), gate.size()});
        EXPECT_NEAR(out[0], 0.0F, 1e-30F);
        EXPECT_EQ(out[1], 400.0F);
        EXPECT_NEAR(out[2], 0.0F, 1e-30F);
        EXPECT_EQ(out[3], 0.0F);
        EXPECT_TRUE(std::isnan(out[4]));
        EXPECT_EQ(out[5], inf);
        EXPECT_LE(std::abs(out[6]), 1e-6F) << "the sigmoid is bounded below, the product stays tiny";
    }
}

}  // namespace
}  // namespace headlong::test
