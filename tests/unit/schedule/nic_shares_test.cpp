#include "hybridps/schedule/nic_shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "hybridps/schedule/shares.h"
#include "tests/support/catch.h"

namespace {

using hybridps::schedule::card_loads;
using hybridps::schedule::NicLayout;
using hybridps::schedule::optimal_owner_shares;
using hybridps::schedule::OwnerShares;
using hybridps::schedule::ranks_per_card;

bool near(double a, double b, double by = 1e-9) { return std::abs(a - b) <= by * std::max(1.0, std::abs(b)); }

double rate_of(const NicLayout& layout, std::size_t card) {
  return card < layout.rates.size() ? layout.rates[card] : layout.dedicated[card - layout.rates.size()];
}

double busiest(const OwnerShares& shares, const NicLayout& layout) {
  const std::vector<double> loads = card_loads(shares, layout);
  double time = 0.0;
  for (std::size_t card = 0; card < loads.size(); ++card) time = std::max(time, loads[card] / rate_of(layout, card));
  return time;
}

double total(const OwnerShares& s) {
  return std::accumulate(s.worker.begin(), s.worker.end(), 0.0) +
         std::accumulate(s.dedicated.begin(), s.dedicated.end(), 0.0);
}

/// nodes[i][j]: the cards (numbered within the node) of local rank j; rates[i]: of its cards.
NicLayout layout_of(const std::vector<std::vector<std::vector<int>>>& nodes,
                    const std::vector<std::vector<double>>& rates, const std::vector<double>& dedicated = {}) {
  NicLayout layout;
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    const int first = static_cast<int>(layout.rates.size());
    layout.rates.insert(layout.rates.end(), rates[node].begin(), rates[node].end());
    for (std::vector<int> cards : nodes[node]) {
      for (int& card : cards) card += first;
      layout.node_of.push_back(static_cast<int>(node));
      layout.cards_of.push_back(std::move(cards));
    }
  }
  layout.dedicated = dedicated;
  return layout;
}

/// The loads of cards by counting every transfer of a plan, span by span.
std::vector<double> counted_loads(const OwnerShares& shares, const NicLayout& layout) {
  std::vector<std::vector<int>> ranks_of;
  std::vector<int> index_of;
  for (std::size_t rank = 0; rank < layout.node_of.size(); ++rank) {
    ranks_of.resize(std::max(ranks_of.size(), static_cast<std::size_t>(layout.node_of[rank]) + 1));
    auto& ranks = ranks_of[static_cast<std::size_t>(layout.node_of[rank])];
    index_of.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
  std::vector<double> loads(layout.rates.size() + layout.dedicated.size(), 0.0);
  const auto moved_by = [&](std::size_t rank, double bytes) {
    double rate = 0.0;
    for (const int card : layout.cards_of[rank]) rate += layout.rates[static_cast<std::size_t>(card)];
    for (const int card : layout.cards_of[rank])
      loads[static_cast<std::size_t>(card)] += bytes * layout.rates[static_cast<std::size_t>(card)] / rate;
  };
  for (std::size_t owner = 0; owner < shares.worker.size() + shares.dedicated.size(); ++owner) {
    const bool dedicated = owner >= shares.worker.size();
    const double share = dedicated ? shares.dedicated[owner - shares.worker.size()] : shares.worker[owner];
    const std::size_t index = dedicated ? owner - shares.worker.size() : static_cast<std::size_t>(index_of[owner]);
    for (std::size_t node = 0; node < ranks_of.size(); ++node) {
      if (!dedicated && layout.node_of[owner] == static_cast<int>(node)) continue;
      moved_by(static_cast<std::size_t>(ranks_of[node][index % ranks_of[node].size()]), share);
      if (dedicated)
        loads[layout.rates.size() + owner - shares.worker.size()] += share;
      else
        moved_by(owner, share);
    }
  }
  return loads;
}

/// The least time by the simplex method: with z = shares / time, the most of sum z so that no card has more than its
/// rate.
double least_time(const NicLayout& layout) {
  const std::size_t workers = layout.node_of.size();
  const std::size_t owners = workers + layout.dedicated.size();
  const std::size_t cards = layout.rates.size() + layout.dedicated.size();
  std::vector<std::vector<double>> table(cards + 1, std::vector<double>(owners + cards + 1, 0.0));
  for (std::size_t owner = 0; owner < owners; ++owner) {
    OwnerShares one{0.0, std::vector<double>(workers, 0.0), std::vector<double>(layout.dedicated.size(), 0.0)};
    (owner < workers ? one.worker[owner] : one.dedicated[owner - workers]) = 1.0;
    const std::vector<double> loads = counted_loads(one, layout);
    for (std::size_t card = 0; card < cards; ++card) table[card][owner] = loads[card];
    table[cards][owner] = -1.0;
  }
  for (std::size_t card = 0; card < cards; ++card) {
    table[card][owners + card] = 1.0;
    table[card].back() = rate_of(layout, card);
  }
  while (true) {  // Bland's rule: it ends
    std::size_t column = 0;
    while (column < owners + cards && table[cards][column] > -1e-11) ++column;
    if (column == owners + cards) return 1.0 / table[cards].back();
    std::size_t row = cards;
    for (std::size_t card = 0; card < cards; ++card)
      if (table[card][column] > 1e-11 &&
          (row == cards || table[card].back() / table[card][column] < table[row].back() / table[row][column] - 1e-12))
        row = card;
    REQUIRE(row < cards);
    const double pivot = table[row][column];
    for (double& value : table[row]) value /= pivot;
    for (std::size_t other = 0; other <= cards; ++other) {
      if (other == row || table[other][column] == 0.0) continue;
      const double factor = table[other][column];
      for (std::size_t i = 0; i < table[other].size(); ++i) table[other][i] -= factor * table[row][i];
    }
  }
}

void check(const NicLayout& layout, double within) {
  const OwnerShares shares = optimal_owner_shares(layout);
  CHECK(near(total(shares), 1.0));
  for (const double share : shares.worker) CHECK(share >= 0.0);
  const std::vector<double> loads = card_loads(shares, layout);
  const std::vector<double> counted = counted_loads(shares, layout);
  REQUIRE(loads.size() == counted.size());
  for (std::size_t card = 0; card < loads.size(); ++card) CHECK(near(loads[card], counted[card]));
  CHECK(near(busiest(shares, layout), shares.time, 1e-6));
  const double least = least_time(layout);
  INFO("time " << shares.time << " least " << least);
  CHECK(shares.time <= least * (1.0 + within));
  CHECK(shares.time >= least * (1.0 - 1e-6));
}

}  // namespace

TEST_CASE("schedule/nic_shares: one card per node is as before", "[schedule][fast]") {
  const NicLayout layout = layout_of({{{0}, {0}}, {{0}, {0}}, {{0}, {0}, {0}}}, {{1}, {1}, {2.5}}, {1.5});
  const OwnerShares shares = optimal_owner_shares(layout);
  const auto nodes = hybridps::schedule::optimal_shares({1, 1, 2.5}, {1.5});
  CHECK(shares.time == nodes.time);
  CHECK(shares.worker[0] == nodes.worker[0] / 2);
  CHECK(shares.worker[6] == nodes.worker[2] / 3);
  CHECK(shares.dedicated == nodes.dedicated);
  CHECK(ranks_per_card(layout) == 3.0);
}

TEST_CASE("schedule/nic_shares: rails of unequal speed get unequal parts", "[schedule][fast]") {
  // Four nodes, a fast and a slow card each: together as fast as one card of the sum.
  const std::vector<std::vector<std::vector<int>>> nodes(4, {{0}, {1}});
  const NicLayout layout = layout_of(nodes, std::vector<std::vector<double>>(4, {25, 10}));
  const OwnerShares shares = optimal_owner_shares(layout);
  CHECK(near(shares.time, 1.5 / 35));
  for (int node = 0; node < 4; ++node) {
    CHECK(near(shares.worker[static_cast<std::size_t>(2 * node)], 25.0 / 35 / 4));
    CHECK(near(shares.worker[static_cast<std::size_t>(2 * node + 1)], 10.0 / 35 / 4));
  }
  for (std::size_t card = 0; card < layout.rates.size(); ++card)
    CHECK(near(card_loads(shares, layout)[card] / layout.rates[card], shares.time));
  CHECK(ranks_per_card(layout) == 1.0);
}

TEST_CASE("schedule/nic_shares: a node with two cards owns what one with one cannot", "[schedule][fast]") {
  // Rank 1 of the others shares their card. Three nodes of rates 2, 1, 1: the floor of the slower ones is reached.
  const NicLayout layout = layout_of({{{0}, {1}}, {{0}, {0}}, {{0}, {0}}}, {{1, 1}, {1}, {1}});
  const OwnerShares shares = optimal_owner_shares(layout);
  CHECK(shares.time <= 1.01);
  CHECK(shares.worker[0] + shares.worker[1] > 0.98);
  check(layout, 0.01);
  // With five nodes it is not; the nodes' rates decide, as if each had one card.
  const NicLayout five =
      layout_of({{{0}, {1}}, {{0}, {0}}, {{0}, {0}}, {{0}, {0}}, {{0}, {0}}}, {{1, 1}, {1}, {1}, {1}, {1}});
  CHECK(near(optimal_owner_shares(five).time, hybridps::schedule::optimal_shares({2, 1, 1, 1, 1}).time, 0.01));
  check(five, 0.01);
}

TEST_CASE("schedule/nic_shares: one rank with several cards is one card of their sum", "[schedule][fast]") {
  const NicLayout layout = layout_of({{{0, 1}}, {{0, 1}}, {{0}}}, {{25, 10}, {25, 10}, {35}});
  CHECK(near(optimal_owner_shares(layout).time, hybridps::schedule::optimal_shares({35, 35, 35}).time));
  CHECK(ranks_per_card(layout) == 1.0);
  CHECK(ranks_per_card(layout_of({{{0, 1}}, {{0, 1}}}, {{1, 1}, {1, 1}})) == 0.5);
}

TEST_CASE("schedule/nic_shares: rails that cross limit what shares can do", "[schedule][fast]") {
  const NicLayout layout = layout_of({{{0}, {1}}, {{0}, {1}}, {{0}, {1}}}, {{3, 1}, {1, 3}, {3, 1}});
  CHECK(optimal_owner_shares(layout).time > 1.4 * hybridps::schedule::optimal_shares({4, 4, 4}).time);
  check(layout, 1e-6);
}

TEST_CASE("schedule/nic_shares: random cards and ranks are within 1 % of the linear program", "[schedule][fast]") {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> rate(0.3, 3.0);
  for (int round = 0; round < 150; ++round) {
    const bool aligned = round % 3 == 0;
    std::vector<std::vector<std::vector<int>>> nodes(2 + random() % 4);
    std::vector<std::vector<double>> rates;
    std::size_t ranks = 1 + random() % 4;
    std::size_t cards = 1 + random() % 4;
    for (auto& node : nodes) {
      if (!aligned) ranks = 1 + random() % 4, cards = 1 + random() % 4;
      std::vector<double> of_node(cards);
      for (double& r : of_node) r = rate(random);
      rates.push_back(std::move(of_node));
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        if (ranks >= cards) {
          node.push_back({static_cast<int>(rank % cards)});
        } else {
          node.emplace_back();
          for (std::size_t card = 0; card < cards; ++card)
            if (card * ranks / cards == rank) node.back().push_back(static_cast<int>(card));
        }
      }
    }
    std::vector<double> dedicated(aligned ? 0 : random() % 3);
    for (double& r : dedicated) r = rate(random);
    INFO("round " << round << (aligned ? " aligned" : ""));
    check(layout_of(nodes, rates, dedicated), aligned ? 1e-6 : 0.01);
  }
}

TEST_CASE("schedule/nic_shares: one node owns everything", "[schedule][fast]") {
  CHECK(optimal_owner_shares(layout_of({{{0}, {1}}}, {{1, 1}})).worker == std::vector<double>{0.5, 0.5});
}
