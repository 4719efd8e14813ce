#include "tools/cases/row_ops_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <headlong/rotary.hpp>

#include "engine/context_impl.hpp"
#include "engine/reference/tensor.hpp"
#include "engine/row_ops.hpp"
#include "kernels/half.hpp"

namespace headlong::tools {
namespace {

using Shape = std::vector<std::int64_t>;

std::int64_t product(const Shape& shape, std::size_t first, std::size_t last) {
    return std::accumulate(shape.begin() + static_cast<std::ptrdiff_t>(first),
                           shape.begin() + static_cast<std::ptrdiff_t>(last), std::int64_t{1}, std::multiplies<>());
}

/// The type that the library computes from or to, where a file has this one.
FileType computed(FileType type) { return type == FileType::f64 ? FileType::f32 : type; }

/// What all these cases have: a file, names that must be known, and an output to compare with.
struct Common {
    std::string unknown;  // what the file asks for and this version of the operator does not have; empty: it runs
    FileType type = FileType::f32;  // that Y is computed to: of F64 it is F32
    Shape shape;                    // of Y
    std::vector<double> expected;
    Tolerance tolerance;
};

class Reader {
  public:
    /// `since` is the opset that the operator came with.
    Reader(const CaseFile& file, const char* op, std::int64_t since, std::initializer_list<const char*> inputs,
           std::initializer_list<const char*> attributes)
        : file_(file), op_(op) {
        constexpr std::int64_t kNewestOpset = 28;
        for (const char* key : {"inputs", "outputs"}) {
            for (const std::string& name : file.list(key)) {
                if (!name.empty()) file.at(name);
            }
        }
        for (const FileTensor& tensor : file.file().tensors()) {
            if (tensor.name != "Y" && std::ranges::count(inputs, tensor.name) == 0) not_known("tensor", tensor.name);
        }
        for (const auto& [key, value] : file.file().metadata()) {
            if (key.starts_with("attr.") && std::ranges::count(attributes, key.substr(5)) == 0) {
                not_known("attribute", key.substr(5));
            }
        }
        const std::int64_t opset = file.integer("opset").value_or(kNewestOpset);
        if (opset < since || opset > kNewestOpset) not_known("opset", std::to_string(opset));
        if (const std::string domain = file.text("domain").value_or(""); !domain.empty()) not_known("domain", domain);
        const FileTensor& y = floats("Y");
        common.type = computed(y.type);
        common.shape = y.shape;
        common.expected = to_doubles(y);
        common.tolerance = file.tolerance(y);
    }

    void not_known(const char* kind, const std::string& name) {
        common.unknown +=
            fmt::format("{}{} '{}' of {}", common.unknown.empty() ? "needs " : ", ", kind, one_line(name), op_);
    }

    /// A tensor of floats.
    const FileTensor& floats(const char* name) {
        const FileTensor& tensor = file_.at(name);
        if (tensor.type != FileType::f32 && tensor.type != FileType::f16 && tensor.type != FileType::bf16 &&
            tensor.type != FileType::f64) {
            file_.fail(
                fmt::format("tensor '{}' is {}, its type must be F32, F16, BF16 or F64", name, describe(tensor)));
        }
        return tensor;
    }

    Common common;

  private:
    const CaseFile& file_;
    const char* op_;
};

/// What a tensor of that type holds of these numbers.
std::vector<double> stored(const std::vector<float>& values, FileType type) {
    std::vector<double> result;
    result.reserve(values.size());
    for (const float x : values) {
        switch (type) {
            case FileType::f16:
                result.push_back(reference::widen_f16(kernels::narrow_f16(x)));
                break;
            case FileType::bf16:
                result.push_back(reference::widen_bf16(kernels::narrow_bf16(x)));
                break;
            default:
                result.push_back(static_cast<double>(x));
        }
    }
    return result;
}

// ----------------------------------------------------------------------------------------------------- rotary

struct RotaryProblem {
    Common common;
    std::int64_t batch = 0, heads = 0, length = 0, head_dim = 0;
    bool three_dimensional = false;  // X and Y are [batch, length, heads * head_dim]
    bool by_position = false;        // rows of the tables are chosen by position, not one per row
    RotaryPairing pairing = RotaryPairing::halves;
    FileType type = FileType::f32;  // of X
    std::vector<std::byte> x;
    std::vector<float> cosine, sine;
    std::int64_t entries = 0, half = 0;  // of one sequence's table
    std::vector<std::int64_t> positions;

    Extents<3> extents() const { return {heads, length, head_dim}; }
    Extents<3> strides() const {
        return three_dimensional ? Extents<3>{head_dim, heads * head_dim, 1} : dense_strides<3>(extents());
    }
};

RotaryProblem read_rotary(const CaseFile& file) {
    Reader reader(file, "RotaryEmbedding", 23, {"X", "cos_cache", "sin_cache", "position_ids"},
                  {"interleaved", "num_heads", "rotary_embedding_dim"});
    RotaryProblem p;
    const FileTensor& x = reader.floats("X");
    p.type = computed(x.type);
    p.x.assign(x.bytes.begin(), x.bytes.end());
    if (p.type != x.type) {
        const std::vector<float> rounded = to_floats(x);
        const auto bytes = std::as_bytes(std::span(rounded));
        p.x.assign(bytes.begin(), bytes.end());
    }
    p.three_dimensional = x.shape.size() == 3;
    if (x.shape.size() < 3 || x.shape.size() > 4) {
        file.fail(fmt::format("tensor 'X' is {}, it must have 3 or 4 dimensions", describe(x)));
    }
    p.batch = x.shape[0];
    if (p.three_dimensional) {
        if (!file.text("attr.num_heads")) file.fail("attribute 'num_heads' is missing, X of 3 dimensions needs it");
        p.heads = *file.integer("attr.num_heads");
        if (p.heads < 1 || x.shape[2] % p.heads != 0) {
            file.fail(
                fmt::format("attribute 'num_heads' is {}, it must divide the {} columns of X", p.heads, x.shape[2]));
        }
        p.length = x.shape[1];
        p.head_dim = x.shape[2] / p.heads;
    } else {
        p.heads = x.shape[1];
        p.length = x.shape[2];
        p.head_dim = x.shape[3];
    }
    file.expect_shape(file.at("Y"), x.shape);

    const std::int64_t given = file.integer("attr.rotary_embedding_dim").value_or(0);
    const std::int64_t rotary_dim = given == 0 ? p.head_dim : given;
    if (rotary_dim < 2 || rotary_dim > p.head_dim || rotary_dim % 2 != 0) {
        file.fail(
            fmt::format("attribute 'rotary_embedding_dim' is {}, an even number up to the head size of {} is "
                        "allowed",
                        given, p.head_dim));
    }
    p.half = rotary_dim / 2;
    const std::int64_t interleaved = file.integer("attr.interleaved").value_or(0);
    if (interleaved != 0 && interleaved != 1) {
        file.fail(fmt::format("attribute 'interleaved' is {}, 0 and 1 are allowed", interleaved));
    }
    p.pairing = interleaved == 1 ? RotaryPairing::interleaved : RotaryPairing::halves;

    const FileTensor& cosine = reader.floats("cos_cache");
    const FileTensor& sine = reader.floats("sin_cache");
    file.expect_shape(sine, cosine.shape);
    if (const FileTensor* positions = file.find("position_ids")) {
        p.by_position = true;
        file.expect_shape(*positions, {p.batch, p.length});
        p.entries = cosine.shape.empty() ? 0 : cosine.shape[0];
        file.expect_shape(cosine, {p.entries, p.half});
        p.positions = to_int64s(*positions);
    } else {
        p.entries = p.length;
        file.expect_shape(cosine, {p.batch, p.length, p.half});
        p.positions.resize(static_cast<std::size_t>(p.length));
        std::iota(p.positions.begin(), p.positions.end(), std::int64_t{0});
    }
    p.cosine = to_floats(cosine);
    p.sine = to_floats(sine);
    p.common = std::move(reader.common);
    return p;
}

Outcome run_rotary(const RotaryProblem& p, Context& context) {
    const std::int64_t batch = p.common.expected.empty() ? 0 : p.batch;  // with an extent of 0 it may be anything
    const std::size_t sequence_elements = batch == 0 ? 0 : p.common.expected.size() / static_cast<std::size_t>(batch);
    const std::size_t x_sequence = sequence_elements * size_of(p.type);
    const std::size_t y_sequence = sequence_elements * size_of(p.common.type);
    const auto rotate_all = [&](const std::vector<std::byte>& x, std::vector<std::byte>& y) {
        for (std::int64_t b = 0; b < batch; ++b) {
            const std::int64_t table = p.by_position ? 0 : b * p.entries * p.half;
            const RotaryTable tables{InputTensor<2>::dense(p.cosine.data() + table, {p.entries, p.half}),
                                     InputTensor<2>::dense(p.sine.data() + table, {p.entries, p.half}), p.pairing};
            const auto sequence = static_cast<std::size_t>(b);
            const auto length = static_cast<std::size_t>(p.length);
            rotate(context, tables, {x.data() + sequence * x_sequence, dtype_of(p.type), p.extents(), p.strides()},
                   std::span(p.positions).subspan(p.by_position ? sequence * length : 0, length),
                   {y.data() + sequence * y_sequence, dtype_of(p.common.type), p.extents(), p.strides()});
        }
    };
    Comparison comparison;
    const auto compare = [&](const char* path, const std::vector<std::byte>& y) {
        comparison.compare("Y", path, p.common.shape,
                           to_doubles({.name = "Y", .type = p.common.type, .shape = p.common.shape, .bytes = y}),
                           p.common.expected, p.common.tolerance);
    };
    std::vector<std::byte> y(static_cast<std::size_t>(batch) * y_sequence, std::byte{0xFF});  // NaN
    rotate_all(p.x, y);
    compare("plain call", y);
    if (p.type == p.common.type) {
        y = p.x;
        rotate_all(y, y);
        compare("in place", y);
    }
    return comparison.outcome();
}

// ----------------------------------------------------------------------------------------- normalisation, gates

struct RmsNormProblem {
    Common common;
    std::int64_t rows = 0, columns = 0;
    float epsilon = 0.0F;
    std::vector<float> x, scale;
};

RmsNormProblem read_rms_norm(const CaseFile& file) {
    // stash_type names the type of the inner computation: float32 is what we have
    Reader reader(file, "RMSNormalization", 23, {"X", "scale"}, {"axis", "epsilon", "stash_type"});
    RmsNormProblem p;
    const FileTensor& x = reader.floats("X");
    const auto rank = static_cast<std::int64_t>(x.shape.size());
    const std::int64_t axis = file.integer("attr.axis").value_or(-1);
    if (axis < -rank || axis >= rank) {
        file.fail(fmt::format("attribute 'axis' is {}, {} to {} are allowed", axis, -rank, rank - 1));
    }
    const auto first = static_cast<std::size_t>(axis < 0 ? axis + rank : axis);
    if (x.count() != 0) {  // with an extent of 0 the others may be anything
        p.rows = product(x.shape, 0, first);
        p.columns = product(x.shape, first, x.shape.size());
    }
    const double epsilon = file.number("attr.epsilon").value_or(1e-5);
    if (epsilon < 0.0 || epsilon > 1e30) {
        file.fail(fmt::format("attribute 'epsilon' is {}, 0 to 1e30 are allowed", epsilon));
    }
    p.epsilon = static_cast<float>(epsilon);
    const FileTensor& scale = reader.floats("scale");
    file.expect_shape(file.at("Y"), x.shape);
    const Shape normalised(x.shape.begin() + static_cast<std::ptrdiff_t>(first), x.shape.end());
    if (scale.shape != normalised) reader.not_known("broadcast", "scale");
    p.x = to_floats(x);
    p.scale = to_floats(scale);
    p.common = std::move(reader.common);
    return p;
}

Outcome compare_floats(const Common& common, const std::vector<float>& y) {
    Comparison comparison;
    comparison.compare("Y", "plain call", common.shape, stored(y, common.type), common.expected, common.tolerance);
    return comparison.outcome();
}

Outcome run_rms_norm(const RmsNormProblem& p, Context& context) {
    std::vector<float> y(p.x.size(), std::numeric_limits<float>::quiet_NaN());
    if (!y.empty()) {
        rms_norm(context.impl(), p.x.data(), p.rows, p.columns, p.scale.data(), p.epsilon, y.data());
    }
    return compare_floats(p.common, y);
}

struct SwiGluProblem {
    Common common;
    std::vector<float> gate, up;
};

SwiGluProblem read_swiglu(const CaseFile& file) {
    Reader reader(file, "SwiGLU", 28, {"A", "B"}, {"alpha"});
    SwiGluProblem p;
    if (const double alpha = file.number("attr.alpha").value_or(1.0); alpha != 1.0) {
        reader.not_known("alpha", fmt::format("{}", alpha));
    }
    const FileTensor& gate = reader.floats("A");
    const FileTensor& up = reader.floats("B");
    file.expect_shape(up, gate.shape);
    file.expect_shape(file.at("Y"), gate.shape);
    p.gate = to_floats(gate);
    p.up = to_floats(up);
    p.common = std::move(reader.common);
    return p;
}

Outcome run_swiglu(const SwiGluProblem& p, Context& context) {
    std::vector<float> y(p.gate.size(), std::numeric_limits<float>::quiet_NaN());
    activate(context.impl(), kernels::Activation::silu, p.gate.data(), p.up.data(), 1, static_cast<std::int64_t>(y.size()), y.data());
    return compare_floats(p.common, y);
}

/// A case that runs unless something of it is missing.
template <class Problem>
Case case_of(std::string name, Problem read, Outcome (*run)(const Problem&, Context&)) {
    const auto problem = std::make_shared<const Problem>(std::move(read));
    return {std::move(name), [problem, run](Context& context, const KvTypes&) {
                const std::string& why = problem->common.unknown;
                return why.empty() ? run(*problem, context) : skipped(why);
            }};
}

}  // namespace

Case rotary_case(std::string name, const CaseFile& file) {
    return case_of(std::move(name), read_rotary(file), run_rotary);
}

Case rms_norm_case(std::string name, const CaseFile& file) {
    return case_of(std::move(name), read_rms_norm(file), run_rms_norm);
}

Case swiglu_case(std::string name, const CaseFile& file) {
    return case_of(std::move(name), read_swiglu(file), run_swiglu);
}

}  // namespace headlong::tools
