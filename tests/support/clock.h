// tests/support/clock.h: lets time pass in a unit program, at once and without waiting.
//
// Model    clock.cpp replaces the program's steady clock, which core::Clock is. While a MovableClock lives, time is
//          what it says; after it, the real time again. The product has none of this.
// Order    declare it before what it moves: time points of it must not be used when it is gone.
// Threads  pass() from any. A condition variable or poll() waits by the kernel's clock: where threads sleep until a
//          point of the clock, only what asks for the time again sees it moved, and nothing should be stopped.
#pragma once

#include "hybridps/core/clock.h"

namespace hybridps::test {

class MovableClock {
 public:
  enum class Between { kGoesOn, kStandsStill };

  /// What time does by itself: with kStandsStill, nothing.
  explicit MovableClock(Between between = Between::kStandsStill) noexcept;
  ~MovableClock();
  MovableClock(const MovableClock&) = delete;
  MovableClock& operator=(const MovableClock&) = delete;

  void pass(core::Duration duration) noexcept;
};

}  // namespace hybridps::test
