// hybridps/engine/groups.h: an engine's groups in its loop, from the call that makes them until they are closed.
//
// Model    Operations wait here, with their deadlines, for the roster and for the dedicated servers that join at the
//          start. Then the Worker takes the operations. A verdict that this rank finds goes to the members by message,
//          and also to the Store, for members that get no message. A group that is left says goodbye as its last
//          collective. The group is closed when the goodbye is done.
// Threads  the engine's loop. GroupCore::mutex guards the fields that other threads may read.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/config.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/engine/group_core.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/engine/verdict_board.h"

namespace hybridps::engine {

/// How long a group that was left serves members that have not said goodbye.
inline constexpr auto kLinger = std::chrono::seconds(5);

class Groups : core::Pinned {
 public:
  using Group = std::shared_ptr<GroupCore>;

  /// Sets the Runtime's hooks for groups. `summary`: the facts for summaries that a roster does not have. `closed` is
  /// called once for each added group, when the group is closed. `gone` is called with a dead peer and the cause.
  Groups(const core::Config& config, core::EngineId self, Runtime& runtime, VerdictBoard& board, SummaryOptions summary,
         std::function<void()> closed, std::function<void(core::EngineId, const core::Status&)> gone);

  void add(Group group);
  /// The group's roster is valid.
  void open(const Group& group, const bootstrap::Roster& roster);
  /// The group has no roster and will get none.
  void not_joined(GroupCore& group, const core::Status& status);
  void submit(const Group& group, worker::Operation operation, std::uint64_t sequence, worker::Completion done);
  void reserve(GroupCore& group, std::uint64_t sequence);
  void abort(GroupCore& group, const std::string& reason);
  /// The group was left.
  void want_goodbye(const Group& group);
  /// The group was left for its next life (Group::supersede()).
  void supersede(const Group& group, const std::string& reason);
  /// The VerdictBoard found this verdict in the Store.
  void on_told(core::GroupUid uid, const core::Status& verdict);
  /// The bootstrap thread has set GroupCore::waiting_for.
  void on_looked() { queued_due_ = core::Clock::now(); }

  /// Writes each group as an object (status_desk.h).
  void write_status(observe::Json& json, bool members) const;
  /// Asks the bootstrap thread what the groups without a roster wait for. False: there are no such groups.
  bool look_for_status() const;
  /// The engine's rank in the world; else its host and process.
  std::string name_of(core::EngineId engine) const;
  /// Handles deadlines, and closes groups that are over. Returns the amount of work done; 0: none.
  std::size_t tick();
  std::chrono::milliseconds sleep_at_most() const;
  /// Whether the last operation failed in any group that was left.
  bool has_failed_leaver() const;
  void close_left();
  void close_all();
  /// Returns an error if this process cannot be rank `rank` of a group with this roster.
  using RosterCheck = std::function<core::Status(const bootstrap::Roster&, int rank)>;
  /// Dedicated servers that groups of this rank 0 may take in.
  void set_servers(ServerJoinsOptions servers, RosterCheck check) {
    servers_ = std::move(servers);
    servers_.introduce = [this](const bootstrap::MemberRecord& server) { introduce(server); };
    check_ = std::move(check);
  }
  /// The tuning that groups may try, except chunk sizes.
  void set_tuning(const schedule::TuningRange& range) { tuning_ = range; }

 private:
  /// Lets operations begin: the wait for dedicated servers is over, or the group has failed.
  void start(const Group& group);
  void on_servers_joined(GroupCore& group, std::vector<bootstrap::MemberRecord> servers);
  void introduce(const bootstrap::MemberRecord& server);
  core::Result<int> may_meet(core::GroupUid uid, const std::vector<bootstrap::MemberRecord>& newcomers) const;
  /// The group as the worker needs it, without codecs. The members become peers.
  worker::GroupInfo info_of(GroupCore& group);
  void set_sizes(worker::GroupInfo& info, const bootstrap::Roster& roster) const;
  void fail(GroupCore& group, const core::Status& status);
  void send_goodbye(const Group& group);
  void tell_of(const GroupCore& group) const;
  /// Skips the goodbye of a failed group without a roster. Does nothing while the roster may still come.
  void give_up_goodbye(GroupCore& group);
  std::size_t close_finished();
  void give_up_superseded(core::TimePoint now);
  std::size_t expire_queued(core::TimePoint now);
  /// Gives up groups with an overdue rendezvous: their Store does not answer.
  std::size_t expire_joining(core::TimePoint now);
  void close(GroupCore& group);
  /// Null: no group with a valid roster has this uid.
  Group find(core::GroupUid uid) const;

  const core::Config& config_;
  const core::EngineId self_;
  Runtime& runtime_;
  VerdictBoard& board_;
  const SummaryOptions summary_;
  const std::function<void()> closed_;
  std::vector<Group> groups_;
  schedule::TuningRange tuning_;
  ServerJoinsOptions servers_;
  RosterCheck check_;
  bool has_ending_ = false;                               // a group is closed, or says goodbye
  core::TimePoint give_up_due_ = core::TimePoint::max();  // the earliest GroupCore::give_up_at
  core::TimePoint joins_due_{};
  core::TimePoint queued_due_ = core::TimePoint::max();   // the earliest deadline of queued operations
  core::TimePoint joining_due_ = core::TimePoint::max();  // the earliest GroupCore::joining_until
};

}  // namespace hybridps::engine
