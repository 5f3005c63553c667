// hybridps/bootstrap/departures.h: processes that this process has found gone, in any group.
//
// Owner    the engine; every Rendezvous of the process reads Departures.
// Threads  any.
#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "hybridps/core/ids.h"
#include "hybridps/core/mutex.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::bootstrap {

class Departures : core::Pinned {
 public:
  void add(core::EngineId engine, core::Status why) {
    const core::MutexLock lock(mutex_);
    gone_.insert_or_assign(engine, std::move(why));
    count_.fetch_add(1);
  }
  /// Why the process is gone. Ok: not known to be gone.
  core::Status why(core::EngineId engine) const {
    const core::MutexLock lock(mutex_);
    const auto found = gone_.find(engine);
    return found == gone_.end() ? core::Status::ok() : found->second;
  }
  /// Grows with every add().
  std::uint64_t count() const noexcept { return count_.load(); }

 private:
  mutable core::Mutex mutex_;
  std::unordered_map<core::EngineId, core::Status> gone_ HYBRIDPS_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> count_{0};
};

}  // namespace hybridps::bootstrap
