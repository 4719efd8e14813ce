#include "tests/support/clock.hpp"

#include <chrono>
#include <ctime>
#include <limits>

namespace {

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
thread_local std::size_t until_late = kNever;
thread_local bool late = false;

}  // namespace

#if defined(__GLIBCXX__)

// libstdc++'s own, which the library and the tests then call in its place.
std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    if (until_late != kNever) {
        late = late || until_late == 0;
        if (!late) --until_late;
        if (late) time.tv_sec += 100'000'000;
    }
    return time_point(seconds(time.tv_sec) + nanoseconds(time.tv_nsec));
}

bool headlong::test::can_move_clock() noexcept { return true; }

#else

bool headlong::test::can_move_clock() noexcept { return false; }

#endif

void headlong::test::move_clock_after(std::size_t readings) noexcept {
    until_late = readings;
    late = false;
}

bool headlong::test::move_clock_back() noexcept {
    until_late = kNever;
    return late;
}
