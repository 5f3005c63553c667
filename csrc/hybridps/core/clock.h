// hybridps/core/clock.h: the one clock, and deadlines on it. A deadline is a point in time, a timeout is a duration.
#pragma once

#include <algorithm>
#include <chrono>
#include <compare>

namespace hybridps::core {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

/// A duration from (fractional) seconds; saturates instead of overflowing.
inline constexpr Duration from_seconds(double seconds) noexcept {
  constexpr double kSecondsMax = 4.0e9;  // 126 years: fits 64-bit nanoseconds
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(std::clamp(seconds, -kSecondsMax, kSecondsMax)));
}

inline constexpr double to_seconds(Duration duration) noexcept {
  return std::chrono::duration<double>(duration).count();
}

/// A point on the clock, or never (the default).
class Deadline {
 public:
  constexpr Deadline() noexcept = default;

  static constexpr Deadline never() noexcept { return {}; }
  static constexpr Deadline at(TimePoint point) noexcept { return Deadline(point); }
  /// Saturates: a timeout too long for the clock means never.
  static Deadline after(Duration timeout, TimePoint now = Clock::now()) noexcept {
    return timeout >= TimePoint::max() - now ? never() : at(now + timeout);
  }

  constexpr bool is_never() const noexcept { return point_ == TimePoint::max(); }
  /// TimePoint::max() when never.
  constexpr TimePoint point() const noexcept { return point_; }
  bool has_passed(TimePoint now = Clock::now()) const noexcept { return !is_never() && now >= point_; }
  /// Zero once it has passed, Duration::max() when never.
  Duration remaining(TimePoint now = Clock::now()) const noexcept {
    if (is_never()) return Duration::max();
    return std::max(point_ - now, Duration::zero());
  }

  /// Earlier compares as less; never is the greatest.
  constexpr auto operator<=>(const Deadline&) const noexcept = default;

 private:
  explicit constexpr Deadline(TimePoint point) noexcept : point_(point) {}
  TimePoint point_ = TimePoint::max();
};

}  // namespace hybridps::core
