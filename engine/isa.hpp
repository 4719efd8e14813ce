// Which kernels this processor can run.
#pragma once

#include <headlong/context.hpp>

#include "kernels/kernel_table.hpp"

namespace headlong {

/// The kernels of an instruction set. Throws Unsupported if this build has none for it.
const kernels::KernelTable& table_of(Isa isa);

/// Whether this build has kernels for it.
bool is_built(Isa isa) noexcept;

/// Whether it is an instruction set of the architecture that this build is for.
bool is_of_this_architecture(Isa isa) noexcept;

/// Whether the processor and the operating system can run it; HEADLONG_ISA plays no part.
bool is_supported(Isa isa) noexcept;

}  // namespace headlong
