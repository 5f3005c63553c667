// hybridps/bootstrap/key_value.h: the key-value store that bootstrap needs: torch's Store, a socket, or memory.
//
// Threads  every method from any thread.
// Waiting  neither set() nor try_get() waits for another rank: with c10d's Store, try_get() calls check(), then get(),
//          never wait().
// Order    after a set() has returned, every later try_get() of any rank sees this set() and all sets before it.
// Trust    values are bytes of foreign origin, so decoders validate them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/core/mutex.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::bootstrap {

using Bytes = std::vector<std::uint8_t>;

class KeyValueStore : core::Pinned {
 public:
  virtual ~KeyValueStore() = default;

  /// Creates or overwrites the key.
  virtual core::Status set(std::string_view key, std::span<const std::uint8_t> value) = 0;
  /// The key's value, or nothing when the key is absent. kMismatch: whoever wrote the value is no member.
  virtual core::Result<std::optional<Bytes>> try_get(std::string_view key) = 0;
  /// From now on the store's creator may wait in the same store. So this object gets its own connection, if it has
  /// none. May take seconds.
  virtual void settle() {}
};

/// A store in this process's memory, thread-safe, for tests and groups of one process.
class MemoryStore final : public KeyValueStore {
 public:
  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    const core::MutexLock lock(mutex_);
    ++operations_;
    values_.insert_or_assign(std::string(key), Bytes(value.begin(), value.end()));
    return core::Status::ok();
  }

  core::Result<std::optional<Bytes>> try_get(std::string_view key) override {
    const core::MutexLock lock(mutex_);
    ++operations_;
    const auto at = values_.find(key);
    if (at == values_.end()) return std::optional<Bytes>();
    return std::optional<Bytes>(at->second);
  }

  /// The number of all calls so far.
  std::size_t operation_count() const {
    const core::MutexLock lock(mutex_);
    return operations_;
  }
  /// A copy of all values, for tests.
  std::map<std::string, Bytes, std::less<>> contents() const {
    const core::MutexLock lock(mutex_);
    return values_;
  }

 private:
  mutable core::Mutex mutex_;
  std::map<std::string, Bytes, std::less<>> values_ HYBRIDPS_GUARDED_BY(mutex_);
  std::size_t operations_ = 0;
};

}  // namespace hybridps::bootstrap
