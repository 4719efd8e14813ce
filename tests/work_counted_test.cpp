// What is masked costs nothing: a call in which whole spans of keys are cut off (by a window, a length, causality or a
// mask) makes exactly the kernel calls that a call over the visible keys alone makes. Counted, not timed.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/context_impl.hpp"
#include "engine/isa.hpp"
#include "kernels/kernel_table.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {
namespace {

using kernels::KernelTable;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Calls of the kernels whose cost follows the keys, and the tokens that they were asked for.
struct Counts {
    std::size_t dot_calls = 0, dot_columns = 0;
    std::size_t softmax_calls = 0, softmax_tokens = 0;
    std::size_t weighted_calls = 0, weighted_tokens = 0;
    std::size_t pack_calls = 0, packed_rows = 0;
    friend bool operator==(const Counts&, const Counts&) = default;
    friend void PrintTo(const Counts& c, std::ostream* out) {
        *out << "dot " << c.dot_calls << " (" << c.dot_columns << " columns), softmax " << c.softmax_calls << " ("
             << c.softmax_tokens << " tokens), weighted " << c.weighted_calls << " (" << c.weighted_tokens
             << " tokens), pack " << c.pack_calls << " (" << c.packed_rows << " rows)";
    }
};

// The table's functions have no state of their own; the tests here are serial.
Counts counts;
const KernelTable* forward_to = nullptr;

KernelTable counting_table(Isa isa) {
    forward_to = &table_of(isa);
    KernelTable table = *forward_to;
    table.dot_panels = [](const kernels::DotPanels& p) noexcept {
        ++counts.dot_calls;
        counts.dot_columns += p.columns;
        forward_to->dot_panels(p);
    };
    table.softmax_span = [](const kernels::SoftmaxSpan& p) noexcept {
        ++counts.softmax_calls;
        counts.softmax_tokens += p.last - p.first;
        forward_to->softmax_span(p);
    };
    table.weighted_rows = [](const kernels::WeightedRows& p) noexcept {
        ++counts.weighted_calls;
        counts.weighted_tokens += p.last - p.first;
        forward_to->weighted_rows(p);
    };
    table.pack_panels = [](const kernels::PackPanels& p) noexcept {
        ++counts.pack_calls;
        counts.packed_rows += p.source.row_count;
        forward_to->pack_panels(p);
    };
    table.pack_values = [](const kernels::PackValues& p) noexcept {
        ++counts.pack_calls;
        counts.packed_rows += p.source.row_count;
        return forward_to->pack_values(p);
    };
    return table;
}

/// What one call costs on this instruction set.
Counts counted(Isa isa, const AttentionCase& c, Route route) {
    const KernelTable table = counting_table(isa);
    Context context(
        std::make_unique<Context::Impl>(table, isa, make_serial_executor(), *std::pmr::new_delete_resource()));
    if (route == Route::cache) {  // filling a cache packs everything, seen or not
        counts = {};
        const auto all = run(context, c, route);
        Counts result = counts;
        result.pack_calls = result.packed_rows = 0;
        return result;
    }
    counts = {};
    static_cast<void>(run(context, c, route));
    return counts;
}

/// `hidden` sees only the keys of `visible`.
void expect_same_work(const AttentionCase& hidden, const AttentionCase& visible,
                      const std::vector<Route>& routes = {Route::plain, Route::packed, Route::cache}) {
    HEADLONG_FOR_EACH_ISA(isa) {
        for (const Route route : routes) {
            const Counts want = counted(isa, visible, route);
            EXPECT_GT(want.dot_calls, 0U);
            EXPECT_EQ(counted(isa, hidden, route), want) << to_string(route);
        }
    }
}

constexpr std::int64_t kQ = 3;
constexpr std::int64_t kKv = 4 * 512;

/// Groups of 2, and nothing cut off yet.
AttentionCase whole_case(std::int64_t q_len = kQ, std::int64_t kv_len = kKv) {
    Random random(601);
    AttentionCase c;
    c.heads = 4;
    c.kv_heads = 2;
    c.head_dim = 5;
    c.value_dim = 3;
    c.q_lens = {q_len};
    c.kv_lens = {kv_len};
    fill_normal(c, random, false);
    return c;
}

TEST(WorkCountedTest, Lengths) {
    for (const std::int64_t length : {1, 63, 512, 600, 1536}) {
        AttentionCase hidden = whole_case();
        hidden.live = {length};
        expect_same_work(hidden, keys_of(whole_case(), 0, length));
    }
}

TEST(WorkCountedTest, Causality) {
    for (const std::int64_t offset : {0, 509, 512, 1000}) {
        AttentionCase hidden = whole_case();
        hidden.causal = true;
        hidden.features.alignment = Alignment::offset;
        hidden.features.causal_offset = offset;
        expect_same_work(hidden, keys_of(hidden, 0, offset + kQ));
    }
    // queries before all keys: no work at all
    AttentionCase nothing = whole_case();
    nothing.causal = true;
    nothing.features.alignment = Alignment::offset;
    nothing.features.causal_offset = -kQ;
    HEADLONG_FOR_EACH_ISA(isa) { EXPECT_EQ(counted(isa, nothing, Route::plain), Counts{}); }
}

TEST(WorkCountedTest, Windows) {
    // the last spans, seen from the end: the visible keys begin at a span's begin, so that spans are cut the same way
    for (const std::int64_t left : {5, 100, 511, 600}) {
        AttentionCase hidden = whole_case();
        hidden.features.window_left = left;
        hidden.features.window_right = 0;
        const std::int64_t first = (kKv - kQ - left) / 512 * 512;
        expect_same_work(hidden, keys_of(hidden, first, kKv - first));
    }
    // the first one, seen from the front
    AttentionCase hidden = whole_case();
    hidden.features.alignment = Alignment::top_left;
    hidden.features.window_right = 90;
    expect_same_work(hidden, keys_of(hidden, 0, kQ + 90));
}

TEST(WorkCountedTest, MasksOverWholeSpans) {
    for (const Element element : {Element::boolean, Element::f32, Element::f16, Element::bf16}) {
        const double yes = element == Element::boolean ? 1.0 : 0.0;
        const double no = element == Element::boolean ? 0.0 : -kInfinity;
        for (const auto& [from, to] : std::vector<std::pair<std::int64_t, std::int64_t>>{
                 {0, 512}, {0, 1024}, {1536, kKv}, {1024, kKv}, {0, 700}, {900, kKv}}) {
            for (const std::int64_t rows : {std::int64_t{1}, kQ}) {
                SCOPED_TRACE("dead from " + std::to_string(from) + " to " + std::to_string(to));
                std::vector<double> values;
                for (std::int64_t i = 0; i < rows; ++i) {
                    for (std::int64_t j = 0; j < kKv; ++j) values.push_back(from <= j && j < to ? no : yes);
                }
                AttentionCase hidden = whole_case();
                set_mask(hidden, element, {rows, kKv}, values);
                const std::int64_t first = from == 0 ? to / 512 * 512 : 0;
                const std::int64_t end = from == 0 ? kKv : from;
                // of a span that a mask cuts, plain keys are packed whole: other rows may see the rest of it
                const bool whole_spans = from % 512 == 0 && to % 512 == 0;
                expect_same_work(hidden, keys_of(hidden, first, end - first),
                                 whole_spans ? std::vector<Route>{Route::plain, Route::packed, Route::cache}
                                             : std::vector<Route>{Route::cache});
            }
        }
        // a hole of a whole span in the middle: what is left is two spans and a bit
        std::vector<double> values(static_cast<std::size_t>(kKv), yes);
        std::fill(values.begin() + 512, values.begin() + 1024, no);
        AttentionCase hidden = whole_case();
        set_mask(hidden, element, {kKv}, values);
        expect_same_work(hidden, keys_of(whole_case(), 0, kKv - 512));
        // a mask that allows nothing
        std::fill(values.begin(), values.end(), no);
        set_mask(hidden, element, {kKv}, values);
        HEADLONG_FOR_EACH_ISA(isa) { EXPECT_EQ(counted(isa, hidden, Route::plain), Counts{}); }
    }
}

// A triangle costs half of a square, and a band its width.
TEST(WorkCountedTest, ManyRowsCostWhatTheySee) {
    const std::int64_t length = 1024;
    HEADLONG_FOR_EACH_ISA(isa) {
        const AttentionCase all = whole_case(length, length);
        const Counts square = counted(isa, all, Route::cache);
        AttentionCase c = all;
        c.causal = true;
        const Counts triangle = counted(isa, c, Route::cache);
        EXPECT_LT(triangle.dot_columns, square.dot_columns * 6 / 10);
        EXPECT_LT(triangle.weighted_tokens, square.weighted_tokens * 6 / 10);
        c.features.window_left = 63;
        const Counts band = counted(isa, c, Route::cache);
        EXPECT_LT(band.dot_columns, square.dot_columns / 6);
        EXPECT_LT(band.weighted_tokens, square.weighted_tokens / 6);
    }
}

}  // namespace
}  // namespace headlong::test
