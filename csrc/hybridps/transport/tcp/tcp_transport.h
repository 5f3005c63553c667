// hybridps/transport/tcp/tcp_transport.h: the Transport between machines over the kernel's TCP, without a library.
//
// Owner    the engine, one TcpTransport for each network card and socket.
// Threads  one thread at a time for everything, destructor included.
// Memory   payloads are sent directly from attached memory (attach()) and received into slots that the transport owns.
// Failure  a broken connection fails its endpoint at once and is reported from progress(). A connection is made again
//          if it was lost before the other side answered, or if either side had no descriptors. An endpoint that failed
//          or was closed is never opened again.
// Fork     sockets are closed in a forked child; there every method does nothing or returns kClosed, and destruction
//          leaks.
// Security without the 128 random bits of our address, a stranger gets no further than the greeting (tcp_wire.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "hybridps/core/clock.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/transport.h"

namespace hybridps::transport {

struct TcpOptions {
  /// Numeric IPv4 or IPv6 address of the card. The transport listens on this address and connects from it.
  std::string address;
  /// Used in names, logs and errors.
  std::string label = "data";
  /// A friendly close and the destructor wait this long for data in flight.
  core::Duration close_timeout = core::from_seconds(1);
  /// The kernel gives up on unacknowledged data, and on connecting, after this time; 0: the kernel's default.
  core::Duration user_timeout = core::from_seconds(10);
  /// A connecting side has this long to send its greeting.
  core::Duration greeting_timeout = core::from_seconds(10);
  /// A connection that is lost before the other side has answered is retried for this long.
  core::Duration redial_for = core::from_seconds(5);
  /// Limit of accepted connections that have not greeted yet. Beyond the limit the oldest is dropped. 0: 1024, but at
  /// most a quarter of the allowed descriptors.
  std::size_t greetings_max = 0;
  /// Larger incoming payloads break the connection: hybridps never sends them.
  std::size_t payload_bytes_max = std::size_t{64} << 20;
};

/// Counts since creation, except for the values marked "now".
struct TcpCounters {
  std::uint64_t sends = 0;                 // system calls that sent something
  std::uint64_t receives = 0;              // system calls that received something
  std::uint64_t bytes_copied = 0;          // payload bytes that arrived together with their header
  std::uint64_t refused = 0;               // connections that were closed at the greeting
  std::uint64_t malformed = 0;             // connections that were closed for invalid bytes
  std::uint64_t redials = 0;               // retries after a loss before an answer, or for lack of descriptors
  std::uint64_t turned_away = 0;           // connections that were told to come again: no descriptors here
  std::uint64_t receive_bytes = 0;         // memory for received payloads, now
  std::uint64_t receive_slots_in_use = 0;  // now
};

class TcpTransport : public Transport {
 public:
  /// kInvalidArgument: no such address here. kOutOfResources: no descriptors.
  static core::Result<std::unique_ptr<TcpTransport>> create(const TcpOptions& options);

  virtual TcpCounters counters() const noexcept = 0;
};

}  // namespace hybridps::transport
