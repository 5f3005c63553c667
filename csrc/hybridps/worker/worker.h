// hybridps/worker/worker.h: runs operations of all groups on this rank.
//
// Owner    the engine's runtime. One Worker per engine; groups and operations are plain state inside it.
// Threads  the engine's progress thread.
// Life     an operation's memory may be read and written until its Completion ran. An operation completes when this
//          rank's own part is done in every role (contributor, agent, owner, forwarder, consumer).
// Errors   Completion gets the Status, its message in the form
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
  /// Sends a small message with a text by the control path.
  virtual void send_control(core::EngineId to, wire::Message message, std::string_view text) = 0;
  /// A group got its first verdict (already told to the members). `status` is what operations end with, `cause` the
  /// verdict itself; `found_here`: this rank told it, else it was told.
  virtual void on_group_failed(core::GroupUid uid, const core::Status& status, const core::Status& cause,
                               bool found_here) = 0;
  /// An operation of the group has waited for kProbeAgainAfter (5 s), once more.
  virtual void on_group_waits(core::GroupUid uid) = 0;
  /// Puts on their way what was sent and waits for company: an operation is over here, and its caller may end the process.
  virtual void send_now() = 0;
  /// Payload that has crossed this process's network card, in the direction that has more.
  virtual std::uint64_t bytes_through_card() const = 0;
  /// The group goes on without this dedicated server, whatever it looks like from here: its connections are to be closed, and
  /// on_peer_dead() is to be called for it.
  virtual void on_server_lost(core::EngineId server, const std::string& why) = 0;
  /// A dedicated server may join the group: `record` is as rank 0 got it. It is a peer from now on. Errors: why it cannot be used from here.
  virtual core::Result<Newcomer> meet(core::GroupUid uid, std::span<const std::byte> record) = 0;
  /// It does not join.
  virtual void part(core::GroupUid uid, core::EngineId server) = 0;
  /// They do: they are the group's last members. on_shares() comes next. Where the group has not started, GroupInfo::topology and
  /// tuning may be changed now.
  virtual void on_joined(core::GroupUid uid, const std::vector<core::EngineId>& servers) = 0;
  /// Called once for a group that has waited for servers: they have joined, or none does. Operations may begin.
  virtual void on_start(core::GroupUid uid) = 0;
  /// From now on the group's nodes own other shares.
  virtual void on_shares(core::GroupUid uid, const schedule::Topology& topology) = 0;
  /// What of it concerns more than one operation: windows of the group's peers, connections, waiting.
  virtual void on_tuning(core::GroupUid uid, const schedule::Tuning& tuning) = 0;
};

struct WorkerOptions {
  std::uint32_t grant_chunks = 4;
  double warn_seconds = 10;
  /// Per group. A header and its keep are some 300 bytes, so what members that run ahead of this rank may claim is
  /// bounded; the data itself is by the allowances.
  std::size_t early_messages_max = std::size_t{1} << 20;
  bool find_rates = true;
  bool tune = false;
  /// Results of a dedicated server's spans that an operation may leave behind, copied, so that it need not wait until all
  /// members have them: the most of one, and of all of a group. 0: all wait.
  std::uint64_t retained_bytes = std::uint64_t{256} << 10;
  std::uint64_t retained_bytes_max = std::uint64_t{8} << 20;
};

/// What codecs have done. Bytes of elements, and of those on the wire.
struct CodecCounts {
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;
  std::uint64_t wire_bytes = 0;
  std::uint64_t blocks_not_finite = 0;
  core::Duration encoding{};
  core::Duration decoding{};  // the sums of contributions included
};

/// What operations came to, since the beginning.
struct OperationCounts {
  struct OfKind {
    std::uint64_t operations = 0;  // that succeeded
    double bytes = 0;              // of their tensors
    double bus_bytes = 0;          // times what the collective has to move for each of them (nccl-tests' bus bandwidth)
    core::Duration time{};         // from the call to the end
  };
  std::array<OfKind, schedule::kKindCount> of_kind{};
  /// How long operations waited for the last rank to take part, by that rank; no id: it is not known who.
  std::unordered_map<core::EngineId, core::Duration> waited_for;
  std::map<core::Code, std::uint64_t> errors;
};

class Worker final : public server::Listener, core::Pinned {
 public:
  Worker(flow::Outbox& outbox, server::Server& server, Host& host, WorkerOptions options);
  ~Worker() override;

  /// The group is known and its roster valid.
  GroupState& open_group(GroupInfo info);
  GroupState* find(core::GroupUid uid);
  /// Fails what is pending and forgets the group.
  void close_group(core::GroupUid uid);

  /// A collective of this number will be submitted later, when its memory is ready.
  void reserve(GroupState& group, std::uint64_t sequence);
  /// Collectives: `sequence` rises by one per group, but for those reserved. Point to point: ignored.
  void submit(GroupState& group, Operation operation, std::uint64_t sequence, Completion done);
  /// Any message of a group that is open here.
  void on_message(GroupState& group, const wire::Message& message, flow::Delivery payload);
  /// A verdict of ours: pending and later operations fail; members are told when `tell`.
  void fail_group(GroupState& group, const core::Status& cause, bool tell);
  /// Tells a member once more that the group has failed: it waits, so it has not heard.
  void repeat_verdict(const GroupState& group, core::EngineId to);
  /// A peer died: every group with it fails. `own_fault`: it is this rank that is to blame, and why.
  void on_peer_dead(core::EngineId peer, const core::Status& cause, const std::string& own_fault = {});
  /// A collective whose deadline passed before the group was open here: the members are told.
  void submit_failed(GroupState& group, Operation operation, std::uint64_t sequence, const core::Status& cause);

  /// Deadlines, probes, warnings. Returns what it did.
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due(core::TimePoint now) const noexcept;
  bool is_idle() const noexcept { return active_ == 0; }
  /// Bytes that the collectives under way still wait for, roughly; of many operations the first few. 0 beside sends and
  /// receives: what they bring may be waited for at once.
  std::uint64_t bytes_awaited() const noexcept;
  std::uint64_t operations_finished() const noexcept { return finished_count_; }
  std::uint64_t operations_active() const noexcept { return active_; }
  const OperationCounts& counts() const noexcept { return counts_; }
  std::uint64_t tuner_trials() const noexcept { return tuner_trials_; }
  std::uint64_t tuner_kept() const noexcept { return tuner_kept_; }
  void on_tried(bool kept) noexcept {
    ++tuner_trials_;
    if (kept) ++tuner_kept_;
  }
  /// Since when the oldest operation waits; now if there is none.
  core::TimePoint oldest_since(core::TimePoint now) const noexcept;
  /// An open group as fields of the object that `json` is in: what is pending and for how long, who has not come, how far it
  /// is, plan, shares, rates. (status.cpp; read by python/hybridps/tools/status.py.)
  void write_status(observe::Json& json, const GroupState& group, core::TimePoint now) const;
  /// A trace begins: what was called before is in it.
  void trace_under_way();

  // server::Listener
  void on_mismatch(const server::OperationKey& key, const server::RankCall& ours, const server::RankCall& theirs) override;
  void on_bad_message(const server::OperationKey& key, std::string what) override;

  // For roles and PointToPoint.
  flow::Outbox& outbox() noexcept { return outbox_; }
  server::Server& server() noexcept { return server_; }
  Host& host() noexcept { return host_; }
  /// One of its pending parts: the operation ends with settle() where that was the last one.
  void part_done(OperationRun& run);
  /// Ends it, now: not from inside a call into one of its roles.
  void finish(OperationRun& run, core::Status status, int source_rank = -1);
  /// All that `run` still waits for is to know that everybody has its results, and these are few enough to be copied.
  bool may_leave(const OperationRun& run) const noexcept;
  /// These are few, and the group has room for them.
  bool may_retain(const OperationRun& run) const noexcept;
  /// What it has retained is not needed any more.
  void drop_retained(OperationRun& run);
  void drop_retained(GroupState& group);
  /// `run` failed here first: tells the members, then fails it.
  void fail(OperationRun& run, core::Status cause);
  void mismatch(const OperationRun& run, const server::RankCall& theirs);
  /// Fails the group with the verdict, with settle().
  void on_group_fault(const GroupState& group, core::Status verdict) {
    events_.push_back({nullptr, group.info.uid, std::move(verdict)});
  }
  /// What a lost dedicated server held of it cannot be had again.
  void on_failover_impossible(const OperationRun& run, int server);
  void settle_owed(OperationRun& run, const std::vector<schedule::Span>& plan);
  /// Registers and starts a run whose spans are made by `plan`.
  void launch(OperationRun& run, const std::vector<schedule::Span>& plan);
  void track(OperationRun& run);
  /// A collective that had to wait for a plan version.
  void start_unfrozen(GroupState& group, std::uint64_t sequence);
  /// A contribution has left: others of the operation may follow, in the next tick().
  void pace_soon(OperationRun& run);
  /// Of chunks that this engine fetches from its node as an agent.
  flow::GrantQueue& local_grants() noexcept { return local_grants_; }
  CodecCounts& codec_counts() noexcept { return codec_counts_; }
  /// For `bytes`, until the next call.
  std::byte* scratch(std::size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  }
  /// Whether one more message that nothing here waits for yet may be kept; else the group is about to fail.
  bool can_keep(GroupState& group, std::size_t kept, const wire::Message& message);
  std::string describe(const OperationRun& run) const;

 private:
  /// A call from outside: the outermost one settles.
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
  /// How it writes slots for other ranks of the node (schedule/stores.h).
  void choose_stores(OperationRun& run);
  /// Of an operation whose memory is coded: kInvalidArgument says what of it cannot be so.
  core::Status check_coded(const OperationRun& run) const;
  /// Ends one that was never taken up.
  void refuse(OperationRun& run, const core::Status& status);
  void pace(OperationRun& run);
  void handle(GroupState& group, const wire::Message& message, flow::Delivery payload);
  void on_chunk(GroupState& group, const wire::Message& message, const wire::ChunkId& chunk, flow::Delivery payload);
  /// What callbacks have found, in their order: operations that are done end, verdicts fail groups. Every call into the
  /// Worker ends with it, so that no operation ends inside a callback. Returns what it did.
  std::size_t settle() { return events_.empty() ? 0 : settle_events(); }
  std::size_t settle_events();
  void start_barriers(GroupState& group);
  bool is_oldest(const GroupState& group, std::uint64_t sequence) const;
  void dispatch(OperationRun& run, const wire::Message& message, flow::Delivery payload);
  void on_verdict(GroupState& group, const wire::From& from, const wire::Verdict& verdict,
                  const flow::Delivery& payload);
  void probe(OperationRun& run, core::TimePoint now);
  void on_probe(GroupState& group, const wire::From& from, const wire::Probe& probe);
  static void on_probe_reply(GroupState& group, const wire::From& from, const wire::ProbeReply& reply);
  void count(const OperationRun& run, const core::Status& status);
  void trace(const OperationRun& run, observe::EventType type, bool failed);
  bool contradicts_finished(const GroupState& group, std::uint64_t sequence, const server::RankCall& theirs);
  void see_local(OperationRun& run, const wire::ChunkId& chunk);
  static bool has_issued(const GroupState& group, int rank, std::uint64_t sequence);
  /// Who has not issued the operation. None of whom nobody knows: before a rank had time to answer a probe, it is not to be
  /// named.
  std::vector<int> missing_ranks(const OperationRun& run) const;
  std::string last_known(const GroupState& group, int rank) const;
  std::string standing(const OperationRun& run) const;
  /// The status that the caller gets: who, which operation, how it stood, what to do.
  core::Status in_full(const OperationRun& run, const core::Status& status) const;
  void watch(core::TimePoint now);
  void watch(GroupState& group, core::TimePoint now, std::set<core::GroupUid>& waiting);
  void watch_peers(core::TimePoint now, std::set<core::GroupUid>& waiting);
  void expire(OperationRun& run);
  /// `servers`: dedicated ones, too.
  void tell_members(GroupState& group, const wire::Body& body, std::string_view text, bool servers);

  static constexpr auto kWatchEvery = std::chrono::milliseconds(100);

  core::OneThread one_thread_;
  flow::Outbox& outbox_;
  server::Server& server_;
  Host& host_;
  const WorkerOptions options_;
  CodecCounts codec_counts_;
  OperationCounts counts_;
  core::TimePoint now_{};  // of the last tick()
  std::vector<std::byte> scratch_;
  flow::GrantQueue local_grants_;
  std::unordered_map<core::GroupUid, std::unique_ptr<GroupState>> groups_;
  Expiries deadlines_;
  std::set<OperationRun*> tracked_;
  std::vector<OperationRun*> pacing_;  // those with pace_due
  struct Settlement {                  // for settle()
    OperationRun* done = nullptr;
    core::GroupUid uid;  // of the group that fails, where nothing is done
    core::Status verdict;
  };
  std::deque<Settlement> events_;
  std::size_t entered_ = 0;  // calls from outside under way, one inside another
  core::TimePoint next_watch_;
  core::TimePoint next_peers_watch_;
  std::size_t active_ = 0;
  std::uint64_t finished_count_ = 0;
  std::uint64_t tuner_trials_ = 0;
  std::uint64_t tuner_kept_ = 0;
};

}  // namespace hybridps::worker
