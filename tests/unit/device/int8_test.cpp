// int8 as devices code it, against the codec of the same name: bit by bit.
#include "hybridps/device/int8.h"

#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "hybridps/compress/codec.h"
#include "hybridps/reduce/sum.h"
#include "tests/support/catch.h"
#include "tests/unit/device/int8_kernels.h"

namespace {

using namespace hybridps;
namespace int8 = device::int8;
using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

std::vector<std::uint32_t> bits_of(const Floats& values) {
  std::vector<std::uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), 4 * values.size());
  return bits;
}

std::unique_ptr<compress::Codec> codec() {
  return compress::make_codec(compress::parse_spec("int8").value(), core::DType::kFloat32);
}

Bytes encoded(const Floats& values) {
  compress::ChunkOrigin place;
  Bytes out(codec()->bytes_max(4 * values.size()));
  out.resize(codec()->encode(reinterpret_cast<const std::byte*>(values.data()), 4 * values.size(), place, out.data()));
  return out;
}

Floats decoded(const Bytes& codes, std::size_t count) {
  Floats out(count);
  codec()->expand(codes.data(), 0, count, reinterpret_cast<std::byte*>(out.data()));
  return out;
}

/// What a node contributes to an average of which it is the part `factor`.
Floats scaled(const Floats& values, float factor) {
  Floats out(values.size());
  const reduce::Input input{reinterpret_cast<const std::byte*>(values.data())};
  reduce::combine({&input, 1}, reinterpret_cast<std::byte*>(out.data()), out.size(), core::DType::kFloat32,
                  core::ReduceOp::kAvg, {reduce::Finish::Scaling::kMultiply, factor, 1});
  return out;
}

float any_bits(std::mt19937& random) { return std::bit_cast<float>(static_cast<std::uint32_t>(random())); }

/// Of each kind several blocks, the last one shorter.
std::vector<Floats> all_kinds() {
  using Limits = std::numeric_limits<float>;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<Floats> kinds;
  const auto add = [&](std::size_t count, auto draw) {
    Floats values(count);
    for (float& value : values) value = draw();
    kinds.push_back(values);
  };
  for (const std::size_t count : {1, 2, 31, 32, 33, 63, 64, 255, 256, 257, 1000, 2047})
    add(count, [&] { return normal(random); });
  add(700, [&] { return any_bits(random); });  // NaNs and infinities in most blocks
  add(6400, [&] {                              // and in none
    const float value = any_bits(random);
    return std::isfinite(value) ? value : 1.0F;
  });
  add(96, [] { return 0.0F; });
  add(96, [&] { return random() % 2 == 0 ? 0.0F : -0.0F; });
  add(96, [&] { return std::bit_cast<float>(static_cast<std::uint32_t>(random() & 0x807fffffU)); });  // denormal
  add(320, [&] { return normal(random) * Limits::min() * 130; });  // scales about the smallest normal
  add(320, [&] { return normal(random) * Limits::denorm_min() * 200; });
  add(320, [&] { return random() % 3 == 0 ? Limits::max() : -Limits::max() / 3; });  // scales that would be too large
  add(320, [&] { return std::bit_cast<float>(0x7f7f0000U + static_cast<std::uint32_t>(random() % 0xffff)); });
  for (const float odd :
       {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), Limits::signaling_NaN(), -Limits::quiet_NaN()})
    for (const std::size_t at : {0, 5, 31, 32, 70, 95}) {
      add(96, [&] { return normal(random); });
      kinds.back()[at] = odd;
    }
  // Halves between two steps: to even.
  add(64, [i = 0]() mutable { return i++ % 32 == 0 ? 127.0F : static_cast<float>(i % 32) + 0.5F; });
  return kinds;
}

}  // namespace

TEST_CASE("device/int8: the host function has the codec's bits", "[device][fast]") {
  for (const Floats& values : all_kinds()) {
    INFO(values.size() << " values, the first " << values.front());
    CHECK(int8::bytes_of(values.size()) == codec()->bytes_max(4 * values.size()));
    for (const float factor : {1.0F, 0.25F, static_cast<float>(1.0 / 3), 3e30F}) {
      const Bytes want = encoded(factor == 1.0F ? values : scaled(values, factor));
      Bytes codes(want.size(), std::byte{0xee});
      int8::encode(codes.data(), values.data(), values.size(), factor);
      REQUIRE((codes == want));
      Floats out(values.size());
      int8::decode(out.data(), codes.data(), values.size());
      REQUIRE((bits_of(out) == bits_of(decoded(want, values.size()))));
    }
  }
}

// A fused one would give another code of one element in some hundred thousand.
TEST_CASE("device/int8: products and sums of a million elements are rounded one by one", "[device][fast]") {
  std::mt19937 random(23);
  std::normal_distribution<float> normal;
  Floats values(2 << 20);
  for (float& value : values) value = normal(random);
  const Bytes want = encoded(values);
  Bytes codes(want.size());
  int8::encode(codes.data(), values.data(), values.size(), 1.0F);
  CHECK((codes == want));
}

TEST_CASE("device/int8: the kernels have the codec's bits, and write nothing else", "[device][fast]") {
  for (const Floats& values : all_kinds()) {
    INFO(values.size() << " values, the first " << values.front());
    const Bytes want = encoded(scaled(values, 0.5F));
    Bytes codes(want.size() + 64, std::byte{0xee});
    test::encode_by_kernel(codes.data() + 32, values.data(), values.size(), 0.5F);
    Floats out(values.size() + 2, -7.0F);
    test::decode_by_kernel(out.data() + 1, codes.data() + 32, values.size());
    for (std::size_t i = 0; i < 32; ++i)
      REQUIRE((codes[i] == std::byte{0xee} && codes[codes.size() - 1 - i] == std::byte{0xee}));
    REQUIRE((Bytes(codes.begin() + 32, codes.end() - 32) == want));
    REQUIRE((out.front() == -7.0F && out.back() == -7.0F));
    REQUIRE((bits_of(Floats(out.begin() + 1, out.end() - 1)) == bits_of(decoded(want, values.size()))));
  }
}

TEST_CASE("device/int8: bytes that no encoder makes decode alike", "[device][fast]") {
  std::mt19937 random(3);
  Bytes codes(int8::bytes_of(32 * 300 + 7));
  for (std::byte& code : codes) code = static_cast<std::byte>(random());
  const std::size_t count = 32 * 300 + 7;
  const Floats want = decoded(codes, count);
  Floats out(count);
  int8::decode(out.data(), codes.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto a = std::bit_cast<std::uint32_t>(out[i]);
    const auto b = std::bit_cast<std::uint32_t>(want[i]);
    REQUIRE((a == b ||
             (std::isnan(out[i]) && std::isnan(want[i]))));  // zero times infinity is whatever NaN the machine has
  }
}
