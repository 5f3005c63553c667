// hybridps/engine/wake_moderation.h: how fast bulk flows, and how long the loop may stay asleep though data comes in.
//
// Problem  On a slow link each message of a large operation would wake the loop: thousands of wake-ups a second, each with its
//          system calls, on a core that computes the next gradients.
// Model    While bulk flows at a known rate, what comes in is left to the kernel's buffers until a batch is there. A nap is as
//          long as a batch takes at that rate, never more than kNapMax, nor than a small part of the time for which the
//          operations under way still need the network, so that none ends noticeably later; below kNapMin it is not worth
//          its timer. What is urgent comes another way and ends a nap.
// Source   interrupt moderation of network cards (Salah, "To coalesce or not to coalesce", 2007); Linux's dim.
// Threads  a plain value; a pure function of what it is told. No clock of its own.
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
  /// Less in a window is no bulk: somebody is waited for, or small messages go to and fro.
  static constexpr std::uint64_t kFlowBytes = kBatchBytes / 4;
  /// What the rate is averaged over, at least.
  static constexpr core::Duration kWindow = std::chrono::milliseconds(4);

  /// `bytes`: payload that has come in or gone out since the beginning; `left`: what the operations under way still wait
  /// for, bytes. To be called often; who looks away for long, or has nothing under way, learns nothing from that time.
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

  /// Bytes a second while operations were under way; 0: not known. The mean: what had gathered in the kernel comes as a burst.
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
  bool flows_ = false;  // in the window before this one: nobody naps when an operation begins
  core::TimePoint since_{};
  std::uint64_t bytes_ = 0;
  double rate_ = 0.0;  // rises at once: a nap that is too long would hold the next rate down
  double mean_ = 0.0;
};

}  // namespace hybridps::engine
