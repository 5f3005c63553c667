#include "hybridps/pg/lanes.h"

#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "hybridps/core/log.h"

namespace hybridps::pg {
namespace {

thread_local int current_lane = 0;

}  // namespace

struct Lanes::Lane {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool busy = false;
  bool stopping = false;
  bool finished = false;
  std::thread thread;
};

int Lanes::current() noexcept { return current_lane; }

Lanes::~Lanes() { stop(std::chrono::milliseconds(0)); }

void Lanes::run(const std::shared_ptr<Lane>& lane, int index) {
  current_lane = index;
  pthread_setname_np(pthread_self(), ("hps-lane" + std::to_string(index)).c_str());
  std::unique_lock lock(lane->mutex);
  for (;;) {
    lane->changed.wait(lock, [&] { return lane->stopping || !lane->tasks.empty(); });
    if (lane->tasks.empty()) break;
    Task task = std::move(lane->tasks.front());
    lane->tasks.pop_front();
    lane->busy = true;
    lock.unlock();
    try {
      task();
      task = Task();  // what it held goes now, outside the lock
    } catch (const std::exception& error) {
      core::log_error("a callback of a future raised: ", error.what());
    } catch (...) {
      core::log_error("a callback of a future raised an unknown exception");
    }
    lock.lock();
    lane->busy = false;
  }
  lane->finished = true;
  lane->changed.notify_all();
}

void Lanes::post(int lane, Task task) {
  const auto slot = static_cast<std::size_t>(lane - 1);
  const std::lock_guard lock(mutex_);
  if (lanes_.size() <= slot) lanes_.resize(slot + 1);
  auto& at = lanes_[slot];
  if (at) {
    std::unique_lock lane_lock(at->mutex);
    if (!at->finished) {
      at->stopping = false;
      at->tasks.push_back(std::move(task));
      at->changed.notify_one();
      return;
    }
    lane_lock.unlock();
    at->thread.join();  // over since end_when_idle()
  }
  at = std::make_shared<Lane>();
  at->tasks.push_back(std::move(task));
  at->thread = std::thread([shared = at, lane] { run(shared, lane); });
}

void Lanes::end_when_idle() {
  const std::lock_guard lock(mutex_);
  for (const auto& lane : lanes_) {
    if (!lane) continue;
    const std::lock_guard lane_lock(lane->mutex);
    lane->stopping = true;
    lane->changed.notify_all();
  }
}

void Lanes::stop(std::chrono::milliseconds patience) {
  std::vector<std::shared_ptr<Lane>> lanes;
  {
    const std::lock_guard lock(mutex_);
    lanes.swap(lanes_);
  }
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (const auto& lane : lanes) {
    if (!lane) continue;
    std::unique_lock lock(lane->mutex);
    lane->stopping = true;
    lane->changed.notify_all();
    const bool self = lane->thread.get_id() == std::this_thread::get_id();
    const bool finished = !self && lane->changed.wait_until(lock, deadline, [&] { return lane->finished; });
    lock.unlock();
    if (finished) {
      lane->thread.join();
    } else {
      lane->thread.detach();  // it owns its Lane
    }
  }
}

bool Lanes::idle(int lane) const {
  std::shared_ptr<Lane> at;
  {
    const auto slot = static_cast<std::size_t>(lane - 1);
    const std::lock_guard lock(mutex_);
    if (slot < lanes_.size()) at = lanes_[slot];
  }
  if (!at) return true;
  const std::lock_guard lock(at->mutex);
  return at->tasks.empty() && !at->busy;
}

std::size_t Lanes::thread_count() const {
  const std::lock_guard lock(mutex_);
  std::size_t count = 0;
  for (const auto& lane : lanes_) count += lane != nullptr;
  return count;
}

std::uint64_t InOrder::enter() {
  const std::lock_guard lock(mutex_);
  slots_.emplace_back();
  return first_ + slots_.size() - 1;
}

std::uint64_t InOrder::next() const {
  const std::lock_guard lock(mutex_);
  return first_ + slots_.size();
}

void InOrder::leave(std::uint64_t ticket, Lanes::Task task) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[static_cast<std::size_t>(ticket - first_)];
  slot.done = true;
  if (task) slot.tasks.insert(slot.tasks.begin(), std::move(task));  // before what was appended
  while (!slots_.empty() && slots_.front().done) {
    std::vector<Lanes::Task> ready = std::move(slots_.front().tasks);
    slots_.pop_front();
    ++first_;
    for (Lanes::Task& next : ready) lanes_->post(lane_, std::move(next));
  }
}

bool InOrder::is_idle_after(std::uint64_t ticket) const {
  const std::lock_guard lock(mutex_);
  return ticket < first_ && lanes_->idle(lane_);
}

bool InOrder::append(std::uint64_t ticket, Lanes::Task& task) {
  const std::lock_guard lock(mutex_);
  if (ticket >= first_) {
    slots_[static_cast<std::size_t>(ticket - first_)].tasks.push_back(std::move(task));
    return true;
  }
  if (lanes_->idle(lane_)) return false;
  lanes_->post(lane_, std::move(task));
  return true;
}

}  // namespace hybridps::pg
