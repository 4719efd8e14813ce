#include "tools/cases/attention_case.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <headlong/attention.hpp>
#include <headlong/error.hpp>
#include <headlong/kv_cache.hpp>

#include "engine/reference/attention.hpp"
#include "engine/reference/quantise.hpp"
#include "tools/cases/timing.hpp"

namespace headlong::tools {
namespace {

using Shape = std::vector<std::int64_t>;

/// A dense tensor with memory of its own: files may hold theirs unaligned.
struct Operand {
    FileType type = FileType::f32;
    Shape shape;
    std::vector<std::byte> bytes;

    Operand() = default;
    explicit Operand(const FileTensor& tensor)
        : type(tensor.type), shape(tensor.shape), bytes(tensor.bytes.begin(), tensor.bytes.end()) {}

    /// Rounded to float where the elements are double, which the engine does not compute in.
    static Operand narrowed(const FileTensor& tensor) {
        if (tensor.type != FileType::f64) return Operand(tensor);
        Operand operand;
        operand.shape = tensor.shape;
        const std::vector<float> floats = to_floats(tensor);
        operand.bytes.resize(floats.size() * sizeof(float));
        if (!floats.empty()) std::memcpy(operand.bytes.data(), floats.data(), operand.bytes.size());
        return operand;
    }

    std::vector<double> doubles() const {
        return to_doubles({.name = "", .type = type, .shape = shape, .bytes = bytes});
    }
};

/// Everything that a case says, checked: no shape disagrees with another one.
struct Problem {
    std::int64_t batch = 0, heads = 0, kv_heads = 0, q_len = 0, new_len = 0, past_len = 0, head_dim = 0, value_dim = 0;
    bool three_dimensional = false;  // Q, K, V and Y are [batch, length, heads * dim]
    bool causal = false;
    Alignment alignment = Alignment::offset;
    std::int64_t causal_offset = 0;
    std::int64_t window_left = -1, window_right = -1;
    std::optional<float> scale;
    float softcap = 0.0F;
    bool mask_of_last_q = false;
    bool through_cache = false;  // not only over plain tensors

    Operand query, key, value;
    std::optional<Operand> past_key, past_value, mask;
    std::vector<std::int64_t> kv_lengths;
    std::vector<float> sinks, alibi_slopes;

    Operand output;  // as it must be
    std::optional<Operand> lse, present_key, present_value, scores;
    Tolerance output_tolerance, lse_tolerance, scores_tolerance;
    ScoreStage scores_stage = ScoreStage::scaled;

    std::string unknown;  // what the file asks for and this operator, as it is known here, does not have

    std::int64_t kv_len() const noexcept { return past_len + new_len; }
    /// The position of a sequence's first query among the keys.
    std::int64_t offset(std::int64_t b) const {
        return alignment == Alignment::offset ? causal_offset : length(b) - q_len;
    }
    /// How many keys a sequence has.
    std::int64_t length(std::int64_t b) const {
        return kv_lengths.empty() ? kv_len() : kv_lengths[static_cast<std::size_t>(b)];
    }
};

// ---------------------------------------------------------------------------------------------------- reading

class ProblemReader {
  public:
    explicit ProblemReader(const CaseFile& file) : file_(file) {}

    Problem read() {
        check_names();
        read_operands();
        read_attributes();
        read_optional_inputs();
        read_alignment();
        read_expected();
        return std::move(p_);
    }

  private:
    /// Fails on what is listed and not there; notes what is there and not known.
    void check_names() {
        static constexpr std::array inputs{"Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"};
        static constexpr std::array outputs{"Y", "present_key", "present_value", "qk_matmul_output"};
        static constexpr std::array attributes{"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode",
                                               "scale", "softcap", "softmax_precision", "left_window_size",
                                               "right_window_size",
                                               // additions
                                               "alignment", "causal_offset", "mask_keys", "through_cache"};
        for (const char* key : {"inputs", "outputs", "extra_inputs", "extra_outputs"}) {
            for (const std::string& name : file_.list(key)) {
                if (!name.empty()) file_.at(name);
            }
        }
        for (const FileTensor& tensor : file_.file().tensors()) {
            const std::string& name = tensor.name;
            const bool known = std::ranges::count(inputs, name) + std::ranges::count(outputs, name) != 0 ||
                               name == "sinks" || name == "alibi_slopes" || name == "lse";
            if (!known) not_known("tensor", name);
        }
        for (const auto& [key, value] : file_.file().metadata()) {
            if (!key.starts_with("attr.")) continue;
            if (std::ranges::count(attributes, key.substr(5)) == 0) not_known("attribute", key.substr(5));
        }
        const std::int64_t opset = file_.integer("opset").value_or(25);
        if (opset < 23 || opset > 25) not_known("opset", std::to_string(opset));
        if (const std::string domain = file_.text("domain").value_or(""); !domain.empty()) not_known("domain", domain);
    }

    void not_known(const char* kind, const std::string& name) {
        p_.unknown += fmt::format("{}{} '{}' of Attention", p_.unknown.empty() ? "needs " : ", ", kind, one_line(name));
    }

    Operand floats(const FileTensor& tensor) {
        switch (tensor.type) {
            case FileType::f32:
            case FileType::f16:
            case FileType::bf16:
            case FileType::f64:
                break;
            default:
                file_.fail(fmt::format("tensor '{}' is {}, its type must be F32, F16, BF16 or F64",
                                       one_line(tensor.name), describe(tensor)));
        }
        return Operand::narrowed(tensor);
    }

    Operand floats(const char* name) { return floats(file_.at(name)); }

    std::int64_t attribute(const std::string& name, std::int64_t lowest, std::int64_t usual) const {
        const std::int64_t value = file_.integer("attr." + name).value_or(usual);
        if (value < lowest) {
            file_.fail(fmt::format("attribute '{}' is {}, at least {} is allowed", name, value, lowest));
        }
        return value;
    }

    std::int64_t heads_attribute(const std::string& name) const {
        if (!file_.text("attr." + name)) {
            file_.fail(fmt::format("attribute '{}' is missing, Q of 3 dimensions needs it", name));
        }
        return attribute(name, 1, 1);
    }

    /// [batch, heads, length, dim] of Q, K or V, whatever its rank.
    std::array<std::int64_t, 4> extents(const Operand& operand, const char* name, std::int64_t heads) const {
        const Shape& s = operand.shape;
        if (s.size() != (p_.three_dimensional ? 3U : 4U)) {
            file_.fail(fmt::format("tensor '{}' has {} dimensions and Q has {}, both must have 3 or both 4", name,
                                   s.size(), p_.query.shape.size()));
        }
        if (!p_.three_dimensional) return {s[0], s[1], s[2], s[3]};
        if (s[2] % heads != 0) {
            file_.fail(fmt::format("tensor '{}' is {} wide, which {} heads do not divide", name, s[2], heads));
        }
        return {s[0], heads, s[1], s[2] / heads};
    }

    void read_operands() {
        p_.query = floats("Q");
        p_.key = floats("K");
        p_.value = floats("V");
        p_.three_dimensional = p_.query.shape.size() == 3;
        if (p_.query.shape.size() < 3 || p_.query.shape.size() > 4) {
            file_.fail(fmt::format("tensor 'Q' has {} dimensions, it must have 3 or 4", p_.query.shape.size()));
        }
        std::int64_t q_heads = 0;
        std::int64_t kv_heads = 0;
        if (p_.three_dimensional) {
            q_heads = heads_attribute("q_num_heads");
            kv_heads = heads_attribute("kv_num_heads");
        }
        const auto q = extents(p_.query, "Q", q_heads);
        const auto k = extents(p_.key, "K", kv_heads);
        const auto v = extents(p_.value, "V", kv_heads);
        p_.batch = q[0];
        p_.heads = q[1];
        p_.q_len = q[2];
        p_.head_dim = q[3];
        p_.kv_heads = k[1];
        p_.new_len = k[2];
        p_.value_dim = v[3];
        if (p_.head_dim == 0) file_.fail("tensor 'Q' has head dim 0, it must be at least 1");
        if (k[0] != q[0] || k[3] != q[3] || v[0] != q[0] || v[1] != k[1] || v[2] != k[2] ||
            (p_.kv_heads == 0 ? p_.heads != 0 : p_.heads % p_.kv_heads != 0)) {
            file_.fail(
                fmt::format("the shapes Q [{}], K [{}] and V [{}] (batch, heads, length, dim) do not fit together",
                            fmt::join(q, ", "), fmt::join(k, ", "), fmt::join(v, ", ")));
        }
    }

    void read_attributes() {
        p_.causal = attribute("is_causal", 0, 0) != 0;
        p_.window_left = attribute("left_window_size", -1, -1);
        p_.window_right = attribute("right_window_size", -1, -1);
        if (const auto scale = file_.number("attr.scale")) p_.scale = static_cast<float>(*scale);
        p_.softcap = static_cast<float>(file_.number("attr.softcap").value_or(0.0));
        if (p_.softcap < 0.0F)
            file_.fail(fmt::format("attribute 'softcap' is {}, it must not be negative", p_.softcap));
        attribute("softmax_precision", 0, 1);  // scores and weights are float32 or better whatever it says
        p_.through_cache = attribute("through_cache", 0, 0) != 0;
        const std::string keys = file_.text("attr.mask_keys").value_or("all");
        if (keys != "all" && keys != "last_q") {
            file_.fail(fmt::format("attribute 'mask_keys' is '{}', all and last_q are allowed", one_line(keys)));
        }
        p_.mask_of_last_q = keys == "last_q";
    }

    /// ONNX's rule, unless the file names another one.
    void read_alignment() {
        const std::string name =
            file_.text("attr.alignment").value_or(p_.kv_lengths.empty() ? "offset" : "bottom_right");
        p_.causal_offset = file_.integer("attr.causal_offset").value_or(p_.past_len);
        if (name == "bottom_right") {
            p_.alignment = Alignment::bottom_right;  // of each sequence's own length
        } else if (name == "top_left") {
            p_.causal_offset = 0;
        } else if (name != "offset") {
            file_.fail(fmt::format("attribute 'alignment' is '{}', bottom_right, top_left and offset are allowed",
                                   one_line(name)));
        }
    }

    void read_optional_inputs() {
        if ((file_.find("past_key") != nullptr) != (file_.find("past_value") != nullptr)) {
            file_.fail("'past_key' and 'past_value' must be given together");
        }
        if (const FileTensor* const past_key = file_.find("past_key")) {
            p_.past_key = floats("past_key");
            p_.past_value = floats("past_value");
            if (past_key->shape.size() != 4) {
                file_.fail(fmt::format("tensor 'past_key' has {} dimensions, it must have 4", past_key->shape.size()));
            }
            p_.past_len = past_key->shape[2];
            file_.expect_shape(*past_key, {p_.batch, p_.kv_heads, p_.past_len, p_.head_dim});
            file_.expect_shape(file_.at("past_value"), {p_.batch, p_.kv_heads, p_.past_len, p_.value_dim});
            if (p_.past_key->type != p_.key.type || p_.past_value->type != p_.value.type) {
                file_.fail("'past_key' and K, and 'past_value' and V, must have the same type");
            }
        }
        if (const FileTensor* const lengths = file_.find("nonpad_kv_seqlen")) {
            if (p_.past_key) file_.fail("'nonpad_kv_seqlen' and 'past_key' must not be given together");
            file_.expect_shape(*lengths, {p_.batch});
            if (lengths->type != FileType::i64) {
                file_.fail(fmt::format("tensor 'nonpad_kv_seqlen' is {}, its type must be I64", describe(*lengths)));
            }
            p_.kv_lengths = to_int64s(*lengths);
            for (const std::int64_t length : p_.kv_lengths) {
                if (length < 0 || length > p_.new_len) {
                    file_.fail(
                        fmt::format("tensor 'nonpad_kv_seqlen' holds {}, 0 to {} is allowed", length, p_.new_len));
                }
            }
        }
        if (const FileTensor* const sinks = file_.find("sinks")) {
            file_.expect_shape(*sinks, {p_.heads});
            p_.sinks = to_floats(*sinks);
        }
        if (const FileTensor* const slopes = file_.find("alibi_slopes")) {
            file_.expect_shape(*slopes, {p_.heads});
            p_.alibi_slopes = to_floats(*slopes);
        }
        read_mask();
    }

    void read_mask() {
        const FileTensor* const mask = file_.find("attn_mask");
        if (mask == nullptr) return;
        p_.mask = mask->type == FileType::boolean ? Operand(*mask) : floats(*mask);
        const std::array scores{p_.batch, p_.heads, p_.q_len, p_.mask_of_last_q ? p_.q_len : p_.kv_len()};
        const std::size_t rank = mask->shape.size();
        bool fits = rank >= 1 && rank <= 4;
        for (std::size_t i = 0; fits && i < rank; ++i) {
            const std::int64_t extent = mask->shape[i];
            const std::int64_t whole = scores[4 - rank + i];
            // fewer keys than there are: the others are not allowed
            const bool keys = i + 1 == rank && !p_.mask_of_last_q;
            fits = extent == 1 || (keys ? extent <= whole : extent == whole);
        }
        if (!fits) {
            file_.fail(fmt::format("tensor 'attn_mask' is {}, which does not broadcast to [{}]", describe(*mask),
                                   fmt::join(scores, ", ")));
        }
    }

    void read_expected() {
        const FileTensor& y = file_.at("Y");
        p_.output = floats(y);
        if (p_.three_dimensional) {
            file_.expect_shape(y, {p_.batch, p_.q_len, p_.heads * p_.value_dim});
        } else {
            file_.expect_shape(y, {p_.batch, p_.heads, p_.q_len, p_.value_dim});
        }
        p_.output_tolerance = file_.tolerance(y);
        if (const FileTensor* const lse = file_.find("lse")) {
            file_.expect_shape(*lse, {p_.batch, p_.heads, p_.q_len});
            if (lse->type != FileType::f32) {
                file_.fail(fmt::format("tensor 'lse' is {}, its type must be F32", describe(*lse)));
            }
            p_.lse = Operand(*lse);
            p_.lse_tolerance = file_.tolerance(*lse);
        }
        if (const FileTensor* const present = file_.find("present_key")) {
            file_.expect_shape(*present, {p_.batch, p_.kv_heads, p_.kv_len(), p_.head_dim});
            p_.present_key = floats(*present);
        }
        if (const FileTensor* const present = file_.find("present_value")) {
            file_.expect_shape(*present, {p_.batch, p_.kv_heads, p_.kv_len(), p_.value_dim});
            p_.present_value = floats(*present);
        }
        const std::int64_t mode = attribute("qk_matmul_output_mode", 0, 0);
        if (mode > 3) file_.fail(fmt::format("attribute 'qk_matmul_output_mode' is {}, 0 to 3 are allowed", mode));
        p_.scores_stage = static_cast<ScoreStage>(mode);  // in ONNX's order
        if (const FileTensor* const scores = file_.find("qk_matmul_output")) {
            file_.expect_shape(*scores, {p_.batch, p_.heads, p_.q_len, p_.kv_len()});
            p_.scores = floats(*scores);
            p_.scores_tolerance = file_.tolerance(*scores);
        }
    }

    const CaseFile& file_;
    Problem p_;
};

// ---------------------------------------------------------------------------------------------------- computing

/// [batch, heads, length, dim] over an operand of either rank.
template <typename View, typename Data>
View view4(Data* data, const Operand& operand, bool three_dimensional, std::int64_t heads) {
    View view;
    view.data = data;
    view.dtype = dtype_of(operand.type);
    const Shape& s = operand.shape;
    if (three_dimensional) {
        const std::int64_t dim = s[2] / heads;
        view.extents = {s[0], heads, s[1], dim};
        view.strides = {s[1] * s[2], dim, s[2], 1};
    } else {
        view.extents = {s[0], s[1], s[2], s[3]};
        view.strides = dense_strides<4>(view.extents);
    }
    return view;
}

InputTensor<4> input4(const Operand& operand, bool three_dimensional, std::int64_t heads) {
    return view4<InputTensor<4>>(operand.bytes.data(), operand, three_dimensional, heads);
}

/// One sequence of a view.
template <typename View>
auto sequence(const View& view, std::int64_t b) {
    const auto bytes = static_cast<std::ptrdiff_t>(size_of(view.dtype));
    if constexpr (std::is_same_v<View, InputTensor<4>>) {
        const auto* const data = static_cast<const std::byte*>(view.data);
        return InputTensor<3>{data == nullptr ? nullptr : data + b * view.strides[0] * bytes,
                              view.dtype,
                              {view.extents[1], view.extents[2], view.extents[3]},
                              {view.strides[1], view.strides[2], view.strides[3]}};
    } else {
        auto* const data = static_cast<std::byte*>(view.data);
        return OutputTensor<3>{data == nullptr ? nullptr : data + b * view.strides[0] * bytes,
                               view.dtype,
                               {view.extents[1], view.extents[2], view.extents[3]},
                               {view.strides[1], view.strides[2], view.strides[3]}};
    }
}

/// past and new along the length, as [batch, heads, past + new, dim].
Operand concatenate(const Operand& past, const InputTensor<4>& fresh) {
    const std::size_t element = size_of(past.type);
    const auto batch = fresh.extents[0], heads = fresh.extents[1], dim = fresh.extents[3];
    const std::int64_t past_len = past.shape[2];
    Operand whole;
    whole.type = past.type;
    whole.shape = {batch, heads, past_len + fresh.extents[2], dim};
    whole.bytes.resize(past.bytes.size() + static_cast<std::size_t>(batch * heads * fresh.extents[2] * dim) * element);
    if (whole.bytes.empty()) return whole;
    const std::size_t row = static_cast<std::size_t>(dim) * element;
    const std::size_t past_bytes = static_cast<std::size_t>(past_len) * row;
    std::byte* to = whole.bytes.data();
    const std::byte* from_past = past.bytes.data();
    for (std::int64_t b = 0; b < batch; ++b) {
        for (std::int64_t h = 0; h < heads; ++h) {
            if (past_bytes != 0) std::memcpy(to, from_past, past_bytes);
            to += past_bytes;
            from_past += past_bytes;
            for (std::int64_t i = 0; i < fresh.extents[2] && row != 0; ++i, to += row) {
                const std::int64_t place = b * fresh.strides[0] + h * fresh.strides[1] + i * fresh.strides[2];
                std::memcpy(to, static_cast<const std::byte*>(fresh.data) + static_cast<std::size_t>(place) * element,
                            row);
            }
        }
    }
    return whole;
}

/// How many keys each row [batch, heads, q_len] sees, decided here and not by the engine. Empty if there is no output.
std::vector<std::int64_t> count_visible_keys(const Problem& p) {
    if (p.output.bytes.empty()) return {};
    std::vector<bool> attend;
    std::array<std::size_t, 4> strides{};
    std::int64_t mask_keys = p.kv_len();
    if (p.mask) {
        if (p.mask->type == FileType::boolean) {
            for (const std::byte byte : p.mask->bytes) attend.push_back(byte != std::byte{0});
        } else {
            for (const double bias : p.mask->doubles())
                attend.push_back(bias != -std::numeric_limits<double>::infinity());
        }
        // right-aligned; what has an extent of 1 is the same everywhere
        const std::size_t rank = p.mask->shape.size();
        std::size_t stride = 1;
        for (std::size_t i = rank; i-- > 0;) {
            const auto extent = static_cast<std::size_t>(p.mask->shape[i]);
            strides[4 - rank + i] = extent == 1 ? 0 : stride;
            stride *= extent;
        }
        if (p.mask->shape.back() != 1 && !p.mask_of_last_q) mask_keys = p.mask->shape.back();
    }
    // windows of a file may be near 2^63; positions are far from it
    constexpr std::int64_t widest = std::int64_t{1} << 62;
    const std::int64_t left = std::min(p.window_left, widest);
    const std::int64_t right = std::min(p.window_right, widest);

    std::vector<std::int64_t> counts;
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const std::int64_t length = p.length(b);
        // what lies before the mask's first key is allowed
        const std::int64_t mask_from = p.mask_of_last_q ? length - p.q_len : 0;
        for (std::int64_t h = 0; h < p.heads; ++h) {
            for (std::int64_t i = 0; i < p.q_len; ++i) {
                const std::int64_t position = i + p.offset(b);
                std::int64_t first = 0;
                std::int64_t end = std::min(length, mask_keys);
                if (p.causal) end = std::min(end, position + 1);
                if (left >= 0) first = std::max(first, position - left);
                if (right >= 0) end = std::min(end, position + right + 1);
                std::int64_t count = std::max<std::int64_t>(0, end - first);
                if (p.mask) {
                    const std::int64_t masked = std::max(first, mask_from);
                    count = std::max<std::int64_t>(0, std::min(end, masked) - first);
                    const std::array row{b, h, i};
                    std::size_t place = static_cast<std::size_t>(masked - mask_from) * strides[3];
                    for (std::size_t d = 0; d < 3; ++d) place += static_cast<std::size_t>(row[d]) * strides[d];
                    for (std::int64_t j = masked; j < end; ++j, place += strides[3]) count += attend[place] ? 1 : 0;
                }
                counts.push_back(count);
            }
        }
    }
    return counts;
}

AttentionOptions options_of(const Problem& p) {
    AttentionOptions options;
    options.scale = p.scale;
    options.causal = p.causal;  // said even where it is the default: a case through a cache may be bidirectional
    options.alignment = p.alignment;
    if (p.alignment == Alignment::offset) options.causal_offset = p.causal_offset;
    options.kv_lengths = p.kv_lengths;
    options.window_left = p.window_left;
    options.window_right = p.window_right;
    options.softcap = p.softcap;
    options.sink_logits = p.sinks;
    options.alibi_slopes = p.alibi_slopes;
    if (p.mask) {
        AttentionMask mask;
        mask.data = p.mask->bytes.data();
        switch (p.mask->type) {
            case FileType::boolean:
                mask.type = AttentionMask::Type::boolean;
                break;
            case FileType::f16:
                mask.type = AttentionMask::Type::f16;
                break;
            case FileType::bf16:
                mask.type = AttentionMask::Type::bf16;
                break;
            default:
                mask.type = AttentionMask::Type::f32;
                break;
        }
        mask.rank = p.mask->shape.size();
        std::int64_t stride = 1;
        for (std::size_t i = mask.rank; i-- > 0;) {
            mask.extents[i] = p.mask->shape[i];
            mask.strides[i] = stride;
            stride *= mask.extents[i];
        }
        mask.keys = p.mask_of_last_q ? AttentionMask::Keys::last_q : AttentionMask::Keys::all;
        options.mask = mask;
    }
    return options;
}

/// The same for one sequence of the batch.
AttentionOptions options_of_sequence(const Problem& p, std::int64_t b) {
    AttentionOptions options = options_of(p);
    if (!options.kv_lengths.empty()) options.kv_lengths = options.kv_lengths.subspan(static_cast<std::size_t>(b), 1);
    if (options.mask && options.mask->rank == 4 && options.mask->extents[0] != 1) {
        const std::size_t element = options.mask->type == AttentionMask::Type::boolean ? 1 : size_of(p.mask->type);
        options.mask->data = static_cast<const std::byte*>(options.mask->data) +
                             static_cast<std::size_t>(b * options.mask->strides[0]) * element;
        options.mask->extents[0] = 1;
    }
    return options;
}

/// An operand like this one, filled with what no result is: 3.4e38, and a NaN in 16 bits.
Operand unwritten(const Operand& like) {
    Operand operand;
    operand.type = like.type;
    operand.shape = like.shape;
    operand.bytes.assign(like.bytes.size(), std::byte{0x7f});
    return operand;
}

/// Where a computation writes.
struct Results {
    Operand output, scores;
    std::vector<float> lse;

    explicit Results(const Problem& p)
        : lse(p.lse ? static_cast<std::size_t>(p.batch * p.heads * p.q_len) : 0,
              std::numeric_limits<float>::quiet_NaN()) {
        output = unwritten(p.output);
        if (p.scores) scores = unwritten(*p.scores);
    }
    OutputTensor<4> scores4() { return view4<OutputTensor<4>>(scores.bytes.data(), scores, false, 0); }
    OutputTensor<4> output4(const Problem& p) {
        return view4<OutputTensor<4>>(output.bytes.data(), output, p.three_dimensional, p.heads);
    }
    OutputTensor<3> lse3(const Problem& p) {
        return p.lse ? OutputTensor<3>::dense(lse.data(), {p.batch, p.heads, p.q_len}) : OutputTensor<3>{};
    }
};

/// What must come out, and how near.
struct Wanted {
    std::vector<double> output, lse, scores;
    Tolerance output_tolerance, lse_tolerance, scores_tolerance;
};

Wanted wanted_by_file(const Problem& p) {
    Wanted wanted;
    wanted.output = p.output.doubles();
    if (p.lse) wanted.lse = p.lse->doubles();
    if (p.scores) wanted.scores = p.scores->doubles();
    wanted.output_tolerance = p.output_tolerance;
    wanted.lse_tolerance = p.lse_tolerance;
    wanted.scores_tolerance = p.scores_tolerance;
    return wanted;
}

/// A bound for the arithmetic, and the rounding of what is written.
Tolerance rounded(Tolerance bound, const Operand& result) {
    switch (result.type) {
        case FileType::f16:
            bound.absolute += 0x1p-25;
            if (bound.rms) *bound.rms += 0x1p-25;
            bound.relative += 0x1p-11;
            break;
        case FileType::bf16:
            bound.relative += 0x1p-8;
            break;
        default:
            break;
    }
    return bound;
}

/// The same by the reference, of the keys and values that caches hold: [batch, kv_heads, kv_len, dim].
Wanted wanted_of_stored(const Problem& p, const KvTypes& types, const std::vector<float>& keys,
                        const std::vector<float>& values) {
    const auto query = reference::widen(input4(p.query, p.three_dimensional, p.heads));
    const reference::Tensor key({p.batch, p.kv_heads, p.kv_len(), p.head_dim}, {keys.begin(), keys.end()});
    const reference::Tensor value({p.batch, p.kv_heads, p.kv_len(), p.value_dim}, {values.begin(), values.end()});
    const reference::AttentionOptions options = reference::widen(options_of(p));
    const reference::AttentionResult result = reference::attention(query, key, value, options);
    Wanted wanted;
    wanted.output.resize(result.output.values.size());
    std::size_t from = 0;
    for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t h = 0; h < p.heads; ++h) {
            for (std::int64_t i = 0; i < p.q_len; ++i) {
                const std::int64_t row =
                    p.three_dimensional ? (b * p.q_len + i) * p.heads + h : (b * p.heads + h) * p.q_len + i;
                for (std::int64_t d = 0; d < p.value_dim; ++d, ++from) {
                    wanted.output[static_cast<std::size_t>(row * p.value_dim + d)] = result.output.values[from];
                }
            }
        }
    }
    wanted.lse = result.lse.values;
    wanted.output_tolerance = rounded(output_tolerance(result, types), p.output);
    wanted.lse_tolerance = lse_tolerance(result.magnitudes, types);
    if (p.scores) {
        reference::AttentionOptions of_scores = options;
        of_scores.scores = static_cast<reference::Scores>(p.scores_stage);
        if (p.scores_stage == ScoreStage::scaled || p.scores_stage == ScoreStage::softcapped) {
            // of all pairs, whose sizes count then
            of_scores.causal = false;
            of_scores.window_left = of_scores.window_right = -1;
            of_scores.mask.reset();
            of_scores.kv_lengths.clear();
        }
        const reference::AttentionResult scored = reference::attention(query, key, value, of_scores);
        wanted.scores = scored.scores.values;
        // that of lse is what a score may be off; a weight is off by the errors of a score and of their sum
        Tolerance bound = lse_tolerance(scored.magnitudes, types);
        if (p.scores_stage == ScoreStage::weights) bound.absolute *= 2.0;
        wanted.scores_tolerance = rounded(bound, *p.scores);
        wanted.scores_tolerance.relative += 0x1p-22;  // a biased score is rounded at its own size
    }
    return wanted;
}

void compare(const Problem& p, const Wanted& wanted, const std::vector<std::int64_t>& visible, const std::string& path,
             const Results& results, Comparison& comparison) {
    const std::vector<double> got = results.output.doubles();
    comparison.compare("Y", path, p.output.shape, got, wanted.output, wanted.output_tolerance);
    if (p.lse) {
        const std::vector<double> lse(results.lse.begin(), results.lse.end());
        comparison.compare("lse", path, p.lse->shape, lse, wanted.lse, wanted.lse_tolerance);
    }
    if (p.scores) {
        comparison.compare("qk_matmul_output", path, p.scores->shape, results.scores.doubles(), wanted.scores,
                           wanted.scores_tolerance);
    }
    for (std::size_t row = 0; row < visible.size(); ++row) {  // [batch, heads, q_len]
        if (visible[row] != 0) continue;
        const auto heads = static_cast<std::size_t>(p.heads);
        const auto q_len = static_cast<std::size_t>(p.q_len);
        const std::size_t b = row / (heads * q_len);
        const std::size_t h = row / q_len % heads;
        const std::size_t i = row % q_len;
        const std::size_t output_row = p.three_dimensional ? (b * q_len + i) * heads + h : row;
        const auto value_dim = static_cast<std::size_t>(p.value_dim);
        for (std::size_t place = output_row * value_dim; place < (output_row + 1) * value_dim; ++place) {
            if (got[place] == 0.0) continue;
            comparison.fail(fmt::format("{}: {} is {:.9g}, a row that sees no key must be exactly 0", path,
                                        element_name("Y", p.output.shape, place), got[place]));
            return;
        }
    }
}

double visible_flops(const Problem& p, const std::vector<std::int64_t>& visible) {
    const double pairs = static_cast<double>(std::accumulate(visible.begin(), visible.end(), std::int64_t{0}));
    return 2.0 * pairs * static_cast<double>(p.head_dim + p.value_dim);
}

/// One call over plain tensors, a past being put in front of K and V.
void run_plain(const Problem& p, const std::vector<std::int64_t>& visible, Context& context, Comparison& comparison,
               Outcome& timing) {
    const InputTensor<4> query = input4(p.query, p.three_dimensional, p.heads);
    InputTensor<4> key = input4(p.key, p.three_dimensional, p.kv_heads);
    InputTensor<4> value = input4(p.value, p.three_dimensional, p.kv_heads);
    Operand whole_key;
    Operand whole_value;
    if (p.past_key) {
        whole_key = concatenate(*p.past_key, key);
        whole_value = concatenate(*p.past_value, value);
        key = input4(whole_key, false, p.kv_heads);
        value = input4(whole_value, false, p.kv_heads);
    }
    const AttentionOptions options = options_of(p);
    Results results(p);
    const auto run = [&] { attend(context, query, key, value, options, results.output4(p), results.lse3(p)); };
    run();
    if (p.scores) attention_scores(context, query, key, options, p.scores_stage, results.scores4());
    compare(p, wanted_by_file(p), visible, "plain call", results, comparison);

    timing.seconds = median_seconds(run);
    timing.flops = visible_flops(p, visible);
}

/// The same through a cache for each sequence: append the past, append the new rows, attend, read the rows back.
void run_cached(const Problem& p, const std::vector<std::int64_t>& visible, Context& context, const KvTypes& types,
                Comparison& comparison, Outcome& timing) {
    const InputTensor<4> query = input4(p.query, p.three_dimensional, p.heads);
    const InputTensor<4> key = input4(p.key, p.three_dimensional, p.kv_heads);
    const InputTensor<4> value = input4(p.value, p.three_dimensional, p.kv_heads);
    Results results(p);
    const OutputTensor<4> output = results.output4(p);

    std::vector<KvCache> caches;
    std::vector<CachedQuery> queries;
    caches.reserve(static_cast<std::size_t>(p.batch));
    for (std::int64_t b = 0; b < p.batch; ++b) {
        KvCacheOptions options;
        options.shape = {.kv_heads = p.kv_heads,
                         .head_dim = p.head_dim,
                         .value_dim = p.value_dim,
                         .key_type = types.keys,
                         .value_type = types.values};
        options.capacity = std::max<std::int64_t>(p.kv_len(), 1);
        KvCache& cache = caches.emplace_back(options);
        if (p.past_key) {
            cache.append(context, 0, sequence(input4(*p.past_key, false, p.kv_heads), b),
                         sequence(input4(*p.past_value, false, p.kv_heads), b));
        }
        cache.append(context, 0, sequence(key, b), sequence(value, b));
        CachedQuery each;
        each.query = sequence(query, b);
        each.cache = &cache;
        each.output = sequence(output, b);
        if (p.lse) {
            each.lse = OutputTensor<2>::dense(results.lse.data() + b * p.heads * p.q_len, {p.heads, p.q_len});
        }
        queries.push_back(each);
    }
    const auto run = [&] { attend(context, queries, options_of(p)); };
    run();
    for (std::int64_t b = 0; p.scores && b < p.batch; ++b) {
        attention_scores(context, sequence(query, b), caches[static_cast<std::size_t>(b)], 0, options_of_sequence(p, b),
                         p.scores_stage, sequence(results.scores4(), b));
    }
    std::vector<float> keys(static_cast<std::size_t>(p.batch * p.kv_heads * p.kv_len() * p.head_dim));
    std::vector<float> values(static_cast<std::size_t>(p.batch * p.kv_heads * p.kv_len() * p.value_dim));
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const std::int64_t rows = b * p.kv_heads * p.kv_len();
        caches[static_cast<std::size_t>(b)].read_back(
            0, 0, OutputTensor<3>::dense(keys.data() + rows * p.head_dim, {p.kv_heads, p.kv_len(), p.head_dim}),
            OutputTensor<3>::dense(values.data() + rows * p.value_dim, {p.kv_heads, p.kv_len(), p.value_dim}));
    }
    compare(p, types == KvTypes{} ? wanted_by_file(p) : wanted_of_stored(p, types, keys, values), visible,
            "through a cache", results, comparison);
    // a cache of f32 holds every input type exactly; of other types the reference sees what the cache holds
    if (p.present_key) {
        comparison.compare("present_key", "read back", p.present_key->shape,
                           {std::vector<double>(keys.begin(), keys.end())},
                           reference::stored_keys(types.keys, p.present_key->doubles(), p.head_dim), {});
    }
    if (p.present_value) {
        comparison.compare("present_value", "read back", p.present_value->shape,
                           {std::vector<double>(values.begin(), values.end())},
                           reference::stored_values(types.values, p.present_value->doubles(), p.value_dim), {});
    }
    if (types == KvTypes{}) return;  // the plain call has been timed
    timing.seconds = median_seconds(run);
    timing.flops = visible_flops(p, visible);
}

Outcome run(const Problem& p, Context& context, const KvTypes& types) {
    Comparison comparison;
    Outcome timing;
    const std::vector<std::int64_t> visible = count_visible_keys(p);
    if (types != KvTypes{}) {
        if (p.kv_heads == 0) return skipped("needs a cache without KV heads");
        run_cached(p, visible, context, types, comparison, timing);
    } else {
        run_plain(p, visible, context, comparison, timing);
        // values of no elements have no rows to append
        if ((p.past_key || p.through_cache) && p.value_dim > 0 && p.kv_heads > 0) {
            run_cached(p, visible, context, types, comparison, timing);
        }
    }
    Outcome outcome = comparison.outcome();
    outcome.seconds = timing.seconds;
    outcome.flops = timing.flops;
    return outcome;
}

}  // namespace

Case attention_case(std::string name, const CaseFile& file) {
    const auto problem = std::make_shared<const Problem>(ProblemReader(file).read());
    return {std::move(name), [problem](Context& context, const KvTypes& types) {
                return problem->unknown.empty() ? run(*problem, context, types) : skipped(problem->unknown);
            }};
}

}  // namespace headlong::tools
