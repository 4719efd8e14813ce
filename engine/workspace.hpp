// Scratch memory that is allocated once and kept: grown before a loop starts, never inside one.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <vector>

#include "engine/carver.hpp"
#include "engine/interrupt.hpp"
#include "kernels/layout.hpp"

namespace headlong {

/// Memory aligned for kernels that only grows. Contents do not survive growth.
class Buffer {
  public:
    explicit Buffer(std::pmr::memory_resource& memory) noexcept : memory_(&memory) {}
    ~Buffer() { release(); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    /// At least `bytes` bytes. Throws what the resource throws, and is empty then.
    std::byte* ensure(std::size_t bytes);
    float* ensure_floats(std::size_t count) {
        return reinterpret_cast<float*>(ensure(saturating_product(count, sizeof(float))));
    }
    std::size_t bytes() const noexcept { return bytes_; }
    const std::byte* data() const noexcept { return data_; }

  private:
    void release() noexcept;
    std::pmr::memory_resource* memory_;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

/// The scratch of one call at a time.
class Workspace {
  public:
    explicit Workspace(std::pmr::memory_resource& memory)
        : workers(memory), units(memory), states(memory), rows(memory), quantised(memory), lists(memory) {}

    Buffer workers;                        ///< one region per worker
    Buffer units;                          ///< the row blocks of a call
    Buffer states;                         ///< span states that several workers hand in
    Buffer rows;                           ///< activations of a layer
    Buffer quantised;                      ///< rows that meet int8 weights
    Buffer lists;                          ///< the call's sequences
    const Interrupt* interrupt = nullptr;  ///< the call's, if it has one: tasks of its layers look at it
    bool interrupted() const noexcept { return interrupt != nullptr && interrupt->requested(); }
    std::size_t bytes() const noexcept {
        return workers.bytes() + units.bytes() + states.bytes() + rows.bytes() + quantised.bytes() + lists.bytes();
    }
};

/// Lends workspaces to calls. A context has as many as it ever had calls at the same time.
class WorkspacePool {
  public:
    explicit WorkspacePool(std::pmr::memory_resource& memory) noexcept : memory_(&memory) {}

    class Lease {
      public:
        Lease(WorkspacePool& pool, std::unique_ptr<Workspace> workspace) noexcept
            : pool_(&pool), workspace_(std::move(workspace)), before_(workspace_->bytes()) {}
        ~Lease() {
            workspace_->interrupt = nullptr;
            pool_->take_back(std::move(workspace_), before_);
        }
        Lease(const Lease&) = delete;
        Lease& operator=(const Lease&) = delete;
        Workspace* operator->() noexcept { return workspace_.get(); }
        Workspace& operator*() noexcept { return *workspace_; }

      private:
        WorkspacePool* pool_;
        std::unique_ptr<Workspace> workspace_;
        std::size_t before_;
    };

    Lease lend();
    std::size_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }

  private:
    void take_back(std::unique_ptr<Workspace> workspace, std::size_t bytes_before) noexcept;

    std::pmr::memory_resource* memory_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Workspace>> idle_;
    std::size_t made_ = 0;
    std::atomic<std::size_t> bytes_{0};
};

}  // namespace headlong
