// What the suites share: numbers to compute with, contexts, caches, and names.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <headlong/context.hpp>
#include <headlong/kv_cache.hpp>

#include "kernels/layout.hpp"

namespace headlong::bench {

/// In [-1, 1), the same in every run; they repeat after 64 Ki, since a generator takes longer than a copy.
inline void fill_random(float* floats, std::size_t count) {
    constexpr std::size_t kPeriod = 65536;
    std::uint32_t x = 1;
    for (std::size_t i = 0; i < std::min(count, kPeriod); ++i) {
        x = x * 1664525U + 1013904223U;
        floats[i] = static_cast<float>(x >> 8U) * 0x1p-23F - 1.0F;
    }
    for (std::size_t done = kPeriod; done < count; done += kPeriod) {
        std::copy_n(floats, std::min(count - done, kPeriod), floats + done);
    }
}

inline std::vector<float> random_floats(std::int64_t count) {
    std::vector<float> v(static_cast<std::size_t>(count));
    fill_random(v.data(), v.size());
    return v;
}

/// Random floats in cache-line-aligned memory, as kernels want them.
class AlignedFloats {
  public:
    explicit AlignedFloats(std::size_t count) : lines_(count / 16 + 1) { fill_random(data(), count); }
    float* data() noexcept { return lines_.front().floats; }

  private:
    struct alignas(kernels::kAlignment) Line {
        float floats[16];
    };
    std::vector<Line> lines_;
};

inline Context context_of(Isa isa, std::int64_t threads) {
    ContextOptions options;
    options.isa = isa;
    options.threads = static_cast<std::size_t>(threads);
    return Context(options);
}

/// Heads of real models.
struct Shape {
    std::int64_t heads, kv_heads, dim;
};
inline constexpr Shape kShapes[] = {{32, 8, 128}, {12, 12, 64}};  // Llama 3 8B; GPT-2

inline std::string to_string(const Shape& s) {
    return std::to_string(s.heads) + "x" + std::to_string(s.kv_heads) + "x" + std::to_string(s.dim);
}

/// A cache of one layer that holds `depth` random tokens.
inline KvCache filled_cache(Context& context, const Shape& s, std::int64_t depth, KvType type = KvType::f32,
                            std::int64_t capacity = std::numeric_limits<std::int64_t>::max()) {
    KvCacheOptions options;
    options.shape = {
        .kv_heads = s.kv_heads, .head_dim = s.dim, .value_dim = s.dim, .key_type = type, .value_type = type};
    options.capacity = capacity;
    KvCache cache(options);
    const std::int64_t step = std::min<std::int64_t>(depth, 1024);
    const std::vector<float> floats = random_floats(s.kv_heads * step * s.dim);
    for (std::int64_t held = 0; held < depth; held += step) {
        const auto rows = InputTensor<3>::dense(floats.data(), {s.kv_heads, std::min(depth - held, step), s.dim});
        cache.append(context, 0, rows, rows);
    }
    return cache;
}

/// Keys and values of `tokens` tokens, each once.
inline double kv_bytes(const Shape& s, std::int64_t tokens) {
    return 2.0 * sizeof(float) * static_cast<double>(s.kv_heads * tokens * s.dim);
}

/// 1 and all.
inline std::vector<std::int64_t> thread_counts() {
    const auto all = static_cast<std::int64_t>(default_concurrency());
    return all > 1 ? std::vector<std::int64_t>{1, all} : std::vector<std::int64_t>{1};
}

/// Registers name/isa[/what]. By the wall clock: it is what the limits are measured by, and what callers wait for.
template <class... Args>
benchmark::internal::Benchmark* add(const std::string& name, Isa isa, const std::string& what,
                                    void (*suite)(benchmark::State&, Isa, Args...), const Args&... args) {
    const std::string full = name + "/" + headlong::to_string(isa) + (what.empty() ? "" : "/" + what);
    return benchmark::RegisterBenchmark(full.c_str(), suite, isa, args...)->UseRealTime();
}
inline benchmark::internal::Benchmark* add(const std::string& name, Isa isa, void (*suite)(benchmark::State&, Isa)) {
    return add(name, isa, "", suite);
}

}  // namespace headlong::bench
