// hybridps/transport/tcp/tcp_transport.h: the Transport between machines over the kernel's TCP, without a library between.
//
// Owner    the engine, one for each network card and socket.
// Threads  one thread at a time for everything, destructor included.
// Memory   payloads are sent from where they lie (attach() says where they may) and received into slots of its own.
// Failure  a broken connection fails its endpoint at once and is reported from progress(); one that is lost before the other side
//          has answered, or that has no descriptors, here or there, is made again. An endpoint that failed or was
//          closed is never opened again.
// Fork     sockets are closed in a forked child; there every method does nothing or returns kClosed, and destruction leaks.
// Security who does not know the 128 random bits of our address gets no further than the greeting (tcp_wire.h).
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
  /// Of the card: numeric, IPv4 or IPv6. Connections come in there and go out from there.
  std::string address;
  /// In names, logs and errors.
  std::string label = "data";
  /// How long a friendly close, and the destructor, wait for what is on its way.
  core::Duration close_timeout = core::from_seconds(1);
  /// The kernel gives up on unacknowledged data, and on connecting, after this; 0: its own default.
  core::Duration user_timeout = core::from_seconds(10);
  /// Who connects has this long for its greeting.
  core::Duration greeting_timeout = core::from_seconds(10);
  /// A connection that is lost before the other side has answered is made again for so long.
  core::Duration redial_for = core::from_seconds(5);
  /// So many may have connected and not greeted: beyond it the oldest goes. 0: 1024, and no more than a quarter of the
  /// descriptors.
  std::size_t greetings_max = 0;
  /// Larger incoming payloads break the connection: nobody of ours sends them.
  std::size_t payload_bytes_max = std::size_t{64} << 20;
};

/// Since creation, where not said otherwise.
struct TcpCounters {
  std::uint64_t sends = 0;                 // system calls that sent something
  std::uint64_t receives = 0;              // system calls that received something
  std::uint64_t bytes_copied = 0;          // of payloads: came in with the header before them
  std::uint64_t refused = 0;               // connections that did not greet as a peer does
  std::uint64_t malformed = 0;             // connections that broke for what they sent
  std::uint64_t redials = 0;               // connections that were lost before an answer, or had no descriptors
  std::uint64_t turned_away = 0;           // connections that were told to come again: no descriptors
  std::uint64_t receive_bytes = 0;         // of memory for payloads, now
  std::uint64_t receive_slots_in_use = 0;  // now
};

class TcpTransport : public Transport {
 public:
  /// kInvalidArgument: no such address here. kOutOfResources: descriptors.
  static core::Result<std::unique_ptr<TcpTransport>> create(const TcpOptions& options);

  virtual TcpCounters counters() const noexcept = 0;
};

}  // namespace hybridps::transport
