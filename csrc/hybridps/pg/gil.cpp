#include "hybridps/pg/gil.h"

#include <unistd.h>

namespace hybridps::pg {
namespace {
InterpreterLock installed;  // NOLINT: written once, before any thread of ours exists
}

void install_interpreter_lock(InterpreterLock lock) noexcept { installed = lock; }

void check_signals() {
  if (installed.check_signals != nullptr && gettid() == getpid()) installed.check_signals();
}

InterpreterReleased::InterpreterReleased() {
  if (installed.held == nullptr || !installed.held()) return;
  state_ = installed.release();
  released_ = true;
}

InterpreterReleased::~InterpreterReleased() {
  if (released_) installed.acquire(state_);
}

}  // namespace hybridps::pg
