#include "engine/block_rows.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/half.hpp"

namespace headlong {

using kernels::BlockLayout;
using kernels::kPanelTokens;
using kernels::StoredType;

namespace {

std::uint8_t* bytes(std::byte* p) noexcept { return reinterpret_cast<std::uint8_t*>(p); }

/// One element of a type without codes.
float element(const std::byte* data, StoredType type, std::size_t index) noexcept {
    std::uint16_t half = 0;
    float single = 0.0F;
    switch (type) {
        case StoredType::f16:
            std::memcpy(&half, data + index * sizeof half, sizeof half);
            return kernels::widen_f16(half);
        case StoredType::bf16:
            std::memcpy(&half, data + index * sizeof half, sizeof half);
            return kernels::widen_bf16(half);
        default:
            std::memcpy(&single, data + index * sizeof single, sizeof single);
            return single;
    }
}

float scaled(const std::byte* scale_at, std::int32_t code) noexcept {
    float scale = 0.0F;
    std::memcpy(&scale, scale_at, sizeof scale);
    return scale * static_cast<float>(code);
}

std::int32_t half_code(std::byte both, bool high) noexcept {
    return static_cast<std::int32_t>(std::to_integer<std::uint32_t>(both) >> (high ? 4U : 0U) & 0x0FU) - 8;
}

}  // namespace

void write_keys(const kernels::KernelTable& kernels, const BlockLayout& layout, const kernels::Rows& rows,
                std::byte* keys, std::size_t token) noexcept {
    if (kernels::has_codes(layout.key_type)) {
        kernels.quantise_keys({rows, bytes(keys), token, layout.key_type});
    } else {
        kernels.pack_panels({rows, keys, token, kernels::element_type(layout.key_type)});
    }
}

bool write_values(const kernels::KernelTable& kernels, const BlockLayout& layout, const kernels::Rows& rows,
                  std::byte* values, std::size_t token) noexcept {
    if (kernels::has_codes(layout.value_type)) {
        return kernels.quantise_values({rows, bytes(values), token, layout.value_type});
    }
    return kernels.pack_values({rows, values, token, kernels::element_type(layout.value_type)});
}

void clear_panel(const BlockLayout& layout, std::byte* keys, std::byte* values, std::size_t token) noexcept {
    std::memset(keys + token / kPanelTokens * layout.panel_bytes(), 0, layout.panel_bytes());
    const StoredType type = layout.value_type;
    if (!kernels::has_codes(type)) {
        const std::size_t size = kernels::element_bytes(kernels::element_type(type));
        for (std::size_t column = 0; column < layout.columns(); column += kPanelTokens) {
            std::memset(values + kernels::value_index(token, column) * size, 0, kPanelTokens * kPanelTokens * size);
        }
        return;
    }
    for (std::size_t column = 0; column < layout.columns(); column += kPanelTokens) {
        std::memset(values + kernels::value_code_index(type, token, column), 0,
                    kPanelTokens * kPanelTokens / kernels::codes_in_byte(type));
    }
    for (std::size_t group = 0; group < layout.columns(); group += kernels::kValueGroup) {
        std::memset(values + kernels::value_block_bytes(type, group) + token * sizeof(float), 0,
                    kPanelTokens * sizeof(float));
    }
}

void clear_token(const BlockLayout& layout, std::byte* keys, std::byte* values, std::size_t token) noexcept {
    std::byte* const panel = keys + token / kPanelTokens * layout.panel_bytes();
    const std::size_t lane = token % kPanelTokens;
    if (!kernels::has_codes(layout.key_type)) {
        const std::size_t size = kernels::element_bytes(kernels::element_type(layout.key_type));
        for (std::size_t d = 0; d < layout.head_dim; ++d)
            std::memset(panel + (d * kPanelTokens + lane) * size, 0, size);
    } else {
        // all of a panel's lines are rows of 16 lanes of 4 bytes, scales and codes alike
        for (std::size_t at = lane * kernels::kQuadInputs; at < layout.panel_bytes(); at += kernels::kCodeLineBytes) {
            std::memset(panel + at, 0, kernels::kQuadInputs);
        }
    }
    const StoredType type = layout.value_type;
    for (std::size_t column = 0; column < layout.columns(); ++column) {
        if (!kernels::has_codes(type)) {
            const std::size_t size = kernels::element_bytes(kernels::element_type(type));
            std::memset(values + kernels::value_index(token, column) * size, 0, size);
        } else {
            std::byte& code = values[kernels::value_code_index(type, token, column)];
            const bool shared = type == StoredType::int4;
            code &= !shared ? std::byte{0} : kernels::in_high_half(token) ? std::byte{0x0F} : std::byte{0xF0};
        }
    }
    if (!kernels::has_codes(type)) return;
    for (std::size_t group = 0; group < layout.columns(); group += kernels::kValueGroup) {
        std::memset(values + kernels::value_block_bytes(type, group) + token * sizeof(float), 0, sizeof(float));
    }
}

bool holds_nonfinite(const BlockLayout& layout, const std::byte* values) noexcept {
    const StoredType type = layout.value_type;
    const auto any = [&](const std::byte* data, StoredType stored, std::size_t count) noexcept {
        bool found = false;
        for (std::size_t i = 0; i < count; ++i) found |= !std::isfinite(element(data, stored, i));
        return found;
    };
    if (!kernels::has_codes(type)) return any(values, type, kernels::kBlockTokens * layout.columns());
    bool found = false;  // of codes, a scale may be
    for (std::size_t group = 0; group < layout.columns(); group += kernels::kValueGroup) {
        found |= any(values + kernels::value_block_bytes(type, group), StoredType::f32, kernels::kBlockTokens);
    }
    return found;
}

float read_key(const BlockLayout& layout, const std::byte* keys, std::size_t token, std::size_t d) noexcept {
    const std::byte* panel = keys + token / kPanelTokens * layout.panel_bytes();
    const std::size_t lane = token % kPanelTokens;
    const StoredType type = layout.key_type;
    if (!kernels::has_codes(type)) return element(panel, type, d * kPanelTokens + lane);
    const std::byte code = panel[kernels::key_code_index(type, d, lane)];
    return scaled(panel + d / kernels::kCodeGroup * kernels::code_group_bytes(type) + lane * sizeof(float),
                  type == StoredType::int4 ? half_code(code, kernels::in_high_quad(d))
                                           : std::to_integer<std::int32_t>(code) - 128);
}

float read_value(const BlockLayout& layout, const std::byte* values, std::size_t token, std::size_t d) noexcept {
    const StoredType type = layout.value_type;
    if (!kernels::has_codes(type)) return element(values, type, kernels::value_index(token, d));
    const std::byte code = values[kernels::value_code_index(type, token, d)];
    const std::size_t group = d / kernels::kValueGroup * kernels::kValueGroup;
    return scaled(values + kernels::value_block_bytes(type, group) + token * sizeof(float),
                  type == StoredType::int4 ? half_code(code, kernels::in_high_half(token))
                                           : std::int32_t{std::to_integer<std::int8_t>(code)});
}

}  // namespace headlong
