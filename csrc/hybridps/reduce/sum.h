// hybridps/reduce/sum.h: combine n inputs element by element, in order, in one pass.
//
// Threads  any; no state but the kernel table, chosen once by CPU features.
// Arith.   Elements are combined left to right: ((x0 op x1) op x2) ... The accumulator is fp32 for float16, bfloat16
//          and the float8 kinds, and the element's own type otherwise (integers wrap). The result is rounded once,
//          to nearest even, after the scale. Bits never depend on the instruction set, alignment or count.
// Source   docs/architecture.md, Bits: each stage accumulates in fp32 and rounds once.
#pragma once

#include <cstddef>
#include <span>

#include "hybridps/core/dtype.h"

namespace hybridps::reduce {

/// The layout of an input's elements, if they do not lie one after the other in combine()'s type. Threads: any.
class Format {
 public:
  virtual ~Format() = default;
  /// Writes elements [first, first + count) to `out`, in combine()'s type.
  virtual void expand(const std::byte* data, std::size_t first, std::size_t count, std::byte* out) const noexcept = 0;
};

/// One input of combine().
struct Input {
  const std::byte* data = nullptr;  // count elements, any alignment
  double premul = 1.0;              // PREMUL_SUM: multiplied in the accumulator's type before the add
  const Format* format = nullptr;   // null: plain elements. Else `out` of combine() must not overlap the data
};

/// The last step on the accumulator, before rounding into the output.
struct Finish {
  enum class Scaling { kNone, kMultiply, kDivideTruncate } kind = Scaling::kNone;
  double factor = 1.0;    // kMultiply: floating types only, e.g. AVG's 1/world at the node stage
  long long divisor = 1;  // kDivideTruncate: integer types only, e.g. AVG's world at the owner stage
};

/// out[i] = finish(inputs[0][i] op inputs[1][i] op ...). `out` may be one of the inputs' data exactly, and may not
/// otherwise overlap one. inputs.size() >= 1; with one input it converts, scales and copies.
///   kAvg and kPremulSum add (kPremulSum honours Input::premul; every other operation ignores it).
///   kBool: SUM, MAX and BOR are logical or; PRODUCT, MIN and BAND logical and; BXOR xor; AVG or.
///   MIN and MAX propagate NaN, as torch does.
/// Precondition (asserted): core::is_reducible(dtype, op).
void combine(std::span<const Input> inputs, std::byte* out, std::size_t count, core::DType dtype, core::ReduceOp op,
             Finish finish = {});

/// Name of the instruction set chosen for this process: "scalar", "avx2", "avx512" or "neon".
const char* instruction_set() noexcept;

}  // namespace hybridps::reduce
