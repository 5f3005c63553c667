// Compiled with the flags of scalar: see the rule in kernels.h.
#include "hybridps/compress/kernels_impl.h"

namespace hybridps::compress {

constinit const KernelTable kBaselineTable = make_table("scalar");

}  // namespace hybridps::compress
