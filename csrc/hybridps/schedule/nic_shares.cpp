#include "hybridps/schedule/nic_shares.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "hybridps/schedule/shares.h"

namespace hybridps::schedule {
namespace {

// The iteration minimises the sum of (load / rate)^p over the cards, for p = 8, 16, ..., 1024. With p = 1024 the
// busiest card is within 1 % of the least possible load, for any number of cards that a job may have.
constexpr int kPowerFirst = 3;
constexpr int kPowerLast = 10;
constexpr int kRoundsPerPower = 150;
constexpr double kRatioMax = 1e6;
constexpr double kShareMin = 1e-4;  // least initial share, relative to an equal share: a share of 0 cannot grow

struct Nodes {
  std::vector<std::vector<int>> ranks_of;
  std::vector<int> index_of;  // local index of each rank
  std::size_t ranks_max = 0;

  explicit Nodes(const std::vector<int>& node_of) {
    for (std::size_t rank = 0; rank < node_of.size(); ++rank) {
      const auto node = static_cast<std::size_t>(node_of[rank]);
      if (ranks_of.size() <= node) ranks_of.resize(node + 1);
      index_of.push_back(static_cast<int>(ranks_of[node].size()));
      ranks_of[node].push_back(static_cast<int>(rank));
      ranks_max = std::max(ranks_max, ranks_of[node].size());
    }
  }
  std::size_t count() const { return ranks_of.size(); }
};

double rate_of(const NicLayout& layout, std::size_t rank) {
  double rate = 0.0;
  for (const int card : layout.cards_of[rank]) rate += layout.rates[static_cast<std::size_t>(card)];
  return rate;
}

/// What each rank moves each way.
std::vector<double> rank_loads(const OwnerShares& shares, const Nodes& nodes) {
  const auto n = static_cast<double>(nodes.count());
  std::vector<double> owned(nodes.ranks_max, 0.0);  // per local index, by all ranks with this index
  for (std::size_t rank = 0; rank < shares.worker.size(); ++rank)
    owned[static_cast<std::size_t>(nodes.index_of[rank])] += shares.worker[rank];
  std::vector<double> loads(shares.worker.size(), 0.0);
  for (const std::vector<int>& ranks : nodes.ranks_of) {
    const auto at = [&](std::size_t index) -> double& {
      return loads[static_cast<std::size_t>(ranks[index % ranks.size()])];
    };
    for (std::size_t index = 0; index < owned.size(); ++index) {
      const double own = index < ranks.size() ? shares.worker[static_cast<std::size_t>(ranks[index])] : 0.0;
      at(index) += owned[index] - own;
      if (index < ranks.size()) at(index) += (n - 1.0) * own;
    }
    for (std::size_t server = 0; server < shares.dedicated.size(); ++server) at(server) += shares.dedicated[server];
  }
  return loads;
}

std::vector<double> loads_of(const OwnerShares& shares, const NicLayout& layout, const Nodes& nodes) {
  std::vector<double> loads(layout.rates.size() + layout.dedicated.size(), 0.0);
  const std::vector<double> moved = rank_loads(shares, nodes);
  for (std::size_t rank = 0; rank < moved.size(); ++rank)
    for (const int card : layout.cards_of[rank])
      loads[static_cast<std::size_t>(card)] +=
          moved[rank] * layout.rates[static_cast<std::size_t>(card)] / rate_of(layout, rank);
  for (std::size_t server = 0; server < shares.dedicated.size(); ++server)
    loads[layout.rates.size() + server] = static_cast<double>(nodes.count()) * shares.dedicated[server];
  return loads;
}

double card_rate(const NicLayout& layout, std::size_t card) {
  return card < layout.rates.size() ? layout.rates[card] : layout.dedicated[card - layout.rates.size()];
}

double time_of(const OwnerShares& shares, const NicLayout& layout, const Nodes& nodes) {
  const std::vector<double> loads = loads_of(shares, layout, nodes);
  double time = 0.0;
  for (std::size_t card = 0; card < loads.size(); ++card) time = std::max(time, loads[card] / card_rate(layout, card));
  return time;
}

/// For each local index, the number of its plane (set of cards); empty unless all nodes have the same card layout.
std::vector<int> planes_of(const NicLayout& layout, const Nodes& nodes) {
  std::vector<int> planes;
  for (const std::vector<int>& ranks : nodes.ranks_of) {
    std::vector<const std::vector<int>*> sets;
    std::vector<int> here;
    for (const int rank : ranks) {
      const std::vector<int>& cards = layout.cards_of[static_cast<std::size_t>(rank)];
      const auto same = std::find_if(sets.begin(), sets.end(), [&](const auto* set) { return *set == cards; });
      here.push_back(static_cast<int>(same - sets.begin()));
      if (same != sets.end()) continue;
      for (const auto* set : sets)  // the sets overlap, but differ
        if (std::find_first_of(set->begin(), set->end(), cards.begin(), cards.end()) != set->end()) return {};
      sets.push_back(&cards);
    }
    if (planes.empty()) planes = here;
    if (planes != here) return {};
  }
  return planes;
}

OwnerShares water_filled(const NicLayout& layout, const Nodes& nodes, const std::vector<int>& planes) {
  OwnerShares result;
  result.worker.assign(layout.node_of.size(), 0.0);
  const int count = *std::max_element(planes.begin(), planes.end()) + 1;
  std::vector<Shares> of_plane;
  std::vector<int> ranks_on;
  double speed = 0.0;
  for (int plane = 0; plane < count; ++plane) {
    const auto first = static_cast<std::size_t>(std::find(planes.begin(), planes.end(), plane) - planes.begin());
    std::vector<double> rates;
    for (const std::vector<int>& ranks : nodes.ranks_of)
      rates.push_back(rate_of(layout, static_cast<std::size_t>(ranks[first])));
    of_plane.push_back(optimal_shares(rates));
    ranks_on.push_back(static_cast<int>(std::count(planes.begin(), planes.end(), plane)));
    speed += 1.0 / of_plane.back().time;
  }
  result.time = 1.0 / speed;
  for (std::size_t node = 0; node < nodes.count(); ++node) {
    for (std::size_t index = 0; index < planes.size(); ++index) {
      const auto plane = static_cast<std::size_t>(planes[index]);
      const double part = result.time / of_plane[plane].time;
      result.worker[static_cast<std::size_t>(nodes.ranks_of[node][index])] =
          part * of_plane[plane].worker[node] / ranks_on[plane];
    }
  }
  return result;
}

/// A node gets the share for the rate of all its cards together. A rank gets its cards' part of the node's share.
OwnerShares first_guess(const NicLayout& layout, const Nodes& nodes) {
  std::vector<int> users(layout.rates.size(), 0);
  for (const std::vector<int>& cards : layout.cards_of)
    for (const int card : cards) ++users[static_cast<std::size_t>(card)];
  std::vector<double> node_rates(nodes.count(), 0.0);
  std::vector<double> rank_rates(layout.node_of.size(), 0.0);
  for (std::size_t rank = 0; rank < rank_rates.size(); ++rank) {
    for (const int card : layout.cards_of[rank])
      rank_rates[rank] += layout.rates[static_cast<std::size_t>(card)] / users[static_cast<std::size_t>(card)];
    node_rates[static_cast<std::size_t>(layout.node_of[rank])] += rank_rates[rank];
  }
  const Shares of_nodes = optimal_shares(node_rates, layout.dedicated);
  OwnerShares result;
  for (std::size_t rank = 0; rank < rank_rates.size(); ++rank) {
    const auto node = static_cast<std::size_t>(layout.node_of[rank]);
    result.worker.push_back(of_nodes.worker[node] * rank_rates[rank] / node_rates[node]);
  }
  result.dedicated = of_nodes.dedicated;
  return result;
}

/// x^(2^exponent); roots for a negative exponent.
double power(double x, int exponent) {
  for (; exponent > 0; --exponent) x *= x;
  for (; exponent < 0; ++exponent) x = std::sqrt(x);
  return x;
}

void normalise(OwnerShares& shares) {
  double total = 0.0;
  for (const auto* part : {&shares.worker, &shares.dedicated})
    total = std::accumulate(part->begin(), part->end(), total);
  for (auto* part : {&shares.worker, &shares.dedicated})
    for (double& share : *part) share /= total;
}

OwnerShares iterated(const NicLayout& layout, const Nodes& nodes) {
  const auto n = static_cast<double>(nodes.count());
  OwnerShares shares = first_guess(layout, nodes);
  const auto owners = static_cast<double>(shares.worker.size() + shares.dedicated.size());
  shares.time = time_of(shares, layout, nodes);
  OwnerShares best = shares;
  for (auto* part : {&shares.worker, &shares.dedicated})
    for (double& share : *part) share = std::max(share, kShareMin / owners);
  normalise(shares);
  for (int p = kPowerFirst; p <= kPowerLast; ++p) {
    for (int round = 0; round < kRoundsPerPower; ++round) {
      const std::vector<double> loads = loads_of(shares, layout, nodes);
      std::vector<double> price(loads.size());
      double busiest = 0.0;
      for (std::size_t card = 0; card < loads.size(); ++card)
        busiest = std::max(busiest, loads[card] / card_rate(layout, card));
      if (busiest < best.time) {
        best = shares;
        best.time = busiest;
      }
      for (std::size_t card = 0; card < loads.size(); ++card)
        price[card] = power(loads[card] / card_rate(layout, card) / busiest, p) / card_rate(layout, card);

      // The cost of a little more share for an owner: on its own cards, and on the cards of its agents.
      std::vector<double> rank_price(shares.worker.size(), 0.0);
      for (std::size_t rank = 0; rank < rank_price.size(); ++rank)
        for (const int card : layout.cards_of[rank])
          rank_price[rank] += price[static_cast<std::size_t>(card)] * layout.rates[static_cast<std::size_t>(card)] /
                              rate_of(layout, rank);
      std::vector<double> agents_price(std::max(nodes.ranks_max, shares.dedicated.size()), 0.0);
      for (const std::vector<int>& ranks : nodes.ranks_of)
        for (std::size_t index = 0; index < agents_price.size(); ++index)
          agents_price[index] += rank_price[static_cast<std::size_t>(ranks[index % ranks.size()])];
      std::vector<double> cost;
      double usual = 0.0;
      for (std::size_t rank = 0; rank < rank_price.size(); ++rank) {
        cost.push_back(agents_price[static_cast<std::size_t>(nodes.index_of[rank])] + (n - 2.0) * rank_price[rank]);
        usual += shares.worker[rank] * cost.back();
      }
      for (std::size_t server = 0; server < shares.dedicated.size(); ++server) {
        cost.push_back(agents_price[server] + n * price[layout.rates.size() + server]);
        usual += shares.dedicated[server] * cost.back();
      }
      std::size_t owner = 0;
      for (auto* part : {&shares.worker, &shares.dedicated}) {
        for (double& share : *part) {
          const double ratio = cost[owner] * kRatioMax > usual ? usual / cost[owner] : kRatioMax;
          share *= power(std::max(ratio, 1.0 / kRatioMax), -(p + 1));
          ++owner;
        }
      }
      normalise(shares);
    }
  }
  return best;
}

}  // namespace

OwnerShares optimal_owner_shares(const NicLayout& layout) {
  const Nodes nodes(layout.node_of);
  if (nodes.count() < 2) {
    OwnerShares alone;
    alone.worker.assign(layout.node_of.size(), 1.0 / static_cast<double>(layout.node_of.size()));
    alone.dedicated.assign(layout.dedicated.size(), 0.0);
    return alone;
  }
  const bool one_set = std::all_of(nodes.ranks_of.begin(), nodes.ranks_of.end(), [&](const std::vector<int>& ranks) {
    return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
      return layout.cards_of[static_cast<std::size_t>(rank)] == layout.cards_of[static_cast<std::size_t>(ranks[0])];
    });
  });
  if (one_set) {
    std::vector<double> rates;
    for (const std::vector<int>& ranks : nodes.ranks_of)
      rates.push_back(rate_of(layout, static_cast<std::size_t>(ranks[0])));
    const Shares of_nodes = optimal_shares(rates, layout.dedicated);
    OwnerShares result{of_nodes.time, {}, of_nodes.dedicated};
    for (const int node : layout.node_of) {
      const auto at = static_cast<std::size_t>(node);
      result.worker.push_back(of_nodes.worker[at] / static_cast<double>(nodes.ranks_of[at].size()));
    }
    return result;
  }
  if (layout.dedicated.empty())
    if (const std::vector<int> planes = planes_of(layout, nodes); !planes.empty())
      return water_filled(layout, nodes, planes);
  return iterated(layout, nodes);
}

std::vector<double> card_loads(const OwnerShares& shares, const NicLayout& layout) {
  return loads_of(shares, layout, Nodes(layout.node_of));
}

double ranks_per_card(const NicLayout& layout) {
  std::vector<double> ranks(layout.rates.size(), 0.0);
  double most = 0.0;
  for (const std::vector<int>& cards : layout.cards_of)
    for (const int card : cards)
      most = std::max(most, ranks[static_cast<std::size_t>(card)] += 1.0 / static_cast<double>(cards.size()));
  return most;
}

}  // namespace hybridps::schedule
