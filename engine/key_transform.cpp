#include "engine/key_transform.hpp"

#include <cmath>

namespace headlong {

void KeyTransform::apply(const kernels::KernelTable& kernels, std::size_t kv_head, float* rows, std::size_t row_count,
                         std::size_t head_dim) const noexcept {
    if (const float* c = centre_of(kv_head, head_dim)) {
        for (std::size_t r = 0; r < row_count; ++r) {
            for (std::size_t d = 0; d < head_dim; ++d) rows[r * head_dim + d] -= c[d];
        }
    }
    if (hadamard) kernels.hadamard({rows, head_dim, row_count, head_dim});
}

void KeyTransform::undo(std::size_t kv_head, double* row, std::size_t head_dim) const noexcept {
    if (hadamard) {  // its own inverse
        const std::size_t block = head_dim & (~head_dim + 1);
        const double unit = 1.0 / std::sqrt(static_cast<double>(block));
        for (std::size_t half = 1; half < block; half *= 2) {
            for (std::size_t i = 0; i < head_dim; ++i) {
                if ((i & half) != 0) continue;
                const double x = row[i];
                const double y = row[i + half];
                row[i] = x + y;
                row[i + half] = x - y;
            }
        }
        for (std::size_t d = 0; d < head_dim; ++d) row[d] *= unit;
    }
    if (const float* c = centre_of(kv_head, head_dim)) {
        for (std::size_t d = 0; d < head_dim; ++d) row[d] += static_cast<double>(c[d]);
    }
}

}  // namespace headlong
