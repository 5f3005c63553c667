// hybridps/schedule/nic_shares.h: how much of a tensor each rank's server should own where nodes have several network
// cards.
//
// Model    As in shares.h, but a node's ranks go through one or several of its cards each, and several ranks may share
//          one. Plans are rail-aligned: what rank j of a node owns goes, on every other node, through the card of the
//          rank with local index j (modulo its ranks). Rank j of node i, which owns w(i,j) of the tensor, therefore moves
//          (n - 1) w(i,j) as an owner, and as an agent what ranks of its index own elsewhere, each way. A card moves that
//          of all its ranks; a rank with several cards uses them in proportion to their rates.
// Method   One set of cards per node: water-filling (shares.h). Ranks and cards lie the same way on all nodes: each rail
//          is a network of its own, which alone would need the time t; a rail gets a part in proportion to 1 / t, and is
//          water-filled. Both are exact. Else (other numbers of ranks or cards, dedicated servers) iteration: shares
//          shrink where their cards are the busiest. Its tests compare it with a linear program: within 1 %.
// Limits   Where rails of different speed cross (index 0 on the fast card of one node and on the slow one of another) no
//          shares reach what all the cards of a node together would allow.
// Threads  pure functions. Equal on all ranks: only operations that IEEE 754 defines to the bit.
#pragma once

#include <vector>

namespace hybridps::schedule {

struct NicLayout {
  std::vector<int> node_of;                // per rank, dense, as in Topology
  std::vector<std::vector<int>> cards_of;  // per rank: numbers of cards of its node, in rising order, at least one
  std::vector<double> rates;               // per card, any unit, > 0
  std::vector<double> dedicated;           // rates of dedicated servers, each with a card of its own
};

struct OwnerShares {
  double time = 0.0;              // of one allreduce, in units of tensor bytes / rate
  std::vector<double> worker;     // per rank
  std::vector<double> dedicated;  // per dedicated server; all shares add up to 1
};

OwnerShares optimal_owner_shares(const NicLayout& layout);

/// What each card moves each way under these shares, in tensors: cards of nodes, then of dedicated servers.
std::vector<double> card_loads(const OwnerShares& shares, const NicLayout& layout);

/// How many ranks go through the busiest card: 2 where pairs share one, 0.5 where each rank has two.
double ranks_per_card(const NicLayout& layout);

}  // namespace hybridps::schedule
