#include "hybridps/schedule/rate_finder.h"

#include <algorithm>
#include <utility>

#include "hybridps/schedule/shares.h"

namespace hybridps::schedule {
namespace {

// A try that would give less than so many times what it has is none.
constexpr double kTriedMin = 1.2;

}  // namespace

std::optional<Shares> RateFinder::learn(const std::vector<CardReport>& reports, const Shares& shares) {
  const std::size_t n = cards_.size();
  if (reports.size() != n || shares.worker.size() != nodes_ || shares.dedicated.size() != n - nodes_ || nodes_ < 3)
    return std::nullopt;
  std::vector<double> delays(n);
  double longest = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    const double last = std::exchange(cards_[i].last_delay, reports[i].delay_seconds);
    delays[i] = std::max(last, reports[i].delay_seconds);
    longest = std::max(longest, reports[i].delay_seconds);
    const bool idle = i >= nodes_ && shares.dedicated[i - nodes_] == 0.0;
    if (reports[i].bytes_per_second <= 0.0 && !idle) return std::nullopt;
  }
  if (!std::exchange(has_last_, true) || longest < kDelayMin) return std::nullopt;

  rates_.assign(n, 0.0);
  for (std::size_t i = 0; i < n; ++i) {
    Card& card = cards_[i];
    const double carried = reports[i].bytes_per_second;
    if (reports[i].delay_seconds >= longest / 2) {
      card.rate = carried;
      card.age = 0;
      if (std::exchange(card.is_tried, false))
        card.remembered = carried > kTriedMin * card.was ? kRemembered : std::min(2 * card.remembered, kRememberedMax);
    } else if (delays[i] >= longest / 2) {
      card.rate = std::max(card.rate, carried);  // it did so the last time
    } else {
      if (++card.age > card.remembered && card.rate > 0.0) {
        card.is_tried = true;
        card.was = std::exchange(card.rate, 0.0);
      }
      if (card.rate > 0.0) card.rate = std::max(card.rate, carried);
    }
    rates_[i] = card.rate > 0.0 ? card.rate : 2.0 * carried;
  }
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
    } else {  // it has what it can have
      cards_[i].is_tried = false;
      cards_[i].remembered = kRemembered;
    }
  }
  if (!tries && push_pull_time(shares, worker_rates, server_rates) < kGainMin * best.time) return std::nullopt;
  return best;
}

}  // namespace hybridps::schedule
