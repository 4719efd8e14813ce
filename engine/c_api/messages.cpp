#include "engine/c_api/messages.hpp"

#include <algorithm>
#include <new>

namespace headlong::c_api {

void copy_text(std::string_view text, char* to, std::size_t capacity) noexcept {
    if (to == nullptr || capacity == 0) return;
    std::size_t bytes = std::min(text.size(), capacity - 1);
    const auto continues = [&](std::size_t i) { return (static_cast<unsigned char>(text[i]) & 0xC0U) == 0x80U; };
    if (bytes < text.size()) {
        while (bytes > 0 && continues(bytes)) --bytes;
    }
    for (std::size_t i = 0; i < bytes; ++i) {
        const char c = text[i];
        to[i] = c == '\n' || c == '\r' || c == '\0' ? ' ' : c;
    }
    to[bytes] = '\0';
}

Messages::~Messages() {
    for (Slot* slot = slots_.load(); slot != nullptr;) {
        Slot* const next = slot->next;
        if (std::none_of(first_.begin(), first_.end(), [&](const Slot& own) { return &own == slot; })) delete slot;
        slot = next;
    }
}

Messages::Slot* Messages::find() const noexcept {
    const std::thread::id me = std::this_thread::get_id();
    Slot* slot = slots_.load(std::memory_order_acquire);
    while (slot != nullptr && slot->thread != me) slot = slot->next;
    return slot;
}

Messages::Slot* Messages::add() noexcept {
    Slot* slot = nullptr;
    if (first_used_.load(std::memory_order_relaxed) < first_.size()) {
        const std::size_t i = first_used_.fetch_add(1, std::memory_order_relaxed);
        if (i < first_.size()) slot = &first_[i];
    }
    if (slot == nullptr) slot = new (std::nothrow) Slot;
    if (slot == nullptr) return nullptr;
    slot->thread = std::this_thread::get_id();
    slot->next = slots_.load(std::memory_order_relaxed);
    while (!slots_.compare_exchange_weak(slot->next, slot, std::memory_order_release, std::memory_order_relaxed)) {
    }
    return slot;
}

void Messages::keep(std::string_view text) noexcept {
    Slot* slot = find();
    if (slot == nullptr) slot = add();
    if (slot == nullptr) {
        lost_.store(true, std::memory_order_relaxed);
        return;
    }
    copy_text(text, slot->text.data(), slot->text.size());
}

const char* Messages::last() const noexcept {
    const Slot* slot = find();
    if (slot != nullptr) return slot->text.data();
    return lost_.load(std::memory_order_relaxed) ? "out of memory, and there was none left for this thread's messages"
                                                 : "";
}

}  // namespace headlong::c_api
