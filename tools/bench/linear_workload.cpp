#include "tools/bench/linear_workload.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include "engine/linear.hpp"
#include "tools/bench/random_floats.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/memory.hpp"

namespace headlong::tools {
namespace {

std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

double root_mean_square(const std::vector<float>& values) {
    double sum = 0.0;
    for (const float x : values) sum += static_cast<double>(x) * static_cast<double>(x);
    return std::sqrt(sum / static_cast<double>(values.size()));
}

class LinearLayer final : public Workload {
  public:
    LinearLayer(const LinearShape& shape, Context& context) : shape_(shape) {
        Random random(1);
        const std::vector<float> weights = random.floats(size(shape_.inputs * shape_.outputs));
        x_ = random.floats(size(shape_.rows * shape_.inputs));
        y_.resize(size(shape_.rows * shape_.outputs));
        const auto weight = InputTensor<2>::dense(weights.data(), {shape_.inputs, shape_.outputs});
        for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
            layers_.push_back(
                std::make_unique<Linear>(context.impl(), context.memory(), weight, InputTensor<1>{}, shape_.weights));
        }
    }

    void run(Context& context) override {
        layer_ = (layer_ + 1) % layers_.size();
        auto workspace = context.impl().workspaces.lend();
        layers_[layer_]->apply(context.impl(), *workspace, x_.data(), shape_.inputs, shape_.rows, y_.data(),
                               shape_.outputs);
    }

    double flops() const override {
        return 2.0 * static_cast<double>(shape_.rows) * static_cast<double>(shape_.inputs * shape_.outputs);
    }
    double bytes() const override {
        const double outputs = static_cast<double>(shape_.outputs);
        const double weights = static_cast<double>(shape_.inputs) * outputs;
        switch (shape_.weights) {  // without what fills up panels
            case WeightType::f32:
                return 4.0 * weights;
            case WeightType::f16:
            case WeightType::bf16:
                return 2.0 * weights;
            case WeightType::int8:
            case WeightType::int4:
                break;
        }
        return weights * (shape_.weights == WeightType::int4 ? 0.5 : 1.0) +
               4.0 * outputs * static_cast<double>(kernels::code_groups(size(shape_.inputs)));
    }
    std::size_t kv_bytes() const override { return 0; }
    std::size_t walk_bytes() const override { return static_cast<std::size_t>(bytes()) * layers_.size(); }

    std::optional<Deviation> check(Context& context) override {
        std::ranges::fill(y_, std::numeric_limits<float>::quiet_NaN());  // nothing of an earlier run can pass
        run(context);
        Deviation worst;
        Random random(7);
        constexpr int kElements = 64;
        const bool integers = shape_.weights == WeightType::int8 || shape_.weights == WeightType::int4;
        for (int i = 0; i < kElements; ++i) {
            const std::size_t row = i == 0 ? size(shape_.rows) - 1 : random.below(size(shape_.rows));
            const std::size_t column = i == 0 ? size(shape_.outputs) - 1 : random.below(size(shape_.outputs));
            double expected = 0.0;
            double terms = 0.0;
            for (std::size_t k = 0; k < size(shape_.inputs); ++k) {
                const double term = static_cast<double>(x_[row * size(shape_.inputs) + k]) *
                                    static_cast<double>(layers_[layer_]->weight(k, column));
                expected += term;
                terms += std::abs(term);
            }
            const double error = std::abs(static_cast<double>(y_[row * size(shape_.outputs) + column]) - expected);
            // as for a score, the same sum; of integers ten times what the root mean square may be (SEMANTICS, 6)
            double tolerance = std::max(1e-5, 8.0 * 0x1p-24 * terms);
            if (integers) tolerance += 1.5e-3 * root_mean_square(y_);
            worst = worse(worst, {error, tolerance});
        }
        return worst;
    }

  private:
    LinearShape shape_;
    std::vector<float> x_, y_;
    std::vector<std::unique_ptr<Linear>> layers_;
    std::size_t layer_ = 0;
};

}  // namespace

PlannedWorkload plan_linear(const LinearShape& shape, const std::string& what) {
    LinearShape s = shape;
    const double weight = 4.0 * static_cast<double>(s.inputs) * static_cast<double>(s.outputs);
    const auto panels = static_cast<double>(Linear::bytes_for(s.inputs, s.outputs, false, s.weights));
    const double rows = 4.0 * static_cast<double>(s.rows) * static_cast<double>(s.inputs + s.outputs);
    if (s.layers == 0) {
        constexpr double kMostLayers = 1024;
        const double wanted = std::ceil(2.0 * static_cast<double>(last_level_cache_bytes()) / panels);
        const double possible = (static_cast<double>(available_memory()) / 2.0 - rows - weight) / panels;
        s.layers = static_cast<std::int64_t>(std::max(1.0, std::min({wanted, possible, kMostLayers})));
    }
    const double layers = static_cast<double>(s.layers);
    const double bytes = weight + rows + panels * layers;
    check_memory(what, bytes + std::min(panels * layers, static_cast<double>(read_buffer_cap())));
    nlohmann::ordered_json json;
    json["phase"] = "linear";
    json["q_len"] = s.rows;
    for (const char* field : {"kv_len", "batch", "heads", "kv_heads", "head_dim", "kv_type"}) json[field] = nullptr;
    json["inputs"] = s.inputs;
    json["outputs"] = s.outputs;
    json["weights"] = to_string(s.weights);
    json["layers"] = s.layers;
    return {.shape = std::move(json), .memory_bytes = static_cast<std::size_t>(bytes), .make = [s](Context& context) {
                return std::make_unique<LinearLayer>(s, context);
            }};
}

}  // namespace headlong::tools
