// The clock that deadlines are looked at on: clock.cpp replaces std::chrono::steady_clock's in the test executable.
#pragma once

#include <cstddef>

namespace headlong::test {

/// Whether the standard library's clock can be replaced.
bool can_move_clock() noexcept;
/// On this thread: after so many more readings it is years later, until ...
void move_clock_after(std::size_t readings) noexcept;
/// ... this, which says whether it came to that.
bool move_clock_back() noexcept;

}  // namespace headlong::test
