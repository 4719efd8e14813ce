#include <headlong/rotary.hpp>

#include <string>
#include <utility>

#include "engine/c_api/c_api.hpp"

namespace headlong::c_api {
namespace {

Rotary rotary_of(const hl_rotary_options* given) {
    const hl_rotary_options from = read("rotary", given);
    RotaryOptions options;
    options.head_dim = from.head_dim;
    options.rotary_dim = from.rotary_dim;
    options.theta = from.theta;
    options.pairing =
        enum_of<RotaryPairing>("rotary: pairing", from.pairing, 2, "HL_ROTARY_HALVES, HL_ROTARY_INTERLEAVED");
    options.scaling = enum_of<RotaryScaling>("rotary: scaling", from.scaling, 6,
                                             "HL_ROTARY_NONE, HL_ROTARY_LINEAR, HL_ROTARY_NTK, HL_ROTARY_LLAMA3, "
                                             "HL_ROTARY_YARN, HL_ROTARY_LONGROPE");
    options.factor = from.factor;
    options.original_context = from.original_context;
    options.low_freq_factor = from.low_freq_factor;
    options.high_freq_factor = from.high_freq_factor;
    options.beta_fast = from.beta_fast;
    options.beta_slow = from.beta_slow;
    options.truncate = from.truncate != 0;
    if (from.has_attention_factor != 0) options.attention_factor = from.attention_factor;
    const auto factors = list("rotary: pair_factors", from.pair_factors, from.pair_factors_count);
    options.pair_factors.assign(factors.begin(), factors.end());
    return Rotary(options);
}

/// Options of the C++ interface, and what they point at.
struct CacheOptions {
    CacheOptions(Core& core, const hl_cache_options* given) {
        const hl_cache_options from = read_required("options", given);
        check_reserved("options", from.reserved);
        options.shape = shape_of(from.shape);
        options.layers = from.layers;
        options.capacity = from.capacity;
        options.ring = from.ring != 0;
        options.sink_tokens = from.sink_tokens;
        options.f16_sinks = from.f16_sinks != 0;
        options.layer_windows = list("layer_windows", from.layer_windows, from.layer_windows_count);
        options.max_chunk = from.max_chunk;
        if (from.rotary != nullptr) options.rotary = rotary_of(from.rotary);
        take_layer_rotary(list("layer_rotary", from.layer_rotary, from.layer_rotary_count));
        options.key_centre = list("key_centre", from.key_centre, from.key_centre_count);
        options.hadamard_keys = from.hadamard_keys != 0;
        options.pool = pool_of(from.pool);
        if (options.pool == nullptr) options.memory = &core.context.memory();
    }
    CacheOptions(const CacheOptions&) = delete;
    CacheOptions& operator=(const CacheOptions&) = delete;

    KvCacheOptions options;

  private:
    void take_layer_rotary(std::span<const hl_rotary_options* const> given) {
        if (!given.empty() && std::cmp_not_equal(given.size(), options.layers)) {
            throw InvalidArgument(fmt::format("layer_rotary has {} elements; it must have one per layer, {}",
                                              given.size(), options.layers));
        }
        layer_rotary_.reserve(given.size());
        for (const hl_rotary_options* one : given) {
            layer_rotary_.push_back(one == nullptr ? std::optional<Rotary>() : rotary_of(one));
        }
        options.layer_rotary = layer_rotary_;
    }

    std::vector<std::optional<Rotary>> layer_rotary_;
};

/// A getter of a number.
template <class Number, class Get>
Number number_of(const hl_cache* cache, Number otherwise, const Get& get) noexcept {
    if (cache == nullptr) return otherwise;
    try {
        return get(cache->cache);
    } catch (...) {
        return otherwise;
    }
}

/// The same for a status: what it works on is an argument that must be there.
template <class Cache, class Operation>
hl_status with_cache(Cache* cache, const Operation& operation) noexcept {
    return guard(core_of(cache), [&] { operation(required("cache", cache)); });
}

}  // namespace

std::shared_ptr<BlockPool> pool_of(const hl_pool* pool) noexcept {
    if (pool == nullptr) return nullptr;
    return {pool->held, &pool->held->pool};  // owns the memory, too
}

}  // namespace headlong::c_api

using namespace headlong::c_api;

extern "C" {

hl_status hl_pool_create(hl_context* context, const hl_kv_shape* shape, hl_pool** pool) noexcept {
    return guard(context, [&](headlong::Context&) {
        hl_pool*& made = result("pool", pool);
        const headlong::KvShape of = shape_of(required("shape", shape));
        made = std::make_unique<hl_pool>(hl_pool{std::make_shared<PoolWithMemory>(context->core, of)}).release();
    });
}

void hl_pool_destroy(hl_pool* pool) noexcept { delete pool; }

size_t hl_pool_block_bytes(const hl_pool* pool) noexcept {
    return pool == nullptr ? 0 : pool->held->pool.block_bytes();
}
size_t hl_pool_used_bytes(const hl_pool* pool) noexcept { return pool == nullptr ? 0 : pool->held->pool.used_bytes(); }
size_t hl_pool_reserved_bytes(const hl_pool* pool) noexcept {
    return pool == nullptr ? 0 : pool->held->pool.reserved_bytes();
}

hl_status hl_cache_create(hl_context* context, const hl_cache_options* options, hl_cache** cache) noexcept {
    return guard(context, [&](headlong::Context&) {
        hl_cache*& made = result("cache", cache);
        const CacheOptions taken(*context->core, options);
        made = new hl_cache{context->core, headlong::KvCache(taken.options), {}};
    });
}

void hl_cache_destroy(hl_cache* cache) noexcept { delete cache; }

hl_status hl_cache_estimate_bytes(hl_context* context, const hl_cache_options* options, int64_t tokens,
                                  size_t* bytes) noexcept {
    return guard(context, [&](headlong::Context&) {
        std::size_t& estimate = required("bytes", bytes);
        const CacheOptions taken(*context->core, options);
        estimate = headlong::KvCache::estimate_bytes(taken.options, tokens);
    });
}

hl_status hl_cache_reserve(hl_cache* cache, int64_t tokens) noexcept {
    return with_cache(cache, [&](hl_cache& in) { in.cache.reserve(tokens); });
}

hl_status hl_cache_append(hl_context* context, hl_cache* cache, size_t layer, const hl_tensor* keys,
                          const hl_tensor* values) noexcept {
    return guard(context, [&](headlong::Context& with) {
        required("cache", cache).cache.append(with, layer, input<3>("keys", keys), input<3>("values", values));
    });
}

int64_t hl_cache_length(const hl_cache* cache) noexcept { return cache == nullptr ? -1 : cache->cache.length(); }

int64_t hl_cache_layer_length(const hl_cache* cache, size_t layer) noexcept {
    if (cache == nullptr || layer >= cache->cache.layers()) return -1;
    return number_of<std::int64_t>(cache, -1, [&](const headlong::KvCache& of) { return of.length(layer); });
}

size_t hl_cache_used_bytes(const hl_cache* cache) noexcept { return cache == nullptr ? 0 : cache->cache.used_bytes(); }

size_t hl_cache_reserved_bytes(const hl_cache* cache) noexcept {
    return cache == nullptr ? 0 : cache->cache.reserved_bytes();
}

hl_status hl_cache_get_info(const hl_cache* cache, hl_cache_info* info) noexcept {
    return with_cache(cache, [&](const hl_cache& of) {
        const headlong::KvCache& from = of.cache;
        const headlong::KvShape& shape = from.shape();
        hl_cache_info all{};
        all.shape = {shape.kv_heads, shape.head_dim, shape.value_dim, static_cast<std::int32_t>(shape.key_type),
                     static_cast<std::int32_t>(shape.value_type)};
        all.layers = static_cast<std::int64_t>(from.layers());
        all.capacity = from.capacity();
        all.sink_tokens = from.sink_tokens();
        all.max_chunk = from.max_chunk();
        all.length = from.length();
        all.ring = from.ring() ? 1 : 0;
        all.forgets = from.forgets() ? 1 : 0;
        all.f16_sinks = from.f16_sinks() ? 1 : 0;
        all.used_bytes = from.used_bytes();
        all.reserved_bytes = from.reserved_bytes();
        write("info", info, all);
    });
}

void hl_cache_discard_unfinished(hl_cache* cache) noexcept {
    if (cache != nullptr) cache->cache.discard_unfinished();
}

hl_status hl_cache_truncate(hl_cache* cache, int64_t length) noexcept {
    return with_cache(cache, [&](hl_cache& in) { in.cache.truncate(length); });
}

void hl_cache_reset(hl_cache* cache) noexcept {
    if (cache != nullptr) cache->cache.reset();
}

hl_status hl_cache_fork(const hl_cache* cache, hl_cache** fork) noexcept {
    return guard(core_of(cache), [&] {
        hl_cache*& made = result("fork", fork);
        const hl_cache& parent = required("cache", cache);
        made = new hl_cache{parent.core, parent.cache.fork(), {}};
    });
}

hl_status hl_cache_read_back(const hl_cache* cache, size_t layer, int64_t first, const hl_tensor* keys,
                             const hl_tensor* values) noexcept {
    return with_cache(cache, [&](const hl_cache& from) {
        from.cache.read_back(layer, first, output<3>("keys", keys), output<3>("values", values));
    });
}

size_t hl_cache_saved_bytes(const hl_cache* cache, size_t attachment_bytes) noexcept {
    return number_of<std::size_t>(cache, 0,
                                  [&](const headlong::KvCache& of) { return of.saved_bytes(attachment_bytes); });
}

hl_status hl_cache_save(const hl_cache* cache, void* bytes, size_t bytes_count, const void* attachment,
                        size_t attachment_bytes) noexcept {
    return with_cache(cache, [&](const hl_cache& from) {
        list("bytes", static_cast<const std::byte*>(bytes), bytes_count);
        from.cache.save(std::span(static_cast<std::byte*>(bytes), bytes_count),
                        bytes_of("attachment", attachment, attachment_bytes));
    });
}

hl_status hl_cache_save_file(const hl_cache* cache, const char* path, const void* attachment,
                             size_t attachment_bytes) noexcept {
    return with_cache(cache, [&](const hl_cache& from) {
        from.cache.save(std::string(&required("path", path)), bytes_of("attachment", attachment, attachment_bytes));
    });
}

hl_status hl_cache_restore(hl_cache* cache, const void* bytes, size_t bytes_count) noexcept {
    return with_cache(cache,
                      [&](hl_cache& in) { in.attachment = in.cache.restore(bytes_of("bytes", bytes, bytes_count)); });
}

hl_status hl_cache_restore_file(hl_cache* cache, const char* path) noexcept {
    return with_cache(cache,
                      [&](hl_cache& in) { in.attachment = in.cache.restore(std::string(&required("path", path))); });
}

const void* hl_cache_attachment(const hl_cache* cache, size_t* bytes) noexcept {
    const bool there = cache != nullptr && !cache->attachment.empty();
    if (bytes != nullptr) *bytes = there ? cache->attachment.size() : 0;
    return there ? cache->attachment.data() : nullptr;
}
}
