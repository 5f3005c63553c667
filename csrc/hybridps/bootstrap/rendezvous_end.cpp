// How a rendezvous ends without a group: a failure in the store, a member that is gone, different lists of members, a
// timeout.
#include <algorithm>
#include <bit>
#include <chrono>

#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/bootstrap/store_notes.h"
#include "hybridps/core/text.h"

namespace hybridps::bootstrap {

using core::Code;
using core::Status;
using core::TimePoint;
using std::chrono::milliseconds;

Status announce_failure(KeyValueStore& store, std::string_view key_prefix, int rank, const Status& failure,
                        std::uint64_t wall_ms, std::uint64_t process_started_ms) {
  const std::string key = std::string(key_prefix) + "/failed";
  const core::Result<std::optional<Bytes>> present = store.try_get(key);
  // kMismatch: the value there lacks our seal. A restarted job must not find that value again.
  if (!present.is_ok() && present.status().code() != Code::kMismatch) return present.status();
  if (present.is_ok() && present.value()) {
    const std::optional<FailedBlob> first = decode_failed(*present.value());
    if (first && written_since(*first, process_started_ms)) return Status::ok();
  }
  return store.set(key, encode_failed({failure, wall_ms, rank, {}}));
}

void Rendezvous::find_gone(TimePoint now) {
  if (!options_.departures || size() == 1 || options_.departures->count() == departures_seen_) return;
  const std::uint64_t count = options_.departures->count();
  // A member may leave after the group became valid, with its part done. So poll before judging.
  poll(now);
  if (phase_ != RendezvousPhase::kPending) return;
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
                             ". What to do: start that process again, or make the group without it. If the process "
                             "still runs, let it destroy all of its groups and make them again"),
      true);
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

// A failure that rank 0 cleared may still be of this life, if its writer wrote it before rank 0 came. The store cannot
// tell this case from an earlier life's failure whose writer has not come again yet. But a writer that comes again
// publishes another record, which is newer than the failure.
std::optional<Status> Rendezvous::unreplaced_failure() {
  if (!cleared_failed_) return std::nullopt;
  const std::optional<FailedBlob> failed = decode_failed(*cleared_failed_);
  if (!failed) return std::nullopt;
  if (failed->engines.empty()) {  // the writer had no record; a record from before the failure is of an earlier life
    if (failed->rank == self_rank() || failed->rank >= size()) return std::nullopt;
    const std::optional<Bytes> bytes = get(record_key(failed->rank));
    const core::Result<MemberRecord> there = decode_record(bytes.value_or(Bytes()));
    const bool is_older = there.is_ok() && there.value().made_ms != 0 && there.value().made_ms < failed->wall_ms;
    if (bytes && !is_older) return std::nullopt;
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
  std::string text = "group " + core::quoted(options_.group_name) + ", " + options_.life + ": rank " +
                     std::to_string(rank) + " should be " + options_.expected[static_cast<std::size_t>(rank)].where +
                     ", but ";
  if (!record.is_ok()) {
    text += "its record cannot be read (" + std::string(record.status().message()) + ")";
  } else if (record.value().engine != options_.expected[static_cast<std::size_t>(rank)].engine) {
    text += "it is " + describe(record.value()) + ": " + options_.life + " is already used by another group";
  } else {
    text += "it was given other members, or the same members in another order";
  }
  end(Status(Code::kMismatch,
             text +
                 ". What to do: give all members of a group the same handles in the same order, and every group, each "
                 "time, a uuid that was never used before"),
      true);
}

std::string Rendezvous::disagreement(const MemberRecord& other) const {
  const MemberRecord& self = options_.self;
  if (self.members.empty() || other.members.empty() || other.members == self.members) return {};
  return "ranks name different members for group " + core::quoted(options_.group_name) + ": " + describe(self) +
         " names " + self.members + ", " + describe(other) + " names " + other.members;
}

bool Rendezvous::is_of_this_life(const MemberRecord& other) const {
  return options_.process_started_ms != 0 && other.made_ms >= options_.process_started_ms &&
         other.incarnation == options_.self.incarnation;
}

bool Rendezvous::end_if_disagrees(const MemberRecord& other) {
  const std::string text = disagreement(other);
  if (text.empty() || !is_of_this_life(other)) return false;
  // A member of a group that is valid without us keeps its group. So look at the newest head.
  fetched_.erase(key("head"));
  const std::optional<Bytes> bytes = get(key("head"));
  const std::optional<Head> head = bytes ? decode_head(*bytes) : std::nullopt;
  bool valid = false;
  if (head && head->state == HeadState::kValid) {
    const std::optional<Bytes> roster = get_roster(*head);
    if (!roster) return phase_ != RendezvousPhase::kPending;
    const core::Result<Roster> decoded = decode_roster(*roster);
    valid = decoded.is_ok() && is_of_this_life(decoded.value().members.front());
  }
  if (phase_ == RendezvousPhase::kPending)
    end(Status(Code::kMismatch, text + ". What to do: let all ranks of the job make the same groups in the same order "
                                       "with the same lists, also groups that they are not in"),
        !valid);
  return true;
}

std::vector<std::string> Rendezvous::other_list_keys() const {
  if (size() == 1 || options_.self.members.empty()) return {};
  std::vector<std::string> names{record_key(self_rank())};
  if (!is_leader()) names.push_back(key("list"));
  return names;
}

bool Rendezvous::looks_at_lists() const noexcept { return std::has_single_bit(polls_ / kPollsPerFailedLook); }

void Rendezvous::find_other_lists() {
  for (const std::string& name : other_list_keys()) {
    const std::optional<Bytes> bytes = phase_ == RendezvousPhase::kPending ? get(name) : std::nullopt;
    if (!bytes) continue;
    if (const core::Result<MemberRecord> record = decode_record(*bytes); record.is_ok())
      end_if_disagrees(record.value());
  }
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
  if (phase_ != RendezvousPhase::kPending) return false;
  const bool grace_is_over = now - started_at_ >= kForeignGrace;
  if (auto failure = believed_failure(bytes, grace_is_over)) {
    end(*std::move(failure), false);
    return true;
  }
  if (auto failure = grace_is_over ? unreplaced_failure() : std::nullopt;
      failure && phase_ == RendezvousPhase::kPending) {
    end(*std::move(failure), true);
    return true;
  }
  if (is_named() && failed_looked_ && phase_ == RendezvousPhase::kPending) {
    const std::optional<Bytes> own = get(record_key(self_rank()));
    const core::Result<Bytes> ours = encode(options_.self);
    if (own && ours.is_ok() && *own != ours.value()) {
      end_taken(self_rank(), *own);
      return true;
    }
  }
  // Two members that come at the same moment have not seen each other. So look again, ever more rarely, because a look
  // costs the store's host.
  if (looks_at_lists()) find_other_lists();
  if (phase_ != RendezvousPhase::kPending) return true;
  if (!failed_looked_) {
    failed_looked_ = true;
    failed_first_ = bytes;
    // A life with a name may own this failure, so rank 0 does not clear it. time_out() names the failure.
    if (is_leader() && !is_named() && bytes && *bytes != cleared_failure()) {
      put(key("failed"), cleared_failure());
      failed_first_ = cleared_failure();
      cleared_failed_ = bytes;
    }
  }
  return false;
}

void Rendezvous::time_out(TimePoint now) {
  std::string text = find_missing();
  if (phase_ != RendezvousPhase::kPending) return;
  const std::optional<Bytes> bytes = get(key("failed"));
  if (phase_ != RendezvousPhase::kPending) return;
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
  if (phase_ == RendezvousPhase::kFailed) return;
  phase_ = RendezvousPhase::kFailed;
  proving_ = false;
  status_ = std::move(status);
  if (!tell_others || size() <= 1) return;

  // Another rank may have been first. Then all members raise the text of that rank.
  const auto present = store_->try_get(key("failed"));
  if (!present.is_ok() && present.status().code() != Code::kMismatch) return;  // kMismatch: as in announce_failure()
  if (auto first = present.is_ok() ? believed_failure(present.value(), false) : std::nullopt) {
    status_ = *std::move(first);
    return;
  }
  FailedBlob failed{status_, options_.wall_ms ? options_.wall_ms() : 0, self_rank(), {}};
  if (published_) failed.engines.push_back(options_.self.engine);
  for (const auto& record : records_) {
    if (record) failed.engines.push_back(record->engine);
  }
  if (!is_leader() && own_ack_ != RosterAck::kStale) {
    for (const MemberRecord& member : roster_.members) failed.engines.push_back(member.engine);
  }
  // The store itself may have failed. Then we can only raise our own text.
  static_cast<void>(store_->set(key("failed"), encode_failed(failed)).is_ok());
}

}  // namespace hybridps::bootstrap
