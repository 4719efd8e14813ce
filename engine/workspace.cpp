#include "engine/workspace.hpp"

#include <limits>
#include <new>
#include <utility>

#include "engine/huge_pages.hpp"

namespace headlong {

namespace {

std::size_t alignment_of(const std::pmr::memory_resource& memory, std::size_t bytes) noexcept {
    return is_ours(memory) && bytes >= kHugePageBytes ? kHugePageBytes : kernels::kAlignment;
}

}  // namespace

std::byte* Buffer::ensure(std::size_t bytes) {
    if (bytes > bytes_) {
        release();
        // operator new rounds up to the alignment without a look: the largest sizes would become 0
        if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
        data_ = static_cast<std::byte*>(memory_->allocate(bytes, alignment_of(*memory_, bytes)));
        bytes_ = bytes;
        if (is_ours(*memory_)) ask_for_huge_pages(data_, bytes);
    }
    return data_;
}

void Buffer::release() noexcept {
    if (data_ != nullptr) memory_->deallocate(data_, bytes_, alignment_of(*memory_, bytes_));
    data_ = nullptr;
    bytes_ = 0;
}

WorkspacePool::Lease WorkspacePool::lend() {
    std::unique_ptr<Workspace> workspace;
    {
        const std::lock_guard lock(mutex_);
        if (!idle_.empty()) {
            workspace = std::move(idle_.back());
            idle_.pop_back();
        } else {
            idle_.reserve(made_ + 1);  // so that taking back cannot fail
            ++made_;
        }
    }
    if (workspace == nullptr) workspace = std::make_unique<Workspace>(*memory_);
    return {*this, std::move(workspace)};
}

void WorkspacePool::take_back(std::unique_ptr<Workspace> workspace, std::size_t bytes_before) noexcept {
    // modular arithmetic: a buffer that failed to grow has shrunk to nothing
    bytes_.fetch_add(workspace->bytes() - bytes_before, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(workspace));
}

}  // namespace headlong
