// One decode step over a cache, and an error of the library caught by its type: built against an installed Headlong.
#include <cstdio>
#include <headlong/headlong.hpp>
#include <vector>

int main() {
    headlong::Context context;
    headlong::KvCache cache({.shape = {.kv_heads = 2, .head_dim = 64, .value_dim = 64}, .capacity = 100});
    const std::vector<float> keys(2 * 100 * 64, 0.1F), values(2 * 100 * 64, 0.5F);
    const auto rows = [](const std::vector<float>& x) {
        return headlong::InputTensor<3>::dense(x.data(), {2, 100, 64});
    };
    cache.append(context, 0, rows(keys), rows(values));
    const std::vector<float> query(8 * 64, 0.2F);
    std::vector<float> output(8 * 64);
    const headlong::CachedQuery step{.query = headlong::InputTensor<3>::dense(query.data(), {8, 1, 64}),
                                     .cache = &cache,
                                     .output = headlong::OutputTensor<3>::dense(output.data(), {8, 1, 64})};
    headlong::attend(context, std::span(&step, 1));
    try {
        cache.append(context, 0, rows(keys), rows(values));
    } catch (const headlong::OutOfMemory& error) {
        std::printf("headlong %s, %s: %g; %s\n", headlong::version(), headlong::to_string(context.isa()),
                    static_cast<double>(output[0]), error.what());
        return output[0] == 0.5F && error.code() == headlong::ErrorCode::out_of_memory ? 0 : 1;
    }
    return 1;
}
