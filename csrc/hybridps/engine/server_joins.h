// hybridps/engine/server_joins.h: how dedicated servers join a group: at its start, late, or again after a loss.
//
// Model    Runs at the group's rank 0, in rounds. A round asks addresses of HYBRIDPS_SERVERS for their engines, and has
//          the group opened at these engines. Then either all ranks take these servers in, or no rank does
//          (worker/newcomers.h):
//            idle -> asking -> opening -> joining -> idle
//          Start  One round covers all addresses. Addresses that fail are left out. The others then open the group once
//                 more, with new server numbers. No operation begins before the start is over. The start ends at the
//                 group's timeout, unless servers are joining then.
//          Late   A round covers one address with engines that are not all in the group. The first round comes after
//                 `retry`. The pause doubles with each failure, up to 16 times `retry`; after an answer that rules the
//                 server out, the pause is 16 times `retry` at once. The pauses begin anew when an engine is lost.
//          The group never uses an engine again after giving it up. Rank 0 asks the server for a new engine instead.
//          Rank 0 does so in the next round if a rank has given the engine up in another group.
// Threads  the loop. Helper threads wait for the network. They hold nothing of this object and may outlive it by 10 s.
// Errors   a server that cannot be used causes one warning. If servers are required, such a server ends a group that is
//          starting. After the start, an address without an answer is logged at debug level only.
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
#include "hybridps/admission/admission_server.h"
#include "hybridps/engine/server_request.h"
#include "hybridps/worker/worker.h"

namespace hybridps::engine {

struct ServerJoinsOptions {
  std::vector<admission::Address> addresses;
  admission::Secret secret;
  core::Duration retry = std::chrono::seconds(2);  // 0: no server joins after the start
  bool required = false;                           // a server that is missing at the start ends the group
  /// A server that has the group open sends pings to rank 0. With this call the engine knows whom to answer.
  std::function<void(const bootstrap::MemberRecord&)> introduce{};
};

class ServerJoins : core::Pinned {
 public:
  static constexpr int kPauseMax = 16;  // in units of options.retry
  /// Servers cannot help groups with fewer nodes than this.
  static constexpr int kNodesMin = 3;
  enum class GroupStart { kAwaitsServers, kIsOver };

  /// `group` is open with `roster`. The group's owner adds the servers that join to `roster`. `group` and `roster`
  /// outlive this object and belong to the loop. `start_until`: when a group that awaits servers starts without the
  /// missing ones. `fail` ends the group for all its members.
  ServerJoins(ServerJoinsOptions options, const bootstrap::Roster& roster, worker::GroupState& group, GroupStart start,
              core::TimePoint start_until, std::function<void(const core::Status&)> fail);
  ~ServerJoins();

  /// Call regularly, and as often as possible while the group starts. Returns the amount of work done; 0: none.
  std::size_t tick(core::TimePoint now);
  /// For GroupInfo::weights_with: weights_with() of records.h, for the roster's servers and the newcomers.
  std::vector<double> weights_with(const std::vector<bool>& are_there) const;

 private:
  /// A round asks while a place is kFinding or kRenewing, and opens while a place is kOpening.
  enum class AddressStep { kIdle, kFinding, kRenewing, kFound, kOpening, kOpened };
  struct Asking;
  struct PolledAddress {
    admission::Address address;
    std::vector<core::EngineId> engines;  // the server's engines, from its last answer
    bool has_all = false;                 // all of `engines` are in the group
    bool has_open = false;                // `newcomers` may have the group open, and have not joined
    bool was_open = false;                // an earlier attempt of the round has the group open there
    bool left_out = false;                // the group's start goes on without this address
    core::TimePoint next;                 // earliest next round of this address
    int pause = 1;                        // in units of options.retry
    int given_up_engines = 0;             // found in a row, by ranks or by the server
    std::string complaint;
    // State of the current round:
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
  /// kYes: the server answered, so a warning says why the group does not use the server.
  enum class Answers { kNo, kYes };
  void try_later(PolledAddress& place, Answers answers, const core::Status& why);
  core::Status check(const PolledAddress& place) const;
  core::Status check_room(const PolledAddress& place) const;
  std::vector<bootstrap::MemberRecord> newcomers() const;
  bootstrap::Roster with_newcomers() const;

  const ServerJoinsOptions options_;
  const bootstrap::Roster& roster_;  // roster_.servers: all servers that are or were members, in the order of joining
  worker::GroupState& group_;
  const std::function<void(const core::Status&)> fail_;
  bool is_starting_;
  const core::TimePoint start_until_;
  std::uint32_t attempt_ = 0;  // number of the last attempt to have the group opened
  std::size_t asked_ = 0;      // engines in the last attempt
  std::vector<PolledAddress> places_;
  std::set<core::EngineId> given_up_;
  // Null: no server is joining now. Empty: there is no outcome yet.
  std::shared_ptr<std::optional<worker::JoinOutcome>> joined_;
};

}  // namespace hybridps::engine
