// hybridps/worker/newcomers.h: dedicated servers that join a group that is open.
//
// Model    Rank 0 has their records and has had the group opened there (engine/server_joins.h). All ranks connect to them; then
//          a plan version gives them shares, and with that version they are members, numbered behind those that there were:
//          numbers are never used again.
//
//            rank 0 --meet, a record each--> all ranks --echo, by both ways--> the servers, which send it back
//            ranks --met--> rank 0: wants the version (membership/agreement.h), the servers too --> switch: members
//            one cannot be reached from a rank, or not in time --> rank 0 --part--> all: as if nothing had been
//
//          One that dies after it was met and before the switch becomes a member, and is lost as any (failover.h).
// Start    where a group awaits servers, its owner submits nothing before Host::on_start(): it comes with the first version that brings
//          servers, or where rank 0 says that none joins.
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
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

/// What a record says, once it is a peer of this engine.
struct Newcomer {
  core::EngineId engine;
  std::string host;  // "host9 pid 77"
};

/// They are members, or why not.
struct JoinOutcome {
  core::Status status;
  std::optional<std::size_t> server;  // whose fault it is, where one is known: index in the attempt
};

class Newcomers : core::Pinned {
 public:
  /// Called once with what has come of it. Not where the group ends before.
  using Done = std::function<void(const JoinOutcome&)>;
  /// A rank that cannot reach one may not notice for long.
  static constexpr auto kMeetWithin = std::chrono::seconds(10);
  /// All ranks wait for what it says to the plan.
  static constexpr auto kAnswerWithin = std::chrono::seconds(5);

  Newcomers(Worker& worker, GroupState& group) : worker_(worker), group_(group) {}

  /// Rank 0 only, with no other attempt under way. A record for each, as Host::meet() reads them.
  void take_in(const std::vector<std::string>& records, Done done);
  bool is_under_way() const noexcept { return attempt_ != 0; }
  /// Rank 0 only: the group starts, and no server has joined.
  void start_without();
  /// Every rank: on_start() was called.
  bool has_started() const noexcept { return started_; }

  /// Those that this rank has met, if they are all of the attempt: the members that the next version may bring.
  std::size_t met() const noexcept { return has_met_all() ? met_.size() : 0; }
  core::EngineId engine(std::size_t index) const { return met_[index].it.engine; }
  /// It is gone, as far as this rank knows: nobody waits for its answers.
  bool is_gone(std::size_t index) const { return !met_[index].gone.is_ok(); }
  /// Rank 0: they are asked for their word to it.
  void on_asked() { due_ = core::Clock::now() + kAnswerWithin; }
  /// The version that gives them shares begins: they are members of the group.
  void admit();
  /// After admit() and once that version is in use: the group starts if it has not, and those that have gone meanwhile are lost.
  void on_admitted();
  /// There will be no such version.
  void refused();

  /// Of type wire::Join, from a rank.
  void on_message(const wire::Message& message, const flow::Delivery& payload);
  /// From one that is not a member yet, if it is of the attempt.
  void on_word(const wire::Message& message, const flow::Delivery& payload);
  void on_peer_dead(core::EngineId engine, const core::Status& cause);
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return due_; }

 private:
  struct Met {
    Newcomer it;
    unsigned echoes = 0;  // that have come back, a bit for each way
    core::Status gone;
  };

  bool is_first() const noexcept;
  bool has_met_all() const noexcept;
  void meet(const wire::Join& join, std::span<const std::byte> record);
  void on_gone(std::size_t index, const core::Status& cause);
  void say(wire::Join::JoinStep step, std::uint32_t server, std::string_view why = {});
  void on_met(int rank);
  void on_not_met(int rank, std::uint32_t server, const std::string& why);
  void part();
  void give_up(const core::Status& why, std::optional<std::size_t> server = {});
  void start();

  Worker& worker_;
  GroupState& group_;
  std::uint32_t attempt_ = 0;   // 0: none
  std::uint32_t expected_ = 0;  // servers of it
  std::vector<Met> met_;        // by index
  std::vector<std::pair<int, core::Status>> gone_members_;  // of those that were admitted
  bool started_ = false;
  // Rank 0.
  std::uint32_t attempts_ = 0;
  std::set<int> ranks_;  // that have met all
  Done done_;
  core::TimePoint due_ = core::TimePoint::max();
};

}  // namespace hybridps::worker
