// hybridps/core/thread.h: what every thread of ours does first.
//
// Threads  of the calling thread alone.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace hybridps::core {

/// Names the thread (at most 15 characters) and blocks all signals in it: they are the program's business.
inline void begin_thread(const char* name) noexcept {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace hybridps::core
