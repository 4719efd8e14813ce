// A dialogue that streams: each line of stdin is continued, and the cache keeps all that was said, so that a turn costs
// what is new in it. (The model that comes with Headlong writes on in the manner of Jane Austen; it does not answer.)
//
//     c++ -std=c++20 chat.cpp -o chat -lheadlong      (or: ... $(pkg-config --cflags --libs headlong))
//     ./chat MODEL_FOLDER [TOKENS_PER_ANSWER]
#include <headlong/headlong.hpp>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace {

int chat(const std::string& folder, std::int64_t tokens_per_answer) {
    headlong::Context context;
    const headlong::Model model(context, folder);
    // A ring: the first tokens and the last ones stay, and the dialogue never has to end.
    headlong::KvCache cache(model.ring_options(model.info().max_positions, 4));

    headlong::GenerateOptions options;
    options.max_tokens = tokens_per_answer;
    options.on_text = [](std::string_view piece) {
        std::cout << piece << std::flush;
        return true;  // false would end the answer
    };
    bool first = true;
    for (std::string line; std::getline(std::cin, line);) {
        std::vector<std::int32_t> prompt = model.tokenizer().encode(first ? line : "\n" + line, first);
        if (prompt.empty()) continue;
        const headlong::Generation answer = headlong::generate(context, model, cache, prompt, options);
        first = false;
        // The last token was drawn but not computed: the next turn would not see it.
        if (!answer.tokens.empty() && answer.reason == headlong::StopReason::max_tokens) {
            model.forward(context, std::span(answer.tokens).last(1), cache, {});
        }
        std::cout << "\n[" << answer.prefill_tokens << " tokens read, " << answer.tokens.size() << " written, "
                  << cache.length() << " so far, " << cache.used_bytes() / 1024 << " KiB]" << std::endl;
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return chat(argc > 1 ? argv[1] : "tools/models/austen", argc > 2 ? std::atoll(argv[2]) : 64);
    } catch (const std::exception& error) {
        std::cerr << "chat: " << error.what() << '\n';
        return 1;
    }
}
