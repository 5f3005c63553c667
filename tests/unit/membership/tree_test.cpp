#include "hybridps/membership/tree.h"

#include <algorithm>
#include <vector>

#include "hybridps/membership/rates.h"
#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using membership::RateReport;
using membership::Tree;

}  // namespace

TEST_CASE("membership/tree: every rank is below rank 0, once, and has few children", "[membership][fast]") {
  std::vector<std::vector<int>> layouts;
  for (const auto& [nodes, each] :
       std::vector<std::pair<int, int>>{{1, 1}, {1, 40}, {17, 1}, {18, 1}, {9, 2}, {300, 8}}) {
    std::vector<int> node_of;
    for (int rank = 0; rank < nodes * each; ++rank) node_of.push_back(rank / each);
    layouts.push_back(node_of);
  }
  std::vector<int> uneven;
  for (int rank = 0; rank < 90; ++rank) uneven.push_back(rank * rank % 31);  // nodes in no order
  std::vector<int> numbers = uneven;
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  for (int& node : uneven)
    node = static_cast<int>(std::lower_bound(numbers.begin(), numbers.end(), node) - numbers.begin());
  layouts.push_back(uneven);
  layouts.push_back({2, 0, 1, 2, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2});  // rank 0 is on the last node
  for (const std::vector<int>& node_of : layouts) {
    const int size = static_cast<int>(node_of.size());
    std::vector<int> times(node_of.size(), 0);
    for (int rank = 0; rank < size; ++rank) {
      const schedule::Topology topology(node_of, rank);
      const Tree tree(topology);
      const auto here = topology.ranks_of(topology.my_node()).size();
      CAPTURE(size, rank);
      CHECK(tree.is_root() == (rank == 0));
      CHECK(tree.children().size() <= Tree::kArity + here - 1);
      for (const int child : tree.children()) {
        ++times[static_cast<std::size_t>(child)];
        CHECK(tree.is_child(child));
        CHECK(Tree(schedule::Topology(node_of, child)).parent() == rank);
      }
      CHECK_FALSE(tree.is_child(rank));
      int above = rank;
      int steps = 0;
      while (above > 0 && ++steps < 10) above = Tree(schedule::Topology(node_of, above)).parent();
      CHECK(steps <= 4);
      CHECK(steps == tree.depth());
    }
    CHECK(times[0] == 0);
    CHECK(std::all_of(times.begin() + 1, times.end(), [](int n) { return n == 1; }));
  }
}

TEST_CASE("membership/rates: reports of several ranks are one, and nonsense is none", "[membership][fast]") {
  RateReport all{{{3, {0.25, 100.0}}}, {0.5, 0.0}, 7};
  all.add({{{3, {0.0, 50.0}}, {4, {0.125, 10.0}}}, {0.75, 2.0}, 0});
  CHECK(all.nodes.at(3).bytes_per_second == 150.0);
  CHECK(all.nodes.at(3).delay_seconds == 0.25);
  CHECK(all.nodes.at(4).delay_seconds == 0.125);
  CHECK(all.server_delays == std::vector<double>{0.5, 2.0});
  CHECK(all.bytes == 7);
  const auto back = RateReport::from_numbers(all.numbers(), 2, 5);
  REQUIRE(back.has_value());
  CHECK(back->numbers() == all.numbers());
  CHECK_FALSE(RateReport::from_numbers(all.numbers(), 2, 4).has_value());  // no node 4
  CHECK_FALSE(RateReport::from_numbers(all.numbers(), 3, 5).has_value());
  CHECK_FALSE(RateReport::from_numbers({0.0, -1.0, 1.0}, 0, 5).has_value());
  CHECK_FALSE(RateReport::from_numbers({1.0}, 2, 5).has_value());
  CHECK(RateReport::from_numbers({}, 0, 5)->nodes.empty());
}
