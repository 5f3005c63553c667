#include "hybridps/transport/ucx/ucx_address.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

namespace hybridps::transport {
namespace {

constexpr std::array<char, 8> kMagic = {'H', 'P', 'S', 'U', 'C', 'X', 0, 1};
constexpr std::size_t kEnvelopeBytes = kMagic.size() + 2 * sizeof(std::uint32_t);

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

}  // namespace

std::vector<std::byte> wrap_ucx_address(std::span<const std::byte> worker_address) {
  std::vector<std::byte> bytes(kEnvelopeBytes + worker_address.size());
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  put_u32(bytes.data() + kMagic.size(), static_cast<std::uint32_t>(worker_address.size()));
  put_u32(bytes.data() + kMagic.size() + 4, fnv1a(worker_address));
  if (!worker_address.empty()) std::memcpy(bytes.data() + kEnvelopeBytes, worker_address.data(), worker_address.size());
  return bytes;
}

core::Result<std::span<const std::byte>> unwrap_ucx_address(std::span<const std::byte> bytes) {
  const auto malformed = [&](const char* what) {
    return core::Status(core::Code::kInvalidArgument,
                        "a UCX address of " + std::to_string(bytes.size()) + " bytes is malformed: " + what);
  };
  if (bytes.size() < kEnvelopeBytes) return malformed("too short");
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size() - 1) != 0) return malformed("it begins otherwise");
  if (bytes[kMagic.size() - 1] != static_cast<std::byte>(kMagic.back()))
    return malformed("its version differs: do all ranks run the same hybridps?");
  const auto inner = bytes.subspan(kEnvelopeBytes);
  if (inner.size() < kUcxAddressBytesMin || inner.size() > kUcxAddressBytesMax ||
      get_u32(bytes.data() + kMagic.size()) != inner.size())
    return malformed("wrong length");
  if (get_u32(bytes.data() + kMagic.size() + 4) != fnv1a(inner)) return malformed("its bytes were changed on the way");
  return inner;
}

}  // namespace hybridps::transport
