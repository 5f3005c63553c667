#include "hybridps/core/dtype.h"

#include <set>
#include <string_view>

#include "tests/support/catch.h"

using namespace hybridps::core;

TEST_CASE("core/dtype: every type has a size and a name of its own", "[core][fast]") {
  std::set<std::string_view> names;
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::size_t size = size_of(dtype);
    CHECK((size == 1 || size == 2 || size == 4 || size == 8 || size == 16));
    CHECK(name_of(dtype) != "unknown");
    names.insert(name_of(dtype));
  }
  CHECK(names.size() == kDTypeCount);
  CHECK(name_of(static_cast<DType>(200)) == "unknown");
}

TEST_CASE("core/dtype: sizes are torch's", "[core][fast]") {
  CHECK(size_of(DType::kBool) == 1);
  CHECK(size_of(DType::kBfloat16) == 2);
  CHECK(size_of(DType::kFloat32) == 4);
  CHECK(size_of(DType::kComplex64) == 8);
  CHECK(size_of(DType::kComplex128) == 16);
  CHECK(size_of(DType::kFloat8E8M0fnu) == 1);
}

TEST_CASE("core/dtype: every operation has a name of its own", "[core][fast]") {
  std::set<std::string_view> names;
  for (int i = 0; i < kReduceOpCount; ++i) names.insert(name_of(static_cast<ReduceOp>(i)));
  CHECK(names.size() == kReduceOpCount);
  CHECK_FALSE(names.contains("unknown"));
}

TEST_CASE("core/dtype: undefined pairs are not reducible", "[core][fast]") {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    CHECK_FALSE(is_reducible(dtype, ReduceOp::kNone));
    CHECK(is_reducible(dtype, ReduceOp::kSum) == (dtype != DType::kBytes && dtype != DType::kFloat8E8M0fnu));
    if (is_floating(dtype)) CHECK_FALSE(is_reducible(dtype, ReduceOp::kBand));
    if (!is_floating(dtype)) CHECK_FALSE(is_reducible(dtype, ReduceOp::kPremulSum));
  }
  CHECK_FALSE(is_reducible(DType::kComplex64, ReduceOp::kMax));
  CHECK(is_reducible(DType::kBool, ReduceOp::kBor));
  CHECK(is_reducible(DType::kInt64, ReduceOp::kAvg));
  CHECK(is_reducible(DType::kFloat16, ReduceOp::kPremulSum));
}
