#include "hybridps/schedule/rate_finder.h"

#include <algorithm>
#include <utility>

#include "hybridps/schedule/shares.h"

namespace hybridps::schedule {
namespace {

// A try of a slow card must give the card at least this many times its present share.
constexpr double kTriedMin = 1.2;

bool same(const Shares& a, const Shares& b) { return a.worker == b.worker && a.dedicated == b.dedicated; }
bool alike(std::uint64_t a, std::uint64_t b) { return a <= 2 * b && b <= 2 * a; }

}  // namespace

std::vector<double> RateFinder::parts(const Shares& shares) const {
  std::vector<double> parts;
  const auto n = static_cast<double>(nodes_);
  for (const double share : shares.worker) parts.push_back(1.0 + (n - 2.0) * share);
  for (const double share : shares.dedicated) parts.push_back(n * share);
  return parts;
}

std::optional<Shares> RateFinder::take_back() {
  held_ = std::exchange(held_next_, std::min(2 * held_next_, kHeldMax));
  held_time_ = proof_->time;
  held_bytes_ = proof_->bytes;
  for (MeasuredCard& card : cards_) card = MeasuredCard{};
  has_last_ = false;
  takes_back_ = true;
  Shares before = std::move(proof_->before);
  proof_.reset();
  return before;
}

double RateFinder::set_rates(const std::vector<CardReport>& reports, const std::vector<double>& part,
                             const std::vector<double>& delays, double pace, double longest) {
  const std::size_t n = cards_.size();
  double fastest = 0.0;
  rates_.assign(n, 0.0);
  for (std::size_t i = 0; i < n; ++i) {
    MeasuredCard& card = cards_[i];
    const double carried =
        i < nodes_ ? std::max(reports[i].bytes_per_second, part[i] * pace) : reports[i].bytes_per_second;
    const double last = std::exchange(card.last_carried, carried);
    if (reports[i].delay_seconds >= longest / 2) {
      card.rate = std::max(carried, last);  // one slow operation says nothing about the card
      card.age = card.free = 0;
      if (std::exchange(card.is_tried, false))
        card.remembered = carried > kTriedMin * card.was ? kRemembered : std::min(2 * card.remembered, kRememberedMax);
    } else if (delays[i] >= longest / 2) {
      card.rate = std::max(card.rate, carried);  // it set the pace in the last operation
      card.free = 0;
    } else {
      ++card.free;
      if (++card.age > card.remembered && card.rate > 0.0) {
        card.is_tried = true;
        card.was = std::exchange(card.rate, 0.0);
      }
      if (card.rate > 0.0) card.rate = std::max(card.rate, carried);
    }
    rates_[i] = card.rate > 0.0 ? card.rate : 2.0 * carried;
    fastest = std::max(fastest, card.rate > 0.0 ? card.rate : carried);
  }
  return fastest;
}

std::optional<Shares> RateFinder::learn(const std::vector<CardReport>& reports, const Shares& shares,
                                        std::uint64_t bytes) {
  takes_back_ = false;
  const std::size_t n = cards_.size();
  if (reports.size() != n || shares.worker.size() != nodes_ || shares.dedicated.size() != n - nodes_ || nodes_ < 3)
    return std::nullopt;
  std::vector<double> delays(n);
  double longest = 0.0;
  std::vector<bool> is_active(n);
  for (std::size_t i = 0; i < n; ++i) {
    const double last = std::exchange(cards_[i].last_delay, reports[i].delay_seconds);
    delays[i] = std::max(last, reports[i].delay_seconds);
    longest = std::max(longest, reports[i].delay_seconds);
    const bool idle = i >= nodes_ && shares.dedicated[i - nodes_] == 0.0;
    if (reports[i].bytes_per_second <= 0.0 && !idle) return std::nullopt;
    is_active[i] = !idle;
  }
  const std::vector<double> part = parts(shares);
  std::vector<double> paces;
  for (std::size_t i = 0; i < nodes_; ++i) paces.push_back(reports[i].bytes_per_second / part[i]);
  std::nth_element(paces.begin(), paces.begin() + static_cast<std::ptrdiff_t>(nodes_ / 2), paces.end());
  const double pace = paces[nodes_ / 2];
  const double time = 1.0 / pace;
  const bool same_shares = same(shares, last_shares_);
  if (!same_shares)
    for (MeasuredCard& card : cards_) card.free = 0;
  const bool as_before = same_shares && alike(bytes, last_bytes_);
  const double best_time = as_before ? std::min(time, last_time_) : time;
  last_time_ = time;
  last_bytes_ = bytes;
  last_shares_ = shares;
  const bool proves = proof_ && alike(bytes, proof_->bytes);
  if (proves && time < kSlower * proof_->time) {
    proof_.reset();
    held_next_ = kHeld;
  }
  if (proof_ && proves && ++proof_->slower > kSlowerMax) return take_back();
  const bool is_held = held_ > 0 && held_-- > 0 && (!alike(bytes, held_bytes_) || time < kALotSlower * held_time_);
  if (!std::exchange(has_last_, true) || longest < kDelayMin) return std::nullopt;

  std::size_t active = 0;
  std::size_t setters = 0;  // cards that set the pace in one of the last two operations
  for (std::size_t i = 0; i < n; ++i) {
    if (!is_active[i]) continue;
    ++active;
    setters += delays[i] >= longest / 2 ? 1 : 0;
  }
  const double fastest = set_rates(reports, part, delays, pace, longest);
  if (2 * setters > active)
    for (std::size_t i = 0; i < n; ++i)
      if (cards_[i].rate == 0.0 && cards_[i].free < kBelieved) rates_[i] = std::min(rates_[i], fastest);
  const auto servers = rates_.begin() + static_cast<std::ptrdiff_t>(nodes_);
  const std::vector<double> worker_rates(rates_.begin(), servers);
  const std::vector<double> server_rates(servers, rates_.end());
  Shares best = optimal_shares(worker_rates, server_rates);
  bool tries = false;
  for (std::size_t i = 0; i < n; ++i) {
    if (!cards_[i].is_tried) continue;
    const double has = i < nodes_ ? shares.worker[i] : shares.dedicated[i - nodes_];
    const double gets = i < nodes_ ? best.worker[i] : best.dedicated[i - nodes_];
    if (gets > kTriedMin * has) {
      tries = true;
    } else {  // the card has its full share already
      cards_[i].is_tried = false;
      cards_[i].remembered = kRemembered;
    }
  }
  if (!tries && push_pull_time(shares, worker_rates, server_rates) < kGainMin * best.time)
    return proof_ && proves && proof_->slower >= 2 ? take_back() : std::nullopt;
  if (is_held) return std::nullopt;
  held_ = 0;
  if (!tries && !proof_) proof_ = Baseline{shares, best_time, bytes, 0};
  return best;
}

}  // namespace hybridps::schedule
