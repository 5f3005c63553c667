#include <cstdint>
#include <cstring>
#include <vector>

#include "hybridps/reduce/sum.h"
#include "tests/support/catch.h"

namespace {

using namespace hybridps;

/// Two bytes an element, backwards, behind a mark.
struct Backwards final : reduce::Format {
  explicit Backwards(std::size_t n) : total(n) {}
  void expand(const std::byte* data, std::size_t first, std::size_t count, std::byte* out) const noexcept override {
    for (std::size_t i = 0; i < count; ++i) {
      std::int16_t value = 0;
      std::memcpy(&value, data + 1 + 2 * (total - 1 - first - i), sizeof value);
      const std::int32_t wide = value;
      std::memcpy(out + 4 * i, &wide, sizeof wide);
    }
  }
  std::vector<std::byte> pack(const std::vector<std::int32_t>& values) const {
    std::vector<std::byte> bytes(1 + 2 * total);
    for (std::size_t i = 0; i < total; ++i) {
      const auto value = static_cast<std::int16_t>(values[i]);
      std::memcpy(bytes.data() + 1 + 2 * (total - 1 - i), &value, sizeof value);
    }
    return bytes;
  }
  std::size_t total;
};

}  // namespace

TEST_CASE("reduce/sum: inputs of other formats, between plain ones", "[reduce][fast]") {
  for (const std::size_t count : {0, 1, 2047, 2048, 2049, 5000}) {
    for (const core::ReduceOp op : {core::ReduceOp::kSum, core::ReduceOp::kMax}) {
      std::vector<std::vector<std::int32_t>> values(4, std::vector<std::int32_t>(count));
      for (std::size_t k = 0; k < 4; ++k)
        for (std::size_t i = 0; i < count; ++i)
          values[k][i] = static_cast<std::int32_t>((i * 7919 + k * 104729) % 20011) - 10000;
      const Backwards format(count);
      std::vector<reduce::Input> plain;
      std::vector<reduce::Input> mixed;
      std::vector<std::vector<std::byte>> packed(4);
      for (std::size_t k = 0; k < 4; ++k) {
        const auto* data = reinterpret_cast<const std::byte*>(values[k].data());
        packed[k] = format.pack(values[k]);
        plain.push_back({data});
        mixed.push_back(k % 2 == 0 ? reduce::Input{packed[k].data(), 1.0, &format} : reduce::Input{data});
      }
      std::vector<std::int32_t> expected(count);
      reduce::combine(plain, reinterpret_cast<std::byte*>(expected.data()), count, core::DType::kInt32, op);
      // The output is one of the plain inputs, as an owner's is.
      reduce::combine(mixed, reinterpret_cast<std::byte*>(values[1].data()), count, core::DType::kInt32, op);
      CHECK(values[1] == expected);
      // One input alone.
      std::vector<std::int32_t> alone(count);
      reduce::combine(std::span(mixed).first(1), reinterpret_cast<std::byte*>(alone.data()), count, core::DType::kInt32,
                      op);
      CHECK(alone == values[0]);
    }
  }
}
