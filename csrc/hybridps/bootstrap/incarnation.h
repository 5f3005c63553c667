// hybridps/bootstrap/incarnation.h: the name of one life of one group, for its keys in the Store.
//
// destroy_process_group() followed by init_process_group() reuses the group's name. Hence the name has a run id and a
// counter per group name. torchrun's restarts of all processes have one name: each of its agents counts the restarts
// of its own workers, so the counts differ. The Rendezvous replaces what an earlier life has left in the store.
// Processes of several launchers count groups differently. So a caller that knows better (reconfigure()'s uuid, a
// quorum) names the life itself.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "hybridps/core/mutex.h"
#include "hybridps/core/pinned.h"

namespace hybridps::bootstrap {

/// Counts the groups of each name that this process has made. One per process, owned by the creator of the engines: a
/// new engine must not start again at zero. Every member makes groups of one name equally often, so the counts agree.
class IncarnationCounter : core::Pinned {
 public:
  /// "<run id>.<count of this name>", from TORCHELASTIC_RUN_ID ("none" where not set). Thread-safe.
  std::string next(std::string_view group_name);
  /// The same with a given text for the run id.
  std::string next(std::string_view group_name, std::string_view run_id);

 private:
  core::Mutex mutex_;
  std::map<std::string, std::uint64_t, std::less<>> counts_ HYBRIDPS_GUARDED_BY(mutex_);
};

/// "hybridps/<group name>": the prefix of keys that all lives of the group share.
std::string lives_key_prefix(std::string_view group_name);
/// "hybridps/<group name>/<incarnation>": the prefix of all keys of one rendezvous.
std::string group_key_prefix(std::string_view group_name, std::string_view incarnation);

}  // namespace hybridps::bootstrap
