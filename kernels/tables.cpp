// Collects the tables of the units that this build has. Compiled for the baseline.
#include "kernels/kernel_table.hpp"

namespace headlong {

namespace generic {
extern const kernels::KernelTable table;
}
#if HEADLONG_HAVE_AVX2
namespace avx2 {
extern const kernels::KernelTable table;
}
#endif
#if HEADLONG_HAVE_AVX2VNNI
namespace avx2vnni {
extern const kernels::KernelTable table;
}
#endif
#if HEADLONG_HAVE_AVX512
namespace avx512 {
extern const kernels::KernelTable table;
}
#endif
#if HEADLONG_HAVE_AVX512VNNI
namespace avx512vnni {
extern const kernels::KernelTable table;
}
#endif
#if HEADLONG_HAVE_NEON
namespace neon {
extern const kernels::KernelTable table;
}
#endif
#if HEADLONG_HAVE_NEONDOT
namespace neondot {
extern const kernels::KernelTable table;
}
#endif

namespace kernels {

constinit const KernelTable* const generic_table = &generic::table;
#if HEADLONG_HAVE_AVX2
constinit const KernelTable* const avx2_table = &avx2::table;
#else
constinit const KernelTable* const avx2_table = nullptr;
#endif
#if HEADLONG_HAVE_AVX2VNNI
constinit const KernelTable* const avx2vnni_table = &avx2vnni::table;
#else
constinit const KernelTable* const avx2vnni_table = nullptr;
#endif
#if HEADLONG_HAVE_AVX512
constinit const KernelTable* const avx512_table = &avx512::table;
#else
constinit const KernelTable* const avx512_table = nullptr;
#endif
#if HEADLONG_HAVE_AVX512VNNI
constinit const KernelTable* const avx512vnni_table = &avx512vnni::table;
#else
constinit const KernelTable* const avx512vnni_table = nullptr;
#endif
#if HEADLONG_HAVE_NEON
constinit const KernelTable* const neon_table = &neon::table;
#else
constinit const KernelTable* const neon_table = nullptr;
#endif
#if HEADLONG_HAVE_NEONDOT
constinit const KernelTable* const neondot_table = &neondot::table;
#else
constinit const KernelTable* const neondot_table = nullptr;
#endif

}  // namespace kernels
}  // namespace headlong
