#include "tools/bench/bench_options.hpp"

#include <memory>

#include "tools/bench/bench_command.hpp"

namespace headlong::tools {
namespace {

constexpr const char* kFooter = R"(LENGTHS, DEPTHS and THREADS are lists: 512,2048 or 512-8192*2 or 1-4+1.
A row runs until its median is steady (6 turns, 10 runs, 95 % confidence within +-2 %), or, after 6 turns, 6 s of runs
have passed.
gflops and gbps are of the median; of_limit is the time that this machine's multiply-adds and memory allow, measured
between the runs, over the time it took. bench/README.md says what each field is.

Examples:
  headlong bench attention --heads 32 --kv-heads 8 --head-dim 128 -p 512,2048 -d 4096,32768 -t 1,2
  headlong bench attention --preset Qwen3-8B -d 1024-65536*4 -o json --out base.json --plot decode.svg
  headlong bench attention --preset Qwen3-8B -d 1024-65536*4 --compare base.json --fail-below 0.95
  headlong bench attention --preset Qwen3-8B -p 2048 -d 32768 --kv f32,f16,int8,f16:int4
  headlong bench linear --shape 1x4096x14336,512x4096x4096
  headlong bench model models/llama -p 512 -d 1,4096

Exit codes: 0 done, 1 a check or comparison failed, 2 a bad call or input, or nothing to compare with.)";

constexpr const char* kKv = "Types of the cache, or keys:values: f32, f16, bf16, int8, int4";

void add_common(CLI::App& command, BenchArguments& arguments, bool checks) {
    command.add_option("-t,--threads", arguments.threads, "Threads; as many as this process may use if not given")
        ->type_name("THREADS");
    command.add_option("--isa", arguments.isa, "Exactly this instruction set, or all; the best one if not given")
        ->type_name("NAME|all");
    command.add_option("-r,--repetitions", arguments.repetitions, "Exactly so many runs of each row")
        ->type_name("REPS");
    if (checks) {
        command.add_flag("--check", arguments.check, "Compare sampled rows of each output with the reference");
    }
    command.add_option("-o,--output", arguments.format, "md, csv, json or jsonl")
        ->type_name("FORMAT")
        ->capture_default_str();
    command.add_option("--out", arguments.out, "Write to a file instead of stdout")->type_name("F");
    command.add_option("--compare", arguments.compare, "Compare with an earlier -o json: base / new of the medians")
        ->type_name("BASE.json");
    command
        .add_option("--fail-below", arguments.fail_below,
                    "With --compare: exit 1 if a row's ratio is below, of medians and of minima")
        ->type_name("X");
    command.add_option("--plot", arguments.plot, "Draw throughput over depth (needs gnuplot)")
        ->type_name("F.svg|F.png");
    command.footer(kFooter);
}

}  // namespace

void add_bench(CLI::App& app, std::function<int()>& chosen) {
    CLI::App* const bench = app.add_subcommand("bench", "Measure against this machine's limits");
    bench->require_subcommand(1);
    bench->footer(kFooter);

    // what is typed lives as long as `chosen`
    const auto attention = std::make_shared<BenchAttentionArguments>();
    CLI::App* const a = bench->add_subcommand("attention", "Prefill, decode at depth, chunks, batches");
    CLI::Option* const config =
        a->add_option("--config", attention->config, "Shape of a Hugging Face config.json")->type_name("F");
    a->add_option("--preset", attention->preset, "Shape of a published model, such as Qwen3-8B")
        ->type_name("NAME")
        ->excludes(config);
    a->add_option("--heads", attention->heads, "Query heads (32)")->type_name("N");
    a->add_option("--kv-heads", attention->kv_heads, "Key-value heads (8; as --heads if that is given)")
        ->type_name("N");
    a->add_option("--head-dim", attention->head_dim, "Elements of a head (128)")->type_name("N");
    a->add_option("-p,--prefill", attention->prefill, "Prompts of these lengths (512,2048 without -p and -d)")
        ->type_name("LENGTHS");
    a->add_option("-d,--depth", attention->depths, "One query over caches of so many keys (4096,32768)")
        ->type_name("DEPTHS");
    a->add_option("-q,--queries", attention->queries, "With -d or --lens: a chunk of so many queries")->type_name("N");
    a->add_option("-b,--batch", attention->batch, "Sequences")->type_name("N");
    a->add_option("--lens", attention->lens, "Sequences of these lengths: a prefill, and a decode step")
        ->type_name("L1,L2,..");
    a->add_flag("--no-causal", attention->no_causal, "Every query sees every key");
    a->add_option("--window", attention->window,
                  "A query sees its own position and N - 1 before it (a mask: caches hold all)")
        ->type_name("N");
    a->add_option("--sink-tokens", attention->sink_tokens,
                  "With --window: caches are rings of N tokens, of which the first so many stay")
        ->type_name("N")
        ->needs("--window");
    a->add_option("--kv", attention->kv, kKv)->type_name("TYPES")->capture_default_str();
    a->add_option("--layers", attention->layers, "Caches to cycle through; 0 = twice the last-level cache")
        ->type_name("N");
    add_common(*a, attention->common, true);
    a->callback([attention, &chosen] { chosen = [attention] { return run_bench_attention(*attention); }; });

    const auto linear = std::make_shared<BenchLinearArguments>();
    CLI::App* const l = bench->add_subcommand("linear", "Linear layers");
    l->add_option("--shape", linear->shapes, "Rows x inputs x outputs")->type_name("MxKxN,..")->capture_default_str();
    l->add_option("--weights", linear->weights, "Types of the weights")->type_name("TYPES")->capture_default_str();
    l->add_option("--layers", linear->layers, "Layers to cycle through; 0 = twice the last-level cache")
        ->type_name("N");
    add_common(*l, linear->common, true);
    l->callback([linear, &chosen] { chosen = [linear] { return run_bench_linear(*linear); }; });

    const auto model = std::make_shared<BenchModelArguments>();
    CLI::App* const m = bench->add_subcommand("model", "A model's prompts and decode steps");
    m->add_option("model", model->model, "A model folder; the embedded model if not given")->type_name("MODEL_DIR");
    m->add_option("-p,--prefill", model->prefill, "Prompts of these lengths (512 without -p and -d)")
        ->type_name("LENGTHS");
    m->add_option("-d,--depth", model->depths, "A decode step that sees so many tokens, its own among them (512)")
        ->type_name("DEPTHS");
    m->add_option("-n,--steps", model->steps, "Decode steps of one repetition, the first one at the depth (1)")
        ->type_name("N");
    m->add_option("--kv", model->kv, kKv)->type_name("TYPES")->capture_default_str();
    m->add_option("--weights", model->weights, "Types of the weights; as the file stores them if not given")
        ->type_name("TYPES");
    add_common(*m, model->common, false);
    m->callback([model, &chosen] { chosen = [model] { return run_bench_model(*model); }; });
}

}  // namespace headlong::tools
