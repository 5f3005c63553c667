// What decodes must encode to the very bytes it came from, and have a description.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "hybridps/wire/header.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps::wire;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto header = decode(bytes);
  if (!header.is_ok()) return 0;
  const HeaderBytes again = encode(header.value());
  if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  if (describe(header.value().signature).empty()) std::abort();
  return 0;
}
