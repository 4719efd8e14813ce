// Address space of which only what is touched costs memory: tensors whose strides reach billions of elements.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include <headlong/tensor.hpp>

#include "tests/support/any_tensor.hpp"

namespace headlong::test {

/// Bytes that read as 0 until they are written; a page of memory for every page that is. Null where the system refuses.
class SparseBytes {
  public:
    explicit SparseBytes(std::size_t bytes) {
        void* const map =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (map == MAP_FAILED) return;
        data_ = static_cast<std::byte*>(map);
        size_ = bytes;
#if defined(MADV_NOHUGEPAGE)
        madvise(map, bytes, MADV_NOHUGEPAGE);  // a touch costs 4 KiB, not 2 MiB
#endif
    }
    ~SparseBytes() {
        if (data_ != nullptr) munmap(data_, size_);
    }
    SparseBytes(const SparseBytes&) = delete;
    SparseBytes& operator=(const SparseBytes&) = delete;

    explicit operator bool() const noexcept { return data_ != nullptr; }
    std::byte* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }

    /// Everything reads as 0 again, and costs nothing.
    void forget() const noexcept { madvise(data_, size_, MADV_DONTNEED); }

  private:
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

/// Where the elements of a shape lie if one dimension's stride is `stride`, of either sign, and the others are dense.
template <std::size_t Rank>
Layout<Rank> far_layout(const Extents<Rank>& extents, std::size_t dimension, std::int64_t stride) {
    Extents<Rank> others = extents;
    others[dimension] = 1;
    Layout<Rank> layout = dense_layout<Rank>(others);
    const std::int64_t reach = (extents[dimension] - 1) * (stride < 0 ? -stride : stride);
    layout.strides[dimension] = stride;
    layout.first = stride < 0 ? reach : 0;
    layout.elements += static_cast<std::size_t>(reach);
    return layout;
}

/// A tensor in sparse memory, which must be large enough for its layout.
template <std::size_t Rank>
class SparseTensor {
  public:
    SparseTensor(const SparseBytes& memory, Element element, const Extents<Rank>& extents, const Layout<Rank>& layout)
        : memory_(memory.data()), element_(element), extents_(extents), layout_(layout) {
        EXPECT_LE(layout.elements * size_of(element), memory.size()) << "the mapping is too small for this test";
    }

    void* data() const noexcept { return at(Extents<Rank>{}); }
    InputTensor<Rank> input() const noexcept { return {data(), dtype_of(element_), extents_, layout_.strides}; }
    OutputTensor<Rank> output() const noexcept { return {data(), dtype_of(element_), extents_, layout_.strides}; }
    const Extents<Rank>& strides() const noexcept { return layout_.strides; }

    /// The elements of a dense view of the same extents and element size.
    void assign(const void* dense) const {
        const auto* from = static_cast<const std::byte*>(dense);
        for_each_index<Rank>(extents_, [&](const Extents<Rank>& i) {
            std::memcpy(at(i), from, size_of(element_));
            from += size_of(element_);
        });
    }
    /// Whether its elements are those of a dense view, bit by bit.
    testing::AssertionResult holds(const void* dense) const {
        const auto* want = static_cast<const std::byte*>(dense);
        std::size_t flat = 0;
        std::size_t different = 0;
        std::size_t first = 0;
        for_each_index<Rank>(extents_, [&](const Extents<Rank>& i) {
            if (std::memcmp(at(i), want + flat * size_of(element_), size_of(element_)) != 0 && different++ == 0) {
                first = flat;
            }
            ++flat;
        });
        if (different == 0) return testing::AssertionSuccess();
        return testing::AssertionFailure() << different << " of " << flat << " elements differ, the first is " << first;
    }

  private:
    std::byte* at(const Extents<Rank>& index) const noexcept {
        std::int64_t place = layout_.first;
        for (std::size_t d = 0; d < Rank; ++d) place += index[d] * layout_.strides[d];
        return memory_ + place * static_cast<std::int64_t>(size_of(element_));
    }

    std::byte* memory_;
    Element element_;
    Extents<Rank> extents_;
    Layout<Rank> layout_;
};

}  // namespace headlong::test
