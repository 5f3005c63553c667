// hybridps/core/one_thread.h: what only one thread at a time may use, and says so when a second one comes.
//
// Why      the rooms below the engine have no locks: whoever drives its loop is alone in them. That is a rule of theirs which
//          a caller can break without a crash, and this notices it, in every build, as core::check() does.
// Limits   two that come within the same few nanoseconds may not see each other: it is in every poll, so it has no locked
//          instruction.
// Threads  any; that is what it is about.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>

#include "hybridps/core/check.h"
#include "hybridps/core/pinned.h"

namespace hybridps::core {

class OneThread : Pinned {
 public:
  /// For the length of a call; calls of one thread may be nested.
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
