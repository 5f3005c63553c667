#include "hybridps/engine/loop.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "hybridps/core/float_mode.h"
#include "hybridps/core/text.h"
#include "hybridps/core/thread.h"

namespace hybridps::engine {

using core::Code;
using core::Status;

Loop::Loop(Runtime& runtime, LoopClient& client, LoopOptions options)
    : runtime_(runtime), client_(client), options_(std::move(options)) {}

Loop::~Loop() { stop(); }

Status Loop::make(Bed& bed) {
  if (!bed.sleeper.open())
    return Status(Code::kOutOfResources, "cannot make an epoll and an event descriptor; raise `ulimit -n`");
  for (const int fd : runtime_.event_fds())
    if (!bed.sleeper.watch(fd)) return Status(Code::kInternal, "cannot watch a transport's event descriptor");
  for (const int fd : runtime_.event_fds(/*data=*/false)) bed.urgent.push_back({fd, POLLIN, 0});
  bed.urgent.push_back({bed.sleeper.wake_fd(), POLLIN, 0});
  return Status::ok();
}

Status Loop::start() {
  for (Bed* bed : {&own_, &driver_})
    if (Status status = make(*bed); !status.is_ok()) return status;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status(Code::kOutOfResources, "cannot start the thread " + options_.thread_name + " (" + error.what() +
                                             "); see `ulimit -u` and the limit of the container");
  }
  return Status::ok();
}

void Loop::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true);
  post([] {});
  thread_.join();
}

bool Loop::post(core::OnceFn<void()> command, bool will_drive) {
  if (!commands_.put(std::move(command))) return false;
  if (driver_.sleeper.wake()) return true;
  if (will_drive) {
    const std::lock_guard lock(park_mutex_);
    claimed_until_ = core::Clock::now() + kClaim;
    claim_seen_.store(true, std::memory_order_relaxed);
  } else if (claim_seen_.load()) {
    {
      const std::lock_guard lock(park_mutex_);
      claimed_until_ = {};
    }
    unpark_.notify_one();
  }
  own_.sleeper.wake();  // with a claim, the thread parks after it wakes
  return true;
}

Status Loop::call(core::OnceFn<void(Status&)> command, core::Duration patience) {
  if (in_round()) return Status(Code::kUnsupported, "the thread " + options_.thread_name + " cannot wait for itself");
  struct Answer {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    Status status;
  };
  const auto answer = std::make_shared<Answer>();
  const bool taken = post([answer, c = std::move(command)]() mutable {
    Status status;
    c(status);
    const std::lock_guard lock(answer->mutex);
    answer->status = std::move(status);
    answer->done = true;
    answer->changed.notify_all();
  });
  if (!taken) return Status(Code::kClosed, "the thread " + options_.thread_name + " has ended");
  std::unique_lock lock(answer->mutex);
  if (!answer->changed.wait_for(lock, patience, [&] { return answer->done; }))
    return Status(Code::kTimeout, "the thread " + options_.thread_name + " has not answered within " +
                                      core::format_seconds(core::to_seconds(patience)));
  return answer->status;
}

std::size_t Loop::drain() {
  if (!commands_.has_some()) return 0;
  std::vector<core::OnceFn<void()>>& taken = commands_.take();
  for (auto& command : taken) command();
  const std::size_t count = taken.size();
  taken.clear();
  if (taken.capacity() > kCommandsKept) taken.shrink_to_fit();
  return count;
}

std::size_t Loop::round() {
  std::size_t work = drain();
  work += runtime_.progress();
  work += client_.round();
  if (work > 0 && ++uncounted_rounds_ >= kRoundsPerUpdate) update_counters();
  return work;
}

void Loop::update_counters() {
  if (uncounted_rounds_ == 0) return;
  uncounted_rounds_ = 0;
  runtime_.update_counters();
}

void Loop::nap(Bed& bed, core::TimePoint until) {
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - core::Clock::now()).count();
  if (left <= 0) return;
  const timespec timeout{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
  (void)ppoll(bed.urgent.data(), bed.urgent.size(), &timeout, nullptr);
}

void Loop::sleep(Bed& bed, core::TimePoint due, core::TimePoint nap_until, std::chrono::milliseconds at_most) {
  if (nap_until > core::TimePoint{}) nap(bed, std::min(nap_until, due));
  const core::Duration left = due - core::Clock::now();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count();
  const int timeout =
      left <= core::Duration::zero() ? 0 : static_cast<int>(std::min<std::int64_t>(ms + 1, at_most.count()));
  bed.sleeper.sleep(timeout);
}

bool Loop::is_claimed() {
  if (!claim_seen_.load(std::memory_order_relaxed)) return false;
  const std::lock_guard lock(park_mutex_);
  if (driving_ || core::Clock::now() < claimed_until_) return true;
  claim_seen_.store(false, std::memory_order_relaxed);
  return false;
}

void Loop::park() {
  std::unique_lock lock(park_mutex_);
  // In a row of short operations every look finds a renewed claim and takes core time from the caller. So the looks
  // become rarer.
  core::Duration late{};
  while (!stop_.load()) {
    const core::TimePoint now = core::Clock::now();
    if (!driving_ && now >= claimed_until_) return;
    // A caller notifies unpark_ after a drive longer than kClaim. After a short drive it may not notify.
    if (driving_ && now - driving_since_ > kClaim)
      unpark_.wait_for(lock, std::chrono::milliseconds(100));
    else
      unpark_.wait_until(lock, (driving_ ? now + kClaim : claimed_until_) + late);
    late = std::min<core::Duration>(late + kClaim, kLateAtMost);
  }
}

void Loop::run() {
  core::begin_thread(options_.thread_name.c_str());
  core::ask_for_short_slices();
  std::unique_lock baton(baton_);
  for (;;) {
    if (is_claimed()) {
      baton.unlock();
      park();
      baton.lock();
      own_.spinning.forget();
    }
    round_of_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    const std::size_t work = round();
    round_of_.store(std::thread::id(), std::memory_order_relaxed);
    if (work > 0) {
      own_.spinning.found_work(runtime_.now());
      continue;
    }
    if (stop_.load()) {
      if (commands_.close_if_empty()) break;
      continue;
    }
    if (own_.spinning.look_again(runtime_.now())) continue;
    update_counters();
    own_.sleeper.lie_down();
    if (!commands_.has_some() && !stop_.load() && runtime_.arm()) {
      const core::TimePoint due = runtime_.next_due();
      const core::TimePoint nap_until = runtime_.nap_until();
      const auto at_most = client_.sleep_at_most();
      baton.unlock();
      sleep(own_, due, nap_until, at_most);
      if (is_claimed()) {  // checked before the thread takes the baton, which the caller needs
        own_.sleeper.get_up();
        park();
      }
      baton.lock();
    }
    own_.sleeper.get_up();
  }
  round_of_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  client_.finish();
  runtime_.update_counters();
}

void Loop::drive(const std::function<bool()>& done, core::TimePoint until) {
  {
    const std::lock_guard lock(park_mutex_);
    if (driving_ || stop_.load()) return;
    driving_ = true;
    driving_since_ = core::Clock::now();
    claim_seen_.store(true, std::memory_order_relaxed);
  }
  const core::UsualFloatMode usual;
  std::unique_lock baton(baton_);  // the loop's thread releases the baton after its round
  round_of_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  driver_.spinning.forget();
  for (;;) {
    const std::size_t work = round();
    if (work > 0) driver_.spinning.found_work(runtime_.now());
    if (done()) break;
    if (work > 0) continue;
    const core::TimePoint now = runtime_.now();
    if (now >= until) break;
    if (driver_.spinning.look_again(now)) continue;
    driver_.sleeper.lie_down();
    if (!commands_.has_some() && runtime_.arm())
      sleep(driver_, std::min(runtime_.next_due(), until), runtime_.nap_until(), client_.sleep_at_most());
    driver_.sleeper.get_up();
  }
  const bool quiet = runtime_.is_quiet();
  const core::TimePoint now = runtime_.now();
  runtime_.pause();
  round_of_.store(std::thread::id(), std::memory_order_relaxed);
  baton.unlock();
  {
    const std::lock_guard lock(park_mutex_);
    driving_ = false;
    // Under the lock: a thread that posts after this finds the claim and takes the claim back.
    claimed_until_ = quiet && !commands_.has_some() ? now + kClaim : core::TimePoint{};
    if (now < claimed_until_ && now - driving_since_ <= kClaim && !own_.sleeper.is_down()) return;
  }
  unpark_.notify_one();
  // The loop's thread sleeps on transports that nobody has armed. So the thread must look again, after the claim.
  own_.sleeper.wake();
}

}  // namespace hybridps::engine
