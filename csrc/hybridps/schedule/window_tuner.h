// hybridps/schedule/window_tuner.h: how many bytes may be under way to one peer, from the time of round trips.
//
// Model    The base window is right on a slow network: it keeps a card busy, and queues short. If the window's bytes
//          come back as credit within a quick round, the window is the limit, not the card. Then the window grows by a
//          quarter per round. In a slow round, data waits in queues or for other nodes' contributions, and a larger
//          window would not help. Then the window falls by a quarter per round, never below the base.
// Source   congestion avoidance by delay, as in TCP Vegas (Brakmo, Peterson 1995), between fixed bounds.
// Threads  a plain value without a clock: pure functions of the arguments.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace hybridps::schedule {

class WindowTuner {
 public:
  using Duration = std::chrono::nanoseconds;  // a point in time is the time since any fixed point
  struct Rounds {
    Duration quick;  // the window grows after a shorter round
    Duration slow;   // the window falls after a longer round
    bool operator==(const Rounds&) const = default;
  };
  static constexpr Rounds kUsual = {std::chrono::milliseconds(1), std::chrono::milliseconds(2)};
  /// With dedicated servers, owners with unequal shares wait for each other. The bytes under way meanwhile keep the
  /// cards busy (decision 16: docs/decisions/flow-control.md).
  static constexpr Rounds kPatient = {std::chrono::milliseconds(10), std::chrono::milliseconds(20)};
  /// The window stays: the path decides (schedule/far_window.h).
  static constexpr Rounds kFixed = {Duration::zero(), Duration::max()};

  /// Starts again with window `base`. `limit`: what the peer allows, bytes; a smaller limit counts as `base`.
  void reset(std::int64_t base, std::int64_t limit, const Rounds& rounds = kUsual) noexcept {
    base_ = window_ = base;
    limit_ = std::max(base, limit);
    rounds_ = rounds;
    measuring_ = false;
  }
  std::int64_t window() const noexcept { return window_; }
  const Rounds& rounds() const noexcept { return rounds_; }

  /// True during a round: on_spent() would do nothing.
  bool is_measuring() const noexcept { return measuring_; }
  /// The window is spent: `total` bytes have left since the beginning, and a further message waits.
  void on_spent(std::uint64_t total, Duration now) noexcept {
    if (measuring_) return;
    measuring_ = true;
    // Credit comes back in batches of a quarter of the window. The last batch does not come while nothing more is sent.
    mark_ = total - std::min<std::uint64_t>(total, static_cast<std::uint64_t>(window_ / 4));
    since_ = now;
  }
  /// Of what has left, so many bytes will not come back: they were not sent.
  void lower(std::uint64_t bytes) noexcept { mark_ -= std::min(mark_, bytes); }
  /// Credit came: `total` bytes are back since the beginning. True if the window has changed.
  bool on_returned(std::uint64_t total, Duration now) noexcept {
    if (!measuring_ || total < mark_) return false;
    measuring_ = false;
    const Duration round = now - since_;
    const std::int64_t before = window_;
    if (round < rounds_.quick)
      window_ = std::min(limit_, window_ + std::max<std::int64_t>(1, window_ / 4));
    else if (round > rounds_.slow)
      window_ = std::max(base_, window_ - window_ / 4);
    return window_ != before;
  }

 private:
  Rounds rounds_ = kUsual;
  std::int64_t base_ = 0;
  std::int64_t limit_ = 0;
  std::int64_t window_ = 0;
  bool measuring_ = false;
  std::uint64_t mark_ = 0;
  Duration since_{};
};

}  // namespace hybridps::schedule
