#include "hybridps/staging/stager.h"

#include <algorithm>
#include <string>
#include <system_error>

#include "hybridps/core/log.h"
#include "hybridps/core/thread.h"

namespace hybridps::staging {
namespace {

using core::Code;
using core::Status;

constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kNapForStream = std::chrono::microseconds(20);
constexpr auto kNapForEnd = std::chrono::microseconds(200);

}  // namespace

Stager::~Stager() {
  // The thread holds a reference: it has ended, or is this one, at its end.
  if (thread_.joinable()) thread_.detach();
}

core::Result<std::shared_ptr<Channel>> Stager::open(std::shared_ptr<device::Device> device,
                                                    std::weak_ptr<engine::Group> group, ChannelOptions options) {
  auto channel = std::make_shared<Channel>(shared_from_this(), std::move(device), std::move(group), options);
  if (!channel->opened_.is_ok()) return channel->opened_;
  if (Status status = start(); !status.is_ok()) return status;
  return channel;
}

Status Stager::start() {
  const std::lock_guard lock(mutex_);
  return start_locked();
}

Status Stager::start_locked() {
  if (running_) return {};
  try {
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  } catch (const std::system_error& error) {
    return Status(Code::kOutOfResources, std::string("cannot start the thread hybridps-stage (") + error.what() +
                                             "); see `ulimit -u` and the limit of the container");
  }
  running_ = true;
  stopping_ = false;
  return {};
}

std::size_t Stager::active() const {
  const std::lock_guard lock(mutex_);
  return active_.size();
}

void Stager::activate(std::shared_ptr<Channel> channel) {
  const std::lock_guard lock(mutex_);
  // stop() may have come after start(). A channel that nobody watches now is watched by the next thread that can be made.
  if (const Status status = start_locked(); !status.is_ok()) core::log_error(status.message());
  if (std::find(active_.begin(), active_.end(), channel) != active_.end()) return;
  active_.push_back(std::move(channel));
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
