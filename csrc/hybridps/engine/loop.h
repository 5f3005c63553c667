// hybridps/engine/loop.h: who drives a Runtime: a thread of its own, or a caller that waits for something.
//
// Model    The Runtime is driven by whoever holds the baton: one thread at a time. Usually that is the loop's own
//          thread, which sleeps in epoll between events. A caller that is about to wait for one operation may drive
//          instead (drive()): its operation then needs no hand-over from thread to thread, which is most of what a tiny
//          operation costs. While a caller drives, and for kClaim after it, the loop's thread is parked, after a row of
//          operations for kLateAtMost longer; it takes over at once if the caller leaves anything running.
// Threads  post(), call(), drive(), in_round() from any thread; start() and stop() from the owner's, once each.
// Fork     in a forked child the thread does not exist: do not destroy a Loop there.
#pragma once

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
#include "hybridps/core/once_fn.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/spinning.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/runtime.h"

namespace hybridps::engine {

/// What else the owner of the Loop does in it. Called with the baton.
class LoopClient {
 public:
  virtual ~LoopClient() = default;
  /// Once a round, after Runtime::progress(). Returns what it did.
  virtual std::size_t round() = 0;
  /// How long the loop may sleep, at most.
  virtual std::chrono::milliseconds sleep_at_most() const { return std::chrono::milliseconds(100); }
  /// Last of all, on the loop's thread.
  virtual void finish() {}
};

struct LoopOptions {
  std::string thread_name;  // at most 15 characters
  core::Spinning spinning = core::Spinning::where_it_pays();  // of the thread, and of callers that drive
};

class Loop : core::Pinned {
 public:
  /// How long the thread stays parked after a caller has driven.
  static constexpr auto kClaim = std::chrono::milliseconds(1);
  static constexpr auto kLateAtMost = std::chrono::milliseconds(3);
  /// Counters are brought up to date before the thread sleeps, at its end, and after so many rounds with work.
  static constexpr std::uint64_t kRoundsPerUpdate = 64;
  /// Memory for so many commands is kept, twice.
  static constexpr std::size_t kCommandsKept = 1024;

  Loop(Runtime& runtime, LoopClient& client, LoopOptions options);
  ~Loop();

  /// Makes descriptors and the thread.
  core::Status start();
  /// Runs what was posted, then ends and joins the thread. Not from inside the loop. Idempotent.
  void stop();

  /// Runs with the baton, in order of posting. `will_drive`: this thread calls drive() next; the command may then wait
  /// for it (kClaim at most). False: the loop has ended, nobody will run it; it is dropped.
  bool post(core::OnceFn<void()> command, bool will_drive = false);
  /// As post(), and waits for the status that it gives. kTimeout: not within `patience`; it may still run, so it must own
  /// what it uses. At once, and it will not run: kClosed where the loop has ended, kUnsupported inside the loop.
  core::Status call(core::OnceFn<void(core::Status&)> command, core::Duration patience);
  /// Drives until done() (asked after every round) or `until`. Returns at once if another caller drives already.
  void drive(const std::function<bool()>& done, core::TimePoint until);
  /// This thread is inside the loop: it must not wait for it.
  bool in_round() const noexcept { return round_of_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

 private:
  /// Where one of the two possible drivers sleeps.
  struct Bed {
    int epoll_fd = -1;
    int nap_fd = -1;  // an epoll as well, of all but the data transport
    int wake_fd = -1;
    std::atomic<bool> sleeping{false};
    core::Spinning spinning;
  };

  core::Status make(Bed& bed);
  /// Until `until`, or something comes that is no data.
  void nap(const Bed& bed, core::TimePoint until) const;
  void wake(Bed& bed) noexcept;
  void run();
  std::size_t round();
  std::size_t drain();
  void update_counters();
  void sleep(Bed& bed, core::TimePoint due, core::TimePoint nap_until, std::chrono::milliseconds at_most);
  bool is_claimed();
  void park();

  Runtime& runtime_;
  LoopClient& client_;
  const LoopOptions options_;
  Bed own_{.spinning = options_.spinning};
  Bed driver_{.spinning = options_.spinning};
  std::thread thread_;
  std::mutex baton_;
  std::uint64_t uncounted_rounds_ = 0;          // with work, since the counters were brought up to date
  std::vector<core::OnceFn<void()>> draining_;  // empty between rounds; commands_ and this change places
  std::atomic<std::thread::id> round_of_{};

  std::mutex command_mutex_;
  std::vector<core::OnceFn<void()>> commands_;
  bool ended_ = false;  // no round comes any more
  std::atomic<bool> has_commands_{false};
  std::atomic<bool> stop_{false};

  std::mutex park_mutex_;
  std::condition_variable unpark_;
  bool driving_ = false;  // a caller drives, or is about to take the baton
  core::TimePoint driving_since_{};
  core::TimePoint claimed_until_{};
  std::atomic<bool> claim_seen_{false};  // claimed_until_ may lie ahead, or driving_ is set: worth the lock
};

}  // namespace hybridps::engine
