#include "hybridps/pg/store_adapter.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "hybridps/core/log.h"
#include "hybridps/pg/errors.h"

namespace hybridps::pg {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// PrefixStore's way of joining a prefix and a key is not public, but a derived class may use it.
struct PrefixPeek : c10d::PrefixStore {
  static std::string join(c10d::PrefixStore& store, const std::string& key) {
    return (store.*&PrefixPeek::joinKey)(key);
  }
};

struct Unwrapped {
  StorePtr base;
  std::string prefix;  // key in the wrapped store == prefix + key, in base
};

Unwrapped unwrap(StorePtr store) {
  Unwrapped result{std::move(store), ""};
  while (auto* layer = dynamic_cast<c10d::PrefixStore*>(result.base.get())) {
    result.prefix = PrefixPeek::join(*layer, result.prefix);
    result.base = layer->getUnderlyingStore();
  }
  return result;
}

/// One clone for each base Store, as long as the base Store lives. Groups share the clone because connecting is
/// expensive: TCPStore looks up the peer's name on the server's only thread. A slow name service then delays all.
StorePtr shared_clone(const StorePtr& base) {
  struct ClonedStore {
    c10::weak_intrusive_ptr<c10d::Store> base;
    StorePtr clone;
  };
  static auto& mutex = *new std::mutex;
  static auto& clones = *new std::map<c10d::Store*, ClonedStore>;
  std::vector<StorePtr> unused;  // closed after the lock is released
  std::unique_lock lock(mutex);
  for (auto at = clones.begin(); at != clones.end();) {
    if (at->second.base.expired()) {
      unused.push_back(std::move(at->second.clone));
      at = clones.erase(at);
    } else {
      ++at;
    }
  }
  // While an entry is there, its weak reference keeps the address from being used again.
  if (const auto at = clones.find(base.get()); at != clones.end()) return at->second.clone;
  StorePtr clone;
  lock.unlock();  // clone() tries a dead host for minutes; other threads have other Stores
  try {
    clone = base->clone();
  } catch (const std::exception& error) {
    // A Store written in Python may have no clone().
    core::log_debug("the Store cannot be cloned and is used as it is: ", message_of(error));
    return base;
  }
  lock.lock();
  const auto [at, is_new] =
      clones.try_emplace(base.get(), ClonedStore{c10::weak_intrusive_ptr<c10d::Store>(base), clone});
  if (!is_new) unused.push_back(std::exchange(clone, at->second.clone));  // another thread was faster
  return clone;
}

core::Status failed(const char* call, const std::string& key, const std::exception& error) {
  return {core::Code::kPeerDead, std::string("the c10d Store failed in ") + call + "(\"" + key +
                                     "\"): " + message_of(error) +
                                     "; see whether the process that hosts it (rank 0, or torchrun's "
                                     "agent) is alive"};
}

class StoreAdapter final : public bootstrap::KeyValueStore {
 public:
  StoreAdapter(StorePtr base, std::string prefix, StoreUse use)
      : prefix_(std::move(prefix)), use_(use), base_(std::move(base)) {}

  void settle() override {
    StorePtr base;
    {
      const std::lock_guard lock(mutex_);
      base = base_;
    }
    if (!base) return;
    StorePtr own = shared_clone(base);  // without the lock: a dead host is tried for minutes
    const std::lock_guard lock(mutex_);
    if (!base_) return;
    own_ = std::move(own);
    base_ = nullptr;  // may be the server: the last call must not hold the server's last reference
  }

  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    const std::string name = prefix_ + std::string(key);
    try {
      store()->set(name, std::vector<std::uint8_t>(value.begin(), value.end()));
      return core::Status::ok();
    } catch (const std::exception& error) {
      return failed("set", name, error);
    }
  }

  core::Result<std::optional<bootstrap::Bytes>> try_get(std::string_view key) override {
    const std::string name = prefix_ + std::string(key);
    try {
      const StorePtr store = this->store();
      if (!store->check({name})) return std::optional<bootstrap::Bytes>();
      return std::optional<bootstrap::Bytes>(store->get(name));
    } catch (const std::exception& error) {
      return failed("get", name, error);
    }
  }

  core::Status set_each(std::span<const bootstrap::KeyAndValue> values) override {
    if (values.empty()) return core::Status::ok();
    try {
      const StorePtr store = this->store();
      if (!store->hasExtendedApi()) return KeyValueStore::set_each(values);
      std::vector<std::string> names;
      std::vector<bootstrap::Bytes> contents;
      for (const auto& [key, value] : values) {
        names.push_back(prefix_ + key);
        contents.push_back(value);
      }
      store->multiSet(names, contents);
      return core::Status::ok();
    } catch (const std::exception& error) {
      return failed("multi_set", prefix_ + values.front().key, error);
    }
  }

  core::Result<std::vector<std::optional<bootstrap::Bytes>>> try_get_each(std::span<const std::string> keys) override {
    std::vector<std::optional<bootstrap::Bytes>> values(keys.size());
    if (keys.empty()) return values;
    try {
      const StorePtr store = this->store();
      if (!store->hasExtendedApi()) return KeyValueStore::try_get_each(keys);
      std::vector<std::string> names;
      for (const std::string& key : keys) names.push_back(prefix_ + key);
      std::vector<std::size_t> there;
      find_present(*store, names, 0, names.size(), there);
      if (there.empty()) return values;
      std::vector<std::string> present;
      for (const std::size_t at : there) present.push_back(names[at]);
      std::vector<bootstrap::Bytes> contents = store->multiGet(present);
      for (std::size_t i = 0; i < there.size() && i < contents.size(); ++i) values[there[i]] = std::move(contents[i]);
      return values;
    } catch (const std::exception& error) {
      return failed("multi_get", prefix_ + keys.front(), error);
    }
  }

 private:
  /// check() says of several keys only whether all are there. multiGet() would wait for those that are not.
  static void find_present(c10d::Store& store, const std::vector<std::string>& names, std::size_t begin,
                           std::size_t end, std::vector<std::size_t>& there) {
    const auto at = [&](std::size_t i) { return names.begin() + static_cast<std::ptrdiff_t>(i); };
    // Of two keys (`failed` and `head`, again and again) mostly one is absent: each is asked for at once.
    if (end - begin != 2 && store.check(std::vector<std::string>(at(begin), at(end)))) {
      for (std::size_t i = begin; i < end; ++i) there.push_back(i);
      return;
    }
    const std::size_t part = (end - begin + kParts - 1) / kParts;
    for (std::size_t i = begin; i < end && end - begin > 1; i += part)
      find_present(store, names, i, std::min(i + part, end), there);
  }
  static constexpr std::size_t kParts = 8;

  StorePtr store() {
    if (use_ == StoreUse::kOwn) settle();
    const std::lock_guard lock(mutex_);
    return own_ ? own_ : base_;
  }

  const std::string prefix_;
  const StoreUse use_;
  std::mutex mutex_;
  StorePtr base_;  // until settle()
  StorePtr own_;
};

}  // namespace

std::shared_ptr<bootstrap::KeyValueStore> adapt_store(const c10::intrusive_ptr<c10d::Store>& store, StoreUse use) {
  Unwrapped unwrapped = unwrap(store);
  return std::make_shared<StoreAdapter>(std::move(unwrapped.base), std::move(unwrapped.prefix), use);
}

}  // namespace hybridps::pg
