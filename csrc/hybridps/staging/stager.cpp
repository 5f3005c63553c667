#include "hybridps/staging/stager.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/thread.h"

namespace hybridps::staging {
namespace {

using core::Code;
using core::Status;

constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kNapForStream = std::chrono::microseconds(20);
constexpr auto kNapForEnd = std::chrono::microseconds(200);
constexpr int kQueuesByDefault = 8;  // CUDA's default
constexpr int kQueuesMost = 32;      // CUDA_DEVICE_MAX_CONNECTIONS goes so far
constexpr auto kLookEvery = std::chrono::milliseconds(2);

core::Status no_thread(const char* name, const std::system_error& error) {
  return Status(Code::kOutOfResources, std::string("cannot start the thread ") + name + " (" + error.what() +
                                           "); see `ulimit -u` and the limit of the container");
}

}  // namespace

Stager::~Stager() {
  // Each thread holds a reference to the Stager. So both threads have ended, or one of them runs this destructor at its
  // end.
  if (thread_.joinable()) thread_.detach();
  if (driver_.joinable()) driver_.detach();
}

core::Result<std::shared_ptr<Channel>> Stager::open(std::shared_ptr<device::Device> device,
                                                    std::weak_ptr<engine::Group> group, ChannelOptions options) {
  std::shared_ptr<DevicePool> pool;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& known : pools_)
      if (&known->device() == device.get()) pool = known;
    if (!pool) pools_.push_back(pool = std::make_shared<DevicePool>(device));
  }
  auto channel = std::make_shared<Channel>(shared_from_this(), std::move(device), pool, std::move(group), options);
  if (!channel->opened_.is_ok()) return channel->opened_;
  if (!options.local) warn_of_few_queues(*pool);  // else the ranks must agree first
  const std::lock_guard lock(mutex_);
  if (Status status = start_locked(); !status.is_ok()) return status;
  return channel;
}

void Stager::warn_of_few_queues(DevicePool& pool) {
  const std::lock_guard lock(mutex_);
  const device::Device& device = pool.device();
  const int queues = device.hardware_queues();
  const int channels = pool.channels().load();
  // A channel's streams wait: the in stream for the caller, the out stream for a flag. With only one hardware queue,
  // both stand before the program's kernels, however many groups there are.
  const int waiting = pool.streams_that_wait().load();
  const int wanted = waiting + 2;
  if (queues == 0 || waiting <= 0 || queues >= wanted || warned_of_few_queues_) return;
  if (queues >= kQueuesMost) {
    core::log_warn(device.describe(), ": ", channels, " channels of hybridps and the program share ", queues,
                   " hardware queues, the most that CUDA has: kernels may stand behind streams that wait for the "
                   "network. What to do: use fewer process groups with CUDA tensors");
  } else if (queues >= kQueuesByDefault) {
    core::log_warn(device.describe(), ": ", channels, " channels of hybridps and the program share ", queues,
                   " hardware queues, so kernels may stand behind streams that wait for the network. What to do: set "
                   "CUDA_DEVICE_MAX_CONNECTIONS=32");
  } else {
    core::log_warn(
        device.describe(), ": CUDA_DEVICE_MAX_CONNECTIONS=", queues,
        ": kernels that are launched while an operation waits for the network stand behind it, so nothing overlaps. "
        "Groups that are used in different orders may wait for each other. What to do: set it to ",
        std::min(wanted, kQueuesMost), " or more (32 at most)");
  }
  warned_of_few_queues_ = true;
}

Status Stager::begin(std::shared_ptr<Channel> channel) {
  std::unique_lock lock(mutex_);
  driver_changed_.wait(lock, [&] { return !trimming_; });
  if (Status status = start_locked(); !status.is_ok()) return status;
  watch_locked(std::move(channel));
  return {};
}

Status Stager::start_locked() {
  if (!running_) {
    try {
      thread_ = std::thread([self = shared_from_this()] { self->run(); });
    } catch (const std::system_error& error) {
      return no_thread("hybridps-stage", error);
    }
    running_ = true;
    stopping_ = false;
    abandon_ = false;
  }
  return start_driver_locked();
}

Status Stager::start_driver_locked() {
  if (driver_running_) return {};
  if (driver_.joinable()) driver_.join();  // the thread is at its very end
  try {
    driver_ = std::thread([self = shared_from_this()] { self->run_driver(); });
  } catch (const std::system_error& error) {
    return no_thread("hybridps-driver", error);
  }
  driver_running_ = true;
  return {};
}

std::size_t Stager::active() const {
  const std::lock_guard lock(mutex_);
  return active_.size();
}

void Stager::activate(std::shared_ptr<Channel> channel) {
  const std::lock_guard lock(mutex_);
  // stop() may have come after begin(). A channel without a thread is watched by the next thread that can be started.
  if (const Status status = start_locked(); !status.is_ok()) core::log_error(status.message());
  watch_locked(std::move(channel));
}

void Stager::watch_locked(std::shared_ptr<Channel> channel) {
  if (std::find(active_.begin(), active_.end(), channel) != active_.end()) return;
  active_.push_back(std::move(channel));
  changed_.notify_all();
  driver_changed_.notify_all();
}

void Stager::bury(Funeral funeral) {
  const std::lock_guard lock(mutex_);
  funerals_.push_back(std::move(funeral));
  // Without a driver's thread, the funeral waits for the next one.
  if (const Status status = start_driver_locked(); !status.is_ok()) core::log_error(status.message());
  driver_changed_.notify_all();
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
  if (thread.joinable()) thread.join();
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return !driver_running_; };
  if (!driver_changed_.wait_until(lock, stop_at_, ended)) {
    // If the driver's thread waits for a stream, abandon_ ends this wait. If the driver's thread is held up in a driver
    // call, stop() leaves the thread there.
    abandon_ = true;
    driver_changed_.notify_all();
    if (!driver_changed_.wait_for(lock, 10 * kLookEvery, ended)) return;
  }
  std::thread driver = std::move(driver_);
  lock.unlock();
  if (driver.joinable()) driver.join();
}

void Stager::run() {
  core::begin_thread("hybridps-stage");
  core::sleep_precisely();
  const device::NoDriverCalls streams_wait_for_this_thread;
  std::vector<std::shared_ptr<Channel>> channels;
  core::TimePoint busy_since = core::Clock::now();
  for (;;) {
    channels.clear();
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !active_.empty(); });
      const bool give_up = stopping_ && core::Clock::now() >= stop_at_;
      channels = active_;
      if (stopping_ && (channels.empty() || give_up)) {
        active_.clear();
        running_ = false;
        gave_up_ |= !channels.empty();
        driver_changed_.notify_all();
        lock.unlock();
        for (const auto& channel : channels)
          channel->expire(Status(Code::kAborted, "the process ends before the operation is complete"), nullptr);
        return;
      }
    }

    const core::TimePoint now = core::Clock::now();
    bool did = false;
    bool waits_for_stream = false;
    for (const auto& channel : channels) {
      const Channel::Progress progress = channel->progress(now);
      did |= progress.did;
      waits_for_stream |= progress.waits_for_stream;
      // begin() comes before any work is put on the channel.
      const std::lock_guard lock(mutex_);
      if (channel->is_idle()) std::erase(active_, channel);
    }
    if (did) {
      busy_since = now;
      continue;
    }
    if (channels.empty()) continue;
    // Small operations end within microseconds, but a stream may also need seconds.
    if (now - busy_since < kSpin)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(waits_for_stream ? kNapForStream : kNapForEnd);
  }
}

void Stager::run_driver() {
  core::begin_thread("hybridps-driver");
  std::vector<std::shared_ptr<Channel>> channels;
  std::vector<Funeral> funerals;
  std::vector<std::shared_ptr<DevicePool>> pools;
  std::size_t relaxed = 0;  // pools for which this thread is a helper
  // Before the first call on a device: it could spoil a graph that another thread records.
  const auto relax = [&] {
    for (; relaxed < pools.size(); ++relaxed) pools[relaxed]->device().begin_helper_thread();
  };
  bool trimmed = false;
  std::unique_lock lock(mutex_);
  for (;;) {
    driver_changed_.wait(lock, [&] { return !active_.empty() || !funerals_.empty() || !running_; });
    if (abandon_ && !funerals_.empty()) {
      // Streams may still use what these funerals would give back, so the funerals are leaked.
      new std::vector<Funeral>(std::move(funerals_));
      funerals_.clear();
      gave_up_ = true;
    }
    if (active_.empty() && funerals_.empty()) {
      if (running_) continue;
      if (trimmed || gave_up_) {
        driver_running_ = false;
        driver_changed_.notify_all();
        return;
      }
      // Nothing is under way, and begin() waits until the trim is over.
      trimming_ = true;
      pools = pools_;
      lock.unlock();
      relax();
      for (const auto& pool : pools) pool->trim();
      lock.lock();
      trimming_ = false;
      trimmed = true;
      driver_changed_.notify_all();
      continue;
    }
    trimmed = false;
    channels = active_;
    funerals = std::exchange(funerals_, {});
    pools = pools_;
    lock.unlock();
    relax();
    for (const auto& channel : channels) channel->look();
    channels.clear();
    std::erase_if(funerals, [](const Funeral& funeral) { return funeral(); });
    lock.lock();
    funerals_.insert(funerals_.end(), std::make_move_iterator(funerals.begin()),
                     std::make_move_iterator(funerals.end()));
    funerals.clear();
    if (!active_.empty() || !funerals_.empty()) driver_changed_.wait_for(lock, kLookEvery);
  }
}

}  // namespace hybridps::staging
