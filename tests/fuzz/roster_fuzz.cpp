// What decodes must encode, and decode to the same again; nothing may crash or allocate beyond the input.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "hybridps/bootstrap/record.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps::bootstrap;
  const std::span<const std::uint8_t> bytes(data, size);
  static_cast<void>(decode_version(bytes).is_ok());
  if (const auto record = decode_record(bytes); record.is_ok()) {
    const auto again = encode(record.value());
    if (!again.is_ok() || !(decode_record(again.value()).value() == record.value())) std::abort();
  }
  if (const auto roster = decode_roster(bytes); roster.is_ok()) {
    const auto again = encode(roster.value());
    if (!again.is_ok() || !(decode_roster(again.value()).value() == roster.value())) std::abort();
  }
  return 0;
}
