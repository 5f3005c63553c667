#include "hybridps/engine/liveness.h"

#include <algorithm>
#include <chrono>
#include <iterator>

#include "hybridps/core/text.h"

namespace hybridps::engine {
namespace {

constexpr auto kSuspectFor = std::chrono::milliseconds(50);

}  // namespace

void Heartbeats::on_asked(core::EngineId peer, core::TimePoint now) {
  if (asked_at_.emplace(peer, now).second) next_ = std::min(next_, now + patience_for(peer));
}

Heartbeats::Findings Heartbeats::look(core::TimePoint now) {
  Findings found;
  if (now < next_) return found;
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
  for (auto& [peer, asked_at] : asked_at_) {
    if (stood_still) asked_at = now;
    const core::Duration patience = patience_for(peer);
    next_ = std::min(next_, std::max(now, asked_at + patience));
    if (now - asked_at >= patience) found.silent.emplace_back(peer, now - asked_at);
  }
  return found;
}

std::string Heartbeats::own_fault(core::TimePoint now) const {
  if (stood_still_for_ < shortest_patience() || now - stood_still_until_ >= shortest_patience()) return {};
  return "stood still for " + core::format_seconds(core::to_seconds(stood_still_for_)) +
         " (stopped, or without a core to run on)";
}

std::vector<Suspects::Suspect> Suspects::judge(core::TimePoint now) {
  for (Suspect& suspect : reported_) {
    suspect.due = now + kSuspectFor;
    waiting_.push_back(std::move(suspect));
  }
  reported_.clear();
  const auto first = std::find_if(waiting_.begin(), waiting_.end(), [now](const Suspect& s) { return s.due > now; });
  std::vector<Suspect> due(std::make_move_iterator(waiting_.begin()), std::make_move_iterator(first));
  waiting_.erase(waiting_.begin(), first);
  return due;
}

}  // namespace hybridps::engine
