// hybridps/core/dtype.h: element types and reduce operations, with torch's meaning. Values travel on the wire:
// append only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hybridps::core {

enum class DType : std::uint8_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kBfloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kUint16 = 12,
  kUint32 = 13,
  kUint64 = 14,
  kFloat8E4M3fn = 15,
  kFloat8E5M2 = 16,
  kFloat8E4M3fnuz = 17,
  kFloat8E5M2fnuz = 18,
  kFloat8E8M0fnu = 19,  // moved only, never reduced
  kBytes = 20,          // opaque bytes: moved only
};
inline constexpr std::uint8_t kDTypeCount = 21;

enum class ReduceOp : std::uint8_t {
  kSum = 0,
  kAvg = 1,
  kProduct = 2,
  kMin = 3,
  kMax = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7,
  kPremulSum = 8,
  kNone = 9,  // operations that only move bytes
  // Outer operations: sums of an allreduce that the owners turn into another result, with the state that the owners
  // keep (outer/state.h). No kernel has them.
  kMomentumStep = 10,  // average, then a step of SGD with momentum
  kNesterovStep = 11,  // average, then a step of SGD with Nesterov's momentum
  kStateLoad = 12,     // the sum becomes the kept state
  kStateRead = 13,     // the kept state becomes the result
};
inline constexpr std::uint8_t kReduceOpCount = 14;

/// Bytes per element.
std::size_t size_of(DType dtype) noexcept;
/// "fp32", "bf16", "int64", ...
std::string_view name_of(DType dtype) noexcept;
/// "sum", "avg", ...
std::string_view name_of(ReduceOp op) noexcept;
/// Whether owners turn the sum into another result.
constexpr bool is_outer(ReduceOp op) noexcept { return op >= ReduceOp::kMomentumStep; }
/// The operation that combines contributions: avg or sum for an outer operation, else `op` itself.
constexpr ReduceOp combined_by(ReduceOp op) noexcept {
  if (!is_outer(op)) return op;
  return op <= ReduceOp::kNesterovStep ? ReduceOp::kAvg : ReduceOp::kSum;
}
/// float16, bfloat16, float32, float64, the float8 kinds, complex64 and complex128.
bool is_floating(DType dtype) noexcept;
/// Whether the pair is defined. Not defined: BAND/BOR/BXOR on floating types, MIN/MAX on complex types, PREMUL_SUM on
/// other than floating types, everything on kFloat8E8M0fnu and kBytes, and outer operations (use combined_by()).
bool is_reducible(DType dtype, ReduceOp op) noexcept;

}  // namespace hybridps::core
