// The blocks that one layer of a cache holds, by number: block b holds the positions [64 b, 64 (b + 1)).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include "engine/block_pool.hpp"

namespace headlong {

/// The first `pinned` blocks, once they are there, stay; the others are a queue, [front, end), that a ring shortens at
/// its front. Finding, adding and dropping a block take the same time whatever the length.
class BlockTable {
  public:
    explicit BlockTable(std::pmr::memory_resource& memory, std::int64_t pinned = 0) noexcept
        : pinned_(pinned), front_(pinned), first_(&memory), queue_(&memory) {}
    /// Without blocks, for good.
    BlockTable() noexcept : BlockTable(*std::pmr::null_memory_resource()) {}

    const Block& operator[](std::int64_t number) const noexcept {
        return number < pinned_ ? first_[static_cast<std::size_t>(number)] : queue_[slot(number)];
    }
    Block& operator[](std::int64_t number) noexcept {
        return number < pinned_ ? first_[static_cast<std::size_t>(number)] : queue_[slot(number)];
    }

    /// The first number behind all blocks.
    std::int64_t end() const noexcept { return end_; }
    /// The first number that is held and not pinned; end() if there is none.
    std::int64_t front() const noexcept { return std::min(front_, end_); }
    std::int64_t pinned() const noexcept { return std::min(pinned_, end_); }
    std::int64_t count() const noexcept { return pinned() + std::max<std::int64_t>(end_ - front_, 0); }

    /// Room for the blocks up to `end`, so that adding them cannot fail.
    void reserve(std::int64_t end) {
        if (end > static_cast<std::int64_t>(first_.capacity()) && first_.size() < static_cast<std::size_t>(pinned_)) {
            first_.reserve(static_cast<std::size_t>(
                std::min(pinned_, std::max(end, 2 * static_cast<std::int64_t>(first_.size())))));
        }
        const auto queued = static_cast<std::size_t>(std::max<std::int64_t>(end - front_, 0));
        if (queued <= queue_.size()) return;
        std::pmr::vector<Block> larger(std::bit_ceil(queued), queue_.get_allocator());
        for (std::int64_t b = front_; b < end_; ++b) {
            larger[static_cast<std::size_t>(b) & (larger.size() - 1)] = queue_[slot(b)];
        }
        queue_.swap(larger);
    }
    /// The same for a table without blocks whose queue is to begin with block `front`.
    void reserve_for(std::int64_t end, std::int64_t front) {
        first_.reserve(static_cast<std::size_t>(std::min(pinned_, end)));
        const std::int64_t begin = std::max(front, pinned_);
        queue_.resize(std::bit_ceil(static_cast<std::size_t>(std::max<std::int64_t>(end - begin, 0))));
    }
    /// The next block is number `front`; the queue is empty.
    void skip_to(std::int64_t front) noexcept { front_ = end_ = front; }
    void push_back(const Block& block) noexcept {
        if (end_ < pinned_) {
            first_.push_back(block);
        } else {
            queue_[slot(end_)] = block;
        }
        ++end_;
    }
    /// front() < end()
    Block pop_front() noexcept { return queue_[slot(front_++)]; }
    /// front() < end(), or only pinned blocks are left and none was dropped behind them.
    Block pop_back() noexcept {
        --end_;
        if (end_ >= pinned_) return queue_[slot(end_)];
        const Block block = first_.back();
        first_.pop_back();
        return block;
    }
    /// All of them, the last one first.
    template <class Visit>
    void for_each(const Visit& visit) const {
        for (std::int64_t b = end_; b-- > front();) visit((*this)[b]);
        for (std::int64_t b = pinned(); b-- > 0;) visit((*this)[b]);
    }
    /// The queue is empty, and begins behind the pinned blocks again, which are all there.
    void drop_queue() noexcept { front_ = end_ = pinned_; }
    /// Nothing is held, and the next block is number 0.
    void clear() noexcept {
        first_.clear();
        front_ = pinned_;
        end_ = 0;
    }

  private:
    std::size_t slot(std::int64_t number) const noexcept {
        return static_cast<std::size_t>(number) & (queue_.size() - 1);
    }

    std::int64_t pinned_;
    std::int64_t front_;
    std::int64_t end_ = 0;
    std::pmr::vector<Block> first_;
    std::pmr::vector<Block> queue_;  ///< a power of two of slots
};

}  // namespace headlong
