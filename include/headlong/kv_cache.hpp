/// \file
/// The key-value cache of one sequence, over all layers of a model: a table of blocks of 64 tokens per layer, taken
/// from a pool as the sequence grows. Growing copies nothing, and cost follows the live length, not the capacity. A
/// ring goes on for ever in bounded memory; layers with a window hold no more than that; forks share blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <headlong/context.hpp>
#include <headlong/export.hpp>
#include <headlong/rotary.hpp>
#include <headlong/tensor.hpp>

namespace headlong HEADLONG_API {

/// How a cache stores keys or values. int8 and int4 quantise a token's elements in groups, 64 of a key and 128 of a
/// value, the last one shorter: scale * code, symmetric, with codes in [-127, 127] or [-7, 7] and scale = the largest
/// magnitude / 127 or 7, nothing shared between tokens. Attention over them computes in integers, with queries and
/// weights of 15 bits. A group of less than 2^-100 is stored as 0; one that holds a NaN or infinity as NaN.
enum class KvType : std::uint8_t { f32, f16, bf16, int8, int4 };

/// "f32", "f16", "bf16", "int8" or "int4".
HEADLONG_API const char* to_string(KvType type) noexcept;

/// Those of a cache's keys and of its values.
struct KvTypes {
    KvType keys = KvType::f32;                                         ///< of the keys
    KvType values = KvType::f32;                                       ///< of the values
    friend bool operator==(const KvTypes&, const KvTypes&) = default;  ///< whether both are the same
};

/// What the rows of a cache look like.
struct KvShape {
    std::int64_t kv_heads = 1;        ///< >= 1
    std::int64_t head_dim = 0;        ///< >= 1: elements of a key
    std::int64_t value_dim = 0;       ///< >= 0: elements of a value
    KvType key_type = KvType::f32;    ///< how keys are stored
    KvType value_type = KvType::f32;  ///< how values are stored

    KvTypes types() const noexcept { return {key_type, value_type}; }  ///< both types
    friend bool operator==(const KvShape&, const KvShape&) = default;  ///< whether all is the same
};

/// Blocks of one shape, shared by any number of caches. Thread-safe. Memory is taken from the resource in slabs
/// that grow with use, and is kept until the pool is destroyed, after the last cache that uses it. What its caches hold
/// beside blocks (their tables, a centre) comes from the resource, too. Its functions must not call the library: it is
/// called with locks held.
class BlockPool {
  public:
    /// `memory` must outlive the pool and be thread-safe; nullptr = aligned operator new.
    /// Throws InvalidArgument or Unsupported, naming what is wrong with the shape.
    explicit BlockPool(const KvShape& shape, std::pmr::memory_resource* memory = nullptr);
    ~BlockPool();
    BlockPool(const BlockPool&) = delete;
    BlockPool& operator=(const BlockPool&) = delete;

    const KvShape& shape() const noexcept;        ///< of the rows in its blocks
    std::size_t block_bytes() const noexcept;     ///< one block: 64 tokens of all KV heads of one layer
    std::size_t used_bytes() const noexcept;      ///< blocks that caches hold
    std::size_t reserved_bytes() const noexcept;  ///< all slabs

    class HEADLONG_LOCAL Impl;
    Impl& impl() const noexcept { return *impl_; }  ///< for the library's own use

  private:
    std::unique_ptr<Impl> impl_;
};

/// What a cache holds, and how. A value; spans are read when the cache is made, `memory` must outlive it.
struct KvCacheOptions {
    KvShape shape = {};       ///< of the rows
    std::int64_t layers = 1;  ///< >= 1
    /// Tokens the cache may hold, >= 1. An append beyond it is refused with OutOfMemory, and nothing is lost, unless:
    std::int64_t capacity = std::numeric_limits<std::int64_t>::max();
    /// The cache is a ring: of any number of tokens it holds the first sink_tokens and the last capacity - sink_tokens,
    /// and these are what a query sees that stands at the end (Xiao et al. 2023, "Efficient Streaming Language Models
    /// with Attention Sinks"): the sinks and the last capacity - sink_tokens positions, its own included. Positions
    /// count all tokens ever appended. With a rotary description, and for ALiBi, a query stands at its own position
    /// before the window, and before the sinks at its place in the cache, at most capacity - 1.
    bool ring = false;
    /// Tokens at the beginning that are never forgotten; 0 to capacity - 1. They are folded on their own and first, in
    /// a cache that is no ring too: only caches of the same sink_tokens (and f16_sinks) give the same bits.
    std::int64_t sink_tokens = 0;
    /// The sink tokens are stored in f16, and not as codes: every query weighs them heavily. They take these bytes on
    /// top (their places as codes stay). From 65520 on an element becomes infinite, which codes would hold. Only with
    /// sink_tokens, and with keys or values of int8 or int4.
    bool f16_sinks = false;
    /// Per layer, empty = none in any: a query sees the last so many positions, its own included, and the layer
    /// forgets all before those; 0 = no window. A window that fits into a ring's has no sinks.
    std::span<const std::int64_t> layer_windows = {};
    /// Layers that forget take at most so many tokens at once (more only while they hold all), and hold so many more
    /// than their window: what the oldest query of an append sees is there until the next one. >= 1. They may be ahead
    /// of length() by as many.
    std::int64_t max_chunk = 512;
    /// If given, append() and attend() take unrotated rows: keys are stored rotated at their position in the cache, and
    /// queries are rotated at theirs. Its head_dim is the shape's.
    std::optional<Rotary> rotary = {};
    /// Per layer, in the place of `rotary`, which must be empty then; empty = `rotary` in all. A layer without one
    /// takes rows as they are.
    std::span<const std::optional<Rotary>> layer_rotary = {};
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
    KvCache(KvCache&&) noexcept;             ///< a cache that was moved from may only be assigned to or destroyed
    KvCache& operator=(KvCache&&) noexcept;  ///< likewise

    /// Takes the blocks that `tokens` more tokens need in every layer, or throws OutOfMemory and changes nothing.
    /// Appends of those tokens, in any pieces, then cannot fail for want of blocks (unless a fork is made in between);
    /// the context's scratch is another matter.
    void reserve(std::int64_t tokens);

    /// Appends keys [kv_heads, n, head_dim] and values [kv_heads, n, value_dim] to one layer, n >= 0, of any element
    /// types. Keys are rotated first if the cache has a rotary description. What the cache's types do not hold is
    /// rounded to nearest even, once, codes too; in f16 from 65520 on to infinity, which reaches the rows that see it.
    /// Throws and leaves the cache as it was if an argument is wrong, the capacity would be exceeded, or memory
    /// runs out.
    void append(Context& context, std::size_t layer, const InputTensor<3>& keys, const InputTensor<3>& values);

    /// Tokens that all layers have, those that they have forgotten included.
    std::int64_t length() const noexcept;
    /// Tokens that one layer has: ahead of length() while a step is under way.
    std::int64_t length(std::size_t layer) const;
    /// Takes back what was appended to some layers but not to all, after a step that failed half-way.
    void discard_unfinished() noexcept;
    /// Takes back the newest tokens of all layers, down to `length`, 0 to length(). Throws WouldForget, and changes
    /// nothing, where a cache of so many tokens would hold positions that this one has forgotten: the tokens of the
    /// last append can be taken back, unless others were appended to single layers since.
    void truncate(std::int64_t length);
    /// Forgets all tokens and returns the blocks to the pool.
    void reset() noexcept;

    /// A cache that holds the same tokens, in the same blocks: a block is copied when one of its holders writes to it.
    /// Either cache goes its own way; they may be used by different threads. Throws OutOfMemory.
    KvCache fork() const;

    /// Makes each cache i a fork of what caches[parents[i]] was before the call: beams that go on from other beams.
    /// Throws InvalidArgument, OutOfMemory, and changes nothing.
    static void reorder(std::span<KvCache> caches, std::span<const std::size_t> parents);

    /// Writes all that the cache holds, and an attachment of the caller's (the tokens, say), in a format of its own
    /// that is the same on every machine and ends in a checksum: to saved_bytes() bytes, or to a file, which is written
    /// beside and then moved over what was there. Throws InvalidArgument (a buffer of another size; layers of different
    /// lengths), IoError, OutOfMemory.
    void save(std::span<std::byte> bytes, std::span<const std::byte> attachment = {}) const;
    /// Likewise, to a file.
    void save(const std::string& path, std::span<const std::byte> attachment = {}) const;
    /// Bytes that save() writes with an attachment of so many bytes.
    std::size_t saved_bytes(std::size_t attachment = 0) const noexcept;
    /// Replaces what the cache holds, and returns the attachment. What is restored must be of a cache of the same
    /// options (but for the capacity of one that is no ring, which it must fit, and pool and memory). Throws BadFile,
    /// saying what is wrong, IoError, OutOfMemory, and leaves the cache as it was.
    std::vector<std::byte> restore(std::span<const std::byte> bytes);
    std::vector<std::byte> restore(const std::string& path);  ///< likewise, from a file

    std::int64_t capacity() const noexcept;     ///< KvCacheOptions::capacity
    bool ring() const noexcept;                 ///< KvCacheOptions::ring
    std::int64_t sink_tokens() const noexcept;  ///< KvCacheOptions::sink_tokens
    bool f16_sinks() const noexcept;            ///< KvCacheOptions::f16_sinks
    std::int64_t max_chunk() const noexcept;    ///< KvCacheOptions::max_chunk
    std::size_t layers() const noexcept;        ///< KvCacheOptions::layers
    const KvShape& shape() const noexcept;      ///< KvCacheOptions::shape
    /// Whether a layer forgets: in a ring, or by a window. Appends of at most max_chunk() tokens are then safe.
    bool forgets() const noexcept;
    const std::optional<Rotary>& rotary(std::size_t layer = 0) const;  ///< throws InvalidArgument: no such layer
    const std::shared_ptr<BlockPool>& pool() const noexcept;           ///< the one it takes blocks from

    std::size_t used_bytes() const noexcept;      ///< bytes of the rows that this cache holds, padding included
    std::size_t reserved_bytes() const noexcept;  ///< bytes of the blocks that this cache holds, shared ones too

    /// Copies the stored rows [first, first + n) of a layer, n being the views' middle extent: keys [kv_heads, n,
    /// head_dim], values [kv_heads, n, value_dim], of any element types: what attention computes with. An f32 cache
    /// gives back the very bits that were appended (of keys that it rotated: the rotated ones), one of another type the
    /// rounded numbers. Throws WouldForget if a ring or a window has forgotten some of them.
    void read_back(std::size_t layer, std::int64_t first, const OutputTensor<3>& keys,
                   const OutputTensor<3>& values) const;

    /// Bytes of the blocks that a cache of these options holds at `tokens` tokens, at most, before anything is
    /// allocated.
    static std::size_t estimate_bytes(const KvCacheOptions& options, std::int64_t tokens);

    class HEADLONG_LOCAL Impl;
    Impl& impl() noexcept { return *impl_; }              ///< for the library's own use
    const Impl& impl() const noexcept { return *impl_; }  ///< for the library's own use

  private:
    HEADLONG_LOCAL explicit KvCache(std::unique_ptr<Impl> impl) noexcept;
    std::unique_ptr<Impl> impl_;
};

}  // namespace headlong
