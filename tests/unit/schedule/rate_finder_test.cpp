#include "hybridps/schedule/rate_finder.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "hybridps/schedule/shares.h"
#include "tests/support/catch.h"

namespace {

using hybridps::schedule::NodeReport;
using hybridps::schedule::optimal_shares;
using hybridps::schedule::push_pull_time;
using hybridps::schedule::RateFinder;
using hybridps::schedule::Shares;

/// A network of cards: what its nodes would report of one allreduce.
class Network {
 public:
  explicit Network(std::vector<double> rates, double noise = 0.0) : rates_(std::move(rates)), noise_(noise) {}
  void set_rate(std::size_t node, double rate) { rates_[node] = rate; }

  double time(const std::vector<double>& shares) const {
    Shares s;
    s.worker = shares;
    return push_pull_time(s, rates_);
  }
  double best() const { return optimal_shares(rates_).time; }

  std::vector<NodeReport> run(const std::vector<double>& shares) {
    const double seconds = time(shares);
    std::vector<NodeReport> reports;
    for (std::size_t i = 0; i < rates_.size(); ++i) {
      const double moved = 1.0 + (static_cast<double>(rates_.size()) - 2.0) * shares[i];
      const double busy = moved / seconds / rates_[i];
      const double delay = busy > 0.97 ? 4e-3 : 2e-4;
      reports.push_back({delay * random(), moved / seconds * random()});
    }
    return reports;
  }

 private:
  double random() { return 1.0 + noise_ * (std::uniform_real_distribution<double>(-1.0, 1.0)(engine_)); }
  std::vector<double> rates_;
  double noise_;
  std::mt19937_64 engine_{7};
};

std::vector<double> equal(std::size_t n) { return std::vector<double>(n, 1.0 / static_cast<double>(n)); }

/// Operations until nothing changes any more for a while; the number of changes.
int settle(Network& network, RateFinder& finder, std::vector<double>& shares, int operations) {
  int changes = 0;
  for (int i = 0; i < operations; ++i) {
    if (auto better = finder.learn(network.run(shares), shares)) {
      CHECK(std::accumulate(better->begin(), better->end(), 0.0) == Approx(1.0));
      CHECK(*std::min_element(better->begin(), better->end()) >= 0.0);
      shares = *better;
      ++changes;
    }
  }
  return changes;
}

}  // namespace

TEST_CASE("schedule/rate_finder: equal cards keep their shares, whatever the noise", "[schedule][fast]") {
  for (const std::size_t n : {3, 4, 8, 32}) {
    Network network(std::vector<double>(n, 1e8), 0.03);
    RateFinder finder(n);
    std::vector<double> shares = equal(n);
    CHECK(settle(network, finder, shares, 200) == 0);
  }
}

TEST_CASE("schedule/rate_finder: one card at half the rate is found by the third operation", "[schedule][fast]") {
  for (const std::size_t slow : {std::size_t{0}, std::size_t{2}}) {
    std::vector<double> rates(4, 6e7);
    rates[slow] = 3e7;
    Network network(rates, 0.02);
    RateFinder finder(4);
    std::vector<double> shares = equal(4);
    const double before = network.time(shares);
    CHECK(settle(network, finder, shares, 3) >= 1);
    CHECK(before / network.time(shares) == Approx(1.5).epsilon(0.02));
    CHECK(settle(network, finder, shares, 30) == 0);
  }
}

TEST_CASE("schedule/rate_finder: any rates come within an eighth of the optimum and stay there", "[schedule][fast]") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    const std::size_t n = 3 + random() % 6;
    std::vector<double> rates;
    for (std::size_t i = 0; i < n; ++i) rates.push_back(std::uniform_real_distribution<double>(0.3, 1.0)(random) * 1e8);
    Network network(rates);
    RateFinder finder(n);
    std::vector<double> shares = equal(n);
    settle(network, finder, shares, 16);
    INFO("round " << round);
    CHECK(network.time(shares) <= 1.125 * network.best());
    CHECK(network.time(shares) <= 1.001 * network.time(equal(n)));
  }
}

TEST_CASE("schedule/rate_finder: a card that becomes slow, and fast again, is noticed", "[schedule][fast]") {
  Network network(std::vector<double>(4, 1e8));
  RateFinder finder(4);
  std::vector<double> shares = equal(4);
  CHECK(settle(network, finder, shares, 10) == 0);
  network.set_rate(1, 4e7);
  CHECK(settle(network, finder, shares, 10) >= 1);
  CHECK(network.time(shares) <= 1.1 * network.best());
  network.set_rate(1, 1e8);
  settle(network, finder, shares, RateFinder::kRemembered + 10);
  CHECK(network.time(shares) <= 1.1 * network.best());
}

TEST_CASE("schedule/rate_finder: one short delay in an equal network changes nothing", "[schedule][fast]") {
  Network network(std::vector<double>(4, 1e8));
  RateFinder finder(4);
  const std::vector<double> shares = equal(4);
  for (int i = 0; i < 20; ++i) {
    std::vector<NodeReport> reports = network.run(shares);
    if (i % 3 == 2) reports[static_cast<std::size_t>(i) % 4].delay_seconds = 1e-4;
    CHECK_FALSE(finder.learn(reports, shares));
  }
}

TEST_CASE("schedule/rate_finder: where no card has a queue nothing is learned", "[schedule][fast]") {
  RateFinder finder(4);
  for (int i = 0; i < 10; ++i)
    CHECK_FALSE(finder.learn({{1e-4, 1e9}, {9e-4, 1e9}, {1e-4, 1e9}, {1e-4, 1e9}}, equal(4)));
  CHECK_FALSE(finder.learn({{4e-3, 1e9}, {4e-3, 0.0}, {4e-3, 1e9}, {4e-3, 1e9}}, equal(4)));
  CHECK_FALSE(finder.learn({{4e-3, 1e9}}, equal(4)));
}
