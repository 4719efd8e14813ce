// The pool of blocks behind headlong::BlockPool.
//
// A slab is one allocation laid out as [kv_head][key panels of all blocks | value panels of all blocks], so that the
// keys of consecutive blocks of a head are contiguous, and so are their values: a span's keys are read, and then its
// values, and each place where what is read does not go on in memory costs a third of a microsecond, as much as 6 KiB
// (bench/RESULTS.md). A block is a slab and an index in it. Slabs never move: a reader may use a block while another
// cache makes the pool grow.
#pragma once

#include <atomic>
#include <cstdint>
#include <headlong/kv_cache.hpp>
#include <list>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/layout.hpp"

namespace headlong {

struct Slab {
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
    std::size_t alignment = 0;
    std::size_t blocks = 0;
    std::size_t key_bytes = 0;                             ///< of one block of one KV head
    std::size_t value_bytes = 0;                           ///< the same
    std::pmr::vector<std::uint8_t> nonfinite;              ///< [kv_head][block]: the values may hold a NaN or infinity
    std::pmr::vector<std::atomic<std::uint32_t>> holders;  ///< [block]: caches that hold it

    Slab(std::pmr::memory_resource& resource, std::size_t block_count, std::size_t heads)
        : blocks(block_count), nonfinite(block_count * heads, &resource), holders(block_count, &resource) {}
};

/// One block of all KV heads.
struct Block {
    Slab* slab = nullptr;
    std::uint32_t index = 0;

    std::byte* keys(std::size_t head) const noexcept { return of_head(head) + index * slab->key_bytes; }
    std::byte* values(std::size_t head) const noexcept {
        return of_head(head) + slab->blocks * slab->key_bytes + index * slab->value_bytes;
    }
    std::uint8_t& nonfinite(std::size_t head) const noexcept { return slab->nonfinite[head * slab->blocks + index]; }
    /// More caches than one hold it: nobody may write to it. What only one cache holds nobody else can begin to hold.
    bool shared() const noexcept { return slab->holders[index].load(std::memory_order_acquire) > 1; }

    friend bool operator==(const Block&, const Block&) = default;

  private:
    std::byte* of_head(std::size_t head) const noexcept {
        return slab->memory + head * slab->blocks * (slab->key_bytes + slab->value_bytes);
    }
};

class BlockPool::Impl {
  public:
    Impl(const KvShape& shape, std::pmr::memory_resource* memory);
    ~Impl();
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    const KvShape& shape() const noexcept { return shape_; }
    kernels::BlockLayout layout() const noexcept { return layout_; }
    std::size_t block_bytes() const noexcept { return block_bytes_; }
    std::size_t used_bytes() const noexcept;
    std::size_t reserved_bytes() const noexcept;

    /// Where slabs come from, and all that grows with them.
    std::pmr::memory_resource& memory() const noexcept { return memory_; }

    /// A pool of the same memory for blocks of the same dims in f16, made when it is asked for first.
    std::shared_ptr<BlockPool> f16_pool();

    /// Fills `blocks` with blocks of one holder, whose memory holds anything: who appends clears the dead lanes that
    /// may be read. Throws std::bad_alloc and takes nothing if there is no memory for all.
    void take(std::span<Block> blocks);
    /// One holder more; the caller is one.
    void share(const Block& block) noexcept;
    /// One holder less; from the last one the pool takes it back.
    void give_back(const Block& block) noexcept;
    /// For a block that its only holder uses anew.
    void renew(const Block& block) const noexcept;
    /// All bytes of a block, into one of a single holder.
    void copy(const Block& from, const Block& to) const noexcept;

  private:
    void add_slab(std::size_t needed_blocks);

    const KvShape shape_;
    const kernels::BlockLayout layout_;
    const std::size_t block_bytes_;
    std::pmr::memory_resource& memory_;
    mutable std::mutex mutex_;
    std::pmr::list<Slab> slabs_;
    std::pmr::vector<Block> free_;  ///< a stack; capacity for all blocks, so that giving back cannot fail
    std::size_t blocks_ = 0;
    std::size_t reserved_bytes_ = 0;
    std::shared_ptr<BlockPool> f16_pool_;
};

/// Throws InvalidArgument or Unsupported unless a pool can hold rows of this shape.
void check_shape(const KvShape& shape);

/// The same dims in f16.
KvShape f16_shape_of(KvShape shape) noexcept;

/// How kernels see a type that a pool holds.
kernels::StoredType stored_type(KvType type) noexcept;

/// Bytes of one block of that shape; the shape has been checked.
std::size_t block_bytes_of(const KvShape& shape) noexcept;

/// Bytes of the keys and values of one token, without padding: what must be read of it. The shape has been checked.
std::size_t token_bytes_of(const KvShape& shape) noexcept;

}  // namespace headlong
