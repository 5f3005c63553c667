// hybridps/engine/wake_moderation.h: how long the loop may stay asleep though data comes in.
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

  /// `bytes`: payload that has come in and gone out, since the beginning; `left`: bytes that the operations under way still wait for.
  core::Duration nap(std::uint64_t bytes, std::uint64_t left, core::TimePoint now) noexcept {
    if (now - since_ >= kWindow) {
      const double seconds = core::to_seconds(now - since_);
      const double rate = static_cast<double>(bytes - bytes_) / seconds;
      // After a pause what was before says nothing.
      rate_ = seconds > 5 * core::to_seconds(kWindow) || rate_ == 0.0 ? rate : 0.75 * rate_ + 0.25 * rate;
      since_ = now;
      bytes_ = bytes;
    }
    if (left == 0 || rate_ <= 0.0) return {};
    const double seconds =
        std::min(static_cast<double>(kBatchBytes) / rate_, static_cast<double>(left) / rate_ * kPartOfRest);
    const core::Duration nap = std::min<core::Duration>(core::from_seconds(seconds), kNapMax);
    return nap < kNapMin ? core::Duration{} : nap;
  }

 private:
  static constexpr core::Duration kWindow = std::chrono::milliseconds(4);
  core::TimePoint since_{};
  std::uint64_t bytes_ = 0;
  double rate_ = 0.0;
};

}  // namespace hybridps::engine
