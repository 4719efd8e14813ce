#include <mimalloc.h>

#include <headlong/mimalloc.hpp>
#include <new>

namespace headlong {
namespace {

class MimallocResource final : public std::pmr::memory_resource {
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        void* p = mi_malloc_aligned(bytes, alignment);
        if (p == nullptr) throw std::bad_alloc();
        return p;
    }
    void do_deallocate(void* p, std::size_t, std::size_t alignment) override { mi_free_aligned(p, alignment); }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

}  // namespace

std::pmr::memory_resource& mimalloc_resource() noexcept {
    static MimallocResource resource;
    return resource;
}

}  // namespace headlong
