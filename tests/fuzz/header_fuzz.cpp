// What decodes must encode to the very bytes it came from, and have a description.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "hybridps/wire/message.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps::wire;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto message = decode(bytes);
  if (!message.is_ok()) return 0;
  const HeaderBytes again = encode(message.value());
  if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  if (const ChunkId* chunk = message.value().chunk(); chunk != nullptr && describe(chunk->signature).empty())
    std::abort();
  return 0;
}
