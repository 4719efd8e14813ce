// Many threads: contexts, caches and pools that they share, arenas of one thread and of more than there are processors,
// calls inside the caller's own loops, and what throws or cancels in the midst of it. Results are compared bit by bit
// with those of one thread; what could stand still for ever is watched.
#include <gtest/gtest.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>
#include <headlong/tbb.hpp>

#include "tests/support/compare.hpp"
#include "tests/support/counting_resource.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/token_rows.hpp"

namespace headlong::test {
namespace {

using Tokens = std::vector<std::uint64_t>;

Tokens tokens_up_to(std::size_t count) {
    Tokens tokens(count);
    for (std::size_t t = 0; t < count; ++t) tokens[t] = t + 1;
    return tokens;
}

Tokens head_of(const Tokens& tokens, std::size_t count) {
    return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count)};
}

// Whatever the machine, this is never how long it takes: it is how long it takes to know that it stands still.
constexpr std::chrono::seconds kPatience{60};

/// Runs an operation on a thread of its own. One that does not end ends the process: what it holds cannot be taken
/// away.
void watched(const std::function<void()>& operation) {
    std::packaged_task<void()> task(operation);
    std::future<void> done = task.get_future();
    std::thread thread(std::move(task));
    if (done.wait_for(emulated() ? 5 * kPatience : kPatience) != std::future_status::ready) {
        std::fputs("a call stands still; the process ends\n", stderr);
        std::abort();
    }
    thread.join();
    done.get();
}

/// Runs body(i) on `count` threads that begin together, and throws on what one of them threw.
void on_threads(std::size_t count, const std::function<void(std::size_t)>& body) {
    watched([&] {
        std::barrier begin(static_cast<std::ptrdiff_t>(count));
        std::vector<std::future<void>> done;
        for (std::size_t i = 0; i < count; ++i) {
            done.push_back(std::async(std::launch::async, [&, i] {
                begin.arrive_and_wait();
                body(i);
            }));
        }
        for (std::future<void>& one : done) one.get();
    });
}

std::vector<float> normal_floats(std::size_t count, std::uint64_t seed) {
    Random random(seed);
    std::vector<float> x(count);
    for (float& y : x) y = random.normal_f32();
    return x;
}

/// Something to compute, all of its results one behind the other. May be called from many threads at once.
struct Job {
    std::string name;
    std::function<std::vector<float>(Context&)> run;
};

/// Every kind of call: through workspaces, pools, loops of few tasks and of many, one wave and several.
class Jobs {
  public:
    Jobs() {
        const std::int64_t keys = emulated() ? 530 : 1100;
        plain("prefill", emulated() ? 60 : 300, keys);
        plain("decoding", 1, emulated() ? 1100 : 5000);
        plain("chunk", 7, keys);
        for (const TypesCase& types : {TypesCase{{KvType::f32, KvType::f32}}, TypesCase{{KvType::f16, KvType::bf16}},
                                       TypesCase{{KvType::int8, KvType::int4}}}) {
            all_.push_back({"a life of a cache of " + types.name(), [types](Context& c) { return live(c, types); }});
        }
        packed();
        scores();
        forks();
        layer();
        rotated();
    }
    const std::vector<Job>& all() const { return all_; }

  private:
    void plain(const char* name, std::int64_t q_len, std::int64_t kv_len) {
        const auto numbers =
            std::make_shared<std::vector<float>>(normal_floats(static_cast<std::size_t>(4 * kv_len * 16), 1));
        all_.push_back({name, [=](Context& context) {
                            std::vector<float> out(static_cast<std::size_t>(4 * q_len * 17));
                            AttentionOptions options;
                            options.causal = true;
                            const InputTensor<4> key = InputTensor<4>::dense(numbers->data(), {1, 2, kv_len, 16});
                            attend(context, InputTensor<4>::dense(numbers->data() + 5, {1, 4, q_len, 16}), key, key,
                                   options, OutputTensor<4>::dense(out.data(), {1, 4, q_len, 16}),
                                   OutputTensor<3>::dense(out.data() + 4 * q_len * 16, {1, 4, q_len}));
                            return out;
                        }});
    }

    static std::vector<float> live(Context& context, const TypesCase& types) {
        const TokenRows rows{.kv_heads = 2, .group = 2, .head_dim = 24, .value_dim = 40};
        const Tokens tokens = tokens_up_to(emulated() ? 200 : 700);
        KvCacheOptions options;
        options.shape = rows.shape(types.types);
        options.rotary = Rotary({.head_dim = 24});
        KvCache cache(options);
        std::vector<float> all;
        for (std::size_t first = 0; first < tokens.size();) {
            const std::size_t count = std::min<std::size_t>(first == 0 ? 150 : 90, tokens.size() - first);
            rows.append(context, cache, tokens, first, count, 0);
            first += count;
            const std::vector<float> out = rows.attend(context, cache, head_of(tokens, first), count, 0);
            all.insert(all.end(), out.begin(), out.end());
            if (first == 150) {
                KvCache fork = cache.fork();
                fork.truncate(99);
                cache = std::move(fork);
                first = 99;
                rows.append(context, cache, tokens, first, 51, 0);
                first = 150;
            }
        }
        return all;
    }

    void packed() {
        const auto numbers = std::make_shared<std::vector<float>>(normal_floats(900 * 2 * 16, 2));
        all_.push_back({"packed", [=](Context& context) {
                            const std::vector<std::int64_t> offsets{0, 3, 3, 250, 251, 600};
                            std::vector<float> out(600 * 4 * 8);
                            const InputTensor<3> key = InputTensor<3>::dense(numbers->data(), {1, 600, 8});
                            AttentionOptions options;
                            options.causal = true;
                            attend_packed(context, InputTensor<3>::dense(numbers->data(), {4, 600, 8}), key, key,
                                          offsets, offsets, options, OutputTensor<3>::dense(out.data(), {4, 600, 8}));
                            return out;
                        }});
    }

    void scores() {
        const auto numbers = std::make_shared<std::vector<float>>(normal_floats(2 * 600 * 8, 3));
        all_.push_back({"scores", [=](Context& context) {
                            std::vector<float> out(2 * 20 * 600);
                            attention_scores(context, InputTensor<4>::dense(numbers->data(), {1, 2, 20, 8}),
                                             InputTensor<4>::dense(numbers->data(), {1, 2, 600, 8}), {},
                                             ScoreStage::weights, OutputTensor<4>::dense(out.data(), {1, 2, 20, 600}));
                            return out;
                        }});
    }

    /// Several sequences in one call, of which some share their blocks, and after a prefix.
    void forks() {
        all_.push_back(
            {"forks", [](Context& context) {
                 const TokenRows rows;
                 const Tokens tokens = tokens_up_to(1100);
                 KvCacheOptions options;
                 options.shape = rows.shape({});
                 KvCache prefix(options);
                 rows.append(context, prefix, tokens, 0, 1040, 0);
                 std::vector<KvCache> caches;
                 for (std::size_t i = 0; i < 5; ++i) {
                     caches.push_back(prefix.fork());
                     rows.append(context, caches.back(), tokens, 1040, 3 * i + 1, 0);
                 }
                 const auto per_query = static_cast<std::size_t>(rows.heads() * (rows.value_dim + 1));
                 std::vector<float> out(2 * caches.size() * per_query);
                 const std::vector<float> query = rows.rows(tokens, 0, 5, 0, TokenRows::Kind::query);
                 std::vector<CachedQuery> queries;
                 for (std::size_t i = 0; i < caches.size(); ++i) {
                     queries.push_back(rows.cached(query.data() + i * 32, caches[i], 1, 0, out.data() + i * per_query));
                 }
                 headlong::attend(context, queries);
                 KvCache suffix(options);
                 rows.append(context, suffix, tokens, 1040, 20, 0);
                 for (std::size_t i = 0; i < queries.size(); ++i) {
                     queries[i] =
                         rows.cached(query.data() + i * 32, suffix, 1, 0, out.data() + (caches.size() + i) * per_query);
                 }
                 attend_shared_prefix(context, prefix, queries);
                 return out;
             }});
    }

    void layer() {
        const auto numbers = std::make_shared<std::vector<float>>(normal_floats(64 * 64, 4));
        all_.push_back({"layer", [=](Context& context) {
                            MultiHeadAttentionWeights weights;
                            const auto weight = InputTensor<2>::dense(numbers->data(), {64, 64});
                            weights.query = weights.key = weights.value = weights.output = weight;
                            const MultiHeadAttention layer(context, {.heads = 4, .kv_heads = 4, .memory = nullptr},
                                                           weights);
                            KvCacheOptions options;
                            options.shape = {.kv_heads = 4, .head_dim = 16, .value_dim = 16};
                            KvCache cache(options);
                            std::vector<float> out(64 * 64);
                            for (std::int64_t first : {0, 40}) {
                                const std::int64_t count = first == 0 ? 40 : 24;
                                layer.forward(context, InputTensor<2>::dense(numbers->data() + first * 64, {count, 64}),
                                              cache, 0, OutputTensor<2>::dense(out.data() + first * 64, {count, 64}));
                            }
                            return out;
                        }});
    }

    void rotated() {
        const auto numbers = std::make_shared<std::vector<float>>(normal_floats(8 * 300 * 32, 5));
        all_.push_back({"rotate and merge", [=](Context& context) {
                            std::vector<float> out(numbers->size());
                            rotate(context, Rotary({.head_dim = 32}),
                                   InputTensor<3>::dense(numbers->data(), {8, 300, 32}), 7,
                                   OutputTensor<3>::dense(out.data(), {8, 300, 32}));
                            const AttentionPart parts[2] = {{InputTensor<4>::dense(numbers->data(), {1, 8, 300, 32}),
                                                             InputTensor<3>::dense(numbers->data(), {1, 8, 300})},
                                                            {InputTensor<4>::dense(out.data(), {1, 8, 300, 32}),
                                                             InputTensor<3>::dense(numbers->data() + 9, {1, 8, 300})}};
                            merge(context, parts, OutputTensor<4>::dense(out.data(), {1, 8, 300, 32}));
                            return out;
                        }});
    }

    std::vector<Job> all_;
};

const std::vector<Job>& jobs() {
    static const Jobs jobs;
    return jobs.all();
}

/// What one thread makes of every job. (merge and prefixes, too: they cut nothing by threads.)
const std::vector<std::vector<float>>& serial() {
    static const std::vector<std::vector<float>> results = [] {
        const auto context = make_context(available_isas().back(), 1);
        std::vector<std::vector<float>> all;
        for (const Job& job : jobs()) all.push_back(job.run(*context));
        return all;
    }();
    return results;
}

/// Runs job `i` and compares; from any thread.
void check_job(Context& context, std::size_t i) {
    EXPECT_TRUE(same_bits(jobs()[i].run(context), serial()[i])) << jobs()[i].name;
}

/// All of them, beginning with another one on every thread.
void check_jobs(Context& context, std::size_t thread) {
    for (std::size_t n = 0; n < jobs().size(); ++n) check_job(context, (thread + n) % jobs().size());
}

std::unique_ptr<Context> context_of(const std::shared_ptr<Executor>& executor,
                                    std::pmr::memory_resource* memory = nullptr) {
    ContextOptions options;
    options.isa = available_isas().back();
    options.executor = executor;
    options.memory = memory;
    return std::make_unique<Context>(options);
}

std::size_t many() { return emulated() ? 4 : 12; }

// ------------------------------------------------------------------------------------------------- shared contexts

TEST(ThreadsTest, OneContextServesManyThreadsWithEveryKindOfCall) {
    serial();
    for (const std::size_t threads : {1U, 2U, 5U}) {
        SCOPED_TRACE(threads);
        CountingResource memory;
        {
            const auto context = make_context(available_isas().back(), threads, &memory);
            for (int round = 0; round < 2; ++round) {  // fresh scratch, and scratch that others have used
                on_threads(many(), [&](std::size_t i) { check_jobs(*context, i); });
            }
            EXPECT_EQ(memory.counts().live_bytes, context->scratch_bytes());
        }
        EXPECT_EQ(memory.counts().live_bytes, 0U);
    }
}

TEST(ThreadsTest, ContextsAreMadeAndDroppedWhileOthersCompute) {
    serial();
    const auto lasting = make_context(available_isas().back(), 2);
    on_threads(many(), [&](std::size_t i) {
        if (i % 2 == 0) return check_jobs(*lasting, i);
        for (std::size_t n = 0; n < jobs().size(); ++n) {
            const auto own = make_context(available_isas().back(), 1 + n % 3);
            check_job(*own, n);
        }
    });
}

// --------------------------------------------------------------------------------------------------- shared caches

// Between two appends of the one that writes all others read.
TEST(ThreadsTest, ACacheIsReadByManyAndWrittenBetween) {
    const TokenRows rows;
    const std::size_t count = emulated() ? 120 : 400;
    const Tokens tokens = tokens_up_to(count);
    for (const KvTypes& types : {KvTypes{}, KvTypes{KvType::int8, KvType::f16}}) {
        for (const bool ring : {false, true}) {
            SCOPED_TRACE(std::string(ring ? "ring of " : "cache of ") + to_string(types.keys));
            KvCacheOptions options;
            options.shape = rows.shape(types);
            options.ring = ring;
            options.sink_tokens = 3;
            if (ring) options.capacity = 70;
            options.max_chunk = 37;
            const auto steps = [&](const std::function<void(const KvCache&, const Tokens&, std::size_t)>& read,
                                   Context& context) {
                KvCache cache(options);
                for (std::size_t first = 0; first < count;) {
                    const std::size_t n = std::min<std::size_t>(1 + first % 37, count - first);
                    rows.append(context, cache, tokens, first, n, 0);
                    first += n;
                    read(cache, head_of(tokens, first), n);
                }
            };
            const auto alone = make_context(available_isas().back(), 1);
            std::vector<std::vector<float>> expected;
            steps([&](const KvCache& cache, const Tokens& so_far,
                      std::size_t n) { expected.push_back(rows.attend(*alone, cache, so_far, n, 0)); },
                  *alone);

            const auto context = make_context(available_isas().back(), 2);
            const std::size_t readers = emulated() ? 3 : 8;
            std::barrier turn(static_cast<std::ptrdiff_t>(readers + 1));
            const KvCache* shown = nullptr;
            Tokens so_far;
            std::size_t rows_of_step = 0;
            bool over = false;
            on_threads(readers + 1, [&](std::size_t i) {
                if (i == 0) {
                    steps(
                        [&](const KvCache& cache, const Tokens& seen, std::size_t n) {
                            shown = &cache;
                            so_far = seen;
                            rows_of_step = n;
                            turn.arrive_and_wait();
                            turn.arrive_and_wait();
                        },
                        *context);
                    over = true;
                    turn.arrive_and_wait();
                    return;
                }
                for (std::size_t step = 0;; ++step) {
                    turn.arrive_and_wait();
                    if (over) return;
                    EXPECT_TRUE(same_bits(rows.attend(*context, *shown, so_far, rows_of_step, 0), expected[step]));
                    EXPECT_EQ(shown->length(), static_cast<std::int64_t>(so_far.size()));
                    turn.arrive_and_wait();
                }
            });
        }
    }
}

// The writer's blocks come from the pool, and partly from the very blocks, of the cache that the others read.
TEST(ThreadsTest, OneCacheIsWrittenWhileItsForkIsRead) {
    const TokenRows rows;
    const std::size_t count = emulated() ? 150 : 600;
    const Tokens tokens = tokens_up_to(count);
    for (const KvTypes& types : {KvTypes{}, KvTypes{KvType::int4, KvType::int8}}) {
        KvCacheOptions options;
        options.shape = rows.shape(types);
        options.pool = std::make_shared<BlockPool>(options.shape);
        const auto context = make_context(available_isas().back(), 2);
        KvCache read(options);
        rows.append(*context, read, tokens, 0, 100, 0);
        const Tokens seen = head_of(tokens, 100);
        const std::vector<float> expected = rows.attend(*context, read, seen, 20, 0);
        KvCache written = read.fork();
        KvCache whole(options);
        rows.append(*context, whole, tokens, 0, count, 0);
        const std::vector<float> expected_end = rows.attend(*context, whole, tokens, 20, 0);
        std::atomic<bool> done{false};
        on_threads(emulated() ? 3 : 8, [&](std::size_t i) {
            if (i > 0) {
                do {
                    EXPECT_TRUE(same_bits(rows.attend(*context, read, seen, 20, 0), expected));
                } while (!done.load());
                return;
            }
            for (int life = 0; life < 3; ++life) {
                written = read.fork();
                for (std::size_t first = 100; first < count; first += 50) {
                    rows.append(*context, written, tokens, first, std::min<std::size_t>(50, count - first), 0);
                }
                EXPECT_TRUE(same_bits(rows.attend(*context, written, tokens, 20, 0), expected_end));
                written.truncate(64);
                const Tokens fewer = head_of(tokens, 64);
                static_cast<void>(rows.attend(*context, written, fewer, 1, 0));
                std::vector<std::byte> saved(written.saved_bytes());
                written.save(saved);
                written.restore(saved);
            }
            done.store(true);
        });
        EXPECT_TRUE(same_bits(rows.attend(*context, read, seen, 20, 0), expected));
    }
}

// ---------------------------------------------------------------------------------------------------------- arenas

TEST(ThreadsTest, ArenasOfOneThreadAndOfSixtyFourGiveTheSameBits) {
    serial();
    allow_threads(64);
    for (const int size : {1, 2, 64}) {
        SCOPED_TRACE(size);
        tbb::task_arena arena(size);
        const auto borrowed = context_of(borrow_arena(arena));
        const auto own = context_of(make_tbb_executor(static_cast<std::size_t>(size)));
        EXPECT_EQ(borrowed->concurrency(), static_cast<std::size_t>(size));
        EXPECT_EQ(own->concurrency(), static_cast<std::size_t>(size));
        watched([&] {
            check_jobs(*borrowed, 0);
            check_jobs(*own, 0);
        });
        // more callers than the arena has slots
        on_threads(emulated() ? 3 : 8, [&](std::size_t i) { check_jobs(i % 2 == 0 ? *borrowed : *own, i); });
    }
}

// --------------------------------------------------------------------------------------------- the caller's loops

/// Runs body(i) for i < count in a loop of oneTBB.
void tbb_loop(std::size_t count, const std::function<void(std::size_t)>& body) {
    tbb::parallel_for(
        std::size_t{0}, count, [&](std::size_t i) { body(i); }, tbb::simple_partitioner{});
}

TEST(ThreadsTest, CallsInsideTheCallersLoops) {
    serial();
    allow_threads(4);
    const std::size_t calls = jobs().size() * (emulated() ? 1 : 2);
    const auto check = [](Context& context) {
        return [&context](std::size_t i) { check_job(context, i % jobs().size()); };
    };
    const auto context = make_context(available_isas().back(), 3);
    {
        SCOPED_TRACE("parallel_for, an arena of the context's own");
        watched([&] { tbb_loop(calls, check(*context)); });
    }
    for (const int size : {1, 2, 4}) {
        SCOPED_TRACE(size);
        tbb::task_arena arena(size);
        const auto same = context_of(borrow_arena(arena));
        tbb::task_arena other(size);
        const auto apart = context_of(borrow_arena(other));
        watched([&] { arena.execute([&] { tbb_loop(calls, check(*same)); }); });
        watched([&] { arena.execute([&] { tbb_loop(calls, check(*apart)); }); });
        // a loop in a loop, and calls beside those of threads that are in no arena
        watched([&] { arena.execute([&] { tbb_loop(3, [&](std::size_t) { tbb_loop(calls / 3, check(*same)); }); }); });
        on_threads(4, [&](std::size_t i) {
            if (i % 2 == 0) {
                arena.execute([&] { tbb_loop(calls / 2, check(*same)); });
            } else {
                check_jobs(*same, i);
            }
        });
        // tasks that wait for others
        watched([&] {
            arena.execute([&] {
                tbb::task_group group;
                for (std::size_t i = 0; i < calls; ++i) group.run([&, i] { check (*same)(i); });
                group.wait();
            });
        });
        // enqueued: the arena's threads are oneTBB's, and nobody waits in it
        watched([&] {
            std::vector<std::promise<void>> done(calls);
            for (std::size_t i = 0; i < calls; ++i) {
                arena.enqueue([&, i] {
                    check (*same)(i);
                    done[i].set_value();
                });
            }
            for (std::promise<void>& one : done) one.get_future().wait();
        });
    }
}

/// Threads that take what they are given, one after the other; a host's pool, of which an executor may be made.
class Pool {
  public:
    explicit Pool(std::size_t threads) {
        for (std::size_t i = 0; i < threads; ++i) {
            threads_.emplace_back([this] {
                for (;;) {
                    std::function<void()> next;
                    {
                        std::unique_lock lock(mutex_);
                        changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
                        if (waiting_.empty()) return;
                        next = std::move(waiting_.front());
                        waiting_.erase(waiting_.begin());
                    }
                    next();
                }
            });
        }
    }
    ~Pool() {
        {
            const std::lock_guard lock(mutex_);
            closed_ = true;
        }
        changed_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    void add(std::function<void()> task) {
        {
            const std::lock_guard lock(mutex_);
            waiting_.push_back(std::move(task));
        }
        changed_.notify_one();
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::function<void()>> waiting_;
    bool closed_ = false;
    std::vector<std::thread> threads_;
};

/// A loop is run by its caller, and by those of the pool that come in time: nobody waits for a thread that is busy.
class PoolExecutor final : public Executor {
  public:
    PoolExecutor(Pool& pool, std::size_t helpers) : pool_(&pool), helpers_(helpers) {}
    std::size_t concurrency() const noexcept override { return helpers_ + 1; }
    void run(std::size_t tasks, Body body, void* state) override {
        struct Loop {
            std::atomic<std::size_t> next{0};
            std::atomic<std::size_t> done{0};
            std::atomic<std::size_t> workers{1};
        };
        const auto loop = std::make_shared<Loop>();
        const auto work = [=](std::size_t worker) {
            for (std::size_t task = loop->next++; task < tasks; task = loop->next++) {
                body(state, task, worker);
                ++loop->done;
                loop->done.notify_all();
            }
        };
        for (std::size_t i = 0; i < helpers_; ++i) {
            pool_->add([=] {
                if (loop->next.load() < tasks) work(loop->workers++);
            });
        }
        work(0);
        for (std::size_t done = loop->done.load(); done < tasks; done = loop->done.load()) loop->done.wait(done);
    }

  private:
    Pool* pool_;
    std::size_t helpers_;
};

TEST(ThreadsTest, CallsOnAHostsPoolThatAlsoRunsTheirLoops) {
    serial();
    Pool pool(emulated() ? 2 : 4);
    const auto tbb_context = make_context(available_isas().back(), 2);
    const auto pool_context = context_of(std::make_shared<PoolExecutor>(pool, 3));
    for (Context* context : {tbb_context.get(), pool_context.get()}) {
        watched([&] {
            const std::size_t calls = jobs().size() * (emulated() ? 1 : 3);
            std::vector<std::promise<void>> done(calls);
            for (std::size_t i = 0; i < calls; ++i) {
                pool.add([&, i] {
                    check_job(*context, i % jobs().size());
                    done[i].set_value();
                });
            }
            for (std::promise<void>& one : done) one.get_future().wait();
        });
    }
}

// --------------------------------------------------------------------------------------------- what ends in between

/// Passes loops on, and does something before the n-th task is run.
class Interposed final : public Executor {
  public:
    Interposed(std::shared_ptr<Executor> inner, std::size_t at, std::function<void()> act)
        : inner_(std::move(inner)), at_(at), act_(std::move(act)) {}
    std::size_t concurrency() const noexcept override { return inner_->concurrency(); }
    std::size_t worker_slots() const noexcept override { return inner_->worker_slots(); }
    void run(std::size_t tasks, Body body, void* state) override {
        struct Both {
            Interposed* self;
            Body body;
            void* state;
        } both{this, body, state};
        inner_->run(
            tasks,
            [](void* s, std::size_t task, std::size_t worker) noexcept {
                const Both& b = *static_cast<Both*>(s);
                if (b.self->seen_++ == b.self->at_) b.self->act_();
                b.body(b.state, task, worker);
            },
            &both);
    }
    std::size_t seen() const noexcept { return seen_.load(); }

  private:
    std::shared_ptr<Executor> inner_;
    std::size_t at_;
    std::function<void()> act_;
    std::atomic<std::size_t> seen_{0};
};

/// A call of many tasks over a cache.
struct LongCall {
    TokenRows rows{};
    Tokens tokens = tokens_up_to(emulated() ? 600 : 2000);
    std::size_t queries = emulated() ? 100 : 500;

    KvCache cache() const {
        KvCacheOptions options;
        options.shape = rows.shape({});
        KvCache filled(options);
        const auto context = make_context(available_isas().back(), 1);
        rows.append(*context, filled, tokens, 0, tokens.size(), 0);
        return filled;
    }
    std::vector<float> run(Context& context, const KvCache& over, std::stop_token stop = {}) const {
        AttentionOptions options;
        options.stop = std::move(stop);
        return rows.attend(context, over, tokens, queries, 0, options);
    }
};

// A stop from inside the call's own loop, so that it comes when the call is under way: after the first task, or late.
TEST(ThreadsTest, OneOfManyCallsIsCancelledByAnotherThread) {
    const LongCall call;
    const KvCache cache = call.cache();
    const auto counting = std::make_shared<Interposed>(make_tbb_executor(2), ~std::size_t{0}, [] {});
    const std::vector<float> expected = call.run(*context_of(counting), cache);
    const std::size_t tasks = counting->seen();
    ASSERT_GT(tasks, 3U);
    const auto bystanders = make_context(available_isas().back(), 2);
    for (const std::size_t at : {std::size_t{0}, std::size_t{1}, tasks / 2, tasks - 1}) {
        SCOPED_TRACE(at);
        std::stop_source source;
        // another thread asks, and the task goes on once it has
        const auto stopper = std::make_shared<Interposed>(make_tbb_executor(2), at,
                                                          [&] { std::thread([&] { source.request_stop(); }).join(); });
        const auto context = context_of(stopper);
        on_threads(4, [&](std::size_t i) {
            if (i > 0) {
                EXPECT_TRUE(same_bits(call.run(*bystanders, cache), expected));
                return;
            }
            const std::string message =
                refusal([&] { call.run(*context, cache, source.get_token()); }, ErrorCode::cancelled);
            EXPECT_TRUE(says(message, "the stop token asked"));
        });
        EXPECT_TRUE(same_bits(call.run(*context, cache), expected)) << "the context is as it was";
        EXPECT_EQ(cache.length(), static_cast<std::int64_t>(call.tokens.size()));
    }
    // one context, of whose calls every second one is cancelled, at any time
    std::atomic<int> completed{0};
    on_threads(many(), [&](std::size_t i) {
        for (int n = 0; n < (emulated() ? 1 : 5); ++n) {
            std::stop_source source;
            std::thread other;
            if (i % 2 == 1) other = std::thread([&] { source.request_stop(); });
            try {
                EXPECT_TRUE(same_bits(call.run(*bystanders, cache, source.get_token()), expected));
                ++completed;
            } catch (const Cancelled&) {
                EXPECT_EQ(i % 2, 1U) << "nobody asked";
            }
            if (other.joinable()) other.join();
        }
    });
    EXPECT_GE(completed.load(), static_cast<int>(many() / 2) * (emulated() ? 1 : 5));
}

/// What a host's own code may throw: no error of the library's, and not of the standard's.
struct HostsFault {
    int number;
};

/// Throws in a loop: before it, in the midst of it when some tasks have been run, or behind it.
class ThrowingExecutor final : public Executor {
  public:
    enum class When : std::uint8_t { before, between, behind, never };
    explicit ThrowingExecutor(std::shared_ptr<Executor> inner) : inner_(std::move(inner)) {}
    std::size_t concurrency() const noexcept override { return inner_->concurrency(); }
    std::size_t worker_slots() const noexcept override { return inner_->worker_slots(); }
    /// In the n-th loop from now.
    void throw_in(int loop, When when) {
        loop_ = loop;
        when_ = when;
    }
    void run(std::size_t tasks, Body body, void* state) override {
        const bool now = loop_-- == 0;
        if (now && when_ == When::before) throw HostsFault{1};
        inner_->run(now && when_ == When::between ? tasks / 2 : tasks, body, state);
        if (now && when_ != When::never) throw HostsFault{when_ == When::between ? 2 : 3};
    }

  private:
    std::shared_ptr<Executor> inner_;
    std::atomic<int> loop_{-1};
    When when_ = When::never;
};

TEST(ThreadsTest, WhatAnExecutorThrowsReachesTheCallerAndLeavesAllUsable) {
    using When = ThrowingExecutor::When;
    serial();
    for (const std::size_t threads : {1U, 2U}) {
        const auto executor =
            std::make_shared<ThrowingExecutor>(threads == 1 ? make_serial_executor() : make_tbb_executor(threads));
        const auto context = context_of(executor);
        for (std::size_t job = 0; job < jobs().size(); ++job) {
            SCOPED_TRACE(jobs()[job].name);
            int loops = 0;
            for (;; ++loops) {
                bool thrown = false;
                for (const When when : {When::before, When::between, When::behind}) {
                    executor->throw_in(loops, when);
                    try {
                        static_cast<void>(jobs()[job].run(*context));
                    } catch (const HostsFault& fault) {
                        thrown = true;
                        EXPECT_EQ(fault.number, when == When::before ? 1 : when == When::between ? 2 : 3);
                    }
                    if (!thrown) break;
                }
                executor->throw_in(-1, When::never);
                check_job(*context, job);
                if (!thrown || HasFailure()) break;
                if (emulated() && loops == 2) break;
            }
            EXPECT_GT(loops, 0) << "no loop of it went to the executor";
        }
    }
}

// What an append would have added is not there, and the next one is as if the first had not been.
TEST(ThreadsTest, AnAppendWhoseExecutorThrowsLeavesTheCache) {
    using When = ThrowingExecutor::When;
    const TokenRows rows{.kv_heads = 2, .group = 2, .head_dim = 64, .value_dim = 64};
    const Tokens tokens = tokens_up_to(400);
    const auto executor = std::make_shared<ThrowingExecutor>(make_tbb_executor(2));
    const auto context = context_of(executor);
    for (const bool ring : {false, true}) {
        for (const bool turned : {false, true}) {
            KvCacheOptions options;
            options.shape = rows.shape({KvType::int8, KvType::f32});
            options.ring = ring;
            options.sink_tokens = 5;
            options.f16_sinks = true;
            if (ring) options.capacity = 150;
            if (turned) options.rotary = Rotary({.head_dim = 64});
            const auto filled = [&] {
                KvCache cache(options);
                rows.append(*context, cache, tokens, 0, 120, 0);
                return cache;
            };
            KvCache undisturbed = filled();
            rows.append(*context, undisturbed, tokens, 120, 280, 0);
            const std::vector<float> expected = rows.attend(*context, undisturbed, tokens, 10, 0);
            for (int loop = 0;; ++loop) {
                bool thrown = false;
                for (const When when : {When::before, When::between, When::behind}) {
                    KvCache cache = filled();
                    const KvCache fork = cache.fork();  // whose blocks the append must copy
                    executor->throw_in(loop, when);
                    try {
                        rows.append(*context, cache, tokens, 120, 280, 0);
                    } catch (const HostsFault&) {
                        thrown = true;
                        EXPECT_EQ(cache.length(), 120);
                        executor->throw_in(-1, When::never);
                        rows.append(*context, cache, tokens, 120, 280, 0);
                    }
                    executor->throw_in(-1, When::never);
                    EXPECT_TRUE(same_bits(rows.attend(*context, cache, tokens, 10, 0), expected));
                }
                if (!thrown) {
                    EXPECT_GT(loop, 0);
                    break;
                }
            }
        }
    }
}

/// A host's memory that throws what is its own, from the n-th allocation on.
class ThrowingResource final : public std::pmr::memory_resource {
  public:
    void throw_after(int allocations) { left_ = allocations; }
    void never_throw() { left_ = -1; }
    std::int64_t live() const noexcept { return live_.load(); }

  private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        int left = left_.load();
        while (left >= 0 && !left_.compare_exchange_weak(left, left > 0 ? left - 1 : 0)) {
        }
        if (left == 0) throw HostsFault{4};
        void* const memory = std::pmr::new_delete_resource()->allocate(bytes, alignment);
        live_ += static_cast<std::int64_t>(bytes);
        return memory;
    }
    void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
        live_ -= static_cast<std::int64_t>(bytes);
        std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
    }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

    std::atomic<int> left_{-1};
    std::atomic<std::int64_t> live_{0};
};

TEST(ThreadsTest, WhatAMemoryResourceThrowsReachesTheCallerAndLeavesAllUsable) {
    serial();
    ThrowingResource memory;
    for (std::size_t job = 0; job < jobs().size(); ++job) {
        SCOPED_TRACE(jobs()[job].name);
        int failures = 0;
        for (;; ++failures) {
            ASSERT_LT(failures, 100);
            const auto context = context_of(make_tbb_executor(2), &memory);
            memory.throw_after(failures);
            bool thrown = false;
            try {
                static_cast<void>(jobs()[job].run(*context));
            } catch (const HostsFault& fault) {
                thrown = true;
                EXPECT_EQ(fault.number, 4);
            }
            memory.never_throw();
            check_job(*context, job);
            if (!thrown) break;
        }
        EXPECT_GT(failures, 0) << "it took no memory";
    }
    EXPECT_EQ(memory.live(), 0);
}

// A pool whose memory ends for a while, used by all at once: each call is whole, or refused and as if it had not been.
TEST(ThreadsTest, CachesOfAPoolThatRunsOutForAWhile) {
    const TokenRows rows{.kv_heads = 2, .group = 1, .head_dim = 16, .value_dim = 16};
    const Tokens tokens = tokens_up_to(emulated() ? 200 : 600);
    ThrowingResource memory;
    CountingResource counted;
    for (std::pmr::memory_resource* resource :
         {static_cast<std::pmr::memory_resource*>(&memory), static_cast<std::pmr::memory_resource*>(&counted)}) {
        const auto context = make_context(available_isas().back(), 2);
        KvCacheOptions options;
        options.shape = rows.shape({});
        options.pool = std::make_shared<BlockPool>(options.shape, resource);
        KvCache alone(options);
        rows.append(*context, alone, tokens, 0, tokens.size(), 0);
        const std::vector<float> expected = rows.attend(*context, alone, tokens, 9, 0);
        std::atomic<int> refused{0};
        std::atomic<bool> scarce{true};
        memory.throw_after(0);
        counted.fail_after(0);
        on_threads(emulated() ? 3 : 8, [&](std::size_t i) {
            std::optional<KvCache> cache;
            std::size_t first = 0;
            while (first < tokens.size()) {
                const std::size_t n = std::min<std::size_t>(64, tokens.size() - first);
                try {
                    if (!cache) cache.emplace(options);
                    rows.append(*context, *cache, tokens, first, n, 0);
                    first += n;
                } catch (const OutOfMemory&) {
                    ++refused;
                } catch (const HostsFault&) {
                    ++refused;
                }
                if (cache) {
                    EXPECT_EQ(cache->length(), static_cast<std::int64_t>(first));
                }
                if (i == 0 && refused.load() >= 20 && scarce.exchange(false)) {
                    memory.never_throw();
                    counted.never_fail();
                }
            }
            EXPECT_TRUE(same_bits(rows.attend(*context, *cache, tokens, 9, 0), expected));
        });
        EXPECT_GE(refused.load(), 20);
    }
}

}  // namespace
}  // namespace headlong::test
