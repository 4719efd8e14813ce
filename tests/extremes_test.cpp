// Sizes at which arithmetic of 32 bits ends, and sizes that nobody tries: strides that reach past 2^31 and 2^32
// elements in every argument, positions as far out, products past 2^63, zero in every place, caches of one token, a
// million sequences, the smallest and the largest heads.
#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <memory_resource>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <headlong/headlong.hpp>

#include "engine/reference/attention.hpp"
#include "tests/support/any_tensor.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/sparse.hpp"
#include "tests/support/token_rows.hpp"
#include "tests/support/wide_executor.hpp"

namespace headlong::test {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
using Tokens = std::vector<std::uint64_t>;

constexpr std::int64_t two_to(int exponent) { return std::int64_t{1} << exponent; }

Tokens tokens_up_to(std::size_t count) {
    Tokens tokens(count);
    for (std::size_t t = 0; t < count; ++t) tokens[t] = t + 1;
    return tokens;
}

// -------------------------------------------------------------------------------------------------------- far strides

/// Of three elements the last one lies past 2^31 bytes, 2^32 bytes or 2^31 elements, 2^32 elements, and beyond: twice
/// the stride crosses first, then the stride itself. An emulator keeps tables of all the pages that there are.
std::vector<std::int64_t> far_strides() {
    if (emulated()) return {two_to(29) + 3};
    return {two_to(28) + 3, two_to(29) + 3, two_to(30) + 5, two_to(31) + 7, two_to(32) + 9};
}

/// Room for three elements so far apart.
std::size_t far_bytes(Element element) {
    return (2 * static_cast<std::size_t>(far_strides().back()) + 4096) * size_of(element);
}

std::vector<Element> element_types() { return {Element::f32, Element::f16, Element::bf16}; }
/// Under an emulator only those whose mapping is smaller.
std::vector<Element> far_types() {
    return emulated() ? std::vector<Element>{Element::f16} : std::vector<Element>{Element::f32, Element::f16};
}

/// visit(layout) for every dimension of a shape and every far stride, forwards or backwards in turn.
template <std::size_t Rank, class Visit>
void for_far_layouts(const Extents<Rank>& extents, const Visit& visit) {
    bool backwards = false;
    for (std::size_t d = 0; d < Rank; ++d) {
        for (const std::int64_t stride : far_strides()) {
            const std::int64_t signed_stride = backwards ? -stride : stride;
            backwards = !backwards;
            SCOPED_TRACE("stride " + std::to_string(signed_stride) + " in dimension " + std::to_string(d));
            visit(far_layout<Rank>(extents, d, signed_stride));
        }
    }
}

/// call(view) with a dense tensor's elements at every far layout.
template <std::size_t Rank, class Call>
void for_far_inputs(const SparseBytes& memory, const AnyTensor<Rank>& dense, const Call& call) {
    for_far_layouts<Rank>(dense.extents(), [&](const Layout<Rank>& layout) {
        memory.forget();
        const SparseTensor<Rank> far(memory, dense.element(), dense.extents(), layout);
        far.assign(dense.data());
        call(far.input());
    });
}

/// call(view) at every far layout must write a dense tensor's elements.
template <std::size_t Rank, class Call>
void for_far_outputs(const SparseBytes& memory, const AnyTensor<Rank>& want, const Call& call) {
    for_far_layouts<Rank>(want.extents(), [&](const Layout<Rank>& layout) {
        memory.forget();
        const SparseTensor<Rank> far(memory, want.element(), want.extents(), layout);
        call(far.output());
        EXPECT_TRUE(far.holds(want.data()));
    });
}

template <std::size_t Rank>
AnyTensor<Rank> normal_tensor(Element element, const Extents<Rank>& extents, Random& random) {
    AnyTensor<Rank> tensor(element, extents);
    tensor.fill_normal(random);
    return tensor;
}

/// The mapping, or a skipped test.
#define HEADLONG_SPARSE_OR_SKIP(memory, bytes) \
    const SparseBytes memory(bytes);           \
    if (!(memory)) GTEST_SKIP() << "the system refuses a sparse mapping of " << (bytes) << " bytes"

TEST(ExtremesTest, PlainArgumentsMayLieFarApart) {
    HEADLONG_SPARSE_OR_SKIP(memory, far_bytes(far_types().front()));
    const Extents<4> extents{3, 3, 3, 3};
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa);
        Random random(seed_or(701));
        HEADLONG_TRACE_SEED(random);
        for (const Element element : element_types()) {
            if (emulated() && element == Element::f32) continue;
            const AnyTensor<4> query = normal_tensor<4>(element, extents, random);
            const AnyTensor<4> key = normal_tensor<4>(element, extents, random);
            const AnyTensor<4> value = normal_tensor<4>(element, extents, random);
            const AnyTensor<4> output(element, extents);
            const AnyTensor<3> lse(Element::f32, {3, 3, 3});
            AttentionOptions options;
            options.causal = true;
            attend(context, query.input(), key.input(), value.input(), options, output.output(), lse.output());
            const AnyTensor<4> again(element, extents);
            const auto same = [&] { EXPECT_EQ(again.all_bits(), output.all_bits()); };
            SCOPED_TRACE(output.describe());
            {
                SCOPED_TRACE("query");
                for_far_inputs(memory, query, [&](const InputTensor<4>& far) {
                    attend(context, far, key.input(), value.input(), options, again.output());
                    same();
                });
            }
            {
                SCOPED_TRACE("key");
                for_far_inputs(memory, key, [&](const InputTensor<4>& far) {
                    attend(context, query.input(), far, value.input(), options, again.output());
                    same();
                });
            }
            {
                SCOPED_TRACE("value");
                for_far_inputs(memory, value, [&](const InputTensor<4>& far) {
                    attend(context, query.input(), key.input(), far, options, again.output());
                    same();
                });
            }
            {
                SCOPED_TRACE("output");
                for_far_outputs(memory, output, [&](const OutputTensor<4>& far) {
                    attend(context, query.input(), key.input(), value.input(), options, far);
                });
            }
            if (element == Element::f32) {
                SCOPED_TRACE("lse");
                for_far_outputs(memory, lse, [&](const OutputTensor<3>& far) {
                    attend(context, query.input(), key.input(), value.input(), options, again.output(), far);
                });
            }
            {
                SCOPED_TRACE("scores");
                const AnyTensor<4> scores(element, extents);
                attention_scores(context, query.input(), key.input(), options, ScoreStage::weights, scores.output());
                for_far_outputs(memory, scores, [&](const OutputTensor<4>& far) {
                    attention_scores(context, query.input(), key.input(), options, ScoreStage::weights, far);
                });
            }
        }
    }
}

TEST(ExtremesTest, MasksMayLieFarApart) {
    const std::vector<Element> types =
        emulated() ? std::vector<Element>{Element::boolean}
                   : std::vector<Element>{Element::boolean, Element::f32, Element::f16, Element::bf16};
    HEADLONG_SPARSE_OR_SKIP(memory, far_bytes(emulated() ? Element::boolean : Element::f32));
    const Extents<4> extents{3, 3, 3, 3};
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa);
        Random random(seed_or(702));
        HEADLONG_TRACE_SEED(random);
        const AnyTensor<4> query = normal_tensor<4>(Element::f32, extents, random);
        const AnyTensor<4> key = normal_tensor<4>(Element::f32, extents, random);
        const AnyTensor<4> value = normal_tensor<4>(Element::f32, extents, random);
        for (const Element element : types) {
            AnyTensor<4> elements(element, extents);
            for_each_index<4>(extents, [&](const Extents<4>& i) {
                elements.set(i, element == Element::boolean ? (random.chance(0.5) ? 1.0 : 0.0) : random.normal());
            });
            AttentionOptions options;
            options.mask = AttentionMask::dense(elements.data(), static_cast<AttentionMask::Type>(element), extents);
            const AnyTensor<4> output(Element::f32, extents);
            attend(context, query.input(), key.input(), value.input(), options, output.output());
            SCOPED_TRACE(elements.describe());
            for_far_inputs(memory, elements, [&](const InputTensor<4>& far) {
                AttentionOptions with_far = options;
                with_far.mask->data = far.data;
                with_far.mask->strides = far.strides;
                const AnyTensor<4> again(Element::f32, extents);
                attend(context, query.input(), key.input(), value.input(), with_far, again.output());
                EXPECT_EQ(again.all_bits(), output.all_bits());
            });
        }
    }
}

// Rows of caches, pages and packed sequences: 3 heads, 3 tokens, 3 elements.
TEST(ExtremesTest, RowsOfSequencesMayLieFarApart) {
    HEADLONG_SPARSE_OR_SKIP(memory, far_bytes(far_types().front()));
    const Extents<3> extents{3, 3, 3};
    Context& context = shared_context(available_isas().back());
    Random random(seed_or(703));
    HEADLONG_TRACE_SEED(random);
    for (const Element element : far_types()) {
        const AnyTensor<3> query = normal_tensor<3>(element, extents, random);
        const AnyTensor<3> key = normal_tensor<3>(element, extents, random);
        const AnyTensor<3> value = normal_tensor<3>(element, extents, random);
        const AnyTensor<3> output(element, extents);
        const AnyTensor<3> again(element, extents);
        const AnyTensor<2> lse(Element::f32, {3, 3});
        SCOPED_TRACE(output.describe());
        KvCacheOptions cache_options;
        cache_options.shape = {.kv_heads = 3, .head_dim = 3, .value_dim = 3};
        const auto filled = [&](const InputTensor<3>& keys, const InputTensor<3>& values) {
            KvCache cache(cache_options);
            cache.append(context, 0, keys, values);
            return cache;
        };
        const KvCache cache = filled(key.input(), value.input());
        const auto cached = [&](const KvCache& over, const InputTensor<3>& rows, const OutputTensor<3>& out,
                                const OutputTensor<2>& out_lse) {
            const CachedQuery q{.query = rows, .cache = &over, .output = out, .lse = out_lse};
            attend(context, std::span(&q, 1));
        };
        const auto paged = [&](const InputTensor<3>& rows, const KvPage& page, const OutputTensor<3>& out,
                               const OutputTensor<2>& out_lse) {
            const PagedQuery q{.query = rows, .pages = {&page, 1}, .output = out, .lse = out_lse};
            attend(context, std::span(&q, 1));
        };
        const std::vector<std::int64_t> offsets{0, 1, 3};
        AttentionOptions packed_options;
        packed_options.causal = true;
        const auto packed = [&](const InputTensor<3>& rows, const InputTensor<3>& keys, const InputTensor<3>& values,
                                const OutputTensor<3>& out, const OutputTensor<2>& out_lse) {
            attend_packed(context, rows, keys, values, offsets, offsets, packed_options, out, out_lse);
        };

        cached(cache, query.input(), output.output(), lse.output());
        const auto same = [&] { EXPECT_EQ(again.all_bits(), output.all_bits()); };
        for_far_inputs(memory, query, [&](const InputTensor<3>& far) {
            cached(cache, far, again.output(), {});
            same();
            paged(far, {key.input(), value.input()}, again.output(), {});
            same();
        });
        for_far_inputs(memory, key, [&](const InputTensor<3>& far) {
            cached(filled(far, value.input()), query.input(), again.output(), {});
            same();
            paged(query.input(), {far, value.input()}, again.output(), {});
            same();
        });
        for_far_inputs(memory, value, [&](const InputTensor<3>& far) {
            cached(filled(key.input(), far), query.input(), again.output(), {});
            same();
            paged(query.input(), {key.input(), far}, again.output(), {});
            same();
        });
        for_far_outputs(memory, output, [&](const OutputTensor<3>& far) { cached(cache, query.input(), far, {}); });
        if (element == Element::f32) {
            for_far_outputs(memory, lse, [&](const OutputTensor<2>& far) {
                paged(query.input(), {key.input(), value.input()}, again.output(), far);
            });
            for_far_outputs(memory, key, [&](const OutputTensor<3>& far) {
                cache.read_back(0, 0, far, again.output());
                EXPECT_EQ(again.all_bits(), value.all_bits());
            });
        }

        packed(query.input(), key.input(), value.input(), output.output(), lse.output());
        for_far_inputs(memory, query, [&](const InputTensor<3>& far) {
            packed(far, key.input(), value.input(), again.output(), {});
            same();
        });
        for_far_inputs(memory, key, [&](const InputTensor<3>& far) {
            packed(query.input(), far, value.input(), again.output(), {});
            same();
        });
        for_far_inputs(memory, value, [&](const InputTensor<3>& far) {
            packed(query.input(), key.input(), far, again.output(), {});
            same();
        });
        for_far_outputs(memory, output, [&](const OutputTensor<3>& far) {
            packed(query.input(), key.input(), value.input(), far, {});
        });
        if (element == Element::f32) {
            for_far_outputs(memory, lse, [&](const OutputTensor<2>& far) {
                packed(query.input(), key.input(), value.input(), again.output(), far);
            });
        }
    }
}

TEST(ExtremesTest, OtherFunctionsTakeTensorsThatLieFarApart) {
    HEADLONG_SPARSE_OR_SKIP(memory, far_bytes(far_types().front()));
    Context& context = shared_context(available_isas().back());
    Random random(seed_or(704));
    HEADLONG_TRACE_SEED(random);
    {
        SCOPED_TRACE("rotate");
        const Rotary rotary({.head_dim = 2});
        const Element element = far_types().back();
        const Extents<3> extents{3, 3, 2};
        const AnyTensor<3> rows = normal_tensor<3>(element, extents, random);
        const AnyTensor<3> turned(element, extents);
        rotate(context, rotary, rows.input(), 5, turned.output());
        const AnyTensor<3> again(element, extents);
        for_far_inputs(memory, rows, [&](const InputTensor<3>& far) {
            rotate(context, rotary, far, 5, again.output());
            EXPECT_EQ(again.all_bits(), turned.all_bits());
        });
        for_far_outputs(memory, turned,
                        [&](const OutputTensor<3>& far) { rotate(context, rotary, rows.input(), 5, far); });
    }
    if (emulated()) return;  // what follows is f32
    {
        SCOPED_TRACE("merge");
        const Extents<4> extents{3, 3, 3, 3};
        const Extents<3> lse_extents{3, 3, 3};
        const AnyTensor<4> first = normal_tensor<4>(Element::f32, extents, random);
        const AnyTensor<4> second = normal_tensor<4>(Element::f32, extents, random);
        const AnyTensor<3> lse = normal_tensor<3>(Element::f32, lse_extents, random);
        const AnyTensor<4> merged(Element::f32, extents);
        const AnyTensor<3> merged_lse(Element::f32, lse_extents);
        const auto call = [&](const InputTensor<4>& part, const InputTensor<3>& part_lse, const OutputTensor<4>& out,
                              const OutputTensor<3>& out_lse) {
            const AttentionPart parts[2] = {{first.input(), lse.input()}, {part, part_lse}};
            merge(context, parts, out, out_lse);
        };
        call(second.input(), lse.input(), merged.output(), merged_lse.output());
        const AnyTensor<4> again(Element::f32, extents);
        for_far_inputs(memory, second, [&](const InputTensor<4>& far) {
            call(far, lse.input(), again.output(), {});
            EXPECT_EQ(again.all_bits(), merged.all_bits());
        });
        for_far_inputs(memory, lse, [&](const InputTensor<3>& far) {
            call(second.input(), far, again.output(), {});
            EXPECT_EQ(again.all_bits(), merged.all_bits());
        });
        for_far_outputs(memory, merged,
                        [&](const OutputTensor<4>& far) { call(second.input(), lse.input(), far, {}); });
        for_far_outputs(memory, merged_lse,
                        [&](const OutputTensor<3>& far) { call(second.input(), lse.input(), again.output(), far); });
    }
    {
        SCOPED_TRACE("layer");
        const Extents<2> extents{3, 3};
        const AnyTensor<2> weight = normal_tensor<2>(Element::f32, extents, random);
        const AnyTensor<2> x = normal_tensor<2>(Element::f32, extents, random);
        const AnyTensor<2> y(Element::f32, extents);
        const AnyTensor<2> again(Element::f32, extents);
        const auto layer_of = [&](const InputTensor<2>& query_weight) {
            MultiHeadAttentionWeights weights;
            weights.query = query_weight;
            weights.key = weights.value = weights.output = weight.input();
            return MultiHeadAttention(context, {.heads = 1, .kv_heads = 1, .memory = nullptr}, weights);
        };
        const auto forward = [&](const MultiHeadAttention& layer, const InputTensor<2>& in,
                                 const OutputTensor<2>& out) {
            KvCacheOptions options;
            options.shape = {.kv_heads = 1, .head_dim = 3, .value_dim = 3};
            KvCache cache(options);
            layer.forward(context, in, cache, 0, out);
        };
        const MultiHeadAttention layer = layer_of(weight.input());
        forward(layer, x.input(), y.output());
        for_far_inputs(memory, x, [&](const InputTensor<2>& far) {
            forward(layer, far, again.output());
            EXPECT_EQ(again.all_bits(), y.all_bits());
        });
        for_far_outputs(memory, y, [&](const OutputTensor<2>& far) { forward(layer, x.input(), far); });
        for_far_inputs(memory, weight, [&](const InputTensor<2>& far) {
            forward(layer_of(far), x.input(), again.output());
            EXPECT_EQ(again.all_bits(), y.all_bits());
        });
    }
}

// ------------------------------------------------------------------------------------------------------ far positions

/// Only so many keys, the last ones, are not zero. They have one element: as many as possible fit into a mapping.
constexpr std::int64_t kTail = 1000;

/// What a call is to see of billions of keys.
struct FarCall {
    const char* name;
    std::function<void(AttentionOptions&)> set;
};

// A key is met by its distance: a call over 2^32 keys has the bits of one over as many fewer as whole groups of spans
// (64 x 512) hold.
TEST(ExtremesTest, KeysAndQueriesStandPastEveryIntegerOf32Bits) {
    constexpr std::int64_t kRows = 3;
    constexpr std::int64_t kNear = 64 * 512 + 70;
    const std::vector<std::int64_t> lengths = emulated() ? std::vector<std::int64_t>{two_to(31) + 70}
                                                         : std::vector<std::int64_t>{two_to(31) + 70, two_to(32) + 70};
    const auto bytes = static_cast<std::size_t>(lengths.back()) * 2;
    HEADLONG_SPARSE_OR_SKIP(keys, bytes);
    HEADLONG_SPARSE_OR_SKIP(values, bytes);
    HEADLONG_SPARSE_OR_SKIP(mask, emulated() ? 4096 : static_cast<std::size_t>(lengths.back()) * kRows);
    Random random(seed_or(705));
    HEADLONG_TRACE_SEED(random);
    const AnyTensor<4> query = normal_tensor<4>(Element::f32, {1, 2, kRows, 1}, random);
    const AnyTensor<1> key_tail = normal_tensor<1>(Element::f16, {kTail}, random);
    const AnyTensor<1> value_tail = normal_tensor<1>(Element::f16, {kTail}, random);
    std::vector<std::uint8_t> mask_tail(kRows * kTail);
    for (std::uint8_t& byte : mask_tail) byte = random.chance(0.7) ? 1 : 0;
    const std::vector<float> slopes{0.01F, 0.25F};
    std::vector<FarCall> calls{
        {"window", [](AttentionOptions& o) { o.window_left = 600; }},
        {"window on both sides",
         [](AttentionOptions& o) {
             o.causal = false;
             o.window_left = 100;
             o.window_right = 30;
         }},
        {"slopes",
         [&](AttentionOptions& o) {
             o.window_left = 600;
             o.alibi_slopes = slopes;
         }},
    };
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 2);
        for (const bool masked : {false, true}) {
            if (masked && emulated()) continue;
            for (const FarCall& call : calls) {
                SCOPED_TRACE(std::string(call.name) + (masked ? ", masked" : ""));
                /// live keys of kv_len; some more lie behind them
                const auto run = [&](std::int64_t kv_len, std::int64_t live) {
                    keys.forget();
                    values.forget();
                    std::memcpy(keys.data() + (kv_len - kTail) * 2, key_tail.data(), kTail * 2);
                    std::memcpy(values.data() + (kv_len - kTail) * 2, value_tail.data(), kTail * 2);
                    AttentionOptions options;
                    options.causal = true;
                    call.set(options);
                    options.kv_lengths = {&live, 1};
                    if (masked) {
                        mask.forget();
                        for (std::int64_t i = 0; i < kRows; ++i) {
                            std::memcpy(mask.data() + i * kv_len + kv_len - kTail, mask_tail.data() + i * kTail, kTail);
                        }
                        const std::int64_t extents[2] = {kRows, kv_len};
                        options.mask = AttentionMask::dense(mask.data(), AttentionMask::Type::boolean, extents);
                    }
                    const InputTensor<4> key{keys.data(), DType::f16, {1, 1, kv_len, 1}, {0, 0, 1, 1}};
                    const InputTensor<4> value{values.data(), DType::f16, {1, 1, kv_len, 1}, {0, 0, 1, 1}};
                    std::vector<float> out(2 * kRows * 2);
                    attend(context, query.input(), key, value, options,
                           OutputTensor<4>::dense(out.data(), {1, 2, kRows, 1}),
                           OutputTensor<3>::dense(out.data() + 2 * kRows, {1, 2, kRows}));
                    return out;
                };
                for (const std::int64_t dead : {0, 41}) {
                    const std::vector<float> near = run(kNear, kNear - dead);
                    EXPECT_TRUE(std::any_of(near.begin(), near.begin() + 2 * kRows, [](float x) { return x != 0.0F; }));
                    for (const std::int64_t length : lengths) {
                        EXPECT_TRUE(same_bits(run(length, length - dead), near)) << length;
                    }
                }
            }
        }
    }
}

TEST(ExtremesTest, PagesAndPackedRowsBeginPastEveryIntegerOf32Bits) {
    constexpr std::int64_t kRows = 3;
    const std::int64_t far = emulated() ? two_to(31) : two_to(32);
    const auto bytes = static_cast<std::size_t>(far + kTail) * 2;
    HEADLONG_SPARSE_OR_SKIP(keys, bytes);
    HEADLONG_SPARSE_OR_SKIP(values, bytes);
    Random random(seed_or(706));
    HEADLONG_TRACE_SEED(random);
    const AnyTensor<3> query = normal_tensor<3>(Element::f32, {2, 2 * kRows, 1}, random);
    const AnyTensor<1> key_tail = normal_tensor<1>(Element::f16, {kTail}, random);
    const AnyTensor<1> value_tail = normal_tensor<1>(Element::f16, {kTail}, random);
    Context& context = shared_context(available_isas().back(), 2);
    const auto rows_of = [](const SparseBytes& memory, std::int64_t first, std::int64_t count) {
        return InputTensor<3>{memory.data() + first * 2, DType::f16, {1, count, 1}, {0, 1, 1}};
    };
    AttentionOptions options;
    options.window_left = 800;
    std::vector<std::vector<float>> results;
    std::vector<std::vector<float>> packed;
    for (const std::int64_t before : {two_to(15), far}) {
        keys.forget();
        values.forget();
        std::memcpy(keys.data() + before * 2, key_tail.data(), kTail * 2);
        std::memcpy(values.data() + before * 2, value_tail.data(), kTail * 2);
        std::vector<float>& out = results.emplace_back(4 * kRows);
        // pages before the window, empty ones, and two that share it
        const KvPage pages[5] = {
            {rows_of(keys, 0, before / 2), rows_of(values, 0, before / 2)},
            {rows_of(keys, before / 2, before - before / 2), rows_of(values, before / 2, before - before / 2)},
            {rows_of(keys, 0, 0), rows_of(values, 0, 0)},
            {rows_of(keys, before, 333), rows_of(values, before, 333)},
            {rows_of(keys, before + 333, kTail - 333), rows_of(values, before + 333, kTail - 333)}};
        InputTensor<3> last = query.input();
        last.extents[1] = kRows;
        const PagedQuery q{.query = last,
                           .pages = pages,
                           .output = OutputTensor<3>::dense(out.data(), {2, kRows, 1}),
                           .lse = OutputTensor<2>::dense(out.data() + 2 * kRows, {2, kRows})};
        attend(context, std::span(&q, 1), options);

        // a long sequence, of which the last keys are seen, and a short one behind it
        std::vector<float>& both = packed.emplace_back(8 * kRows);
        const std::vector<std::int64_t> query_offsets{0, kRows, 2 * kRows};
        const std::vector<std::int64_t> key_offsets{0, before + 700, before + kTail};
        AttentionOptions causal = options;
        causal.causal = true;
        attend_packed(context, query.input(), rows_of(keys, 0, before + kTail), rows_of(values, 0, before + kTail),
                      query_offsets, key_offsets, causal, OutputTensor<3>::dense(both.data(), {2, 2 * kRows, 1}),
                      OutputTensor<2>::dense(both.data() + 4 * kRows, {2, 2 * kRows}));
    }
    EXPECT_TRUE(same_bits(results[0], results[1]));
    EXPECT_TRUE(same_bits(packed[0], packed[1]));
    EXPECT_NE(results[0][0], 0.0F);
    EXPECT_NE(packed[0][2 * kRows - 1], 0.0F);
}

// ----------------------------------------------------------------------------------------- rings that have run for
// ever

/// Words of a saved cache of one layer, by their places (saved_cache.cpp): 18 of them, the rotary description of 3 and
/// its frequencies, the layer's window and the first position held.
constexpr std::size_t kLengthPlace = 3 * 8;
std::size_t held_place(const KvCacheOptions& options) {
    const std::size_t frequencies = options.rotary ? options.rotary->inverse_frequencies().size() : 0;
    return (18 + 3 + frequencies + 1) * 8;
}

/// The cache as if `by` more tokens had gone through it before those that it holds; a multiple of a block's.
KvCache moved_on(const KvCache& cache, const KvCacheOptions& options, std::int64_t by) {
    std::vector<std::byte> saved(cache.saved_bytes());
    cache.save(saved);
    const auto add = [&](std::size_t place) {
        std::int64_t word = 0;
        std::memcpy(&word, saved.data() + place, sizeof word);
        word += by;
        std::memcpy(saved.data() + place, &word, sizeof word);
    };
    add(kLengthPlace);
    add(held_place(options));
    const std::uint64_t sum = XXH3_64bits(saved.data(), saved.size() - sizeof sum);
    std::memcpy(saved.data() + saved.size() - sizeof sum, &sum, sizeof sum);
    KvCache moved(options);
    moved.restore(saved);
    EXPECT_EQ(moved.length(), cache.length() + by);
    return moved;
}

KvCacheOptions ring_options(const TokenRows& rows, const KvTypes& types, std::int64_t capacity, std::int64_t sinks) {
    KvCacheOptions options;
    options.shape = rows.shape(types);
    options.ring = true;
    options.capacity = capacity;
    options.sink_tokens = sinks;
    options.max_chunk = 64;
    return options;
}

TEST(ExtremesTest, RingsGoOnPastEveryIntegerOf32Bits) {
    const TokenRows rows;
    constexpr std::size_t kBefore = 640 - 30;
    const Tokens tokens = tokens_up_to(kBefore + 100);
    constexpr std::int64_t kGroup = 64 * 512;  // positions that many apart have the same fold
    const std::vector<float> slopes = alibi_slopes_for(rows.heads());
    const std::vector<TypesCase> all =
        emulated() ? std::vector<TypesCase>{{{KvType::f32, KvType::f32}}} : all_kv_types();
    for (const auto& [capacity, sinks] : std::vector<std::pair<std::int64_t, std::int64_t>>{{100, 0}, {130, 67}}) {
        for (const TypesCase& types : all) {
            SCOPED_TRACE(types.name() + ", capacity " + std::to_string(capacity));
            const auto context = make_context(available_isas().back(), 1);
            const KvCacheOptions options = ring_options(rows, types.types, capacity, sinks);
            KvCache cache(options);
            for (std::size_t t = 0; t < kBefore; t += 61) {
                rows.append(*context, cache, tokens, t, std::min<std::size_t>(61, kBefore - t), 0);
            }
            for (const std::int64_t far : {two_to(31), two_to(32), two_to(40)}) {
                SCOPED_TRACE(far);
                KvCache near = moved_on(cache, options, kGroup - 640);
                KvCache moved = moved_on(cache, options, far - 640);
                const auto both = [&](std::size_t first, std::size_t count) {
                    const Tokens so_far(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(first + count));
                    AttentionOptions with_slopes;
                    with_slopes.alibi_slopes = slopes;
                    for (KvCache* c : {&near, &moved}) rows.append(*context, *c, tokens, first, count, 0);
                    for (const AttentionOptions& attention : {AttentionOptions{}, with_slopes}) {
                        EXPECT_TRUE(same_bits(rows.attend(*context, near, so_far, count, 0, attention),
                                              rows.attend(*context, moved, so_far, count, 0, attention)))
                            << "after token " << first;
                    }
                    EXPECT_EQ(moved.length(), far - 640 + static_cast<std::int64_t>(first + count));
                };
                for (std::size_t t = kBefore; t < kBefore + 36; ++t) both(t, 1);
                for (KvCache* c : {&near, &moved}) c->truncate(c->length() - 1);  // and back
                both(kBefore + 35, 1);
                KvCache fork = moved.fork();
                EXPECT_EQ(fork.length(), moved.length());
                both(kBefore + 36, 60);
                // what the ring holds reads back by its position, and what it has forgotten is refused by it
                const auto read = [&](const KvCache& c, std::int64_t first) {
                    std::vector<float> key(static_cast<std::size_t>(rows.kv_heads * 5 * rows.head_dim));
                    std::vector<float> value(static_cast<std::size_t>(rows.kv_heads * 5 * rows.value_dim));
                    c.read_back(0, first, OutputTensor<3>::dense(key.data(), {rows.kv_heads, 5, rows.head_dim}),
                                OutputTensor<3>::dense(value.data(), {rows.kv_heads, 5, rows.value_dim}));
                    key.insert(key.end(), value.begin(), value.end());
                    return key;
                };
                EXPECT_TRUE(same_bits(read(near, kGroup + 50), read(moved, far + 50)));
                EXPECT_TRUE(
                    says(refusal([&] { read(moved, far - 100); }, ErrorCode::would_forget), std::to_string(far - 100)));
                EXPECT_EQ(moved.reserved_bytes(), near.reserved_bytes());
            }
        }
    }
}

// Rotated keys are met by their distance, too, as far as the angles of so far a position are known: an angle of 2^32 is
// a double with 20 bits behind the point.
TEST(ExtremesTest, RotaryRingsGoOnPastEveryIntegerOf32Bits) {
    const TokenRows rows;
    const Tokens tokens = tokens_up_to(1000);
    const auto context = make_context(available_isas().back(), 1);
    KvCacheOptions options = ring_options(rows, {}, 100, 4);
    options.rotary = Rotary({.head_dim = rows.head_dim});
    KvCache cache(options);
    rows.append(*context, cache, tokens, 0, 60, 0);
    for (std::size_t t = 60; t < 640; t += 58) rows.append(*context, cache, tokens, t, 58, 0);
    KvCache far_31 = moved_on(cache, options, two_to(31) - 640);
    KvCache far_32 = moved_on(cache, options, two_to(32) - 640);
    std::vector<std::vector<float>> results;
    for (KvCache* c : {&cache, &far_31, &far_32}) {
        // keys that were rotated where they stood before are gone after a window
        for (std::size_t t = 640; t < 1000; t += 60) rows.append(*context, *c, tokens, t, 60, 0);
        results.push_back(rows.attend(*context, *c, tokens, 40, 0));
    }
    for (std::size_t far : {1U, 2U}) {
        double worst = 0.0;
        for (std::size_t i = 0; i < results[0].size(); ++i) {
            worst =
                std::max(worst, std::abs(static_cast<double>(results[far][i]) - static_cast<double>(results[0][i])));
        }
        EXPECT_LT(worst, 2e-5) << far;
        EXPECT_FALSE(same_bits(results[far], results[0])) << "the positions do not matter";
    }
}

TEST(ExtremesTest, TheLastPositionIsRefusedByName) {
    const TokenRows rows;
    const Tokens tokens = tokens_up_to(200);
    const auto context = make_context(available_isas().back(), 1);
    const KvCacheOptions options = ring_options(rows, {}, 20, 2);
    KvCache cache(options);
    for (std::size_t t = 0; t < 180; t += 20) rows.append(*context, cache, tokens, t, 20, 0);
    KvCache last = moved_on(cache, options, two_to(48) - 192);  // 12 are left
    rows.append(*context, last, tokens, 180, 12, 0);
    KvCache near = moved_on(cache, options, 2 * 64 * 512 - 192);
    rows.append(*context, near, tokens, 180, 12, 0);
    const Tokens seen(tokens.begin(), tokens.begin() + 192);
    const std::vector<float> out = rows.attend(*context, last, seen, 3, 0);
    EXPECT_TRUE(same_bits(out, rows.attend(*context, near, seen, 3, 0)));
    const std::string message =
        refusal([&] { rows.append(*context, last, tokens, 192, 1, 0); }, ErrorCode::out_of_memory);
    EXPECT_TRUE(says(message, "1 tokens after 281474976710656 exceed the cache's capacity of 281474976710656"));
    refusal([&] { last.reserve(1); }, ErrorCode::out_of_memory);
    EXPECT_TRUE(same_bits(rows.attend(*context, last, seen, 3, 0), out));
    // a file that says more
    std::vector<std::byte> saved(last.saved_bytes());
    last.save(saved);
    const std::int64_t length = two_to(48) + 64;
    std::memcpy(saved.data() + kLengthPlace, &length, sizeof length);
    EXPECT_TRUE(says(refusal([&] { last.restore(saved); }, ErrorCode::bad_file), std::to_string(length)));
}

// ------------------------------------------------------------------------------------------------ products past 2^63

/// What goes wrong with a view: which of its numbers, in which dimension, is named.
template <std::size_t Rank>
struct BadView {
    Extents<Rank> extents;
    Extents<Rank> strides;
    std::int64_t named;
};

/// Every way in which a valid view of extents 2 and more may leave 64 bits: a stride that does alone, one that does in
/// bytes, one that does together with the others, the most negative, and extents whose product does.
template <std::size_t Rank>
std::vector<BadView<Rank>> bad_views(const Extents<Rank>& extents, const Extents<Rank>& strides, std::size_t bytes) {
    std::vector<BadView<Rank>> all;
    for (std::size_t d = 0; d < Rank; ++d) {
        const std::int64_t steps = extents[d] - 1;
        const std::int64_t in_bytes = kMax / static_cast<std::int64_t>(bytes) / steps;
        for (const std::int64_t stride :
             {kMax, -kMax, std::numeric_limits<std::int64_t>::min(), kMax / steps, in_bytes, -in_bytes}) {
            BadView<Rank> bad{extents, strides, stride};
            bad.strides[d] = stride;
            all.push_back(bad);
        }
    }
    return all;
}

TEST(ExtremesTest, StridesPast64BitsAreRefusedByNameAndValue) {
    Context& context = shared_context(available_isas().back());
    Random random(seed_or(711));
    const Extents<4> extents{2, 2, 3, 4};
    const AnyTensor<4> query = normal_tensor<4>(Element::f32, extents, random);
    const AnyTensor<4> key = normal_tensor<4>(Element::f32, extents, random);
    const AnyTensor<4> value = normal_tensor<4>(Element::f32, extents, random);
    const AnyTensor<4> output(Element::f32, extents);
    const AnyTensor<3> lse(Element::f32, {2, 2, 3});
    const AnyTensor<4> scores(Element::f32, {2, 2, 3, 3});
    const auto refused = [](const char* name, std::int64_t named, const auto& call) {
        const std::string message = refusal(call);
        EXPECT_TRUE(says(message, name));
        EXPECT_TRUE(says(message, std::to_string(named)));
        EXPECT_TRUE(says(message, "64-bit"));
    };
    const auto bent = [](auto view, const auto& bad) {
        view.extents = bad.extents;
        view.strides = bad.strides;
        return view;
    };
    for (const auto& bad : bad_views<4>(extents, query.strides(), 4)) {
        SCOPED_TRACE(bad.named);
        refused("query", bad.named, [&] {
            attend(context, bent(query.input(), bad), key.input(), value.input(), {}, output.output(), lse.output());
        });
        refused("query", bad.named, [&] {
            attention_scores(context, bent(query.input(), bad), key.input(), {}, ScoreStage::masked, scores.output());
        });
        refused("key", bad.named, [&] {
            attend(context, query.input(), bent(key.input(), bad), value.input(), {}, output.output(), lse.output());
        });
        refused("value", bad.named, [&] {
            attend(context, query.input(), key.input(), bent(value.input(), bad), {}, output.output(), lse.output());
        });
        refused("output", bad.named, [&] {
            attend(context, query.input(), key.input(), value.input(), {}, bent(output.output(), bad), lse.output());
        });
        const AttentionPart part{bent(query.input(), bad),
                                 InputTensor<3>{lse.data(), DType::f32, {2, 2, 3}, {6, 3, 1}}};
        refused("part: output", bad.named, [&] { merge(context, std::span(&part, 1), output.output()); });
        const AttentionPart good{query.input(), part.lse};
        refused("output", bad.named, [&] { merge(context, std::span(&good, 1), bent(output.output(), bad)); });
    }
    for (const auto& bad : bad_views<4>({2, 2, 3, 3}, scores.strides(), 4)) {
        refused("scores", bad.named, [&] {
            attention_scores(context, query.input(), key.input(), {}, ScoreStage::masked, bent(scores.output(), bad));
        });
        AttentionOptions options;  // (a mask's booleans are bytes: its strides may reach four times as far)
        options.mask = AttentionMask::dense(scores.data(), AttentionMask::Type::f32, bad.extents);
        options.mask->strides = bad.strides;
        refused("mask", bad.named,
                [&] { attend(context, query.input(), key.input(), value.input(), options, output.output()); });
    }
    for (const auto& bad : bad_views<3>({2, 2, 3}, lse.strides(), 4)) {
        refused("lse", bad.named, [&] {
            attend(context, query.input(), key.input(), value.input(), {}, output.output(), bent(lse.output(), bad));
        });
    }
    EXPECT_TRUE(output.untouched());
    EXPECT_TRUE(lse.untouched());
    EXPECT_TRUE(scores.untouched());

    const Extents<3> rows{2, 3, 4};
    const AnyTensor<3> row = normal_tensor<3>(Element::f32, rows, random);
    const AnyTensor<3> out(Element::f32, rows);
    KvCacheOptions options;
    options.shape = {.kv_heads = 2, .head_dim = 4, .value_dim = 4};
    KvCache cache(options);
    cache.append(context, 0, row.input(), row.input());
    const std::vector<std::int64_t> offsets{0, 3};
    for (const auto& bad : bad_views<3>(rows, row.strides(), 4)) {
        SCOPED_TRACE(bad.named);
        const InputTensor<3> in = bent(row.input(), bad);
        const OutputTensor<3> to = bent(out.output(), bad);
        refused("keys", bad.named, [&] { cache.append(context, 0, in, row.input()); });
        refused("values", bad.named, [&] { cache.append(context, 0, row.input(), in); });
        refused("keys", bad.named, [&] { cache.read_back(0, 0, to, out.output()); });
        refused("values", bad.named, [&] { cache.read_back(0, 0, out.output(), to); });
        const auto cached = [&](const InputTensor<3>& q, const OutputTensor<3>& o) {
            const CachedQuery one{.query = q, .cache = &cache, .output = o};
            attend(context, std::span(&one, 1));
        };
        refused("query", bad.named, [&] { cached(in, out.output()); });
        refused("output", bad.named, [&] { cached(row.input(), to); });
        const auto paged = [&](const KvPage& page) {
            const PagedQuery one{.query = row.input(), .pages = {&page, 1}, .output = out.output()};
            attend(context, std::span(&one, 1));
        };
        refused("key", bad.named, [&] { paged({in, row.input()}); });
        refused("value", bad.named, [&] { paged({row.input(), in}); });
        const auto packed = [&](const InputTensor<3>& q, const InputTensor<3>& k, const InputTensor<3>& v,
                                const OutputTensor<3>& o) { attend_packed(context, q, k, v, offsets, offsets, {}, o); };
        const InputTensor<3> good = row.input();
        refused("query", bad.named, [&] { packed(in, good, good, out.output()); });
        refused("key", bad.named, [&] { packed(good, in, good, out.output()); });
        refused("value", bad.named, [&] { packed(good, good, in, out.output()); });
        refused("output", bad.named, [&] { packed(good, good, good, to); });
        refused("rows", bad.named, [&] { rotate(context, Rotary({.head_dim = 4}), in, 0, out.output()); });
        refused("out", bad.named, [&] { rotate(context, Rotary({.head_dim = 4}), good, 0, to); });
    }
    EXPECT_TRUE(out.untouched());
    EXPECT_EQ(cache.length(), 3);
}

// Strides of 0, so that the memory is there: what is refused is the size.
TEST(ExtremesTest, ExtentsPastTheirLimitsAreRefusedByNameAndValue) {
    Context& context = shared_context(available_isas().back());
    const float one = 1.0F;
    float out = 7.0F;
    const auto in = [&](const Extents<4>& extents) { return InputTensor<4>{&one, DType::f32, extents, {}}; };
    const auto to = [&](const Extents<4>& extents) {
        return OutputTensor<4>{&out, DType::f32, extents, dense_strides<4>(extents)};
    };
    const auto refused = [&](const Extents<4>& query, const Extents<4>& key, std::int64_t value_dim,
                             const std::vector<std::string>& words) {
        Extents<4> value = key;
        value[3] = value_dim;
        Extents<4> output = query;
        output[3] = value_dim;
        const std::string message =
            refusal([&] { attend(context, in(query), in(key), in(value), {}, to(output), {}); });
        for (const std::string& word : words) EXPECT_TRUE(says(message, word));
        EXPECT_EQ(out, 7.0F);
    };
    // (of no rows, or of no columns: nothing else is wrong with them)
    refused({two_to(32) + 1, 1, 0, 1}, {two_to(32) + 1, 1, 1, 1}, 1, {"batch is 4294967297", "4294967296"});
    refused({1, two_to(20) + 1, 1, 1}, {1, 1, 1, 1}, 0, {"query: heads is 1048577", "1048576"});
    refused({1, 0, 1, 1}, {1, two_to(20) + 1, 1, 1}, 1, {"key: heads is 1048577", "1048576"});
    refused({1, 1, 1, two_to(20) + 1}, {1, 1, 1, two_to(20) + 1}, 1, {"head_dim is 1048577", "1048576"});
    refused({1, 1, 0, 1}, {1, 1, 1, 1}, two_to(20) + 1, {"value_dim is 1048577", "1048576"});
    refused({1, 1, two_to(48) + 1, 1}, {1, 1, 1, 1}, 0, {"query: length is 281474976710657", "281474976710656"});
    refused({1, 1, 1, 1}, {1, 1, two_to(48) + 1, 1}, 1, {"key: length is 281474976710657", "281474976710656"});
    // each within its limits, the product not
    refused({two_to(16), two_to(20), two_to(27), 1}, {two_to(16), 1, 1, 1}, 0, {"query: extent 134217728", "64-bit"});
    refused({two_to(16), 1, 1, 1}, {two_to(16), two_to(20), two_to(27), 1}, 0, {"key: extent 134217728", "64-bit"});
    refused({1, two_to(20), 1, 1}, {1, two_to(20), two_to(24), 1}, two_to(20), {"value: extent 1048576", "64-bit"});

    // pages whose lengths are fine, one by one
    const std::vector<KvPage> pages(3, {InputTensor<3>{&one, DType::f32, {1, two_to(47), 1}, {}},
                                        InputTensor<3>{&one, DType::f32, {1, two_to(47), 1}, {}}});
    const PagedQuery paged{
        .query = {&one, DType::f32, {1, 1, 1}, {}}, .pages = pages, .output = {&out, DType::f32, {1, 1, 1}, {1, 1, 1}}};
    EXPECT_TRUE(says(refusal([&] { attend(context, std::span(&paged, 1)); }), "key: length is 422212465065984"));

    KvCacheOptions options;
    options.shape = {.kv_heads = two_to(20), .head_dim = two_to(20), .value_dim = two_to(20)};
    options.layers = two_to(10);
    const std::string message =
        refusal([&] { static_cast<void>(KvCache::estimate_bytes(options, two_to(40))); }, ErrorCode::out_of_memory);
    EXPECT_TRUE(says(message, "1099511627776 tokens"));
    EXPECT_EQ(KvCache::estimate_bytes(options, 0), 0U);
    options.layers = 1;
    EXPECT_EQ(KvCache::estimate_bytes(options, 1), static_cast<std::size_t>(two_to(20 + 6)) * 8 * two_to(20))
        << "64 tokens of 2^20 heads of 2 x 2^20 floats";
}

/// Gives out no more than it is told: a machine with less memory than a call asks for.
class SmallResource final : public std::pmr::memory_resource {
  public:
    explicit SmallResource(std::size_t most) : most_(most) {}
    std::size_t largest() const { return largest_; }

  private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        largest_ = std::max(largest_, bytes);
        if (bytes > most_) throw std::bad_alloc();
        return std::pmr::new_delete_resource()->allocate(bytes, alignment);
    }
    void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
        std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
    }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

    std::size_t most_;
    std::size_t largest_ = 0;
};

// The largest that every limit allows, with strides of 0: what it takes is counted right, and refused.
TEST(ExtremesTest, TheLargestCallsAskForWhatTheyNeed) {
    const float one = 1.0F;
    const auto in = [&](const Extents<4>& extents) { return InputTensor<4>{&one, DType::f32, extents, {}}; };
    struct Call {
        Extents<4> query, key;
        std::int64_t value_dim;
        std::size_t least;  ///< bytes that it must ask for
    };
    const std::vector<Call> calls{
        // a sequence of a batch takes some hundred bytes
        {{two_to(32), 1, 1, 1}, {two_to(32), 1, 1, 1}, 1, static_cast<std::size_t>(two_to(32 + 8))},
        // a group of 2^20 heads of 2^20 columns are the rows of one position
        {{1, two_to(20), 1, two_to(20)}, {1, 1, 1, two_to(20)}, 1, static_cast<std::size_t>(two_to(40 + 2))},
        {{1, two_to(20), 1, 1}, {1, 1, 1, 1}, two_to(20), static_cast<std::size_t>(two_to(40 + 2))},
        {{1, 1, 1, two_to(20)}, {1, 1, 1, two_to(20)}, two_to(20), static_cast<std::size_t>(two_to(20 + 9 + 3))},
        // row blocks of 2048 rows each take 56 bytes
        {{1, 1, two_to(48), 1}, {1, 1, 1, 1}, 1, static_cast<std::size_t>(two_to(48 - 11 + 5))},
        {{1, two_to(10), two_to(48), 1}, {1, two_to(10), 1, 1}, 1, static_cast<std::size_t>(two_to(48 - 11 + 5))},
    };
    for (std::size_t i = 0; i < calls.size(); ++i) {
        for (const std::size_t threads : {1U, 2U}) {
            SCOPED_TRACE("call " + std::to_string(i) + ", threads " + std::to_string(threads));
            SmallResource memory(std::size_t{1} << 28);
            const auto context = make_context(available_isas().back(), threads, &memory);
            const Call& call = calls[i];
            Extents<4> value = call.key;
            value[3] = call.value_dim;
            Extents<4> output = call.query;
            output[3] = call.value_dim;
            float nothing = 7.0F;
            const OutputTensor<4> out{&nothing, DType::f32, output, dense_strides<4>(output)};
            const std::string message = refusal(
                [&] { attend(*context, in(call.query), in(call.key), in(value), {}, out); }, ErrorCode::out_of_memory);
            EXPECT_TRUE(says(message, "attend"));
            EXPECT_GE(memory.largest(), call.least);
            EXPECT_LT(memory.largest(), call.least << 8);
            EXPECT_EQ(nothing, 7.0F);
        }
    }
}

// Columns of which a row for each of 64 workers takes 2^64 bytes and a little more: nearly nothing, if it wraps.
TEST(ExtremesTest, ScratchForAllWorkersIsCountedInMoreThan64Bits) {
    ContextOptions options;
    options.executor = std::make_shared<WideExecutor>(64);
    Context context(options);
    const float one = 1.0F;
    float out = 7.0F;
    {
        const std::int64_t columns = 24019198012642656;  // of 12 bytes
        const AttentionPart part{{&one, DType::f32, {1, 1, 1, columns}, {}}, {&one, DType::f32, {1, 1, 1}, {}}};
        const OutputTensor<4> to{&out, DType::f32, {1, 1, 1, columns}, {1, 1, 1, 1}};
        EXPECT_TRUE(says(refusal([&] { merge(context, std::span(&part, 1), to); }, ErrorCode::out_of_memory), "merge"));
    }
    {
        const std::int64_t columns = two_to(58);
        const RotaryTable table{.cosine = InputTensor<2>::dense(&one, {1, 1}),
                                .sine = InputTensor<2>::dense(&one, {1, 1})};
        const std::int64_t position = 0;
        const InputTensor<3> row{&one, DType::f32, {1, 1, columns}, {}};
        const OutputTensor<3> to{&out, DType::f32, {1, 1, columns}, {1, 1, 1}};
        EXPECT_TRUE(says(refusal(
                             [&] {
                                 rotate(context, table, row, {&position, 1}, to);
                             },
                             ErrorCode::invalid_argument),
                         "rows: head_dim is 288230376151711744"));
    }
    EXPECT_EQ(out, 7.0F);
}

// What lengths cut off is never read, and may lie anywhere.
TEST(ExtremesTest, WhatIsNeverReadMayLieAtTheEndOfTheAddressSpace) {
    Context& context = shared_context(available_isas().back());
    Random random(seed_or(712));
    const AnyTensor<4> query = normal_tensor<4>(Element::f32, {1, 1, 2, 4}, random);
    const AnyTensor<4> key = normal_tensor<4>(Element::f32, {1, 1, 1, 4}, random);
    const AnyTensor<4> value = normal_tensor<4>(Element::f32, {1, 1, 1, 4}, random);
    const AnyTensor<4> output(Element::f32, {1, 1, 2, 4});
    const std::int64_t live = 1;
    AttentionOptions options;
    options.kv_lengths = {&live, 1};
    InputTensor<4> far_key = key.input();
    far_key.extents[2] = 2;
    far_key.strides[2] = kMax / 4 - 4;
    InputTensor<4> far_value = value.input();
    far_value.extents[2] = 2;
    far_value.strides[2] = -(kMax / 4 - 4);
    attend(context, query.input(), far_key, far_value, options, output.output());
    for (std::int64_t i = 0; i < 2; ++i) {
        for (std::int64_t d = 0; d < 4; ++d) EXPECT_EQ(output.bits({0, 0, i, d}), value.bits({0, 0, 0, d}));
    }
}

// --------------------------------------------------------------------------------------------------- zero everywhere

// Every set of extents that may be 0, on every road.
TEST(ExtremesTest, ZeroInEveryPlaceAndInSeveral) {
    Context& context = shared_context(available_isas().back(), 2);
    constexpr std::int64_t kBatch = 2, kHeads = 2, kQ = 3, kKv = 4, kDim = 5, kValueDim = 6;
    const std::vector<float> numbers(1024, 1.0F);
    const std::vector<float> slopes(static_cast<std::size_t>(kHeads), 0.5F);
    const std::vector<float> logits{1.5F, -kInfinity};
    for (unsigned zeros = 0; zeros < 64; ++zeros) {
        for (const bool with_features : {false, true}) {
            const auto or_zero = [&](unsigned bit, std::int64_t extent) {
                return (zeros >> bit & 1U) != 0 ? 0 : extent;
            };
            const std::int64_t batch = or_zero(0, kBatch);
            const std::int64_t heads = or_zero(1, kHeads);
            const std::int64_t q_len = or_zero(2, kQ);
            const std::int64_t kv_len = or_zero(3, kKv);
            const std::int64_t value_dim = or_zero(4, kValueDim);
            const std::int64_t kv_heads = or_zero(5, kHeads);
            SCOPED_TRACE("zeros " + std::to_string(zeros) + (with_features ? ", features" : ""));
            AttentionOptions options;
            options.causal = false;
            if (with_features) {
                options.window_left = 0;
                options.alibi_slopes = std::span(slopes).first(static_cast<std::size_t>(heads));
                options.sink_logits = std::span(logits).first(static_cast<std::size_t>(heads));
                const std::int64_t extents[4] = {batch, heads, q_len, kv_len};
                options.mask = AttentionMask::dense(numbers.data(), AttentionMask::Type::f32, extents);
            }
            /// Views without elements have no memory.
            const auto in = [&]<std::size_t Rank>(const Extents<Rank>& extents) {
                const bool empty = std::find(extents.begin(), extents.end(), 0) != extents.end();
                return InputTensor<Rank>::dense(empty ? nullptr : numbers.data(), extents);
            };
            std::vector<float> out(1024, 7.0F);
            std::vector<float> lse(1024, 7.0F);
            const auto to = [&]<std::size_t Rank>(std::vector<float>& memory, const Extents<Rank>& extents) {
                return OutputTensor<Rank>::dense(memory.data(), extents);
            };
            /// Rows without keys are 0 and -infinity, or the sink's; others are of equal values; nothing else is
            /// written.
            const auto check = [&](std::int64_t sequences) {
                const auto rows = static_cast<std::size_t>(sequences * heads * q_len);
                const auto columns = static_cast<std::size_t>(value_dim);
                EXPECT_TRUE(std::all_of(out.begin() + static_cast<std::ptrdiff_t>(rows * columns), out.end(),
                                        [](float x) { return x == 7.0F; }));
                EXPECT_TRUE(std::all_of(lse.begin() + static_cast<std::ptrdiff_t>(rows), lse.end(),
                                        [](float x) { return x == 7.0F; }));
                for (std::size_t row = 0; row < rows; ++row) {
                    const std::size_t head = row / static_cast<std::size_t>(q_len) % static_cast<std::size_t>(heads);
                    if (kv_len == 0) {
                        EXPECT_EQ(lse[row], with_features ? logits[head] : -kInfinity);
                    } else {
                        EXPECT_TRUE(std::isfinite(lse[row]));
                        EXPECT_NE(lse[row], 7.0F);
                    }
                    for (std::size_t c = 0; c < columns; ++c) {
                        const float x = out[row * columns + c];
                        if (kv_len == 0) {
                            EXPECT_EQ(x, 0.0F);
                        } else if (!with_features) {
                            EXPECT_NEAR(x, 1.0F, 1e-6F);
                        } else {
                            EXPECT_GT(x, 0.0F);
                            EXPECT_LT(x, 1.0F + 1e-6F);
                        }
                    }
                }
                std::fill(out.begin(), out.end(), 7.0F);
                std::fill(lse.begin(), lse.end(), 7.0F);
            };
            const auto plain = [&] {
                attend(context, in(Extents<4>{batch, heads, q_len, kDim}),
                       in(Extents<4>{batch, kv_heads, kv_len, kDim}),
                       in(Extents<4>{batch, kv_heads, kv_len, value_dim}), options,
                       to(out, Extents<4>{batch, heads, q_len, value_dim}), to(lse, Extents<3>{batch, heads, q_len}));
            };
            if (kv_heads == 0 && heads != 0) {
                EXPECT_TRUE(says(refusal(plain), "2 heads; they must be a multiple of the 0 KV heads"));
                continue;
            }
            plain();
            check(batch);
            // a score is a pair's: -infinity or finite, and none where there is no key
            std::vector<float> scores(1024, 7.0F);
            attention_scores(context, in(Extents<4>{batch, heads, q_len, kDim}),
                             in(Extents<4>{batch, kv_heads, kv_len, kDim}), options, ScoreStage::weights,
                             to(scores, Extents<4>{batch, heads, q_len, kv_len}));
            EXPECT_EQ(std::count_if(scores.begin(), scores.end(), [](float x) { return x != 7.0F; }),
                      batch * heads * q_len * kv_len);

            const AttentionPart part{in(Extents<4>{batch, heads, q_len, value_dim}),
                                     in(Extents<3>{batch, heads, q_len})};
            merge(context, std::span(&part, 1), to(out, Extents<4>{batch, heads, q_len, value_dim}),
                  to(lse, Extents<3>{batch, heads, q_len}));
            EXPECT_EQ(std::count(lse.begin(), lse.end(), 1.0F), batch * heads * q_len);
            EXPECT_EQ(std::count(out.begin(), out.end(), 1.0F), batch * heads * q_len * value_dim);
            std::fill(out.begin(), out.end(), 7.0F);
            std::fill(lse.begin(), lse.end(), 7.0F);

            // one sequence on the other roads
            if (with_features) options.mask.reset();
            const KvPage page{in(Extents<3>{kv_heads, kv_len, kDim}), in(Extents<3>{kv_heads, kv_len, value_dim})};
            const std::vector<KvPage> pages(zeros % 3 + 1, page);
            const std::vector<std::int64_t> live{kv_len};
            options.kv_lengths = live;
            const PagedQuery paged{.query = in(Extents<3>{heads, q_len, kDim}),
                                   .pages = pages,
                                   .output = to(out, Extents<3>{heads, q_len, value_dim}),
                                   .lse = to(lse, Extents<2>{heads, q_len})};
            attend(context, std::span(&paged, 1), options);
            check(1);
            options.kv_lengths = {};
            // (a batch of 0 is a list of no sequences)
            std::vector<std::int64_t> query_offsets{0};
            std::vector<std::int64_t> key_offsets{0};
            if (batch > 0) {
                query_offsets = {0, 0, q_len, q_len};
                key_offsets = {0, 0, kv_len, kv_len};
            }
            attend_packed(context, in(Extents<3>{heads, q_len, kDim}), in(Extents<3>{kv_heads, kv_len, kDim}),
                          in(Extents<3>{kv_heads, kv_len, value_dim}), query_offsets, key_offsets, options,
                          to(out, Extents<3>{heads, q_len, value_dim}), to(lse, Extents<2>{heads, q_len}));
            if (batch > 0) {
                check(1);
            } else {
                EXPECT_EQ(std::count(out.begin(), out.end(), 7.0F), 1024) << "rows behind the last offset";
            }
            if (kv_heads == 0) continue;  // a cache has some
            KvCacheOptions cache_options;
            cache_options.shape = {.kv_heads = kv_heads, .head_dim = kDim, .value_dim = value_dim};
            KvCache cache(cache_options);
            cache.append(context, 0, page.key, page.value);
            cache.append(context, 0, in(Extents<3>{kv_heads, 0, kDim}), in(Extents<3>{kv_heads, 0, value_dim}));
            EXPECT_EQ(cache.length(), kv_len);
            const CachedQuery cached{.query = paged.query, .cache = &cache, .output = paged.output, .lse = paged.lse};
            attend(context, std::span(&cached, 1), options);
            check(1);
            options.alignment = Alignment::bottom_right;
            const KvCache empty(cache_options);
            const CachedQuery after_prefix{
                .query = paged.query, .cache = &empty, .output = paged.output, .lse = paged.lse};
            attend_shared_prefix(context, cache, std::span(&after_prefix, 1), options);
            check(1);
        }
    }
}

TEST(ExtremesTest, EmptyCachesDoEverything) {
    Context& context = shared_context(available_isas().back(), 2);
    const Rotary rotary({.head_dim = 4});
    for (const TypesCase& types : all_kv_types()) {
        for (const bool ring : {false, true}) {
            KvCacheOptions options;
            options.shape = {.kv_heads = 2,
                             .head_dim = 4,
                             .value_dim = 0,
                             .key_type = types.types.keys,
                             .value_type = types.types.values};
            options.layers = 2;
            options.capacity = 1;
            options.ring = ring;
            options.rotary = rotary;
            KvCache cache(options);
            const auto nothing = InputTensor<3>::dense(nullptr, {2, 0, 4});
            const auto no_values = InputTensor<3>::dense(nullptr, {2, 0, 0});
            cache.append(context, 0, nothing, no_values);
            cache.append(context, 1, nothing, no_values);
            cache.reserve(0);
            cache.truncate(0);
            cache.discard_unfinished();
            cache.read_back(1, 0, OutputTensor<3>::dense(nullptr, {2, 0, 4}),
                            OutputTensor<3>::dense(nullptr, {2, 0, 0}));
            EXPECT_EQ(cache.length(), 0);
            EXPECT_EQ(cache.used_bytes(), 0U);
            KvCache fork = cache.fork();
            std::vector<std::byte> saved(fork.saved_bytes());
            fork.save(saved);
            EXPECT_TRUE(cache.restore(saved).empty());
            cache.reset();
            KvCache::reorder({}, {});
            // one token, whose value has no elements: its lse is all that there is
            const std::vector<float> key(8, 1.0F);
            const auto values = InputTensor<3>::dense(nullptr, {2, 1, 0});
            cache.append(context, 1, InputTensor<3>::dense(key.data(), {2, 1, 4}), values);
            float lse[2] = {7.0F, 7.0F};
            const CachedQuery q{.query = InputTensor<3>::dense(key.data(), {2, 1, 4}),
                                .cache = &cache,
                                .layer = 1,
                                .output = OutputTensor<3>::dense(nullptr, {2, 1, 0}),
                                .lse = OutputTensor<2>::dense(lse, {2, 1})};
            attend(context, std::span(&q, 1));
            EXPECT_NEAR(lse[0], 2.0F, 1e-2F) << types.name();  // of codes of 4 bits
            EXPECT_EQ(lse[0], lse[1]);
        }
    }
}

// -------------------------------------------------------------------------------------------------- the smallest rings

// All but one of the places are sinks, or there is only one: a query sees the sinks and itself.
TEST(ExtremesTest, RingsOfOnePlaceBesideTheirSinks) {
    const TokenRows rows;
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        const auto context = make_context(isa, 1);
        for (const std::int64_t capacity : {1, 2, 64, 65, 66, 512, 513, 514}) {
            if (emulated() && capacity > 66) continue;
            for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{7}}) {
                SCOPED_TRACE("capacity " + std::to_string(capacity) + ", chunks of " + std::to_string(chunk));
                const std::int64_t sinks = capacity - 1;
                const auto count = static_cast<std::size_t>(sinks + 150);
                const Tokens tokens = tokens_up_to(count);
                KvCacheOptions options = ring_options(rows, {}, capacity, sinks);
                options.max_chunk = chunk;
                KvCache cache(options);
                for (std::size_t t = 0; t < count;) {
                    const std::size_t n = std::min<std::size_t>(static_cast<std::size_t>(chunk), count - t);
                    rows.append(*context, cache, tokens, t, n, 0);
                    t += n;
                    const bool shown =
                        t == n || t + 9 > count ||
                        (static_cast<std::int64_t>(t) >= sinks && static_cast<std::int64_t>(t) < sinks + 9);
                    if (!shown) continue;
                    const Tokens so_far(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(t));
                    const std::vector<float> got = rows.attend(*context, cache, so_far, n, 0);
                    for (std::size_t i = 0; i < n; ++i) {
                        // the sinks up to the query's own position, and itself
                        const std::size_t position = t - n + i;
                        Tokens seen(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(std::min(
                                                                         position, static_cast<std::size_t>(sinks))));
                        seen.push_back(tokens[position]);
                        const auto keys = static_cast<std::int64_t>(seen.size());
                        const auto dense = [&](TokenRows::Kind kind, std::int64_t heads, std::int64_t dim,
                                               std::size_t first, std::int64_t length) {
                            const std::vector<float> x =
                                rows.rows(seen, first, static_cast<std::size_t>(length), 0, kind);
                            return reference::widen(InputTensor<4>{
                                x.data(), DType::f32, {1, heads, length, dim}, {0, dim, heads * dim, 1}});
                        };
                        const reference::AttentionResult want = reference::attention(
                            dense(TokenRows::Kind::query, rows.heads(), rows.head_dim, seen.size() - 1, 1),
                            dense(TokenRows::Kind::key, rows.kv_heads, rows.head_dim, 0, keys),
                            dense(TokenRows::Kind::value, rows.kv_heads, rows.value_dim, 0, keys));
                        const auto columns = static_cast<std::size_t>(rows.heads() * rows.value_dim);
                        const auto begin = got.begin() + static_cast<std::ptrdiff_t>(i * columns);
                        const std::vector<float> row(begin, begin + static_cast<std::ptrdiff_t>(columns));
                        EXPECT_TRUE(within(row, want.output, output_tolerance(want.magnitudes))) << position;
                    }
                }
                EXPECT_LE(cache.reserved_bytes(), KvCache::estimate_bytes(options, static_cast<std::int64_t>(count)));
            }
        }
    }
}

TEST(ExtremesTest, ACacheOfOneToken) {
    const TokenRows rows;
    const Tokens tokens = tokens_up_to(2);
    Context& context = shared_context(available_isas().back());
    KvCacheOptions options;
    options.shape = rows.shape({});
    options.capacity = 1;
    options.max_chunk = 1;
    KvCache cache(options);
    for (int life = 0; life < 3; ++life) {
        rows.append(context, cache, tokens, 0, 1, 0);
        const std::vector<float> out = rows.attend(context, cache, {tokens[0]}, 1, 0);
        const std::vector<float> value = rows.rows(tokens, 0, 1, 0, TokenRows::Kind::value);
        for (std::int64_t h = 0; h < rows.heads(); ++h) {
            EXPECT_TRUE(same_bits(out.data() + h * rows.value_dim, value.data() + h / rows.group * rows.value_dim,
                                  static_cast<std::size_t>(rows.value_dim)));
        }
        EXPECT_TRUE(says(refusal([&] { rows.append(context, cache, tokens, 1, 1, 0); }, ErrorCode::out_of_memory),
                         "1 tokens after 1 exceed the cache's capacity of 1"));
        EXPECT_TRUE(says(refusal([&] { rows.append(context, cache, tokens, 0, 2, 0); }, ErrorCode::out_of_memory),
                         "2 tokens after 1"));
        if (life == 0) cache.truncate(0);
        if (life == 1) cache.reset();
    }
    options.sink_tokens = 1;
    EXPECT_TRUE(says(refusal([&] { const KvCache bad(options); }), "sink_tokens is 1; allowed: 0 to 0"));
}

// -------------------------------------------------------------------------------------------------- a million
// sequences

/// What one query of one head of two elements makes of `count` keys.
void attend_by_hand(const float* query, const float* keys, const float* values, std::int64_t count, double* out) {
    double sum = 0.0;
    out[0] = out[1] = 0.0;
    for (std::int64_t j = 0; j < count; ++j) {
        const double score = (static_cast<double>(query[0]) * static_cast<double>(keys[2 * j]) +
                              static_cast<double>(query[1]) * static_cast<double>(keys[2 * j + 1])) /
                             std::sqrt(2.0);
        const double weight = std::exp(score);
        sum += weight;
        for (int d = 0; d < 2; ++d) out[d] += weight * static_cast<double>(values[2 * j + d]);
    }
    if (count == 0) return;
    out[0] /= sum;
    out[1] /= sum;
}

TEST(ExtremesTest, AMillionSequencesInOneCall) {
    const std::int64_t count = emulated() ? 3000 : 1000000;
    SmallResource memory(std::size_t{1} << 30);
    const auto context = make_context(available_isas().back(), 2, &memory);
    Random random(seed_or(721));
    HEADLONG_TRACE_SEED(random);
    // of 0, 1 and 2 queries over 0 to 3 keys, in no order
    std::vector<std::int64_t> query_offsets{0};
    std::vector<std::int64_t> key_offsets{0};
    for (std::int64_t s = 0; s < count; ++s) {
        const std::uint64_t bits = random.bits();
        query_offsets.push_back(query_offsets.back() + static_cast<std::int64_t>(bits % 7 % 3));
        key_offsets.push_back(key_offsets.back() + static_cast<std::int64_t>(bits >> 20U & 3U));
    }
    const std::int64_t rows = query_offsets.back();
    const std::int64_t keys = key_offsets.back();
    std::uint64_t state = random.bits();
    const auto numbers = [&](std::int64_t n) {
        std::vector<float> x(static_cast<std::size_t>(n));
        for (float& y : x) {
            state = state * 6364136223846793005U + 1442695040888963407U;
            y = static_cast<float>(state >> 40U) * 0x1p-23F - 1.0F;
        }
        return x;
    };
    const std::vector<float> query = numbers(2 * rows);
    const std::vector<float> key = numbers(2 * keys);
    const std::vector<float> value = numbers(2 * keys);
    std::vector<float> out(static_cast<std::size_t>(2 * rows), 7.0F);
    attend_packed(*context, InputTensor<3>::dense(query.data(), {1, rows, 2}),
                  InputTensor<3>::dense(key.data(), {1, keys, 2}), InputTensor<3>::dense(value.data(), {1, keys, 2}),
                  query_offsets, key_offsets, {}, OutputTensor<3>::dense(out.data(), {1, rows, 2}));
    std::int64_t wrong = 0;
    for (std::size_t s = 0; s < static_cast<std::size_t>(count); ++s) {
        const std::int64_t first = key_offsets[s];
        for (std::int64_t i = query_offsets[s]; i < query_offsets[s + 1]; ++i) {
            double want[2];
            attend_by_hand(query.data() + 2 * i, key.data() + 2 * first, value.data() + 2 * first,
                           key_offsets[s + 1] - first, want);
            for (int d = 0; d < 2; ++d) {
                wrong += std::abs(want[d] - static_cast<double>(out[static_cast<std::size_t>(2 * i + d)])) > 1e-5;
            }
        }
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_LT(context->scratch_bytes(), static_cast<std::size_t>(count) * 700 + (std::size_t{1} << 22))
        << "a sequence takes more than its lists";
}

TEST(ExtremesTest, AHundredThousandInABatchAndThousandsOverOneCache) {
    const std::int64_t batch = emulated() ? 2000 : 100000;
    SmallResource memory(std::size_t{1} << 30);
    Random random(seed_or(722));
    {
        const auto context = make_context(available_isas().back(), 2, &memory);
        // one key each: the output is its value
        std::vector<float> value(static_cast<std::size_t>(batch));
        for (std::size_t i = 0; i < value.size(); ++i) value[i] = static_cast<float>(i % 8191) - 4000.0F;
        std::vector<float> out(value.size(), 7.0F);
        const InputTensor<4> one = InputTensor<4>::dense(value.data(), {batch, 1, 1, 1});
        attend(*context, one, one, one, {}, OutputTensor<4>::dense(out.data(), {batch, 1, 1, 1}));
        EXPECT_TRUE(same_bits(out, value));
    }
    // queries over the same cache: over a span and more, so that they are looked at for what they share
    const TokenRows rows;
    const auto context = make_context(available_isas().back(), 2, &memory);
    const std::int64_t count = emulated() ? 60 : 20000;
    const std::size_t length = emulated() ? 520 : 513;
    const Tokens tokens = tokens_up_to(length);
    KvCacheOptions options;
    options.shape = rows.shape({});
    KvCache cache(options);
    rows.append(*context, cache, tokens, 0, length, 0);
    const std::vector<float> query = rows.rows(tokens, length - 1, 1, 0, TokenRows::Kind::query);
    std::vector<float> want(static_cast<std::size_t>(rows.heads() * (rows.value_dim + 1)));
    std::vector<float> out(want.size() * static_cast<std::size_t>(count));
    std::vector<CachedQuery> queries;
    queries.reserve(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
        queries.push_back(rows.cached(query.data(), cache, 1, 0, out.data() + i * want.size()));
    }
    AttentionOptions window;  // (what a query sees is not the point)
    window.window_left = 3;
    attend(*context, queries, window);
    const CachedQuery one = rows.cached(query.data(), cache, 1, 0, want.data());
    attend(*context, std::span(&one, 1), window);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < queries.size(); ++i) {
        wrong += std::memcmp(out.data() + i * want.size(), want.data(), want.size() * sizeof(float)) != 0 ? 1U : 0U;
    }
    EXPECT_EQ(wrong, 0U);
}

// ------------------------------------------------------------------------------------------- heads of every size

struct HeadsCase {
    std::int64_t heads, kv_heads, head_dim, value_dim, q_len, kv_len;
};

void check_heads(const HeadsCase& h, const KvTypes& types, Random& random) {
    AttentionCase c;
    c.heads = h.heads;
    c.kv_heads = h.kv_heads;
    c.head_dim = h.head_dim;
    c.value_dim = h.value_dim;
    c.q_lens = {h.q_len};
    c.kv_lens = {h.kv_len};
    c.causal = true;
    c.cache = types;
    fill_normal(c, random);
    if (h.heads > 1000) {  // as many slopes and logits as there are heads
        c.alibi_slopes = alibi_slopes_for(h.heads);
        c.sink_logits.resize(static_cast<std::size_t>(h.heads));
        for (float& logit : c.sink_logits) logit = random.normal_f32();
    }
    SCOPED_TRACE(c.describe());
    const bool codes = types.keys >= KvType::int8 || types.values >= KvType::int8;
    const Expected want = expected(c);
    const Expected stored = types == KvTypes{} ? want : expected(as_stored(c));
    HEADLONG_FOR_EACH_ISA(isa) {
        if (left_to_native_tests(isa)) continue;
        Context& context = shared_context(isa, 3);
        if (types != KvTypes{}) {
            const Outcome cached = run(context, c, Route::cache);
            EXPECT_TRUE(codes ? agrees_in_codes(c, cached, stored) : agrees(c, cached, stored));
            continue;
        }
        const Outcome plain = run(context, c, Route::plain);
        EXPECT_TRUE(agrees(c, plain, want));
        for (const Route route : {Route::cache, Route::paged, Route::packed}) {
            EXPECT_TRUE(same_bits(run(context, c, route), plain)) << to_string(route);
        }
    }
}

TEST(ExtremesTest, HeadsOfOneElementAndOfFourThousand) {
    Random random(seed_or(731));
    HEADLONG_TRACE_SEED(random);
    std::vector<HeadsCase> cases{
        {2, 1, 1, 1, 3, 20},       {2, 2, 1, 4096, 3, 20}, {2, 1, 4096, 1, 3, 20},
        {1, 1, 4096, 4096, 2, 70}, {3, 3, 4096, 5, 2, 40}, {1, 1, 4095, 4097, 1, 17},
    };
    if (emulated()) cases = {{1, 1, 1, 4096, 1, 17}, {1, 1, 4096, 1, 1, 17}};
    for (const HeadsCase& h : cases) check_heads(h, {}, random);
    for (const KvTypes& types : {KvTypes{KvType::f16, KvType::bf16}, KvTypes{KvType::int8, KvType::int4},
                                 KvTypes{KvType::int4, KvType::int8}}) {
        check_heads(cases.front(), types, random);
        check_heads(cases.back(), types, random);
    }
}

TEST(ExtremesTest, AThousandHeads) {
    Random random(seed_or(732));
    HEADLONG_TRACE_SEED(random);
    std::vector<HeadsCase> cases{
        {1024, 1, 5, 3, 2, 40}, {1024, 1024, 5, 3, 2, 40}, {1024, 2, 16, 8, 1, 530},
        {994, 14, 8, 8, 3, 20}, {1065, 15, 1, 1, 1, 100},  // 71 heads a group
    };
    if (emulated()) cases = {{1024, 1, 2, 1, 1, 17}, {1065, 15, 1, 2, 1, 5}};
    for (const HeadsCase& h : cases) {
        check_heads(h, {}, random);
        check_heads(h, {KvType::int8, KvType::int8}, random);
    }
}

}  // namespace
}  // namespace headlong::test
