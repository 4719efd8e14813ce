#include "engine/block_pool.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <headlong/error.hpp>
#include <new>

#include "engine/huge_pages.hpp"
#include "engine/validate.hpp"

namespace headlong {
namespace {

constexpr std::size_t kFirstSlabBytes = std::size_t{64} << 10U;    // a test's cache should not cost megabytes
constexpr std::size_t kLargestSlabBytes = std::size_t{64} << 20U;  // bounds what the last slab may leave unused
constexpr std::int64_t kMaxDim = std::int64_t{1} << 20;            // bounds block_bytes far below 2^63:
constexpr std::int64_t kMaxHeads = std::int64_t{1} << 20;  // 2^20 heads * 2^6 tokens * 2^21 dims * 4 bytes = 2^49

kernels::BlockLayout layout_of(const KvShape& shape) noexcept {
    return {static_cast<std::size_t>(shape.head_dim), static_cast<std::size_t>(shape.value_dim),
            stored_type(shape.key_type), stored_type(shape.value_type)};
}

void check_range(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value < least || value > most)
        throw InvalidArgument(fmt::format("{} is {}; allowed: {} to {}", name, value, least, most));
}

}  // namespace

const char* to_string(KvType type) noexcept {
    switch (type) {
        case KvType::f32:
            return "f32";
        case KvType::f16:
            return "f16";
        case KvType::bf16:
            return "bf16";
        case KvType::int8:
            return "int8";
        case KvType::int4:
            return "int4";
    }
    return "unknown";
}

void check_shape(const KvShape& shape) {
    check_range("KvShape: kv_heads", shape.kv_heads, 1, kMaxHeads);
    check_range("KvShape: head_dim", shape.head_dim, 1, kMaxDim);
    check_range("KvShape: value_dim", shape.value_dim, 0, kMaxDim);
    for (const auto& [name, type] :
         {std::pair{"key_type", shape.key_type}, std::pair{"value_type", shape.value_type}}) {
        if (type > KvType::int4) {
            throw InvalidArgument(
                fmt::format("KvShape: {} is {}; allowed: f32, f16, bf16, int8, int4", name, static_cast<int>(type)));
        }
    }
}

kernels::StoredType stored_type(KvType type) noexcept {
    switch (type) {
        case KvType::f16:
            return kernels::StoredType::f16;
        case KvType::bf16:
            return kernels::StoredType::bf16;
        case KvType::int8:
            return kernels::StoredType::int8;
        case KvType::int4:
            return kernels::StoredType::int4;
        case KvType::f32:
            break;
    }
    return kernels::StoredType::f32;
}

KvShape f16_shape_of(KvShape shape) noexcept {
    shape.key_type = shape.value_type = KvType::f16;
    return shape;
}

std::size_t block_bytes_of(const KvShape& shape) noexcept {
    return layout_of(shape).bytes() * static_cast<std::size_t>(shape.kv_heads);
}

std::size_t token_bytes_of(const KvShape& shape) noexcept {
    const auto row_bytes = [](kernels::StoredType type, std::size_t elements, std::size_t group) noexcept {
        if (!kernels::has_codes(type)) return elements * kernels::element_bytes(kernels::element_type(type));
        const std::size_t scales = (elements + group - 1) / group;
        const std::size_t in_byte = kernels::codes_in_byte(type);
        return scales * sizeof(float) + (elements + in_byte - 1) / in_byte;
    };
    const kernels::BlockLayout layout = layout_of(shape);
    return static_cast<std::size_t>(shape.kv_heads) *
           (row_bytes(layout.key_type, layout.head_dim, kernels::kCodeGroup) +
            row_bytes(layout.value_type, layout.value_dim, kernels::kValueGroup));
}

BlockPool::Impl::Impl(const KvShape& shape, std::pmr::memory_resource* memory)
    : shape_(shape),
      layout_(layout_of(shape)),
      block_bytes_(block_bytes_of(shape)),
      memory_(memory != nullptr ? *memory : *std::pmr::new_delete_resource()),
      slabs_(&memory_),
      free_(&memory_) {}

BlockPool::Impl::~Impl() {
    for (const Slab& slab : slabs_) memory_.deallocate(slab.memory, slab.bytes, slab.alignment);
}

std::size_t BlockPool::Impl::used_bytes() const noexcept {
    const std::lock_guard lock(mutex_);
    return (blocks_ - free_.size()) * block_bytes_ + (f16_pool_ != nullptr ? f16_pool_->used_bytes() : 0);
}

std::size_t BlockPool::Impl::reserved_bytes() const noexcept {
    const std::lock_guard lock(mutex_);
    return reserved_bytes_ + (f16_pool_ != nullptr ? f16_pool_->reserved_bytes() : 0);
}

std::shared_ptr<BlockPool> BlockPool::Impl::f16_pool() {
    const std::lock_guard lock(mutex_);
    if (f16_pool_ == nullptr) {
        f16_pool_ = std::make_shared<BlockPool>(f16_shape_of(shape_), &memory_);
    }
    return f16_pool_;
}

void BlockPool::Impl::add_slab(std::size_t needed_blocks) {
    // Doubling what is there keeps the number of slabs small without reserving much more than is used. Where memory
    // is short a smaller slab may still do, down to a single block.
    const std::size_t wanted_bytes = std::clamp(reserved_bytes_, kFirstSlabBytes, kLargestSlabBytes);
    std::size_t blocks = std::clamp<std::size_t>(wanted_bytes / block_bytes_, 1, std::size_t{1} << 20U);
    std::pmr::list<Slab> made(&memory_);
    for (;;) {
        try {
            Slab& slab = made.emplace_back(memory_, blocks, static_cast<std::size_t>(shape_.kv_heads));
            free_.reserve(blocks_ + blocks);
            slab.bytes = blocks * block_bytes_;
            slab.alignment = slab.bytes >= kHugePageBytes ? kHugePageBytes : kernels::kAlignment;
            slab.memory = static_cast<std::byte*>(memory_.allocate(slab.bytes, slab.alignment));
            break;
        } catch (const std::bad_alloc&) {
            made.clear();
            if (blocks == 1) throw;
            blocks = blocks > needed_blocks ? std::max<std::size_t>(needed_blocks, blocks / 2) : blocks / 2;
        }
    }
    Slab& slab = made.back();
    if (is_ours(memory_)) ask_for_huge_pages(slab.memory, slab.bytes);
    slab.key_bytes = layout_.values_offset();
    slab.value_bytes = layout_.value_bytes();
    for (std::size_t i = blocks; i-- > 0;) free_.push_back({&slab, static_cast<std::uint32_t>(i)});
    reserved_bytes_ += slab.bytes;
    blocks_ += blocks;
    slabs_.splice(slabs_.end(), made);
}

void BlockPool::Impl::take(std::span<Block> blocks) {
    {
        const std::lock_guard lock(mutex_);
        while (free_.size() < blocks.size()) add_slab(blocks.size() - free_.size());
        for (Block& block : blocks) {
            block = free_.back();
            free_.pop_back();
        }
    }
    for (const Block& block : blocks) {
        block.slab->holders[block.index].store(1, std::memory_order_relaxed);
        renew(block);
    }
}

void BlockPool::Impl::share(const Block& block) noexcept {
    block.slab->holders[block.index].fetch_add(1, std::memory_order_relaxed);
}

void BlockPool::Impl::give_back(const Block& block) noexcept {
    if (block.slab->holders[block.index].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::lock_guard lock(mutex_);
    free_.push_back(block);
}

void BlockPool::Impl::renew(const Block& block) const noexcept {
    for (std::size_t head = 0; head < static_cast<std::size_t>(shape_.kv_heads); ++head) block.nonfinite(head) = 0;
}

void BlockPool::Impl::copy(const Block& from, const Block& to) const noexcept {
    for (std::size_t head = 0; head < static_cast<std::size_t>(shape_.kv_heads); ++head) {
        std::memcpy(to.keys(head), from.keys(head), layout_.values_offset());
        if (layout_.value_bytes() > 0) std::memcpy(to.values(head), from.values(head), layout_.value_bytes());
        to.nonfinite(head) = from.nonfinite(head);
    }
}

BlockPool::BlockPool(const KvShape& shape, std::pmr::memory_resource* memory) {
    check_shape(shape);
    impl_ = std::make_unique<Impl>(shape, memory);
}

BlockPool::~BlockPool() = default;

const KvShape& BlockPool::shape() const noexcept { return impl_->shape(); }
std::size_t BlockPool::block_bytes() const noexcept { return impl_->block_bytes(); }
std::size_t BlockPool::used_bytes() const noexcept { return impl_->used_bytes(); }
std::size_t BlockPool::reserved_bytes() const noexcept { return impl_->reserved_bytes(); }

}  // namespace headlong
