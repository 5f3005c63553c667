// hybridps/pg/gil.h: releases the interpreter's lock and hears of Ctrl-C, without knowing the interpreter;
// bindings installs the functions for this.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"

namespace hybridps::pg {

/// CPython's calls. Without an interpreter (C++ programs, tests) all pointers stay null, and nothing is done.
struct InterpreterLock {
  bool (*held)() = nullptr;
  void* (*release)() = nullptr;
  void (*acquire)(void*) = nullptr;
  void (*check_signals)() = nullptr;  // throws what a signal handler of the program has raised
};

/// Call once, when the module is loaded.
void install_interpreter_lock(InterpreterLock lock) noexcept;

/// Throws KeyboardInterrupt after Ctrl-C. A long wait calls check_signals() now and then, without the interpreter's
/// lock. Does nothing on threads other than the main thread, because only the main thread runs signal handlers.
void check_signals();

/// The sleep of all waits in this room. `sleep(t)` sleeps until t, or returns true because the awaited event is there.
/// Every 100 ms the main thread looks for Ctrl-C. Returns false when `until` has passed. Without the interpreter's
/// lock.
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

/// Keeps a thread that runs callbacks from being unwound when the interpreter ends. A thread that then asks for the
/// interpreter's lock is ended by pthread_exit() until Python 3.13, and sleeps for ever from 3.14 on. pthread_exit()
/// unwinds the stack through frames of torch and pybind11. Destructors there ask for the lock again or may not throw,
/// so the process aborts. A thread with an UnwindsNever sleeps for ever instead, before anything is unwound. An
/// UnwindsNever lies on the heap and lives as long as its thread runs.
class UnwindsNever : core::Pinned {
 public:
  /// Call on the thread itself.
  void begin() noexcept;

 private:
  _pthread_cleanup_buffer buffer_{};
};

/// While this object lives, this thread does not hold the interpreter's lock, whether it did before or not. Use around
/// waits for a thread that may drop a tensor: ~Backend runs with the lock held.
class InterpreterReleased : core::Pinned {
 public:
  InterpreterReleased();
  ~InterpreterReleased();

 private:
  void* state_ = nullptr;
  bool released_ = false;
};

}  // namespace hybridps::pg
