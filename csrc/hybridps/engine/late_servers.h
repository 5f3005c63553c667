// hybridps/engine/late_servers.h: how dedicated servers come into a group that is open: those that were started late, started
// again, or given up and alive.
//
// Model    At the group's rank 0. Each address of HYBRIDPS_SERVERS of whose engines the group has not all is asked now and then: at
//          first after `retry`, then after twice that and so on, 16 times at most; that begins anew when one is lost. Who
//          answers is asked to open the group, and then all ranks take it in or none does (worker/newcomers.h).
//            asking -> opening -> joining -> idle, one address at a time
//          An engine that this group has given up is never used again: its server is asked for another one in its place.
// Threads  the loop; what waits for the network is done on helper threads, which hold nothing of this and may outlive it by 10 s.
// Errors   none. What is wrong with a server that answers is a warning, once; that nobody answers is not worth a line.
#pragma once

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
#include "hybridps/engine/dedicated_client.h"
#include "hybridps/worker/worker.h"

namespace hybridps::engine {

struct LateServersOptions {
  std::vector<door::Address> addresses;
  std::string token;
  core::Duration retry = std::chrono::seconds(2);
};

class LateServers : core::Pinned {
 public:
  static constexpr int kPauseMax = 16;  // times options.retry

  /// The group is open with this roster; it outlives this. Both in the loop.
  LateServers(LateServersOptions options, bootstrap::Roster roster, worker::GroupState& group);
  ~LateServers();

  /// Now and then.
  std::size_t tick(core::TimePoint now);
  /// For GroupInfo::weights_with: as records.h has it, of members and newcomers.
  std::vector<double> weights_with(const std::vector<bool>& are_there) const;

 private:
  struct PolledAddress {
    door::Address address;
    std::vector<core::EngineId> engines;  // as it has said
    bool has_all = false;                 // of them, the group
    core::TimePoint next;
    int pause = 1;  // times options.retry
    std::string complaint;
  };
  struct Asking;

  bool has(core::EngineId engine) const;
  bool has_given_up(core::EngineId engine) const;
  template <typename Task>
  void start(PolledAddress& place, Task task);
  void ask(PolledAddress& place, ServerRequest request);
  std::size_t on_found(PolledAddress& place);
  void open(PolledAddress& place, std::vector<bootstrap::MemberRecord> newcomers);
  void on_opened(PolledAddress& place);
  void on_joined(PolledAddress& place);
  void give_up();
  /// Of one that answers it is said why it is not used.
  enum class Answers { kNo, kYes };
  void try_later(PolledAddress& place, Answers answers, const core::Status& why);
  core::Status check(const PolledAddress& place, const std::vector<bootstrap::MemberRecord>& newcomers) const;

  const LateServersOptions options_;
  bootstrap::Roster roster_;                        // its servers are all that have been members, in their order
  std::vector<bootstrap::MemberRecord> newcomers_;  // that are to be
  worker::GroupState& group_;
  std::vector<PolledAddress> places_;
  std::set<core::EngineId> given_up_;
  enum class JoinPhase { kIdle, kFinding, kRenewing, kOpening, kJoining };
  JoinPhase phase_ = JoinPhase::kIdle;
  std::size_t busy_ = 0;  // the place that it is about
  std::shared_ptr<Asking> asking_;
  core::TimePoint no_answer_at_;
  std::shared_ptr<std::optional<core::Status>> joined_;  // what has come of it
};

}  // namespace hybridps::engine
