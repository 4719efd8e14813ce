// The messages of failed calls: one per thread, kept by the context.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <string_view>
#include <thread>

namespace headlong::c_api {

/// Cuts a text to what fits, between characters of UTF-8, and ends it with a 0. Nothing is written if there is no room
/// for that. Line breaks become spaces: a message is one line.
void copy_text(std::string_view text, char* to, std::size_t capacity) noexcept;

/// Thread-safe. A thread-local text would be global state, and one text for all threads would be overwritten before it
/// is read; so each thread that has failed has a slot, found by its id. Slots are only ever added, and a text is
/// touched by its own thread alone. (Ids of threads that ended are used again, and so are their slots.)
class Messages {
  public:
    Messages() = default;
    ~Messages();
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;

    void keep(std::string_view text) noexcept;
    /// Of the calling thread; valid until its next keep().
    const char* last() const noexcept;

    static constexpr std::size_t kBytes = 1024;

  private:
    struct Slot {
        std::thread::id thread;
        Slot* next = nullptr;
        std::array<char, kBytes> text{};
    };
    Slot* find() const noexcept;
    Slot* add() noexcept;

    std::array<Slot, 4> first_{};  ///< so that a message about memory that ran out needs none
    std::atomic<std::size_t> first_used_ = 0;
    std::atomic<Slot*> slots_ = nullptr;
    std::atomic<bool> lost_ = false;
};

}  // namespace headlong::c_api
