// hybridps/schedule/level_shares.h: how much of a tensor each owner should own where sums have levels.
//
// Model    An allreduce with levels (plan.h). Let y be what an owner owns of the tensor. For this part
//            a node               sends y once, to its gateway or to the owner
//            a gateway            of m nodes sends m y: the sum, and m - 1 results
//            the owner            sends y to each other node of its region, and to each other region's gateway
//            an uplink            carries y
//            the owner's uplink   carries R - 1 times y, for R regions
//          Each of them receives as much as it sends. The slowest card or uplink sets the pace.
// Method   Iteration from the given shares. In each round, the shares that load the busiest cards most shrink. The new
//          shares must gain kGainMin; otherwise the given shares stay, as they do in very large groups (kWorkMax). The
//          tests compare with results worked out by hand, and with a search.
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
