#include "tests/support/case_writer.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "tests/support/views.hpp"
#include "tests/support/write_safetensors.hpp"

namespace headlong::test {
namespace {

const char* file_type_of(Element element) {
    static constexpr const char* kNames[] = {"BOOL", "F32", "F16", "BF16"};
    return kNames[static_cast<std::size_t>(element)];
}

std::string bytes_of(Element element, std::span<const std::uint32_t> elements) {
    std::string bytes(elements.size() * size_of(element), '\0');
    for (std::size_t i = 0; i < elements.size(); ++i) {
        std::memcpy(bytes.data() + i * size_of(element), &elements[i], size_of(element));
    }
    return bytes;
}

/// A part of the case, dense.
TensorToWrite part_to_write(std::string name, const AttentionCase& c, Part part) {
    const Element element = element_of(c, part);
    Extents<4> extents{};
    Extents<4> strides{};
    std::size_t rank = 4;
    const void* data = nullptr;
    if (part == Part::mask) {
        rank = c.mask->rank;
        data = c.mask->data;
        extents = {1, 1, 1, 1};
        std::copy_n(c.mask->extents.begin(), rank, extents.end() - static_cast<std::ptrdiff_t>(rank));
        std::copy_n(c.mask->strides.begin(), rank, strides.end() - static_cast<std::ptrdiff_t>(rank));
    } else {
        const InputTensor<4>& view = part == Part::query ? c.query : part == Part::key ? c.key : c.value;
        data = view.data;
        extents = view.extents;
        strides = view.strides;
    }
    const AnyTensor<4> dense = copy_of<4>(data, element, extents, strides, element);
    return {std::move(name), file_type_of(element),
            std::vector<std::int64_t>(extents.end() - static_cast<std::ptrdiff_t>(rank), extents.end()),
            bytes_of(element, dense.all_bits())};
}

TensorToWrite result_to_write(std::string name, Element element, std::vector<std::int64_t> shape,
                              const std::vector<double>& values) {
    std::vector<std::uint32_t> bits;
    bits.reserve(values.size());
    for (const double value : values) bits.push_back(bits_of(element, value));
    return {std::move(name), file_type_of(element), std::move(shape), bytes_of(element, bits)};
}

/// How far two numbers that were rounded to a type may be apart on top of a bound: half a unit each.
std::pair<double, double> roundings(Element element) {
    if (element == Element::f16) return {0x1p-24, 0x1p-10};
    if (element == Element::bf16) return {0.0, 0x1p-7};
    return {0.0, 0x1p-23};
}

void write_uniform(const std::filesystem::path& path, const AttentionCase& c, const Expected& want) {
    std::map<std::string, std::string> metadata{{"op", "Attention"}, {"opset", "25"}, {"name", path.stem().string()}};
    std::string inputs = "Q,K,V";
    std::vector<std::string> extra_inputs;
    std::vector<TensorToWrite> tensors{part_to_write("Q", c, Part::query), part_to_write("K", c, Part::key),
                                       part_to_write("V", c, Part::value)};
    if (c.mask) {
        inputs += ",attn_mask";
        tensors.push_back(part_to_write("attn_mask", c, Part::mask));
        if (c.mask->keys == AttentionMask::Keys::last_q) metadata["attr.mask_keys"] = "last_q";
    }
    if (!c.live.empty()) {
        inputs += c.mask ? ",,,nonpad_kv_seqlen" : ",,,,nonpad_kv_seqlen";
        tensors.push_back(tensor_to_write("nonpad_kv_seqlen", "I64", {c.sequences()}, c.live));
    }
    const auto add_of_heads = [&](const char* name, const std::vector<float>& of_heads) {
        if (of_heads.empty()) return;
        extra_inputs.emplace_back(name);
        tensors.push_back(tensor_to_write(name, "F32", {c.heads}, of_heads));
    };
    add_of_heads("alibi_slopes", c.alibi_slopes);
    add_of_heads("sinks", c.sink_logits);
    metadata["inputs"] = inputs;
    if (!extra_inputs.empty()) metadata["extra_inputs"] = fmt::format("{}", fmt::join(extra_inputs, ","));
    metadata["outputs"] = "Y";
    metadata["extra_outputs"] = "lse";

    const AttentionOptions& features = c.features;
    metadata["attr.is_causal"] = c.causal ? "1" : "0";
    metadata["attr.through_cache"] = "1";
    metadata["attr.alignment"] = features.alignment == Alignment::bottom_right ? "bottom_right"
                                 : features.alignment == Alignment::top_left   ? "top_left"
                                                                               : "offset";
    if (features.alignment == Alignment::offset) {
        metadata["attr.causal_offset"] = std::to_string(features.causal_offset);
    }
    metadata["attr.left_window_size"] = std::to_string(features.window_left);
    metadata["attr.right_window_size"] = std::to_string(features.window_right);
    // all digits of the double that a float is: reading it back gives the same float
    if (features.scale) metadata["attr.scale"] = fmt::format("{}", static_cast<double>(*features.scale));
    if (features.softcap != 0.0F) metadata["attr.softcap"] = fmt::format("{}", static_cast<double>(features.softcap));

    const Element type = element_of(c.output_type);
    const auto add_result = [&](const std::string& name, Element element, std::vector<std::int64_t> shape,
                                const std::vector<double>& values, const std::vector<double>& bounds) {
        tensors.push_back(result_to_write(name, element, std::move(shape), values));
        const auto [absolute, relative] = roundings(element);
        const double bound = bounds.empty() ? 0.0 : *std::max_element(bounds.begin(), bounds.end());
        metadata["atol." + name] = fmt::format("{}", bound + absolute);
        metadata["rtol." + name] = fmt::format("{}", relative);
    };
    add_result("Y", type, {c.sequences(), c.heads, c.longest_q(), c.value_dim}, want.output, want.output_bound);
    add_result("lse", Element::f32, {c.sequences(), c.heads, c.longest_q()}, want.lse, want.lse_bound);
    write_safetensors(path.string(), tensors, metadata);
}

/// Sequence s's part of what is expected.
Expected sequence_of(const AttentionCase& c, const Expected& want, std::int64_t s) {
    const auto begin = static_cast<std::ptrdiff_t>(c.row_of(s, 0, 0));
    const auto end = static_cast<std::ptrdiff_t>(c.row_of(s, c.heads, 0));
    const auto width = static_cast<std::ptrdiff_t>(c.value_dim);
    Expected part;
    part.output.assign(want.output.begin() + begin * width, want.output.begin() + end * width);
    part.lse.assign(want.lse.begin() + begin, want.lse.begin() + end);
    part.output_bound.assign(want.output_bound.begin() + begin, want.output_bound.begin() + end);
    part.lse_bound.assign(want.lse_bound.begin() + begin, want.lse_bound.begin() + end);
    return part;
}

}  // namespace

std::vector<std::filesystem::path> write_case(const std::filesystem::path& folder, const std::string& name,
                                              const AttentionCase& c, const Expected& want) {
    std::vector<std::filesystem::path> paths;
    if (c.uniform()) {
        paths.push_back(folder / (name + ".safetensors"));
        write_uniform(paths.back(), c, want);
        return paths;
    }
    for (std::int64_t s = 0; s < c.sequences(); ++s) {
        paths.push_back(folder / fmt::format("{}-{}.safetensors", name, s));
        write_uniform(paths.back(), sequence_of(c, s), sequence_of(c, want, s));
    }
    return paths;
}

}  // namespace headlong::test
