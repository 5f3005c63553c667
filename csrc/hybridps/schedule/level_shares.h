// hybridps/schedule/level_shares.h: how much of a tensor each owner should own where sums have levels.
//
// Model    An allreduce with levels (plan.h) in which y is what an owner owns. Each node sends y once, to its gateway
// or
//          to the owner. A gateway of m nodes sends m y: the sum, and m - 1 results. An owner sends y to each other
//          node of its region and to each other region's gateway. An uplink carries y, and R - 1 times y for an owner
//          of its region. What arrives is the same. The slowest card or uplink sets the pace.
// Method   Iteration from the given shares: what costs the busiest cards most shrinks. Shares stay as they are unless
//          that gains kGainMin. The tests compare with what can be worked out by hand, and with a search.
// Threads  pure functions. Equal on all ranks: the code uses only operations that IEEE 754 defines to the bit.
#pragma once

#include <vector>

#include "hybridps/schedule/topology.h"

namespace hybridps::schedule {

struct LevelRates {
  std::vector<double> nodes;    // of each node's cards together, any unit, > 0
  std::vector<double> servers;  // of each dedicated server's
  std::vector<double> uplinks;  // of each region; empty: they are not known and do not count
};

/// The time of an allreduce with levels under the topology's weights, in tensor bytes / rate.
double level_time(const Topology& topology, const LevelRates& rates);

/// Weights of the nodes and then of the dedicated servers, with sum 1. A server without weight gets none.
/// Precondition: more than one region.
std::vector<double> level_weights(const Topology& topology, const LevelRates& rates);

}  // namespace hybridps::schedule
