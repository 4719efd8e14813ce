// What a cache holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <headlong/kv_cache.hpp>
#include <limits>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <vector>

#include "engine/block_pool.hpp"
#include "engine/block_table.hpp"
#include "engine/key_transform.hpp"

namespace headlong {

class KvCache::Impl {
  public:
    struct Layer {
        explicit Layer(std::pmr::memory_resource& memory) noexcept : blocks(memory), spare(&memory) {}

        BlockTable blocks;
        std::pmr::vector<Block> spare;     ///< blocks that the next appends take first
        std::int64_t length = 0;           ///< tokens ever appended, less those taken back
        std::int64_t sinks = 0;            ///< the positions [0, sinks) are never forgotten
        std::int64_t window = kUnbounded;  ///< positions, its own included, that a query sees of the others
        std::int64_t held_from = 0;        ///< of those, the first that is still held; at least `sinks`
        std::int64_t own_sinks = -1;       ///< its layer of `f16_sinks`; -1: it has none there

        static constexpr std::int64_t kMostTokens = std::int64_t{1} << 48;  ///< that attention counts to
        static constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();
        bool forgets() const noexcept { return window != kUnbounded; }
        /// The first position, sinks aside, that belongs to a layer of `tokens` tokens.
        std::int64_t resident_from(std::int64_t tokens) const noexcept {
            return forgets() ? std::max(sinks, tokens - window) : sinks;
        }
        /// Positions that a query at this one sees.
        std::int64_t seen_at(std::int64_t position) const noexcept {
            return std::min(sinks, position + 1) + std::clamp(position + 1 - sinks, std::int64_t{0}, window);
        }
        /// Whether nothing is forgotten at so many tokens.
        bool holds_all(std::int64_t tokens) const noexcept { return !forgets() || tokens - sinks <= window; }
        std::int64_t held() const noexcept {
            return std::min(sinks, length) + std::max(length - held_from, std::int64_t{0});
        }
    };

    using Rotaries = std::pmr::vector<std::optional<Rotary>>;

    explicit Impl(const KvCacheOptions& options);
    /// A fork: holds the blocks of `parent`, which stays as it is.
    Impl(const Impl& parent, std::nullptr_t);
    ~Impl();
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    /// Bytes of a workspace's buffers that an append of `tokens` rotated rows fills.
    struct AppendScratch {
        std::size_t tables;
        std::size_t workers;
    };
    static AppendScratch append_scratch(const Context::Impl& context, std::int64_t head_dim, std::int64_t rotary_dim,
                                        std::int64_t tokens) noexcept;

    std::pmr::memory_resource& memory() const noexcept { return pool->impl().memory(); }
    const Layer& layer(std::size_t index) const;  ///< throws InvalidArgument if there is none
    const std::optional<Rotary>& rotary(std::size_t index) const noexcept {
        return (*rotaries)[rotaries->size() == 1 ? 0 : index];
    }
    std::int64_t length() const noexcept;
    void reserve(std::int64_t tokens);
    void append(Context& context, std::size_t layer, const InputTensor<3>& keys, const InputTensor<3>& values);
    std::size_t used_bytes() const noexcept;
    std::size_t reserved_bytes() const noexcept;
    /// The most tokens that the next append to all layers may have: max_chunk where one of them forgets, unless so many
    /// are all held.
    std::int64_t most_at_once() const noexcept;
    void truncate(std::int64_t length);
    /// Drops the newest tokens of all layers down to `length`, what length() was before the last append or more; blocks
    /// are kept for what comes next.
    void take_back(std::int64_t length) noexcept;
    void take_back(std::size_t layer, std::int64_t length) noexcept { shorten(layers[layer], length); }
    void reset() noexcept;

    static std::pmr::vector<Layer> layers_of(const KvCacheOptions& options, std::pmr::memory_resource& memory);
    /// Layer `index` of a cache of these options, without tokens.
    static Layer layer_of(const KvCacheOptions& options, std::size_t index,
                          std::pmr::memory_resource& memory = *std::pmr::null_memory_resource()) noexcept;
    /// Blocks that a layer of this kind holds at most, whatever its length; kUnbounded if it does not forget.
    static std::int64_t most_blocks(const Layer& layer, std::int64_t max_chunk) noexcept;
    /// What a query's position counts as among the sinks: positions inside the cache end at its capacity.
    std::int64_t last_place() const noexcept { return ring ? capacity - 1 : Layer::kUnbounded; }

    const std::shared_ptr<BlockPool> pool;
    const std::int64_t capacity;
    const bool ring;
    const std::int64_t sink_tokens;
    const bool with_f16_sinks;  ///< asked for: `f16_sinks` is null if no layer has sinks
    const std::int64_t max_chunk;
    const std::shared_ptr<const Rotaries> rotaries;       ///< per layer, or one for all
    const std::shared_ptr<const KeyTransform> transform;  ///< forks have the same one
    std::pmr::vector<Layer> layers;
    /// The sinks once more, as a cache in f16 of the layers that have some, which is what attention reads. `layers` go
    /// on counting them, so that lengths, blocks and what is forgotten are the same either way. Null: not asked for.
    const std::unique_ptr<Impl> f16_sinks;

    /// Where the sinks of a layer are stored; null: with the others.
    const Layer* own_sinks(const Layer& layer) const noexcept {
        return layer.own_sinks < 0 ? nullptr : &f16_sinks->layers[static_cast<std::size_t>(layer.own_sinks)];
    }

  private:
    struct RowScratch;

    /// Writes rows [first, last) of the views, the layer's blocks being there; they become visible with its length.
    void pack(Context& context, const Layer& layer, const InputTensor<3>& keys, const InputTensor<3>& values,
              std::int64_t first, std::int64_t last, const RowScratch* scratch) const;
    /// Throws OutOfMemory if a layer would have more tokens than the cache may.
    void check_length(const char* what, const Layer& layer, std::int64_t tokens) const;
    /// Drops what no query from position `committed` on may see.
    void forget(Layer& layer, std::int64_t committed) noexcept;
    /// Of the blocks [from, to), those that no other cache holds.
    static std::int64_t own_blocks(const Layer& layer, std::int64_t from, std::int64_t to) noexcept;
    /// Blocks that `tokens` more tokens take: new ones, and copies of shared ones.
    static std::int64_t new_blocks(const Layer& layer, std::int64_t tokens) noexcept;
    /// Adds blocks from the pool to a layer's spare ones, all or none.
    void take_spare(Layer& layer, std::int64_t count);
    /// Forgets what a cache of `committed` tokens does not hold, and makes the blocks of the next `tokens` positions
    /// this cache's own, for writing. Throws std::bad_alloc and changes nothing if there is no memory.
    void make_room(Layer& layer, std::int64_t tokens, std::int64_t committed);
    void shorten(Layer& layer, std::int64_t length) const noexcept;
    /// The same, giving back what blocks are not needed.
    void cut(Layer& layer, std::int64_t length) const noexcept;
    std::unique_ptr<Impl> sinks_of(const KvCacheOptions& options) const;
    void append_rows(Context& context, std::size_t index, const InputTensor<3>& keys, const InputTensor<3>& values);
};

}  // namespace headlong
