// hybridps/bootstrap/rendezvous.h: the members of a group find each other, agree on one roster, and prove nodes.
//
//   member r                        store                         group rank 0
//   publish rec/<r> ---------------> rec/<r> --------------------> collect all, map nodes
//   read, find itself <------------- roster/<nonce>, head <------- propose
//   prove shared memory, confirm --> ack/<nonce>/<r> ------------> all ok: head says valid; else propose again
//   ready <------------------------- head (valid)
//
// A roster is proposed again, under a new nonce, when a member finds a record of an earlier life in its place
// ("stale": the leader reads that record again) or could not prove shared memory with members of its candidate
// node ("unproven": these pairs never share a node again). Nobody is ready before all have confirmed one roster.
//
// Threads  one thread at a time calls step(); hooks run inside it. No thread of its own, no waiting, no clock.
// Members  who names other members than the others (MemberRecord::members) is told so at once, with both lists, and so are they,
//          unless they are ready already. Rank 0 compares all records, each member those at its own place and at rank 0's.
// Cost     a member: 5 store calls (of a group that names its members 2 more) and its polls (one small key each); rank 0: n records, n acks and its polls, in
//          batches of at most kBatch per step.
// Failure  whoever finds an error writes `failed`, also who could not even make a record (announce_failure()); all
//          raise its text. One that was there before we first looked, does not name our engine and is older than this
//          process by the wall clock may be of an earlier life: others believe it after kForeignGrace; rank 0 clears
//          it, and believes it after kForeignGrace if its writer's record is then still the same, or if it had none and has
//          none: nobody has come in its place. A member that the process knows to be gone, from another group or because
//          it has met it itself, is waited for by nobody: unless the group is valid already, it ends.
// Trust    what does not decode, or is of another incarnation, is skipped, and named if we time out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/bootstrap/departures.h"
#include "hybridps/bootstrap/key_value.h"
#include "hybridps/bootstrap/record.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::bootstrap {

/// What a member's prove hook found out about its candidate node.
struct MemoryProof {
  enum class ProofResult { kPending, kOk, kUnproven, kFailed };
  ProofResult state = ProofResult::kPending;
  std::vector<int> unproven;  // kUnproven: group ranks of this member's node in the roster, never itself
  core::Status status;        // kFailed: ends the rendezvous for all members

  static MemoryProof pending() { return {}; }
  static MemoryProof ok() { return {ProofResult::kOk, {}, {}}; }
  static MemoryProof unproven_with(std::vector<int> ranks) { return {ProofResult::kUnproven, std::move(ranks), {}}; }
  static MemoryProof failed(core::Status status) { return {ProofResult::kFailed, {}, std::move(status)}; }
};

/// Who is to be at a rank, where the caller has said who is in the group.
struct ExpectedMember {
  core::EngineId engine;
  std::string where;  // "host-b pid 812"
};

struct RendezvousOptions {
  std::string group_name;  // for messages
  std::string key_prefix;  // group_key_prefix()
  MemberRecord self;       // group_rank and group_size say who we are
  core::Deadline deadline;
  /// Milliseconds since 1970, as announce_failure() takes them: now, and when this process began. A failure that was
  /// written since then is of this life. Unset, 0: not known.
  std::function<std::uint64_t()> wall_ms;
  std::uint64_t process_started_ms = 0;
  /// Called on each step until it is not pending, then not again for this roster. A roster of another nonce
  /// supersedes: what was set up for the former one is to be dropped. Unset: every candidate node is believed.
  std::function<MemoryProof(const Roster&)> prove;
  bool names_servers = false;  // rank 0 only: Roster::names_servers
  /// By group rank, where the caller has named this life of the group and all who are in it: then nothing under its keys is of
  /// an earlier life, and what is published there by others, or for another group, ends it for all at once. Else empty.
  std::vector<ExpectedMember> expected;
  std::string life;  // for messages, with `expected`: "uuid 17"
  /// By group rank, where nobody has named the members: who this process takes for them since it knows them from another group;
  /// engine 0: it does not know. Only for telling that one of them will not come. Empty: none is known.
  std::vector<ExpectedMember> presumed;
  /// Of processes that this one has found gone. With one of them there is no group: ends it for all members. Unset: none.
  std::shared_ptr<const Departures> departures;
  /// Of keys under which the members of all lives of the group say which one they are in, for the message of one who waits in
  /// vain for somebody in another. Empty: nobody says.
  std::string lives_prefix;
  /// A line about what is being waited for: after 10 s, then every 10 s.
  std::function<void(std::string_view)> progress;
};

/// For a member that has failed before it could join, with neither engine nor record: the others raise this. What
/// another member has written since `process_started_ms` stays.
core::Status announce_failure(KeyValueStore& store, std::string_view key_prefix, int rank, const core::Status& failure,
                              std::uint64_t wall_ms, std::uint64_t process_started_ms);

class Rendezvous : core::Pinned {
 public:
  enum class RendezvousPhase { kPending, kReady, kFailed };

  Rendezvous(std::shared_ptr<KeyValueStore> store, RendezvousOptions options);

  /// Does what can be done now. Calls before next_step() cost nothing, except that a pending proof is asked again.
  RendezvousPhase step(core::TimePoint now);
  /// When to call step() again: for the store, or for a pending proof.
  core::TimePoint next_step() const noexcept;
  RendezvousPhase phase() const noexcept { return phase_; }

  /// Once ready: the roster that every member has confirmed.
  const Roster& roster() const noexcept { return roster_; }
  /// Once failed: the same text on every member that could be told.
  const core::Status& status() const noexcept { return status_; }

  /// Ends it for all members (abort, a transport that cannot open). No effect once ready or failed.
  void fail(core::Status status);

  /// Whom this member waits for and is to ask whether they live, of those that it can name: rank 0 those who are late; of the
  /// others few look after rank 0, for it need not be asked by all.
  std::vector<core::EngineId> awaited() const;

  /// "waiting for ranks [2, 3] (none of 2 published a record)".
  std::string unconfirmed_text(const std::vector<int>& ranks) const;
  std::string waiting_for() const;
  /// The same, after a look into the store where this member cannot know; may end the rendezvous, if the store fails.
  std::string find_missing();

  static constexpr int kBatch = 64;
  static constexpr core::Duration kForeignGrace = std::chrono::seconds(60);

 private:
  /// A member looks for `failed` in one of so many polls.
  static constexpr std::uint64_t kPollsPerFailedLook = 4;
  enum class RosterAck : std::uint8_t { kNone = 0, kOk = 1, kStale = 2, kUnproven = 3 };
  using EnginePair = std::pair<std::uint64_t, std::uint64_t>;  // ordered

  bool is_leader() const noexcept { return self_rank() == 0; }
  int self_rank() const noexcept { return options_.self.group_rank; }
  int size() const noexcept { return options_.self.group_size; }
  std::string key(std::string_view suffix) const;
  std::string record_key(int rank) const;
  std::string roster_key(std::uint64_t nonce) const;
  std::string ack_key(std::uint64_t nonce, int rank) const;

  // Those that return bool say whether anything moved. All end the rendezvous on errors.
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
  bool take_roster(std::uint64_t nonce, const Bytes& bytes);
  bool is_named() const noexcept { return !options_.expected.empty(); }
  /// Whose record lies at a rank where another was expected: ends it.
  void end_taken(int rank, const Bytes& bytes);
  /// That the two name different members, in words; empty: they do not.
  std::string disagreement(const MemberRecord& other) const;
  /// By the wall clock: an earlier life may have had other members.
  bool is_of_this_life(const MemberRecord& other) const;
  /// Whether it ended.
  bool end_if_disagrees(const MemberRecord& other);
  /// The same with whose records lie at our place and at rank 0's.
  void find_other_lists();
  /// Whether it ended, since a process that was given up has come.
  bool refuses(const MemberRecord& member);
  /// Ends it if one who is to come is gone.
  void find_gone(core::TimePoint now);
  void end_without(const std::string& who, const core::Status& why);
  /// Who is at a rank, as far as it is known; engine 0: it is not.
  ExpectedMember member_at(int rank) const;
  std::string absent_text(const std::vector<int>& absent) const;
  /// What absent ranks have last said of the life that they are in, if it is another.
  std::string other_lives(const std::vector<int>& absent);
  std::string life_key(int rank) const;
  bool ask_proof();
  void acknowledge(RosterAck ack, const std::vector<int>& unproven);
  void add_unproven(int rank, const std::vector<int>& others);
  Roster make_roster() const;
  std::vector<int> map_nodes() const;

  void put(const std::string& name, std::span<const std::uint8_t> value);
  std::optional<Bytes> get(const std::string& name);
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
  core::TimePoint started_at_{};
  core::TimePoint last_step_{};
  core::TimePoint next_poll_{};
  core::TimePoint next_progress_{};
  core::Duration pace_{};
  std::uint64_t polls_ = 0;
  std::uint64_t departures_seen_ = 0;

  // The roster in hand: proposed by us (leader) or read (member).
  Roster roster_;
  std::uint64_t nonce_ = 0;  // of the last roster looked at, ours or not
  bool proving_ = false;
  RosterAck own_ack_ = RosterAck::kNone;
  std::string note_;  // an oddity worth telling if we time out

  // `failed` as first seen.
  bool failed_looked_ = false;
  std::optional<Bytes> failed_first_;

  // Leader only.
  std::optional<Bytes> cleared_failed_;  // what it found under `failed` and cleared

  // Leader only, by rank.
  bool gathering_ = false;
  std::vector<std::optional<MemberRecord>> records_;
  std::vector<core::EngineId> rejected_;  // stale: a record of this engine is not taken again
  std::vector<RosterAck> acks_;
  std::set<EnginePair> unproven_;
  int cursor_ = 0;  // where the next batch starts
  core::TimePoint propose_not_before_{};
  core::Duration propose_pace_{};
};

}  // namespace hybridps::bootstrap
