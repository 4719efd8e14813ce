// What libFuzzer calls. Compiled once per fuzzer, with its name as HEADLONG_FUZZER_NAME.
#include <cstddef>
#include <cstdint>
#include <span>

#include "tests/fuzz/fuzzer.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
    headlong::fuzz::HEADLONG_FUZZER_NAME(std::as_bytes(std::span(bytes, size)));
    return 0;
}
