// hybridps/schedule/nic_shares.h: how much of a tensor each rank's server should own where nodes have several network
// cards.
//
// Model    As in shares.h, but each rank of a node uses one or several of the node's cards, and several ranks may share
//          a card. Plans are rail-aligned: bytes that rank j of a node owns go, on every other node, through the card
//          of the rank with local index j (modulo the node's ranks). Rank j of node i owns w(i,j) of the tensor. Each
//          way, the rank moves (n - 1) w(i,j) as an owner, and as an agent the bytes that ranks with its index own
//          elsewhere. A card moves the bytes of all its ranks. A rank with several cards uses the cards in proportion
//          to their rates.
// Method   One set of cards per node: water-filling (shares.h). Same layout of ranks and cards on all nodes: each rail
//          is a separate network, which alone would need the time t. A rail gets a part in proportion to 1 / t, and is
//          water-filled. Both are exact. Other cases (different numbers of ranks or cards, dedicated servers):
//          iteration, in which shares on the busiest cards shrink. The tests compare the iteration with a linear
//          program: within 1 %.
// Limits   Where rails of different speed cross (index 0 on one node's fast card and on another node's slow card), no
//          shares reach what all cards of a node together would allow.
// Threads  pure functions. Equal on all ranks: the code uses only operations that IEEE 754 defines to the bit.
#pragma once

#include <vector>

namespace hybridps::schedule {

struct NicLayout {
  std::vector<int> node_of;                // per rank, dense, as in Topology
  std::vector<std::vector<int>> cards_of;  // per rank: numbers of cards of its node, in rising order, at least one
  std::vector<double> rates;               // per card, any unit, > 0
  std::vector<double> dedicated;           // rates of dedicated servers, each with a card of its own
  bool are_rates_known = false;            // else all rates are 1
};

struct OwnerShares {
  double time = 0.0;              // of one allreduce, in units of tensor bytes / rate
  std::vector<double> worker;     // per rank
  std::vector<double> dedicated;  // per dedicated server; all shares add up to 1
};

OwnerShares optimal_owner_shares(const NicLayout& layout);

/// What each card moves each way under these shares, in tensors: first cards of nodes, then cards of dedicated servers.
std::vector<double> card_loads(const OwnerShares& shares, const NicLayout& layout);

/// How many ranks use the busiest card: 2 where two ranks share each card, 0.5 where each rank has two cards.
double ranks_per_card(const NicLayout& layout);

}  // namespace hybridps::schedule
