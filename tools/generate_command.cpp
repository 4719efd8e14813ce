#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <headlong/error.hpp>
#include <headlong/model.hpp>

#include "engine/mapped_file.hpp"
#include "engine/output_file.hpp"
#include "tools/commands.hpp"
#include "tools/embedded_model.hpp"
#include "tools/measure/contexts.hpp"
#include "tools/measure/lists.hpp"

namespace headlong::tools {
namespace {

/// While it lives, Ctrl-C asks for a stop instead of ending the process; a second one ends it. The signal is blocked
/// in every thread that starts meanwhile and taken by one of our own: a handler may not touch a stop_source. Where the
/// process was started with Ctrl-C ignored (in the background of a script), it stays ignored.
class Interrupt {
  public:
    Interrupt() {
        struct sigaction action {};
        sigaction(SIGINT, nullptr, &action);
        sigemptyset(&signals_);
        if (action.sa_handler != SIG_IGN) sigaddset(&signals_, SIGINT);
        sigaddset(&signals_, kEnd);
        pthread_sigmask(SIG_BLOCK, &signals_, &before_);
        thread_ = std::thread([this] {
            for (int signal = 0; sigwait(&signals_, &signal) == 0 && signal != kEnd;) {
                if (!source_.request_stop()) std::_Exit(130);
            }
        });
    }
    ~Interrupt() {
        pthread_kill(thread_.native_handle(), kEnd);
        thread_.join();
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }
    Interrupt(const Interrupt&) = delete;
    Interrupt& operator=(const Interrupt&) = delete;
    std::stop_token token() const { return source_.get_token(); }

  private:
    static constexpr int kEnd = SIGUSR2;  // sent to our own thread alone, to end it
    sigset_t signals_{};
    sigset_t before_{};
    std::stop_source source_;
    std::thread thread_;
};

std::string read_prompt(const std::string& path) {
    const InputFile file(path);
    constexpr std::uint64_t kLargest = std::uint64_t{1} << 30;
    if (file.size() > kLargest)
        throw InvalidArgument(
            fmt::format("--prompt-file {}: has {} bytes; at most {} are allowed", path, file.size(), kLargest));
    std::string text(static_cast<std::size_t>(file.size()), '\0');
    file.read(0, std::as_writable_bytes(std::span(text)));
    return text;
}

/// From a saved cache on, to a saved one. Attached to it are the text's tokens: the last ones, of which the cache holds
/// nothing yet, are computed first when it goes on.
Generation generate_with_files(Context& context, const Model& model, const std::string& prompt,
                               const GenerateOptions& options, const GenerateArguments& arguments) {
    KvCacheOptions cache_options = options.window > 0
                                       ? model.ring_options(options.window, options.sink_tokens, options.kv)
                                       : model.cache_options(options.kv);
    cache_options.f16_sinks = options.f16_sinks;
    KvCache cache(cache_options);
    std::vector<std::int32_t> tokens;  // of the whole text
    if (!arguments.load_cache.empty()) {
        const std::vector<std::byte> attached = cache.restore(arguments.load_cache);
        tokens.resize(attached.size() / sizeof(std::int32_t));
        if (attached.size() % sizeof(std::int32_t) != 0 || static_cast<std::int64_t>(tokens.size()) < cache.length()) {
            throw BadFile(fmt::format("--load-cache {}: {} tokens are in the cache, {} bytes of tokens attached",
                                      arguments.load_cache, cache.length(), attached.size()));
        }
        std::memcpy(tokens.data(), attached.data(), attached.size());
    }
    const auto held = static_cast<std::size_t>(cache.length());
    const std::vector<std::int32_t> more = model.tokenizer().encode(prompt, arguments.load_cache.empty());
    tokens.insert(tokens.end(), more.begin(), more.end());
    const ModelInfo& info = model.info();
    if (tokens.empty() && info.bos_id) tokens.push_back(*info.bos_id);
    if (tokens.empty() && !info.eos_ids.empty()) tokens.push_back(info.eos_ids.front());
    if (tokens.size() == held) {
        throw InvalidArgument(
            "-p: is empty, and the cache holds all of its text: there is nothing to go on from; give some text");
    }
    if (!arguments.save_cache.empty()) static_cast<void>(OutputFile(arguments.save_cache));  // can it be written?
    const Generation result = generate(context, model, cache, std::span(tokens).subspan(held), options);
    if (!arguments.save_cache.empty()) {
        tokens.insert(tokens.end(), result.tokens.begin(), result.tokens.end());
        cache.save(arguments.save_cache, std::as_bytes(std::span(tokens)));
    }
    return result;
}

double rate(std::int64_t tokens, double seconds) { return seconds > 0.0 ? static_cast<double>(tokens) / seconds : 0.0; }

}  // namespace

int run_generate(const GenerateArguments& arguments) {
    const Interrupt interrupt;  // before the context starts threads
    const std::string prompt = arguments.prompt_file.empty() ? arguments.prompt : read_prompt(arguments.prompt_file);
    ModelOptions model_options;
    if (!arguments.weights.empty()) model_options.weights = parse_weight_type("--weights", arguments.weights);
    ContextOptions context_options = context_options_of(arguments.isa);
    context_options.threads = arguments.threads;
    const KvTypes types = parse_kv_pair("--kv", arguments.kv);
    check_ring("--window", "--sink-tokens", arguments.window, arguments.sink_tokens);
    static_cast<void>(Sampler(arguments.sampling));  // refused before a model is loaded
    Context context(context_options);
    const Model model = load_model(context, arguments.model, model_options);

    GenerateOptions options;
    options.kv = types;
    options.window = arguments.window;
    options.sink_tokens = arguments.sink_tokens;
    options.f16_sinks = arguments.f16_sinks;
    options.max_tokens = arguments.max_tokens;
    options.sampling = arguments.sampling;
    options.ignore_eos = arguments.ignore_eos;
    options.stop = arguments.stop;
    options.stop_token = interrupt.token();
    if (!arguments.json) {
        options.on_text = [](std::string_view piece) {
            // a reader that is gone ends the text; main() says so
            return std::fwrite(piece.data(), 1, piece.size(), stdout) == piece.size() && std::fflush(stdout) == 0;
        };
    }
    if (isatty(STDERR_FILENO) == 1) {
        options.on_prefill = [](std::int64_t tokens, std::int64_t all) {
            if (all <= 512) return;  // done at once
            fmt::print(stderr, "\r\x1b[K");
            if (tokens < all) fmt::print(stderr, "{} of {} tokens of the prompt", tokens, all);
        };
    }
    const Generation result = arguments.save_cache.empty() && arguments.load_cache.empty()
                                  ? generate(context, model, prompt, options)
                                  : generate_with_files(context, model, prompt, options, arguments);

    const double prefill = rate(result.prefill_tokens, result.prefill_seconds);
    const double decode = rate(result.decode_steps, result.decode_seconds);
    if (arguments.json) {
        nlohmann::ordered_json json;
        json["prompt_tokens"] = result.prompt_tokens;
        json["tokens"] = result.tokens;
        json["text"] = result.text;
        json["stopped_by"] = to_string(result.reason);
        json["prefill_tokens_per_s"] = prefill;
        json["decode_tokens_per_s"] = decode;
        json["kv_bytes"] = result.kv_bytes;
        json["isa"] = to_string(context.isa());
        fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    } else {
        fmt::print("\n");
        std::fflush(stdout);  // the text is a result, the figures are about it
        fmt::print(stderr,
                   "[{} tokens after {}, stopped by {}; prefill {:.0f} tokens/s, decode {:.0f} tokens/s, cache {} "
                   "bytes, {}]\n",
                   result.tokens.size(), result.prompt_tokens.size(), to_string(result.reason), prefill, decode,
                   result.kv_bytes, to_string(context.isa()));
    }
    return done;
}

}  // namespace headlong::tools
