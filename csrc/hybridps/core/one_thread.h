// hybridps/core/one_thread.h: guards an object that only one thread at a time may use, and reports a second thread.
//
// Why      the rooms below the engine have no locks: the thread that drives the engine's loop is alone in them. A
//          caller can break this rule without a crash. OneThread notices this in every build, as core::check() does.
// Limits   two threads that come within the same few nanoseconds may not see each other. OneThread is in every poll, so
//          it has no locked instruction.
// Threads  any; to notice a second thread is the purpose.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>

#include "hybridps/core/check.h"
#include "hybridps/core/pinned.h"

namespace hybridps::core {

class OneThread : Pinned {
 public:
  /// Lives for the length of a call; calls of one thread may be nested.
  class Inside : Pinned {
   public:
    explicit Inside(OneThread& what, const char* file = __builtin_FILE(), int line = __builtin_LINE()) noexcept
        : what_(what) {
      const std::thread::id me = std::this_thread::get_id();
      const std::thread::id there = what.thread_.load(std::memory_order_relaxed);
      if (there == me) return;
      is_first_ = check(there == std::thread::id{}, "one thread at a time is in here", file, line);
      if (is_first_) what.thread_.store(me, std::memory_order_relaxed);
    }
    ~Inside() {
      if (is_first_) what_.thread_.store({}, std::memory_order_relaxed);
    }

   private:
    OneThread& what_;
    bool is_first_ = false;
  };

 private:
  std::atomic<std::thread::id> thread_{};
};

}  // namespace hybridps::core
