#include "hybridps/schedule/shares.h"

#include <algorithm>
#include <numeric>

namespace hybridps::schedule {
namespace {

// The largest shares that the cards can serve within `time`; empty if a worker cannot even move its own tensor.
std::vector<double> served_within(double time, const std::vector<double>& workers,
                                  const std::vector<double>& dedicated) {
  const auto n = static_cast<double>(workers.size());
  std::vector<double> shares;
  for (const double rate : workers) {
    const double budget = rate * time;  // in tensors
    if (budget < 1.0 - 1e-12) return {};
    shares.push_back(n <= 2 ? 1.0 : std::clamp((budget - 1.0) / (n - 2.0), 0.0, 1.0));
  }
  for (const double rate : dedicated) shares.push_back(std::min(1.0, rate * time / n));
  return shares;
}

double total(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

}  // namespace

Shares optimal_shares(const std::vector<double>& worker_rates, const std::vector<double>& dedicated_rates) {
  Shares result;
  const std::size_t n = worker_rates.size();
  if (n < 2) {
    result.worker.assign(n, 1.0);
    result.dedicated.assign(dedicated_rates.size(), 0.0);
    return result;
  }
  double low =
      1.0 / *std::min_element(worker_rates.begin(), worker_rates.end());  // the floor: send and receive the tensor once
  double high = low * std::max(1.0, static_cast<double>(n) - 1.0);        // the slowest could own everything
  if (total(served_within(low, worker_rates, dedicated_rates)) >= 1.0) high = low;
  for (int i = 0; i < 200 && high - low > 1e-13 * high; ++i) {
    const double middle = (low + high) / 2;
    (total(served_within(middle, worker_rates, dedicated_rates)) >= 1.0 ? high : low) = middle;
  }
  std::vector<double> shares = served_within(high, worker_rates, dedicated_rates);
  const double sum = total(shares);
  for (double& share : shares) share /= sum;  // at the floor there is slack: spread it
  result.time = high;
  result.worker.assign(shares.begin(), shares.begin() + static_cast<std::ptrdiff_t>(n));
  result.dedicated.assign(shares.begin() + static_cast<std::ptrdiff_t>(n), shares.end());
  return result;
}

double push_pull_time(const Shares& shares, const std::vector<double>& worker_rates,
                      const std::vector<double>& dedicated_rates) {
  const auto n = static_cast<double>(worker_rates.size());
  double time = 0.0;
  for (std::size_t i = 0; i < worker_rates.size(); ++i)
    time = std::max(time, (1.0 + (n - 2.0) * shares.worker[i]) / worker_rates[i]);
  for (std::size_t j = 0; j < dedicated_rates.size(); ++j)
    if (shares.dedicated[j] > 0.0) time = std::max(time, n * shares.dedicated[j] / dedicated_rates[j]);
  return time;
}

}  // namespace hybridps::schedule
