#include "hybridps/pg/lanes.h"

#include <cxxabi.h>
#include <pthread.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/pg/gil.h"

namespace hybridps::pg {
namespace {

thread_local int current_lane = 0;

}  // namespace

struct Lanes::Lane {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool stopping = false;
  bool finished = false;
  UnwindsNever unwinds_never;
  std::thread thread;
};

int Lanes::current() noexcept { return current_lane; }

Lanes::~Lanes() { stop(std::chrono::milliseconds(0)); }

void Lanes::run(const std::shared_ptr<Lane>& lane, int index) {
  current_lane = index;
  lane->unwinds_never.begin();
  pthread_setname_np(pthread_self(), ("hps-lane" + std::to_string(index)).c_str());
  std::unique_lock lock(lane->mutex);
  for (;;) {
    lane->changed.wait(lock, [&] { return lane->stopping || !lane->tasks.empty(); });
    if (lane->tasks.empty()) break;
    Task task = std::move(lane->tasks.front());
    lane->tasks.pop_front();
    lock.unlock();
    try {
      task();
    } catch (const abi::__forced_unwind&) {
      sleep_for_ever();
    } catch (const std::exception& error) {
      core::log_error("a callback of a future raised: ", error.what());
    } catch (...) {
      core::log_error("a callback of a future raised an unknown exception");
    }
    task = nullptr;  // drops what the task held, outside the lock
    lock.lock();
  }
  lane->finished = true;
  lane->changed.notify_all();
}

void Lanes::post(int lane, Task task) {
  const std::lock_guard lock(mutex_);
  try {
    put(lane, task);
    return;
  } catch (const std::system_error& error) {
    core::log_error("cannot start a thread for callbacks (", error.what(),
                    "); see `ulimit -u` and the limit of the container");
  }
  // A lower lane runs the task. Losing the task would be worse than a callback that cannot wait for another lane.
  while (--lane > 0)
    if (put_to_running(lane, task)) return;
}

bool Lanes::put_to_running(int lane, Task& task) {
  const auto& at = lanes_[static_cast<std::size_t>(lane - 1)];
  if (!at) return false;
  const std::lock_guard lane_lock(at->mutex);
  if (at->finished) return false;
  at->stopping = ends_when_idle_;
  at->tasks.push_back(std::move(task));
  at->changed.notify_one();
  return true;
}

void Lanes::put(int lane, Task& task) {
  const auto slot = static_cast<std::size_t>(lane - 1);
  if (lanes_.size() <= slot) lanes_.resize(slot + 1);
  if (put_to_running(lane, task)) return;
  auto& at = lanes_[slot];
  if (at) {
    at->thread.join();  // the thread has ended since end_when_idle()
    at.reset();
  }
  auto made = std::make_shared<Lane>();
  made->stopping = ends_when_idle_;
  made->tasks.push_back(std::move(task));
  try {
    made->thread = std::thread([made, lane] { run(made, lane); });
  } catch (const std::system_error&) {
    task = std::move(made->tasks.front());
    throw;
  }
  at = std::move(made);
}

void Lanes::start(int lane) {
  const std::lock_guard lock(mutex_);
  try {
    Task nothing = [] {};
    put(lane, nothing);
  } catch (const std::system_error& error) {
    throw std::runtime_error("hybridps: cannot start a thread for callbacks (" + core::printable(error.what()) +
                             "); see `ulimit -u` and the limit of the container");
  }
}

void Lanes::begin() {
  const std::lock_guard lock(mutex_);
  ends_when_idle_ = false;
}

void Lanes::end_when_idle() {
  const std::lock_guard lock(mutex_);
  ends_when_idle_ = true;
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
    ends_when_idle_ = true;
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
      lane->thread.detach();  // the thread owns its Lane
    }
  }
}

std::size_t Lanes::thread_count() const {
  const std::lock_guard lock(mutex_);
  std::size_t count = 0;
  for (const auto& lane : lanes_) {
    if (!lane) continue;
    const std::lock_guard lane_lock(lane->mutex);
    count += !lane->finished;
  }
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

void InOrder::leave(std::uint64_t ticket, Lanes::Task task, bool calls_back) {
  const std::lock_guard lock(mutex_);
  TicketSlot& left = slots_[static_cast<std::size_t>(ticket - first_)];
  left.done = true;
  if (calls_back) {
    left.callbacks.insert(left.callbacks.begin(), std::move(task));  // before the appended tasks
  } else {
    left.task = std::move(task);
  }
  while (!slots_.empty() && slots_.front().done) {
    TicketSlot ready = std::move(slots_.front());
    slots_.pop_front();
    ++first_;
    if (ready.task) lanes_->post(lane_, std::move(ready.task));
    for (Lanes::Task& next : ready.callbacks) post_callbacks(std::move(next));
  }
  changed_.notify_all();
}

void InOrder::post_callbacks(Lanes::Task task) {
  ++callbacks_left_;
  lanes_->post(lane_, [self = shared_from_this(), task = std::move(task)] {
    // callbacks_over() also runs if the task throws, but not if the thread is unwound: the thread then sleeps for ever.
    try {
      task();
    } catch (const std::exception&) {
      self->callbacks_over();
      throw;
    }
    self->callbacks_over();
  });
}

void InOrder::callbacks_over() {
  const std::lock_guard lock(mutex_);
  if (--callbacks_left_ == 0) changed_.notify_all();
}

bool InOrder::is_first(std::uint64_t ticket) const {
  const std::lock_guard lock(mutex_);
  return nothing_before(ticket);
}

void InOrder::wait_until_first(std::uint64_t ticket, std::chrono::steady_clock::time_point until) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, until, [&] {
    return ticket < first_ ? callbacks_left_ == 0 : slots_[static_cast<std::size_t>(ticket - first_)].done;
  });
}

bool InOrder::append(std::uint64_t ticket, Lanes::Task& task) {
  const std::lock_guard lock(mutex_);
  if (nothing_before(ticket)) return false;
  if (ticket >= first_) {
    slots_[static_cast<std::size_t>(ticket - first_)].callbacks.push_back(std::move(task));
  } else {
    post_callbacks(std::move(task));
  }
  return true;
}

}  // namespace hybridps::pg
