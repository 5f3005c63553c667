#include "hybridps/core/dtype.h"

namespace hybridps::core {

std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUint8:
    case DType::kInt8:
    case DType::kBool:
    case DType::kFloat8E4M3fn:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3fnuz:
    case DType::kFloat8E5M2fnuz:
    case DType::kFloat8E8M0fnu:
    case DType::kBytes: return 1;
    case DType::kInt16:
    case DType::kUint16:
    case DType::kFloat16:
    case DType::kBfloat16: return 2;
    case DType::kInt32:
    case DType::kUint32:
    case DType::kFloat32: return 4;
    case DType::kInt64:
    case DType::kUint64:
    case DType::kFloat64:
    case DType::kComplex64: return 8;
    case DType::kComplex128: return 16;
  }
  return 1;
}

std::string_view name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUint8: return "uint8";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kFloat16: return "fp16";
    case DType::kBfloat16: return "bf16";
    case DType::kFloat32: return "fp32";
    case DType::kFloat64: return "fp64";
    case DType::kComplex64: return "complex64";
    case DType::kComplex128: return "complex128";
    case DType::kBool: return "bool";
    case DType::kUint16: return "uint16";
    case DType::kUint32: return "uint32";
    case DType::kUint64: return "uint64";
    case DType::kFloat8E4M3fn: return "fp8_e4m3fn";
    case DType::kFloat8E5M2: return "fp8_e5m2";
    case DType::kFloat8E4M3fnuz: return "fp8_e4m3fnuz";
    case DType::kFloat8E5M2fnuz: return "fp8_e5m2fnuz";
    case DType::kFloat8E8M0fnu: return "fp8_e8m0fnu";
    case DType::kBytes: return "bytes";
  }
  return "unknown";
}

std::string_view name_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kAvg: return "avg";
    case ReduceOp::kProduct: return "product";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kBand: return "band";
    case ReduceOp::kBor: return "bor";
    case ReduceOp::kBxor: return "bxor";
    case ReduceOp::kPremulSum: return "premul_sum";
    case ReduceOp::kNone: return "none";
    case ReduceOp::kMomentumStep: return "momentum step";
    case ReduceOp::kNesterovStep: return "nesterov step";
    case ReduceOp::kStateLoad: return "outer state load";
    case ReduceOp::kStateRead: return "outer state read";
  }
  return "unknown";
}

bool is_floating(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBfloat16:
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kFloat8E4M3fn:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3fnuz:
    case DType::kFloat8E5M2fnuz: return true;
    default: return false;
  }
}

bool is_reducible(DType dtype, ReduceOp op) noexcept {
  if (dtype == DType::kBytes || dtype == DType::kFloat8E8M0fnu || op == ReduceOp::kNone || is_outer(op)) return false;
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  switch (op) {
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor: return !is_floating(dtype);
    case ReduceOp::kMin:
    case ReduceOp::kMax: return !complex;
    case ReduceOp::kPremulSum: return is_floating(dtype);
    default: return true;
  }
}

}  // namespace hybridps::core
