#include "hybridps/pg/stream_work.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include "hybridps/pg/accelerator.h"
#include "hybridps/pg/errors.h"
#include "hybridps/pg/gil.h"
#include "hybridps/pg/work_cast.h"

namespace hybridps::pg {
namespace {

bool await(staging::Staged& staged, core::TimePoint until) {
  return wait_with_signals(until, [&](core::TimePoint next) { return staged.wait(next); });
}

c10d::WorkResult result_of(const core::Status& status) {
  switch (status.code()) {
    case core::Code::kOk: return c10d::WorkResult::SUCCESS;
    case core::Code::kTimeout: return c10d::WorkResult::TIMEOUT;
    case core::Code::kPeerDead: return c10d::WorkResult::COMM_ERROR;
    default: return c10d::WorkResult::UNKNOWN;
  }
}

}  // namespace

// What outlives the handle ------------------------------------------------------------------------------------------

void StreamWork::Held::let_go() {
  Buffers buffers;
  const std::lock_guard lock(mutex_);
  std::swap(buffers, buffers_);
}

void StreamWork::Held::part_over(const std::shared_ptr<Held>& held, const core::Status& status) {
  {
    const std::lock_guard lock(held->mutex_);
    if (held->status_.is_ok() && !status.is_ok()) held->status_ = status;
    if (--held->parts_left_ > 0) return;
    held->duration_ms_ =
        std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - held->started_).count();
  }
  held->context_->lanes->post(1, [held] { held->complete(); });
}

void StreamWork::Held::complete() {
  let_go();
  for (const auto& extension : extensions_) extension->expired.store(true, std::memory_order_release);
  core::Status status;
  FuturePtr future;
  float duration_ms = 0;
  {
    const std::lock_guard lock(mutex_);
    status = status_;
    future = future_result_;
    duration_ms = duration_ms_;
  }
  report(*context_, status, completion_key_, duration_ms);
  if (future && !future->completed()) future->markCompleted(c10::IValue(static_cast<std::int64_t>(result_of(status))));
}

StreamWork::FuturePtr StreamWork::Held::future_result() {
  const std::lock_guard lock(mutex_);
  if (future_result_) return future_result_;
  future_result_ = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
  if (duration_ms_ >= 0) future_result_->markCompleted(c10::IValue(static_cast<std::int64_t>(result_of(status_))));
  return future_result_;
}

float StreamWork::Held::duration_ms() const {
  const std::lock_guard lock(mutex_);
  return duration_ms_;
}

// The handle ----------------------------------------------------------------------------------------------------------

StreamWork::StreamWork(std::shared_ptr<WorkContext> context, const Call& call, c10::Device device, bool blocks_host,
                       std::shared_ptr<Held> held)
    : c10d::Work(context->rank, call.type, call.title, call.profiled_inputs()),
      context_(std::move(context)),
      name_(call.name),
      outputs_(call.outputs),
      device_(device),
      issued_on_(current_stream(device)),
      timeout_(call.timeout),
      blocks_host_(blocks_host),
      held_(std::move(held)) {}

void StreamWork::add(std::shared_ptr<staging::Staged> staged, std::shared_ptr<staging::Channel> channel) {
  staged_.push_back(std::move(staged));
  channels_.push_back(std::move(channel));
}

void StreamWork::enqueued() {
  if (auto end = std::exchange(recordFunctionEndCallback_, nullptr)) end();
}

void StreamWork::join(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  for (const auto& work : works) {
    if (auto on_stream = work_cast<StreamWork>(work)) {
      outputs_.insert(outputs_.end(), on_stream->outputs_.begin(), on_stream->outputs_.end());
      joined_.push_back(std::move(on_stream));
    } else if (work) {
      on_host_.push_back(work);
    }
  }
}

void StreamWork::complete_enqueue() {
  for (const auto& staged : staged_) check_status(staged->complete_enqueue(), describe());
  for (const Ptr& work : joined_) work->complete_enqueue();
}

std::string StreamWork::describe() const {
  return std::string(name_) + " of group " + context_->group_name + " (rank " + std::to_string(context_->rank) +
         " of " + std::to_string(context_->size) + ") on " + device_.str();
}

core::Status StreamWork::failure() const {
  for (const auto& staged : staged_)
    if (core::Status status = staged->status(); !status.is_ok()) return status;
  for (const Ptr& work : joined_)
    if (core::Status status = work->failure(); !status.is_ok()) return status;
  return {};
}

void StreamWork::throw_failure() const {
  if (const core::Status status = failure(); !status.is_ok()) throw_status(status, describe());
}

void StreamWork::synchronize() {
  throw_failure();
  const device::DeviceStream current = current_stream(device_);
  for (const auto& staged : staged_) check_status(staged->wait_on(current), describe());
  for (const Ptr& work : joined_) work->synchronize();
  // Keep memory that was made on another stream: that stream would use the memory again and does not wait.
  if (current.native == issued_on_.native) held_->let_go();
}

bool StreamWork::wait(std::chrono::milliseconds timeout) {
  const bool limited = timeout.count() > 0;
  const core::TimePoint until = limited ? core::Clock::now() + timeout : core::TimePoint::max();
  synchronize();
  if (limited || blocks_host_) {
    for (const auto& staged : staged_)
      TORCH_CHECK(await(*staged, until), "Operation timed out! hybridps: ", describe(), " was not complete within ",
                  timeout.count(), " ms of waiting; it goes on");
    throw_failure();
  }
  const auto left = [&] {
    const auto now = core::Clock::now();
    return !limited      ? kNoTimeout
           : now < until ? std::max(std::chrono::duration_cast<std::chrono::milliseconds>(until - now),
                                    std::chrono::milliseconds(1))
                         : std::chrono::milliseconds(1);
  };
  for (const Ptr& work : joined_) work->wait(left());
  for (const auto& work : on_host_) work->wait(left());
  return true;
}

bool StreamWork::isCompleted() {
  for (const auto& staged : staged_)
    if (!staged->is_over() && !staged->has_failed()) return false;
  return std::all_of(joined_.begin(), joined_.end(), [](const Ptr& work) { return work->isCompleted(); }) &&
         std::all_of(on_host_.begin(), on_host_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool StreamWork::isSuccess() const { return const_cast<StreamWork*>(this)->isCompleted() && exception() == nullptr; }

std::exception_ptr StreamWork::exception() const {
  if (const core::Status status = failure(); !status.is_ok()) return to_exception(status, describe());
  for (const auto& work : on_host_)
    if (auto exception = work->exception()) return exception;
  return nullptr;
}

int StreamWork::sourceRank() const {
  const InterpreterReleased released;
  // dist.recv() calls this after wait(), but wait() has not waited for the message.
  for (const auto& staged : staged_) {
    await(*staged, core::TimePoint::max());
    if (const int rank = staged->source_rank(); rank >= 0) return rank;
  }
  throw_failure();
  TORCH_CHECK(false, "sourceRank() may only be called on the work of a receive (", describe(), ")");
}

void StreamWork::abort() {
  if (const auto group = context_->group.lock()) group->abort(describe() + " was aborted through its Work");
}

StreamWork::FuturePtr StreamWork::getFuture() {
  const InterpreterReleased released;
  const std::lock_guard lock(future_mutex_);
  if (future_) return future_;
  complete_enqueue();
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{device_});
  if (const core::Status status = failure(); !status.is_ok()) {
    future->setError(to_exception(status, describe()));
  } else {
    // The value is ready when the stream that is current at markCompleted() has come this far.
    std::vector<Ptr> all = joined_;
    all.push_back(Ptr::reclaim_copy(this));
    device::DeviceStream last{};
    bool found = false;
    for (const Ptr& work : all) {
      if (work->channels_.empty()) continue;
      if (!found) last = work->channels_.front()->out_stream();
      found = true;
      for (std::size_t i = 0; i < work->staged_.size(); ++i)
        if (work->channels_[i]->out_stream().native != last.native)
          check_status(work->staged_[i]->wait_on(last), describe());
    }
    for (const auto& work : on_host_) work->wait();
    if (found) {
      const c10::StreamGuard guard(as_torch_stream(last, device_));
      future->markCompleted(c10::IValue(outputs_));
    } else {
      future->markCompleted(c10::IValue(outputs_));
    }
  }
  future_ = std::move(future);
  return future_;
}

StreamWork::FuturePtr StreamWork::getFutureResult() {
  // If several works were joined, the last counts.
  if (!staged_.empty()) return held_->future_result();
  return joined_.empty() ? on_host_.back()->getFutureResult() : joined_.back()->getFutureResult();
}

float StreamWork::getDuration() const {
  const float duration_ms = held_->duration_ms();
  TORCH_CHECK(duration_ms >= 0, "getDuration() may only be called once the work is complete (", describe(), ")");
  return duration_ms;
}

}  // namespace hybridps::pg
