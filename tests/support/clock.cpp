// tests/support/clock.cpp: the steady clock of unit programs.
#include "tests/support/clock.h"

#include <time.h>

#include <atomic>

namespace {

using Nanoseconds = std::chrono::nanoseconds;

std::atomic<bool> stopped{false};
std::atomic<Nanoseconds::rep> offset_ns{0};  // from the real time, or from zero while stopped

Nanoseconds::rep real_ns() noexcept {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * Nanoseconds::rep{1'000'000'000} + t.tv_nsec;
}

}  // namespace

// In place of the standard library's.
std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
  const Nanoseconds::rep base = stopped.load(std::memory_order_relaxed) ? 0 : real_ns();
  return time_point(Nanoseconds(base + offset_ns.load(std::memory_order_relaxed)));
}

namespace hybridps::test {

MovableClock::MovableClock(Between between) noexcept {
  if (between == Between::kGoesOn) return;
  offset_ns = real_ns();
  stopped = true;
}

MovableClock::~MovableClock() {
  stopped = false;
  offset_ns = 0;
}

void MovableClock::pass(core::Duration duration) noexcept {
  offset_ns += std::chrono::duration_cast<Nanoseconds>(duration).count();
}

}  // namespace hybridps::test
