// The addresses in records, of UCX, of several network cards and of shared memory: only what was packed comes out.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "hybridps/intranode/shm/handshake.h"
#include "hybridps/transport/cards.h"
#include "hybridps/transport/envelope.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps::transport;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  if (const auto inside = unwrap(kUcxEnvelope, bytes); inside.is_ok()) {
    const auto again = wrap(kUcxEnvelope, inside.value());
    if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  }
  if (size >= kUcxEnvelope.bytes_min && size <= kUcxEnvelope.bytes_max) {
    const auto wrapped = wrap(kUcxEnvelope, bytes);
    const auto inside = unwrap(kUcxEnvelope, wrapped);
    if (!inside.is_ok() || !std::equal(inside.value().begin(), inside.value().end(), bytes.begin(), bytes.end()))
      std::abort();
  }
  if (const auto cards = decode_cards(bytes); cards.is_ok()) {
    const auto again = encode_cards(cards.value());
    if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  }
  if (const auto shm = hybridps::intranode::shm::decode(bytes); shm.has_value()) {
    const auto again = hybridps::intranode::shm::encode(*shm);
    if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  }
  return 0;
}
