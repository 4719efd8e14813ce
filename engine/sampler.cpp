// Drawing a token: temperature, then top-k, then top-p, then one uniform number.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <headlong/error.hpp>
#include <headlong/model.hpp>

namespace headlong {

Sampler::Sampler(const SamplingOptions& options) : options_(options), state_(options.seed) {
    if (!(options.temperature >= 0.0F) || !std::isfinite(options.temperature)) {
        throw InvalidArgument(fmt::format("temperature is {}; it must be 0 or more", options.temperature));
    }
    if (options.top_k < 0) throw InvalidArgument(fmt::format("top_k is {}; it must be 0 (all) or more", options.top_k));
    if (!(options.top_p > 0.0F && options.top_p <= 1.0F)) {
        throw InvalidArgument(fmt::format("top_p is {}; it must be above 0 and at most 1", options.top_p));
    }
}

/// In [0, 1): the upper 53 bits of SplitMix64 (Steele, Lea and Flood 2014).
double Sampler::uniform() noexcept {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return static_cast<double>((z ^ (z >> 31U)) >> 11U) * 0x1p-53;
}

std::int32_t Sampler::pick(std::span<const float> logits) {
    if (logits.empty()) throw InvalidArgument("pick: logits are empty");
    std::size_t best = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
        if (std::isnan(logits[i]) || logits[i] == std::numeric_limits<float>::infinity()) {
            throw InvalidArgument(fmt::format("pick: logits[{}] is {}; it must be finite or -inf", i, logits[i]));
        }
        if (logits[i] > logits[best]) best = i;
    }
    if (logits[best] == -std::numeric_limits<float>::infinity()) throw InvalidArgument("pick: all logits are -inf");
    if (options_.temperature == 0.0F || options_.top_k == 1) return static_cast<std::int32_t>(best);

    const auto temperature = static_cast<double>(options_.temperature);
    const auto largest = static_cast<double>(logits[best]);
    candidates_.clear();
    for (std::size_t i = 0; i < logits.size(); ++i) {
        candidates_.push_back(
            {std::exp((static_cast<double>(logits[i]) - largest) / temperature), static_cast<std::int32_t>(i)});
    }
    const auto heavier = [](const Candidate& a, const Candidate& b) {
        return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
    };
    const auto k = static_cast<std::size_t>(options_.top_k);
    if (k != 0 && k < candidates_.size()) {
        std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(k), candidates_.end(),
                         heavier);
        candidates_.resize(k);
    }
    double total = 0.0;
    if (options_.top_p < 1.0F || k != 0) std::sort(candidates_.begin(), candidates_.end(), heavier);
    for (const Candidate& candidate : candidates_) total += candidate.weight;
    if (options_.top_p < 1.0F) {
        const double wanted = static_cast<double>(options_.top_p) * total;
        double held = 0.0;
        std::size_t count = 0;
        while (count < candidates_.size() && held < wanted) held += candidates_[count++].weight;
        candidates_.resize(std::max<std::size_t>(count, 1));
        total = held;
    }
    double target = uniform() * total;
    for (const Candidate& candidate : candidates_) {
        target -= candidate.weight;
        if (target < 0.0) return candidate.token;
    }
    // rounding left a remainder: the last one that can be drawn
    for (std::size_t i = candidates_.size(); i-- > 0;) {
        if (candidates_[i].weight > 0.0) return candidates_[i].token;
    }
    return static_cast<std::int32_t>(best);
}

}  // namespace headlong
