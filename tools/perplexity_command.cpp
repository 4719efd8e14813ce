// headlong perplexity: how well a model foretells a text, and what the types of a cache cost of that.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <headlong/error.hpp>
#include <headlong/model.hpp>

#include "engine/mapped_file.hpp"
#include "tools/commands.hpp"
#include "tools/embedded_model.hpp"
#include "tools/measure/contexts.hpp"
#include "tools/measure/lists.hpp"

namespace headlong::tools {
namespace {

constexpr std::int64_t kWindow = 512;
constexpr std::uint64_t kLargestText = std::uint64_t{1} << 30;

/// -log of the probability that the logits give a token.
double loss_of(std::span<const float> logits, std::int32_t token) {
    const auto most = static_cast<double>(*std::ranges::max_element(logits));
    double sum = 0.0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - most);
    return std::log(sum) + most - static_cast<double>(logits[static_cast<std::size_t>(token)]);
}

struct Loss {
    double sum = 0.0;
    std::int64_t tokens = 0;
    double mean() const { return sum / static_cast<double>(tokens); }
};

/// A text through a model: each window on its own, from an empty cache, or all of it through one ring.
class Reader {
  public:
    Reader(Context& context, const Model& model, const PerplexityArguments& arguments)
        : context_(context), model_(model), arguments_(arguments), vocab_(model.info().vocab_size) {
        // logits of a chunk take at most 64 MiB
        chunk_ = std::clamp<std::int64_t>((std::int64_t{1} << 24) / vocab_, 1, kWindow);
        logits_.resize(static_cast<std::size_t>(chunk_ * vocab_));
    }

    Loss read(const std::vector<std::int32_t>& text, const KvTypes& types) {
        const bool ring = arguments_.window > 0;
        KvCacheOptions options = ring ? model_.ring_options(arguments_.window, arguments_.sink_tokens, types)
                                      : model_.cache_options(types, std::min(kWindow, model_.info().max_positions));
        options.f16_sinks = arguments_.f16_sinks && !(types == KvTypes{});  // what is compared with is all of f32
        KvCache cache(options);
        const std::int64_t window =
            ring ? static_cast<std::int64_t>(text.size()) : std::min(kWindow, model_.info().max_positions);
        Loss loss;
        held_bytes_ = 0;
        for (std::span<const std::int32_t> rest = text; !rest.empty();) {
            const std::size_t count = std::min(rest.size(), static_cast<std::size_t>(window));
            cache.reset();
            read_window(cache, rest.first(count), loss, static_cast<std::int64_t>(text.size() - rest.size()),
                        static_cast<std::int64_t>(text.size()));
            held_bytes_ = std::max(held_bytes_, cache.reserved_bytes());
            rest = rest.subspan(count);
        }
        return loss;
    }
    std::size_t held_bytes() const { return held_bytes_; }

  private:
    void read_window(KvCache& cache, std::span<const std::int32_t> tokens, Loss& loss, std::int64_t before,
                     std::int64_t all) {
        for (std::size_t first = 0; first + 1 < tokens.size(); first += static_cast<std::size_t>(chunk_)) {
            // the window's last token is foretold, and foretells nothing
            const std::size_t count = std::min(static_cast<std::size_t>(chunk_), tokens.size() - 1 - first);
            model_.forward(context_, tokens.subspan(first, count), cache,
                           OutputTensor<2>::dense(logits_.data(), {static_cast<std::int64_t>(count), vocab_}));
            for (std::size_t i = 0; i < count; ++i) {
                loss.sum += loss_of(
                    std::span(logits_).subspan(i * static_cast<std::size_t>(vocab_), static_cast<std::size_t>(vocab_)),
                    tokens[first + i + 1]);
            }
            loss.tokens += static_cast<std::int64_t>(count);
            if (isatty(STDERR_FILENO) == 1) {
                fmt::print(stderr, "\r\x1b[K{} of {} tokens", before + static_cast<std::int64_t>(first + count), all);
            }
        }
        if (isatty(STDERR_FILENO) == 1) fmt::print(stderr, "\r\x1b[K");
    }

    Context& context_;
    const Model& model_;
    const PerplexityArguments& arguments_;
    std::int64_t vocab_;
    std::int64_t chunk_;
    std::vector<float> logits_;
    std::size_t held_bytes_ = 0;
};

}  // namespace

int run_perplexity(const PerplexityArguments& arguments) {
    check_ring("--window", "--sink-tokens", arguments.window, arguments.sink_tokens);
    std::vector<KvTypes> types = parse_kv_types("--kv", arguments.kv);
    std::erase(types, KvTypes{});
    types.insert(types.begin(), KvTypes{});  // the others are compared with f32
    // one path is the text, two are the model and the text
    const std::string path = arguments.paths.back();
    const std::string folder = arguments.paths.size() > 1 ? arguments.paths.front() : std::string();
    const std::string text = read_text(path, kLargestText);
    ContextOptions context_options = context_options_of(arguments.isa);
    context_options.threads = arguments.threads;
    Context context(context_options);
    const Model model = load_model(context, folder, {});
    const std::vector<std::int32_t> tokens = model.tokenizer().encode(text, false);
    if (tokens.size() < 2) {
        throw InvalidArgument(fmt::format("{}: has {} tokens; at least 2 are needed", one_line(path), tokens.size()));
    }

    Reader reader(context, model, arguments);
    nlohmann::ordered_json json;
    json["tokens"] = tokens.size();
    json["window"] = arguments.window > 0 ? arguments.window : std::min(kWindow, model.info().max_positions);
    json["ring"] = arguments.window > 0;
    json["sink_tokens"] = arguments.sink_tokens;
    json["f16_sinks"] = arguments.f16_sinks;
    json["isa"] = to_string(context.isa());
    json["rows"] = nlohmann::ordered_json::array();
    if (!arguments.json) {
        fmt::print("{} tokens, {}\n\n", tokens.size(),
                   arguments.window > 0
                       ? fmt::format("one pass through a ring of {} with {} sink tokens{}", arguments.window,
                                     arguments.sink_tokens, arguments.f16_sinks ? " in f16" : "")
                       : fmt::format("windows of {} without overlap", json["window"].get<std::int64_t>()));
        fmt::print("| cache     | loss, nats a token | perplexity | against f32 |\n");
        fmt::print("|-----------|-------------------:|-----------:|------------:|\n");
        std::fflush(stdout);
    }
    double base = 0.0;
    for (const KvTypes& each : types) {
        const Loss loss = reader.read(tokens, each);
        const double perplexity = std::exp(loss.mean());
        if (each == KvTypes{}) base = perplexity;
        const double difference = perplexity / base - 1.0;
        if (arguments.json) {
            json["rows"].push_back({{"kv", kv_types_name(each)},
                                    {"predicted_tokens", loss.tokens},
                                    {"loss", loss.mean()},
                                    {"perplexity", perplexity},
                                    {"difference", difference},
                                    {"kv_bytes", reader.held_bytes()}});
        } else {
            fmt::print("| {:<9} | {:18.5f} | {:10.4f} | {:>+10.3f}% |\n", kv_types_name(each), loss.mean(), perplexity,
                       100.0 * difference);
            std::fflush(stdout);
        }
    }
    if (arguments.json) fmt::print("{}\n", json.dump(2));
    return done;
}

}  // namespace headlong::tools
