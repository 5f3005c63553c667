// hybridps/membership/tree.h: the ranks that pass rank 0's messages on, and collect the answers to them.
//
// Model    Pure. In a small group rank 0 talks to every rank. In a larger one the first rank of each node stands for
//          the ranks of its node, and has the first ranks of up to kArity further nodes below it. So no rank talks to
//          more than kArity nodes and its own, whatever the size of the group. A rank is always there: a group that
//          loses a rank fails.
// Threads  immutable after construction.
#pragma once

#include <vector>

#include "hybridps/schedule/topology.h"

namespace hybridps::membership {

class Tree {
 public:
  static constexpr int kArity = 16;

  explicit Tree(const schedule::Topology& topology);

  bool is_root() const noexcept { return parent_ < 0; }
  /// -1 on rank 0.
  int parent() const noexcept { return parent_; }
  /// In ascending order.
  const std::vector<int>& children() const noexcept { return children_; }
  bool is_child(int rank) const noexcept;
  /// Ranks between this rank and rank 0, and 1; 0 on rank 0.
  int depth() const noexcept { return depth_; }

 private:
  int parent_ = -1;
  int depth_ = 0;
  std::vector<int> children_;
};

}  // namespace hybridps::membership
