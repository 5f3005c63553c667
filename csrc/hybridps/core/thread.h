// hybridps/core/thread.h: what every thread of ours does first, and threads that nobody waits for.
//
// Threads  run_detached(): any thread. All other functions act on the calling thread alone.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "hybridps/core/float_mode.h"
#include "hybridps/core/log.h"

namespace hybridps::core {

/// Names the thread (at most 15 characters), blocks all signals in the thread (signals are the program's business), and
/// sets the usual floating-point mode, whatever the mode of the thread that made it.
inline void begin_thread(const char* name) noexcept {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
  use_usual_float_mode();
}

/// Runs `task` on a thread of its own that nobody waits for. The task must own everything that it uses. An exception of
/// the task is logged as a warning and ends only this thread. False: no thread could be made, and the task has not run.
template <typename Task>
[[nodiscard]] bool run_detached(const char* name, Task task) {
  try {
    std::thread([name, task = std::move(task)]() mutable {
      begin_thread(name);
      try {
        task();
      } catch (const std::exception& error) {
        log_warn("the thread ", name, " has ended: ", error.what());
      }
    }).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

/// For a thread that sleeps for tens of microseconds. The kernel adds up to 50 us to every sleep, to wake several
/// threads at once (PR_SET_TIMERSLACK). From this call on, the kernel adds up to 1 us for the calling thread.
inline void sleep_precisely() noexcept { prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); }

/// For a thread that sleeps a lot and works in moments, on cores that others compute on. Asks the scheduler for slices
/// of 0.1 ms, the shortest slices there are. The thread gets no more of a core than before, but gets the core at its
/// wake-up, instead of after the rest of a computing thread's slice. Needs Linux 6.12 or later (EEVDF,
/// sched_attr::sched_runtime of ordinary threads); older kernels ignore the request.
inline void ask_for_short_slices() noexcept {
  struct Attributes {  // for sched_setattr(2); glibc declares it only since 2.41
    std::uint32_t size = sizeof(Attributes);
    std::uint32_t policy = 0;
    std::uint64_t flags = 0;
    std::int32_t nice = 0;
    std::uint32_t priority = 0;
    std::uint64_t runtime = 0;
    std::uint64_t deadline = 0;
    std::uint64_t period = 0;
    std::uint32_t util_min = 0;
    std::uint32_t util_max = 0;
  } attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 || attributes.policy != SCHED_OTHER) return;
  attributes.runtime = 100'000;  // ns
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace hybridps::core
