// hybridps/transport/envelope.h: a transport's address in an envelope that can be checked.
//
//   bytes  0..6   the kind of transport, such as "HPSUCX", filled up with 0
//   byte   7      version, 1
//   bytes  8..11  length of what is inside, little endian
//   bytes 12..15  FNV-1a of it, little endian
//   bytes 16..    what is inside
//
// Why      Addresses come from a Store that others write: cut or damaged bytes must not reach what trusts them, and those of
//          another kind of transport must be told as such. The sum is no signature: who forges it must be kept out by other
//          means.
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
/// What is inside, a view into `bytes`; kInvalidArgument for anything else.
core::Result<std::span<const std::byte>> unwrap(const EnvelopeKind& kind, std::span<const std::byte> bytes);

}  // namespace hybridps::transport
