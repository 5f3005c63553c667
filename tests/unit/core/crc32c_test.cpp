#include "hybridps/core/crc32c.h"

#include <array>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "tests/support/catch.h"

namespace hybridps::core {
namespace {

TEST_CASE("core/crc32c: the values of RFC 3720, appendix B.4", "[core][fast]") {
  const auto of = [](auto&& value) {
    std::array<std::byte, 32> bytes{};
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(value(i));
    CHECK(crc32c(bytes) == crc32c_by_table(bytes));
    return crc32c(bytes);
  };
  CHECK(of([](std::size_t) { return 0; }) == 0x8a9136aa);
  CHECK(of([](std::size_t) { return 0xff; }) == 0x62a8ab43);
  CHECK(of([](std::size_t i) { return i; }) == 0x46dd794e);
  CHECK(of([](std::size_t i) { return 31 - i; }) == 0x113fdb5c);
  CHECK(crc32c(std::as_bytes(std::span(std::string_view("123456789")))) == 0xe3069283);
  CHECK(crc32c({}) == 0);
}

TEST_CASE("core/crc32c: every size and place, in one piece and in two, as by the table", "[core][fast]") {
  std::mt19937_64 random(7);
  std::vector<std::byte> bytes(40000);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  const auto check = [&](std::size_t from, std::size_t size) {
    const std::span<const std::byte> all = std::span(bytes).subspan(from, size);
    const std::uint32_t wanted = crc32c_by_table(all);
    CAPTURE(from, size);
    REQUIRE(crc32c(all) == wanted);
    const std::size_t cut = size == 0 ? 0 : random() % size;
    REQUIRE(crc32c(all.subspan(cut), crc32c(all.first(cut))) == wanted);
  };
  for (std::size_t size = 0; size < 900; ++size) check(size % 9, size);
  for (int i = 0; i < 300; ++i) check(random() % 64, random() % 39000);
}

}  // namespace
}  // namespace hybridps::core
