// hybridps/engine/loop.h: the driver of a Runtime: the loop's own thread, or a caller that waits for an operation.
//
// Model    The thread that holds the baton drives the Runtime: one thread at a time. Usually that thread is the loop's
//          own thread, which sleeps in epoll between events. A caller that is about to wait for one operation may call
//          drive() instead. Then the operation needs no hand-over between threads. The hand-over is most of the cost of
//          a tiny operation. The loop's thread is parked while a caller drives, and for kClaim afterwards. After a row
//          of operations the loop's thread stays parked for up to kLateAtMost longer. If the caller leaves anything
//          running, the loop's thread takes over at once.
// Threads  post(), call(), drive(), in_round() from any thread; start() and stop() from the owner's thread, once each.
// Fork     in a forked child the thread does not exist: do not destroy a Loop there.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/mailbox.h"
#include "hybridps/core/once_fn.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/sleeper.h"
#include "hybridps/core/spinning.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/runtime.h"

namespace hybridps::engine {

/// Work of the Loop's owner inside the loop. The thread with the baton makes these calls.
class LoopClient {
 public:
  virtual ~LoopClient() = default;
  /// Called once a round, after Runtime::progress(). Returns the amount of work done; 0: none.
  virtual std::size_t round() = 0;
  /// The longest time that the loop may sleep.
  virtual std::chrono::milliseconds sleep_at_most() const { return std::chrono::milliseconds(100); }
  /// The last call. On the loop's thread.
  virtual void finish() {}
};

struct LoopOptions {
  std::string thread_name;                                    // at most 15 characters
  core::Spinning spinning = core::Spinning::where_it_pays();  // for the thread, and for callers that drive
};

class Loop : core::Pinned {
 public:
  /// How long the thread stays parked after a caller has driven.
  static constexpr auto kClaim = std::chrono::milliseconds(1);
  static constexpr auto kLateAtMost = std::chrono::milliseconds(3);
  /// The loop updates the counters after this many rounds with work, before the thread sleeps, and at the thread's end.
  static constexpr std::uint64_t kRoundsPerUpdate = 64;
  /// The number of commands for which the loop keeps memory, in each of its two queues.
  static constexpr std::size_t kCommandsKept = 1024;

  Loop(Runtime& runtime, LoopClient& client, LoopOptions options);
  ~Loop();

  core::Status start();
  /// Runs the posted commands, then ends and joins the thread. Not from inside the loop. Idempotent.
  void stop();

  /// Commands run with the baton, in the order of posting. `will_drive`: this thread calls drive() next, so the command
  /// may wait for drive(), kClaim at most. Returns false: the loop has ended, and the command is dropped.
  bool post(core::OnceFn<void()> command, bool will_drive = false);
  /// As post(), and waits for the status that the command sets. kTimeout: no status within `patience`. The command may
  /// still run later, so it must own what it uses. Two errors come at once, and then the command does not run: kClosed
  /// if the loop has ended, kUnsupported inside the loop.
  core::Status call(core::OnceFn<void(core::Status&)> command, core::Duration patience);
  /// Drives until done() (asked after every round) or `until`. Returns at once if another caller drives already.
  void drive(const std::function<bool()>& done, core::TimePoint until);
  /// True: the calling thread is inside the loop, and must not wait for the loop.
  bool in_round() const noexcept { return round_of_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

 private:
  /// How one of the two possible drivers waits for events.
  struct Bed {
    core::Sleeper sleeper{};
    std::vector<pollfd> urgent{};  // what ends a nap: everything except the data transport
    core::Spinning spinning;
  };

  core::Status make(Bed& bed);
  /// Sleeps until `until`, or until an event that is not data.
  static void nap(Bed& bed, core::TimePoint until);
  void run();
  std::size_t round();
  std::size_t drain();
  void update_counters();
  static void sleep(Bed& bed, core::TimePoint due, core::TimePoint nap_until, std::chrono::milliseconds at_most);
  bool is_claimed();
  void park();

  Runtime& runtime_;
  LoopClient& client_;
  const LoopOptions options_;
  Bed own_{.spinning = options_.spinning};
  Bed driver_{.spinning = options_.spinning};
  std::thread thread_;
  std::mutex baton_;
  std::uint64_t uncounted_rounds_ = 0;  // rounds with work since the last update of the counters
  std::atomic<std::thread::id> round_of_{};

  core::Mailbox<core::OnceFn<void()>> commands_;  // closed: there will be no more rounds
  std::atomic<bool> stop_{false};

  std::mutex park_mutex_;
  std::condition_variable unpark_;
  bool driving_ = false;  // a caller drives, or is about to take the baton
  core::TimePoint driving_since_{};
  core::TimePoint claimed_until_{};
  std::atomic<bool> claim_seen_{false};  // true: claimed_until_ or driving_ may be set, so take park_mutex_ and look
};

}  // namespace hybridps::engine
