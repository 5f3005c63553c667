// hybridps/worker/worker.h: runs operations of all groups on this rank.
//
// Owner    the engine's runtime. One Worker per engine; groups and operations are plain state inside it.
// Threads  the engine's progress thread.
// Life     the worker may read and write an operation's memory until the operation's Completion has run. An operation
//          completes when this rank's own part is done in every role (contributor, agent, owner, forwarder, consumer).
// Errors   Completion gets the Status. Its message has the form
//          `hybridps[rank R/N HOST pid P group "G"]: KIND seq S (WHAT) failed after T s: WHY`.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/one_thread.h"
#include "hybridps/flow/grants.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/observe/json.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/server/server.h"
#include "hybridps/worker/group_state.h"
#include "hybridps/worker/operation.h"

namespace hybridps::worker {

/// What the worker needs from the engine.
class Host {
 public:
  virtual ~Host() = default;
  /// Sends a small message with a text on the control path.
  virtual void send_control(core::EngineId to, wire::Message message, std::string_view text) = 0;
  /// The same over a connection that stands. Without one, the message is dropped.
  virtual void send_if_connected(core::EngineId to, wire::Message message, std::string_view text) = 0;
  /// A group got its first verdict. The members have been told already. `status`: the status for callers, with advice.
  /// `cause`: the verdict itself. `found_here`: this rank told the members; else another rank told this rank.
  virtual void on_group_failed(core::GroupUid uid, const core::Status& status, const core::Status& cause,
                               bool found_here) = 0;
  /// An operation of the group has waited for another kProbeAgainAfter (5 s).
  virtual void on_group_waits(core::GroupUid uid) = 0;
  /// Sends the messages that wait for further messages to the same peer. Called when an operation is over here: its
  /// caller may end the process next.
  virtual void send_now() = 0;
  /// Which connections to these peers wait for file descriptors, and what to do; empty: none does.
  virtual std::string lack_of_descriptors(const std::vector<core::EngineId>& peers) const = 0;
  /// Payload bytes through this process's network card, in the direction that has more.
  virtual std::uint64_t bytes_through_card() const = 0;
  /// The group goes on without this dedicated server, even if the server looks healthy from here. The host must close
  /// the connections to the server and call on_peer_dead() for the server.
  virtual void on_server_lost(core::EngineId server, const std::string& why) = 0;
  /// A dedicated server may join the group. `record`: the server's record, as rank 0 got it. The server is a peer from
  /// now on. Errors: why this rank cannot use the server.
  virtual core::Result<schedule::Member> meet(core::GroupUid uid, std::span<const std::byte> record) = 0;
  /// No server of meet() joins. `servers`: those that it has accepted.
  virtual void part(core::GroupUid uid, const std::vector<core::EngineId>& servers) = 0;
  /// The servers of meet() have joined: `members` are the group's members now. on_shares() comes next. If the group has
  /// not started, the host may change GroupInfo::topology and GroupInfo::tuning in this call.
  virtual void on_joined(core::GroupUid uid, const schedule::Members& members) = 0;
  /// The group may begin operations. Called once per group: after servers have joined, or if no server joins.
  virtual void on_start(core::GroupUid uid) = 0;
  /// From now on the group's nodes and servers own other shares.
  virtual void on_shares(core::GroupUid uid, const schedule::Topology& topology) = 0;
  /// The group has a new tuning. The host applies the settings that concern more than one operation: the windows of the
  /// group's peers, and connections.
  virtual void on_tuning(core::GroupUid uid, const schedule::Tuning& tuning) = 0;
};

struct WorkerOptions {
  std::uint32_t grant_chunks = 4;
  double warn_seconds = 10;
  /// The most messages kept per group for operations that have not started here. A kept message takes about 300 bytes
  /// beside its data, so this limit bounds the memory for ranks that run ahead. The allowances bound the data.
  std::size_t early_messages_max = std::size_t{1} << 20;
  bool find_rates = true;
  bool tune = false;
  /// An operation waits until all members have the results of a dedicated server's spans. Instead, it may leave a copy
  /// of the results behind, and end at once. These are the most bytes of copies per operation, and per group. 0: all
  /// operations wait.
  std::uint64_t retained_bytes = std::uint64_t{256} << 10;
  std::uint64_t retained_bytes_max = std::uint64_t{8} << 20;
};

/// Counts of all codecs.
struct CodecCounts {
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;       // bytes of elements that were encoded
  std::uint64_t wire_bytes = 0;  // encoded size of these elements
  std::uint64_t blocks_not_finite = 0;
  core::Duration encoding{};
  core::Duration decoding{};  // includes the sums of contributions
};

/// Counts of operations, since the start of the engine.
struct OperationCounts {
  struct OfKind {
    std::uint64_t operations = 0;  // operations that succeeded
    double bytes = 0;              // tensor bytes of these operations
    double bus_bytes = 0;          // `bytes` times the bus factor of the collective (bus bandwidth of nccl-tests)
    core::Duration time{};         // from the call to the end
  };
  std::array<OfKind, schedule::kKindCount> of_kind{};
  /// Key: the last rank to take part. Value: how long operations waited for this rank. No id: the rank is unknown.
  std::unordered_map<core::EngineId, core::Duration> waited_for;
  std::map<core::Code, std::uint64_t> errors;
};

class Worker final : public server::Listener, core::Pinned {
 public:
  Worker(flow::Outbox& outbox, server::Server& server, Host& host, WorkerOptions options);
  ~Worker() override;

  /// Opens a group. Its roster must be valid.
  GroupState& open_group(GroupInfo info);
  GroupState* find(core::GroupUid uid);
  /// Fails what is pending and forgets the group.
  void close_group(core::GroupUid uid);

  /// The collective `sequence` will be submitted later, when its memory is ready.
  void reserve(GroupState& group, std::uint64_t sequence);
  /// Collectives: `sequence` rises by one per group, except for reserved numbers. Point to point: ignores `sequence`.
  void submit(GroupState& group, Operation operation, std::uint64_t sequence, Completion done);
  /// Any message of a group that is open here.
  void on_message(GroupState& group, const wire::Message& message, flow::Delivery payload);
  /// Pending and later operations of the group fail with `cause`. `tell`: this rank tells the members.
  /// `blamed`: the rank whose end, or silence, is the cause; -1: none.
  void fail_group(GroupState& group, const core::Status& cause, bool tell, int blamed = -1);
  /// Tells a member once more that the group has failed. The member still waits, so the first message did not arrive.
  void repeat_verdict(const GroupState& group, core::EngineId to);
  /// A peer died. If the peer is a rank, every group with the peer fails. If the peer is a dedicated server, its groups
  /// go on without the server (failover.h). `own_fault`: set if this rank is to blame; says why.
  void on_peer_dead(core::EngineId peer, const core::Status& cause, const std::string& own_fault = {});
  /// The collective's deadline passed before the group was open here. The members are told.
  void submit_failed(GroupState& group, Operation operation, std::uint64_t sequence, const core::Status& cause);

  /// Handles deadlines, probes, warnings. Returns the number of things done.
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due(core::TimePoint now) const noexcept;
  bool is_idle() const noexcept { return active_ == 0; }
  /// Roughly the bytes that the collectives under way still wait for. Looks at up to 16 operations. 0 if one of these
  /// operations is a send or a receive: its caller may wait for the data right now.
  std::uint64_t bytes_awaited() const noexcept;
  /// How often a group was looked at since the beginning: the measure of what idle groups cost.
  std::uint64_t group_looks() const noexcept { return group_looks_; }
  std::uint64_t operations_finished() const noexcept { return finished_count_; }
  std::uint64_t operations_active() const noexcept { return active_; }
  const OperationCounts& counts() const noexcept { return counts_; }
  std::uint64_t tuner_trials() const noexcept { return tuner_trials_; }
  std::uint64_t tuner_kept() const noexcept { return tuner_kept_; }
  void on_tried(bool kept) noexcept {
    ++tuner_trials_;
    if (kept) ++tuner_kept_;
  }
  /// When the oldest unfinished operation was submitted; `now` if there is no such operation.
  core::TimePoint oldest_since(core::TimePoint now) const noexcept;
  /// Writes an open group as fields of the current object of `json`: pending operations and their age, servers that owe
  /// results, progress, plan, shares, rates. (status.cpp; python/hybridps/tools/status.py reads the fields.)
  void write_status(observe::Json& json, const GroupState& group, core::TimePoint now) const;
  /// A trace begins. Adds the calls of operations that are under way already.
  void trace_under_way();

  // server::Listener
  void on_mismatch(const server::OperationKey& key, const server::RankCall& ours,
                   const server::RankCall& theirs) override;
  void on_bad_message(const server::OperationKey& key, std::string what) override;

  // For roles and PointToPoint.
  flow::Outbox& outbox() noexcept { return outbox_; }
  server::Server& server() noexcept { return server_; }
  Host& host() noexcept { return host_; }
  /// One pending part of `run` is done. After the last part, settle() ends the operation.
  void part_done(OperationRun& run);
  /// Ends the operation now. Not allowed from inside a call into one of the operation's roles.
  void finish(OperationRun& run, core::Status status, int source_rank = -1);
  /// `run` only waits to know that all takers have its results, and the results are small enough to be copied.
  bool may_leave(const OperationRun& run) const noexcept;
  /// The results of `run` are small enough to be copied, and the group has room for the copy.
  bool may_retain(const OperationRun& run) const noexcept;
  /// The results that `run` has retained are not needed any more. Frees `run`.
  void drop_retained(OperationRun& run);
  void drop_retained(GroupState& group);
  /// This rank is the first to find that `run` fails. Tells the members, then ends `run` with `cause`.
  void fail(OperationRun& run, core::Status cause);
  void mismatch(const OperationRun& run, const server::RankCall& theirs);
  /// The next settle() fails the group with the verdict.
  void on_group_fault(const GroupState& group, core::Status verdict) {
    events_.push_back({nullptr, group.info.uid, std::move(verdict)});
  }
  /// Chunks of `run` that a lost dedicated server held cannot be recovered. The next settle() fails the group.
  void on_failover_impossible(const OperationRun& run, int server);
  /// To each child of this rank in the group's tree (membership/tree.h).
  void send_down(const GroupState& group, const wire::Body& body, std::string_view text = {});
  /// To the parent of this rank in the tree.
  void send_up(const GroupState& group, const wire::Body& body, std::string_view text = {});
  void settle_owed(OperationRun& run, const std::vector<schedule::Span>& plan);
  /// Makes the run's spans from `plan` and starts them.
  void launch(OperationRun& run, const std::vector<schedule::Span>& plan);
  void track(OperationRun& run);
  /// Starts a collective that had to wait for a plan version.
  void start_unfrozen(GroupState& group, std::uint64_t sequence);
  /// A contribution has left. Further contributions of the operation may follow, in the next tick().
  void pace_soon(OperationRun& run);
  /// Grants of chunks that this engine, as an agent, fetches from ranks of its node.
  flow::GrantQueue& local_grants() noexcept { return local_grants_; }
  CodecCounts& codec_counts() noexcept { return codec_counts_; }
  /// Something may have changed that the group's tick() must know of. Groups that nobody touches cost nothing.
  void touch(GroupState& group);
  /// Memory of at least `bytes`, valid until the next call. The worker owns it.
  std::byte* scratch(std::size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  }
  /// Whether an early message may be kept, when `kept` are kept already. If not, the next settle() fails the group.
  bool can_keep(GroupState& group, std::size_t kept, const wire::Message& message);
  std::string describe(const OperationRun& run) const;

 private:
  /// A call from outside. The outermost Entry calls settle().
  class Entry : core::Pinned {
   public:
    explicit Entry(Worker& worker) : worker_(worker), inside_(worker.one_thread_) {
      if (worker_.entered_++ == 0) worker_.settle();
    }
    ~Entry() {
      if (worker_.entered_ == 1) worker_.settle();
      --worker_.entered_;
    }

   private:
    Worker& worker_;
    const core::OneThread::Inside inside_;
  };

  void start(OperationRun& run);
  void write_under_way(observe::Json& json, const GroupState& group, core::TimePoint now) const;
  /// Chooses how the operation writes slots for other ranks of the node (schedule/stores.h).
  void choose_stores(OperationRun& run);
  /// Checks an operation with Operation::coded. kInvalidArgument says why this operation cannot have coded memory.
  core::Status check_coded(const OperationRun& run) const;
  /// Ends an operation that was never tracked.
  void refuse(OperationRun& run, const core::Status& status);
  void pace(OperationRun& run);
  void handle(GroupState& group, const wire::Message& message, flow::Delivery payload);
  void on_chunk(GroupState& group, const wire::Message& message, const wire::ChunkId& chunk, flow::Delivery payload);
  /// Handles the events that callbacks have recorded, in order: ends operations that are done, fails groups that got a
  /// verdict. Every call into the Worker ends with settle(), so no operation ends inside a callback. Returns the number
  /// of events.
  std::size_t settle() { return events_.empty() ? 0 : settle_events(); }
  std::size_t settle_events();
  void start_barriers(GroupState& group);
  /// When the group must be looked at, whoever touches it.
  static core::TimePoint due_of(const GroupState& group) noexcept;
  /// Handles what has become due in groups: barriers, changes of plans, servers, news.
  std::size_t look_at_groups(core::TimePoint now);
  bool is_oldest(const GroupState& group, std::uint64_t sequence) const;
  void dispatch(OperationRun& run, const wire::Message& message, flow::Delivery payload);
  void on_verdict(GroupState& group, const wire::From& from, const wire::Verdict& verdict,
                  const flow::Delivery& payload);
  static core::Status of_this_rank(const GroupState& group, const wire::From& from, const wire::Verdict& verdict,
                                   const core::Status& status);
  void probe(OperationRun& run, core::TimePoint now);
  void on_probe(GroupState& group, const wire::From& from, const wire::Probe& probe, const flow::Delivery& told);
  static void on_probe_reply(GroupState& group, const wire::From& from, const wire::ProbeReply& reply,
                             const flow::Delivery& told);
  static void add_owners(const OperationRun& run, std::vector<int>& asked);
  /// What this rank has done, and in a large group what it knows of the others.
  static wire::ProbeReply own_word(const GroupState& group);
  static std::string told_of_all(GroupState& group);
  static void learn(GroupState& group, const flow::Delivery& told);
  /// Tells the neighbours in a large group what this rank has learned.
  void tell_news(GroupState& group, core::TimePoint now);
  void count(const OperationRun& run, const core::Status& status);
  void trace(const OperationRun& run, observe::EventType type, bool failed);
  bool contradicts_finished(const GroupState& group, std::uint64_t sequence, const server::RankCall& theirs);
  void see_local(OperationRun& run, const wire::ChunkId& chunk);
  static bool has_issued(const GroupState& group, int rank, std::uint64_t sequence);
  /// Ranks that have not issued the operation. A rank is left out until it had time to answer a probe. Empty list: the
  /// dedicated servers that owe a result instead. A send or receive: the peer.
  std::vector<int> missing_ranks(const OperationRun& run) const;
  std::string last_known(const GroupState& group, int rank) const;
  std::string standing(const OperationRun& run) const;
  /// The status for the caller: adds the rank, the operation, its progress and what to do.
  core::Status in_full(const OperationRun& run, const core::Status& status) const;
  void watch(core::TimePoint now);
  void watch(GroupState& group, core::TimePoint now, std::set<core::GroupUid>& waiting);
  void watch_peers(core::TimePoint now, std::set<core::GroupUid>& waiting);
  void expire(OperationRun& run);
  /// Tells a verdict of this rank's own to its neighbours (census.h), which pass it on, and to the dedicated servers.
  void tell_first(GroupState& group, const wire::Verdict& verdict, std::string_view text);
  /// Passes on what another rank has told. In a large group to the neighbours. Else over the connections that stand,
  /// since the first to tell has told all members.
  void pass_on(GroupState& group, wire::Verdict verdict, std::string_view text);

  static constexpr auto kWatchEvery = std::chrono::milliseconds(100);

  core::OneThread one_thread_;
  flow::Outbox& outbox_;
  server::Server& server_;
  Host& host_;
  const WorkerOptions options_;
  CodecCounts codec_counts_;
  OperationCounts counts_;
  core::TimePoint now_{};  // time of the last tick()
  std::vector<std::byte> scratch_;
  flow::GrantQueue local_grants_;
  std::unordered_map<core::GroupUid, std::unique_ptr<GroupState>> groups_;
  std::uint64_t group_looks_ = 0;
  std::vector<GroupState*> touched_;                        // since they were looked at; null: closed since
  std::set<std::pair<core::TimePoint, GroupState*>> dues_;  // groups that must be looked at by then, by GroupState::due
  Expiries deadlines_;
  std::set<OperationRun*> tracked_;
  std::vector<OperationRun*> pacing_;  // operations with pace_due set
  struct Settlement {                  // an event for settle()
    OperationRun* done = nullptr;      // null: a group fails
    core::GroupUid uid;                // the group that fails
    core::Status verdict;
  };
  std::deque<Settlement> events_;
  std::size_t entered_ = 0;  // nested calls from outside that are under way
  core::TimePoint next_watch_;
  core::TimePoint next_peers_watch_;
  std::size_t active_ = 0;
  std::uint64_t finished_count_ = 0;
  std::uint64_t tuner_trials_ = 0;
  std::uint64_t tuner_kept_ = 0;
};

}  // namespace hybridps::worker
