// hybridps/bootstrap/key_value.h: what bootstrap needs of a key-value store: torch's Store, a socket, or memory.
//
// Threads  every method from any thread.
// Waiting  neither call waits for another rank: c10d's Store is asked with check(), then get(), never wait().
// Order    a set() that returned is seen by every later try_get(), of any rank, together with all sets before it.
// Trust    values are bytes of foreign origin: decoders validate them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::bootstrap {

using Bytes = std::vector<std::uint8_t>;

class KeyValueStore : core::Pinned {
 public:
  virtual ~KeyValueStore() = default;

  /// Creates or overwrites.
  virtual core::Status set(std::string_view key, std::span<const std::uint8_t> value) = 0;
  /// Nothing when the key is absent.
  virtual core::Result<std::optional<Bytes>> try_get(std::string_view key) = 0;
  /// Who made it may from now on wait in the same store: gets a connection of its own, if it has none. May take seconds.
  virtual void settle() {}
};

/// In this process's memory, thread-safe: tests and groups of one process.
class MemoryStore final : public KeyValueStore {
 public:
  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    const std::lock_guard lock(mutex_);
    ++operations_;
    values_.insert_or_assign(std::string(key), Bytes(value.begin(), value.end()));
    return core::Status::ok();
  }

  core::Result<std::optional<Bytes>> try_get(std::string_view key) override {
    const std::lock_guard lock(mutex_);
    ++operations_;
    const auto at = values_.find(key);
    if (at == values_.end()) return std::optional<Bytes>();
    return std::optional<Bytes>(at->second);
  }

  /// All calls so far.
  std::size_t operation_count() const {
    const std::lock_guard lock(mutex_);
    return operations_;
  }
  /// A copy, for tests.
  std::map<std::string, Bytes, std::less<>> contents() const {
    const std::lock_guard lock(mutex_);
    return values_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Bytes, std::less<>> values_;
  std::size_t operations_ = 0;
};

}  // namespace hybridps::bootstrap
