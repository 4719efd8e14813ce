// A cache that runs for ever inside the event loop of a program with a window: each tick brings one token, which is
// appended and attended, within a budget of time. A step that would take longer is cancelled and made up for later: the
// program stays responsive, and memory stays bounded.
//
//     c++ -std=c++20 event_loop.cpp -o event_loop -lheadlong      (or: ... $(pkg-config --cflags --libs headlong))
//     ./event_loop [TICKS] [BUDGET_IN_MICROSECONDS]
#include <headlong/headlong.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <span>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kDim = 64;

/// What the program's model would compute for a tick: here a few waves.
void make_rows(std::int64_t tick, std::vector<float>& rows) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i] = static_cast<float>((tick * 31 + static_cast<std::int64_t>(i) * 17) % 200 - 100) / 100.0F;
    }
}

int run(std::int64_t ticks, std::chrono::microseconds budget) {
    headlong::Context context;
    headlong::KvCacheOptions options;
    options.shape = {kKvHeads, kDim, kDim, headlong::KvType::int8, headlong::KvType::int8};
    options.capacity = 1024;  // of any number of tokens: the first 4 and the last 1,020
    options.ring = true;
    options.sink_tokens = 4;
    options.max_chunk = 1;
    headlong::KvCache cache(options);

    std::vector<float> key(kKvHeads * kDim);
    std::vector<float> value(key.size());
    std::vector<float> query(kHeads * kDim);
    std::vector<float> output(query.size());
    const auto keys = headlong::InputTensor<3>::dense(key.data(), {kKvHeads, 1, kDim});
    const auto values = headlong::InputTensor<3>::dense(value.data(), {kKvHeads, 1, kDim});
    headlong::CachedQuery step;
    step.query = headlong::InputTensor<3>::dense(query.data(), {kHeads, 1, kDim});
    step.cache = &cache;
    step.output = headlong::OutputTensor<3>::dense(output.data(), {kHeads, 1, kDim});

    std::int64_t late = 0;
    std::int64_t attended = 0;
    std::size_t most = 0;
    bool pending = false;  // a token is in the cache whose attention was cancelled
    for (std::int64_t tick = 0; tick < ticks; ++tick) {
        // ... here a program handles its events ...
        headlong::AttentionOptions attention;
        attention.deadline = Clock::now() + budget;
        try {
            if (!pending) {
                make_rows(attended, key);
                make_rows(attended + 1, value);
                make_rows(attended + 2, query);
                cache.append(context, 0, keys, values);
                pending = true;
            }
            headlong::attend(context, std::span(&step, 1), attention);
            pending = false;
            ++attended;
        } catch (const headlong::Cancelled&) {
            ++late;  // the cache has the token; its attention is computed on the next tick
        }
        most = std::max(most, cache.reserved_bytes());
    }
    std::cout << ticks << " ticks, " << cache.length() << " tokens, " << late << " steps over the budget, at most "
              << most / 1024 << " KiB of keys and values\n";
    const bool all_there = attended + late == ticks && cache.length() == attended + (pending ? 1 : 0);
    return attended > 0 && all_there && most <= headlong::KvCache::estimate_bytes(options, ticks) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(argc > 1 ? std::atoll(argv[1]) : 5000,
                   std::chrono::microseconds(argc > 2 ? std::atoll(argv[2]) : 2000));
    } catch (const std::exception& error) {
        std::cerr << "event_loop: " << error.what() << '\n';
        return 1;
    }
}
