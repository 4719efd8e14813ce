// Shared by the AVX2 and AVX-512 units, inside their namespaces: two 8 x 8 transpositions side by side.
inline constexpr std::size_t kTransposeColumns = 8;

HEADLONG_INLINE void transpose_8(const float* rows, std::ptrdiff_t stride, float* panel) noexcept {
    __m256 r[8];
    HEADLONG_UNROLL for (std::ptrdiff_t i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(rows + i * stride);
    __m256 pairs[8];
    HEADLONG_UNROLL for (std::size_t i = 0; i < 4; ++i) {
        pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    __m256 quads[8];  // quads[4 h + c]: rows 4 h .. 4 h + 3, column c in the low and c + 4 in the high 128 bits
    HEADLONG_UNROLL for (std::size_t h = 0; h < 2; ++h) {
        quads[4 * h + 0] = _mm256_shuffle_ps(pairs[4 * h], pairs[4 * h + 2], 0x44);
        quads[4 * h + 1] = _mm256_shuffle_ps(pairs[4 * h], pairs[4 * h + 2], 0xEE);
        quads[4 * h + 2] = _mm256_shuffle_ps(pairs[4 * h + 1], pairs[4 * h + 3], 0x44);
        quads[4 * h + 3] = _mm256_shuffle_ps(pairs[4 * h + 1], pairs[4 * h + 3], 0xEE);
    }
    HEADLONG_UNROLL for (std::size_t c = 0; c < 4; ++c) {
        _mm256_storeu_ps(panel + c * 16, _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x20));
        _mm256_storeu_ps(panel + (c + 4) * 16, _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x31));
    }
}

HEADLONG_INLINE void transpose_16(const float* rows, std::ptrdiff_t stride, float* panel) noexcept {
    transpose_8(rows, stride, panel);
    transpose_8(rows + 8 * stride, stride, panel + 8);
}
