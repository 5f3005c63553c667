#include "hybridps/transport/envelope.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>

namespace hybridps::transport {
namespace {

constexpr std::byte kVersion{1};
constexpr std::size_t kMarkBytes = 8;  // the mark, a zero, the version
constexpr std::size_t kEnvelopeBytes = kMarkBytes + 2 * sizeof(std::uint32_t);

std::uint32_t fnv1a(std::span<const std::byte> bytes) {
  std::uint32_t sum = 2166136261U;
  for (const std::byte byte : bytes) sum = (sum ^ static_cast<std::uint32_t>(byte)) * 16777619U;
  return sum;
}

void put_u32(std::byte* to, std::uint32_t value) {
  for (unsigned i = 0; i < 4; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

std::uint32_t get_u32(const std::byte* from) {
  std::uint32_t value = 0;
  for (unsigned i = 0; i < 4; ++i) value |= static_cast<std::uint32_t>(from[i]) << (8 * i);
  return value;
}

std::array<std::byte, kMarkBytes> mark_of(const EnvelopeKind& kind) {
  std::array<std::byte, kMarkBytes> mark{};
  std::memcpy(mark.data(), kind.mark.data(), std::min(kind.mark.size(), kMarkBytes - 2));
  mark.back() = kVersion;
  return mark;
}

bool begins_as(const EnvelopeKind& kind, std::span<const std::byte> bytes) {
  return std::memcmp(bytes.data(), mark_of(kind).data(), kMarkBytes - 1) == 0;
}

}  // namespace

std::vector<std::byte> wrap(const EnvelopeKind& kind, std::span<const std::byte> inside) {
  std::vector<std::byte> bytes(kEnvelopeBytes + inside.size());
  const auto mark = mark_of(kind);
  std::copy(mark.begin(), mark.end(), bytes.begin());
  put_u32(bytes.data() + kMarkBytes, static_cast<std::uint32_t>(inside.size()));
  put_u32(bytes.data() + kMarkBytes + 4, fnv1a(inside));
  std::copy(inside.begin(), inside.end(), bytes.begin() + kEnvelopeBytes);
  return bytes;
}

core::Result<std::span<const std::byte>> unwrap(const EnvelopeKind& kind, std::span<const std::byte> bytes) {
  const auto malformed = [&](const std::string& what) {
    return core::Status(core::Code::kInvalidArgument, std::string(kind.name) + " of " + std::to_string(bytes.size()) +
                                                          " bytes is malformed: " + what);
  };
  if (bytes.size() < kEnvelopeBytes) return malformed("too short");
  if (!begins_as(kind, bytes)) {
    for (const EnvelopeKind& other : {kUcxEnvelope, kTcpEnvelope})
      if (begins_as(other, bytes))
        return malformed(
            "it is " + std::string(other.name) +
            "; HYBRIDPS_DATA_TRANSPORT, UCX_TLS, UCX_TCP_* and UCX_NET_DEVICES must be set alike for all ranks " +
            "and servers");
    return malformed("it begins otherwise");
  }
  if (bytes[kMarkBytes - 1] != kVersion) return malformed("its version differs: do all ranks run the same hybridps?");
  const auto inside = bytes.subspan(kEnvelopeBytes);
  if (inside.size() < kind.bytes_min || inside.size() > kind.bytes_max ||
      get_u32(bytes.data() + kMarkBytes) != inside.size())
    return malformed("wrong length");
  if (get_u32(bytes.data() + kMarkBytes + 4) != fnv1a(inside)) return malformed("its bytes were changed on the way");
  return inside;
}

}  // namespace hybridps::transport
