// hybridps/transport/tcp/tcp_wire.h: what goes over a connection, and the address of a transport.
//
//   knock      32 bytes, once, from the connecting side, only with TLS (tls/knock.h). All that follows goes in TLS
//   greeting   68 bytes, once, from the connecting side: mark, own id, id of the wanted side, session, counts
//   answer     28 bytes, once, from the accepting side: whether messages may follow, and the session's counts. The last
//              4 bytes of a greeting and of an answer are the CRC32C of the others
//   message    a frame, then the header, then the payload
//   frame      12 bytes: length of the payload (4), length of the header (2), kind (2), count of received bytes (4)
//   sums       8 bytes behind each frame, with TcpOptions::checksums: CRC32C of header and payload (4), CRC32C of the
//              frame and of these 4 bytes (4). All bits of the kind are inverted then
//
// The count of a frame has the low 32 bits of all bytes received since the session began. Greeting and answer do not
// count. A session (tcp_session.h) is the stream of frames. A frame without a message only carries the count, or says
// farewell. Numbers are little endian.
//
// An id has 128 bits and is part of the transport's address. The members of a group have each other's addresses. A side
// that does not know the id is refused. Without TLS, the id is random. With TLS, the id is a hash of the transport's
// certificate (tls/authority.h).
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
#include "hybridps/transport/tcp/tcp_session.h"

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
  bool has_tls = false;        // connections there go in TLS
  bool has_checksums = false;  // frames have sums
};
std::vector<std::byte> encode(const TcpAddress& address);
core::Result<TcpAddress> decode_tcp_address(std::span<const std::byte> bytes);

/// For a way that swallows larger packets: 1,280 bytes, which IPv6 asks of every network, without the headers.
inline constexpr int kSmallSegmentBytes = 1220;

/// Who greets, and which session the connection is for.
struct TcpGreeting {
  TcpId from{};
  TcpId to{};
  std::uint32_t number = 0;  // of the sessions that one side has begun
  bool is_mine = true;       // the greeting side has begun the session, else the greeted side
  bool is_new = true;        // no greeting for the session has had an answer yet
  bool has_small_packets = false;
  SessionSide side;
};
inline constexpr std::size_t kGreetingBytes = 68;
std::array<std::byte, kGreetingBytes> encode(const TcpGreeting& greeting);
/// Whether `bytes` are a greeting as it was sent, or may be the beginning of one, for any receiver.
bool may_be_greeting(std::span<const std::byte> bytes);
/// The greeting, if it is for `us`.
std::optional<TcpGreeting> decode_greeting(std::span<const std::byte, kGreetingBytes> bytes, const TcpId& us);

/// The answer to the connecting side. Before the answer, the connecting side sends only its greeting.
enum class TcpAnswer : std::uint8_t {
  kWelcome,
  kBusy,     // no descriptors or memory for the connection now: come again
  kClosed,   // the accepting side's endpoint to the greeting side has failed or was closed, or it has no such session
  kNotHere,  // another process has the address now
  kCrossed,  // the accepting side dials, too, and its session or attempt goes first
  kSmaller,  // full packets do not arrive: come again with small ones
  kUnnamed,  // too many that nobody has named are here already: come again
  kDamaged   // bytes of the dialling side were changed on the way: it gets no further connection
};
inline constexpr std::size_t kAnswerBytes = 28;
struct TcpReply {
  TcpAnswer answer = TcpAnswer::kWelcome;
  SessionSide side;  // with kWelcome
};
std::array<std::byte, kAnswerBytes> encode(const TcpReply& reply);
/// Whether `bytes` are an answer that was changed on the way. Else, if decode_reply() gives none, they are no answer.
bool is_damaged_reply(std::span<const std::byte, kAnswerBytes> bytes);
std::optional<TcpReply> decode_reply(std::span<const std::byte, kAnswerBytes> bytes);

enum class FrameKind : std::uint16_t {
  kMessage = 0x5048,
  kCount = 0x5049,    // tells what has come, nothing else
  kFarewell = 0x504a  // the last frame: the sending side has closed its endpoint, and does not come again
};
struct Frame {
  FrameKind kind = FrameKind::kMessage;
  std::uint32_t payload_bytes = 0;
  std::uint16_t header_bytes = 0;
  std::uint32_t received = 0;
};
inline constexpr std::size_t kFrameBytes = 12;
void encode(const Frame& frame, std::byte* to);
/// Changes what an encoded frame tells to have come.
void set_received(std::byte* frame, std::uint32_t received);
/// Nothing: hybridps does not send such bytes.
std::optional<Frame> decode_frame(const std::byte* from);

inline constexpr std::size_t kSumsBytes = 8;
/// Writes the sums behind an encoded frame, and marks the frame. `body`: the CRC32C of header and payload.
void add_sums(std::byte* frame, std::uint32_t body);
/// Of a frame with its sums, kFrameBytes + kSumsBytes.
struct SummedFrame {
  std::optional<Frame> frame;  // nothing: as decode_frame()
  std::uint32_t body = 0;
};
/// Nothing: the bytes were changed on the way, or have no sums.
std::optional<SummedFrame> decode_summed_frame(const std::byte* from);

}  // namespace hybridps::transport
