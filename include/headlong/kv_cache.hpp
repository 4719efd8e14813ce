// The key-value cache of one sequence, over all layers of a model: a table of blocks of 64 tokens per layer, taken
// from a pool as the sequence grows. Growing copies nothing, and cost follows the live length, not the capacity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>

#include <headlong/context.hpp>
#include <headlong/rotary.hpp>
#include <headlong/tensor.hpp>

namespace headlong {

/// How a cache stores keys or values. int8 and int4 quantise a token's elements in groups, 64 of a key and 128 of a
/// value, the last one shorter: scale * code, symmetric, with codes in [-127, 127] or [-7, 7] and scale = the largest
/// magnitude / 127 or 7, nothing shared between tokens. Attention over them computes in integers, with queries and
/// weights of 15 bits. A group of less than 2^-100 is stored as 0; one that holds a NaN or infinity as NaN.
enum class KvType : std::uint8_t { f32, f16, bf16, int8, int4 };

/// "f32", "f16", "bf16", "int8" or "int4".
const char* to_string(KvType type) noexcept;

/// Those of a cache's keys and of its values.
struct KvTypes {
    KvType keys = KvType::f32;
    KvType values = KvType::f32;
    friend bool operator==(const KvTypes&, const KvTypes&) = default;
};

/// What the rows of a cache look like.
struct KvShape {
    std::int64_t kv_heads = 1;   ///< >= 1
    std::int64_t head_dim = 0;   ///< >= 1: elements of a key
    std::int64_t value_dim = 0;  ///< >= 0: elements of a value
    KvType key_type = KvType::f32;
    KvType value_type = KvType::f32;

    KvTypes types() const noexcept { return {key_type, value_type}; }
    friend bool operator==(const KvShape&, const KvShape&) = default;
};

/// Blocks of one shape, shared by any number of caches. Thread-safe. Memory is taken from the resource in slabs
/// that grow with use, and is kept until the pool is destroyed, after the last cache that uses it.
class BlockPool {
  public:
    /// `memory` must outlive the pool and be thread-safe; nullptr = aligned operator new.
    /// Throws InvalidArgument or Unsupported, naming what is wrong with the shape.
    explicit BlockPool(const KvShape& shape, std::pmr::memory_resource* memory = nullptr);
    ~BlockPool();
    BlockPool(const BlockPool&) = delete;
    BlockPool& operator=(const BlockPool&) = delete;

    const KvShape& shape() const noexcept;
    std::size_t block_bytes() const noexcept;     ///< one block: 64 tokens of all KV heads of one layer
    std::size_t used_bytes() const noexcept;      ///< blocks that caches hold
    std::size_t reserved_bytes() const noexcept;  ///< all slabs

    class Impl;
    Impl& impl() const noexcept { return *impl_; }  ///< for the library's own use

  private:
    std::unique_ptr<Impl> impl_;
};

struct KvCacheOptions {
    KvShape shape = {};
    std::int64_t layers = 1;  ///< >= 1
    /// Tokens the cache may hold. An append beyond it is refused with OutOfMemory, and nothing is lost.
    std::int64_t capacity = std::numeric_limits<std::int64_t>::max();
    std::int64_t sink_tokens = 0;                      ///< Not built yet.
    std::span<const std::int64_t> layer_windows = {};  ///< per layer, empty = none. Not built yet.
    /// If given, append() and attend() take unrotated rows: keys are stored rotated at their position in the cache, and
    /// queries are rotated at theirs. Its head_dim is the shape's.
    std::optional<Rotary> rotary = {};
    /// Subtracted from keys before they are quantised, after rotation: [kv_heads, head_dim], copied; empty = nothing.
    /// What it adds to a score is added back to every score. Fixed for the life of the cache. Of keys that share a
    /// large mean, most of the scale would go to that. Only with keys of int8 or int4; elements must be finite.
    std::span<const float> key_centre = {};
    /// Keys are turned by a Walsh-Hadamard transform before they are quantised, and queries when they meet them: scores
    /// stay what they were, and an outlier is spread over all elements (Ashkboos et al. 2024, "QuaRot"). Of a head_dim
    /// that is no power of two, blocks of the largest one that divides it. Only with keys of int8 or int4.
    bool hadamard_keys = false;
    std::shared_ptr<BlockPool> pool = {};         ///< to share blocks with other caches; must have the same shape
    std::pmr::memory_resource* memory = nullptr;  ///< for a pool of its own; not with `pool`
};

/// Tokens are appended layer by layer. Each layer has its own length, which append() advances; the cache's length
/// is the number of tokens that every layer has. One thread may change a cache; any number may read it (attend,
/// read_back, sizes) while none changes it.
class KvCache {
  public:
    /// Takes no blocks yet. Throws InvalidArgument or Unsupported, naming the option.
    explicit KvCache(const KvCacheOptions& options);
    ~KvCache();
    KvCache(KvCache&&) noexcept;  ///< a cache that was moved from may only be assigned to or destroyed
    KvCache& operator=(KvCache&&) noexcept;

    /// Takes the blocks that `tokens` more tokens need in every layer, or throws OutOfMemory and changes nothing.
    /// Appends of those tokens then cannot fail for want of memory.
    void reserve(std::int64_t tokens);

    /// Appends keys [kv_heads, n, head_dim] and values [kv_heads, n, value_dim] to one layer, n >= 0, of any element
    /// types. Keys are rotated first if the cache has a rotary description. What the cache's types do not hold is
    /// rounded to nearest even, once, codes too; in f16 from 65520 on to infinity, which reaches the rows that see it.
    /// Throws and leaves the cache as it was if an argument is wrong, the capacity would be exceeded, or memory
    /// runs out.
    void append(Context& context, std::size_t layer, const InputTensor<3>& keys, const InputTensor<3>& values);

    /// Tokens that all layers hold.
    std::int64_t length() const noexcept;
    /// Tokens that one layer holds: ahead of length() while a step is under way.
    std::int64_t length(std::size_t layer) const;
    /// Takes back what was appended to some layers but not to all, after a step that failed half-way.
    void discard_unfinished() noexcept;
    /// Forgets all tokens and returns the blocks to the pool.
    void reset() noexcept;

    std::int64_t capacity() const noexcept;
    std::size_t layers() const noexcept;
    const KvShape& shape() const noexcept;
    const std::optional<Rotary>& rotary() const noexcept;
    const std::shared_ptr<BlockPool>& pool() const noexcept;

    std::size_t used_bytes() const noexcept;      ///< bytes of the rows that this cache holds, padding included
    std::size_t reserved_bytes() const noexcept;  ///< bytes of the blocks that this cache holds

    /// Copies the stored rows [first, first + n) of a layer, n being the views' middle extent: keys [kv_heads, n,
    /// head_dim], values [kv_heads, n, value_dim], of any element types: what attention computes with. An f32 cache
    /// gives back the very bits that were appended (of keys that it rotated: the rotated ones), one of another type the
    /// rounded numbers.
    void read_back(std::size_t layer, std::int64_t first, const OutputTensor<3>& keys,
                   const OutputTensor<3>& values) const;

    /// Bytes of the blocks that a cache of these options holds at `tokens` tokens, before anything is allocated.
    static std::size_t estimate_bytes(const KvCacheOptions& options, std::int64_t tokens);

    class Impl;
    Impl& impl() noexcept { return *impl_; }              ///< for the library's own use
    const Impl& impl() const noexcept { return *impl_; }  ///< for the library's own use

  private:
    std::unique_ptr<Impl> impl_;
};

}  // namespace headlong
