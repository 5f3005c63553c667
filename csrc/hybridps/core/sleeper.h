// hybridps/core/sleeper.h: how a thread sleeps until a descriptor is readable, or until another thread wakes it.
//
//            the thread:  lie_down(); look for work once more; if there is none, sleep(); get_up()
//            others:      put down work; wake()
//
// Model    Dekker's pattern: at least one side sees what the other side did first. So work is never left to a thread
//          that sleeps. One wake-up costs one system call, for however many pieces of work there are.
// Threads  wake() and is_down() from any thread. EventFd: any thread. The rest: one thread at a time; watch() and
//          unwatch() also while the thread sleeps.
// Fork     descriptors are not kept by exec(). A forked child closes its copies.
#pragma once

#include <atomic>

#include "hybridps/core/pinned.h"

namespace hybridps::core {

/// A descriptor that is readable from signal() to drain().
class EventFd : Pinned {
 public:
  ~EventFd();
  /// False: this process has no descriptor left. True again if it is open already.
  bool open() noexcept;
  /// Negative: not open. Then signal() and drain() do nothing.
  int get() const noexcept { return fd_; }
  void signal() const noexcept;
  void drain() const noexcept;

 private:
  int fd_ = -1;
};

/// A descriptor that is readable while one of others is.
class FdSet : Pinned {
 public:
  ~FdSet();
  /// As EventFd::open().
  bool open() noexcept;
  /// Negative: not open.
  int get() const noexcept { return fd_; }
  /// False: the kernel refuses.
  bool watch(int fd) const noexcept;
  void unwatch(int fd) const noexcept;

 private:
  int fd_ = -1;
};

class Sleeper : Pinned {
 public:
  /// False: this process has no descriptors left. True again if it is open already.
  bool open() noexcept;
  bool watch(int fd) const noexcept { return fds_.watch(fd); }
  void unwatch(int fd) const noexcept { fds_.unwatch(fd); }
  /// Readable once somebody has woken the thread, until sleep() returns.
  int wake_fd() const noexcept { return wake_.get(); }

  void lie_down() noexcept { is_down_.store(true); }
  /// Waits for an event, `timeout_ms` at most (negative: without end).
  void sleep(int timeout_ms) const noexcept;
  void get_up() noexcept { is_down_.store(false, std::memory_order_relaxed); }

  bool is_down() const noexcept { return is_down_.load(); }
  /// Returns whether this call woke the thread: false if it was up, or was woken already.
  bool wake() noexcept {
    if (!is_down_.load() || !is_down_.exchange(false)) return false;
    wake_.signal();
    return true;
  }

 private:
  FdSet fds_;
  EventFd wake_;
  bool is_watched_ = false;  // fds_ watches wake_
  std::atomic<bool> is_down_{false};
};

}  // namespace hybridps::core
