// The commands of bin/headlong. Results go to stdout; errors are thrown, and main() words them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <headlong/model.hpp>

namespace headlong::tools {

/// What the process returns.
enum ExitCode : int {
    done = 0,
    check_failed = 1,
    bad_call = 2,  ///< a wrong call or input
};

/// One line on stderr that begins with the program's name, whatever the text holds. Returns bad_call.
int complain(const std::string& text);

struct InfoArguments {
    bool measure = false;  ///< the machine's limits too, which takes a second or two
    bool json = false;
};

/// Prints what this build and this machine can do.
int run_info(const InfoArguments& arguments);

struct VerifyArguments {
    std::vector<std::string> paths;  ///< files and folders; none = the self-test
    std::string isa;                 ///< a name, "all", or empty for the context's choice
    std::string kv = "f32";          ///< types of the caches
    std::size_t threads = 0;         ///< 0 = as many as this process may use
    bool json = false;
};

/// Computes cases and compares them with what they expect.
int run_verify(const VerifyArguments& arguments);

struct GenerateArguments {
    std::string model;        ///< a folder; empty = the embedded model
    std::string prompt;       ///< the text, unless prompt_file is given
    std::string prompt_file;  ///< a file that holds it
    std::int64_t max_tokens = 256;
    SamplingOptions sampling;
    bool ignore_eos = false;
    std::vector<std::string> stop;
    std::string kv = "f32";   ///< types of the cache
    std::string weights;      ///< a type; empty = as the file stores them
    std::string isa;          ///< a name; empty = the context's choice
    std::size_t threads = 0;  ///< 0 = as many as this process may use
    std::int64_t window = 0;  ///< of a ring cache; 0 = none
    std::int64_t sink_tokens = 0;
    bool f16_sinks = false;  ///< they are stored in f16
    std::string save_cache;  ///< a file to write at the end; empty = none
    std::string load_cache;  ///< a file to go on from; empty = none
    bool json = false;
};

/// Continues a prompt with a model, token by token.
int run_generate(const GenerateArguments& arguments);

struct PerplexityArguments {
    std::vector<std::string> paths;  ///< the text, or a model's folder and the text
    std::string kv = "f32";          ///< types of caches; f32 is always computed, to compare with
    std::int64_t window = 0;         ///< of a ring cache; 0 = windows of 512 tokens, each on its own
    std::int64_t sink_tokens = 0;
    bool f16_sinks = false;   ///< they are stored in f16
    std::string isa;          ///< a name; empty = the context's choice
    std::size_t threads = 0;  ///< 0 = as many as this process may use
    bool json = false;
};

/// How well a model foretells a text, by type of cache.
int run_perplexity(const PerplexityArguments& arguments);

struct ProfileArguments {
    std::string model;                          ///< a folder; empty = the embedded model
    std::optional<std::int64_t> prompt_tokens;  ///< none = 512, or as many as the model allows
    std::optional<std::int64_t> decode_steps;   ///< none = 64, or as many as the model allows
    bool layers = false;                        ///< each layer on its own, too
    std::string kv = "f32";                     ///< types of the cache
    std::string isa;                            ///< a name; empty = the context's choice
    std::size_t threads = 0;                    ///< 0 = as many as this process may use
    std::string trace;                          ///< a file to write; empty = none
    std::int64_t window = 0;                    ///< of a ring cache; 0 = none
    std::int64_t sink_tokens = 0;
    bool json = false;
};

/// Shows where the time of a prefill and of decode steps goes.
int run_profile(const ProfileArguments& arguments);

struct MakeModelArguments {
    std::string folder;                 ///< to write; made if it is not there
    std::string config;                 ///< a config.json, its folder, or the name of a preset
    std::vector<std::string> settings;  ///< KEY=VALUE, over what the config says
    std::string weights = "bf16";
    std::uint64_t seed = 0;
};

/// Writes a model of random weights.
int run_make_model(const MakeModelArguments& arguments);

struct MemoryArguments {
    std::string config;  ///< a config.json, its folder, or the name of a preset
    std::string depths;  ///< as parse_list() reads them
    std::string kv = "f32";
    std::optional<std::string> ram;  ///< the memory to plan for; nothing = this machine's
    bool json = false;
};

/// Prints what a model and its cache need at each depth.
int run_memory(const MemoryArguments& arguments);

}  // namespace headlong::tools
