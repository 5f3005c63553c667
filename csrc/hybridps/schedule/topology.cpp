#include "hybridps/schedule/topology.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

namespace hybridps::schedule {

Topology::Topology(std::vector<int> node_of, int rank, std::vector<double> weights, std::vector<double> server_weights,
                   CardUse cards)
    : node_of_(std::move(node_of)),
      rank_(rank),
      weights_(std::move(weights)),
      server_weights_(std::move(server_weights)),
      cards_(std::move(cards)) {
  int nodes = 0;
  for (const int node : node_of_) nodes = std::max(nodes, node + 1);
  ranks_of_.resize(static_cast<std::size_t>(nodes));
  for (std::size_t r = 0; r < node_of_.size(); ++r) {
    auto& ranks = ranks_of_[static_cast<std::size_t>(node_of_[r])];
    local_index_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(r));
  }
  if (weights_.empty()) weights_.assign(static_cast<std::size_t>(nodes), 1.0);
  assert(weights_.size() == static_cast<std::size_t>(nodes));
  region_of_.assign(static_cast<std::size_t>(nodes), 0);
  nodes_in_.resize(1);
  for (int node = 0; node < nodes; ++node) nodes_in_[0].push_back(node);
  server_region_.assign(server_weights_.size(), kNoRegion);
  assert(cards_.parts.empty() || cards_.parts.size() == node_of_.size());
}

std::vector<double> Topology::weights() const {
  std::vector<double> all = weights_;
  all.insert(all.end(), server_weights_.begin(), server_weights_.end());
  return all;
}

Topology Topology::with_weights(std::vector<double> weights) const {
  const auto servers = weights.begin() + nodes();
  std::vector<double> server_weights(servers, weights.end());
  weights.erase(servers, weights.end());
  Topology copy(node_of_, rank_, std::move(weights), std::move(server_weights), cards_);
  copy.region_of_ = region_of_;
  copy.nodes_in_ = nodes_in_;
  copy.server_region_ = server_region_;
  copy.server_region_.resize(copy.server_weights_.size(), kNoRegion);
  return copy;
}

Topology Topology::with_regions(std::vector<int> region_of) const {
  assert(region_of.size() == ranks_of_.size());
  Topology copy = *this;
  copy.nodes_in_.assign(static_cast<std::size_t>(*std::max_element(region_of.begin(), region_of.end())) + 1, {});
  for (int node = 0; node < nodes(); ++node)
    copy.nodes_in_[static_cast<std::size_t>(region_of[static_cast<std::size_t>(node)])].push_back(node);
  copy.region_of_ = std::move(region_of);
  return copy;
}

Topology Topology::with_server_regions(std::vector<int> region_of_server) const {
  assert(region_of_server.size() == server_weights_.size());
  Topology copy = *this;
  copy.server_region_ = std::move(region_of_server);
  return copy;
}

int Topology::region_of_owner(int owner) const noexcept {
  return is_dedicated(owner) ? server_region_[static_cast<std::size_t>(owner - size())] : region_of(node_of(owner));
}

// The owners of a region have gateways on different nodes and cores of another region, as far as it has so many.
int Topology::gateway_node(int region, int owner, int excluded) const noexcept {
  const int node = node_of(owner);
  if (region_of_owner(owner) == region) return node;
  const std::vector<int>& there = nodes_in(region);
  auto at = static_cast<std::size_t>(owner - size());
  if (!is_dedicated(owner)) {
    const std::vector<int>& around = nodes_in(region_of(node));
    at = static_cast<std::size_t>(std::find(around.begin(), around.end(), node) - around.begin() + local_index(owner));
  }
  if (there[at % there.size()] == excluded) ++at;
  return there[at % there.size()] == excluded ? -1 : there[at % there.size()];
}

int Topology::parent_node(int node, int owner, int excluded) const noexcept {
  const int gateway = gateway_node(region_of(node), owner, excluded);
  return gateway == node ? node_of(owner) : gateway;
}

std::vector<std::vector<std::uint32_t>> Topology::parts_of(int owner, bool levels) const {
  std::vector<std::vector<std::uint32_t>> parts;
  for (int region = 0; region < regions(); ++region) {
    if (region == region_of_owner(owner) || !levels)
      parts.emplace_back(nodes_in(region).begin(), nodes_in(region).end());
    else
      parts.push_back({static_cast<std::uint32_t>(gateway_node(region, owner))});
  }
  return parts;
}

int Topology::agent(int node, int owner) const noexcept {
  const std::vector<int>& ranks = ranks_of(node);
  const int index = is_dedicated(owner) ? owner - size() : local_index(owner);
  return ranks[static_cast<std::size_t>(index) % ranks.size()];
}

double Topology::ranks_per_card() const noexcept {
  return cards_.ranks_per_card > 0.0 ? cards_.ranks_per_card : static_cast<double>(rails());
}

int Topology::rails() const noexcept {
  std::size_t ranks = 1;
  for (const auto& node : ranks_of_) ranks = std::max(ranks, node.size());
  return static_cast<int>(ranks);
}

int Topology::rail_rank(int node, int rail) const noexcept {
  const std::vector<int>& ranks = ranks_of(node);
  return ranks[static_cast<std::size_t>(rail) % ranks.size()];
}

std::uint64_t Topology::fan() const noexcept {
  return static_cast<std::uint64_t>(std::ceil(ranks_per_card() * std::max(1, nodes() - 1 + servers())));
}

}  // namespace hybridps::schedule
