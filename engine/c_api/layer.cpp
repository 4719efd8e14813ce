#include <headlong/multi_head_attention.hpp>

#include "engine/c_api/c_api.hpp"

struct hl_layer {
    std::shared_ptr<headlong::c_api::Core> core;  ///< before `layer`, whose weights are in its memory
    headlong::MultiHeadAttention layer;
};

using namespace headlong::c_api;

extern "C" {

hl_status hl_layer_create(hl_context* context, const hl_layer_options* options, const hl_layer_weights* weights,
                          hl_layer** layer) noexcept {
    return guard(context, [&](headlong::Context& with) {
        hl_layer*& made = result("layer", layer);
        const hl_layer_options given = read_required("options", options);
        const hl_layer_weights from = read_required("weights", weights);
        headlong::MultiHeadAttentionOptions taken;
        taken.heads = given.heads;
        taken.kv_heads = given.kv_heads;
        taken.memory = &with.memory();
        headlong::MultiHeadAttentionWeights views;
        views.query = input<2>("query", &from.query);
        views.key = input<2>("key", &from.key);
        views.value = input<2>("value", &from.value);
        views.output = input<2>("output", &from.output);
        views.query_bias = optional_input<1>("query_bias", &from.query_bias);
        views.key_bias = optional_input<1>("key_bias", &from.key_bias);
        views.value_bias = optional_input<1>("value_bias", &from.value_bias);
        views.output_bias = optional_input<1>("output_bias", &from.output_bias);
        made = new hl_layer{context->core, headlong::MultiHeadAttention(with, taken, views)};
    });
}

void hl_layer_destroy(hl_layer* layer) noexcept { delete layer; }

hl_status hl_layer_get_info(const hl_layer* layer, hl_layer_info* info) noexcept {
    return guard(layer == nullptr ? nullptr : layer->core.get(), [&] {
        const headlong::MultiHeadAttention& from = required("layer", layer).layer;
        hl_layer_info all{};
        all.d_model = from.d_model();
        all.heads = from.heads();
        all.kv_heads = from.kv_heads();
        all.head_dim = from.head_dim();
        write("info", info, all);
    });
}

hl_status hl_layer_forward(hl_context* context, const hl_layer* layer, const hl_tensor* x,
                           const hl_attention_options* options, const hl_tensor* y) noexcept {
    return guard(context, [&](headlong::Context& with) {
        required("layer", layer).layer.forward(with, input<3>("x", x), output<3>("y", y), attention_options(options));
    });
}

hl_status hl_layer_forward_cached(hl_context* context, const hl_layer* layer, const hl_tensor* x, hl_cache* cache,
                                  size_t cache_layer, const hl_attention_options* options,
                                  const hl_tensor* y) noexcept {
    return guard(context, [&](headlong::Context& with) {
        required("layer", layer)
            .layer.forward(with, input<2>("x", x), required("cache", cache).cache, cache_layer, output<2>("y", y),
                           attention_options(options));
    });
}
}
