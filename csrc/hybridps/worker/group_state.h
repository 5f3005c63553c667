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
#include "hybridps/schedule/members.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/schedule/stores.h"
#include "hybridps/server/server.h"
#include "hybridps/worker/census.h"
#include "hybridps/worker/failover.h"
#include "hybridps/worker/newcomers.h"
#include "hybridps/worker/operation.h"
#include "hybridps/worker/pieces.h"
#include "hybridps/worker/plan_changes.h"
#include "hybridps/worker/point_to_point.h"
#include "hybridps/worker/sequence_window.h"
#include "hybridps/worker/span_run.h"

namespace hybridps::worker {

/// In one group, coded memory (Operation::coded) and dedicated servers that join later exclude each other. The first of
/// the two to be used wins. Reason: after the loss of a server, only results made of elements can be recovered.
/// Thread-safe.
class CodedOrJoined : core::Pinned {
 public:
  bool may_code() noexcept { return !needs_elements_ && claim(kCoded); }
  bool may_join() noexcept { return claim(kJoined); }
  /// The group starts. No server has joined, and no memory was coded.
  void forget() noexcept { claimed_ = kNeither; }
  /// No memory may be coded: encoded sums have levels, so nodes of a region send elements.
  void need_elements() noexcept { needs_elements_ = true; }

 private:
  enum Claim : int { kNeither, kCoded, kJoined };
  bool claim(Claim what) noexcept {
    int found = kNeither;
    return claimed_.compare_exchange_strong(found, what) || found == what;
  }
  std::atomic<int> claimed_{kNeither};
  std::atomic<bool> needs_elements_{false};
};

struct GroupInfo {
  core::GroupUid uid;
  std::string name;
  schedule::Members members;
  schedule::Topology topology;
  std::uint64_t tiny_bytes = schedule::Limits().tiny_bytes;
  std::uint64_t urgent_below = tiny_bytes + 1;  // messages of smaller spans pass bulk data; each rank's own choice
  /// Codecs for contributions to sums, and for sums, between nodes; the same on all members. Null: no codec.
  std::shared_ptr<const compress::Codecs> codecs{};
  /// Whether data between nodes may go packed (flow/packing.h), where no codec has it.
  flow::MayPack may_pack = flow::MayPack::kNever;
  std::uint64_t packs_from = 0;  // the least input or output of such an operation, in bytes
  std::uint64_t residual_bytes_max = 0;
  bool is_reconfigurable = false;  // the others can go on without a member that is lost
  /// Weights of the nodes and then of the dedicated servers. `are_there`: by server, whether the server takes part. The
  /// last entries may be newcomers. Unset: the topology's weights, 0 for servers that do not take part, and the nodes'
  /// average for a newcomer.
  std::function<std::vector<double>(const std::vector<bool>& are_there)> weights_with{};
  schedule::TuningRange tuning{};
  std::shared_ptr<CodedOrJoined> coded_or_joined = std::make_shared<CodedOrJoined>();

  /// Limits for plans. Without an argument: for operations without a plan version or codec.
  schedule::Limits limits() const noexcept { return limits(tuning.chunks.usual); }
  schedule::Limits limits(std::uint32_t chunk_bytes) const noexcept { return {chunk_bytes, tiny_bytes}; }
  /// "rank 3 (host7 pid 4121)" or "the dedicated server host9 pid 77".
  std::string member_text(int member) const;
};

struct GroupState;
struct OperationRun;

/// Operations by deadline, then by sequence. So at equal deadlines a group's oldest operation expires first: only the
/// oldest operation has sent probes to the other ranks.
using Expiries = std::multimap<std::pair<core::TimePoint, std::uint64_t>, OperationRun*>;

struct OperationRun final : server::LocalOwner, core::Pinned {
  OperationRun(GroupState& g, Operation o, std::uint64_t s, Completion d)
      : group(g), operation(std::move(o)), sequence(s), done(std::move(d)) {}

  // server::LocalOwner
  void on_complete(std::uint32_t span, std::uint32_t chunk) override;
  void on_granted(std::uint32_t span, std::uint32_t chunk) override;

  /// Null: this rank has no part in the span.
  SpanRun* find(std::uint32_t span);
  /// Call this when `spans` has changed.
  void index_spans();

  GroupState& group;
  Operation operation;
  /// Number of the collective in its group. Point to point: the message's number, known once the message is sent or
  /// matched; the worker orders nothing by this number.
  std::uint64_t sequence;
  std::uint64_t issued = 0;   // receives: order of issue in the group
  std::uint32_t follows = 0;  // sends: must not overtake message number `sequence - follows`; 0: no such message
  bool acknowledged = false;  // sends
  std::uint32_t plan_version = 0;
  std::uint32_t shares_version = 0;
  std::uint16_t pace_chunks = schedule::Tuning::kPaceChunks;
  bool postponed = false;                 // a change of plans delayed the start
  schedule::StoreChooser::Choice stores;  // for slots that another rank of this node reads
  core::TimePoint stores_began_at;        // set if the choice is timed
  Completion done;
  wire::Signature signature;
  const compress::Codec* codec = nullptr;  // for data between nodes; null: none
  std::uint64_t seed = 0;                  // for the codec's random choices
  core::Duration codec_time{};
  Pieces input;
  Pieces output;
  std::vector<std::byte> input_copy;  // `input` is here, if results may come before all contributions have left
  std::vector<std::unique_ptr<SpanRun>> spans;
  std::vector<std::pair<std::uint32_t, SpanRun*>> spans_by_id;  // sorted; empty if `spans` are few
  std::vector<std::uint8_t> local_seen;                         // by local index
  std::uint32_t local_seen_count = 0;
  std::uint64_t pending = 0;         // parts of this rank that are not done
  std::uint64_t awaits_known = 0;    // pending parts that only wait to know that all takers have a span's results
  std::uint64_t retained_bytes = 0;  // bytes of copied results, if is_retained
  bool is_retained = false;          // ended for its caller, with spans that still wait; in GroupState::retained
  bool started = false;
  bool is_done = false;  // nothing is pending: Worker::settle() ends it
  bool pace_due = false;
  int last_heard = -1;            // the rank whose first message for this operation came last
  core::TimePoint last_heard_at;  // when this message came
  int blamed = -1;                // a rank that had not issued the operation, by its answer to a probe
  double pace_ahead = 1.0;        // how far the contributions to one owner may run ahead of those to another, 0..1
  core::TimePoint submitted_at;
  core::TimePoint probed_at;
  core::TimePoint warned_at;
  core::Deadline deadline;
  std::optional<Expiries::iterator> expiry;  // unset: no deadline, or finished
};

/// Messages for operations that have not started here, by sequence number.
class EarlyMessages {
 public:
  using Messages = std::vector<std::pair<wire::Message, flow::Delivery>>;

  std::size_t size() const noexcept { return size_; }
  void add(const wire::Message& message, flow::Delivery payload);
  Messages take(std::uint64_t sequence);
  void drop(std::uint64_t sequence) { take(sequence); }
  /// The sender and the signature of a kept message with another signature than `ours`; no value: there is none.
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
        servers(info.topology.size(), info.topology.servers()),
        has_locals(info.topology.ranks_of(info.topology.my_node()).size() > 1),
        known(static_cast<std::size_t>(info.topology.size())),
        census(info.topology),
        residuals(std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{info.residual_bytes_max, 0})),
        owed(std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{info.residual_bytes_max, 0})),
        momenta(std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{info.residual_bytes_max, 0})),
        // No limit: outer steps need no more memory than the tensors of this process.
        outer(std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{~std::uint64_t{0}, 0})) {}
  /// A message from this rank.
  wire::Message message(wire::Body body) const { return {from(), 0, std::move(body)}; }
  wire::From from() const { return {{}, info.uid, static_cast<std::uint32_t>(info.topology.rank())}; }
  /// Whether this rank has told the verdict on an operation before; from now on it has. The numbers that are remembered
  /// are bounded: of an operation below all of them, too, it says true.
  bool told_before(std::uint64_t sequence);

  GroupInfo info;
  membership::ServerLife servers;
  const bool has_locals;  // whether this node has other ranks
  schedule::StoreChooser stores;
  std::uint64_t newest_start = 0;      // the last collective that started; set only if has_locals
  core::Status status;                 // first verdict on the group
  core::TimePoint last_finished_at{};  // end of the last collective
  core::TimePoint failed_at{};
  bool has_told = false;                     // a verdict on the group was sent to the neighbours
  int blamed = -1;                           // the rank that the verdict blames; -1: none
  std::set<core::EngineId> know_of_failure;  // members that have sent a verdict on the group
  bool leaving = false;                      // this rank has said goodbye
  std::uint64_t submitted = 0;               // number of collectives issued
  SequenceWindow over;
  std::map<std::uint64_t, std::unique_ptr<OperationRun>> running;
  /// Finished for the caller. These operations no longer touch the caller's memory. They keep copies of a dedicated
  /// server's results until all takers have the results: the copies replace the server if it is lost (failover.h).
  std::map<std::uint64_t, std::unique_ptr<OperationRun>> retained;
  std::uint64_t retained_bytes = 0;
  std::vector<std::vector<std::byte>> spare_copies;  // used again: a new allocation costs more than the copy
  /// Signatures of finished operations, at index sequence modulo kSignaturesKept. A late message with another signature
  /// is a mismatch that maybe no other rank notices (for example, two roots that both only send).
  std::vector<std::pair<std::uint64_t, wire::Signature>> signatures_over;
  std::set<std::uint64_t> reserved;  // issued, and not submitted yet
  std::set<std::uint64_t> barriers;  // barriers that wait for earlier operations
  std::vector<std::uint64_t> heard;  // by member: 1 + the highest collective for which the member sent a message
  std::vector<RankWord> known;       // by rank: from answers to probes, for any operation
  Census census;
  std::size_t owners_asked = 0;
  core::TimePoint asked_at;   // time of the last probe
  core::TimePoint warned_at;  // time of the last warning
  EarlyMessages early;
  std::unordered_map<std::uint64_t, core::Status> verdicts;  // on operations not yet submitted here
  std::set<std::uint64_t> verdicts_told;
  bool is_touched = false;                       // listed in Worker::touched_
  core::TimePoint due = core::TimePoint::max();  // listed in Worker::dues_, if it is not max()
  std::unique_ptr<PointToPoint> p2p;
  std::unique_ptr<PlanChanges> plans;
  std::unique_ptr<LostServers> lost_servers;
  std::unique_ptr<Newcomers> newcomers;
  compress::Residuals residuals;  // what encodings left out of this node's contributions
  compress::Residuals owed;       // what encodings left out of the sums that this rank owns
  compress::Residuals momenta;    // momentum of this node's contributions
  outer::State outer;             // state for the spans that this rank owns
  bool steps = false;             // an owners' operation was issued: so other owners keep parts of the outer state
  /// By tensor: the shares version under which `owed` was last settled.
  std::unordered_map<compress::TensorKey, std::uint32_t> owed_version;
};

/// The status in a peer's verdict. An unknown code becomes kInternal.
core::Status verdict_in(const wire::From& from, const wire::Verdict& verdict, const flow::Delivery& payload);

}  // namespace hybridps::worker
