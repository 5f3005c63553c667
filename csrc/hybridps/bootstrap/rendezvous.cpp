#include "hybridps/bootstrap/rendezvous.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <limits>
#include <map>

#include "hybridps/bootstrap/bytes.h"
#include "hybridps/bootstrap/store_notes.h"
#include "hybridps/core/text.h"

namespace hybridps::bootstrap {
namespace {

using core::Code;
using core::Duration;
using core::Status;
using core::TimePoint;
using std::chrono::milliseconds;
using std::chrono::seconds;

// The pace after a poll that found something: the next change is then probably near.
constexpr Duration kPaceMin = std::chrono::microseconds(200);
constexpr Duration kPaceMinPerRank = std::chrono::microseconds(25);
constexpr Duration kPaceMinMax = milliseconds(1);
constexpr Duration kPaceMinMaxOfMany = milliseconds(100);
// The longest pace. Many members poll more rarely: all together ask the store's host 10,000 times a second.
constexpr Duration kPaceMaxEarly = milliseconds(2);
constexpr Duration kPaceMaxEarlyPerRank = std::chrono::microseconds(250);
constexpr Duration kPaceMaxPerRank = std::chrono::microseconds(100);
constexpr Duration kPaceMaxOfMany = seconds(1);
constexpr Duration kEarly = milliseconds(500);
constexpr Duration kPaceMax = milliseconds(20);
constexpr Duration kPaceMaxLate = milliseconds(50);
constexpr Duration kLateAfter = seconds(5);
constexpr Duration kShelfPace = milliseconds(1);
constexpr Duration kProgressInterval = seconds(10);
constexpr Duration kProposePaceMin = milliseconds(20);
constexpr Duration kProposePaceMax = seconds(1);

std::string version_text(const BlobVersion& version) {
  return "protocol " + std::to_string(version.protocol_version) + " build " + core::quoted(version.build);
}

/// A value of torch's Store has 8 MiB at most, and the store's host keeps a large one several times while it sends.
std::vector<Bytes> in_parts(const Bytes& bytes) {
  constexpr std::size_t kPartBytesMax = (std::size_t{1} << 20) - 64;  // with its seal 1 MiB at most
  std::vector<Bytes> parts;
  for (std::size_t at = 0; at < bytes.size(); at += kPartBytesMax) {
    const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    parts.emplace_back(from, from + static_cast<std::ptrdiff_t>(std::min(kPartBytesMax, bytes.size() - at)));
  }
  return parts;
}

/// Ordered, so that (a, b) and (b, a) are one pair.
std::pair<std::uint64_t, std::uint64_t> pair_of(core::EngineId a, core::EngineId b) {
  return std::minmax(a.value, b.value);
}

}  // namespace

Rendezvous::Rendezvous(std::shared_ptr<KeyValueStore> store, RendezvousOptions options)
    : store_(std::move(store)), options_(std::move(options)) {
  if (is_leader() && size() > 1) {
    const auto count = static_cast<std::size_t>(size());
    records_.resize(count);
    rejected_.resize(count);
    acks_.resize(count);
  }
}

Rendezvous::~Rendezvous() {
  if (claimed_ != 0) options_.shelf->clear(claimed_);
}

Rendezvous::RendezvousPhase Rendezvous::step(TimePoint now) {
  if (phase_ != RendezvousPhase::kPending) return phase_;
  if (!started_) start(now);
  last_step_ = now;
  if (claimed_ != 0) options_.shelf->serve();
  if (phase_ == RendezvousPhase::kPending && proving_ && ask_proof()) next_poll_ = now;
  if (phase_ == RendezvousPhase::kPending) find_gone(now);
  if (phase_ == RendezvousPhase::kPending && shelved_ && now >= next_look_ && follow()) {
    pace_ = pace_min();
    next_poll_ = now + pace_;
  }
  const bool is_late = options_.deadline.has_passed(now);
  if (phase_ == RendezvousPhase::kPending && (now >= next_poll_ || is_late)) {
    pace_ = poll(now) ? pace_min() : std::min(pace_ * 3 / 2, pace_max(now - started_at_));
    next_poll_ = now + pace_;
  }
  if (phase_ == RendezvousPhase::kPending && is_late) time_out(now);
  if (phase_ == RendezvousPhase::kPending && now >= next_progress_) report_progress(now);
  fetched_.clear();
  return phase_;
}

Duration Rendezvous::pace_min() const noexcept {
  return std::clamp(kPaceMinPerRank * size(), kPaceMin, is_leader() ? kPaceMinMax : kPaceMinMaxOfMany);
}

Duration Rendezvous::pace_max(Duration age) const noexcept {
  const Duration share = is_leader() ? Duration(0) : std::min(kPaceMaxPerRank * size(), kPaceMaxOfMany);
  if (age >= kLateAfter) return std::max(share, kPaceMaxLate);
  if (age >= kEarly) return std::max(share, kPaceMax);
  return std::max(share, std::clamp(kPaceMaxEarlyPerRank * size(), kPaceMaxEarly, kPaceMax));
}

TimePoint Rendezvous::next_step() const noexcept {
  TimePoint next = next_poll_;
  if (proving_) next = std::min(next, last_step_ + pace_min());
  if (shelved_) next = std::min(next, next_look_);
  if (claimed_ != 0)
    next = std::min(next, last_step_ + (last_step_ - shelved_since_ < kLateAfter ? kShelfPace : kPaceMax));
  return next;
}

ExpectedMember Rendezvous::member_at(int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  const auto of = [](const MemberRecord& record) { return ExpectedMember{record.engine, describe(record)}; };
  if (at < records_.size() && records_[at]) return of(*records_[at]);
  if (at < roster_.members.size() && own_ack_ != RosterAck::kStale) return of(roster_.members[at]);
  for (const auto* known : {&options_.expected, &options_.presumed})
    if (at < known->size() && (*known)[at].engine.value != 0)
      return {(*known)[at].engine, "rank " + std::to_string(rank) + " (" + (*known)[at].where + ")"};
  return {};
}

std::vector<core::EngineId> Rendezvous::awaited() const {
  std::vector<core::EngineId> engines;
  const auto add = [&](int rank) {
    if (const core::EngineId engine = member_at(rank).engine; engine.value != 0) engines.push_back(engine);
  };
  if (phase_ != RendezvousPhase::kPending || size() == 1) return engines;
  if (!is_leader()) {
    if ((self_rank() & (self_rank() - 1)) == 0) add(0);
    return engines;
  }
  for (int rank = 1; rank < size(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    if (gathering_ ? acks_[at] == RosterAck::kNone : !records_[at].has_value()) add(rank);
  }
  return engines;
}

void Rendezvous::fail(Status status) {
  if (phase_ == RendezvousPhase::kPending) end(std::move(status), true);
}

void Rendezvous::start(TimePoint now) {
  started_ = true;
  started_at_ = now;
  next_poll_ = now;
  next_progress_ = now + kProgressInterval;
  pace_ = pace_min();
  const core::Result<Bytes> own = encode(options_.self);
  if (!own.is_ok()) return end(own.status(), size() > 1);
  if (size() > 1) {
    std::vector<std::string> names = other_list_keys();
    if (names.empty() && is_named()) names.push_back(record_key(self_rank()));
    names.push_back(key("failed"));
    if (!is_leader()) names.push_back(key("head"));
    fetch(names);
  }
  if (phase_ == RendezvousPhase::kPending && size() > 1 && is_named()) {
    // A foreign record is from another use of the name. Never overwrite a foreign record.
    const std::optional<Bytes> there = get(record_key(self_rank()));
    if (there && *there != own.value()) end_taken(self_rank(), *there);
  }
  if (phase_ == RendezvousPhase::kPending) find_other_lists();
  if (phase_ != RendezvousPhase::kPending) return;
  if (size() > 1) {
    std::vector<KeyAndValue> values;
    const std::string& life = options_.self.incarnation;
    if (!options_.lives_prefix.empty()) values.push_back({life_key(self_rank()), Bytes(life.begin(), life.end())});
    values.push_back({record_key(self_rank()), own.value()});
    if (is_leader() && !options_.self.members.empty()) {
      MemberRecord list = options_.self;
      list.node_identity = "-";
      for (Bytes* address : {&list.shm_address, &list.data_address, &list.control_address}) address->clear();
      list.nics.clear();
      list.control = {};
      for (std::string* text : {&list.region, &list.compress, &list.priority, &list.loopback, &list.notes})
        text->clear();
      const core::Result<Bytes> bytes = encode(list);
      if (!bytes.is_ok()) return end(bytes.status(), true);
      values.push_back({key("list"), bytes.value()});
    }
    published_ = true;
    return put_each(values);
  }
  records_.assign(1, options_.self);  // a group of one rank uses no store, but makes the same proof
  roster_ = make_roster();
  proving_ = true;
}

bool Rendezvous::poll(TimePoint now) {
  if (size() == 1) {
    if (own_ack_ == RosterAck::kOk) phase_ = RendezvousPhase::kReady;
    return false;
  }
  bool moved = false;
  const bool watches = polls_++ % kPollsPerFailedLook == 0;
  if (watches && polls_ > 1) {  // start() has fetched them for the first poll
    std::vector<std::string> names{key("failed")};
    if (!is_leader() && !shelved_) names.push_back(key("head"));
    if (looks_at_lists()) {
      const std::vector<std::string> lists = other_list_keys();
      names.insert(names.end(), lists.begin(), lists.end());
    }
    fetch(names);
    if (phase_ != RendezvousPhase::kPending) return true;
  }
  if (watches) moved = watch_failed(now);
  if (phase_ == RendezvousPhase::kPending && (is_leader() ? lead(now) : !shelved_ && follow())) moved = true;
  return moved;
}

// ---- group rank 0

bool Rendezvous::lead(TimePoint now) {
  bool moved = false;
  if (!gathering_) {
    moved = collect();
    const bool all =
        std::all_of(records_.begin(), records_.end(), [](const auto& record) { return record.has_value(); });
    if (phase_ == RendezvousPhase::kPending && all && now >= propose_not_before_) moved = propose(now);
  }
  if (phase_ == RendezvousPhase::kPending && gathering_ && gather(now)) moved = true;
  return moved;
}

bool Rendezvous::collect() {
  records_[0] = options_.self;
  note_.clear();  // set again below if still true
  return take_batch([&](int rank) { return !records_[static_cast<std::size_t>(rank)].has_value(); },
                    [&](int rank) { return record_key(rank); },
                    [&](int rank, const Bytes& bytes) { return take_record(rank, bytes); });
}

bool Rendezvous::take_batch(const std::function<bool(int)>& is_wanted, const std::function<std::string(int)>& key_of,
                            const std::function<bool(int, const Bytes&)>& take) {
  std::vector<int> ranks;
  std::vector<std::string> names;
  for (int i = 0; i < size(); ++i) {
    const int rank = (cursor_ + i) % size();
    if (!is_wanted(rank)) continue;
    if (static_cast<int>(ranks.size()) == batch_) {
      cursor_ = rank;
      break;
    }
    ranks.push_back(rank);
    names.push_back(key_of(rank));
  }
  if (names.empty()) return false;
  fetch(names);
  bool moved = false;
  bool are_all_there = true;
  for (std::size_t i = 0; i < ranks.size() && phase_ == RendezvousPhase::kPending; ++i) {
    const std::optional<Bytes> bytes = get(names[i]);
    if (bytes && take(ranks[i], *bytes)) moved = true;
    are_all_there = are_all_there && bytes;
  }
  batch_ = are_all_there ? std::min(2 * batch_, kBatchMax) : kBatch;
  return moved;
}

bool Rendezvous::take_record(int rank, const Bytes& bytes) {
  const std::string who = "rank " + std::to_string(rank);
  const BlobVersion ours{options_.self.protocol_version, options_.self.build};
  if (const auto theirs = decode_version(bytes); theirs.is_ok() && theirs.value() != ours) {
    end(Status(Code::kMismatch,
               "hybridps refuses group " + core::quoted(options_.group_name) + ": rank 0 runs " + version_text(ours) +
                   ", " + who + " runs " + version_text(theirs.value()) +
                   "; install the same version on all ranks, with the same settings where it names any"),
        true);
    return false;
  }
  core::Result<MemberRecord> decoded = decode_record(bytes);
  if (!decoded.is_ok()) {
    note_ = who + " published a record that cannot be read: " + std::string(decoded.status().message());
    return false;
  }
  MemberRecord record = std::move(decoded).value();
  if (is_named() &&
      (record.engine != options_.expected[static_cast<std::size_t>(rank)].engine || record.group_rank != rank ||
       record.group_size != size() || record.incarnation != options_.self.incarnation)) {
    end_taken(rank, bytes);
    return false;
  }
  if (end_if_disagrees(record)) return false;
  if (const std::string text = disagreement(record); !text.empty()) {
    note_ = text + ", perhaps in an earlier life";
    return false;
  }
  if (record.group_rank != rank || record.group_size != size()) {
    note_ = who + " published a record for rank " + std::to_string(record.group_rank) + " of " +
            std::to_string(record.group_size) + ", this group has " + std::to_string(size()) + " ranks";
    return false;
  }
  if (record.incarnation != options_.self.incarnation) {
    note_ = who + " published a record of incarnation " + core::quoted(record.incarnation) + ", this is " +
            core::quoted(options_.self.incarnation);
    return false;
  }
  const auto at = static_cast<std::size_t>(rank);
  if (record.engine == rejected_[at]) return false;  // still the stale record
  if (refuses(record)) return false;
  for (const auto& other : records_) {
    if (other && other->engine == record.engine) {
      note_ = describe(*other) + " and " + describe(record) + " have the same engine id";
      return false;
    }
  }
  records_[at] = std::move(record);
  return true;
}

std::vector<int> Rendezvous::map_nodes() const {
  std::vector<int> node_of;
  std::vector<std::vector<core::EngineId>> nodes;
  std::map<std::string_view, std::vector<std::size_t>> nodes_of_identity;
  for (const auto& record : records_) {
    auto& candidates = nodes_of_identity[record->node_identity];
    const auto at = std::find_if(candidates.begin(), candidates.end(), [&](std::size_t node) {
      return std::none_of(nodes[node].begin(), nodes[node].end(),
                          [&](core::EngineId other) { return unproven_.contains(pair_of(other, record->engine)); });
    });
    std::size_t node = nodes.size();
    if (at != candidates.end()) {
      node = *at;
    } else {
      nodes.emplace_back();
      candidates.push_back(node);
    }
    nodes[node].push_back(record->engine);
    node_of.push_back(static_cast<int>(node));
  }
  return node_of;
}

Roster Rendezvous::make_roster() const {
  Roster roster;
  while (roster.nonce == 0) roster.nonce = core::random_u64();
  roster.uid = core::make_group_uid();
  for (const auto& record : records_) roster.members.push_back(*record);
  roster.node_of = map_nodes();
  roster.names_servers = options_.names_servers;
  return roster;
}

bool Rendezvous::propose(TimePoint now) {
  Roster roster = make_roster();
  roster_ = std::move(roster);
  nonce_ = roster_.nonce;
  const core::Result<Bytes> bytes = encode(roster_);
  if (!bytes.is_ok()) {
    end(bytes.status(), true);
    return false;
  }
  const std::vector<Bytes> parts = in_parts(bytes.value());
  if (parts.size() > static_cast<std::size_t>(kRosterPartsMax)) {
    end(Status(Code::kOutOfResources, "the roster of group " + core::quoted(options_.group_name) + " has " +
                                          std::to_string(bytes.value().size()) +
                                          " bytes, too many for the store; make a smaller group"),
        true);
    return false;
  }
  parts_ = static_cast<int>(parts.size());
  if (options_.shelf) digest_ = options_.shelf->digest_of(bytes.value());
  if (options_.shelf && claim_shelf(nonce_) == NodeShelf::ShelfClaim::kOurs) options_.shelf->put(nonce_, bytes.value());
  std::vector<KeyAndValue> values;  // the roster before the head that names it
  for (int part = 0; part < parts_; ++part)
    values.push_back({roster_key(nonce_, part), parts[static_cast<std::size_t>(part)]});
  values.push_back({key("head"), encode_head({nonce_, HeadState::kProposed, {}, parts_, digest_})});
  put_each(values);
  round_trips_.assign(static_cast<std::size_t>(roster_.node_count()), {});
  std::fill(acks_.begin(), acks_.end(), RosterAck::kNone);
  own_ack_ = RosterAck::kNone;
  gathering_ = true;
  proving_ = phase_ == RendezvousPhase::kPending;
  cursor_ = 0;
  propose_pace_ = std::clamp(propose_pace_ * 2, kProposePaceMin, kProposePaceMax);
  propose_not_before_ = now + propose_pace_;
  return true;
}

bool Rendezvous::gather(TimePoint now) {
  const bool moved =
      take_batch([&](int rank) { return rank != 0 && acks_[static_cast<std::size_t>(rank)] == RosterAck::kNone; },
                 [&](int rank) { return ack_key(nonce_, rank); },
                 [&](int rank, const Bytes& bytes) { return take_ack(rank, bytes); });
  acks_[0] = own_ack_;
  if (phase_ != RendezvousPhase::kPending) return moved;

  if (std::find(acks_.begin(), acks_.end(), RosterAck::kStale) != acks_.end()) {
    // Read again the records that nobody has confirmed. For a stale record, accept only a record of another engine.
    for (std::size_t rank = 1; rank < acks_.size(); ++rank) {
      if (acks_[rank] == RosterAck::kStale) rejected_[rank] = roster_.members[rank].engine;
      if (acks_[rank] == RosterAck::kStale || acks_[rank] == RosterAck::kNone) records_[rank].reset();
    }
    gathering_ = false;
    proving_ = false;
    cursor_ = 0;
    return true;
  }
  if (std::find(acks_.begin(), acks_.end(), RosterAck::kNone) != acks_.end()) return moved;
  if (std::find(acks_.begin(), acks_.end(), RosterAck::kUnproven) != acks_.end()) {
    return now >= propose_not_before_ ? propose(now) : moved;
  }
  // Not earlier: a proposed roster may have records of dead processes, whose hosts were set otherwise.
  if (const Status status = check_reachable(roster_); !status.is_ok()) {
    end(Status(status.code(), "group " + core::quoted(options_.group_name) + ": " + std::string(status.message())),
        true);
    return true;
  }
  if (options_.find_regions) roster_.region_of = options_.find_regions(round_trips_);
  put(key("head"), encode_head({nonce_, HeadState::kValid, roster_.region_of, parts_, digest_}));
  if (phase_ == RendezvousPhase::kPending) phase_ = RendezvousPhase::kReady;
  return true;
}

bool Rendezvous::take_ack(int rank, const Bytes& bytes) {
  const auto at = static_cast<std::size_t>(rank);
  const std::optional<AckBlob> ack = decode_ack(bytes);
  const auto kind = ack ? static_cast<RosterAck>(ack->kind) : RosterAck::kNone;
  if (kind == RosterAck::kNone || (kind != RosterAck::kStale && ack->engine != roster_.members[at].engine)) {
    note_ = "rank " + std::to_string(rank) + " sent a confirmation that cannot be read";
    return false;
  }
  if (kind == RosterAck::kUnproven) add_unproven(rank, ack->ranks);
  if (kind == RosterAck::kOk) take_round_trips(rank, ack->round_trips);
  acks_[at] = kind;
  return true;
}

void Rendezvous::take_round_trips(int rank, std::vector<std::uint32_t> round_trips) {
  const auto node = static_cast<std::size_t>(roster_.node_of[static_cast<std::size_t>(rank)]);
  if (round_trips.size() == round_trips_.size()) round_trips_[node] = std::move(round_trips);
}

void Rendezvous::add_unproven(int rank, const std::vector<int>& others) {
  const core::EngineId engine = roster_.members[static_cast<std::size_t>(rank)].engine;
  for (const int other : others) {
    if (other < 0 || other >= size() || other == rank) continue;
    unproven_.insert(pair_of(engine, roster_.members[static_cast<std::size_t>(other)].engine));
  }
}

// ---- every member

bool Rendezvous::follow() {
  std::optional<Head> head = shelved_;
  if (!head) {
    const std::optional<Bytes> bytes = get(key("head"));
    if (!bytes) return false;
    head = decode_head(*bytes);
  }
  if (!head) {
    note_ = "the store holds a roster head that cannot be read";
    return false;
  }
  bool moved = false;
  if (head->nonce != nonce_) {
    std::optional<core::Result<Roster>> roster = find_roster(*head);
    if (!roster) return false;
    moved = take_roster(head->nonce, *std::move(roster));
    if (phase_ == RendezvousPhase::kPending && proving_) ask_proof();
  }
  if (phase_ == RendezvousPhase::kPending && head->state == HeadState::kValid && own_ack_ == RosterAck::kOk) {
    if (!head->region_of.empty() && static_cast<int>(head->region_of.size()) != roster_.node_count()) {
      note_ = "the store holds a roster head with regions that the group cannot have";
      return moved;
    }
    roster_.region_of = head->region_of;
    phase_ = RendezvousPhase::kReady;
  }
  return moved;
}

std::optional<core::Result<Roster>> Rendezvous::find_roster(const Head& head) {
  if (options_.shelf && claimed_ != head.nonce && !head.digest.empty()) {
    const bool is_there = shelved_ || claim_shelf(head.nonce) == NodeShelf::ShelfClaim::kOthers;
    if (is_there) {
      shelved_ = head;
      next_look_ = last_step_ + kShelfPace;
      if (const std::optional<Bytes> bytes = options_.shelf->look(head.nonce)) {
        if (options_.shelf->digest_of(*bytes) == head.digest) {
          shelved_.reset();
          return decode_roster(*bytes);
        }
      } else if (last_step_ - shelved_since_ < kShelfPatience + kShelfPatiencePerRank * size()) {
        return std::nullopt;
      }
    }
    shelved_.reset();
  }
  const std::optional<Bytes> bytes = get_roster(head);
  if (!bytes) return std::nullopt;
  if (claimed_ == head.nonce) options_.shelf->put(head.nonce, *bytes);
  return decode_roster(*bytes);
}

NodeShelf::ShelfClaim Rendezvous::claim_shelf(std::uint64_t nonce) {
  if (claimed_ != 0) options_.shelf->clear(claimed_);
  const NodeShelf::ShelfClaim claim = options_.shelf->claim(nonce);
  claimed_ = claim == NodeShelf::ShelfClaim::kOurs ? nonce : 0;
  shelved_since_ = last_step_;
  return claim;
}

bool Rendezvous::take_roster(std::uint64_t nonce, core::Result<Roster> decoded) {
  nonce_ = nonce;
  proving_ = false;
  own_ack_ = RosterAck::kNone;
  if (!decoded.is_ok() || decoded.value().nonce != nonce) {
    // Perhaps from an earlier life and another version. If our versions differ, rank 0 reports the difference.
    note_ = "the store holds a roster that cannot be read: " + std::string(decoded.status().message());
    return false;
  }
  Roster roster = std::move(decoded).value();
  const MemberRecord& self = options_.self;
  const MemberRecord* entry =
      self_rank() < roster.size() ? &roster.members[static_cast<std::size_t>(self_rank())] : nullptr;
  if (roster.size() != size() || entry->engine != self.engine || entry->incarnation != self.incarnation) {
    if (end_if_disagrees(roster.members.front())) return true;
    note_ = entry == nullptr || roster.size() != size()
                ? "the last roster is for " + std::to_string(roster.size()) + " ranks"
                : "the last roster has another process in this place, " + describe(*entry) +
                      " (a stale record, or two processes with the same rank)";
    if (is_named())
      end(Status(Code::kMismatch, "group " + core::quoted(options_.group_name) + ": " + options_.life +
                                      " is already used by another group: " + note_ +
                                      ". What to do: take a uuid that was never used before"),
          true);
    else
      acknowledge(RosterAck::kStale, {});
    return true;
  }
  for (const MemberRecord& member : roster.members)
    if (refuses(member)) return true;
  roster_ = std::move(roster);
  proving_ = true;
  note_.clear();
  return true;
}

bool Rendezvous::ask_proof() {
  MemoryProof proof = options_.prove ? options_.prove(roster_) : MemoryProof::ok();
  if (proof.state == MemoryProof::ProofResult::kPending) return false;
  proving_ = false;
  if (proof.state == MemoryProof::ProofResult::kFailed) {
    end(Status(proof.status.code(), describe(options_.self) + " in group " + core::quoted(options_.group_name) + ": " +
                                        std::string(proof.status.message())),
        true);
    return true;
  }
  std::vector<int> unproven;
  if (proof.state == MemoryProof::ProofResult::kUnproven) {
    const auto node = [&](int rank) { return roster_.node_of[static_cast<std::size_t>(rank)]; };
    for (const int rank : proof.unproven) {
      if (rank < 0 || rank >= size() || rank == self_rank() || node(rank) != node(self_rank())) continue;
      unproven.push_back(rank);
    }
    std::sort(unproven.begin(), unproven.end());
    unproven.erase(std::unique(unproven.begin(), unproven.end()), unproven.end());
  }
  acknowledge(unproven.empty() ? RosterAck::kOk : RosterAck::kUnproven, unproven, std::move(proof.round_trips));
  return true;
}

void Rendezvous::acknowledge(RosterAck ack, const std::vector<int>& unproven, std::vector<std::uint32_t> round_trips) {
  own_ack_ = ack;
  if (size() == 1) return;
  if (is_leader()) {
    add_unproven(0, unproven);
    take_round_trips(0, std::move(round_trips));
    return;
  }
  put(ack_key(nonce_, self_rank()),
      encode_ack({static_cast<std::uint8_t>(ack), options_.self.engine, unproven, std::move(round_trips)}));
}

// ---- time

void Rendezvous::report_progress(TimePoint now) {
  next_progress_ = now + kProgressInterval;
  if (!options_.progress) return;
  std::string text = waiting_for();
  if (!is_leader() && nonce_ == 0 && !get(record_key(0)) && phase_ == RendezvousPhase::kPending)
    text = absent_text({0});
  if (phase_ != RendezvousPhase::kPending) return;
  options_.progress("rank " + std::to_string(self_rank()) + " has been in the rendezvous of group " +
                    core::quoted(options_.group_name) + " for " +
                    std::to_string(std::chrono::duration_cast<seconds>(now - started_at_).count()) + " s: " + text);
}

}  // namespace hybridps::bootstrap
