#include "hybridps/staging/staged.h"

#include <utility>

#include "hybridps/staging/channel.h"

namespace hybridps::staging {

using core::Status;

Staged::Staged(std::shared_ptr<Channel> channel, std::shared_ptr<DevicePool> pool) noexcept
    : channel_(channel), pool_(std::move(pool)) {}

Staged::~Staged() { pool_->give_back(start_); }

core::Status Staged::complete_enqueue() {
  const auto channel = channel_.lock();
  return channel ? channel->complete_enqueue(*this) : Status();
}

core::Status Staged::wait_on(device::DeviceStream stream) {
  if (is_over()) return {};
  const auto channel = channel_.lock();
  if (!channel) return {};  // a channel outlives the work on it, so the operation is over
  if (Status status = channel->complete_enqueue(*this); !status.is_ok()) return status;
  return channel->device_->wait(stream, *end_);
}

bool Staged::is_over() const {
  const std::lock_guard lock(mutex_);
  return over_;
}

core::Status Staged::status() {
  const std::lock_guard lock(mutex_);
  if (!status_.is_ok()) told_ = true;
  return status_;
}

bool Staged::has_failed() const {
  const std::lock_guard lock(mutex_);
  return !status_.is_ok();
}

bool Staged::is_told() const {
  const std::lock_guard lock(mutex_);
  return told_;
}

bool Staged::wait(core::TimePoint until) {
  std::unique_lock lock(mutex_);
  const auto settled = [this] { return over_ || !status_.is_ok(); };
  waits_.fetch_add(1);
  bool did = true;
  if (until == core::TimePoint::max())
    changed_.wait(lock, settled);
  else
    did = changed_.wait_until(lock, until, settled);
  waits_.fetch_sub(1);
  return did;
}

int Staged::source_rank() const {
  const std::lock_guard lock(mutex_);
  return source_rank_;
}

void Staged::set_failed(const Status& status) {
  const std::lock_guard lock(mutex_);
  if (status_.is_ok()) status_ = status;
  changed_.notify_all();
}

void Staged::slice_done(const worker::Outcome& outcome) {
  if (!outcome.status.is_ok()) set_failed(outcome.status);
  if (outcome.source_rank < 0) return;
  const std::lock_guard lock(mutex_);
  source_rank_ = outcome.source_rank;
}

void Staged::forget() {
  finish_ = nullptr;
  const std::lock_guard lock(mutex_);
  done_ = {};
}

void Staged::set_over() {
  core::OnceFn<void(const Status&)> done;
  Status status;
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
    done = std::move(done_);
    status = status_;
    changed_.notify_all();
  }
  done(status);
}

}  // namespace hybridps::staging
