#include "tests/support/attention_case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <sstream>
#include <tuple>
#include <utility>

#include "engine/reference/quantise.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/isas.hpp"
#include "tests/support/views.hpp"

namespace headlong::test {

Context& shared_context(Isa isa, std::size_t threads) {
    static std::map<std::pair<Isa, std::size_t>, std::unique_ptr<Context>> contexts;
    std::unique_ptr<Context>& context = contexts[{isa, threads}];
    if (context == nullptr) context = make_context(isa, threads);
    return *context;
}

namespace {

std::int64_t largest(const std::vector<std::int64_t>& lengths) noexcept {
    return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
}

const InputTensor<4>& view_of(const AttentionCase& c, Part part) {
    return part == Part::query ? c.query : part == Part::key ? c.key : c.value;
}

/// The view of rank 3 of one sequence.
InputTensor<3> one_of(const InputTensor<4>& view, std::int64_t s) {
    return {moved(view.data, view.dtype, s * view.strides[0]),
            view.dtype,
            {view.extents[1], view.extents[2], view.extents[3]},
            {view.strides[1], view.strides[2], view.strides[3]}};
}

/// Where a call writes: outputs of all sequences, padded as the inputs are.
struct Outputs {
    AnyTensor<4> output;
    AnyTensor<3> lse;

    Outputs(const AttentionCase& c, Random* random)
        : output(make<4>(element_of(c.output_type), {c.sequences(), c.heads, c.longest_q(), c.value_dim}, random)),
          lse(make<3>(Element::f32, {c.sequences(), c.heads, c.longest_q()}, random)) {}

    template <std::size_t Rank>
    static AnyTensor<Rank> make(Element element, const Extents<Rank>& extents, Random* random) {
        return random != nullptr ? AnyTensor<Rank>::random(element, extents, *random)
                                 : AnyTensor<Rank>(element, extents);
    }

    OutputTensor<3> output_of(std::int64_t s, std::int64_t first, std::int64_t count) const {
        const OutputTensor<4> all = output.output();
        return {moved(all.data, all.dtype, s * all.strides[0] + first * all.strides[2]),
                all.dtype,
                {all.extents[1], count, all.extents[3]},
                {all.strides[1], all.strides[2], all.strides[3]}};
    }
    OutputTensor<2> lse_of(std::int64_t s, std::int64_t first, std::int64_t count) const {
        const OutputTensor<3> all = lse.output();
        return {moved(all.data, all.dtype, s * all.strides[0] + first * all.strides[2]),
                all.dtype,
                {all.extents[1], count},
                {all.strides[1], all.strides[2]}};
    }

    /// The outcome; fails where rows are missing or something else was written.
    Outcome collect(const AttentionCase& c) const {
        const auto own = [&](std::int64_t s, std::int64_t row) { return row < c.q_lens[static_cast<std::size_t>(s)]; };
        EXPECT_TRUE(output.written_exactly([&](const Extents<4>& i) { return own(i[0], i[2]); }))
            << "output: " << output.describe();
        EXPECT_TRUE(lse.written_exactly([&](const Extents<3>& i) { return own(i[0], i[2]); }))
            << "lse: " << lse.describe();
        Outcome outcome;
        outcome.type = c.output_type;
        outcome.output.reserve(c.rows() * static_cast<std::size_t>(c.value_dim));
        outcome.lse.reserve(c.rows());
        for_each_index<4>(output.extents(), [&](const Extents<4>& i) {
            if (own(i[0], i[2])) outcome.output.push_back(output.bits(i));
        });
        for_each_index<3>(lse.extents(), [&](const Extents<3>& i) {
            if (own(i[0], i[2])) outcome.lse.push_back(lse.bits(i));
        });
        return outcome;
    }
};

/// What an odd cutter leaves: sizes of pieces that sum up to `length`, some of them empty.
std::vector<std::int64_t> pieces(std::int64_t length, Random* random) {
    static constexpr std::int64_t kOdd[] = {1, 3, 0, 2, 17, 15, 64, 1, 63, 100};
    const std::int64_t most = random == nullptr ? 0 : random->pick(std::vector<std::int64_t>{1, 7, 64, 65, 500, 2000});
    std::vector<std::int64_t> sizes;
    std::int64_t done = 0;
    while (done < length) {
        // one by one only for the first few: many of them are slow and show no more
        const std::int64_t size =
            random == nullptr
                ? kOdd[sizes.size() % std::size(kOdd)]
                : random->integer(random->chance(0.1) ? 0 : 1, done > 200 ? std::max<std::int64_t>(most, 100) : most);
        sizes.push_back(std::min(size, length - done));
        done += sizes.back();
    }
    return sizes;
}

KvCache cache_for(const AttentionCase& c, const std::shared_ptr<BlockPool>& pool = {}) {
    KvCacheOptions options;
    options.shape = c.cache_shape();
    options.pool = pool;
    return KvCache(options);
}

/// Masks of the call or of each query: which of the two is said here.
bool own_masks(const AttentionCase& c, Random* random) {
    if (!c.mask) return false;
    return random != nullptr && random->chance(0.5);
}

Outcome run_plain(Context& context, const AttentionCase& c, Random* random) {
    const Outputs out(c, random);
    attend(context, c.query, c.key, c.value, c.options(), out.output.output(), out.lse.output());
    return out.collect(c);
}

Outcome run_cached(Context& context, const AttentionCase& c, Random* random) {
    const Outputs out(c, random);
    const bool own = own_masks(c, random);
    std::vector<KvCache> caches;
    std::vector<CachedQuery> queries;
    caches.reserve(c.q_lens.size());
    std::shared_ptr<BlockPool> pool;
    for (std::int64_t s = 0; s < c.sequences(); ++s) {
        const auto index = static_cast<std::size_t>(s);
        caches.push_back(cache_for(c, pool));
        pool = caches.back().pool();
        const InputTensor<3> keys = one_of(c.key, s);
        const InputTensor<3> values = one_of(c.value, s);
        std::int64_t first = 0;
        for (const std::int64_t count :
             random != nullptr ? pieces(c.kv_lens[index], random) : std::vector<std::int64_t>{c.kv_lens[index]}) {
            caches.back().append(context, 0, cut(keys, 1, first, count), cut(values, 1, first, count));
            first += count;
        }
        CachedQuery query;
        query.query = cut(one_of(c.query, s), 1, 0, c.q_lens[index]);
        query.cache = &caches.back();
        query.output = out.output_of(s, 0, c.q_lens[index]);
        query.lse = out.lse_of(s, 0, c.q_lens[index]);
        if (own) query.mask = sequence_of(c, s).mask;
        queries.push_back(query);
    }
    AttentionOptions options = c.options();
    if (own) options.mask.reset();
    if (c.causal && random != nullptr && random->chance(0.5)) options.causal.reset();  // what a cache does unasked
    attend(context, queries, options);
    return out.collect(c);
}

Outcome run_paged(Context& context, const AttentionCase& c, Random* random) {
    const Outputs out(c, random);
    const bool own = own_masks(c, random);
    std::vector<std::vector<KvPage>> pages(c.q_lens.size());
    std::vector<PagedQuery> queries;
    for (std::int64_t s = 0; s < c.sequences(); ++s) {
        const auto index = static_cast<std::size_t>(s);
        const InputTensor<3> keys = one_of(c.key, s);
        const InputTensor<3> values = one_of(c.value, s);
        std::int64_t first = 0;
        for (const std::int64_t count : pieces(c.kv_lens[index], random)) {
            pages[index].push_back({cut(keys, 1, first, count), cut(values, 1, first, count)});
            first += count;
        }
        if (pages[index].empty()) pages[index].push_back({cut(keys, 1, 0, 0), cut(values, 1, 0, 0)});
        PagedQuery query;
        query.query = cut(one_of(c.query, s), 1, 0, c.q_lens[index]);
        query.pages = pages[index];
        query.output = out.output_of(s, 0, c.q_lens[index]);
        query.lse = out.lse_of(s, 0, c.q_lens[index]);
        if (own) query.mask = sequence_of(c, s).mask;
        queries.push_back(query);
    }
    AttentionOptions options = c.options();
    if (own) options.mask.reset();
    if (c.causal && random != nullptr && random->chance(0.5)) options.causal.reset();
    attend(context, queries, options);
    return out.collect(c);
}

/// The rows of all sequences one behind the other, and some that belong to none.
class Packed {
  public:
    Packed(const InputTensor<4>& padded, const std::vector<std::int64_t>& lengths, Random* random)
        : offsets_(offsets(lengths)),
          tensor_(Outputs::make<3>(element_of(padded.dtype),
                                   {padded.extents[1], offsets_.back() + kBehind, padded.extents[3]}, random)) {
        const auto element = element_of(padded.dtype);
        for_each_index<4>(padded.extents, [&](const Extents<4>& i) {
            const auto s = static_cast<std::size_t>(i[0]);
            if (i[2] >= lengths[s]) return;
            tensor_.set_bits({i[1], offsets_[s] + i[2], i[3]}, bits_at(padded.data, element, padded.strides, i));
        });
    }

    InputTensor<3> view() const { return tensor_.input(); }
    const std::vector<std::int64_t>& offsets() const { return offsets_; }

    static constexpr std::int64_t kBehind = 2;
    static std::vector<std::int64_t> offsets(const std::vector<std::int64_t>& lengths) {
        std::vector<std::int64_t> all{0};
        for (const std::int64_t length : lengths) all.push_back(all.back() + length);
        return all;
    }

  private:
    std::vector<std::int64_t> offsets_;
    AnyTensor<3> tensor_;
};

Outcome run_packed(Context& context, const AttentionCase& c, Random* random) {
    const Packed query(c.query, c.q_lens, random);
    const Packed key(c.key, c.kv_lens, random);
    const Packed value(c.value, c.kv_lens, random);
    const std::int64_t rows = query.offsets().back() + Packed::kBehind;
    const auto output = Outputs::make<3>(element_of(c.output_type), {c.heads, rows, c.value_dim}, random);
    const auto lse = Outputs::make<2>(Element::f32, {c.heads, rows}, random);
    attend_packed(context, query.view(), key.view(), value.view(), query.offsets(), key.offsets(), c.options(),
                  output.output(), lse.output());
    EXPECT_TRUE(output.written_exactly([&](const Extents<3>& i) { return i[1] < query.offsets().back(); }))
        << "output: " << output.describe();
    EXPECT_TRUE(lse.written_exactly([&](const Extents<2>& i) { return i[1] < query.offsets().back(); }))
        << "lse: " << lse.describe();
    Outcome outcome;
    outcome.type = c.output_type;
    for (std::size_t s = 0; s < c.q_lens.size(); ++s) {
        for (std::int64_t h = 0; h < c.heads; ++h) {
            for (std::int64_t row = query.offsets()[s]; row < query.offsets()[s + 1]; ++row) {
                for (std::int64_t d = 0; d < c.value_dim; ++d) outcome.output.push_back(output.bits({h, row, d}));
                outcome.lse.push_back(lse.bits({h, row}));
            }
        }
    }
    return outcome;
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- the case

std::int64_t AttentionCase::longest_q() const noexcept { return largest(q_lens); }
std::int64_t AttentionCase::longest_kv() const noexcept { return largest(kv_lens); }

bool AttentionCase::uniform() const noexcept {
    const auto same = [](const std::vector<std::int64_t>& lengths) {
        return std::all_of(lengths.begin(), lengths.end(), [&](std::int64_t n) { return n == lengths.front(); });
    };
    return same(q_lens) && same(kv_lens);
}

std::int64_t AttentionCase::live_of(std::int64_t s) const noexcept {
    return (live.empty() ? kv_lens : live)[static_cast<std::size_t>(s)];
}

std::int64_t AttentionCase::offset_of(std::int64_t s) const noexcept {
    if (features.alignment == Alignment::top_left) return 0;
    if (features.alignment == Alignment::offset) return features.causal_offset;
    return live_of(s) - q_lens[static_cast<std::size_t>(s)];
}

std::size_t AttentionCase::row_of(std::int64_t s, std::int64_t head, std::int64_t row) const noexcept {
    std::int64_t place = 0;
    for (std::int64_t before = 0; before < s; ++before) place += heads * q_lens[static_cast<std::size_t>(before)];
    return static_cast<std::size_t>(place + head * q_lens[static_cast<std::size_t>(s)] + row);
}

std::size_t AttentionCase::rows() const noexcept { return sequences() == 0 ? 0 : row_of(sequences() - 1, heads, 0); }

KvShape AttentionCase::cache_shape() const noexcept {
    return {.kv_heads = kv_heads,
            .head_dim = head_dim,
            .value_dim = value_dim,
            .key_type = cache.keys,
            .value_type = cache.values};
}

AttentionOptions AttentionCase::options() const {
    AttentionOptions all = features;
    all.causal = causal;
    all.alibi_slopes = alibi_slopes;
    all.sink_logits = sink_logits;
    all.kv_lengths = live;
    all.mask = mask;
    return all;
}

std::string AttentionCase::describe() const {
    std::ostringstream text;
    const auto list = [&](const auto& values) {
        for (std::size_t i = 0; i < values.size(); ++i) text << (i == 0 ? "" : ",") << values[i];
    };
    text << "heads " << heads << "/" << kv_heads << ", dims " << head_dim << "/" << value_dim << ", q ";
    list(q_lens);
    text << ", kv ";
    list(kv_lens);
    text << ", types " << headlong::to_string(query.dtype) << " " << headlong::to_string(key.dtype) << " "
         << headlong::to_string(value.dtype) << " -> " << headlong::to_string(output_type) << ", caches "
         << headlong::to_string(cache.keys) << ":" << headlong::to_string(cache.values);
    if (causal) text << ", causal";
    text << (features.alignment == Alignment::bottom_right ? ", bottom-right"
             : features.alignment == Alignment::top_left   ? ", top-left"
                                                           : ", offset ");
    if (features.alignment == Alignment::offset) text << features.causal_offset;
    if (features.scale) text << ", scale " << *features.scale;
    if (features.window_left != -1 || features.window_right != -1) {
        text << ", window " << features.window_left << " " << features.window_right;
    }
    if (features.softcap != 0.0F) text << ", softcap " << features.softcap;
    if (!alibi_slopes.empty()) text << ", ALiBi";
    if (!sink_logits.empty()) text << ", sinks";
    if (!live.empty()) {
        text << ", live ";
        list(live);
    }
    if (mask) {
        static constexpr const char* kNames[] = {"bool", "f32", "f16", "bf16"};
        text << ", mask " << kNames[static_cast<std::size_t>(mask->type)];
        for (std::size_t i = 0; i < mask->rank; ++i) text << " " << mask->extents[i] << "(" << mask->strides[i] << ")";
        if (mask->keys == AttentionMask::Keys::last_q) text << " of the last q";
    }
    return text.str();
}

const AnyTensor<4>& keep(AttentionCase& c, AnyTensor<4> tensor) {
    auto kept = std::make_shared<const AnyTensor<4>>(std::move(tensor));
    c.memory.push_back(kept);
    return *kept;
}

void fill_normal(AttentionCase& c, Random& random, bool layouts, Element query, Element key, Element value) {
    // Of the inputs' dimensions batch and heads may have stride 0. Tokens or a head dim of equal elements would make
    // sums of equal terms, whose roundings all go one way: a float sum of 512 of them is off by more than the bound.
    constexpr std::size_t kBroadcastable = 2;
    const auto make = [&](Element element, const Extents<4>& extents, const std::vector<std::int64_t>& lengths) {
        const AnyTensor<4>& tensor = keep(c, layouts ? AnyTensor<4>::random(element, extents, random, kBroadcastable)
                                                     : AnyTensor<4>(element, extents));
        for_each_index<4>(extents, [&](const Extents<4>& i) {
            if (i[2] < lengths[static_cast<std::size_t>(i[0])]) tensor.set(i, random.normal());
        });
        return tensor.input();
    };
    c.query = make(query, {c.sequences(), c.heads, c.longest_q(), c.head_dim}, c.q_lens);
    c.key = make(key, {c.sequences(), c.kv_heads, c.longest_kv(), c.head_dim}, c.kv_lens);
    c.value = make(value, {c.sequences(), c.kv_heads, c.longest_kv(), c.value_dim}, c.kv_lens);
}

AttentionCase dense_case(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, std::int64_t value_dim,
                         const std::vector<double>& query, const std::vector<double>& key,
                         const std::vector<double>& value, Element element) {
    AttentionCase c;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.head_dim = head_dim;
    c.value_dim = value_dim;
    c.q_lens = {static_cast<std::int64_t>(query.size()) / (heads * head_dim)};
    c.kv_lens = {static_cast<std::int64_t>(key.size()) / (kv_heads * head_dim)};
    const auto make = [&](const Extents<4>& extents, const std::vector<double>& elements) {
        const AnyTensor<4>& tensor = keep(c, AnyTensor<4>(element, extents));
        tensor.assign(elements);
        return tensor.input();
    };
    c.query = make({1, heads, c.q_lens[0], head_dim}, query);
    c.key = make({1, kv_heads, c.kv_lens[0], head_dim}, key);
    c.value = make({1, kv_heads, c.kv_lens[0], value_dim}, value);
    return c;
}

void set_mask(AttentionCase& c, Element element, const std::vector<std::int64_t>& extents,
              const std::vector<double>& values, AttentionMask::Keys keys) {
    Extents<4> full{1, 1, 1, 1};
    std::copy(extents.begin(), extents.end(), full.end() - static_cast<std::ptrdiff_t>(extents.size()));
    const AnyTensor<4>& tensor = keep(c, AnyTensor<4>(element, full));
    tensor.assign(values);
    c.mask = AttentionMask::dense(tensor.data(), static_cast<AttentionMask::Type>(element), extents);
    c.mask->keys = keys;
}

// ------------------------------------------------------------------------------------------------- parts of a case

AttentionCase sequence_of(const AttentionCase& c, std::int64_t s) {
    const auto index = static_cast<std::size_t>(s);
    AttentionCase one = c;
    one.q_lens = {c.q_lens[index]};
    one.kv_lens = {c.kv_lens[index]};
    if (!c.live.empty()) one.live = {c.live[index]};
    one.query = cut(cut(c.query, 0, s, 1), 2, 0, one.q_lens[0]);
    one.key = cut(cut(c.key, 0, s, 1), 2, 0, one.kv_lens[0]);
    one.value = cut(cut(c.value, 0, s, 1), 2, 0, one.kv_lens[0]);
    if (!c.mask) return one;
    AttentionMask& mask = *one.mask;
    if (mask.rank == 4) {
        cut_mask(mask, 0, s, 1);
        mask.rank = 3;
        std::copy(mask.extents.begin() + 1, mask.extents.end(), mask.extents.begin());
        std::copy(mask.strides.begin() + 1, mask.strides.end(), mask.strides.begin());
    }
    if (mask.rank >= 2) cut_mask(mask, mask.rank - 2, 0, std::min(mask.extents[mask.rank - 2], one.q_lens[0]));
    const std::int64_t columns = mask.keys == AttentionMask::Keys::last_q ? one.q_lens[0] : one.kv_lens[0];
    cut_mask(mask, mask.rank - 1, 0, std::min(mask.extents[mask.rank - 1], columns));
    return one;
}

AttentionCase rows_of(const AttentionCase& c, std::int64_t first, std::int64_t count) {
    AttentionCase part = c;
    part.features.alignment = Alignment::offset;
    part.features.causal_offset = c.offset_of(0) + first;
    part.q_lens = {count};
    part.query = cut(c.query, 2, first, count);
    if (part.mask && part.mask->rank >= 2) cut_mask(*part.mask, part.mask->rank - 2, first, count);
    return part;
}

AttentionCase keys_of(const AttentionCase& c, std::int64_t first, std::int64_t count) {
    AttentionCase part = c;
    part.features.alignment = Alignment::offset;
    part.features.causal_offset = c.offset_of(0) - first;
    if (c.mask) {
        // keys behind a short mask are not allowed; without them what is left cannot become a broadcast column
        const std::int64_t columns = c.mask->extents[c.mask->rank - 1];
        if (columns != 1) count = std::min(count, std::max<std::int64_t>(columns - first, 0));
        cut_mask(*part.mask, part.mask->rank - 1, count == 0 ? 0 : first, count);
    }
    part.kv_lens = {count};
    part.key = cut(c.key, 2, count == 0 ? 0 : first, count);
    part.value = cut(c.value, 2, count == 0 ? 0 : first, count);
    if (!c.live.empty()) part.live = {std::clamp<std::int64_t>(c.live[0] - first, 0, count)};
    return part;
}

AttentionCase as_stored(const AttentionCase& c) {
    AttentionCase stored = c;
    const auto round = [&](const InputTensor<4>& view, KvType type, const auto& rounded) {
        const Element element = type == KvType::f16    ? Element::f16
                                : type == KvType::bf16 ? Element::bf16
                                                       : Element::f32;
        const AnyTensor<4>& tensor = keep(stored, AnyTensor<4>(element, view.extents));
        tensor.assign(rounded(type, reference::widen(view).values, view.extents[3]));
        return tensor.input();
    };
    stored.key = round(c.key, c.cache.keys, reference::stored_keys);
    stored.value = round(c.value, c.cache.values, reference::stored_values);
    return stored;
}

Element element_of(const AttentionCase& c, Part part) {
    if (part == Part::mask) return element_of(c.mask->type);
    return element_of(view_of(c, part).dtype);
}

bool is_dense(const AttentionCase& c, Part part) {
    if (part == Part::mask) {
        const AttentionMask& mask = *c.mask;
        std::int64_t stride = 1;
        for (std::size_t i = mask.rank; i-- > 0; stride *= mask.extents[i]) {
            if (mask.strides[i] != stride) return false;
        }
        return true;
    }
    const InputTensor<4>& view = view_of(c, part);
    return view.strides == dense_strides<4>(view.extents);
}

AttentionCase with_copy_of(const AttentionCase& c, Part part, Element element, bool dense) {
    AttentionCase copied = c;
    if (part == Part::mask) {
        AttentionMask& mask = *copied.mask;
        const auto front = static_cast<std::ptrdiff_t>(4 - mask.rank);
        Extents<4> extents{1, 1, 1, 1};
        Extents<4> strides{};
        std::copy_n(mask.extents.begin(), mask.rank, extents.begin() + front);
        std::copy_n(mask.strides.begin(), mask.rank, strides.begin() + front);
        const AnyTensor<4>& tensor =
            keep(copied, copy_of<4>(mask.data, element_of(mask.type), extents, strides, element, dense));
        mask.data = tensor.data();
        mask.type = static_cast<AttentionMask::Type>(element);
        std::copy_n(tensor.strides().begin() + front, mask.rank, mask.strides.begin());
        return copied;
    }
    const InputTensor<4>& view = view_of(c, part);
    const AnyTensor<4>& tensor =
        keep(copied, copy_of<4>(view.data, element_of(view.dtype), view.extents, view.strides, element, dense));
    (part == Part::query ? copied.query : part == Part::key ? copied.key : copied.value) = tensor.input();
    return copied;
}

AttentionCase with_own_memory(const AttentionCase& c) {
    AttentionCase own = c;
    for (const Part part : {Part::query, Part::key, Part::value, Part::mask}) {
        if (part != Part::mask || c.mask) own = with_copy_of(own, part, element_of(c, part), false);
    }
    return own;
}

AttentionCase between_empty_sequences(const AttentionCase& c) {
    constexpr std::int64_t kIdleKeys = 3;
    AttentionCase three = c;
    three.q_lens = {0, c.q_lens[0], 0};
    three.kv_lens = {0, c.kv_lens[0], kIdleKeys};
    if (!c.live.empty()) three.live = {0, c.live[0], kIdleKeys};
    const auto middle = [&](const InputTensor<4>& view, std::int64_t longest) {
        const AnyTensor<4>& tensor =
            keep(three, AnyTensor<4>(element_of(view.dtype), {3, view.extents[1], longest, view.extents[3]}));
        const reference::Tensor wide = reference::widen(view);
        auto next = wide.values.begin();
        for_each_index<4>(view.extents, [&](const Extents<4>& i) { tensor.set({1, i[1], i[2], i[3]}, *next++); });
        return tensor.input();
    };
    three.query = middle(c.query, three.longest_q());
    three.key = middle(c.key, three.longest_kv());
    three.value = middle(c.value, three.longest_kv());
    return three;
}

// ---------------------------------------------------------------------------------------------- ways to compute it

const char* to_string(Route route) noexcept {
    static constexpr const char* kNames[] = {"plain tensors", "cache", "pages", "packed rows"};
    return kNames[static_cast<std::size_t>(route)];
}

bool possible(const AttentionCase& c, Route route) noexcept {
    if (route == Route::plain) return c.uniform();
    return c.sequences() > 0 && c.heads > 0 && c.kv_heads > 0;
}

std::vector<Route> possible_routes(const AttentionCase& c) {
    std::vector<Route> routes;
    for (const Route route : {Route::plain, Route::cache, Route::paged, Route::packed}) {
        if (possible(c, route)) routes.push_back(route);
    }
    return routes;
}

Outcome run(Context& context, const AttentionCase& c, Route route, Random* random) {
    switch (route) {
        case Route::plain:
            return run_plain(context, c, random);
        case Route::cache:
            return run_cached(context, c, random);
        case Route::paged:
            return run_paged(context, c, random);
        case Route::packed:
            break;
    }
    return run_packed(context, c, random);
}

bool can_run_in_chunks(const AttentionCase& c) noexcept {
    return c.causal && possible(c, Route::cache) && !(c.mask && c.mask->keys == AttentionMask::Keys::last_q);
}

Outcome run_in_chunks(Context& context, const AttentionCase& c, std::int64_t chunk, Random* random) {
    const Outputs out(c, random);
    for (std::int64_t s = 0; s < c.sequences(); ++s) {
        const AttentionCase one = sequence_of(c, s);
        KvCache cache = cache_for(c);
        const InputTensor<3> keys = one_of(one.key, 0);
        const InputTensor<3> values = one_of(one.value, 0);
        const bool bottom_right = c.features.alignment == Alignment::bottom_right;
        for (std::int64_t first = 0; first < one.q_lens[0];) {
            const std::int64_t rest = one.q_lens[0] - first;
            const std::int64_t count =
                chunk == 0 ? random->integer(1, std::min<std::int64_t>(rest, 70)) : std::min(chunk, rest);
            // the last row of the chunk sees the most, and its own key is the last one that has come
            const std::int64_t offset = one.offset_of(0) + first;
            const std::int64_t seen =
                offset > one.live_of(0) ? one.live_of(0) : std::clamp<std::int64_t>(offset + count, 0, one.live_of(0));
            const std::int64_t held = cache.length();
            cache.append(context, 0, cut(keys, 1, held, seen - held), cut(values, 1, held, seen - held));
            const AttentionCase part = rows_of(one, first, count);
            AttentionOptions options = part.options();
            options.kv_lengths = {};
            // as decoding does it, where that is the same
            if (bottom_right && offset + count == seen) {
                options.alignment = Alignment::bottom_right;
                options.causal_offset = 0;
                options.causal.reset();
            }
            if (part.mask) {
                options.mask = part.mask;
                const std::size_t last = part.mask->rank - 1;
                cut_mask(*options.mask, last, 0, std::min(part.mask->extents[last], seen));
            }
            CachedQuery query;
            query.query = one_of(part.query, 0);
            query.cache = &cache;
            query.output = out.output_of(s, first, count);
            query.lse = out.lse_of(s, first, count);
            attend(context, {&query, 1}, options);
            first += count;
        }
    }
    return out.collect(c);
}

Outcome run_merged(Context& context, const AttentionCase& c, const std::vector<std::int64_t>& cuts,
                   std::size_t sink_part) {
    std::vector<std::int64_t> ends = cuts;
    ends.push_back(c.kv_lens[0]);
    std::vector<std::unique_ptr<Outputs>> outputs;
    std::vector<AttentionPart> parts;
    std::int64_t first = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) {
        AttentionCase part = keys_of(c, first, ends[i] - first);
        part.output_type = DType::f32;
        if (i != sink_part) part.sink_logits.clear();
        outputs.push_back(std::make_unique<Outputs>(part, nullptr));
        const Outputs& out = *outputs.back();
        attend(context, part.query, part.key, part.value, part.options(), out.output.output(), out.lse.output());
        parts.push_back({out.output.input(), out.lse.input()});
        first = ends[i];
    }
    const Outputs joined(c, nullptr);
    merge(context, parts, joined.output.output(), joined.lse.output());
    return joined.collect(c);
}

bool can_share_prefix(const AttentionCase& c, std::int64_t prefix) noexcept {
    if (c.features.alignment != Alignment::bottom_right || c.sequences() == 0 || !possible(c, Route::cache)) {
        return false;
    }
    if (c.mask && c.mask->keys != AttentionMask::Keys::last_q) return false;
    for (std::int64_t s = 0; s < c.sequences(); ++s) {
        // a mask lies over keys of the suffix
        const std::int64_t own = c.mask ? c.q_lens[static_cast<std::size_t>(s)] : 0;
        if (prefix > c.live_of(s) - own) return false;
    }
    return true;
}

Outcome run_with_shared_prefix(Context& context, const AttentionCase& c, std::int64_t prefix) {
    const Outputs out(c, nullptr);
    KvCache common = cache_for(c);
    common.append(context, 0, cut(one_of(c.key, 0), 1, 0, prefix), cut(one_of(c.value, 0), 1, 0, prefix));
    std::vector<KvCache> caches;
    std::vector<CachedQuery> queries;
    caches.reserve(c.q_lens.size());
    for (std::int64_t s = 0; s < c.sequences(); ++s) {
        const auto index = static_cast<std::size_t>(s);
        caches.push_back(cache_for(c, common.pool()));
        const std::int64_t own = c.kv_lens[index] - prefix;
        caches.back().append(context, 0, cut(one_of(c.key, s), 1, prefix, own),
                             cut(one_of(c.value, s), 1, prefix, own));
        CachedQuery query;
        query.query = cut(one_of(c.query, s), 1, 0, c.q_lens[index]);
        query.cache = &caches.back();
        query.output = out.output_of(s, 0, c.q_lens[index]);
        query.lse = out.lse_of(s, 0, c.q_lens[index]);
        if (c.mask) query.mask = sequence_of(c, s).mask;
        queries.push_back(query);
    }
    AttentionOptions options = c.options();
    options.mask.reset();
    std::vector<std::int64_t> live = c.live;
    for (std::int64_t& length : live) length -= prefix;
    options.kv_lengths = live;
    attend_shared_prefix(context, common, queries, options);
    return out.collect(c);
}

Outcome rows_of(const AttentionCase& c, const Outcome& outcome, std::int64_t first, std::int64_t count) {
    Outcome part;
    part.type = outcome.type;
    const auto width = static_cast<std::ptrdiff_t>(c.value_dim);
    for (std::int64_t h = 0; h < c.heads; ++h) {
        const auto row = static_cast<std::ptrdiff_t>(c.row_of(0, h, first));
        part.output.insert(part.output.end(), outcome.output.begin() + row * width,
                           outcome.output.begin() + (row + count) * width);
        part.lse.insert(part.lse.end(), outcome.lse.begin() + row, outcome.lse.begin() + row + count);
    }
    return part;
}

Outcome sequence_of(const AttentionCase& c, const Outcome& outcome, std::int64_t s) {
    const auto begin = static_cast<std::ptrdiff_t>(c.row_of(s, 0, 0));
    const auto end = static_cast<std::ptrdiff_t>(c.row_of(s, c.heads, 0));
    const auto width = static_cast<std::ptrdiff_t>(c.value_dim);
    return {outcome.type,
            {outcome.output.begin() + begin * width, outcome.output.begin() + end * width},
            {outcome.lse.begin() + begin, outcome.lse.begin() + end}};
}

// ------------------------------------------------------------------------------------------------------ comparisons

Expected expected(const AttentionCase& c, std::optional<reference::Scores> scores) {
    Expected want;
    const auto add = [&](const AttentionCase& part) {
        reference::AttentionOptions options = reference::widen(part.options());
        options.scores = scores;
        want.parts.push_back(reference::attention(reference::widen(part.query), reference::widen(part.key),
                                                  reference::widen(part.value), options));
        const reference::AttentionResult& result = want.parts.back();
        want.output.insert(want.output.end(), result.output.values.begin(), result.output.values.end());
        want.lse.insert(want.lse.end(), result.lse.values.begin(), result.lse.values.end());
        want.output_bound.resize(want.lse.size(), output_tolerance(result.magnitudes));
        want.lse_bound.resize(want.lse.size(), lse_tolerance(result.magnitudes));
    };
    if (c.uniform()) {
        add(c);
    } else {
        for (std::int64_t s = 0; s < c.sequences(); ++s) add(sequence_of(c, s));
    }
    return want;
}

void poison_dead_keys(AttentionCase& c, const Expected& masked, Random& random) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const std::int64_t group = c.kv_heads == 0 ? 1 : std::max<std::int64_t>(c.heads / c.kv_heads, 1);
    reference::Tensor alive({c.sequences(), c.kv_heads, c.longest_kv()});
    for (std::int64_t s = 0; s < c.sequences(); ++s) {
        const reference::Tensor& scores = masked.parts[c.uniform() ? 0 : static_cast<std::size_t>(s)].scores;
        const auto index = static_cast<std::size_t>(s);
        for (std::int64_t h = 0; h < c.heads; ++h) {
            for (std::int64_t i = 0; i < c.q_lens[index]; ++i) {
                for (std::int64_t j = 0; j < c.kv_lens[index]; ++j) {
                    if (scores.at(c.uniform() ? s : 0, h, i, j) != -kInfinity) alive.at(s, h / group, j) = 1.0;
                }
            }
        }
    }
    const double poison =
        random.pick(std::vector<double>{std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity});
    for (const InputTensor<4>* view : {&c.key, &c.value}) {
        const std::size_t bytes = headlong::size_of(view->dtype);
        const std::uint32_t bits = bits_of(element_of(view->dtype), poison);
        std::vector<std::pair<std::byte*, std::uint32_t>> living;
        std::vector<std::byte*> dead;
        for_each_index<4>(view->extents, [&](const Extents<4>& i) {
            if (i[2] >= c.kv_lens[static_cast<std::size_t>(i[0])]) return;
            std::int64_t place = 0;
            for (std::size_t d = 0; d < 4; ++d) place += i[d] * view->strides[d];
            auto* element = static_cast<std::byte*>(const_cast<void*>(moved(view->data, view->dtype, place)));
            if (alive.at(i[0], i[1], i[2]) == 0.0) {
                dead.push_back(element);
            } else {
                living.emplace_back(element, 0);
                std::memcpy(&living.back().second, element, bytes);
            }
        });
        for (std::byte* element : dead) std::memcpy(element, &bits, bytes);
        // heads and sequences may share memory: what lives for one of them lives
        for (const auto& [element, value] : living) std::memcpy(element, &value, bytes);
    }
}

double half_ulp(DType type, double x) noexcept {
    if (type == DType::f32 || !std::isfinite(x)) return 0.0;
    const bool f16 = type == DType::f16;
    const int exponent = x == 0.0 ? -1000 : std::ilogb(x);
    return std::ldexp(1.0, std::max(exponent, f16 ? -14 : -126) - (f16 ? 11 : 8));
}

namespace {

/// The first and the worst disagreement of rows of `width` elements, `slack` bounds apart.
template <class Want>
testing::AssertionResult compare(const AttentionCase& c, const char* what, DType type,
                                 const std::vector<std::uint32_t>& got, const Want& want, std::size_t count,
                                 const std::vector<double>& bounds, std::size_t width, double slack,
                                 bool rounded_twice) {
    if (got.size() != count)
        return testing::AssertionFailure() << what << ": " << got.size() << " elements, want " << count;
    std::size_t wrong = 0;
    std::size_t worst = 0;
    double worst_excess = -1.0;
    double allowed = 0.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const double value = value_of(element_of(type), got[i]);
        double bound = slack * bounds[i / width];
        bound += (rounded_twice ? 2.0 : 1.0) * half_ulp(type, std::abs(want(i)) + bound);
        if (agree(value, want(i), bound)) continue;
        ++wrong;
        double excess = std::abs(value - want(i)) / bound;
        if (std::isnan(excess)) excess = std::numeric_limits<double>::infinity();
        if (excess > worst_excess) {
            worst_excess = excess;
            worst = i;
            allowed = bound;
        }
    }
    if (wrong == 0) return testing::AssertionSuccess();
    std::size_t row = worst / width;
    std::int64_t s = 0;
    while (s + 1 < c.sequences() && row >= c.row_of(s + 1, 0, 0)) ++s;
    row -= c.row_of(s, 0, 0);
    const auto q_len = static_cast<std::size_t>(c.q_lens[static_cast<std::size_t>(s)]);
    std::ostringstream text;
    text << std::setprecision(10) << what << ": " << wrong << " of " << got.size()
         << " elements are wrong, the worst at sequence " << s << ", head " << row / q_len << ", row " << row % q_len
         << ", column " << worst % width << ": got " << value_of(element_of(type), got[worst]) << ", want "
         << want(worst) << ", allowed " << allowed << ", " << worst_excess << " times as much";
    return testing::AssertionFailure() << text.str();
}

std::size_t width_of(const AttentionCase& c) {
    return static_cast<std::size_t>(std::max<std::int64_t>(c.value_dim, 1));
}

}  // namespace

testing::AssertionResult agrees(const AttentionCase& c, const Outcome& got, const Expected& want) {
    testing::AssertionResult output = compare(
        c, "output", got.type, got.output, [&](std::size_t i) { return want.output[i]; }, want.output.size(),
        want.output_bound, width_of(c), 1.0, false);
    if (!output) return output;
    return compare(
        c, "lse", DType::f32, got.lse, [&](std::size_t i) { return want.lse[i]; }, want.lse.size(), want.lse_bound, 1,
        1.0, false);
}

testing::AssertionResult agrees_in_codes(const AttentionCase& c, const Outcome& got, const Expected& want) {
    if (got.output.size() != want.output.size()) return testing::AssertionFailure() << "output: another size";
    double score = 0.0;
    double terms = 0.0;
    for (const reference::AttentionResult& part : want.parts) {
        score = std::max(score, part.magnitudes.score);
        terms = std::max(terms, part.magnitudes.terms);
    }
    const double large = std::max(1.0, score / 8.0);
    const std::size_t width = width_of(c);
    double square = 0.0;
    double square_error = 0.0;
    double largest_row = 0.0;
    for (std::size_t first = 0; first < want.output.size(); first += width) {
        double row = 0.0;
        for (std::size_t i = first; i < first + width; ++i) {
            const double error = std::abs(value_of(element_of(got.type), got.output[i]) - want.output[i]);
            if (!std::isfinite(error)) continue;  // agree() has its say below
            row += want.output[i] * want.output[i];
            square_error += std::pow(std::max(error - half_ulp(got.type, want.output[i]), 0.0), 2);
        }
        square += row;
        largest_row = std::max(largest_row, std::sqrt(row / static_cast<double>(width)));
    }
    const double count = static_cast<double>(std::max<std::size_t>(want.output.size(), 1));
    double allowed = 1.5e-4 * large * std::sqrt(square / count);
    if (!want.output_bound.empty()) allowed += *std::max_element(want.output_bound.begin(), want.output_bound.end());
    if (const double error = std::sqrt(square_error / count); error > allowed) {
        return testing::AssertionFailure()
               << "output: the error's root mean square is " << error << ", allowed " << allowed;
    }
    Expected bounds = want;
    for (double& bound : bounds.output_bound) bound += 1.5e-3 * large * largest_row;
    // a score's error reaches lse in full, and grows with the terms of its product
    for (double& bound : bounds.lse_bound) bound += 5e-4 * std::max(1.0, terms / 8.0);
    return agrees(c, got, bounds);
}

testing::AssertionResult close(const AttentionCase& c, const Outcome& a, const Outcome& b, const Expected& bounds) {
    testing::AssertionResult output = compare(
        c, "output", a.type, a.output, [&](std::size_t i) { return value_of(element_of(b.type), b.output[i]); },
        b.output.size(), bounds.output_bound, width_of(c), 2.0, true);
    if (!output) return output;
    return compare(
        c, "lse", DType::f32, a.lse, [&](std::size_t i) { return value_of(Element::f32, b.lse[i]); }, b.lse.size(),
        bounds.lse_bound, 1, 2.0, true);
}

testing::AssertionResult same_bits(const Outcome& a, const Outcome& b) {
    if (a.type != b.type) return testing::AssertionFailure() << "element types differ";
    const auto compared = [](const char* what, DType type, const std::vector<std::uint32_t>& x,
                             const std::vector<std::uint32_t>& y) -> testing::AssertionResult {
        if (x == y) return testing::AssertionSuccess();
        if (x.size() != y.size())
            return testing::AssertionFailure() << what << ": " << x.size() << " elements and " << y.size();
        std::size_t different = 0;
        std::size_t first = x.size();
        for (std::size_t i = x.size(); i-- > 0;) {
            if (x[i] == y[i]) continue;
            ++different;
            first = i;
        }
        std::ostringstream text;
        text << what << ": " << different << " of " << x.size() << " elements differ in their bits, the first at "
             << first << std::setprecision(9) << ": " << value_of(element_of(type), x[first]) << " (0x" << std::hex
             << x[first] << ") and " << value_of(element_of(type), y[first]) << " (0x" << y[first] << ")";
        return testing::AssertionFailure() << text.str();
    };
    testing::AssertionResult output = compared("output", a.type, a.output, b.output);
    return output ? compared("lse", DType::f32, a.lse, b.lse) : output;
}

}  // namespace headlong::test
