#include "engine/workspace.hpp"

#include <utility>

#include "engine/huge_pages.hpp"

namespace headlong {

namespace {

std::size_t alignment_of(std::size_t bytes) noexcept {
    return bytes >= kHugePageBytes ? kHugePageBytes : kernels::kAlignment;
}

}  // namespace

std::byte* Buffer::ensure(std::size_t bytes) {
    if (bytes > bytes_) {
        release();
        data_ = static_cast<std::byte*>(memory_->allocate(bytes, alignment_of(bytes)));
        bytes_ = bytes;
        // nobody else manages these pages; of a caller's resource that is not known
        if (memory_ == std::pmr::new_delete_resource()) ask_for_huge_pages(data_, bytes);
    }
    return data_;
}

void Buffer::release() noexcept {
    if (data_ != nullptr) memory_->deallocate(data_, bytes_, alignment_of(bytes_));
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
