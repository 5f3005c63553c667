// Channel: the part that runs on the Stager's threads and in the engine's completions.
#include <algorithm>
#include <cstring>
#include <utility>

#include "hybridps/core/check.h"
#include "hybridps/staging/channel.h"
#include "hybridps/staging/stager.h"

namespace hybridps::staging {
namespace {

using core::Code;
using core::Status;

// Waiting time after the deadline, so that the engine can first name the missing ranks.
constexpr auto kGrace = std::chrono::milliseconds(500);
constexpr auto kTroubleEvery = std::chrono::milliseconds(2);
// A LocalGroup that has not stopped after this time never will. Streams then go on, whatever its work does.
constexpr auto kStopPatience = std::chrono::seconds(5);

std::string seconds_text(core::Duration duration) {
  const auto tenths = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count() / 100;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

}  // namespace

Channel::Progress Channel::progress(core::TimePoint now) {
  Progress result;
  std::vector<WaitingSlice> ready;
  std::vector<std::shared_ptr<Staged>> over;
  Status failure;
  {
    const std::lock_guard lock(progress_mutex_);
    const std::uint32_t reached = ready_.word->load(std::memory_order_acquire);
    while (!waiting_.empty() && device::has_reached(reached, word_of(waiting_.front().number))) {
      ready.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    // Where there is a witness, the witness must first name the missing ranks.
    if (!waiting_.empty() && waiting_.front().staged->deadline_.has_passed(local_ ? now - kGrace : now)) {
      const Staged& late = *waiting_.front().staged;
      failure = Status(Code::kTimeout,
                       late.what_ + " timed out after " + seconds_text(late.timeout_) + ": " + device_->describe() +
                           " has not come to it; see whether the work that the program put on the stream "
                           "before it can end, or pass a longer timeout");
    }
    result.waits_for_stream = !waiting_.empty();
    const bool dead = !device_failed_.is_ok();
    if (dead && !(waiting_.empty() && staged_.empty())) failure = device_failed_;
    const std::uint32_t ended = ended_.word->load(std::memory_order_acquire);
    while (!staged_.empty()) {
      const bool is_over = device::has_reached(ended, word_of(staged_.front()->end_number_));
      if (!is_over && !dead) break;
      if (!is_over) staged_.front()->set_failed(device_failed_);
      over.push_back(std::move(staged_.front()));
      staged_.pop_front();
    }
    while (!retired_.empty() && device::has_reached(ended, word_of(retired_.front().end))) {
      pool_->give_back(retired_.front().memory);
      retired_.pop_front();
    }
    result.waits_for_stream |= std::ranges::any_of(staged_, [](const auto& s) { return s->is_waited_for(); });
    release_if_stopped(now);
  }
  if (failure.is_ok()) failure = trouble(now);
  for (WaitingSlice& waiting : ready) submit(std::move(waiting));
  result.did = !ready.empty() || !over.empty();
  if (!failure.is_ok()) expire(failure, group_.lock().get());
  for (const auto& staged : over) {
    staged->set_over();
    if (!staged->has_failed()) continue;
    const std::lock_guard lock(progress_mutex_);
    if (!failed_) failed_ = staged;
  }
  return result;
}

void Channel::look() {
  std::shared_ptr<Local> local;
  std::shared_ptr<Staged> oldest;
  {
    const std::lock_guard lock(progress_mutex_);
    if (local_failed_.is_ok() && !(staged_.empty() && putting_ == 0)) local = local_;
    if (!staged_.empty()) oldest = staged_.front();
  }
  // Only the error matters, not whether the event is done: a failed device says so in every call.
  const Status device = oldest ? device_->is_done(*oldest->end_).status() : Status();
  const Status found = local ? local->poll() : Status();
  const std::lock_guard lock(progress_mutex_);
  if (device_failed_.is_ok()) device_failed_ = device;
  if (local_found_.is_ok()) local_found_ = found;
}

/// Finds reasons why a LocalGroup's work cannot end. Nothing on the streams reports such reasons.
core::Status Channel::trouble(core::TimePoint now) {
  std::shared_ptr<Staged> oldest;
  {
    const std::lock_guard lock(progress_mutex_);
    if (!local_ || now < next_trouble_ || (staged_.empty() && putting_ == 0 && !withheld_)) return {};
    next_trouble_ = now + kTroubleEvery;
    if (!local_failed_.is_ok()) return local_failed_;  // a failed Local withholds "done"
    if (!local_found_.is_ok()) return local_found_;
    if (!staged_.empty()) oldest = staged_.front();
  }
  if (const auto group = group_.lock())
    if (Status status = group->status(); !status.is_ok()) return status;
  if (!oldest || oldest->deadline_.is_never() || now < oldest->deadline_.point() + kGrace) return {};
  return Status(Code::kTimeout,
                oldest->what_ + " timed out after " + seconds_text(oldest->timeout_) + ": " + device_->describe() +
                    " has not come to its end; see whether the GPUs of this node's other ranks have come "
                    "to it, or pass a longer timeout");
}

/// progress_mutex_ held. Moves "done" when Local has stopped. Work behind the flag then runs, and a stopped LocalGroup
/// lets this work end at once, undone.
void Channel::release_if_stopped(core::TimePoint now) {
  if (release_by_ == core::TimePoint::max() || released_) return;
  if (now < release_by_ && !local_->is_stopped()) return;
  released_ = true;
  if (std::exchange(withheld_, false)) done_.word->store(word_of(done_until_), std::memory_order_release);
}

void Channel::abort(const Status& why) {
  {
    const std::lock_guard lock(progress_mutex_);
    fail_local(why);
  }
  stager_->activate(shared_from_this());
}

bool Channel::is_idle() const {
  const std::lock_guard lock(progress_mutex_);
  return waiting_.empty() && staged_.empty() && putting_ == 0 && !withheld_;
}

void Channel::submit(WaitingSlice waiting) {
  const auto group = group_.lock();
  if (!group) {
    slice_done(waiting.number, *waiting.staged, worker::Outcome{group_is_gone(waiting.staged->what_), -1},
               waiting.results);
    return;
  }
  auto done = [channel = shared_from_this(), staged = std::move(waiting.staged), number = waiting.number,
               results = std::move(waiting.results)](const worker::Outcome& outcome) {
    channel->slice_done(number, *staged, outcome, results);
  };
  if (waiting.operation.kind == schedule::Kind::kPointToPoint)
    group->submit(std::move(waiting.operation), std::move(done));
  else
    group->submit_reserved(waiting.sequence, std::move(waiting.operation), std::move(done));
}

/// Slices that have not reached the engine are never submitted.
void Channel::expire(const Status& status, engine::Group* group) {
  std::deque<WaitingSlice> waiting;
  std::shared_ptr<Local> local;
  std::shared_ptr<DirectRing> direct;
  std::deque<std::shared_ptr<Staged>> under_way;
  {
    const std::lock_guard lock(progress_mutex_);
    waiting.swap(waiting_);
    local = local_;
    direct = direct_;
    if (local) under_way = staged_;
    if (group == nullptr) released_ = true;  // nobody calls again to release "done"
  }
  // The engine reports nothing about operations within the node.
  for (const auto& staged : under_way) staged->set_failed(status);
  if (group != nullptr) group->abort(std::string(status.message()) + " (rank " + std::to_string(group->rank()) + ")");
  for (const WaitingSlice& slice : waiting)
    slice_done(slice.number, *slice.staged, worker::Outcome{status, -1}, slice.results);
  if (group == nullptr && direct) direct->give_up();
  if (!local) return;
  local->abort();
  {
    const std::lock_guard lock(progress_mutex_);
    if (group == nullptr) {
      withheld_ = false;
      done_.word->store(word_of(done_until_), std::memory_order_release);
      return;
    }
    if (release_by_ == core::TimePoint::max()) release_by_ = core::Clock::now() + kStopPatience;
  }
  stager_->activate(shared_from_this());
}

unsigned char mark_of(core::DType dtype) noexcept {
  switch (dtype) {
    case core::DType::kFloat8E4M3fnuz:
    case core::DType::kFloat8E5M2fnuz: return 0x80;  // their only NaN, where others have -0
    case core::DType::kBool: return 1;
    default: return 0xff;
  }
}

void Channel::slice_done(std::uint64_t number, Staged& staged, const worker::Outcome& outcome,
                         const SliceResults& results) {
  const device::NoDriverCalls the_out_stream_waits_for_this;
  // The stream goes on with what is there, and the program may look at no error: NaN shows in its next loss.
  if (!outcome.status.is_ok())
    for (const worker::Piece& piece : results.pieces) std::memset(piece.data, results.mark, piece.bytes);
  staged.slice_done(outcome);  // first, so that a thread that sees the flag sees the failure too
  bool withheld = false;
  {
    const std::lock_guard lock(progress_mutex_);
    if (!outcome.status.is_ok()) fail_local(outcome.status);
    if (!core::check(number - done_until_ - 1 < slices_done_.size(), "a slice is done once")) {
      if (const auto group = group_.lock())
        group->abort("rank " + std::to_string(group->rank()) + " lost count of its slices");
      return;
    }
    slices_done_[number - done_until_ - 1] = true;
    const std::uint64_t before = done_until_;
    while (!slices_done_.empty() && slices_done_.front()) {
      slices_done_.pop_front();
      ++done_until_;
    }
    withheld = withheld_;
    if (done_until_ != before && !withheld) done_.word->store(word_of(done_until_), std::memory_order_release);
  }
  if (withheld) stager_->activate(shared_from_this());  // it may be idle: an operation was put only in part
}

/// progress_mutex_ held. The ranks of the node must not go on with a wrong result, so "done" is withheld until Local
/// has stopped.
void Channel::fail_local(const Status& status) {
  if (!local_) return;
  if (local_failed_.is_ok()) local_failed_ = status;
  withheld_ = !released_;
}

}  // namespace hybridps::staging
