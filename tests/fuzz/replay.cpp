// Runs a fuzzer over files, and over mutations of them that a seed decides: what libFuzzer does, without its feedback,
// with any compiler and on any processor.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/fuzzer.hpp"

namespace headlong::fuzz {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;

constexpr const char* kUsage =
    "Usage: headlong_fuzz NAME PATH... [--mutations N] [--seed S] [--dictionary FILE] [--keep FILE]\n"
    "\n"
    "Runs the fuzzer NAME over every file at the paths, in folders too, then over N mutations of them. The input that "
    "is\n"
    "running is in the file of --keep: after a crash that is the one.\n"
    "\n"
    "Fuzzers:";

struct Fuzzer {
    std::string_view name;
    void (*run)(Input input);
};
constexpr Fuzzer kFuzzers[] = {
#define HEADLONG_FUZZER(name) {#name, name},
#include "fuzzers.inc"
#undef HEADLONG_FUZZER
};

[[noreturn]] void bad_call(const std::string& what) {
    std::fprintf(stderr, "headlong_fuzz: %s\n\n%s", what.c_str(), kUsage);
    for (const Fuzzer& fuzzer : kFuzzers) std::fprintf(stderr, " %s", std::string(fuzzer.name).c_str());
    std::fputc('\n', stderr);
    std::exit(2);
}

Bytes read_file(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) bad_call(path.string() + " cannot be read");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const Input bytes = std::as_bytes(std::span(text));
    return {bytes.begin(), bytes.end()};
}

/// libFuzzer's dictionaries: a word a line, in quotes, maybe after a name and "="; \\, \" and \xHH.
std::vector<Bytes> read_dictionary(const std::string& path) {
    std::vector<Bytes> words;
    std::ifstream file(path);
    if (!file) bad_call(path + " cannot be read");
    for (std::string line; std::getline(file, line);) {
        const std::size_t first = line.find('"');
        const std::size_t last = line.rfind('"');
        if (line.starts_with('#') || first == last) continue;
        Bytes word;
        for (std::size_t i = first + 1; i < last; ++i) {
            unsigned value = static_cast<unsigned char>(line[i]);
            if (value == '\\') {
                ++i;
                value = static_cast<unsigned char>(line[i]);
                if (value == 'x') {
                    std::from_chars(line.data() + i + 1, line.data() + i + 3, value, 16);
                    i += 2;
                }
            }
            word.push_back(static_cast<std::byte>(value));
        }
        words.push_back(std::move(word));
    }
    return words;
}

/// Mutations as libFuzzer has them. The same on every machine: the standard's distributions are not.
class Mutator {
  public:
    Mutator(std::uint64_t seed, const std::vector<Bytes>& corpus, const std::vector<Bytes>& words)
        : random_(seed), corpus_(corpus), words_(words) {}

    Bytes mutation() {
        Bytes bytes = corpus_[below(corpus_.size())];
        for (std::size_t times = 1 + below(4); times > 0; --times) mutate(bytes);
        return bytes;
    }

  private:
    std::size_t below(std::size_t n) { return static_cast<std::size_t>(random_() % n); }
    std::ptrdiff_t place(std::size_t n) { return static_cast<std::ptrdiff_t>(below(n)); }

    void mutate(Bytes& bytes) {
        static constexpr std::uint64_t kNumbers[] = {0,
                                                     1,
                                                     127,
                                                     128,
                                                     255,
                                                     256,
                                                     4096,
                                                     65535,
                                                     0x7FFFFFFF,
                                                     0x80000000,
                                                     0xFFFFFFFF,
                                                     std::uint64_t{1} << 32U,
                                                     std::uint64_t{1} << 62U,
                                                     ~std::uint64_t{0} >> 1U,
                                                     ~std::uint64_t{0}};
        if (bytes.empty()) bytes.push_back(std::byte{0});
        const std::ptrdiff_t at = place(bytes.size());
        const auto rest = static_cast<std::size_t>(std::ssize(bytes) - at);
        switch (below(8)) {
            case 0:
                bytes[static_cast<std::size_t>(at)] ^= std::byte{1} << below(8);
                break;
            case 1:
                bytes[static_cast<std::size_t>(at)] = static_cast<std::byte>(below(256));
                break;
            case 2:
                bytes.erase(
                    bytes.begin() + at,
                    bytes.begin() + at + static_cast<std::ptrdiff_t>(1 + below(std::min<std::size_t>(rest, 32))));
                break;
            case 3:
                bytes.insert(bytes.begin() + at, 1 + below(8), static_cast<std::byte>(below(256)));
                break;
            case 4: {  // a number of 1 to 8 bytes
                const std::uint64_t number = kNumbers[below(std::size(kNumbers))];
                std::memcpy(bytes.data() + at, &number, std::min<std::size_t>(rest, std::size_t{1} << below(4)));
                break;
            }
            case 5: {  // a part of another file
                const Bytes& other = corpus_[below(corpus_.size())];
                if (other.empty()) break;
                const std::ptrdiff_t from = place(other.size());
                const auto size = 1 + below(std::min<std::size_t>(other.size() - static_cast<std::size_t>(from), 256));
                bytes.insert(bytes.begin() + at, other.begin() + from,
                             other.begin() + from + static_cast<std::ptrdiff_t>(size));
                break;
            }
            case 6: {  // a part of itself, again
                const Bytes part(
                    bytes.begin() + at,
                    bytes.begin() + at + static_cast<std::ptrdiff_t>(1 + below(std::min<std::size_t>(rest, 64))));
                const std::ptrdiff_t to = place(bytes.size());
                bytes.insert(bytes.begin() + to, part.begin(), part.end());
                break;
            }
            default: {
                if (words_.empty()) {
                    bytes.resize(static_cast<std::size_t>(at));
                    break;
                }
                const Bytes& word = words_[below(words_.size())];
                bytes.insert(bytes.begin() + at, word.begin(), word.end());
                break;
            }
        }
    }

    std::mt19937_64 random_;
    const std::vector<Bytes>& corpus_;
    const std::vector<Bytes>& words_;
};

struct Call {
    const Fuzzer* fuzzer = nullptr;
    std::vector<fs::path> files;
    std::uint64_t mutations = 0;
    std::uint64_t seed = 1;
    std::vector<Bytes> words;
    std::string keep;
};

Call parse(const std::vector<std::string>& arguments) {
    Call call;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const std::string& argument = arguments[i];
        if (argument.starts_with("--")) {
            if (++i == arguments.size()) bad_call(argument + " needs a value");
            const std::string& value = arguments[i];
            if (argument == "--mutations" || argument == "--seed") {
                std::uint64_t& number = argument == "--seed" ? call.seed : call.mutations;
                const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
                if (error != std::errc{} || end != value.data() + value.size()) bad_call(argument + " is " + value);
            } else if (argument == "--dictionary") {
                call.words = read_dictionary(value);
            } else if (argument == "--keep") {
                call.keep = value;
            } else {
                bad_call("there is no " + argument);
            }
        } else if (call.fuzzer == nullptr) {
            const auto* found = std::ranges::find(kFuzzers, argument, &Fuzzer::name);
            if (found == std::end(kFuzzers)) bad_call("there is no fuzzer " + argument);
            call.fuzzer = found;
        } else if (fs::is_directory(argument)) {
            for (const auto& entry : fs::recursive_directory_iterator(argument)) {
                if (entry.is_regular_file()) call.files.push_back(entry.path());
            }
        } else {
            call.files.emplace_back(argument);
        }
    }
    if (call.fuzzer == nullptr) bad_call("the name of a fuzzer is missing");
    if (call.files.empty()) bad_call("there are no files");
    std::ranges::sort(call.files);
    return call;
}

int run(const Call& call) {
    std::vector<Bytes> corpus;
    for (const fs::path& file : call.files) corpus.push_back(read_file(file));
    const auto run_one = [&](const Bytes& bytes) {
        if (!call.keep.empty()) {
            std::ofstream file(call.keep, std::ios::binary | std::ios::trunc);
            file.write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
        }
        // exactly as long as it is, so that a sanitizer sees reads past its end
        const Bytes input(bytes.begin(), bytes.end());
        call.fuzzer->run(input);
    };
    for (const Bytes& bytes : corpus) run_one(bytes);
    Mutator mutator(call.seed, corpus, call.words);
    for (std::uint64_t i = 0; i < call.mutations; ++i) run_one(mutator.mutation());
    if (!call.keep.empty()) fs::remove(call.keep);
    std::printf("%s: %zu files and %llu mutations of them, seed %llu\n", std::string(call.fuzzer->name).c_str(),
                corpus.size(), static_cast<unsigned long long>(call.mutations),
                static_cast<unsigned long long>(call.seed));
    return 0;
}

}  // namespace
}  // namespace headlong::fuzz

int main(int count, char** arguments) {
    return headlong::fuzz::run(headlong::fuzz::parse({arguments + 1, arguments + count}));
}
