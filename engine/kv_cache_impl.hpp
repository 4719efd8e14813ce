// What a cache holds.
#pragma once

#include <headlong/kv_cache.hpp>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/block_pool.hpp"
#include "engine/key_transform.hpp"

namespace headlong {

class KvCache::Impl {
  public:
    struct Layer {
        std::vector<Block> blocks;  ///< block b holds the positions [64 b, 64 (b + 1))
        std::int64_t length = 0;
    };

    explicit Impl(const KvCacheOptions& options);
    ~Impl();
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    const Layer& layer(std::size_t index) const;  ///< throws InvalidArgument if there is none
    std::int64_t length() const noexcept;
    void reserve(std::int64_t tokens);
    void append(Context& context, std::size_t layer, const InputTensor<3>& keys, const InputTensor<3>& values);
    /// Drops the newest tokens of a layer down to `length`; its blocks stay.
    void shorten(std::size_t layer, std::int64_t length) noexcept;
    void reset() noexcept;

    const std::shared_ptr<BlockPool> pool;
    const std::int64_t capacity;
    const std::optional<Rotary> rotary;
    const KeyTransform transform;
    std::vector<Layer> layers;

  private:
    struct RowScratch;

    /// Writes rows [first, last) of the views, the layer's blocks being there; they become visible with its length.
    void pack(Context& context, const Layer& layer, const InputTensor<3>& keys, const InputTensor<3>& values,
              std::int64_t first, std::int64_t last, const RowScratch* scratch) const;
    /// Takes the blocks that the listed layers need for `tokens` more tokens each; all of them or none.
    void take_blocks(std::span<Layer> these, std::int64_t tokens);
};

}  // namespace headlong
