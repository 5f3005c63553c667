#include "hybridps/transport/transport_thread.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "hybridps/core/thread.h"

namespace hybridps::transport {
namespace {

constexpr int kSleepMs = 100;

/// CPUs of the calling thread. A thread that another caller starts later gets the same CPUs.
cpu_set_t own_cpus() noexcept {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) CPU_ZERO(&cpus);
  return cpus;
}

}  // namespace

TransportThread::TransportThread(TransportThreadOptions options) : options_(std::move(options)), may_(own_cpus()) {}

TransportThread::~TransportThread() {
  if (core::fork_generation() != generation_) {
    (void)thread_.release();  // NOLINT: it does not exist here
    return;
  }
  if (thread_) {
    stop_.store(true);
    wake();
    thread_->join();
  }
}

core::Status TransportThread::start() {
  const std::lock_guard lock(start_mutex_);
  if (thread_) return core::Status::ok();
  if (!sleeper_.open())
    return {core::Code::kOutOfResources, "no descriptors for the thread " + options_.name + "; raise `ulimit -n`"};
  try {
    thread_ = std::make_unique<std::thread>([this] { run(); });
  } catch (const std::system_error& error) {
    return {core::Code::kOutOfResources, "cannot start the thread " + options_.name + " (" + error.what() +
                                             "); see `ulimit -u` and the limit of the container"};
  }
  return core::Status::ok();
}

core::Status TransportThread::add(Driven& driven) {
  if (core::Status status = start(); !status.is_ok()) return status;
  bool watched = false;
  call([&] {
    if ((watched = sleeper_.watch(driven.inner_fd()))) driven_.push_back(&driven);
  });
  if (watched) return core::Status::ok();
  return {core::Code::kInternal, "the thread " + options_.name + " cannot watch a transport's event descriptor"};
}

void TransportThread::remove(Driven& driven) {
  call([&] {
    if (std::erase(driven_, &driven) > 0) sleeper_.unwatch(driven.inner_fd());
  });
}

/// While a ThreadRound exists, the transports belong to the thread.
class TransportThread::ThreadRound : core::Pinned {
 public:
  explicit ThreadRound(TransportThread& thread) : thread_(thread) {
    const std::lock_guard lock(thread_.round_mutex_);
    thread_.in_round_ = true;
    ++thread_.rounds_;
  }
  /// Runs the calls that arrived meanwhile. So the thread need not stand still until their callers have woken up.
  ~ThreadRound() {
    const std::lock_guard lock(thread_.round_mutex_);
    thread_.in_round_ = false;
    if (thread_.calls_.empty()) return;
    for (PendingCall* call : thread_.calls_) {
      (*call->function)();
      call->ran = true;
    }
    thread_.calls_.clear();
    thread_.ran_.notify_all();
  }

 private:
  TransportThread& thread_;
};

TransportThread::CallResult TransportThread::run_between_rounds(const std::function<void()>& function,
                                                                std::optional<core::Duration> patience) {
  {
    std::unique_lock lock(round_mutex_);
    if (!in_round_) {
      function();
    } else if (patience && given_up_ == rounds_) {
      return CallResult::kLateStill;
    } else {
      PendingCall mine{&function};
      calls_.push_back(&mine);
      const auto has_run = [&] { return mine.ran; };
      if (!patience) {
        ran_.wait(lock, has_run);
      } else if (!ran_.wait_for(lock, *patience, has_run)) {
        std::erase(calls_, &mine);
        given_up_ = rounds_;
        return CallResult::kLate;
      }
    }
  }
  wake();  // `function` may have queued work
  return CallResult::kRan;
}

std::size_t TransportThread::round() {
  const ThreadRound mine(*this);
  std::size_t did = 0;
  for (Driven* driven : driven_) did += driven->round();
  return did;
}

bool TransportThread::arm() {
  const ThreadRound mine(*this);
  sleep_ms_ = driven_.empty() ? -1 : kSleepMs;
  return std::all_of(driven_.begin(), driven_.end(), [](Driven* driven) { return driven->arm_inner(); });
}

void TransportThread::choose_cpus() const noexcept {
  cpu_set_t near;
  CPU_ZERO(&near);
  for (const int cpu : options_.cpus)
    if (cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &may_)) CPU_SET(cpu, &near);
  const auto count = static_cast<std::size_t>(CPU_COUNT(&near));
  const cpu_set_t& chosen = count > 0 && count >= options_.cpus_needed ? near : may_;
  const cpu_set_t own = own_cpus();
  if (CPU_COUNT(&chosen) > 0 && !CPU_EQUAL(&chosen, &own)) (void)sched_setaffinity(0, sizeof chosen, &chosen);
}

void TransportThread::run() {
  core::begin_thread(options_.name.c_str());
  core::ask_for_short_slices();
  choose_cpus();
  core::Spinning spinning = options_.spinning;
  for (;;) {
    if (round() > 0) {
      if (spinning.is_waiting()) spinning.found_work(core::Clock::now());
      continue;
    }
    if (stop_.load()) return;
    if (spinning.look_again(core::Clock::now())) continue;
    sleeper_.lie_down();
    if (!stop_.load() && arm()) sleeper_.sleep(sleep_ms_);
    sleeper_.get_up();
  }
}

core::Result<std::shared_ptr<TransportThread>> start_transport_thread(TransportThreadOptions options) {
  auto thread = std::make_shared<TransportThread>(std::move(options));
  if (thread->starts_at_once())
    if (core::Status status = thread->start(); !status.is_ok()) return status;
  return thread;
}

}  // namespace hybridps::transport
