// hybridps/core/mutex.h: a mutex that says what it guards, so that clang can check it.
//
// Model    With clang, `-Wthread-safety` warns where a field is used without its mutex, and where a function is called
//          without the mutex that it needs (tests/python/test_thread_safety.py). Other compilers check nothing. A
//          mutex that a condition variable waits for is a std::mutex, and is not checked.
#pragma once

#include <mutex>

#include "hybridps/core/pinned.h"

#if defined(__clang__)
#define HYBRIDPS_CHECKED_LOCK(attribute) __attribute__((attribute))
#else
#define HYBRIDPS_CHECKED_LOCK(attribute)
#endif
/// Behind a field: only with this mutex held.
#define HYBRIDPS_GUARDED_BY(mutex) HYBRIDPS_CHECKED_LOCK(guarded_by(mutex))
/// Behind a function: its caller holds this mutex.
#define HYBRIDPS_REQUIRES(mutex) HYBRIDPS_CHECKED_LOCK(requires_capability(mutex))

namespace hybridps::core {

class HYBRIDPS_CHECKED_LOCK(capability("mutex")) Mutex : Pinned {
 public:
  void lock() HYBRIDPS_CHECKED_LOCK(acquire_capability()) { mutex_.lock(); }
  void unlock() HYBRIDPS_CHECKED_LOCK(release_capability()) { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

/// Holds a Mutex to the end of its block.
class HYBRIDPS_CHECKED_LOCK(scoped_lockable) MutexLock : Pinned {
 public:
  explicit MutexLock(Mutex& mutex) HYBRIDPS_CHECKED_LOCK(acquire_capability(mutex)) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() HYBRIDPS_CHECKED_LOCK(release_capability()) { mutex_.unlock(); }

 private:
  Mutex& mutex_;
};

}  // namespace hybridps::core
