// The kernels for every CPU of the architecture. The reference for all other tables.
#include "hybridps/reduce/dispatch.h"
#include "hybridps/reduce/kernels.h"

namespace hybridps::reduce {

constinit const SumKernels kBaselineTable = make_table<NoLanes>("scalar");

}  // namespace hybridps::reduce
