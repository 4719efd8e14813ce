// A library without models, or without oneTBB: what is left works, and what is missing says so. HEADLONG_MODELS and
// HEADLONG_TBB say what is left out.
#include <headlong/headlong.h>
#include <cstddef>
#include <cstdio>
#include <headlong/attention.hpp>
#include <headlong/context.hpp>
#include <headlong/error.hpp>
#include <headlong/kv_cache.hpp>
#include <headlong/multi_head_attention.hpp>
#include <headlong/tensor.hpp>
#include <limits>
#include <string>
#include <vector>

namespace {

int failures = 0;

void check(bool holds, const char* what) {
    if (holds) return;
    ++failures;
    std::fprintf(stderr, "not so: %s\n", what);
}

template <class Operation>
bool is_unsupported(const Operation& operation) {
    try {
        operation();
    } catch (const headlong::Unsupported&) {
        return true;
    }
    return false;
}

/// One decode step over 100 equal tokens: any weights give their value back.
std::vector<float> decode_step(headlong::Context& context, headlong::KvCache& cache) {
    const std::vector<float> query(std::size_t{8} * 64, 0.2F);
    std::vector<float> output(query.size());
    const headlong::CachedQuery step{.query = headlong::InputTensor<3>::dense(query.data(), {8, 1, 64}),
                                     .cache = &cache,
                                     .output = headlong::OutputTensor<3>::dense(output.data(), {8, 1, 64})};
    headlong::attend(context, std::span(&step, 1));
    return output;
}

void caches(headlong::Context& context) {
    for (const headlong::KvType type : {headlong::KvType::f32, headlong::KvType::int8}) {
        const headlong::KvCacheOptions options{
            .shape = {.kv_heads = 2, .head_dim = 64, .value_dim = 64, .key_type = type, .value_type = type}};
        headlong::KvCache cache(options);
        const std::vector<float> keys(std::size_t{2} * 100 * 64, 0.1F);
        const std::vector<float> values(keys.size(), 0.5F);
        cache.append(context, 0, headlong::InputTensor<3>::dense(keys.data(), {2, 100, 64}),
                     headlong::InputTensor<3>::dense(values.data(), {2, 100, 64}));
        const std::vector<float> output = decode_step(context, cache);
        check(output[0] > 0.499F && output[0] < 0.501F, "a cache's values come back");

        std::vector<std::byte> saved(cache.saved_bytes());
        cache.save(saved);
        headlong::KvCache other(options);
        other.restore(saved);
        check(decode_step(context, other) == output, "a restored cache gives the same bits");
    }
}

void layer(headlong::Context& context) {
    std::vector<float> identity(std::size_t{16} * 16);
    for (std::size_t i = 0; i < 16; ++i) identity[17 * i] = 1.0F;
    const auto matrix = headlong::InputTensor<2>::dense(identity.data(), {16, 16});
    const headlong::MultiHeadAttention attention(context, {.heads = 2},
                                                 {.query = matrix, .key = matrix, .value = matrix, .output = matrix});
    std::vector<float> x(std::size_t{3} * 16, 0.25F);
    std::vector<float> y(x.size());
    attention.forward(context, headlong::InputTensor<3>::dense(x.data(), {1, 3, 16}),
                      headlong::OutputTensor<3>::dense(y.data(), {1, 3, 16}));
    check(y[0] == 0.25F, "a layer of identities gives its input back");
}

/// Of 64 bits, or of 32: parts.cpp also runs there.
void sizes(headlong::Context& context) {
    const std::vector<float> row(16);
    std::vector<float> output(16);
    const auto query = headlong::InputTensor<4>::dense(row.data(), {1, 1, 1, 16});
    const auto result = headlong::OutputTensor<4>::dense(output.data(), {1, 1, 1, 16});
    constexpr std::int64_t kMost = std::numeric_limits<std::ptrdiff_t>::max();
    for (const headlong::InputTensor<4>& keys : {
             headlong::InputTensor<4>{row.data(), headlong::DType::f32, {1, 1, kMost / 8, 16}, {0, 0, 0, 1}},
             headlong::InputTensor<4>{row.data(), headlong::DType::f32, {1, 1, 3, 16}, {0, 0, kMost / 8, 1}},
         }) {
        bool refused = false;
        try {
            headlong::attend(context, query, keys, keys, {}, result);
        } catch (const headlong::InvalidArgument&) {
            refused = true;
        }
        check(refused, "keys that a pointer cannot count are refused");
    }
}

}  // namespace

int main() {
    check(hl_has_feature("models") == HEADLONG_MODELS, "hl_has_feature(\"models\")");
    check(hl_has_feature("tbb") == HEADLONG_TBB, "hl_has_feature(\"tbb\")");

    headlong::Context context;
    if (HEADLONG_TBB == 0) {
        check(context.concurrency() == 1, "the default context is serial");
        check(is_unsupported([] { headlong::make_tbb_executor(); }), "make_tbb_executor is unsupported");
        check(is_unsupported([] { headlong::Context({.threads = 2}); }), "a context of two threads is unsupported");
    }
    caches(context);
    layer(context);
    sizes(context);

    if (HEADLONG_MODELS == 0) {
        hl_context* handle = nullptr;
        check(hl_context_create(nullptr, &handle, nullptr, 0) == HL_OK, "a context in C");
        auto* model = reinterpret_cast<hl_model*>(&failures);
        check(hl_model_load(handle, "model", nullptr, &model) == HL_UNSUPPORTED, "models are unsupported");
        check(model == nullptr, "no model is made");
        check(std::string(hl_context_message(handle)).find("models") != std::string::npos, "the message says what");
        check(hl_generate(nullptr, nullptr, nullptr, 0, nullptr, nullptr) == HL_UNSUPPORTED, "nor without arguments");
        hl_context_destroy(handle);
    }
    if (failures == 0) std::printf("%s: as it should be\n", headlong::to_string(context.isa()));
    return failures == 0 ? 0 : 1;
}
