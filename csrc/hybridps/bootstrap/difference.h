// hybridps/bootstrap/difference.h: bytes, told as their difference from bytes that the reader has.
//
//   difference := size n | repeated until there are `size` bytes: equal n | literal n | [skipped n] | bytes
//   n          := 7 bits a byte, the lowest first; the top bit says that more follow
//
// `equal` bytes are copied from the reader's. Then `literal >> 1` bytes follow here, and take the place of as many of
// the reader's, or of `skipped` if the lowest bit of `literal` is set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "hybridps/bootstrap/bytes.h"

namespace hybridps::bootstrap {

void write_difference(ByteWriter& out, std::span<const std::uint8_t> from, std::span<const std::uint8_t> to);
/// Nothing: not such a difference, or of more than `bytes_max` bytes.
std::optional<Bytes> read_difference(ByteReader& in, std::span<const std::uint8_t> from, std::size_t bytes_max);

}  // namespace hybridps::bootstrap
