// How often the process has called operator new: operator_new.cpp replaces it for the test executable.
#pragma once

#include <cstddef>

namespace headlong::test {

std::size_t operator_new_calls() noexcept;
/// Bytes that it was asked for in all, whatever was given back.
std::size_t operator_new_bytes() noexcept;

}  // namespace headlong::test
