// hybridps/pg/hooks.h: torch's abort and completion hooks of one process group (its flight recorder registers some).
//
// Threads  every method is thread-safe. Hooks run on the caller's thread, without locks of ours. Abort hooks take
//          seconds, so only a thread of their own runs them (WorkContext::post_abort_hooks()). Completion hooks run on
//          the engine's progress thread, a waiter's thread or a lane. torch requires completion hooks to be short and
//          not to use the interpreter.
// Versions torch 2.14 has abort hooks, torch 2.15 completion hooks; earlier versions register nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/pinned.h"

namespace hybridps::pg {

template <typename... Args>
class HookTable : core::Pinned {
 public:
  using Hook = std::function<void(Args...)>;

  void add(std::int64_t id, Hook hook) {
    change([&](Table& table) { table.insert_or_assign(id, std::move(hook)); });
  }
  void remove(std::int64_t id) {
    change([&](Table& table) { table.erase(id); });
  }
  bool empty() const noexcept { return empty_.load(std::memory_order_acquire); }
  void run(Args... args) const {
    if (empty()) return;
    std::shared_ptr<const Table> table;
    {
      const std::lock_guard lock(mutex_);
      table = table_;
    }
    for (const auto& [id, hook] : *table) {
      try {
        hook(args...);
      } catch (const std::exception& error) {
        core::log_warn("hook ", id, " of a process group raised: ", error.what());
      }
    }
  }

 private:
  using Table = std::map<std::int64_t, Hook>;
  template <typename Change>
  void change(const Change& change) {
    const std::lock_guard lock(mutex_);
    auto table = std::make_shared<Table>(*table_);
    change(*table);
    empty_.store(table->empty(), std::memory_order_release);
    table_ = std::move(table);
  }

  mutable std::mutex mutex_;
  std::shared_ptr<const Table> table_ = std::make_shared<Table>();
  std::atomic<bool> empty_{true};
};

struct Hooks {
  HookTable<> abort;
  HookTable<std::uint64_t, std::optional<float>> completion;  // completion key, milliseconds
};

}  // namespace hybridps::pg
