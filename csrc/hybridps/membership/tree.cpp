#include "hybridps/membership/tree.h"

#include <algorithm>

namespace hybridps::membership {

Tree::Tree(const schedule::Topology& topology) {
  const int me = topology.rank();
  if (topology.size() <= kArity + 1) {
    if (me != 0) parent_ = 0;
    depth_ = me == 0 ? 0 : 1;
    for (int rank = 1; me == 0 && rank < topology.size(); ++rank) children_.push_back(rank);
    return;
  }
  const int nodes = topology.nodes();
  const int first = topology.node_of(0);
  const auto leader = [&](int place) { return topology.ranks_of((first + place) % nodes).front(); };
  const int place = (topology.my_node() + nodes - first) % nodes;
  const std::vector<int>& here = topology.ranks_of(topology.my_node());
  for (int above = place; above != 0; above = (above - 1) / kArity) ++depth_;
  if (me != here.front()) {
    parent_ = here.front();
    ++depth_;
    return;
  }
  if (place != 0) parent_ = leader((place - 1) / kArity);
  children_.assign(here.begin() + 1, here.end());
  for (int below = place * kArity + 1; below <= place * kArity + kArity && below < nodes; ++below)
    children_.push_back(leader(below));
  std::sort(children_.begin(), children_.end());
}

bool Tree::is_child(int rank) const noexcept { return std::binary_search(children_.begin(), children_.end(), rank); }

}  // namespace hybridps::membership
