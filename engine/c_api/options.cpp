// Structures: their defaults, and what is taken from them.
#include "engine/c_api/c_api.hpp"

namespace headlong::c_api {

template <>
hl_attention_options defaults() noexcept {
    hl_attention_options options{};
    options.window_left = -1;
    options.window_right = -1;
    return options;
}

template <>
hl_rotary_options defaults() noexcept {
    const RotaryOptions from{};
    hl_rotary_options options{};
    options.theta = from.theta;
    options.factor = from.factor;
    options.low_freq_factor = from.low_freq_factor;
    options.high_freq_factor = from.high_freq_factor;
    options.beta_fast = from.beta_fast;
    options.beta_slow = from.beta_slow;
    options.truncate = from.truncate ? 1 : 0;
    return options;
}

template <>
hl_cache_options defaults() noexcept {
    const KvCacheOptions from{};
    hl_cache_options options{};
    options.shape.kv_heads = from.shape.kv_heads;
    options.layers = from.layers;
    options.capacity = from.capacity;
    options.max_chunk = from.max_chunk;
    return options;
}

template <>
hl_model_options defaults() noexcept {
    hl_model_options options{};
    options.map = 1;
    return options;
}

template <>
hl_generate_options defaults() noexcept {
    hl_generate_options options{};
    options.max_tokens = 256;  // those of GenerateOptions, which a build without models does not have
    options.top_p = 1.0F;
    options.prefill_chunk = 512;
    return options;
}

void check_size(const char* name, std::size_t size, std::size_t first, std::size_t now) {
    if (is_known_size(size, first, now)) return;
    throw InvalidArgument(
        fmt::format("{}: size is {}; this library knows {} to {}{}", name, size, first, now,
                    size == 0 ? ": set it to sizeof of the structure, or by its _init function" : ""));
}

DType dtype_of(const char* name, std::int32_t dtype) {
    if (dtype < HL_F32 || dtype > HL_BF16) {
        throw InvalidArgument(fmt::format("{}: dtype is {}; allowed: HL_F32, HL_F16, HL_BF16", name, dtype));
    }
    return static_cast<DType>(dtype);
}

void check_rank(const char* name, std::int32_t rank, std::size_t expected) {
    if (rank == static_cast<std::int32_t>(expected)) return;
    throw InvalidArgument(fmt::format("{}: rank is {}; it must be {}", name, rank, expected));
}

std::optional<AttentionMask> mask_of(const hl_mask* mask) {
    if (mask == nullptr) return {};
    const hl_mask given = read("mask", mask);
    check_reserved("mask", given.reserved);
    if (given.rank < 1 || given.rank > 4) {
        throw InvalidArgument(fmt::format("mask: rank is {}; allowed: 1 to 4", given.rank));
    }
    AttentionMask view;
    view.data = given.data;
    view.type = enum_of<AttentionMask::Type>("mask: type", given.type, 4,
                                             "HL_MASK_BOOLEAN, HL_MASK_F32, HL_MASK_F16, HL_MASK_BF16");
    view.keys = enum_of<AttentionMask::Keys>("mask: keys", given.keys, 2, "HL_MASK_ALL_KEYS, HL_MASK_LAST_Q");
    view.rank = static_cast<std::size_t>(given.rank);
    std::copy_n(given.extents, view.rank, view.extents.begin());
    std::copy_n(given.strides, view.rank, view.strides.begin());
    return view;
}

AttentionOptions attention_options(const hl_attention_options* given) {
    const hl_attention_options from = read("options", given);
    check_reserved("options", from.reserved);
    AttentionOptions options;
    if (from.has_scale != 0) options.scale = from.scale;
    enum class Causal : std::uint8_t { by_default, no, yes };
    const auto causal = enum_of<Causal>("causal", from.causal, 3, "HL_CAUSAL_DEFAULT, HL_CAUSAL_NO, HL_CAUSAL_YES");
    if (causal != Causal::by_default) options.causal = causal == Causal::yes;
    options.alignment = enum_of<Alignment>("alignment", from.alignment, 3, "HL_BOTTOM_RIGHT, HL_TOP_LEFT, HL_OFFSET");
    options.causal_offset = from.causal_offset;
    options.window_left = from.window_left;
    options.window_right = from.window_right;
    options.softcap = from.softcap;
    options.alibi_slopes = list("alibi_slopes", from.alibi_slopes, from.alibi_slopes_count);
    options.mask = mask_of(from.mask);
    options.sink_logits = list("sink_logits", from.sink_logits, from.sink_logits_count);
    options.kv_lengths = list("kv_lengths", from.kv_lengths, from.kv_lengths_count);
    options.stop = stop_of(from.cancel);
    options.deadline = deadline_of(from.timeout_seconds);
    return options;
}

KvType kv_type_of(const char* name, std::int32_t type) {
    return enum_of<KvType>(name, type, 5, "HL_KV_F32, HL_KV_F16, HL_KV_BF16, HL_KV_INT8, HL_KV_INT4");
}

KvShape shape_of(const hl_kv_shape& shape) {
    return {shape.kv_heads, shape.head_dim, shape.value_dim, kv_type_of("shape: key_type", shape.key_type),
            kv_type_of("shape: value_type", shape.value_type)};
}

}  // namespace headlong::c_api

extern "C" {

hl_status hl_attention_options_init(hl_attention_options* options, size_t size) noexcept {
    return headlong::c_api::init(options, size);
}
hl_status hl_rotary_options_init(hl_rotary_options* options, size_t size) noexcept {
    return headlong::c_api::init(options, size);
}
hl_status hl_cache_options_init(hl_cache_options* options, size_t size) noexcept {
    return headlong::c_api::init(options, size);
}
hl_status hl_model_options_init(hl_model_options* options, size_t size) noexcept {
    return headlong::c_api::init(options, size);
}
hl_status hl_generate_options_init(hl_generate_options* options, size_t size) noexcept {
    return headlong::c_api::init(options, size);
}

hl_tensor hl_dense(const void* data, int32_t dtype, int32_t rank, const int64_t* extents) noexcept {
    hl_tensor tensor{};
    tensor.data = const_cast<void*>(data);  // one view for both directions; inputs are not written
    tensor.dtype = dtype;
    tensor.rank = -1;
    if (rank < 1 || rank > 4 || extents == nullptr) return tensor;
    tensor.rank = rank;
    std::uint64_t stride = 1;  // a hostile extent wraps here and is refused when the view is looked at
    for (std::int32_t i = rank; i-- > 0;) {
        tensor.extents[i] = extents[i];
        tensor.strides[i] = static_cast<std::int64_t>(stride);
        stride *= static_cast<std::uint64_t>(extents[i]);
    }
    return tensor;
}
}
