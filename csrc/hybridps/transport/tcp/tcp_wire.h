// hybridps/transport/tcp/tcp_wire.h: what goes over a connection, and where it leads to.
//
//   greeting   once, from the connecting side: 8 bytes mark, 16 bytes own id, 16 bytes id of the wanted side
//   answer     once, from the accepting side, 8 bytes: whether messages may follow
//   message    4 bytes length of the payload, 2 bytes length of the header, 2 bytes mark; the header; the payload
//
// Numbers are little endian. An id is 128 random bits that a transport draws. The id is part of the transport's
// address. The members of a group have each other's addresses. A side that does not know the id is refused.
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
/// Parses a numeric IP address. Nothing: `numeric` is no IP address.
std::optional<SocketAddress> parse_address(const std::string& numeric, std::uint16_t port);

/// Whether packets to `there` leave through the card with the address `here`. True if `there` is in the card's own
/// network, if the kernel's routes lead through the card, or if `there` is an address of this machine. Otherwise the
/// packets would take another card than the chosen one.
bool leads_through(const SocketAddress& here, const SocketAddress& there);

struct TcpAddress {
  TcpId id{};
  SocketAddress socket;
};
std::vector<std::byte> encode(const TcpAddress& address);
core::Result<TcpAddress> decode_tcp_address(std::span<const std::byte> bytes);

inline constexpr std::size_t kGreetingBytes = 8 + 2 * sizeof(TcpId);
std::array<std::byte, kGreetingBytes> encode_greeting(const TcpId& from, const TcpId& to);
/// Whether `bytes` begin as a greeting does, for any receiver.
bool is_greeting(std::span<const std::byte, kGreetingBytes> bytes);
/// The id of the greeting side, if the greeting is for `us`.
std::optional<TcpId> decode_greeting(std::span<const std::byte, kGreetingBytes> bytes, const TcpId& us);

/// The answer to the connecting side. Before the answer, the connecting side sends only its greeting. So if no answer
/// comes, the connecting side can send everything again on a new connection.
enum class TcpAnswer : std::uint8_t {
  kWelcome,
  kBusy,    // no descriptors or memory for the connection now: come again
  kClosed,  // the accepting side's endpoint to the greeting side has failed or was closed
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
/// Nothing: hybridps does not send such bytes.
std::optional<Frame> decode_frame(const std::byte* from);

}  // namespace hybridps::transport
