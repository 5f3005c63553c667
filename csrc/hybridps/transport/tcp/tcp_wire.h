// hybridps/transport/tcp/tcp_wire.h: what goes over a connection, and where it leads to.
//
//   greeting   once, from who connects: 8 bytes mark, 16 bytes its own id, 16 bytes the id that it wants to reach
//   answer     once, from who accepted, 8 bytes: whether messages may follow
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
/// Whether they begin as a greeting does, whoever it is for.
bool is_greeting(std::span<const std::byte, kGreetingBytes> bytes);
/// Who greets, if it is for `us`.
std::optional<TcpId> decode_greeting(std::span<const std::byte, kGreetingBytes> bytes, const TcpId& us);

/// To who has connected. Before it nothing but the greeting was sent there: where none comes, the same can be sent once more.
enum class TcpAnswer : std::uint8_t {
  kWelcome,
  kBusy,    // no descriptors or memory for it now: come again
  kClosed,  // the one who greets was given up, or left, before
  kNotHere  // another process has the address now
};
inline constexpr std::size_t kAnswerBytes = 8;
std::array<std::byte, kAnswerBytes> encode_answer(TcpAnswer answer);
std::optional<TcpAnswer> decode_answer(std::span<const std::byte, kAnswerBytes> bytes);

struct Frame {
  std::uint32_t payload_bytes = 0;
  std::uint16_t header_bytes = 0;
};
inline constexpr std::size_t kFrameBytes = 8;
void encode(const Frame& frame, std::byte* to);
/// Nothing: those are not bytes of ours.
std::optional<Frame> decode_frame(const std::byte* from);

}  // namespace hybridps::transport
