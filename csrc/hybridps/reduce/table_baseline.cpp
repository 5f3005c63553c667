// The kernels for every CPU of the architecture, and the reference that the other tables are compared with.
#include "hybridps/reduce/dispatch.h"
#include "hybridps/reduce/kernels.h"

namespace hybridps::reduce {

constinit const SumKernels kBaselineTable = make_table<NoLanes>("scalar");

}  // namespace hybridps::reduce
