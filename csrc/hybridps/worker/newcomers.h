// hybridps/worker/newcomers.h: dedicated servers that join an open group.
//
// Model    Rank 0 has the records of the servers, and has opened the group on them (engine/server_joins.h). All ranks
//          connect to the servers. Then a plan version gives the servers shares, and makes them members. Their member
//          numbers follow the existing numbers. A number is never used again.
//
//            rank 0 --meet, one record each--> all ranks --echo, on data and control path--> servers --echo--> ranks
//            ranks --met--> rank 0 --ask for a version (membership/agreement.h)--> ranks, servers --switch--> members
//            a rank cannot reach a server, or not in time --> rank 0 --part--> all: the group stays as it was
//
//          Messages between rank 0 and the ranks go along the tree of ranks (membership/tree.h). A rank says that it
//          has met the servers when its children have said so, too.
//
//          A server may die after all ranks have met it and before the switch. Such a server becomes a member, and is
//          lost like any other (failover.h).
// Start    a group may wait for servers before it starts. The caller submits nothing before Host::on_start(). The call
//          comes with the first version that brings servers, or when rank 0 says that no server joins.
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/wire/message.h"

namespace hybridps::worker {

struct GroupState;
class Worker;

/// The result of an attempt.
struct JoinOutcome {
  core::Status status{};                // ok: all servers are members; else: no server is a member, and why
  std::optional<std::size_t> server{};  // the server that caused the error, if known: index in the attempt
  bool given_up = false;                // a rank has given up this engine of that server before
};

class Newcomers : core::Pinned {
 public:
  /// Called once with the result of the attempt. Never called if the group ends first.
  using Done = std::function<void(const JoinOutcome&)>;
  /// Time for all ranks to reach the servers. A rank may need long to notice that it cannot reach a server.
  static constexpr auto kMeetWithin = std::chrono::seconds(12);
  /// A rank that has not reached the servers by then says so. A rank above waits longer for its children: the longer,
  /// the higher it is.
  static constexpr auto kReachWithin = std::chrono::seconds(10);
  static constexpr auto kChildrenWithin = std::chrono::milliseconds(11500);
  static constexpr auto kSoonerBelow = std::chrono::milliseconds(250);
  /// Time for the servers to answer the plan version. All ranks wait for these answers.
  static constexpr auto kAnswerWithin = std::chrono::seconds(5);

  Newcomers(Worker& worker, GroupState& group) : worker_(worker), group_(group) {}

  /// Starts an attempt. Rank 0 only, and only if no other attempt is under way. `records`: one per server, as
  /// Host::meet() reads them.
  void take_in(const std::vector<std::string>& records, Done done);
  bool is_under_way() const noexcept { return attempt_ != 0; }
  /// Rank 0 only: the group starts, and no server has joined.
  void start_without();
  /// Every rank: Host::on_start() was called.
  bool has_started() const noexcept { return started_; }
  /// Rank 0: the newcomers are asked to answer the plan version.
  void on_asked() { due_ = core::Clock::now() + kAnswerWithin; }
  /// The version that gives the newcomers shares begins: they become members of the group.
  void admit();
  /// Call after admit(), once the version is in use. Starts the group if it has not started, and reports newcomers that
  /// have died as lost.
  void on_admitted();
  /// The members have refused the version that was to bring the newcomers.
  void refused();

  /// A message of type wire::Join, from a rank.
  void on_message(const wire::Message& message, const flow::Delivery& payload);
  /// A message from an engine that is not a member yet. Ignored unless the engine is a newcomer of the attempt.
  void on_word(const wire::Message& message, const flow::Delivery& payload);
  void on_peer_dead(core::EngineId engine, const core::Status& cause);
  /// Forgets the attempt.
  void part();
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return due_; }

 private:
  bool is_first() const noexcept;
  std::size_t expire_on_rank(core::TimePoint now);
  void meet(const wire::Join& join, std::span<const std::byte> record);
  void on_gone(int newcomer, const core::Status& cause);
  void say(wire::Join::JoinStep step, std::uint32_t server, std::string_view why = {});
  void on_met(int rank);
  void on_not_met(int rank, const wire::Join& join, const std::string& why);
  void give_up(const JoinOutcome& outcome);
  void start();

  Worker& worker_;
  GroupState& group_;
  std::uint32_t attempt_ = 0;  // 0: none
  bool started_ = false;
  std::set<int> met_;            // this rank and its children: those that have met all servers
  core::TimePoint met_since_{};  // when this rank heard of the attempt
  core::TimePoint due_ = core::TimePoint::max();
  // Rank 0.
  std::uint32_t attempts_ = 0;
  Done done_;
};

}  // namespace hybridps::worker
