// hybridps/engine/evidence.h: what an engine knows of other engines' processes, and when it gives one up.
//
// Model    Pure: Evidence gets events with their times, and look() returns verdicts. Runtime acts on the verdicts. The
//          table of evidence is in docs/failures.md ("A connection is not a process").
// Threads  the engine's progress thread.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"

namespace hybridps::engine {

class Evidence {
 public:
  struct HeartbeatTimes {
    core::Duration interval;          // watched peers are asked twice per interval
    core::Duration dead_after;        // from the first question without an answer
    core::Duration quick_dead_after;  // the same for `quick` peers: see watch()
  };
  /// What the engine knows of a peer at the time of an event.
  struct PeerFacts {
    bool is_local = false;             // its shared memory is proven
    bool data_serves_control = false;  // data's connection serves for control
    bool lacks_descriptors = false;    // a connection to it waits for file descriptors, here or there
  };
  enum class Connection : std::uint8_t { kMemory, kData, kControl };

  Evidence(HeartbeatTimes times, std::function<PeerFacts(core::EngineId)> facts_of)
      : pause_(times.interval / 2), times_(times), facts_of_(std::move(facts_of)) {}

  /// `quick`: peers without which their groups can go on. There a false verdict costs less than a long wait.
  void watch(std::unordered_set<core::EngineId> peers, std::unordered_set<core::EngineId> quick) {
    watched_ = std::move(peers);
    quick_ = std::move(quick);
  }
  /// A ping or probe has gone to `peer`. The peer owes an answer from the first ping or probe on.
  void on_asked(core::EngineId peer, core::TimePoint now);
  /// Something has come from `peer`, on any connection, or nobody needs the peer any more.
  void on_heard(core::EngineId peer) {
    if (!asked_at_.empty()) asked_at_.erase(peer);
  }
  /// A transport has given `peer` up. No evidence: control alone, if data serves for it and the process has not ended;
  /// and memory of a peer that counts as being on another node, since only its proof failed.
  void on_lost(core::EngineId peer, Connection connection, core::Status cause);

  struct PeerVerdict {
    core::EngineId peer;
    core::Status cause;
    bool silent = false;  // the process may be stopped, and continue later
  };
  struct Findings {
    std::vector<core::EngineId> to_ping;
    std::vector<PeerVerdict> verdicts;  // the silent ones first
  };
  /// Finds nothing before next_due(). A silent peer is found again until on_heard(). A lost peer becomes a verdict 50
  /// ms later: by then, a peer that leaves because of another failure has told of that failure, and a peer that leaves
  /// in good order has answered our goodbye. The first call asks no peer: the pause before a ping begins there. If this
  /// process itself has stood still, no peer counts as silent yet, since answers may wait in our sockets. A peer is not
  /// silent where descriptors kept it from being asked.
  Findings look(core::TimePoint now);
  core::TimePoint next_due() const noexcept;
  /// on_lost() has told of a peer since the last look().
  bool has_reports() const noexcept { return !reported_.empty(); }
  /// A text if this process recently stood still for so long that the other engines have given it up; else empty.
  std::string own_fault(core::TimePoint now) const;

 private:
  struct Lost {
    core::EngineId peer;
    Connection connection;
    core::Status cause;
    core::TimePoint due{};
  };
  core::Duration patience_for(core::EngineId peer) const {
    return quick_.count(peer) > 0 ? times_.quick_dead_after : times_.dead_after;
  }
  /// Of the other engines with this one.
  core::Duration shortest_patience() const { return quick_.empty() ? times_.dead_after : times_.quick_dead_after; }
  void look_for_silence(core::TimePoint now, Findings& found);
  void judge_lost(core::TimePoint now, Findings& found);

  const core::Duration pause_;
  const HeartbeatTimes times_;
  const std::function<PeerFacts(core::EngineId)> facts_of_;
  std::unordered_set<core::EngineId> watched_;
  std::unordered_set<core::EngineId> quick_;
  std::unordered_map<core::EngineId, core::TimePoint> asked_at_;  // peers that owe an answer
  core::TimePoint next_ping_{};
  core::TimePoint next_{};  // time of the next ping, or the earlier time when a peer becomes silent
  core::Duration stood_still_for_{};
  core::TimePoint stood_still_until_{};
  std::vector<Lost> reported_;
  std::vector<Lost> waiting_;  // by `due`
};

}  // namespace hybridps::engine
