#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "engine/block_rows.hpp"
#include "engine/context_impl.hpp"
#include "engine/kv_cache_impl.hpp"
#include "engine/parallel.hpp"
#include "engine/rows.hpp"
#include "engine/validate.hpp"
#include "kernels/half.hpp"

namespace headlong {
namespace {

constexpr auto kBlock = static_cast<std::int64_t>(kernels::kBlockTokens);
constexpr std::int64_t kMaxLayers = std::int64_t{1} << 20;

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
    if (options.sink_tokens != 0) throw Unsupported("KvCacheOptions: sink_tokens is not built yet; leave it 0");
    if (!options.layer_windows.empty())
        throw Unsupported("KvCacheOptions: layer_windows is not built yet; leave it empty");
    if (options.rotary && options.rotary->head_dim() != options.shape.head_dim) {
        throw InvalidArgument(fmt::format("KvCacheOptions: rotary is made for a head_dim of {}; the shape's is {}",
                                          options.rotary->head_dim(), options.shape.head_dim));
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
    float* cosine;  ///< [kRoundTokens][half], of the round's first row on; with a rotary description
    float* sine;
    float* rows;  ///< [worker][kPanelTokens][head_dim]
};

KvCache::Impl::Impl(const KvCacheOptions& options)
    : pool(pool_of(options)),
      capacity(options.capacity),
      rotary(options.rotary),
      transform{{options.key_centre.begin(), options.key_centre.end()}, options.hadamard_keys},
      layers(static_cast<std::size_t>(options.layers)) {}

KvCache::Impl::~Impl() { reset(); }

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

void KvCache::Impl::take_blocks(std::span<Layer> these, std::int64_t tokens) {
    std::vector<Block> taken;
    std::size_t missing = 0;
    for (Layer& layer : these) {
        const std::size_t needed = blocks_for(layer.length + tokens);
        if (needed <= layer.blocks.size()) continue;
        missing += needed - layer.blocks.size();
        layer.blocks.reserve(std::max(needed, layer.blocks.capacity() < needed ? 2 * layer.blocks.capacity() : 0));
    }
    if (missing == 0) return;
    taken.resize(missing);
    pool->impl().take(taken);
    auto next = taken.begin();
    for (Layer& layer : these) {  // from here on nothing can fail
        for (std::size_t needed = blocks_for(layer.length + tokens); layer.blocks.size() < needed;) {
            layer.blocks.push_back(*next++);
        }
    }
}

void KvCache::Impl::reserve(std::int64_t tokens) {
    if (tokens < 0) throw InvalidArgument(fmt::format("reserve: tokens is {}; it must not be negative", tokens));
    for (const Layer& layer : layers) {
        if (tokens > capacity - layer.length) {
            throw OutOfMemory(fmt::format("reserve: {} tokens after {} exceed the cache's capacity of {}", tokens,
                                          layer.length, capacity));
        }
    }
    take_blocks(layers, tokens);
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
    if (tokens > capacity - layer.length) {
        throw OutOfMemory(fmt::format("append: {} tokens after {} exceed the cache's capacity of {}", tokens,
                                      layer.length, capacity));
    }
    if (tokens == 0) return;
    if (!rotary && !transform.changes_keys()) {
        take_blocks(std::span(&layer, 1), tokens);
        pack(context, layer, keys, values, 0, tokens, nullptr);
    } else {
        Context::Impl& impl = context.impl();
        const auto half = rotary ? static_cast<std::size_t>(rotary->rotary_dim()) / 2 : 0;
        const auto round = static_cast<std::size_t>(std::min(tokens, kRoundTokens));
        const auto head_dim = static_cast<std::size_t>(shape.head_dim);
        auto workspace = impl.workspaces.lend();
        RowScratch scratch{};
        scratch.cosine = workspace->rows.ensure_floats(2 * round * half);
        scratch.sine = scratch.cosine + round * half;
        scratch.rows =
            workspace->workers.ensure_floats(impl.executor->worker_slots() * kernels::kPanelTokens * head_dim);
        take_blocks(std::span(&layer, 1), tokens);
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
            transform.apply(kernels, head, dense, rows, layout.head_dim);
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
        const Block& block = layer.blocks[block_index];
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

void KvCache::Impl::shorten(std::size_t index, std::int64_t length) noexcept {
    layers[index].length = std::min(layers[index].length, length);
}

void KvCache::Impl::reset() noexcept {
    for (Layer& layer : layers) {
        // in descending order: the pool hands out the last returned first, and ascending blocks are contiguous
        for (std::size_t i = layer.blocks.size(); i-- > 0;) pool->impl().give_back(layer.blocks[i]);
        layer.blocks.clear();
        layer.length = 0;
    }
}

KvCache::KvCache(const KvCacheOptions& options)
    : impl_(with_memory_errors("KvCache", [&] { return std::make_unique<Impl>(options); })) {}
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

void KvCache::discard_unfinished() noexcept {
    const std::int64_t length = impl_->length();
    for (std::size_t i = 0; i < impl_->layers.size(); ++i) impl_->shorten(i, length);
}

void KvCache::reset() noexcept { impl_->reset(); }
std::int64_t KvCache::capacity() const noexcept { return impl_->capacity; }
std::size_t KvCache::layers() const noexcept { return impl_->layers.size(); }
const KvShape& KvCache::shape() const noexcept { return impl_->pool->shape(); }
const std::optional<Rotary>& KvCache::rotary() const noexcept { return impl_->rotary; }
const std::shared_ptr<BlockPool>& KvCache::pool() const noexcept { return impl_->pool; }

std::size_t KvCache::used_bytes() const noexcept {
    const std::size_t token_bytes = impl_->pool->block_bytes() / kernels::kBlockTokens;
    std::size_t tokens = 0;
    for (const Impl::Layer& layer : impl_->layers) tokens += static_cast<std::size_t>(layer.length);
    return tokens * token_bytes;
}

std::size_t KvCache::reserved_bytes() const noexcept {
    std::size_t blocks = 0;
    for (const Impl::Layer& layer : impl_->layers) blocks += layer.blocks.size();
    return blocks * impl_->pool->block_bytes();
}

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
    const kernels::BlockLayout layout = impl_->pool->impl().layout();
    const bool transformed = impl_->transform.changes_keys();
    std::vector<double> row;
    if (transformed) with_memory_errors("KvCache::read_back", [&] { row.resize(layout.head_dim); });
    const FloatEnvironment environment;  // narrowing rounds
    for (std::int64_t i = 0; i < count; ++i) {
        const Block& block = layer.blocks[static_cast<std::size_t>((first + i) / kBlock)];
        const auto token = static_cast<std::size_t>((first + i) % kBlock);
        for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
            const auto kv_head = static_cast<std::size_t>(head);
            const std::int64_t key = head * keys.strides[0] + i * keys.strides[1];
            for (std::size_t d = 0; transformed && d < layout.head_dim; ++d) {
                row[d] = static_cast<double>(read_key(layout, block.keys(kv_head), token, d));
            }
            if (transformed) impl_->transform.undo(kv_head, row.data(), layout.head_dim);
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
    if (tokens < 0 || tokens > options.capacity) {
        throw InvalidArgument(
            fmt::format("estimate_bytes: tokens is {}; allowed: 0 to the capacity of {}", tokens, options.capacity));
    }
    std::size_t bytes = 0;
    if (__builtin_mul_overflow(blocks_for(tokens), block_bytes_of(options.shape), &bytes) ||
        __builtin_mul_overflow(bytes, static_cast<std::size_t>(options.layers), &bytes)) {
        throw OutOfMemory(fmt::format("estimate_bytes: {} tokens need more bytes than 64 bits can count", tokens));
    }
    return bytes;
}

}  // namespace headlong
