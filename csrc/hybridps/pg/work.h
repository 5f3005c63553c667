// hybridps/pg/work.h: the handle of one operation of a process group.
//
// Life     pending -> (arrived -> finishing ->) complete. The engine's completion moves the work on. A work becomes
//          `arrived` if something remains to do before anybody may look: copying temporaries back, summing sparse
//          parts. The first waiter or a lane does this, never the engine's thread. Then waiters go on, and a lane
//          completes the future, in the group's order.
// Owner    the caller, who may drop the work at once, and the engine's completion. The completion hands its reference
//          to a waiter or a lane, because dropping a tensor may take the interpreter's lock.
// Threads  every method is thread-safe. wait() blocks: call wait() without the interpreter's lock (torch's binding
//          releases the lock).
// Errors   every wait() throws the same error; the message names the operation.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/version.h>

#include "hybridps/core/clock.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/group.h"
#include "hybridps/pg/call.h"
#include "hybridps/pg/hooks.h"
#include "hybridps/pg/lanes.h"
#include "hybridps/pg/tensors.h"
#include "hybridps/worker/operation.h"

#define HYBRIDPS_TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace hybridps::pg {

/// The data that all Works of one process group share. Does not keep the engine alive.
struct WorkContext {
  /// Runs the group's abort hooks on a thread of their own and returns at once. torch's flight recorder takes seconds
  /// to write. Neither the error nor the messages to the other ranks may wait for the flight recorder.
  void post_abort_hooks() const;

  std::string group_name;
  int rank = 0;
  int size = 1;
  std::shared_ptr<Lanes> lanes;
  std::weak_ptr<engine::Group> group;
  std::shared_ptr<Hooks> hooks = std::make_shared<Hooks>();  // shared by all lives of a process group
  std::atomic<bool> failure_told{false};                     // abort hooks run once, for the first verdict
};

/// Extra time that addEphemeralTimeout() grants to all works. Ends when the first work made after the call is complete.
struct TimeExtension {
  explicit TimeExtension(std::chrono::milliseconds by) : extra(by) {}
  const std::chrono::milliseconds extra;
  std::atomic<bool> used{false};  // a work carries the extension; guarded by the process group's lock
  std::atomic<bool> expired{false};
};

class WorkHybrid final : public c10d::Work {
 public:
  using Ptr = c10::intrusive_ptr<WorkHybrid>;

  /// Takes the buffers and `finish` out of the call. Complete when part_done() was called `parts` times.
  WorkHybrid(std::shared_ptr<WorkContext> context, Call& call, std::size_t parts,
             std::vector<std::shared_ptr<TimeExtension>> extensions);
  ~WorkHybrid() override;

  // For the process group -------------------------------------------------------------------------------------------
  /// Call before the first part is submitted. Without set_order() the future completes as soon as the operation does.
  void set_order(std::shared_ptr<InOrder> order);
  /// The work for which this thread, a lane, is running callbacks of the future; null: none.
  static const WorkHybrid* of_running_callback() noexcept;
  /// Whether the group with these orders has issued collectives after this work, or after an ancestor of this work. An
  /// ancestor is a work with a callback that led to this work. If true, a collective that a callback of this work
  /// issues now has no place in the orders: on another rank it may have come before the other collectives.
  bool overtaken(const std::vector<std::shared_ptr<InOrder>>& orders) const;
  /// The sequence number for messages: that of the last part.
  void set_sequence(std::uint64_t sequence) noexcept { sequence_.store(sequence, std::memory_order_relaxed); }
  /// Called once for each of `parts`, when the part is complete.
  static void part_done(Ptr work, const worker::Outcome& outcome);
  /// The first part that fails completes the work. For a work without buffers; call before the first part_done().
  void end_at_first_error() noexcept { ends_at_error_ = true; }
  /// Makes `parent` count this work as one of its parts.
  static void add_parent(const Ptr& work, Ptr parent);
  const std::vector<at::Tensor>& outputs() const noexcept { return outputs_; }
  bool waited_for() const noexcept { return waited_for_; }
  /// "all_reduce 17 of group 0 (rank 1 of 4)".
  std::string describe() const;

  // c10d::Work ------------------------------------------------------------------------------------------------------
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;
  float getDuration() const override;
#if HYBRIDPS_TORCH_AT_LEAST(14)
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif
#if HYBRIDPS_TORCH_AT_LEAST(15)
  uint64_t getCompletionKey() const override { return completion_key_; }
#endif

 private:
  class Settled;
  enum class WorkStage { kPending, kArrived, kFinishing, kComplete };
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  static void arrived(Ptr work);
  static void finish_and_complete(Ptr work);  // called by the thread that claimed kFinishing
  static void complete(Ptr work);
  /// For a lane: completes the futures that were asked for, ends the profiler's span, drops the references.
  static Lanes::Task settling(Ptr work, FuturePtr future, FuturePtr future_result);
  /// Runs the engine on this thread until the work is no longer pending or `until` has passed. True: still pending at
  /// `until`. False: not pending any more, or another thread drives the engine.
  bool drive(engine::Group& group, core::TimePoint until);
  /// Waits until `until`. Returns whether the work is complete.
  bool sleep_until(core::TimePoint until);
  bool claim_finish();
  /// Whether the caller may be told that the work is complete: its future must be complete, too. mutex_ held.
  bool may_show() const;
  void mark(const FuturePtr& future) const;
  void mark_result(const FuturePtr& future) const;
  void end_span();
  c10d::WorkResult work_result() const;

  const std::shared_ptr<WorkContext> context_;
  const char* const name_;
  const std::vector<at::Tensor> outputs_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point started_;
  const bool waited_for_;
  const std::uint64_t completion_key_;
  const int lane_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> seen_complete_{false};  // the program has seen that the work is complete

  // Used by one thread at a time: the issuing thread, then the finishing thread, then the thread that drops the work.
  Buffers buffers_;
  std::function<void()> finish_;
  std::vector<std::shared_ptr<TimeExtension>> extensions_;
  std::shared_ptr<InOrder> order_;
  std::uint64_t ticket_ = 0;
  std::vector<std::pair<std::shared_ptr<InOrder>, std::uint64_t>> ancestors_;  // works with callbacks that led here

  // Guarded by mutex_. mutex_ and cv_ are members of the base class.
  WorkStage stage_ = WorkStage::kPending;
  std::size_t parts_left_;
  bool ends_at_error_ = false;
  bool ended_ = false;         // arrived() was called
  bool owes_future_ = false;   // a future was asked for before the work was complete, and is not complete yet
  core::TimePoint settle_by_;  // waiters wait for such a future until then
  core::Status status_;
  int source_rank_ = -1;
  int waiters_ = 0;
  float duration_ms_ = 0;
  FuturePtr future_;
  FuturePtr future_result_;
  std::vector<Ptr> parents_;
  Ptr kept_;  // the completion's reference, for the waiter to drop

  std::mutex span_mutex_;  // guards recordFunctionEndCallback_
};

/// Returns a new key in every call.
std::uint64_t next_completion_key();
/// Runs the group's hooks at the end of a work: completion hooks after a success, abort hooks after the first verdict.
void report(WorkContext& context, const core::Status& status, std::uint64_t completion_key, float duration_ms);

/// One Work that completes when all of `works` have, with the first error among them; null works count as complete.
/// Messages between two ranks are independent: the first error among them completes it at once.
c10::intrusive_ptr<c10d::Work> combine(const std::shared_ptr<WorkContext>& context, std::vector<WorkHybrid::Ptr> works);

}  // namespace hybridps::pg
