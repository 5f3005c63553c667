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
  if (!core::check(rank_ == 0, "rank 0 alone proposes changes")) return;
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
    const wire::PlanAsk ask{drafted->version, drafted->turns};
    for (int member = 1; member < drafted->asked; ++member) host_.send_ask(member, ask, drafted->weights);
    answers_.clear();
    begin(std::move(*drafted));
    answers_[0] = unbound_;
    look_at_answers();
  }
}

void Agreement::on_answer(int member, const wire::PlanAnswer& answer) {
  if (!is_frozen() || answer.version != change_->version) return;
  answers_[member] = answer.first;
  look_at_answers();
}

void Agreement::look_at_answers() {
  if (!is_frozen()) return;
  std::uint64_t first = 0;
  for (int member = 0; member < change_->asked; ++member) {
    if (!host_.is_awaited(member)) continue;
    const auto answer = answers_.find(member);
    if (answer == answers_.end()) return;
    first = std::max(first, answer->second);
  }
  const wire::PlanSwitch change{change_->version, first};
  for (int rank = 1; rank < size_; ++rank) host_.send(rank, change);
  end(first);
}

std::size_t Agreement::tick(core::TimePoint now) {
  if (now < again_at_) return 0;
  begin_next();
  return 1;
}

// --- every rank ------------------------------------------------------------------------------------------------------

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
  answer(ask.version, unbound_);
}

void Agreement::answer(std::uint32_t version, std::uint64_t first) { host_.send(0, wire::PlanAnswer{version, first}); }

void Agreement::on_switch(const wire::PlanSwitch& change) {
  if (is_frozen() && change.version == change_->version && change.first >= unbound_) end(change.first);
}

void Agreement::begin(Change change) {
  numbered_ = last_number(change);
  unbound_ = host_.first_unbound();
  change_ = std::move(change);
}

void Agreement::end(std::uint64_t first) {
  const Change change = std::move(*change_);
  change_.reset();
  is_ending_ = true;
  if (first == wire::kRefused) {
    host_.on_refused(change);
    if (rank_ == 0 && cause_ == Cause::kLeave) {
      wanted_ |= bit(Cause::kLeave);
      again_at_ = core::Clock::now() + kAgainAfter;
    }
  } else {
    newest_ = last_number(change);
    host_.on_switch(change, first);
  }
  is_ending_ = false;
  if (rank_ != 0) {
    if (auto next = std::exchange(next_ask_, {})) on_ask(next->first, std::move(next->second));
  } else if (again_at_ == core::TimePoint::max()) {
    begin_next();
  }
}

}  // namespace hybridps::membership
