// hybridps/engine/groups.h: an engine's groups in its loop, from the call that makes them until they are closed.
//
// Model    Operations wait here for the roster, and for the dedicated servers that are there at the start, with their deadlines; then the
//          Worker has them. A verdict that this rank has found
//          goes to the members by message, and to the Store for those whom none reaches. A group that is left says goodbye, its last
//          collective, and is closed when that is done.
// Threads  the engine's loop; what others may look at is under GroupCore::mutex.
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

class Groups : core::Pinned {
 public:
  using Group = std::shared_ptr<GroupCore>;

  /// `closed` is called once for each group that was added, when it is closed. Takes the Runtime's hooks.
  /// `summary`: what of it an engine knows and a roster does not.
  /// `gone`: a peer was found dead, and as what.
  Groups(const core::Config& config, core::EngineId self, Runtime& runtime, VerdictBoard& board, SummaryOptions summary,
         std::function<void()> closed, std::function<void(core::EngineId, const core::Status&)> gone);

  void add(Group group);
  /// Its roster is valid.
  void open(const Group& group, const bootstrap::Roster& roster);
  /// It has none, and will not.
  void not_joined(GroupCore& group, const core::Status& status);
  void submit(const Group& group, worker::Operation operation, std::uint64_t sequence, worker::Completion done);
  void reserve(GroupCore& group, std::uint64_t sequence);
  void abort(GroupCore& group, const std::string& reason);
  /// It was left.
  void want_goodbye(const Group& group);
  /// It was left for its next life (Group::supersede()).
  void supersede(const Group& group, const std::string& reason);
  /// From the Store.
  void on_told(core::GroupUid uid, const core::Status& verdict);
  /// GroupCore::waiting_for is there.
  void on_looked() { queued_due_ = core::Clock::now(); }

  /// Each as an object (status_desk.h).
  void write_status(observe::Json& json, bool members) const;
  /// Has somebody look what groups without a roster wait for; whether there are any.
  bool look_for_status() const;
  /// Its rank in the world, else where it is.
  std::string name_of(core::EngineId engine) const;
  /// Deadlines, and groups that are over. Returns what it did.
  std::size_t tick();
  std::chrono::milliseconds sleep_at_most() const;
  /// Of those left, whether one has ended in a failure.
  bool has_failed_leaver() const;
  void close_left();
  void close_all();
  /// What keeps this process, which has that rank, from being in such a group.
  using RosterCheck = std::function<core::Status(const bootstrap::Roster&, int rank)>;
  /// Dedicated servers that groups of this rank 0 may take in.
  void set_servers(ServerJoinsOptions servers, RosterCheck check) {
    servers_ = std::move(servers);
    check_ = std::move(check);
  }
  /// What groups may try out, but for sizes of chunks.
  void set_tuning(const schedule::TuningRange& range) { tuning_ = range; }

 private:
  /// Operations may begin: `group` has all servers that are there at its start, or has failed.
  void start(const Group& group);
  void on_servers_joined(GroupCore& group, std::vector<bootstrap::MemberRecord> servers);
  core::Status may_meet(core::GroupUid uid, const std::vector<bootstrap::MemberRecord>& newcomers) const;
  /// What the worker is told of it, but for codecs; its members become peers.
  worker::GroupInfo info_of(GroupCore& group);
  void set_sizes(worker::GroupInfo& info, const bootstrap::Roster& roster) const;
  void fail(GroupCore& group, const core::Status& status);
  void send_goodbye(const Group& group);
  void tell_of(const GroupCore& group) const;
  /// For a group that has failed and will have nobody to say it to. One that is still being made may have.
  void give_up_goodbye(GroupCore& group);
  std::size_t close_finished();
  std::size_t expire_queued(core::TimePoint now);
  /// Gives up groups whose rendezvous should have ended and has not: its Store stands still.
  std::size_t expire_joining(core::TimePoint now);
  void close(GroupCore& group);
  /// A group whose roster is valid, or nothing.
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
  core::TimePoint joins_due_{};
  core::TimePoint queued_due_ = core::TimePoint::max();  // the first deadline among queued operations
  core::TimePoint joining_due_ = core::TimePoint::max();  // the first GroupCore::joining_until
};

}  // namespace hybridps::engine
