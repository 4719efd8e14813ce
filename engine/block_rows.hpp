// The rows of one KV head in a block: written from strided memory, cleared, read back, whatever a block stores.
#pragma once

#include <cstddef>

#include "kernels/kernel_table.hpp"

namespace headlong {

/// Writes rows as the keys of tokens `token`, `token` + 1, ... of a block.
void write_keys(const kernels::KernelTable& kernels, const kernels::BlockLayout& layout, const kernels::Rows& rows,
                std::byte* keys, std::size_t token) noexcept;

/// The same for values. Returns whether one is NaN or infinite, as written.
bool write_values(const kernels::KernelTable& kernels, const kernels::BlockLayout& layout, const kernels::Rows& rows,
                  std::byte* values, std::size_t token) noexcept;

/// Clears the panel of 16 tokens that begins with `token`.
void clear_panel(const kernels::BlockLayout& layout, std::byte* keys, std::byte* values, std::size_t token) noexcept;

/// Clears the place of one token. A value that several of a type's tokens share a byte with stays what it is.
void clear_token(const kernels::BlockLayout& layout, std::byte* keys, std::byte* values, std::size_t token) noexcept;

/// Whether a block's values hold a NaN or infinity.
bool holds_nonfinite(const kernels::BlockLayout& layout, const std::byte* values) noexcept;

/// Element d of a token's key, and of its value, as attention computes with it.
float read_key(const kernels::BlockLayout& layout, const std::byte* keys, std::size_t token, std::size_t d) noexcept;
float read_value(const kernels::BlockLayout& layout, const std::byte* values, std::size_t token,
                 std::size_t d) noexcept;

}  // namespace headlong
