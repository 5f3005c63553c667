// hybridps/transport/envelope.h: a transport's address in an envelope that can be checked.
//
//   bytes  0..6   the kind of transport, such as "HPSUCX", filled up with 0
//   byte   7      version, 1
//   bytes  8..11  length of the content, little endian
//   bytes 12..15  FNV-1a checksum of the content, little endian
//   bytes 16..    the content
//
// Why      Addresses come from a Store that others write. Cut or damaged bytes must not reach code that trusts them. An
//          address of another kind of transport must give a clear error. The checksum is no signature: other means must
//          keep forgers out.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "hybridps/core/status.h"

namespace hybridps::transport {

struct EnvelopeKind {
  std::string_view mark;  // 6 characters
  std::string_view name;  // in errors: "a UCX address"
  std::size_t bytes_min = 0;
  std::size_t bytes_max = 0;
};
inline constexpr EnvelopeKind kUcxEnvelope = {"HPSUCX", "a UCX address", 16, 4096};
inline constexpr EnvelopeKind kTcpEnvelope = {"HPSTCP", "a TCP address", 36, 36};

std::vector<std::byte> wrap(const EnvelopeKind& kind, std::span<const std::byte> inside);
/// The content, a view into `bytes`. kInvalidArgument: `bytes` is not a valid envelope of this kind.
core::Result<std::span<const std::byte>> unwrap(const EnvelopeKind& kind, std::span<const std::byte> bytes);

}  // namespace hybridps::transport
