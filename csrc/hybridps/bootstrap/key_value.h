// hybridps/bootstrap/key_value.h: the key-value store that bootstrap needs: torch's Store, a socket, or memory.
//
// Threads  every method from any thread.
// Waiting  nothing waits for another rank: with c10d's Store, a key is read only after check() has found it.
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

struct KeyAndValue {
  std::string key;
  Bytes value;
};

class KeyValueStore : core::Pinned {
 public:
  virtual ~KeyValueStore() = default;

  /// Creates or overwrites the key.
  virtual core::Status set(std::string_view key, std::span<const std::uint8_t> value) = 0;
  /// The key's value, or nothing when the key is absent. kMismatch: whoever wrote the value is no member.
  virtual core::Result<std::optional<Bytes>> try_get(std::string_view key) = 0;
  /// The same for several keys, in their order: one request, where the store can.
  virtual core::Status set_each(std::span<const KeyAndValue> values) {
    for (const KeyAndValue& value : values)
      if (core::Status status = set(value.key, value.value); !status.is_ok()) return status;
    return core::Status::ok();
  }
  virtual core::Result<std::vector<std::optional<Bytes>>> try_get_each(std::span<const std::string> keys) {
    std::vector<std::optional<Bytes>> values;
    for (const std::string& key : keys) {
      core::Result<std::optional<Bytes>> value = try_get(key);
      if (!value.is_ok()) return value.status();
      values.push_back(std::move(value).value());
    }
    return values;
  }
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
    return find(key);
  }

  core::Status set_each(std::span<const KeyAndValue> values) override {
    const core::MutexLock lock(mutex_);
    ++operations_;
    for (const KeyAndValue& value : values) values_.insert_or_assign(value.key, value.value);
    return core::Status::ok();
  }

  core::Result<std::vector<std::optional<Bytes>>> try_get_each(std::span<const std::string> keys) override {
    const core::MutexLock lock(mutex_);
    ++operations_;
    std::vector<std::optional<Bytes>> values;
    for (const std::string& key : keys) values.push_back(find(key));
    return values;
  }

  /// The number of all calls so far.
  std::size_t operation_count() const {
    const core::MutexLock lock(mutex_);
    return operations_;
  }
  /// The bytes of all values that were read so far.
  std::size_t bytes_read() const {
    const core::MutexLock lock(mutex_);
    return bytes_read_;
  }
  /// A copy of all values, for tests.
  std::map<std::string, Bytes, std::less<>> contents() const {
    const core::MutexLock lock(mutex_);
    return values_;
  }

 private:
  std::optional<Bytes> find(std::string_view key) HYBRIDPS_REQUIRES(mutex_) {
    const auto at = values_.find(key);
    if (at == values_.end()) return std::nullopt;
    bytes_read_ += at->second.size();
    return at->second;
  }

  mutable core::Mutex mutex_;
  std::map<std::string, Bytes, std::less<>> values_ HYBRIDPS_GUARDED_BY(mutex_);
  std::size_t operations_ = 0;
  std::size_t bytes_read_ = 0;
};

}  // namespace hybridps::bootstrap
