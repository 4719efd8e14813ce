// What a cache does to keys before it quantises them, and to the queries that meet them: scores stay the same, and
// outliers shrink.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <vector>

#include "kernels/kernel_table.hpp"

namespace headlong {

struct KeyTransform {
    std::pmr::vector<float> centre;  ///< [kv_heads][head_dim], subtracted from keys; empty: none
    bool hadamard = false;           ///< keys are turned by a Walsh-Hadamard transform, and so are queries

    bool changes_keys() const noexcept { return hadamard || !centre.empty(); }
    const float* centre_of(std::size_t kv_head, std::size_t head_dim) const noexcept {
        return centre.empty() ? nullptr : centre.data() + kv_head * head_dim;
    }

    /// Rows of keys of one KV head, in place.
    void apply(const kernels::KernelTable& kernels, std::size_t kv_head, float* rows, std::size_t row_count,
               std::size_t head_dim) const noexcept;
    /// The way back for one row, as it was stored: exact but for a rounding.
    void undo(std::size_t kv_head, double* row, std::size_t head_dim) const noexcept;
};

}  // namespace headlong
