// Rounding and widening, exhaustively: every code of the narrow types, and every midpoint between two of
// them.
#include "hybridps/reduce/convert.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "hybridps/reduce/dispatch.h"
#include "tests/support/catch.h"
#include "tests/unit/reduce/reference.h"

namespace hybridps::reduce {
namespace {

using core::DType;
using core::ReduceOp;

struct Narrow {
  DType dtype;
  float (*widen)(std::uint32_t);
  std::uint32_t (*narrow)(float);
};

const Narrow kNarrowTypes[] = {
    {DType::kFloat16, &widen<kFp16Format>, &narrow<kFp16Format>},
    {DType::kBfloat16, [](std::uint32_t code) { return widen_bf16(static_cast<std::uint16_t>(code)); },
     [](float value) -> std::uint32_t { return narrow_bf16(value); }},
    {DType::kFloat8E4M3fn, &widen<kE4M3fnFormat>, &narrow<kE4M3fnFormat>},
    {DType::kFloat8E5M2, &widen<kE5M2Format>, &narrow<kE5M2Format>},
    {DType::kFloat8E4M3fnuz, &widen<kE4M3fnuzFormat>, &narrow<kE4M3fnuzFormat>},
    {DType::kFloat8E5M2fnuz, &widen<kE5M2fnuzFormat>, &narrow<kE5M2fnuzFormat>},
};

std::uint64_t code_count(DType dtype) { return 1ull << (8 * core::size_of(dtype)); }

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

}  // namespace

TEST_CASE("reduce/convert: every code widens exactly and narrows back to itself", "[reduce][fast]") {
  for (const Narrow& type : kNarrowTypes) {
    for (std::uint64_t code = 0; code < code_count(type.dtype); ++code) {
      const float value = type.widen(static_cast<std::uint32_t>(code));
      const bool back = std::isnan(value) || type.narrow(value) == code;
      if (!same(value, testing::decode(type.dtype, code)) || !back) {
        FAIL(core::name_of(type.dtype) << " code " << code << " widens to " << value);
      }
    }
    CHECK(std::isnan(type.widen(type.narrow(NAN))));
  }
}

TEST_CASE("reduce/convert: midpoints and their neighbours narrow to the nearest even code", "[reduce][fast]") {
  for (const Narrow& type : kNarrowTypes) {
    for (std::uint64_t code = 0; code < code_count(type.dtype); ++code) {
      const double here = testing::decode(type.dtype, code);
      const double next = testing::decode(type.dtype, (code + 1) % code_count(type.dtype));
      if (!std::isfinite(here)) continue;
      const auto middle = static_cast<float>(std::isfinite(next) ? (here + next) / 2 : here * 1.0625);
      for (const float value : {middle, std::nextafter(middle, INFINITY), std::nextafter(middle, -INFINITY)}) {
        const std::uint64_t want = testing::encode(type.dtype, value);
        if (type.narrow(value) != want) {
          FAIL(core::name_of(type.dtype) << " narrows " << value << " to " << type.narrow(value) << ", not " << want);
        }
      }
    }
    for (const float value : {INFINITY, -INFINITY, 0.0f, -0.0f, 1e-45f, -1e-45f, 3.4e38f, 480.0f, 464.0f, 448.1f}) {
      INFO(core::name_of(type.dtype) << " " << value);
      CHECK(type.narrow(value) == testing::encode(type.dtype, value));
    }
  }
}

TEST_CASE("reduce/convert: every table rounds every half times a factor as the reference does", "[reduce][fast]") {
  // The factors move each code to a value between two codes, to a tie (1 + 2^-n, 1.5), and into the
  // subnormals.
  const double factors[] = {0.333333, 1.5, 1.0 + 0x1p-11, 1.0 + 0x1p-8, 0x1p-10, 0x1.8p-12, 0x1.004p-20};
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    const std::size_t count = code_count(dtype);
    std::vector<std::byte> all(2 * count), want(2 * count), out(2 * count);
    for (std::size_t code = 0; code < count; ++code) testing::store_code(dtype, all.data() + 2 * code, code);
    for (const double factor : factors) {
      const std::vector<Input> inputs = {{all.data(), factor}};
      testing::reference_combine(inputs, want.data(), count, dtype, ReduceOp::kPremulSum);
      for (const SumKernels* table : available_tables()) {
        combine_with(*table, inputs, out.data(), count, dtype, ReduceOp::kPremulSum, {});
        INFO(table->name << " " << testing::describe(dtype, ReduceOp::kPremulSum, 1) << " factor " << factor);
        REQUIRE(testing::difference(dtype, out.data(), want.data(), count) == "");
      }
    }
  }
}

TEST_CASE("reduce/convert: every pair of float8 numbers adds and multiplies as the reference does", "[reduce][fast]") {
  constexpr std::size_t kCount = 256 * 256;
  std::vector<std::byte> left(kCount), right(kCount), want(kCount), out(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    left[i] = static_cast<std::byte>(i / 256);
    right[i] = static_cast<std::byte>(i % 256);
  }
  const std::vector<Input> inputs = {{left.data(), 1.0}, {right.data(), 1.0}};
  for (const DType dtype : {DType::kFloat8E4M3fn, DType::kFloat8E5M2, DType::kFloat8E4M3fnuz, DType::kFloat8E5M2fnuz}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      testing::reference_combine(inputs, want.data(), kCount, dtype, op);
      for (const SumKernels* table : available_tables()) {
        combine_with(*table, inputs, out.data(), kCount, dtype, op, {});
        INFO(table->name << " " << testing::describe(dtype, op, 2));
        REQUIRE(testing::difference(dtype, out.data(), want.data(), kCount) == "");
      }
    }
  }
}

}  // namespace hybridps::reduce
