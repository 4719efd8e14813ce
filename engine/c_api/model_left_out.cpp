// The functions of model.cpp in a build without models: the interface is the same, and each says what is missing.
#include "engine/c_api/features.hpp"

#if !HEADLONG_MODELS

#include "engine/c_api/c_api.hpp"

namespace headlong::c_api {
namespace {

hl_status left_out(hl_context* context) noexcept {
    if (context != nullptr) context->core->messages.keep("models: this build of the library leaves them out");
    return HL_UNSUPPORTED;
}

template <class T>
hl_status left_out(hl_context* context, T** handle) noexcept {
    if (handle != nullptr) *handle = nullptr;
    return left_out(context);
}

}  // namespace
}  // namespace headlong::c_api

using namespace headlong::c_api;

extern "C" {

hl_status hl_model_load(hl_context* context, const char*, const hl_model_options*, hl_model** model) noexcept {
    return left_out(context, model);
}
hl_status hl_model_load_memory(hl_context* context, const hl_model_files*, const hl_model_options*,
                               hl_model** model) noexcept {
    return left_out(context, model);
}
void hl_model_destroy(hl_model*) noexcept {}
hl_status hl_model_get_info(const hl_model*, hl_model_info*) noexcept { return HL_UNSUPPORTED; }
hl_status hl_model_tokenize(const hl_model*, const char*, size_t, int32_t, int32_t*, size_t, size_t*) noexcept {
    return HL_UNSUPPORTED;
}
hl_status hl_model_detokenize(const hl_model*, const int32_t*, size_t, int32_t, char*, size_t, size_t*) noexcept {
    return HL_UNSUPPORTED;
}
hl_status hl_model_cache_create(hl_context* context, const hl_model*, const hl_model_cache_options*,
                                hl_cache** cache) noexcept {
    return left_out(context, cache);
}
hl_status hl_model_forward(hl_context* context, const hl_model*, const int32_t*, size_t, hl_cache*, const hl_tensor*,
                           const hl_forward_options*) noexcept {
    return left_out(context);
}
hl_status hl_generate(hl_context* context, const hl_model*, const char*, size_t, const hl_generate_options*,
                      hl_generation** generation) noexcept {
    return left_out(context, generation);
}
hl_status hl_generate_cached(hl_context* context, const hl_model*, hl_cache*, const int32_t*, size_t,
                             const hl_generate_options*, hl_generation** generation) noexcept {
    return left_out(context, generation);
}
void hl_generation_destroy(hl_generation*) noexcept {}
hl_status hl_generation_get_info(const hl_generation*, hl_generation_info*) noexcept { return HL_UNSUPPORTED; }
}

#endif
