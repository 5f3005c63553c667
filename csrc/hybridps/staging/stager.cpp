#include "hybridps/staging/stager.h"

#include <algorithm>
#include <string>
#include <system_error>

#include "hybridps/core/thread.h"

namespace hybridps::staging {
namespace {

using core::Code;
using core::Status;

constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kNapForStream = std::chrono::microseconds(20);
constexpr auto kNapForEnd = std::chrono::microseconds(200);

}  // namespace

// EventPool -----------------------------------------------------------------------------------------------------------

EventPool::~EventPool() {
  for (const device::Event event : free_) device_->destroy(event);
}

core::Result<device::Event> EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const device::Event event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  return device_->make_event();
}

void EventPool::give_back(device::Event event) {
  if (event.native == nullptr) return;
  const std::lock_guard lock(mutex_);
  free_.push_back(event);
}

// Staged --------------------------------------------------------------------------------------------------------------

Staged::Staged(std::shared_ptr<Channel> channel, std::shared_ptr<EventPool> events) noexcept
    : channel_(channel), events_(std::move(events)) {}

Staged::~Staged() {
  events_->give_back(start_);
  events_->give_back(end_);
}

core::Status Staged::complete_enqueue() {
  const auto channel = channel_.lock();
  return channel ? channel->complete_enqueue(*this) : Status();
}

core::Status Staged::wait_on(device::Stream stream) {
  if (is_over()) return {};
  const auto channel = channel_.lock();
  if (!channel) return {};  // it outlives what is under way on it
  if (Status status = channel->complete_enqueue(*this); !status.is_ok()) return status;
  return channel->device_->wait(stream, end_);
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
  if (until == core::TimePoint::max()) {
    changed_.wait(lock, settled);
    return true;
  }
  return changed_.wait_until(lock, until, settled);
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

// Stager --------------------------------------------------------------------------------------------------------------

Stager::~Stager() {
  // The thread holds a reference: it has ended, or is this one, at its end.
  if (thread_.joinable()) thread_.detach();
}

core::Result<std::shared_ptr<Channel>> Stager::open(std::shared_ptr<device::Device> device,
                                                    std::weak_ptr<engine::Group> group, ChannelOptions options) {
  auto channel = std::make_shared<Channel>(shared_from_this(), std::move(device), std::move(group), options);
  if (!channel->opened_.is_ok()) return channel->opened_;
  const std::lock_guard lock(mutex_);
  try {
    start();
  } catch (const std::system_error& error) {
    return Status(Code::kOutOfResources, std::string("cannot start the thread hybridps-stage (") + error.what() +
                                             "); see `ulimit -u` and the limit of the container");
  }
  return channel;
}

void Stager::start() {
  if (running_) return;
  thread_ = std::thread([self = shared_from_this()] { self->run(); });
  running_ = true;
  stopping_ = false;
}

std::size_t Stager::active() const {
  const std::lock_guard lock(mutex_);
  return active_.size();
}

void Stager::activate(std::shared_ptr<Channel> channel) {
  const std::lock_guard lock(mutex_);
  if (std::find(active_.begin(), active_.end(), channel) != active_.end()) return;
  active_.push_back(std::move(channel));
  start();  // stop() may have come after open()
  changed_.notify_all();
}

void Stager::bury(std::function<void()> funeral) {
  {
    const std::lock_guard lock(mutex_);
    if (running_ && !stopping_) {
      funerals_.push_back(std::move(funeral));
      changed_.notify_all();
      return;
    }
  }
  funeral();
}

void Stager::stop(std::chrono::milliseconds patience) {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    stop_at_ = core::Clock::now() + patience;
    thread = std::move(thread_);
    changed_.notify_all();
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();
  else
    thread.join();
}

void Stager::run() {
  core::begin_thread("hybridps-stage");
  std::vector<std::shared_ptr<Channel>> channels;
  std::vector<std::function<void()>> funerals;
  core::TimePoint busy_since = core::Clock::now();
  const device::Device* relaxed = nullptr;
  for (;;) {
    channels.clear();
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !active_.empty() || !funerals_.empty(); });
      const bool give_up = stopping_ && core::Clock::now() >= stop_at_;
      funerals.swap(funerals_);
      channels = active_;
      if (stopping_ && (channels.empty() || give_up)) {
        active_.clear();
        running_ = false;
        lock.unlock();
        for (const auto& channel : channels)
          channel->expire(Status(Code::kAborted, "the process is leaving before the operation was complete"), nullptr);
        for (const auto& funeral : funerals) funeral();
        return;
      }
    }
    for (const auto& funeral : funerals) funeral();
    funerals.clear();

    const core::TimePoint now = core::Clock::now();
    bool did = false;
    bool waits_for_stream = false;
    for (const auto& channel : channels) {
      if (std::exchange(relaxed, &channel->device()) != &channel->device()) channel->device().begin_helper_thread();
      const Channel::Progress progress = channel->progress(now);
      did |= progress.did;
      waits_for_stream |= progress.waits_for_stream;
      // activate() comes after something was put on the channel.
      const std::lock_guard lock(mutex_);
      if (channel->is_idle()) std::erase(active_, channel);
    }
    if (did) {
      busy_since = now;
      continue;
    }
    if (channels.empty()) continue;
    // Small operations are over within microseconds; a stream may also be seconds away.
    if (now - busy_since < kSpin)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(waits_for_stream ? kNapForStream : kNapForEnd);
  }
}

}  // namespace hybridps::staging
