// hybridps/schedule/topology.h: which ranks share which node, which nodes a region, and which dedicated servers help.
//
// Threads  immutable after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybridps::schedule {

/// The region of a dedicated server that is in none of a group's regions.
inline constexpr int kNoRegion = -1;

/// How the ranks of a node share the node's network cards, where not all ranks use the same card.
struct CardUse {
  /// For each rank, the part of its node's weight that its server owns; 1 in sum for each node. Empty: equal parts.
  std::vector<double> parts;
  /// Ranks that use the busiest card (nic_shares.h); 0: all ranks of a node use one card.
  double ranks_per_card = 0.0;
};

/// Which ranks share which node, and which dedicated servers help. Rank and node numbers count within the group.
/// Dedicated server d is the owner with number size() + d.
class Topology {
 public:
  /// node_of[rank] is in [0, nodes), and every node has at least one rank. weights: one per node, the share of a tensor
  /// that the node's ranks own together, >= 0, not all 0; empty: equal shares. server_weights: the share of each
  /// dedicated server. rank: this process; size() + d on dedicated server d.
  Topology(std::vector<int> node_of, int rank, std::vector<double> weights = {},
           std::vector<double> server_weights = {}, CardUse cards = {});
  /// A copy of this topology with other weights: of the nodes, and then of the dedicated servers, which may be more or
  /// fewer than here. Further servers are in kNoRegion.
  Topology with_weights(std::vector<double> weights) const;
  /// A copy of this topology with the nodes in regions. region_of[node] is in [0, regions), and every region has a
  /// node.
  Topology with_regions(std::vector<int> region_of) const;
  /// A copy of this topology with the region of each dedicated server; kNoRegion: in none of these.
  Topology with_server_regions(std::vector<int> region_of_server) const;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(node_of_.size()); }
  int nodes() const noexcept { return static_cast<int>(ranks_of_.size()); }
  int servers() const noexcept { return static_cast<int>(server_weights_.size()); }
  bool is_dedicated(int owner) const noexcept { return owner >= size(); }
  /// -1 for a dedicated server, which shares memory with no rank.
  int node_of(int rank) const noexcept { return is_dedicated(rank) ? -1 : node_of_[static_cast<std::size_t>(rank)]; }
  int my_node() const noexcept { return node_of(rank_); }
  int local_index(int rank) const noexcept { return local_index_[static_cast<std::size_t>(rank)]; }
  /// Ranks of a node in ascending order; local_index is a rank's place in it.
  const std::vector<int>& ranks_of(int node) const noexcept { return ranks_of_[static_cast<std::size_t>(node)]; }
  /// 1 where no regions are known.
  int regions() const noexcept { return static_cast<int>(nodes_in_.size()); }
  int region_of(int node) const noexcept { return region_of_[static_cast<std::size_t>(node)]; }
  /// Of a rank or a dedicated server; kNoRegion: a server in none of the regions, and any server where no regions are
  /// known.
  int region_of_owner(int owner) const noexcept;
  /// Nodes of a region in ascending order.
  const std::vector<int>& nodes_in(int region) const noexcept { return nodes_in_[static_cast<std::size_t>(region)]; }
  /// The node that acts for `region` in spans with levels of `owner`. In the owner's own region that is node_of(owner):
  /// -1 for a dedicated server, since there the owner itself acts. `excluded`: a node that acts for no other. -1: no
  /// node is left.
  int gateway_node(int region, int owner, int excluded = -1) const noexcept;
  /// The node that `node` contributes to in such a span: that of its gateway, or for a gateway's node, node_of(owner).
  int parent_node(int node, int owner, int excluded = -1) const noexcept;
  /// The nodes whose contributions `owner` adds, and the order: first inside each part, then over the parts. One part
  /// for each region, in order, so that a sum has the same bits with levels and without. With levels a part is the
  /// node of the region's gateway, but for the owner's own region.
  std::vector<std::vector<std::uint32_t>> parts_of(int owner, bool levels) const;
  /// Of the nodes, and then of the dedicated servers.
  std::vector<double> weights() const;
  double weight(int node) const noexcept { return weights_[static_cast<std::size_t>(node)]; }
  /// The weight of the part that a rank's own server owns.
  double owner_weight(int rank) const noexcept {
    const double of_node = weight(node_of(rank));
    return cards_.parts.empty() ? of_node / static_cast<double>(ranks_of(node_of(rank)).size())
                                : of_node * cards_.parts[static_cast<std::size_t>(rank)];
  }
  double server_weight(int server) const noexcept { return server_weights_[static_cast<std::size_t>(server)]; }
  /// The largest number of a node's ranks on one card; below 1 where a rank has several cards.
  double ranks_per_card() const noexcept;
  /// How many streams may arrive at one card at a time: from each other node and each server to each rank of the card.
  std::uint64_t fan() const noexcept;
  /// The rank that acts for `node` in spans owned by `owner`.
  int agent(int node, int owner) const noexcept;
  /// The number of rails: parts of a tensor that the nodes reduce inside before the engine gets them (Scope). Equal to
  /// the number of ranks of the largest node.
  int rails() const noexcept;
  /// The rank of `node` that holds the part `rail`.
  int rail_rank(int node, int rail) const noexcept;

 private:
  std::vector<int> node_of_;
  int rank_;
  std::vector<std::vector<int>> ranks_of_;
  std::vector<int> local_index_;
  std::vector<int> region_of_;              // by node
  std::vector<std::vector<int>> nodes_in_;  // by region
  std::vector<int> server_region_;          // by dedicated server
  std::vector<double> weights_;
  std::vector<double> server_weights_;
  CardUse cards_;
};

}  // namespace hybridps::schedule
