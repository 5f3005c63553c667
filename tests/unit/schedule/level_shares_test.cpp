// Shares for sums with levels.
#include "hybridps/schedule/level_shares.h"

#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "tests/support/catch.h"

using hybridps::schedule::kNoRegion;
using hybridps::schedule::level_time;
using hybridps::schedule::level_weights;
using hybridps::schedule::LevelRates;
using hybridps::schedule::Topology;

namespace {

std::vector<int> one_each(std::size_t nodes) {
  std::vector<int> node_of(nodes);
  std::iota(node_of.begin(), node_of.end(), 0);
  return node_of;
}

Topology of(const std::vector<int>& region_of, const std::vector<int>& region_of_server = {},
            std::vector<double> weights = {}, double of_server = 1.0) {
  return Topology(one_each(region_of.size()), 0, std::move(weights),
                  std::vector<double>(region_of_server.size(), of_server))
      .with_regions(region_of)
      .with_server_regions(region_of_server);
}

LevelRates equal(const Topology& topology) {
  return {std::vector<double>(static_cast<std::size_t>(topology.nodes()), 1.0),
          std::vector<double>(static_cast<std::size_t>(topology.servers()), 1.0),
          {}};
}

double time_after(const Topology& topology, const LevelRates& rates) {
  return level_time(topology.with_weights(level_weights(topology, rates)), rates);
}

}  // namespace

TEST_CASE("schedule/level_shares: the time is that of the busiest card or uplink", "[schedule][fast]") {
  // Two regions of m nodes: each node sends 2 (m - 1) / m tensors in its region, and 1 / m to the other.
  CHECK(level_time(of({0, 0, 1, 1}), equal(of({0, 0, 1, 1}))) == Approx(1.5));
  CHECK(level_time(of({0, 0, 0, 0, 1, 1, 1, 1}), equal(of({0, 0, 0, 0, 1, 1, 1, 1}))) == Approx(1.75));
  LevelRates rates = equal(of({0, 0, 1, 1, 2, 2}));
  rates.uplinks = {1.0, 0.25, 1.0};
  CHECK(level_time(of({0, 0, 1, 1, 2, 2}), rates) == Approx((1 + 1.0 / 3) / 0.25));
  // A server of a region of two sends its part there twice, and once to the other region.
  const Topology served = of({0, 0, 1, 1}, {0}, {0, 0, 0, 0});
  CHECK(level_time(served, equal(served)) == Approx(3));
  const Topology outside = of({0, 0, 1, 1}, {kNoRegion}, {0, 0, 0, 0});
  CHECK(level_time(outside, equal(outside)) == Approx(2));
}

TEST_CASE("schedule/level_shares: equal regions keep equal shares", "[schedule][fast]") {
  for (const Topology& topology :
       {of({0, 1}), of({0, 0, 1, 1}), of({0, 0, 0, 0, 1, 1, 1, 1}), of({0, 0, 1, 1, 2, 2}), of({0, 1, 2, 3})}) {
    const double share = 1.0 / topology.nodes();
    for (const double weight : level_weights(topology, equal(topology))) CHECK(weight == Approx(share));
  }
}

TEST_CASE("schedule/level_shares: no search finds much better shares", "[schedule][fast]") {
  std::mt19937_64 random(3);
  const auto unit = [&] { return static_cast<double>(random() % 1'000'001) / 1e6; };
  for (int turn = 0; turn < 60; ++turn) {
    std::vector<int> region_of{0, 1};
    while (region_of.size() < 3 + random() % 5) region_of.push_back(static_cast<int>(random() % 3) % 2);
    std::vector<int> servers;
    for (std::size_t i = random() % 3; i > 0; --i) servers.push_back(static_cast<int>(random() % 3) - 1);
    const Topology topology = of(region_of, servers);
    LevelRates rates = equal(topology);
    for (double& rate : rates.nodes) rate = 1.0 + static_cast<double>(random() % 4);
    if (random() % 2 == 0) rates.uplinks = {0.5 + 2 * unit(), 0.5 + 2 * unit()};
    const double found = time_after(topology, rates);
    CHECK(found <= level_time(topology, rates) * (1 + 1e-9));
    std::vector<double> weights = level_weights(topology, rates);
    CHECK(std::accumulate(weights.begin(), weights.end(), 0.0) == Approx(1));
    double best = found;
    for (int step = 0; step < 4000; ++step) {
      std::vector<double> other = weights;
      for (double& weight : other) weight = std::max(0.0, weight + (unit() - 0.5) * 0.2 * unit());
      const double time = level_time(topology.with_weights(other), rates);
      if (time >= best) continue;
      best = time;
      weights = other;
    }
    INFO("turn " << turn << ", " << topology.nodes() << " nodes, " << servers.size() << " servers");
    CHECK(found <= best * 1.03);
  }
}

TEST_CASE("schedule/level_shares: regions of unlike size, and servers, make it faster", "[schedule][fast]") {
  const Topology uneven = of({0, 0, 1, 1, 1, 1});
  CHECK(time_after(uneven, equal(uneven)) < 0.97 * level_time(uneven, equal(uneven)));
  const Topology alone = of({0, 0, 0, 0, 1, 1, 1, 1});
  const Topology served = of({0, 0, 0, 0, 1, 1, 1, 1}, {0, 1}, {}, 2.3);
  CHECK(level_time(served, equal(served)) > level_time(alone, equal(alone)));  // the servers' gateways are too busy
  CHECK(time_after(served, equal(served)) <= 1.005 * level_time(alone, equal(alone)));
  const Topology many = of({0, 0, 1, 1}, {0, 0, 1, 1}, {}, 2.3);
  CHECK(time_after(many, equal(many)) < 1.3);  // servers own all: 1.25
  const Topology idle = of({0, 0, 0, 0, 1, 1, 1, 1}, {0, 1}, {}, 0.0);
  const std::vector<double> weights = level_weights(idle, equal(idle));
  CHECK(weights[8] == 0.0);
  CHECK(weights[9] == 0.0);
}
