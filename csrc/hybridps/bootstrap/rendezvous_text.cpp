// The messages of a rendezvous about the members that it waits for.
#include <algorithm>

#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/core/text.h"

namespace hybridps::bootstrap {
namespace {

constexpr std::size_t kLivesTold = 3;

}  // namespace

std::string Rendezvous::waiting_for() const {
  std::string text;
  if (is_leader() && size() > 1) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      if (gathering_ ? acks_[at] == RosterAck::kNone : !records_[at].has_value()) ranks.push_back(rank);
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
  } else if (shelved_) {
    text = "waiting for another rank of this node to read the roster";
  } else if (own_ack_ == RosterAck::kOk || own_ack_ == RosterAck::kUnproven) {
    text = "waiting for all ranks to confirm the roster";
  } else if (own_ack_ == RosterAck::kStale) {
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
    if (looked++ == kLivesTold || phase_ != RendezvousPhase::kPending) break;
    const std::optional<Bytes> bytes = get(life_key(rank));
    if (!bytes || bytes->empty() || bytes->size() > kTextBytesMax) continue;
    const std::string theirs(bytes->begin(), bytes->end());
    if (theirs == options_.self.incarnation) continue;
    text += "; rank " + std::to_string(rank) + " was last seen in life " + core::quoted(theirs) + " of this group";
  }
  if (!text.empty())
    text += ", this rank is in " + core::quoted(options_.self.incarnation) +
            " (run id, how often the process has made the group), and ranks of two lives do not meet: give "
            "all ranks the same hybridps.Options(incarnation=...), or the same uuid in reconfigure()";
  return text;
}

std::string Rendezvous::unconfirmed_text(const std::vector<int>& ranks) const {
  const MemberRecord& first = roster_.members[static_cast<std::size_t>(ranks.front())];
  const bool may_be_dead = first.made_ms != 0 && first.made_ms < options_.process_started_ms;
  return "waiting for ranks " + core::format_ranks(ranks) + " to confirm the roster (the first: " + describe(first) +
         (may_be_dead ? "; its record is from before this process began: perhaps it has not started again" : "") + ")";
}

std::vector<int> Rendezvous::absent_keys(int first, const std::function<std::string(int)>& key_of) {
  std::vector<int> ranks;
  std::vector<std::string> names;
  for (int rank = first; rank < std::min(size(), kBatch); ++rank) {
    if (rank == self_rank()) continue;
    ranks.push_back(rank);
    names.push_back(key_of(rank));
  }
  if (names.empty()) return ranks;
  fetch(names);
  std::vector<int> absent;
  for (std::size_t i = 0; i < ranks.size() && phase_ == RendezvousPhase::kPending; ++i)
    if (!get(names[i])) absent.push_back(ranks[i]);
  return absent;
}

std::string Rendezvous::find_missing() {
  std::string text = waiting_for();
  if (is_leader() && !gathering_ && size() > 1) {
    std::vector<int> absent;
    for (int rank = 1; rank < size(); ++rank)
      if (!records_[static_cast<std::size_t>(rank)]) absent.push_back(rank);
    text += other_lives(absent);
  }
  // Rank 0 knows the silent ranks, but the member that times out first tells all others.
  if (phase_ == RendezvousPhase::kPending && !is_leader() &&
      (own_ack_ == RosterAck::kOk || own_ack_ == RosterAck::kUnproven)) {
    const std::vector<int> silent = absent_keys(1, [&](int rank) { return ack_key(nonce_, rank); });
    if (phase_ == RendezvousPhase::kPending && !silent.empty()) {
      text = unconfirmed_text(silent);
      if (!note_.empty()) text += "; " + note_;
    }
  }
  if (phase_ == RendezvousPhase::kPending && !is_leader() && own_ack_ == RosterAck::kNone && !proving_ && !shelved_) {
    // Rank 0 cannot tell us who is absent, so look into the store.
    const std::vector<int> absent = absent_keys(0, [&](int rank) { return record_key(rank); });
    if (phase_ == RendezvousPhase::kPending && !absent.empty()) {
      text = absent_text(absent);
      if (size() > kBatch) text += " among the first " + std::to_string(kBatch);
      if (!note_.empty()) text += "; " + note_;
      text += other_lives(absent);
    }
  }
  return text;
}

}  // namespace hybridps::bootstrap
