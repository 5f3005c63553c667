// hybridps/reduce/dispatch.h: the kernel tables, one per instruction set. Private to the room and its tests.
//
// Threads  any; the tables are constants.
// Rule     a file compiled with instruction-set flags defines one table and nothing else with external linkage, and
//          calls no inline function of the standard library. The linker keeps one copy of such a function for the whole
//          program, and might keep a copy that this CPU cannot run.
#pragma once

#include <cstddef>
#include <span>

#include "hybridps/core/dtype.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::reduce {

/// combine() for one dtype and operation; n >= 1. Reads every input once and writes `out` once.
using Kernel = void (*)(const Input* inputs, std::size_t n, std::byte* out, std::size_t count, const Finish& finish);

struct SumKernels {
  const char* name = nullptr;  // the result of instruction_set()
  // By dtype and operation. nullptr where core::is_reducible() is false, and for complex sums: combine() runs these as
  // sums of twice as many real numbers.
  Kernel kernels[core::kDTypeCount][core::kReduceOpCount] = {};
};

extern const SumKernels kBaselineTable;  // "scalar": vector instructions only where the compiler finds them
#if defined(__x86_64__)
extern const SumKernels kAvx2Table;
extern const SumKernels kAvx512Table;
#elif defined(__aarch64__)
extern const SumKernels kNeonTable;
#endif

/// The tables that this CPU and its operating system can run, slowest first. Never empty.
std::span<const SumKernels* const> available_tables() noexcept;

/// As combine(), with the kernels of one table.
void combine_with(const SumKernels& table, std::span<const Input> inputs, std::byte* out, std::size_t count,
                  core::DType dtype, core::ReduceOp op, Finish finish);

}  // namespace hybridps::reduce
