// Arguments that make no sense: exactly an InvalidArgument, whose message names the argument, its value and what is
// allowed, and outputs that nobody has touched. Options are tried in every function that takes them.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <headlong/headlong.hpp>

#include "tests/support/any_tensor.hpp"
#include "tests/support/attention_case.hpp"

namespace headlong::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

using Words = std::vector<std::string>;

/// Valid arguments of every function, for tests to break. Two sequences, 4 heads over 2, 3 queries, 5 keys, dims 8
/// and 6. Caches have 3 layers.
class AttentionRefusalsTest : public testing::Test {
  protected:
    static constexpr std::int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kQ = 3, kKv = 5, kDim = 8, kValueDim = 6;

    AttentionRefusalsTest() {
        c_.heads = kHeads;
        c_.kv_heads = kKvHeads;
        c_.head_dim = kDim;
        c_.value_dim = kValueDim;
        c_.q_lens = {kQ, kQ};
        c_.kv_lens = {kKv, kKv};
        Random random(1);
        fill_normal(c_, random, false);
        query_ = c_.query;
        key_ = c_.key;
        value_ = c_.value;
        for (KvCache* cache : {&cache_, &prefix_}) {
            for (std::size_t layer = 0; layer < 3; ++layer) {
                cache->append(context_, layer, first_of(c_.key), first_of(c_.value));
            }
        }
        for (std::int64_t s = 0; s < kBatch; ++s) {
            CachedQuery query;
            query.query = first_of(c_.query);
            query.cache = &cache_;
            query.output = sequence(output_.output(), s);
            query.lse = sequence(lse_.output(), s);
            cached_.push_back(query);
            PagedQuery paged;
            paged.query = query.query;
            paged.pages = {&page_, 1};
            paged.output = query.output;
            paged.lse = query.lse;
            paged_.push_back(paged);
        }
        page_ = {first_of(c_.key), first_of(c_.value)};
    }

    static KvCacheOptions cache_options(std::int64_t head_dim = kDim) {
        KvCacheOptions options;
        options.shape = {.kv_heads = kKvHeads, .head_dim = head_dim, .value_dim = kValueDim};
        options.layers = 3;
        return options;
    }

    static InputTensor<3> first_of(const InputTensor<4>& view) {
        return {view.data,
                view.dtype,
                {view.extents[1], view.extents[2], view.extents[3]},
                {view.strides[1], view.strides[2], view.strides[3]}};
    }
    static OutputTensor<3> sequence(const OutputTensor<4>& view, std::int64_t s) {
        return {static_cast<float*>(view.data) + s * view.strides[0],
                view.dtype,
                {view.extents[1], view.extents[2], view.extents[3]},
                {view.strides[1], view.strides[2], view.strides[3]}};
    }
    static OutputTensor<2> sequence(const OutputTensor<3>& view, std::int64_t s) {
        return {static_cast<float*>(view.data) + s * view.strides[0],
                view.dtype,
                {view.extents[1], view.extents[2]},
                {view.strides[1], view.strides[2]}};
    }

    void plain() { attend(context_, query_, key_, value_, options_, output_.output(), lse_.output()); }
    void packed() {
        // the first sequence, and an empty one
        attend_packed(context_, first_of(query_), first_of(key_), first_of(value_), query_offsets_, key_offsets_,
                      options_, sequence(output_.output(), 0), sequence(lse_.output(), 0));
    }
    void cached() { attend(context_, cached_, options_); }
    void paged() { attend(context_, paged_, options_); }
    void shared() { attend_shared_prefix(context_, prefix_, cached_, options_); }
    void scores() { attention_scores(context_, query_, key_, options_, stage_, scores_.output()); }
    void cache_scores() {
        attention_scores(context_, first_of(query_), cache_, 0, options_, stage_, sequence(scores_.output(), 0));
    }

    /// Whether a call is refused for what the words say.
    void refused(const char* what, const std::function<void()>& call, const Words& words) {
        SCOPED_TRACE(what);
        std::string message = "nothing was thrown";
        bool right = false;
        try {
            call();
        } catch (const InvalidArgument& error) {
            right = true;
            message = error.what();
        } catch (const std::exception& error) {
            message = std::string("another exception: ") + error.what();
        }
        EXPECT_TRUE(right) << message;
        for (const std::string& word : words) {
            EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
        }
        expect_untouched(output_);
        expect_untouched(lse_);
        expect_untouched(scores_);
    }

    /// And makes it so, for the next call.
    template <std::size_t Rank>
    static void expect_untouched(const AnyTensor<Rank>& tensor) {
        EXPECT_TRUE(tensor.untouched());
        for_each_index<Rank>(tensor.extents(),
                             [&](const Extents<Rank>& i) { tensor.set_bits(i, canary_of(tensor.element())); });
    }

    /// An option that no function may take.
    void refused_everywhere(const Words& words) {
        refused(
            "plain", [&] { plain(); }, words);
        refused(
            "packed", [&] { packed(); }, words);
        refused(
            "cached", [&] { cached(); }, words);
        refused(
            "paged", [&] { paged(); }, words);
        refused(
            "scores", [&] { scores(); }, words);
        refused_with_one_sequence(words);
    }
    void refused_with_one_sequence(const Words& words) {
        refused(
            "cache_scores", [&] { cache_scores(); }, words);
    }

    void set_option_mask(AttentionMask::Type type, const std::vector<std::int64_t>& extents) {
        options_.mask = AttentionMask::dense(mask_memory_.data(), type, extents);
    }

    Context context_;
    AttentionCase c_;
    InputTensor<4> query_, key_, value_;
    AttentionOptions options_;
    ScoreStage stage_ = ScoreStage::masked;
    AnyTensor<4> output_{Element::f32, {kBatch, kHeads, kQ, kValueDim}};
    AnyTensor<3> lse_{Element::f32, {kBatch, kHeads, kQ}};
    AnyTensor<4> scores_{Element::f32, {kBatch, kHeads, kQ, kKv}};
    std::vector<std::int64_t> query_offsets_{0, kQ, kQ};
    std::vector<std::int64_t> key_offsets_{0, kKv, kKv};
    KvCache cache_{cache_options()};
    KvCache prefix_{cache_options()};
    KvPage page_;
    std::vector<CachedQuery> cached_;
    std::vector<PagedQuery> paged_;
    std::vector<float> mask_memory_ = std::vector<float>(1024, 0.0F);
    std::vector<float> slopes_, sinks_;
    std::vector<std::int64_t> lengths_;
};

TEST_F(AttentionRefusalsTest, TheUnbrokenCallsPass) {
    plain();
    packed();
    cached();
    paged();
    shared();
    scores();
    cache_scores();
}

TEST_F(AttentionRefusalsTest, ScaleAndSoftcap) {
    for (const float bad : {kNaN, kInfinity, -kInfinity}) {
        options_.scale = bad;
        refused_everywhere({"scale", std::isnan(bad) ? "nan" : "inf"});
        refused("shared", [&] { shared(); }, {"scale"});
    }
    options_.scale.reset();
    for (const float bad : {-1.0F, kNaN, kInfinity, 1e-31F, 1e31F, -1e-40F, 1e-40F}) {
        options_.softcap = bad;
        refused_everywhere({"softcap", std::isnan(bad) ? "nan" : std::isinf(bad) ? "inf" : bad == -1.0F ? "-1" : "e"});
        refused("shared", [&] { shared(); }, {"softcap"});
    }
}

TEST_F(AttentionRefusalsTest, WindowsAndAlignment) {
    for (const std::int64_t bad : {std::int64_t{-2}, std::numeric_limits<std::int64_t>::min()}) {
        options_ = {};
        options_.window_left = bad;
        refused_everywhere({"window_left", std::to_string(bad), "-1"});
        options_ = {};
        options_.window_right = bad;
        refused_everywhere({"window_right", std::to_string(bad), "-1"});
    }
    for (const Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
        options_ = {};
        options_.alignment = alignment;
        options_.causal_offset = 3;
        refused_everywhere({"causal_offset", "3"});
    }
    options_ = {};
    options_.alignment = static_cast<Alignment>(7);
    refused_everywhere({"alignment", "7", "bottom_right"});
}

TEST_F(AttentionRefusalsTest, SlopesAndSinks) {
    for (const std::size_t count : {1U, 3U, 5U}) {
        slopes_.assign(count, 0.5F);
        options_ = {};
        options_.alibi_slopes = slopes_;
        refused_everywhere({"alibi_slopes", std::to_string(count), "4"});
        options_ = {};
        options_.sink_logits = slopes_;
        refused_everywhere({"sink_logits", std::to_string(count), "4"});
    }
    for (const float bad : {kNaN, kInfinity, -kInfinity}) {
        slopes_ = {0.5F, 0.5F, bad, 0.5F};
        options_ = {};
        options_.alibi_slopes = slopes_;
        refused_everywhere({"alibi_slopes", "2", std::isnan(bad) ? "nan" : "inf"});
        if (bad == -kInfinity) continue;  // no sink
        options_ = {};
        options_.sink_logits = slopes_;
        refused_everywhere({"sink_logits", "2", std::isnan(bad) ? "nan" : "inf"});
    }
}

TEST_F(AttentionRefusalsTest, KvLengths) {
    for (const std::size_t count : {1U, 3U}) {
        lengths_.assign(count, 1);
        options_.kv_lengths = lengths_;
        const Words words{"kv_lengths", std::to_string(count), "2"};
        refused(
            "plain", [&] { plain(); }, words);
        refused(
            "packed", [&] { packed(); }, words);
        refused(
            "cached", [&] { cached(); }, words);
        refused(
            "paged", [&] { paged(); }, words);
        refused(
            "shared", [&] { shared(); }, words);
        refused(
            "scores", [&] { scores(); }, words);
    }
    lengths_.assign(2, 1);
    options_.kv_lengths = lengths_;
    refused_with_one_sequence({"kv_lengths", "2", "1"});
    for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{6}, kHuge}) {
        lengths_ = {1, bad};
        options_.kv_lengths = lengths_;
        const Words words{"kv_lengths", std::to_string(bad)};
        for (const auto& [what, call] :
             std::vector<std::pair<const char*, std::function<void()>>>{{"plain", [&] { plain(); }},
                                                                        {"cached", [&] { cached(); }},
                                                                        {"paged", [&] { paged(); }},
                                                                        {"shared", [&] { shared(); }},
                                                                        {"scores", [&] { scores(); }}}) {
            refused(what, call, words);
            if (bad > 0) refused(what, call, {"5"});
        }
        refused(
            "packed", [&] { packed(); }, words);
    }
    lengths_ = {1, 4};  // more than the second packed sequence has
    key_offsets_ = {0, 2, 5};
    options_.kv_lengths = lengths_;
    refused("packed", [&] { packed(); }, {"kv_lengths", "4", "3"});
}

TEST_F(AttentionRefusalsTest, Masks) {
    using Type = AttentionMask::Type;
    set_option_mask(Type::f32, {kQ, kKv});
    for (const std::size_t rank : {std::size_t{0}, std::size_t{5}, ~std::size_t{0}}) {
        options_.mask->rank = rank;
        refused_everywhere({"mask", "rank", std::to_string(rank), "4"});
    }
    const std::vector<std::int64_t> five{1, 1, 1, 1, 1};
    set_option_mask(Type::f32, five);
    refused_everywhere({"mask", "rank"});
    set_option_mask(Type::f32, {});
    refused_everywhere({"mask", "rank"});
    set_option_mask(static_cast<Type>(9), {kKv});
    refused_everywhere({"mask", "type", "9"});
    set_option_mask(Type::boolean, {kKv});
    options_.mask->keys = static_cast<AttentionMask::Keys>(9);
    refused_everywhere({"mask", "keys", "9"});
    set_option_mask(Type::boolean, {kKv});
    options_.mask->data = nullptr;
    refused_everywhere({"mask", "null"});

    set_option_mask(Type::boolean, {kKv});
    options_.mask->extents[0] = -1;
    refused_everywhere({"mask", "-1"});
    set_option_mask(Type::boolean, {kKv + 1});  // more keys than there are
    refused_everywhere({"mask", "6"});
    set_option_mask(Type::boolean, {kQ + 1, kKv});
    refused_everywhere({"mask", "4", "3"});
    set_option_mask(Type::boolean, {2, kKv});  // a short q extent is no padding
    refused("plain", [&] { plain(); }, {"mask", "2", "3"});
    refused("cached", [&] { cached(); }, {"mask", "2", "3"});
    set_option_mask(Type::boolean, {kHeads + 1, kQ, kKv});
    refused_everywhere({"mask", "5", "4"});
    set_option_mask(Type::boolean, {kKvHeads, kQ, kKv});  // heads, not KV heads
    refused_everywhere({"mask", "2", "4"});
    set_option_mask(Type::boolean, {kBatch + 1, 1, kQ, kKv});
    refused("plain", [&] { plain(); }, {"mask", "3", "2"});
    refused("scores", [&] { scores(); }, {"mask", "3", "2"});

    set_option_mask(Type::f32, {kQ, kKv});
    options_.mask->strides[0] = kHuge;
    refused_everywhere({"mask", std::to_string(kHuge)});
    options_.mask->strides[0] = std::numeric_limits<std::int64_t>::min();
    refused_everywhere({"mask"});

    for (const std::int64_t last : {kQ - 1, kQ + 1, kKv}) {
        set_option_mask(Type::boolean, {kQ, last});
        options_.mask->keys = AttentionMask::Keys::last_q;
        const Words words{"mask", std::to_string(last), "3"};
        refused(
            "plain", [&] { plain(); }, words);
        refused(
            "cached", [&] { cached(); }, words);
        refused(
            "paged", [&] { paged(); }, words);
        refused(
            "scores", [&] { scores(); }, words);
        refused(
            "cache_scores", [&] { cache_scores(); }, words);
    }
}

TEST_F(AttentionRefusalsTest, MasksOfAQuery) {
    set_option_mask(AttentionMask::Type::boolean, {kQ, kKv});
    cached_[1].mask = options_.mask;
    paged_[1].mask = options_.mask;
    refused("cached, both", [&] { cached(); }, {"mask"});
    refused("paged, both", [&] { paged(); }, {"mask"});
    options_.mask.reset();
    for (const std::size_t rank : {std::size_t{0}, std::size_t{4}}) {
        cached_[1].mask->rank = rank;
        cached_[1].mask->extents = {1, 1, 1, kKv};
        paged_[1].mask = cached_[1].mask;
        refused("cached", [&] { cached(); }, {"mask", "rank", std::to_string(rank), "3"});
        refused("paged", [&] { paged(); }, {"mask", "rank", std::to_string(rank), "3"});
    }
}

TEST_F(AttentionRefusalsTest, ElementTypes) {
    const auto bad = static_cast<DType>(7);
    for (InputTensor<4>* view : {&query_, &key_, &value_}) {
        const char* name = view == &query_ ? "query" : view == &key_ ? "key" : "value";
        view->dtype = bad;
        refused("plain", [&] { plain(); }, {name, "7"});
        refused("packed", [&] { packed(); }, {name, "7"});
        if (view != &value_) refused("scores", [&] { scores(); }, {name, "7"});
        view->dtype = DType::f32;
    }
    OutputTensor<4> output = output_.output();
    OutputTensor<3> lse = lse_.output();
    OutputTensor<4> scores = scores_.output();
    const auto call = [&] { attend(context_, query_, key_, value_, options_, output, lse); };
    output.dtype = bad;
    refused("output", call, {"output", "7"});
    output.dtype = DType::f32;
    for (const DType type : {DType::f16, DType::bf16, bad}) {
        const std::string name = type == bad ? "7" : to_string(type);
        lse.dtype = type;
        refused("lse", call, {"lse", name, "f32"});
        cached_[0].lse.dtype = type;
        refused("cached lse", [&] { cached(); }, {"lse", name, "f32"});
        cached_[0].lse.dtype = DType::f32;
        paged_[1].lse.dtype = type;
        refused("paged lse", [&] { paged(); }, {"lse", name, "f32"});
        paged_[1].lse.dtype = DType::f32;
    }
    scores.dtype = bad;
    refused("scores", [&] { attention_scores(context_, query_, key_, options_, stage_, scores); }, {"scores", "7"});
    cached_[1].query.dtype = bad;
    refused("cached", [&] { cached(); }, {"query", "7"});
    page_.key.dtype = bad;
    refused("paged", [&] { paged(); }, {"key", "7"});
    page_.key.dtype = DType::f32;
    page_.value.dtype = bad;
    refused("paged", [&] { paged(); }, {"value", "7"});
}

TEST_F(AttentionRefusalsTest, PackedOffsets) {
    const auto packed_refused = [&](std::vector<std::int64_t> query, std::vector<std::int64_t> key,
                                    const Words& words) {
        query_offsets_ = std::move(query);
        key_offsets_ = std::move(key);
        refused(
            "packed", [&] { packed(); }, words);
    };
    packed_refused({0, 2, 1}, {0, 2, 5}, {"query_offsets", "1", "2"});
    packed_refused({0, 1, 3}, {0, 4, 3}, {"key_offsets", "3", "4"});
    packed_refused({-1, 1, 3}, {0, 2, 5}, {"query_offsets", "-1", "0"});
    packed_refused({0, -1, 3}, {0, 2, 5}, {"query_offsets", "-1"});
    packed_refused({0, 1, 3}, {0, std::numeric_limits<std::int64_t>::min(), 5}, {"key_offsets"});
    packed_refused({1, 1, 3}, {0, 2, 5}, {"query_offsets", "1", "0"});
    packed_refused({0, 1, 3}, {2, 2, 5}, {"key_offsets", "2", "0"});
    packed_refused({0, 1, 4}, {0, 2, 5}, {"query_offsets", "4", "3"});
    packed_refused({0, 1, 3}, {0, 2, 6}, {"key_offsets", "6", "5"});
    packed_refused({0, 1, 3}, {0, 2, kHuge}, {"key_offsets", std::to_string(kHuge), "5"});
    packed_refused({0, 3}, {0, 2, 5}, {"_offsets", "2", "3"});
    packed_refused({0, 1, 3}, {0}, {"_offsets", "1", "3"});
    packed_refused({}, {}, {"query_offsets", "0"});
    packed_refused({0, 1, 3}, {}, {"key_offsets", "0"});
}

TEST_F(AttentionRefusalsTest, Pages) {
    paged_[1].pages = {};
    refused("none", [&] { paged(); }, {"pages"});
    const KvPage good = page_;
    std::vector<KvPage> pages{good, good};
    paged_[1].pages = pages;
    pages[1].key.extents[2] = kDim - 1;
    refused("head_dim", [&] { paged(); }, {"key", "7", "8"});
    pages[1] = good;
    pages[1].key.extents[0] = 1;
    refused("kv_heads", [&] { paged(); }, {"key", "1", "2"});
    pages[1] = good;
    pages[1].value.extents[0] = 1;
    refused("kv_heads of values", [&] { paged(); }, {"value", "1", "2"});
    pages[1] = good;
    pages[1].value.extents[2] = kValueDim - 1;
    refused("value_dim", [&] { paged(); }, {"value", "5", "6"});
    pages[1] = good;
    pages[1].value.extents[1] = kKv - 1;
    refused("tokens", [&] { paged(); }, {"value", "4", "5"});
    pages[1] = good;
    pages[1].key.data = nullptr;
    refused("null", [&] { paged(); }, {"key", "null"});
    pages[1] = good;
    pages[1].key.extents[1] = -1;
    refused("negative", [&] { paged(); }, {"key", "-1"});
    pages = {good};
    paged_[1].pages = pages;
    paged_[1].output.extents[2] = kValueDim - 1;
    refused("output", [&] { paged(); }, {"output", "5", "6"});
    paged_[1].output = paged_[0].output;
    paged_[1].query.extents[0] = kHeads - 1;
    refused("heads", [&] { paged(); }, {"query", "3", "4"});
}

TEST_F(AttentionRefusalsTest, MergeOfDifferentShapes) {
    const AnyTensor<4> part(Element::f32, {kBatch, kHeads, kQ, kValueDim});
    const AnyTensor<3> part_lse(Element::f32, {kBatch, kHeads, kQ});
    for_each_index<4>(part.extents(), [&](const Extents<4>& i) { part.set(i, 1.0); });
    for_each_index<3>(part_lse.extents(), [&](const Extents<3>& i) { part_lse.set(i, 1.0); });
    const AttentionPart good{part.input(), part_lse.input()};
    std::vector<AttentionPart> parts{good, good};
    OutputTensor<3> lse = lse_.output();
    const auto call = [&] { merge(context_, parts, output_.output(), lse); };
    for (std::size_t d = 0; d < 4; ++d) {
        parts = {good, good};
        parts[1].output.extents[d] -= 1;
        refused("output", call,
                {"output", std::to_string(good.output.extents[d] - 1), std::to_string(good.output.extents[d])});
    }
    for (std::size_t d = 0; d < 3; ++d) {
        parts = {good, good};
        parts[1].lse.extents[d] -= 1;
        refused("lse", call, {"lse", std::to_string(good.lse.extents[d] - 1), std::to_string(good.lse.extents[d])});
    }
    parts = {good, good};
    parts[0].lse.data = nullptr;
    refused("no lse", call, {"lse", "null"});
    parts = {good, good};
    parts[1].lse.dtype = DType::f16;
    refused("lse type", call, {"lse", "f16", "f32"});
    parts = {good, good};
    parts[1].output.dtype = static_cast<DType>(7);
    refused("output type", call, {"output", "7"});
    parts = {good, good};
    lse.extents[2] -= 1;
    refused("result's lse", call, {"lse", "2", "3"});
    lse = lse_.output();
    lse.dtype = DType::bf16;
    refused("result's lse type", call, {"lse", "bf16", "f32"});
}

TEST_F(AttentionRefusalsTest, SharedPrefix) {
    const auto call = [&] { shared(); };
    for (const Alignment alignment : {Alignment::top_left, Alignment::offset, static_cast<Alignment>(7)}) {
        options_.alignment = alignment;
        refused("alignment", call, {"alignment", "bottom_right"});
    }
    options_ = {};
    set_option_mask(AttentionMask::Type::boolean, {kQ, kQ});
    refused("mask of all keys", call, {"mask", "last_q"});
    options_ = {};
    cached_[1].mask =
        AttentionMask::dense(mask_memory_.data(), AttentionMask::Type::boolean, std::vector<std::int64_t>{kQ, kKv});
    refused("own mask of all keys", call, {"mask", "last_q"});
    cached_[1].mask.reset();
    cached_[1].output.dtype = static_cast<DType>(7);
    refused("output type", call, {"output", "7"});
    cached_[1].output.dtype = DType::f32;
    cached_[1].layer = 1;
    refused("layers", call, {"layer", "1", "0"});
    cached_[0].layer = cached_[1].layer = 3;
    refused("no such layer", call, {"layer", "3"});
    cached_[0].layer = cached_[1].layer = 0;
    const KvCache other(cache_options(kDim - 1));
    refused("another shape", [&] { attend_shared_prefix(context_, other, cached_, options_); }, {"prefix"});
    KvCacheOptions rotated = cache_options();
    RotaryOptions rotary;
    rotary.head_dim = kDim;
    rotated.rotary.emplace(rotary);
    const KvCache turning(rotated);
    refused("a rotary prefix", [&] { attend_shared_prefix(context_, turning, cached_, options_); }, {"rotary"});
    {  // columns of a mask that would lie over the prefix
        const std::uint8_t all = 1;
        const std::int64_t extents[2] = {1, 1};
        cached_[1].mask = AttentionMask::dense(&all, AttentionMask::Type::boolean, extents);
        cached_[1].mask->keys = AttentionMask::Keys::last_q;
        const std::vector<std::int64_t> none(cached_.size(), 0);
        options_.kv_lengths = none;
        refused("a mask over the prefix", call, {"mask", "suffix", "0"});
        options_.kv_lengths = {};
        cached_[1].mask.reset();
    }
    cached_[1].cache = &turning;
    refused("a rotary suffix", call, {"rotary"});
    cached_[1].cache = nullptr;
    refused("no cache", call, {"cache", "null"});
}

TEST_F(AttentionRefusalsTest, Scores) {
    OutputTensor<4> scores = scores_.output();
    const auto call = [&] { attention_scores(context_, query_, key_, options_, stage_, scores); };
    for (std::size_t d = 0; d < 4; ++d) {
        for (const std::int64_t by : {-1, 1}) {
            scores = scores_.output();
            scores.extents[d] += by;
            refused("extent", call,
                    {"scores", std::to_string(scores.extents[d]), std::to_string(scores.extents[d] - by)});
        }
    }
    scores = scores_.output();
    scores.data = nullptr;
    refused("null", call, {"scores", "null"});
    scores = scores_.output();
    scores.strides[3] = 0;
    refused("stride", call, {"scores", "0"});
    scores = scores_.output();
    stage_ = static_cast<ScoreStage>(9);
    refused("stage", call, {"stage", "9"});
    refused("stage", [&] { cache_scores(); }, {"stage", "9"});
    stage_ = ScoreStage::scaled;
    key_.extents[3] = kDim - 1;
    refused("key", call, {"key", "7", "8"});
    OutputTensor<3> one = sequence(scores_.output(), 0);
    one.extents[2] += 1;
    refused("cache", [&] { attention_scores(context_, first_of(query_), cache_, 0, options_, stage_, one); },
            {"scores", "6", "5"});
    refused("layer",
            [&] {
                attention_scores(context_, first_of(query_), cache_, 3, options_, stage_,
                                 sequence(scores_.output(), 0));
            },
            {"layer", "3"});
}

TEST_F(AttentionRefusalsTest, OutputsThatShareMemory) {
    OutputTensor<4> output = output_.output();
    const auto call = [&] { attend(context_, query_, key_, value_, options_, output, lse_.output()); };
    for (std::size_t d = 0; d < 4; ++d) {
        output = output_.output();
        output.strides[d] = 0;
        refused("stride", call, {"output", "0"});
    }
    output = output_.output();
    output.extents[3] += 1;
    refused("extent", call, {"output", "7", "6"});
}

TEST_F(AttentionRefusalsTest, Helpers) {
    for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::min()}) {
        refused("window_left_of", [&] { static_cast<void>(window_left_of(bad)); },
                {"sliding_window", std::to_string(bad), "1"});
        refused("alibi_slopes_for", [&] { static_cast<void>(alibi_slopes_for(bad)); },
                {"heads", std::to_string(bad), "1"});
    }
    refused("alibi_slopes_for", [&] { static_cast<void>(alibi_slopes_for((1 << 20) + 1)); },
            {"heads", "1048577", "1048576"});
    EXPECT_EQ(window_left_of(1), 0);
    EXPECT_EQ(window_left_of(4096), 4095);
    EXPECT_EQ(window_left_of(kHuge), kHuge - 1);
}

}  // namespace
}  // namespace headlong::test
