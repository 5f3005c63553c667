// Compiled for AArch64 only, with the baseline's flags.
#include "hybridps/reduce/dispatch.h"
#include "hybridps/reduce/lanes_neon.h"

#if !defined(__aarch64__)
#error "compile this file for AArch64"
#endif

namespace hybridps::reduce {

constinit const SumKernels kNeonTable = make_table<NeonLanes>("neon");

}  // namespace hybridps::reduce
