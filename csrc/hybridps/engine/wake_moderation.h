// hybridps/engine/wake_moderation.h: how fast bulk flows, and how long the loop may sleep while data comes in.
//
// Problem  On a slow link each message of a large operation would wake the loop. This makes thousands of wake-ups a
//          second, each with its system calls, on a core that computes the next gradients.
// Model    While bulk flows at a known rate, received data stays in the kernel's buffers until a batch has come. A nap
//          lasts as long as a batch takes at that rate, and at most kNapMax. A nap also lasts at most kPartOfRest of
//          the time for which the operations under way still need the network, so that no operation ends noticeably
//          later. A nap below kNapMin is not worth its timer. Urgent messages use another connection and end a nap.
// Source   interrupt moderation of network cards (Salah, "To coalesce or not to coalesce", 2007); Linux's dim.
// Threads  a plain value; a pure function of its inputs. No clock of its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "hybridps/core/clock.h"

namespace hybridps::engine {

class WakeModeration {
 public:
  static constexpr std::uint64_t kBatchBytes = std::uint64_t{64} << 10;
  static constexpr core::Duration kNapMax = std::chrono::milliseconds(2);
  static constexpr core::Duration kNapMin = std::chrono::microseconds(200);
  static constexpr double kPartOfRest = 1.0 / 128;
  /// Fewer bytes in a window are not bulk: the operation waits for a rank, or small messages go both ways.
  static constexpr std::uint64_t kFlowBytes = kBatchBytes / 4;
  /// The shortest time over which the rate is measured.
  static constexpr core::Duration kWindow = std::chrono::milliseconds(4);

  /// `bytes`: payload received or sent since the beginning, in the direction with more. `left`: bytes that the
  /// operations under way still wait for. Call it often: a pause of more than 5 windows, or a time with nothing under
  /// way, is not measured.
  void look(std::uint64_t bytes, std::uint64_t left, core::TimePoint now) noexcept {
    if (now - since_ < kWindow && is_measuring_) return;
    if (is_measuring_ && left > 0 && now - since_ <= 5 * kWindow) {
      flows_ = bytes - bytes_ >= kFlowBytes;
      const double rate = static_cast<double>(bytes - bytes_) / core::to_seconds(now - since_);
      if (flows_) {
        mean_ = mean_ == 0.0 ? rate : 0.75 * mean_ + 0.25 * rate;
        rate_ = std::max(rate, 0.75 * rate_ + 0.25 * rate);
      }
    } else {
      flows_ = false;
    }
    is_measuring_ = left > 0;
    since_ = now;
    bytes_ = bytes;
  }

  /// Mean bytes per second while operations were under way; 0: not known. A mean, because data that has gathered in the
  /// kernel comes as a burst.
  double rate() const noexcept { return mean_; }

  core::Duration nap(std::uint64_t left) const noexcept {
    if (left == 0 || rate_ <= 0.0 || !flows_) return {};
    const double seconds =
        std::min(static_cast<double>(kBatchBytes) / rate_, static_cast<double>(left) / rate_ * kPartOfRest);
    const core::Duration nap = std::min<core::Duration>(core::from_seconds(seconds), kNapMax);
    return nap < kNapMin ? core::Duration{} : nap;
  }

 private:
  bool is_measuring_ = false;
  bool flows_ = false;  // bulk flowed in the last window; so no nap comes when an operation begins
  core::TimePoint since_{};
  std::uint64_t bytes_ = 0;
  double rate_ = 0.0;  // rises at once: a nap that is too long would lower the next measured rate
  double mean_ = 0.0;
};

}  // namespace hybridps::engine
