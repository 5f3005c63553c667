// hybridps/transport/handover.h: when transports' bytes are moved by threads of their own, and when by the engine's.
//
// Why      A thread of its own takes most of a fast network's cost off the thread that sums (docs/decisions/0015), but a
//          message waits for it, so that it pays only while moving bytes is what the engine's thread is busy with.
// Model    One for all data transports of an engine. Time is cut into stretches. Where the engine's thread spent `busy` of one
//          moving bytes, the transport that ends it is handed over, and it is known what a byte costs. What is moved by the
//          other threads is reckoned at that cost; after `light_stretches` with less than `light` of the time, one behind the
//          other, the transport that ends the last is taken back, if that would not make the engine's thread busy again. Stretches end when bytes move: a pause counts as one.
// Threads  the engine's. Pure: no clock, no I/O.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridps/core/clock.h"

namespace hybridps::transport {

struct HandoverOptions {
  core::Duration stretch = core::from_seconds(0.02);
  double busy = 0.2;  // sums and copies of the same bytes take about as long again
  double light = 0.1;
  int light_stretches = 50;
  std::uint64_t bulk_bytes = 16 * 1024;  // what moves at once before it is worth looking at the time that it takes
};

class Handover {
 public:
  explicit Handover(const HandoverOptions& options = {}) : options_(options) {}

  /// The engine's thread moved `bytes` of a transport, in and out, and `spent` this time of its core on it, until `now`.
  /// True: hand that transport over.
  bool moved_here(core::TimePoint now, core::Duration spent, std::uint64_t bytes) noexcept;
  /// Another thread moved `bytes` of one until `now`. True: take it back.
  bool moved_there(core::TimePoint now, std::uint64_t bytes) noexcept;

  /// As found in the stretch that last handed over; 0 before.
  double seconds_per_byte() const noexcept { return seconds_per_byte_; }
  const HandoverOptions& options() const noexcept { return options_; }

 private:
  struct Stretch {
    core::TimePoint since{};  // none: no bytes yet
    core::Duration spent{};
    std::uint64_t bytes = 0;
  };
  /// Adds to the stretch. If that ends it, true; `whole` is what it came to, and `took` how long it was, in seconds.
  bool ends(Stretch& stretch, core::TimePoint now, core::Duration spent, std::uint64_t bytes, Stretch& whole,
            double& took) const noexcept;

  const HandoverOptions options_;
  Stretch here_;
  Stretch there_;
  int light_ = 0;
  double here_part_ = 0;  // of the last stretch here; 0 again where that handed over
  double seconds_per_byte_ = 0;
};

}  // namespace hybridps::transport
