#include "hybridps/engine/watch_list.h"

#include <algorithm>
#include <utility>

namespace hybridps::engine {
namespace {

void add_all(const std::vector<core::EngineId>& engines, std::unordered_map<core::EngineId, std::size_t>& counts) {
  for (const core::EngineId engine : engines) ++counts[engine];
}

void take_all(const std::vector<core::EngineId>& engines, std::unordered_map<core::EngineId, std::size_t>& counts) {
  for (const core::EngineId engine : engines)
    if (const auto found = counts.find(engine); --found->second == 0) counts.erase(found);
}

}  // namespace

std::unordered_set<core::EngineId> WatchList::keys(const Counts& counts) {
  std::unordered_set<core::EngineId> engines;
  for (const auto& [engine, count] : counts) engines.insert(engine);
  return engines;
}

void WatchList::choose(Watching& kept) const {
  const std::vector<core::EngineId>& engines = kept.group.members.engines();
  const std::size_t ranks = kept.group.ranks;
  kept.watched.clear();
  kept.quick.assign(engines.begin() + static_cast<std::ptrdiff_t>(kept.group.goes_on ? 0 : ranks), engines.end());
  const auto self = std::find(engines.begin(), engines.end(), self_);
  if (self == engines.end() || engines.size() < 2) return;
  const auto me = static_cast<std::size_t>(self - engines.begin());
  kept.watched.push_back(engines[(me + 1) % engines.size()]);
  // A server that joins has no connection to a rank yet, and nobody tells it that the job has ended.
  if (me >= ranks && me + 1 < engines.size()) kept.watched.push_back(engines[0]);
  for (std::size_t server = ranks; server < engines.size(); ++server)
    if ((server + 1) % ranks == me) kept.watched.push_back(engines[server]);
}

void WatchList::count(const Watching& kept) {
  add_all(kept.watched, watched_);
  add_all(kept.quick, quick_);
  remote_groups_ += kept.group.has_remote ? 1 : 0;
}

void WatchList::uncount(const Watching& kept) {
  take_all(kept.watched, watched_);
  take_all(kept.quick, quick_);
  remote_groups_ -= kept.group.has_remote ? 1 : 0;
}

void WatchList::set(core::GroupUid uid, WatchedGroup group) {
  close(uid);
  Watching& kept = groups_[uid];
  kept.group = std::move(group);
  choose(kept);
  count(kept);
}

void WatchList::close(core::GroupUid uid) {
  const auto found = groups_.find(uid);
  if (found == groups_.end()) return;
  uncount(found->second);
  groups_.erase(found);
}

}  // namespace hybridps::engine
