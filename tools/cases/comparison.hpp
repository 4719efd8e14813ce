// Compares what was computed with what a case expects, and words the difference in one line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <headlong/kv_cache.hpp>

#include "engine/reference/attention.hpp"
#include "tools/cases/outcome.hpp"

namespace headlong::tools {

/// An element may be wrong by absolute + relative * |expected|. Equal infinities match; NaN matches only NaN.
struct Tolerance {
    double absolute = 0.0;
    double relative = 0.0;
    /// If given: of all finite errors the root mean square may be this + relative * that of what is expected.
    std::optional<double> rms = {};
};

/// For attention over plain tensors or caches of such types, against the reference on what they hold.
Tolerance output_tolerance(const reference::AttentionResult& expected, const KvTypes& types);
Tolerance lse_tolerance(const reference::Magnitudes& magnitudes, const KvTypes& types);

/// "Y[0, 2, 5]": an element of a row-major shape.
std::string element_name(const std::string& tensor, std::span<const std::int64_t> shape, std::size_t flat);

/// Collects the comparisons of one case.
class Comparison {
  public:
    /// `tensor` names what is compared, `path` how it was computed. got and expected have the shape's elements.
    void compare(const std::string& tensor, const std::string& path, std::span<const std::int64_t> shape,
                 std::span<const double> got, std::span<const double> expected, Tolerance tolerance);
    /// Something else that must hold and does not. Only the first reason is kept.
    void fail(const std::string& why);

    Outcome outcome() const;

  private:
    double max_abs_err_ = 0.0;
    std::string why_;
};

}  // namespace headlong::tools
