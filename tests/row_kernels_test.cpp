// The kernels on single rows, every instruction set, against double; a row's bits do not depend on its place.
#include <gtest/gtest.h>

#include <algorithm>
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

TEST(RowKernelsTest, LayerNorm) {
    Random random(64);
    HEADLONG_FOR_EACH_ISA(isa) {
        const kernels::KernelTable& table = table_of(isa);
        for (const std::size_t n : kSizes) {
            SCOPED_TRACE(n);
            const GuardedFloats x(2 * n), weight(n), bias(n), out(2 * n), alone(n);
            for (float& v : x) v = random.normal_f32() * 3.0F + 20.0F;  // the mean must be taken off before squaring
            for (float& v : weight) v = random.normal_f32();
            for (float& v : bias) v = random.normal_f32();
            constexpr float kEpsilon = 1e-3F;
            table.layer_norm({x.data(), n, 2, n, weight.data(), bias.data(), kEpsilon, out.data(), n});
            for (std::size_t r = 0; r < 2; ++r) {
                double mean = 0.0;
                for (std::size_t i = 0; i < n; ++i) mean += static_cast<double>(x[r * n + i]) / static_cast<double>(n);
                double variance = 0.0;
                for (std::size_t i = 0; i < n; ++i) {
                    variance += std::pow(static_cast<double>(x[r * n + i]) - mean, 2) / static_cast<double>(n);
                }
                const double factor = 1.0 / std::sqrt(variance + static_cast<double>(kEpsilon));
                for (std::size_t i = 0; i < n; ++i) {
                    const double want =
                        (static_cast<double>(x[r * n + i]) - mean) * factor * static_cast<double>(weight[i]) +
                        static_cast<double>(bias[i]);
                    // a value of 20 is known to 2^-20 times the largest factor, 32
                    ASSERT_NEAR(out[r * n + i], want, 1e-5 * (1.0 + factor * std::abs(static_cast<double>(weight[i]))));
                }
            }
            table.layer_norm({x.data() + n, 0, 1, n, weight.data(), bias.data(), kEpsilon, alone.data(), 0});
            EXPECT_TRUE(same_bits(alone.data(), out.data() + n, n));
            table.layer_norm({x.data(), n, 2, n, weight.data(), bias.data(), kEpsilon, x.data(), n});  // in place
            EXPECT_TRUE(same_bits(x.data(), out.data(), 2 * n));
        }
    }
}

TEST(RowKernelsTest, AddScaled) {
    Random random(65);
    HEADLONG_FOR_EACH_ISA(isa) {
        const kernels::KernelTable& table = table_of(isa);
        for (const std::size_t n : kSizes) {
            const GuardedFloats x(n), out(n), before(n);
            for (float& v : x) v = random.normal_f32();
            for (std::size_t i = 0; i < n; ++i) out[i] = before[i] = random.normal_f32();
            table.add_scaled({x.data(), 0.37F, out.data(), n});
            for (std::size_t i = 0; i < n; ++i) {
                const double want =
                    static_cast<double>(before[i]) + static_cast<double>(0.37F) * static_cast<double>(x[i]);
                ASSERT_NEAR(out[i], want, 3e-7 * (std::abs(want) + std::abs(static_cast<double>(x[i]))));
            }
        }
    }
}

/// In double precision, as modelling code has them.
double activated(kernels::Activation activation, double x) {
    switch (activation) {
        case kernels::Activation::silu:
            return x / (1.0 + std::exp(-x));
        case kernels::Activation::gelu:
            return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
        case kernels::Activation::gelu_tanh:
            return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
        case kernels::Activation::clamped_silu:
            return x / (1.0 + std::exp(-1.702 * x));
    }
    return 0.0;
}

TEST(RowKernelsTest, Activations) {
    using kernels::Activation;
    Random random(66);
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    constexpr float kInf = std::numeric_limits<float>::infinity();
    HEADLONG_FOR_EACH_ISA(isa) {
        const kernels::KernelTable& table = table_of(isa);
        for (const Activation activation : {Activation::silu, Activation::gelu, Activation::gelu_tanh}) {
            SCOPED_TRACE(static_cast<int>(activation));
            for (const std::size_t n : kSizes) {
                const GuardedFloats gate(n), up(n), out(n), plain(n);
                for (float& v : gate) v = random.normal_f32() * 4.0F;
                for (float& v : up) v = random.normal_f32();
                table.activate({gate.data(), up.data(), out.data(), n, activation});
                table.activate({gate.data(), nullptr, plain.data(), n, activation});
                for (std::size_t i = 0; i < n; ++i) {
                    const double want = activated(activation, gate[i]);
                    // the tanh form's reference cancels, and rounding of x^2 counts in an exponent
                    const double error = 1e-6 * std::abs(want) * (1.0 + std::abs(static_cast<double>(gate[i]))) + 1e-14;
                    ASSERT_NEAR(plain[i], want, error) << gate[i];
                    ASSERT_NEAR(out[i], want * static_cast<double>(up[i]), 2 * error * std::abs(up[i]) + 1e-14);
                }
            }
            const std::vector<float> gate{-200.0F, 200.0F, 0.0F, kNan, kInf, -1e30F, 1e-20F, -30.0F};
            std::vector<float> out(gate.size());
            table.activate({gate.data(), nullptr, out.data(), gate.size(), activation});
            EXPECT_NEAR(out[0], 0.0F, 1e-30F);
            EXPECT_EQ(out[1], 200.0F);
            EXPECT_EQ(out[2], 0.0F);
            EXPECT_TRUE(std::isnan(out[3]));
            EXPECT_EQ(out[4], kInf);
            EXPECT_LE(std::abs(out[5]), 1e-6F);
            EXPECT_NEAR(out[6], 5e-21F, 1e-26F);
            EXPECT_NEAR(out[7], activated(activation, -30.0), 1e-16);
        }
        // gpt-oss: the gate is bounded above only, up on both sides, before 1 is added
        const std::vector<float> gate{-20.0F, -1.5F, 0.5F, 6.9F, 7.1F, 100.0F, kNan, 1.0F, 1.0F};
        const std::vector<float> up{0.5F, -7.5F, 8.0F, 1.0F, -1.0F, 2.0F, 1.0F, kNan, -1e20F};
        std::vector<float> out(gate.size());
        table.activate({gate.data(), up.data(), out.data(), gate.size(), Activation::clamped_silu, 7.0F});
        for (std::size_t i = 0; i < gate.size(); ++i) {
            if (std::isnan(gate[i]) || std::isnan(up[i])) {
                EXPECT_TRUE(std::isnan(out[i])) << i;
                continue;
            }
            const double x = std::min(static_cast<double>(gate[i]), 7.0);
            const double u = std::clamp(static_cast<double>(up[i]), -7.0, 7.0);
            const double want = activated(Activation::clamped_silu, x) * (u + 1.0);
            EXPECT_NEAR(out[i], want, 1e-6 * std::abs(want) + 1e-12) << i;
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
            table.activate({gate.data(), up.data(), out.data(), n});
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
        table.activate({gate.data(), up.data(), out.data(), gate.size()});
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
