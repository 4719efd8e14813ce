#include "tools/bench/model_workload.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include <fmt/format.h>

#include <headlong/error.hpp>

#include "engine/decoder.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/model_impl.hpp"
#include "tools/bench/random_floats.hpp"
#include "tools/measure/lists.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/memory.hpp"

namespace headlong::tools {
namespace {

std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

/// Adds up what forward passes are made of.
class WorkSum final : public ForwardLog {
  public:
    void begin(Operation /*operation*/, std::int64_t /*layer*/, const Work& work) noexcept override {
        flops += static_cast<double>(work.flops);
        bytes += static_cast<double>(work.bytes);
    }
    void end() noexcept override {}
    double flops = 0.0;
    double bytes = 0.0;
};

class ForwardPasses final : public Workload {
  public:
    ForwardPasses(const ModelRun& run, std::shared_ptr<const Model> model, Context& context)
        : run_(run), model_(std::move(model)), cache_(options(context)) {
        const std::int64_t vocab = model_->info().vocab_size;
        Random random(1);
        for (std::int64_t i = 0; i < (run_.prefill ? run_.length : run_.steps); ++i) {
            tokens_.push_back(static_cast<std::int32_t>(random.below(size(vocab))));
        }
        logits_.resize(size(vocab));
        if (!run_.prefill) fill(context, random);
        repeat(context, &work_);
    }

    void run(Context& context) override { repeat(context, nullptr); }

    double flops() const override { return work_.flops; }
    double bytes() const override { return work_.bytes; }
    std::size_t kv_bytes() const override { return cache_.used_bytes(); }
    std::size_t walk_bytes() const override { return model_->impl().decoder.weight_bytes() + cache_.used_bytes(); }
    std::int64_t tokens() const override { return static_cast<std::int64_t>(tokens_.size()); }
    std::optional<Deviation> check(Context& /*context*/) override { return {}; }

  private:
    KvCacheOptions options(Context& context) const {
        KvCacheOptions result = model_->cache_options(run_.kv);
        result.memory = &context.memory();
        return result;
    }

    /// The keys before the first step. Their values do not matter for the time.
    void fill(Context& context, Random& random) {
        const KvShape& shape = cache_.shape();
        constexpr std::int64_t kChunk = 512;
        for (std::int64_t done = 0; done < run_.length - 1;) {
            const std::int64_t count = std::min(kChunk, run_.length - 1 - done);
            const auto rows = random.floats(size(shape.kv_heads * count * shape.head_dim));
            const auto view = InputTensor<3>::dense(rows.data(), {shape.kv_heads, count, shape.head_dim});
            for (std::size_t layer = 0; layer < cache_.layers(); ++layer) cache_.append(context, layer, view, view);
            done += count;
        }
    }

    void repeat(Context& context, ForwardLog* log) {
        if (run_.prefill) {
            cache_.reset();
        } else if (cache_.forgets() && run_.steps > 1) {
            KvCache steps = cache_.fork();  // what several steps forget cannot be taken back
            return forward(context, steps, log);
        } else {
            cache_.impl().take_back(run_.length - 1);
        }
        forward(context, cache_, log);
    }

    void forward(Context& context, KvCache& cache, ForwardLog* log) {
        // a prompt in the chunks of generate(), which bound its scratch
        const std::size_t chunk = run_.prefill ? size(GenerateOptions{}.prefill_chunk) : 1;
        for (std::span<const std::int32_t> rest = tokens_; !rest.empty();) {
            const std::size_t count = std::min(rest.size(), chunk);
            const bool logits = !run_.prefill || count == rest.size();
            model_->impl().decoder.forward(context, rest.first(count), cache, logits_.data(), logits ? 1 : 0,
                                           static_cast<std::int64_t>(logits_.size()), {.observer = {}, .log = log});
            rest = rest.subspan(count);
        }
    }

    ModelRun run_;
    std::shared_ptr<const Model> model_;
    KvCache cache_;
    std::vector<std::int32_t> tokens_;
    std::vector<float> logits_;
    WorkSum work_;
};

}  // namespace

PlannedWorkload plan_model(const ModelRun& run, const DecoderConfig& config, const std::string& name,
                           std::function<std::shared_ptr<const Model>(Context&)> model) {
    const std::int64_t longest = run.prefill ? run.length : run.length + run.steps - 1;
    const char* const option = run.prefill ? "-p" : "-d";
    if (longest > config.max_positions) {
        throw InvalidArgument(fmt::format("{} {}{}: more tokens than the model's max_position_embeddings of {}", option,
                                          run.length, run.steps > 1 ? fmt::format(" -n {}", run.steps) : "",
                                          config.max_positions));
    }
    const std::size_t bytes = KvCache::estimate_bytes(cache_options_of(config, run.kv), longest);
    const auto weights = static_cast<double>(Decoder::weight_bytes(config, run.weights));
    const double walk = weights + static_cast<double>(bytes);
    check_memory(fmt::format("{} {}", option, run.length),
                 walk + std::min(walk, static_cast<double>(read_buffer_cap())));
    nlohmann::ordered_json json;
    json["phase"] = run.prefill ? "prefill" : "decode";
    json["model"] = name;
    json["q_len"] = run.prefill ? run.length : 1;
    json["kv_len"] = run.length;
    json["steps"] = run.steps;
    json["batch"] = 1;
    json["lens"] = nullptr;
    json["heads"] = config.heads;
    json["kv_heads"] = config.kv_heads;
    json["head_dim"] = config.head_dim;
    json["value_dim"] = config.head_dim;
    json["causal"] = true;
    json["window"] = config.windows.empty() ? 0 : std::ranges::max(config.windows);
    json["weights"] = to_string(run.weights.value_or(config.stored_type));
    json["kv_type"] = kv_types_name(run.kv);
    return {.shape = std::move(json),
            .memory_bytes = bytes,
            .make = [run, model = std::move(model)](Context& context) -> std::unique_ptr<Workload> {
                return std::make_unique<ForwardPasses>(run, model(context), context);
            }};
}

}  // namespace headlong::tools
