// Random combinations of everything that attention does: features, shapes, strides, element types.
#pragma once

#include "tests/support/any_tensor.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/random.hpp"

namespace headlong::test {

Element draw_element(Random& random);

/// A case of bounded cost, at most some ten million floating-point operations.
AttentionCase draw_case(Random& random);

/// A NaN that some rows may see: it must reach exactly those.
void draw_visible_nan(const AttentionCase& c, Random& random);

}  // namespace headlong::test
