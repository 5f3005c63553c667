// Compiled with the flags of avx2: see the rule in kernels.h.
#include "hybridps/compress/kernels_impl.h"

namespace hybridps::compress {

constinit const KernelTable kAvx2Table = make_table("avx2");

}  // namespace hybridps::compress
