// hybridps/transport/transport_thread.h: a thread that drives transports (threaded.h has the other side).
//
// Model    It works in rounds, over all that it drives, and sleeps in epoll_wait when none of them has anything to do. What another
//          thread wants done with these transports runs between two rounds: there where no round is under way, else at its end.
// Threads  every public method from any, but for its own; the destructor in no thread that a round calls.
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
#include "hybridps/core/spinning.h"
#include "hybridps/core/status.h"

namespace hybridps::transport {

struct TransportThreadOptions {
  std::string name;  // at most 15 characters
  core::Spinning spinning = core::Spinning::always({});
  std::vector<int> cpus{};      // it runs on those of these that its maker may, if they are `cpus_needed` at least;
  std::size_t cpus_needed = 1;  // else on all that its maker may when start_transport_thread() is called
  bool when_needed = false;     // made when a transport comes to it, not before
  core::Duration patience = std::chrono::seconds(1);  // send_now()'s with a round, which takes milliseconds
};

/// Of an eventfd: makes it readable; takes back what has.
void signal(int event_fd) noexcept;
void drain(int event_fd) noexcept;

/// One of the transports that a thread drives. Called by the thread.
class Driven {
 public:
  /// Returns what it did.
  virtual std::size_t round() = 0;
  /// As Transport::arm() of the inner transport.
  virtual bool arm_inner() = 0;
  virtual int inner_fd() const noexcept = 0;

 protected:
  ~Driven() = default;
};

/// Drives the transports that were given to it. Ends with the last of them, and the last who holds it.
class TransportThread : core::Pinned {
 public:
  explicit TransportThread(TransportThreadOptions options);
  ~TransportThread();

  bool starts_at_once() const noexcept { return !options_.when_needed; }

  /// kOk where it runs already. From any thread: several engines may hand over to one.
  core::Status start();

  core::Status add(Driven& driven);
  /// From its return on the thread leaves it alone.
  void remove(Driven& driven);

  /// Runs `function` between two rounds: in the caller's thread where no round is under way, else at the end of that one.
  void call(const std::function<void()>& function) { (void)run_between_rounds(function, std::nullopt); }

  enum class CallResult : std::uint8_t { kRan, kLate, kLateStill };
  /// The same, but waits for TransportThreadOptions::patience at most. kLate, kLateStill: it did not run and will not. A
  /// round that somebody has waited for in vain is not waited for again (kLateStill).
  CallResult try_call(const std::function<void()>& function) { return run_between_rounds(function, options_.patience); }

  const TransportThreadOptions& options() const noexcept { return options_; }

  /// After something was put down for it. With what the thread does before it sleeps this is Dekker's pattern: one of the
  /// two sides sees the other.
  void wake() noexcept {
    if (sleeping_.load() && sleeping_.exchange(false)) signal(wake_fd_);
  }

 private:
  struct PendingCall {
    const std::function<void()>* function = nullptr;
    bool ran = false;
  };

  class ThreadRound;

  CallResult run_between_rounds(const std::function<void()>& function, std::optional<core::Duration> patience);

  bool watch(int fd) const;
  std::size_t round();
  /// Nothing to do now for any of them.
  bool arm();
  void sleep() const;
  /// Where it is begun late, that is from within whichever call of the program.
  void choose_cpus() const noexcept;
  void run();

  const TransportThreadOptions options_;
  const cpu_set_t may_;
  std::mutex start_mutex_;
  const std::uint64_t generation_ = core::fork_generation();
  int epoll_fd_ = -1;
  int wake_fd_ = -1;
  bool is_watched_ = false;  // the latter by the former
  int sleep_ms_ = -1;        // the thread's
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stop_{false};
  std::mutex round_mutex_;
  std::condition_variable ran_;      // calls
  std::vector<PendingCall*> calls_;  // none between two rounds
  bool in_round_ = false;
  std::uint64_t rounds_ = 0;
  std::uint64_t given_up_ = 0;   // the last of these that somebody has waited for in vain
  std::vector<Driven*> driven_;  // the thread's in a round, a caller's between two
  std::unique_ptr<std::thread> thread_;
};

/// kOutOfResources: no thread or descriptor.
core::Result<std::shared_ptr<TransportThread>> start_transport_thread(TransportThreadOptions options);

}  // namespace hybridps::transport
