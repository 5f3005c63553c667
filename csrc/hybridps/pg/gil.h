// hybridps/pg/gil.h: letting go of the interpreter's lock, and hearing of Ctrl-C, without knowing the interpreter;
// bindings installs how.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"

namespace hybridps::pg {

/// CPython's calls. Without an interpreter (C++ programs, tests) all stay null and nothing is done.
struct InterpreterLock {
  bool (*held)() = nullptr;
  void* (*release)() = nullptr;
  void (*acquire)(void*) = nullptr;
  void (*check_signals)() = nullptr;  // throws what a signal handler of the program has raised
};

/// Once, when the module is loaded.
void install_interpreter_lock(InterpreterLock lock) noexcept;

/// For whoever waits long, now and then, without the interpreter's lock: throws KeyboardInterrupt after Ctrl-C. Does
/// nothing on other threads than the main one, which alone runs signal handlers.
void check_signals();

/// How all waits of this room sleep: `sleep(t)` sleeps until t, or returns true because what it waits for is there. Comes
/// back now and then for Ctrl-C, on the main thread. False when `until` has passed. Without the interpreter's lock.
template <typename Sleep>
bool wait_with_signals(core::TimePoint until, const Sleep& sleep) {
  constexpr std::chrono::milliseconds kPeriod(100);
  for (;;) {
    if (sleep(std::min(until, core::Clock::now() + kPeriod))) return true;
    if (core::Clock::now() >= until) return false;
    check_signals();
  }
}

[[noreturn]] void sleep_for_ever() noexcept;

/// An interpreter that ends wants no thread back: whoever asks for its lock then is ended by pthread_exit() until Python 3.13,
/// and sleeps for ever from 3.14 on. pthread_exit() unwinds the stack, through frames of torch and pybind11 whose destructors
/// ask for the lock again or may not throw: the process aborts. A thread that runs callbacks therefore has one of these,
/// and sleeps for ever instead, before anything is unwound. It lies on the heap, for as long as the thread runs.
class UnwindsNever : core::Pinned {
 public:
  /// On the thread.
  void begin() noexcept;

 private:
  _pthread_cleanup_buffer buffer_{};
};

/// While alive, this thread does not hold the interpreter's lock, whether it did before or not. For whatever waits
/// for a thread that may drop a tensor: ~Backend runs with the lock held.
class InterpreterReleased : core::Pinned {
 public:
  InterpreterReleased();
  ~InterpreterReleased();

 private:
  void* state_ = nullptr;
  bool released_ = false;
};

}  // namespace hybridps::pg
