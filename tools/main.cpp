// The headlong command line: what may be typed, and how errors are told. The commands are in files of their own.
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <headlong/version.hpp>

#include "engine/mapped_file.hpp"
#include "tools/bench/bench_options.hpp"
#include "tools/commands.hpp"

namespace headlong::tools {

int complain(const std::string& text) {
    constexpr std::size_t kLongest = 2000;  // the names of all presets have room
    // not fmt::print, which throws where stderr cannot be written to
    std::fputs(fmt::format("headlong: {}\n", one_line(text, kLongest)).c_str(), stderr);
    return bad_call;
}

namespace {

constexpr const char* kExamples = R"(Examples:
  headlong info                       what this machine can do, and what will be used
  headlong verify                     a self-test against the double-precision reference
  headlong verify tests/cases/multi_head --isa all
                                      case files, on every instruction set of this machine
  headlong generate -p "It is a truth"
                                      continue a text with the embedded model
  headlong bench attention --preset Qwen3-8B
                                      how near attention comes to what this machine can do
  headlong perplexity text.txt --kv int8
                                      what a smaller cache costs of a model's quality
  headlong profile                    where the time of a model's layers goes
  headlong memory Llama-3.1-8B -d 8192
                                      what a cache of 8192 tokens needs

Exit codes: 0 done, 1 a check failed, 2 a bad call or input.)";

constexpr const char* kVerifyExamples =
    R"(A FILE is a case in a safetensors file. A FOLDER is its own *.safetensors; a folder
with config.json is one case: a model with golden.safetensors.

Examples:
  headlong verify
  headlong verify tests/cases/multi_head tests/cases/attention_edges --isa all
  headlong verify case.safetensors --isa generic --json
  headlong verify --kv int8           such caches against the reference on what they hold

Exit codes: 0 nothing failed, 1 a case failed, 2 a bad call or input.)";

constexpr const char* kGenerateExamples =
    R"(Greedy unless a temperature is given. MODEL_DIR is a Hugging Face folder (config.json, tokenizer.json,
model.safetensors or its shards); without it, the small model inside the program. Ctrl-C ends the text (exit
code 0). The text goes to stdout, the figures to stderr.

Examples:
  headlong generate -p "Mr. Bennet looked out of the window and" -n 96
  headlong generate models/llama -p "Once" --temperature 0.8 --top-p 0.9 --seed 7
  headlong generate --prompt-file letter.txt --stop "THE END" --json
  headlong generate -p "Once" -n 20000 --ignore-eos --kv int8 --window 4096 --sink-tokens 4
  headlong generate -p "Once" -n 50 --save-cache story.kv
  headlong generate --load-cache story.kv -n 50

Exit codes: 0 done, 2 a bad call or input.)";

constexpr const char* kPerplexityExamples =
    R"(Reads the text in windows of 512 tokens, each from an empty cache, or with --window all of it through one ring. f32 is
computed too, and the others are compared with it.

Examples:
  headlong perplexity text.txt --kv f16,int8,int4
  headlong perplexity models/llama text.txt --kv int8:f16
  headlong perplexity text.txt --window 256 --sink-tokens 4 --json

Exit codes: 0 done, 2 a bad call or input.)";

constexpr const char* kProfileExamples =
    R"(Computes a prompt of pseudo-random tokens and continues it greedily, once untimed and once timed, and shows what
each kind of operation took, beside the arithmetic and the memory bandwidth that the same threads reach at best.
MODEL_DIR is as for generate. "waiting" is the time of threads that a loop has no task for; beside each kind it is that
of the kind's own loops. Rates and "of limit" are over both, ms and waiting ms. "of limit" can exceed 100% where an
operation's weights stay in a nearer cache than the whole model does. A trace opens in ui.perfetto.dev, and replaces
FILE only when the run is over.

Examples:
  headlong profile
  headlong profile models/llama -p 2048 -n 128 --layers
  headlong profile --threads 1 --trace trace.json --json

Exit codes: 0 done, 2 a bad call or input.)";

constexpr const char* kMemoryExamples =
    R"(CONFIG is a Hugging Face config.json, a folder with one, or the name of a published model. DEPTHS are tokens in the
cache: 512,2048 or 512-8192*2 or 1-4+1. Nothing is allocated, and no weights need to be there.

cache    the blocks of all layers, as a cache of that type holds them
weights  as the engine holds them, in the type that config.json says, or that a published model has; the
         weight file is mapped beside them. "~" marks estimates: of dense
         decoders that are presets, or that this version does not run, from their shape and without biases
scratch  what generating after a prompt of that depth needs, with as many threads as this process may use
fits     the total is within the memory that is available now, or within --ram

Examples:
  headlong memory models/llama/config.json -d 512-8192*2
  headlong memory Qwen3-8B -d 32768 --kv f32,f16 --ram 64G --json

Exit codes: 0 done, 2 a bad call or input, or a cache that is larger than all memory.)";

constexpr const char* kMakeModelExamples =
    R"(Writes config.json, model.safetensors and a tokenizer.json of single bytes. CONFIG is a config.json of a family that
generate runs, a folder with one, or a published model's name: then a Llama of its sizes. Its text is noise; its speed is
that of a model of this shape.

Examples:
  headlong make-model /tmp/1b Llama-3.2-1B
  headlong make-model /tmp/two models/qwen3 --set num_hidden_layers=2 --weights f32 --seed 7
  headlong bench model /tmp/1b --weights bf16,int8,int4 -d 512 -p 512

Exit codes: 0 done, 2 a bad call or input.)";

/// The command that was typed, once the command line is parsed. What it refers to lives as long.
using Chosen = std::function<int()>;

template <class Arguments>
void choose(CLI::App* command, const std::shared_ptr<Arguments>& arguments, int (*run)(const Arguments&),
            Chosen& chosen) {
    command->callback([arguments, run, &chosen] { chosen = [arguments, run] { return run(*arguments); }; });
}

template <class Arguments>
void add_isa_and_threads(CLI::App* command, Arguments& arguments) {
    command->add_option("--isa", arguments.isa, "Exactly this instruction set; the best one if not given")
        ->type_name("NAME");
    command->add_option("--threads", arguments.threads, "Threads; as many as this process may use if not given")
        ->type_name("N")
        ->check(CLI::Range(1, 4096).description(""));
}

template <class Arguments>
void add_ring(CLI::App* command, Arguments& arguments) {
    CLI::Option* const window =
        command->add_option("--window", arguments.window, "A ring cache of so many tokens: a text of any length")
            ->type_name("N")
            ->check(CLI::PositiveNumber.description(""));
    command->add_option("--sink-tokens", arguments.sink_tokens, "First tokens of the text that stay in the ring")
        ->type_name("N")
        ->check(CLI::NonNegativeNumber.description(""))
        ->needs(window);
}

template <class Arguments>
void add_f16_sinks(CLI::App* command, Arguments& arguments) {
    command->add_flag("--f16-sinks", arguments.f16_sinks, "Sink tokens are stored in f16, in a cache of int8 or int4")
        ->needs("--sink-tokens");
}

void add_kv(CLI::App* command, std::string& types, const char* description) {
    command->add_option("--kv", types, description)->type_name("K[:V]")->capture_default_str();
}

void add_info(CLI::App& app, Chosen& chosen) {
    const auto info = std::make_shared<InfoArguments>();
    CLI::App* const command = app.add_subcommand("info", "Show what this build and this machine can do");
    command->add_flag("--measure", info->measure, "Measure what this machine can do at best");
    command->add_flag("--json", info->json, "Print JSON");
    choose(command, info, run_info, chosen);
}

void add_verify(CLI::App& app, Chosen& chosen) {
    const auto verify = std::make_shared<VerifyArguments>();
    CLI::App* const command =
        app.add_subcommand("verify", "Compute cases and compare them with what they expect; without any, a self-test");
    command->footer(kVerifyExamples);
    command->add_option("paths", verify->paths, "Case files, and folders of them")->type_name("FILE|FOLDER");
    add_isa_and_threads(command, *verify);
    command->get_option("--isa")
        ->description("Exactly this instruction set, or all; the best one if not given")
        ->type_name("NAME|all");
    add_kv(command, verify->kv,
           "Type of the caches, or keys:values; of other types than f32, what is expected is computed from what they "
           "hold");
    command->add_flag("--json", verify->json, "Print JSON");
    choose(command, verify, run_verify, chosen);
}

void add_generate(CLI::App& app, Chosen& chosen) {
    const auto generate = std::make_shared<GenerateArguments>();
    CLI::App* const command = app.add_subcommand("generate", "Continue a text with a model");
    command->footer(kGenerateExamples);
    command->add_option("model", generate->model, "A model folder; the embedded model if not given")
        ->type_name("MODEL_DIR");
    CLI::Option* const prompt =
        command->add_option("-p,--prompt", generate->prompt, "The text to continue")->type_name("TEXT");
    command->add_option("--prompt-file", generate->prompt_file, "A file that holds it")
        ->type_name("F")
        ->excludes(prompt);
    command->add_option("-n,--max-tokens", generate->max_tokens, "Tokens to generate at most")
        ->type_name("N")
        ->capture_default_str();
    command->add_option("--temperature", generate->sampling.temperature, "Draw at random, sharper below 1; 0 is greedy")
        ->type_name("X");
    command->add_option("--top-k", generate->sampling.top_k, "Draw from the K likeliest tokens; 0 = all")
        ->type_name("K");
    command->add_option("--top-p", generate->sampling.top_p, "Draw from the likeliest tokens that hold this share")
        ->type_name("P");
    command->add_option("--seed", generate->sampling.seed, "The same seed gives the same text")
        ->type_name("S")
        ->check(CLI::NonNegativeNumber.description(""));
    command->add_flag("--ignore-eos", generate->ignore_eos, "Go on after the end of the text");
    command->add_option("--stop", generate->stop, "End before this text; may be given several times")
        ->type_name("TEXT")
        ->allow_extra_args(false);
    add_kv(command, generate->kv, "Type of the cache, or keys:values: f32, f16, bf16, int8, int4");
    command
        ->add_option("--weights", generate->weights,
                     "How linear layers store their weights: f32, f16, bf16, int8, int4; as the file does if not given")
        ->type_name("TYPE");
    add_ring(command, *generate);
    add_f16_sinks(command, *generate);
    command->add_option("--load-cache", generate->load_cache, "Go on from where a saved cache ends")->type_name("F");
    command->add_option("--save-cache", generate->save_cache, "Save the cache to this file at the end")->type_name("F");
    add_isa_and_threads(command, *generate);
    command->add_flag("--json", generate->json, "Print JSON at the end instead of text");
    choose(command, generate, run_generate, chosen);
}

void add_perplexity(CLI::App& app, Chosen& chosen) {
    const auto perplexity = std::make_shared<PerplexityArguments>();
    CLI::App* const command =
        app.add_subcommand("perplexity", "Measure how well a model foretells a text, by type of cache");
    command->footer(kPerplexityExamples);
    command->add_option("paths", perplexity->paths, "A model folder (the embedded model if not given), and the text")
        ->type_name("[MODEL_DIR] FILE")
        ->required()
        ->expected(1, 2);
    command->add_option("--kv", perplexity->kv, "Types of caches, or keys:values: f32, f16, bf16, int8, int4")
        ->type_name("TYPES")
        ->capture_default_str();
    add_ring(command, *perplexity);
    add_f16_sinks(command, *perplexity);
    add_isa_and_threads(command, *perplexity);
    command->add_flag("--json", perplexity->json, "Print JSON");
    choose(command, perplexity, run_perplexity, chosen);
}

void add_profile(CLI::App& app, Chosen& chosen) {
    const auto profile = std::make_shared<ProfileArguments>();
    CLI::App* const command =
        app.add_subcommand("profile", "Show where the time of a model's prefill and decode steps goes");
    command->footer(kProfileExamples);
    command->add_option("model", profile->model, "A model folder; the embedded model if not given")
        ->type_name("MODEL_DIR");
    command
        ->add_option("-p,--prompt-tokens", profile->prompt_tokens,
                     "Tokens of the prompt; 512, or as many as the model allows, if not given")
        ->type_name("N");
    command
        ->add_option("-n,--decode-steps", profile->decode_steps,
                     "Tokens computed one by one; 64, or as many as the model allows, if not given")
        ->type_name("N");
    command->add_flag("--layers", profile->layers, "Show each layer, too");
    add_kv(command, profile->kv, "Type of the cache, or keys:values: f32, f16, bf16, int8, int4");
    add_ring(command, *profile);
    add_isa_and_threads(command, *profile);
    command->add_option("--trace", profile->trace, "Write a trace of every operation and task to this file")
        ->type_name("FILE");
    command->add_flag("--json", profile->json, "Print JSON");
    choose(command, profile, run_profile, chosen);
}

void add_memory(CLI::App& app, Chosen& chosen) {
    const auto memory = std::make_shared<MemoryArguments>();
    CLI::App* const command =
        app.add_subcommand("memory", "Plan: what a model and its cache need, before anything is allocated");
    command->footer(kMemoryExamples);
    command->add_option("config", memory->config, "The model: a file, a folder or a name")
        ->type_name("CONFIG")
        ->required();
    command->add_option("-d,--depth", memory->depths, "Tokens in the cache")->type_name("DEPTHS")->required();
    command->add_option("--kv", memory->kv, "Types of the cache, or keys:values: f32, f16, bf16, int8, int4")
        ->type_name("TYPES")
        ->capture_default_str();
    command->add_option("--ram", memory->ram, "Plan for a machine with this memory: 64G, 512M or bytes")
        ->type_name("SIZE");
    command->add_flag("--json", memory->json, "Print JSON");
    choose(command, memory, run_memory, chosen);
}

void add_make_model(CLI::App& app, Chosen& chosen) {
    const auto make = std::make_shared<MakeModelArguments>();
    CLI::App* const command =
        app.add_subcommand("make-model", "Write a model of random weights, for benchmarks without a download");
    command->footer(kMakeModelExamples);
    command->add_option("folder", make->folder, "The folder to write")->type_name("DIR")->required();
    command->add_option("config", make->config, "Its shape and family: a config.json, its folder, or a preset's name")
        ->type_name("CONFIG")
        ->required();
    command->add_option("--set", make->settings, "Another value for a key of config.json; may be given several times")
        ->type_name("KEY=VALUE")
        ->allow_extra_args(false);
    command->add_option("--weights", make->weights, "Type of the weights in the file: f32, f16, bf16")
        ->type_name("TYPE")
        ->capture_default_str();
    command->add_option("--seed", make->seed, "The same seed gives the same weights")->type_name("S");
    choose(command, make, run_make_model, chosen);
}

/// An empty value is most often a script's variable that is not set. Only texts to continue may be empty.
void refuse_empty_values(CLI::App& app) {
    const CLI::Validator not_empty(
        [](const std::string& value) { return value.empty() ? std::string("is empty") : std::string(); }, "");
    for (CLI::App* command : app.get_subcommands({})) {
        for (CLI::Option* option : command->get_options()) {
            if (option->get_items_expected_max() > 0 && !option->check_lname("prompt")) option->check(not_empty);
        }
        refuse_empty_values(*command);
    }
}

int run(int argc, char** argv) {
    CLI::App app("Headlong: exact attention on CPUs.", "headlong");
    app.footer(kExamples);
    app.set_version_flag("--version", std::string("headlong ") + version(), "Print the version and exit");
    app.set_help_flag("-h,--help", "Print this help and exit");
    app.require_subcommand(0, 1);  // at most one; that there is one is checked below, after what is not known
    Chosen chosen;
    add_info(app, chosen);
    add_verify(app, chosen);
    add_generate(app, chosen);
    add_perplexity(app, chosen);
    add_profile(app, chosen);
    add_memory(app, chosen);
    add_make_model(app, chosen);
    add_bench(app, chosen);
    refuse_empty_values(app);

    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& request) {  // --help and --version
        return app.exit(request);
    } catch (const CLI::ParseError& error) {
        std::string command;
        for (const CLI::App* typed = &app; !typed->get_subcommands().empty();) {
            typed = typed->get_subcommands().front();
            command += " " + typed->get_name();
        }
        return complain(fmt::format("{} (see headlong{} --help)", error.what(), command));
    }
    if (chosen) return chosen();
    std::vector<std::string> names;
    for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
    return complain(fmt::format("a command is needed: {} (see headlong --help)", fmt::join(names, ", ")));
}

}  // namespace
}  // namespace headlong::tools

int main(int argc, char** argv) {
    using headlong::tools::complain;
    // mimalloc as Debian builds it ends the process where operator new fails and there is no handler
    std::set_new_handler([] { throw std::bad_alloc(); });
    try {
        const int code = headlong::tools::run(argc, argv);
        // results that did not reach their reader are not done
        if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return complain("writing the results failed");
        return code;
    } catch (const std::bad_alloc&) {
        return complain("out of memory");
    } catch (const std::exception& error) {
        return complain(error.what());
    }
}
