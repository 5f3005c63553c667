#include "hybridps/membership/agreement.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "hybridps/core/check.h"

namespace hybridps::membership {
namespace {

// The last version number of a change. A change with turns has two versions.
template <typename AskOrChange>
std::uint32_t last_number(const AskOrChange& change) noexcept {
  return change.version + (change.turns.pairs > 0 ? 1 : 0);
}

}  // namespace

// --- rank 0 ----------------------------------------------------------------------------------------------------------

void Agreement::want(Cause cause) {
  if (!core::check(tree_.is_root(), "rank 0 alone proposes changes")) return;
  wanted_ |= bit(cause);
  if (is_frozen())
    look_at_answers();  // the cause may be a server that is no longer awaited
  else
    begin_next();
}

void Agreement::begin_next() {
  again_at_ = core::TimePoint::max();
  for (int i = 0; i < kCauses && !is_frozen() && !is_ending_; ++i) {
    const auto cause = static_cast<Cause>(i);
    if (!wants(cause)) continue;
    wanted_ &= ~bit(cause);
    std::optional<Change> drafted = host_.draft(cause);
    if (!drafted) continue;
    cause_ = cause;
    drafted->version = numbered_ + 1;
    begin(std::move(*drafted));
    look_at_answers();
  }
}

// --- every rank ------------------------------------------------------------------------------------------------------

void Agreement::on_answer(int member, const wire::PlanAnswer& answer) {
  if (!is_frozen() || answer.version != change_->version) return;
  answers_[member] = answer.first;
  look_at_answers();
}

void Agreement::look_at_answers() {
  if (!is_frozen() || has_answered_) return;
  std::uint64_t first = unbound_;
  const auto is_in = [&](int member) {
    const auto answer = answers_.find(member);
    if (answer == answers_.end()) return false;
    first = std::max(first, answer->second);
    return true;
  };
  if (!std::all_of(tree_.children().begin(), tree_.children().end(), is_in)) return;
  for (int server = ranks_; server < ranks_ + change_->servers_asked; ++server)
    if (host_.is_awaited(server) && !is_in(server)) return;
  has_answered_ = true;
  if (tree_.is_root())
    end(first);
  else
    answer(change_->version, first);
}

std::size_t Agreement::tick(core::TimePoint now) {
  if (now < again_at_) return 0;
  begin_next();
  return 1;
}

void Agreement::on_ask(const wire::PlanAsk& ask, std::vector<double> weights) {
  if (is_frozen()) {
    if (!next_ask_ || next_ask_->first.version < ask.version) next_ask_.emplace(ask, std::move(weights));
    return;
  }
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const bool are_weights =
      std::all_of(weights.begin(), weights.end(), [](double w) { return std::isfinite(w) && w >= 0.0; }) &&
      std::isfinite(total) && total > 0.0;
  Change change{ask.version, ask.turns, std::move(weights)};
  if (ask.version <= numbered_ || !are_weights || !host_.can_do(change)) {
    numbered_ = std::max(numbered_, last_number(ask));
    answer(ask.version, wire::kRefused);
    return;
  }
  begin(std::move(change));
  look_at_answers();
}

void Agreement::answer(std::uint32_t version, std::uint64_t first) { host_.send_up({version, first}); }

void Agreement::on_switch(const wire::PlanSwitch& change) {
  if (is_frozen() && change.version == change_->version && change.first >= unbound_) end(change.first);
}

void Agreement::begin(Change change) {
  numbered_ = last_number(change);
  const wire::PlanAsk ask{change.version, change.turns};
  host_.send_down(ask, change.weights);
  for (int server = ranks_; server < ranks_ + change.servers_asked; ++server) host_.ask_server(server, ask);
  unbound_ = host_.first_unbound();
  answers_.clear();
  has_answered_ = false;
  change_ = std::move(change);
}

void Agreement::end(std::uint64_t first) {
  const Change change = std::move(*change_);
  change_.reset();
  host_.send_down(wire::PlanSwitch{change.version, first}, {});
  is_ending_ = true;
  if (first == wire::kRefused) {
    host_.on_refused(change);
    if (tree_.is_root() && cause_ == Cause::kLeave) {
      wanted_ |= bit(Cause::kLeave);
      again_at_ = core::Clock::now() + kAgainAfter;
    }
  } else {
    newest_ = last_number(change);
    host_.on_switch(change, first);
  }
  is_ending_ = false;
  if (!tree_.is_root()) {
    if (auto next = std::exchange(next_ask_, {})) on_ask(next->first, std::move(next->second));
  } else if (again_at_ == core::TimePoint::max()) {
    begin_next();
  }
}

}  // namespace hybridps::membership
