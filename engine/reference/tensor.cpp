#include "engine/reference/tensor.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include <headlong/error.hpp>

namespace headlong::reference {

namespace {

// Calls visit(offset in elements) for every element of a strided shape, in row-major order.
void for_each_offset(const std::vector<std::int64_t>& extents, const std::vector<std::int64_t>& strides,
                     std::size_t dimension, std::int64_t offset, const std::function<void(std::int64_t)>& visit) {
    if (dimension == extents.size()) {
        visit(offset);
        return;
    }
    for (std::int64_t i = 0; i < extents[dimension]; ++i) {
        for_each_offset(extents, strides, dimension + 1, offset + i * strides[dimension], visit);
    }
}

template <typename Element>
Element load(const void* data, std::int64_t offset) {
    Element element;
    std::memcpy(&element, static_cast<const Element*>(data) + offset, sizeof(Element));
    return element;
}

double load_float(const void* data, DType type, std::int64_t offset) {
    switch (type) {
        case DType::f32:
            return static_cast<double>(load<float>(data, offset));
        case DType::f16:
            return widen_f16(load<std::uint16_t>(data, offset));
        case DType::bf16:
            return widen_bf16(load<std::uint16_t>(data, offset));
    }
    throw InvalidArgument("reference: unknown element type");
}

// A format with that many bits of mantissa (the leading one not counted) and that smallest exponent of a normal number.
std::uint16_t narrow(double value, int mantissa_bits, int smallest, std::uint16_t infinity) noexcept {
    const std::uint16_t sign = std::signbit(value) ? 0x8000U : 0U;
    // the quiet NaN that the library writes: no sign, no payload
    if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | (1U << (mantissa_bits - 1)));
    if (value == 0.0) return sign;
    if (std::isinf(value)) return sign | infinity;
    // in units of the last place; a mantissa that rounds up to the next power of two carries into the exponent, from
    // subnormal to normal and from the largest number to infinity as well
    const int exponent = std::max(std::ilogb(value), smallest);
    const double mantissa = std::nearbyint(std::ldexp(std::abs(value), mantissa_bits - exponent));
    const double bits = std::ldexp(exponent - smallest, mantissa_bits) + mantissa;
    return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(std::min(bits, static_cast<double>(infinity))));
}

}  // namespace

std::uint16_t narrow_f16(double value) noexcept { return narrow(value, 10, -14, 0x7C00U); }

std::uint16_t narrow_bf16(double value) noexcept { return narrow(value, 7, -126, 0x7F80U); }

double root_mean_square(std::span<const double> values) {
    double sum = 0.0;
    std::size_t count = 0;
    for (const double value : values) {
        if (!std::isfinite(value)) continue;
        sum += value * value;
        ++count;
    }
    return count == 0 ? 0.0 : std::sqrt(sum / static_cast<double>(count));
}

std::size_t element_count(const std::vector<std::int64_t>& extents) {
    std::size_t count = 1;
    for (const std::int64_t extent : extents) {
        if (extent < 0) throw InvalidArgument("reference: negative extent " + std::to_string(extent));
        count *= static_cast<std::size_t>(extent);
    }
    return count;
}

Tensor::Tensor(std::vector<std::int64_t> shape, double fill)
    : extents(std::move(shape)), values(element_count(extents), fill) {}

Tensor::Tensor(std::vector<std::int64_t> shape, std::vector<double> elements)
    : extents(std::move(shape)), values(std::move(elements)) {
    if (values.size() != element_count(extents)) {
        throw InvalidArgument("reference: " + std::to_string(values.size()) + " elements for a shape of " +
                              std::to_string(element_count(extents)));
    }
}

double widen_f16(std::uint16_t bits) noexcept {
    const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
    const int exponent = (bits >> 10U) & 0x1F;
    const int mantissa = bits & 0x3FF;
    if (exponent == 0) return sign * std::ldexp(mantissa, -24);
    if (exponent == 31) {
        return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                             : std::numeric_limits<double>::quiet_NaN();
    }
    return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

double widen_bf16(std::uint16_t bits) noexcept {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16U;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return static_cast<double>(value);
}

Tensor widen(const void* data, DType type, std::vector<std::int64_t> extents,
             const std::vector<std::int64_t>& strides) {
    Tensor result(std::move(extents));
    std::size_t next = 0;
    for_each_offset(result.extents, strides, 0, 0,
                    [&](std::int64_t offset) { result.values[next++] = load_float(data, type, offset); });
    return result;
}

Mask widen(const AttentionMask& mask) {
    const auto rank = static_cast<std::ptrdiff_t>(mask.rank);
    std::vector<std::int64_t> extents(mask.extents.begin(), mask.extents.begin() + rank);
    const std::vector<std::int64_t> strides(mask.strides.begin(), mask.strides.begin() + rank);
    const bool last_q = mask.keys == AttentionMask::Keys::last_q;
    switch (mask.type) {
        case AttentionMask::Type::f32:
            return {widen(mask.data, DType::f32, std::move(extents), strides), false, last_q};
        case AttentionMask::Type::f16:
            return {widen(mask.data, DType::f16, std::move(extents), strides), false, last_q};
        case AttentionMask::Type::bf16:
            return {widen(mask.data, DType::bf16, std::move(extents), strides), false, last_q};
        case AttentionMask::Type::boolean:
            break;
    }
    Mask result{Tensor(std::move(extents)), true, last_q};
    std::size_t next = 0;
    for_each_offset(result.values.extents, strides, 0, 0, [&](std::int64_t offset) {
        result.values.values[next++] = load<std::uint8_t>(mask.data, offset) != 0 ? 1.0 : 0.0;
    });
    return result;
}

}  // namespace headlong::reference
