// hybridps/transport/handover.h: decides whether a separate thread or the engine's thread moves a transport's bytes.
//
// Why      A separate thread takes most of a fast network's cost off the thread that sums. But messages then
//          wait for the separate thread. So a handover pays only while moving bytes keeps the engine's thread busy
//          (decisions 15 and 38: docs/decisions/threads.md).
// Model    There is one Handover for all data transports of an engine. Time is cut into stretches. If the engine's
//          thread spent at least the fraction `busy` of a stretch on moving bytes, the transport that ended the stretch
//          is handed over. The stretch also gives the cost per byte. Bytes that other threads move are converted to
//          time at this cost. A stretch is light if the converted time is below the fraction `light` and would not make
//          the engine's thread busy again. After `light_stretches` light stretches in a row, the transport that ended
//          the last of them is taken back. Stretches end when bytes move: a pause counts as one stretch.
// Threads  the engine's. Pure: no clock, no I/O.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridps/core/clock.h"

namespace hybridps::transport {

struct HandoverOptions {
  core::Duration stretch = core::from_seconds(0.02);
  double busy = 0.2;  // fraction of a stretch; sums and copies of the same bytes take about as long again
  double light = 0.1;
  int light_stretches = 50;
  std::uint64_t bulk_bytes = 16 * 1024;  // CPU time is measured only after a round that moved this much
};

class Handover {
 public:
  explicit Handover(const HandoverOptions& options = {}) : options_(options) {}

  /// Until `now`, the engine's thread sent and received `bytes` of a transport and spent the CPU time `spent` on them.
  /// True: hand that transport over.
  bool moved_here(core::TimePoint now, core::Duration spent, std::uint64_t bytes) noexcept;
  /// Until `now`, another thread moved `bytes` of a transport. True: take that transport back.
  bool moved_there(core::TimePoint now, std::uint64_t bytes) noexcept;

  /// Cost found in the stretch of the last handover; 0 before the first one.
  double seconds_per_byte() const noexcept { return seconds_per_byte_; }
  const HandoverOptions& options() const noexcept { return options_; }

 private:
  struct Stretch {
    core::TimePoint since{};  // default: no bytes yet
    core::Duration spent{};
    std::uint64_t bytes = 0;
  };
  /// Adds to `stretch`. True: the stretch has ended, `whole` is its total and `took` is its length in seconds.
  bool ends(Stretch& stretch, core::TimePoint now, core::Duration spent, std::uint64_t bytes, Stretch& whole,
            double& took) const noexcept;

  const HandoverOptions options_;
  Stretch here_;
  Stretch there_;
  int light_ = 0;
  double here_part_ = 0;  // busy fraction of the engine's last stretch; 0 after a handover
  double seconds_per_byte_ = 0;
};

}  // namespace hybridps::transport
