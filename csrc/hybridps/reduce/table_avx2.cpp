// Compiled with -mavx2 -mf16c: see the rule in dispatch.h.
#include "hybridps/reduce/dispatch.h"
#include "hybridps/reduce/lanes_avx2.h"

#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mf16c"
#endif

namespace hybridps::reduce {

constinit const SumKernels kAvx2Table = make_table<Avx2Lanes>("avx2");

}  // namespace hybridps::reduce
