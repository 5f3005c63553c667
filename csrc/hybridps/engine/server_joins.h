// hybridps/engine/server_joins.h: how dedicated servers come into a group: at its start, late, started again, or given up and alive.
//
// Model    At the group's rank 0. A round asks addresses of HYBRIDPS_SERVERS for their engines, has the group opened there, and then
//          all ranks take these servers in or none does (worker/newcomers.h):
//            idle -> asking -> opening -> joining -> idle
//          Start  a round of all addresses. Those that fail are left out, and the others are opened once more, with other numbers. No
//                 operation begins before that is over, and it is over when the group's timeout is.
//          Late   rounds of one address whose engines are not all in the group: at first after `retry`, then after twice that and so
//                 on, 16 times at most. That begins anew when an engine is lost.
//          An engine that this group has given up is never used again: its server is asked for another one in its place.
// Threads  the loop; what waits for the network is done on helper threads, which hold nothing of this and may outlive it by 10 s.
// Errors   a server that cannot be used is a warning, once. Where servers are required, it ends the group at its start. Later, an
//          address that nobody answers at is not worth a line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/door/door.h"
#include "hybridps/engine/server_request.h"
#include "hybridps/worker/worker.h"

namespace hybridps::engine {

struct ServerJoinsOptions {
  std::vector<door::Address> addresses;
  std::string token;
  core::Duration retry = std::chrono::seconds(2);                // 0: none joins after the start
  bool required = false;                                         // one that is missing at the start ends the group
};

class ServerJoins : core::Pinned {
 public:
  static constexpr int kPauseMax = 16;  // times options.retry
  /// Servers cannot help groups of fewer nodes.
  static constexpr int kNodesMin = 3;
  enum class GroupStart { kAwaitsServers, kIsOver };

  /// The group is open with this roster, to which its owner adds the servers that join. Both outlive this, and are in the loop.
  /// `start_until`: when a group that awaits servers starts without those that have not joined.
  /// `fail` ends the group for all its members.
  ServerJoins(ServerJoinsOptions options, const bootstrap::Roster& roster, worker::GroupState& group, GroupStart start,
              core::TimePoint start_until, std::function<void(const core::Status&)> fail);
  ~ServerJoins();

  /// Now and then; as often as can be while the group starts.
  std::size_t tick(core::TimePoint now);
  /// For GroupInfo::weights_with: as records.h has it, of members and newcomers.
  std::vector<double> weights_with(const std::vector<bool>& are_there) const;

 private:
  enum class AddressStep { kIdle, kFinding, kRenewing, kFound, kOpening, kOpened };
  struct Asking;
  struct PolledAddress {
    door::Address address;
    std::vector<core::EngineId> engines;  // as it has said
    bool has_all = false;                 // of them, the group
    bool has_open = false;                // the group, at `newcomers`, and they have not joined
    bool left_out = false;                // of the group's start
    core::TimePoint next;
    int pause = 1;  // times options.retry
    std::string complaint;
    // Of the round.
    AddressStep step = AddressStep::kIdle;
    std::vector<bootstrap::MemberRecord> newcomers;
    std::shared_ptr<Asking> asking;
    core::TimePoint no_answer_at;
    core::Status opened;
  };

  bool has(core::EngineId engine) const;
  bool has_given_up(core::EngineId engine) const;
  bool any_in(AddressStep step) const;
  std::size_t begin_round(core::TimePoint now);
  std::size_t begin_start();
  template <typename Task>
  void ask_by_thread(PolledAddress& place, AddressStep step, Task task);
  void ask(PolledAddress& place, AddressStep step, ServerRequest request);
  std::size_t on_found(PolledAddress& place);
  void open_found();
  std::size_t on_opened(PolledAddress& place);
  void take_in_opened();
  void on_joined();
  void give_up(PolledAddress& place);
  std::size_t end_start();
  void end_round();
  /// Of one that answers it is said why it is not used.
  enum class Answers { kNo, kYes };
  void try_later(PolledAddress& place, Answers answers, const core::Status& why);
  core::Status check(const PolledAddress& place) const;
  core::Status check_room(const PolledAddress& place) const;
  std::vector<bootstrap::MemberRecord> newcomers() const;
  bootstrap::Roster with_newcomers() const;

  const ServerJoinsOptions options_;
  const bootstrap::Roster& roster_;  // its servers are all that have been members, in their order
  worker::GroupState& group_;
  const std::function<void(const core::Status&)> fail_;
  bool is_starting_;
  const core::TimePoint start_until_;
  std::uint32_t attempt_ = 0;  // to have the group opened
  std::size_t asked_ = 0;      // engines in it
  std::vector<PolledAddress> places_;
  std::set<core::EngineId> given_up_;
  enum class JoinPhase { kIdle, kAsking, kOpening, kJoining };
  JoinPhase phase_ = JoinPhase::kIdle;
  std::shared_ptr<std::optional<worker::JoinOutcome>> joined_;  // what has come of it
};

}  // namespace hybridps::engine
