// hybridps/transport/tcp/round_trip.h: the round trip to a host, from the kernel's handshake with one of its ports.
//
// Model    A connection is opened and closed. TCP_INFO has the time between SYN and SYN-ACK, so neither this process
// nor
//          the peer's process adds to it. If the first time is long, kAgain connections more are opened at once, and
//          the shortest of all times counts: the first packet to a host may wait for address resolution.
// Threads  one at a time. Nothing waits.
// Errors   a host that refuses, or has not answered within kGiveUpAfter, gives 0. So does a lack of descriptors.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/core/pinned.h"
#include "hybridps/transport/tcp/tcp_wire.h"

namespace hybridps::transport {

class RoundTrip : core::Pinned {
 public:
  static constexpr auto kGiveUpAfter = std::chrono::seconds(1);
  static constexpr std::uint32_t kLongUs = 500;
  static constexpr int kAgain = 2;

  /// Begins. `to`: a port that listens.
  RoundTrip(SocketAddress to, core::TimePoint now);
  /// Microseconds, at least 1; 0: not known. No value: not over yet.
  std::optional<std::uint32_t> step(core::TimePoint now);

 private:
  void open();

  const SocketAddress to_;
  const core::TimePoint give_up_at_;
  std::vector<core::Descriptor> sockets_;  // that are being connected
  bool asked_again_ = false;
  std::uint32_t shortest_ = 0;
};

}  // namespace hybridps::transport
