#include "hybridps/bootstrap/bytes.h"

namespace hybridps::bootstrap {

// Not in the header: g++ 14 puts several of these calls into one function, and then warns wrongly of writes beyond the
// end.

void ByteWriter::raw(std::span<const std::uint8_t> bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }

void ByteWriter::text(std::string_view value) {
  u16(static_cast<std::uint16_t>(value.size()));
  out_.insert(out_.end(), value.begin(), value.end());
}

void ByteWriter::little_endian(std::uint64_t value, int byte_count) {
  for (int i = 0; i < byte_count; ++i) out_.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

}  // namespace hybridps::bootstrap
