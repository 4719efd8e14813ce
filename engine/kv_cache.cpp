#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "engine/block_rows.hpp"
#include "engine/carver.hpp"
#include "engine/context_impl.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/parallel.hpp"
#include "engine/rows.hpp"
#include "engine/validate.hpp"
#include "kernels/compiler.hpp"
#include "kernels/half.hpp"

namespace headlong {
namespace {

constexpr auto kBlock = static_cast<std::int64_t>(kernels::kBlockTokens);
constexpr std::int64_t kMaxLayers = std::int64_t{1} << 20;
constexpr std::int64_t kMostChunk = std::int64_t{1} << 40;  // sums of a ring and a chunk stay far from 2^63
constexpr std::int64_t kMostRing = std::int64_t{1} << 47;

std::int64_t count_of(std::size_t n) noexcept { return static_cast<std::int64_t>(n); }
std::size_t size(std::int64_t n) noexcept { return static_cast<std::size_t>(n); }

std::size_t blocks_for(std::int64_t tokens) noexcept {
    return static_cast<std::size_t>(tokens / kBlock + (tokens % kBlock != 0 ? 1 : 0));
}

void check_options(const KvCacheOptions& options) {
    check_shape(options.shape);
    if (options.layers < 1 || options.layers > kMaxLayers) {
        throw InvalidArgument(
            fmt::format("KvCacheOptions: layers is {}; allowed: 1 to {}", options.layers, kMaxLayers));
    }
    if (options.capacity < 1) {
        throw InvalidArgument(fmt::format("KvCacheOptions: capacity is {}; it must be at least 1", options.capacity));
    }
    if (options.sink_tokens < 0 || options.sink_tokens >= options.capacity) {
        throw InvalidArgument(fmt::format("KvCacheOptions: sink_tokens is {}; allowed: 0 to {}, one less than capacity",
                                          options.sink_tokens, options.capacity - 1));
    }
    if (options.max_chunk < 1 || options.max_chunk > kMostChunk) {
        throw InvalidArgument(
            fmt::format("KvCacheOptions: max_chunk is {}; allowed: 1 to {}", options.max_chunk, kMostChunk));
    }
    if (options.ring && options.capacity > kMostRing) {
        throw InvalidArgument(
            fmt::format("KvCacheOptions: capacity is {}; a ring's is at most {}", options.capacity, kMostRing));
    }
    if (!options.layer_windows.empty() && options.layer_windows.size() != static_cast<std::size_t>(options.layers)) {
        throw InvalidArgument(
            fmt::format("KvCacheOptions: layer_windows has {} elements; it must have one per layer, {}",
                        options.layer_windows.size(), options.layers));
    }
    for (std::size_t i = 0; i < options.layer_windows.size(); ++i) {
        if (options.layer_windows[i] >= 0 && options.layer_windows[i] <= kMostRing) continue;
        throw InvalidArgument(fmt::format("KvCacheOptions: layer_windows[{}] is {}; allowed: 0 (none) to {}", i,
                                          options.layer_windows[i], kMostRing));
    }
    if (options.rotary && options.rotary->head_dim() != options.shape.head_dim) {
        throw InvalidArgument(fmt::format("KvCacheOptions: rotary is made for a head_dim of {}; the shape's is {}",
                                          options.rotary->head_dim(), options.shape.head_dim));
    }
    if (options.rotary && !options.layer_rotary.empty()) {
        throw InvalidArgument("KvCacheOptions: rotary and layer_rotary are both given; give one");
    }
    if (!options.layer_rotary.empty() && options.layer_rotary.size() != static_cast<std::size_t>(options.layers)) {
        throw InvalidArgument(
            fmt::format("KvCacheOptions: layer_rotary has {} elements; it must have one per layer, {}",
                        options.layer_rotary.size(), options.layers));
    }
    for (std::size_t i = 0; i < options.layer_rotary.size(); ++i) {
        const std::optional<Rotary>& rotary = options.layer_rotary[i];
        if (!rotary || rotary->head_dim() == options.shape.head_dim) continue;
        throw InvalidArgument(
            fmt::format("KvCacheOptions: layer_rotary[{}] is made for a head_dim of {}; the shape's is {}", i,
                        rotary->head_dim(), options.shape.head_dim));
    }
    const bool codes = kernels::has_codes(stored_type(options.shape.key_type));
    if (options.hadamard_keys && !codes) {
        throw InvalidArgument(fmt::format("KvCacheOptions: hadamard_keys is true and keys are {}; allowed: int8, int4",
                                          to_string(options.shape.key_type)));
    }
    if (!options.key_centre.empty()) {
        if (!codes) {
            throw InvalidArgument(
                fmt::format("KvCacheOptions: key_centre is given and keys are {}; allowed: int8, int4",
                            to_string(options.shape.key_type)));
        }
        const auto elements = static_cast<std::size_t>(options.shape.kv_heads * options.shape.head_dim);
        if (options.key_centre.size() != elements) {
            throw InvalidArgument(
                fmt::format("KvCacheOptions: key_centre has {} elements; it must have kv_heads x head_dim, {}",
                            options.key_centre.size(), elements));
        }
        for (std::size_t i = 0; i < elements; ++i) {
            if (std::isfinite(options.key_centre[i])) continue;
            throw InvalidArgument(
                fmt::format("KvCacheOptions: key_centre[{}] is {}; it must be finite", i, options.key_centre[i]));
        }
    }
    if (options.f16_sinks) {
        const bool value_codes = kernels::has_codes(stored_type(options.shape.value_type));
        if (!codes && !value_codes) {
            throw InvalidArgument(
                fmt::format("KvCacheOptions: f16_sinks is true, keys are {} and values {}; one must be int8 or int4",
                            to_string(options.shape.key_type), to_string(options.shape.value_type)));
        }
        if (options.sink_tokens == 0) {
            throw InvalidArgument("KvCacheOptions: f16_sinks is true and sink_tokens is 0; it must be at least 1");
        }
    }
    if (options.pool != nullptr && options.memory != nullptr) {
        throw InvalidArgument("KvCacheOptions: pool and memory are both set; give one");
    }
    if (options.pool != nullptr && !(options.pool->shape() == options.shape)) {
        throw InvalidArgument("KvCacheOptions: pool holds blocks of another shape than the cache's");
    }
}

std::shared_ptr<BlockPool> pool_of(const KvCacheOptions& options) {
    check_options(options);
    return options.pool != nullptr ? options.pool : std::make_shared<BlockPool>(options.shape, options.memory);
}

std::shared_ptr<const KvCache::Impl::Rotaries> rotaries_of(const KvCacheOptions& options,
                                                           std::pmr::memory_resource& memory) {
    using Rotaries = KvCache::Impl::Rotaries;
    const std::pmr::polymorphic_allocator<Rotaries> allocator(&memory);
    const auto& per_layer = options.layer_rotary;
    return per_layer.empty() ? std::allocate_shared<Rotaries>(allocator, 1, options.rotary)
                             : std::allocate_shared<Rotaries>(allocator, per_layer.begin(), per_layer.end());
}

std::shared_ptr<const KeyTransform> transform_of(const KvCacheOptions& options, std::pmr::memory_resource& memory) {
    const std::pmr::polymorphic_allocator<KeyTransform> allocator(&memory);
    return std::allocate_shared<KeyTransform>(
        allocator,
        KeyTransform{{options.key_centre.begin(), options.key_centre.end(), &memory}, options.hadamard_keys});
}

/// Writes one element, rounded to nearest even where its type is narrower.
void store_element(void* data, DType type, std::int64_t offset, float x) noexcept {
    switch (type) {
        case DType::f32:
            static_cast<float*>(data)[offset] = x;
            return;
        case DType::f16:
            static_cast<std::uint16_t*>(data)[offset] = kernels::narrow_f16(x);
            return;
        case DType::bf16:
            static_cast<std::uint16_t*>(data)[offset] = kernels::narrow_bf16(x);
            return;
    }
}

// Keys to be rotated go in rounds, which bounds the tables of cosines and sines whatever the length of an append.
constexpr std::int64_t kRoundTokens = 64 * kBlock;

}  // namespace

/// Where keys are made ready before they are stored: a part of a workspace.
struct KvCache::Impl::RowScratch {
    const std::optional<Rotary>& rotary;
    float* cosine;  ///< [kRoundTokens][half], of the round's first row on; with a rotary description
    float* sine;
    float* rows;  ///< [worker][kPanelTokens][head_dim]
};

KvCache::Impl::Impl(const KvCacheOptions& options)
    : pool(pool_of(options)),
      capacity(options.capacity),
      ring(options.ring),
      sink_tokens(options.sink_tokens),
      with_f16_sinks(options.f16_sinks),
      max_chunk(options.max_chunk),
      rotaries(rotaries_of(options, memory())),
      transform(transform_of(options, memory())),
      layers(layers_of(options, memory())),
      f16_sinks(options.f16_sinks ? sinks_of(options) : nullptr) {}

std::pmr::vector<KvCache::Impl::Layer> KvCache::Impl::layers_of(const KvCacheOptions& options,
                                                                std::pmr::memory_resource& memory) {
    std::pmr::vector<Layer> layers(&memory);
    layers.reserve(size(options.layers));
    std::int64_t with_sinks = 0;
    for (std::size_t i = 0; i < size(options.layers); ++i) {
        Layer& layer = layers.emplace_back(layer_of(options, i, memory));
        if (options.f16_sinks && layer.sinks > 0) layer.own_sinks = with_sinks++;
    }
    return layers;
}

std::unique_ptr<KvCache::Impl> KvCache::Impl::sinks_of(const KvCacheOptions& options) const {
    std::vector<std::optional<Rotary>> turned;
    for (std::size_t i = 0; i < layers.size(); ++i) {
        if (layers[i].own_sinks >= 0) turned.push_back(rotary(i));
    }
    if (turned.empty()) return nullptr;  // windows without sinks in all layers
    KvCacheOptions sinks;
    sinks.shape = f16_shape_of(options.shape);
    sinks.layers = count_of(turned.size());
    sinks.layer_rotary = turned;
    sinks.pool = pool->impl().f16_pool();
    return std::make_unique<Impl>(sinks);
}

KvCache::Impl::Layer KvCache::Impl::layer_of(const KvCacheOptions& options, std::size_t index,
                                             std::pmr::memory_resource& memory) noexcept {
    Layer layer(memory);
    layer.sinks = options.sink_tokens;
    if (options.ring) layer.window = options.capacity - options.sink_tokens;
    const std::int64_t window = options.layer_windows.empty() ? 0 : options.layer_windows[index];
    if (window > 0 && window <= layer.window) {  // a local layer sees no sinks
        layer.sinks = 0;
        layer.window = window;
    }
    layer.held_from = layer.sinks;
    if (layer.forgets()) layer.blocks = BlockTable(memory, count_of(blocks_for(layer.sinks)));
    return layer;
}

KvCache::Impl::Impl(const Impl& parent, std::nullptr_t)
    : pool(parent.pool),
      capacity(parent.capacity),
      ring(parent.ring),
      sink_tokens(parent.sink_tokens),
      with_f16_sinks(parent.with_f16_sinks),
      max_chunk(parent.max_chunk),
      rotaries(parent.rotaries),
      transform(parent.transform),
      layers(&memory()),
      f16_sinks(parent.f16_sinks != nullptr ? std::make_unique<Impl>(*parent.f16_sinks, nullptr) : nullptr) {
    layers.reserve(parent.layers.size());
    for (const Layer& from : parent.layers) {
        Layer& layer = layers.emplace_back(memory());
        layer.blocks = from.blocks;
        layer.length = from.length;
        layer.sinks = from.sinks;
        layer.window = from.window;
        layer.held_from = from.held_from;
        layer.own_sinks = from.own_sinks;
    }
    for (Layer& layer : layers) {  // from here on nothing can fail
        while (layer.blocks.end() > count_of(blocks_for(layer.length))) layer.blocks.pop_back();
        layer.blocks.for_each([&](const Block& block) noexcept { pool->impl().share(block); });
    }
}

KvCache::Impl::~Impl() { reset(); }

KvCache::Impl::AppendScratch KvCache::Impl::append_scratch(const Context::Impl& context, std::int64_t head_dim,
                                                           std::int64_t rotary_dim, std::int64_t tokens) noexcept {
    const auto floats = [](std::size_t count) noexcept { return saturating_product(count, sizeof(float)); };
    return {floats(static_cast<std::size_t>(std::min(tokens, kRoundTokens) * rotary_dim)),
            floats(context.executor->worker_slots() * kernels::kPanelTokens * static_cast<std::size_t>(head_dim))};
}

const KvCache::Impl::Layer& KvCache::Impl::layer(std::size_t index) const {
    if (index >= layers.size()) {
        throw InvalidArgument(fmt::format("layer is {}; the cache has layers 0 to {}", index, layers.size() - 1));
    }
    return layers[index];
}

std::int64_t KvCache::Impl::length() const noexcept {
    std::int64_t least = layers.front().length;
    for (const Layer& layer : layers) least = std::min(least, layer.length);
    return least;
}

std::int64_t KvCache::Impl::most_at_once() const noexcept {
    std::int64_t most = Layer::kUnbounded;
    for (const Layer& layer : layers) {
        if (layer.forgets()) most = std::min(most, std::max(max_chunk, layer.sinks + layer.window - layer.length));
    }
    return most;
}

std::int64_t KvCache::Impl::most_blocks(const Layer& layer, std::int64_t max_chunk) noexcept {
    if (!layer.forgets()) return Layer::kUnbounded;
    // those of the sinks, of the window before a chunk and of the chunk, which begin and end inside a block
    return count_of(blocks_for(layer.sinks)) + (layer.window + max_chunk) / kBlock + 2;
}

void KvCache::Impl::forget(Layer& layer, std::int64_t committed) noexcept {
    const std::int64_t from = layer.resident_from(committed);
    if (from <= layer.held_from) return;
    layer.held_from = from;
    while (layer.blocks.front() < layer.blocks.end() && (layer.blocks.front() + 1) * kBlock <= from) {
        const Block block = layer.blocks.pop_front();
        if (block.shared() || layer.spare.size() == layer.spare.capacity()) {
            pool->impl().give_back(block);
        } else {
            layer.spare.push_back(block);
        }
    }
}

std::int64_t KvCache::Impl::own_blocks(const Layer& layer, std::int64_t from, std::int64_t to) noexcept {
    std::int64_t own = 0;
    for (std::int64_t b = from; b < to; ++b) own += layer.blocks[b].shared() ? 0 : 1;
    return own;
}

std::int64_t KvCache::Impl::new_blocks(const Layer& layer, std::int64_t tokens) noexcept {
    const std::int64_t end = count_of(blocks_for(layer.length + tokens));
    const std::int64_t first = layer.length / kBlock;
    const std::int64_t there = std::max(std::min(end, layer.blocks.end()), first);
    return std::max<std::int64_t>(end - layer.blocks.end(), 0) + there - first - own_blocks(layer, first, there);
}

void KvCache::Impl::take_spare(Layer& layer, std::int64_t count) {
    if (count <= 0) return;
    const std::size_t had = layer.spare.size();
    layer.spare.resize(had + static_cast<std::size_t>(count));
    try {
        pool->impl().take(std::span(layer.spare).subspan(had));
    } catch (...) {
        layer.spare.resize(had);
        throw;
    }
    // the pool hands out neighbours in ascending order, and the last spare one is used first
    std::reverse(layer.spare.begin() + static_cast<std::ptrdiff_t>(had), layer.spare.end());
}

void KvCache::Impl::make_room(Layer& layer, std::int64_t tokens, std::int64_t committed) {
    const std::int64_t end = count_of(blocks_for(layer.length + tokens));
    // What is to be forgotten is used again, once all that can fail is done.
    const std::int64_t from = layer.resident_from(committed);
    const std::int64_t kept = std::clamp(from / kBlock, layer.blocks.front(), layer.blocks.end());
    const std::int64_t freed = from > layer.held_from ? own_blocks(layer, layer.blocks.front(), kept) : 0;
    layer.blocks.reserve(end);
    take_spare(layer, new_blocks(layer, tokens) - freed - static_cast<std::int64_t>(layer.spare.size()));
    layer.spare.reserve(layer.spare.size() + static_cast<std::size_t>(freed));

    forget(layer, committed);  // from here on nothing can fail
    const auto next = [&]() noexcept {
        const Block block = layer.spare.back();
        layer.spare.pop_back();
        pool->impl().renew(block);
        return block;
    };
    for (std::int64_t b = layer.length / kBlock; b < end; ++b) {
        if (b == layer.blocks.end()) {
            layer.blocks.push_back(next());
        } else if (layer.blocks[b].shared()) {
            const Block own = next();
            pool->impl().copy(layer.blocks[b], own);
            pool->impl().give_back(std::exchange(layer.blocks[b], own));
        }
    }
}

void KvCache::Impl::reserve(std::int64_t tokens) {
    if (tokens < 0) throw InvalidArgument(fmt::format("reserve: tokens is {}; it must not be negative", tokens));
    for (const Layer& layer : layers) check_length("reserve", layer, tokens);
    // Layer by layer; where one gets nothing, those before it give back what they took.
    std::size_t done = 0;
    std::pmr::vector<std::int64_t> taken(layers.size(), &memory());
    try {
        for (; done < layers.size(); ++done) {
            Layer& layer = layers[done];
            const std::int64_t fresh = new_blocks(layer, tokens);
            const auto spare = static_cast<std::int64_t>(layer.spare.size());
            std::int64_t missing = fresh - spare;
            std::int64_t end = count_of(blocks_for(layer.length + tokens));
            if (layer.forgets() && missing > 0) {
                // Blocks of its own are used again when their tokens are forgotten; shared ones are not, but whole ones
                // of sinks stay what they are.
                const std::int64_t most = most_blocks(layer, max_chunk);
                const std::int64_t whole = std::min(layer.blocks.pinned(), layer.length / kBlock);
                const std::int64_t sinks = whole - own_blocks(layer, 0, whole);
                const std::int64_t own = own_blocks(layer, 0, layer.blocks.pinned()) +
                                         own_blocks(layer, layer.blocks.front(), layer.blocks.end());
                missing = std::min(most - sinks, own + fresh) - own - spare;
                end = std::min(end, layer.blocks.front() + most);
                layer.spare.reserve(static_cast<std::size_t>(own + spare + std::max<std::int64_t>(missing, 0)));
            }
            if (end > layer.blocks.end()) layer.blocks.reserve(end);
            take_spare(layer, missing);
            taken[done] = std::max<std::int64_t>(missing, 0);
        }
        if (f16_sinks != nullptr) {
            f16_sinks->reserve(std::clamp(sink_tokens - f16_sinks->length(), std::int64_t{0}, tokens));
        }
    } catch (...) {
        for (std::size_t i = 0; i < done; ++i) {
            for (; taken[i] > 0; --taken[i]) {
                pool->impl().give_back(layers[i].spare.back());
                layers[i].spare.pop_back();
            }
        }
        throw;
    }
}

void KvCache::Impl::check_length(const char* what, const Layer& layer, std::int64_t tokens) const {
    const std::int64_t most = ring ? Layer::kMostTokens : std::min(capacity, Layer::kMostTokens);
    if (tokens <= most - layer.length) return;
    throw OutOfMemory(
        fmt::format("{}: {} tokens after {} exceed the cache's capacity of {}", what, tokens, layer.length, most));
}

void KvCache::Impl::append(Context& context, std::size_t index, const InputTensor<3>& keys,
                           const InputTensor<3>& values) {
    static_cast<void>(layer(index));
    Layer& layer = layers[index];
    const KvShape& shape = pool->shape();
    check_input("keys", keys);
    check_input("values", values);
    check_extent("keys", 0, keys.extents[0], shape.kv_heads, "the cache's kv_heads");
    check_extent("keys", 2, keys.extents[2], shape.head_dim, "the cache's head_dim");
    check_extent("values", 0, values.extents[0], shape.kv_heads, "the cache's kv_heads");
    check_extent("values", 1, values.extents[1], keys.extents[1], "the number of keys");
    check_extent("values", 2, values.extents[2], shape.value_dim, "the cache's value_dim");
    const std::int64_t tokens = keys.extents[1];
    check_length("append", layer, tokens);
    if (tokens == 0) return;
    const std::int64_t committed = layer.forgets() ? length() : 0;
    if (!layer.holds_all(layer.length + tokens) && tokens > max_chunk - (layer.length - committed)) {
        throw InvalidArgument(
            fmt::format("append: {} tokens, {} ahead of the cache's length; a layer that forgets "
                        "may be ahead by max_chunk, {}",
                        tokens, layer.length - committed, max_chunk));
    }
    const std::int64_t of_sinks = layer.own_sinks < 0 ? 0 : std::min(tokens, layer.sinks - layer.length);
    if (of_sinks <= 0) return append_rows(context, index, keys, values);
    const auto first_rows = [&](InputTensor<3> rows) noexcept {
        rows.extents[1] = of_sinks;
        return rows;
    };
    f16_sinks->append(context, size(layer.own_sinks), first_rows(keys), first_rows(values));
    try {
        append_rows(context, index, keys, values);
    } catch (...) {
        f16_sinks->take_back(size(layer.own_sinks), layer.length);
        throw;
    }
}

void KvCache::Impl::append_rows(Context& context, std::size_t index, const InputTensor<3>& keys,
                                const InputTensor<3>& values) {
    Layer& layer = layers[index];
    const KvShape& shape = pool->shape();
    const std::int64_t tokens = keys.extents[1];
    const std::int64_t committed = layer.forgets() ? length() : 0;
    const std::optional<Rotary>& rotary = this->rotary(index);
    if (!rotary && !transform->changes_keys()) {
        make_room(layer, tokens, committed);
        pack(context, layer, keys, values, 0, tokens, nullptr);
    } else {
        Context::Impl& impl = context.impl();
        const std::int64_t turned = rotary ? rotary->rotary_dim() : 0;
        const auto half = static_cast<std::size_t>(turned) / 2;
        const auto round = static_cast<std::size_t>(std::min(tokens, kRoundTokens));
        const AppendScratch bytes = append_scratch(impl, shape.head_dim, turned, tokens);
        auto workspace = impl.workspaces.lend();
        RowScratch scratch{.rotary = rotary, .cosine = nullptr, .sine = nullptr, .rows = nullptr};
        scratch.cosine = reinterpret_cast<float*>(workspace->rows.ensure(bytes.tables));
        scratch.sine = scratch.cosine + round * half;
        scratch.rows = reinterpret_cast<float*>(workspace->workers.ensure(bytes.workers));
        make_room(layer, tokens, committed);
        for (std::int64_t first = 0; first < tokens; first += kRoundTokens) {
            const std::int64_t last = std::min(tokens, first + kRoundTokens);
            const std::int64_t elements = (last - first) * shape.kv_heads * (shape.head_dim + shape.value_dim);
            if (rotary) {
                parallel_for(*impl.executor, static_cast<std::size_t>(last - first), elements,
                             [&](std::size_t i, std::size_t) noexcept {
                                 rotary->tabulate(layer.length + first + static_cast<std::int64_t>(i),
                                                  scratch.cosine + i * half, scratch.sine + i * half);
                             });
            }
            pack(context, layer, keys, values, first, last, &scratch);
        }
    }
    layer.length += tokens;
}

void KvCache::Impl::pack(Context& context, const Layer& layer, const InputTensor<3>& keys, const InputTensor<3>& values,
                         std::int64_t first, std::int64_t last, const RowScratch* scratch) const {
    const KvShape& shape = pool->shape();
    const std::int64_t begin = layer.length + first;
    const std::int64_t end = layer.length + last;
    const auto heads = static_cast<std::size_t>(shape.kv_heads);
    const std::size_t first_block = static_cast<std::size_t>(begin / kBlock);
    const std::size_t blocks = blocks_for(end) - first_block;
    const kernels::KernelTable& kernels = context.impl().kernels;
    const kernels::BlockLayout layout = pool->impl().layout();
    const InputRows key_rows = input_rows(keys);
    const InputRows value_rows = input_rows(values);
    // Keys `from` on of a head, made ready in dense rows and stored a panel at a time.
    const auto store_ready = [&](std::size_t head, std::int64_t from, std::size_t count, const Block& block,
                                 std::size_t lane, std::size_t worker) noexcept {
        const std::optional<Rotary>& rotary = scratch->rotary;
        const auto half = rotary ? static_cast<std::size_t>(rotary->rotary_dim()) / 2 : 0;
        const bool interleaved = rotary && rotary->pairing() == RotaryPairing::interleaved;
        const auto key_head = static_cast<std::int64_t>(head);
        float* const dense = scratch->rows + worker * kernels::kPanelTokens * layout.head_dim;
        for (std::size_t done = 0; done < count;) {
            const std::size_t rows =
                std::min(count - done, kernels::kPanelTokens - (lane + done) % kernels::kPanelTokens);
            const std::int64_t row = from - layer.length + static_cast<std::int64_t>(done);
            kernels.scale_rows({key_rows.rows(key_head, row, static_cast<std::int64_t>(rows), layout.head_dim), 1.0F,
                                dense, layout.head_dim});
            for (std::size_t i = 0; rotary && i < rows; ++i) {
                const std::size_t place = (static_cast<std::size_t>(row - first) + i) * half;
                kernels.rotate({dense + i * layout.head_dim, 1, layout.head_dim, half, scratch->cosine + place,
                                scratch->sine + place, interleaved});
            }
            transform->apply(kernels, head, dense, rows, layout.head_dim);
            const auto stride = static_cast<std::ptrdiff_t>(layout.head_dim);
            write_keys(kernels, layout, {dense, kernels::ElementType::f32, stride, 1, rows, layout.head_dim},
                       block.keys(head), lane + done);
            done += rows;
        }
    };
    const auto pack_block = [&](std::size_t task, std::size_t worker) noexcept {
        const std::size_t head = task % heads;
        const std::size_t block_index = first_block + task / heads;
        const auto block_begin = static_cast<std::int64_t>(block_index) * kBlock;
        const std::int64_t from = std::max(begin, block_begin);
        const std::int64_t tokens = std::min(end, block_begin + kBlock) - from;
        const auto count = static_cast<std::size_t>(tokens);
        const auto lane = static_cast<std::size_t>(from - block_begin);
        const Block& block = layer.blocks[count_of(block_index)];
        const auto row_head = static_cast<std::int64_t>(head);
        const std::int64_t row = from - layer.length;
        // Reads go by whole panels: a panel begun here and not filled is cleared first. What no token holds weighs -0,
        // and must be finite. (What a shortened layer left behind is finite, or marked.)
        const std::size_t begun = (lane + count) / kernels::kPanelTokens * kernels::kPanelTokens;
        if (lane <= begun && begun < lane + count) clear_panel(layout, block.keys(head), block.values(head), begun);
        if (scratch != nullptr) {
            store_ready(head, from, count, block, lane, worker);
        } else {
            write_keys(kernels, layout, key_rows.rows(row_head, row, tokens, layout.head_dim), block.keys(head), lane);
        }
        if (write_values(kernels, layout, value_rows.rows(row_head, row, tokens, layout.value_dim), block.values(head),
                         lane)) {
            block.nonfinite(head) = 1;
        }
    };
    parallel_for(*context.impl().executor, blocks * heads,
                 (last - first) * shape.kv_heads * (shape.head_dim + shape.value_dim), pack_block);
}

void KvCache::Impl::shorten(Layer& layer, std::int64_t length) const noexcept {
    if (length >= layer.length) return;
    layer.length = length;
    // A shared block would have to be copied before it is written to, for nothing where no token is left in it.
    while (layer.blocks.end() > count_of(blocks_for(length)) && layer.blocks[layer.blocks.end() - 1].shared()) {
        pool->impl().give_back(layer.blocks.pop_back());
    }
    if (layer.own_sinks >= 0) f16_sinks->take_back(size(layer.own_sinks), length);
}

void KvCache::Impl::cut(Layer& layer, std::int64_t length) const noexcept {
    layer.length = std::min(layer.length, length);
    while (layer.blocks.end() > count_of(blocks_for(layer.length))) pool->impl().give_back(layer.blocks.pop_back());
    if (layer.own_sinks >= 0) f16_sinks->cut(f16_sinks->layers[size(layer.own_sinks)], length);
}

void KvCache::Impl::truncate(std::int64_t to) {
    if (to < 0 || to > length()) {
        throw InvalidArgument(fmt::format("truncate: length is {}; allowed: 0 to {}", to, length()));
    }
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const Layer& layer = layers[i];
        if (to <= layer.sinks || layer.held_from <= layer.resident_from(to)) continue;
        throw WouldForget(
            fmt::format("truncate: at {} tokens layer {} would hold the positions from {} on; it has "
                        "forgotten those before {}",
                        to, i, layer.resident_from(to), layer.held_from));
    }
    for (Layer& layer : layers) {
        if (to <= layer.sinks && layer.held_from > layer.sinks) {  // nothing is left but sinks
            while (layer.blocks.front() < layer.blocks.end()) pool->impl().give_back(layer.blocks.pop_front());
            layer.blocks.drop_queue();
            layer.held_from = layer.sinks;
        }
        cut(layer, to);
    }
}

void KvCache::Impl::take_back(std::int64_t to) noexcept {
    // Exact: what a layer forgets it forgets by the length of all.
    for (Layer& layer : layers) shorten(layer, to);
}

void KvCache::Impl::reset() noexcept {
    for (Layer& layer : layers) {
        // in descending order: the pool hands out the last returned first, and ascending blocks are contiguous
        for (const Block& block : layer.spare) pool->impl().give_back(block);
        layer.spare.clear();
        layer.blocks.for_each([&](const Block& block) noexcept { pool->impl().give_back(block); });
        layer.blocks.clear();
        layer.length = 0;
        layer.held_from = layer.sinks;
    }
    if (f16_sinks != nullptr) f16_sinks->reset();
}

std::size_t KvCache::Impl::used_bytes() const noexcept {
    std::size_t tokens = 0;
    for (const Layer& layer : layers) tokens += static_cast<std::size_t>(layer.held());
    return tokens * (pool->block_bytes() / kernels::kBlockTokens) +
           (f16_sinks != nullptr ? f16_sinks->used_bytes() : 0);
}

std::size_t KvCache::Impl::reserved_bytes() const noexcept {
    std::size_t blocks = 0;
    for (const Layer& layer : layers) blocks += static_cast<std::size_t>(layer.blocks.count()) + layer.spare.size();
    return blocks * pool->block_bytes() + (f16_sinks != nullptr ? f16_sinks->reserved_bytes() : 0);
}

KvCache::KvCache(const KvCacheOptions& options)
    : impl_(with_memory_errors("KvCache", [&] { return std::make_unique<Impl>(options); })) {}
KvCache::KvCache(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
KvCache::~KvCache() = default;
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;

void KvCache::reserve(std::int64_t tokens) {
    with_memory_errors("KvCache::reserve", [&] { impl_->reserve(tokens); });
}

void KvCache::append(Context& context, std::size_t layer, const InputTensor<3>& keys, const InputTensor<3>& values) {
    with_memory_errors("KvCache::append", [&] { impl_->append(context, layer, keys, values); });
}

std::int64_t KvCache::length() const noexcept { return impl_->length(); }
std::int64_t KvCache::length(std::size_t layer) const { return impl_->layer(layer).length; }

void KvCache::discard_unfinished() noexcept { impl_->take_back(impl_->length()); }
void KvCache::truncate(std::int64_t length) { impl_->truncate(length); }
KvCache KvCache::fork() const {
    return with_memory_errors("KvCache::fork", [&] { return KvCache(std::make_unique<Impl>(*impl_, nullptr)); });
}
void KvCache::reorder(std::span<KvCache> caches, std::span<const std::size_t> parents) {
    if (parents.size() != caches.size()) {
        throw InvalidArgument(fmt::format("reorder: parents has {} elements; it must have one per cache, {}",
                                          parents.size(), caches.size()));
    }
    for (std::size_t i = 0; i < parents.size(); ++i) {
        if (parents[i] < caches.size()) continue;
        throw InvalidArgument(
            fmt::format("reorder: parents[{}] is {}; allowed: 0 to {}", i, parents[i], caches.size() - 1));
    }
    with_memory_errors("KvCache::reorder", [&] {
        std::vector<KvCache> next;
        next.reserve(caches.size());
        for (const std::size_t parent : parents) next.push_back(caches[parent].fork());
        for (std::size_t i = 0; i < caches.size(); ++i) caches[i] = std::move(next[i]);
    });
}

void KvCache::reset() noexcept { impl_->reset(); }
std::int64_t KvCache::capacity() const noexcept { return impl_->capacity; }
bool KvCache::ring() const noexcept { return impl_->ring; }
std::int64_t KvCache::sink_tokens() const noexcept { return impl_->sink_tokens; }
bool KvCache::f16_sinks() const noexcept { return impl_->with_f16_sinks; }
std::int64_t KvCache::max_chunk() const noexcept { return impl_->max_chunk; }
std::size_t KvCache::layers() const noexcept { return impl_->layers.size(); }
const KvShape& KvCache::shape() const noexcept { return impl_->pool->shape(); }
bool KvCache::forgets() const noexcept {
    return std::ranges::any_of(impl_->layers, [](const Impl::Layer& layer) { return layer.forgets(); });
}
const std::optional<Rotary>& KvCache::rotary(std::size_t layer) const {
    static_cast<void>(impl_->layer(layer));
    return impl_->rotary(layer);
}
const std::shared_ptr<BlockPool>& KvCache::pool() const noexcept { return impl_->pool; }

std::size_t KvCache::used_bytes() const noexcept { return impl_->used_bytes(); }
std::size_t KvCache::reserved_bytes() const noexcept { return impl_->reserved_bytes(); }

void KvCache::read_back(std::size_t index, std::int64_t first, const OutputTensor<3>& keys,
                        const OutputTensor<3>& values) const {
    const Impl::Layer& layer = impl_->layer(index);
    const KvShape& shape = impl_->pool->shape();
    check_output("keys", keys);
    check_output("values", values);
    check_extent("keys", 0, keys.extents[0], shape.kv_heads, "the cache's kv_heads");
    check_extent("keys", 2, keys.extents[2], shape.head_dim, "the cache's head_dim");
    check_extent("values", 0, values.extents[0], shape.kv_heads, "the cache's kv_heads");
    check_extent("values", 1, values.extents[1], keys.extents[1], "the number of keys");
    check_extent("values", 2, values.extents[2], shape.value_dim, "the cache's value_dim");
    const std::int64_t count = keys.extents[1];
    if (first < 0 || first > layer.length || count > layer.length - first) {
        throw InvalidArgument(fmt::format("read_back: positions {} to {} are not all held; the layer holds 0 to {}",
                                          first, first + count, layer.length));
    }
    if (std::max(first, layer.sinks) < std::min(first + count, layer.held_from)) {
        throw WouldForget(
            fmt::format("read_back: positions {} to {} are not all held; the layer has forgotten {} to {}", first,
                        first + count, layer.sinks, layer.held_from));
    }
    const Impl::Layer* const own_sinks = impl_->own_sinks(layer);
    std::pmr::vector<double> row(&impl_->memory());
    if (impl_->transform->changes_keys())
        with_memory_errors("KvCache::read_back", [&] { row.resize(size(shape.head_dim)); });
    const FloatEnvironment environment;  // narrowing rounds
    for (std::int64_t i = 0; i < count; ++i) {
        const bool apart = own_sinks != nullptr && first + i < layer.sinks;
        const kernels::BlockLayout layout = (apart ? *impl_->f16_sinks : *impl_).pool->impl().layout();
        const bool transformed = !apart && impl_->transform->changes_keys();
        const Block& block = (apart ? *own_sinks : layer).blocks[(first + i) / kBlock];
        const auto token = static_cast<std::size_t>((first + i) % kBlock);
        for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
            const auto kv_head = static_cast<std::size_t>(head);
            const std::int64_t key = head * keys.strides[0] + i * keys.strides[1];
            for (std::size_t d = 0; transformed && d < layout.head_dim; ++d) {
                row[d] = static_cast<double>(read_key(layout, block.keys(kv_head), token, d));
            }
            if (transformed) impl_->transform->undo(kv_head, row.data(), layout.head_dim);
            for (std::size_t d = 0; d < layout.head_dim; ++d) {
                store_element(
                    keys.data, keys.dtype, key + static_cast<std::int64_t>(d) * keys.strides[2],
                    transformed ? static_cast<float>(row[d]) : read_key(layout, block.keys(kv_head), token, d));
            }
            const std::int64_t value = head * values.strides[0] + i * values.strides[1];
            for (std::size_t d = 0; d < layout.value_dim; ++d) {
                store_element(values.data, values.dtype, value + static_cast<std::int64_t>(d) * values.strides[2],
                              read_value(layout, block.values(kv_head), token, d));
            }
        }
    }
}

std::size_t KvCache::estimate_bytes(const KvCacheOptions& options, std::int64_t tokens) {
    check_options(options);
    if (tokens < 0 || (!options.ring && tokens > options.capacity)) {
        throw InvalidArgument(
            fmt::format("estimate_bytes: tokens is {}; allowed: 0 to the capacity of {}", tokens, options.capacity));
    }
    std::size_t blocks = 0;
    std::size_t sink_blocks = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(options.layers); ++i) {
        const Impl::Layer layer = Impl::layer_of(options, i);
        blocks = saturating_sum(
            blocks,
            std::min(blocks_for(tokens), static_cast<std::size_t>(Impl::most_blocks(layer, options.max_chunk))));
        if (options.f16_sinks) sink_blocks = saturating_sum(sink_blocks, blocks_for(std::min(tokens, layer.sinks)));
    }
    std::size_t bytes = 0;
    std::size_t sink_bytes = 0;
    if (compiler::mul_overflows(blocks, block_bytes_of(options.shape), bytes) ||
        compiler::mul_overflows(sink_blocks, block_bytes_of(f16_shape_of(options.shape)), sink_bytes) ||
        compiler::add_overflows(bytes, sink_bytes, bytes)) {
        throw OutOfMemory(fmt::format("estimate_bytes: {} tokens need more bytes than 64 bits can count", tokens));
    }
    return bytes;
}

}  // namespace headlong
