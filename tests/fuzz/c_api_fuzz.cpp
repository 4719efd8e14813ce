// Sequences of calls of the C interface, with arguments of every kind: right ones, and wrong ones that a call must see
// without touching memory. What a caller must keep to is kept to: memory is as large as a view says unless the view
// must be refused, and nothing is used after it was destroyed. Promised are: a status that there is, and a message
// where it is no success; objects that a failed call leaves as they were; lengths that follow from the calls that
// succeeded; and that the memory of a context comes back.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <headlong/headlong.h>

#include "tests/fuzz/fuzzer.hpp"
#include "tests/fuzz/reader.hpp"

namespace headlong::fuzz {
namespace {

using Bytes = std::vector<std::byte>;
using Extents4 = std::array<std::int64_t, 4>;

constexpr std::int64_t kHuge[] = {std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::max(), -1,
                                  std::numeric_limits<std::int64_t>::min(), std::int64_t{1} << 61};

bool is_status(hl_status status) { return status >= HL_OK && status <= HL_INTERNAL; }

/// Memory that counts what is out, and can refuse.
struct Memory {
    std::size_t live = 0;
    std::size_t until_refusal = std::numeric_limits<std::size_t>::max();

    hl_memory callbacks() {
        return {sizeof(hl_memory), this,
                [](void* user, std::size_t bytes, std::size_t alignment) -> void* {
                    auto& memory = *static_cast<Memory*>(user);
                    if (memory.until_refusal == 0 || bytes > std::size_t{64} << 20U) return nullptr;
                    --memory.until_refusal;
                    ++memory.live;
                    return ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
                },
                [](void* user, void* address, std::size_t bytes, std::size_t alignment) {
                    --static_cast<Memory*>(user)->live;
                    ::operator delete (address, bytes, std::align_val_t{alignment});
                }};
    }
};

/// An executor that runs tasks in turn, and may leave some out.
struct Pool {
    bool leaves_out = false;

    hl_executor callbacks() {
        return {sizeof(hl_executor), this, 3, 0, [](void* user, std::size_t tasks, hl_task task, void* state) {
                    const bool less = static_cast<Pool*>(user)->leaves_out;
                    for (std::size_t t = less ? 1 : 0; t < tasks; ++t) task(state, t, t % 3);
                }};
    }
};

/// A view and the memory behind it, just as large as the view says.
struct View {
    hl_tensor tensor{};
    std::unique_ptr<std::byte[]> memory;
    bool wrong = false;  ///< it must be refused

    const hl_tensor* get() const { return &tensor; }
};

struct CacheBox {
    hl_cache* handle = nullptr;
    hl_cache_options options{};
    std::vector<std::int64_t> lengths;

    std::int64_t length() const { return *std::min_element(lengths.begin(), lengths.end()); }
    bool even() const {
        return std::all_of(lengths.begin(), lengths.end(), [&](auto n) { return n == lengths[0]; });
    }
};

struct LayerBox {
    hl_layer* handle = nullptr;
    std::int64_t d_model = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
};

class Session {
  public:
    explicit Session(Input input) : reader_(input) {}
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    void run() {
        make_context();
        for (int step = 0; step < 60 && !reader_.empty(); ++step) one_call();
        end();
    }

  private:
    // ------------------------------------------------------------------------------------------------- drawing

    std::int64_t small(std::int64_t most) {
        return static_cast<std::int64_t>(reader_.below(static_cast<std::size_t>(most + 1)));
    }
    bool rarely() { return reader_.byte() > 235; }
    std::int64_t huge() { return kHuge[reader_.below(std::size(kHuge))]; }

    /// Rank `rank`, of any strides; some are wrong.
    View view(std::int32_t rank, const Extents4& extents, bool output = false, bool f32 = false) {
        View made;
        hl_tensor& t = made.tensor;
        t.dtype = f32 ? HL_F32 : static_cast<std::int32_t>(reader_.below(3));
        t.rank = rank;
        std::int64_t reach = 1;
        bool empty = false;
        const std::uint8_t how = reader_.byte();
        const std::int64_t gap = how % 4 == 1 ? small(3) : 0;
        for (std::int32_t i = rank - 1; i >= 0; --i) {
            const auto d = static_cast<std::size_t>(i);
            t.extents[d] = extents[d];
            t.strides[d] = reach + (i < rank - 1 ? gap : 0);
            empty = empty || extents[d] == 0;
            reach += (extents[d] - 1) * t.strides[d];
        }
        const std::size_t bytes = t.dtype == HL_F32 ? 4 : 2;
        if (empty) {
            t.data = nullptr;
        } else {
            made.memory.reset(new std::byte[static_cast<std::size_t>(reach) * bytes]);
            fill(made.memory.get(), static_cast<std::size_t>(reach), t.dtype);
            t.data = made.memory.get();
            for (std::int32_t i = 0; i < rank; ++i) {
                const auto d = static_cast<std::size_t>(i);
                if (how % 4 == 2) {  // backwards
                    t.data = static_cast<std::byte*>(t.data) +
                             (t.extents[d] - 1) * t.strides[d] * static_cast<std::int64_t>(bytes);
                    t.strides[d] = -t.strides[d];
                } else if (how % 4 == 3 && !output && i == 0) {
                    t.strides[d] = 0;  // broadcast
                }
            }
        }
        if (rarely()) spoil(made, empty);
        return made;
    }

    void fill(std::byte* memory, std::size_t elements, std::int32_t dtype) {
        const std::uint32_t seed = reader_.byte();
        static constexpr float kOdd[] = {0.0F,
                                         -0.0F,
                                         1e30F,
                                         -1e30F,
                                         std::numeric_limits<float>::infinity(),
                                         std::numeric_limits<float>::quiet_NaN(),
                                         1e-40F,
                                         3e38F};
        for (std::size_t i = 0; i < elements; ++i) {
            float x = static_cast<float>((i * 31 + seed) % 97) / 40.0F - 1.2F;
            if (seed > 200 && i % 13 == 5) x = kOdd[(i + seed) % std::size(kOdd)];
            if (dtype == HL_F32) {
                std::memcpy(memory + 4 * i, &x, 4);
            } else {
                std::uint32_t bits = 0;
                std::memcpy(&bits, &x, 4);
                const auto half = static_cast<std::uint16_t>(bits >> 16U);  // any bits are some number
                std::memcpy(memory + 2 * i, &half, 2);
            }
        }
    }

    void spoil(View& made, bool empty) {
        hl_tensor& t = made.tensor;
        const std::size_t d = reader_.below(static_cast<std::size_t>(std::max(1, t.rank)));
        switch (reader_.below(5)) {
            case 0:
                t.dtype = reader_.one_of<std::int32_t>({-1, 3, 77, std::numeric_limits<std::int32_t>::max()});
                break;
            case 1:
                t.rank = reader_.one_of<std::int32_t>({-1, 5, 99, std::numeric_limits<std::int32_t>::min()});
                break;
            case 2:
                t.extents[d] = -1 - small(5);
                break;
            case 3:
                if (empty || t.extents[d] < 2) return;
                t.strides[d] = reader_.one_of<std::int64_t>({kHuge[0], kHuge[1], kHuge[3], -kHuge[0]});
                break;
            default:
                if (empty) return;
                t.data = nullptr;
                break;
        }
        made.wrong = true;
    }

    hl_attention_options attention_options(std::int64_t heads, std::int64_t q_len, std::int64_t kv_len,
                                           std::size_t sequences) {
        hl_attention_options options;
        require(hl_attention_options_init(&options, sizeof options) == HL_OK, "options can be initialised");
        const std::uint32_t bits = reader_.take<std::uint16_t>();
        wrong_options_ = false;
        if (bits & 1U) options.causal = static_cast<std::int32_t>(reader_.below(3));
        if (bits & 2U) options.window_left = small(300) - 1;
        if (bits & 4U) options.window_right = small(300) - 1;
        if (bits & 8U) options.softcap = 30.0F;
        if (bits & 16U) {
            slopes_.assign(static_cast<std::size_t>(heads), 0.25F);
            options.alibi_slopes = slopes_.data();
            options.alibi_slopes_count = slopes_.size();
        }
        if (bits & 32U) {
            sinks_.assign(static_cast<std::size_t>(heads), 0.5F);
            options.sink_logits = sinks_.data();
            options.sink_logits_count = sinks_.size();
        }
        if (bits & 64U && sequences > 0) {
            lengths_.assign(sequences, small(kv_len));
            options.kv_lengths = lengths_.data();
            options.kv_lengths_count = lengths_.size();
        }
        if (bits & 128U && q_len > 0 && kv_len > 0) {
            mask_bytes_.assign(static_cast<std::size_t>(q_len * kv_len), 1);
            for (std::size_t i = 0; i < mask_bytes_.size(); i += 3) mask_bytes_[i] = 0;
            mask_ = {};
            mask_.size = sizeof mask_;
            mask_.data = mask_bytes_.data();
            mask_.rank = 2;
            mask_.extents[0] = q_len;
            mask_.extents[1] = kv_len;
            mask_.strides[0] = kv_len;
            mask_.strides[1] = 1;
            options.mask = &mask_;
        }
        if (bits & 256U) {
            options.alignment = static_cast<std::int32_t>(reader_.below(3));
            if (options.alignment == HL_OFFSET) options.causal_offset = rarely() ? huge() : small(300) - 150;
        }
        if (bits & 512U) options.timeout_seconds = reader_.one_of({1e-9, 10.0, 1e300});
        if (bits & 1024U) options.cancel = cancel_;
        if (rarely()) {
            wrong_options_ = true;
            switch (reader_.below(7)) {
                case 0:
                    options.size = reader_.one_of<std::size_t>({0, 1, sizeof options + 8, ~std::size_t{0}});
                    break;
                case 1:
                    options.causal = 7;
                    break;
                case 2:
                    options.alignment = -1;
                    break;
                case 3:
                    options.softcap = -1.0F;
                    break;
                case 4:
                    options.window_left = -2;
                    break;
                case 5:
                    options.timeout_seconds = -1.0;
                    break;
                default:
                    options.reserved = 1;
                    break;
            }
        }
        return options;
    }

    // ------------------------------------------------------------------------------------------------- judging

    /// What a call through a context returned.
    bool judge(hl_status status, bool wrong, const char* what, bool through_context = true) {
        require(is_status(status), "a call returns a status that there is");
        require(status != HL_INTERNAL, what);
        if (wrong && status == HL_OK) fail(std::string(what) + ": what is wrong is refused");
        if (status != HL_OK && through_context) {
            const std::string_view message = hl_context_message(context_);
            require(!message.empty() && message.size() < 1024, "a failure has a message");
            require(message.find('\n') == std::string_view::npos, "a message is one line");
        }
        return status == HL_OK;
    }

    Bytes saved(const CacheBox& box) {
        Bytes bytes(hl_cache_saved_bytes(box.handle, 0));
        if (!box.even() || hl_cache_save(box.handle, bytes.data(), bytes.size(), nullptr, 0) != HL_OK) bytes.clear();
        return bytes;
    }

    void check_lengths(const CacheBox& box) {
        require(hl_cache_length(box.handle) == box.length(), "a cache has the tokens that were appended");
        for (std::size_t layer = 0; layer < box.lengths.size(); ++layer) {
            require(hl_cache_layer_length(box.handle, layer) == box.lengths[layer], "a layer has its own");
        }
        require(hl_cache_layer_length(box.handle, box.lengths.size()) == -1, "there is no other layer");
    }

    /// Runs a call that changes a cache, and sees that it is as it was if it failed.
    template <class Call>
    bool change(CacheBox& box, bool wrong, const char* what, const Call& call, bool through_context = true) {
        const Bytes before = reader_.flag() ? saved(box) : Bytes{};
        const bool ok = judge(call(), wrong, what, through_context);
        if (!ok) {
            check_lengths(box);
            // the comparison itself must not be refused memory
            const std::size_t until = std::exchange(memory_.until_refusal, std::numeric_limits<std::size_t>::max());
            if (!before.empty()) require(saved(box) == before, "a failed call leaves the cache as it was");
            memory_.until_refusal = until;
        }
        return ok;
    }

    // --------------------------------------------------------------------------------------------------- calls

    void make_context() {
        if (context_ != nullptr) return;
        hl_context_options options{};
        options.size = sizeof options;
        hl_memory callbacks = memory_.callbacks();
        hl_executor executor = pool_.callbacks();
        options.memory = &callbacks;
        const std::uint8_t kind = reader_.byte();
        options.threads = 1;
        if (kind % 4 == 1) {
            options.threads = 0;
            options.executor = &executor;
        }
        if (kind % 3 == 1) options.isa = "generic";
        bool wrong = false;
        if (rarely()) {
            wrong = true;
            switch (reader_.below(6)) {
                case 0:
                    options.isa = "avx3";
                    break;
                case 1:
                    options.size = sizeof options + 1;
                    break;
                case 2:
                    callbacks.allocate = nullptr;
                    break;
                case 3:
                    options.processors = "nonsense";
                    options.executor = nullptr;
                    break;
                case 4:
                    options.isa_cap = "";
                    options.isa = nullptr;
                    break;
                default:
                    options.threads = 100000;
                    options.executor = nullptr;
                    break;
            }
        }
        char message[64];
        hl_context* made = nullptr;
        const hl_status status = hl_context_create(&options, &made, message, sizeof message);
        require(is_status(status) && status != HL_INTERNAL, "a context is made or refused");
        require((status == HL_OK) == (made != nullptr), "a handle comes with success");
        require((status == HL_OK) == (message[0] == 0), "a message comes with failure");
        require(!wrong || status != HL_OK, "wrong options of a context are refused");
        context_ = made;
        if (context_ == nullptr) {
            pool_.leaves_out = false;
            options = {};
            options.size = sizeof options;
            options.threads = 1;
            callbacks = memory_.callbacks();
            options.memory = &callbacks;
            const std::size_t until = std::exchange(memory_.until_refusal, std::numeric_limits<std::size_t>::max());
            require(hl_context_create(&options, &context_, nullptr, 0) == HL_OK, "a plain context is made");
            memory_.until_refusal = until;
        }
    }

    void one_call() {
        const std::uint8_t op = reader_.byte();
        if (caches_.empty() && op % 24 >= 4 && op % 24 < 15) return make_cache();
        switch (op % 24) {
            case 0:
                return plain();
            case 1:
                return packed();
            case 2:
                return make_cache();
            case 3:
                return refusals();
            case 4:
            case 5:
            case 6:
                return append(a_cache());
            case 7:
            case 8:
                return step(a_cache());
            case 9:
                return truncate(a_cache());
            case 10:
                return fork(a_cache());
            case 11:
                return save_and_restore(a_cache());
            case 12:
                return read_back(a_cache());
            case 13:
                return sizes(a_cache());
            case 14:
                return drop_cache();
            case 15:
                return make_layer();
            case 16:
            case 17:
                return forward();
            case 18:
                return nothing();
            case 19: {  // another context, while what was made with the first lives on
                hl_context_destroy(std::exchange(context_, nullptr));
                return make_context();
            }
            case 20:
                pool_.leaves_out = rarely();
                return;
            case 21:
                return cancel();
            case 22:
                return estimate();
            default:
                return make_pool();
        }
    }

    CacheBox& a_cache() { return caches_[reader_.below(caches_.size())]; }

    void refusals() {
        memory_.until_refusal = reader_.flag() ? reader_.below(20) : std::numeric_limits<std::size_t>::max();
    }

    void plain() {
        const std::int64_t batch = small(2), kv_heads = small(3), group = small(3), q_len = small(20),
                           kv_len = small(140), head_dim = small(24), value_dim = small(24);
        const std::int64_t heads = kv_heads * group;
        const View query = view(4, {batch, heads, q_len, head_dim});
        const View key = view(4, {batch, kv_heads, kv_len, head_dim});
        const View value = view(4, {batch, kv_heads, kv_len, value_dim});
        const View output = view(4, {batch, heads, q_len, value_dim}, true);
        const View lse = view(3, {batch, heads, q_len, 0}, true, true);
        const hl_attention_options options = attention_options(heads, q_len, kv_len, static_cast<std::size_t>(batch));
        const bool with_lse = reader_.flag();
        const bool wrong =
            query.wrong || key.wrong || value.wrong || output.wrong || (with_lse && lse.wrong) || wrong_options_;
        judge(hl_attend(context_, query.get(), key.get(), value.get(), &options, output.get(),
                        with_lse ? lse.get() : nullptr),
              wrong, "hl_attend");
    }

    void packed() {
        const std::int64_t kv_heads = 1 + small(2), group = 1 + small(2), head_dim = 1 + small(16),
                           value_dim = small(16);
        std::vector<std::int64_t> queries{0};
        std::vector<std::int64_t> keys{0};
        for (std::size_t n = reader_.below(5); n > 0; --n) {
            queries.push_back(queries.back() + small(6));
            keys.push_back(keys.back() + small(40));
        }
        const View query = view(3, {kv_heads * group, queries.back(), head_dim, 0});
        const View key = view(3, {kv_heads, keys.back(), head_dim, 0});
        const View value = view(3, {kv_heads, keys.back(), value_dim, 0});
        const View output = view(3, {kv_heads * group, queries.back(), value_dim, 0}, true);
        const std::size_t sequences = queries.size() - 1;
        bool wrong = query.wrong || key.wrong || value.wrong || output.wrong;
        if (rarely() && sequences > 0) {
            std::vector<std::int64_t>& list = reader_.flag() ? queries : keys;
            list[reader_.below(list.size())] = huge();
            wrong = true;
        }
        judge(hl_attend_packed(context_, query.get(), key.get(), value.get(), queries.data(), keys.data(), sequences,
                               nullptr, output.get(), nullptr),
              wrong, "hl_attend_packed");
    }

    hl_cache_options cache_options() {
        hl_cache_options options;
        require(hl_cache_options_init(&options, sizeof options) == HL_OK, "options can be initialised");
        options.shape.kv_heads = 1 + small(2);
        options.shape.head_dim = 1 + small(20);
        options.shape.value_dim = small(20);
        options.shape.key_type = static_cast<std::int32_t>(reader_.below(5));
        options.shape.value_type = static_cast<std::int32_t>(reader_.below(5));
        options.layers = 1 + small(2);
        const std::uint8_t kind = reader_.byte();
        if (kind % 4 == 1) {
            options.ring = 1;
            options.capacity = 1 + small(200);
            options.sink_tokens = small(options.capacity - 1);
            options.max_chunk = 1 + small(100);
        } else if (kind % 4 == 2) {
            windows_.assign(static_cast<std::size_t>(options.layers), small(90));
            options.layer_windows = windows_.data();
            options.layer_windows_count = windows_.size();
            options.max_chunk = 1 + small(100);
        } else if (kind % 4 == 3) {
            options.capacity = 1 + small(300);
        }
        if (options.shape.key_type >= HL_KV_INT8) options.hadamard_keys = reader_.flag();
        wrong_options_ = false;
        if (rarely()) {
            wrong_options_ = true;
            switch (reader_.below(9)) {
                case 0:
                    options.shape.kv_heads = reader_.one_of<std::int64_t>({0, -1, kHuge[0]});
                    break;
                case 1:
                    options.shape.head_dim = reader_.one_of<std::int64_t>({0, -5, kHuge[1]});
                    break;
                case 2:
                    options.shape.value_dim = reader_.one_of<std::int64_t>({-1, kHuge[0]});
                    break;
                case 3:
                    options.shape.key_type = 5;
                    break;
                case 4:
                    options.layers = reader_.one_of<std::int64_t>({0, -1, kHuge[1]});
                    break;
                case 5:
                    options.capacity = 0;
                    break;
                case 6:
                    options.sink_tokens = -1;
                    break;
                case 7:
                    options.size = 3;
                    break;
                default:
                    options.reserved = 1;
                    break;
            }
        }
        return options;
    }

    void make_cache() {
        if (caches_.size() >= 6) return;
        CacheBox box;
        box.options = cache_options();
        if (judge(hl_cache_create(context_, &box.options, &box.handle), wrong_options_, "hl_cache_create")) {
            box.lengths.assign(static_cast<std::size_t>(box.options.layers), 0);
            caches_.push_back(std::move(box));
        } else {
            require(box.handle == nullptr, "a failed call gives no handle");
        }
    }

    void estimate() {
        const hl_cache_options options = cache_options();
        std::size_t bytes = 0;
        judge(hl_cache_estimate_bytes(context_, &options, reader_.flag() ? small(1000) : huge(), &bytes),
              wrong_options_, "hl_cache_estimate_bytes");
    }

    void make_pool() {
        hl_kv_shape shape = cache_options().shape;
        hl_pool* pool = nullptr;
        if (!judge(hl_pool_create(context_, &shape, &pool), false, "hl_pool_create")) return;
        CacheBox box;
        box.options = cache_options();
        if (reader_.flag()) box.options.shape = shape;
        box.options.pool = pool;
        if (caches_.size() < 6 &&
            judge(hl_cache_create(context_, &box.options, &box.handle), false, "hl_cache_create in a pool")) {
            box.lengths.assign(static_cast<std::size_t>(box.options.layers), 0);
            caches_.push_back(std::move(box));
        }
        require(hl_pool_used_bytes(pool) <= hl_pool_reserved_bytes(pool), "a pool reserves what is used");
        hl_pool_destroy(pool);  // the cache keeps it
    }

    void append(CacheBox& box) {
        const std::size_t layer = rarely() ? 99 : reader_.below(box.lengths.size());
        const std::int64_t tokens = small(reader_.flag() ? 3 : 150);
        const hl_kv_shape& shape = box.options.shape;
        if (box.length() > 2000) return;  // honest work is bounded
        const View keys = view(3, {shape.kv_heads, tokens, shape.head_dim, 0});
        const View values = view(3, {shape.kv_heads, tokens, shape.value_dim, 0});
        const bool wrong = keys.wrong || values.wrong || layer == 99;
        if (change(box, wrong, "hl_cache_append",
                   [&] { return hl_cache_append(context_, box.handle, layer, keys.get(), values.get()); })) {
            box.lengths[layer] += tokens;
            check_lengths(box);
        }
        if (reader_.flag()) {  // the other layers follow
            for (std::size_t other = 0; other < box.lengths.size(); ++other) {
                if (other == layer || box.lengths[other] >= box.lengths[std::min(layer, box.lengths.size() - 1)])
                    continue;
                if (change(box, keys.wrong || values.wrong, "hl_cache_append",
                           [&] { return hl_cache_append(context_, box.handle, other, keys.get(), values.get()); })) {
                    box.lengths[other] += tokens;
                }
            }
        }
    }

    void step(CacheBox& box) {
        const hl_kv_shape& shape = box.options.shape;
        const std::int64_t heads = shape.kv_heads * (1 + small(3));
        const std::int64_t q_len = small(5);
        hl_cached_query queries[2]{};
        std::vector<View> views;
        views.reserve(6);
        bool wrong = false;
        const std::size_t count = 1 + reader_.below(2);
        for (std::size_t i = 0; i < count; ++i) {
            views.push_back(view(3, {heads, q_len, shape.head_dim, 0}));
            views.push_back(view(3, {heads, q_len, shape.value_dim, 0}, true));
            wrong = wrong || views[2 * i].wrong || views[2 * i + 1].wrong;
            queries[i].size = sizeof(hl_cached_query);
            queries[i].query = views[2 * i].tensor;
            queries[i].output = views[2 * i + 1].tensor;
            queries[i].cache = box.handle;
            queries[i].layer = rarely() ? 99 : reader_.below(box.lengths.size());
            wrong = wrong || queries[i].layer == 99;
        }
        const hl_attention_options options = attention_options(heads, q_len, box.length(), count);
        judge(hl_attend_cached(context_, queries, count, &options), wrong || wrong_options_, "hl_attend_cached");
    }

    void truncate(CacheBox& box) {
        switch (reader_.below(4)) {
            case 0:
                hl_cache_reset(box.handle);
                box.lengths.assign(box.lengths.size(), 0);
                break;
            case 1:
                hl_cache_discard_unfinished(box.handle);
                box.lengths.assign(box.lengths.size(), box.length());
                break;
            default: {
                const std::int64_t length = rarely() ? huge() : small(std::max<std::int64_t>(box.length(), 1));
                const bool wrong = length < 0 || length > box.length();
                if (change(
                        box, wrong, "hl_cache_truncate", [&] { return hl_cache_truncate(box.handle, length); },
                        false)) {
                    box.lengths.assign(box.lengths.size(), length);
                }
                break;
            }
        }
        check_lengths(box);
    }

    void fork(CacheBox& box) {
        if (caches_.size() >= 6) return;
        CacheBox made = box;
        made.handle = nullptr;
        if (!judge_without_message(hl_cache_fork(box.handle, &made.handle))) return;
        check_lengths(made);
        caches_.push_back(std::move(made));
    }

    /// Calls whose message goes to a context that may be gone.
    bool judge_without_message(hl_status status) {
        require(is_status(status) && status != HL_INTERNAL, "a call returns a status that there is");
        return status == HL_OK;
    }

    void save_and_restore(CacheBox& box) {
        Bytes file(hl_cache_saved_bytes(box.handle, 5));
        const bool ok = judge_without_message(hl_cache_save(box.handle, file.data(), file.size(), "hello", 5));
        require(!ok || box.even(), "layers of different lengths are not saved");
        if (!ok) return;
        CacheBox& into = reader_.flag() ? a_cache() : box;
        bool changed = false;
        if (reader_.flag() && !file.empty()) {
            const std::size_t at = reader_.take<std::uint32_t>() % file.size();
            const auto bits = static_cast<std::byte>(1U << reader_.below(8));
            file[at] ^= bits;
            changed = true;
        }
        const std::size_t size = rarely() ? reader_.below(file.size() + 1) : file.size();
        changed = changed || size != file.size();
        const Bytes part(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size));
        const std::vector<std::int64_t> lengths = box.lengths;
        if (change(
                into, false, "hl_cache_restore",
                [&] { return hl_cache_restore(into.handle, part.data(), part.size()); }, false)) {
            require(!changed, "a file with another bit is refused");
            into.lengths = lengths;
            std::size_t bytes = 0;
            const void* attachment = hl_cache_attachment(into.handle, &bytes);
            require(bytes == 5 && std::memcmp(attachment, "hello", 5) == 0, "the attachment comes back");
        }
        check_lengths(into);
    }

    void read_back(CacheBox& box) {
        const hl_kv_shape& shape = box.options.shape;
        const std::size_t layer = reader_.below(box.lengths.size());
        const std::int64_t first = rarely() ? huge() : small(std::max<std::int64_t>(box.lengths[layer], 1));
        const std::int64_t rows = small(30);
        const View keys = view(3, {shape.kv_heads, rows, shape.head_dim, 0}, true);
        const View values = view(3, {shape.kv_heads, rows, shape.value_dim, 0}, true);
        const bool wrong = keys.wrong || values.wrong || first < 0 || first > box.lengths[layer] - rows;
        const bool ok = judge_without_message(hl_cache_read_back(box.handle, layer, first, keys.get(), values.get()));
        require(!(ok && wrong), "rows that there are not are not read");
    }

    void sizes(CacheBox& box) {
        hl_cache_info info{};
        info.size = rarely() ? reader_.below(200) : sizeof info;
        const std::size_t size = info.size;
        if (judge_without_message(hl_cache_get_info(box.handle, &info))) {
            require(info.size == size, "the size stays");
            require(info.length == box.length() && info.layers == std::ssize(box.lengths), "what a cache is");
            require(info.used_bytes == hl_cache_used_bytes(box.handle), "how full it is");
        }
        const std::int64_t tokens = rarely() ? huge() : small(200);
        change(
            box, tokens < 0, "hl_cache_reserve", [&] { return hl_cache_reserve(box.handle, tokens); }, false);
        check_lengths(box);
    }

    void drop_cache() {
        const std::size_t i = reader_.below(caches_.size());
        hl_cache_destroy(caches_[i].handle);
        caches_.erase(caches_.begin() + static_cast<std::ptrdiff_t>(i));
    }

    void make_layer() {
        LayerBox box;
        box.kv_heads = 1 + small(1);
        const std::int64_t heads = box.kv_heads * (1 + small(1));
        box.head_dim = 1 + small(9);
        box.d_model = 1 + small(12);
        const std::int64_t width = heads * box.head_dim, kv_width = box.kv_heads * box.head_dim;
        const View query = view(2, {box.d_model, width, 0, 0}, false, true);
        const View key = view(2, {box.d_model, kv_width, 0, 0}, false, true);
        const View value = view(2, {box.d_model, kv_width, 0, 0}, false, true);
        const View output = view(2, {width, box.d_model, 0, 0}, false, true);
        hl_layer_weights weights{};
        weights.size = sizeof weights;
        weights.query = query.tensor;
        weights.key = key.tensor;
        weights.value = value.tensor;
        weights.output = output.tensor;
        hl_layer_options options{sizeof options, heads, box.kv_heads};
        bool wrong = query.wrong || key.wrong || value.wrong || output.wrong;
        if (rarely()) {
            options.heads = reader_.one_of<std::int64_t>({0, -1, kHuge[0], kHuge[1]});
            wrong = true;
        }
        if (judge(hl_layer_create(context_, &options, &weights, &box.handle), wrong, "hl_layer_create")) {
            hl_layer_destroy(std::exchange(layer_.handle, nullptr));
            layer_ = box;
        }
    }

    void forward() {
        if (layer_.handle == nullptr) return make_layer();
        const std::int64_t length = small(40);
        if (reader_.flag()) {
            const std::int64_t batch = small(2);
            const View x = view(3, {batch, length, layer_.d_model, 0});
            const View y = view(3, {batch, length, layer_.d_model, 0}, true);
            judge(hl_layer_forward(context_, layer_.handle, x.get(), nullptr, y.get()), x.wrong || y.wrong,
                  "hl_layer_forward");
            return;
        }
        if (caches_.empty()) return;
        CacheBox& box = a_cache();
        if (box.length() > 2000) return;
        const std::size_t layer = reader_.below(box.lengths.size());
        const View x = view(2, {length, layer_.d_model, 0, 0});
        const View y = view(2, {length, layer_.d_model, 0, 0}, true);
        const hl_kv_shape& shape = box.options.shape;
        const bool wrong = x.wrong || y.wrong || shape.kv_heads != layer_.kv_heads ||
                           shape.head_dim != layer_.head_dim || shape.value_dim != layer_.head_dim;
        if (change(box, wrong, "hl_layer_forward_cached", [&] {
                return hl_layer_forward_cached(context_, layer_.handle, x.get(), box.handle, layer, nullptr, y.get());
            })) {
            box.lengths[layer] += length;
            check_lengths(box);
        }
    }

    /// NULL in every place.
    void nothing() {
        hl_cache* cache = nullptr;
        hl_tensor none{};
        std::size_t count = 0;
        for (const hl_status status :
             {hl_attend(context_, nullptr, &none, nullptr, nullptr, nullptr, nullptr),
              hl_attend_cached(context_, nullptr, 3, nullptr),
              hl_attend_packed(context_, &none, &none, &none, nullptr, nullptr, 7, nullptr, &none, nullptr),
              hl_cache_create(nullptr, nullptr, &cache), hl_cache_create(context_, nullptr, nullptr),
              hl_cache_append(context_, nullptr, 0, &none, &none), hl_cache_restore(nullptr, "x", 1),
              hl_cache_truncate(nullptr, 0), hl_cache_fork(nullptr, &cache), hl_cache_reserve(nullptr, 1),
              hl_cache_read_back(nullptr, 0, 0, &none, &none), hl_layer_create(context_, nullptr, nullptr, nullptr),
              hl_layer_forward(context_, nullptr, &none, nullptr, &none),
              hl_model_load(context_, nullptr, nullptr, nullptr),
              hl_model_tokenize(nullptr, "a", 1, 0, nullptr, 0, &count),
              hl_generate(context_, nullptr, "a", 1, nullptr, nullptr), hl_available_isas(nullptr, 3, &count),
              hl_cancel_create(nullptr), hl_cancel_reset(nullptr)}) {
            require(is_status(status) && status != HL_OK && status != HL_INTERNAL, "NULL is refused");
        }
        hl_cache_destroy(nullptr);
        hl_context_destroy(nullptr);
        hl_pool_destroy(nullptr);
        hl_layer_destroy(nullptr);
        hl_model_destroy(nullptr);
        require(hl_cache_length(nullptr) == -1 && *hl_context_message(nullptr) == 0, "getters take NULL");
    }

    void cancel() {
        if (cancel_ == nullptr) {
            judge_without_message(hl_cancel_create(&cancel_));
        } else if (reader_.flag()) {
            hl_cancel_request(cancel_);
            require(hl_cancel_requested(cancel_) != 0, "a request is there");
        } else {
            judge_without_message(hl_cancel_reset(cancel_));
        }
    }

    void end() {
        while (!caches_.empty()) drop_cache();
        hl_layer_destroy(layer_.handle);
        hl_cancel_destroy(cancel_);
        hl_context_destroy(context_);
        require(memory_.live == 0, "a context's memory comes back");
    }

    Reader reader_;
    Memory memory_;
    Pool pool_;
    hl_context* context_ = nullptr;
    hl_cancel* cancel_ = nullptr;
    std::vector<CacheBox> caches_;
    LayerBox layer_;
    bool wrong_options_ = false;
    // what options point to
    std::vector<float> slopes_;
    std::vector<float> sinks_;
    std::vector<std::int64_t> lengths_;
    std::vector<std::int64_t> windows_;
    std::vector<unsigned char> mask_bytes_;
    hl_mask mask_{};
};

}  // namespace

void c_api(Input input) { Session(input).run(); }

}  // namespace headlong::fuzz
