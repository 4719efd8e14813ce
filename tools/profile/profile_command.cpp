// headlong profile: one prefill and decode steps of a model, timed from inside.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <headlong/error.hpp>
#include <headlong/kv_cache.hpp>
#include <headlong/model.hpp>

#include "engine/carver.hpp"
#include "engine/decoder.hpp"
#include "engine/limits.hpp"
#include "engine/mapped_file.hpp"
#include "engine/model_impl.hpp"
#include "tools/commands.hpp"
#include "tools/embedded_model.hpp"
#include "tools/measure/contexts.hpp"
#include "tools/measure/lists.hpp"
#include "tools/measure/machine.hpp"
#include "tools/measure/memory.hpp"
#include "tools/profile/recorder.hpp"
#include "tools/profile/report.hpp"
#include "tools/profile/timed_executor.hpp"
#include "tools/profile/trace.hpp"

namespace headlong::tools {
namespace {

// As generate() does it: its scratch, and its time to the first token.
const std::int64_t kPrefillChunk = GenerateOptions{}.prefill_chunk;

struct Lengths {
    std::int64_t prompt = 0;
    std::int64_t steps = 0;
};

/// What was asked for, or as much of the defaults as the model allows; refuses what it does not.
Lengths lengths_of(const ProfileArguments& arguments, const DecoderConfig& config) {
    constexpr std::int64_t kPrompt = 512;
    constexpr std::int64_t kSteps = 64;
    constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;  // through a ring
    const bool endless = arguments.window > 0 && !config.learned_positions;
    const std::int64_t most = endless ? kMostTokens : config.max_positions;
    const char* const limit = arguments.window > 0 ? "what is profiled at once" : "the model's max_position_embeddings";
    if (arguments.prompt_tokens && *arguments.prompt_tokens < 1) {
        throw InvalidArgument(fmt::format("-p is {}; it must be at least 1", *arguments.prompt_tokens));
    }
    if (arguments.decode_steps && *arguments.decode_steps < 0) {
        throw InvalidArgument(fmt::format("-n is {}; it must be 0 or more", *arguments.decode_steps));
    }
    Lengths lengths;
    if (arguments.prompt_tokens) {
        lengths.prompt = *arguments.prompt_tokens;
        lengths.steps = arguments.decode_steps.value_or(std::clamp(most - lengths.prompt, std::int64_t{0}, kSteps));
    } else {
        lengths.steps = arguments.decode_steps.value_or(std::min(kSteps, most / 2));
        lengths.prompt = std::clamp(most - lengths.steps, std::int64_t{1}, kPrompt);
    }
    if (lengths.prompt > most || lengths.steps > most - lengths.prompt) {
        // only what was typed is to blame
        if (!arguments.decode_steps) {
            throw InvalidArgument(fmt::format("-p {}: at most {}, {}", lengths.prompt, most, limit));
        }
        throw InvalidArgument(fmt::format(
            "{} -n {}: together at most {}, {}",
            arguments.prompt_tokens ? fmt::format("-p {}", lengths.prompt) : std::string("a prompt of 1 token and"),
            lengths.steps, most, limit));
    }
    return lengths;
}

/// The cache that is profiled: a model's, or a ring.
KvCacheOptions cache_of(const ProfileArguments& arguments, KvCacheOptions options) {
    if (arguments.window == 0) return options;
    options.ring = true;
    options.capacity = arguments.window;
    options.sink_tokens = arguments.sink_tokens;
    return options;
}

/// Refuses what does not fit into memory, before any of it is allocated.
void check_memory(Context& context, const DecoderConfig& config, const KvTypes& types,
                  const ProfileArguments& arguments, const Lengths& lengths) {
    const std::size_t cache =
        KvCache::estimate_bytes(cache_of(arguments, cache_options_of(config, types)), lengths.prompt + lengths.steps);
    const std::size_t weights = Decoder::weight_bytes(config);
    const std::array calls{std::min(lengths.prompt, kPrefillChunk), lengths.prompt % kPrefillChunk,
                           std::min(lengths.steps, std::int64_t{1})};
    const std::size_t scratch = Decoder::scratch_bytes(context.impl(), config, calls, types, {}, arguments.sink_tokens);
    const std::size_t needed = saturating_sum(saturating_sum(cache, weights), scratch);
    const std::uint64_t available = available_memory();
    if (needed > available) {
        throw OutOfMemory(
            fmt::format("-p {} -n {}: the cache needs {} bytes, weights {} and scratch {}; {} bytes of "
                        "memory are available",
                        lengths.prompt, lengths.steps, cache, weights, scratch, available));
    }
}

/// A prompt of valid tokens, and the tokens that follow, computed as often as asked for.
class Runs {
  public:
    Runs(Context& context, const Model& model, const KvCacheOptions& cache, TimedExecutor& executor,
         const Lengths& lengths)
        : context_(context),
          decoder_(model.impl().decoder),
          executor_(executor),
          lengths_(lengths),
          cache_(cache),
          logits_(static_cast<std::size_t>(decoder_.config().vocab_size)),
          steps_(static_cast<std::size_t>(lengths.steps)) {
        std::mt19937 random(1);  // the same tokens everywhere
        const auto vocab = static_cast<std::uint32_t>(decoder_.config().vocab_size);
        for (std::int64_t i = 0; i < lengths.prompt; ++i) {
            prompt_.push_back(static_cast<std::int32_t>(random() % vocab));
        }
    }

    /// One phase, timed.
    struct Phase {
        Clock::time_point begin;
        Clock::time_point end;
        Recorder recorder;
    };
    Phase new_phase() const { return {{}, {}, Recorder(executor_, decoder_.config().layers)}; }

    /// Forgets what was, and computes the prompt and the first token after it.
    void prefill(Phase& phase) {
        cache_.reset();
        phase.begin = Clock::now();
        phase.recorder.start();
        for (std::span<const std::int32_t> rest = prompt_; !rest.empty();) {
            const std::size_t count = std::min(rest.size(), static_cast<std::size_t>(kPrefillChunk));
            forward(phase.recorder, rest.first(count), rest.size() == count ? 1 : 0);
            rest = rest.subspan(count);
        }
        pick(phase.recorder);
        phase.recorder.stop();
        phase.end = Clock::now();
    }

    /// Continues token by token.
    void decode(Phase& phase) {
        phase.begin = Clock::now();
        phase.recorder.start();
        for (Clock::duration& step : steps_) {
            const Clock::time_point begin = Clock::now();
            forward(phase.recorder, std::span(&token_, 1), 1);
            pick(phase.recorder);
            step = Clock::now() - begin;
        }
        phase.recorder.stop();
        phase.end = Clock::now();
    }

    const KvCache& cache() const noexcept { return cache_; }
    const std::vector<Clock::duration>& steps() const noexcept { return steps_; }

  private:
    void forward(Recorder& recorder, std::span<const std::int32_t> tokens, std::int64_t logit_rows) {
        decoder_.forward(context_, tokens, cache_, logits_.data(), logit_rows,
                         static_cast<std::int64_t>(logits_.size()), {.log = &recorder});
    }
    void pick(Recorder& recorder) {
        recorder.begin_sampling();
        token_ = greedy_.pick(logits_);
        recorder.end();
    }

    Context& context_;
    const Decoder& decoder_;
    TimedExecutor& executor_;
    Lengths lengths_;
    KvCache cache_;
    std::vector<std::int32_t> prompt_;
    std::vector<float> logits_;
    Sampler greedy_{{}};
    std::int32_t token_ = 0;
    std::vector<Clock::duration> steps_;
};

/// The machine's limits on the profile's own threads, the best of all times they were measured.
class Limits {
  public:
    Limits(Context& context, std::size_t working_set)
        : context_(context), buffer_(std::min(working_set, most_bytes()), context.memory()) {}

    /// Measures everything, again and again while that is quick; returns the clock.
    double measure() {
        constexpr auto kBudget = std::chrono::milliseconds(30);     // several times, unless emulated
        constexpr std::size_t kLeastBytes = std::size_t{32} << 20;  // 2 ms at 16 GB/s
        double now = 0.0;
        const Clock::time_point start = Clock::now();
        do {
            flops = std::max(flops, measure_flops(context_));
            bytes = std::max(bytes, buffer_.measure(context_, buffer_.bytes(), kLeastBytes));
            now = std::max(now, measure_clock(context_));
        } while (Clock::now() - start < kBudget);
        clock = std::max(clock, now);
        return now;
    }

    std::size_t buffer_bytes() const noexcept { return buffer_.bytes(); }

    double flops = 0.0;  ///< FLOP/s
    double bytes = 0.0;  ///< bytes/s
    double clock = 0.0;  ///< Hz

  private:
    /// Where a larger buffer would give the same: far beyond the last cache.
    static std::size_t most_bytes() { return std::max(std::size_t{64} << 20, 8 * last_level_cache_bytes()); }

    Context& context_;
    ReadBuffer buffer_;
};

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

/// Rows of the kinds that occur in the phase, and a last one for waiting. No layer: all together.
std::vector<Part> parts_of(const Recorder& recorder, std::optional<std::int64_t> layer = {}) {
    std::vector<Part> parts;
    Clock::duration waiting{};
    for (Kind kind = 0; kind < kKinds; ++kind) {
        const Totals all = recorder.totals(kind);
        const Totals totals = layer ? recorder.totals(kind, *layer) : all;
        waiting += totals.waiting;
        if (all.calls == 0) continue;
        parts.push_back({kind_name(kind), totals.calls, seconds(totals.time), totals.work.flops, totals.work.bytes,
                         seconds(totals.waiting)});
    }
    parts.push_back({.kind = "waiting", .seconds = seconds(waiting)});
    return parts;
}

PhaseReport report_of(const char* name, std::int64_t tokens, const Runs::Phase& phase) {
    PhaseReport report;
    report.name = name;
    report.tokens = tokens;
    report.wall_seconds = seconds(phase.end - phase.begin);
    report.parts = parts_of(phase.recorder);
    for (std::int64_t layer = -1; layer < phase.recorder.layers(); ++layer) {
        report.layers.push_back({layer, parts_of(phase.recorder, layer)});
    }
    return report;
}

std::uint64_t peak_resident_bytes() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;  // Linux counts KiB
}

}  // namespace

int run_profile(const ProfileArguments& arguments) {
    const DecoderConfig config = load_config(arguments.model);
    const Lengths lengths = lengths_of(arguments, config);
    const KvTypes types = parse_kv_pair("--kv", arguments.kv);
    check_ring("--window", "--sink-tokens", arguments.window, arguments.sink_tokens);
    ContextOptions context_options = context_options_of(arguments.isa);
    const std::size_t threads = arguments.threads == 0 ? default_concurrency() : arguments.threads;
    allow_threads(threads);
    const auto executor =
        std::make_shared<TimedExecutor>(threads == 1 ? make_serial_executor() : make_tbb_executor(threads));
    context_options.executor = executor;
    Context context(context_options);
    check_memory(context, config, types, arguments, lengths);
    std::optional<TraceFile> trace;
    if (!arguments.trace.empty()) trace.emplace(arguments.trace);
    const Model model = load_model(context, arguments.model);

    Runs runs(context, model, cache_of(arguments, model.cache_options(types)), *executor, lengths);
    Runs::Phase prefill = runs.new_phase();
    Runs::Phase decode = runs.new_phase();
    {
        Runs::Phase warm_prefill = runs.new_phase();
        Runs::Phase warm_decode = runs.new_phase();
        runs.prefill(warm_prefill);
        runs.decode(warm_decode);
        if (trace) {  // room for as much again: nothing is allocated while tasks run
            prefill.recorder.keep_segments(warm_prefill.recorder.segments());
            decode.recorder.keep_segments(warm_decode.recorder.segments());
        }
    }
    constexpr std::uint64_t kMostTasks = std::uint64_t{1} << 20;  // of a worker: 16 MiB
    const std::size_t kept_tasks = trace ? static_cast<std::size_t>(std::min(executor->tasks(), kMostTasks)) : 0;

    ProfileReport report;
    report.peak_bytes = peak_resident_bytes();
    report.weight_bytes = model.impl().decoder.weight_bytes();
    Limits limits(context, report.weight_bytes + runs.cache().used_bytes());
    const double clock_before = limits.measure();
    executor->keep_tasks(kept_tasks);
    runs.prefill(prefill);
    executor->keep_tasks(0);
    const double clock_between = limits.measure();
    executor->keep_tasks(kept_tasks);
    runs.decode(decode);
    executor->keep_tasks(0);
    const double clock_after = limits.measure();

    report.model = fmt::format("{}: {}, {} layers, {} heads, {} KV heads, head_dim {}, hidden_size {}",
                               arguments.model.empty() ? "embedded model" : one_line(arguments.model),
                               one_line(config.architecture), config.layers, config.heads, config.kv_heads,
                               config.head_dim, config.hidden_size);
    report.isa = to_string(context.isa());
    report.threads = context.concurrency();
    report.prompt_tokens = lengths.prompt;
    report.prefill_chunk = kPrefillChunk;
    report.decode_steps = lengths.steps;
    report.limit_flops = limits.flops;
    report.limit_bytes = limits.bytes;
    report.best_clock = limits.clock;
    report.read_buffer_bytes = limits.buffer_bytes();
    for (const Clock::duration step : runs.steps()) report.step_seconds.add({seconds(step)});
    report.kv_type = kv_types_name(types);
    report.kv_used_bytes = runs.cache().used_bytes();
    report.kv_reserved_bytes = runs.cache().pool()->reserved_bytes();
    report.scratch_bytes = context.scratch_bytes();
    report.prefill = report_of("prefill", lengths.prompt, prefill);
    report.decode = report_of("decode", lengths.steps, decode);
    const auto set_clock = [&](PhaseReport& phase, double before, double after) {
        constexpr double kThrottled = 0.9;
        phase.clock_before = before;
        phase.clock_after = after;
        phase.throttled = std::min(before, after) < kThrottled * limits.clock;
    };
    set_clock(report.prefill, clock_before, clock_between);
    set_clock(report.decode, clock_between, clock_after);

    if (trace) {
        trace->write({{"prefill", prefill.begin, prefill.end, &prefill.recorder},
                      {"decode", decode.begin, decode.end, &decode.recorder}},
                     *executor);
    }
    const std::string text =
        arguments.json
            ? to_json(report, arguments.layers).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
                  "\n"
            : to_text(report, arguments.layers);
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) throw IoError("writing the results failed");
    return done;
}

}  // namespace headlong::tools
