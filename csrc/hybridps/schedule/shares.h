// hybridps/schedule/shares.h: how much of a tensor each node should own, from the rates of the network cards.
//
// Model    Every worker node holds `bytes` after its local reduction; cards are full duplex; summing is free; push and
//          pull overlap. A node that owns share y moves (1 + (n - 2) y) tensors each way. A dedicated server with share
//          x moves n x tensors each way. The best shares let every card finish at the same time (water-filling).
// Source   the equal-rate case is Theorem 1 of BytePS (OSDI 2020); for other rates, bisection on the time.
// Threads  pure functions.
#pragma once

#include <vector>

namespace hybridps::schedule {

struct Shares {
  double time = 0.0;              // of one allreduce, in units of tensor bytes / rate
  std::vector<double> worker;     // per worker node, 0..1
  std::vector<double> dedicated;  // per dedicated server; all shares add up to 1
};

/// Rates in any unit, > 0; at least one worker.
Shares optimal_shares(const std::vector<double>& worker_rates, const std::vector<double>& dedicated_rates = {});

/// The time of an allreduce with these shares: the time of the busiest card.
double push_pull_time(const Shares& shares, const std::vector<double>& worker_rates,
                      const std::vector<double>& dedicated_rates = {});

}  // namespace hybridps::schedule
