// hybridps/transport/tcp/tcp_wire.h: what goes over a connection, and where it leads to.
//
//   greeting   once, from who connects: 8 bytes mark, 16 bytes its own id, 16 bytes the id that it wants to reach
//   message    4 bytes length of the payload, 2 bytes length of the header, 2 bytes mark; the header; the payload
//
// All little endian. An id is 128 random bits that a transport draws; they are in its address, which members of a group
// have from each other. Who does not know them is not heard.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hybridps/core/status.h"
#include "hybridps/transport/endpoint.h"

namespace hybridps::transport {

using TcpId = std::array<std::byte, 16>;
TcpId make_tcp_id();

struct SocketAddress {
  sockaddr_storage name{};
  socklen_t bytes = 0;

  /// "10.0.0.1:4711", "[fe80::1]:4711".
  std::string text() const;
  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&name); }
};
/// Of a numeric address; nothing where it is none.
std::optional<SocketAddress> parse_address(const std::string& numeric, std::uint16_t port);

/// Whether packets to `there` leave through the card with the address `here`: it is in the card's own network, or the kernel's
/// routes lead through the card, or it is an address of this machine. Else they would take another card than was chosen.
bool leads_through(const SocketAddress& here, const SocketAddress& there);

struct TcpAddress {
  TcpId id{};
  SocketAddress socket;
};
std::vector<std::byte> encode(const TcpAddress& address);
core::Result<TcpAddress> decode_tcp_address(std::span<const std::byte> bytes);

inline constexpr std::size_t kGreetingBytes = 8 + 2 * sizeof(TcpId);
std::array<std::byte, kGreetingBytes> encode_greeting(const TcpId& from, const TcpId& to);
/// Who greets, if it is for `us`.
std::optional<TcpId> decode_greeting(std::span<const std::byte, kGreetingBytes> bytes, const TcpId& us);

struct Frame {
  std::uint32_t payload_bytes = 0;
  std::uint16_t header_bytes = 0;
};
inline constexpr std::size_t kFrameBytes = 8;
void encode(const Frame& frame, std::byte* to);
/// Nothing: those are not bytes of ours.
std::optional<Frame> decode_frame(const std::byte* from);

}  // namespace hybridps::transport
