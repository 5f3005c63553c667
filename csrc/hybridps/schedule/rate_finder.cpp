#include "hybridps/schedule/rate_finder.h"

#include <algorithm>
#include <utility>

#include "hybridps/schedule/shares.h"

namespace hybridps::schedule {

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
    } else if (delays[i] >= longest / 2) {
      card.rate = std::max(card.rate, carried);  // it did so the last time
    } else {
      if (++card.age > kRemembered) card.rate = 0.0;
      if (card.rate > 0.0) card.rate = std::max(card.rate, carried);
    }
    rates_[i] = card.rate > 0.0 ? card.rate : 2.0 * carried;
  }
  const auto servers = rates_.begin() + static_cast<std::ptrdiff_t>(nodes_);
  const std::vector<double> worker_rates(rates_.begin(), servers);
  const std::vector<double> server_rates(servers, rates_.end());
  Shares best = optimal_shares(worker_rates, server_rates);
  if (push_pull_time(shares, worker_rates, server_rates) < kGainMin * best.time) return std::nullopt;
  return best;
}

}  // namespace hybridps::schedule
