#include "hybridps/schedule/window_tuner.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include "tests/support/catch.h"

namespace hybridps::schedule {
namespace {

using Duration = WindowTuner::Duration;
constexpr std::int64_t kKiB = 1024;

// One sender over a link of `rate` bytes/s and a round trip of `trip`, always with more to send: its window after a
// while.
std::int64_t settled(double rate, Duration trip, std::int64_t base, std::int64_t limit, double held_up_ms = 0,
                     const WindowTuner::Rounds& rounds = WindowTuner::kUsual) {
  WindowTuner tuner;
  tuner.reset(base, limit, rounds);
  const std::int64_t chunk = 8 * kKiB;
  std::uint64_t sent = 0, returned = 0;
  double free_at = 0;  // the link, in ns
  std::deque<std::pair<double, std::uint64_t>> under_way;
  double now = 0;
  for (int step = 0; step < 20000; ++step) {
    while (static_cast<std::int64_t>(sent - returned) + chunk <= tuner.window()) {
      sent += chunk;
      free_at = std::max(now, free_at) + static_cast<double>(chunk) / rate * 1e9;
      under_way.emplace_back(free_at + static_cast<double>(trip.count()) + held_up_ms * 1e6, sent);
      const bool spent = static_cast<std::int64_t>(sent - returned) + chunk > tuner.window();
      if (spent) tuner.on_spent(sent, Duration(static_cast<std::int64_t>(now)));
    }
    now = under_way.front().first;
    returned = under_way.front().second;
    under_way.pop_front();
    tuner.on_returned(returned, Duration(static_cast<std::int64_t>(now)));
    REQUIRE(tuner.window() >= base);
    REQUIRE(tuner.window() <= limit);
  }
  return tuner.window();
}

TEST_CASE("schedule/window_tuner: a slow card keeps the base", "[schedule][fast]") {
  // 500 Mbit/s: 128 KiB are 2.2 ms of it, 42 KiB 0.7 ms; of three senders each sees the queue of all.
  CHECK(settled(59.8e6, std::chrono::microseconds(200), 128 * kKiB, 512 * kKiB) <= 160 * kKiB);
  CHECK(settled(59.8e6 / 3, std::chrono::microseconds(200), 42 * kKiB, 512 * kKiB) <= 53 * kKiB);
  CHECK(settled(23.9e6, std::chrono::microseconds(200), 128 * kKiB, 512 * kKiB) == 128 * kKiB);
}

TEST_CASE("schedule/window_tuner: a fast card gets what its round trip holds", "[schedule][fast]") {
  const double rate = 1.25e9;  // 10 Gbit/s
  const std::int64_t window = settled(rate, std::chrono::microseconds(300), 42 * kKiB, 4096 * kKiB);
  CHECK(static_cast<double>(window) > rate * 300e-6);       // the card is busy
  CHECK(static_cast<double>(window) < rate * 2 * 2000e-6);  // and its queue bounded
  CHECK(settled(rate, std::chrono::microseconds(300), 42 * kKiB, 256 * kKiB) == 256 * kKiB);
}

TEST_CASE("schedule/window_tuner: who waits for others does not send more", "[schedule][fast]") {
  CHECK(settled(1.25e9, std::chrono::microseconds(100), 64 * kKiB, 512 * kKiB, /*held_up_ms=*/3) == 64 * kKiB);
}

TEST_CASE("schedule/window_tuner: where dedicated servers help it grows to milliseconds of the card's rate",
          "[schedule][fast]") {
  const auto with_servers = [](double rate, std::int64_t limit, double held_up_ms) {
    return settled(rate, std::chrono::microseconds(200), 32 * kKiB, limit, held_up_ms, WindowTuner::kPatient);
  };
  // A quarter of 500 Mbit/s and of 200: between the quick round's bytes and the slow one's.
  for (const double rate : {59.8e6 / 4, 23.9e6 / 4}) {
    const auto window = static_cast<double>(with_servers(rate, 512 * kKiB, 0));
    CHECK(window > rate * 9e-3);
    CHECK(window < rate * 20e-3);
  }
  CHECK(with_servers(59.8e6, 512 * kKiB, /*held_up_ms=*/5) > 200 * kKiB);  // waiting for others does not stop it
  CHECK(with_servers(59.8e6, 512 * kKiB, /*held_up_ms=*/25) == 32 * kKiB);
  CHECK(with_servers(1.25e9, 512 * kKiB, 0) == 512 * kKiB);
}

TEST_CASE("schedule/window_tuner: falls back when the network becomes slow, and starts again", "[schedule][fast]") {
  WindowTuner tuner;
  tuner.reset(100, 1000);
  std::uint64_t total = 0;
  Duration now{};
  const auto round = [&](Duration took) {
    total += 100;
    tuner.on_spent(total, now);
    now += took;
    return tuner.on_returned(total, now);
  };
  while (tuner.window() < 1000) REQUIRE(round(std::chrono::microseconds(100)));
  CHECK_FALSE(round(std::chrono::microseconds(100)));   // at the limit
  CHECK_FALSE(round(std::chrono::microseconds(1500)));  // neither short nor long
  while (tuner.window() > 100) REQUIRE(round(std::chrono::milliseconds(5)));
  CHECK_FALSE(round(std::chrono::milliseconds(5)));
  CHECK_FALSE(tuner.on_returned(total + 100, now));  // it was never spent, so it is not what limits
  tuner.reset(300, 200);
  CHECK(tuner.window() == 300);
}

}  // namespace
}  // namespace hybridps::schedule
