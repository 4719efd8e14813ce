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

/// What a call over `kv_len` keys makes of the last rows, if only the last kTail of them are not zero; heads of one
/// element, so that as many keys as possible fit into the address space.
constexpr std::int64_t kTail = 1000;

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
        {"window on both sides, offset",
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

}  // namespace
}  // namespace headlong::test
