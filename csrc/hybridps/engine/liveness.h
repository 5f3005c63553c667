// hybridps/engine/liveness.h: which peers are taken for dead: those that owe an answer for too long, and those whose
// connection broke.
//
// Model    Pure: both are told what happens and when, and say what follows; Runtime acts on it.
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

/// Peers that are stopped, or cut off without a broken connection: found by asking.
class Heartbeats {
 public:
  /// Watched peers are asked twice an `interval`; who has not been heard for `dead_after` since it was asked is silent.
  Heartbeats(core::Duration interval, core::Duration dead_after) : pause_(interval / 2), dead_after_(dead_after) {}

  void watch(std::unordered_set<core::EngineId> peers) { watched_ = std::move(peers); }
  /// A ping or probe has gone to it: from the first one on it owes an answer.
  void on_asked(core::EngineId peer, core::TimePoint now);
  /// Anything came from it, or nobody needs it any more.
  void on_heard(core::EngineId peer) {
    if (!asked_at_.empty()) asked_at_.erase(peer);
  }

  struct Findings {
    std::vector<core::EngineId> to_ping;
    std::vector<std::pair<core::EngineId, core::Duration>> silent;  // for so long
  };
  /// Nothing before next_due(). If this process itself has stood still since, nobody is silent yet: the answers may lie in
  /// our sockets.
  Findings look(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return next_; }
  /// Where this process stood still so long, not long ago, that others have given it up: a text that says so; else empty.
  std::string own_fault(core::TimePoint now) const;

 private:
  const core::Duration pause_;
  const core::Duration dead_after_;
  std::unordered_set<core::EngineId> watched_;
  std::unordered_map<core::EngineId, core::TimePoint> asked_at_;  // those that owe an answer
  core::TimePoint next_ping_{};
  core::TimePoint next_{};  // the next ping, or the moment when a peer has been silent for too long
  core::Duration stood_still_for_{};
  core::TimePoint stood_still_until_{};
};

/// Broken connections. Each becomes a verdict a moment later: one who leaves because of somebody else's failure has told
/// us by then, and one who left in good order has answered our goodbye.
class Suspects {
 public:
  struct Suspect {
    core::EngineId peer;
    core::Status cause;
    bool memory = false;  // found by the transport over shared memory: says nothing of a peer on another node
    core::TimePoint due;  // set by judge()
  };

  void report(core::EngineId peer, core::Status cause, bool memory = false) {
    reported_.push_back({peer, std::move(cause), memory, {}});
  }
  bool has_reports() const noexcept { return !reported_.empty(); }
  /// Those whose moment is over. Reports since the last call begin to wait.
  std::vector<Suspect> judge(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return waiting_.empty() ? core::TimePoint::max() : waiting_.front().due; }

 private:
  std::vector<Suspect> reported_;
  std::vector<Suspect> waiting_;
};

}  // namespace hybridps::engine
