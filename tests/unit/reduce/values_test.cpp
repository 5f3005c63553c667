// Hand-written values: what a reader of sum.h would work out on paper.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "hybridps/reduce/dispatch.h"
#include "hybridps/reduce/sum.h"
#include "tests/support/catch.h"
#include "tests/unit/reduce/reference.h"

namespace hybridps::reduce {
namespace {

using core::DType;
using core::ReduceOp;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// The codes of the result of combining one column of codes, which every table must agree on in every lane.
std::uint64_t combine_codes(DType dtype, ReduceOp op, const std::vector<std::uint64_t>& codes, Finish finish = {},
                            const std::vector<double>& premul = {}) {
  constexpr std::size_t kCount = 37;  // registers and a tail
  const std::size_t bytes = core::size_of(dtype);
  std::vector<std::vector<std::byte>> tensors;
  std::vector<Input> inputs;
  for (const std::uint64_t code : codes) {
    tensors.emplace_back(kCount * bytes);
    for (std::size_t i = 0; i < kCount; ++i) testing::store_code(dtype, tensors.back().data() + i * bytes, code);
  }
  for (std::size_t k = 0; k < codes.size(); ++k) {
    inputs.push_back({tensors[k].data(), premul.empty() ? 1.0 : premul[k]});
  }
  std::uint64_t answer = 0;
  bool first = true;
  for (const SumKernels* table : available_tables()) {
    std::vector<std::byte> out(kCount * bytes);
    combine_with(*table, inputs, out.data(), kCount, dtype, op, finish);
    for (std::size_t i = 0; i < kCount; ++i) {
      const std::uint64_t code = testing::load_code(dtype, out.data() + i * bytes);
      if (first) answer = code;
      first = false;
      INFO(table->name << " element " << i);
      REQUIRE(code == answer);
    }
  }
  return answer;
}

std::uint64_t fp32(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

std::uint64_t sum32(std::vector<float> values) {
  std::vector<std::uint64_t> codes;
  for (const float v : values) codes.push_back(fp32(v));
  return combine_codes(DType::kFloat32, ReduceOp::kSum, codes);
}

}  // namespace

TEST_CASE("reduce/sum: fp32 adds from left to right", "[reduce][fast]") {
  CHECK(sum32({1e8f, -1e8f, 1.0f}) == fp32(1.0f));
  CHECK(sum32({1.0f, 1e8f, -1e8f}) == fp32(0.0f));
}

TEST_CASE("reduce/sum: infinities zeros and subnormals follow IEEE 754", "[reduce][fast]") {
  CHECK(sum32({kInf, 1.0f}) == fp32(kInf));
  CHECK(sum32({3e38f, 3e38f}) == fp32(kInf));
  CHECK(sum32({-0.0f, -0.0f}) == fp32(-0.0f));
  CHECK(sum32({-0.0f, 0.0f}) == fp32(0.0f));
  CHECK(sum32({1e-45f, 1e-45f}) == 2);
}

TEST_CASE("reduce/sum: a NaN result is the positive quiet NaN whatever came in", "[reduce][fast]") {
  CHECK(sum32({kInf, -kInf}) == 0x7fc00000);
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kSum, {0xffc01234, 0x7fc05678}) == 0x7fc00000);
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kSum, {0x7f800001, 0}) == 0x7fc00000);
  CHECK(combine_codes(DType::kFloat64, ReduceOp::kSum, {0xfff0000000000001, 0}) == 0x7ff8000000000000);
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kSum, {0xfc01, 0}) == 0x7e00);
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kSum, {0x7c00, 0xfc00}) == 0x7e00);
  CHECK(combine_codes(DType::kBfloat16, ReduceOp::kSum, {0xff81, 0}) == 0x7fc0);
  CHECK(combine_codes(DType::kBfloat16, ReduceOp::kSum, {0x7fff, 0}) == 0x7fc0);
  CHECK(combine_codes(DType::kFloat8E4M3fn, ReduceOp::kSum, {0xff, 0}) == 0x7f);
  CHECK(combine_codes(DType::kFloat8E5M2, ReduceOp::kSum, {0xfd, 0}) == 0x7f);
  CHECK(combine_codes(DType::kFloat8E5M2, ReduceOp::kSum, {0x7c, 0xfc}) == 0x7f);
  CHECK(combine_codes(DType::kFloat8E4M3fnuz, ReduceOp::kSum, {0x80, 0}) == 0x80);
}

TEST_CASE("reduce/sum: one input with nothing to do is copied byte for byte", "[reduce][fast]") {
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kSum, {0xff801234}) == 0xff801234);
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kPremulSum, {0xff801234}) == 0xff801234);
  CHECK(combine_codes(DType::kBfloat16, ReduceOp::kAvg, {0x7f81}) == 0x7f81);
  CHECK(combine_codes(DType::kBool, ReduceOp::kMax, {0x80}) == 1);
}

TEST_CASE("reduce/sum: halves accumulate in fp32 and round once", "[reduce][fast]") {
  // 2048 + 1 is a tie in fp16 that rounds back to 2048; in fp32 the ones add up.
  const std::uint64_t one = 0x3c00, n2048 = 0x6800;
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kSum, {n2048, one, one}) == testing::encode(DType::kFloat16, 2050));
  // 256 + 1 in bf16, likewise.
  CHECK(combine_codes(DType::kBfloat16, ReduceOp::kSum, {0x4380, 0x3f80, 0x3f80}) ==
        testing::encode(DType::kBfloat16, 258));
  // The largest fp16 twice overflows only if it is still too large after the scale.
  const Finish half{Finish::Scaling::kMultiply, 0.5, 1};
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kAvg, {0x7bff, 0x7bff}, half) == 0x7bff);
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kSum, {0x7bff, 0x7bff}) == 0x7c00);
}

TEST_CASE("reduce/sum: ties round to even", "[reduce][fast]") {
  const auto fp16 = [](double v) { return testing::encode(DType::kFloat16, v); };
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kSum, {fp16(2048), fp16(1)}) == fp16(2048));
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kSum, {fp16(2050), fp16(1)}) == fp16(2052));
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kSum, {fp16(65504), fp16(15.99)}) == fp16(65504));
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kSum, {fp16(65504), fp16(16)}) == 0x7c00);
  const auto bf16 = [](double v) { return testing::encode(DType::kBfloat16, v); };
  CHECK(combine_codes(DType::kBfloat16, ReduceOp::kSum, {bf16(256), bf16(1)}) == bf16(256));
  CHECK(combine_codes(DType::kBfloat16, ReduceOp::kSum, {bf16(258), bf16(1)}) == bf16(260));
  CHECK(combine_codes(DType::kBfloat16, ReduceOp::kSum, {0x7f7f, 0x7b00}) == 0x7f80);  // the largest and half an ulp
  CHECK(sum32({16777216.0f, 1.0f}) == fp32(16777216.0f));
  CHECK(sum32({16777218.0f, 1.0f}) == fp32(16777220.0f));
}

TEST_CASE("reduce/sum: float8 overflow saturates or becomes infinity or NaN by kind", "[reduce][fast]") {
  CHECK(combine_codes(DType::kFloat8E4M3fn, ReduceOp::kSum, {0x7e, 0x7e}) == 0x7e);  // 448 + 448
  CHECK(combine_codes(DType::kFloat8E4M3fn, ReduceOp::kSum, {0xfe, 0xfe}) == 0xfe);
  CHECK(combine_codes(DType::kFloat8E5M2, ReduceOp::kSum, {0x7b, 0x7b}) == 0x7c);       // 57344 + 57344
  CHECK(combine_codes(DType::kFloat8E4M3fnuz, ReduceOp::kSum, {0x7f, 0x7f}) == 0x80);   // 240 + 240
  CHECK(combine_codes(DType::kFloat8E5M2fnuz, ReduceOp::kSum, {0xff, 0xff}) == 0x80);   // -57344 twice
  CHECK(combine_codes(DType::kFloat8E4M3fnuz, ReduceOp::kProduct, {0x01, 0x81}) == 0);  // no negative zero
}

TEST_CASE("reduce/sum: min and max propagate NaN and keep the left of equal values", "[reduce][fast]") {
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    CHECK(combine_codes(DType::kFloat32, op, {fp32(1), fp32(kNan), fp32(2)}) == 0x7fc00000);
    CHECK(combine_codes(DType::kFloat32, op, {fp32(kNan), fp32(1)}) == 0x7fc00000);
    CHECK(combine_codes(DType::kFloat32, op, {fp32(1), 0xffc00001}) == 0x7fc00000);
    CHECK(combine_codes(DType::kFloat64, op, {0x7ff8000000000001, 0}) == 0x7ff8000000000000);
    CHECK(combine_codes(DType::kFloat16, op, {0x3c00, 0xfe00}) == 0x7e00);
    CHECK(combine_codes(DType::kBfloat16, op, {0x7fc1, 0x3f80}) == 0x7fc0);
    CHECK(combine_codes(DType::kFloat32, op, {fp32(-0.0f), fp32(0.0f)}) == fp32(-0.0f));
    CHECK(combine_codes(DType::kFloat32, op, {fp32(0.0f), fp32(-0.0f)}) == fp32(0.0f));
  }
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kMin, {fp32(3), fp32(-kInf), fp32(2)}) == fp32(-kInf));
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kMax, {fp32(3), fp32(-kInf), fp32(2)}) == fp32(3));
}

TEST_CASE("reduce/sum: premul multiplies each input by its own factor and only there", "[reduce][fast]") {
  const std::vector<std::uint64_t> codes = {fp32(1), fp32(10), fp32(100)};
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kPremulSum, codes, {}, {1, 2, 3}) == fp32(321));
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kSum, codes, {}, {1, 2, 3}) == fp32(111));
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kPremulSum, {fp32(4)}, {}, {0.25}) == fp32(1));
  // The factor is rounded to fp32, and the product before the sum: no fused multiply-add. With one, the exact
  // x * x - rounded(x * x) would be left over.
  const float x = 1.0f + 0x1p-12f;
  const volatile float square = x * x;
  CHECK(combine_codes(DType::kFloat32, ReduceOp::kPremulSum, {fp32(-square), fp32(x)}, {}, {1.0, x}) == fp32(0));
  // fp16 beyond its own range inside the sum.
  CHECK(combine_codes(DType::kFloat16, ReduceOp::kPremulSum, {0x7bff, 0x7bff}, {}, {3, -2}) == 0x7bff);
}

TEST_CASE("reduce/sum: the divisor truncates towards zero and may exceed the type", "[reduce][fast]") {
  const auto divide = [](long long d) { return Finish{Finish::Scaling::kDivideTruncate, 1.0, d}; };
  CHECK(combine_codes(DType::kInt32, ReduceOp::kAvg, {0xfffffffdu, 0xfffffffcu}, divide(2)) == 0xfffffffdu);  // -7/2
  CHECK(combine_codes(DType::kInt8, ReduceOp::kAvg, {0xff, 0}, divide(2)) == 0);                              // -1/2
  CHECK(combine_codes(DType::kInt64, ReduceOp::kAvg, {~0ull, ~0ull, ~0ull - 4}, divide(3)) == ~0ull - 1);     // -7/3
  CHECK(combine_codes(DType::kUint8, ReduceOp::kAvg, {200, 50}, divide(300)) == 0);
  CHECK(combine_codes(DType::kUint8, ReduceOp::kAvg, {250, 5}, divide(3)) == 85);
  CHECK(combine_codes(DType::kUint64, ReduceOp::kAvg, {~0ull - 1, 0}, divide(2)) == ~0ull >> 1);
  CHECK(combine_codes(DType::kInt32, ReduceOp::kAvg, {7}, divide(2)) == 3);
  CHECK(combine_codes(DType::kInt32, ReduceOp::kAvg, {7, 8}) == 15);
}

TEST_CASE("reduce/sum: integers wrap", "[reduce][fast]") {
  CHECK(combine_codes(DType::kUint8, ReduceOp::kSum, {200, 100}) == 44);
  CHECK(combine_codes(DType::kInt32, ReduceOp::kSum, {0x7fffffff, 1}) == 0x80000000u);
  CHECK(combine_codes(DType::kInt64, ReduceOp::kSum, {0x7fffffffffffffffull, 1}) == 0x8000000000000000ull);
  CHECK(combine_codes(DType::kUint16, ReduceOp::kProduct, {0xffff, 0xffff}) == 1);
  CHECK(combine_codes(DType::kInt16, ReduceOp::kProduct, {0x8000, 0xffff}) == 0x8000);
  CHECK(combine_codes(DType::kInt64, ReduceOp::kMin, {5, ~0ull}) == ~0ull);
  CHECK(combine_codes(DType::kUint64, ReduceOp::kMin, {5, ~0ull}) == 5);
  CHECK(combine_codes(DType::kUint32, ReduceOp::kMax, {5, 0xffffffffu}) == 0xffffffffu);
}

TEST_CASE("reduce/sum: bool is logic on nonzero bytes", "[reduce][fast]") {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kBor}) {
    CHECK(combine_codes(DType::kBool, op, {1, 1}) == 1);
    CHECK(combine_codes(DType::kBool, op, {0, 4, 0}) == 1);
    CHECK(combine_codes(DType::kBool, op, {0, 0}) == 0);
  }
  for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand}) {
    CHECK(combine_codes(DType::kBool, op, {1, 2}) == 1);  // 1 & 2 would be 0
    CHECK(combine_codes(DType::kBool, op, {1, 0}) == 0);
  }
  CHECK(combine_codes(DType::kBool, ReduceOp::kBxor, {1, 2}) == 0);
  CHECK(combine_codes(DType::kBool, ReduceOp::kBxor, {1, 1, 1}) == 1);
}

TEST_CASE("reduce/sum: complex numbers multiply and scale", "[reduce][fast]") {
  const std::vector<float> a = {1, 2}, b = {3, -4};
  std::vector<float> out(2);
  const std::vector<Input> inputs = {{reinterpret_cast<const std::byte*>(a.data()), 2.0},
                                     {reinterpret_cast<const std::byte*>(b.data()), 0.5}};
  auto* to = reinterpret_cast<std::byte*>(out.data());
  for (const SumKernels* table : available_tables()) {
    combine_with(*table, inputs, to, 1, DType::kComplex64, ReduceOp::kProduct, {});
    CHECK(out == std::vector<float>{11, 2});
    combine_with(*table, inputs, to, 1, DType::kComplex64, ReduceOp::kSum, {});
    CHECK(out == std::vector<float>{4, -2});
    combine_with(*table, inputs, to, 1, DType::kComplex64, ReduceOp::kPremulSum, {});
    CHECK(out == std::vector<float>{3.5f, 2});
    combine_with(*table, inputs, to, 1, DType::kComplex64, ReduceOp::kAvg, {Finish::Scaling::kMultiply, 0.5, 1});
    CHECK(out == std::vector<float>{2, -1});
  }
}

}  // namespace hybridps::reduce
