// hybridps/worker/group_state.h: what the worker knows of a group and of the operations under way in it.
//
// Threads  the engine's progress thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/compress/codec.h"
#include "hybridps/compress/residuals.h"
#include "hybridps/membership/server_life.h"
#include "hybridps/outer/state.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/schedule/stores.h"
#include "hybridps/server/server.h"
#include "hybridps/worker/failover.h"
#include "hybridps/worker/newcomers.h"
#include "hybridps/worker/operation.h"
#include "hybridps/worker/pieces.h"
#include "hybridps/worker/plan_changes.h"
#include "hybridps/worker/point_to_point.h"
#include "hybridps/worker/sequence_window.h"
#include "hybridps/worker/span_run.h"

namespace hybridps::worker {

/// Memory that is coded (Operation::coded) and dedicated servers that join later exclude each other in a group: what comes first
/// stays, because failover needs elements. Threads: any.
class CodedOrJoined : core::Pinned {
 public:
  bool may_code() noexcept { return claim(kCoded); }
  bool may_join() noexcept { return claim(kJoined); }
  /// The group starts, and nothing has joined or was coded.
  void forget() noexcept { claimed_ = kNeither; }

 private:
  enum Claim : int { kNeither, kCoded, kJoined };
  bool claim(Claim what) noexcept {
    int found = kNeither;
    return claimed_.compare_exchange_strong(found, what) || found == what;
  }
  std::atomic<int> claimed_{kNeither};
};

struct GroupInfo {
  core::GroupUid uid;
  std::string name;
  std::vector<core::EngineId> engines;  // by group rank, then the dedicated servers
  std::vector<std::string> hosts;       // likewise, for messages: "host7 pid 4121"
  schedule::Topology topology;
  std::uint64_t tiny_bytes = schedule::Limits().tiny_bytes;
  std::uint64_t urgent_below = tiny_bytes + 1;  // messages of spans below this pass bulk; each rank's own choice
  /// Of contributions and results of sums between nodes; the same on all members. Null: all goes as it is.
  std::shared_ptr<const compress::Codecs> codecs{};
  std::uint64_t residual_bytes_max = 0;
  /// Weights of the nodes and then of the dedicated servers, where those of which this says so, by server, are there; the last of
  /// them may be newcomers. Unset: as the topology has them, without the others, and newcomers have what a node has.
  std::function<std::vector<double>(const std::vector<bool>& are_there)> weights_with{};
  schedule::TuningRange tuning{};
  std::shared_ptr<CodedOrJoined> coded_or_joined = std::make_shared<CodedOrJoined>();

  /// Of plans: outside of versions and codecs, or for chunks of this size.
  schedule::Limits limits() const noexcept { return limits(tuning.chunks.usual); }
  schedule::Limits limits(std::uint32_t chunk_bytes) const noexcept { return {chunk_bytes, tiny_bytes}; }
  /// "rank 3 (host7 pid 4121)" or "the dedicated server host9 pid 77".
  std::string member_text(int member) const;
};

struct GroupState;
struct OperationRun;

/// By deadline. Of operations with one deadline the oldest of its group comes first: it alone has asked the others what
/// they are doing.
using Expiries = std::multimap<std::pair<core::TimePoint, std::uint64_t>, OperationRun*>;

struct OperationRun final : server::LocalOwner, core::Pinned {
  OperationRun(GroupState& g, Operation o, std::uint64_t s, Completion d)
      : group(g), operation(std::move(o)), sequence(s), done(std::move(d)) {}

  // server::LocalOwner
  void on_complete(std::uint32_t span, std::uint32_t chunk) override;
  void on_granted(std::uint32_t span, std::uint32_t chunk) override;

  SpanRun* find(std::uint32_t span);

  GroupState& group;
  Operation operation;
  /// Of the group. Point to point: the message's number, known once it is sent or matched; nothing is ordered by it here.
  std::uint64_t sequence;
  std::uint64_t issued = 0;   // receives: order of issue in the group
  std::uint32_t follows = 0;  // sends: so many numbers ago is the message that this one must not overtake; 0: none
  bool acknowledged = false;  // sends
  std::uint32_t plan_version = 0;
  std::uint32_t shares_version = 0;
  std::uint16_t pace_chunks = schedule::Tuning::kPaceChunks;
  bool postponed = false;  // by a change of plans
  schedule::StoreChooser::Choice stores;  // of slots that another rank of this node reads
  core::TimePoint stores_began_at;        // where it is a trial
  Completion done;
  wire::Signature signature;
  const compress::Codec* codec = nullptr;  // of what goes between nodes
  std::uint64_t seed = 0;                  // of its codec's lots
  core::Duration codec_time{};
  Pieces input;
  Pieces output;
  std::vector<std::unique_ptr<SpanRun>> spans;
  std::vector<std::uint8_t> local_seen;  // by local index
  std::uint32_t local_seen_count = 0;
  std::uint64_t pending = 0;  // parts of this rank that are not done
  std::uint64_t awaits_known = 0;    // of these: spans that are kept until all have their results
  std::uint64_t retained_bytes = 0;  // in copies, once the operation has ended without waiting for that
  bool is_retained = false;          // it has; it is in GroupState::retained
  bool started = false;
  bool is_done = false;  // nothing is pending: Worker::settle() ends it
  bool pace_due = false;
  int last_heard = -1;  // of the ranks that this one hears in it, the last to be heard for the first time, at
  core::TimePoint last_heard_at;
  int blamed = -1;  // by its answer to a probe a rank that had not issued it
  double pace_ahead = 1.0;  // how far the contributions to one owner may run ahead of those to another, 0..1
  core::TimePoint submitted_at;
  core::TimePoint probed_at;
  core::TimePoint warned_at;
  core::Deadline deadline;
  std::optional<Expiries::iterator> expiry;  // while it has a deadline ahead
};

/// Messages for operations that have not started here, by sequence number.
class EarlyMessages {
 public:
  using Messages = std::vector<std::pair<wire::Message, flow::Delivery>>;

  std::size_t size() const noexcept { return size_; }
  void add(const wire::Message& message, flow::Delivery payload);
  Messages take(std::uint64_t sequence);
  void drop(std::uint64_t sequence) { take(sequence); }
  /// Who sent one that is of another operation, and which.
  std::optional<server::RankCall> contradiction(std::uint64_t sequence, const wire::Signature& ours) const noexcept;
  void clear();

 private:
  std::unordered_map<std::uint64_t, Messages> by_sequence_;
  std::size_t size_ = 0;
};

struct GroupState : core::Pinned {
  static constexpr std::size_t kSignaturesKept = 256;
  static constexpr std::size_t kVerdictsKept = 1024;

  explicit GroupState(GroupInfo i)
      : info(std::move(i)),
        servers(info.topology.size()),
        has_locals(info.topology.ranks_of(info.topology.my_node()).size() > 1),
        residuals(std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{info.residual_bytes_max, 0})),
        owed(std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{info.residual_bytes_max, 0})),
        momenta(std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{info.residual_bytes_max, 0})),
        // Bounded by the tensors that this process has.
        outer(std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{~std::uint64_t{0}, 0})) {}
  /// From this rank.
  wire::Message message(wire::Body body) const { return {from(), 0, std::move(body)}; }
  wire::From from() const { return {{}, info.uid, static_cast<std::uint32_t>(info.topology.rank())}; }

  GroupInfo info;
  membership::ServerLife servers;
  const bool has_locals;  // other ranks of this node
  schedule::StoreChooser stores;
  std::uint64_t newest_start = 0;  // the collective that started last, where there are locals
  core::Status status;  // first verdict on the group
  core::TimePoint last_finished_at{};  // a collective
  core::TimePoint failed_at{};
  bool told = false;                         // the verdict was found here, and sent to all members
  std::set<core::EngineId> know_of_failure;  // they have sent a verdict on the group
  bool leaving = false;         // this rank has said goodbye
  std::uint64_t submitted = 0;  // collectives issued, by number
  SequenceWindow over;
  std::map<std::uint64_t, std::unique_ptr<OperationRun>> running;
  /// Over for their callers, of whose memory they know nothing any more. They have results of a dedicated server until all have
  /// them, if that server should be lost (failover.h).
  std::map<std::uint64_t, std::unique_ptr<OperationRun>> retained;
  std::uint64_t retained_bytes = 0;
  std::vector<std::vector<std::byte>> spare_copies;  // new memory for each would cost more than the copy
  /// Signatures of operations that are over, by sequence modulo its length: a late message that contradicts one of them
  /// is a mismatch that nobody else may notice (two roots that both only send).
  std::vector<std::pair<std::uint64_t, wire::Signature>> signatures_over;
  std::set<std::uint64_t> reserved;  // issued, and not submitted yet
  std::set<std::uint64_t> barriers;  // that wait for earlier operations
  std::vector<std::uint64_t> heard;  // by member: 1 + the greatest collective that a message of it was of
  /// What a rank has answered to probes, of whatever operation.
  struct Known {
    std::uint64_t submitted = 0;  // collectives of this group
    std::uint64_t finished = 0;
    wire::Signature last;  // the one it is in; if it is in none, the last one it finished
    core::TimePoint at;    // of its last answer
  };
  std::vector<Known> known;   // by rank
  core::TimePoint asked_at;   // the last probe
  core::TimePoint warned_at;  // the last warning
  EarlyMessages early;
  std::unordered_map<std::uint64_t, core::Status> verdicts;  // on operations not yet submitted here
  std::unique_ptr<PointToPoint> p2p;
  std::unique_ptr<PlanChanges> plans;
  std::unique_ptr<LostServers> lost_servers;
  std::unique_ptr<Newcomers> newcomers;
  // What encodings left out of this node's contributions, and of the sums that it owns; and momentum of contributions.
  compress::Residuals residuals;
  compress::Residuals owed;
  compress::Residuals momenta;
  outer::State outer;  // of the spans that this rank owns
  bool steps = false;  // an owners' operation was issued: other owners keep some of that state
  /// By tensor: the shares by which `owed` is spread.
  std::unordered_map<compress::TensorKey, std::uint32_t> owed_version;
};

/// What a verdict says; a peer's bytes are checked.
core::Status verdict_in(const wire::From& from, const wire::Verdict& verdict, const flow::Delivery& payload);

}  // namespace hybridps::worker
