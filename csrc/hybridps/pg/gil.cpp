#include "hybridps/pg/gil.h"

#include <cxxabi.h>
#include <unistd.h>

// The header hides this function from C++. Weak: the function is old, and a C library may drop it.
extern "C" [[gnu::weak]] void _pthread_cleanup_push(_pthread_cleanup_buffer* buffer, void (*routine)(void*), void* arg);

namespace hybridps::pg {
namespace {
InterpreterLock installed;  // NOLINT: written once, before any thread of ours exists
}

void install_interpreter_lock(InterpreterLock lock) noexcept { installed = lock; }

void check_signals() {
  if (installed.check_signals != nullptr && gettid() == getpid()) installed.check_signals();
}

void sleep_for_ever() noexcept {
  for (;;) pause();
}

// A pushed routine runs when the stack is unwound to the frame of its buffer, before the destructors of that frame. A
// routine with a buffer in no frame (on the heap) runs first of all.
void UnwindsNever::begin() noexcept {
  if (&_pthread_cleanup_push != nullptr)
    _pthread_cleanup_push(&buffer_, [](void* /*arg*/) { sleep_for_ever(); }, nullptr);
}

InterpreterReleased::InterpreterReleased() {
  if (installed.held == nullptr || !installed.held()) return;
  state_ = installed.release();
  released_ = true;
}

InterpreterReleased::~InterpreterReleased() {
  if (!released_) return;
  try {
    installed.acquire(state_);
  } catch (const abi::__forced_unwind&) {
    sleep_for_ever();
  }
}

}  // namespace hybridps::pg
