// hybridps/pg/lanes.h: the threads on which futures complete, so that a callback may wait for further operations.
//
// Model    Lane d completes the futures of operations that were issued from lane d-1; every other thread is lane 0. A
//          callback on lane 1 may issue an operation and wait for its future, which completes on lane 2: that lane is
//          free. Within one group and lane, futures complete in the order of issue of the collectives (InOrder).
// Threads  every method is thread-safe. A lane is a thread. The first lane is made with the first group, further lanes
//          when needed. The tasks of a lane run one by one. Tasks run without locks of ours and without the
//          interpreter's lock; they may take both.
// Exit     a lane that stop() left in a user's callback stays there when the interpreter ends: UnwindsNever (gil.h).
// Why not the engine's progress thread: a callback may take the interpreter's lock, and so may dropping the last
//          reference of a tensor that Python has seen. The holder of the lock may be waiting for progress.
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

  /// The lane of the calling thread; 0 on a thread that is no lane.
  static int current() noexcept;

  /// Runs `task` on lane `lane` (>= 1), after the tasks that were posted there before. If no thread can be made for the
  /// lane, the next lower lane that runs gets `task`; without such a lane, `task` is dropped. An error is logged.
  void post(int lane, Task task);

  /// Makes the lane's thread now, so that the caller learns of a failure: throws std::runtime_error.
  void start(int lane);

  /// From now on threads stay when they have run the queued tasks.
  void begin();

  /// Runs the queued tasks, then ends the threads. Threads that are still busy after `patience` are left alone, and so
  /// is the calling lane. Tasks that are posted later run on new threads, which end after these tasks. Never call with
  /// the interpreter's lock held.
  void stop(std::chrono::milliseconds patience);

  /// From now until begin(), threads end when they have run the queued tasks. Nobody waits for that end.
  void end_when_idle();

  /// The number of threads that have not ended.
  std::size_t thread_count() const;

 private:
  struct Lane;
  static void run(const std::shared_ptr<Lane>& lane, int index);
  void put(int lane, Task& task);             // mutex_ held; if it throws std::system_error, `task` is unchanged
  bool put_to_running(int lane, Task& task);  // mutex_ held

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Lane>> lanes_;  // [0] is lane 1; null when not made
  bool ends_when_idle_ = false;               // set by stop(), end_when_idle(): nobody would end a thread made now
};

/// The order of one group's collectives on one lane.
class InOrder : public std::enable_shared_from_this<InOrder>, core::Pinned {
 public:
  InOrder(std::shared_ptr<Lanes> lanes, int lane) : lanes_(std::move(lanes)), lane_(lane) {}

  /// Returns the next ticket. Call in the order of issue.
  std::uint64_t enter();
  /// The operation of this ticket is complete. `task` (may be empty) is posted when all earlier operations are complete
  /// too. `calls_back`: `task` completes a future, and so may run callbacks.
  void leave(std::uint64_t ticket, Lanes::Task task, bool calls_back);
  /// Runs `task`, which completes a future, on the lane after the tasks of this and of earlier tickets. Call before or
  /// after leave(). False: those tasks are all over and `task` was not taken, so the caller may complete the future.
  bool append(std::uint64_t ticket, Lanes::Task& task);
  /// Whether append() would return false.
  bool is_first(std::uint64_t ticket) const;
  /// Waits until is_first() or `until`; returns at once if this ticket has left and an earlier one has not.
  void wait_until_first(std::uint64_t ticket, std::chrono::steady_clock::time_point until);

  int lane() const noexcept { return lane_; }
  /// The ticket that the next enter() will give.
  std::uint64_t next() const;

 private:
  struct TicketSlot {
    bool done = false;
    Lanes::Task task;                    // the task of leave(), if it calls nothing back
    std::vector<Lanes::Task> callbacks;  // run in order after `task`
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
  std::size_t callbacks_left_ = 0;  // tasks on the lane that call back, with the running task
};

}  // namespace hybridps::pg
