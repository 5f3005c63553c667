// hybridps/bootstrap/rendezvous.h: the members of a group find each other, agree on one roster, and prove nodes.
//
//   member r                        store                         group rank 0
//   publish rec/<r> ---------------> rec/<r> --------------------> collect all, map nodes
//   read, find itself <------------- roster/<nonce>, head <------- propose
//   prove shared memory, confirm --> ack/<nonce>/<r> ------------> all ok: head says valid, and the regions
//   (with round trips)                                             not ok: propose again
//   ready <------------------------- head (valid)
//
// Rank 0 proposes a new roster, with a new nonce, in two cases. "stale": a member finds a record of an earlier life in
// its place, so rank 0 reads that record again. "unproven": a member could not prove shared memory with members of its
// candidate node, so these pairs never share a node again. No member is ready before all have confirmed one roster.
//
// Threads  one thread at a time calls step(); hooks run inside step(). No thread of its own, no waiting, no clock.
// Members  members may name different members for the group (MemberRecord::members). Then both sides get an error at
//          once, with both lists, unless the side is ready already. Rank 0 compares all records. Each other member
//          compares the record at its own place, and `list`, which is rank 0's record without addresses.
// Cost     a member: 4 store requests and its polls (one small key each), which are rarer in larger groups. Rank 0: n
//          records, n acks and its polls, in batches of at most kBatch per step, or kBatchMax where all are there.
// Failure  a member that finds an error writes `failed`, even a member that could not make a record
//          (announce_failure()). All members raise the text of `failed`. A failure may be of an earlier life if it was
//          there before our first look, does not name our engine, and is older than this process by the wall clock.
//          Other ranks believe such a failure after kForeignGrace. Rank 0 clears such a failure, and believes the
//          failure after kForeignGrace if nobody has come in the writer's place: the writer's record is still the same,
//          or the writer had no record and still has none that is newer than the failure (by the clocks of its hosts).
//          The process may know that a member is gone, from another group or from this one. Nobody waits for such a
//          member: the rendezvous ends, unless the group is valid already.
// Trust    a value that does not decode, or is of another incarnation, is skipped. A timeout's message names such a
//          value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/bootstrap/departures.h"
#include "hybridps/bootstrap/key_value.h"
#include "hybridps/bootstrap/node_shelf.h"
#include "hybridps/bootstrap/record.h"
#include "hybridps/bootstrap/store_notes.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::bootstrap {

/// The result of a member's prove hook for its candidate node, and what it has measured.
struct MemoryProof {
  enum class ProofResult { kPending, kOk, kUnproven, kFailed };
  ProofResult state = ProofResult::kPending;
  std::vector<int> unproven;  // kUnproven: group ranks of this member's node in the roster, never the member itself
  core::Status status;        // kFailed: ends the rendezvous for all members
  /// kOk, from the first rank of a node: microseconds to each node; 0: not known. Empty: not measured.
  std::vector<std::uint32_t> round_trips;

  static MemoryProof pending() { return {}; }
  static MemoryProof ok(std::vector<std::uint32_t> round_trips = {}) {
    return {ProofResult::kOk, {}, {}, std::move(round_trips)};
  }
  static MemoryProof unproven_with(std::vector<int> ranks) {
    return {ProofResult::kUnproven, std::move(ranks), {}, {}};
  }
  static MemoryProof failed(core::Status status) { return {ProofResult::kFailed, {}, std::move(status), {}}; }
};

/// The process that should be at a rank, if the caller has named the group's members.
struct ExpectedMember {
  core::EngineId engine;
  std::string where;  // "host-b pid 812"
};

struct RendezvousOptions {
  std::string group_name;  // for messages
  std::string key_prefix;  // group_key_prefix()
  MemberRecord self;       // group_rank and group_size are this member's
  core::Deadline deadline;
  /// Times in milliseconds since 1970, as for announce_failure(): now, and this process's start. A failure written
  /// since the start is of this life. Unset or 0: not known.
  std::function<std::uint64_t()> wall_ms;
  std::uint64_t process_started_ms = 0;
  /// Called on each step until the result is not pending, then not again for this roster. A roster with another nonce
  /// replaces the former roster: the hook drops everything set up for the former roster. Unset: every candidate node is
  /// believed.
  std::function<MemoryProof(const Roster&)> prove;
  bool names_servers = false;  // rank 0 only: Roster::names_servers
  /// Rank 0 only: Roster::region_of, from what each node has measured to each (MemoryProof::round_trips). Unset: none.
  std::function<std::vector<int>(const std::vector<std::vector<std::uint32_t>>&)> find_regions;
  /// By group rank, if the caller has named this life of the group and all its members; else empty. If set, no value
  /// under the group's keys is of an earlier life. A value from other processes, or for another group, ends the
  /// rendezvous for all members at once.
  std::vector<ExpectedMember> expected;
  std::string life;  // for messages, with `expected`: "uuid 17"
  /// By group rank, if nobody has named the members: the processes that this process presumes, from another group.
  /// Engine 0: not known. Used only to report that a member will not come. Empty: no member is known.
  std::vector<ExpectedMember> presumed;
  /// The processes that this process has found gone. If a member is gone, the rendezvous ends for all members. Unset:
  /// none.
  std::shared_ptr<const Departures> departures;
  /// Where members of a node hand a roster on, which one of them has read. Unset: each member reads the store.
  std::shared_ptr<NodeShelf> shelf;
  /// Prefix of keys under which members of all lives of the group publish their current life. Used in the message when
  /// a member waits in vain for members of another life. Empty: nobody publishes.
  std::string lives_prefix;
  /// Gets a line about what this member waits for, after 10 s and then every 10 s.
  std::function<void(std::string_view)> progress;
};

/// For a member that has failed before it could join, and has neither engine nor record. The other members raise
/// `failure`. A failure that another member has written since `process_started_ms` stays.
core::Status announce_failure(KeyValueStore& store, std::string_view key_prefix, int rank, const core::Status& failure,
                              std::uint64_t wall_ms, std::uint64_t process_started_ms);

class Rendezvous : core::Pinned {
 public:
  enum class RendezvousPhase { kPending, kReady, kFailed };

  Rendezvous(std::shared_ptr<KeyValueStore> store, RendezvousOptions options);
  ~Rendezvous();

  /// Does the work that is possible now. Calls before next_step() cost nothing, but ask a pending proof again.
  RendezvousPhase step(core::TimePoint now);
  /// When to call step() again, for the store or for a pending proof.
  core::TimePoint next_step() const noexcept;
  RendezvousPhase phase() const noexcept { return phase_; }

  /// When ready: the roster that every member has confirmed.
  const Roster& roster() const noexcept { return roster_; }
  /// When failed: the same text on every member that could be told.
  const core::Status& status() const noexcept { return status_; }

  /// Ends the rendezvous for all members (abort, a transport that cannot open). No effect when ready or failed.
  void fail(core::Status status);

  /// Engines of the members that this member waits for and must check for life, as far as known. Rank 0 checks all late
  /// members. Only a few of the other members check rank 0, to spare rank 0.
  std::vector<core::EngineId> awaited() const;

  /// "waiting for ranks [2, 3] (none of 2 published a record)".
  std::string unconfirmed_text(const std::vector<int>& ranks) const;
  std::string waiting_for() const;
  /// As waiting_for(), after a look into the store where this member cannot know. A store error may end the rendezvous.
  std::string find_missing();

  static constexpr int kBatch = 64;
  static constexpr int kBatchMax = 1024;
  /// How long a member waits for another member of its node to read the roster.
  static constexpr core::Duration kShelfPatience = std::chrono::seconds(2);
  static constexpr core::Duration kShelfPatiencePerRank = std::chrono::milliseconds(1);
  static constexpr core::Duration kForeignGrace = std::chrono::seconds(60);

 private:
  /// A member looks for `failed` once in this many polls.
  static constexpr std::uint64_t kPollsPerFailedLook = 4;
  enum class RosterAck : std::uint8_t { kNone = 0, kOk = 1, kStale = 2, kUnproven = 3 };
  using EnginePair = std::pair<std::uint64_t, std::uint64_t>;  // ordered: the smaller value first

  bool is_leader() const noexcept { return self_rank() == 0; }
  int self_rank() const noexcept { return options_.self.group_rank; }
  int size() const noexcept { return options_.self.group_size; }
  std::string key(std::string_view suffix) const;
  std::string record_key(int rank) const;
  std::string roster_key(std::uint64_t nonce, int part) const;
  std::string ack_key(std::uint64_t nonce, int rank) const;

  // The bool results say whether anything moved. All these functions end the rendezvous on errors.
  void start(core::TimePoint now);
  bool poll(core::TimePoint now);
  core::Duration pace_min() const noexcept;
  core::Duration pace_max(core::Duration age) const noexcept;
  bool watch_failed(core::TimePoint now);
  bool lead(core::TimePoint now);
  bool collect();
  bool take_record(int rank, const Bytes& bytes);
  bool propose(core::TimePoint now);
  bool gather(core::TimePoint now);
  bool take_ack(int rank, const Bytes& bytes);
  bool follow();
  /// The roster that `head` names, from the node's shelf or from the store. Nothing: it is not there yet.
  std::optional<core::Result<Roster>> find_roster(const Head& head);
  bool take_roster(std::uint64_t nonce, core::Result<Roster> decoded);
  NodeShelf::ShelfClaim claim_shelf(std::uint64_t nonce);
  bool is_named() const noexcept { return !options_.expected.empty(); }
  /// Ends the rendezvous: another process's record lies at `rank`.
  void end_taken(int rank, const Bytes& bytes);
  /// Says in words that this member and `other` name different members. Empty: they name the same.
  std::string disagreement(const MemberRecord& other) const;
  /// By incarnation and wall clock. An earlier life may have had other members.
  bool is_of_this_life(const MemberRecord& other) const;
  /// Ends the rendezvous if the lists differ in this life. Returns whether the rendezvous ended.
  bool end_if_disagrees(const MemberRecord& other);
  /// Calls end_if_disagrees() for the records at our place and at rank 0's place.
  void find_other_lists();
  std::vector<std::string> other_list_keys() const;
  /// Whether this look at `failed` also looks at lists.
  bool looks_at_lists() const noexcept;
  /// Ends the rendezvous if `member` was given up before. Returns whether the rendezvous ended.
  bool refuses(const MemberRecord& member);
  /// Ends the rendezvous if an expected member is gone.
  void find_gone(core::TimePoint now);
  void end_without(const std::string& who, const core::Status& why);
  /// The process at a rank, as far as known; engine 0: not known.
  ExpectedMember member_at(int rank) const;
  std::string absent_text(const std::vector<int>& absent) const;
  /// Of the first kBatch ranks, from `first` on, those whose key the store does not have.
  std::vector<int> absent_keys(int first, const std::function<std::string(int)>& key_of);
  /// The lives that absent ranks have published last, if they differ from ours.
  std::string other_lives(const std::vector<int>& absent);
  std::string life_key(int rank) const;
  bool ask_proof();
  void acknowledge(RosterAck ack, const std::vector<int>& unproven, std::vector<std::uint32_t> round_trips = {});
  void take_round_trips(int rank, std::vector<std::uint32_t> round_trips);
  void add_unproven(int rank, const std::vector<int>& others);
  Roster make_roster() const;
  std::vector<int> map_nodes() const;

  void put(const std::string& name, std::span<const std::uint8_t> value);
  void put_each(const std::vector<KeyAndValue>& values);
  /// What fetch() has brought in this step, once; else what the store holds.
  std::optional<Bytes> get(const std::string& name);
  /// The bytes of the roster that `head` names.
  std::optional<Bytes> get_roster(const Head& head);
  /// Asks for several values in one request.
  void fetch(const std::vector<std::string>& names);
  void end_refused(const std::string& name, const core::Status& status);
  /// Fetches the keys of the next ranks that are wanted, batch_ at most, from cursor_ on. `take` gets what is there,
  /// and says whether anything moved. So does the result.
  bool take_batch(const std::function<bool(int)>& is_wanted, const std::function<std::string(int)>& key_of,
                  const std::function<bool(int, const Bytes&)>& take);
  std::optional<core::Status> believed_failure(const std::optional<Bytes>& bytes, bool grace_is_over) const;
  std::optional<core::Status> unreplaced_failure();
  void report_progress(core::TimePoint now);
  void time_out(core::TimePoint now);
  void end(core::Status status, bool tell_others);

  const std::shared_ptr<KeyValueStore> store_;
  const RendezvousOptions options_;
  RendezvousPhase phase_ = RendezvousPhase::kPending;
  core::Status status_;

  // Pace.
  bool started_ = false;
  bool published_ = false;
  core::TimePoint started_at_{};
  core::TimePoint last_step_{};
  core::TimePoint next_poll_{};
  core::TimePoint next_progress_{};
  core::Duration pace_{};
  std::uint64_t polls_ = 0;
  std::uint64_t departures_seen_ = 0;

  std::map<std::string, std::optional<Bytes>> fetched_;  // by fetch(), not yet used; in a step only

  // The current roster: proposed by us (leader) or read (other members).
  Roster roster_;
  std::uint64_t nonce_ = 0;  // of the last roster looked at, ours or another
  bool proving_ = false;
  RosterAck own_ack_ = RosterAck::kNone;
  std::string note_;  // an oddity that a timeout's message reports

  // The node's shelf.
  std::optional<Head> shelved_;  // the head whose roster another member of the node reads
  core::TimePoint shelved_since_{};
  core::TimePoint next_look_{};  // while shelved_: the store is polled at its own pace
  std::uint64_t claimed_ = 0;    // the roster that we are to put there; 0: none

  // `failed` at our first look.
  bool failed_looked_ = false;
  std::optional<Bytes> failed_first_;

  // Leader only.
  std::optional<Bytes> cleared_failed_;  // the value that rank 0 found under `failed` and cleared

  // Leader only, by rank.
  bool gathering_ = false;
  int parts_ = 1;  // of the proposed roster
  Bytes digest_;   // of the proposed roster, with a shelf
  std::vector<std::optional<MemberRecord>> records_;
  std::vector<core::EngineId> rejected_;  // stale: a record of this engine is not taken again
  std::vector<RosterAck> acks_;
  std::vector<std::vector<std::uint32_t>> round_trips_;  // by node
  std::set<EnginePair> unproven_;
  int cursor_ = 0;      // where the next batch starts
  int batch_ = kBatch;  // larger as long as everything is there
  core::TimePoint propose_not_before_{};
  core::Duration propose_pace_{};
};

}  // namespace hybridps::bootstrap
