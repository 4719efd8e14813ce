// What goes wrong outside: memory that is refused, calls that are ended, disks that are full, processes that are
// killed, files that shrink. The operation fails with its error, nothing leaks, and what there was is as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <memory_resource>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#endif

#include <headlong/headlong.h>
#include <headlong/headlong.hpp>

#include "tests/support/clock.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/operator_new.hpp"
#include "tests/support/random.hpp"
#include "tests/support/small_model.hpp"
#include "tests/support/token_rows.hpp"
#include "tests/support/wide_executor.hpp"
#include "tests/support/write_safetensors.hpp"

namespace headlong::test {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;

/// A resource of the caller's. It keeps no record, which would need memory itself: it counts.
class CallersMemory final : public std::pmr::memory_resource {
  public:
    std::size_t live() const noexcept { return live_; }

  private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        void* const memory = ::operator new (bytes, std::align_val_t{alignment});
        ++live_;
        return memory;
    }
    void do_deallocate(void* memory, std::size_t, std::size_t alignment) override {
        --live_;
        ::operator delete (memory, std::align_val_t{alignment});
    }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

    std::atomic<std::size_t> live_ = 0;
};

/// A folder that is removed at the end.
class Folder {
  public:
    Folder() : path_(fs::temp_directory_path() / ("headlong-faults-" + std::to_string(::getpid()))) {
        fs::remove_all(path_);
        fs::create_directories(path_);
    }
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    std::string at(const char* name) const { return (path_ / name).string(); }
    std::size_t files() const { return static_cast<std::size_t>(std::distance(fs::directory_iterator(path_), {})); }

  private:
    fs::path path_;
};

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

const std::vector<float>& numbers() {
    static const std::vector<float> all = [] {
        Random random(71);
        std::vector<float> x(200'000);
        for (float& value : x) value = random.normal_f32();
        return x;
    }();
    return all;
}

/// What operations are tried on.
struct World {
    World() {
        ContextOptions options;
        options.executor = std::make_shared<WideExecutor>(4);
        options.memory = &memory;
        context = std::make_unique<Context>(options);
    }
    CallersMemory memory;
    std::unique_ptr<Context> context;
    std::vector<KvCache> caches;
    std::optional<MultiHeadAttention> layer;
    std::optional<Model> model;
    std::vector<float> output = std::vector<float>(40'000);
    std::string text;
    Bytes file;

    /// All that an operation can change but must not if it fails.
    Bytes look() const {
        Bytes all;
        for (const KvCache& cache : caches) {
            for (std::size_t layer_index = 0; layer_index < cache.layers(); ++layer_index) {
                all.push_back(static_cast<std::byte>(cache.length(layer_index)));
            }
            Bytes saved(cache.saved_bytes());
            cache.save(saved);
            all.insert(all.end(), saved.begin(), saved.end());
        }
        return all;
    }
    /// What it makes, too.
    Bytes results() const {
        Bytes all = look();
        const auto floats = std::as_bytes(std::span(output));
        all.insert(all.end(), floats.begin(), floats.end());
        all.insert(all.end(), file.begin(), file.end());
        const auto characters = std::as_bytes(std::span(text));
        all.insert(all.end(), characters.begin(), characters.end());
        return all;
    }
};

struct Operation {
    std::string name;
    std::function<void(World&)> prepare;
    std::function<void(World&)> run;
};

/// Tries the operation with its n-th step of some kind made to fail, for every n: `arm(n)` says so, `fired()` ends that
/// and says whether it came to it. Returns how many there were.
std::size_t every_failure(const Operation& operation, const std::function<void(std::size_t)>& arm,
                          const std::function<bool()>& fired, ErrorCode expected) {
    SCOPED_TRACE(operation.name);
    Bytes undisturbed;
    {
        World world;  // and whatever is made once in a process is made
        operation.prepare(world);
        operation.run(world);
        undisturbed = world.results();
    }
    for (std::size_t n = 0;; ++n) {
        const std::size_t live = operator_new_live();
        bool came_to_it = false;
        bool failed = false;
        {
            World world;
            operation.prepare(world);
            const Bytes before = world.look();
            arm(n);
            try {
                operation.run(world);
                came_to_it = fired();
            } catch (const Error& error) {
                came_to_it = fired();
                failed = true;
                EXPECT_EQ(error.code(), expected) << error.what();
                EXPECT_STRNE(error.what(), "");
            } catch (const std::bad_alloc&) {
                came_to_it = fired();
                failed = true;
                EXPECT_EQ(expected, ErrorCode::out_of_memory);
            }
            EXPECT_TRUE(came_to_it || !failed) << n;
            if (failed) {
                EXPECT_TRUE(world.look() == before) << n;
                operation.run(world);
            }
            EXPECT_TRUE(world.results() == undisturbed) << n;
            world.caches.clear();
            world.layer.reset();
            world.model.reset();
            world.context.reset();
            EXPECT_EQ(world.memory.live(), 0U) << n;
        }
        EXPECT_EQ(operator_new_live(), live) << n;
        if (!came_to_it) return n;
        if (testing::Test::HasFailure()) return n;  // one is enough to read
    }
}

std::size_t every_refusal(const Operation& operation) {
    std::size_t points = 0;
    for (const bool all_after : {false, true}) {
        points = every_failure(
            operation, [&](std::size_t n) { refuse_operator_new(n, all_after); }, [] { return refuse_no_more() > 0; },
            ErrorCode::out_of_memory);
    }
    return points;
}

// ----------------------------------------------------------------------------------------------------- operations

const TokenRows kRows{};
using Tokens = std::vector<std::uint64_t>;

Tokens tokens(std::size_t count) {
    Tokens all(count);
    for (std::size_t i = 0; i < count; ++i) all[i] = i * 7 % 101;
    return all;
}

KvCacheOptions options_of(World& world, const KvTypes& types) {
    KvCacheOptions options;
    options.shape = kRows.shape(types);
    options.memory = &world.memory;
    return options;
}

void fill(World& world, KvCache& cache, std::size_t count, std::size_t first = 0) {
    const Tokens all = tokens(first + count);
    for (std::size_t at = first; at < first + count; at += 60) {
        for (std::size_t layer = 0; layer < cache.layers(); ++layer) {
            kRows.append(*world.context, cache, all, at, std::min<std::size_t>(60, first + count - at), layer);
        }
    }
}

/// Views of numbers.
template <std::size_t Rank>
InputTensor<Rank> input(const Extents<Rank>& extents, std::size_t from = 0) {
    return InputTensor<Rank>::dense(numbers().data() + from, extents);
}
template <std::size_t Rank>
OutputTensor<Rank> output(World& world, const Extents<Rank>& extents, std::size_t from = 0) {
    return OutputTensor<Rank>::dense(world.output.data() + from, extents);
}

AttentionOptions all_features() {
    static const std::vector<float> slopes(4, 0.25F);
    static const std::vector<float> sinks(4, 0.5F);
    static const std::vector<std::uint8_t> mask(3 * 700, 1);
    static const std::vector<std::int64_t> lengths(2, 650);
    AttentionOptions options;
    options.causal = true;
    options.window_left = 600;
    options.softcap = 30.0F;
    options.alibi_slopes = slopes;
    options.sink_logits = sinks;
    options.mask = AttentionMask::dense(mask.data(), AttentionMask::Type::boolean, std::vector<std::int64_t>{3, 700});
    options.kv_lengths = lengths;
    return options;
}

void nothing(World&) {}

std::vector<Operation> attention_operations() {
    return {
        {"Context", nothing, [](World& world) { Context other({.threads = 1, .memory = &world.memory}); }},
        {"attend", nothing,
         [](World& world) {
             attend(*world.context, input<4>({2, 4, 3, 16}), input<4>({2, 2, 700, 16}, 500),
                    input<4>({2, 2, 700, 12}, 900), all_features(), output<4>(world, {2, 4, 3, 12}),
                    output<3>(world, {2, 4, 3}, 1000));
         }},
        {"attend, one row over many keys", nothing,
         [](World& world) {
             attend(*world.context, input<4>({1, 2, 1, 8}), input<4>({1, 1, 9000, 8}), input<4>({1, 1, 9000, 8}, 7), {},
                    output<4>(world, {1, 2, 1, 8}));
         }},
        {"attend_packed", nothing,
         [](World& world) {
             const std::vector<std::int64_t> offsets{0, 3, 3, 40};
             attend_packed(*world.context, input<3>({4, 40, 8}), input<3>({2, 40, 8}), input<3>({2, 40, 8}, 5), offsets,
                           offsets, {}, output<3>(world, {4, 40, 8}));
         }},
        {"attend over pages", nothing,
         [](World& world) {
             const std::vector<KvPage> pages{{input<3>({2, 70, 8}), input<3>({2, 70, 8}, 3)},
                                             {input<3>({2, 5, 8}), input<3>({2, 5, 8}, 9)}};
             const PagedQuery query{
                 .query = input<3>({4, 2, 8}), .pages = pages, .output = output<3>(world, {4, 2, 8})};
             attend(*world.context, std::span(&query, 1));
         }},
        {"attention_scores", nothing,
         [](World& world) {
             attention_scores(*world.context, input<4>({1, 4, 3, 8}), input<4>({1, 2, 90, 8}), {}, ScoreStage::weights,
                              output<4>(world, {1, 4, 3, 90}));
         }},
        {"merge", nothing,
         [](World& world) {
             const std::vector<AttentionPart> parts{{input<4>({1, 4, 3, 8}), input<3>({1, 4, 3}, 400)},
                                                    {input<4>({1, 4, 3, 8}, 50), input<3>({1, 4, 3}, 300)}};
             merge(*world.context, parts, output<4>(world, {1, 4, 3, 8}), output<3>(world, {1, 4, 3}, 200));
         }},
        {"Rotary and rotate", nothing,
         [](World& world) {
             const Rotary rotary({.head_dim = 8});
             rotate(*world.context, rotary, input<3>({2, 9, 8}), 5, output<3>(world, {2, 9, 8}));
         }},
        {"MultiHeadAttention", nothing,
         [](World& world) {
             world.layer.emplace(*world.context,
                                 MultiHeadAttentionOptions{.heads = 4, .kv_heads = 2, .memory = &world.memory},
                                 MultiHeadAttentionWeights{.query = input<2>({24, 32}),
                                                           .key = input<2>({24, 16}),
                                                           .value = input<2>({24, 16}, 7),
                                                           .output = input<2>({32, 24}),
                                                           .query_bias = input<1>({32})});
         }},
    };
}

void with_layer(World& world) {
    attention_operations().back().run(world);
    KvCacheOptions options;
    options.shape = {.kv_heads = 2, .head_dim = 8, .value_dim = 8};
    options.memory = &world.memory;
    world.caches.emplace_back(options);
}

std::vector<Operation> layer_operations() {
    return {
        {"MultiHeadAttention::forward", with_layer,
         [](World& world) {
             world.layer->forward(*world.context, input<3>({2, 70, 24}), output<3>(world, {2, 70, 24}));
         }},
        {"MultiHeadAttention::forward over a cache", with_layer,
         [](World& world) {
             world.layer->forward(*world.context, input<2>({70, 24}), world.caches[0], 0, output<2>(world, {70, 24}));
         }},
    };
}

struct Kind {
    const char* name;
    KvTypes types;
    bool ring = false;
    bool rotary = false;
    bool turned = false;  ///< keys centred and turned, sinks in f16
};
constexpr Kind kKinds[] = {{"f32", {}},
                           {"f16", {KvType::f16, KvType::f16}, false, true},
                           {"bf16 ring", {KvType::bf16, KvType::bf16}, true},
                           {"int8", {KvType::int8, KvType::int8}, false, true},
                           {"int8 ring", {KvType::int8, KvType::int8}, true, true, true},
                           {"int4", {KvType::int4, KvType::int4}, false, false, true}};

KvCacheOptions options_of(World& world, const Kind& kind) {
    static const std::vector<float> centre(2 * 8, 0.1F);
    KvCacheOptions options = options_of(world, kind.types);
    if (kind.ring) {
        options.ring = true;
        options.capacity = 150;
        options.sink_tokens = 4;
        options.max_chunk = 64;
    }
    if (kind.rotary) options.rotary.emplace(RotaryOptions{.head_dim = 8});
    if (kind.turned) {
        options.key_centre = centre;
        options.hadamard_keys = true;
        options.f16_sinks = kind.ring;
    }
    return options;
}

std::vector<Operation> cache_operations(const Kind& kind, const Folder& folder) {
    const auto with = [kind](std::size_t count, bool fork = false) {
        return [=](World& world) {
            world.caches.reserve(4);
            world.caches.emplace_back(options_of(world, kind));
            fill(world, world.caches[0], count);
            if (fork) world.caches.push_back(world.caches[0].fork());
        };
    };
    const std::string path = folder.at("cache");
    std::vector<Operation> all{
        {"KvCache", [](World& world) { world.caches.reserve(4); },
         [kind](World& world) { world.caches.emplace_back(options_of(world, kind)); }},
        {"append", with(100),
         [](World& world) { kRows.append(*world.context, world.caches[0], tokens(160), 100, 60, 0); }},
        {"append to a fork", with(100, true), [](World& world) { fill(world, world.caches[1], 1, 100); }},
        {"reserve", with(10), [](World& world) { world.caches[0].reserve(50); }},
        {"truncate", with(100, true), [](World& world) { world.caches[0].truncate(99); }},
        {"fork", with(100), [](World& world) { world.caches.push_back(world.caches[0].fork()); }},
        {"reorder", with(70, true),
         [](World& world) {
             KvCache::reorder(world.caches, std::vector<std::size_t>{1, 0});
         }},
        {"save to memory", with(100),
         [](World& world) {
             Bytes file(world.caches[0].saved_bytes(3));
             world.caches[0].save(file, std::as_bytes(std::span("abc", 3)));
             world.file = std::move(file);
         }},
        {"save to a file", with(100),
         [path](World& world) { world.caches[0].save(path, std::as_bytes(std::span("abc", 3))); }},
        {"restore from memory",
         [with](World& world) {
             with(100, true)(world);
             world.file.resize(world.caches[0].saved_bytes(3));
             world.caches[0].save(world.file, std::as_bytes(std::span("abc", 3)));
             world.caches[0].reset();
             fill(world, world.caches[0], 7);
         },
         [](World& world) { world.caches[0].restore(world.file); }},
        {"restore from a file", with(20), [path](World& world) { world.caches[0].restore(path); }},
        {"attend over a cache", with(130),
         [](World& world) {
             const std::vector<float> out = kRows.attend(*world.context, world.caches[0], tokens(130), 3, 0);
             std::copy(out.begin(), out.end(), world.output.begin());
         }},
        {"read_back", with(130),
         [](World& world) {
             world.caches[0].read_back(0, 100, output<3>(world, {2, 30, 8}), output<3>(world, {2, 30, 5}, 1000));
         }},
    };
    if (!kind.ring && !kind.rotary) {
        all.push_back({"attend_shared_prefix",
                       [with](World& world) {
                           with(100)(world);
                           world.caches.emplace_back(KvCache(world.caches[0].fork()));
                           world.caches[1].truncate(9);
                       },
                       [](World& world) {
                           const CachedQuery query =
                               kRows.cached(numbers().data(), world.caches[1], 1, 0, world.output.data());
                           attend_shared_prefix(*world.context, world.caches[0], std::span(&query, 1));
                       }});
        all.push_back({"attention_scores over a cache", with(100), [](World& world) {
                           attention_scores(*world.context, input<3>({4, 2, 8}), world.caches[0], 0, {},
                                            ScoreStage::weights, output<3>(world, {4, 2, 100}));
                       }});
    }
    return all;
}

/// The small model's folder.
void write_model(const std::string& folder) {
    fs::create_directories(folder);
    write_bytes(folder + "/config.json", small_config().dump());
    write_bytes(folder + "/tokenizer.json", kSmallTokenizer);
    write_safetensors(folder + "/model.safetensors", small_tensors());
}

std::vector<Operation> model_operations(const std::string& folder) {
    const auto load = [folder](World& world) {
        world.model.emplace(*world.context, folder, ModelOptions{.memory = &world.memory});
    };
    const auto with_cache = [load](World& world) {
        load(world);
        KvCacheOptions options = world.model->cache_options({KvType::int8, KvType::f16});
        options.memory = &world.memory;
        world.caches.emplace_back(options);
    };
    GenerateOptions generate_options;
    generate_options.max_tokens = 6;
    generate_options.ignore_eos = true;
    generate_options.prefill_chunk = 2;
    return {
        {"Model", nothing, load},
        {"Model, read and quantised", nothing,
         [folder](World& world) {
             world.model.emplace(*world.context, folder,
                                 ModelOptions{.weights = WeightType::int8, .map = false, .memory = &world.memory});
         }},
        {"Tokenizer", nothing,
         [folder](World& world) {
             const Tokenizer tokenizer = Tokenizer::from_file(folder + "/tokenizer.json");
             const std::vector<std::int32_t> ids = tokenizer.encode("abab");
             TokenStream stream(tokenizer);
             std::string text = tokenizer.decode(ids);
             for (const std::int32_t id : ids) text += stream.push(id);
             world.text = text + stream.finish();
         }},
        {"Model::forward", with_cache,
         [](World& world) {
             world.model->forward(*world.context, std::vector<std::int32_t>{1, 2, 3, 4, 5}, world.caches[0],
                                  output<2>(world, {2, 11}));
         }},
        {"generate", load,
         [generate_options](World& world) {
             world.text = generate(*world.context, *world.model, "abba", generate_options).text;
         }},
        {"generate over a cache", with_cache,
         [generate_options](World& world) {
             world.text = generate(*world.context, *world.model, world.caches[0], std::vector<std::int32_t>{1, 0, 1},
                                   generate_options)
                              .text;
         }},
    };
}

TEST(FaultsTest, EveryRefusedAllocationIsAnErrorAndNothingMore) {
    const Folder folder;
    write_model(folder.at("model"));
    std::vector<Operation> all = attention_operations();
    const auto add = [&](std::vector<Operation> more) { std::move(more.begin(), more.end(), std::back_inserter(all)); };
    add(layer_operations());
    for (const Kind& kind : kKinds) {
        if (emulated() && std::string_view(kind.name) != "int8 ring") continue;
        std::vector<Operation> of_kind = cache_operations(kind, folder);
        for (Operation& operation : of_kind) operation.name += std::string(", ") + kind.name;
        add(std::move(of_kind));
    }
    add(model_operations(folder.at("model")));
    std::size_t points = 0;
    for (const Operation& operation : all) {
        const std::size_t here = every_refusal(operation);
        points += here;
        if (HasFailure()) return;
    }
    EXPECT_EQ(folder.files(), 2U) << "nothing is left beside a saved file";
    std::printf("%zu operations, %zu points at which they allocate, each refused alone and with all that follow\n",
                all.size(), points);
    RecordProperty("points", static_cast<int>(points));
}

// ------------------------------------------------------------------------------------------------------ ended calls

TEST(FaultsTest, EveryCallCanBeEndedAtEveryTile) {
    if (!can_move_clock()) GTEST_SKIP() << "the clock that the library reads cannot be moved here";
    const Folder folder;
    write_model(folder.at("model"));
    const auto in_an_hour = std::chrono::steady_clock::now() + std::chrono::hours(1);
    const auto soon = [in_an_hour] { return in_an_hour; };
    const auto options = [soon] {
        AttentionOptions of;
        of.deadline = soon();
        return of;
    };
    std::vector<Operation> all{
        {"attend", nothing,
         [options](World& world) {
             attend(*world.context, input<4>({1, 2, 70, 8}), input<4>({1, 1, 3000, 8}), input<4>({1, 1, 3000, 8}, 7),
                    options(), output<4>(world, {1, 2, 70, 8}));
         }},
        {"attend, one row", nothing,
         [options](World& world) {
             attend(*world.context, input<4>({1, 2, 1, 8}), input<4>({1, 1, 9000, 8}), input<4>({1, 1, 9000, 8}, 7),
                    options(), output<4>(world, {1, 2, 1, 8}));
         }},
        {"attention_scores", nothing,
         [options](World& world) {
             attention_scores(*world.context, input<4>({1, 4, 30, 8}), input<4>({1, 2, 90, 8}), options(),
                              ScoreStage::weights, output<4>(world, {1, 4, 30, 90}));
         }},
        {"MultiHeadAttention::forward", with_layer,
         [options](World& world) {
             world.layer->forward(*world.context, input<3>({2, 70, 24}), output<3>(world, {2, 70, 24}), options());
         }},
        {"MultiHeadAttention::forward over a cache", with_layer,
         [options](World& world) {
             world.layer->forward(*world.context, input<2>({70, 24}), world.caches[0], 0, output<2>(world, {70, 24}),
                                  options());
         }},
    };
    for (const Kind& kind : kKinds) {
        if (emulated() && std::string_view(kind.name) != "int8 ring") continue;
        all.push_back({std::string("attend over a cache of ") + kind.name,
                       [kind](World& world) {
                           world.caches.emplace_back(options_of(world, kind));
                           fill(world, world.caches[0], 600);
                       },
                       [options](World& world) {
                           const std::vector<float> out =
                               kRows.attend(*world.context, world.caches[0], tokens(600), 3, 0, options());
                           std::copy(out.begin(), out.end(), world.output.begin());
                       }});
    }
    const std::vector<Operation> of_models = model_operations(folder.at("model"));
    const auto prepared =
        std::find_if(of_models.begin(), of_models.end(), [](const Operation& o) { return o.name == "Model::forward"; });
    all.push_back({"Model::forward", prepared->prepare, [soon](World& world) {
                       world.model->forward(*world.context, std::vector<std::int32_t>{1, 2, 3, 4, 5}, world.caches[0],
                                            output<2>(world, {2, 11}), {.deadline = soon()});
                   }});
    std::size_t points = 0;
    for (const Operation& operation : all) {
        const std::size_t here = every_failure(
            operation, move_clock_after, [] { return move_clock_back(); }, ErrorCode::cancelled);
        EXPECT_GE(here, 1U) << operation.name << " looks at the clock";
        points += here;
        if (HasFailure()) return;
    }
    std::printf("%zu operations, %zu looks at the clock, each the last\n", all.size(), points);
}

// ------------------------------------------------------------------------------------------------------------ disks

#if defined(__linux__)

/// Runs `body` in a child, which must not use threads of the library's, and returns its status.
template <class Body>
int in_a_child(const Body& body) {
    const pid_t child = ::fork();
    if (child == 0) {
        body();
        ::_exit(0);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return status;
}

/// A cache of so many tokens, and its file's bytes.
struct Saved {
    explicit Saved(World& world, std::size_t count) : cache(options_of(world, kKinds[3])) {
        fill(world, cache, count);
        bytes.resize(cache.saved_bytes());
        cache.save(std::as_writable_bytes(std::span(bytes)));
    }
    KvCache cache;
    std::string bytes;
};

TEST(FaultsTest, AFullDiskLeavesTheOldFile) {
    World world;
    const Saved old(world, 100);
    const Saved next(world, 2000);
    const Folder folder;
    const std::string path = folder.at("cache");
    old.cache.save(path);
    for (const std::size_t room : {std::size_t{0}, std::size_t{1000}, next.bytes.size() - 1}) {
        const int status = in_a_child([&] {
            std::signal(SIGXFSZ, SIG_IGN);
            const rlimit limit{room, room};
            if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(2);
            try {
                next.cache.save(path);
                ::_exit(3);  // it cannot have been written
            } catch (const IoError& error) {
                ::_exit(std::string(error.what()).find(path) != std::string::npos ? 0 : 4);
            }
        });
        EXPECT_EQ(status, 0) << room;
        EXPECT_EQ(read_file(path), old.bytes) << "the old file is there, whole";
        EXPECT_EQ(folder.files(), 1U) << "and nothing beside it";
    }
    next.cache.save(path);
    EXPECT_EQ(read_file(path), next.bytes);
}

TEST(FaultsTest, AKilledSaveLeavesTheOldFileOrTheNewOne) {
    World world;
    const Saved old(world, 100);
    const Saved next(world, 3000);
    const Folder folder;
    const std::string path = folder.at("cache");
    Random random(73);
    const int times = emulated() ? 5 : 100;
    int olds = 0;
    int news = 0;
    for (int i = 0; i < times; ++i) {
        old.cache.save(path);
        const pid_t child = ::fork();
        if (child == 0) {
            for (;;) {
                next.cache.save(path);
                old.cache.save(path);
            }
        }
        ::usleep(static_cast<useconds_t>(random.integer(0, 20'000)));
        ::kill(child, SIGKILL);
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        ASSERT_TRUE(WIFSIGNALED(status)) << "it was saving when it was killed";
        const std::string found = read_file(path);
        ASSERT_TRUE(found == old.bytes || found == next.bytes) << "kill " << i;
        ++(found == old.bytes ? olds : news);
        KvCache cache(options_of(world, kKinds[3]));
        cache.restore(path);
    }
    std::printf("%d saves killed: %d times the old file, %d times the new one\n", times, olds, news);
}

TEST(FaultsTest, AMappedFileThatShrinksEndsTheProcessAndAFileThatWasReadDoesNot) {
    const Folder folder;
    const std::string model_folder = folder.at("model");
    write_model(model_folder);
    const std::string weights = model_folder + "/model.safetensors";
    // Embeddings are read from the file when they are used; and the library installs no handler.
    for (const bool map : {true, false}) {
        write_model(model_folder);
        const int status = in_a_child([&] {
            World world;
            const Model model(*world.context, model_folder, {.map = map});
            KvCache cache(model.cache_options());
            if (::truncate(weights.c_str(), 0) != 0) ::_exit(2);
            model.forward(*world.context, std::vector<std::int32_t>{1, 2, 3}, cache, output<2>(world, {1, 11}));
        });
        if (map) {
            EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS) << status;
        } else {
            EXPECT_EQ(status, 0);
        }
    }
}

#endif

}  // namespace
}  // namespace headlong::test
