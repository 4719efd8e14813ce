// Statuses, versions, and what this build and machine can do.
#include <headlong/version.hpp>

#include <exception>
#include <new>
#include <stdexcept>

#include "engine/c_api/c_api.hpp"
#include "engine/c_api/features.hpp"

namespace headlong::c_api {
namespace {

hl_status status_of(ErrorCode code) noexcept {
    switch (code) {
        case ErrorCode::invalid_argument:
            return HL_INVALID_ARGUMENT;
        case ErrorCode::unsupported:
            return HL_UNSUPPORTED;
        case ErrorCode::out_of_memory:
            return HL_OUT_OF_MEMORY;
        case ErrorCode::would_forget:
            return HL_WOULD_FORGET;
        case ErrorCode::bad_file:
            return HL_BAD_FILE;
        case ErrorCode::io:
            return HL_IO;
        case ErrorCode::cancelled:
            return HL_CANCELLED;
    }
    return HL_INTERNAL;
}

}  // namespace

hl_status report(Messages* messages, char* text, std::size_t capacity) noexcept {
    const auto fail = [&](hl_status status, const char* message) noexcept {
        if (messages != nullptr) messages->keep(message);
        copy_text(message, text, capacity);
        return status;
    };
    try {
        throw;
    } catch (const Error& error) {
        return fail(status_of(error.code()), error.what());
    } catch (const std::bad_alloc&) {
        return fail(HL_OUT_OF_MEMORY, "out of memory");
    } catch (const std::length_error&) {
        return fail(HL_OUT_OF_MEMORY, "more memory is needed than can be addressed");
    } catch (const std::exception& error) {
        return fail(HL_INTERNAL, error.what());
    } catch (...) {
        return fail(HL_INTERNAL, "a callback threw what is no std::exception");
    }
}

}  // namespace headlong::c_api

extern "C" {

const char* hl_status_name(int32_t status) noexcept {
    if (status == HL_OK) return "ok";
    if (status == HL_INTERNAL) return "internal";
    if (status < HL_OK || status > HL_INTERNAL) return "unknown";
    return headlong::to_string(static_cast<headlong::ErrorCode>(status - 1));
}

const char* hl_version(void) noexcept { return headlong::version(); }

int32_t hl_abi_version(void) noexcept { return HL_ABI_VERSION; }

int32_t hl_has_feature(const char* name) noexcept {
    if (name == nullptr) return 0;
    const std::string_view feature = name;
    if (feature == "models") return HEADLONG_MODELS;
    if (feature == "tbb") return HEADLONG_TBB;
    return 0;
}

hl_status hl_available_isas(const char** names, size_t capacity, size_t* count) noexcept {
    using namespace headlong;
    return c_api::guard(static_cast<c_api::Core*>(nullptr), [&] {
        std::size_t& all = c_api::required("count", count);
        all = 0;
        if (capacity > 0) c_api::required("names", names);
        const std::vector<Isa> isas = available_isas();
        for (std::size_t i = 0; i < std::min(capacity, isas.size()); ++i) names[i] = to_string(isas[i]);
        all = isas.size();
    });
}

size_t hl_default_concurrency(void) noexcept {
    try {
        return headlong::default_concurrency();
    } catch (...) {
        return 1;  // it could not read what the system says
    }
}
}
