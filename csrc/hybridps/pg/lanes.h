// hybridps/pg/lanes.h: the threads on which futures complete, so that a callback may wait for further operations.
//
// Model    Lane d completes the futures of operations that were issued from lane d-1; every other thread is lane 0.
//          A callback on lane 1 that issues an operation and waits for its future waits for lane 2, which is free.
//          Within one group and lane, futures complete in the order in which the collectives were issued (InOrder).
// Threads  every method from any thread. A lane is a thread, the first made with the first group and others when needed; tasks of a lane run one by one.
//          Tasks run without locks of ours and without the interpreter's lock; they may take both.
// Exit     a lane that stop() has left in a user's callback stays there when the interpreter ends: UnwindsNever (gil.h).
// Why not the engine's progress thread: a callback, or the last reference of a tensor that Python has seen, takes the
//          interpreter's lock, and its holder may be waiting for progress.
#pragma once

#include <chrono>
#include <cstddef>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "hybridps/core/pinned.h"

namespace hybridps::pg {

class Lanes : core::Pinned {
 public:
  using Task = std::function<void()>;  // called once

  Lanes() = default;
  /// Does not wait for a lane that is stuck in a user's callback.
  ~Lanes();

  /// The lane whose thread is calling; 0 on all other threads.
  static int current() noexcept;

  /// Runs `task` on lane `lane` (>= 1), after what was posted there before. Where no thread can be made for it: on the next
  /// lane below that runs; without one it is dropped. Both are logged.
  void post(int lane, Task task);

  /// Makes its thread now, so that its maker hears that there can be none: throws std::runtime_error then.
  void start(int lane);

  /// From now on threads stay when they have run what is queued.
  void begin();

  /// Runs what is queued, then ends the threads; those still busy after `patience` are left to themselves, and so is
  /// the lane that calls. What is posted later runs on new ones, which end with it. Never with the interpreter's lock held.
  void stop(std::chrono::milliseconds patience);

  /// The threads end once they have run what is queued, now and until begin(); nobody waits for that.
  void end_when_idle();

  /// Those that have not ended.
  std::size_t thread_count() const;

 private:
  struct Lane;
  static void run(const std::shared_ptr<Lane>& lane, int index);
  void put(int lane, Task& task);             // mutex_ held; throws std::system_error, and leaves the task
  bool put_to_running(int lane, Task& task);  // mutex_ held

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Lane>> lanes_;  // [0] is lane 1; null when not made
  bool ends_when_idle_ = false;               // since stop(): nobody would end a thread that is made now
};

/// The order of one group's collectives on one lane.
class InOrder : public std::enable_shared_from_this<InOrder>, core::Pinned {
 public:
  InOrder(std::shared_ptr<Lanes> lanes, int lane) : lanes_(std::move(lanes)), lane_(lane) {}

  /// In the order of issue.
  std::uint64_t enter();
  /// The operation of this ticket is complete: its task (may be empty) is posted once all earlier ones are.
  /// `calls_back`: it completes a future, and so may run callbacks.
  void leave(std::uint64_t ticket, Lanes::Task task, bool calls_back);
  /// Before or after leave(): `task`, which completes a future, runs on the lane, after those of this ticket and of
  /// earlier ones. False, and not taken, when those are all over: the caller may do at once what it wants to be done.
  bool append(std::uint64_t ticket, Lanes::Task& task);
  /// append() would return false.
  bool is_first(std::uint64_t ticket) const;
  /// Waits for that until `until`; not where an earlier operation is not complete yet.
  void wait_until_first(std::uint64_t ticket, std::chrono::steady_clock::time_point until);

  int lane() const noexcept { return lane_; }
  /// The ticket that the next enter() will give.
  std::uint64_t next() const;

 private:
  struct TicketSlot {
    bool done = false;
    Lanes::Task task;                    // of leave()
    std::vector<Lanes::Task> callbacks;  // after it
  };
  bool nothing_before(std::uint64_t ticket) const { return ticket < first_ && callbacks_left_ == 0; }  // mutex_ held
  void post_callbacks(Lanes::Task task);                                                               // mutex_ held
  void callbacks_over();

  const std::shared_ptr<Lanes> lanes_;
  const int lane_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t first_ = 0;  // ticket of slots_.front()
  std::deque<TicketSlot> slots_;
  std::size_t callbacks_left_ = 0;  // tasks on the lane that call back, the running one included
};

}  // namespace hybridps::pg
