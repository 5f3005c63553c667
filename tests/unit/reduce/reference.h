// tests/unit/reduce/reference.h: combine() again, slowly and by other means, and data to try it on.
//
// Narrow floating types are decoded with ldexp and encoded by searching the sorted list of their values. fp32
// steps are computed in double and rounded once more: a double has more than twice the bits and two to spare,
// so that the second rounding changes nothing, and no compiler can fuse a multiplication with an addition
// across it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "hybridps/core/dtype.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::reduce::testing {

inline constexpr core::DType kAllDTypes[] = {
    core::DType::kUint8,      core::DType::kInt8,           core::DType::kInt16,         core::DType::kInt32,
    core::DType::kInt64,      core::DType::kFloat16,        core::DType::kBfloat16,      core::DType::kFloat32,
    core::DType::kFloat64,    core::DType::kComplex64,      core::DType::kComplex128,    core::DType::kBool,
    core::DType::kUint16,     core::DType::kUint32,         core::DType::kUint64,        core::DType::kFloat8E4M3fn,
    core::DType::kFloat8E5M2, core::DType::kFloat8E4M3fnuz, core::DType::kFloat8E5M2fnuz};

inline constexpr core::ReduceOp kAllOps[] = {core::ReduceOp::kSum, core::ReduceOp::kAvg,  core::ReduceOp::kProduct,
                                             core::ReduceOp::kMin, core::ReduceOp::kMax,  core::ReduceOp::kBand,
                                             core::ReduceOp::kBor, core::ReduceOp::kBxor, core::ReduceOp::kPremulSum};

/// What reduce/sum.h says, element by element. One input with nothing to do is copied.
void reference_combine(const std::vector<Input>& inputs, std::byte* out, std::size_t count, core::DType dtype,
                       core::ReduceOp op, Finish finish = {});

/// Value of one element of a real floating type.
double decode(core::DType dtype, std::uint64_t code);
/// Code of the nearest value, ties to even; overflow as torch's cast. Any NaN gives the positive quiet one.
std::uint64_t encode(core::DType dtype, double value);

std::uint64_t load_code(core::DType dtype, const std::byte* from);
void store_code(core::DType dtype, std::byte* to, std::uint64_t code);

/// How wild the numbers are.
enum class Data {
  kOrdinary,  // of similar size, so that sums and products round but rarely overflow
  kAnyBits,   // every bit pattern: NaNs, infinities, subnormals, extremes; bools other than 0 and 1
};
std::vector<std::byte> random_elements(std::mt19937_64& random, core::DType dtype, std::size_t count, Data data);

/// "bf16 sum n=3", for messages.
std::string describe(core::DType dtype, core::ReduceOp op, std::size_t n);
/// Empty when the elements are the same bit for bit, else where they first differ and how.
std::string difference(core::DType dtype, const std::byte* got, const std::byte* want, std::size_t count);

}  // namespace hybridps::reduce::testing
