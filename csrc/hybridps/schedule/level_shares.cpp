#include "hybridps/schedule/level_shares.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace hybridps::schedule {
namespace {

constexpr double kGainMin = 1.02;
constexpr int kRounds = 400;
constexpr double kFirstStep = 0.3;
// Work of a round; larger groups keep the given shares. The progress thread waits for all rounds at a change of plans:
// 36 ms for 4,000 nodes in two regions, a work of at least 4,000 (measured on one core).
constexpr std::size_t kWorkMax = 2'000;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// An owner's bytes, beside those that each node and each uplink carries of every owner, in units of what it owns.
struct More {
  std::size_t row;
  double times;
};

/// Rows are nodes, then servers, then uplinks.
class Loads {
 public:
  Loads(const Topology& topology, const LevelRates& rates) {
    const int regions = topology.regions();
    rates_ = rates.nodes;
    rates_.insert(rates_.end(), rates.servers.begin(), rates.servers.end());
    const std::size_t uplinks = rates_.size();
    rates_.insert(rates_.end(), rates.uplinks.begin(), rates.uplinks.end());
    always_.assign(rates_.size(), 1.0);
    std::fill_n(always_.begin() + topology.nodes(), topology.servers(), 0.0);
    more_.resize(at(topology.nodes() + topology.servers()));
    const auto add = [&](int owner, std::size_t place, double part) {
      const int home = topology.region_of_owner(owner);
      const int mates = home == kNoRegion ? 0 : static_cast<int>(topology.nodes_in(home).size());
      const double others = regions - (home == kNoRegion ? 0 : 1);
      if (topology.is_dedicated(owner))
        more_[place].push_back({place, mates + others});
      else
        more_[place].push_back({place, part * (mates - 1 + others - 1)});
      for (int region = 0; region < regions; ++region) {
        const auto nodes = static_cast<double>(topology.nodes_in(region).size());
        if (region != home) more_[place].push_back({at(topology.gateway_node(region, owner)), part * (nodes - 1)});
      }
      if (home != kNoRegion && !rates.uplinks.empty())
        more_[place].push_back({uplinks + at(home), part * (others - 1)});
    };
    for (int node = 0; node < topology.nodes(); ++node) {
      double sum = 0.0;
      for (const int rank : topology.ranks_of(node)) sum += topology.owner_weight(rank);
      for (const int rank : topology.ranks_of(node))
        add(rank, at(node),
            sum > 0.0 ? topology.owner_weight(rank) / sum : 1.0 / static_cast<double>(topology.ranks_of(node).size()));
    }
    for (int server = 0; server < topology.servers(); ++server)
      add(topology.size() + server, at(topology.nodes() + server), 1.0);
  }

  std::size_t work() const {
    return std::accumulate(more_.begin(), more_.end(), std::size_t{0},
                           [](std::size_t sum, const auto& more) { return sum + more.size(); });
  }
  /// By row, with shares of sum 1.
  std::vector<double> times(const std::vector<double>& shares) const {
    std::vector<double> times = always_;
    for (std::size_t owner = 0; owner < shares.size(); ++owner)
      for (const More& more : more_[owner]) times[more.row] += shares[owner] * more.times;
    for (std::size_t row = 0; row < times.size(); ++row) times[row] /= rates_[row];
    return times;
  }
  /// What a share of this owner costs, where a second on each row costs `prices`. What every owner's costs is left out.
  double cost(std::size_t owner, const std::vector<double>& prices) const {
    double cost = 0.0;
    for (const More& more : more_[owner]) cost += prices[more.row] * more.times / rates_[more.row];
    return cost;
  }

 private:
  std::vector<double> rates_;
  std::vector<double> always_;           // what a row carries of every owner
  std::vector<std::vector<More>> more_;  // by owner: nodes, then servers
};

double longest(const std::vector<double>& times) { return *std::max_element(times.begin(), times.end()); }

std::vector<double> normalised(std::vector<double> shares) {
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (double& share : shares) share /= sum;
  return shares;
}

}  // namespace

double level_time(const Topology& topology, const LevelRates& rates) {
  return longest(Loads(topology, rates).times(normalised(topology.weights())));
}

std::vector<double> level_weights(const Topology& topology, const LevelRates& rates) {
  const Loads loads(topology, rates);
  const std::vector<double> given = normalised(topology.weights());
  if (loads.work() > kWorkMax) return given;
  const double before = longest(loads.times(given));
  std::vector<double> best = given;
  double best_time = before;
  // An owner without a share could not get one by a factor.
  std::vector<double> shares = given;
  for (int node = 0; node < topology.nodes(); ++node) shares[at(node)] += 0.5 / topology.nodes();
  shares = normalised(std::move(shares));
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> prices = loads.times(shares);
    const double time = longest(prices);
    if (time < best_time) {
      best_time = time;
      best = shares;
    }
    for (double& price : prices) {  // (time / longest)^32: nearly all of it is on the busiest
      price /= time;
      for (int square = 0; square < 5; ++square) price *= price;
    }
    std::vector<double> costs;
    for (std::size_t owner = 0; owner < shares.size(); ++owner) costs.push_back(loads.cost(owner, prices));
    double mean = 0.0;
    for (std::size_t owner = 0; owner < shares.size(); ++owner) mean += shares[owner] * costs[owner];
    double widest = 0.0;
    for (const double cost : costs) widest = std::max({widest, cost - mean, mean - cost});
    if (widest <= 0.0) break;
    const double step = kFirstStep * (1.0 - static_cast<double>(round) / kRounds);
    for (std::size_t owner = 0; owner < shares.size(); ++owner)
      shares[owner] *= 1.0 - step * (costs[owner] - mean) / widest;
    shares = normalised(std::move(shares));
  }
  return best_time * kGainMin < before ? best : given;
}

}  // namespace hybridps::schedule
