// Compiled with the flags of avx512: see the rule in kernels.h.
#include "hybridps/compress/kernels_impl.h"

namespace hybridps::compress {

constinit const KernelTable kAvx512Table = make_table("avx512");

}  // namespace hybridps::compress
