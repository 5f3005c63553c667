// hybridps/transport/transport_thread.h: a thread that drives transports (threaded.h has the other side).
//
// Model    The thread works in rounds over all transports that it drives. The thread sleeps in epoll_wait when no
//          transport has work. Other threads may ask for a call on these transports. The call runs between two rounds:
//          in the calling thread if no round is under way, otherwise in this thread at the end of its round.
// Threads  Public methods may be called from any thread except this thread itself. The destructor must not run inside a
//          round.
// Fork     in a forked child the thread does not exist: the destructor leaks on purpose.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/fork.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/sleeper.h"
#include "hybridps/core/spinning.h"
#include "hybridps/core/status.h"

namespace hybridps::transport {

struct TransportThreadOptions {
  std::string name;  // at most 15 characters
  core::Spinning spinning = core::Spinning::always({});
  std::vector<int> cpus{};      // preferred CPUs; only those that the creator may use count
  std::size_t cpus_needed = 1;  // with fewer, all CPUs that the creator may use at start_transport_thread()
  bool when_needed = false;     // the thread starts with its first transport, not at once
  core::Duration patience = std::chrono::seconds(1);  // limit of send_now()'s wait; a round takes milliseconds
};

/// A transport that a thread drives. The thread calls these methods.
class Driven {
 public:
  /// Returns the number of things done.
  virtual std::size_t round() = 0;
  /// Like Transport::arm(), for the inner transport.
  virtual bool arm_inner() = 0;
  virtual int inner_fd() const noexcept = 0;

 protected:
  ~Driven() = default;
};

/// Drives the transports that add() gave it. The object lives as long as its last shared_ptr; each transport holds one.
class TransportThread : core::Pinned {
 public:
  explicit TransportThread(TransportThreadOptions options);
  ~TransportThread();

  bool starts_at_once() const noexcept { return !options_.when_needed; }

  /// kOk if the thread runs already. Thread-safe, because several engines may hand over to the same thread.
  core::Status start();

  core::Status add(Driven& driven);
  /// After remove() has returned, the thread does not touch `driven` any more.
  void remove(Driven& driven);

  /// Runs `function` between two rounds: in the caller's thread if no round is under way, else in this thread.
  void call(const std::function<void()>& function) { (void)run_between_rounds(function, std::nullopt); }

  enum class CallResult : std::uint8_t { kRan, kLate, kLateStill };
  /// Like call(), but waits for TransportThreadOptions::patience at most. kLate, kLateStill: `function` did not run and
  /// will not run. kLateStill: an earlier caller waited in vain for this round, so this call did not wait.
  CallResult try_call(const std::function<void()>& function) { return run_between_rounds(function, options_.patience); }

  const TransportThreadOptions& options() const noexcept { return options_; }

  /// Call wake() after queueing work for the thread.
  void wake() noexcept { sleeper_.wake(); }

 private:
  struct PendingCall {
    const std::function<void()>* function = nullptr;
    bool ran = false;
  };

  class ThreadRound;

  CallResult run_between_rounds(const std::function<void()>& function, std::optional<core::Duration> patience);

  std::size_t round();
  /// True: no driven transport has work now.
  bool arm();
  /// Sets the thread's CPUs, because a thread that starts late would inherit the CPUs of whichever thread starts it.
  void choose_cpus() const noexcept;
  void run();

  const TransportThreadOptions options_;
  const cpu_set_t may_;
  std::mutex start_mutex_;
  const std::uint64_t generation_ = core::fork_generation();
  core::Sleeper sleeper_;
  int sleep_ms_ = -1;  // the longest sleep; used by the thread only
  std::atomic<bool> stop_{false};
  std::mutex round_mutex_;
  std::condition_variable ran_;      // notified after calls_ ran
  std::vector<PendingCall*> calls_;  // waiting calls; empty between two rounds
  bool in_round_ = false;
  std::uint64_t rounds_ = 0;
  std::uint64_t given_up_ = 0;   // last round that a caller has waited for in vain
  std::vector<Driven*> driven_;  // used by the thread in a round, by a caller between two rounds
  std::unique_ptr<std::thread> thread_;
};

/// kOutOfResources: no thread or descriptor.
core::Result<std::shared_ptr<TransportThread>> start_transport_thread(TransportThreadOptions options);

}  // namespace hybridps::transport
