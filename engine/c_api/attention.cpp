#include <headlong/attention.hpp>

#include <limits>

#include "engine/c_api/c_api.hpp"

using namespace headlong::c_api;

extern "C" {

hl_status hl_attend(hl_context* context, const hl_tensor* query, const hl_tensor* key, const hl_tensor* value,
                    const hl_attention_options* options, const hl_tensor* output, const hl_tensor* lse) noexcept {
    return guard(context, [&](headlong::Context& with) {
        headlong::attend(with, input<4>("query", query), input<4>("key", key), input<4>("value", value),
                         attention_options(options), headlong::c_api::output<4>("output", output),
                         optional_output<3>("lse", lse));
    });
}

hl_status hl_attend_packed(hl_context* context, const hl_tensor* query, const hl_tensor* key, const hl_tensor* value,
                           const int64_t* query_offsets, const int64_t* key_offsets, size_t sequences,
                           const hl_attention_options* options, const hl_tensor* output,
                           const hl_tensor* lse) noexcept {
    return guard(context, [&](headlong::Context& with) {
        if (sequences == std::numeric_limits<std::size_t>::max()) {
            throw headlong::InvalidArgument(fmt::format("sequences is {}, more than memory can hold", sequences));
        }
        headlong::attend_packed(with, input<3>("query", query), input<3>("key", key), input<3>("value", value),
                                list("query_offsets", query_offsets, sequences + 1),
                                list("key_offsets", key_offsets, sequences + 1), attention_options(options),
                                headlong::c_api::output<3>("output", output), optional_output<2>("lse", lse));
    });
}

hl_status hl_attend_cached(hl_context* context, const hl_cached_query* queries, size_t count,
                           const hl_attention_options* options) noexcept {
    return guard(context, [&](headlong::Context& with) {
        const headlong::AttentionOptions all = attention_options(options);
        list("queries", queries, count);
        std::vector<headlong::CachedQuery> taken(count);
        const std::size_t size = count == 0 ? 0 : queries->size;
        for (std::size_t i = 0; i < count; ++i) {
            const hl_cached_query from = read("queries", element(queries, size, i));
            if (from.size != size) {
                throw headlong::InvalidArgument(
                    fmt::format("queries[{}]: size is {}; that of the first one is {}", i, from.size, size));
            }
            taken[i].query = input<3>("query", &from.query);
            taken[i].cache = &required("cache", from.cache).cache;
            taken[i].layer = from.layer;
            taken[i].output = output<3>("output", &from.output);
            taken[i].lse = optional_output<2>("lse", &from.lse);
            taken[i].mask = mask_of(from.mask);
        }
        headlong::attend(with, std::span<const headlong::CachedQuery>(taken), all);
    });
}
}
