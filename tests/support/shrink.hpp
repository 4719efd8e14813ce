// A case that fails, made small: of two that fail the smaller one says more.
#pragma once

#include <cstddef>
#include <functional>

#include "tests/support/attention_case.hpp"

namespace headlong::test {

/// Takes away as much as it can while the case still fails: sequences, heads, rows, keys and dims (down to one of
/// each), features one by one, element types other than f32, strides. Greedy, until nothing more can go by itself or
/// `most_tries` cases have been tried. `still_fails` is asked about valid calls only, and not about `c` itself; it must
/// not write to the memory of a case, which others share (with_own_memory()).
AttentionCase shrink(AttentionCase c, const std::function<bool(const AttentionCase&)>& still_fails,
                     std::size_t most_tries = 3000);

}  // namespace headlong::test
