// Linear layers of every type of weights: against double precision on the weights as stored, and bit for bit.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <headlong/model.hpp>

#include "engine/linear.hpp"
#include "kernels/half.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/shared_data.hpp"
#include "tests/support/write_safetensors.hpp"

namespace headlong::test {
namespace {

constexpr WeightType kTypes[] = {WeightType::f32, WeightType::f16, WeightType::bf16, WeightType::int8,
                                 WeightType::int4};

bool has_codes(WeightType type) { return type == WeightType::int8 || type == WeightType::int4; }

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Layer {
    std::int64_t inputs, outputs;
    std::vector<float> weight, bias;

    Layer(std::int64_t inputs_, std::int64_t outputs_, Random& random)
        : inputs(inputs_), outputs(outputs_), weight(size(inputs * outputs)), bias(size(outputs)) {
        for (float& w : weight) w = random.normal_f32() / std::sqrt(static_cast<float>(inputs + 1));
        for (float& b : bias) b = random.normal_f32();
    }
    Linear make(Context& context, WeightType type, bool with_bias = true) const {
        return {context.impl(), context.memory(), InputTensor<2>::dense(weight.data(), {inputs, outputs}),
                with_bias ? InputTensor<1>::dense(bias.data(), {outputs}) : InputTensor<1>{}, type};
    }
};

std::vector<float> normal(std::size_t count, Random& random) {
    std::vector<float> values(count);
    for (float& x : values) x = random.normal_f32();
    return values;
}

std::vector<float> apply(Context& context, const Linear& linear, const float* x, std::int64_t rows,
                         std::vector<float> y = {}, Linear::Into into = Linear::Into::overwrite) {
    y.resize(size(rows * linear.outputs()));
    auto workspace = context.impl().workspaces.lend();
    linear.apply(context.impl(), *workspace, x, linear.inputs(), rows, y.data(), linear.outputs(), into);
    return y;
}

/// The sums of floats, bit for bit: one accumulator over the inputs in ascending order, from `start` on, by fused
/// multiply-adds but where the set has none.
void expect_sums(const Linear& linear, Isa isa, const std::vector<float>& x, const std::vector<float>& start,
                 const std::vector<float>& y, std::int64_t rows) {
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < linear.outputs(); ++c) {
            float sum = start[size(r * linear.outputs() + c)];
            for (std::int64_t k = 0; k < linear.inputs(); ++k) {
                const float a = x[size(r * linear.inputs() + k)];
                const float w = linear.weight(size(k), size(c));
                sum = isa == Isa::generic ? sum + a * w : std::fma(a, w, sum);
            }
            ASSERT_TRUE(same_bits(y[size(r * linear.outputs() + c)], sum)) << r << " " << c;
        }
    }
}

/// Against double precision on the weights as stored. Of int8 and int4, whose arithmetic quantises the rows too: the
/// root mean square of the error is at most 1.5e-4 of that of the outputs, and no error more than ten times that.
void expect_product(const Linear& linear, Isa isa, const std::vector<float>& x, const std::vector<float>& start,
                    const std::vector<float>& y, std::int64_t rows) {
    if (!has_codes(linear.type())) return expect_sums(linear, isa, x, start, y, rows);
    double errors = 0.0, squares = 0.0, worst = 0.0;
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < linear.outputs(); ++c) {
            double want = start[size(r * linear.outputs() + c)];
            double terms = std::abs(want);
            double product = 0.0;
            for (std::int64_t k = 0; k < linear.inputs(); ++k) {
                const double term = static_cast<double>(x[size(r * linear.inputs() + k)]) *
                                    static_cast<double>(linear.weight(size(k), size(c)));
                product += term;
                terms += std::abs(term);
            }
            want += product;
            const double error = std::abs(static_cast<double>(y[size(r * linear.outputs() + c)]) - want);
            errors += error * error;
            squares += product * product;
            worst = std::max(worst, error - 8.0 * 0x1p-24 * terms);
        }
    }
    const double count = static_cast<double>(std::max<std::size_t>(y.size(), 1));
    const double bound = 1.5e-4 * std::sqrt(squares / count);
    EXPECT_LE(std::sqrt(errors / count), bound + 1e-6);
    EXPECT_LE(worst, 10.0 * bound + 1e-6);
}

TEST(LinearTest, IsTheProductOfTheWeightsAsStored) {
    Random random(seed_or(91));
    HEADLONG_TRACE_SEED(random);
    struct Sizes {
        std::int64_t rows, inputs, outputs;
    };
    std::vector<Sizes> sizes{{1, 1, 1},   {1, 64, 16},   {2, 65, 17},   {3, 255, 31},  {5, 256, 33}, {8, 257, 130},
                             {15, 40, 7}, {16, 256, 64}, {17, 513, 65}, {47, 100, 80}, {3, 7, 0},    {4, 0, 5}};
    if (!emulated()) sizes.insert(sizes.end(), {{265, 300, 600}, {290, 1030, 70}, {20, 0, 40}});
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa, 2);
        for (const Sizes& s : sizes) {
            const Layer layer(s.inputs, s.outputs, random);
            const std::vector<float> x = normal(size(s.rows * s.inputs), random);
            for (const WeightType type : kTypes) {
                SCOPED_TRACE(std::string(to_string(type)) + " " + std::to_string(s.rows) + "x" +
                             std::to_string(s.inputs) + "x" + std::to_string(s.outputs));
                const bool with_bias = random.chance(0.5);
                const Linear linear = layer.make(*context, type, with_bias);
                EXPECT_EQ(linear.bytes(), Linear::bytes_for(s.inputs, s.outputs, with_bias, type));
                std::vector<float> start(size(s.rows * s.outputs));
                for (std::size_t i = 0; with_bias && i < start.size(); ++i)
                    start[i] = layer.bias[i % layer.bias.size()];
                expect_product(linear, isa, x, start, apply(*context, linear, x.data(), s.rows), s.rows);
                std::vector<float> before = normal(start.size(), random);
                const std::vector<float> added = apply(*context, linear, x.data(), s.rows, before, Linear::Into::add);
                for (std::size_t i = 0; i < start.size(); ++i) start[i] += before[i];
                expect_product(linear, isa, x, start, added, s.rows);
            }
        }
    }
}

TEST(LinearTest, ARowHasTheSameBitsHoweverManyComeWithIt) {
    Random random(seed_or(92));
    HEADLONG_TRACE_SEED(random);
    const std::int64_t rows = emulated() ? 20 : 160;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const Layer layer(530, 77, random);
        const std::vector<float> x = normal(size(rows * layer.inputs), random);
        const std::vector<float> before = normal(size(rows * layer.outputs), random);
        for (const WeightType type : kTypes) {
            for (const bool adds : {false, true}) {
                const Linear::Into into = adds ? Linear::Into::add : Linear::Into::overwrite;
                std::vector<float> first;
                for (const std::size_t threads : {1U, 2U, 3U}) {
                    const auto context = make_context(isa, threads);
                    const Linear linear = layer.make(*context, type, !adds);
                    for (const std::int64_t step : {rows, std::int64_t{1}, std::int64_t{7}, std::int64_t{16}}) {
                        std::vector<float> y;
                        for (std::int64_t r = 0; r < rows; r += step) {
                            const std::int64_t count = std::min(step, rows - r);
                            const std::vector<float> part = apply(
                                *context, linear, x.data() + r * layer.inputs, count,
                                {before.begin() + r * layer.outputs, before.begin() + (r + count) * layer.outputs},
                                into);
                            y.insert(y.end(), part.begin(), part.end());
                        }
                        if (first.empty()) first = y;
                        ASSERT_TRUE(same_bits(first, y))
                            << to_string(type) << (adds ? " added, " : ", ") << threads << " threads, " << step;
                    }
                }
            }
        }
    }
}

TEST(LinearTest, SixteenBitsComputeAsTheSameFloats) {
    Random random(seed_or(93));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa);
        for (const WeightType type : {WeightType::f16, WeightType::bf16}) {
            Layer layer(300, 50, random);
            for (float& w : layer.weight) {
                w = type == WeightType::f16 ? kernels::widen_f16(kernels::narrow_f16(w))
                                            : kernels::widen_bf16(kernels::narrow_bf16(w));
            }
            for (const std::int64_t rows : {1, 5, 40}) {
                const std::vector<float> x = normal(size(rows * layer.inputs), random);
                EXPECT_TRUE(same_bits(apply(*context, layer.make(*context, type), x.data(), rows),
                                      apply(*context, layer.make(*context, WeightType::f32), x.data(), rows)));
            }
        }
    }
}

TEST(LinearTest, NaNsReachTheirRowsAndOutputsAlone) {
    Random random(seed_or(94));
    HEADLONG_TRACE_SEED(random);
    HEADLONG_FOR_EACH_ISA(isa) {
        const auto context = make_context(isa);
        for (const WeightType type : kTypes) {
            for (const std::int64_t rows : {3, 40}) {
                Layer layer(130, 40, random);
                layer.weight[7 * 40 + 21] = std::numeric_limits<float>::quiet_NaN();
                std::vector<float> x = normal(size(rows * layer.inputs), random);
                x[size(layer.inputs) + 100] = -std::numeric_limits<float>::infinity();
                x[size(2 * layer.inputs)] = std::numeric_limits<float>::quiet_NaN();
                const std::vector<float> y = apply(*context, layer.make(*context, type), x.data(), rows);
                for (std::int64_t r = 0; r < rows; ++r) {
                    for (std::int64_t c = 0; c < 40; ++c) {
                        const float out = y[size(r * 40 + c)];
                        const bool spoiled = c == 21 || r == 2 || (r == 1 && has_codes(type));
                        if (r == 1 && !spoiled) {
                            ASSERT_TRUE(std::isinf(out)) << to_string(type) << " " << c;
                        } else {
                            ASSERT_EQ(std::isnan(out), spoiled) << to_string(type) << " " << r << " " << c;
                        }
                        if (spoiled) {
                            ASSERT_TRUE(same_bits(out, std::numeric_limits<float>::quiet_NaN()));
                        }
                    }
                }
            }
        }
    }
}

TEST(LinearTest, ScratchIsWhatACallLeaves) {
    Random random(seed_or(95));
    HEADLONG_TRACE_SEED(random);
    for (const WeightType type : kTypes) {
        for (const std::int64_t rows : {1, 15, 16, 300}) {
            CountingResource memory;
            ContextOptions options;
            options.memory = &memory;
            options.threads = 1;
            Context context(options);
            const Layer layer(200, 90, random);
            const Linear linear(context.impl(), *std::pmr::new_delete_resource(),
                                InputTensor<2>::dense(layer.weight.data(), {200, 90}), InputTensor<1>{}, type);
            const std::vector<float> x = normal(size(rows * 200), random);
            apply(context, linear, x.data(), rows);
            const Linear::Scratch planned = Linear::scratch(context.impl(), 200, rows, type);
            EXPECT_EQ(context.scratch_bytes(), planned.workers + planned.quantised) << to_string(type) << " " << rows;
        }
    }
}

class LinearModelTest : public testing::Test {
  protected:
    std::vector<float> logits(Context& context, std::optional<WeightType> type, std::int64_t tokens) {
        ModelOptions options;
        options.weights = type;
        const Model model(context, (source_dir() / "tools" / "models" / "austen").string(), options);
        KvCache cache(model.cache_options());
        std::vector<std::int32_t> ids(size(tokens));
        for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(17 * i % 1000);
        std::vector<float> out(size(tokens * model.info().vocab_size));
        model.forward(context, ids, cache, OutputTensor<2>::dense(out.data(), {tokens, model.info().vocab_size}));
        return out;
    }
};

// The embedded model's file is of bf16.
TEST_F(LinearModelTest, WeightsOfAModelAreOfTheTypeAskedFor) {
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa);
        const std::int64_t tokens = 20;
        const std::vector<float> stored = logits(*context, std::nullopt, tokens);
        EXPECT_TRUE(same_bits(stored, logits(*context, WeightType::bf16, tokens)));
        EXPECT_TRUE(same_bits(stored, logits(*context, WeightType::f32, tokens)));
        const auto distance = [&](WeightType type) {
            const std::vector<float> other = logits(*context, type, tokens);
            double errors = 0.0, squares = 0.0;
            for (std::size_t i = 0; i < stored.size(); ++i) {
                errors += std::pow(static_cast<double>(other[i]) - static_cast<double>(stored[i]), 2);
                squares += std::pow(static_cast<double>(stored[i]), 2);
            }
            return std::sqrt(errors / squares);
        };
        EXPECT_LT(distance(WeightType::f16), 1e-3);
        const double int8 = distance(WeightType::int8);
        EXPECT_GT(int8, 1e-5);  // it is another arithmetic
        EXPECT_LT(int8, 3e-2);
        const double int4 = distance(WeightType::int4);
        EXPECT_GT(int4, 2.0 * int8);
        EXPECT_LT(int4, 0.5);
    }
}

FileMatrix rows_of(const FileTensor& tensor) {
    return {.tensor = &tensor, .inputs = tensor.shape[1], .outputs = tensor.shape[0], .output_stride = tensor.shape[1]};
}

// However a file lays a matrix out, a layer has the same weights.
TEST(LinearTest, TakesMatricesAsFilesHaveThem) {
    Random random(seed_or(96));
    HEADLONG_TRACE_SEED(random);
    const std::filesystem::path path =
        std::filesystem::temp_directory_path() / ("headlong_linear_test_" + std::to_string(getpid()) + ".layout");
    constexpr std::int64_t kInputs = 70, kOutputs = 36;
    const std::vector<float> weights = normal(3 * kOutputs * kInputs, random);  // [3 * outputs][inputs]
    std::vector<float> inputs_first(weights.size());                            // [inputs][3 * outputs]
    for (std::int64_t o = 0; o < 3 * kOutputs; ++o) {
        for (std::int64_t i = 0; i < kInputs; ++i) {
            inputs_first[size(i * 3 * kOutputs + o)] = weights[size(o * kInputs + i)];
        }
    }
    write_safetensors(path.string(), {tensor_to_write("rows", "F32", {3 * kOutputs, kInputs}, weights),
                                      tensor_to_write("columns", "F32", {kInputs, 3 * kOutputs}, inputs_first)});
    const SafetensorsFile file(path.string());
    const FileTensor& rows = file.at("rows");
    const FileTensor& columns = file.at("columns");
    struct Case {
        const char* what;
        FileMatrix matrix;
        std::int64_t (*row)(std::int64_t output);  // of `weights`
    };
    const std::int64_t all = 3 * kOutputs;
    const Case cases[] = {
        {"the second third",
         {&rows, kInputs, kOutputs, kOutputs * kInputs, kInputs},
         [](std::int64_t o) { return kOutputs + o; }},
        {"heads of 4, the second of three parts",
         {&rows, kInputs, kOutputs, 4 * kInputs, kInputs, 1, 4, 12 * kInputs},
         [](std::int64_t o) { return o / 4 * 12 + 4 + o % 4; }},
        {"inputs first", {&columns, kInputs, kOutputs, 0, 1, all}, [](std::int64_t o) { return o; }},
        {"inputs first, the last third",
         {&columns, kInputs, kOutputs, 2 * kOutputs, 1, all},
         [](std::int64_t o) { return 2 * kOutputs + o; }},
        {"inputs first, every second from the first on",
         {&columns, kInputs, kOutputs, 1, 2, all},
         [](std::int64_t o) { return 1 + 2 * o; }},
    };
    for (const Isa isa : available_isas()) {
        const auto context = make_context(isa, 2);
        for (const Case& each : cases) {
            SCOPED_TRACE(each.what);
            const Linear linear(context->impl(), context->memory(), each.matrix, {}, WeightType::f32);
            for (std::int64_t o = 0; o < kOutputs; ++o) {
                for (std::int64_t i = 0; i < kInputs; ++i) {
                    ASSERT_EQ(linear.weight(size(i), size(o)), weights[size(each.row(o) * kInputs + i)]);
                }
            }
        }
    }
    std::filesystem::remove(path);
}

TEST_F(LinearModelTest, AWeightThatWouldBecomeInfiniteIsRefused) {
    const std::filesystem::path path =
        std::filesystem::temp_directory_path() / ("headlong_linear_test_" + std::to_string(getpid()) + ".safetensors");
    std::vector<float> weight(4 * 3, 1.0F);
    weight[5] = -70000.0F;
    write_safetensors(path.string(), {tensor_to_write("w", "F32", {4, 3}, weight)});
    const SafetensorsFile file(path.string());
    Context context;
    const auto make = [&](WeightType type) {
        return Linear(context.impl(), context.memory(), rows_of(file.at("w")), {}, type);
    };
    const std::string message = refusal([&] { make(WeightType::f16); }, ErrorCode::unsupported);
    for (const char* part : {"'w'", "-70000", "65504", "bf16"}) EXPECT_TRUE(says(message, part));
    EXPECT_EQ(make(WeightType::bf16).outputs(), 4);
    weight[5] = 3.4e38F;
    write_safetensors(path.string(), {tensor_to_write("w", "F32", {4, 3}, weight)});
    const SafetensorsFile larger(path.string());
    const std::string of_bf16 =
        refusal([&] { Linear(context.impl(), context.memory(), rows_of(larger.at("w")), {}, WeightType::bf16); },
                ErrorCode::unsupported);
    for (const char* part : {"'w'", "3.4", "3.3895e38", "f32"}) EXPECT_TRUE(says(of_bf16, part));
    std::filesystem::remove(path);
}

}  // namespace
}  // namespace headlong::test
