// What becomes of a case that fails: it is shrunk to a small one, and written as a file that `headlong verify` replays.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <headlong/headlong.hpp>

#include "tests/support/attention_case.hpp"
#include "tests/support/case_writer.hpp"
#include "tests/support/command_line.hpp"
#include "tests/support/draw_case.hpp"
#include "tests/support/failed_case.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/shrink.hpp"
#include "tests/support/write_safetensors.hpp"

namespace headlong::test {
namespace {

/// A case with everything on: two ragged sequences of 16-bit rows with strides.
AttentionCase case_with_everything(Random& random) {
    AttentionCase c;
    c.heads = 6;
    c.kv_heads = 2;
    c.head_dim = 21;
    c.value_dim = 16;
    c.q_lens = {7, 3};
    c.kv_lens = {40, 33};
    c.live = {39, 33};
    c.causal = true;
    c.features.alignment = Alignment::offset;
    c.features.causal_offset = 30;
    c.features.window_left = 25;
    c.features.window_right = 3;
    c.features.softcap = 5.0F;
    c.features.scale = 0.3F;
    c.alibi_slopes = alibi_slopes_for(c.heads);
    c.sink_logits = std::vector<float>(6, 0.5F);
    c.output_type = DType::bf16;
    c.cache = {KvType::f16, KvType::bf16};
    fill_normal(c, random, true, Element::f16, Element::f16, Element::bf16);
    set_mask(c, Element::f16, {2, 6, 7, 40}, std::vector<double>(std::size_t{2} * 6 * 7 * 40, 0.25));
    return c;
}

/// What is left of a case if only one thing matters.
void expect_plain(const AttentionCase& c) {
    EXPECT_EQ(c.heads, 1);
    EXPECT_EQ(c.kv_heads, 1);
    EXPECT_EQ(c.head_dim, 1);
    EXPECT_EQ(c.value_dim, 1);
    EXPECT_EQ(c.q_lens, std::vector<std::int64_t>{1});
    EXPECT_FALSE(c.causal);
    EXPECT_EQ(c.features.alignment, Alignment::bottom_right);
    EXPECT_EQ(c.features.softcap, 0.0F);
    EXPECT_FALSE(c.features.scale);
    EXPECT_TRUE(c.alibi_slopes.empty());
    EXPECT_TRUE(c.sink_logits.empty());
    EXPECT_TRUE(c.live.empty());
    for (const Part part : {Part::query, Part::key, Part::value}) {
        EXPECT_EQ(element_of(c, part), Element::f32);
        EXPECT_TRUE(is_dense(c, part));
    }
    EXPECT_EQ(c.output_type, DType::f32);
    EXPECT_EQ(c.cache.keys, KvType::f32);
    EXPECT_EQ(c.cache.values, KvType::f32);
}

TEST(FailedCasesShrink, LeavesWhatTheFailureNeeds) {
    Random random(seed_or(20261201));
    HEADLONG_TRACE_SEED(random);
    const AttentionCase c = case_with_everything(random);

    const AttentionCase window = shrink(
        c, [](const AttentionCase& less) { return less.features.window_left >= 2 && less.kv_lens.back() >= 17; });
    SCOPED_TRACE(window.describe());
    expect_plain(window);
    EXPECT_EQ(window.kv_lens, std::vector<std::int64_t>{17});
    EXPECT_EQ(window.features.window_left, 2);
    EXPECT_EQ(window.features.window_right, -1);
    EXPECT_FALSE(window.mask);

    const AttentionCase mask = shrink(c, [](const AttentionCase& less) { return less.mask.has_value(); });
    SCOPED_TRACE(mask.describe());
    expect_plain(mask);
    EXPECT_EQ(mask.kv_lens, std::vector<std::int64_t>{1});
    ASSERT_TRUE(mask.mask);
    EXPECT_EQ(mask.mask->rank, 1U);
    EXPECT_EQ(mask.mask->type, AttentionMask::Type::boolean);
    EXPECT_EQ(mask.features.window_left, -1);

    const AttentionCase heads = shrink(c, [](const AttentionCase& less) {
        return less.heads == 3 * less.kv_heads && less.kv_heads == 2 && less.sink_logits.size() == 6;
    });
    EXPECT_EQ(heads.heads, 6);
    EXPECT_EQ(heads.kv_heads, 2);
    EXPECT_TRUE(heads.alibi_slopes.empty());
    EXPECT_EQ(heads.kv_lens, std::vector<std::int64_t>{1});
}

TEST(FailedCasesShrink, KeepsTheNumbersOfWhatIsLeft) {
    Random random(seed_or(20261202));
    HEADLONG_TRACE_SEED(random);
    AttentionCase c = case_with_everything(random);
    // one key of one head of one sequence is what matters: no cut may lose it or move its number elsewhere
    const auto marked = [](const AttentionCase& less) {
        const auto keys = reference::widen(less.key).values;
        return std::ranges::count(keys, 1234.0) != 0;
    };
    c = with_copy_of(c, Part::key, Element::f16, true);
    const_cast<std::uint16_t*>(static_cast<const std::uint16_t*>(c.key.data))[((1 * 2 + 1) * 40 + 20) * 21 + 5] =
        static_cast<std::uint16_t>(reference::narrow_f16(1234.0));
    ASSERT_TRUE(marked(c));
    const AttentionCase small = shrink(c, marked);
    SCOPED_TRACE(small.describe());
    expect_plain(small);
    EXPECT_EQ(small.kv_lens, std::vector<std::int64_t>{1});
    EXPECT_EQ(reference::widen(small.key).values, std::vector<double>{1234.0});
}

TEST(FailedCasesShrink, AsksAboutValidCallsOnly) {
    Random random(seed_or(20261203));
    HEADLONG_TRACE_SEED(random);
    for (int i = 0; i < (emulated() ? 3 : 10); ++i) {
        const AttentionCase c = draw_case(random);
        SCOPED_TRACE(c.describe());
        Context& context = shared_context(available_isas().back());
        std::uint64_t asked = 0;
        shrink(c, [&](const AttentionCase& less) {
            ++asked;
            for (const Route route : possible_routes(less)) {
                try {
                    run(context, less, route);
                } catch (const Error& error) {
                    ADD_FAILURE() << to_string(route) << ": " << error.what() << ": " << less.describe();
                }
            }
            return asked % 3 == 0;
        });
    }
}

TEST(FailedCasesShrink, EndsWhereNothingMoreCanGo) {
    Random random(seed_or(20261207));
    HEADLONG_TRACE_SEED(random);
    for (int i = 0; i < 20; ++i) {
        const AttentionCase c = draw_case(random);
        SCOPED_TRACE(c.describe());
        const auto size_of_case = [](const AttentionCase& less) {
            return static_cast<std::int64_t>(less.rows()) * less.head_dim + less.longest_kv() + (less.causal ? 3 : 0) +
                   (less.mask ? 5 : 0);
        };
        const std::int64_t least = std::min<std::int64_t>(size_of_case(c), random.integer(1, 100));
        const auto fails = [&](const AttentionCase& less) { return size_of_case(less) >= least; };
        const AttentionCase small = shrink(c, fails);
        EXPECT_TRUE(fails(small)) << small.describe();
        const AttentionCase again = shrink(small, [&](const AttentionCase& less) {
            EXPECT_FALSE(fails(less)) << small.describe() << " could be " << less.describe();
            return false;
        });
        EXPECT_EQ(again.describe(), small.describe());

        std::size_t tries = 0;
        const auto counts = [&](const AttentionCase&) { return ++tries == 0; };
        shrink(c, counts, 7);
        EXPECT_LE(tries, 7U);
    }
}

class FailedCasesTest : public CommandLine {
  protected:
    int verify(const std::vector<std::filesystem::path>& paths) const {
        std::string arguments = "verify --json";
        for (const std::filesystem::path& path : paths) arguments += " '" + path.string() + "'";
        const Result result = run(arguments);
        const auto report = nlohmann::json::parse(result.out);
        EXPECT_EQ(report["skipped"], 0) << result.out;
        if (report["failed"] != 0) failures_ = result.out;
        return result.code;
    }
    mutable std::string failures_;
};

TEST_F(FailedCasesTest, IsWrittenAsVerifyReadsIt) {
    Random random(seed_or(20261204));
    HEADLONG_TRACE_SEED(random);
    std::vector<std::filesystem::path> paths;
    for (int i = 0; i < (emulated() ? 10 : 100); ++i) {
        AttentionCase c = draw_case(random);
        const Expected want = expected(c, reference::Scores::masked);
        poison_dead_keys(c, want, random);
        for (const auto& path : write_case(folder_, "draw-" + std::to_string(i), c, want)) paths.push_back(path);
    }
    EXPECT_EQ(verify(paths), 0) << failures_;
}

TEST_F(FailedCasesTest, FailsInVerifyIfItIsWrong) {
    Random random(seed_or(20261205));
    HEADLONG_TRACE_SEED(random);
    const AttentionCase c = sequence_of(case_with_everything(random), 0);
    const Expected want = expected(c);
    EXPECT_EQ(verify(write_case(folder_, "right", c, want)), 0) << failures_;

    Expected wrong = want;
    wrong.output.back() += 0.1;
    EXPECT_EQ(verify(write_case(folder_, "output", c, wrong)), 1);
    wrong = want;
    wrong.lse.front() += 0.01;
    EXPECT_EQ(verify(write_case(folder_, "lse", c, wrong)), 1);

    // and so does every feature, taken out of the call but not out of the answer
    std::vector<AttentionCase> without(9, c);
    without[0].causal = false;
    without[1].features.causal_offset -= 1;
    without[2].features.window_left = -1;
    without[3].features.softcap = 0.0F;
    without[4].features.scale.reset();
    without[5].alibi_slopes.clear();
    without[6].sink_logits.clear();
    without[7].live[0] = 30;
    without[8].mask.reset();
    for (std::size_t i = 0; i < without.size(); ++i) {
        SCOPED_TRACE(i);
        EXPECT_EQ(verify(write_case(folder_, "without", without[i], want)), 1);
    }
}

TEST_F(FailedCasesTest, AdditionsThatAreNotKnownAreNamed) {
    const auto one = [](const char* name) { return tensor_to_write<float>(name, "F32", {1, 1, 1, 1}, {1.0F}); };
    for (const auto& [key, value] : std::map<std::string, std::string>{{"attr.alignment", "sideways"},
                                                                       {"attr.mask_keys", "first_q"},
                                                                       {"attr.causal_offset", "1.5"},
                                                                       {"attr.through_cache", "yes"},
                                                                       {"atol.Y", "-1"}}) {
        SCOPED_TRACE(key);
        const std::string path = (folder_ / "case.safetensors").string();
        write_safetensors(path, {one("Q"), one("K"), one("V"), one("Y")}, {{"op", "Attention"}, {key, value}});
        const Result result = run("verify '" + path + "'");
        EXPECT_EQ(result.code, 1);
        EXPECT_TRUE(holds(result.out, key.substr(key.find('.') + 1)) || holds(result.out, "atol")) << result.out;
    }
}

TEST_F(FailedCasesTest, IsShrunkWrittenAndReplayed) {
    Random random(seed_or(20261206));
    HEADLONG_TRACE_SEED(random);
    const AttentionCase c = case_with_everything(random);
    ASSERT_EQ(::setenv("HEADLONG_FAILED_CASES", (folder_ / "failed").c_str(), 1), 0);
    const std::string text = shrink_and_write(c, "planted", available_isas().back(), [](const AttentionCase& less) {
        return less.features.softcap != 0.0F && less.kv_lens[0] >= 5;
    });
    ::unsetenv("HEADLONG_FAILED_CASES");
    const std::filesystem::path path = folder_ / "failed" / "planted.safetensors";
    EXPECT_TRUE(holds(text, "kv 5, ")) << text;
    EXPECT_TRUE(holds(text, "softcap 5")) << text;
    EXPECT_TRUE(holds(text, "but not as files say it")) << text;  // the library is right
    const std::string line = text.substr(text.find("headlong verify ") + 9);
    EXPECT_TRUE(holds(line, path.string())) << text;
    EXPECT_EQ(run(line.substr(0, line.find('\n'))).code, 0);
}

}  // namespace
}  // namespace headlong::test
