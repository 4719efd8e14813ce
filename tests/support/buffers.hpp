// Memory for tests: inaccessible pages on both sides, strided layouts with holes, and canaries in what must not be
// written.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <headlong/tensor.hpp>

#include "engine/reference/tensor.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {

/// A quiet NaN that the library never writes (it writes 0x7fc00000), for memory that must not be read or written.
inline constexpr std::uint32_t kCanaryBits = 0x7FE5A1C3U;
inline const float kCanary = std::bit_cast<float>(kCanaryBits);

inline bool is_canary(float x) noexcept { return std::bit_cast<std::uint32_t>(x) == kCanaryBits; }

/// Which side of a buffer touches an inaccessible page; the other side's page is up to a page away.
enum class Touch : std::uint8_t { end, begin };

/// Bytes between two inaccessible pages: an access beyond the side that touches one ends the process at once.
class GuardedBytes {
  public:
    explicit GuardedBytes(std::size_t bytes, Touch touch = Touch::end) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t inner = std::max<std::size_t>(1, (bytes + page - 1) / page) * page;
        total_ = inner + 2 * page;
        map_ = take_idle(total_);
        if (map_ == nullptr) {
            void* map = mmap(nullptr, total_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (map == MAP_FAILED) throw std::bad_alloc();
            map_ = static_cast<std::byte*>(map);
            if (mprotect(map_ + page, inner, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
        }
        data_ = touch == Touch::end ? map_ + page + inner - bytes : map_ + page;
        size_ = bytes;
    }
    ~GuardedBytes() {
        if (map_ != nullptr && !keep_idle(map_, total_)) munmap(map_, total_);
    }
    GuardedBytes(GuardedBytes&& other) noexcept { swap(other); }
    GuardedBytes& operator=(GuardedBytes&& other) noexcept {
        swap(other);
        return *this;
    }

    std::byte* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }

    /// While one exists, what is released is kept for the next of its size, which costs no system call: for tests that
    /// make many, on one thread. (An access to what has been released then goes unnoticed.)
    class Reuse {
      public:
        Reuse() { idle_ = &maps_; }
        ~Reuse() {
            idle_ = nullptr;
            for (const auto& [total, map] : maps_) munmap(map, total);
        }
        Reuse(const Reuse&) = delete;
        Reuse& operator=(const Reuse&) = delete;

      private:
        std::multimap<std::size_t, std::byte*> maps_;
    };

  private:
    static constexpr std::size_t kMostIdle = 500;
    static constexpr std::size_t kMostIdleBytes = 1U << 20U;  ///< of each
    static inline std::multimap<std::size_t, std::byte*>* idle_ = nullptr;

    static std::byte* take_idle(std::size_t total) {
        if (idle_ == nullptr) return nullptr;
        const auto found = idle_->find(total);
        if (found == idle_->end()) return nullptr;
        std::byte* const map = found->second;
        idle_->erase(found);
        return map;
    }
    static bool keep_idle(std::byte* map, std::size_t total) {
        if (idle_ == nullptr || idle_->size() >= kMostIdle || total > kMostIdleBytes) return false;
        idle_->emplace(total, map);
        return true;
    }

    void swap(GuardedBytes& other) noexcept {
        std::swap(map_, other.map_);
        std::swap(data_, other.data_);
        std::swap(total_, other.total_);
        std::swap(size_, other.size_);
    }

    std::byte* map_ = nullptr;
    std::byte* data_ = nullptr;
    std::size_t total_ = 0;
    std::size_t size_ = 0;
};

/// Guarded floats, all canaries at first. Ends on a guard page, so that a size that is a multiple of 16 floats is
/// also aligned to 64 bytes.
class GuardedFloats {
  public:
    explicit GuardedFloats(std::size_t count, Touch touch = Touch::end)
        : bytes_(count * sizeof(float), touch), floats_(reinterpret_cast<float*>(bytes_.data()), count) {
        std::fill(floats_.begin(), floats_.end(), kCanary);
    }

    float* data() const noexcept { return floats_.data(); }
    std::size_t size() const noexcept { return floats_.size(); }
    float& operator[](std::size_t i) const { return floats_[i]; }
    float* begin() const noexcept { return floats_.data(); }
    float* end() const noexcept { return floats_.data() + floats_.size(); }

  private:
    GuardedBytes bytes_;
    std::span<float> floats_;
};

/// Where the elements of a tensor lie in a buffer of `elements` elements.
template <std::size_t Rank>
struct Layout {
    Extents<Rank> strides{};
    std::int64_t first = 0;  ///< place of element [0, 0, ...]
    std::size_t elements = 0;
};

template <std::size_t Rank>
Layout<Rank> dense_layout(const Extents<Rank>& extents) {
    std::size_t floats = 1;
    for (const std::int64_t extent : extents) floats *= static_cast<std::size_t>(extent);
    return {dense_strides<Rank>(extents), 0, floats};
}

/// Dimensions in any order of nesting, with holes between rows, some of them running backwards. Of the first
/// `broadcastable` dimensions (inputs only) some have stride 0.
template <std::size_t Rank>
Layout<Rank> random_layout(const Extents<Rank>& extents, Random& random, std::size_t broadcastable = 0) {
    std::array<std::size_t, Rank> nesting{};
    for (std::size_t i = 0; i < Rank; ++i) nesting[i] = Rank - 1 - i;  // innermost first
    if (random.chance(0.5)) random.shuffle(nesting);
    Layout<Rank> layout;
    std::int64_t used = random.chance(0.8) ? 1 : random.integer(2, 3);
    for (const std::size_t dimension : nesting) {
        const std::int64_t extent = extents[dimension];
        if (dimension < broadcastable && random.chance(0.1)) continue;  // stride 0
        layout.strides[dimension] = used;
        used = used * std::max<std::int64_t>(extent, 1) + (random.chance(0.5) ? random.integer(1, 5) : 0);
        if (extent > 0 && random.chance(0.2)) {
            layout.first += (extent - 1) * layout.strides[dimension];
            layout.strides[dimension] = -layout.strides[dimension];
        }
    }
    const std::int64_t lead = random.integer(0, 5);
    layout.first += lead;
    // exactly up to the last element, which then lies against the guard page
    std::int64_t last = layout.first;
    for (std::size_t i = 0; i < Rank; ++i) {
        if (layout.strides[i] > 0) last += std::max<std::int64_t>(extents[i] - 1, 0) * layout.strides[i];
    }
    layout.elements = static_cast<std::size_t>(last + 1);
    return layout;
}

/// A tensor of float in guarded memory, with canaries (NaN) in every place that is not an element.
template <std::size_t Rank>
class GuardedTensor {
  public:
    GuardedTensor(const Extents<Rank>& extents, const Layout<Rank>& layout, Touch touch = Touch::end)
        : extents_(extents), layout_(layout), memory_(layout.elements, touch) {}

    /// Dense.
    explicit GuardedTensor(const Extents<Rank>& extents) : GuardedTensor(extents, dense_layout<Rank>(extents)) {}

    /// Any layout, the guard page behind or in front.
    static GuardedTensor random(const Extents<Rank>& extents, Random& random, std::size_t broadcastable = 0) {
        const Layout<Rank> layout = random_layout<Rank>(extents, random, broadcastable);
        return GuardedTensor(extents, layout, random.chance(0.75) ? Touch::end : Touch::begin);
    }

    const Extents<Rank>& extents() const noexcept { return extents_; }

    InputTensor<Rank> input() const noexcept {
        return {memory_.data() + layout_.first, DType::f32, extents_, layout_.strides};
    }
    OutputTensor<Rank> output() const noexcept {
        return {memory_.data() + layout_.first, DType::f32, extents_, layout_.strides};
    }

    float& at(const Extents<Rank>& index) const {
        std::int64_t place = layout_.first;
        for (std::size_t i = 0; i < Rank; ++i) place += index[i] * layout_.strides[i];
        return memory_[static_cast<std::size_t>(place)];
    }

    /// Calls visit(element) in row-major order.
    template <typename Visit>
    void for_each(const Visit& visit) const {
        for (const std::int64_t extent : extents_) {
            if (extent == 0) return;
        }
        Extents<Rank> index{};
        for (;;) {
            visit(at(index));
            std::size_t i = Rank;
            while (i > 0 && ++index[i - 1] == extents_[i - 1]) index[--i] = 0;
            if (i == 0) return;
        }
    }

    void fill(float value) const {
        for_each([&](float& element) { element = value; });
    }
    void fill_normal(Random& random, double factor = 1.0) const {
        for_each([&](float& element) { element = static_cast<float>(random.normal() * factor); });
    }
    /// From a dense row-major sequence.
    template <typename Source>
    void assign(const Source& source) const {
        auto next = source.begin();
        for_each([&](float& element) { element = static_cast<float>(*next++); });
    }

    /// The elements, dense and row-major.
    std::vector<float> dense() const {
        std::vector<float> elements;
        for_each([&](const float& element) { elements.push_back(element); });
        return elements;
    }

    reference::Tensor widened() const { return reference::widen(input()); }

    /// Whether every element of an output has been written, and nothing else.
    testing::AssertionResult written_exactly() const {
        std::vector<char> element(memory_.size(), 0);
        std::size_t unwritten = 0;
        for_each([&](const float& place) {
            element[static_cast<std::size_t>(&place - memory_.data())] = 1;
            unwritten += is_canary(place) ? 1U : 0U;
        });
        if (unwritten != 0) return testing::AssertionFailure() << unwritten << " elements were not written";
        for (std::size_t i = 0; i < memory_.size(); ++i) {
            if (element[i] == 0 && !is_canary(memory_[i])) {
                return testing::AssertionFailure()
                       << "wrote " << memory_[i] << " to a place that is no element, float " << i << " of "
                       << memory_.size() << ", first element at " << layout_.first;
            }
        }
        return testing::AssertionSuccess();
    }

    /// For messages.
    std::string describe() const {
        std::string text = "extents";
        for (const std::int64_t extent : extents_) text += " " + std::to_string(extent);
        text += ", strides";
        for (const std::int64_t stride : layout_.strides) text += " " + std::to_string(stride);
        return text;
    }

  private:
    Extents<Rank> extents_;
    Layout<Rank> layout_;
    GuardedFloats memory_;
};

}  // namespace headlong::test
