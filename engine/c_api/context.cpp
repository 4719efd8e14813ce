#include <string>

#include "engine/c_api/c_api.hpp"

namespace headlong::c_api {
namespace {

Isa isa_of(const char* field, const char* name) {
    if (const auto isa = parse_isa(name)) return *isa;
    char shown[64];  // the name may be of any length
    copy_text(name, shown, sizeof(shown));
    throw InvalidArgument(fmt::format(
        "hl_context_options: {} is \"{}\", which is no instruction set; those available: {}", field, shown, [] {
            std::string names;
            for (const Isa isa : available_isas()) names += (names.empty() ? "" : ", ") + std::string(to_string(isa));
            return names;
        }()));
}

std::shared_ptr<Core> make_core(const hl_context_options* given) {
    const hl_context_options from = read("options", given);
    ContextOptions options;
    if (from.isa != nullptr) options.isa = isa_of("isa", from.isa);
    if (from.isa_cap != nullptr) options.isa_cap = isa_of("isa_cap", from.isa_cap);
    options.threads = from.threads;
    if (from.processors != nullptr) options.processors = from.processors;
    if (from.executor != nullptr) {
        const hl_executor executor = read("executor", from.executor);
        check(executor);
        options.executor = std::make_shared<CallbackExecutor>(executor);
    }
    std::unique_ptr<CallbackMemory> memory;
    if (from.memory != nullptr) {
        const hl_memory callbacks = read("memory", from.memory);
        check(callbacks);
        memory = std::make_unique<CallbackMemory>(callbacks);
        options.memory = memory.get();
    }
    return std::make_shared<Core>(options, std::move(memory));
}

}  // namespace

std::optional<std::chrono::steady_clock::time_point> deadline_of(double timeout_seconds) {
    constexpr double kNever = 1e9;  // thirty years: a clock counts nanoseconds in 63 bits
    if (!(timeout_seconds >= 0.0)) {
        throw InvalidArgument(fmt::format("timeout_seconds is {}; allowed: 0 (never) and more", timeout_seconds));
    }
    if (timeout_seconds == 0.0 || timeout_seconds > kNever) return {};
    using Clock = std::chrono::steady_clock;
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds));
}

std::stop_token stop_of(const hl_cancel* cancel) {
    if (cancel == nullptr) return {};
    const std::lock_guard lock(cancel->mutex);
    return cancel->source.get_token();
}

}  // namespace headlong::c_api

using namespace headlong::c_api;

extern "C" {

hl_status hl_context_create(const hl_context_options* options, hl_context** context, char* message,
                            size_t capacity) noexcept {
    copy_text("", message, capacity);
    try {
        hl_context*& made = result("context", context);
        made = std::make_unique<hl_context>(hl_context{make_core(options)}).release();
        return HL_OK;
    } catch (...) {
        return report(nullptr, message, capacity);
    }
}

void hl_context_destroy(hl_context* context) noexcept { delete context; }

const char* hl_context_message(const hl_context* context) noexcept {
    return context == nullptr ? "" : context->core->messages.last();
}

const char* hl_context_isa(const hl_context* context) noexcept {
    return context == nullptr ? "" : headlong::to_string(context->core->context.isa());
}

size_t hl_context_concurrency(const hl_context* context) noexcept {
    return context == nullptr ? 0 : context->core->context.concurrency();
}

size_t hl_context_scratch_bytes(const hl_context* context) noexcept {
    return context == nullptr ? 0 : context->core->context.scratch_bytes();
}

hl_status hl_cancel_create(hl_cancel** cancel) noexcept {
    return guard(static_cast<Core*>(nullptr), [&] {
        hl_cancel*& made = result("cancel", cancel);  // a refusal must have made nothing
        made = std::make_unique<hl_cancel>().release();
    });
}

void hl_cancel_destroy(hl_cancel* cancel) noexcept { delete cancel; }

void hl_cancel_request(hl_cancel* cancel) noexcept {
    if (cancel == nullptr) return;
    const std::lock_guard lock(cancel->mutex);
    cancel->source.request_stop();
}

hl_status hl_cancel_reset(hl_cancel* cancel) noexcept {
    return guard(static_cast<Core*>(nullptr), [&] {
        hl_cancel& given = required("cancel", cancel);
        const std::lock_guard lock(given.mutex);
        if (given.source.stop_requested()) given.source = std::stop_source();
    });
}

int32_t hl_cancel_requested(const hl_cancel* cancel) noexcept {
    if (cancel == nullptr) return 0;
    const std::lock_guard lock(cancel->mutex);
    return cancel->source.stop_requested() ? 1 : 0;
}
}
