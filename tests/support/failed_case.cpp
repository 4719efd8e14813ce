#include "tests/support/failed_case.hpp"

#include <cstdlib>
#include <exception>
#include <filesystem>

#include <gtest/gtest-spi.h>

#include "tests/support/case_writer.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/shrink.hpp"

namespace headlong::test {
namespace {

std::filesystem::path failed_cases_folder() {
    const char* named = std::getenv("HEADLONG_FAILED_CASES");
    const std::filesystem::path folder = named != nullptr && *named != '\0'
                                             ? std::filesystem::path(named)
                                             : std::filesystem::temp_directory_path() / "headlong-failed-cases";
    std::filesystem::create_directories(folder);
    return folder;
}

/// Dense, as files hold it, and what the reference makes of it.
struct Filed {
    AttentionCase c;
    Expected want;

    Filed(const AttentionCase& original, bool poisoned) : c(original) {
        for (const Part part : {Part::query, Part::key, Part::value, Part::mask}) {
            if (part != Part::mask || c.mask) c = with_copy_of(c, part, element_of(c, part), true);
        }
        c.cache = {};
        want = expected(c, reference::Scores::masked);
        Random random(1);
        if (poisoned) poison_dead_keys(c, want, random);
    }

    /// What `verify` computes, as it does.
    bool fails(Isa isa) const {
        for (std::int64_t s = 0; s < (c.uniform() ? 1 : c.sequences()); ++s) {
            const AttentionCase each = c.uniform() ? c : sequence_of(c, s);
            const Expected own = c.uniform() ? want : expected(each);
            for (const Route route : {Route::plain, Route::cache}) {
                if (possible(each, route) && !agrees(each, run(shared_context(isa), each, route), own)) return true;
            }
        }
        return false;
    }
};

bool fails_in_a_file(const AttentionCase& c, bool poisoned, Isa isa) {
    testing::TestPartResultArray results;  // of run(): what was written beside the outputs
    testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    try {
        return Filed(c, poisoned).fails(isa) || results.size() != 0;
    } catch (const std::exception&) {
        return true;
    }
}

}  // namespace

std::string shrink_and_write(const AttentionCase& c, const std::string& name, Isa isa,
                             const std::function<bool(const AttentionCase&)>& still_fails) {
    bool in_a_file = false;
    bool poisoned = false;
    for (const bool with_poison : {false, true}) {
        if (in_a_file || !fails_in_a_file(c, with_poison, isa)) continue;
        in_a_file = true;
        poisoned = with_poison;
    }
    const AttentionCase small =
        in_a_file ? shrink(c, [&](const AttentionCase& less) { return fails_in_a_file(less, poisoned, isa); })
                  : shrink(c, still_fails);
    std::string text = "shrunk to: " + small.describe() + "\n";
    if (!in_a_file) {
        text +=
            "which fails, but not as files say it: dense, on one thread, over plain tensors and through a cache of "
            "f32\n";
    }
    const Filed filed(small, poisoned);
    for (const std::filesystem::path& path : write_case(failed_cases_folder(), name, filed.c, filed.want)) {
        text +=
            std::string("headlong verify --isa ") + headlong::to_string(isa) + " --threads 1 '" + path.string() + "'\n";
    }
    return text;
}

}  // namespace headlong::test
