// hybridps/engine/liveness.h: which peers count as dead: silent peers, and peers with a broken connection.
//
// Model    Pure: Heartbeats and Suspects get events with their times and return findings. Runtime acts on the findings.
// Threads  the engine's progress thread.
#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"

namespace hybridps::engine {

/// Finds peers that are stopped, or cut off without a broken connection, by asking them.
class Heartbeats {
 public:
  /// Watched peers are asked twice per `interval`. A peer is silent `dead_after` after its first unanswered question,
  /// or `quick_dead_after`: see watch().
  Heartbeats(core::Duration interval, core::Duration dead_after, core::Duration quick_dead_after)
      : pause_(interval / 2), dead_after_(dead_after), quick_dead_after_(quick_dead_after) {}

  /// `quick`: peers without which their groups can go on. There a false verdict costs less than a long wait.
  void watch(std::unordered_set<core::EngineId> peers, std::unordered_set<core::EngineId> quick) {
    watched_ = std::move(peers);
    quick_ = std::move(quick);
  }
  /// A ping or probe has gone to `peer`. The peer owes an answer from the first ping or probe on.
  void on_asked(core::EngineId peer, core::TimePoint now);
  /// Something has come from `peer`, or nobody needs the peer any more.
  void on_heard(core::EngineId peer) {
    if (!asked_at_.empty()) asked_at_.erase(peer);
  }

  struct Findings {
    std::vector<core::EngineId> to_ping;
    std::vector<std::pair<core::EngineId, core::Duration>> silent;  // with the time since they were first asked
  };
  /// Finds nothing before next_due(). The first call asks no peer: the pause before a ping begins there. If this
  /// process itself has stood still, no peer counts as silent yet, since answers may wait in our sockets.
  Findings look(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return next_; }
  /// A text if this process recently stood still for so long that the other engines have given it up; else empty.
  std::string own_fault(core::TimePoint now) const;

 private:
  core::Duration patience_for(core::EngineId peer) const {
    return quick_.count(peer) > 0 ? quick_dead_after_ : dead_after_;
  }
  /// Of the other engines with this one.
  core::Duration shortest_patience() const { return quick_.empty() ? dead_after_ : quick_dead_after_; }

  const core::Duration pause_;
  const core::Duration dead_after_;
  const core::Duration quick_dead_after_;
  std::unordered_set<core::EngineId> watched_;
  std::unordered_set<core::EngineId> quick_;
  std::unordered_map<core::EngineId, core::TimePoint> asked_at_;  // peers that owe an answer
  core::TimePoint next_ping_{};
  core::TimePoint next_{};  // time of the next ping, or the earlier time when a peer becomes silent
  core::Duration stood_still_for_{};
  core::TimePoint stood_still_until_{};
};

/// Broken connections. Each becomes a verdict 50 ms later. By then, a peer that leaves because of another failure has
/// told us of that failure. A peer that leaves normally has answered our goodbye by then.
class Suspects {
 public:
  struct Suspect {
    core::EngineId peer;
    core::Status cause;
    bool memory = false;  // reported by the shared-memory transport: means nothing for a peer on another node
    core::TimePoint due;  // set by judge()
  };

  void report(core::EngineId peer, core::Status cause, bool memory = false) {
    reported_.push_back({peer, std::move(cause), memory, {}});
  }
  bool has_reports() const noexcept { return !reported_.empty(); }
  /// Returns the suspects whose waiting time is over. Reports since the last call begin to wait.
  std::vector<Suspect> judge(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return waiting_.empty() ? core::TimePoint::max() : waiting_.front().due; }

 private:
  std::vector<Suspect> reported_;
  std::vector<Suspect> waiting_;
};

}  // namespace hybridps::engine
