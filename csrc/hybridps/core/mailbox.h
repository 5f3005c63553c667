// hybridps/core/mailbox.h: what other threads put down for one thread, which takes all of it at once.
//
// Threads  any thread puts; one thread at a time takes. has_some() from any thread: with core/sleeper.h, its store and
//          load are one side of Dekker's pattern.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "hybridps/core/mutex.h"
#include "hybridps/core/pinned.h"

namespace hybridps::core {

template <typename T>
class Mailbox : Pinned {
 public:
  /// False: the mailbox is closed, and `item` is dropped.
  bool put(T item) {
    const MutexLock lock(mutex_);
    if (is_closed_) return false;
    items_.push_back(std::move(item));
    has_some_.store(true);
    return true;
  }
  /// `change` gets the items under the lock: to put several, and whatever else the lock guards.
  template <typename Change>
  void change(const Change& change) {
    const MutexLock lock(mutex_);
    change(items_);
    has_some_.store(!items_.empty());
  }
  bool has_some() const noexcept { return has_some_.load(); }
  /// The items, until the next call. The caller empties them before that.
  std::vector<T>& take() {
    const MutexLock lock(mutex_);
    has_some_.store(false);
    taken_.swap(items_);
    return taken_;
  }
  /// True: put() returns false from now on. False: there are items.
  bool close_if_empty() {
    const MutexLock lock(mutex_);
    return is_closed_ = items_.empty();
  }

 private:
  Mutex mutex_;
  std::vector<T> items_ HYBRIDPS_GUARDED_BY(mutex_);
  bool is_closed_ HYBRIDPS_GUARDED_BY(mutex_) = false;
  std::atomic<bool> has_some_{false};
  std::vector<T> taken_;  // empty between two calls of take(), but for its memory
};

}  // namespace hybridps::core
