#include "hybridps/core/copy.h"

#include <cstddef>
#include <vector>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;

TEST_CASE("core/copy: every size and alignment, and nothing beside it", "[core][fast]") {
  constexpr std::size_t kRoom = 700;
  std::vector<std::byte> from(kRoom);
  for (std::size_t i = 0; i < kRoom; ++i) from[i] = static_cast<std::byte>(i * 31 + 7);
  for (const core::Reader reader : {core::Reader::kThisCore, core::Reader::kAnother})
    for (std::size_t bytes = 0; bytes < 450; bytes += bytes < 140 ? 1 : 13)
      for (std::size_t shift = 0; shift < 67; shift += 3) {
        const std::size_t source = shift % 5;
        std::vector<std::byte> to(kRoom, std::byte{0xee});
        core::copy_for(reader, to.data() + shift, from.data() + source, bytes);
        bool right = true;
        for (std::size_t i = 0; i < kRoom; ++i)
          right &= to[i] == (i >= shift && i < shift + bytes ? from[i - shift + source] : std::byte{0xee});
        INFO(bytes << " bytes to " << shift);
        REQUIRE(right);
      }
}

}  // namespace
