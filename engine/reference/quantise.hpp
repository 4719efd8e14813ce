// What caches hold of rows: the rounding of every type, written from its definition.
//
// int8 and int4: a token's elements are cut into groups of 64 (keys) or 128 (values), the last one shorter. Of a group
// with the largest magnitude m, in float32, each operation rounded:
//
//     scale = m / 127 (int4: 7)     code = x * (127 / m), rounded to even     what is held: scale * code
//
// m < 2^-100: scale and codes are 0. An element is NaN or infinite: the scale is NaN, and so is the whole group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <headlong/kv_cache.hpp>

namespace headlong::reference {

inline constexpr std::size_t kKeyGroup = 64;
inline constexpr std::size_t kValueGroup = 128;

bool has_codes(KvType type) noexcept;

/// What a cache of that type holds of keys and of values of `dim` elements each, which lie one behind the other and are
/// float32 numbers.
std::vector<double> stored_keys(KvType type, std::vector<double> rows, std::int64_t dim);
std::vector<double> stored_values(KvType type, std::vector<double> rows, std::int64_t dim);

}  // namespace headlong::reference
