// hybridps/engine/watch_list.h: the peers whose processes this engine watches, over all its groups.
//
// Model    Pure. In a group each engine watches its successor. So at least one of the silent members has a watcher that
//          is not silent. The verdict of one dedicated server on another does not count, so ranks watch the servers. In
//          addition, the worker probes the ranks that an operation waits for. A group that opens or closes costs as
//          many look-ups as it has members, however many other groups there are.
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/schedule/members.h"

namespace hybridps::engine {

class WatchList {
 public:
  struct WatchedGroup {
    schedule::Members members;
    std::size_t ranks = 0;    // the members behind the ranks are dedicated servers
    bool goes_on = false;     // without a rank that is lost
    bool has_remote = false;  // a member is on another node
  };

  explicit WatchList(core::EngineId self) : self_(self) {}

  /// A new group, or a group whose members have changed.
  void set(core::GroupUid uid, WatchedGroup group);
  void close(core::GroupUid uid);

  std::unordered_set<core::EngineId> watched() const { return keys(watched_); }
  /// Peers without which their groups can go on: Evidence::watch().
  std::unordered_set<core::EngineId> quick() const { return keys(quick_); }
  bool any_remote() const noexcept { return remote_groups_ > 0; }

 private:
  using Counts = std::unordered_map<core::EngineId, std::size_t>;  // groups, by engine
  struct Watching {
    WatchedGroup group;
    std::vector<core::EngineId> watched;
    std::vector<core::EngineId> quick;
  };

  static std::unordered_set<core::EngineId> keys(const Counts& counts);
  void choose(Watching& kept) const;
  void count(const Watching& kept);
  void uncount(const Watching& kept);

  const core::EngineId self_;
  std::map<core::GroupUid, Watching> groups_;
  Counts watched_;
  Counts quick_;
  std::size_t remote_groups_ = 0;
};

}  // namespace hybridps::engine
