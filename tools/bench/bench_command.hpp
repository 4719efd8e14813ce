// headlong bench: attention, linear layers and models against the machine's limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace headlong::tools {

/// What all benchmarks are asked; empty texts and absent values were not given.
struct BenchArguments {
    std::string threads;  ///< list
    std::string isa;      ///< name, "all", or empty for the best
    std::optional<std::int64_t> repetitions;
    std::string format = "md";
    std::string out;  ///< file, instead of stdout
    std::string compare;
    std::optional<double> fail_below;
    std::string plot;
    bool check = false;
};

struct BenchAttentionArguments {
    BenchArguments common;
    std::string config;
    std::string preset;
    std::optional<std::int64_t> heads;
    std::optional<std::int64_t> kv_heads;
    std::optional<std::int64_t> head_dim;
    std::string prefill;  ///< list of lengths
    std::string depths;   ///< list
    std::optional<std::int64_t> queries;
    std::optional<std::int64_t> batch;
    std::string lens;  ///< list
    bool no_causal = false;
    std::optional<std::int64_t> window;
    std::optional<std::int64_t> sink_tokens;
    std::string kv = "f32";  ///< list of types
    std::int64_t layers = 0;
};

struct BenchLinearArguments {
    BenchArguments common;
    std::string shapes = "1x4096x4096,512x4096x4096";
    std::string weights = "f32";
    std::int64_t layers = 0;
};

struct BenchModelArguments {
    BenchArguments common;
    std::string model;    ///< a folder; empty = the embedded model
    std::string prefill;  ///< list of lengths
    std::string depths;   ///< list
    std::optional<std::int64_t> steps;
    std::string kv = "f32";  ///< list of types
    std::string weights;     ///< list; empty = as the file stores them
};

int run_bench_attention(const BenchAttentionArguments& arguments);
int run_bench_linear(const BenchLinearArguments& arguments);
int run_bench_model(const BenchModelArguments& arguments);

}  // namespace headlong::tools
