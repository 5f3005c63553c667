// hybridps/transport/tcp/tcp_transport.h: the Transport between machines over the kernel's TCP, without a library.
//
// Owner    the engine, one TcpTransport for each network card and socket.
// Threads  one thread at a time for everything, destructor included.
// Memory   payloads are sent directly from attached memory (attach()) and received into slots that the transport owns.
//          A payload is kept until the peer has confirmed it. A peer that sends nothing itself may confirm 256 KiB or
//          40 ms late. So the kept bytes are bounded by what may be under way, and by this delay.
// Failure  a broken connection is a pause: either side makes it again, and no byte is lost or comes twice. An endpoint
//          fails, once, in three cases. The peer's process is known to have ended: nobody listens there, or another
//          process does. The peer has closed its own endpoint. No connection could be made for redial_for. An endpoint
//          that failed or was closed is never opened again.
// Fork     sockets are closed in a forked child; there every method does nothing or returns kClosed, and destruction
//          leaks.
// Security without the 128-bit id of our address, a stranger gets no further than the greeting (tcp_wire.h). With an
//          authority, the greeting goes inside TLS, and only the process that made an id can use it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "hybridps/core/clock.h"
#include "hybridps/core/status.h"
#include "hybridps/tls/authority.h"
#include "hybridps/transport/transport.h"

namespace hybridps::transport {

struct TcpOptions {
  /// Numeric IPv4 or IPv6 address of the card. The transport listens on this address and connects from it.
  std::string address;
  /// Listens on a free port of this range. Both 0: on any free port.
  std::uint16_t port_first = 0;
  std::uint16_t port_last = 0;
  /// Used in names, logs and errors.
  std::string label = "data";
  /// A friendly close and the destructor wait this long for data in flight.
  core::Duration close_timeout = core::from_seconds(1);
  /// The kernel gives up on unacknowledged data, and on connecting, after this time; 0: the kernel's default. The
  /// connection is then made again: sooner than the kernel's own retries, which come later and later.
  core::Duration user_timeout = core::from_seconds(3);
  /// The congestion control of all connections; empty: the kernel's.
  std::string congestion;
  /// The most that a connection sends, in bytes a second; 0: no limit.
  double bytes_per_second_max = 0;
  /// The class of all packets (RFC 2474), 0..63.
  int dscp = 0;
  /// A connecting side has this long to send its greeting.
  core::Duration greeting_timeout = core::from_seconds(10);
  /// A connection that is lost is made again, and goes on after the last byte that arrived. It is tried for this long.
  core::Duration redial_for = core::from_seconds(5);
  /// Limit of connections that have greeted without a name that is known here, and in TLS of those that have knocked
  /// and not greeted. 0: 1024, but at most a quarter of the allowed descriptors. Connections that may be of anybody
  /// have 64 places, or this limit if it is lower. Beyond a limit the oldest is dropped.
  std::size_t greetings_max = 0;
  /// Larger incoming payloads break the connection: hybridps never sends them.
  std::size_t payload_bytes_max = std::size_t{64} << 20;
  /// All connections go in TLS 1.3, with peers of this authority only. Null: they go in clear.
  std::shared_ptr<const tls::Authority> authority;
  /// The kernel encrypts what is sent, where it can.
  bool kernel_tls = false;
  /// Each message carries a CRC32C. A wrong one ends the session with its peer. Without an authority only: TLS has sums
  /// of its own.
  bool checksums = false;
  /// Counts wrong sums, for all transports that share it. May be null.
  std::shared_ptr<std::atomic<std::uint64_t>> damaged;
};

/// Counts since creation, except for the values marked "now".
struct TcpCounters {
  std::uint64_t sends = 0;                 // system calls that sent something
  std::uint64_t receives = 0;              // system calls that received something
  std::uint64_t bytes_copied = 0;          // payload bytes that arrived together with their header
  std::uint64_t refused = 0;               // connections that were closed at the greeting
  std::uint64_t malformed = 0;             // connections that were closed for invalid bytes
  std::uint64_t damaged = 0;               // frames and messages with a wrong checksum
  std::uint64_t redials = 0;               // retries after a loss, for lack of descriptors, or as both sides dialled
  std::uint64_t turned_away = 0;           // connections that were told to come again: no descriptors here
  std::uint64_t receive_bytes = 0;         // memory for received payloads, now
  std::uint64_t receive_slots_in_use = 0;  // now
};

class TcpTransport : public Transport {
 public:
  /// kInvalidArgument: no such address, or no such congestion control, here. kOutOfResources: no descriptors.
  static core::Result<std::unique_ptr<TcpTransport>> create(const TcpOptions& options);

  virtual TcpCounters counters() const noexcept = 0;
};

}  // namespace hybridps::transport
