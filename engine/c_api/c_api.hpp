// What the functions of headlong.h share: the one place where exceptions become statuses, and the checks that make C
// structures, numbers and pointers into arguments of the C++ interface.
#pragma once

#include <fmt/format.h>
#include <headlong/headlong.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <headlong/attention.hpp>
#include <headlong/context.hpp>
#include <headlong/error.hpp>
#include <headlong/kv_cache.hpp>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string_view>
#include <vector>

#include "engine/c_api/callbacks.hpp"
#include "engine/c_api/messages.hpp"

namespace headlong::c_api {

/// What a context's handle and everything made with it hold together: who is destroyed last does not matter.
struct Core {
    explicit Core(const ContextOptions& options, std::unique_ptr<CallbackMemory> memory_)
        : memory(std::move(memory_)), context(options) {}

    const std::unique_ptr<CallbackMemory> memory;  ///< of the context, or null; outlives it
    Messages messages;
    Context context;
};

/// A pool with the memory that it takes its slabs from: caches hold it through a pointer to `pool`.
struct PoolWithMemory {
    PoolWithMemory(std::shared_ptr<Core> core_, const KvShape& shape)
        : core(std::move(core_)), pool(shape, &core->context.memory()) {}

    const std::shared_ptr<Core> core;
    BlockPool pool;
};

}  // namespace headlong::c_api

struct hl_context {
    std::shared_ptr<headlong::c_api::Core> core;
};

struct hl_pool {
    std::shared_ptr<headlong::c_api::PoolWithMemory> held;
};

struct hl_cache {
    std::shared_ptr<headlong::c_api::Core> core;  ///< before `cache`, whose blocks may be in its memory
    headlong::KvCache cache;
    std::vector<std::byte> attachment;
};

struct hl_cancel {
    mutable std::mutex mutex;
    std::stop_source source;
};

namespace headlong::c_api {

/// The status of the exception that is being handled; its message goes to `messages` (may be null) and `text` (may be
/// null).
hl_status report(Messages* messages, char* text, std::size_t capacity) noexcept;

inline Core* core_of(const hl_context* context) noexcept { return context == nullptr ? nullptr : context->core.get(); }
inline Core* core_of(const hl_cache* cache) noexcept { return cache == nullptr ? nullptr : cache->core.get(); }

/// Runs a function of the interface: no exception leaves it.
template <class Operation>
hl_status guard(Core* core, const Operation& operation) noexcept {
    try {
        operation();
        return HL_OK;
    } catch (...) {
        return report(core == nullptr ? nullptr : &core->messages, nullptr, 0);
    }
}

/// The same for one that needs a context.
template <class Operation>
hl_status guard(hl_context* context, const Operation& operation) noexcept {
    if (context == nullptr) return HL_INVALID_ARGUMENT;  // and nobody to keep a message
    return guard(context->core.get(), [&] { operation(context->core->context); });
}

/// What a pointer points at; throws InvalidArgument if it is NULL.
template <class T>
T& required(const char* name, T* pointer) {
    if (pointer == nullptr) throw InvalidArgument(fmt::format("{} is NULL", name));
    return *pointer;
}

/// A handle to be written, NULL until it is.
template <class T>
T*& result(const char* name, T** handle) {
    T*& written = required(name, handle);
    written = nullptr;
    return written;
}

/// A list of the caller's.
template <class T>
std::span<const T> list(const char* name, const T* data, std::size_t count) {
    if (data == nullptr && count != 0) throw InvalidArgument(fmt::format("{} is NULL; its count is {}", name, count));
    if (count > std::numeric_limits<std::ptrdiff_t>::max() / sizeof(T)) {
        throw InvalidArgument(fmt::format("{}: its count is {}, more than memory can hold", name, count));
    }
    return {data, count};
}

inline std::span<const std::byte> bytes_of(const char* name, const void* data, std::size_t count) {
    return list(name, static_cast<const std::byte*>(data), count);
}

/// A text of so many bytes, or one that ends with a 0.
inline std::string_view text_of(const char* name, const char* data, std::size_t bytes) {
    if (bytes == HL_TO_THE_END) return &required(name, data);
    const auto text = list(name, data, bytes);
    return {text.data(), text.size()};
}

/// A number as an enumeration of `count` values; `allowed` lists them.
template <class Enum>
Enum enum_of(const char* name, std::int32_t value, std::int32_t count, const char* allowed) {
    if (value < 0 || value >= count) {
        throw InvalidArgument(fmt::format("{} is {}; allowed: {}", name, value, allowed));
    }
    return static_cast<Enum>(value);
}

inline void check_reserved(const char* name, std::int32_t value) {
    if (value != 0) throw InvalidArgument(fmt::format("{}: reserved is {}; it must be 0", name, value));
}

/// What a structure's size was in its first version. Where fields are added, a specialisation says where the first of
/// them lies. (Structures have no padding, or a field could be added without a change of size: tests/abi.)
template <class T>
inline constexpr std::size_t kFirstSize = sizeof(T);

/// A structure's defaults: all zero, if nothing else is said below.
template <class T>
T defaults() noexcept {
    return T{};
}
template <>
hl_attention_options defaults() noexcept;
template <>
hl_rotary_options defaults() noexcept;
template <>
hl_cache_options defaults() noexcept;
template <>
hl_model_options defaults() noexcept;
template <>
hl_generate_options defaults() noexcept;

inline bool is_known_size(std::size_t size, std::size_t first, std::size_t now) noexcept {
    return size >= first && size <= now;
}

void check_size(const char* name, std::size_t size, std::size_t first, std::size_t now);  ///< throws InvalidArgument

/// A structure of the caller's, which may be of an older version; defaults for NULL.
template <class T>
T read(const char* name, const T* given) {
    T all = defaults<T>();
    if (given == nullptr) return all;
    std::size_t size = 0;
    std::memcpy(&size, given, sizeof(size));
    check_size(name, size, kFirstSize<T>, sizeof(T));
    std::memcpy(&all, given, size);  // byte by byte: the caller's structure may be shorter than T
    return all;
}

template <class T>
T read_required(const char* name, const T* given) {
    return read(name, &required(name, given));
}

/// Element i of the caller's array of structures, whose distance is what the first one says is its size.
template <class T>
const T* element(const T* first, std::size_t size, std::size_t i) noexcept {
    return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(first) + i * size);
}

/// Fills a structure of the caller's as far as its size says.
template <class T>
void write(const char* name, T* to, T all) {
    std::size_t size = 0;
    std::memcpy(&size, &required(name, to), sizeof(size));
    check_size(name, size, kFirstSize<T>, sizeof(T));
    all.size = size;
    std::memcpy(static_cast<void*>(to), &all, size);
}

/// The _init functions.
template <class T>
hl_status init(T* options, std::size_t size) noexcept {
    if (options == nullptr) return HL_INVALID_ARGUMENT;
    T all = defaults<T>();
    const bool known = is_known_size(size, kFirstSize<T>, sizeof(T));
    all.size = known ? size : 0;  // which the call that takes the structure refuses
    if (size >= sizeof(size)) std::memcpy(static_cast<void*>(options), &all, known ? size : sizeof(size));
    return known ? HL_OK : HL_INVALID_ARGUMENT;
}

DType dtype_of(const char* name, std::int32_t dtype);
void check_rank(const char* name, std::int32_t rank, std::size_t expected);  ///< throws InvalidArgument

template <class View>
View view_of(const char* name, const hl_tensor& tensor) {
    View view{};
    check_rank(name, tensor.rank, view.extents.size());
    view.data = tensor.data;
    view.dtype = dtype_of(name, tensor.dtype);
    std::copy_n(tensor.extents, view.extents.size(), view.extents.begin());
    std::copy_n(tensor.strides, view.strides.size(), view.strides.begin());
    return view;
}

/// A tensor that must be there.
template <std::size_t Rank>
InputTensor<Rank> input(const char* name, const hl_tensor* tensor) {
    return view_of<InputTensor<Rank>>(name, required(name, tensor));
}
template <std::size_t Rank>
OutputTensor<Rank> output(const char* name, const hl_tensor* tensor) {
    return view_of<OutputTensor<Rank>>(name, required(name, tensor));
}

inline bool is_absent(const hl_tensor* tensor) noexcept {
    return tensor == nullptr || (tensor->rank == 0 && tensor->data == nullptr);
}

/// Of an optional tensor with a rank: a view without data would be taken for none, and left unread or unwritten.
template <class View>
View with_data(const char* name, View view) {
    const bool empty = std::ranges::count(view.extents, 0) > 0 &&
                       std::ranges::all_of(view.extents, [](std::int64_t extent) { return extent >= 0; });
    if (view.data == nullptr && !empty) {
        throw InvalidArgument(fmt::format("{}: data is NULL; a tensor that is not there is NULL or has rank 0", name));
    }
    return view;
}

/// One that need not be: NULL, or rank 0.
template <std::size_t Rank>
InputTensor<Rank> optional_input(const char* name, const hl_tensor* tensor) {
    return is_absent(tensor) ? InputTensor<Rank>{} : with_data(name, input<Rank>(name, tensor));
}
template <std::size_t Rank>
OutputTensor<Rank> optional_output(const char* name, const hl_tensor* tensor) {
    return is_absent(tensor) ? OutputTensor<Rank>{} : with_data(name, output<Rank>(name, tensor));
}

std::optional<AttentionMask> mask_of(const hl_mask* mask);
/// Lists stay the caller's.
AttentionOptions attention_options(const hl_attention_options* given);
std::stop_token stop_of(const hl_cancel* cancel);
/// That of a call that begins now. Throws InvalidArgument for a number of seconds that is none.
std::optional<std::chrono::steady_clock::time_point> deadline_of(double timeout_seconds);

KvType kv_type_of(const char* name, std::int32_t type);
KvShape shape_of(const hl_kv_shape& shape);
std::shared_ptr<BlockPool> pool_of(const hl_pool* pool) noexcept;

}  // namespace headlong::c_api
