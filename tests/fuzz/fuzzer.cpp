#include "tests/fuzz/fuzzer.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace headlong::fuzz {

void fail(std::string_view what) {
    std::fprintf(stderr, "fuzzer: this does not hold: %.*s\n", static_cast<int>(what.size()), what.data());
    std::abort();
}

bool done(const std::function<void()>& operation) {
    try {
        operation();
        return true;
    } catch (const Error& error) {
        const std::string_view message = error.what();
        require(!message.empty(), "a refusal says why");
        require(message.find('\n') == std::string_view::npos, "a refusal's message is one line");
        return false;
    }
}

}  // namespace headlong::fuzz
