#include "tools/cases/model_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <headlong/error.hpp>
#include <headlong/kv_cache.hpp>

#include "engine/context_impl.hpp"
#include "engine/decoder.hpp"
#include "engine/mapped_file.hpp"
#include "tools/cases/case_file.hpp"
#include "tools/cases/timing.hpp"

namespace headlong::tools {
namespace {

// Plain float32 stays under 6e-5; the mildest mistake tried (a norm's epsilon, a rotary angle) gives 2e-3.
constexpr Tolerance kLogits{.absolute = 5e-4, .relative = 0.0};
// Where the two largest logits are nearer than this, rounding may choose.
constexpr double kSmallestGap = 0.01;

/// How far logits of a cache of such a type may be from those of f32, root mean square by root mean square: some three
/// times what the twenty models of the shared data need (of int4 twice), with experts that change for a few tokens. No
/// bound is on single ones.
double most_moved(KvType type) {
    switch (type) {
        case KvType::f32:
            break;
        case KvType::f16:
            return 0.004;
        case KvType::bf16:
            return 0.03;
        case KvType::int8:
            return 0.25;
        case KvType::int4:
            return 0.9;
    }
    return 0.0;
}

/// What a golden.safetensors says.
struct Golden {
    std::vector<std::int32_t> tokens;
    std::vector<double> logits;
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> greedy;  ///< as far as they must agree with caches of f32
};

double root_mean_square(const std::vector<double>& values) {
    double squares = 0.0;
    for (const double x : values) squares += x * x;
    return std::sqrt(squares / static_cast<double>(values.size()));
}

/// Of the two largest.
double gap_of(const std::vector<float>& logits) {
    std::vector<float> sorted(logits);
    std::ranges::nth_element(sorted, sorted.begin() + 1, std::greater<>());
    return logits.size() < 2 ? 0.0 : static_cast<double>(sorted[0]) - static_cast<double>(sorted[1]);
}

Golden read_golden(const std::string& path, std::int64_t vocab_size) {
    const CaseFile file(path);
    Golden golden;
    for (const std::int64_t id : to_int64s(file.at("tokens"))) {
        if (id < 0 || id >= vocab_size)
            file.fail(fmt::format("tensor 'tokens' holds {}, allowed are 0 to {}", id, vocab_size - 1));
        golden.tokens.push_back(static_cast<std::int32_t>(id));
    }
    if (golden.tokens.empty()) file.fail("tensor 'tokens' is empty");
    golden.shape = {static_cast<std::int64_t>(golden.tokens.size()), vocab_size};
    file.expect_shape(file.at("logits"), golden.shape);
    golden.logits = to_doubles(file.at("logits"));
    golden.greedy = to_int64s(file.at("greedy"));
    std::size_t sure = golden.greedy.size();
    std::string gaps = file.text("greedy_gaps").value_or("");
    std::ranges::replace(gaps, ',', ' ');  // files separate them by either
    std::istringstream numbers(gaps);
    double gap = 0.0;
    for (std::size_t i = 0; i < sure && numbers >> gap; ++i) {
        if (gap < kSmallestGap) sure = i;
    }
    if (!numbers && !numbers.eof()) file.fail("metadata 'greedy_gaps' must be a list of numbers");
    golden.greedy.resize(sure);
    return golden;
}

Outcome run(Context& context, const std::string& folder, const KvTypes& types) {
    const std::string config_path = folder + "/config.json";
    const DecoderConfig config = parse_decoder_config(read_text(config_path, kMostConfigBytes), config_path);
    const Decoder decoder(context.impl(), context.memory(), config,
                          std::make_shared<const WeightFiles>(WeightFiles::open(folder)));
    const Golden golden = read_golden(folder + "/golden.safetensors", config.vocab_size);
    const auto rows = static_cast<std::int64_t>(golden.tokens.size());
    const std::int64_t vocab = config.vocab_size;

    const KvCacheOptions cache_options = cache_options_of(config, types);
    KvCache cache(cache_options);
    std::vector<float> logits(static_cast<std::size_t>(rows * vocab));
    decoder.forward(context, golden.tokens, cache, logits.data(), rows, vocab);
    Comparison comparison;
    Tolerance tolerance = kLogits;
    double close_call = 0.0;  // of f32, golden.greedy ends there
    if (types != KvTypes{}) {
        tolerance.absolute = std::numeric_limits<double>::max();
        tolerance.rms = std::max(most_moved(types.keys), most_moved(types.values)) * root_mean_square(golden.logits);
        for (std::size_t i = 0; i < logits.size(); ++i) {
            close_call = std::max(close_call, 2.0 * std::abs(static_cast<double>(logits[i]) - golden.logits[i]));
        }
    }
    comparison.compare("logits", "one call", golden.shape, std::vector<double>(logits.begin(), logits.end()),
                       golden.logits, tolerance);

    KvCache steps(cache_options);
    std::vector<float> row(static_cast<std::size_t>(vocab));
    for (std::int64_t i = 0; i < rows; ++i) {
        decoder.forward(context, std::span(golden.tokens).subspan(static_cast<std::size_t>(i), 1), steps, row.data(), 1,
                        vocab);
        if (std::memcmp(row.data(), logits.data() + i * vocab, row.size() * sizeof(float)) != 0) {
            comparison.fail(fmt::format("logits of token {} by single steps have other bits than in one call", i));
        }
    }
    for (std::size_t i = 0; i < golden.greedy.size(); ++i) {  // `row` holds the last logits
        if (gap_of(row) < close_call) break;                  // what the cache moved may have chosen
        const auto token = static_cast<std::int32_t>(std::ranges::max_element(row) - row.begin());
        if (token != golden.greedy[i]) {
            comparison.fail(fmt::format("greedy[{}] is {}, expected {}", i, token, golden.greedy[i]));
            break;
        }
        decoder.forward(context, std::span(&token, 1), cache, row.data(), 1, vocab);
    }
    return comparison.outcome();
}

}  // namespace

Case model_case(std::string name, std::string folder) {
    return {std::move(name), [folder = std::move(folder)](Context& context, const KvTypes& types) {
                return run(context, folder, types);
            }};
}

}  // namespace headlong::tools
