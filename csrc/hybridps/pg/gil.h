// hybridps/pg/gil.h: letting go of the interpreter's lock without knowing the interpreter; bindings installs how.
#pragma once

#include "hybridps/core/pinned.h"

namespace hybridps::pg {

/// CPython's three calls. Without an interpreter (C++ programs, tests) all stay null and nothing is done.
struct InterpreterLock {
  bool (*held)() = nullptr;
  void* (*release)() = nullptr;
  void (*acquire)(void*) = nullptr;
};

/// Once, when the module is loaded.
void install_interpreter_lock(InterpreterLock lock) noexcept;

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
