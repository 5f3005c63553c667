// hybridps/transport/tcp/round_trip.h: the round trip to a host, from the kernel's handshake with one of its ports.
//
// Model    A connection is opened and closed. TCP_INFO has the time between SYN and SYN-ACK. Neither this process nor
//          the peer's process adds to this time. The first packet to a host may wait for address resolution. So after a
//          first time above kLongUs, kAgain more connections are opened at once. The shortest of all times counts.
// Threads  one at a time. Nothing waits.
// Errors   the result is 0 if the host refuses, if it does not answer within kGiveUpAfter, or if no descriptor is free.
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
