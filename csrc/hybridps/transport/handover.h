// hybridps/transport/handover.h: when a transport's bytes are moved by a thread of its own, and when by the engine's.
//
// Why      A thread of its own takes most of a fast network's cost off the thread that sums (docs/decisions/0015), but a
//          message waits for it, so that it pays only while moving bytes is what the engine's thread is busy with.
// Model    Time is cut into stretches. The first in which the engine's thread spent `busy` of the time moving bytes hands the
//          transport over, and says what a byte costs. What is moved afterwards is reckoned at that cost; after
//          `light_stretches` with less than `light` of the time, one behind the other, it is taken back. Stretches end when
//          bytes move: a pause counts as one.
// Threads  one at a time. Pure: no clock, no I/O.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridps/core/clock.h"

namespace hybridps::transport {

struct HandoverOptions {
  core::Duration stretch = core::from_seconds(0.02);
  double busy = 0.25;  // sums and copies of the same bytes take about as long again
  double light = 0.08;
  int light_stretches = 50;
  std::uint64_t bulk_bytes = 16 * 1024;  // whoever tells this times only what moves so much at once, and what follows it
};

class Handover {
 public:
  explicit Handover(const HandoverOptions& options) : options_(options) {}

  /// The engine's thread moved `bytes`, in and out, and `spent` this time on it, until `now`. True: hand over.
  bool moved_here(core::TimePoint now, core::Duration spent, std::uint64_t bytes) noexcept;
  /// The transport's thread moved `bytes` until `now`. True: take back.
  bool moved_there(core::TimePoint now, std::uint64_t bytes) noexcept;

  /// As found in the stretch that handed over; 0 before.
  double seconds_per_byte() const noexcept { return seconds_per_byte_; }

 private:
  /// Adds to the stretch; if that ends it, true, and `took` its length.
  bool ends(core::TimePoint now, core::Duration spent, std::uint64_t bytes, core::Duration& took) noexcept;
  void begin() noexcept;

  const HandoverOptions options_;
  core::TimePoint since_{};  // of the stretch; none: no bytes yet
  core::Duration spent_{};
  std::uint64_t bytes_ = 0;
  int light_ = 0;
  double seconds_per_byte_ = 0;
};

}  // namespace hybridps::transport
