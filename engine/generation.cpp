// From a prompt to text: prefill in chunks, one token at a time, text as soon as it is certain.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include <headlong/error.hpp>
#include <headlong/model.hpp>

#include "engine/context_impl.hpp"
#include "engine/model_impl.hpp"
#include "engine/utf8.hpp"

namespace headlong {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void check(const GenerateOptions& options) {
    if (options.max_tokens < 0) {
        throw InvalidArgument(fmt::format("max_tokens is {}; it must be 0 or more", options.max_tokens));
    }
    if (options.prefill_chunk < 1) {
        throw InvalidArgument(fmt::format("prefill_chunk is {}; it must be at least 1", options.prefill_chunk));
    }
    if (options.window < 0) throw InvalidArgument(fmt::format("window is {}; it must be 0 or more", options.window));
    if (options.sink_tokens < 0 || options.sink_tokens > std::max<std::int64_t>(options.window - 1, 0)) {
        throw InvalidArgument(fmt::format("sink_tokens is {}; allowed: 0 to {}, less than window", options.sink_tokens,
                                          std::max<std::int64_t>(options.window - 1, 0)));
    }
    for (const std::string& stop : options.stop) {
        constexpr std::size_t kLongest = 4096;  // its beginnings are looked for after every token
        if (stop.empty() || stop.size() > kLongest) {
            throw InvalidArgument(fmt::format("stop: a text has {} bytes; allowed: 1 to {}", stop.size(), kLongest));
        }
        if (const auto offset = find_invalid_utf8(stop)) {
            throw InvalidArgument(fmt::format("stop: a text is not valid UTF-8 at its byte {}", *offset));
        }
    }
}

/// Holds back text that may be the beginning of a stop text, and finds stop texts.
class StopTexts {
  public:
    explicit StopTexts(const std::vector<std::string>& texts) : texts_(texts) {}

    /// Takes new text; returns what is certain not to belong to a stop text. After a stop text was found, it and all
    /// that follows are dropped.
    std::string push(std::string_view piece) {
        if (found_) return {};
        pending_ += piece;
        std::size_t first = std::string::npos;
        for (const std::string& text : texts_) first = std::min(first, pending_.find(text));
        if (first != std::string::npos) {
            found_ = true;
            return pending_.substr(0, first);
        }
        std::size_t held = 0;  // the longest end of `pending_` that begins a stop text
        for (const std::string& text : texts_) {
            for (std::size_t n = std::min(text.size() - 1, pending_.size()); n > held; --n) {
                if (std::string_view(pending_).ends_with(std::string_view(text).substr(0, n))) held = n;
            }
        }
        const std::size_t certain = pending_.size() - held;
        std::string text = pending_.substr(0, certain);
        pending_.erase(0, certain);
        return text;
    }
    std::string finish() { return found_ ? std::string() : std::exchange(pending_, {}); }
    bool found() const noexcept { return found_; }

  private:
    const std::vector<std::string>& texts_;
    std::string pending_;
    bool found_ = false;
};

}  // namespace

const char* to_string(StopReason reason) noexcept {
    switch (reason) {
        case StopReason::max_tokens:
            return "max_tokens";
        case StopReason::end_of_text:
            return "end_of_text";
        case StopReason::stop_text:
            return "stop_text";
        case StopReason::context_full:
            return "context_full";
        case StopReason::cancelled:
            return "cancelled";
    }
    return "unknown";
}

namespace {

Generation run(Context& context, const Model& model, KvCache& cache, std::vector<std::int32_t> prompt,
               const GenerateOptions& options) {
    Sampler sampler(options.sampling);
    const ModelInfo& info = model.info();
    Generation result;
    result.prompt_tokens = std::move(prompt);
    const auto prompt_length = static_cast<std::int64_t>(result.prompt_tokens.size());
    const bool bounded = !cache.ring() || model.impl().decoder.config().learned_positions;
    if (bounded && prompt_length > info.max_positions - cache.length()) {
        throw InvalidArgument(fmt::format("prompt: has {} tokens after {}; the model's max_position_embeddings is {}",
                                          prompt_length, cache.length(), info.max_positions));
    }
    if (!cache.ring() && prompt_length > cache.capacity() - cache.length()) {
        throw OutOfMemory(fmt::format("prompt: {} tokens after {} exceed the cache's capacity of {}", prompt_length,
                                      cache.length(), cache.capacity()));
    }
    TokenStream stream(model.tokenizer());
    stream.prime(result.prompt_tokens);
    std::vector<float> logits(static_cast<std::size_t>(info.vocab_size));
    const auto one_row = OutputTensor<2>::dense(logits.data(), {1, info.vocab_size});
    const Interrupt interrupt{options.stop_token, options.deadline};
    // Returns whether it came to its end.
    const auto forward = [&](std::span<const std::int32_t> tokens, const OutputTensor<2>& into) {
        try {
            model.forward(context, tokens, cache, into, {options.stop_token, options.deadline});
        } catch (const Cancelled&) {
            return false;
        }
        return true;
    };

    const auto prefill_start = Clock::now();
    while (result.prefill_tokens < prompt_length && !interrupt.requested()) {
        const std::int64_t most =
            cache.forgets() ? std::min(options.prefill_chunk, cache.max_chunk()) : options.prefill_chunk;
        const std::int64_t count = std::min(most, prompt_length - result.prefill_tokens);
        const bool last = result.prefill_tokens + count == prompt_length;
        const auto chunk =
            std::span(result.prompt_tokens)
                .subspan(static_cast<std::size_t>(result.prefill_tokens), static_cast<std::size_t>(count));
        if (!forward(chunk, last ? one_row : OutputTensor<2>{})) break;
        result.prefill_tokens += count;
        if (options.on_prefill) options.on_prefill(result.prefill_tokens, prompt_length);
    }
    result.prefill_seconds = seconds_since(prefill_start);

    StopTexts stop_texts(options.stop);
    bool wanted = true;  // by the callback
    const auto emit = [&](const std::string& text) {
        result.text += text;
        if (wanted && !text.empty() && options.on_text) wanted = options.on_text(text);
    };
    const std::int64_t length_before = cache.length();  // positions of the tokens to come
    const auto generated = [&] { return static_cast<std::int64_t>(result.tokens.size()); };
    const auto decode_start = Clock::now();
    for (;;) {
        result.reason = StopReason::cancelled;
        if (interrupt.requested() || !wanted) break;
        result.reason = StopReason::max_tokens;
        if (generated() >= options.max_tokens) break;
        result.reason = StopReason::context_full;
        if (bounded && length_before + generated() >= info.max_positions) break;
        if (generated() > 0) {  // the logits of the last token are needed only now
            result.reason = StopReason::cancelled;
            if (!forward(std::span(result.tokens).last(1), one_row)) break;
            ++result.decode_steps;
        }
        if (!std::ranges::all_of(logits, [](float x) { return x < std::numeric_limits<float>::infinity(); })) {
            throw BadFile("model: its logits are not all numbers; the weights hold NaN or infinities, or lead to them");
        }
        const std::int32_t token = sampler.pick(logits);
        result.reason = StopReason::end_of_text;
        if (!options.ignore_eos && std::ranges::find(info.eos_ids, token) != info.eos_ids.end()) break;
        result.tokens.push_back(token);
        // a vocabulary may be padded with ids that are no tokens and have no text
        if (model.tokenizer().id_to_token(token)) emit(stop_texts.push(stream.push(token)));
        result.reason = StopReason::stop_text;
        if (stop_texts.found()) break;
    }
    result.decode_seconds = seconds_since(decode_start);
    emit(stop_texts.push(stream.finish()));
    if (stop_texts.found()) result.reason = StopReason::stop_text;
    emit(stop_texts.finish());
    result.kv_bytes = cache.used_bytes();
    return result;
}

}  // namespace

Generation generate(Context& context, const Model& model, std::string_view prompt, const GenerateOptions& options) {
    check(options);
    return with_memory_errors("generate", [&] {
        const ModelInfo& info = model.info();
        std::vector<std::int32_t> tokens = model.tokenizer().encode(prompt);
        if (tokens.empty() && info.bos_id) tokens.push_back(*info.bos_id);
        if (tokens.empty() && !info.eos_ids.empty()) tokens.push_back(info.eos_ids.front());
        if (tokens.empty()) throw InvalidArgument("prompt: is empty, and the model has no token to start from");
        const auto length = static_cast<std::int64_t>(tokens.size());
        const std::int64_t capacity =  // no more than there is to say: it may be that of a short text
            options.max_tokens < info.max_positions - length ? length + options.max_tokens : info.max_positions;
        KvCacheOptions cache_options = options.window > 0
                                           ? model.ring_options(options.window, options.sink_tokens, options.kv)
                                           : model.cache_options(options.kv, capacity);
        cache_options.f16_sinks = options.f16_sinks;
        KvCache cache(cache_options);
        return run(context, model, cache, std::move(tokens), options);
    });
}

Generation generate(Context& context, const Model& model, KvCache& cache, std::span<const std::int32_t> prompt,
                    const GenerateOptions& options) {
    check(options);
    if (prompt.empty()) throw InvalidArgument("prompt: has no tokens; at least one is needed");
    const std::int64_t held = cache.length();
    return with_memory_errors("generate", [&] {
        try {
            return run(context, model, cache, {prompt.begin(), prompt.end()}, options);
        } catch (...) {
            if (!cache.forgets()) cache.truncate(held);
            throw;
        }
    });
}

}  // namespace headlong
