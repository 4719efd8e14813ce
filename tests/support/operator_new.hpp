// What the process asks operator new for, and refusals: operator_new.cpp replaces it for the test executable.
#pragma once

#include <cstddef>
#include <limits>

namespace headlong::test {

std::size_t operator_new_calls() noexcept;
/// Bytes that it was asked for in all, whatever was given back.
std::size_t operator_new_bytes() noexcept;

/// Allocations that were not given back yet.
std::size_t operator_new_live() noexcept;

inline constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
/// On this thread: refuses an allocation after so many others, and all that follow if so asked, until ...
void refuse_operator_new(std::size_t after, bool and_all_after) noexcept;
/// ... this, which returns how many were refused.
std::size_t refuse_no_more() noexcept;

}  // namespace headlong::test
