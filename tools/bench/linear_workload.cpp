#include "tools/bench/linear_workload.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include <headlong/error.hpp>

#include "engine/linear.hpp"
#include "tools/bench/random_floats.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/memory.hpp"

namespace headlong::tools {
namespace {

std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

class LinearLayer final : public Workload {
  public:
    LinearLayer(const LinearShape& shape, Context& context) : shape_(shape) {
        Random random(1);
        weight_ = random.floats(size(shape_.inputs * shape_.outputs));
        x_ = random.floats(size(shape_.rows * shape_.inputs));
        y_.resize(size(shape_.rows * shape_.outputs));
        const auto weight = InputTensor<2>::dense(weight_.data(), {shape_.inputs, shape_.outputs});
        for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
            layers_.push_back(std::make_unique<Linear>(context.impl(), context.memory(), weight, InputTensor<1>{}));
        }
    }

    void run(Context& context) override {
        layer_ = (layer_ + 1) % layers_.size();
        layers_[layer_]->apply(context.impl(), x_.data(), shape_.inputs, shape_.rows, y_.data(), shape_.outputs);
    }

    double flops() const override {
        return 2.0 * static_cast<double>(shape_.rows) * static_cast<double>(shape_.inputs * shape_.outputs);
    }
    double bytes() const override { return 4.0 * static_cast<double>(shape_.inputs * shape_.outputs); }
    std::size_t kv_bytes() const override { return 0; }
    std::size_t walk_bytes() const override { return static_cast<std::size_t>(bytes()) * layers_.size(); }

    std::optional<Deviation> check(Context& context) override {
        run(context);
        Deviation worst;
        Random random(7);
        constexpr int kElements = 64;
        for (int i = 0; i < kElements; ++i) {
            const std::size_t row = i == 0 ? size(shape_.rows) - 1 : random.below(size(shape_.rows));
            const std::size_t column = i == 0 ? size(shape_.outputs) - 1 : random.below(size(shape_.outputs));
            double expected = 0.0;
            double terms = 0.0;
            for (std::size_t k = 0; k < size(shape_.inputs); ++k) {
                const double term = static_cast<double>(x_[row * size(shape_.inputs) + k]) *
                                    static_cast<double>(weight_[k * size(shape_.outputs) + column]);
                expected += term;
                terms += std::abs(term);
            }
            const double error = std::abs(static_cast<double>(y_[row * size(shape_.outputs) + column]) - expected);
            if (!(error <= worst.max_abs_err)) worst.max_abs_err = error;
            // as for a score, which is the same kernel's sum
            worst.tolerance = std::max({worst.tolerance, 1e-5, 8.0 * 0x1p-24 * terms});
        }
        return worst;
    }

  private:
    LinearShape shape_;
    std::vector<float> weight_;  ///< [inputs][outputs], for the check
    std::vector<float> x_, y_;
    std::vector<std::unique_ptr<Linear>> layers_;
    std::size_t layer_ = 0;
};

}  // namespace

PlannedWorkload plan_linear(const LinearShape& shape, const std::string& what) {
    LinearShape s = shape;
    const double weight = 4.0 * static_cast<double>(s.inputs) * static_cast<double>(s.outputs);
    const double rows = 4.0 * static_cast<double>(s.rows) * static_cast<double>(s.inputs + s.outputs);
    const auto available = static_cast<double>(available_memory());
    if (s.layers == 0) {
        const double wanted = 2.0 * static_cast<double>(last_level_cache_bytes()) / weight;
        const double possible = (available / 2.0 - rows) / weight - 1.0;
        s.layers = static_cast<std::int64_t>(std::max(1.0, std::min(std::ceil(wanted), possible)));
    }
    const double panels = 4.0 * static_cast<double>(s.inputs) * std::ceil(static_cast<double>(s.outputs) / 16.0) * 16.0;
    const double bytes = weight + rows + panels * static_cast<double>(s.layers);
    if (bytes > available) {
        throw OutOfMemory(fmt::format("{}: needs {:.4g} GiB of memory, {:.4g} GiB are available", what, bytes * 0x1p-30,
                                      available * 0x1p-30));
    }
    nlohmann::ordered_json json;
    json["phase"] = "linear";
    json["q_len"] = s.rows;
    json["inputs"] = s.inputs;
    json["outputs"] = s.outputs;
    json["weights"] = "f32";
    return {.shape = std::move(json), .memory_bytes = static_cast<std::size_t>(bytes), .make = [s](Context& context) {
                return std::make_unique<LinearLayer>(s, context);
            }};
}

}  // namespace headlong::tools
