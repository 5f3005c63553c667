#include "hybridps/bootstrap/rendezvous.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <limits>
#include <map>

#include "hybridps/bootstrap/bytes.h"
#include "hybridps/core/text.h"

namespace hybridps::bootstrap {
namespace {

using core::Code;
using core::Duration;
using core::Status;
using core::TimePoint;
using std::chrono::milliseconds;
using std::chrono::seconds;

// After a look that found something, which is when the next thing is near.
constexpr Duration kPaceMin = std::chrono::microseconds(200);
constexpr Duration kPaceMinPerRank = std::chrono::microseconds(25);
constexpr Duration kPaceMinMax = milliseconds(1);
// Between looks: in the first half second as often as the store's host can well answer that many ranks.
constexpr Duration kPaceMaxEarly = milliseconds(2);
constexpr Duration kPaceMaxEarlyPerRank = std::chrono::microseconds(250);
constexpr Duration kEarly = milliseconds(500);
constexpr Duration kPaceMax = milliseconds(20);
constexpr Duration kPaceMaxLate = milliseconds(50);
constexpr Duration kLateAfter = seconds(5);
constexpr Duration kProgressInterval = seconds(10);
constexpr Duration kProposePaceMin = milliseconds(20);
constexpr Duration kProposePaceMax = seconds(1);
constexpr std::uint64_t kPollsPerFailedLook = 4;
constexpr std::size_t kLivesTold = 3;

// head := magic u32 | nonce u64 | state u8
constexpr std::uint32_t kHeadMagic = 0x68535048;  // "HPSh"
enum class HeadState : std::uint8_t { kProposed = 0, kValid = 1 };
struct Head {
  std::uint64_t nonce = 0;
  HeadState state = HeadState::kProposed;
};

Bytes encode_head(const Head& head) {
  ByteWriter out;
  out.u32(kHeadMagic);
  out.u64(head.nonce);
  out.u8(static_cast<std::uint8_t>(head.state));
  return std::move(out).take();
}

std::optional<Head> decode_head(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  const std::uint32_t magic = in.u32();
  Head head;
  head.nonce = in.u64();
  const std::uint8_t state = in.u8();
  if (!in.finished() || magic != kHeadMagic || state > 1 || head.nonce == 0) return std::nullopt;
  head.state = static_cast<HeadState>(state);
  return head;
}

// ack := magic u32 | kind u8 | engine u64 | count u32 | count x rank u32
constexpr std::uint32_t kAckMagic = 0x61535048;  // "HPSa"
constexpr std::uint8_t kAckKindMax = 3;
struct AckBlob {
  std::uint8_t kind = 0;
  core::EngineId engine;
  std::vector<int> ranks;
};

Bytes encode_ack(const AckBlob& ack) {
  ByteWriter out;
  out.u32(kAckMagic);
  out.u8(ack.kind);
  out.u64(ack.engine.value);
  out.u32(static_cast<std::uint32_t>(ack.ranks.size()));
  for (const int rank : ack.ranks) out.u32(static_cast<std::uint32_t>(rank));
  return std::move(out).take();
}

std::optional<AckBlob> decode_ack(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  const std::uint32_t magic = in.u32();
  AckBlob ack;
  ack.kind = in.u8();
  ack.engine.value = in.u64();
  const std::size_t count = in.u32();
  if (magic != kAckMagic || ack.kind < 1 || ack.kind > kAckKindMax || count != in.remaining() / 4) return std::nullopt;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t rank = in.u32();
    if (rank >= kMembersMax) return std::nullopt;
    ack.ranks.push_back(static_cast<int>(rank));
  }
  if (!in.finished()) return std::nullopt;
  return ack;
}

// failed := magic u32 | code u8 | wall_ms u64 | rank u32 | text address | count u32 | count x engine u64   (the writer's rank;
// engines that it knows)
constexpr std::uint32_t kFailedMagic = 0x67535048;  // "HPSg"; python/hybridps/_announce.py writes it, too
constexpr std::size_t kFailedTextBytesMax = 4096;
Bytes cleared() { return {0}; }  // not empty: some stores make a difference between empty and absent
struct FailedBlob {
  Status status;
  std::uint64_t wall_ms = 0;  // when it was written; 0: not known
  int rank = 0;               // the writer's
  std::vector<core::EngineId> engines;
};

Bytes encode_failed(const FailedBlob& failed) {
  ByteWriter out;
  out.u32(kFailedMagic);
  out.u8(static_cast<std::uint8_t>(failed.status.code()));
  out.u64(failed.wall_ms);
  out.u32(static_cast<std::uint32_t>(failed.rank));
  const std::string text(failed.status.message().substr(0, kFailedTextBytesMax));
  out.address(Bytes(text.begin(), text.end()));
  out.u32(static_cast<std::uint32_t>(failed.engines.size()));
  for (const core::EngineId engine : failed.engines) out.u64(engine.value);
  return std::move(out).take();
}

std::optional<FailedBlob> decode_failed(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  const std::uint32_t magic = in.u32();
  const std::uint8_t code = in.u8();
  const std::uint64_t wall_ms = in.u64();
  const std::uint32_t rank = in.u32();
  const Bytes text = in.address(kFailedTextBytesMax);
  const std::size_t count = in.u32();
  if (magic != kFailedMagic || code == 0 || code > static_cast<std::uint8_t>(Code::kInternal) ||
      count != in.remaining() / 8 || rank > static_cast<std::uint32_t>(std::numeric_limits<int>::max())) {
    return std::nullopt;
  }
  FailedBlob failed;
  failed.status = Status(static_cast<Code>(code), std::string(text.begin(), text.end()));
  failed.wall_ms = wall_ms;
  failed.rank = static_cast<int>(rank);
  for (std::size_t i = 0; i < count; ++i) failed.engines.push_back(core::EngineId{in.u64()});
  if (!in.finished()) return std::nullopt;
  return failed;
}

std::string hex(std::uint64_t value) { return core::to_string(core::EngineId{value}); }

std::string version_text(const BlobVersion& version) {
  return "protocol " + std::to_string(version.protocol_version) + " build " + core::quoted(version.build);
}

/// Ordered, so that (a, b) and (b, a) are one pair.
std::pair<std::uint64_t, std::uint64_t> pair_of(core::EngineId a, core::EngineId b) {
  return std::minmax(a.value, b.value);
}

bool written_since(const FailedBlob& failed, std::uint64_t process_started_ms) {
  return failed.wall_ms != 0 && process_started_ms != 0 && failed.wall_ms >= process_started_ms;
}

}  // namespace

Status announce_failure(KeyValueStore& store, std::string_view key_prefix, int rank, const Status& failure,
                        std::uint64_t wall_ms, std::uint64_t process_started_ms) {
  const std::string key = std::string(key_prefix) + "/failed";
  const core::Result<std::optional<Bytes>> present = store.try_get(key);
  if (!present.is_ok()) return present.status();
  if (present.value()) {
    const std::optional<FailedBlob> first = decode_failed(*present.value());
    if (first && written_since(*first, process_started_ms)) return Status::ok();
  }
  return store.set(key, encode_failed({failure, wall_ms, rank, {}}));
}

Rendezvous::Rendezvous(std::shared_ptr<KeyValueStore> store, RendezvousOptions options)
    : store_(std::move(store)), options_(std::move(options)) {
  if (is_leader() && size() > 1) {
    const auto count = static_cast<std::size_t>(size());
    records_.resize(count);
    rejected_.resize(count);
    acks_.resize(count);
  }
}

Rendezvous::Phase Rendezvous::step(TimePoint now) {
  if (phase_ != Phase::kPending) return phase_;
  if (!started_) start(now);
  last_step_ = now;
  if (phase_ == Phase::kPending && proving_ && ask_proof()) next_poll_ = now;
  if (phase_ == Phase::kPending) find_gone(now);
  const bool is_late = options_.deadline.has_passed(now);
  if (phase_ == Phase::kPending && (now >= next_poll_ || is_late)) {
    pace_ = poll(now) ? pace_min() : std::min(pace_ * 3 / 2, pace_max(now - started_at_));
    next_poll_ = now + pace_;
  }
  if (phase_ == Phase::kPending && is_late) time_out(now);
  if (phase_ == Phase::kPending && now >= next_progress_) report_progress(now);
  return phase_;
}

Duration Rendezvous::pace_min() const noexcept { return std::clamp(kPaceMinPerRank * size(), kPaceMin, kPaceMinMax); }

Duration Rendezvous::pace_max(Duration age) const noexcept {
  if (age >= kLateAfter) return kPaceMaxLate;
  if (age >= kEarly) return kPaceMax;
  return std::clamp(kPaceMaxEarlyPerRank * size(), kPaceMaxEarly, kPaceMax);
}

TimePoint Rendezvous::next_step() const noexcept {
  return proving_ ? std::min(next_poll_, last_step_ + pace_min()) : next_poll_;
}

ExpectedMember Rendezvous::member_at(int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  const auto of = [](const MemberRecord& record) { return ExpectedMember{record.engine, describe(record)}; };
  if (at < records_.size() && records_[at]) return of(*records_[at]);
  if (at < roster_.members.size() && own_ack_ != Ack::kStale) return of(roster_.members[at]);
  for (const auto* known : {&options_.expected, &options_.presumed})
    if (at < known->size() && (*known)[at].engine.value != 0)
      return {(*known)[at].engine, "rank " + std::to_string(rank) + " (" + (*known)[at].where + ")"};
  return {};
}

void Rendezvous::find_gone(TimePoint now) {
  if (!options_.departures || size() == 1 || options_.departures->count() == departures_seen_) return;
  const std::uint64_t count = options_.departures->count();
  // One who has left may have seen the group become valid, and done its part.
  poll(now);
  if (phase_ != Phase::kPending) return;
  departures_seen_ = count;
  for (int rank = 0; rank < size(); ++rank) {
    const ExpectedMember member = member_at(rank);
    if (member.engine.value == 0 || member.engine == options_.self.engine) continue;
    const Status why = options_.departures->why(member.engine);
    if (why.is_ok()) continue;
    return end_without(member.where, why);
  }
}

void Rendezvous::end_without(const std::string& who, const Status& why) {
  end(Status(why.code(), who + " of group " + core::quoted(options_.group_name) +
                             " is gone, and was given up before by " + describe(options_.self) + ": " +
                             std::string(why.message()) +
                             ". What to do: start that process anew, or make the group without it; if it lives, let it "
                             "destroy all of its groups and make them again"),
      true);
}

std::vector<core::EngineId> Rendezvous::awaited() const {
  std::vector<core::EngineId> engines;
  const auto add = [&](int rank) {
    if (const core::EngineId engine = member_at(rank).engine; engine.value != 0) engines.push_back(engine);
  };
  if (phase_ != Phase::kPending || size() == 1) return engines;
  if (!is_leader()) {
    if ((self_rank() & (self_rank() - 1)) == 0) add(0);
    return engines;
  }
  for (int rank = 1; rank < size(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    if (gathering_ ? acks_[at] == Ack::kNone : !records_[at].has_value()) add(rank);
  }
  return engines;
}

void Rendezvous::fail(Status status) {
  if (phase_ == Phase::kPending) end(std::move(status), true);
}

std::string Rendezvous::waiting_for() const {
  std::string text;
  if (is_leader() && size() > 1) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      if (gathering_ ? acks_[at] == Ack::kNone : !records_[at].has_value()) ranks.push_back(rank);
    }
    if (ranks.empty()) {
      text = "about to propose a roster";
    } else if (!gathering_) {
      text = absent_text(ranks);
    } else {
      text = unconfirmed_text(ranks);
    }
  } else if (proving_) {
    std::vector<int> ranks = roster_.ranks_of_node(roster_.node_of[static_cast<std::size_t>(self_rank())]);
    text = "proving shared memory with ranks " + core::format_ranks(ranks);
  } else if (own_ack_ == Ack::kOk || own_ack_ == Ack::kUnproven) {
    text = "waiting for all ranks to confirm the roster";
  } else if (own_ack_ == Ack::kStale) {
    text = "waiting for rank 0 to make a roster with this process in it";
  } else {
    text = "waiting for rank 0 to make a roster";
  }
  return note_.empty() ? text : text + "; " + note_;
}

std::string Rendezvous::absent_text(const std::vector<int>& absent) const {
  std::string text = "waiting for ranks " + core::format_ranks(absent) + " (none of " + std::to_string(absent.size()) +
                     " published a record)";
  if (is_named() && !absent.empty())
    text += ", the first: rank " + std::to_string(absent.front()) + " (" +
            options_.expected[static_cast<std::size_t>(absent.front())].where + ")";
  return text;
}

std::string Rendezvous::other_lives(const std::vector<int>& absent) {
  if (options_.lives_prefix.empty()) return {};
  std::string text;
  std::size_t looked = 0;
  for (const int rank : absent) {
    if (looked++ == kLivesTold || phase_ != Phase::kPending) break;
    const std::optional<Bytes> bytes = get(life_key(rank));
    if (!bytes || bytes->empty() || bytes->size() > kTextBytesMax) continue;
    const std::string theirs(bytes->begin(), bytes->end());
    if (theirs == options_.self.incarnation) continue;
    text += "; rank " + std::to_string(rank) + " was last seen in life " + core::quoted(theirs) + " of this group";
  }
  if (!text.empty())
    text += ", this rank is in " + core::quoted(options_.self.incarnation) +
            " (run id, restart count, how often the process has made the group): lives find each other only by a name that "
            "their callers give them, hybridps.Options(incarnation=...) or the uuid of reconfigure()";
  return text;
}

std::string Rendezvous::unconfirmed_text(const std::vector<int>& ranks) const {
  return "waiting for ranks " + core::format_ranks(ranks) + " to confirm the roster (the first: " +
         describe(roster_.members[static_cast<std::size_t>(ranks.front())]) + ")";
}

std::string Rendezvous::key(std::string_view suffix) const { return options_.key_prefix + "/" + std::string(suffix); }
std::string Rendezvous::record_key(int rank) const { return key("rec/" + std::to_string(rank)); }
std::string Rendezvous::life_key(int rank) const { return options_.lives_prefix + "/life/" + std::to_string(rank); }
std::string Rendezvous::roster_key(std::uint64_t nonce) const { return key("roster/" + hex(nonce)); }
std::string Rendezvous::ack_key(std::uint64_t nonce, int rank) const {
  return key("ack/" + hex(nonce) + "/" + std::to_string(rank));
}

void Rendezvous::start(TimePoint now) {
  started_ = true;
  started_at_ = now;
  next_poll_ = now;
  next_progress_ = now + kProgressInterval;
  pace_ = pace_min();
  const core::Result<Bytes> own = encode(options_.self);
  if (!own.is_ok()) return end(own.status(), size() > 1);
  if (size() > 1 && is_named()) {
    // Of another use of the name, a record that is not ours: never to be overwritten.
    const std::optional<Bytes> there = get(record_key(self_rank()));
    if (there && *there != own.value()) end_taken(self_rank(), *there);
  }
  if (phase_ == Phase::kPending) find_other_lists();
  if (size() > 1 && phase_ == Phase::kPending && !options_.lives_prefix.empty()) {
    const std::string& life = options_.self.incarnation;
    put(life_key(self_rank()), Bytes(life.begin(), life.end()));
  }
  if (phase_ != Phase::kPending) return;
  if (size() > 1) return put(record_key(self_rank()), own.value());
  records_.assign(1, options_.self);  // alone: no store, but the same proof as everyone
  roster_ = make_roster();
  proving_ = true;
}

bool Rendezvous::poll(TimePoint now) {
  if (size() == 1) {
    if (own_ack_ == Ack::kOk) phase_ = Phase::kReady;
    return false;
  }
  bool moved = false;
  if (polls_++ % kPollsPerFailedLook == 0) moved = watch_failed(now);
  if (phase_ == Phase::kPending && (is_leader() ? lead(now) : follow())) moved = true;
  return moved;
}

std::optional<Status> Rendezvous::believed_failure(const std::optional<Bytes>& bytes, bool grace_is_over) const {
  if (!bytes) return std::nullopt;
  const std::optional<FailedBlob> failed = decode_failed(*bytes);
  if (!failed) return std::nullopt;
  const bool names_us =
      std::find(failed->engines.begin(), failed->engines.end(), options_.self.engine) != failed->engines.end();
  const bool is_of_this_life =
      names_us || (failed_looked_ && bytes != failed_first_) || written_since(*failed, options_.process_started_ms);
  if (!is_of_this_life && !grace_is_over) return std::nullopt;
  return failed->status;
}

// What rank 0 has cleared is of this life if its writer wrote it before rank 0 came. Nothing in the store tells that from an
// earlier life whose rank has not come again yet; but who comes again publishes another record.
std::optional<Status> Rendezvous::unreplaced_failure() {
  if (!cleared_failed_) return std::nullopt;
  const std::optional<FailedBlob> failed = decode_failed(*cleared_failed_);
  if (!failed) return std::nullopt;
  if (failed->engines.empty()) {  // its writer had no record then
    if (failed->rank == self_rank() || failed->rank >= size() || get(record_key(failed->rank))) return std::nullopt;
    return failed->status;
  }
  for (std::size_t rank = 1; rank < records_.size(); ++rank) {
    if (!records_[rank] || records_[rank]->engine != failed->engines.front()) continue;
    const std::optional<Bytes> bytes = get(record_key(static_cast<int>(rank)));
    if (!bytes) return std::nullopt;
    const core::Result<MemberRecord> now_there = decode_record(*bytes);
    if (now_there.is_ok() && now_there.value() == *records_[rank]) return failed->status;
  }
  return std::nullopt;
}

void Rendezvous::end_taken(int rank, const Bytes& bytes) {
  const auto record = decode_record(bytes);
  std::string text = "group " + core::quoted(options_.group_name) + ", " + options_.life + ": at rank " +
                     std::to_string(rank) + ", where " + options_.expected[static_cast<std::size_t>(rank)].where +
                     " was expected, ";
  if (!record.is_ok()) {
    text += "is what cannot be read (" + std::string(record.status().message()) + ")";
  } else if (record.value().engine != options_.expected[static_cast<std::size_t>(rank)].engine) {
    text += "is " + describe(record.value()) + ": " + options_.life + " is already used by another group";
  } else {
    text += "it was given other members, or the same in another order";
  }
  end(Status(Code::kMismatch,
             text + ". What to do: give all members of a group the same handles in the same order, and every group, each "
                    "time, a uuid that was never used before"),
      true);
}

std::string Rendezvous::disagreement(const MemberRecord& other) const {
  const MemberRecord& self = options_.self;
  if (self.members.empty() || other.members.empty() || other.members == self.members) return {};
  return "ranks name different members for group " + core::quoted(options_.group_name) + ": " + describe(self) + " names " +
         self.members + ", " + describe(other) + " names " + other.members;
}

bool Rendezvous::is_of_this_life(const MemberRecord& other) const {
  return options_.process_started_ms != 0 && other.made_ms >= options_.process_started_ms &&
         other.incarnation == options_.self.incarnation;
}

bool Rendezvous::end_if_disagrees(const MemberRecord& other) {
  const std::string text = disagreement(other);
  if (text.empty() || !is_of_this_life(other)) return false;
  // Who is in a group that is valid without us keeps it.
  const std::optional<Bytes> bytes = get(key("head"));
  const std::optional<Head> head = bytes ? decode_head(*bytes) : std::nullopt;
  bool valid = false;
  if (head && head->state == HeadState::kValid) {
    const std::optional<Bytes> roster = get(roster_key(head->nonce));
    if (!roster) return phase_ != Phase::kPending;
    const core::Result<Roster> decoded = decode_roster(*roster);
    valid = decoded.is_ok() && is_of_this_life(decoded.value().members.front());
  }
  if (phase_ == Phase::kPending)
    end(Status(Code::kMismatch,
               text + ". What to do: let all ranks of the job make the same groups in the same order with the same lists, also "
                      "those that they are not in"),
        !valid);
  return true;
}

void Rendezvous::find_other_lists() {
  if (size() == 1 || options_.self.members.empty()) return;
  const auto look = [&](int rank) {
    const std::optional<Bytes> bytes = phase_ == Phase::kPending ? get(record_key(rank)) : std::nullopt;
    if (!bytes) return;
    if (const core::Result<MemberRecord> record = decode_record(*bytes); record.is_ok()) end_if_disagrees(record.value());
  };
  look(self_rank());
  if (!is_leader()) look(0);
}

bool Rendezvous::refuses(const MemberRecord& member) {
  if (!options_.departures || member.engine == options_.self.engine) return false;
  const Status why = options_.departures->why(member.engine);
  if (why.is_ok()) return false;
  end_without(describe(member), why);
  return true;
}

bool Rendezvous::watch_failed(TimePoint now) {
  const std::optional<Bytes> bytes = get(key("failed"));
  if (phase_ != Phase::kPending) return false;
  const bool grace_is_over = now - started_at_ >= kForeignGrace;
  if (auto failure = believed_failure(bytes, grace_is_over)) {
    end(*std::move(failure), false);
    return true;
  }
  if (auto failure = grace_is_over ? unreplaced_failure() : std::nullopt; failure && phase_ == Phase::kPending) {
    end(*std::move(failure), true);
    return true;
  }
  if (is_named() && failed_looked_ && phase_ == Phase::kPending) {
    const std::optional<Bytes> own = get(record_key(self_rank()));
    const core::Result<Bytes> ours = encode(options_.self);
    if (own && ours.is_ok() && *own != ours.value()) {
      end_taken(self_rank(), *own);
      return true;
    }
  }
  // Two who come at one moment have not seen each other. Ever more rarely, for it costs the Store's host.
  if (std::has_single_bit(polls_ / kPollsPerFailedLook)) find_other_lists();
  if (phase_ != Phase::kPending) return true;
  if (!failed_looked_) {
    failed_looked_ = true;
    failed_first_ = bytes;
    // Of a life with a name it may be this life's: time_out() names it.
    if (is_leader() && !is_named() && bytes && *bytes != cleared()) {
      put(key("failed"), cleared());
      failed_first_ = cleared();
      cleared_failed_ = bytes;
    }
  }
  return false;
}

// ---- group rank 0

bool Rendezvous::lead(TimePoint now) {
  bool moved = false;
  if (!gathering_) {
    moved = collect();
    const bool all =
        std::all_of(records_.begin(), records_.end(), [](const auto& record) { return record.has_value(); });
    if (phase_ == Phase::kPending && all && now >= propose_not_before_) moved = propose(now);
  }
  if (phase_ == Phase::kPending && gathering_ && gather(now)) moved = true;
  return moved;
}

bool Rendezvous::collect() {
  records_[0] = options_.self;
  note_.clear();  // set again below while it holds
  bool moved = false;
  int looked = 0;
  for (int i = 0; i < size() && phase_ == Phase::kPending; ++i) {
    const int rank = (cursor_ + i) % size();
    if (records_[static_cast<std::size_t>(rank)]) continue;
    if (looked++ == kBatch) {
      cursor_ = rank;
      break;
    }
    if (const auto bytes = get(record_key(rank)); bytes && take_record(rank, *bytes)) moved = true;
  }
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
    note_ = who + " published what cannot be read: " + std::string(decoded.status().message());
    return false;
  }
  MemberRecord record = std::move(decoded).value();
  if (is_named() && (record.engine != options_.expected[static_cast<std::size_t>(rank)].engine ||
                     record.group_rank != rank || record.group_size != size() ||
                     record.incarnation != options_.self.incarnation)) {
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
  if (record.engine == rejected_[at]) return false;  // the stale one still
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
  return roster;
}

bool Rendezvous::propose(TimePoint now) {
  Roster roster = make_roster();
  if (const Status status = check_reachable(roster); !status.is_ok()) {
    end(Status(status.code(), "group " + core::quoted(options_.group_name) + ": " + std::string(status.message())),
        true);
    return false;
  }
  if (options_.servers) {
    auto servers = options_.servers(roster);
    if (!servers) return false;
    roster.servers = *std::move(servers);
  }
  roster_ = std::move(roster);
  nonce_ = roster_.nonce;
  const core::Result<Bytes> bytes = encode(roster_);
  if (!bytes.is_ok()) {
    end(bytes.status(), true);
    return false;
  }
  put(roster_key(nonce_), bytes.value());  // before the head that names it
  if (phase_ == Phase::kPending) put(key("head"), encode_head({nonce_, HeadState::kProposed}));
  std::fill(acks_.begin(), acks_.end(), Ack::kNone);
  own_ack_ = Ack::kNone;
  gathering_ = true;
  proving_ = phase_ == Phase::kPending;
  cursor_ = 0;
  propose_pace_ = std::clamp(propose_pace_ * 2, kProposePaceMin, kProposePaceMax);
  propose_not_before_ = now + propose_pace_;
  return true;
}

bool Rendezvous::gather(TimePoint now) {
  bool moved = false;
  int looked = 0;
  for (int i = 0; i < size() && phase_ == Phase::kPending; ++i) {
    const int rank = (cursor_ + i) % size();
    if (rank == 0 || acks_[static_cast<std::size_t>(rank)] != Ack::kNone) continue;
    if (looked++ == kBatch) {
      cursor_ = rank;
      break;
    }
    if (const auto bytes = get(ack_key(nonce_, rank)); bytes && take_ack(rank, *bytes)) moved = true;
  }
  acks_[0] = own_ack_;
  if (phase_ != Phase::kPending) return moved;

  if (std::find(acks_.begin(), acks_.end(), Ack::kStale) != acks_.end()) {
    // Read again what nobody has vouched for; of the stale ones, another record than before.
    for (std::size_t rank = 1; rank < acks_.size(); ++rank) {
      if (acks_[rank] == Ack::kStale) rejected_[rank] = roster_.members[rank].engine;
      if (acks_[rank] == Ack::kStale || acks_[rank] == Ack::kNone) records_[rank].reset();
    }
    gathering_ = false;
    proving_ = false;
    cursor_ = 0;
    return true;
  }
  if (std::find(acks_.begin(), acks_.end(), Ack::kNone) != acks_.end()) return moved;
  if (std::find(acks_.begin(), acks_.end(), Ack::kUnproven) != acks_.end()) {
    return now >= propose_not_before_ ? propose(now) : moved;
  }
  return commit(now) || moved;
}

bool Rendezvous::commit(TimePoint now) {
  const Proof proof = options_.commit ? options_.commit(roster_) : Proof::ok();
  switch (proof.state) {
    case Proof::State::kPending: return false;
    case Proof::State::kUnproven: return propose(now);
    case Proof::State::kFailed: end(proof.status, true); return true;
    case Proof::State::kOk: break;
  }
  put(key("head"), encode_head({nonce_, HeadState::kValid}));
  if (phase_ == Phase::kPending) phase_ = Phase::kReady;
  return true;
}

bool Rendezvous::take_ack(int rank, const Bytes& bytes) {
  const auto at = static_cast<std::size_t>(rank);
  const std::optional<AckBlob> ack = decode_ack(bytes);
  const auto kind = ack ? static_cast<Ack>(ack->kind) : Ack::kNone;
  if (kind == Ack::kNone || (kind != Ack::kStale && ack->engine != roster_.members[at].engine)) {
    note_ = "rank " + std::to_string(rank) + " confirmed with what cannot be read";
    return false;
  }
  if (kind == Ack::kUnproven) add_unproven(rank, ack->ranks);
  acks_[at] = kind;
  return true;
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
  const std::optional<Bytes> bytes = get(key("head"));
  if (!bytes) return false;
  const std::optional<Head> head = decode_head(*bytes);
  if (!head) {
    note_ = "the store holds a roster head that cannot be read";
    return false;
  }
  bool moved = false;
  if (head->nonce != nonce_) {
    const std::optional<Bytes> roster = get(roster_key(head->nonce));
    if (!roster) return false;
    moved = take_roster(head->nonce, *roster);
    if (phase_ == Phase::kPending && proving_) ask_proof();
  }
  if (phase_ == Phase::kPending && head->state == HeadState::kValid && own_ack_ == Ack::kOk) phase_ = Phase::kReady;
  return moved;
}

bool Rendezvous::take_roster(std::uint64_t nonce, const Bytes& bytes) {
  nonce_ = nonce;
  proving_ = false;
  own_ack_ = Ack::kNone;
  core::Result<Roster> decoded = decode_roster(bytes);
  if (!decoded.is_ok() || decoded.value().nonce != nonce) {
    // Perhaps of an earlier life and another version: rank 0 tells if our versions differ.
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
      acknowledge(Ack::kStale, {});
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
  Proof proof = options_.prove ? options_.prove(roster_) : Proof::ok();
  if (proof.state == Proof::State::kPending) return false;
  proving_ = false;
  if (proof.state == Proof::State::kFailed) {
    end(Status(proof.status.code(), describe(options_.self) + " in group " + core::quoted(options_.group_name) + ": " +
                                        std::string(proof.status.message())),
        true);
    return true;
  }
  std::vector<int> unproven;
  if (proof.state == Proof::State::kUnproven) {
    const auto node = [&](int rank) { return roster_.node_of[static_cast<std::size_t>(rank)]; };
    for (const int rank : proof.unproven) {
      if (rank < 0 || rank >= size() || rank == self_rank() || node(rank) != node(self_rank())) continue;
      unproven.push_back(rank);
    }
    std::sort(unproven.begin(), unproven.end());
    unproven.erase(std::unique(unproven.begin(), unproven.end()), unproven.end());
  }
  acknowledge(unproven.empty() ? Ack::kOk : Ack::kUnproven, unproven);
  return true;
}

void Rendezvous::acknowledge(Ack ack, const std::vector<int>& unproven) {
  own_ack_ = ack;
  if (size() == 1) return;
  if (is_leader()) return add_unproven(0, unproven);
  put(ack_key(nonce_, self_rank()), encode_ack({static_cast<std::uint8_t>(ack), options_.self.engine, unproven}));
}

// ---- store, time and ends

void Rendezvous::put(const std::string& name, std::span<const std::uint8_t> value) {
  const Status status = store_->set(name, value);
  if (!status.is_ok()) {
    end(Status(status.code(), "the store refused " + core::quoted(name) + ": " + std::string(status.message()) +
                                  "; see whether the process that hosts the store (often rank 0) is alive"),
        false);
  }
}

std::optional<Bytes> Rendezvous::get(const std::string& name) {
  core::Result<std::optional<Bytes>> value = store_->try_get(name);
  if (value.is_ok()) return std::move(value).value();
  end(Status(value.status().code(), "the store refused " + core::quoted(name) + ": " +
                                        std::string(value.status().message()) +
                                        "; see whether the process that hosts the store (often rank 0) is alive"),
      false);
  return std::nullopt;
}

void Rendezvous::report_progress(TimePoint now) {
  next_progress_ = now + kProgressInterval;
  if (!options_.progress) return;
  std::string text = waiting_for();
  if (!is_leader() && nonce_ == 0 && !get(record_key(0)) && phase_ == Phase::kPending) text = absent_text({0});
  if (phase_ != Phase::kPending) return;
  options_.progress("rank " + std::to_string(self_rank()) + " has been in the rendezvous of group " +
                    core::quoted(options_.group_name) + " for " +
                    std::to_string(std::chrono::duration_cast<seconds>(now - started_at_).count()) + " s: " + text);
}

std::string Rendezvous::find_missing() {
  std::string text = waiting_for();
  if (is_leader() && !gathering_ && size() > 1) {
    std::vector<int> absent;
    for (int rank = 1; rank < size(); ++rank)
      if (!records_[static_cast<std::size_t>(rank)]) absent.push_back(rank);
    text += other_lives(absent);
  }
  // Rank 0 knows them, but whose time is up first tells all.
  if (phase_ == Phase::kPending && !is_leader() && (own_ack_ == Ack::kOk || own_ack_ == Ack::kUnproven)) {
    std::vector<int> silent;
    for (int rank = 1; rank < std::min(size(), kBatch) && phase_ == Phase::kPending; ++rank)
      if (rank != self_rank() && !get(ack_key(nonce_, rank))) silent.push_back(rank);
    if (phase_ == Phase::kPending && !silent.empty()) {
      text = unconfirmed_text(silent);
      if (!note_.empty()) text += "; " + note_;
    }
  }
  if (phase_ == Phase::kPending && !is_leader() && own_ack_ == Ack::kNone && !proving_) {
    // Rank 0 cannot tell us who is absent: look for ourselves.
    std::vector<int> absent;
    for (int rank = 0; rank < std::min(size(), kBatch) && phase_ == Phase::kPending; ++rank) {
      if (rank != self_rank() && !get(record_key(rank))) absent.push_back(rank);
    }
    if (phase_ == Phase::kPending && !absent.empty()) {
      text = absent_text(absent);
      if (size() > kBatch) text += " among the first " + std::to_string(kBatch);
      if (!note_.empty()) text += "; " + note_;
      text += other_lives(absent);
    }
  }
  return text;
}

void Rendezvous::time_out(TimePoint now) {
  std::string text = find_missing();
  if (phase_ != Phase::kPending) return;
  const std::optional<Bytes> bytes = get(key("failed"));
  if (phase_ != Phase::kPending) return;
  if (auto failure = believed_failure(bytes, false)) return end(*std::move(failure), false);
  std::optional<Status> doubtful = believed_failure(bytes, true);
  if (!doubtful) doubtful = unreplaced_failure();
  if (doubtful)
    text += "; the store holds a failure, perhaps of an earlier attempt: " + std::string(doubtful->message());
  end(Status(Code::kTimeout,
             "rank " + std::to_string(self_rank()) + " timed out after " +
                 core::format_double(
                     static_cast<double>(std::chrono::duration_cast<milliseconds>(now - started_at_).count()) / 1000) +
                 " s in the rendezvous of group " + core::quoted(options_.group_name) + ": " + text +
                 "; see whether these ranks are alive and make the same group, or pass a longer "
                 "timeout to init_process_group"),
      true);
}

void Rendezvous::end(Status status, bool tell_others) {
  if (phase_ == Phase::kFailed) return;
  phase_ = Phase::kFailed;
  proving_ = false;
  status_ = std::move(status);
  if (!tell_others || size() <= 1) return;

  // Another rank may have been first: then all raise its text.
  const auto present = store_->try_get(key("failed"));
  if (!present.is_ok()) return;
  if (auto first = believed_failure(present.value(), false)) {
    status_ = *std::move(first);
    return;
  }
  FailedBlob failed{status_, options_.wall_ms ? options_.wall_ms() : 0, self_rank(), {options_.self.engine}};
  for (const auto& record : records_) {
    if (record) failed.engines.push_back(record->engine);
  }
  if (!is_leader() && own_ack_ != Ack::kStale) {
    for (const MemberRecord& member : roster_.members) failed.engines.push_back(member.engine);
  }
  // The store may be what failed: nothing better to do than to raise our own text.
  static_cast<void>(store_->set(key("failed"), encode_failed(failed)).is_ok());
}

}  // namespace hybridps::bootstrap
