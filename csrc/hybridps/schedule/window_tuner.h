// hybridps/schedule/window_tuner.h: how much may be under way to one peer, from the round trips that it takes.
//
// Model    The base window is right where the network is slow: what it holds keeps a card busy, and queues short. Where
//          what is sent comes back as credit within kShort, the window itself is the limit, not the card: it grows, by a
//          quarter a round, as long as that holds. Where a round takes longer than kLong, data waits in queues or for
//          other nodes' contributions, and more of it would not help: the window falls back, never below its base.
// Source   congestion avoidance by delay, as in TCP Vegas (Brakmo, Peterson 1995), between fixed bounds.
// Threads  a plain value; pure functions of what it is told. No clock of its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace hybridps::schedule {

class WindowTuner {
 public:
  using Duration = std::chrono::nanoseconds;  // a point in time is the time since any fixed one
  static constexpr Duration kShort = std::chrono::microseconds(1000);
  static constexpr Duration kLong = std::chrono::microseconds(2000);

  /// Starts again. `base` <= `limit`, bytes; limit: what the peer allows.
  void reset(std::int64_t base, std::int64_t limit) noexcept {
    base_ = window_ = base;
    limit_ = std::max(base, limit);
    measuring_ = false;
  }
  std::int64_t window() const noexcept { return window_; }

  /// The window is spent: `total` bytes have left since the beginning, and no further message fits.
  void on_spent(std::uint64_t total, Duration now) noexcept {
    if (measuring_) return;
    measuring_ = true;
    // Credit comes back in batches of a quarter of the window; the last one stays away while nothing more is sent.
    mark_ = total - std::min<std::uint64_t>(total, static_cast<std::uint64_t>(window_ / 4));
    since_ = now;
  }
  /// Credit came: `total` bytes are back since the beginning. True if the window has changed.
  bool on_returned(std::uint64_t total, Duration now) noexcept {
    if (!measuring_ || total < mark_) return false;
    measuring_ = false;
    const Duration round = now - since_;
    const std::int64_t before = window_;
    if (round < kShort)
      window_ = std::min(limit_, window_ + std::max<std::int64_t>(1, window_ / 4));
    else if (round > kLong)
      window_ = std::max(base_, window_ - window_ / 4);
    return window_ != before;
  }

 private:
  std::int64_t base_ = 0;
  std::int64_t limit_ = 0;
  std::int64_t window_ = 0;
  bool measuring_ = false;
  std::uint64_t mark_ = 0;
  Duration since_{};
};

}  // namespace hybridps::schedule
