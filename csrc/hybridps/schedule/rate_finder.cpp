#include "hybridps/schedule/rate_finder.h"

#include <algorithm>
#include <utility>

#include "hybridps/schedule/shares.h"

namespace hybridps::schedule {

std::optional<std::vector<double>> RateFinder::learn(const std::vector<NodeReport>& reports,
                                                     const std::vector<double>& shares) {
  const std::size_t n = nodes_.size();
  if (reports.size() != n || shares.size() != n || n < 3) return std::nullopt;
  std::vector<double> delays(n);
  double longest = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    const double last = std::exchange(nodes_[i].last_delay, reports[i].delay_seconds);
    delays[i] = std::max(last, reports[i].delay_seconds);
    longest = std::max(longest, reports[i].delay_seconds);
    if (reports[i].bytes_per_second <= 0.0) return std::nullopt;
  }
  if (!std::exchange(has_last_, true) || longest < kDelayMin) return std::nullopt;

  rates_.assign(n, 0.0);
  for (std::size_t i = 0; i < n; ++i) {
    Node& node = nodes_[i];
    const double carried = reports[i].bytes_per_second;
    if (reports[i].delay_seconds >= longest / 2) {
      node.rate = carried;
      node.age = 0;
    } else if (delays[i] >= longest / 2) {
      node.rate = std::max(node.rate, carried);  // it did so the last time
    } else {
      if (++node.age > kRemembered) node.rate = 0.0;
      if (node.rate > 0.0) node.rate = std::max(node.rate, carried);
    }
    rates_[i] = node.rate > 0.0 ? node.rate : 2.0 * carried;
  }
  Shares best = optimal_shares(rates_);
  Shares now;
  now.worker = shares;
  if (push_pull_time(now, rates_) < kGainMin * best.time) return std::nullopt;
  return best.worker;
}

}  // namespace hybridps::schedule
