// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq: see the rule in dispatch.h.
#include "hybridps/reduce/dispatch.h"
#include "hybridps/reduce/lanes_avx512.h"

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "compile this file with -mavx512f -mavx512bw -mavx512vl -mavx512dq"
#endif

namespace hybridps::reduce {

constinit const SumKernels kAvx512Table = make_table<Avx512Lanes>("avx512");

}  // namespace hybridps::reduce
