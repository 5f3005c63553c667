#include "hybridps/pg/work.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include "hybridps/core/float_mode.h"
#include "hybridps/core/log.h"
#include "hybridps/pg/errors.h"
#include "hybridps/pg/gil.h"
#include "hybridps/pg/process.h"

namespace hybridps::pg {
namespace {

// How long getFuture() waits for a lane to end earlier callbacks, if the program has already seen the work complete.
constexpr std::chrono::milliseconds kMoment(20);
// How long wait() and isCompleted() wait for callbacks of a future that was asked for earlier. A callback may wait for
// the program itself.
constexpr std::chrono::seconds kSettleWithin(1);
constexpr int kAbortHooksNice = 10;  // still leaves a tenth of a busy core: hooks may hold the interpreter's lock

thread_local const WorkHybrid* running_callback = nullptr;  // NOLINT: see of_running_callback()

class RunningCallback : core::Pinned {
 public:
  explicit RunningCallback(const WorkHybrid* work) : outer_(std::exchange(running_callback, work)) {}
  ~RunningCallback() { running_callback = outer_; }

 private:
  const WorkHybrid* const outer_;
};

/// Whether abort hooks should explain the error: a peer's fault or a delay, not the caller's own action.
bool is_verdict(const core::Status& status) {
  switch (status.code()) {
    case core::Code::kTimeout:
    case core::Code::kPeerDead:
    case core::Code::kMismatch:
    case core::Code::kInternal: return true;
    default: return false;
  }
}

}  // namespace

std::uint64_t next_completion_key() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

void WorkContext::post_abort_hooks() const {
  if (hooks->abort.empty()) return;
  Process::instance().abort_hooks()->post(1, [hooks = hooks] {
    // The program's next work, such as going on with the remaining ranks, needs the cores more than the hooks do.
    static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kAbortHooksNice));
    hooks->abort.run();
  });
}

void report(WorkContext& context, const core::Status& status, std::uint64_t completion_key, float duration_ms) {
  if (status.is_ok()) {
    context.hooks->completion.run(completion_key, duration_ms);
  } else if (is_verdict(status) && !context.hooks->abort.empty() && !context.failure_told.exchange(true)) {
    context.post_abort_hooks();
  }
}

WorkHybrid::WorkHybrid(std::shared_ptr<WorkContext> context, Call& call, std::size_t parts,
                       std::vector<std::shared_ptr<TimeExtension>> extensions)
    : c10d::Work(context->rank, call.type, call.title, call.profiled_inputs()),
      context_(std::move(context)),
      name_(call.name),
      outputs_(call.outputs),
      timeout_(call.timeout),
      started_(std::chrono::steady_clock::now()),
      waited_for_(!call.asynchronous),
      completion_key_(next_completion_key()),
      lane_(Lanes::current() + 1),
      buffers_(std::move(call.buffers)),
      finish_(std::exchange(call.finish, nullptr)),
      extensions_(std::move(extensions)),
      parts_left_(parts) {}

WorkHybrid::~WorkHybrid() {
  // The reference count says that no other thread is here. But torch's own code may have dropped the last reference,
  // and torch is not compiled with the thread sanitizer. The lock shows the sanitizer that settling() came before.
  const std::lock_guard lock(mutex_);
}

void WorkHybrid::set_order(std::shared_ptr<InOrder> order) {
  order_ = std::move(order);
  ticket_ = order_->enter();
  if (const WorkHybrid* parent = of_running_callback()) {
    ancestors_ = parent->ancestors_;
    if (parent->order_) ancestors_.emplace_back(parent->order_, parent->ticket_);
  }
}

const WorkHybrid* WorkHybrid::of_running_callback() noexcept { return running_callback; }

bool WorkHybrid::overtaken(const std::vector<std::shared_ptr<InOrder>>& orders) const {
  const auto newer = [&](const std::shared_ptr<InOrder>& order, std::uint64_t ticket) {
    return order && std::find(orders.begin(), orders.end(), order) != orders.end() && order->next() > ticket + 1;
  };
  return newer(order_, ticket_) ||
         std::any_of(ancestors_.begin(), ancestors_.end(), [&](const auto& at) { return newer(at.first, at.second); });
}

std::string WorkHybrid::describe() const {
  std::string text = name_;
  if (const auto sequence = sequence_.load(std::memory_order_relaxed)) text += " " + std::to_string(sequence);
  return text + " of group " + context_->group_name + " (rank " + std::to_string(context_->rank) + " of " +
         std::to_string(context_->size) + ")";
}

// The way to completion ---------------------------------------------------------------------------------------------

void WorkHybrid::part_done(Ptr work, const worker::Outcome& outcome) {
  bool has_ended = false;
  {
    const std::lock_guard lock(work->mutex_);
    --work->parts_left_;
    has_ended = work->ended_;
    if (!has_ended) {
      if (work->status_.is_ok() && !outcome.status.is_ok()) work->status_ = outcome.status;
      if (outcome.source_rank >= 0) work->source_rank_ = outcome.source_rank;
      const bool fails_now = work->ends_at_error_ && !work->status_.is_ok();
      if (work->parts_left_ > 0 && !fails_now) return;  // the other parts hold references of their own
      work->ended_ = true;
    }
  }
  if (!has_ended) {
    arrived(std::move(work));
    return;
  }
  // The program may have dropped the work, so this reference may be the last.
  Lanes& lanes = *work->context_->lanes;
  const int lane = work->lane_;
  lanes.post(lane, [work = std::move(work)]() mutable { work.reset(); });
}

void WorkHybrid::arrived(Ptr work) {
  // Until stage_ changes, no other thread touches buffers_ and finish_.
  const bool to_finish = work->status_.is_ok() && (work->buffers_.needs_finish() || work->finish_ != nullptr);
  if (!to_finish) {
    complete(std::move(work));
    return;
  }
  Lanes& lanes = *work->context_->lanes;
  const int lane = work->lane_;
  {
    const std::lock_guard lock(work->mutex_);
    work->stage_ = WorkStage::kArrived;
    if (work->waiters_ > 0) work->cv_.notify_all();
  }
  // The lane or a waiter may be first: the lane can be busy with a callback that waits for this very work.
  lanes.post(lane, [work = std::move(work)]() mutable {
    if (work->claim_finish()) finish_and_complete(std::move(work));
    work.reset();
  });
}

bool WorkHybrid::claim_finish() {
  const std::lock_guard lock(mutex_);
  if (stage_ != WorkStage::kArrived) return false;
  stage_ = WorkStage::kFinishing;
  return true;
}

void WorkHybrid::finish_and_complete(Ptr work) {
  try {
    const core::UsualFloatMode usual;  // finish_ sums sparse parts, on a waiter's thread or a lane
    work->buffers_.finish();
    if (work->finish_) work->finish_();
    work->finish_ = nullptr;
  } catch (const std::exception& error) {
    const std::lock_guard lock(work->mutex_);
    work->status_ = core::Status(core::Code::kInternal, "cannot deliver the result: " + message_of(error));
  }
  complete(std::move(work));
}

void WorkHybrid::complete(Ptr work) {
  const float duration_ms =
      std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - work->started_).count();
  for (const auto& extension : work->extensions_) extension->expired.store(true, std::memory_order_release);
  report(*work->context_, work->status_, work->completion_key_, duration_ms);

  const std::shared_ptr<Lanes> lanes = work->context_->lanes;
  const std::shared_ptr<InOrder> order = work->order_;
  const std::uint64_t ticket = work->ticket_;
  const int lane = work->lane_;
  const worker::Outcome outcome{work->status_, work->source_rank_};
  std::vector<Ptr> parents;
  FuturePtr future;
  FuturePtr future_result;
  {
    const std::lock_guard lock(work->mutex_);
    work->stage_ = WorkStage::kComplete;
    work->completed_ = true;
    work->duration_ms_ = duration_ms;
    parents.swap(work->parents_);
    future = work->future_;  // getFuture() completes a future that is asked for later
    future_result = work->future_result_;
    work->owes_future_ = future || future_result;
    work->settle_by_ = core::Clock::now() + kSettleWithin;
    if (work->waiters_ > 0) {
      work->cv_.notify_all();
      // Only the waiter needs the work, so the waiter drops the reference, and no lane wakes up. The waiter may destroy
      // the work as soon as this lock is released.
      if (!future && !future_result) {
        WorkHybrid& target = *work;
        target.kept_ = std::move(work);
      }
    }
  }
  for (Ptr& parent : parents) part_done(std::move(parent), outcome);
  const bool calls_back = future || future_result;
  Lanes::Task task;
  if (work) task = settling(std::move(work), std::move(future), std::move(future_result));
  if (order) {
    order->leave(ticket, std::move(task), calls_back);
  } else if (task) {
    lanes->post(lane, std::move(task));
  }
}

class WorkHybrid::Settled : core::Pinned {
 public:
  explicit Settled(WorkHybrid& work) : work_(work) {}
  ~Settled() {  // also if a callback throws
    const std::lock_guard lock(work_.mutex_);
    work_.owes_future_ = false;
    if (work_.waiters_ > 0) work_.cv_.notify_all();
  }

 private:
  WorkHybrid& work_;
};

Lanes::Task WorkHybrid::settling(Ptr work, FuturePtr future, FuturePtr future_result) {
  // The buffers are destroyed with the task.
  return [work = std::move(work), future = std::move(future), future_result = std::move(future_result),
          buffers = Buffers()]() mutable {
    {
      const std::lock_guard lock(work->mutex_);
      std::swap(buffers, work->buffers_);
    }
    work->end_span();
    const RunningCallback running(work.get());
    const Settled settled(*work);
    if (future) work->mark(future);
    if (future_result) work->mark_result(future_result);
  };
}

void WorkHybrid::mark(const FuturePtr& future) const {
  if (status_.is_ok()) {
    future->markCompleted(c10::IValue(outputs_));
  } else {
    future->setError(to_exception(status_, describe()));
  }
}

void WorkHybrid::mark_result(const FuturePtr& future) const {
  future->markCompleted(c10::IValue(static_cast<std::int64_t>(work_result())));
}

c10d::WorkResult WorkHybrid::work_result() const {
  switch (status_.code()) {
    case core::Code::kOk: return c10d::WorkResult::SUCCESS;
    case core::Code::kTimeout: return c10d::WorkResult::TIMEOUT;
    case core::Code::kPeerDead: return c10d::WorkResult::COMM_ERROR;
    default: return c10d::WorkResult::UNKNOWN;
  }
}

void WorkHybrid::end_span() {
  const std::lock_guard lock(span_mutex_);
  if (!recordFunctionEndCallback_) return;
  recordFunctionEndCallback_();
  recordFunctionEndCallback_ = nullptr;
}

void WorkHybrid::add_parent(const Ptr& work, Ptr parent) {
  worker::Outcome outcome;
  {
    const std::lock_guard lock(work->mutex_);
    if (work->stage_ != WorkStage::kComplete) {
      work->parents_.push_back(std::move(parent));
      return;
    }
    outcome = {work->status_, work->source_rank_};
  }
  part_done(std::move(parent), outcome);
}

// What the caller sees ----------------------------------------------------------------------------------------------

bool WorkHybrid::wait(std::chrono::milliseconds timeout) {
  const auto deadline = timeout.count() > 0 ? core::Deadline::after(timeout) : core::Deadline::never();
  std::shared_ptr<engine::Group> group;  // may be the last reference: dropped after the lock
  bool drives = false;
  {
    const std::lock_guard lock(mutex_);
    if (waited_for_ && stage_ == WorkStage::kPending) group = context_->group.lock();
    drives = group != nullptr;
  }
  bool complete = wait_with_signals(deadline.point(), [&](core::TimePoint until) {
    if (drives) drives = drive(*group, until);
    return sleep_until(until);
  });
  if (!complete) {  // perhaps only callbacks are late
    const std::lock_guard lock(mutex_);
    complete = stage_ == WorkStage::kComplete;
  }
  TORCH_CHECK(complete, "Operation timed out! hybridps: ", describe(), " was not complete within ", timeout.count(),
              " ms of waiting; it goes on");
  Ptr kept;
  Buffers buffers;
  {
    const std::lock_guard lock(mutex_);
    kept = std::move(kept_);
    if (kept) std::swap(buffers, buffers_);
  }
  kept.reset();  // the caller holds another reference
  end_span();
  seen_complete_.store(true, std::memory_order_relaxed);
  if (!status_.is_ok()) throw_status(status_, describe());
  return true;
}

bool WorkHybrid::drive(engine::Group& group, core::TimePoint until) {
  {
    const std::lock_guard lock(mutex_);
    ++waiters_;  // so that no lane wakes up for this work
  }
  const auto is_pending = [this] {
    const std::lock_guard lock(mutex_);
    return stage_ == WorkStage::kPending;
  };
  group.drive([&] { return !is_pending(); }, until);
  const std::lock_guard lock(mutex_);
  --waiters_;
  return stage_ == WorkStage::kPending && core::Clock::now() >= until;
}

bool WorkHybrid::sleep_until(core::TimePoint until) {
  std::unique_lock lock(mutex_);
  while (stage_ != WorkStage::kComplete || !may_show()) {
    if (stage_ == WorkStage::kArrived) {
      stage_ = WorkStage::kFinishing;
      lock.unlock();
      finish_and_complete(Ptr::reclaim_copy(this));
      lock.lock();
      continue;
    }
    const bool is_complete = stage_ == WorkStage::kComplete;
    ++waiters_;
    const bool woken =
        cv_.wait_until(lock, is_complete ? std::min(until, settle_by_) : until) == std::cv_status::no_timeout;
    --waiters_;
    if (!woken && stage_ != WorkStage::kComplete && stage_ != WorkStage::kArrived) return false;
    if (!woken && is_complete && core::Clock::now() >= until) return false;
  }
  return true;
}

// On the work's own lane, or one above, nobody else would complete the future.
bool WorkHybrid::may_show() const {
  return !owes_future_ || Lanes::current() >= lane_ || core::Clock::now() >= settle_by_;
}

bool WorkHybrid::isCompleted() {
  const std::lock_guard lock(mutex_);
  const bool may_see = seen_complete_.load(std::memory_order_relaxed) || may_show();
  if (stage_ != WorkStage::kComplete || !may_see) return false;
  seen_complete_.store(true, std::memory_order_relaxed);
  return true;
}

bool WorkHybrid::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return stage_ == WorkStage::kComplete && status_.is_ok();
}

std::exception_ptr WorkHybrid::exception() const {
  const std::lock_guard lock(mutex_);
  if (stage_ != WorkStage::kComplete || status_.is_ok()) return nullptr;
  return to_exception(status_, describe());
}

int WorkHybrid::sourceRank() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(source_rank_ >= 0, "sourceRank() may only be called on the work of a receive that is complete (",
              describe(), ")");
  return source_rank_;
}

std::vector<at::Tensor> WorkHybrid::result() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(stage_ == WorkStage::kComplete,
              "Work needs to be completed before calling result(). Should call wait() before result().");
  return outputs_;
}

void WorkHybrid::abort() {
  if (const auto group = context_->group.lock()) group->abort(describe() + " was aborted through its Work");
}

c10::intrusive_ptr<c10::ivalue::Future> WorkHybrid::getFuture() {
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (stage_ != WorkStage::kComplete) return future_;
  }
  // No other thread knows future_ yet, and no lane will complete it. Callbacks of earlier works run first, even if this
  // work was complete before them: a callback that is added to a finished future runs in the caller. But a caller that
  // knows the work to be complete may ask for the value at once (DDP's join does). So a lane that is about to finish
  // gets kMoment, and the interpreter's lock, which the lane may need.
  if (order_ && Lanes::current() < lane_) {
    if (seen_complete_.load(std::memory_order_relaxed) && !order_->is_first(ticket_)) {
      const InterpreterReleased released;
      order_->wait_until_first(ticket_, std::chrono::steady_clock::now() + kMoment);
    }
    Lanes::Task task = settling(Ptr::reclaim_copy(this), future_, nullptr);
    if (order_->append(ticket_, task)) return future_;
  }
  mark(future_);
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkHybrid::getFutureResult() {
  {
    const std::lock_guard lock(mutex_);
    if (future_result_) return future_result_;
    future_result_ = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
    if (stage_ != WorkStage::kComplete) return future_result_;
  }
  mark_result(future_result_);
  return future_result_;
}

uint64_t WorkHybrid::getSequencenumber() const { return sequence_.load(std::memory_order_relaxed); }

float WorkHybrid::getDuration() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(stage_ == WorkStage::kComplete, "getDuration() may only be called once the work is complete (",
              describe(), ")");
  return duration_ms_;
}

c10::intrusive_ptr<c10d::Work> combine(const std::shared_ptr<WorkContext>& context,
                                       std::vector<WorkHybrid::Ptr> works) {
  std::erase_if(works, [](const WorkHybrid::Ptr& work) { return !work; });
  Call all = Call::of_coalesced();
  for (const auto& work : works) all.outputs.insert(all.outputs.end(), work->outputs().begin(), work->outputs().end());
  auto parent =
      c10::make_intrusive<WorkHybrid>(context, all, works.size() + 1, std::vector<std::shared_ptr<TimeExtension>>());
  // Coalesced collectives end together: until then all their buffers are in use.
  if (std::all_of(works.begin(), works.end(), [](const WorkHybrid::Ptr& work) {
        const c10d::OpType type = work->retrieveOpType();
        return type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
      }))
    parent->end_at_first_error();
  for (const auto& work : works) WorkHybrid::add_parent(work, parent);
  WorkHybrid::part_done(parent, {});
  return parent;
}

}  // namespace hybridps::pg
