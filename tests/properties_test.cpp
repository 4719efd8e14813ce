// Random combinations of everything that attention does, against the double-precision reference: features, shapes,
// strides, element types, and the ways to call it. What no row sees holds NaN or infinity, holes hold canaries, guard
// pages surround everything. Each draw also checks one relation that must hold to the bit (or, for merged parts, within
// the bounds), and instruction sets of one family are held against each other. Each draw has a seed of its own:
// HEADLONG_SEED=<the printed one> HEADLONG_DRAWS=1 replays it alone. A draw that fails is shrunk and left in a file
// that `headlong verify` replays (failed_case.hpp says where).
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>

#include "tests/support/any_tensor.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/buffers.hpp"
#include "tests/support/draw_case.hpp"
#include "tests/support/failed_case.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

std::size_t draw_threads(Random& random) {
    // mostly one: threads show in few ways, and on few processors their wake-ups cost more than the draws
    return random.chance(0.8) ? 1 : static_cast<std::size_t>(random.integer(2, 3));
}

/// Another computation of the same rows.
void check_relation(const AttentionCase& c, Route route, const Outcome& outcome, Isa isa, Random& random) {
    Context& context = shared_context(isa, draw_threads(random));
    const bool tree = c.mask && c.mask->keys == AttentionMask::Keys::last_q;
    const std::int64_t which = random.integer(0, 6);
    if (which == 1) {
        SCOPED_TRACE(std::string(to_string(route)) + " on 1 and 3 threads");
        EXPECT_TRUE(
            same_bits(run(shared_context(isa, 1), c, route, &random), run(shared_context(isa, 3), c, route, &random)));
        return;
    }
    if (which == 2 && can_run_in_chunks(c)) {
        SCOPED_TRACE("in chunks through a cache");
        EXPECT_TRUE(same_bits(outcome, run_in_chunks(context, c, 0, &random)));
        return;
    }
    if (which >= 3 && c.sequences() > 0) {
        const std::int64_t s = random.integer(0, c.sequences() - 1);
        const AttentionCase one = sequence_of(c, s);
        const Outcome own = sequence_of(c, outcome, s);
        const std::vector<Route> routes = possible_routes(one);
        if (which == 3 || (tree && which != 5)) {
            const Route alone = random.pick(routes);
            SCOPED_TRACE("sequence " + std::to_string(s) + " alone: " + to_string(alone));
            EXPECT_TRUE(same_bits(own, run(context, one, alone, &random)));
        } else if (which == 4) {
            const std::int64_t first = random.integer(0, one.q_lens[0]);
            const std::int64_t count = random.integer(0, one.q_lens[0] - first);
            const Route alone = random.pick(routes);
            SCOPED_TRACE("rows " + std::to_string(first) + " to " + std::to_string(first + count) + " of sequence " +
                         std::to_string(s) + " alone: " + to_string(alone));
            EXPECT_TRUE(
                same_bits(rows_of(one, own, first, count), run(context, rows_of(one, first, count), alone, &random)));
        } else if (const std::int64_t prefix = random.integer(0, one.live_of(0));
                   which == 5 && can_share_prefix(one, prefix)) {
            SCOPED_TRACE("sequence " + std::to_string(s) + ", " + std::to_string(prefix) + " keys as a shared prefix");
            EXPECT_TRUE(close(one, run_with_shared_prefix(context, one, prefix), own, expected(one)));
        } else if (!tree) {
            std::vector<std::int64_t> cuts;
            for (std::int64_t i = random.integer(1, 4); i > 0; --i) cuts.push_back(random.integer(0, one.kv_lens[0]));
            std::sort(cuts.begin(), cuts.end());
            SCOPED_TRACE("sequence " + std::to_string(s) + " merged from " + std::to_string(cuts.size() + 1) +
                         " parts");
            const auto sink = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(cuts.size())));
            EXPECT_TRUE(close(one, run_merged(context, one, cuts, sink), own, expected(one)));
        }
        return;
    }
    const Route other = random.pick(possible_routes(c));
    SCOPED_TRACE(std::string(to_string(route)) + " and " + to_string(other));
    EXPECT_TRUE(same_bits(outcome, run(context, c, other, &random)));
}

std::optional<Outcome> check_on(Isa isa, const AttentionCase& c, const Expected& want, Random& random) {
    const std::vector<Route> routes = possible_routes(c);
    if (routes.empty()) return std::nullopt;
    const Route route = random.pick(routes);
    const std::size_t threads = draw_threads(random);
    SCOPED_TRACE(std::string(to_string(route)) + ", " + std::to_string(threads) + " threads");
    const Outcome outcome = run(shared_context(isa, threads), c, route, &random);
    EXPECT_TRUE(agrees(c, outcome, want));
    check_relation(c, route, outcome, isa, random);
    return outcome;
}

/// A matrix of scores against the reference's, plainly and over a cache.
void check_scores(Isa isa, const AttentionCase& c, ScoreStage stage, Random& random) {
    Context& context = shared_context(isa, draw_threads(random));
    const auto which = static_cast<reference::Scores>(stage);
    // Of all pairs: what is not allowed has a score as well, and its size counts
    AttentionCase open = c;
    const bool all_pairs = stage == ScoreStage::scaled || stage == ScoreStage::softcapped;
    if (all_pairs) {
        open.causal = false;
        open.features.window_left = open.features.window_right = -1;
        open.mask.reset();
        open.live.clear();
    }
    const Expected want = expected(open, which);
    const AttentionCase one = c.sequences() > 0 ? sequence_of(c, 0) : c;
    const bool over_cache = c.sequences() > 0 && random.chance(0.5) && possible(c, Route::cache);
    if (!over_cache && !c.uniform()) return;
    const Element element = draw_element(random);
    const std::int64_t sequences = over_cache ? 1 : c.sequences();
    const auto scores = AnyTensor<4>::random(
        element,
        {sequences, c.heads, over_cache ? one.q_lens[0] : c.longest_q(), over_cache ? one.kv_lens[0] : c.longest_kv()},
        random);
    SCOPED_TRACE("scores, stage " + std::to_string(static_cast<int>(stage)) + (over_cache ? ", over a cache" : ""));
    if (over_cache) {
        KvCacheOptions options;
        options.shape = c.cache_shape();
        KvCache cache(options);
        const auto of = [](const InputTensor<4>& view) {
            return InputTensor<3>{view.data,
                                  view.dtype,
                                  {view.extents[1], view.extents[2], view.extents[3]},
                                  {view.strides[1], view.strides[2], view.strides[3]}};
        };
        cache.append(context, 0, of(one.key), of(one.value));
        const OutputTensor<4> all = scores.output();
        attention_scores(context, of(one.query), cache, 0, one.options(), stage,
                         OutputTensor<3>{all.data,
                                         all.dtype,
                                         {all.extents[1], all.extents[2], all.extents[3]},
                                         {all.strides[1], all.strides[2], all.strides[3]}});
    } else {
        attention_scores(context, c.query, c.key, c.options(), stage, scores.output());
    }
    EXPECT_TRUE(scores.written_exactly()) << scores.describe();
    const double factor = stage == ScoreStage::weights ? 2.0 : 1.0;  // of a score and of their sum
    std::size_t wrong = 0;
    for_each_index<4>(scores.extents(), [&](const Extents<4>& i) {
        const reference::AttentionResult& part = want.parts[c.uniform() ? 0 : static_cast<std::size_t>(i[0])];
        const double expected_score = part.scores.at(i[0], i[1], i[2], i[3]);
        // a biased score is rounded at its own size, however little it weighs
        const double size = std::isfinite(expected_score) ? std::abs(expected_score) : 0.0;
        double bound = factor * lse_tolerance(part.magnitudes) + 4.0 * 0x1p-24 * size;
        bound += half_ulp(dtype_of(element), std::abs(expected_score) + bound);
        const double got = scores.get(i);
        const double rounded = value_of(element, bits_of(element, expected_score));  // infinite beyond float16
        const bool fits = got == rounded || std::abs(got - expected_score) <= bound ||
                          (std::isnan(got) && std::isnan(expected_score));
        if (fits || wrong++ != 0) return;
        ADD_FAILURE() << "at " << i[0] << " " << i[1] << " " << i[2] << " " << i[3] << ": got " << got << ", want "
                      << expected_score << ", allowed " << bound;
    });
    EXPECT_EQ(wrong, 0U);
}

/// A case, and what is looked at beside its outputs.
struct Draw {
    std::uint64_t seed;
    Random random;
    AttentionCase c;
    bool with_scores;
    ScoreStage stage;

    explicit Draw(std::uint64_t of) : seed(of), random(of), c(draw_case(random)) {
        if (random.chance(0.05)) draw_visible_nan(c, random);
        with_scores = random.chance(0.1);
        stage = static_cast<ScoreStage>(random.integer(0, 3));
    }
};

/// Sets of one family have the same arithmetic in floats, and integers only in codes, of which no cache here is.
bool of_one_family(Isa a, Isa b) {
    const auto family = [](Isa isa) {
        return isa == Isa::avx2vnni     ? Isa::avx2
               : isa == Isa::avx512vnni ? Isa::avx512
               : isa == Isa::neondot    ? Isa::neon
                                        : isa;
    };
    return family(a) == family(b);
}

/// Writes to the case's dead keys.
void check(Draw draw, const std::vector<Isa>& isas) {
    AttentionCase& c = draw.c;
    SCOPED_TRACE(c.describe());
    const Expected want = expected(c, reference::Scores::masked);
    const bool all_pairs = draw.stage == ScoreStage::scaled || draw.stage == ScoreStage::softcapped;
    // what an instruction set draws does not depend on which others there are
    const auto own = [&](Isa isa) { return Random(draw.seed ^ (static_cast<std::uint64_t>(isa) + 1) << 56U); };
    if (draw.with_scores && all_pairs) {
        for (const Isa isa : isas) {
            SCOPED_TRACE(to_string(isa));
            Random random = own(isa);
            check_scores(isa, c, draw.stage, random);
        }
    }
    poison_dead_keys(c, want, draw.random);
    std::vector<std::pair<Isa, Outcome>> outcomes;
    for (const Isa isa : isas) {
        SCOPED_TRACE(to_string(isa));
        Random random = own(isa);
        if (std::optional<Outcome> outcome = check_on(isa, c, want, random)) {
            // By whatever road: they are the same bits. Of other sets no more is promised than the reference has seen.
            for (const auto& [other, others] : outcomes) {
                if (!of_one_family(isa, other)) continue;
                SCOPED_TRACE(std::string("against ") + to_string(other));
                EXPECT_TRUE(same_bits(*outcome, others));
            }
            outcomes.emplace_back(isa, *std::move(outcome));
        }
        if (draw.with_scores && !all_pairs) check_scores(isa, c, draw.stage, random);
    }
}

/// The messages of what fails in a check.
std::vector<std::string> failures_of(const Draw& draw, const std::vector<Isa>& isas) {
    testing::TestPartResultArray results;
    std::vector<std::string> failures;
    try {
        const testing::ScopedFakeTestPartResultReporter reporter(
            testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
        check(draw, isas);
    } catch (const std::exception& error) {
        failures.push_back(std::string("threw: ") + error.what());
    }
    for (int i = 0; i < results.size(); ++i) {
        if (results.GetTestPartResult(i).failed()) failures.emplace_back(results.GetTestPartResult(i).message());
    }
    return failures;
}

/// Fails with all there is to know about a draw that has failed: its seed, and a smaller case in a file.
void report(std::uint64_t seed, const std::vector<std::string>& failures) {
    const std::string replay = "HEADLONG_SEED=" + std::to_string(seed) + " HEADLONG_DRAWS=1";
    std::fprintf(stderr, "%s fails; shrinking it\n", replay.c_str());
    const Draw draw(seed);
    std::vector<Isa> isas = available_isas();
    for (const Isa isa : available_isas()) {
        Draw again = draw;
        again.c = with_own_memory(draw.c);
        if (isas.size() > 1 && !failures_of(again, {isa}).empty()) isas = {isa};
    }
    const auto still_fails = [&](const AttentionCase& c) {
        // other roads and layouts as well: the ones that were drawn mean something else in a smaller case
        for (std::uint64_t attempt = 0; attempt < 4; ++attempt) {
            Draw smaller = draw;
            smaller.c = with_own_memory(c);
            smaller.seed += attempt;
            if (!failures_of(smaller, isas).empty()) return true;
        }
        return false;
    };
    std::string text = replay + " replays this:\n";
    for (const std::string& failure : failures) text += failure + "\n";
    ADD_FAILURE() << text << shrink_and_write(draw.c, "seed-" + std::to_string(seed), isas.back(), still_fails);
}

std::uint64_t draws_or(std::uint64_t usual) {
    const char* text = std::getenv("HEADLONG_DRAWS");
    return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 0) : usual;
}

/// Says which draw ends the process, if a signal does: a guard page was touched, or an instruction is not there. (Not
/// where sanitizers have handlers of their own: tools/check draws without.)
class NamesDrawOfCrash {
  public:
    NamesDrawOfCrash() {
        for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) std::signal(signal, end);
    }
    ~NamesDrawOfCrash() {
        for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) std::signal(signal, SIG_DFL);
    }
    NamesDrawOfCrash(const NamesDrawOfCrash&) = delete;
    NamesDrawOfCrash& operator=(const NamesDrawOfCrash&) = delete;

    static void set(std::uint64_t seed) {
        std::snprintf(text_, sizeof text_, "HEADLONG_SEED=%llu HEADLONG_DRAWS=1 crashed\n",
                      static_cast<unsigned long long>(seed));
    }

  private:
    static void end(int signal) {
        const ssize_t ignored = ::write(STDERR_FILENO, text_, std::strlen(text_));
        static_cast<void>(ignored);
        std::signal(signal, SIG_DFL);
        std::raise(signal);
    }
    static inline char text_[80] = {};
};

TEST(PropertiesTest, RandomCombinationsOfFeatures) {
    const std::uint64_t first = seed_or(20250000);
    const std::uint64_t draws = draws_or(emulated() ? 200 : 2000);
    const bool progress = std::getenv("HEADLONG_PROGRESS") != nullptr;  // tools/check
    const GuardedBytes::Reuse reuse;
    std::optional<NamesDrawOfCrash> names;
    if (progress) names.emplace();
    for (std::uint64_t i = 0; i < draws && !HasFailure(); ++i) {
        NamesDrawOfCrash::set(first + i);
        const std::vector<std::string> failures = failures_of(Draw(first + i), available_isas());
        if (!failures.empty()) report(first + i, failures);
        if (progress && (i + 1) % 1000 == 0) {
            std::fprintf(stderr, "%llu of %llu draws from seed %llu on\n", static_cast<unsigned long long>(i + 1),
                         static_cast<unsigned long long>(draws), static_cast<unsigned long long>(first));
        }
    }
}

}  // namespace
}  // namespace headlong::test
