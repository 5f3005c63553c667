#include "hybridps/engine/evidence.h"

#include <algorithm>
#include <chrono>

#include "hybridps/core/text.h"
#include "hybridps/transport/endpoint.h"

namespace hybridps::engine {
namespace {

constexpr auto kLostFor = std::chrono::milliseconds(50);

}  // namespace

void Evidence::on_asked(core::EngineId peer, core::TimePoint now) {
  if (asked_at_.emplace(peer, now).second) next_ = std::min(next_, now + patience_for(peer));
}

void Evidence::on_lost(core::EngineId peer, Connection connection, core::Status cause) {
  // What ends a process, or spoils its bytes, is not excused by a data connection that stands.
  const bool is_final = cause.message() == transport::kEndedWithoutClosing ||
                        cause.message().find(transport::kChangedOnTheWay) != std::string_view::npos;
  if (connection == Connection::kControl && !is_final && facts_of_(peer).data_serves_control) return;
  reported_.push_back({peer, connection, std::move(cause)});
}

Evidence::Findings Evidence::look(core::TimePoint now) {
  Findings found;
  if (now >= next_) look_for_silence(now, found);
  judge_lost(now, found);
  return found;
}

core::TimePoint Evidence::next_due() const noexcept {
  return waiting_.empty() ? next_ : std::min(next_, waiting_.front().due);
}

void Evidence::look_for_silence(core::TimePoint now, Findings& found) {
  const bool is_first = next_ping_ == core::TimePoint{};
  if (is_first) next_ping_ = now + pause_;
  const core::Duration late = is_first ? core::Duration::zero() : now - next_;
  const bool stood_still = late > shortest_patience() / 4;
  if (stood_still) {
    stood_still_for_ = late + pause_;
    stood_still_until_ = now;
  }
  // Twice per interval: so a peer that stops right after an answer is found within its patience plus half an interval.
  if (now >= next_ping_) {
    next_ping_ = now + pause_;
    found.to_ping.assign(watched_.begin(), watched_.end());
  }
  next_ = next_ping_;
  std::vector<core::EngineId> excused;
  for (auto& [peer, asked_at] : asked_at_) {
    if (stood_still) asked_at = now;
    const core::Duration patience = patience_for(peer);
    const core::Duration silence = now - asked_at;
    if (silence >= patience && facts_of_(peer).lacks_descriptors) {
      excused.push_back(peer);
      continue;
    }
    next_ = std::min(next_, std::max(now, asked_at + patience));
    if (silence >= patience)
      found.verdicts.push_back(
          {peer,
           core::Status(core::Code::kPeerDead, "it sent no heartbeat for " +
                                                   core::format_seconds(core::to_seconds(silence)) +
                                                   " (stopped, or cut off from the network)"),
           /*silent=*/true});
  }
  for (const core::EngineId peer : excused) on_heard(peer);
}

void Evidence::judge_lost(core::TimePoint now, Findings& found) {
  for (Lost& lost : reported_) {
    lost.due = now + kLostFor;
    waiting_.push_back(std::move(lost));
  }
  reported_.clear();
  const auto first = std::find_if(waiting_.begin(), waiting_.end(), [now](const Lost& lost) { return lost.due > now; });
  for (auto lost = waiting_.begin(); lost != first; ++lost) {
    // A peer may claim to be on this node, and count as being on another one.
    if (lost->connection == Connection::kMemory && !facts_of_(lost->peer).is_local) continue;
    found.verdicts.push_back({lost->peer, std::move(lost->cause)});
  }
  waiting_.erase(waiting_.begin(), first);
}

std::string Evidence::own_fault(core::TimePoint now) const {
  if (stood_still_for_ < shortest_patience() || now - stood_still_until_ >= shortest_patience()) return {};
  return "stood still for " + core::format_seconds(core::to_seconds(stood_still_for_)) +
         " (stopped, or without a core to run on)";
}

}  // namespace hybridps::engine
