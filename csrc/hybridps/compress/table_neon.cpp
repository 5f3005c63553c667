// Compiled with the flags of neon: see the rule in kernels.h.
#include "hybridps/compress/kernels_impl.h"

namespace hybridps::compress {

constinit const KernelTable kNeonTable = make_table("neon");

}  // namespace hybridps::compress
